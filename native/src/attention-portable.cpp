// The fused kernel for every processor.

#define H2OG_ISA portable
#include "attention-kernel.h"

