// The 8-bit code of the moments: dynamic (tree) quantization, after Dettmers, "8-Bit Approximations for
// Parallelism in Deep Learning" (arXiv:1511.04561) and "8-bit Optimizers via Block-wise Quantization"
// (arXiv:2110.02861).
//
// A code is a number c. Its highest set bit is its level i; its lower bits choose one of the level's 2^i
// equal cells. c = 0 is zero. Large values get many cells, small ones many levels. Three choices differ from
// bitsandbytes:
// - A level spans a factor of 8, not of 10. Its number then follows from a value's exponent, and the cells of
// the
//   top level, where most of a block lies, are narrower; the lowest level ends at 5e-7 instead of 1e-7.
// - The scale maps a block's largest value onto the centre of the last cell, so that it is exact with either
//   sign; there only the positive one is.
// - The second moment is coded by its square root, which is what the update divides by. The root needs half
// the
//   range, so no divisor that matters becomes zero.
//
// The unsigned code of a root is the byte c, of 8 levels. The signed code of a first moment is the byte c or
// -c (two's complement), of 7 levels.
#pragma once

#include <cstdint>

namespace lohan {

struct DynamicCode {
  int levels;
  float top;  // centre of the last cell: what the largest value of a block is scaled to
  // value = offset + slope * c, by the exponent of c as a float, modulo 8. Twice over, so that vectors of 8
  // and of 16 elements load the tables whole.
  float decode_offset[16];
  float decode_slope[16];
  // c = floor(offset + slope * value), or 0 where that is negative, by level, twice over.
  float encode_offset[16];
  float encode_slope[16];
  // The same by octave, three to a level from the lowest one's beginning on, for vectors that can hold all of
  // them.
  float octave_offset[32];
  float octave_slope[32];
};

constexpr DynamicCode MakeDynamicCode(int levels) {
  DynamicCode code = {};
  code.levels = levels;
  double end = 1.0;  // of the level
  for (int level = 1; level < levels; ++level) end /= 8.0;
  double cells = 1.0;
  for (int level = 0; level < levels; ++level) {
    const double begin = end / 8.0;
    double width = (end - begin) / cells;
    double offset = begin + (0.5 - cells) * width;  // of the values: offset + width * c
    // Where the level's first code begins; the lowest level's only one halfway between zero and its value.
    double encode_begin = level == 0 ? 0.5 * (begin + 0.5 * width) : begin;
    double encode_width = width;
    // A float's exponent is 127 + its highest bit; zero's is 0. Level 1, with the numbers 2 and 3, shares
    // zero's place in the tables: its values are on a line through zero, so that 0 needs no case of its own.
    const int place = (127 + level) % 8;
    if (level == 1) {
      const double last = end - 0.5 * width;
      offset = 0.0;
      width = last / (2.0 * cells - 1.0);
      encode_width = 2.5 * width - encode_begin;  // 2 and 3 meet halfway between their values
    }
    for (int half = 0; half < 16; half += 8) {
      code.decode_offset[half + place] = static_cast<float>(offset);
      code.decode_slope[half + place] = static_cast<float>(width);
      code.encode_offset[half + level] = static_cast<float>(cells - encode_begin / encode_width);
      code.encode_slope[half + level] = static_cast<float>(1.0 / encode_width);
    }
    for (int octave = 3 * level; octave < 3 * level + 3; ++octave) {
      code.octave_offset[octave] = code.encode_offset[level];
      code.octave_slope[octave] = code.encode_slope[level];
    }
    code.top = static_cast<float>(offset + width * (2.0 * cells - 1.0));
    end *= 8.0;
    cells *= 2.0;
  }
  return code;
}

namespace {
constexpr DynamicCode kSignedCode = MakeDynamicCode(7);
constexpr DynamicCode kUnsignedCode = MakeDynamicCode(8);
}  // namespace

}  // namespace lohan
