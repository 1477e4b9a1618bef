#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <utility>

#include "io.h"

namespace lohan {

// ---------------------------------------------------------------- callbacks

void Notifier::Add(Transfer& transfer, nb::object ticket, nb::object callback) {
  const int64_t number = next_number_++;
  outstanding_.emplace(number, Call{std::move(ticket), std::move(callback)});
  if (!loop_runs_) {
    try {
      StartLoop();
    } catch (...) {
      outstanding_.erase(number);
      throw;
    }
  }
  transfer.OnDone([self = shared_from_this(), number] {
    {
      std::lock_guard lock(self->mutex_);
      self->ready_.push_back(number);
    }
    self->work_.notify_one();
  });
}

void Notifier::StartLoop() {
  loop_runs_ = true;
  try {
    const nb::object body = nb::cpp_function([self = shared_from_this()] { self->Loop(); });
    const nb::object thread = nb::module_::import_("threading")
                                  .attr("Thread")(nb::arg("target") = body, nb::arg("name") = "io-notifier",
                                                  nb::arg("daemon") = false);
    thread.attr("start")();
  } catch (...) {
    loop_runs_ = false;
    throw;
  }
}

void Notifier::Loop() {
  while (!outstanding_.empty()) {
    int64_t number = 0;
    {
      nb::gil_scoped_release release;
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return !ready_.empty(); });
      number = ready_.front();
      ready_.pop_front();
    }
    Deliver(number);
  }
  loop_runs_ = false;
}

void Notifier::Deliver(int64_t number) {
  const auto found = outstanding_.find(number);
  const Call call = std::move(found->second);
  outstanding_.erase(found);
  try {
    call.callback(call.ticket);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable(call.callback);
  }
}

// ---------------------------------------------------------------- tickets

Ticket::~Ticket() {
  if (!submitted_) return;
  if (!engine_->owner().IsCurrent()) {
    // A forked child: the transfer never ends and its locks may be held for ever. Leave it as it is.
    static_cast<void>(new std::shared_ptr<Transfer>(std::move(transfer_)));
    return;
  }
  {
    nb::gil_scoped_release release;
    transfer_->WaitQuietly();
  }
  DropWithoutGil(engine_);
}

void Ticket::Wait() {
  engine_->owner().Check(kIoPoolName);
  nb::gil_scoped_release release;
  transfer_->Wait();
}

std::optional<std::pair<double, double>> Ticket::Times() const {
  using Seconds = std::chrono::duration<double>;
  const std::optional<Transfer::Times> times = transfer_->times();
  if (!times) return std::nullopt;
  return std::pair(Seconds(times->first_call_began).count(), Seconds(times->last_call_ended).count());
}

void Ticket::OnDone(nb::object self, nb::object callback) {
  engine_->owner().Check(kIoPoolName);
  if (!PyCallable_Check(callback.ptr())) throw nb::type_error("callback: expected a callable");
  notifier_->Add(*transfer_, std::move(self), std::move(callback));
}

void InitIoTickets(nb::module_& m) {
  nb::class_<Ticket>(m, "IoTicket",
                     R"(A transfer under way.

It keeps the array alive; dropping it waits for the transfer to end.)")
      .def("wait", &Ticket::Wait,
           "Block until the transfer has ended; raises IoError if it failed. Releases the GIL.")
      .def("done", &Ticket::Done, "Whether the transfer has ended, well or badly.")
      .def_prop_ro("times", &Ticket::Times,
                   R"(When its first call into the system began and its last one ended.

In seconds of `time.perf_counter`. None until the transfer has ended, and where no call was made.)")
      .def(
          "on_done",
          [](nb::handle_t<Ticket> self, nb::object callback) {
            nb::cast<Ticket&>(self).OnDone(nb::borrow(self), std::move(callback));
          },
          nb::arg("callback"),
          nb::sig("def on_done(self, callback: collections.abc.Callable[[IoTicket], object]) -> None"),
          R"(Have `callback(ticket)` called once the transfer has ended, well or badly.

All callbacks of a pool run one after the other, in a thread that lives while there are any outstanding;
the interpreter's end waits for it. What a callback raises goes to `sys.unraisablehook`.)");
}

}  // namespace lohan
