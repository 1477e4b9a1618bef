// Coding and decoding of 8-bit moments (dynamic_code.h), a vector at a time. Part of adam-inl.h.

#pragma once

#include "dynamic_code.h"
#include "vector-inl.h"

namespace lohan {
namespace {

template <const DynamicCode& kCode>
inline Floats Decode(Ints codes) {
  const Floats numbers = __builtin_convertvector(codes, Floats);
  // The exponent field is 127 + the highest set bit; LookUp takes it modulo 8.
  const Ints level = (__builtin_bit_cast(Ints, numbers) >> 23) + 1;
  const Floats values = LookUp(kCode.decode_offset, level) + LookUp(kCode.decode_slope, level) * numbers;
  return codes != 0 ? values : Floats{};
}

/// `values` are 0 or more and below 1; a NaN's code is 0.
template <const DynamicCode& kCode>
inline Ints Encode(Floats values) {
  // Octaves above the lowest level's beginning; three make a level. n / 3 = n * 11 / 32 for n up to 23.
  Ints octave = (__builtin_bit_cast(Ints, values) >> 23) - (127 - 3 * kCode.levels);
  octave = octave > 0 ? octave : Ints{};
  const Ints level = MultiplySmall(octave, 11) >> 5;
  return Truncate(LookUp(kCode.encode_offset, level) + LookUp(kCode.encode_slope, level) * values);
}

inline Floats DecodeFirst(const uint8_t* codes, Floats scale) {
  const Ints bytes = LoadBytes(codes);
  const Words magnitude = BitsOf(Decode<kSignedCode>(bytes & 0x7F) * scale);
  return FromBits(magnitude | (__builtin_bit_cast(Words, bytes & 0x80) << 24));
}

inline Floats DecodeRoot(const uint8_t* codes, Floats scale) {
  return Decode<kUnsignedCode>(LoadBytes(codes)) * scale;
}

/// The larger of each lane's magnitudes as bits: NaN above infinity above every number, in any order.
inline Ints LargerMagnitude(Ints largest, Floats values) {
  const Ints bits = __builtin_bit_cast(Ints, values) & 0x7FFFFFFF;
  return bits > largest ? bits : largest;
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
