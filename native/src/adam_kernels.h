// The leaf loops of AdamW, built once per instruction set from adam-inl.h.
#pragma once

#include <cstdint>

#include "lohan/adam_state.h"
#include "store_kind.h"

namespace lohan {

/// Elements per block: the grain of the norm's tree, and a multiple of kMomentBlockElements.
inline constexpr int64_t kBlockElements = 2048;
/// A block's squares are summed in fp32 in parts of this many elements, in kNormLanes interleaved sums: 16
/// additions in each.
inline constexpr int64_t kNormPartElements = 256;
inline constexpr int64_t kNormLanes = 16;
inline constexpr int64_t kNormSumsPerBlock = kBlockElements / kNormPartElements * kNormLanes;

/// A segment's constants, rounded to fp32 once so that every kernel multiplies by the same bits. The step
/// size is part of the quotient's divisor: lr' * m / (sqrt(v) * c + epsilon) = m / (sqrt(v) * (c / lr') +
/// epsilon / lr').
struct AdamScalars {
  float decay;          // 1 - learning_rate * weight_decay
  float beta1;          //
  float first_weight;   // 1 - beta1
  float beta2;          //
  float beta2_root;     // sqrt(beta2)
  float second_weight;  // 1 - beta2
  float root_weight;    // 1 / sqrt(1 - beta2^step) / lr', where lr' = learning_rate / (1 - beta1^step)
  float epsilon;        // epsilon / lr'; infinite, with a root_weight of 0, where lr' is 0 or next to it
};

/// Sum of squares and the number of infinite or NaN elements.
struct ExactNorm {
  double squared_norm;
  int64_t non_finite;
};

enum MasterKernel { kFloat32Master, kFloat32MasterWithWeights, kSplitMaster, kMasterKernels };
enum MomentKernel { kFloat32Moments, kEightBitMoments, kMomentKernels };

struct AdamKernels {
  /// Updates elements [begin, end), which lie in one block, and adds the squares of their scaled gradients to
  /// the block's kNormSumsPerBlock sums: element i to sum i % kNormLanes of its part. With 8-bit moments
  /// `begin` is a multiple of kMomentBlockElements. `in` and `out` hold the arrays' beginnings, and may be
  /// the same. With StoreKind::kStreaming they are not, the arrays of `out` other than scales begin at whole
  /// cache lines, and the caller fences before it tells another thread.
  using Update = void (*)(const AdamScalars& scalars, const void* gradients, float gradient_scale,
                          const AdamState& in, const AdamState& out, int64_t begin, int64_t end,
                          float* block_sums);
  Update update[2][kMasterKernels][kMomentKernels][2];  // by GradientType first, StoreKind last

  /// The norm's part of Update alone, by GradientType.
  using AddSquares = void (*)(const void* gradients, float gradient_scale, int64_t begin, int64_t end,
                              float* block_sums);
  AddSquares add_squares[2];

  /// A block's kNormSumsPerBlock sums in double: part after part by lane, then the lanes in halves.
  double (*sum_of)(const float* block_sums);

  /// The slow way, one after the other in double, for blocks whose fp32 sums are not finite; by GradientType.
  using AddExactly = void (*)(const void* gradients, float gradient_scale, int64_t begin, int64_t end,
                              ExactNorm* norm);
  AddExactly add_exactly[2];

  void (*split)(const float* master, uint16_t* weights, int16_t* remainder, int64_t count);
  void (*join)(const uint16_t* weights, const int16_t* remainder, float* master, int64_t count);
  /// Of `count` elements from the beginning of a moment block on; the second moment itself, not its root.
  void (*decode[2])(const uint8_t* codes, const float* scales, float* moments, int64_t count);
  /// a += d, b += d, c += d: the memory's own speed for the update's pattern of reads and writes.
  void (*read_modify_write)(float* a, float* b, float* c, const float* d, int64_t count);
};

extern const AdamKernels kPortableKernels;
#ifdef LOHAN_X86_KERNELS
extern const AdamKernels kAvx2Kernels;
extern const AdamKernels kAvx512Kernels;
#endif

}  // namespace lohan
