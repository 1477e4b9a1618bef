// The thread that keeps an io_uring busy.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "lohan/io.h"
#include "operation_queue.h"
#include "registered_buffers.h"
#include "uring.h"

namespace lohan {

/// One thread that owns a ring, and what other threads hand to it. Up to `depth` calls are in flight for each
/// directory, so that a drive that does not answer takes no other's places.
class UringWorkers {
 public:
  /// Throws UringRefused.
  UringWorkers(int depth, std::shared_ptr<FaultPlan> faults);
  ~UringWorkers() { Close(); }

  void CheckOpen() const;
  void Submit(std::span<const std::shared_ptr<Transfer>> transfers, Priority priority);
  void Close();
  IoEngine::Registration RegisterMemory(std::byte* memory, int64_t size_bytes);
  void UnregisterMemory(const IoEngine::Registration& registration) noexcept;

 private:
  struct Directory;
  /// A place for one call in flight, used again and again.
  struct Flight {
    Directory* directory = nullptr;
    OperationPointer operation;
    std::unique_ptr<AlignedBuffer> bounce;
    Call call{};
    int64_t result = 0;
  };
  struct Directory {
    explicit Directory(int depth);
    OperationQueue queue;  // shared; the rest belongs to the ring's thread
    std::vector<Flight> flights;
    std::vector<Flight*> idle;
    std::vector<std::unique_ptr<AlignedBuffer>> idle_bounces;
    size_t bounces = 0;
  };
  enum class State { kRunning, kEnded };

  void CheckOpenLocked() const;
  void Wake();
  /// Has the ring's thread run `command` and waits for it; false when the engine is closed.
  bool RunInRing(std::function<void(Ring&)> command);

  // In the ring's thread:
  void Run(const std::shared_ptr<std::promise<void>>& started);
  void Loop();
  State Collect();
  bool CanLaunch(const Directory& directory) const;
  bool FallAsleep();
  void Launch(Directory& directory);
  void IssueReady();
  void Issue(Flight& flight);
  void Prepare(Flight& flight);
  void ArmWake();
  void Settle(Flight& flight);
  void Finish(Flight& flight);
  void SettleParked();
  std::optional<std::chrono::steady_clock::time_point> NextDue() const;

  const int depth_;
  const std::shared_ptr<FaultPlan> faults_;
  Descriptor wake_;

  mutable std::mutex mutex_;
  std::map<DirectoryId, Directory> directories_;
  std::deque<std::function<void(Ring&)>> commands_;
  bool closing_ = false;
  bool asleep_ = false;  // the ring's thread waits in the kernel: whoever adds work clears this and wakes it

  Ring* ring_ = nullptr;
  RegisteredBuffers* registered_ = nullptr;
  uint64_t wake_count_ = 0;
  bool wake_armed_ = false;
  size_t in_flight_ = 0;         // flights with an operation
  std::vector<Flight*> ready_;   // with a call to be made
  std::vector<Flight*> parked_;  // with a result that a fault plan holds back

  std::mutex join_mutex_;
  std::vector<std::thread> thread_;
};

}  // namespace lohan
