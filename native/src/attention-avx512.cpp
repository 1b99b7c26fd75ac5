// The fused kernel for AVX-512.
#if defined(__x86_64__)
#define H2OG_ISA avx512
#include "attention-kernel.h"
#endif
