// Memory that an io_uring has pinned once and for all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "lohan/io.h"
#include "uring.h"

namespace lohan {

/// The ring's table of pinned memory. For the ring's thread.
class RegisteredBuffers {
 public:
  explicit RegisteredBuffers(Ring& ring) : ring_(ring) {}

  /// Pins `memory` in slots of up to 1 GiB, the kernel's longest; all of it or, with the refusal, nothing.
  IoEngine::Registration Add(std::byte* memory, int64_t size_bytes);
  void Remove(const IoEngine::Registration& registration);
  /// The slot that holds the whole range.
  std::optional<uint16_t> Find(const std::byte* memory, int64_t length_bytes) const;

 private:
  struct Slot {
    uintptr_t begin;
    int64_t length_bytes;
    uint32_t index;
  };

  std::string MakeTable();
  int Update(uint32_t index, std::byte* memory, int64_t length_bytes);

  Ring& ring_;
  bool has_table_ = false;
  std::vector<uint32_t> free_;
  std::map<uintptr_t, Slot> slots_;  // by begin; ranges registered twice have one entry, the later
};

}  // namespace lohan
