#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lohan/io.h"
#include "threads.h"

namespace lohan {
namespace {

/// One piece is one system call in the common case: large enough for a drive's full speed, small enough
/// that an urgent request waits for at most one piece per worker.
constexpr int64_t kPieceBytes = int64_t{4} << 20;
constexpr const char* kName = "the I/O pool";

class ThreadEngine : public IoEngine {
 public:
  explicit ThreadEngine(int threads) : workers_(std::make_unique<Workers>()) { workers_->Start(threads); }

  ~ThreadEngine() override {
    // In a forked child there is nobody to wait for and the mutex may be held for ever.
    if (owner_.IsCurrent()) {
      workers_->Close();
    } else {
      static_cast<void>(workers_.release());
    }
  }

  void Submit(std::shared_ptr<Transfer> transfer, Priority priority) override {
    owner_.Check(kName);
    if (transfer->length_bytes() == 0) return workers_->CheckOpen();
    workers_->Submit(std::move(transfer), priority);
  }

  void Close() override {
    owner_.Check(kName);
    workers_->Close();
  }

  void CheckUsable() const override {
    owner_.Check(kName);
    workers_->CheckOpen();
  }

  const OwningProcess& owner() const override { return owner_; }

 private:
  class Workers {
   public:
    ~Workers() { Close(); }

    void Start(int count) {
      StartThreads(count, [this](int) { Work(); }, threads_);
    }

    void CheckOpen() const {
      std::lock_guard lock(mutex_);
      if (closing_) throw std::runtime_error(std::string(kName) + " is closed");
    }

    void Submit(std::shared_ptr<Transfer> transfer, Priority priority) {
      {
        std::lock_guard lock(mutex_);
        if (closing_) throw std::runtime_error(std::string(kName) + " is closed");
        queues_[priority == Priority::kUrgent ? 0 : 1].push_back({std::move(transfer), 0});
      }
      work_.notify_all();
    }

    void Close() {
      {
        std::lock_guard lock(mutex_);
        closing_ = true;
      }
      work_.notify_all();
      std::lock_guard joining(join_mutex_);
      for (std::thread& thread : threads_) {
        if (thread.joinable()) thread.join();
      }
    }

   private:
    struct Entry {
      std::shared_ptr<Transfer> transfer;
      int64_t handed_out_bytes;
    };

    std::deque<Entry>* NextQueue() {
      for (std::deque<Entry>& queue : queues_) {
        if (!queue.empty()) return &queue;
      }
      return nullptr;
    }

    void Work() {
      BounceBuffer bounce;
      std::unique_lock lock(mutex_);
      while (true) {
        work_.wait(lock, [this] { return closing_ || NextQueue() != nullptr; });
        std::deque<Entry>* queue = NextQueue();
        if (queue == nullptr) return;
        Entry& entry = queue->front();
        const int64_t begin = entry.handed_out_bytes;
        const int64_t length = std::min(kPieceBytes, entry.transfer->length_bytes() - begin);
        entry.handed_out_bytes += length;
        std::shared_ptr<Transfer> transfer = entry.transfer;
        if (entry.handed_out_bytes == transfer->length_bytes()) queue->pop_front();
        lock.unlock();
        transfer->RunPiece(begin, length, bounce);
        transfer.reset();
        lock.lock();
      }
    }

    mutable std::mutex mutex_;
    std::condition_variable work_;
    std::array<std::deque<Entry>, 2> queues_;  // urgent, normal
    bool closing_ = false;
    std::mutex join_mutex_;
    std::vector<std::thread> threads_;
  };

  OwningProcess owner_;
  std::unique_ptr<Workers> workers_;
};

}  // namespace

std::shared_ptr<IoEngine> MakeThreadEngine(int threads) {
  if (threads < 1 || threads > 256) {
    throw std::invalid_argument("threads is " + std::to_string(threads) + "; allowed are 1 to 256");
  }
  return std::make_shared<ThreadEngine>(threads);
}

}  // namespace lohan
