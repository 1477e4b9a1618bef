#pragma once

#include <cstddef>
#include <cstdint>

namespace lohan {

/// Copies between ranges that do not overlap, past the caches where it is long. For targets that are not used
/// soon: a store that goes past the caches does not read its line first, a third of a copy's traffic, and
/// leaves the caches to others. What was copied is visible to whoever is told after the return.
void StreamingCopy(std::byte* target, const std::byte* source, int64_t length_bytes) noexcept;

}  // namespace lohan
