#include "lohan/checksum.h"

#include <string>

#include "bindings.h"

namespace lohan {
namespace {

uint32_t Checksum(nb::handle array, ThreadPool& pool) {
  const HostArray bytes = ImportArray(array, "array", ArrayUse::kRead);
  nb::gil_scoped_release release;
  return ParallelCrc32c(bytes.data, bytes.size_bytes(), pool);
}

uint32_t Copy(nb::handle target, nb::handle source, ThreadPool& pool) {
  const HostArray to = ImportArray(target, "target", ArrayUse::kWrite);
  const HostArray from = ImportArray(source, "source", ArrayUse::kRead);
  if (to.size_bytes() != from.size_bytes()) {
    throw nb::value_error(("target has " + std::to_string(to.size_bytes()) + " bytes, source has " +
                           std::to_string(from.size_bytes()))
                              .c_str());
  }
  CheckDisjoint(to, "target", from, "source");
  nb::gil_scoped_release release;
  return CopyWithChecksum(to.data, from.data, to.size_bytes(), pool);
}

}  // namespace

void InitChecksum(nb::module_& m) {
  m.def("checksum", &Checksum, nb::arg("array"), nb::kw_only(), nb::arg("pool"),
        R"(CRC-32C (Castagnoli, RFC 3720) of the bytes of a 1-D contiguous host array of any element type.

The standard value, whatever the number of threads; 0 for an empty array. Releases the GIL.

Raises TypeError for what is no array, ValueError for one that cannot be used.)");

  m.def("copy_with_checksum", &Copy, nb::arg("target"), nb::arg("source"), nb::kw_only(), nb::arg("pool"),
        R"(Copy the bytes of `source` to `target` and return the CRC-32C of what `target` then holds.

Both are 1-D contiguous host arrays of equal size in bytes; element types may differ. One pass over
memory: tiles of 256 KiB are summed while they lie in the cache. Releases the GIL.

Raises TypeError for what is no array, ValueError for sizes that differ, memory that overlaps, or an array
that cannot be used.)");
}

}  // namespace lohan
