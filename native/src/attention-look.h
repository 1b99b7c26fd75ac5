// Queries held against keys outside of attention: what a softmax over them would be divided by, and which keys stand out.
#pragma once

#include "attention-wide.h"

namespace h2og {
namespace H2OG_ISA {

// Logits of at most BLOCK keys from the first on: [n][width].
H2OG_INLINE int32_t logits_of(const Keys & k, const Question & q, int32_t first, float * keys, float * logits) {
    const int32_t n = k.n - first < BLOCK ? k.n - first : BLOCK;
    const int32_t dim = (q.head_dim + LANES - 1)/LANES*LANES;
    load_rows(k.data + first*k.step, k.step, k.type, n, q.head_dim, dim, keys);
    product(keys, dim, 1, q.q, q.width, q.head_dim, logits, q.width, n, q.width, false);
    if (q.softcap == 0.0f && k.hidden == nullptr) {
        return n;
    }
    for (int32_t c = 0; c < n; ++c) {
        const vf hidden = all(k.hidden == nullptr ? 0.0f : k.hidden[first + c]);
        for (int32_t r = 0; r < q.width; r += LANES) {
            float * at = logits + size_t(c)*q.width + r;
            store(at, cap(load(at), q.softcap) + hidden);
        }
    }
    return n;
}

static void look(const Keys & k, const Question & q, float * top, float * total, float * memory) {
    float * logits = memory;
    float * keys = memory + size_t(BLOCK)*q.width;
    for (int32_t first = 0; first < k.n; first += BLOCK) {
        const int32_t n = logits_of(k, q, first, keys, logits);
        for (int32_t r = 0; r < q.width; r += LANES) {
            const vf before = load(top + r);
            vf most = before;
            for (int32_t c = 0; c < n; ++c) {
                most = larger(load(logits + size_t(c)*q.width + r), most);
            }
            store(top + r, most);
            store(total + r, load(total + r)*faded(before, most));
        }
        exp_columns(q.width, n, logits, top, total);
    }
}

static void find(const Keys & k, const Question & q, const float * whole, float * best, float * memory) {
    float * logits = memory;
    float * keys = memory + size_t(BLOCK)*q.width;
    for (int32_t first = 0; first < k.n; first += BLOCK) {
        const int32_t n = logits_of(k, q, first, keys, logits);
        for (int32_t c = 0; c < n; ++c) {
            vf most = all(NEG_INF);
            for (int32_t r = 0; r < q.width; r += LANES) {
                most = larger(load(logits + size_t(c)*q.width + r) - load(whole + r), most);
            }
            best[first + c] = largest(most);
        }
    }
}

} // namespace H2OG_ISA
} // namespace h2og
