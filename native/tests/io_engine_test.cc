// What every engine must do alike: keep the order, serve directories apart, and end well.
#include <sys/wait.h>

#include <cerrno>
#include <chrono>
#include <future>
#include <span>

#include "io_fixture.h"

namespace lohan {
namespace {

using test::Contents;
using test::Folder;
using test::NewPlan;
using test::Pattern;
using test::Start;
using test::WaitUntilHeld;

constexpr int64_t kMib = int64_t{1} << 20;
constexpr int64_t kPage = 4096;

// ---------------------------------------------------------------- order

TEST_EACH_ENGINE(UrgentTransfersOvertakeNormalOnes) {
  Folder folder;
  auto plan = NewPlan();
  auto file = File::Open(folder.File("order"), 64 * kPage);
  auto engine = make(1, plan);
  AlignedBuffer memory(64 * kPage);
  plan->Hold({});
  std::vector<std::shared_ptr<Transfer>> transfers;
  const auto start = [&](int64_t page, Priority priority) {
    transfers.push_back(
        Start(*engine, file, Access::kRead, page * kPage, memory.data() + page * kPage, kPage, priority));
  };
  start(0, Priority::kNormal);
  WaitUntilHeld(*plan, 1);
  plan->Slow({.count = 100}, 0);  // strikes to no effect: what is struck tells the order
  start(1, Priority::kNormal);
  start(2, Priority::kNormal);
  start(3, Priority::kUrgent);
  start(4, Priority::kUrgent);
  plan->Release();
  for (const auto& transfer : transfers) transfer->Wait();
  std::vector<int64_t> order;
  for (const FaultPlan::Struck& struck : plan->struck()) order.push_back(struck.offset / kPage);
  CHECK(order == (std::vector<int64_t>{0, 3, 4, 1, 2}));
}

TEST_EACH_ENGINE(ASlowOperationCompletesAfterLaterOnes) {
  Folder folder;
  auto plan = NewPlan();
  auto file = File::Open(folder.File("late"), 8 * kPage);
  auto engine = make(2, plan);
  AlignedBuffer memory(8 * kPage);
  plan->Hold({});
  auto late = Start(*engine, file, Access::kRead, 0, memory.data(), kPage);
  WaitUntilHeld(*plan, 1);
  for (int64_t i = 1; i < 8; ++i) {
    Start(*engine, file, Access::kRead, i * kPage, memory.data() + i * kPage, kPage)->Wait();
  }
  CHECK(!late->Done());
  plan->Release();
  late->Wait();
  plan->Slow({}, 0.002);
  const auto begin = std::chrono::steady_clock::now();
  Start(*engine, file, Access::kRead, 0, memory.data(), kPage)->Wait();
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(2));  // never earlier
}

TEST_EACH_ENGINE(ADirectoryThatDoesNotAnswerDelaysNoOther) {
  Folder stuck_folder;
  Folder folder;
  auto plan = NewPlan();
  auto stuck_file = File::Open(stuck_folder.File("stuck"), 64 * kMib);
  auto file = File::Open(folder.File("data"), 64 * kMib);
  auto engine = make(2, plan);
  AlignedBuffer memory(64 * kMib + 1);
  plan->Hold({.count = 1000, .path_prefix = stuck_folder.File("")});
  // Unaligned, so that the stuck directory holds all the bounce buffers it can get.
  auto stuck = Start(*engine, stuck_file, Access::kRead, 0, memory.data() + 1, 64 * kMib);
  WaitUntilHeld(*plan, 2);
  Start(*engine, file, Access::kWrite, 0, memory.data() + 1, 64 * kMib)->Wait();
  CHECK(!stuck->Done());
  plan->Release();
  stuck->Wait();
}

TEST_EACH_ENGINE(ABandwidthLimitIsOneTimelineForItsDirectory) {
  Folder folder;
  auto plan = NewPlan();
  plan->LimitBandwidth(folder.File(""), 100 * kMib);
  auto file = File::Open(folder.File("data"), kMib);
  auto engine = make(4, plan);
  AlignedBuffer memory(kMib);
  std::vector<std::shared_ptr<Transfer>> transfers;
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < 4; ++i) {
    transfers.push_back(
        Start(*engine, file, Access::kRead, i * kMib / 4, memory.data() + i * kMib / 4, kMib / 4));
  }
  for (const auto& transfer : transfers) transfer->Wait();
  // Four calls side by side take as long as one after the other: 1 MiB at 100 MiB/s, and never less.
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(10));
  CHECK(plan->struck().empty());
}

// ---------------------------------------------------------------- completion and the end

TEST_EACH_ENGINE(CallbacksRunOnceForEveryTransferAlsoAFailedOne) {
  Folder folder;
  auto plan = NewPlan();
  auto file = File::Open(folder.File("called"), 64 * kPage);
  AlignedBuffer memory(64 * kPage);
  std::atomic<int> calls = 0;
  {
    auto engine = make(2, plan);
    plan->Fail({.nth = 7}, EIO);
    for (int64_t i = 0; i < 64; ++i) {
      auto transfer =
          std::make_shared<Transfer>(file, Access::kRead, i * kPage, memory.data() + i * kPage, kPage);
      transfer->OnDone([&calls, held = transfer.get()] { calls += held->Done() ? 1 : 1000; });
      engine->Submit({&transfer, 1}, Priority::kNormal);
    }
    engine->Close();
    auto done = Start(*make(1, nullptr), file, Access::kRead, 0, memory.data(), 0);
    done->OnDone([&calls] { ++calls; });  // at once
  }
  CHECK_EQUAL(calls.load(), 65);
}

TEST_EACH_ENGINE(ATransferKnowsWhenItsCallsBeganAndEnded) {
  Folder folder;
  auto plan = NewPlan();
  auto file = File::Open(folder.File("times"), 16 * kMib);
  auto engine = make(1, plan);
  AlignedBuffer memory(16 * kMib);
  plan->Hold({});
  auto first = Start(*engine, file, Access::kWrite, 0, memory.data(), 9 * kMib);  // in several extents
  WaitUntilHeld(*plan, 1);
  auto second = Start(*engine, file, Access::kWrite, 9 * kMib, memory.data(), kPage);
  CHECK(!first->times() && !second->times());
  const auto released = std::chrono::steady_clock::now().time_since_epoch();
  plan->Release();
  first->Wait();
  second->Wait();
  const auto seen = std::chrono::steady_clock::now().time_since_epoch();
  CHECK(first->times()->first_call_began <= released && released <= first->times()->last_call_ended);
  CHECK(first->times()->last_call_ended <= second->times()->first_call_began);  // one call at a time
  CHECK(second->times()->first_call_began <= second->times()->last_call_ended);
  CHECK(second->times()->last_call_ended <= seen);
  auto empty = Start(*engine, file, Access::kRead, 0, memory.data(), 0);
  empty->Wait();
  CHECK(!empty->times());  // no call was made
}

TEST_EACH_ENGINE(ClosingWithTransfersInFlightCompletesThem) {
  Folder folder;
  auto plan = NewPlan();
  auto file = File::Open(folder.File("in_flight"), 64 * kMib);
  auto engine = make(2, plan);
  std::vector<std::byte> source = Pattern(64 * kMib, 12);
  plan->Hold({.nth = 2, .count = 2});
  auto transfer = Start(*engine, file, Access::kWrite, 0, source.data(), 64 * kMib);
  WaitUntilHeld(*plan, 1);
  CHECK(!transfer->Done());
  // Neither the file nor the pool may end before the held-back write has.
  auto file_closed = std::async(std::launch::async, [&] { file->Close(); });
  auto pool_closed = std::async(std::launch::async, [&] { engine->Close(); });
  auto again = std::async(std::launch::async, [&] { engine->Close(); });
  plan->Release();
  transfer->Wait();
  file_closed.get();
  pool_closed.get();
  again.get();
  CHECK(Contents(folder.File("in_flight")) == source);
}

TEST_EACH_ENGINE(ARefusedBatchStartsNothing) {
  Folder folder;
  auto plan = NewPlan();
  auto file = File::Open(folder.File("refused"), kMib);
  AlignedBuffer memory(kMib);
  auto engine = make(2, plan);
  engine->Close();
  {
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (int64_t i = 0; i < 4; ++i) {
      transfers.push_back(std::make_shared<Transfer>(file, Access::kWrite, i, memory.data(), 1));
    }
    CHECK_THROWS(std::runtime_error, "the I/O pool is closed", engine->Submit(transfers, Priority::kNormal));
  }
  file->Close();  // would wait for ever if the file still counted the refused transfers as its users
  CHECK_EQUAL(plan->operations(), 0);
}

TEST_EACH_ENGINE(AForkWithTransfersInFlightHurtsNeitherProcess) {
  Folder folder;
  auto plan = NewPlan();
  auto file = File::Open(folder.File("forked"), 8 * kMib);
  auto engine = make(2, plan);
  std::vector<std::byte> source = Pattern(8 * kMib, 3);
  AlignedBuffer pinned(kMib);
  auto registered = std::make_unique<RegisteredMemory>(engine, pinned.data(), pinned.size_bytes());
  plan->Hold({});
  auto transfer = Start(*engine, file, Access::kWrite, 0, source.data(), 8 * kMib);
  WaitUntilHeld(*plan, 1);
  const pid_t child = fork();
  if (child == 0) {
    int code = 0;
    try {
      engine->CheckUsable();
      code = 1;
    } catch (const std::runtime_error&) {
    }
    registered.reset();
    engine.reset();  // must not wait for threads that do not exist
    _exit(code);
  }
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), 0);
  plan->Release();
  transfer->Wait();
  CHECK(Contents(folder.File("forked")) == source);
}

TEST(MoreCallsInFlightThanTheRingHolds) {
  const std::string refusal = IoUringRefusal();
  if (!refusal.empty()) test::Skip("no io_uring here: " + refusal);
  Folder folder;
  constexpr int64_t kCount = 6000;
  auto file = File::Open(folder.File("many"), kCount * kPage);
  auto engine = MakeUringEngine(4096);
  const std::vector<std::byte> source = Pattern(kCount * kPage, 9);
  AlignedBuffer memory(kCount * kPage);
  std::copy(source.begin(), source.end(), memory.data());
  for (const Access access : {Access::kWrite, Access::kRead}) {
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (int64_t at = 0; at < kCount * kPage; at += kPage) {
      transfers.push_back(std::make_shared<Transfer>(file, access, at, memory.data() + at, kPage));
    }
    engine->Submit(transfers, Priority::kNormal);
    for (const auto& transfer : transfers) transfer->Wait();
    if (access == Access::kWrite) std::memset(memory.data(), 0, static_cast<size_t>(memory.size_bytes()));
  }
  CHECK(std::equal(source.begin(), source.end(), memory.data()));
}

// ---------------------------------------------------------------- registered memory

TEST(ThreadsSayThatTheyRegisterNothing) {
  auto engine = MakeThreadEngine(1);
  AlignedBuffer memory(kMib);
  const RegisteredMemory registered(engine, memory.data(), memory.size_bytes());
  CHECK(registered.refusal().find("io_uring does") != std::string::npos);
}

TEST_EACH_ENGINE(TransfersFromRegisteredMemoryAndBesideItRoundTrip) {
  Folder folder;
  auto file = File::Open(folder.File("pinned"), 6 * kMib);
  auto engine = make(4, nullptr);
  AlignedBuffer memory(6 * kMib);
  for (uint32_t round = 0; round < 20; ++round) {
    const std::vector<std::byte> source = Pattern(6 * kMib, round);
    std::copy(source.begin(), source.end(), memory.data());
    // Part of the memory, so that some extents lie within it, some outside and some across its end.
    const int64_t pinned_bytes = (round % 6 + 1) * kMib;
    auto registered = std::make_unique<RegisteredMemory>(engine, memory.data(), pinned_bytes);
    Start(*engine, file, Access::kWrite, 0, memory.data(), 6 * kMib)->Wait();
    if (round % 2 == 0) registered.reset();
    std::memset(memory.data(), 0, static_cast<size_t>(memory.size_bytes()));
    Start(*engine, file, Access::kRead, 0, memory.data(), 6 * kMib)->Wait();
    CHECK(std::equal(source.begin(), source.end(), memory.data()));
    if (round % 5 == 4) {
      engine->Close();  // before the registration ends
      const RegisteredMemory late(engine, memory.data(), kMib);
      CHECK(!late.refusal().empty());
      registered.reset();
      engine = make(4, nullptr);
    }
  }
}

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
