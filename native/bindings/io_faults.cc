#include <nanobind/stl/string.h>

#include "io.h"

namespace lohan {
namespace {

FaultPlan::Target TargetOf(int64_t nth, int64_t count, nb::handle path_prefix) {
  return {nth, count, EncodePath(path_prefix)};
}

nb::list StruckOf(const FaultPlanHandle& self) {
  nb::list struck;
  for (const FaultPlan::Struck& one : self.plan->struck()) {
    struck.append(nb::make_tuple(NameOf(one.access), DecodePath(one.path), one.offset));
  }
  return struck;
}

// A str, bytes or os.PathLike, as every path here.
#define LOHAN_TARGET_SIGNATURE "*, count: int = 1, path_prefix: str | os.PathLike[str] = '') -> None"

}  // namespace

void InitIoFaults(nb::module_& m) {
  nb::class_<FaultPlanHandle>(m, "FaultPlan",
                              R"(Faults for tests: which operations of a pool go wrong, and how.

An operation is one read or write call of up to 4 MiB; a repeated call counts again. Each rule counts the
operations on paths that begin with `path_prefix`, from 1 on since the rule was made, and strikes `count`
of them from the `nth` on. All engines are struck alike. Values below 1 raise ValueError.)")
      .def(nb::init<>())
      .def(
          "fail",
          [](FaultPlanHandle& self, int64_t nth, int error_number, int64_t count, nb::handle prefix) {
            self.plan->Fail(TargetOf(nth, count, prefix), error_number);
          },
          nb::arg("nth"), nb::arg("error_number"), nb::kw_only(), nb::arg("count") = 1,
          nb::arg("path_prefix") = "",
          nb::sig("def fail(self, nth: int, error_number: int, " LOHAN_TARGET_SIGNATURE),
          "Fail with this errno; the pool repeats EINTR and EAGAIN.")
      .def(
          "shorten",
          [](FaultPlanHandle& self, int64_t nth, int64_t missing_bytes, int64_t count, nb::handle prefix) {
            self.plan->Shorten(TargetOf(nth, count, prefix), missing_bytes);
          },
          nb::arg("nth"), nb::arg("missing_bytes"), nb::kw_only(), nb::arg("count") = 1,
          nb::arg("path_prefix") = "",
          nb::sig("def shorten(self, nth: int, missing_bytes: int, " LOHAN_TARGET_SIGNATURE),
          "Move this many bytes less than asked for, but at least one; the pool goes on from there.")
      .def(
          "slow",
          [](FaultPlanHandle& self, int64_t nth, double seconds, int64_t count, nb::handle prefix) {
            self.plan->Slow(TargetOf(nth, count, prefix), seconds);
          },
          nb::arg("nth"), nb::arg("seconds"), nb::kw_only(), nb::arg("count") = 1,
          nb::arg("path_prefix") = "",
          nb::sig("def slow(self, nth: int, seconds: float, " LOHAN_TARGET_SIGNATURE),
          "Complete no earlier than this long (0 to 86400 s) after the beginning.")
      .def(
          "flip_bit",
          [](FaultPlanHandle& self, int64_t nth, int64_t bit, int64_t count, nb::handle prefix) {
            self.plan->FlipBit(TargetOf(nth, count, prefix), bit);
          },
          nb::arg("nth"), nb::arg("bit"), nb::kw_only(), nb::arg("count") = 1, nb::arg("path_prefix") = "",
          nb::sig("def flip_bit(self, nth: int, bit: int, " LOHAN_TARGET_SIGNATURE),
          "Change this bit, modulo the length, of what arrives in memory or on the drive; report no error.")
      .def(
          "hold",
          [](FaultPlanHandle& self, int64_t nth, int64_t count, nb::handle prefix) {
            self.plan->Hold(TargetOf(nth, count, prefix));
          },
          nb::arg("nth"), nb::kw_only(), nb::arg("count") = 1, nb::arg("path_prefix") = "",
          nb::sig("def hold(self, nth: int, " LOHAN_TARGET_SIGNATURE),
          "Complete only after `release`: a way to test an order without a clock. Closing the pool waits "
          "too.")
      .def(
          "release", [](FaultPlanHandle& self) { self.plan->Release(); },
          "Let go of what is held, and drop the rules that hold.")
      .def(
          "limit_bandwidth",
          [](FaultPlanHandle& self, nb::handle path_prefix, int64_t bytes_per_second) {
            self.plan->LimitBandwidth(EncodePath(path_prefix), bytes_per_second);
          },
          nb::arg("path_prefix"), nb::arg("bytes_per_second"),
          nb::sig("def limit_bandwidth(self, path_prefix: str | os.PathLike[str], bytes_per_second: int) -> "
                  "None"),
          R"(Let operations on these paths complete at this rate in total, one after the other, as a slow drive would.

Name a directory with a slash at its end, or `dir1` stands for `dir10` too.)")
      .def_prop_ro(
          "operations", [](const FaultPlanHandle& self) { return self.plan->operations(); },
          "Operations begun so far.")
      .def_prop_ro(
          "held", [](const FaultPlanHandle& self) { return self.plan->held(); },
          "Operations that `hold` holds now.")
      .def_prop_ro("struck", &StruckOf, nb::sig("def struck(self) -> list[tuple[str, str, int]]"),
                   "What the rules struck, in order: \"read\" or \"write\", path, offset in bytes.");
}

}  // namespace lohan
