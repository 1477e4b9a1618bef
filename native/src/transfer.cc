#include <stdexcept>
#include <utility>

#include "lohan/io.h"

namespace lohan {
namespace {

int64_t NowNanoseconds() noexcept {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Transfer::Transfer(std::shared_ptr<File> file, Access access, int64_t offset, std::byte* memory,
                   int64_t length_bytes)
    : file_(std::move(file)),
      access_(access),
      extents_(file_->Cut(offset, memory, length_bytes)),
      remaining_extents_(extents_.size()) {
  file_->Begin();
  if (Done()) LeaveFile();
}

Transfer::~Transfer() {
  if (file_) LeaveFile();  // it was never carried out: the engine refused it
}

void Transfer::LeaveFile() noexcept {
  file_->End();
  file_.reset();
}

void Transfer::WaitQuietly() const noexcept {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return Done(); });
}

void Transfer::Wait() const {
  WaitQuietly();
  if (error_) throw IoError(*error_);
}

void Transfer::OnDone(std::function<void()> callback) {
  {
    std::lock_guard lock(mutex_);
    if (!Done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

std::optional<Transfer::Times> Transfer::times() const {
  if (!Done() || began_nanoseconds_ == 0) return std::nullopt;
  return Times{std::chrono::nanoseconds(began_nanoseconds_), std::chrono::nanoseconds(ended_nanoseconds_)};
}

void Transfer::NoteCall() noexcept {
  if (began_nanoseconds_ != 0) return;
  int64_t none = 0;
  began_nanoseconds_.compare_exchange_strong(none, NowNanoseconds());
}

void Transfer::CompleteExtent(size_t index, std::optional<IoError> error) noexcept {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(mutex_);
    if (error && (!error_ || index < failed_extent_)) {
      error_ = std::move(error);
      failed_extent_ = index;
    }
    if (remaining_extents_ == 1) {
      // Before anybody can see the end: whoever waited for it may count on the worker using the file no more.
      LeaveFile();
      callbacks.swap(callbacks_);
      ended_nanoseconds_ = NowNanoseconds();
    }
    if (--remaining_extents_ == 0) done_.notify_all();
  }
  for (const auto& callback : callbacks) callback();
}

RegisteredMemory::RegisteredMemory(std::shared_ptr<IoEngine> engine, std::byte* memory, int64_t size_bytes)
    : engine_(std::move(engine)), registration_(engine_->RegisterMemory(memory, size_bytes)) {}

RegisteredMemory::~RegisteredMemory() {
  if (engine_->owner().IsCurrent()) engine_->UnregisterMemory(registration_);
}

}  // namespace lohan
