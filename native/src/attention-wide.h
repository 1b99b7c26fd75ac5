// Many rows of a KV head, as in prefill: they are the lanes of the vectors, so that nothing is summed across lanes.
// A block of K or V is converted once and multiplied with the whole tile.  Logits are kept as [cell][row].
#pragma once

#include "attention-parts.h"

namespace h2og {
namespace H2OG_ISA {

// Rows and vectors of a product that stay in registers: 2 or 4 vectors for each of TILE_ROWS rows.
constexpr int TILE_ROWS    = LANES == 16 ? 8 : LANES == 8 ? 6 : 4;
constexpr int TILE_VECTORS = LANES == 4 ? 4 : 2;

// c[r][j] (+)= sum over i of a[r][i]*b[i][j], for R rows and V vectors of columns.  Elements of a have strides.
template <int R, int V>
H2OG_INLINE void product_tile(const float * a, size_t a_row, size_t a_i, const float * b, size_t b_i, int32_t n, float * c,
                              size_t c_row, bool is_added) {
    vf acc[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) {
            acc[r][v] = is_added ? load(c + r*c_row + v*LANES) : vf{};
        }
    }
    for (int32_t i = 0; i < n; ++i) {
        vf bv[V];
        for (int v = 0; v < V; ++v) {
            bv[v] = load(b + i*b_i + v*LANES);
        }
        for (int r = 0; r < R; ++r) {
            const vf ar = all(a[r*a_row + i*a_i]);
            for (int v = 0; v < V; ++v) {
                acc[r][v] += ar*bv[v];
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) {
            store(c + r*c_row + v*LANES, acc[r][v]);
        }
    }
}

template <int R>
H2OG_INLINE void product_rows(const float * a, size_t a_row, size_t a_i, const float * b, size_t b_i, int32_t n, float * c,
                              size_t c_row, int32_t n_column, bool is_added) {
    int32_t j = 0;
    for (; j + TILE_VECTORS*LANES <= n_column; j += TILE_VECTORS*LANES) {
        product_tile<R, TILE_VECTORS>(a, a_row, a_i, b + j, b_i, n, c + j, c_row, is_added);
    }
    for (; j < n_column; j += LANES) {
        product_tile<R, 1>(a, a_row, a_i, b + j, b_i, n, c + j, c_row, is_added);
    }
}

// The rows that are left when n_row is no multiple of TILE_ROWS.
template <int R>
H2OG_INLINE void product_rest(int32_t n_row, const float * a, size_t a_row, size_t a_i, const float * b, size_t b_i, int32_t n,
                              float * c, size_t c_row, int32_t n_column, bool is_added) {
    if constexpr (R > 0) {
        if (n_row == R) {
            product_rows<R>(a, a_row, a_i, b, b_i, n, c, c_row, n_column, is_added);
        } else {
            product_rest<R - 1>(n_row, a, a_row, a_i, b, b_i, n, c, c_row, n_column, is_added);
        }
    }
}

// c[n_row][n_column] (+)= a[n_row][n] b[n][n_column]; n_column is a multiple of LANES.
static void product(const float * a, size_t a_row, size_t a_i, const float * b, size_t b_i, int32_t n, float * c, size_t c_row,
                    int32_t n_row, int32_t n_column, bool is_added) {
    int32_t r = 0;
    for (; r + TILE_ROWS <= n_row; r += TILE_ROWS) {
        product_rows<TILE_ROWS>(a + r*a_row, a_row, a_i, b, b_i, n, c + r*c_row, c_row, n_column, is_added);
    }
    product_rest<TILE_ROWS - 1>(n_row - r, a + r*a_row, a_row, a_i, b, b_i, n, c + r*c_row, c_row, n_column, is_added);
}

H2OG_INLINE void mask_columns(const Attention & a, const Plan & p, const Unit & u, const float * mask, Mask kind, int32_t n,
                              float * logits, float * top) {
    for (int32_t r = 0; r < p.width; r += LANES) {
        const float * of_lane[LANES];
        for (int32_t i = 0; i < LANES; ++i) {
            const int32_t row = u.row + (r + i < u.n_row ? r + i : u.n_row - 1);
            of_lane[i] = mask + size_t(row/p.group - u.row/p.group)*BLOCK;
        }
        vf t = load(top + r);
        for (int32_t c = 0; c < n; ++c) {
            float * at = logits + size_t(c)*p.width + r;
            vf x = cap(load(at), a.softcap);
            if (kind == Mask::MIXED) {
                vf m;
                for (int32_t i = 0; i < LANES; ++i) {
                    m[i] = of_lane[i][c];
                }
                x += m;
            }
            store(at, x);
            t = larger(x, t);
        }
        store(top + r, t);
    }
}

H2OG_INLINE void exp_columns(int32_t width, int32_t n, float * logits, const float * top, float * total) {
    for (int32_t r = 0; r < width; r += LANES) {
        vf t = load(top + r);
        t = t == NEG_INF ? vf{} : t;
        vf sum_of = load(total + r);
        for (int32_t c = 0; c < n; ++c) {
            float * at = logits + size_t(c)*width + r;
            const vf e = exp_nonpositive(load(at) - t);
            store(at, e);
            sum_of += e;
        }
        store(total + r, sum_of);
    }
}

// mass[c] = mass[c]*keep + sum over the rows of weight[r]*e[c][r]; weight is 0 behind the rows there are.
static void weigh_columns(const float * e, int32_t width, const float * weight, int32_t n_cells, float keep, float * mass) {
    for (int32_t c = 0; c < n_cells; c += LANES) {
        const int32_t n = n_cells - c < LANES ? n_cells - c : LANES;
        vf part[LANES] = {};
        for (int32_t i = 0; i < n; ++i) {
            for (int32_t r = 0; r < width; r += LANES) {
                part[i] += load(weight + r)*load(e + size_t(c + i)*width + r);
            }
        }
        float out[LANES];
        store(out, sums(part));
        for (int32_t i = 0; i < n; ++i) {
            mass[c + i] = mass[c + i]*keep + out[i];
        }
    }
}

// exp(before - now) for a maximum that has grown; 0 if nothing had been seen.
H2OG_INLINE vf faded(vf before, vf now) {
    return exp_nonpositive(before - (now == NEG_INF ? vf{} : now));
}

// Asks for a block's rows while the one before it is multiplied.
H2OG_INLINE void ask_block(const char * p, size_t step, size_t row) {
    for (int32_t c = 0; c < BLOCK; ++c) {
        ask_ahead(p + c*step, row);
    }
}

static void attend_wide(const Attention & a, const Plan & p, const Unit & u, float * memory, float * mass, Scratch & s) {
    const int32_t n_block = (u.n_cells + BLOCK - 1)/BLOCK;
    const char * k = a.k + u.stream*a.k_stream + u.head*a.k_head + u.cell*a.k_cell;
    const char * v = a.v + u.stream*a.v_stream + u.head*a.v_head + u.cell*a.v_cell;
    float * top   = memory;
    float * total = memory + p.total_at;
    float * out   = memory + p.out_at;
    const auto n_of      = [&](int32_t b) { return u.n_cells - b*BLOCK < BLOCK ? u.n_cells - b*BLOCK : BLOCK; };
    const auto logits_of = [&](int32_t b) { return s.logits + size_t(b)*BLOCK*p.width; };

    if (!has_loaded(a, p, u, s)) {
        load_queries(a, p, u, s.q, 1, p.width);
    }
    for (int32_t r = 0; r < p.width; ++r) {
        top[r] = NEG_INF;
        total[r] = 0.0f;
    }
    memset(out, 0, size_t(u.n_row)*p.dim_v*sizeof(float));
    // A stretch at a time, so that its logits are still in the core's cache when they become probabilities.
    for (int32_t first = 0, i = 0; first < n_block; first += STRETCH, ++i) {
        const int32_t end = first + STRETCH < n_block ? first + STRETCH : n_block;
        float * before = s.tops + size_t(i)*p.width;
        memcpy(before, top, p.width*sizeof(float));
        for (int32_t b = first; b < end; ++b) {
            const Mask kind = load_masks(a, p, u, u.cell + b*BLOCK, n_of(b), s.mask);
            s.is_hidden[b] = kind == Mask::HIDDEN;
            if (kind != Mask::HIDDEN) {
                load_rows(k + b*BLOCK*a.k_cell, a.k_cell, a.type_k, n_of(b), a.head_dim_k, p.dim_k, s.k);
                ask_block(k + (b + 1)*BLOCK*a.k_cell, a.k_cell, p.row_k);
                product(s.k, p.dim_k, 1, s.q, p.width, a.head_dim_k, logits_of(b), p.width, n_of(b), p.width, false);
                mask_columns(a, p, u, s.mask, kind, n_of(b), logits_of(b), top);
            }
        }
        if (first > 0) {
            for (int32_t r = 0; r < p.width; r += LANES) {
                store(s.weight + r, faded(load(before + r), load(top + r)));
                store(total + r, load(total + r)*load(s.weight + r));
            }
            for (int32_t r = 0; r < u.n_row; ++r) {
                for (int32_t d = 0; d < p.dim_v; ++d) {
                    out[size_t(r)*p.dim_v + d] *= s.weight[r];
                }
            }
        }
        memcpy(before, top, p.width*sizeof(float));
        for (int32_t b = first; b < end; ++b) {
            if (s.is_hidden[b]) {
                memset(logits_of(b), 0, size_t(n_of(b))*p.width*sizeof(float));
                continue;
            }
            exp_columns(p.width, n_of(b), logits_of(b), top, total);
            load_values(a, v + b*BLOCK*a.v_cell, n_of(b), p.dim_v, s.v);
            if (a.v_element == 0) {
                ask_block(v + (b + 1)*BLOCK*a.v_cell, a.v_cell, p.row_v);
            }
            product(logits_of(b), 1, p.width, s.v, p.dim_v, n_of(b), out, p.dim_v, u.n_row, p.dim_v, true);
        }
    }
    if (a.scores == nullptr) {
        return;
    }
    if (p.n_split > 1) {
        memcpy(memory + p.e_at, s.logits, size_t(u.n_cells)*p.width*sizeof(float));
        return;
    }
    softmax_shares(a, p, u, memory, 1, 0, s.factor);
    weigh(a, p, u, s.factor, s.factor);
    for (int32_t first = 0, i = 0; first < u.n_cells; first += STRETCH*BLOCK, ++i) {
        for (int32_t r = 0; r < p.width; r += LANES) {
            store(s.weight + r, load(s.factor + r)*faded(load(s.tops + size_t(i)*p.width + r), load(top + r)));
        }
        const int32_t n = u.n_cells - first < STRETCH*BLOCK ? u.n_cells - first : STRETCH*BLOCK;
        weigh_columns(s.logits + size_t(first)*p.width, p.width, s.weight, n, 1.0f, mass + first);
    }
}

} // namespace H2OG_ISA
} // namespace h2og
