#include "lohan/thread_pool.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <iterator>
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

/// The nice value of every worker of a new pool, where each runs at least one task.
std::vector<int> PrioritiesOfWorkers(int threads) {
  ThreadPool pool(threads);
  std::vector<int> priorities(static_cast<size_t>(threads));
  std::atomic<int> arrived = 0;
  pool.Run(threads, [&](int64_t index) {
    priorities[static_cast<size_t>(index)] = getpriority(PRIO_PROCESS, 0);
    // Nobody takes a second task before everybody has one.
    for (++arrived; arrived < threads;) std::this_thread::yield();
  });
  return priorities;
}

/// Runs `body` in a process of its own and returns its result, from 0 to 255.
template <typename Body>
int InChild(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  return WEXITSTATUS(status);
}

bool AllAre(const std::vector<int>& values, int expected) {
  return std::all_of(values.begin(), values.end(), [&](int value) { return value == expected; });
}

TEST(WorkersYieldToTheThreadThatMadeThem) {
  const int own = getpriority(PRIO_PROCESS, 0);
  CHECK(AllAre(PrioritiesOfWorkers(3), std::min(own + kYieldedPriority, 19)));
  CHECK_EQUAL(getpriority(PRIO_PROCESS, 0), own);
  // In children: a priority is not to be had back.
  for (const int makers : {own, std::max(own, 18), 19}) {
    CHECK_EQUAL(InChild([&] {
                  if (setpriority(PRIO_PROCESS, 0, makers) != 0) return 2;
                  const int expected = std::min(makers + kYieldedPriority, 19);
                  return AllAre(PrioritiesOfWorkers(2), expected) ? 0 : 1;
                }),
                0);
  }
}

/// Has one system call fail with EPERM in this process from now on, as a container's profile does. False
/// where the kernel takes no filter.
bool Forbid(long call) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {std::size(program), program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST(WorkersWorkWherePrioritiesAreRefused) {
  constexpr int kNoFilter = 77;
  for (const long call : {SYS_getpriority, SYS_setpriority}) {
    const int result = InChild([&] {
      if (!Forbid(call)) return kNoFilter;
      ThreadPool pool(2);
      std::atomic<int64_t> sum = 0;
      pool.Run(10, [&](int64_t index) { sum += index; });
      return sum.load() == 45 ? 0 : 1;
    });
    if (result == kNoFilter) test::Skip("the kernel takes no seccomp filter");
    CHECK_EQUAL(result, 0);
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
