// What the functions of the C edge share.
#pragma once

#include "h2og.h"
#include "state.h"

#include <memory>
#include <vector>

// A group of a context.  The first owns the others.
struct h2og_cache {
    std::shared_ptr<h2og_state> state;
    std::vector<std::unique_ptr<h2og_cache>> others;
};

namespace h2og {

h2og_state & state_of(h2og_cache * cache);

// For calls that change the cache, or use llama.cpp.
h2og_state & idle_state_of(h2og_cache * cache);

void require_pointer(const void * p, const char * name);

} // namespace h2og
