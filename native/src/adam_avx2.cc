#define LOHAN_KERNELS kAvx2Kernels
#include "adam-inl.h"
