// Large pages under memory that is read from end to end at every token: fewer misses of the address cache, and prefetching
// that does not stop every 4 KiB.  A wish; where the system has none, or no memory for them, nothing changes.
#pragma once

#include <cstddef>

namespace h2og {

void prefer_large_pages(void * p, size_t n);

} // namespace h2og
