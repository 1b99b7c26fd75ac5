// Few rows of queries and weights meet rows of K and V where they lie in the cache.  What a quantized block's elements have in
// common is taken out of the sums over them.
#pragma once

#include "attention-bytes.h"
#include "attention-plan.h"
#include "cache-rows.h"

namespace h2og {
namespace H2OG_ISA {

// While cells are read, as many rows from `at` on are asked for, into the first-level cache; a few lines at a time, since a core
// can wait for few.
struct Ahead {
    const char * at = nullptr;
    int32_t row = 0;  // bytes; 0: nothing is asked for

    __attribute__((always_inline)) inline void ask(int32_t cell, int32_t n) const {
        for (int32_t i = 0; i < n*row; i += 64) {
            __builtin_prefetch(at + cell*row + i, 0, 3);
        }
    }
};

constexpr int CELLS    = 4;                      // cells whose dot products are taken at once
constexpr int ROWS     = LANES == 8 ? 3 : 4;     // rows that meet them there
constexpr int VECTORS  = 4;                      // vectors of an output row that stay in registers

// logits[r][0 .. CELLS) = q[r] . k[i] for R rows.
template <typename Row, int R>
H2OG_INLINE void dots(const float * q, int32_t dim, const char * const * k, float * logits, size_t stride) {
    vf acc[ROWS*CELLS] = {};
    for (int32_t d = 0; d < dim; d += Row::STEP) {
        for (int i = 0; i < CELLS; ++i) {
            for (int32_t j = 0; j < Row::STEP; j += LANES) {
                const vf ki = Row::at(k[i], d, j);
                for (int r = 0; r < R; ++r) {
                    acc[r*CELLS + i] += load(q + size_t(r)*dim + d + j)*ki;
                }
            }
        }
    }
    float out[ROWS*CELLS];
    for (int i = 0; i < R*CELLS; i += LANES) {
        vf part[LANES];
        for (int j = 0; j < LANES; ++j) {
            part[j] = i + j < R*CELLS ? acc[i + j < ROWS*CELLS ? i + j : 0] : vf{};
        }
        const vf sum_of = sums(part);
        memcpy(out + i, &sum_of, (R*CELLS - i < LANES ? R*CELLS - i : LANES)*sizeof(float));
    }
    for (int r = 0; r < R; ++r) {
        memcpy(logits + r*stride, out + r*CELLS, CELLS*sizeof(float));
    }
}

// What a row is multiplied with: the weight of row r and cell c at row[r*stride + c], and for elements of V that have a factor
// in common, that of their block's factor in it, of_block further for each block.
struct Weights {
    const float * row;
    size_t stride, of_block;
};

// out[r][0 .. V*LANES) += sum over n cells of e[r][c]*v[c], from element d of the rows on.
template <typename Row, int R, int V>
H2OG_INLINE void values(const Weights & e, const char * v, size_t v_step, int32_t n, int32_t d, float * out, int32_t dim,
                        const Ahead & ahead) {
    constexpr int BLOCKS = Row::HAS_FACTOR ? V*LANES/Row::STEP : 1;
    const float * weight[BLOCKS];
    for (int b = 0; b < BLOCKS; ++b) {
        weight[b] = e.row + (Row::HAS_FACTOR ? (d/Row::STEP + b)*e.of_block : 0);
    }
    vf acc[R][V];
    for (int r = 0; r < R; ++r) {
        for (int j = 0; j < V; ++j) {
            acc[r][j] = load(out + size_t(r)*dim + d + j*LANES);
        }
    }
    for (int32_t c = 0; c < n; ++c) {
        ahead.ask(c, 1);
        for (int j = 0; j < V; ++j) {
            const int32_t b = j*LANES/Row::STEP;
            const vf x = Row::parts(v + c*v_step, d + b*Row::STEP, j*LANES % Row::STEP);
            for (int r = 0; r < R; ++r) {
                acc[r][j] += all(weight[Row::HAS_FACTOR ? b : 0][r*e.stride + c])*x;
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int j = 0; j < V; ++j) {
            store(out + size_t(r)*dim + d + j*LANES, acc[r][j]);
        }
    }
}

// scaled[block][r][0 .. BLOCK) = e[r][c] times the factor of that block of v[c]'s elements, for n cells.  A block's least value
// is the same for all its elements: out gets the sum of them at once.
template <typename Row>
static void scale_rows(const float * e, size_t stride, int32_t n_row, const char * v, size_t v_step, int32_t n, float * scaled,
                       float * out, int32_t dim) {
    for (int32_t d = 0; d < dim; d += Row::STEP, scaled += n_row*BLOCK) {
        const char * block = v + d/Row::STEP*sizeof(typename Row::Block);
        for (int32_t c = 0; c < n; c += LANES) {
            const vf factor = load_halves(block + offsetof(typename Row::Block, d) + c*v_step, v_step, n - c);
            for (int32_t r = 0; r < n_row; ++r) {
                store(scaled + r*BLOCK + c, load(e + r*stride + c)*factor);
            }
        }
        if constexpr (HAS_LEAST<typename Row::Block>) {
            float least[BLOCK];
            for (int32_t c = 0; c < n; c += LANES) {
                store(least + c, load_halves(block + offsetof(typename Row::Block, m) + c*v_step, v_step, n - c));
            }
            for (int32_t r = 0; r < n_row; ++r) {
                vf all_of = vf{};
                for (int32_t c = 0; c < n; c += LANES) {
                    all_of += load(e + r*stride + c)*load(least + c);
                }
                const float sum_of = sum(all_of);
                for (int32_t j = 0; j < Row::STEP; ++j) {
                    out[size_t(r)*dim + d + j] += sum_of;
                }
            }
        }
    }
}

template <typename Row, int R>
H2OG_INLINE void all_dots(const float * q, int32_t dim, const char * k, size_t k_step, int32_t n, float * logits, size_t stride,
                          const Ahead & ahead) {
#if defined(H2OG_BYTES)
    if constexpr (Row::HAS_FACTOR) {
        for (int32_t c = 0; c < n; c += LANES) {
            ahead.ask(c, LANES);
            byte_dots<typename Row::Block, R>(q, dim, k + c*k_step, k_step, n - c, logits + c, stride);
        }
        return;
    }
#endif
    for (int32_t c = 0; c < n; c += CELLS) {
        ahead.ask(c, CELLS);
        const char * at[CELLS];
        for (int i = 0; i < CELLS; ++i) {
            at[i] = k + (c + i < n ? c + i : n - 1)*k_step;
        }
        dots<Row, R>(q, dim, at, logits + c, stride);
    }
}

template <typename Row, int R>
H2OG_INLINE void all_values(const Weights & e, const char * v, size_t v_step, int32_t n, float * out, int32_t dim, Ahead ahead) {
    constexpr int few = Row::STEP/LANES, many = few > VECTORS ? few : VECTORS;
    int32_t d = 0;
    for (; d + many*LANES <= dim; d += many*LANES) {
        values<Row, R, many>(e, v, v_step, n, d, out, dim, ahead);
        ahead.row = 0;
    }
    for (; d < dim; d += Row::STEP) {
        values<Row, R, few>(e, v, v_step, n, d, out, dim, ahead);
        ahead.row = 0;
    }
}

// n_row rows against n cells of one head.
template <typename Row>
static void dots_of(const float * q, int32_t dim, int32_t n_row, const char * k, size_t k_step, int32_t n, float * logits, size_t stride,
                    Ahead ahead) {
    for (int32_t r = 0; r < n_row; r += ROWS) {
        const float * qr = q + size_t(r)*dim;
        float * to = logits + r*stride;
        switch (n_row - r) {
            case 1:  all_dots<Row, 1>(qr, dim, k, k_step, n, to, stride, ahead);    break;
            case 2:  all_dots<Row, 2>(qr, dim, k, k_step, n, to, stride, ahead);    break;
            case 3:  all_dots<Row, 3>(qr, dim, k, k_step, n, to, stride, ahead);    break;
            default: all_dots<Row, ROWS>(qr, dim, k, k_step, n, to, stride, ahead); break;
        }
        ahead.row = 0;
    }
}

template <typename Row>
static void values_of(Weights e, int32_t n_row, const char * v, size_t v_step, int32_t n, float * out, int32_t dim, Ahead ahead) {
    for (int32_t r = 0; r < n_row; r += ROWS, e.row += ROWS*e.stride) {
        float * to = out + size_t(r)*dim;
        switch (n_row - r) {
            case 1:  all_values<Row, 1>(e, v, v_step, n, to, dim, ahead);    break;
            case 2:  all_values<Row, 2>(e, v, v_step, n, to, dim, ahead);    break;
            case 3:  all_values<Row, 3>(e, v, v_step, n, to, dim, ahead);    break;
            default: all_values<Row, ROWS>(e, v, v_step, n, to, dim, ahead); break;
        }
        ahead.row = 0;
    }
}

struct Reader {
    bool is_direct = false;  // rows are used where they lie; otherwise they are converted to float32 first
    decltype(&dots_of<RowF32>)   dots   = dots_of<RowF32>;
    decltype(&values_of<RowF32>) values = values_of<RowF32>;
    // What queries and weights go through before they meet rows of K and V; nullptr: nothing.
    void (* split)(float * q, int32_t n) = nullptr;
    decltype(&scale_rows<BlockRow<block_q8_0>>) scale = nullptr;
};

H2OG_INLINE Reader reader_of(ggml_type type, int32_t dim, bool is_transposed) {
    Reader reader;
    if (dim % LANES != 0 || is_transposed) {
        return reader;
    }
    with_row(type, [&](auto row) {
        using Row = decltype(row);
        reader.is_direct = true;
        reader.dots   = dots_of<Row>;
        reader.values = values_of<Row>;
        if constexpr (Row::HAS_FACTOR) {
            reader.scale = scale_rows<Row>;
#if defined(H2OG_BYTES)
            reader.split = split_query<typename Row::Block>;
#endif
        }
    });
    return reader;
}

} // namespace H2OG_ISA
} // namespace h2og
