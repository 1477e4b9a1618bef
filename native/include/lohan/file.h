// Files of fixed size, and the cutting of a request into the extents that engines carry out.
#pragma once

#include <sys/types.h>

#include <compare>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lohan/aligned_buffer.h"
#include "lohan/descriptor.h"
#include "lohan/error.h"
#include "lohan/file_mapping.h"

namespace lohan {

enum class Access { kRead, kWrite };
const char* NameOf(Access access);

/// How an extent reaches the drive.
enum class Route {
  kBuffered,       // through the page cache: partial pages, and files without direct I/O
  kDirect,         // O_DIRECT from and to the caller's memory
  kDirectBounced,  // O_DIRECT through an aligned buffer of the engine's, for memory that O_DIRECT cannot take
};

/// One system call's worth in the common case: large enough for a drive's full speed, small enough that an
/// urgent request never waits long for a piece under way.
constexpr int64_t kExtentBytes = int64_t{4} << 20;
/// The longest bounced extent, and the size of an engine's bounce buffers.
constexpr int64_t kBounceBytes = int64_t{1} << 20;
/// The longest extent of a mapped file: a copy is one thread's, and all of a small transfer's are to share
/// it.
constexpr int64_t kCopyBytes = int64_t{1} << 20;

class MemberFile;

/// A contiguous range of one file that is moved to or from contiguous memory by one route.
struct Extent {
  const MemberFile* file;
  int64_t offset;  // in `file`
  std::byte* memory;
  int64_t length_bytes;  // at most kExtentBytes; kBounceBytes when bounced, kCopyBytes when mapped
  Route route;
};

/// The directory a file lies in. Engines keep one queue for each, so that a slow drive delays no other.
struct DirectoryId {
  dev_t device;
  ino_t inode;
  auto operator<=>(const DirectoryId&) const = default;
};

/// One file on disk with two descriptors, one with and one without O_DIRECT.
///
/// Whole pages of a request go through the O_DIRECT descriptor, the partial pages at its two ends through
/// the buffered one. Which of the two a page takes depends on the file range alone, never on the memory, so
/// requests that do not overlap never reach one page through both descriptors, and the kernel never has a
/// dirty cached page under a direct transfer of somebody else. Requests that follow one another may: the
/// kernel writes a dirty page back before a direct transfer touches it.
class MemberFile {
 public:
  enum class Missing { kCreate, kReport };

  /// Opens a regular file, or creates it (mode 0600). Its size is as it was until Reserve and Resize.
  MemberFile(std::string path, Missing missing);
  MemberFile(const MemberFile&) = delete;
  MemberFile& operator=(const MemberFile&) = delete;

  /// Allocates the space of a file of `size_bytes`; never shortens the file.
  void Reserve(int64_t size_bytes);
  void Resize(int64_t size_bytes);
  /// Takes back the constructor and Reserve: the file is gone if it was new, else of its old size.
  void Undo() noexcept;
  /// Finds out whether the file takes direct I/O, and with which alignment, or is memory that can be mapped;
  /// to be called once it has its size.
  void ChooseDirect();

  const std::string& path() const { return path_; }
  int64_t size_bytes() const { return size_bytes_; }
  DirectoryId directory() const { return directory_; }
  /// Device and inode of the file itself.
  DirectoryId identity() const { return identity_; }
  bool direct() const { return direct_refusal_.empty(); }
  const std::string& direct_refusal() const { return direct_refusal_; }
  /// Where `offset` is mapped; null but for whole files on a filesystem that keeps them in memory.
  std::byte* mapped(int64_t offset) const {
    return mapping_.data() == nullptr ? nullptr : mapping_.data() + offset;
  }
  /// Offsets and lengths of direct extents are multiples of this, and no less than a page.
  int64_t direct_alignment_bytes() const { return direct_alignment_bytes_; }

  int descriptor(Route route) const;
  /// What a call's offset and length must be multiples of on this route.
  int64_t granule_bytes(Route route) const { return route == Route::kBuffered ? 1 : direct_alignment_bytes_; }
  /// Appends the extents of [offset, offset + length), in order.
  void Cut(int64_t offset, std::byte* memory, int64_t length_bytes, std::vector<Extent>& extents) const;

  void Sync();
  void Close();

 private:
  void MapWhole();

  std::string path_;
  int64_t size_bytes_ = 0;
  std::optional<int64_t> size_before_bytes_;  // absent when the constructor created the file
  DirectoryId directory_{};
  DirectoryId identity_{};
  Descriptor buffered_;
  Descriptor direct_;
  std::string direct_refusal_;
  FileMapping mapping_;
  int64_t direct_alignment_bytes_ = PageBytes();
  int64_t memory_alignment_bytes_ = PageBytes();
};

/// A file of fixed size that lies in one file on disk, or is striped over several: stripe k of
/// `stripe_bytes` is stripe k / n of member k % n, so that a large transfer uses all drives at once.
///
/// Thread-safe. Begin and Sync throw std::invalid_argument once closed, Sync IoError.
class File {
 public:
  static constexpr int64_t kStripeBytes = kExtentBytes;

  /// Opens for reading and writing. With `size_bytes` the members are created (mode 0600) if missing, and
  /// their space is allocated; what they held within their new size stays. When one does not fit, all are as
  /// they were. Without `size_bytes` they must exist, with the sizes that such striping gives them.
  static std::shared_ptr<File> Open(const std::vector<std::string>& paths, std::optional<int64_t> size_bytes,
                                    int64_t stripe_bytes = kStripeBytes);
  static std::shared_ptr<File> Open(const std::string& path, std::optional<int64_t> size_bytes) {
    return Open(std::vector<std::string>{path}, size_bytes);
  }

  std::vector<std::string> paths() const;
  /// The path, or all of them, for messages.
  std::string Name() const;
  int64_t size_bytes() const { return size_bytes_; }
  /// Whether whole pages of every member bypass the page cache.
  bool direct() const { return direct_refusal_.empty(); }
  /// Why a member is read and written through the page cache; empty when none is.
  const std::string& direct_refusal() const { return direct_refusal_; }
  /// Ranges that begin and end on multiples of this go direct as a whole; 1 without direct I/O.
  int64_t alignment_bytes() const { return direct() ? alignment_bytes_ : 1; }

  /// Counts a user in; every Begin that returns needs an End. Close waits for the count to reach zero.
  void Begin();
  void End();

  /// The extents of [offset, offset + length), in order. Throws std::invalid_argument unless the range lies
  /// within the file. They may be used between Begin and End.
  std::vector<Extent> Cut(int64_t offset, std::byte* memory, int64_t length_bytes) const;

  /// Makes what was written to all members durable (fdatasync), including the drives' own caches; tries all
  /// of them and throws the first error.
  void Sync();
  /// Waits for those between Begin and End, then closes. Closing twice is harmless.
  void Close();

 private:
  File() = default;
  int64_t MemberSize(size_t index, int64_t size_bytes) const;
  void Allocate(int64_t size_bytes);
  void CheckMemberSizes();
  void CheckMembersDiffer() const;
  void ChooseDirect();

  std::vector<std::unique_ptr<MemberFile>> members_;
  int64_t stripe_bytes_ = kStripeBytes;
  int64_t size_bytes_ = 0;
  int64_t alignment_bytes_ = 1;
  std::string direct_refusal_;

  std::mutex mutex_;
  std::condition_variable idle_;
  int64_t users_ = 0;
  bool closed_ = false;
};

}  // namespace lohan
