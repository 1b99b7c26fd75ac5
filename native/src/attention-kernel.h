// The fused kernel for one instruction set: attention-avx512.cpp and its neighbours define H2OG_ISA and include this.
//
// A unit is a tile of rows (queries with the G heads of one KV head, query-major) against a range of cells.  Logits of
// the whole range are kept, so that each K row is read once and each V row once, and so that the probabilities are
// still there when their sum is known: they are the scores.
#pragma once

#include "attention-plan.h"
#include "simd.h"
#include "cache-rows.h"

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

enum class Mask { OPEN, HIDDEN, MIXED };

// The mask of one query over a block's cells: m[0 .. BLOCK), -inf behind the n cells there are.
H2OG_INLINE Mask load_mask(const Attention & a, int32_t stream, int32_t query, int32_t cell, int32_t n, float * m) {
    if (a.mask == nullptr) {
        memset(m, 0, n*sizeof(float));
    } else {
        const char * row = a.mask + stream*a.mask_stream + query*a.mask_query;
        load_row(row + cell*(a.type_mask == GGML_TYPE_F32 ? sizeof(float) : sizeof(uint16_t)), a.type_mask, n, m);
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

// n rows of one head from `cell` on, into dst[n][width]; asks for the same number of rows at `next`.
H2OG_INLINE void load_rows(const char * src, size_t stride, ggml_type type, int32_t n, int32_t dim, int32_t width, float * dst,
                           const char * next, size_t next_stride, size_t next_bytes) {
    for (int32_t c = 0; c < n; ++c) {
        load_row(src + c*stride, type, dim, dst + size_t(c)*width);
        prefetch(next + c*next_stride, next_bytes);
        for (int32_t d = dim; d < width; ++d) {
            dst[size_t(c)*width + d] = 0.0f;
        }
    }
}

// n cells of a transposed V, whose elements lie v_element apart.
static void load_transposed(const Attention & a, const char * src, int32_t n, int32_t width, float * dst) {
    for (int32_t c = 0; c < n; ++c) {
        for (int32_t d = 0; d < a.head_dim_v; ++d) {
            load_row(src + c*a.v_cell + d*a.v_element, a.type_v, 1, dst + size_t(c)*width + d);
        }
        for (int32_t d = a.head_dim_v; d < width; ++d) {
            dst[size_t(c)*width + d] = 0.0f;
        }
    }
}

// mass[c] += sum over the rows of weight[r]*e[r][c].
static void weigh_rows(const float * e, size_t stride, const float * weight, int32_t n_row, int32_t n_cells, float * mass) {
    for (int32_t r = 0; r < n_row; ++r) {
        const float * row = e + r*stride;
        const float w = weight[r];
        int32_t c = 0;
        for (; c + LANES <= n_cells; c += LANES) {
            store(mass + c, load(mass + c) + w*load(row + c));
        }
        for (; c < n_cells; ++c) {
            mass[c] += w*row[c];
        }
    }
}

// The same where the rows lie side by side: e[c][r]; weight is 0 behind the rows there are.
static void weigh_columns(const float * e, int32_t width, const float * weight, int32_t n_cells, float * mass) {
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
            mass[c + i] += out[i];
        }
    }
}

// q[row][dim], or where wide q[dim][row], times the scale of the logits; 0 where there is none.
H2OG_INLINE void load_queries(const Attention & a, const Plan & p, const Unit & u, float * q) {
    const size_t row_step = p.is_wide ? 1 : p.dim_k, dim_step = p.is_wide ? p.width : 1;
    memset(q, 0, size_t(p.width)*p.dim_k*sizeof(float));
    for (int32_t i = 0; i < u.n_row; ++i) {
        const int32_t row = u.row + i;
        const float * src = reinterpret_cast<const float *>(
            a.q + u.stream*a.q_stream + (u.head*p.group + row % p.group)*a.q_head + (row/p.group)*a.q_query);
        for (int32_t d = 0; d < a.head_dim_k; ++d) {
            q[i*row_step + d*dim_step] = src[d]*a.scale;
        }
    }
}

// logits[r][0 .. BLOCK) of a block, few rows: dot products.
H2OG_INLINE void dot_block(const Plan & p, int32_t n_row, const float * q, const float * k, int32_t n, float * logits, size_t stride) {
    for (int32_t c = 0; c < n; c += LANES) {
        for (int32_t r = 0; r < n_row; ++r) {
            vf acc[LANES] = {};
            for (int32_t d = 0; d < p.dim_k; d += LANES) {
                const vf qd = load(q + size_t(r)*p.dim_k + d);
                for (int32_t i = 0; i < LANES; ++i) {
                    acc[i] += qd*load(k + size_t(c + i)*p.dim_k + d);
                }
            }
            store(logits + r*stride + c, sums(acc));
        }
    }
}

H2OG_INLINE vf cap(vf x, float softcap) {
    return softcap == 0.0f ? x : tanh(x*(1.0f/softcap))*softcap;
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

H2OG_INLINE void mask_rows(const Attention & a, const Plan & p, const Unit & u, const float * mask, Mask kind, float * logits,
                           size_t stride, float * top) {
    for (int32_t r = 0; r < u.n_row; ++r) {
        const float * m = mask + size_t((u.row + r)/p.group - u.row/p.group)*BLOCK;
        float * row = logits + r*stride;
        vf t = all(top[r]);
        for (int32_t c = 0; c < BLOCK; c += LANES) {
            vf x = cap(load(row + c), a.softcap);
            if (kind == Mask::MIXED) {
                x = load(m + c) == NEG_INF ? all(NEG_INF) : x + load(m + c);
            }
            store(row + c, x);
            t = larger(x, t);
        }
        top[r] = largest(t);
    }
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

// logits become e = exp(logit - top); total gets their sum.  A row that sees nothing has top -inf and e = 0.
H2OG_INLINE void exp_rows(int32_t n_row, float * logits, size_t stride, const float * top, float * total) {
    for (int32_t r = 0; r < n_row; ++r) {
        const vf t = all(top[r] == NEG_INF ? 0.0f : top[r]);
        vf sum_of = vf{};
        for (int32_t c = 0; c < BLOCK; c += LANES) {
            const vf e = exp_nonpositive(load(logits + r*stride + c) - t);
            store(logits + r*stride + c, e);
            sum_of += e;
        }
        total[r] += sum(sum_of);
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

// The weight of every row's e in the scores, given the sum of its probabilities; 0 behind the rows there are.
H2OG_INLINE void weigh(const Attention & a, const Plan & p, const Unit & u, const float * inverse, float * weight) {
    for (int32_t r = 0; r < p.width; ++r) {
        weight[r] = r < u.n_row ? inverse[r]*a.weights[u.stream*a.n_query + (u.row + r)/p.group] : 0.0f;
    }
}

H2OG_INLINE void add_mass(const Plan & p, const float * e, size_t stride, const float * weight, int32_t n_row, int32_t n_cells,
                          float * mass) {
    if (p.is_wide) {
        weigh_columns(e, p.width, weight, n_cells, mass);
    } else {
        weigh_rows(e, stride, weight, n_row, n_cells, mass);
    }
}

static float exp1(float x) {
    return exp_nonpositive(all(x))[0];
}

H2OG_INLINE float * output_row(const Attention & a, const Plan & p, const Unit & u, int32_t r) {
    const int32_t row = u.row + r;
    return a.out + ((size_t(u.stream)*a.n_query + row/p.group)*a.n_head + u.head*p.group + row % p.group)*a.head_dim_v;
}

// What each range's e of a row is to be multiplied with to give probabilities: factor[i*factor_step] from top[i*step] and
// total[i*step], i < n; 0 for a row that sees nothing.
H2OG_INLINE void softmax_share(float sink, const float * top, const float * total, int32_t n, size_t step, float * factor,
                               size_t factor_step) {
    float most = sink;
    for (int32_t i = 0; i < n; ++i) {
        most = top[i*step] > most ? top[i*step] : most;
    }
    float whole = sink == NEG_INF ? 0.0f : exp1(sink - most);
    for (int32_t i = 0; i < n; ++i) {
        const float f = top[i*step] == NEG_INF ? 0.0f : exp1(top[i*step] - most);
        factor[i*factor_step] = f;
        whole += f*total[i*step];
    }
    for (int32_t i = 0; i < n; ++i) {
        float & f = factor[i*factor_step];
        f = f == 0.0f ? 0.0f : f/whole;
    }
}

H2OG_INLINE float sink_of(const Attention & a, const Plan & p, const Unit & u, int32_t r) {
    return a.sinks == nullptr ? NEG_INF : a.sinks[u.head*p.group + (u.row + r) % p.group];
}

static void attend(const Attention & a, const Plan & p, const Unit & u, const Unit * next, float * memory, const Scratch & s) {
    const int32_t n_block = (u.n_cells + BLOCK - 1)/BLOCK;
    const size_t stride   = p.logit_stride, k_bytes = p.k_row_bytes, v_bytes = p.v_row_bytes;
    float * top   = memory;
    float * total = memory + p.total_at;
    float * out   = memory + p.out_at;
    const char * k = a.k + u.stream*a.k_stream + u.head*a.k_head;
    const char * v = a.v + u.stream*a.v_stream + u.head*a.v_head;

    load_queries(a, p, u, s.q);
    for (int32_t r = 0; r < p.width; ++r) {
        top[r] = NEG_INF;
        total[r] = 0.0f;
    }
    for (int32_t b = 0; b < n_block; ++b) {
        const int32_t cell = u.cell + b*BLOCK;
        const int32_t n    = u.n_cells - b*BLOCK < BLOCK ? u.n_cells - b*BLOCK : BLOCK;
        float * logits = s.logits + (p.is_wide ? size_t(b)*BLOCK*p.width : size_t(b)*BLOCK);
        const Mask kind = load_masks(a, p, u, cell, n, s.mask);
        s.is_hidden[b] = kind == Mask::HIDDEN;
        if (kind == Mask::HIDDEN) {
            continue;
        }
        const bool is_last = b + 1 == n_block;
        load_rows(k + cell*a.k_cell, a.k_cell, a.type_k, n, a.head_dim_k, p.dim_k, s.k,
                  is_last ? v + u.cell*a.v_cell : k + (cell + BLOCK)*a.k_cell, is_last ? a.v_cell : a.k_cell, is_last ? v_bytes : k_bytes);
        if (p.is_wide) {
            product(s.k, p.dim_k, 1, s.q, p.width, a.head_dim_k, logits, p.width, n, p.width, false);
            mask_columns(a, p, u, s.mask, kind, n, logits, top);
        } else {
            dot_block(p, u.n_row, s.q, s.k, n, logits, stride);
            mask_rows(a, p, u, s.mask, kind, logits, stride, top);
        }
    }

    bool is_added = false;
    for (int32_t b = 0; b < n_block; ++b) {
        const int32_t cell = u.cell + b*BLOCK;
        const int32_t n    = u.n_cells - b*BLOCK < BLOCK ? u.n_cells - b*BLOCK : BLOCK;
        float * logits = s.logits + (p.is_wide ? size_t(b)*BLOCK*p.width : size_t(b)*BLOCK);
        if (s.is_hidden[b]) {
            for (int32_t i = 0; i < (p.is_wide ? n : u.n_row); ++i) {
                memset(logits + i*(p.is_wide ? size_t(p.width) : stride), 0, (p.is_wide ? p.width : BLOCK)*sizeof(float));
            }
            continue;
        }
        if (p.is_wide) {
            exp_columns(p.width, n, logits, top, total);
        } else {
            exp_rows(u.n_row, logits, stride, top, total);
        }
        if (a.v_element == 0) {
            const bool is_last = b + 1 == n_block;
            const char * k_next = next == nullptr ? k : a.k + next->stream*a.k_stream + next->head*a.k_head + next->cell*a.k_cell;
            load_rows(v + cell*a.v_cell, a.v_cell, a.type_v, n, a.head_dim_v, p.dim_v, s.v,
                      is_last ? k_next : v + (cell + BLOCK)*a.v_cell, is_last ? a.k_cell : a.v_cell, is_last ? k_bytes : v_bytes);
        } else {
            load_transposed(a, v + cell*a.v_cell, n, p.dim_v, s.v);
        }
        product(logits, p.is_wide ? 1 : stride, p.is_wide ? p.width : 1, s.v, p.dim_v, n, out, p.dim_v, u.n_row, p.dim_v, is_added);
        is_added = true;
    }
    if (!is_added) {
        memset(out, 0, size_t(u.n_row)*p.dim_v*sizeof(float));
    }
    if (a.scores == nullptr) {
        return;
    }
    float * rest = memory + p.rest_at;
    if (p.n_split > 1) {
        for (int32_t i = 0; i < (p.is_wide ? 1 : u.n_row); ++i) {
            memcpy(rest + i*stride, s.logits + i*stride, (p.is_wide ? u.n_cells*p.width : u.n_cells)*sizeof(float));
        }
        return;
    }
    for (int32_t r = 0; r < u.n_row; ++r) {
        softmax_share(sink_of(a, p, u, r), top + r, total + r, 1, 0, s.factor + r, 0);
    }
    weigh(a, p, u, s.factor, s.weight);
    memset(rest, 0, u.n_cells*sizeof(float));
    add_mass(p, s.logits, stride, s.weight, u.n_row, u.n_cells, rest);
}

// A part of one KV head's outputs, and of its cells' scores.
static void combine(const Attention & a, const Plan & p, const float * workspace, int32_t stream, int32_t head, int32_t part,
                    const Scratch & s) {
    const int32_t step  = round_up((a.n_cells + p.n_part - 1)/p.n_part, p.n_split > 1 ? p.n_split_cells : 1);
    const int32_t first = part*step, end = first + step < a.n_cells ? first + step : a.n_cells;
    float * scores = a.scores == nullptr ? nullptr : a.scores + stream*a.scores_stream + head*a.scores_head;
    for (int32_t c = first; scores != nullptr && c < end; ++c) {
        scores[c] *= a.fade[stream];
    }
    for (int32_t tile = 0; tile < p.n_tile; ++tile) {
        const int32_t i_unit = (stream*p.n_tile + tile)*p.n_split*a.n_head_kv + head;
        const Unit u = p.unit(a, i_unit);
        const float * memory = workspace + i_unit*p.unit_floats;
        const size_t next = a.n_head_kv*p.unit_floats;  // to the same rows' next range of cells
        for (int32_t r = 0; r < u.n_row; ++r) {
            softmax_share(sink_of(a, p, u, r), memory + r, memory + p.total_at + r, p.n_split, next, s.factor + r, p.width);
        }
        for (int32_t r = part; r < u.n_row; r += p.n_part) {
            float * dst = output_row(a, p, u, r);
            memset(dst, 0, a.head_dim_v*sizeof(float));
            for (int32_t split = 0; split < p.n_split; ++split) {
                const float * out = memory + split*next + p.out_at + size_t(r)*p.dim_v;
                const float f = s.factor[size_t(split)*p.width + r];
                for (int32_t d = 0; d < a.head_dim_v; ++d) {
                    dst[d] += f*out[d];
                }
            }
        }
        if (scores == nullptr) {
            continue;
        }
        if (p.n_split == 1) {
            for (int32_t c = first; c < end; ++c) {
                scores[c] += memory[p.rest_at + c];
            }
            continue;
        }
        for (int32_t cell = first; cell < end; cell += p.n_split_cells) {
            const int32_t split = cell/p.n_split_cells;
            const int32_t n = a.n_cells - cell < p.n_split_cells ? a.n_cells - cell : p.n_split_cells;
            weigh(a, p, u, s.factor + size_t(split)*p.width, s.weight);
            add_mass(p, memory + split*next + p.rest_at, p.logit_stride, s.weight, u.n_row, n, scores + cell);
        }
    }
}

} // namespace H2OG_ISA

#define H2OG_NAME_(isa) #isa
#define H2OG_NAME(isa) H2OG_NAME_(isa)
#define H2OG_KERNEL_(isa) kernel_##isa
#define H2OG_KERNEL(isa) H2OG_KERNEL_(isa)
extern const Kernel H2OG_KERNEL(H2OG_ISA) = { H2OG_NAME(H2OG_ISA), H2OG_ISA::LANES, H2OG_ISA::attend, H2OG_ISA::combine };

} // namespace h2og
