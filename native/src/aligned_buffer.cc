#include "lohan/aligned_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <limits>
#include <stdexcept>
#include <string>

#include "lohan/error.h"
#include "memory_policy.h"
#include "system.h"

namespace lohan {
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::byte* Map(int64_t size_bytes) {
  try {
    return static_cast<std::byte*>(CheckedCall("mmap", "anonymous memory", std::nullopt, [&] {
      return mmap(nullptr, static_cast<size_t>(size_bytes), PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }));
  } catch (const IoError& error) {
    throw OutOfMemory("cannot map " + std::to_string(size_bytes) + " bytes of memory: " + error.what());
  }
}

void Unmap(std::byte* address, int64_t size_bytes) {
  if (size_bytes > 0) munmap(address, static_cast<size_t>(size_bytes));
}

}  // namespace

int64_t PageBytes() {
  static const int64_t size_bytes = sysconf(_SC_PAGESIZE);
  return size_bytes;
}

AlignedBuffer::AlignedBuffer(int64_t size_bytes) : size_bytes_(size_bytes) {
  if (size_bytes < 1 || size_bytes > std::numeric_limits<int64_t>::max() - 2 * kHugePageBytes) {
    throw std::invalid_argument("size_bytes is " + std::to_string(size_bytes) +
                                "; it must be at least 1 and fit");
  }
  mapped_bytes_ = RoundUp(size_bytes, PageBytes());
  if (mapped_bytes_ < kHugePageBytes) {
    data_ = Map(mapped_bytes_);
  } else {
    // Map one huge page more than needed and give back both ends: kernels before 6.7 do not align by
    // themselves, and an unaligned mapping loses its first and last huge page.
    std::byte* raw = Map(mapped_bytes_ + kHugePageBytes);
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(raw));
    const int64_t head = RoundUp(address, kHugePageBytes) - address;
    data_ = raw + head;
    Unmap(raw, head);
    Unmap(data_ + mapped_bytes_, kHugePageBytes - head);
    // Advice only: a kernel without transparent huge pages refuses, and the memory works all the same.
    madvise(data_, static_cast<size_t>(mapped_bytes_), MADV_HUGEPAGE);
    SpreadOverNodes(data_, mapped_bytes_);
  }
  madvise(data_, static_cast<size_t>(mapped_bytes_), MADV_WIPEONFORK);
}

AlignedBuffer::~AlignedBuffer() { Unmap(data_, mapped_bytes_); }

}  // namespace lohan
