// Coding and decoding of 8-bit moments (dynamic_code.h), a vector at a time. Part of adam-inl.h.

#pragma once

#include "dynamic_code.h"
#include "vector-inl.h"

namespace lohan {
namespace {

/// A code's values times a block's scale.
class Decoder {
 public:
  Decoder(const DynamicCode& code, float scale)
      : offset_(code.decode_offset, scale), slope_(code.decode_slope, scale) {}

  Floats First(const uint8_t* codes) const { return Values(LoadSignedBytes(codes)); }

  /// The square root of the second moment.
  Floats Root(const uint8_t* codes) const { return Values(LoadBytes(codes)); }

 private:
  Floats Values(Ints codes) const {
    const Floats numbers = __builtin_convertvector(codes, Floats);
    const Ints exponent =
        __builtin_bit_cast(Ints, numbers) >> 23;  // of which the tables take the lowest three bits
    // A negative code's value is the negated one, bit for bit: so are both of the sum's terms.
    return FlipSigns(offset_.At(exponent), numbers) + slope_.At(exponent) * numbers;
  }

  ScaledTable offset_, slope_;
};

/// What truncated is the number that codes a value, for a NaN a NaN. `values` are 0 or more and below 1.
template <const DynamicCode& kCode>
inline Floats EncodeMagnitude(Floats values) {
  // Octaves above the lowest level's beginning; three make a level. n / 3 = n * 11 / 32 for n up to 23.
  const Ints exponent = __builtin_bit_cast(Ints, BitsOf(values) >> 23);
  const Ints octave = SubtractSaturating(exponent, 127 - 3 * kCode.levels);
#if defined(__AVX512F__)
  return LookUp(kCode.octave_offset, octave) + LookUp(kCode.octave_slope, octave) * values;
#else
  const Ints level = MultiplySmall(octave, 11) >> 5;
  return LookUp(kCode.encode_offset, level) + LookUp(kCode.encode_slope, level) * values;
#endif
}

/// `inverse` maps the block's largest value onto the code's top.
inline Ints EncodeFirst(Floats values, Floats inverse) {
  const Floats magnitudes = FromBits(BitsOf(values) & 0x7FFFFFFFu);
  return Truncate(FlipSigns(EncodeMagnitude<kSignedCode>(magnitudes * inverse), values));
}

inline Ints EncodeRoot(Floats values, Floats inverse) {
  return Truncate(EncodeMagnitude<kUnsignedCode>(values * inverse));
}

/// The larger of each lane's bits as unsigned numbers: of what is not negative, NaN above infinity above
/// every number; a NaN with its sign's bit set, as x86 makes them, above all.
inline Words LargerBits(Words largest, Floats values) {
  const Words bits = BitsOf(values);
  return bits > largest ? bits : largest;
}

/// The larger of each lane's magnitudes as bits: NaN above infinity above every number, in any order.
inline Words LargerMagnitude(Words largest, Floats values) {
  return LargerBits(largest, FromBits(BitsOf(values) & 0x7FFFFFFFu));
}

struct BlockScale {
  float scale;    // what codes are multiplied by
  float inverse;  // what values are multiplied by
};

inline BlockScale ScaleOf(Words largest_lanes, float top) {
  const int32_t largest = LargestLane(__builtin_bit_cast(Ints, largest_lanes & 0x7FFFFFFFu));
  if (largest >= 0x7F800000) return {__builtin_bit_cast(float, 0x7FC00000u), 0.0f};
  // Below 2^-100 the inverse would near its own overflow, and such a block has no effect on any weight: zero.
  if (largest < ((127 - 100) << 23)) return {0.0f, 0.0f};
  const float absolute = __builtin_bit_cast(float, largest);
  return {absolute / top, top / absolute};
}

}  // namespace
}  // namespace lohan
