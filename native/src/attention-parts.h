// What the narrow and the wide form of the kernel share: queries, masks, rows as float32, and what becomes of a row's sum.
#pragma once

#include "attention-plan.h"
#include "cache-rows.h"
#include "simd.h"

namespace h2og {
namespace H2OG_ISA {

// Asks for the n bytes at p, so that they are in the second-level cache when their turn comes.
H2OG_INLINE void ask_ahead(const char * p, size_t n) {
    for (size_t i = 0; i < n; i += 64) {
        __builtin_prefetch(p + i, 0, 2);
    }
}

// The unit's queries times the scale of the logits: element d of row r at q[r*row_step + d*dim_step], 0 behind head_dim.
H2OG_INLINE void load_queries(const Attention & a, const Plan & p, const Unit & u, float * q, size_t row_step, size_t dim_step) {
    memset(q, 0, size_t(p.width)*p.dim_k*sizeof(float));
    for (int32_t r = 0; r < u.n_row; ++r) {
        const int32_t row = u.row + r;
        const float * src = reinterpret_cast<const float *>(
            a.q + u.stream*a.q_stream + (u.head*p.group + row % p.group)*a.q_head + (row/p.group)*a.q_query);
        for (int32_t d = 0; d < a.head_dim_k; ++d) {
            q[r*row_step + d*dim_step] = src[d]*a.scale;
        }
    }
}

// Whether the unit's queries are in s.q from the unit before; notes that they will be.
H2OG_INLINE bool has_loaded(const Attention & a, const Plan & p, const Unit & u, Scratch & s) {
    const int32_t before = s.loaded;
    s.loaded = (u.stream*p.n_tile + u.row/p.n_tile_row)*a.n_head_kv + u.head;
    return s.loaded == before;
}

enum class Mask { OPEN, HIDDEN, MIXED };

// The mask of one query over a block's cells: m[0 .. BLOCK), -inf behind the n cells there are.
H2OG_INLINE Mask load_mask(const Attention & a, int32_t stream, int32_t query, int32_t cell, int32_t n, float * m) {
    if (a.mask == nullptr) {
        memset(m, 0, n*sizeof(float));
    } else {
        const char * row = a.mask + stream*a.mask_stream + query*a.mask_query;
        load_rows(row + cell*(a.type_mask == GGML_TYPE_F32 ? sizeof(float) : sizeof(uint16_t)), 0, a.type_mask, 1, n, n, m);
    }
    for (int32_t c = n; c < BLOCK; ++c) {
        m[c] = NEG_INF;
    }
    vf top = all(NEG_INF), all_zero = vf{};
    for (int32_t c = 0; c < BLOCK; c += LANES) {
        const vf x = load(m + c);
        top = larger(x, top);
        all_zero += x*x;
    }
    return largest(top) == NEG_INF ? Mask::HIDDEN : sum(all_zero) == 0.0f ? Mask::OPEN : Mask::MIXED;
}

// Masks of the unit's queries over a block, s.mask[query of the tile][BLOCK].
H2OG_INLINE Mask load_masks(const Attention & a, const Plan & p, const Unit & u, int32_t cell, int32_t n, float * mask) {
    bool is_open = true, is_hidden = true;
    const int32_t first = u.row/p.group, last = (u.row + u.n_row - 1)/p.group;
    for (int32_t t = first; t <= last; ++t) {
        const Mask m = load_mask(a, u.stream, t, cell, n, mask + size_t(t - first)*BLOCK);
        is_open   &= m == Mask::OPEN;
        is_hidden &= m == Mask::HIDDEN;
    }
    return is_hidden ? Mask::HIDDEN : is_open ? Mask::OPEN : Mask::MIXED;
}

H2OG_INLINE vf cap(vf x, float softcap) {
    return softcap == 0.0f ? x : tanh(x*(1.0f/softcap))*softcap;
}

// n rows of V as float32; in a transposed V the elements of a row lie v_element apart.
H2OG_INLINE void load_values(const Attention & a, const char * src, int32_t n, int32_t width, float * dst) {
    if (a.v_element == 0) {
        load_rows(src, a.v_cell, a.type_v, n, a.head_dim_v, width, dst);
        return;
    }
    for (int32_t c = 0; c < n; ++c) {
        for (int32_t d = 0; d < a.head_dim_v; ++d) {
            load_rows(src + c*a.v_cell + d*a.v_element, 0, a.type_v, 1, 1, 1, dst + size_t(c)*width + d);
        }
        for (int32_t d = a.head_dim_v; d < width; ++d) {
            dst[size_t(c)*width + d] = 0.0f;
        }
    }
}

// Which of the outputs is that of the unit's row r.
H2OG_INLINE size_t output_row(const Attention & a, const Plan & p, const Unit & u, int32_t r) {
    const int32_t row = u.row + r;
    return (size_t(u.stream)*a.n_query + row/p.group)*a.n_head + u.head*p.group + row % p.group;
}

// What each range's e of a row is to be multiplied with to give probabilities: factor[i*width + r] from the i-th of n units
// of the same rows, unit[i*step ...]; 0 for a row that sees nothing.  log_sum: of their denominators, [width], if wanted.
H2OG_INLINE void softmax_shares(const Attention & a, const Plan & p, const Unit & u, const float * unit, int32_t n, size_t step,
                                float * factor, float * log_sum = nullptr) {
    for (int32_t r = 0; r < p.width; r += LANES) {
        vf sink = all(NEG_INF), elsewhere = sink;
        for (int32_t i = 0; a.sinks != nullptr && i < LANES && r + i < u.n_row; ++i) {
            sink[i] = a.sinks[u.head*p.group + (u.row + r + i) % p.group];
        }
        for (int32_t i = 0; a.elsewhere != nullptr && i < LANES && r + i < u.n_row; ++i) {
            elsewhere[i] = a.elsewhere[output_row(a, p, u, r + i)];
        }
        vf most = larger(sink, elsewhere);
        for (int32_t i = 0; i < n; ++i) {
            most = larger(load(unit + i*step + r), most);
        }
        most = most == NEG_INF ? vf{} : most;
        vf whole = exp_nonpositive(sink - most) + exp_nonpositive(elsewhere - most);
        for (int32_t i = 0; i < n; ++i) {
            const vf f = exp_nonpositive(load(unit + i*step + r) - most);
            store(factor + size_t(i)*p.width + r, f);
            whole += f*load(unit + i*step + p.total_at + r);
        }
        for (int32_t i = 0; log_sum != nullptr && i < LANES; ++i) {
            log_sum[r + i] = most[i] + __builtin_logf(whole[i]);
        }
        const vf inverse = whole > 0.0f ? 1.0f/whole : vf{};
        for (int32_t i = 0; i < n; ++i) {
            float * f = factor + size_t(i)*p.width + r;
            store(f, load(f)*inverse);
        }
    }
}

// The weight of every row's e in the scores, given the sum of its probabilities; 0 behind the rows there are.
H2OG_INLINE void weigh(const Attention & a, const Plan & p, const Unit & u, const float * inverse, float * weight) {
    for (int32_t r = 0; r < p.width; ++r) {
        weight[r] = r < u.n_row ? inverse[r]*a.weights[u.stream*a.n_query + (u.row + r)/p.group] : 0.0f;
    }
}

} // namespace H2OG_ISA
} // namespace h2og
