#include "pages.h"

#if defined(__linux__)
#  include <sys/mman.h>

#  include <cstdint>
#endif

namespace h2og {

#if defined(__linux__)

void prefer_large_pages(void * p, size_t n) {
    constexpr uintptr_t LARGE = uintptr_t(2) << 20;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(p) + LARGE - 1)/LARGE*LARGE;
    const uintptr_t end   = (reinterpret_cast<uintptr_t>(p) + n)/LARGE*LARGE;
    if (first >= end) {
        return;
    }
    void * at = reinterpret_cast<void *>(first);
    if (madvise(at, end - first, MADV_HUGEPAGE) != 0) {
        return;
    }
#  if !defined(MADV_COLLAPSE)
    constexpr int MADV_COLLAPSE = 25;  // Linux 6.1; older kernels refuse it and come round to these pages later
#  endif
    madvise(at, end - first, MADV_COLLAPSE);
}

#else

void prefer_large_pages(void *, size_t) {}

#endif

} // namespace h2og
