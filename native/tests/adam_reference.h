// AdamW written the long way, one element at a time, and the arrays to run it on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <vector>

#include "dynamic_code.h"
#include "lohan/adam.h"

namespace lohan::test {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float Canonical(float value) { return std::isnan(value) ? FromBits(0x7FC00000) : value; }

inline uint16_t ToBfloat16(float value) {
  if (std::isnan(value)) return 0x7FC0;
  const uint32_t bits = BitsOf(value);
  const uint32_t low = bits & 0xFFFF;
  uint32_t high = bits >> 16;
  if (low > 0x8000 || (low == 0x8000 && (high & 1) == 1)) ++high;
  return static_cast<uint16_t>(high);
}

/// The split form: the nearest bfloat16, ties away from zero, and the signed distance to it in units of the
/// fp32 value's last place.
inline void SplitOf(float value, uint16_t& weights, int16_t& remainder) {
  const int64_t bits = BitsOf(Canonical(value));
  int64_t high = bits >> 16;
  if ((bits & 0xFFFF) >= 0x8000) ++high;
  weights = static_cast<uint16_t>(high);
  remainder = static_cast<int16_t>(bits - (high << 16));
}

inline float JoinOf(uint16_t weights, int16_t remainder) {
  return FromBits(static_cast<uint32_t>((static_cast<int64_t>(weights) << 16) + remainder));
}

enum class Master { kFloat32, kFloat32WithWeights, kSplit };
enum class Moments { kFloat32, kEightBit };

/// For arrays that begin at whole cache lines: new states in such a place are written by streaming stores.
template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <typename Other>
  explicit LineAllocator(const LineAllocator<Other>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* values, size_t) { ::operator delete(values, kLine); }
  bool operator==(const LineAllocator&) const = default;
};

template <typename T>
using Lines = std::vector<T, LineAllocator<T>>;

/// Gradients of both types, and a state in every form; a test uses those its form calls for.
struct Arrays {
  Lines<float> gradients, master, first, second, first_scales, second_scales;
  Lines<uint16_t> gradients16, weights;
  Lines<int16_t> remainder;
  Lines<uint8_t> first_codes, second_codes;

  Arrays(int64_t length, uint32_t seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < length; ++i) {
      gradients.push_back(normal(generator));
      gradients16.push_back(ToBfloat16(normal(generator)));
      master.push_back(normal(generator));
      first.push_back(0.1f * normal(generator));
      second.push_back(std::abs(0.01f * normal(generator)));
      weights.push_back(0x1234);
      remainder.push_back(0x77);
      first_codes.push_back(static_cast<uint8_t>(generator()));
      second_codes.push_back(static_cast<uint8_t>(generator()));
    }
    for (int64_t block = 0; block * kMomentBlockElements < length; ++block) {
      first_scales.push_back(0.3f * std::abs(normal(generator)));
      second_scales.push_back(0.1f * std::abs(normal(generator)));
    }
  }

  AdamState State(Master master_form, Moments moments) {
    AdamState state;
    if (master_form != Master::kSplit) state.master = master.data();
    if (master_form != Master::kFloat32) state.weights = weights.data();
    if (master_form == Master::kSplit) state.remainder = remainder.data();
    if (moments == Moments::kFloat32) {
      state.first_moment = first.data();
      state.second_moment = second.data();
    } else {
      state.first_codes = first_codes.data();
      state.second_codes = second_codes.data();
      state.first_scales = first_scales.data();
      state.second_scales = second_scales.data();
    }
    return state;
  }

  /// Makes weights and remainder the split form of master.
  void SplitAll() {
    for (size_t i = 0; i < master.size(); ++i) SplitOf(master[i], weights[i], remainder[i]);
  }

  GradientArray Float32() const {
    return {gradients.data(), GradientType::kFloat32, static_cast<int64_t>(gradients.size())};
  }
  GradientArray Bfloat16() const {
    return {gradients16.data(), GradientType::kBfloat16, static_cast<int64_t>(gradients16.size())};
  }
  GradientArray Gradients(GradientType type) const {
    return type == GradientType::kFloat32 ? Float32() : Bfloat16();
  }
};

/// Bitwise: NaN equals itself, -0 does not equal 0.
template <typename T>
bool SameBits(const Lines<T>& a, const Lines<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

inline bool SameBits(const Arrays& a, const Arrays& b) {
  return SameBits(a.master, b.master) && SameBits(a.first, b.first) && SameBits(a.second, b.second) &&
         SameBits(a.weights, b.weights) && SameBits(a.remainder, b.remainder) &&
         SameBits(a.first_codes, b.first_codes) && SameBits(a.second_codes, b.second_codes) &&
         SameBits(a.first_scales, b.first_scales) && SameBits(a.second_scales, b.second_scales);
}

inline float GradientAt(const GradientArray& gradients, int64_t i, float scale) {
  if (gradients.type == GradientType::kFloat32) return static_cast<const float*>(gradients.data)[i] * scale;
  return FromBits(static_cast<uint32_t>(static_cast<const uint16_t*>(gradients.data)[i]) << 16) * scale;
}

inline float DecodeMagnitude(const DynamicCode& code, int number, float scale) {
  const auto value = static_cast<float>(number);
  const uint32_t place = BitsOf(value) >> 23 & 7;
  return code.decode_offset[place] * scale + code.decode_slope[place] * scale * value;
}

inline float DecodeFirst(uint8_t byte, float scale) {
  const auto number = static_cast<int8_t>(byte);
  const float magnitude = DecodeMagnitude(kSignedCode, std::abs(number), scale);
  return number < 0 ? -magnitude : magnitude;
}

/// The number of a magnitude below 1.
inline int EncodeMagnitude(const DynamicCode& code, float value) {
  if (std::isnan(value)) return 0;
  int level = 0;
  float end = std::ldexp(1.0f, -3 * (code.levels - 1));
  while (value >= end) {
    end *= 8.0f;
    ++level;
  }
  return static_cast<int>(code.encode_offset[level] + code.encode_slope[level] * value);
}

struct Scale {
  float scale, inverse;
};

inline Scale ScaleOf(const std::vector<float>& values, float top) {
  float largest = 0.0f;
  for (const float value : values) {
    if (!std::isfinite(value)) return {FromBits(0x7FC00000), 0.0f};
    largest = std::max(largest, std::abs(value));
  }
  if (largest < std::ldexp(1.0f, -100)) return {0.0f, 0.0f};
  return {largest / top, top / largest};
}

/// The update of one segment. With 8-bit moments it recodes the blocks that the segment owns.
class Reference {
 public:
  Reference(const AdamSegment& segment, const GradientArray& gradients, Arrays& arrays, float scale,
            Master master, Moments moments)
      : s_(segment),
        gradients_(gradients),
        arrays_(arrays),
        scale_(scale),
        master_(master),
        moments_(moments) {}

  void Run() {
    const int64_t end = s_.offset + s_.length;
    if (moments_ == Moments::kFloat32) {
      for (int64_t i = s_.offset; i < end; ++i) {
        const auto at = static_cast<size_t>(i);
        Advance(i, arrays_.first[at], arrays_.second[at]);
        arrays_.first[at] = first_;
        arrays_.second[at] = second_;
      }
      return;
    }
    for (int64_t begin = s_.offset; begin < end; begin += kMomentBlockElements) {
      RunBlock(begin, std::min(begin + kMomentBlockElements, end));
    }
  }

 private:
  void RunBlock(int64_t begin, int64_t end) {
    const auto block = static_cast<size_t>(begin / kMomentBlockElements);
    std::vector<float> firsts, roots;
    for (int64_t i = begin; i < end; ++i) {
      const auto at = static_cast<size_t>(i);
      const float g = GradientAt(gradients_, i, scale_);
      const float root =
          DecodeMagnitude(kUnsignedCode, arrays_.second_codes[at],
                          static_cast<float>(std::sqrt(s_.beta2)) * arrays_.second_scales[block]);
      second_ = root * root + static_cast<float>(1.0 - s_.beta2) * (g * g);
      const float first =
          DecodeFirst(arrays_.first_codes[at], static_cast<float>(s_.beta1) * arrays_.first_scales[block]);
      first_ = Canonical(first + static_cast<float>(1.0 - s_.beta1) * g);
      Move(at);
      firsts.push_back(first_);
      roots.push_back(std::sqrt(second_));
    }
    const Scale first = ScaleOf(firsts, kSignedCode.top), second = ScaleOf(roots, kUnsignedCode.top);
    arrays_.first_scales[block] = first.scale;
    arrays_.second_scales[block] = second.scale;
    for (int64_t i = begin; i < end; ++i) {
      const auto at = static_cast<size_t>(i), from = static_cast<size_t>(i - begin);
      const int number = EncodeMagnitude(kSignedCode, std::abs(firsts[from]) * first.inverse);
      arrays_.first_codes[at] = static_cast<uint8_t>(std::signbit(firsts[from]) ? -number : number);
      // The least that a signed byte holds, as of any number too small for it; an infinity times zero is one
      // too.
      if (std::isnan(firsts[from] * first.inverse)) arrays_.first_codes[at] = 0x80;
      arrays_.second_codes[at] =
          static_cast<uint8_t>(EncodeMagnitude(kUnsignedCode, roots[from] * second.inverse));
    }
  }

  void Advance(int64_t i, float first, float second) {
    const float g = GradientAt(gradients_, i, scale_);
    first_ = Canonical(first + static_cast<float>(1.0 - s_.beta1) * (g - first));
    second_ = Canonical(static_cast<float>(s_.beta2) * second + static_cast<float>(1.0 - s_.beta2) * (g * g));
    Move(static_cast<size_t>(i));
  }

  /// The master weight's step, from the new moments.
  void Move(size_t at) {
    const auto step = static_cast<double>(s_.step);
    const double step_size = s_.learning_rate / (1.0 - std::pow(s_.beta1, step));
    const double correction = 1.0 / std::sqrt(1.0 - std::pow(s_.beta2, step));
    float p =
        master_ == Master::kSplit ? JoinOf(arrays_.weights[at], arrays_.remainder[at]) : arrays_.master[at];
    p = p * static_cast<float>(1.0 - s_.learning_rate * s_.weight_decay);
    float quotient = 0.0f;
    if (step_size > 0.0) {
      quotient = first_ / (std::sqrt(second_) * static_cast<float>(correction / step_size) +
                           static_cast<float>(s_.epsilon / step_size));
    } else {
      quotient = first_ / (std::sqrt(second_) * 0.0f + kInfinity);
    }
    p = Canonical(p - quotient);
    if (master_ == Master::kSplit) {
      SplitOf(p, arrays_.weights[at], arrays_.remainder[at]);
      return;
    }
    arrays_.master[at] = p;
    if (master_ == Master::kFloat32WithWeights) arrays_.weights[at] = ToBfloat16(p);
  }

  const AdamSegment& s_;
  const GradientArray gradients_;
  Arrays& arrays_;
  const float scale_;
  const Master master_;
  const Moments moments_;
  float first_ = 0.0f, second_ = 0.0f;
};

}  // namespace lohan::test
