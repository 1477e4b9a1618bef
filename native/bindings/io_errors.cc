#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "io.h"

namespace lohan {
namespace {

/// Sets IoError(errno, summary, path) with the attributes `offset` and `operation`.
void SetIoError(nb::handle type, const IoError& error) {
  nb::object exception = type(error.error_number(), error.Summary(), DecodePath(error.path()));
  exception.attr("_operation") = error.operation();
  exception.attr("_offset") = error.offset();
  PyErr_SetObject(type.ptr(), exception.ptr());
}

int ErrorNumber(nb::handle self) {
  const nb::object number = self.attr("errno");
  return number.is_none() ? 0 : nb::cast<int>(number);
}

template <typename Getter>
nb::object Property(const char* name, const char* signature, const char* doc, Getter getter) {
  return nb::module_::import_("builtins")
      .attr("property")(nb::cpp_function(getter, nb::is_method(), nb::name(name), nb::sig(signature), doc));
}

}  // namespace

nb::object DecodePath(const std::string& path) {
  return nb::steal(PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

std::string EncodePath(nb::handle path) {
  PyObject* encoded = nullptr;
  if (!PyUnicode_FSConverter(path.ptr(), &encoded)) throw nb::python_error();
  const nb::bytes name = nb::steal<nb::bytes>(encoded);
  return {name.c_str(), name.size()};
}

void InitIoErrors(nb::module_& m) {
  nb::enum_<IoErrorKind>(m, "IoErrorKind", "The failures of a drive that are treated differently.")
      .value("DEVICE", IoErrorKind::kDevice, "EIO: the drive reported an error.")
      .value("NO_SPACE", IoErrorKind::kNoSpace, "ENOSPC: the file system is full.")
      .value("QUOTA", IoErrorKind::kQuota, "EDQUOT: the user's quota is used up.")
      .value("FILE_TOO_LARGE", IoErrorKind::kFileTooLarge,
             "EFBIG: the file system, or `ulimit -f`, allows no such size.")
      .value("OTHER", IoErrorKind::kOther, "Anything else; `errno` says what.");
  nb::dict members;
  members["offset"] =
      Property("offset", "def offset(self) -> int | None",
               "Where in the file `filename` the transfer failed, in bytes; None if none did.",
               [](nb::handle self) { return nb::getattr(self, "_offset", nb::none()); });
  members["operation"] =
      Property("operation", "def operation(self) -> str",
               "What failed: \"open\", \"allocate\", \"read\", \"write\", \"sync\" and so on.",
               [](nb::handle self) { return nb::getattr(self, "_operation", nb::str("")); });
  members["kind"] = Property("kind", "def kind(self) -> IoErrorKind", "`errno`, as far as it matters.",
                             [](nb::handle self) { return KindOf(ErrorNumber(self)); });
  members["remedy"] =
      Property("remedy", "def remedy(self) -> str", "What a user can do about it: one sentence.",
               [](nb::handle self) { return std::string(RemedyOf(ErrorNumber(self))); });
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

}  // namespace lohan
