#include "operation.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "rounding.h"
#include "streaming_copy.h"

namespace lohan {
namespace {

/// A direct transfer that stops inside a logical block gets no further by itself; give up after this many.
constexpr int kStalledCalls = 8;
/// The kernel says EAGAIN when it lacks a request structure or queue space for the moment; each repetition
/// waits for a system call, so this many mean that the moment does not end.
constexpr int kRefusedCalls = 10000;
constexpr const char* kEndsEarly = "the file ends early: it was truncated after it was opened";

void Flip(std::byte* data, int64_t length_bytes, int64_t bit) {
  const int64_t at = bit % (length_bytes * 8);
  data[at / 8] ^= std::byte{1} << static_cast<int>(at % 8);
}

/// Whether the file still reaches to the end of the call, so that no page of its mapping is missing.
bool StillReaches(const Call& call) noexcept {
  struct stat status{};
  return fstat(call.descriptor, &status) == 0 && call.offset + call.length_bytes <= status.st_size;
}

}  // namespace

Operation::Operation(std::shared_ptr<Transfer> transfer, size_t extent, std::shared_ptr<FaultPlan> faults)
    : transfer_(std::move(transfer)),
      index_(extent),
      extent_(transfer_->extents()[extent]),
      faults_(std::move(faults)) {}

Call Operation::NextCall(std::byte* bounce) {
  if (memory_ == nullptr) {
    transfer_->NoteCall();
    memory_ = NeedsBounce() ? bounce : extent_.memory;
    if (NeedsBounce() && transfer_->access() == Access::kWrite) {
      std::memcpy(bounce, extent_.memory, static_cast<size_t>(extent_.length_bytes));
    }
  }
  Call call{transfer_->access(),
            extent_.file->descriptor(extent_.route),
            extent_.file->mapped(extent_.offset + done_bytes_),
            extent_.offset + done_bytes_,
            memory_ + done_bytes_,
            extent_.length_bytes - done_bytes_,
            {}};
  if (!faults_) return call;
  call.fault = faults_->Decide(call.access, extent_.file->path(), call.offset, call.length_bytes);
  if (call.fault.limit_bytes) {
    // O_DIRECT takes whole blocks only: move at least what is reported, in whole granules.
    const int64_t granule = extent_.file->granule_bytes(extent_.route);
    call.length_bytes = std::min(call.length_bytes, RoundUp(*call.fault.limit_bytes, granule));
  }
  if (call.fault.flipped_bit && call.access == Access::kWrite) {
    altered_ = std::make_unique<AlignedBuffer>(call.length_bytes);
    std::memcpy(altered_->data(), call.memory, static_cast<size_t>(call.length_bytes));
    Flip(altered_->data(), call.length_bytes, *call.fault.flipped_bit);
    call.memory = altered_->data();
  }
  return call;
}

void Operation::AwaitCompletion(const Call& call) const {
  if (faults_) faults_->AwaitCompletion(call.fault);
}

Operation::Next Operation::Take(const Call& call, int64_t result) noexcept {
  if (faults_) faults_->CountOut(call.fault);
  if (result < 0) {
    const auto error_number = static_cast<int>(-result);
    if (error_number == EINTR) return Next::kCallAgain;
    if (error_number == EAGAIN && ++refused_calls_ < kRefusedCalls) return Next::kCallAgain;
    return End(ErrorHere(error_number, ""));
  }
  if (call.fault.flipped_bit && call.access == Access::kRead && result > 0) {
    Flip(call.memory, result, *call.fault.flipped_bit);
  }
  return Advance(call.fault.limit_bytes ? std::min(result, *call.fault.limit_bytes) : result);
}

Operation::Next Operation::Advance(int64_t moved) noexcept {
  const bool reading = transfer_->access() == Access::kRead;
  if (moved == 0 && reading) return End(ErrorHere(ENODATA, kEndsEarly));
  const int64_t reached = done_bytes_ + moved;
  // Direct calls go on from the last whole granule, so that offset, memory and length stay aligned.
  const int64_t granule = extent_.file->granule_bytes(extent_.route);
  const int64_t kept = reached == extent_.length_bytes ? reached : RoundDown(reached, granule);
  if (kept > done_bytes_) {
    stalled_calls_ = 0;
    refused_calls_ = 0;
  } else if (++stalled_calls_ == kStalledCalls) {
    // A read that ends inside a block again and again has met the end of the file.
    if (reading) return End(ErrorHere(ENODATA, kEndsEarly));
    return End(ErrorHere(EIO, "the system writes less than one block at a time"));
  }
  done_bytes_ = kept;
  if (done_bytes_ < extent_.length_bytes) return Next::kCallAgain;
  if (NeedsBounce() && reading) {
    std::memcpy(extent_.memory, memory_, static_cast<size_t>(extent_.length_bytes));
  }
  return End(std::nullopt);
}

void Operation::Fail(int error_number, const char* detail) noexcept { End(ErrorHere(error_number, detail)); }

IoError Operation::ErrorHere(int error_number, const char* detail) const {
  return {NameOf(transfer_->access()), error_number, extent_.file->path(), extent_.offset + done_bytes_,
          detail};
}

Operation::Next Operation::End(std::optional<IoError> error) noexcept {
  transfer_->CompleteExtent(index_, std::move(error));
  return Next::kEnded;
}

int64_t Perform(const Call& call) noexcept {
  const auto size = static_cast<size_t>(call.length_bytes);
  if (call.mapped != nullptr && StillReaches(call)) {
    if (call.access == Access::kRead) {
      std::memcpy(call.memory, call.mapped, size);  // into the caches: it is used at once
    } else {
      StreamingCopy(call.mapped, call.memory, call.length_bytes);
    }
    return call.length_bytes;
  }
  const ssize_t moved = call.access == Access::kRead
                            ? pread(call.descriptor, call.memory, size, call.offset)
                            : pwrite(call.descriptor, call.memory, size, call.offset);
  return moved < 0 ? -static_cast<int64_t>(errno) : moved;
}

}  // namespace lohan
