#include "rotation.h"

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

} // namespace h2og
