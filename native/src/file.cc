#include "lohan/file.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace lohan {
namespace {

void CheckArguments(const std::vector<std::string>& paths, std::optional<int64_t> size_bytes,
                    int64_t stripe_bytes) {
  if (paths.empty()) throw std::invalid_argument("paths is empty; name at least one file");
  if (size_bytes && *size_bytes < 0) {
    throw std::invalid_argument("size_bytes is " + std::to_string(*size_bytes) + "; it must be 0 or more");
  }
  if (stripe_bytes < 1 || stripe_bytes % PageBytes() != 0) {
    throw std::invalid_argument("stripe_bytes is " + std::to_string(stripe_bytes) +
                                "; it must be a positive multiple of the page size, " +
                                std::to_string(PageBytes()));
  }
}

}  // namespace

std::shared_ptr<File> File::Open(const std::vector<std::string>& paths, std::optional<int64_t> size_bytes,
                                 int64_t stripe_bytes) {
  CheckArguments(paths, size_bytes, stripe_bytes);
  std::shared_ptr<File> file(new File());
  file->stripe_bytes_ = stripe_bytes;
  try {
    const auto missing = size_bytes ? MemberFile::Missing::kCreate : MemberFile::Missing::kReport;
    for (const std::string& path : paths) {
      file->members_.push_back(std::make_unique<MemberFile>(path, missing));
      file->CheckMembersDiffer();
    }
    if (size_bytes) file->Allocate(*size_bytes);
  } catch (...) {
    if (size_bytes) {
      for (const auto& member : file->members_) member->Undo();
    }
    throw;
  }
  if (size_bytes) {
    for (size_t i = 0; i < paths.size(); ++i) file->members_[i]->Resize(file->MemberSize(i, *size_bytes));
    file->size_bytes_ = *size_bytes;
  } else {
    file->CheckMemberSizes();
  }
  file->ChooseDirect();
  return file;
}

void File::CheckMembersDiffer() const {
  const MemberFile& last = *members_.back();
  for (const auto& member : members_) {
    if (member.get() != &last && member->identity() == last.identity()) {
      throw std::invalid_argument(member->path() + " and " + last.path() +
                                  " are one file; a striped file needs a file for each path");
    }
  }
}

int64_t File::MemberSize(size_t index, int64_t size_bytes) const {
  const auto count = static_cast<int64_t>(members_.size());
  const auto member = static_cast<int64_t>(index);
  if (count == 1) return size_bytes;
  const int64_t stripes = size_bytes / stripe_bytes_;
  const int64_t extra = stripes % count;  // members before this one have a stripe more
  const int64_t rest = member == extra ? size_bytes % stripe_bytes_ : 0;
  return (stripes / count + (member < extra ? 1 : 0)) * stripe_bytes_ + rest;
}

void File::Allocate(int64_t size_bytes) {
  for (size_t i = 0; i < members_.size(); ++i) members_[i]->Reserve(MemberSize(i, size_bytes));
}

void File::CheckMemberSizes() {
  for (const auto& member : members_) size_bytes_ += member->size_bytes();
  for (size_t i = 0; i < members_.size(); ++i) {
    const int64_t expected = MemberSize(i, size_bytes_);
    if (members_[i]->size_bytes() == expected) continue;
    throw std::invalid_argument(
        members_[i]->path() + " has " + std::to_string(members_[i]->size_bytes()) + " bytes where " +
        std::to_string(size_bytes_) + " bytes striped over " + std::to_string(members_.size()) +
        " files by stripe_bytes " + std::to_string(stripe_bytes_) + " give it " + std::to_string(expected) +
        "; name the files in the order, and with the stripe_bytes, that they were made with");
  }
}

void File::ChooseDirect() {
  for (const auto& member : members_) {
    member->ChooseDirect();
    if (!member->direct() && direct_refusal_.empty()) {
      direct_refusal_ =
          members_.size() == 1 ? member->direct_refusal() : member->path() + ": " + member->direct_refusal();
    }
    alignment_bytes_ = std::lcm(alignment_bytes_, member->direct_alignment_bytes());
    if (members_.size() > 1 && stripe_bytes_ % member->direct_alignment_bytes() != 0) {
      throw std::invalid_argument("stripe_bytes is " + std::to_string(stripe_bytes_) + "; for " +
                                  member->path() + " it must be a multiple of " +
                                  std::to_string(member->direct_alignment_bytes()));
    }
  }
}

std::vector<std::string> File::paths() const {
  std::vector<std::string> paths;
  for (const auto& member : members_) paths.push_back(member->path());
  return paths;
}

std::string File::Name() const {
  std::string name;
  for (const auto& member : members_) name += (name.empty() ? "" : ", ") + member->path();
  return name;
}

void File::Begin() {
  std::lock_guard lock(mutex_);
  if (closed_) throw std::invalid_argument(Name() + " is closed");
  ++users_;
}

void File::End() {
  std::lock_guard lock(mutex_);
  if (--users_ == 0) idle_.notify_all();
}

std::vector<Extent> File::Cut(int64_t offset, std::byte* memory, int64_t length_bytes) const {
  if (offset < 0 || length_bytes < 0 || offset > size_bytes_ || length_bytes > size_bytes_ - offset) {
    throw std::invalid_argument(std::to_string(length_bytes) + " bytes at byte " + std::to_string(offset) +
                                " are not within the " + std::to_string(size_bytes_) + " bytes of " + Name());
  }
  std::vector<Extent> extents;
  const auto count = static_cast<int64_t>(members_.size());
  if (count == 1) {
    members_[0]->Cut(offset, memory, length_bytes, extents);
    return extents;
  }
  for (int64_t done = 0; done < length_bytes;) {
    const int64_t stripe = (offset + done) / stripe_bytes_;
    const int64_t within = (offset + done) % stripe_bytes_;
    const int64_t length = std::min(stripe_bytes_ - within, length_bytes - done);
    const int64_t in_member = stripe / count * stripe_bytes_ + within;
    members_[static_cast<size_t>(stripe % count)]->Cut(in_member, memory + done, length, extents);
    done += length;
  }
  return extents;
}

void File::Sync() {
  Begin();
  std::exception_ptr first;
  for (const auto& member : members_) {
    try {
      member->Sync();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  End();
  if (first) std::rethrow_exception(first);
}

void File::Close() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  idle_.wait(lock, [this] { return users_ == 0; });
  std::exception_ptr first;
  for (const auto& member : members_) {
    try {
      member->Close();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace lohan
