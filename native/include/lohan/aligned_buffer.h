#pragma once

#include <cstddef>
#include <cstdint>

namespace lohan {

/// The system's page size: the grain of mappings and of the page cache.
int64_t PageBytes();

/// Anonymous private memory of exactly the size asked for, rounded up to a page: zero-filled, page aligned,
/// huge-page aligned, advised and (on a machine with several NUMA nodes) spread over the nodes from 2 MiB on.
/// A forked child sees zeros in it (MADV_WIPEONFORK): no page
/// is ever shared copy-on-write, so a direct read in flight during a fork cannot land in the child's copy.
class AlignedBuffer {
 public:
  /// Throws std::invalid_argument for a size below 1, OutOfMemory when the system refuses the mapping.
  explicit AlignedBuffer(int64_t size_bytes);
  ~AlignedBuffer();
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  int64_t size_bytes_;
  int64_t mapped_bytes_;
  std::byte* data_;
};

}  // namespace lohan
