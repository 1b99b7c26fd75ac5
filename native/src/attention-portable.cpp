// The fused kernel for portable.

#define H2OG_ISA portable
#include "attention-kernel.h"

