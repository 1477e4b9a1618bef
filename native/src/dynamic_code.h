// The 8-bit code of the moments: dynamic (tree) quantization, after Dettmers, "8-Bit Approximations for
// Parallelism in Deep Learning" (arXiv:1511.04561) and "8-bit Optimizers via Block-wise Quantization"
// (arXiv:2110.02861).
//
// A code's highest set bit is its level i; its lower bits choose one of the level's 2^i equal cells. Code 0
// is zero. Large values get many cells, small ones many levels. Three choices differ from bitsandbytes:
// - A level spans a factor of 8, not of 10. Its number then follows from a value's exponent, and the cells of
// the
//   top level, where most of a block lies, are 7/8 to 9/10 as wide; the lowest level ends at 5e-7 instead of
//   1e-7.
// - The scale maps a block's largest value onto the centre of the last cell, so that it is exact with either
//   sign; there only the positive one is.
// - The second moment is coded by its square root, which is what the update divides by. The root needs half
// the
//   range, so no divisor that matters becomes zero.
#pragma once

#include <cstdint>

namespace lohan {

struct DynamicCode {
  int levels;
  float top;  // centre of the last cell: what the largest value of a block is scaled to
  // By level, twice over, so that vectors of 8 and 16 elements load them whole.
  float decode_offset[16];  // value = offset + slope * code
  float decode_slope[16];
  float encode_offset[16];  // code = floor(offset + slope * value)
  float encode_slope[16];
};

constexpr DynamicCode MakeDynamicCode(int levels) {
  DynamicCode code = {};
  code.levels = levels;
  double end = 1.0;  // of the level
  for (int level = 1; level < levels; ++level) end /= 8.0;
  double cells = 1.0;
  for (int level = 0; level < levels; ++level) {
    const double begin = end / 8.0;
    const double width = (end - begin) / cells;
    // The lowest level's only cell begins halfway between zero and its centre.
    const double encode_begin = level == 0 ? 0.5 * (begin + 0.5 * width) : begin;
    for (int entry = level; entry < 16; entry += 8) {
      code.decode_slope[entry] = static_cast<float>(width);
      code.decode_offset[entry] = static_cast<float>(begin + (0.5 - cells) * width);
      code.encode_slope[entry] = static_cast<float>(1.0 / width);
      code.encode_offset[entry] = static_cast<float>(cells - encode_begin / width);
    }
    code.top = static_cast<float>(end - 0.5 * width);
    end *= 8.0;
    cells *= 2.0;
  }
  return code;
}

namespace {
constexpr DynamicCode kSignedCode = MakeDynamicCode(7);  // and a sign bit
constexpr DynamicCode kUnsignedCode = MakeDynamicCode(8);
}  // namespace

}  // namespace lohan
