// Coding and decoding of 8-bit moments (dynamic_code.h), a vector at a time. Part of adam-inl.h.

#pragma once

#include "dynamic_code.h"
#include "vector-inl.h"

namespace lohan {
namespace {

/// A code's values times a block's scale.
struct Decoder {
  ScaledTable offset, slope;

  Decoder(const DynamicCode& code, float scale)
      : offset(code.decode_offset, scale), slope(code.decode_slope, scale) {}

  /// The values of bytes without a sign.
  Floats Magnitudes(Ints bytes) const {
    const Floats numbers = __builtin_convertvector(bytes, Floats);
    const Ints exponent =
        __builtin_bit_cast(Ints, numbers) >> 23;  // of which the tables take the lowest three bits
    return offset.At(exponent) + slope.At(exponent) * numbers;
  }

  Floats First(const uint8_t* codes) const {
    const Ints bytes = LoadBytes(codes);
    return FromBits(BitsOf(Magnitudes(bytes & 0xFE)) | __builtin_bit_cast(Words, bytes) << 31);
  }

  /// The square root of the second moment.
  Floats Root(const uint8_t* codes) const { return Magnitudes(LoadBytes(codes)); }
};

/// The bytes, with the sign's bit still to be set or cleared. `values` are 0 or more and below 1; a NaN's
/// byte is 0.
template <const DynamicCode& kCode>
inline Ints EncodeMagnitude(Floats values) {
  // Octaves above the lowest level's beginning; three make a level. n / 3 = n * 11 / 32 for n up to 23.
  const Ints exponent = __builtin_bit_cast(Ints, BitsOf(values) >> 23);
  const Ints octave = SubtractSaturating(exponent, 127 - 3 * kCode.levels);
#if defined(__AVX512F__)
  return Truncate(LookUp(kCode.octave_offset, octave) + LookUp(kCode.octave_slope, octave) * values);
#else
  const Ints level = MultiplySmall(octave, 11) >> 5;
  return Truncate(LookUp(kCode.encode_offset, level) + LookUp(kCode.encode_slope, level) * values);
#endif
}

/// `inverse` maps the block's largest value onto the code's top.
inline Ints EncodeFirst(Floats values, Floats inverse) {
  // The sign is the value's own: an infinity times the inverse, zero, is a NaN of either sign.
  const Ints sign = __builtin_bit_cast(Ints, BitsOf(values) >> 31);
  return (EncodeMagnitude<kSignedCode>(FromBits(BitsOf(values) & 0x7FFFFFFFu) * inverse) & 0xFE) | sign;
}

inline Ints EncodeRoot(Floats values, Floats inverse) {
  return EncodeMagnitude<kUnsignedCode>(values * inverse);
}

inline Ints Larger(Ints a, Ints b) { return a > b ? a : b; }

/// The larger of each lane's magnitudes as bits: NaN above infinity above every number, in any order.
inline Ints LargerMagnitude(Ints largest, Floats values) {
  return Larger(largest, __builtin_bit_cast(Ints, values) & 0x7FFFFFFF);
}

struct BlockScale {
  float scale;    // what codes are multiplied by
  float inverse;  // what values are multiplied by
};

inline BlockScale ScaleOf(Ints largest_lanes, float top) {
  const int32_t largest = LargestLane(largest_lanes);
  if (largest >= 0x7F800000) return {__builtin_bit_cast(float, 0x7FC00000u), 0.0f};
  // Below 2^-100 the inverse would near its own overflow, and such a block has no effect on any weight: zero.
  if (largest < ((127 - 100) << 23)) return {0.0f, 0.0f};
  const float absolute = __builtin_bit_cast(float, largest);
  return {absolute / top, top / absolute};
}

}  // namespace
}  // namespace lohan
