#include "bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "The native core: AdamW on the CPU, aligned memory, and parallel direct file I/O.";
  lohan::InitMemory(m);
  lohan::InitAdam(m);
  lohan::InitIo(m);
}
