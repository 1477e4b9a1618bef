#include "pread_workers.h"

#include <cerrno>
#include <stdexcept>
#include <string>
#include <utility>

#include "pooled_engine.h"
#include "threads.h"

namespace lohan {
namespace {

void CarryOut(Operation& operation, std::unique_ptr<AlignedBuffer>& bounce) noexcept {
  try {
    if (operation.NeedsBounce() && !bounce) bounce = std::make_unique<AlignedBuffer>(kBounceBytes);
    Operation::Next next = Operation::Next::kCallAgain;
    while (next == Operation::Next::kCallAgain) {
      const Call call = operation.NextCall(bounce ? bounce->data() : nullptr);
      const int64_t result = call.fault.error_number != 0 ? -call.fault.error_number : Perform(call);
      operation.AwaitCompletion(call);
      next = operation.Take(call, result);
    }
  } catch (const std::exception& error) {
    operation.Fail(ENOMEM, error.what());
  }
}

}  // namespace

PreadWorkers::PreadWorkers(int threads, std::shared_ptr<FaultPlan> faults)
    : threads_per_directory_(threads), faults_(std::move(faults)) {}

void PreadWorkers::CheckOpen() const {
  std::lock_guard lock(mutex_);
  CheckOpenLocked();
}

void PreadWorkers::CheckOpenLocked() const {
  if (closing_) throw std::runtime_error(std::string(kPoolName) + " is closed");
}

void PreadWorkers::Submit(std::span<const std::shared_ptr<Transfer>> transfers, Priority priority) {
  std::vector<OperationPointer> operations = MakeOperations(transfers, faults_);
  std::vector<Directory*> to_wake;
  {
    std::lock_guard lock(mutex_);
    CheckOpenLocked();
    for (const OperationPointer& operation : operations) {
      StartDirectory(operation->extent().file->directory());
    }
    for (OperationPointer& operation : operations) {
      Directory& directory = directories_.at(operation->extent().file->directory());
      directory.queue.Push(std::move(operation), priority);
      if (directory.idle_threads == 0) continue;  // a busy one looks at the queue when it is done
      --directory.idle_threads;
      to_wake.push_back(&directory);
    }
  }
  for (Directory* const directory : to_wake) directory->work.notify_one();
}

void PreadWorkers::StartDirectory(DirectoryId id) {
  Directory& directory = directories_[id];
  if (!directory.threads.empty()) return;
  try {
    StartThreads(threads_per_directory_, [this, &directory](int) { Work(directory); }, directory.threads);
  } catch (const std::exception&) {
    if (directory.threads.empty()) throw;  // with fewer threads than asked for the directory is only slower
  }
}

void PreadWorkers::Work(Directory& directory) {
  std::unique_ptr<AlignedBuffer> bounce;
  std::unique_lock lock(mutex_);
  while (true) {
    while (directory.queue.empty()) {
      if (closing_) return;
      ++directory.idle_threads;
      directory.work.wait(lock);
    }
    OperationPointer operation = directory.queue.Pop();
    lock.unlock();
    CarryOut(*operation, bounce);
    operation.reset();
    lock.lock();
  }
}

void PreadWorkers::Close() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    for (auto& [id, directory] : directories_) directory.work.notify_all();
  }
  // No directory is added any more, so the map may be walked without the lock.
  std::lock_guard joining(join_mutex_);
  for (auto& [id, directory] : directories_) {
    for (std::thread& thread : directory.threads) {
      if (thread.joinable()) thread.join();
    }
  }
}

IoEngine::Registration PreadWorkers::RegisterMemory(std::byte*, int64_t) {
  return {{}, "pread and pwrite know no registered memory; io_uring does"};
}

}  // namespace lohan
