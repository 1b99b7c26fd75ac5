#pragma once

#include <cstdint>

struct h2og_state;

namespace h2og {

int64_t state_size(h2og_state & state, int32_t stream);  // bytes
void    state_save(h2og_state & state, int32_t stream, uint8_t * out, int64_t size);
void    state_load(h2og_state & state, int32_t stream, const uint8_t * data, int64_t size);

} // namespace h2og
