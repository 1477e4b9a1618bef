// One io_uring, by its system calls: liburing is not needed. Knows rings, not files or transfers.
#pragma once

#include <linux/io_uring.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "lohan/descriptor.h"

namespace lohan {

/// There is no usable io_uring in this process; what() says why.
struct UringRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A mapping of a ring's memory. Forked children do not get it: they must not touch the parent's ring.
class RingMapping {
 public:
  RingMapping(int descriptor, size_t size_bytes, int64_t offset);
  ~RingMapping();
  RingMapping(const RingMapping&) = delete;
  RingMapping& operator=(const RingMapping&) = delete;

  template <typename T>
  T* At(uint32_t offset) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  std::byte* data_;
  size_t size_bytes_;
};

/// For the one thread that constructs it.
class Ring {
 public:
  /// What was found at set-up, held apart so that the mappings can be members that are never empty.
  struct Setup {
    Descriptor descriptor;
    io_uring_params parameters;
  };
  /// Throws UringRefused.
  static Setup SetUp(uint32_t submissions, uint32_t completions);

  /// Throws UringRefused.
  explicit Ring(Setup setup);

  bool HasRoom() const;
  /// Whether the kernel has yet to take entries that were filled in.
  bool HasUnsubmitted() const { return tail_ != submitted_; }
  /// A cleared entry to fill in; there must be room.
  io_uring_sqe& NextSubmission();
  /// Submits the entries filled in so far. Waits for a completion when `wait` says so, no longer than
  /// `until`.
  enum class Wait { kNo, kForOne };
  void Enter(Wait wait, std::optional<std::chrono::steady_clock::time_point> until);
  /// Calls take(user_data, result) for each completion there is.
  template <typename Take>
  void TakeCompletions(Take&& take) {
    uint32_t head = *completion_head_;  // only this thread writes it
    const uint32_t tail = std::atomic_ref(*completion_tail_).load(std::memory_order_acquire);
    for (; head != tail; ++head) {
      const io_uring_cqe completion = completions_[head & completion_mask_];
      // Given back before `take` runs, which may submit and so need room.
      std::atomic_ref(*completion_head_).store(head + 1, std::memory_order_release);
      take(completion.user_data, completion.res);
    }
  }

  /// io_uring_register(2); 0 or more, or minus the error number.
  int Register(uint32_t operation, const void* argument, uint32_t count);

 private:
  Descriptor descriptor_;
  RingMapping rings_;
  RingMapping entries_;
  uint32_t* submission_head_;
  uint32_t* submission_tail_;
  uint32_t submission_mask_;
  uint32_t submission_entries_;
  io_uring_sqe* submissions_;
  uint32_t* completion_head_;
  uint32_t* completion_tail_;
  uint32_t completion_mask_;
  io_uring_cqe* completions_;
  uint32_t tail_ = 0;
  uint32_t submitted_ = 0;
};

}  // namespace lohan
