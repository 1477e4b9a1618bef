// Errors of the native core. Nothing here knows Python; bindings/module.cc turns these into exceptions.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace lohan {

/// The failures of a drive that a program or its user treats differently.
enum class IoErrorKind {
  kDevice,        // EIO: the drive reported an error
  kNoSpace,       // ENOSPC: the filesystem is full
  kQuota,         // EDQUOT: the user's quota is used up
  kFileTooLarge,  // EFBIG: the filesystem, or RLIMIT_FSIZE, allows no such size
  kOther,
};

IoErrorKind KindOf(int error_number);
/// What a user can do about a failed file operation: one sentence, never empty.
const char* RemedyOf(int error_number);

/// A system call on a file failed, or a file ended early. `offset` is in bytes from the file's start.
class IoError : public std::runtime_error {
 public:
  IoError(std::string operation, int error_number, std::string path, std::optional<int64_t> offset,
          std::string detail);

  const std::string& operation() const { return operation_; }
  int error_number() const { return error_number_; }
  const std::string& path() const { return path_; }
  const std::optional<int64_t>& offset() const { return offset_; }
  IoErrorKind kind() const { return KindOf(error_number_); }
  const char* remedy() const { return RemedyOf(error_number_); }
  /// what() without the path, e.g. "write at byte 4096: No space left on device".
  std::string Summary() const;

 private:
  std::string operation_;
  int error_number_;
  std::string path_;
  std::optional<int64_t> offset_;
  std::string detail_;
};

/// A std::bad_alloc that says how much was asked for.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

/// The process in which a pool's threads live. A forked child has the pool's memory but none of its
/// threads, so whatever waits for one would wait for ever.
class OwningProcess {
 public:
  OwningProcess();
  bool IsCurrent() const;
  /// Throws std::runtime_error that names `what` when called in a forked child.
  void Check(const char* what) const;

 private:
  pid_t process_id_;
};

}  // namespace lohan
