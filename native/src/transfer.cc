#include <stdexcept>
#include <utility>

#include "lohan/io.h"

namespace lohan {

Transfer::Transfer(std::shared_ptr<File> file, Access access, int64_t offset, std::byte* memory,
                   int64_t length_bytes)
    : file_(std::move(file)),
      access_(access),
      offset_(offset),
      memory_(memory),
      length_bytes_(length_bytes),
      remaining_bytes_(length_bytes) {
  file_->CheckRange(offset, length_bytes);
  file_->Begin();
  if (Done()) file_->End();
}

Transfer::~Transfer() {
  if (!Done()) file_->End();  // it was never carried out: the engine refused it
}

bool Transfer::Done() const { return remaining_bytes_ == 0; }

void Transfer::WaitQuietly() const noexcept {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return Done(); });
}

void Transfer::Wait() const {
  WaitQuietly();
  if (error_) throw IoError(*error_);
}

void Transfer::RunPiece(int64_t begin, int64_t length, BounceBuffer& bounce) noexcept {
  try {
    file_->Move(access_, offset_ + begin, memory_ + begin, length, bounce);
    Complete(length, std::nullopt);
  } catch (const IoError& error) {
    Complete(length, error);
  } catch (const std::exception& error) {
    Complete(length, IoError(access_ == Access::kRead ? "read" : "write", ENOMEM, file_->path(),
                             offset_ + begin, error.what()));
  }
}

void Transfer::Complete(int64_t length, std::optional<IoError> error) noexcept {
  bool last = false;
  {
    std::lock_guard lock(mutex_);
    if (error && (!error_ || error->offset() < error_->offset())) error_ = std::move(error);
    remaining_bytes_ -= length;
    last = Done();
    if (last) done_.notify_all();
  }
  if (last) file_->End();
}

}  // namespace lohan
