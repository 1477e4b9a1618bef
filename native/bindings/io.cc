#include "io.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>
#include <vector>

namespace lohan {
namespace {

/// One (offset, array) of a batch.
struct Request {
  int64_t offset;
  HostArray array;
};

class OpenFile {
 public:
  OpenFile(std::shared_ptr<IoEngine> engine, std::shared_ptr<Notifier> notifier, std::shared_ptr<File> opened)
      : file(std::move(opened)), engine_(std::move(engine)), notifier_(std::move(notifier)) {}
  ~OpenFile() { DropWithoutGil(engine_); }

  std::unique_ptr<Ticket> Read(int64_t offset, nb::handle target, bool urgent) {
    return SubmitOne(Access::kRead, {offset, ImportArray(target, "target", ArrayUse::kWrite)}, urgent);
  }

  std::unique_ptr<Ticket> Write(int64_t offset, nb::handle source, bool urgent) {
    return SubmitOne(Access::kWrite, {offset, ImportArray(source, "source", ArrayUse::kRead)}, urgent);
  }

  std::vector<std::unique_ptr<Ticket>> ReadBatch(const nb::iterable& requests, bool urgent) {
    return Submit(Access::kRead, Import(requests, "target", ArrayUse::kWrite), urgent);
  }

  std::vector<std::unique_ptr<Ticket>> WriteBatch(const nb::iterable& requests, bool urgent) {
    return Submit(Access::kWrite, Import(requests, "source", ArrayUse::kRead), urgent);
  }

  void Sync() {
    engine_->owner().Check(kIoPoolName);
    nb::gil_scoped_release release;
    file->Sync();
  }

  void Close() {
    engine_->owner().Check(kIoPoolName);
    nb::gil_scoped_release release;
    file->Close();
  }

  const std::shared_ptr<File> file;

 private:
  static std::vector<Request> Import(const nb::iterable& requests, const char* name, ArrayUse use) {
    std::vector<Request> imported;
    for (const nb::handle item : requests) {
      const std::string place = std::string(name) + " " + std::to_string(imported.size());
      std::pair<int64_t, nb::object> pair;
      if (!nb::isinstance<nb::tuple>(item) || nb::len(item) != 2 ||
          !nb::try_cast<int64_t>(item[0], pair.first)) {
        throw nb::type_error((place + ": expected a tuple of an offset in bytes and an array").c_str());
      }
      imported.push_back({pair.first, ImportArray(item[1], place.c_str(), use)});
    }
    return imported;
  }

  std::unique_ptr<Ticket> SubmitOne(Access access, Request request, bool urgent) {
    std::vector<Request> requests;
    requests.push_back(std::move(request));
    return std::move(Submit(access, std::move(requests), urgent).front());
  }

  /// Starts all of them or, when one cannot be, none.
  std::vector<std::unique_ptr<Ticket>> Submit(Access access, std::vector<Request> requests, bool urgent) {
    engine_->CheckUsable();
    std::vector<std::unique_ptr<Ticket>> tickets;
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (Request& request : requests) {
      HostArray& array = request.array;
      transfers.push_back(
          std::make_shared<Transfer>(file, access, request.offset, array.data, array.size_bytes()));
      tickets.push_back(std::make_unique<Ticket>(engine_, notifier_, transfers.back(), std::move(array)));
    }
    engine_->Submit(transfers, urgent ? Priority::kUrgent : Priority::kNormal);
    for (const auto& ticket : tickets) ticket->MarkSubmitted();
    return tickets;
  }

  std::shared_ptr<IoEngine> engine_;
  std::shared_ptr<Notifier> notifier_;
};

/// Registered memory with the buffer it lies in; the members' order unpins it before the buffer may go.
struct PinnedMemory {
  nb::object buffer;
  std::shared_ptr<RegisteredMemory> registered;

  ~PinnedMemory() { DropWithoutGil(registered); }
};

class Pool {
 public:
  Pool(int threads, EngineKind wish, int depth, const FaultPlanHandle* faults) {
    const std::shared_ptr<FaultPlan> plan = faults == nullptr ? nullptr : faults->plan;
    nb::gil_scoped_release release;
    chosen_ = MakeEngine(wish, threads, depth, plan);
  }
  ~Pool() { DropWithoutGil(chosen_.engine); }

  EngineKind engine() const { return chosen_.engine->kind(); }
  const std::string& engine_refusal() const { return chosen_.uring_refusal; }

  std::unique_ptr<OpenFile> Open(nb::handle path, std::optional<int64_t> size_bytes, int64_t stripe_bytes) {
    std::vector<std::string> paths;
    if (nb::isinstance<nb::list>(path) || nb::isinstance<nb::tuple>(path)) {
      for (const nb::handle one : nb::borrow<nb::iterable>(path)) paths.push_back(EncodePath(one));
    } else {
      paths.push_back(EncodePath(path));
    }
    chosen_.engine->CheckUsable();
    nb::gil_scoped_release release;
    return std::make_unique<OpenFile>(chosen_.engine, notifier_, File::Open(paths, size_bytes, stripe_bytes));
  }

  std::unique_ptr<PinnedMemory> Register(nb::handle_t<AlignedBuffer> buffer) {
    chosen_.engine->CheckUsable();
    const auto& memory = nb::cast<const AlignedBuffer&>(buffer);
    nb::object owner = nb::borrow(buffer);
    nb::gil_scoped_release release;
    auto registered = std::make_shared<RegisteredMemory>(chosen_.engine, memory.data(), memory.size_bytes());
    return std::unique_ptr<PinnedMemory>(new PinnedMemory{std::move(owner), std::move(registered)});
  }

  void Close() {
    nb::gil_scoped_release release;
    chosen_.engine->Close();
  }

 private:
  ChosenEngine chosen_;
  std::shared_ptr<Notifier> notifier_ = std::make_shared<Notifier>();
};

void InitFile(nb::module_& m) {
  nb::class_<OpenFile>(m, "IoFile", "An open file of fixed size. All methods may be called from any thread.")
      .def_prop_ro(
          "path", [](const OpenFile& self) { return DecodePath(self.file->paths().front()); },
          nb::sig("def path(self) -> str"), "The path, or the first of a striped file's.")
      .def_prop_ro(
          "paths",
          [](const OpenFile& self) {
            nb::list paths;
            for (const std::string& path : self.file->paths()) paths.append(DecodePath(path));
            return paths;
          },
          nb::sig("def paths(self) -> list[str]"), "All paths, in the order they were given.")
      .def_prop_ro("size_bytes", [](const OpenFile& self) { return self.file->size_bytes(); })
      .def_prop_ro(
          "direct", [](const OpenFile& self) { return self.file->direct(); },
          "Whether whole pages bypass the page cache (O_DIRECT).")
      .def_prop_ro(
          "direct_refusal", [](const OpenFile& self) { return self.file->direct_refusal(); },
          "Why `direct` is False; empty when it is True.")
      .def_prop_ro(
          "alignment_bytes", [](const OpenFile& self) { return self.file->alignment_bytes(); },
          "Ranges that begin and end on multiples of this bypass the page cache as a whole; 1 if none do.")
      .def(
          "read", &OpenFile::Read, nb::arg("offset"), nb::arg("target"), nb::kw_only(),
          nb::arg("urgent") = false,
          R"(Start filling `target`, a 1-D contiguous host array, from byte `offset`; urgent transfers go first.

Raises ValueError when the range leaves the file or the file is closed, RuntimeError when the pool is.)")
      .def("write", &OpenFile::Write, nb::arg("offset"), nb::arg("source"), nb::kw_only(),
           nb::arg("urgent") = false,
           R"(Start writing `source`, a 1-D contiguous host array, at byte `offset`; see `read`.

The array must not change until the transfer has ended.)")
      .def("read_batch", &OpenFile::ReadBatch, nb::arg("requests"), nb::kw_only(), nb::arg("urgent") = false,
           nb::sig("def read_batch(self, requests: collections.abc.Iterable[tuple[int, typing.Any]], *, "
                   "urgent: bool = False) -> list[IoTicket]"),
           "Start a `read` for each (offset, target), all at once; starts none when one cannot be.")
      .def("write_batch", &OpenFile::WriteBatch, nb::arg("requests"), nb::kw_only(),
           nb::arg("urgent") = false,
           nb::sig("def write_batch(self, requests: collections.abc.Iterable[tuple[int, typing.Any]], *, "
                   "urgent: bool = False) -> list[IoTicket]"),
           "Start a `write` for each (offset, source), all at once; starts none when one cannot be.")
      .def("sync", &OpenFile::Sync,
           R"(Make what was written durable (fdatasync of every path).

Raises IoError; what was written since the last sync may then be lost.)")
      .def("close", &OpenFile::Close,
           "Wait for the file's transfers, then close it. Closing twice is harmless.");
}

void InitPool(nb::module_& m) {
  nb::enum_<EngineKind>(m, "IoEngine", "What carries out a pool's transfers.")
      .value("AUTO", EngineKind::kAuto, "io_uring, or threads where there is none.")
      .value("URING", EngineKind::kUring, "One thread with an io_uring.")
      .value("THREADS", EngineKind::kThreads, "Threads that call pread and pwrite.");
  m.def("io_uring_refusal", &IoUringRefusal,
        "Why io_uring cannot be used in this process, with call, error and likely cause; empty when it can.");
  nb::class_<PinnedMemory>(m, "IoMemory", R"(An AlignedBuffer that a pool's kernel side has pinned.

It keeps the buffer alive, and pinned as long as it lives itself.)")
      .def_prop_ro(
          "refusal", [](const PinnedMemory& self) { return self.registered->refusal(); },
          "Why the memory is not pinned; transfers then work as without. Empty when it is.");
  nb::class_<Pool>(m, "IoPool",
                   R"(Reads and writes files, in pieces of up to 4 MiB, with a queue for each directory.

Using it in a forked child raises RuntimeError.)")
      .def(nb::init<int, EngineKind, int, const FaultPlanHandle*>(), nb::arg("threads") = 4, nb::kw_only(),
           nb::arg("engine") = EngineKind::kAuto, nb::arg("depth") = 32,
           nb::arg("faults").none() = nb::none(),
           R"(Start the workers.

Args:
    threads: calls under way at a time in each directory, with IoEngine.THREADS; 1 to 256.
    engine: IoEngine.URING raises RuntimeError with `io_uring_refusal()` where there is none.
    depth: calls under way at a time in each directory, with IoEngine.URING; 1 to 4096.
    faults: what goes wrong, for tests.)")
      .def_prop_ro("engine", &Pool::engine, "What carries out the transfers: URING or THREADS.")
      .def_prop_ro("engine_refusal", &Pool::engine_refusal, "Why AUTO took THREADS; empty when it did not.")
      .def(
          "open", &Pool::Open, nb::arg("path"), nb::kw_only(), nb::arg("size_bytes") = nb::none(),
          nb::arg("stripe_bytes") = File::kStripeBytes,
          nb::sig(
              "def open(self, path: str | os.PathLike[str] | collections.abc.Sequence[str | "
              "os.PathLike[str]], *, size_bytes: int | None = None, stripe_bytes: int = 4194304) -> IoFile"),
          R"(Open a regular file for reading and writing; several paths are one file, striped over them in turn.

With `size_bytes` it is created if missing (mode 0600), set to that size and its space allocated; without,
it must exist. `stripe_bytes` is a multiple of the page size. Raises IoError, ValueError for what is no
regular file or not striped like this, RuntimeError when the pool is closed.)")
      .def("register_memory", &Pool::Register, nb::arg("buffer"),
           nb::sig("def register_memory(self, buffer: AlignedBuffer) -> IoMemory"),
           R"(Have the kernel pin the buffer once instead of for each transfer; it counts as locked memory.

A refusal (no io_uring, or `ulimit -l`) changes nothing else; IoMemory.refusal says why.)")
      .def("close", &Pool::Close,
           "Complete what was submitted and end the workers. Files stay open. Closing twice is harmless.");
}

}  // namespace

void InitIo(nb::module_& m) {
  InitIoErrors(m);
  InitIoFaults(m);
  InitIoTickets(m);
  InitFile(m);
  InitPool(m);
}

}  // namespace lohan
