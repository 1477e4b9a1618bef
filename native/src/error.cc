#include "lohan/error.h"

#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace lohan {
namespace {

std::string Describe(const std::string& action, int error_number, std::optional<int64_t> offset,
                     const std::string& detail) {
  std::string text = action;
  if (offset) text += " at byte " + std::to_string(*offset);
  // std::generic_category is thread-safe, strerror is not.
  text += ": " + std::generic_category().message(error_number);
  if (!detail.empty()) text += " (" + detail + ")";
  return text;
}

}  // namespace

IoErrorKind KindOf(int error_number) {
  switch (error_number) {
    case EIO:
      return IoErrorKind::kDevice;
    case ENOSPC:
      return IoErrorKind::kNoSpace;
    case EDQUOT:
      return IoErrorKind::kQuota;
    case EFBIG:
      return IoErrorKind::kFileTooLarge;
    default:
      return IoErrorKind::kOther;
  }
}

const char* RemedyOf(int error_number) {
  switch (error_number) {
    case ENOSPC:
      return "Free space on this drive, or name a state directory on another one.";
    case EDQUOT:
      return "This user's disk quota is used up: free space, raise the quota, or name a state directory on "
             "another drive.";
    case EIO:
      return "The drive reported an error and can no longer be trusted: look at `dmesg` and `smartctl -a`, "
             "and use another drive.";
    case EFBIG:
      return "The file system, or this process's limit (`ulimit -f`), allows no such file size: raise the "
             "limit or use another drive.";
    case EACCES:
    case EPERM:
      return "Give this process's user the right to read and write there, or name another folder.";
    case EROFS:
      return "The file system is mounted read-only: mount it writable, or name a folder on another drive.";
    case ENOENT:
      return "Name an existing file, or a folder that exists.";
    case ENOTDIR:
      return "A part of the path is no folder: name another path.";
    case EISDIR:
      return "The path names a folder: name a file.";
    case EMFILE:
      return "This process has too many open files: raise its limit (`ulimit -n`).";
    case ENFILE:
      return "The system has too many open files: close programs or raise `fs.file-max`.";
    case ENODATA:
      return "Something else shortened the file while it was in use: leave a run's files alone, and start "
             "the run again.";
    case ENODEV:
    case ENXIO:
      return "The drive is gone: check that it is connected and mounted.";
    case ENOMEM:
      return "Free memory on this machine.";
    default:
      return "Check the drive and its file system, or name a folder on another one.";
  }
}

IoError::IoError(std::string operation, int error_number, std::string path, std::optional<int64_t> offset,
                 std::string detail)
    : std::runtime_error(Describe(operation + " of " + path, error_number, offset, detail)),
      operation_(std::move(operation)),
      error_number_(error_number),
      path_(std::move(path)),
      offset_(offset),
      detail_(std::move(detail)) {}

std::string IoError::Summary() const { return Describe(operation_, error_number_, offset_, detail_); }

OwningProcess::OwningProcess() : process_id_(getpid()) {}

bool OwningProcess::IsCurrent() const { return getpid() == process_id_; }

void OwningProcess::Check(const char* what) const {
  if (IsCurrent()) return;
  throw std::runtime_error(std::string(what) + " was made in process " + std::to_string(process_id_) +
                           " and its threads did not survive the fork into process " +
                           std::to_string(getpid()) + ": make a new one in the child");
}

}  // namespace lohan
