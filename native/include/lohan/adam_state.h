// The arrays that AdamW reads and writes.
#pragma once

#include <cstdint>

namespace lohan {

enum class GradientType { kFloat32, kBfloat16 };

/// `length` gradients; bfloat16 values are held as their 16 bits.
struct GradientArray {
  const void* data = nullptr;
  GradientType type = GradientType::kFloat32;
  int64_t length = 0;
};

/// Elements that share one scale in 8-bit moments (Dettmers et al., arXiv:2110.02861, section 2.1, with the
/// block of 256 that bitsandbytes takes for optimizers).
inline constexpr int64_t kMomentBlockElements = 256;

/// The state arrays of an update, each as long as its gradients and aligned to its element size.
///
/// Master weights take one of two forms:
/// - fp32: `master`, and in an output optionally `weights`, its bfloat16 copy rounded to nearest even;
/// - split: `weights` and `remainder` with `master` null. The fp32 value's bits are (weights << 16) +
///   remainder as a signed number, so `weights` is the value rounded to the nearest bfloat16, ties away from
///   zero, and nothing is lost. NaN is stored as 0x7FC0 and 0.
///
/// Moments take one of two forms:
/// - fp32: `first_moment` and `second_moment`;
/// - 8-bit: codes of the first moment and of the second one's square root (dynamic_code.h), with one fp32
///   scale per kMomentBlockElements. All zero bits mean zero in both.
struct AdamState {
  float* master = nullptr;
  uint16_t* weights = nullptr;
  int16_t* remainder = nullptr;
  float* first_moment = nullptr;
  float* second_moment = nullptr;
  uint8_t* first_codes = nullptr;
  uint8_t* second_codes = nullptr;
  float* first_scales = nullptr;
  float* second_scales = nullptr;
};

enum class MomentCode {
  kFirst,   // a sign and 7 levels
  kSecond,  // of the square root: 8 levels
};

}  // namespace lohan
