// How a layer rotates its queries and keys, read from the graph that llama.cpp builds for it.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

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

// The first element of a head that is rotated; with MLA the rotated part comes last.
int32_t first_rotated(const Rotation & r, int32_t head_dim, bool is_mla);

// Two elements of a head, and the angle in radians that one position turns them by.
struct Pair { int32_t first, second; double angle; };

// All of a layer's, begin being its first rotated element; none if it does not rotate.
std::vector<Pair> pairs_of(const Rotation & r, int32_t begin);

// Turns heads by numbers of positions, most of which come again and again.
class Turner {
public:
    explicit Turner(std::vector<Pair> pairs) : pairs(std::move(pairs)) {}

    void turn(float * head, int32_t by);

private:
    struct Angle { double cos, sin; };

    const std::vector<Pair> pairs;
    std::map<int32_t, std::vector<Angle>> known;  // by number of positions, an angle for each pair
};

} // namespace h2og
