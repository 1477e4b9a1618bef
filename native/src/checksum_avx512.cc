// Compiled for AVX-512 and VPCLMULQDQ: see checksum_sse42.cc on why nothing inline may be called from here.
#include <immintrin.h>

#include "checksum_kernels.h"

namespace lohan {
namespace {

// Four accumulators of 64 bytes: eight carry-less multiplications are under way at a time, about their
// latency.
constexpr size_t kAccumulators = 4;
constexpr size_t kBlockBytes = kAccumulators * 64;

/// Multiplies each 16 bytes of `value`, as message bytes, by x^(8 * kDistanceBytes) modulo P, and adds
/// `next`: what `value` says about the message then stands kDistanceBytes further on.
///
/// The product of two reflected 64-bit values has bit i for x^(126 - i); as 16 message bytes that is the
/// product times x. The first eight bytes stand x^64 above the last eight. Hence the exponents; a constant of
/// degree below 32 lies in the upper half of its 64 bits.
template <uint64_t kDistanceBytes>
__m512i Fold(__m512i value, __m512i next) {
  constexpr uint64_t kFirst = uint64_t{PowerOfX(8 * kDistanceBytes + 63)} << 32;
  constexpr uint64_t kLast = uint64_t{PowerOfX(8 * kDistanceBytes - 1)} << 32;
  const __m512i factors = _mm512_set4_epi64(static_cast<long long>(kLast), static_cast<long long>(kFirst),
                                            static_cast<long long>(kLast), static_cast<long long>(kFirst));
  const __m512i first = _mm512_clmulepi64_epi128(value, factors, 0x00);
  const __m512i last = _mm512_clmulepi64_epi128(value, factors, 0x11);
  return _mm512_ternarylogic_epi64(first, last, next, 0x96);  // exclusive or of all three
}

}  // namespace

uint32_t ExtendAvx512(uint32_t state, const std::byte* data, size_t size) {
  if (size >= 2 * kBlockBytes) {
    __m512i sums[kAccumulators];
    for (size_t i = 0; i < kAccumulators; ++i) sums[i] = _mm512_loadu_si512(data + 64 * i);
    const __m512i before = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state)));
    sums[0] = _mm512_xor_si512(sums[0], before);
    data += kBlockBytes;
    size -= kBlockBytes;
    for (; size >= kBlockBytes; data += kBlockBytes, size -= kBlockBytes) {
      for (size_t i = 0; i < kAccumulators; ++i) {
        sums[i] = Fold<kBlockBytes>(sums[i], _mm512_loadu_si512(data + 64 * i));
      }
    }
    for (size_t i = 1; i < kAccumulators; ++i) sums[i] = Fold<64>(sums[i - 1], sums[i]);
    // 64 bytes that have the same remainder as all that was read.
    std::byte equivalent[64];
    _mm512_storeu_si512(equivalent, sums[kAccumulators - 1]);
    state = ExtendSse42(0, equivalent, sizeof(equivalent));
  }
  return ExtendSse42(state, data, size);
}

}  // namespace lohan
