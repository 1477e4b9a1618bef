// AdamW over segments of flat arrays, in place, with the gradient norm and finite check in the same pass.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lohan/thread_pool.h"

namespace lohan {

/// Which build of the kernels runs. All give bitwise identical results; kAuto takes the widest one.
enum class InstructionSet { kAuto, kPortable, kAvx2, kAvx512 };

/// The instruction sets this processor can run, narrowest first; kAuto is not among them.
std::vector<InstructionSet> AvailableInstructionSets();

/// Consecutive elements of one parameter group with one step count (1 for the first update).
struct AdamSegment {
  int64_t offset = 0;
  int64_t length = 0;
  double learning_rate = 0;
  double beta1 = 0;
  double beta2 = 0;
  double epsilon = 0;
  double weight_decay = 0;
  int64_t step = 0;

  /// Throws std::invalid_argument that names the first value outside what torch.optim.AdamW allows.
  void Validate() const;
};

enum class GradientType { kFloat32, kBfloat16 };

/// `length` gradients; bfloat16 values are held as their 16 bits.
struct GradientArray {
  const void* data = nullptr;
  GradientType type = GradientType::kFloat32;
  int64_t length = 0;
};

/// The state arrays of an update, each as long as its gradients. All arrays are aligned to their element
/// size and none overlaps another.
struct AdamState {
  float* master = nullptr;
  float* first_moment = nullptr;
  float* second_moment = nullptr;
  uint16_t* weights_out = nullptr;  // bfloat16 copy of the new master, or null
};

/// Norm of the scaled gradients seen by a pass. The sum is in double over a tree that is fixed by element
/// index alone: blocks of 2,048 elements, 16 interleaved lanes in each, then neighbours in pairs. It does not
/// depend on threads, instruction set, alignment or how the elements are cut into segments.
struct UpdateResult {
  double squared_norm = 0;  // NaN when a gradient is
  int64_t non_finite = 0;   // elements that are infinite or NaN after scaling
};

/// One step of AdamW, computed as torch.optim.AdamW does (decoupled decay, fp32 states, multiply then add
/// without contraction):
///   p *= 1 - lr * wd;  m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g
///   p -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + epsilon),   g = scale * gradient
/// Elements outside all segments are not touched and count to nothing. NaN results are stored as 0x7FC00000
/// (bfloat16: 0x7FC0). Thread-safe on disjoint arrays. Throws std::invalid_argument for segments that
/// overlap, leave the arrays or hold bad values, and for an instruction set the processor lacks.
UpdateResult AdamwUpdate(std::span<const AdamSegment> segments, const GradientArray& gradients,
                         const AdamState& state, double gradient_scale, ThreadPool& pool,
                         InstructionSet instruction_set);

/// The norm alone, over all gradients: equal to AdamwUpdate's when its segments cover the arrays.
UpdateResult GradientNorm(const GradientArray& gradients, double gradient_scale, ThreadPool& pool,
                          InstructionSet instruction_set);

}  // namespace lohan
