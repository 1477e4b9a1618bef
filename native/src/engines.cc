#include <stdexcept>
#include <string>
#include <utility>

#include "lohan/io.h"
#include "pooled_engine.h"
#include "pread_workers.h"
#include "uring_workers.h"

namespace lohan {
namespace {

void CheckWithin(const char* name, int value, int most) {
  if (value >= 1 && value <= most) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; allowed are 1 to " +
                              std::to_string(most));
}
void CheckThreads(int threads) { CheckWithin("threads", threads, 256); }
void CheckDepth(int depth) { CheckWithin("depth", depth, 4096); }

}  // namespace

std::string IoUringRefusal() {
  try {
    const Ring ring(Ring::SetUp(1, 1));
    return "";
  } catch (const UringRefused& refusal) {
    return refusal.what();
  }
}

std::shared_ptr<IoEngine> MakeThreadEngine(int threads, std::shared_ptr<FaultPlan> faults) {
  CheckThreads(threads);
  return std::make_shared<PooledEngine<PreadWorkers, EngineKind::kThreads>>(
      std::make_unique<PreadWorkers>(threads, std::move(faults)));
}

std::shared_ptr<IoEngine> MakeUringEngine(int depth, std::shared_ptr<FaultPlan> faults) {
  CheckDepth(depth);
  return std::make_shared<PooledEngine<UringWorkers, EngineKind::kUring>>(
      std::make_unique<UringWorkers>(depth, std::move(faults)));
}

ChosenEngine MakeEngine(EngineKind wish, int threads, int depth, std::shared_ptr<FaultPlan> faults) {
  CheckThreads(threads);
  CheckDepth(depth);
  if (wish == EngineKind::kThreads) return {MakeThreadEngine(threads, std::move(faults)), ""};
  try {
    return {MakeUringEngine(depth, faults), ""};
  } catch (const UringRefused& refusal) {
    if (wish == EngineKind::kUring) {
      throw UringRefused("io_uring was asked for and cannot be used: " + std::string(refusal.what()) +
                         "; threads work without it");
    }
    return {MakeThreadEngine(threads, std::move(faults)), refusal.what()};
  }
}

}  // namespace lohan
