#include "lohan/io.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <utility>

#include "bindings.h"

namespace lohan {
namespace {

constexpr const char* kPoolName = "the I/O pool";

/// A transfer with the array it works on. The engine's workers never touch Python, so the array may only be
/// let go by a thread that holds the GIL, after the transfer has ended.
class Ticket {
 public:
  Ticket(std::shared_ptr<IoEngine> engine, std::shared_ptr<Transfer> transfer, HostArray array)
      : engine_(std::move(engine)), transfer_(std::move(transfer)), array_(std::move(array)) {}

  ~Ticket() {
    if (!started_) return;
    if (!engine_->owner().IsCurrent()) {
      // A forked child: the transfer never ends and its locks may be held for ever. Leave it as it is.
      static_cast<void>(new std::shared_ptr<Transfer>(std::move(transfer_)));
      return;
    }
    nb::gil_scoped_release release;
    transfer_->WaitQuietly();
  }

  void Start(Priority priority) {
    engine_->Submit(transfer_, priority);
    started_ = true;
  }

  bool Done() const { return transfer_->Done(); }

  void Wait() {
    engine_->owner().Check(kPoolName);
    nb::gil_scoped_release release;
    transfer_->Wait();
  }

 private:
  std::shared_ptr<IoEngine> engine_;
  std::shared_ptr<Transfer> transfer_;
  HostArray array_;
  bool started_ = false;
};

class OpenFile {
 public:
  OpenFile(std::shared_ptr<IoEngine> engine, std::shared_ptr<File> opened)
      : file(std::move(opened)), engine_(std::move(engine)) {}

  std::unique_ptr<Ticket> Read(int64_t offset, nb::handle target, bool urgent) {
    return Submit(Access::kRead, offset, ImportArray(target, "target", ArrayUse::kWrite), urgent);
  }

  std::unique_ptr<Ticket> Write(int64_t offset, nb::handle source, bool urgent) {
    return Submit(Access::kWrite, offset, ImportArray(source, "source", ArrayUse::kRead), urgent);
  }

  void Sync() {
    engine_->owner().Check(kPoolName);
    nb::gil_scoped_release release;
    file->Sync();
  }

  void Close() {
    engine_->owner().Check(kPoolName);
    nb::gil_scoped_release release;
    file->Close();
  }

  const std::shared_ptr<File> file;

 private:
  std::unique_ptr<Ticket> Submit(Access access, int64_t offset, HostArray array, bool urgent) {
    engine_->CheckUsable();
    auto transfer = std::make_shared<Transfer>(file, access, offset, array.data, array.size_bytes());
    auto ticket = std::make_unique<Ticket>(engine_, transfer, std::move(array));
    ticket->Start(urgent ? Priority::kUrgent : Priority::kNormal);
    return ticket;
  }

  std::shared_ptr<IoEngine> engine_;
};

struct Pool {
  std::shared_ptr<IoEngine> engine;

  std::unique_ptr<OpenFile> Open(nb::handle path, std::optional<int64_t> size_bytes) {
    PyObject* encoded = nullptr;
    if (!PyUnicode_FSConverter(path.ptr(), &encoded)) throw nb::python_error();
    const nb::bytes name = nb::steal<nb::bytes>(encoded);
    engine->CheckUsable();
    const std::string text(name.c_str(), name.size());
    nb::gil_scoped_release release;
    return std::make_unique<OpenFile>(engine, File::Open(text, size_bytes));
  }

  void Close() {
    nb::gil_scoped_release release;
    engine->Close();
  }
};

nb::object DecodePath(const std::string& path) {
  return nb::steal(PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

/// Sets IoError(errno, summary, path) with the attributes `offset` and `operation`.
void SetIoError(nb::handle type, const IoError& error) {
  nb::object exception = type(error.error_number(), error.Summary(), DecodePath(error.path()));
  exception.attr("_operation") = error.operation();
  exception.attr("_offset") = error.offset();
  PyErr_SetObject(type.ptr(), exception.ptr());
}

void InitIoError(nb::module_& m) {
  const nb::object property = nb::module_::import_("builtins").attr("property");
  nb::dict members;
  members["offset"] = property(
      nb::cpp_function([](nb::handle self) { return nb::getattr(self, "_offset", nb::none()); },
                       nb::is_method(), nb::name("offset"), nb::sig("def offset(self) -> int | None"),
                       "Where in the file the transfer failed, in bytes; None if none did."));
  members["operation"] = property(
      nb::cpp_function([](nb::handle self) { return nb::getattr(self, "_operation", nb::str("")); },
                       nb::is_method(), nb::name("operation"), nb::sig("def operation(self) -> str"),
                       "What failed: \"open\", \"allocate\", \"read\", \"write\", \"sync\" and so on."));
  nb::object type = nb::steal(PyErr_NewExceptionWithDoc(
      "lohan._native.IoError", "A file operation failed; `errno` and `filename` are set as in every OSError.",
      PyExc_OSError, members.ptr()));
  m.attr("IoError") = type;
  nb::register_exception_translator(
      [](const std::exception_ptr& pointer, void* payload) {
        try {
          std::rethrow_exception(pointer);
        } catch (const IoError& error) {
          SetIoError(nb::handle(static_cast<PyObject*>(payload)), error);
        }
      },
      type.ptr());
}

void InitFile(nb::module_& m) {
  nb::class_<OpenFile>(m, "IoFile", "An open file of fixed size. All methods may be called from any thread.")
      .def_prop_ro(
          "path", [](const OpenFile& self) { return DecodePath(self.file->path()); },
          nb::sig("def path(self) -> str"))
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
      .def("sync", &OpenFile::Sync,
           R"(Make what was written durable (fdatasync).

Raises IoError; what was written since the last sync may then be lost.)")
      .def("close", &OpenFile::Close,
           "Wait for the file's transfers, then close it. Closing twice is harmless.");
}

void InitPool(nb::module_& m) {
  nb::class_<Pool>(m, "IoPool",
                   R"(Workers that read and write files, in pieces of up to 4 MiB.

Using it in a forked child raises RuntimeError.)")
      .def(
          "__init__", [](Pool* self, int threads) { new (self) Pool{MakeThreadEngine(threads)}; },
          nb::arg("threads") = 4, "Start `threads` workers. Raises ValueError outside 1..256.")
      .def(
          "open", &Pool::Open, nb::arg("path"), nb::kw_only(), nb::arg("size_bytes") = nb::none(),
          nb::sig("def open(self, path: str | os.PathLike[str], *, size_bytes: int | None = None) -> IoFile"),
          R"(Open a regular file for reading and writing.

With `size_bytes` it is created if missing (mode 0600), set to that size and its space allocated; without,
it must exist. Raises IoError, ValueError for what is no regular file, RuntimeError when the pool is closed.)")
      .def("close", &Pool::Close,
           "Complete what was submitted and end the workers. Files stay open. Closing twice is harmless.");
}

}  // namespace

void InitIo(nb::module_& m) {
  InitIoError(m);
  nb::class_<Ticket>(m, "IoTicket",
                     R"(A transfer under way.

It keeps the array alive; dropping it waits for the transfer to end.)")
      .def("wait", &Ticket::Wait,
           "Block until the transfer has ended; raises IoError if it failed. Releases the GIL.")
      .def("done", &Ticket::Done, "Whether the transfer has ended, well or badly.");
  InitFile(m);
  InitPool(m);
}

}  // namespace lohan
