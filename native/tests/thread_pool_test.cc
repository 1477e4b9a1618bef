#include "lohan/thread_pool.h"

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <vector>

#include "check.h"
#include "lohan/topology.h"

namespace lohan {
namespace {

TEST(EveryIndexRunsOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (const int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<size_t>(count));
      pool.Run(count, [&](int64_t index) { ++calls[static_cast<size_t>(index)]; });
      for (const auto& value : calls) CHECK_EQUAL(value.load(), 1);
    }
  }
}

TEST(ZeroThreadsMeansTheAffinityMask) {
  cpu_set_t saved;
  CHECK_EQUAL(sched_getaffinity(0, sizeof(saved), &saved), 0);
  CHECK_EQUAL(ThreadPool(0).threads(), CPU_COUNT(&saved));
  int first = 0;
  while (!CPU_ISSET(first, &saved)) ++first;
  cpu_set_t narrow;
  CPU_ZERO(&narrow);
  CPU_SET(first, &narrow);
  CHECK_EQUAL(sched_setaffinity(0, sizeof(narrow), &narrow), 0);
  {
    ThreadPool pool(0);
    CHECK_EQUAL(pool.threads(), 1);
    int ran_on = -1;
    pool.Run(1, [&](int64_t) { ran_on = sched_getcpu(); });
    CHECK_EQUAL(ran_on, first);
  }
  CHECK_EQUAL(sched_setaffinity(0, sizeof(saved), &saved), 0);
}

TEST(ATaskThatThrowsEndsTheRunAndThePoolGoesOn) {
  ThreadPool pool(3);
  CHECK_THROWS(std::runtime_error, "task 5", pool.Run(1000, [](int64_t index) {
    if (index == 5) throw std::runtime_error("task 5");
  }));
  std::atomic<int64_t> sum = 0;
  pool.Run(10, [&](int64_t index) { sum += index; });
  CHECK_EQUAL(sum.load(), 45);
}

std::vector<int> Numbers(const std::vector<Cpu>& cpus) {
  std::vector<int> numbers;
  for (const Cpu& cpu : cpus) numbers.push_back(cpu.number);
  return numbers;
}

TEST(CoresComeBeforeTheirSecondThreadsAndNodesAlike) {
  // Two nodes of two cores of two threads each, numbered as Linux does: all first threads, then all second
  // ones.
  std::vector<Cpu> cpus;
  for (int number = 0; number < 8; ++number) cpus.push_back({number, number % 4, number % 4 / 2});
  CHECK(Numbers(ChooseCpus(cpus, 1)) == std::vector<int>({0}));
  CHECK(Numbers(ChooseCpus(cpus, 2)) == std::vector<int>({0, 2}));
  CHECK(Numbers(ChooseCpus(cpus, 4)) == std::vector<int>({0, 1, 2, 3}));
  CHECK(Numbers(ChooseCpus(cpus, 6)) == std::vector<int>({0, 1, 4, 2, 3, 6}));
  CHECK(Numbers(ChooseCpus(cpus, 8)) == std::vector<int>({0, 1, 4, 5, 2, 3, 6, 7}));
  CHECK(ChooseCpus(cpus, 9).empty());
  CHECK(ChooseCpus({}, 1).empty());
}

TEST(TheAllowedCpusAreThoseOfTheMask) {
  cpu_set_t mask;
  CHECK_EQUAL(sched_getaffinity(0, sizeof(mask), &mask), 0);
  const std::vector<Cpu> cpus = AllowedCpus();
  CHECK_EQUAL(static_cast<int>(cpus.size()), CPU_COUNT(&mask));
  for (const Cpu& cpu : cpus) CHECK(CPU_ISSET(cpu.number, &mask));
  // Without a /sys every CPU is a core of its own on one node.
  const std::vector<Cpu> unknown = AllowedCpus("/nonexistent");
  for (size_t i = 0; i < unknown.size(); ++i) {
    CHECK_EQUAL(unknown[i].core, static_cast<int>(i));
    CHECK_EQUAL(unknown[i].node, 0);
  }
}

TEST(PinnedWorkersHaveCpusOfTheirOwnAndOthersTheMakersMask) {
  const std::vector<Cpu> cpus = AllowedCpus();
  const auto count = static_cast<int>(cpus.size());
  for (const auto& [affinity, threads, allowed] :
       {std::tuple(Affinity::kPinned, count, 1), std::tuple(Affinity::kInherit, count, count),
        std::tuple(Affinity::kPinned, count + 1, count)}) {
    ThreadPool pool(threads, affinity);
    std::vector<cpu_set_t> masks(static_cast<size_t>(threads));
    pool.Run(threads, [&](int64_t i) {
      CHECK_EQUAL(sched_getaffinity(0, sizeof(cpu_set_t), &masks[static_cast<size_t>(i)]), 0);
    });
    for (const cpu_set_t& mask : masks) CHECK_EQUAL(CPU_COUNT(&mask), allowed);
  }
}

TEST(ConcurrentCallersTakeTurns) {
  ThreadPool pool(2);
  std::atomic<int64_t> sum = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) pool.Run(20, [&](int64_t index) { sum += index; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQUAL(sum.load(), 4 * 50 * 190);
}

TEST(BadCountsAreRefused) {
  CHECK_THROWS(std::invalid_argument, "-1", ThreadPool(-1));
  CHECK_THROWS(std::invalid_argument, "1025", ThreadPool(1025));
}

TEST(AForkedChildGetsAnErrorAndEnds) {
  ThreadPool pool(2);
  const pid_t child = fork();
  if (child == 0) {
    int code = 1;
    {
      ThreadPool& inherited = pool;
      try {
        inherited.Run(1, [](int64_t) {});
      } catch (const std::runtime_error&) {
        code = 0;
      }
    }
    pool.~ThreadPool();  // must not join threads that do not exist
    _exit(code);
  }
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), 0);
  std::atomic<int> ran = 0;
  pool.Run(3, [&](int64_t) { ++ran; });
  CHECK_EQUAL(ran.load(), 3);
}

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
