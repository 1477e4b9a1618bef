#define LOHAN_KERNELS kAvx512Kernels
#include "adam-inl.h"
