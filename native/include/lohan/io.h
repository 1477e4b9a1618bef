// Asynchronous reads and writes of whole arrays: transfers, and the engines that carry them out.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lohan/error.h"
#include "lohan/faults.h"
#include "lohan/file.h"

namespace lohan {

enum class Priority { kNormal, kUrgent };

/// One read or write of a contiguous range, carried out in extents by whichever workers are free. The memory
/// must stay valid until Done. Thread-safe.
class Transfer {
 public:
  /// Throws std::invalid_argument when the file is closed or the range leaves it.
  Transfer(std::shared_ptr<File> file, Access access, int64_t offset, std::byte* memory,
           int64_t length_bytes);
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  bool Done() const { return remaining_extents_ == 0; }
  /// Blocks until Done; throws the IoError of the failed extent nearest to the range's start.
  void Wait() const;
  /// Blocks until Done and throws nothing.
  void WaitQuietly() const noexcept;
  /// Calls `callback` once the transfer is Done: in the worker that completes it, which must not be held up,
  /// or at once in this thread. It must not throw.
  void OnDone(std::function<void()> callback);

  /// CLOCK_MONOTONIC, as Python's time.perf_counter has it.
  struct Times {
    std::chrono::nanoseconds first_call_began;
    std::chrono::nanoseconds last_call_ended;
  };
  /// Empty until Done, and where no call was made.
  std::optional<Times> times() const;

  // For engines:
  Access access() const { return access_; }
  const std::vector<Extent>& extents() const { return extents_; }
  /// A call is about to be made; of several the first counts.
  void NoteCall() noexcept;
  /// Counts an extent as completed. The last one may end the transfer's life.
  void CompleteExtent(size_t index, std::optional<IoError> error) noexcept;

 private:
  void LeaveFile() noexcept;

  std::shared_ptr<File> file_;  // until the transfer has ended
  const Access access_;
  const std::vector<Extent> extents_;

  mutable std::mutex mutex_;
  mutable std::condition_variable done_;
  std::atomic<int64_t> began_nanoseconds_ = 0;  // 0: no call was made
  int64_t ended_nanoseconds_ = 0;               // written before remaining_extents_ becomes 0
  std::atomic<size_t> remaining_extents_;       // atomic so that Done takes no lock
  size_t failed_extent_ = 0;
  std::optional<IoError> error_;
  std::vector<std::function<void()>> callbacks_;
};

enum class EngineKind {
  kAuto,  // a wish only: io_uring, or threads where there is none
  kUring,
  kThreads,
};

/// Carries out transfers. Thread-safe. Transfers that overlap are ordered by the caller.
class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual EngineKind kind() const = 0;
  /// Queues transfers as one batch. Each directory has a queue of its own: urgent ones before all others,
  /// else first in, first out. Throws std::runtime_error after Close and in a forked child, and then none
  /// was queued.
  virtual void Submit(std::span<const std::shared_ptr<Transfer>> transfers, Priority priority) = 0;
  /// Completes what was submitted, then ends the workers. Closing twice is harmless.
  virtual void Close() = 0;
  /// Throws std::runtime_error after Close and in a forked child.
  virtual void CheckUsable() const = 0;
  /// The process whose threads complete transfers; in a forked child none ever ends.
  virtual const OwningProcess& owner() const = 0;

  /// Lets the kernel pin `memory` once instead of for each transfer. Returns a handle for UnregisterMemory;
  /// its refusal says why transfers pin their pages each time as before.
  struct Registration {
    std::vector<uint32_t> slots;
    std::string refusal;
  };
  virtual Registration RegisterMemory(std::byte* memory, int64_t size_bytes) = 0;
  /// Must be called before the memory is unmapped, and once its transfers have ended.
  virtual void UnregisterMemory(const Registration& registration) noexcept = 0;
};

/// Memory that is registered with an engine as long as this lives; the memory must live longer.
class RegisteredMemory {
 public:
  RegisteredMemory(std::shared_ptr<IoEngine> engine, std::byte* memory, int64_t size_bytes);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  const std::string& refusal() const { return registration_.refusal; }

 private:
  std::shared_ptr<IoEngine> engine_;
  IoEngine::Registration registration_;
};

/// Workers that call pread and pwrite: `threads` (1..256) for each directory. `faults` may be null.
std::shared_ptr<IoEngine> MakeThreadEngine(int threads, std::shared_ptr<FaultPlan> faults = nullptr);

/// Why io_uring cannot be used in this process; empty when it can.
std::string IoUringRefusal();

/// A thread with an io_uring that keeps up to `depth` (1..4096) calls per directory in flight. Throws
/// std::runtime_error with IoUringRefusal's text where there is no io_uring.
std::shared_ptr<IoEngine> MakeUringEngine(int depth, std::shared_ptr<FaultPlan> faults = nullptr);

struct ChosenEngine {
  std::shared_ptr<IoEngine> engine;
  std::string uring_refusal;  // why kAuto took threads; else empty
};
ChosenEngine MakeEngine(EngineKind wish, int threads, int depth, std::shared_ptr<FaultPlan> faults);

}  // namespace lohan
