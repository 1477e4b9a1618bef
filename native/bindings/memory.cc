#include "bindings.h"

namespace lohan {
namespace {

using ByteArray = nb::ndarray<nb::array_api, uint8_t, nb::ndim<1>, nb::device::cpu>;

ByteArray ArrayOf(const AlignedBuffer& buffer) {
  return ByteArray(buffer.data(), {static_cast<size_t>(buffer.size_bytes())}, nb::find(buffer));
}

}  // namespace

void InitMemory(nb::module_& m) {
  nb::class_<AlignedBuffer>(m, "AlignedBuffer",
                            R"(Zero-filled host memory, page aligned, advised to use huge pages from 2 MiB on.

On a machine with several NUMA nodes it is spread over them from that size on. The mapping has
exactly the size asked for, rounded up to a page. It is given back when the
buffer and the last view of it are gone. A forked child sees zeros in it.)")
      .def(nb::init<int64_t>(), nb::arg("size_bytes"),
           "Map `size_bytes` bytes. Raises ValueError below 1, MemoryError when the system refuses.")
      .def_prop_ro("size_bytes", &AlignedBuffer::size_bytes, "Usable size in bytes: the size asked for.")
      .def_prop_ro(
          "address", [](const AlignedBuffer& buffer) { return reinterpret_cast<uintptr_t>(buffer.data()); },
          "Address of the first byte, a multiple of the page size.")
      .def("array", &ArrayOf, nb::sig("def array(self) -> typing.Any"),
           R"(The memory as a 1-D uint8 array that keeps it alive: `torch.from_dlpack(buffer.array())`.

The array has `__dlpack__` and the buffer protocol.)");
}

}  // namespace lohan
