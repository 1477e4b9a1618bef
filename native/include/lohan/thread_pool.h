#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "lohan/error.h"

namespace lohan {

/// Whether a pool's workers stay on a CPU of their own.
enum class Affinity {
  kPinned,   // each on one CPU of the maker's mask, cores before their second threads, while there are enough
  kInherit,  // anywhere in the maker's mask
};

/// Worker threads for compute kernels; they block all signals. Thread-safe: concurrent calls of Run take
/// turns.
///
/// Each worker first takes its own share of consecutive indices, the same for equal counts, and then helps
/// the others, its neighbours first. Workers are numbered node by node, so a share's memory stays with one
/// NUMA node when the same pool touched it first.
class ThreadPool {
 public:
  /// `threads` 0 means one per CPU in the affinity mask. Throws std::invalid_argument outside 0..1024.
  explicit ThreadPool(int threads, Affinity affinity = Affinity::kPinned);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  /// Calls `task(index)` once for every index in [0, count) and returns when all have ended. Rethrows one of
  /// the tasks' exceptions, after which the other tasks may not have run. Throws std::runtime_error in a
  /// forked child.
  void Run(int64_t count, const std::function<void(int64_t)>& task);

 private:
  class Workers;
  OwningProcess owner_;
  int threads_;
  std::unique_ptr<Workers> workers_;
};

}  // namespace lohan
