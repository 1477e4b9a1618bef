// Threads that call pread and pwrite.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "lohan/io.h"
#include "operation_queue.h"

namespace lohan {

/// One set of threads for each directory that was ever submitted to: a run uses a handful, and threads of
/// their own are what keeps a directory's transfers going while another's drive does not answer.
class PreadWorkers {
 public:
  PreadWorkers(int threads, std::shared_ptr<FaultPlan> faults);
  ~PreadWorkers() { Close(); }

  void CheckOpen() const;
  void Submit(std::span<const std::shared_ptr<Transfer>> transfers, Priority priority);
  void Close();
  IoEngine::Registration RegisterMemory(std::byte* memory, int64_t size_bytes);
  void UnregisterMemory(const IoEngine::Registration&) noexcept {}

 private:
  struct Directory {
    OperationQueue queue;
    std::condition_variable work;
    int idle_threads = 0;  // that wait for work and have not been woken
    std::vector<std::thread> threads;
  };

  void CheckOpenLocked() const;
  void StartDirectory(DirectoryId id);
  void Work(Directory& directory);

  const int threads_per_directory_;
  const std::shared_ptr<FaultPlan> faults_;
  mutable std::mutex mutex_;
  std::map<DirectoryId, Directory> directories_;
  bool closing_ = false;
  std::mutex join_mutex_;
};

}  // namespace lohan
