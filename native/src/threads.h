// Starting worker threads, for the pools.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <functional>
#include <thread>
#include <vector>

namespace lohan {

/// Starts `count` threads that call `body(index)`, with every signal blocked, so that signals reach the
/// interpreter's own thread. Threads that were started before one failed are in `threads` too: the caller
/// stops and joins them.
inline void StartThreads(int count, const std::function<void(int)>& body, std::vector<std::thread>& threads) {
  sigset_t all, previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  try {
    threads.reserve(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

}  // namespace lohan
