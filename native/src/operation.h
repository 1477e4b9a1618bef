// One extent under way. Engines make the calls; what a result means is decided here, for all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "lohan/faults.h"
#include "lohan/io.h"

namespace lohan {

/// The next call of an operation. With an error number in its fault it is not to be made: that is its result.
struct Call {
  Access access;
  int descriptor;
  std::byte* mapped;  // the offset in memory, of files that are memory; else null
  int64_t offset;
  std::byte* memory;
  int64_t length_bytes;
  CallFault fault;
};

/// Carries an extent from its first call to its completion: goes on after short calls, repeats interrupted
/// ones, copies bounced data, and tells the transfer how it ended. For one thread at a time.
class Operation {
 public:
  enum class Next { kCallAgain, kEnded };

  /// `faults` may be null.
  Operation(std::shared_ptr<Transfer> transfer, size_t extent, std::shared_ptr<FaultPlan> faults);

  const Extent& extent() const { return extent_; }
  bool NeedsBounce() const { return extent_.route == Route::kDirectBounced; }
  /// The call to make now. `bounce` is the same kBounceBytes of page-aligned memory each time when
  /// NeedsBounce, else not looked at. Throws OutOfMemory.
  Call NextCall(std::byte* bounce);
  bool MayComplete(const Call& call) const { return !faults_ || faults_->MayComplete(call.fault); }
  void AwaitCompletion(const Call& call) const;
  /// Takes a call's result: the bytes it moved, or minus its error number.
  Next Take(const Call& call, int64_t result) noexcept;
  /// Ends the operation without a further call.
  void Fail(int error_number, const char* detail) noexcept;

 private:
  Next Advance(int64_t moved) noexcept;
  Next End(std::optional<IoError> error) noexcept;
  IoError ErrorHere(int error_number, const char* detail) const;

  std::shared_ptr<Transfer> transfer_;
  const size_t index_;
  const Extent& extent_;
  std::shared_ptr<FaultPlan> faults_;
  std::byte* memory_ = nullptr;             // the caller's, or the bounce buffer
  std::unique_ptr<AlignedBuffer> altered_;  // what a bit-flipping fault writes in place of the caller's bytes
  int64_t done_bytes_ = 0;
  int stalled_calls_ = 0;
  int refused_calls_ = 0;
};

/// Calls pread or pwrite, or copies where the file is mapped; returns the bytes moved, or minus
/// the error number.
int64_t Perform(const Call& call) noexcept;

}  // namespace lohan
