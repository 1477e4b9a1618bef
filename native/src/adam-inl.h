// Body of the AdamW kernels; included once by each adam_<instruction set>.cc, which defines LOHAN_KERNELS and
// is compiled with that set's flags. No include guard: it is code, not an interface.
//
// Two rules keep this safe and exact. Nothing here may call an inline function or template from another
// header: the linker keeps one copy of those, and it could be the AVX-512 one. Every loop is plain
// element-wise IEEE arithmetic that the compiler may vectorise but (without -ffast-math, with
// -ffp-contract=off) may not reassociate or fuse, so all builds give the same bits.

#include "adam_kernels.h"

namespace lohan {
namespace {

inline uint32_t BitsOf(float value) { return __builtin_bit_cast(uint32_t, value); }
inline float FromBits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Which NaN an operation on two NaNs returns depends on operand order, which the compiler chooses: one
// canonical NaN keeps the builds bitwise equal.
inline float CanonicalNan(float value) { return value != value ? FromBits(0x7FC00000u) : value; }

void LoadFloat32(const float* __restrict source, float scale, float* __restrict target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] = CanonicalNan(source[i] * scale);
}

void LoadBfloat16(const uint16_t* __restrict source, float scale, float* __restrict target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    target[i] = CanonicalNan(FromBits(static_cast<uint32_t>(source[i]) << 16) * scale);
  }
}

BlockNorm Norm(const float* __restrict gradients) {
  double lanes[kNormLanes] = {};
  for (int64_t i = 0; i < kBlockElements; i += kNormLanes) {
    for (int64_t lane = 0; lane < kNormLanes; ++lane) {
      const double value = gradients[i + lane];
      lanes[lane] += value * value;  // exact: two 24-bit significands fit in 53 bits
    }
  }
  for (int64_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  uint32_t non_finite = 0;
  for (int64_t i = 0; i < kBlockElements; ++i) {
    non_finite += (BitsOf(gradients[i]) & 0x7F800000u) == 0x7F800000u;
  }
  return {lanes[0], non_finite};
}

void Update(const AdamScalars& scalars, const float* __restrict gradients, float* __restrict master,
            float* __restrict first_moment, float* __restrict second_moment, int64_t count) {
  const AdamScalars s = scalars;
  for (int64_t i = 0; i < count; ++i) {
    const float gradient = gradients[i];
    const float decayed = master[i] * s.decay;
    const float first = first_moment[i] + s.first_weight * (gradient - first_moment[i]);
    const float second = s.beta2 * second_moment[i] + s.second_weight * (gradient * gradient);
    const float denominator = __builtin_sqrtf(second) / s.second_correction_sqrt + s.epsilon;
    master[i] = CanonicalNan(decayed - s.step_size * (first / denominator));
    first_moment[i] = CanonicalNan(first);
    second_moment[i] = CanonicalNan(second);
  }
}

void StoreBfloat16(const float* __restrict source, uint16_t* __restrict target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = BitsOf(source[i]);
    // Adds just under half of the dropped 16 bits' range, and one more when the kept part is odd: ties to
    // even.
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    target[i] = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
  }
}

}  // namespace

const AdamKernels LOHAN_KERNELS = {LoadFloat32, LoadBfloat16, Norm, Update, StoreBfloat16};

}  // namespace lohan
