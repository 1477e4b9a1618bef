#define LOHAN_KERNELS kPortableKernels
#include "adam-inl.h"
