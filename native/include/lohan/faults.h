// Scripted faults for tests and measurements: they strike the calls of any engine alike.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lohan/file.h"

namespace lohan {

/// What happens to one call. At most one of the first four strikes; all are absent from most calls.
struct CallFault {
  int error_number = 0;                         // fail with it, without reaching the drive
  std::optional<int64_t> limit_bytes;           // report at most this many bytes
  std::optional<int64_t> flipped_bit;           // bit of the call's data, modulo its length
  int64_t hold = 0;                             // complete only after this FaultPlan::Release; 0: at once
  std::chrono::steady_clock::time_point due{};  // complete no earlier
};

/// Which operations go wrong, and how. An operation is one read or write call of an engine, of at most
/// kExtentBytes; a repeated call counts again. Each rule counts the operations on the paths that begin with
/// its prefix (all, when it is empty), from 1 on from the moment the rule was made, and strikes `count` of
/// them from the `nth` on. Thread-safe; may be changed while an engine runs.
class FaultPlan {
 public:
  /// Which operations a rule strikes. Throws std::invalid_argument, as do the rules, for values below 1.
  struct Target {
    int64_t nth = 1;
    int64_t count = 1;
    std::string path_prefix{};
  };
  struct Struck {
    Access access;
    std::string path;
    int64_t offset;
  };

  /// Fails with `error_number`; EINTR and EAGAIN are repeated by the engine.
  void Fail(const Target& target, int error_number);
  /// Moves `missing_bytes` less than asked for, but at least one byte.
  void Shorten(const Target& target, int64_t missing_bytes);
  /// Completes `seconds` after it began at the earliest.
  void Slow(const Target& target, double seconds);
  /// Changes bit `bit` of what is read, or of what is written (not in the caller's memory).
  void FlipBit(const Target& target, int64_t bit);
  /// Completes after Release only: the way to test an order without a clock.
  void Hold(const Target& target);
  /// Lets go of all held operations, and holds no further one.
  void Release();
  /// Lets the operations on paths that begin with `path_prefix` complete at this rate in total, one after the
  /// other, as one slow drive would. Replaces an earlier limit of the same prefix.
  void LimitBandwidth(const std::string& path_prefix, int64_t bytes_per_second);

  /// Operations so far.
  int64_t operations() const;
  /// Operations that wait for Release now.
  int64_t held() const;
  /// The operations that a rule (not a bandwidth limit) struck, in order.
  std::vector<Struck> struck() const;

  // For engines:
  CallFault Decide(Access access, const std::string& path, int64_t offset, int64_t length_bytes);
  /// Whether the call may complete now.
  bool MayComplete(const CallFault& fault) const;
  /// Blocks until it may.
  void AwaitCompletion(const CallFault& fault) const;
  /// A call that was held has completed.
  void CountOut(const CallFault& fault);

 private:
  struct Rule {
    Target target{};
    CallFault fault{};
    int64_t missing_bytes = 0;
    std::chrono::nanoseconds delay{0};
    int64_t seen = 0;
  };
  struct Limit {
    std::string path_prefix;
    int64_t bytes_per_second;
    std::chrono::steady_clock::time_point busy_until{};
  };

  void Add(Rule rule);

  mutable std::mutex mutex_;
  mutable std::condition_variable released_condition_;
  std::vector<Rule> rules_;
  std::vector<Limit> limits_;
  std::vector<Struck> struck_;
  int64_t operations_ = 0;
  int64_t held_ = 0;
  int64_t releases_ = 0;
};

}  // namespace lohan
