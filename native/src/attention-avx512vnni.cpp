// The fused kernel for AVX-512 with VNNI.
#if defined(__x86_64__)
#define H2OG_ISA avx512vnni
#include "attention-kernel.h"
#endif
