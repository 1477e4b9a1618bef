#include "lohan/file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "system.h"

namespace lohan {
namespace {

/// System calls transfer at most 0x7ffff000 bytes; engines ask for far less at a time.
constexpr int64_t kCallBytes = int64_t{1} << 30;
/// A direct transfer that stops inside a logical block gets no further by itself; give up after this many.
constexpr int kStalledCalls = 8;

int64_t RoundDown(int64_t value, int64_t multiple) { return value / multiple * multiple; }
int64_t RoundUp(int64_t value, int64_t multiple) { return RoundDown(value + multiple - 1, multiple); }

constexpr const char* NameOf(Access access) { return access == Access::kRead ? "read" : "write"; }

IoError EndsEarly(const std::string& path, int64_t offset) {
  return {"read", ENODATA, path, offset, "the file ends early: it was truncated after it was opened"};
}

/// Transfers all `length` bytes with repeated calls. Direct transfers go on from the last multiple of
/// `granule` that was reached, so that offset, memory and length stay aligned after a short call.
void TransferAll(Access access, int descriptor, const std::string& path, int64_t offset, std::byte* memory,
                 int64_t length, int64_t granule) {
  int64_t done = 0;
  int stalled = 0;
  while (done < length) {
    const int64_t wanted = std::min(length - done, kCallBytes);
    const ssize_t moved = CheckedCall(NameOf(access), path, offset + done, [&] {
      const auto size = static_cast<size_t>(wanted);
      return access == Access::kRead ? pread(descriptor, memory + done, size, offset + done)
                                     : pwrite(descriptor, memory + done, size, offset + done);
    });
    if (moved == 0 && access == Access::kRead) {
      throw EndsEarly(path, offset + done);
    }
    const int64_t reached = done + moved;
    const int64_t kept = reached == length ? reached : RoundDown(reached, granule);
    if (kept > done) {
      stalled = 0;
    } else if (++stalled == kStalledCalls) {
      // A read that ends inside a block again and again has met the end of the file.
      if (access == Access::kRead) throw EndsEarly(path, offset + done);
      throw IoError("write", EIO, path, offset + done, "the system writes less than one block at a time");
    }
    done = kept;
  }
}

void Allocate(int descriptor, const std::string& path, int64_t size_bytes) {
  // fallocate(2), not posix_fallocate(3): where the filesystem cannot allocate, glibc's version writes a byte
  // into every block, which takes as long as filling the file.
  try {
    CheckedCall("allocate", path, std::nullopt, [&] {
      return size_bytes == 0 ? 0 : fallocate(descriptor, 0, 0, static_cast<off_t>(size_bytes));
    });
  } catch (const IoError& error) {
    if (error.error_number() != EOPNOTSUPP && error.error_number() != ENOSYS) throw;
  }
  CheckedCall("resize", path, std::nullopt,
              [&] { return ftruncate(descriptor, static_cast<off_t>(size_bytes)); });
}

Descriptor OpenDescriptor(const std::string& path, int flags) {
  return Descriptor(CheckedCall("open", path, std::nullopt,
                                [&] { return open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0600); }));
}

/// Opens an existing file or creates one, and allocates it. One that does not fit is as it was before: gone
/// if it was new, else of its old size (a filesystem may have lengthened it before it ran out of space).
Descriptor OpenAllocated(const std::string& path, int64_t size_bytes) {
  bool created = false;
  Descriptor descriptor;
  try {
    descriptor = OpenDescriptor(path, 0);
  } catch (const IoError& error) {
    if (error.error_number() != ENOENT) throw;
    descriptor = OpenDescriptor(path, O_CREAT | O_EXCL);
    created = true;
  }
  struct stat before{};
  CheckedCall("stat", path, std::nullopt, [&] { return fstat(descriptor.value(), &before); });
  if (!S_ISREG(before.st_mode)) throw std::invalid_argument(path + " is not a regular file");
  try {
    Allocate(descriptor.value(), path, size_bytes);
  } catch (...) {
    const int undone = created ? unlink(path.c_str()) : ftruncate(descriptor.value(), before.st_size);
    static_cast<void>(undone);  // the first error is the one to report
    throw;
  }
  return descriptor;
}

}  // namespace

Descriptor::Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(value_, other.value_);
  return *this;
}

Descriptor::~Descriptor() {
  if (is_open()) close(value_);
}

void Descriptor::Close(const std::string& path) {
  if (!is_open()) return;
  const int value = std::exchange(value_, -1);
  // Linux frees the descriptor even when close is interrupted; a repetition could close somebody else's.
  CheckedCall("close", path, std::nullopt, [&] { return close(value); }, OnInterrupt::kReport);
}

std::byte* BounceBuffer::data() {
  if (!buffer_) buffer_ = std::make_unique<AlignedBuffer>(kSizeBytes);
  return buffer_->data();
}

std::shared_ptr<File> File::Open(const std::string& path, std::optional<int64_t> size_bytes) {
  if (size_bytes && *size_bytes < 0) {
    throw std::invalid_argument("size_bytes is " + std::to_string(*size_bytes) + "; it must be 0 or more");
  }
  std::shared_ptr<File> file(new File(path));
  file->buffered_ = size_bytes ? OpenAllocated(path, *size_bytes) : OpenDescriptor(path, 0);
  struct stat status{};
  CheckedCall("stat", path, std::nullopt, [&] { return fstat(file->buffered_.value(), &status); });
  if (!S_ISREG(status.st_mode)) throw std::invalid_argument(path + " is not a regular file");
  file->size_bytes_ = status.st_size;
  file->ChooseDirect();
  return file;
}

void File::ChooseDirect() {
  struct statfs filesystem{};
  CheckedCall("statfs", path_, std::nullopt, [&] { return fstatfs(buffered_.value(), &filesystem); });
  if (filesystem.f_type == TMPFS_MAGIC || filesystem.f_type == RAMFS_MAGIC) {
    direct_refusal_ = "the file lies on a filesystem in memory (tmpfs), where O_DIRECT has no meaning";
    return;
  }
#ifdef STATX_DIOALIGN
  struct statx status{};
  if (statx(buffered_.value(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    if (status.stx_dio_offset_align == 0) {
      direct_refusal_ = "the filesystem reports that this file takes no direct I/O";
      return;
    }
    direct_alignment_bytes_ = RoundUp(PageBytes(), status.stx_dio_offset_align);
    memory_alignment_bytes_ = std::max<int64_t>(1, status.stx_dio_mem_align);
  }
#endif
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

void File::Begin() {
  std::lock_guard lock(mutex_);
  if (closed_) throw std::invalid_argument(path_ + " is closed");
  ++users_;
}

void File::End() {
  std::lock_guard lock(mutex_);
  if (--users_ == 0) idle_.notify_all();
}

void File::CheckRange(int64_t offset, int64_t length) const {
  if (offset >= 0 && length >= 0 && offset <= size_bytes_ && length <= size_bytes_ - offset) return;
  throw std::invalid_argument(std::to_string(length) + " bytes at byte " + std::to_string(offset) +
                              " are not within the " + std::to_string(size_bytes_) + " bytes of " + path_);
}

void File::Move(Access access, int64_t offset, std::byte* memory, int64_t length_bytes,
                BounceBuffer& bounce) const {
  const int64_t end = offset + length_bytes;
  const int64_t middle_begin = direct() ? RoundUp(offset, direct_alignment_bytes_) : end;
  const int64_t middle_end = direct() ? RoundDown(end, direct_alignment_bytes_) : end;
  const auto buffered = [&](int64_t begin, int64_t stop) {
    TransferAll(access, buffered_.value(), path_, begin, memory + (begin - offset), stop - begin, 1);
  };
  if (middle_begin >= middle_end) return buffered(offset, end);
  buffered(offset, middle_begin);
  MoveDirect(access, middle_begin, memory + (middle_begin - offset), middle_end - middle_begin, bounce);
  buffered(middle_end, end);
}

void File::MoveDirect(Access access, int64_t offset, std::byte* memory, int64_t length_bytes,
                      BounceBuffer& bounce) const {
  const auto direct = [&](int64_t at, std::byte* where, int64_t length) {
    TransferAll(access, direct_.value(), path_, at, where, length, direct_alignment_bytes_);
  };
  if (reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(memory_alignment_bytes_) == 0) {
    return direct(offset, memory, length_bytes);
  }
  for (int64_t done = 0; done < length_bytes; done += BounceBuffer::kSizeBytes) {
    const int64_t length = std::min(BounceBuffer::kSizeBytes, length_bytes - done);
    if (access == Access::kWrite) std::memcpy(bounce.data(), memory + done, static_cast<size_t>(length));
    direct(offset + done, bounce.data(), length);
    if (access == Access::kRead) std::memcpy(memory + done, bounce.data(), static_cast<size_t>(length));
  }
}

void File::Sync() {
  Begin();
  try {
    CheckedCall("sync", path_, std::nullopt, [&] { return fdatasync(buffered_.value()); });
  } catch (...) {
    End();
    throw;
  }
  End();
}

void File::Close() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  idle_.wait(lock, [this] { return users_ == 0; });
  direct_ = Descriptor();
  buffered_.Close(path_);
}

}  // namespace lohan
