// The fused kernel for AVX2.
#if defined(__x86_64__)
#define H2OG_ISA avx2
#include "attention-kernel.h"
#endif
