#pragma once

#include <cstddef>
#include <cstdint>

namespace lohan {

/// Copies between ranges that do not overlap, past the caches where it is long: neither end is used again
/// before others have pushed it out, and a store that goes past the caches does not read its line first, a
/// third of a copy's traffic. What was copied is visible to whoever is told after the return.
void StreamingCopy(std::byte* target, const std::byte* source, int64_t length_bytes) noexcept;

}  // namespace lohan
