#include "registered_buffers.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <system_error>

namespace lohan {
namespace {

// By their binary layout and number: headers older than Linux 5.19 lack some of them.
struct TableArgument {
  uint32_t slots;
  uint32_t flags;
  uint64_t reserved;
  uint64_t buffers;
  uint64_t tags;
};
struct UpdateArgument {
  uint32_t first;
  uint32_t reserved;
  uint64_t buffers;
  uint64_t tags;
  uint32_t count;
  uint32_t reserved2;
};
constexpr uint32_t kRegisterTable = 15;
constexpr uint32_t kRegisterUpdate = 16;
constexpr uint32_t kTableIsEmpty = 1;  // Linux 5.19

constexpr uint32_t kSlots = 1024;
constexpr int64_t kSlotBytes = int64_t{1} << 30;

std::string Describe(const char* what, int error_number) {
  std::string text = std::string(what) + ": " + std::generic_category().message(error_number);
  if (error_number == ENOMEM)
    text += " (the limit on locked memory, `ulimit -l`, is lower than what is to be pinned)";
  if (error_number == EINVAL) text += " (Linux before 5.19 has no such table)";
  return text;
}

}  // namespace

std::string RegisteredBuffers::MakeTable() {
  if (has_table_) return "";
  const TableArgument argument{kSlots, kTableIsEmpty, 0, 0, 0};
  const int result = ring_.Register(kRegisterTable, &argument, sizeof(argument));
  if (result < 0) return Describe("making the table of pinned memory", -result);
  has_table_ = true;
  for (uint32_t i = kSlots; i > 0; --i) free_.push_back(i - 1);
  return "";
}

int RegisteredBuffers::Update(uint32_t index, std::byte* memory, int64_t length_bytes) {
  const iovec buffer{memory, static_cast<size_t>(length_bytes)};
  const uint64_t tag = 0;
  const UpdateArgument argument{
      index, 0, reinterpret_cast<uintptr_t>(&buffer), reinterpret_cast<uintptr_t>(&tag), 1, 0};
  return ring_.Register(kRegisterUpdate, &argument, sizeof(argument));
}

IoEngine::Registration RegisteredBuffers::Add(std::byte* memory, int64_t size_bytes) {
  IoEngine::Registration registration;
  registration.refusal = MakeTable();
  if (!registration.refusal.empty()) return registration;
  for (int64_t done = 0; done < size_bytes; done += kSlotBytes) {
    const int64_t length = std::min(kSlotBytes, size_bytes - done);
    int result = -ENOSPC;
    if (!free_.empty()) result = Update(free_.back(), memory + done, length);
    if (result < 0) {
      const std::string refusal =
          result == -ENOSPC ? "all slots for pinned memory are in use" : Describe("pinning memory", -result);
      Remove(registration);
      return {{}, refusal};
    }
    const uint32_t index = free_.back();
    free_.pop_back();
    const auto begin = reinterpret_cast<uintptr_t>(memory + done);
    slots_[begin] = {begin, length, index};
    registration.slots.push_back(index);
  }
  return registration;
}

void RegisteredBuffers::Remove(const IoEngine::Registration& registration) {
  for (const uint32_t index : registration.slots) {
    std::erase_if(slots_, [&](const auto& entry) { return entry.second.index == index; });
    // An emptied slot can only fail to be emptied when its number is wrong.
    static_cast<void>(Update(index, nullptr, 0));
    free_.push_back(index);
  }
}

std::optional<uint16_t> RegisteredBuffers::Find(const std::byte* memory, int64_t length_bytes) const {
  if (slots_.empty()) return std::nullopt;
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  auto next = slots_.upper_bound(begin);
  if (next == slots_.begin()) return std::nullopt;
  const Slot& slot = std::prev(next)->second;
  const uintptr_t end = slot.begin + static_cast<uintptr_t>(slot.length_bytes);
  if (begin + static_cast<uintptr_t>(length_bytes) > end) return std::nullopt;
  return static_cast<uint16_t>(slot.index);
}

}  // namespace lohan
