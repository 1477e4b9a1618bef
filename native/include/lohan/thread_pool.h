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

/// How much lower than its maker's the scheduling priority of a pool's workers is, as a nice value.
///
/// Beside the kernels a training process launches a GPU's work from one thread, which computes for
/// microseconds at a time and holds up the GPU when it waits; the kernels wait for host memory. Each step of
/// the nice value divides a thread's weight by 1.25: at 5 a thread of the maker's priority gets
/// 1024 / (1024 + 335) = 75 % of a CPU that it shares with a worker, and mostly preempts it when it wakes.
///
/// On two busy CPUs with two workers a thread that does small tensor operations without a pause did, of the
/// 113 thousand a second it does alone, 58 at 0, 84 at 5 and 99 at 10, and one operation in a thousand took
/// 4.1, 0.2 and 0.07 ms; updates went at 60, 27 and 13 % of their speed alone. 5 has most of the gain, and
/// leaves updates a quarter of a CPU whatever else runs on it: another GPU's trainer, or a program of others.
inline constexpr int kYieldedPriority = 5;

/// Worker threads for compute kernels; they block all signals, and yield to other threads (kYieldedPriority).
/// Thread-safe: concurrent calls of Run take turns; the callers wait and compute nothing.
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
