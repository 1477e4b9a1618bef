#include "bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "The native core: AdamW on the CPU, aligned memory, checksums, and parallel direct file I/O.";
#ifdef NDEBUG
  // nanobind reports objects that live when the interpreter ends; a pool kept in a global is no fault.
  nb::set_leak_warnings(false);
#endif
  lohan::InitMemory(m);
  lohan::InitAdam(m);
  lohan::InitChecksum(m);
  lohan::InitIo(m);
}
