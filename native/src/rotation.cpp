#include "rotation.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>

namespace h2og {

namespace {

constexpr int MAX_DEPTH = 24;  // nodes between attention and the projection that makes q; a handful in practice

Rotation read_rope(const ggml_tensor * node) {
    // ggml's parameters of a RoPE node, by index.
    enum { N_DIMS = 1, MODE = 2, N_CTX_ORIG = 4, FREQ_BASE = 5, FREQ_SCALE = 6, EXT_FACTOR = 7, BETA_FAST = 9, BETA_SLOW = 10,
           OFFSET = 15 };
    const auto number = [&](int i) {
        float x;
        memcpy(&x, node->op_params + i, sizeof(x));
        return x;
    };
    Rotation r;
    r.kind       = Rotation::ROPE;
    r.n_dims     = node->op_params[N_DIMS];
    r.mode       = node->op_params[MODE];
    r.n_ctx_orig = node->op_params[N_CTX_ORIG];
    r.offset     = node->op_params[OFFSET];
    r.freq_base  = number(FREQ_BASE);
    r.freq_scale = number(FREQ_SCALE);
    r.ext_factor = number(EXT_FACTOR);
    r.beta_fast  = number(BETA_FAST);
    r.beta_slow  = number(BETA_SLOW);
    r.factors    = node->src[2];
    if (r.mode & GGML_ROPE_TYPE_MROPE) {
        // Text has the same position in every section, which is plain NeoX over all of them.
        r.mode = GGML_ROPE_TYPE_NEOX;
    }
    if (r.factors != nullptr && r.factors->op != GGML_OP_NONE) {
        r.kind = Rotation::ENTANGLED;  // factors computed per batch
    }
    return r;
}

// Whether a rotation behind this node is still a rotation of its output.
bool commutes(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_MUL:
            return node->src[1]->ne[0] == 1;  // one factor per head or token
        case GGML_OP_ADD:
            return false;
        default:
            return true;
    }
}

Rotation search(const ggml_tensor * node, int depth) {
    Rotation none;
    none.kind = Rotation::NONE;
    if (node == nullptr || depth > MAX_DEPTH) {
        return none;
    }
    if (node->op == GGML_OP_ROPE) {
        return read_rope(node);
    }
    Rotation found = none;
    if (node->op == GGML_OP_MUL_MAT) {
        if (node->op_params[1] != GGML_HINT_SRC0_IS_HADAMARD) {
            return none;  // the projection: what is behind it is another vector
        }
        found = search(node->src[1], depth + 1);
    } else {
        for (const ggml_tensor * src : { node->src[0], node->op == GGML_OP_CONCAT ? node->src[1] : nullptr }) {
            const Rotation r = search(src, depth + 1);
            found = r.kind != Rotation::NONE ? r : found;
        }
    }
    if (found.kind == Rotation::ROPE && !commutes(node)) {
        found.kind = Rotation::ENTANGLED;
    }
    return found;
}

} // namespace

Rotation find_rotation(const ggml_tensor * q) {
    return search(q, 0);
}

int32_t first_rotated(const Rotation & r, int32_t head_dim, bool is_mla) {
    return is_mla ? head_dim - r.n_dims : r.offset;
}

// As ggml computes it: each pair turns slower than the one before by a constant factor; factors of the model slow it down
// further, and so does a scale, which YaRN mixes in from the fast pairs to the slow ones.
std::vector<Pair> pairs_of(const Rotation & r, int32_t begin) {
    if (r.kind != Rotation::ROPE) {
        return {};
    }
    const int32_t n = r.n_dims/2;
    std::vector<float> factors(n, 1.0f);
    if (r.factors != nullptr) {
        ggml_backend_tensor_get(r.factors, factors.data(), 0, n*sizeof(float));
    }
    float mixed[2];  // the pairs between which YaRN goes over from one to the other; of no effect without it
    ggml_rope_yarn_corr_dims(r.n_dims, r.n_ctx_orig, r.freq_base, r.beta_fast, r.beta_slow, mixed);
    const float slower = powf(r.freq_base, -2.0f/r.n_dims);

    std::vector<Pair> pairs;
    float angle = 1.0f;
    for (int32_t i = 0; i < n; ++i, angle *= slower) {
        const float ramp  = 1.0f - std::clamp((i - mixed[0])/std::max(0.001f, mixed[1] - mixed[0]), 0.0f, 1.0f);
        const float scale = r.freq_scale + (1.0f - r.freq_scale)*r.ext_factor*ramp;
        const bool is_neox = r.mode == GGML_ROPE_TYPE_NEOX;
        pairs.push_back({ begin + (is_neox ? i : 2*i), begin + (is_neox ? i + n : 2*i + 1), double(scale)*angle/factors[i] });
    }
    return pairs;
}

void Turner::turn(float * head, int32_t by) {
    if (by == 0) {
        return;
    }
    auto & angles = known[by];
    if (angles.empty()) {
        for (const Pair & p : pairs) {
            angles.push_back({ std::cos(by*p.angle), std::sin(by*p.angle) });
        }
    }
    for (size_t i = 0; i < pairs.size(); ++i) {
        float & first = head[pairs[i].first], & second = head[pairs[i].second];
        const double x = first, y = second;
        first  = float(x*angles[i].cos - y*angles[i].sin);
        second = float(x*angles[i].sin + y*angles[i].cos);
    }
}

} // namespace h2og
