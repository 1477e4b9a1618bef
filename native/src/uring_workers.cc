#include "uring_workers.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <utility>

#include "pooled_engine.h"
#include "system.h"
#include "threads.h"

namespace lohan {
namespace {

// Newer kernels count a ring's memory as locked, of which some containers allow 64 KiB: these take 20 KiB.
constexpr uint32_t kSubmissions = 128;  // prepared for one system call
constexpr uint32_t kCompletions = 512;  // more are kept by the kernel until these are taken
/// A directory's bounce buffers: enough to keep a drive busy at 1 MiB each, and a bound on the memory.
constexpr size_t kBounces = 8;
/// Longer calls through the page cache are copies by the processor. The kernel's own threads make them, side
/// by side, in place of the one thread that submits.
constexpr int64_t kInlineBytes = 64 << 10;
/// How often a call that a fault plan holds is looked at again.
constexpr std::chrono::milliseconds kHoldPoll{1};
constexpr uint64_t kWakeTag = 0;  // no flight's address

}  // namespace

UringWorkers::Directory::Directory(int depth) : flights(static_cast<size_t>(depth)) {
  idle.reserve(flights.size());
  for (Flight& flight : flights) {
    flight.directory = this;
    idle.push_back(&flight);
  }
  idle_bounces.reserve(kBounces);
}

UringWorkers::UringWorkers(int depth, std::shared_ptr<FaultPlan> faults)
    : depth_(depth), faults_(std::move(faults)) {
  wake_ =
      Descriptor(CheckedCall("eventfd", "the ring", std::nullopt, [] { return eventfd(0, EFD_CLOEXEC); }));
  // Shared, because set_value may still be at work when the waiting side goes on.
  const auto started = std::make_shared<std::promise<void>>();
  StartThreads(1, [this, started](int) { Run(started); }, thread_);
  try {
    started->get_future().get();
  } catch (...) {
    thread_.front().join();
    throw;
  }
}

void UringWorkers::CheckOpen() const {
  std::lock_guard lock(mutex_);
  CheckOpenLocked();
}

void UringWorkers::CheckOpenLocked() const {
  if (closing_) throw std::runtime_error(std::string(kPoolName) + " is closed");
}

void UringWorkers::Submit(std::span<const std::shared_ptr<Transfer>> transfers, Priority priority) {
  std::vector<OperationPointer> operations = MakeOperations(transfers, faults_);
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    CheckOpenLocked();
    for (const OperationPointer& operation : operations) {
      directories_.try_emplace(operation->extent().file->directory(), depth_);
    }
    for (OperationPointer& operation : operations) {
      directories_.at(operation->extent().file->directory()).queue.Push(std::move(operation), priority);
    }
    wake = std::exchange(asleep_, false);
  }
  if (wake) Wake();
}

void UringWorkers::Wake() {
  const uint64_t one = 1;
  CheckedCall("wake", "the ring", std::nullopt, [&] { return write(wake_.value(), &one, sizeof(one)); });
}

void UringWorkers::Close() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    asleep_ = false;
  }
  Wake();
  std::lock_guard joining(join_mutex_);
  if (thread_.front().joinable()) thread_.front().join();
}

bool UringWorkers::RunInRing(std::function<void(Ring&)> command) {
  const auto ran = std::make_shared<std::promise<void>>();
  {
    std::lock_guard lock(mutex_);
    if (closing_) return false;
    commands_.push_back([&command, ran](Ring& ring) {
      command(ring);
      ran->set_value();
    });
    asleep_ = false;
  }
  Wake();
  ran->get_future().wait();
  return true;
}

IoEngine::Registration UringWorkers::RegisterMemory(std::byte* memory, int64_t size_bytes) {
  IoEngine::Registration registration;
  if (!RunInRing([&](Ring&) { registration = registered_->Add(memory, size_bytes); })) {
    registration.refusal = std::string(kPoolName) + " is closed";
  }
  return registration;
}

void UringWorkers::UnregisterMemory(const IoEngine::Registration& registration) noexcept {
  // A closed engine has no ring any more, and with it went what was pinned.
  if (!registration.slots.empty()) RunInRing([&](Ring&) { registered_->Remove(registration); });
}

// ---------------------------------------------------------------- in the ring's thread

void UringWorkers::Run(const std::shared_ptr<std::promise<void>>& started) {
  std::optional<Ring> ring;
  try {
    ring.emplace(Ring::SetUp(kSubmissions, kCompletions));
  } catch (...) {
    return started->set_exception(std::current_exception());
  }
  RegisteredBuffers registered(*ring);
  ring_ = &*ring;
  registered_ = &registered;
  started->set_value();
  Loop();
}

void UringWorkers::Loop() {
  const auto take = [this](uint64_t tag, int32_t result) {
    if (tag == kWakeTag) {
      wake_armed_ = false;
      return;
    }
    auto& flight = *reinterpret_cast<Flight*>(tag);
    flight.result = result;
    Settle(flight);
  };
  while (Collect() == State::kRunning) {
    IssueReady();
    const bool waits = FallAsleep();
    ring_->Enter(waits ? Ring::Wait::kForOne : Ring::Wait::kNo, NextDue());
    ring_->TakeCompletions(take);
    SettleParked();
  }
}

bool UringWorkers::CanLaunch(const Directory& directory) const {
  if (directory.queue.empty() || directory.idle.empty()) return false;
  return !directory.queue.front().NeedsBounce() || !directory.idle_bounces.empty() ||
         directory.bounces < kBounces;
}

UringWorkers::State UringWorkers::Collect() {
  std::unique_lock lock(mutex_);
  asleep_ = false;
  // An entry that the kernel has yet to take may name registered memory, which commands change.
  while (!commands_.empty() && !ring_->HasUnsubmitted()) {
    const std::function<void(Ring&)> command = std::move(commands_.front());
    commands_.pop_front();
    lock.unlock();
    command(*ring_);
    lock.lock();
  }
  for (auto& [id, directory] : directories_) {
    while (CanLaunch(directory)) Launch(directory);
  }
  // What is queued and cannot be launched waits for something in flight.
  return closing_ && in_flight_ == 0 && commands_.empty() ? State::kEnded : State::kRunning;
}

void UringWorkers::Launch(Directory& directory) {
  Flight& flight = *directory.idle.back();
  directory.idle.pop_back();
  flight.operation = directory.queue.Pop();
  ++in_flight_;
  ready_.push_back(&flight);
  if (!flight.operation->NeedsBounce()) return;
  if (directory.idle_bounces.empty()) {
    ++directory.bounces;
  } else {
    flight.bounce = std::move(directory.idle_bounces.back());
    directory.idle_bounces.pop_back();
  }
}

bool UringWorkers::FallAsleep() {
  if (!ready_.empty() || !wake_armed_) return false;
  std::lock_guard lock(mutex_);
  if (!commands_.empty() || (closing_ && in_flight_ == 0)) return false;
  for (const auto& [id, directory] : directories_) {
    if (CanLaunch(directory)) return false;
  }
  asleep_ = true;
  return true;
}

void UringWorkers::ArmWake() {
  io_uring_sqe& entry = ring_->NextSubmission();
  entry.opcode = IORING_OP_READ;
  entry.fd = wake_.value();
  entry.addr = reinterpret_cast<uintptr_t>(&wake_count_);
  entry.len = sizeof(wake_count_);
  entry.user_data = kWakeTag;
  wake_armed_ = true;
}

void UringWorkers::IssueReady() {
  if (!wake_armed_ && ring_->HasRoom()) ArmWake();
  // Those that fail at once or find no room stand in ready_ again; the next round takes them.
  std::vector<Flight*> issuing;
  issuing.swap(ready_);
  for (Flight* flight : issuing) {
    if (ring_->HasRoom()) {
      Issue(*flight);
    } else {
      ready_.push_back(flight);
    }
  }
}

void UringWorkers::Issue(Flight& flight) {
  try {
    Operation& operation = *flight.operation;
    if (operation.NeedsBounce() && !flight.bounce) {
      flight.bounce = std::make_unique<AlignedBuffer>(kBounceBytes);
    }
    flight.call = operation.NextCall(flight.bounce ? flight.bounce->data() : nullptr);
  } catch (const std::exception& error) {
    flight.operation->Fail(ENOMEM, error.what());
    return Finish(flight);
  }
  if (flight.call.fault.error_number != 0) {
    flight.result = -flight.call.fault.error_number;
    return Settle(flight);
  }
  Prepare(flight);
}

void UringWorkers::Prepare(Flight& flight) {
  const Call& call = flight.call;
  // Descriptors are not registered with the ring: to look one up is a matter of nanoseconds, and the smallest
  // call takes microseconds.
  const bool reading = call.access == Access::kRead;
  io_uring_sqe& entry = ring_->NextSubmission();
  entry.opcode = reading ? IORING_OP_READ : IORING_OP_WRITE;
  entry.fd = call.descriptor;
  entry.off = static_cast<uint64_t>(call.offset);
  entry.addr = reinterpret_cast<uintptr_t>(call.memory);
  entry.len = static_cast<uint32_t>(call.length_bytes);
  entry.user_data = reinterpret_cast<uintptr_t>(&flight);
  if (const std::optional<uint16_t> slot = registered_->Find(call.memory, call.length_bytes)) {
    entry.opcode = reading ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
    entry.buf_index = *slot;
  }
  if (flight.operation->extent().route == Route::kBuffered && call.length_bytes > kInlineBytes) {
    entry.flags |= IOSQE_ASYNC;
  }
}

void UringWorkers::Settle(Flight& flight) {
  if (!flight.operation->MayComplete(flight.call)) {
    parked_.push_back(&flight);
  } else if (flight.operation->Take(flight.call, flight.result) == Operation::Next::kCallAgain) {
    ready_.push_back(&flight);
  } else {
    Finish(flight);
  }
}

void UringWorkers::Finish(Flight& flight) {
  Directory& directory = *flight.directory;
  flight.operation.reset();
  if (flight.bounce) directory.idle_bounces.push_back(std::move(flight.bounce));
  directory.idle.push_back(&flight);
  --in_flight_;
}

void UringWorkers::SettleParked() {
  if (parked_.empty()) return;
  std::vector<Flight*> looked_at;
  looked_at.swap(parked_);
  for (Flight* flight : looked_at) Settle(*flight);
}

std::optional<std::chrono::steady_clock::time_point> UringWorkers::NextDue() const {
  std::optional<std::chrono::steady_clock::time_point> next;
  for (const Flight* flight : parked_) {
    const CallFault& fault = flight->call.fault;
    const auto due = fault.hold != 0 ? std::chrono::steady_clock::now() + kHoldPoll : fault.due;
    next = next ? std::min(*next, due) : due;
  }
  return next;
}

}  // namespace lohan
