#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "lohan/aligned_buffer.h"
#include "lohan/error.h"

namespace lohan {

/// Owns one file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();

  int value() const { return value_; }
  bool is_open() const { return value_ >= 0; }
  /// Closes and reports what close(2) says; the descriptor is gone either way.
  void Close(const std::string& path);

 private:
  int value_ = -1;
};

/// A worker's own aligned scratch, mapped on first use, for memory that O_DIRECT cannot take.
class BounceBuffer {
 public:
  static constexpr int64_t kSizeBytes = 1 << 20;
  std::byte* data();

 private:
  std::unique_ptr<AlignedBuffer> buffer_;
};

enum class Access { kRead, kWrite };

/// A file of fixed size with two descriptors, one with and one without O_DIRECT.
///
/// Whole pages of a request go through the O_DIRECT descriptor, the partial pages at its two ends through
/// the buffered one. Which of the two a page takes depends on the file range alone, never on the memory, so
/// requests that do not overlap never reach one page through both descriptors, and the kernel never has a
/// dirty cached page under a direct transfer of somebody else. Requests that follow one another may: the
/// kernel writes a dirty page back before a direct transfer touches it.
///
/// Thread-safe. Begin and Sync throw std::invalid_argument once closed, Move and Sync IoError.
class File {
 public:
  /// Opens for reading and writing. With `size_bytes` the file is created (mode 0600) if missing, and its
  /// space is allocated; what it held within that size stays. Without, it must exist.
  static std::shared_ptr<File> Open(const std::string& path, std::optional<int64_t> size_bytes);

  const std::string& path() const { return path_; }
  int64_t size_bytes() const { return size_bytes_; }
  bool direct() const { return direct_refusal_.empty(); }
  /// Why the file is read and written through the page cache; empty when it is not.
  const std::string& direct_refusal() const { return direct_refusal_; }
  /// Ranges that begin and end on multiples of this go direct as a whole; 1 without direct I/O.
  int64_t alignment_bytes() const { return direct() ? direct_alignment_bytes_ : 1; }

  /// Counts a user in; every Begin that returns needs an End. Close waits for the count to reach zero.
  void Begin();
  void End();

  /// Throws std::invalid_argument unless [offset, offset + length) lies within the file.
  void CheckRange(int64_t offset, int64_t length) const;
  /// Reads into or writes from all `length_bytes` of `memory`; to be called between Begin and End.
  void Move(Access access, int64_t offset, std::byte* memory, int64_t length_bytes,
            BounceBuffer& bounce) const;

  /// Makes what was written durable (fdatasync), including the drive's own cache.
  void Sync();
  /// Waits for those between Begin and End, then closes. Closing twice is harmless.
  void Close();

 private:
  explicit File(std::string path) : path_(std::move(path)) {}
  void ChooseDirect();
  void MoveDirect(Access access, int64_t offset, std::byte* memory, int64_t length_bytes,
                  BounceBuffer& bounce) const;

  std::string path_;
  int64_t size_bytes_ = 0;
  Descriptor buffered_;
  Descriptor direct_;
  std::string direct_refusal_;
  int64_t direct_alignment_bytes_ = PageBytes();
  int64_t memory_alignment_bytes_ = PageBytes();

  std::mutex mutex_;
  std::condition_variable idle_;
  int64_t users_ = 0;
  bool closed_ = false;
};

}  // namespace lohan
