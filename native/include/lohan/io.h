// Asynchronous reads and writes of whole arrays: requests, and the engines that carry them out.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "lohan/error.h"
#include "lohan/file.h"

namespace lohan {

enum class Priority { kNormal, kUrgent };

/// One read or write of a contiguous range, carried out in pieces by whichever workers are free. The memory
/// must stay valid until Done. Thread-safe.
class Transfer {
 public:
  /// Throws std::invalid_argument when the file is closed or the range leaves it.
  Transfer(std::shared_ptr<File> file, Access access, int64_t offset, std::byte* memory,
           int64_t length_bytes);
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  bool Done() const;
  /// Blocks until Done; throws the IoError of the failed piece nearest to the file's start.
  void Wait() const;
  /// Blocks until Done and throws nothing.
  void WaitQuietly() const noexcept;

  // For engines:
  int64_t length_bytes() const { return length_bytes_; }
  /// Carries out the piece [begin, begin + length) of the request and counts it as completed.
  void RunPiece(int64_t begin, int64_t length, BounceBuffer& bounce) noexcept;

 private:
  void Complete(int64_t length, std::optional<IoError> error) noexcept;

  std::shared_ptr<File> file_;
  const Access access_;
  const int64_t offset_;
  std::byte* const memory_;
  const int64_t length_bytes_;

  mutable std::mutex mutex_;
  mutable std::condition_variable done_;
  std::atomic<int64_t> remaining_bytes_;  // atomic so that Done takes no lock
  std::optional<IoError> error_;
};

/// Carries out transfers. Thread-safe.
class IoEngine {
 public:
  virtual ~IoEngine() = default;
  /// Queues a transfer: urgent ones before all others, else first in, first out. Throws std::runtime_error
  /// after Close and in a forked child.
  virtual void Submit(std::shared_ptr<Transfer> transfer, Priority priority) = 0;
  /// Completes what was submitted, then ends the workers. Closing twice is harmless.
  virtual void Close() = 0;
  /// Throws std::runtime_error after Close and in a forked child.
  virtual void CheckUsable() const = 0;
  /// The process whose threads complete transfers; in a forked child none ever ends.
  virtual const OwningProcess& owner() const = 0;
};

/// An engine of `threads` workers (1..256) that call pread and pwrite, one piece of up to 4 MiB at a time.
std::shared_ptr<IoEngine> MakeThreadEngine(int threads);

}  // namespace lohan
