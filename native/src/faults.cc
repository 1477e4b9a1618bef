#include "lohan/faults.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <thread>
#include <utility>

namespace lohan {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLongestDelaySeconds = 86400;

bool HasPrefix(const std::string& path, const std::string& prefix) {
  return path.compare(0, prefix.size(), prefix) == 0;
}

void CheckAtLeast(const char* name, int64_t value, int64_t least) {
  if (value >= least) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be " +
                              std::to_string(least) + " or more");
}

}  // namespace

void FaultPlan::Add(Rule rule) {
  CheckAtLeast("nth", rule.target.nth, 1);
  CheckAtLeast("count", rule.target.count, 1);
  std::lock_guard lock(mutex_);
  rules_.push_back(std::move(rule));
}

void FaultPlan::Fail(const Target& target, int error_number) {
  CheckAtLeast("error_number", error_number, 1);
  Rule rule{.target = target};
  rule.fault.error_number = error_number;
  Add(std::move(rule));
}

void FaultPlan::Shorten(const Target& target, int64_t missing_bytes) {
  CheckAtLeast("missing_bytes", missing_bytes, 1);
  Add({.target = target, .missing_bytes = missing_bytes});
}

void FaultPlan::Slow(const Target& target, double seconds) {
  if (!(seconds >= 0 && seconds <= kLongestDelaySeconds)) {
    throw std::invalid_argument("seconds is " + std::to_string(seconds) + "; allowed are 0 to 86400");
  }
  Add({.target = target, .delay = std::chrono::nanoseconds(std::llround(seconds * 1e9))});
}

void FaultPlan::FlipBit(const Target& target, int64_t bit) {
  CheckAtLeast("bit", bit, 0);
  Rule rule{.target = target};
  rule.fault.flipped_bit = bit;
  Add(std::move(rule));
}

void FaultPlan::Hold(const Target& target) {
  Rule rule{.target = target};
  rule.fault.hold = 1;
  Add(std::move(rule));
}

void FaultPlan::Release() {
  {
    std::lock_guard lock(mutex_);
    ++releases_;
    std::erase_if(rules_, [](const Rule& rule) { return rule.fault.hold != 0; });
  }
  released_condition_.notify_all();
}

void FaultPlan::LimitBandwidth(const std::string& path_prefix, int64_t bytes_per_second) {
  CheckAtLeast("bytes_per_second", bytes_per_second, 1);
  std::lock_guard lock(mutex_);
  std::erase_if(limits_, [&](const Limit& limit) { return limit.path_prefix == path_prefix; });
  limits_.push_back({path_prefix, bytes_per_second});
}

int64_t FaultPlan::operations() const {
  std::lock_guard lock(mutex_);
  return operations_;
}

int64_t FaultPlan::held() const {
  std::lock_guard lock(mutex_);
  return held_;
}

std::vector<FaultPlan::Struck> FaultPlan::struck() const {
  std::lock_guard lock(mutex_);
  return struck_;
}

CallFault FaultPlan::Decide(Access access, const std::string& path, int64_t offset, int64_t length_bytes) {
  const Clock::time_point now = Clock::now();
  std::lock_guard lock(mutex_);
  ++operations_;
  CallFault fault;
  bool strikes = false;
  for (Rule& rule : rules_) {
    if (!HasPrefix(path, rule.target.path_prefix)) continue;
    ++rule.seen;
    if (strikes || rule.seen < rule.target.nth || rule.seen - rule.target.nth >= rule.target.count) continue;
    strikes = true;
    fault = rule.fault;
    if (rule.missing_bytes > 0) {
      fault.limit_bytes = std::max<int64_t>(1, length_bytes - rule.missing_bytes);
    }
    if (rule.delay.count() > 0) fault.due = now + rule.delay;
  }
  if (strikes) struck_.push_back({access, path, offset});
  if (fault.hold != 0) {
    fault.hold = releases_ + 1;
    ++held_;
  }
  for (Limit& limit : limits_) {
    if (!HasPrefix(path, limit.path_prefix)) continue;
    const double seconds = static_cast<double>(length_bytes) / static_cast<double>(limit.bytes_per_second);
    limit.busy_until =
        std::max(now, limit.busy_until) + std::chrono::nanoseconds(std::llround(seconds * 1e9));
    fault.due = std::max(fault.due, limit.busy_until);
  }
  return fault;
}

bool FaultPlan::MayComplete(const CallFault& fault) const {
  if (Clock::now() < fault.due) return false;
  std::lock_guard lock(mutex_);
  return fault.hold <= releases_;
}

void FaultPlan::AwaitCompletion(const CallFault& fault) const {
  std::unique_lock lock(mutex_);
  released_condition_.wait(lock, [&] { return fault.hold <= releases_; });
  lock.unlock();
  const auto now = Clock::now();
  if (fault.due > now) std::this_thread::sleep_until(fault.due);
}

void FaultPlan::CountOut(const CallFault& fault) {
  if (fault.hold == 0) return;
  std::lock_guard lock(mutex_);
  --held_;
}

}  // namespace lohan
