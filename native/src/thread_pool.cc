#include "lohan/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "threads.h"

namespace lohan {
namespace {

int CpusInAffinityMask() {
  // The fixed-size set holds 1,024 CPUs; a larger machine makes the call fail, and the count is a fallback.
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int CountOfThreads(int threads) {
  if (threads < 0 || threads > 1024) {
    throw std::invalid_argument("threads is " + std::to_string(threads) +
                                "; allowed are 1 to 1024, or 0 for one per CPU");
  }
  return threads == 0 ? CpusInAffinityMask() : threads;
}

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

  void Start(int count) {
    StartThreads(count, [this] { Work(); }, threads_);
  }

  void Run(int64_t count, const std::function<void(int64_t)>& task) {
    std::lock_guard turn(turn_);
    std::unique_lock lock(mutex_);
    task_ = &task;
    count_ = count;
    next_.store(0);
    failure_ = nullptr;
    active_ = threads_.size();
    ++generation_;
    start_.notify_all();
    finished_.wait(lock, [this] { return active_ == 0; });
    task_ = nullptr;
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  void Work() {
    int64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      start_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      const auto& task = *task_;
      const int64_t count = count_;
      lock.unlock();
      std::exception_ptr failure;
      try {
        for (int64_t index = next_.fetch_add(1); index < count; index = next_.fetch_add(1)) task(index);
      } catch (...) {
        failure = std::current_exception();
        next_.store(count);
      }
      lock.lock();
      if (failure && !failure_) failure_ = std::move(failure);
      if (--active_ == 0) finished_.notify_one();
    }
  }

  std::mutex turn_;  // held by the caller whose job runs
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable finished_;
  bool stopping_ = false;
  int64_t generation_ = 0;
  const std::function<void(int64_t)>* task_ = nullptr;
  int64_t count_ = 0;
  size_t active_ = 0;
  std::exception_ptr failure_;
  std::atomic<int64_t> next_{0};
  std::vector<std::thread> threads_;
};

ThreadPool::ThreadPool(int threads)
    : threads_(CountOfThreads(threads)), workers_(std::make_unique<Workers>()) {
  workers_->Start(threads_);
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
