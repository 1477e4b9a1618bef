#include "lohan/thread_pool.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lohan/topology.h"
#include "threads.h"

namespace lohan {
namespace {

int CountOfThreads(int threads, const std::vector<Cpu>& cpus) {
  if (threads < 0 || threads > 1024) {
    throw std::invalid_argument("threads is " + std::to_string(threads) +
                                "; allowed are 1 to 1024, or 0 for one per CPU");
  }
  if (threads > 0) return threads;
  // Without a mask (more CPUs than it holds) the count is a fallback.
  return cpus.empty() ? std::max(1, static_cast<int>(std::thread::hardware_concurrency()))
                      : static_cast<int>(cpus.size());
}

/// Lowers the calling thread's priority, for good: raising it again takes a privilege.
void YieldToOthers() {
  // On Linux the calls mean the thread whose number is given, 0 the calling one. It has its maker's value.
  errno = 0;
  const int inherited = getpriority(PRIO_PROCESS, 0);
  if (inherited == -1 && errno != 0) return;  // -1 is a priority, too
  // Advice: a sandbox may refuse, and updates are right at any priority. The kernel takes more than 19
  // for 19.
  static_cast<void>(setpriority(PRIO_PROCESS, 0, inherited + kYieldedPriority));
}

/// The next index of one worker's share. Alone in its cache line: its owner counts on it without disturbing
/// others.
struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

}  // namespace

class ThreadPool::Workers {
 public:
  ~Workers() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    start_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  /// Pins worker i to cpus[i]; none is pinned when there are no CPUs.
  void Start(int count, std::vector<Cpu> cpus) {
    cpus_ = std::move(cpus);
    shares_ = std::vector<Share>(static_cast<size_t>(count));
    StartThreads(count, [this](int index) { Work(static_cast<size_t>(index)); }, threads_);
  }

  void Run(int64_t count, const std::function<void(int64_t)>& task) {
    std::lock_guard turn(turn_);
    std::unique_lock lock(mutex_);
    task_ = &task;
    const auto workers = static_cast<int64_t>(shares_.size());
    for (int64_t i = 0; i < workers; ++i) {
      // count * i could overflow; the remainder goes to the first shares.
      Share& share = shares_[static_cast<size_t>(i)];
      const int64_t begin = count / workers * i + std::min(i, count % workers);
      share.next.store(begin);
      share.end = begin + count / workers + (i < count % workers ? 1 : 0);
    }
    failure_ = nullptr;
    active_ = threads_.size();
    ++generation_;
    start_.notify_all();
    finished_.wait(lock, [this] { return active_ == 0; });
    task_ = nullptr;
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  void Pin(size_t index) const {
    if (index >= cpus_.size()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus_[index].number, &set);
    // Advice: a CPU may have been taken from the process since its mask was read, and work runs elsewhere as
    // well.
    sched_setaffinity(0, sizeof(set), &set);
  }

  void Work(size_t index) {
    Pin(index);
    YieldToOthers();
    int64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      start_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      const auto& task = *task_;
      lock.unlock();
      std::exception_ptr failure;
      try {
        RunShares(index, task);
      } catch (...) {
        failure = std::current_exception();
        for (Share& share : shares_) share.next.store(share.end);
      }
      lock.lock();
      if (failure && !failure_) failure_ = std::move(failure);
      if (--active_ == 0) finished_.notify_one();
    }
  }

  void RunShares(size_t own, const std::function<void(int64_t)>& task) {
    for (size_t turn = 0; turn < shares_.size(); ++turn) {
      Share& share = shares_[(own + turn) % shares_.size()];
      if (share.next.load() >= share.end) continue;  // without writing to another worker's cache line
      for (int64_t index = share.next.fetch_add(1); index < share.end; index = share.next.fetch_add(1))
        task(index);
    }
  }

  std::mutex turn_;  // held by the caller whose job runs
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable finished_;
  bool stopping_ = false;
  int64_t generation_ = 0;
  const std::function<void(int64_t)>* task_ = nullptr;
  size_t active_ = 0;
  std::exception_ptr failure_;
  std::vector<Cpu> cpus_;
  std::vector<Share> shares_;
  std::vector<std::thread> threads_;
};

ThreadPool::ThreadPool(int threads, Affinity affinity) : workers_(std::make_unique<Workers>()) {
  const std::vector<Cpu> allowed = AllowedCpus();
  threads_ = CountOfThreads(threads, allowed);
  workers_->Start(threads_,
                  affinity == Affinity::kPinned ? ChooseCpus(allowed, threads_) : std::vector<Cpu>{});
}

ThreadPool::~ThreadPool() {
  // In a forked child the threads to join do not exist and the mutex may be held for ever: leave both.
  if (!owner_.IsCurrent()) static_cast<void>(workers_.release());
}

void ThreadPool::Run(int64_t count, const std::function<void(int64_t)>& task) {
  owner_.Check("the thread pool");
  if (count > 0) workers_->Run(count, task);
}

}  // namespace lohan
