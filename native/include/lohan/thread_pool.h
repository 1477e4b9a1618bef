#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "lohan/error.h"

namespace lohan {

/// Worker threads for compute kernels. Workers inherit the CPU affinity mask of the thread that makes the
/// pool and block all signals. Thread-safe: concurrent calls of Run take turns.
class ThreadPool {
 public:
  /// `threads` 0 means one per CPU in the affinity mask. Throws std::invalid_argument outside 0..1024.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  /// Calls `task(index)` once for every index in [0, count), in no order, and returns when all have ended.
  /// Rethrows one of the tasks' exceptions. Throws std::runtime_error in a forked child.
  void Run(int64_t count, const std::function<void(int64_t)>& task);

 private:
  class Workers;
  OwningProcess owner_;
  int threads_;
  std::unique_ptr<Workers> workers_;
};

}  // namespace lohan
