// The one place where a system call's result is looked at.
#pragma once

#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>

#include "lohan/error.h"

namespace lohan {

enum class OnInterrupt { kRepeat, kReport };

/// Calls `call` until it is not interrupted; returns its result, or throws IoError with errno when that
/// is -1 (or MAP_FAILED).
template <typename Call>
auto CheckedCall(const char* operation, const std::string& path, std::optional<int64_t> offset, Call&& call,
                 OnInterrupt on_interrupt = OnInterrupt::kRepeat) {
  while (true) {
    const auto result = call();
    if (result != decltype(result)(-1)) return result;
    const int error_number = errno;
    if (error_number == EINTR && on_interrupt == OnInterrupt::kRepeat) continue;
    throw IoError(operation, error_number, path, offset, {});
  }
}

}  // namespace lohan
