#include "lohan/error.h"

#include <unistd.h>

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
