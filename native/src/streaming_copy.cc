#include "streaming_copy.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace lohan {

#if defined(__SSE2__)

namespace {

constexpr int64_t kLineBytes = 64;
/// Below a processor's own cache (half a MiB to 2 MiB), what is copied may be used again from there.
constexpr int64_t kLeastBytes = int64_t{1} << 19;

}  // namespace

void StreamingCopy(std::byte* target, const std::byte* source, int64_t length_bytes) noexcept {
  if (length_bytes < kLeastBytes) {
    std::memcpy(target, source, static_cast<size_t>(length_bytes));
    return;
  }
  // Whole lines alone leave a core in one piece.
  const auto misplaced = static_cast<int64_t>(reinterpret_cast<uintptr_t>(target) % kLineBytes);
  const int64_t head = misplaced == 0 ? 0 : kLineBytes - misplaced;
  std::memcpy(target, source, static_cast<size_t>(head));
  const int64_t end = head + (length_bytes - head) / kLineBytes * kLineBytes;
  for (int64_t at = head; at < end; at += kLineBytes) {
    const auto* from = reinterpret_cast<const __m128i*>(source + at);
    auto* to = reinterpret_cast<__m128i*>(target + at);
    const __m128i first = _mm_loadu_si128(from);
    const __m128i second = _mm_loadu_si128(from + 1);
    const __m128i third = _mm_loadu_si128(from + 2);
    const __m128i fourth = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, first);
    _mm_stream_si128(to + 1, second);
    _mm_stream_si128(to + 2, third);
    _mm_stream_si128(to + 3, fourth);
  }
  // Stores past the caches are ordered after others by a fence alone.
  _mm_sfence();
  std::memcpy(target + end, source + end, static_cast<size_t>(length_bytes - end));
}

#else

void StreamingCopy(std::byte* target, const std::byte* source, int64_t length_bytes) noexcept {
  std::memcpy(target, source, static_cast<size_t>(length_bytes));
}

#endif

}  // namespace lohan
