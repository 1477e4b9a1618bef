// The leaf loops of AdamW, built once per instruction set from adam-inl.h.
#pragma once

#include <cstdint>

namespace lohan {

/// Elements per block: the grain of the norm's tree. 8 KiB of fp32 gradients stay in the first-level cache
/// between the loops that read them.
inline constexpr int64_t kBlockElements = 2048;
/// Interleaved sums per block; a multiple of every vector width in doubles (2, 4, 8).
inline constexpr int64_t kNormLanes = 16;

/// A segment's constants, rounded to fp32 once so that every kernel multiplies by the same bits.
struct AdamScalars {
  float decay;                   // 1 - learning_rate * weight_decay
  float first_weight;            // 1 - beta1
  float beta2;                   //
  float second_weight;           // 1 - beta2
  float step_size;               // learning_rate / (1 - beta1^step)
  float second_correction_sqrt;  // sqrt(1 - beta2^step)
  float epsilon;                 //
};

struct BlockNorm {
  double squared_norm;
  int64_t non_finite;
};

struct AdamKernels {
  /// target[i] = source[i] * scale, NaN canonical.
  void (*load_float32)(const float* source, float scale, float* target, int64_t count);
  void (*load_bfloat16)(const uint16_t* source, float scale, float* target, int64_t count);
  /// Norm of kBlockElements values; unused ones are zero.
  BlockNorm (*norm)(const float* gradients);
  void (*update)(const AdamScalars& scalars, const float* gradients, float* master, float* first_moment,
                 float* second_moment, int64_t count);
  /// Rounds to nearest even; NaN becomes 0x7FC0.
  void (*store_bfloat16)(const float* source, uint16_t* target, int64_t count);
};

extern const AdamKernels kPortableKernels;
#ifdef LOHAN_X86_KERNELS
extern const AdamKernels kAvx2Kernels;
extern const AdamKernels kAvx512Kernels;
#endif

}  // namespace lohan
