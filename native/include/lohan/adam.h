// AdamW over segments of flat arrays, in place, with the gradient norm and finite check in the same pass.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lohan/adam_state.h"
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

/// Norm of the scaled gradients seen by a pass. Squares are summed in fp32 over 16 elements (every 16th of
/// 256), and those sums in double: 17 roundings bound the relative error of squared_norm by 17 * 2^-24
/// = 1.0e-6 and the norm's by half of that; as they go either way, 10^6 elements are good to about 1e-9. The
/// order of additions is a tree over blocks of 2,048 elements that depends on the elements' places alone: not
/// on threads, instruction set, alignment or how the elements are cut into segments. Where the squares leave
/// fp32's range upwards, the block is summed in double.
struct UpdateResult {
  double squared_norm = 0;  // NaN when a gradient is
  int64_t non_finite = 0;   // elements that are infinite or NaN after scaling
};

/// One step of AdamW (Loshchilov & Hutter, arXiv:1711.05101), computed as torch.optim.AdamW does: decoupled
/// decay, multiply then add without contraction, with g = scale * gradient:
///   p *= 1 - lr * wd;  m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g
///   p -= m / (sqrt(v) * c / lr' + epsilon / lr'),  lr' = lr / (1 - beta1^step),  c = 1 / sqrt(1 -
///   beta2^step)
/// (torch divides by the correction and multiplies by lr'; both being part of the divisor's constants has the
/// same error bound and one division and one product less. A lr' of 0 moves nothing, whatever m and v are,
/// unless they are not finite.) Reads `in` and writes `out`, which is either `in` itself or shares no memory
/// with it. A place of its own is written past the caches where its arrays, but for the scales, begin at
/// multiples of 64 bytes: without that every line of it is read first, for nothing. With 8-bit moments the
/// update uses the new moments before they are coded.
///
/// Elements outside all segments are neither read nor written and count to nothing. With 8-bit moments a
/// segment owns the moment blocks it touches: it begins at a multiple of kMomentBlockElements, and no other
/// segment begins in its last block. NaN results are stored as 0x7FC00000 (bfloat16: 0x7FC0).
///
/// Bitwise the same for any instruction set and number of threads. Thread-safe on disjoint arrays. Throws
/// std::invalid_argument for segments that overlap, leave the arrays or hold bad values, for states whose
/// arrays do not make one of AdamState's forms or differ in form, and for an instruction set the processor
/// lacks.
UpdateResult AdamwUpdate(std::span<const AdamSegment> segments, const GradientArray& gradients,
                         const AdamState& in, const AdamState& out, double gradient_scale, ThreadPool& pool,
                         InstructionSet instruction_set);

/// The norm alone, over all gradients: equal to AdamwUpdate's when its segments cover the arrays.
UpdateResult GradientNorm(const GradientArray& gradients, double gradient_scale, ThreadPool& pool,
                          InstructionSet instruction_set);

/// fp32 values to the split form of AdamState and back; lossless but for the bits of NaN.
void SplitMaster(const float* master, uint16_t* weights, int16_t* remainder, int64_t length, ThreadPool& pool,
                 InstructionSet instruction_set);
void JoinMaster(const uint16_t* weights, const int16_t* remainder, float* master, int64_t length,
                ThreadPool& pool, InstructionSet instruction_set);

/// The values that 8-bit codes stand for; for kSecond the second moment itself.
void DecodeMoment(MomentCode code, const uint8_t* codes, const float* scales, float* moments, int64_t length,
                  ThreadPool& pool, InstructionSet instruction_set);

/// a += d, b += d, c += d: 28 bytes of traffic an element in the update's own pattern, three streams read and
/// written and one read. What a machine reaches here is what an update of fp32 states can reach.
void ReadModifyWrite(float* a, float* b, float* c, const float* d, int64_t length, ThreadPool& pool,
                     InstructionSet instruction_set);

}  // namespace lohan
