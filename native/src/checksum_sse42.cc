// Compiled for SSE4.2 and PCLMULQDQ: nothing inline that another file could share may be called from here,
// or the linker might keep this file's version of it for processors that lack the instructions.
#include <nmmintrin.h>
#include <wmmintrin.h>

#include "checksum_kernels.h"

namespace lohan {
namespace {

// The crc32 instruction takes three cycles and starts one per cycle, so three independent streams keep it
// busy. Joining them costs two multiplications, a few dozen cycles: 1 % of the 3,072 cycles of a long block
// and a fifth of a short one's 192. A 256 KiB tile is ten long blocks, ten short ones and 1 KiB.
constexpr size_t kLongStreamBytes = 8192;
constexpr size_t kShortStreamBytes = 512;

uint64_t Load(const std::byte* data) {
  uint64_t word;
  __builtin_memcpy(&word, data, 8);
  return word;
}

/// The carry-less product of two reflected 32-bit values has bit i for x^(62 - i); read as eight message
/// bytes that is the product times x, and the crc32 instruction multiplies by x^32. So this is value * factor
/// * x^33.
uint32_t MultiplyByFactorAndX33(uint64_t value, uint32_t factor) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(value)),
                                               _mm_cvtsi64_si128(static_cast<long long>(factor)), 0);
  return static_cast<uint32_t>(_mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product))));
}

/// Consumes blocks of three streams of kStreamBytes each while there are enough bytes.
template <size_t kStreamBytes>
uint32_t ExtendBlocks(uint32_t state, const std::byte*& data, size_t& size) {
  constexpr uint32_t kShiftOne = PowerOfX(8 * kStreamBytes - 33);
  constexpr uint32_t kShiftTwo = PowerOfX(16 * kStreamBytes - 33);
  for (; size >= 3 * kStreamBytes; data += 3 * kStreamBytes, size -= 3 * kStreamBytes) {
    uint64_t first = state;
    uint64_t second = 0;
    uint64_t third = 0;
    for (const std::byte* at = data; at != data + kStreamBytes; at += 8) {
      first = _mm_crc32_u64(first, Load(at));
      second = _mm_crc32_u64(second, Load(at + kStreamBytes));
      third = _mm_crc32_u64(third, Load(at + 2 * kStreamBytes));
    }
    state = MultiplyByFactorAndX33(first, kShiftTwo) ^ MultiplyByFactorAndX33(second, kShiftOne) ^
            static_cast<uint32_t>(third);
  }
  return state;
}

}  // namespace

uint32_t ExtendSse42(uint32_t state, const std::byte* data, size_t size) {
  state = ExtendBlocks<kLongStreamBytes>(state, data, size);
  state = ExtendBlocks<kShortStreamBytes>(state, data, size);
  for (; size >= 8; data += 8, size -= 8) state = static_cast<uint32_t>(_mm_crc32_u64(state, Load(data)));
  for (; size > 0; ++data, --size) state = _mm_crc32_u8(state, static_cast<uint8_t>(*data));
  return state;
}

}  // namespace lohan
