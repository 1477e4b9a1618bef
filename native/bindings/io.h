// What the binding files of file I/O share.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "bindings.h"
#include "lohan/io.h"

namespace lohan {

inline constexpr const char* kIoPoolName = "the I/O pool";

/// Lets go of what may join threads or wait for transfers, without keeping other Python threads from running.
template <typename T>
void DropWithoutGil(std::shared_ptr<T>& pointer) {
  nb::gil_scoped_release release;
  pointer.reset();
}

/// Calls Python when transfers end. I/O workers hand over numbers and never take the GIL; a thread of
/// Python's does the calling. It lives while callbacks are outstanding, and the interpreter waits for it at
/// its end.
class Notifier : public std::enable_shared_from_this<Notifier> {
 public:
  /// Has `callback(ticket)` called once `transfer` is done. Needs the GIL.
  void Add(Transfer& transfer, nb::object ticket, nb::object callback);

 private:
  struct Call {
    nb::object ticket;
    nb::object callback;
  };

  void StartLoop();
  void Loop();
  void Deliver(int64_t number);

  // Guarded by the GIL:
  std::map<int64_t, Call> outstanding_;
  int64_t next_number_ = 0;
  bool loop_runs_ = false;

  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<int64_t> ready_;
};

/// A transfer with the array it works on. The engine's workers never touch Python, so the array may only be
/// let go by a thread that holds the GIL, after the transfer has ended.
class Ticket {
 public:
  Ticket(std::shared_ptr<IoEngine> engine, std::shared_ptr<Notifier> notifier,
         std::shared_ptr<Transfer> transfer, HostArray array)
      : engine_(std::move(engine)),
        notifier_(std::move(notifier)),
        transfer_(std::move(transfer)),
        array_(std::move(array)) {}
  ~Ticket();

  const std::shared_ptr<Transfer>& transfer() const { return transfer_; }
  /// The engine has taken the transfer, so that from now on it ends.
  void MarkSubmitted() { submitted_ = true; }

  bool Done() const { return transfer_->Done(); }
  /// Seconds.
  std::optional<std::pair<double, double>> Times() const;
  void Wait();
  void OnDone(nb::object self, nb::object callback);

 private:
  std::shared_ptr<IoEngine> engine_;
  std::shared_ptr<Notifier> notifier_;
  std::shared_ptr<Transfer> transfer_;
  HostArray array_;
  bool submitted_ = false;
};

/// Python's FaultPlan. Workers share the plan itself, so that letting go of it never needs the GIL.
struct FaultPlanHandle {
  std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
};

/// A path as the system takes it, from str, bytes or os.PathLike. Throws TypeError, ValueError.
std::string EncodePath(nb::handle path);
nb::object DecodePath(const std::string& path);

void InitIoErrors(nb::module_& m);
void InitIoFaults(nb::module_& m);
void InitIoTickets(nb::module_& m);

}  // namespace lohan
