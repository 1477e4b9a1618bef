// What the kernel says about direct I/O on an open file.
#pragma once

#include <cstdint>
#include <optional>

namespace lohan {

/// Both are 0 when the file takes no direct I/O.
struct DirectAlignment {
  int64_t memory_bytes;
  int64_t offset_bytes;
};

/// statx(STATX_DIOALIGN), Linux 6.1; nullopt where kernel or filesystem do not tell.
std::optional<DirectAlignment> AskDirectAlignment(int descriptor);

}  // namespace lohan
