#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "direct_alignment.h"
#include "lohan/file.h"
#include "rounding.h"
#include "system.h"

namespace lohan {
namespace {

Descriptor OpenDescriptor(const std::string& path, int flags) {
  return Descriptor(CheckedCall("open", path, std::nullopt,
                                [&] { return open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0600); }));
}

}  // namespace

const char* NameOf(Access access) { return access == Access::kRead ? "read" : "write"; }

MemberFile::MemberFile(std::string path, Missing missing) : path_(std::move(path)) {
  bool created = false;
  try {
    buffered_ = OpenDescriptor(path_, 0);
  } catch (const IoError& error) {
    if (error.error_number() != ENOENT || missing == Missing::kReport) throw;
    buffered_ = OpenDescriptor(path_, O_CREAT | O_EXCL);
    created = true;
  }
  struct stat status{};
  CheckedCall("stat", path_, std::nullopt, [&] { return fstat(buffered_.value(), &status); });
  if (!S_ISREG(status.st_mode)) throw std::invalid_argument(path_ + " is not a regular file");
  identity_ = {status.st_dev, status.st_ino};
  size_bytes_ = status.st_size;
  if (!created) size_before_bytes_ = status.st_size;
  const size_t slash = path_.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path_.substr(0, slash);
  CheckedCall("stat", folder, std::nullopt, [&] { return stat(folder.c_str(), &status); });
  directory_ = {status.st_dev, status.st_ino};
}

void MemberFile::Reserve(int64_t size_bytes) {
  // fallocate(2), not posix_fallocate(3): where the filesystem cannot allocate, glibc's version writes a byte
  // into every block, which takes as long as filling the file.
  try {
    CheckedCall("allocate", path_, std::nullopt, [&] {
      return size_bytes == 0 ? 0 : fallocate(buffered_.value(), 0, 0, static_cast<off_t>(size_bytes));
    });
  } catch (const IoError& error) {
    if (error.error_number() != EOPNOTSUPP && error.error_number() != ENOSYS) throw;
  }
}

void MemberFile::Resize(int64_t size_bytes) {
  CheckedCall("resize", path_, std::nullopt,
              [&] { return ftruncate(buffered_.value(), static_cast<off_t>(size_bytes)); });
  size_bytes_ = size_bytes;
}

void MemberFile::Undo() noexcept {
  // A filesystem may have lengthened the file before it ran out of space.
  const int undone =
      size_before_bytes_ ? ftruncate(buffered_.value(), *size_before_bytes_) : unlink(path_.c_str());
  static_cast<void>(undone);  // the error that led here is the one to report
}

void MemberFile::ChooseDirect() {
  struct statfs filesystem{};
  CheckedCall("statfs", path_, std::nullopt, [&] { return fstatfs(buffered_.value(), &filesystem); });
  if (filesystem.f_type == TMPFS_MAGIC || filesystem.f_type == RAMFS_MAGIC) {
    direct_refusal_ = "the file lies on a filesystem in memory (tmpfs), where O_DIRECT has no meaning";
    MapWhole();
    return;
  }
  if (const std::optional<DirectAlignment> alignment = AskDirectAlignment(buffered_.value())) {
    if (alignment->offset_bytes == 0) {
      direct_refusal_ = "the filesystem reports that this file takes no direct I/O";
      return;
    }
    direct_alignment_bytes_ = RoundUp(PageBytes(), alignment->offset_bytes);
    memory_alignment_bytes_ = std::max<int64_t>(1, alignment->memory_bytes);
  }
  try {
    direct_ = OpenDescriptor(path_, O_DIRECT);
    // Some filesystems accept the flag and refuse the transfer; a read past the end or of one block shows it.
    AlignedBuffer block(direct_alignment_bytes_);
    CheckedCall("read", path_, 0, [&] {
      return pread(direct_.value(), block.data(), static_cast<size_t>(direct_alignment_bytes_), 0);
    });
  } catch (const IoError& error) {
    direct_ = Descriptor();
    if (error.error_number() != EINVAL && error.error_number() != EOPNOTSUPP) throw;
    direct_refusal_ = "the filesystem refuses O_DIRECT (" + error.Summary() + ")";
    return;
  }
  // Only partial pages pass the page cache from here on; reading ahead of them would fill it with neighbours.
  posix_fadvise(buffered_.value(), 0, 0, POSIX_FADV_RANDOM);
}

// A write to a file in memory holds the lock of its inode until all is copied, so that one thread at a time
// writes to it, at one processor's speed; copies to a mapping go side by side. Not where pages are missing,
// which may not be had later.
void MemberFile::MapWhole() {
  struct stat status{};
  CheckedCall("stat", path_, std::nullopt, [&] { return fstat(buffered_.value(), &status); });
  constexpr int64_t kBlockBytes = 512;  // of st_blocks, whatever the filesystem's own
  if (status.st_blocks * kBlockBytes >= size_bytes_) mapping_ = FileMapping(buffered_.value(), size_bytes_);
}

int MemberFile::descriptor(Route route) const {
  return route == Route::kBuffered ? buffered_.value() : direct_.value();
}

void MemberFile::Cut(int64_t offset, std::byte* memory, int64_t length_bytes,
                     std::vector<Extent>& extents) const {
  const int64_t end = offset + length_bytes;
  const auto append = [&](int64_t from, int64_t to, Route route) {
    const int64_t longest = mapped(from) != nullptr          ? kCopyBytes
                            : route == Route::kDirectBounced ? kBounceBytes
                                                             : kExtentBytes;
    for (int64_t at = from; at < to; at += longest) {
      extents.push_back({this, at, memory + (at - offset), std::min(longest, to - at), route});
    }
  };
  const int64_t middle_begin = RoundUp(offset, direct_alignment_bytes_);
  const int64_t middle_end = RoundDown(end, direct_alignment_bytes_);
  if (!direct() || middle_begin >= middle_end) return append(offset, end, Route::kBuffered);
  const auto address = reinterpret_cast<uintptr_t>(memory + (middle_begin - offset));
  const bool aligned = address % static_cast<uintptr_t>(memory_alignment_bytes_) == 0;
  append(offset, middle_begin, Route::kBuffered);
  append(middle_begin, middle_end, aligned ? Route::kDirect : Route::kDirectBounced);
  append(middle_end, end, Route::kBuffered);
}

void MemberFile::Sync() {
  CheckedCall("sync", path_, std::nullopt, [&] { return fdatasync(buffered_.value()); });
}

void MemberFile::Close() {
  mapping_ = FileMapping();
  direct_ = Descriptor();
  buffered_.Close(path_);
}

}  // namespace lohan
