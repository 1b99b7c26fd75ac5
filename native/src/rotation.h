// How a layer rotates its queries and keys, read from the graph that llama.cpp builds for it.
#pragma once

#include "ggml.h"

namespace h2og {

struct Rotation {
    enum Kind {
        UNKNOWN,    // no graph has been built yet
        NONE,       // this layer does not rotate
        ROPE,
        ENTANGLED,  // rotated, then changed in a way that a later rotation would not commute with
    };

    Kind    kind = UNKNOWN;
    int32_t n_dims = 0, mode = 0, n_ctx_orig = 0, offset = 0;
    float   freq_base = 0, freq_scale = 0, ext_factor = 0, beta_fast = 0, beta_slow = 0;
    ggml_tensor * factors = nullptr;  // a tensor of the model
};

// q: the queries of a layer as they enter attention.
Rotation find_rotation(const ggml_tensor * q);

} // namespace h2og
