// The leaf loops of CRC-32C, and the arithmetic behind combining values.
//
// A value is a polynomial over GF(2) of degree below 32 in reflected order: bit i stands for x^(31 - i).
// Appending n zero bits to a message multiplies its remainder by x^n modulo the Castagnoli polynomial P.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lohan {

/// P without x^32, reflected.
inline constexpr uint32_t kCastagnoli = 0x82F63B78;
/// The polynomial 1.
inline constexpr uint32_t kOne = 0x80000000;

/// a * b modulo P.
constexpr uint32_t MultiplyModP(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b & 1) != 0 ? (b >> 1) ^ kCastagnoli : b >> 1;  // b * x
  }
  return product;
}

/// base^exponent modulo P.
constexpr uint32_t PowerModP(uint32_t base, uint64_t exponent) {
  uint32_t result = kOne;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = MultiplyModP(result, base);
    base = MultiplyModP(base, base);
  }
  return result;
}

/// x^exponent modulo P.
constexpr uint32_t PowerOfX(uint64_t exponent) { return PowerModP(kOne >> 1, exponent); }

/// Goes on with `state`, the value before the final xor, over `size` bytes.
uint32_t ExtendPortable(uint32_t state, const std::byte* data, size_t size);
#ifdef LOHAN_X86_KERNELS
uint32_t ExtendSse42(uint32_t state, const std::byte* data, size_t size);
uint32_t ExtendAvx512(uint32_t state, const std::byte* data, size_t size);
#endif

}  // namespace lohan
