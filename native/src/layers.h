#pragma once

#include <cstdint>

struct llama_model;

namespace h2og {

// Checks and takes over what h2og_set_layer_cells() was given.
void set_layer_cells(llama_model & model, const int32_t * n_cells, int32_t n);

} // namespace h2og
