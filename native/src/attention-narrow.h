// Few rows for each KV head, as when decoding: rows of K and V are read once, straight from the cache, in the order they
// lie in memory, and meet the queries of all heads there.  Logits are kept as [row][cell].
#pragma once

#include "attention-bytes.h"
#include "attention-parts.h"

namespace h2og {
namespace H2OG_ISA {

constexpr int CELLS    = 4;                      // cells whose dot products are taken at once
constexpr int ROWS     = LANES == 8 ? 3 : 4;     // rows that meet them there
constexpr int VECTORS  = 4;     // vectors of an output row that stay in registers
constexpr size_t GROUP_BYTES = 36*64;            // read of one head before the next, and asked for at once, if rows are small

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
H2OG_INLINE void values(const Weights & e, const char * v, size_t v_step, int32_t n, int32_t d, float * out, int32_t dim) {
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
H2OG_INLINE void all_dots(const float * q, int32_t dim, const char * k, size_t k_step, int32_t n, float * logits, size_t stride) {
#if defined(H2OG_BYTES)
    if constexpr (Row::HAS_FACTOR) {
        for (int32_t c = 0; c < n; c += LANES) {
            byte_dots<typename Row::Block, R>(q, dim, k + c*k_step, k_step, n - c, logits + c, stride);
        }
        return;
    }
#endif
    for (int32_t c = 0; c < n; c += CELLS) {
        const char * at[CELLS];
        for (int i = 0; i < CELLS; ++i) {
            at[i] = k + (c + i < n ? c + i : n - 1)*k_step;
        }
        dots<Row, R>(q, dim, at, logits + c, stride);
    }
}

template <typename Row, int R>
H2OG_INLINE void all_values(const Weights & e, const char * v, size_t v_step, int32_t n, float * out, int32_t dim) {
    constexpr int few = Row::STEP/LANES, many = few > VECTORS ? few : VECTORS;
    int32_t d = 0;
    for (; d + many*LANES <= dim; d += many*LANES) {
        values<Row, R, many>(e, v, v_step, n, d, out, dim);
    }
    for (; d < dim; d += Row::STEP) {
        values<Row, R, few>(e, v, v_step, n, d, out, dim);
    }
}

// n_row rows against n cells of one head.
template <typename Row>
static void dots_of(const float * q, int32_t dim, int32_t n_row, const char * k, size_t k_step, int32_t n, float * logits, size_t stride) {
    for (int32_t r = 0; r < n_row; r += ROWS) {
        const float * qr = q + size_t(r)*dim;
        float * to = logits + r*stride;
        switch (n_row - r) {
            case 1:  all_dots<Row, 1>(qr, dim, k, k_step, n, to, stride);    break;
            case 2:  all_dots<Row, 2>(qr, dim, k, k_step, n, to, stride);    break;
            case 3:  all_dots<Row, 3>(qr, dim, k, k_step, n, to, stride);    break;
            default: all_dots<Row, ROWS>(qr, dim, k, k_step, n, to, stride); break;
        }
    }
}

template <typename Row>
static void values_of(Weights e, int32_t n_row, const char * v, size_t v_step, int32_t n, float * out, int32_t dim) {
    for (int32_t r = 0; r < n_row; r += ROWS, e.row += ROWS*e.stride) {
        float * to = out + size_t(r)*dim;
        switch (n_row - r) {
            case 1:  all_values<Row, 1>(e, v, v_step, n, to, dim);    break;
            case 2:  all_values<Row, 2>(e, v, v_step, n, to, dim);    break;
            case 3:  all_values<Row, 3>(e, v, v_step, n, to, dim);    break;
            default: all_values<Row, ROWS>(e, v, v_step, n, to, dim); break;
        }
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

// Cells read of one head before the next: a part of a block.
H2OG_INLINE int32_t group_of(size_t row) {
    int32_t n = BLOCK;
    while (n > BLOCK/4 && n*row > GROUP_BYTES) {
        n /= 2;
    }
    return n;
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

// mass[c] = mass[c]*keep + sum over the rows of weight[r]*e[r][c].
static void weigh_rows(const float * e, size_t stride, const float * weight, int32_t n_row, int32_t n_cells, float keep, float * mass) {
    int32_t c = 0;
    for (; c + LANES <= n_cells; c += LANES) {
        vf m = load(mass + c)*keep;
        for (int32_t r = 0; r < n_row; ++r) {
            m += weight[r]*load(e + r*stride + c);
        }
        store(mass + c, m);
    }
    for (; c < n_cells; ++c) {
        mass[c] *= keep;
        for (int32_t r = 0; r < n_row; ++r) {
            mass[c] += weight[r]*e[r*stride + c];
        }
    }
}

static void attend_narrow(const Attention & a, const Plan & p, const Unit & u, float * memory, float * mass, const Scratch & s) {
    const int32_t n_row = u.n_row, n_block = (u.n_cells + BLOCK - 1)/BLOCK;
    const size_t stride = p.logit_stride;
    const Reader of_k = reader_of(a.type_k, a.head_dim_k, false), of_v = reader_of(a.type_v, a.head_dim_v, a.v_element != 0);
    const char * k = a.k + u.stream*a.k_stream + u.cell*a.k_cell;
    const char * v = a.v + u.stream*a.v_stream + u.cell*a.v_cell;
    // How far ahead memory is asked for.  What blocks of V have in common is read a block of cells at once.
    const int32_t group_k = group_of(a.k_head), group_v = group_of(a.v_head);
    const int32_t ahead_k = 2*group_k, ahead_v = 2*group_v + (of_v.scale == nullptr ? 0 : BLOCK);
    const auto unit_of   = [&](int32_t h) { Unit w = u; w.head = h; return w; };
    const auto memory_of = [&](int32_t h) { return memory + h*p.unit_floats; };
    const auto q_of      = [&](int32_t h) { return s.q + size_t(h)*p.width*p.dim_k; };
    // Where the scores still need them, logits are written to where combine() finds them.
    const bool   is_kept = a.scores != nullptr && p.n_split > 1;
    float * const logits = is_kept ? memory + p.e_at : s.logits;
    const size_t of_head = is_kept ? p.unit_floats : n_row*stride;
    const auto logits_of = [&](int32_t h, int32_t c) { return logits + h*of_head + c; };
    const auto n_of      = [&](int32_t c, int32_t step) { return u.n_cells - c < step ? u.n_cells - c : step; };
    const auto scaled_of = [&](int32_t h) { return s.scaled + size_t(h)*(p.dim_v/QUANTS)*n_row*BLOCK; };

    for (int32_t h = 0; h < a.n_head_kv; ++h) {
        load_queries(a, p, unit_of(h), q_of(h), p.dim_k, 1);
        for (int32_t r = 0; of_k.split != nullptr && r < n_row; ++r) {
            of_k.split(q_of(h) + size_t(r)*p.dim_k, p.dim_k);
        }
        for (int32_t r = 0; r < p.width; ++r) {
            memory_of(h)[r] = NEG_INF;
            memory_of(h)[p.total_at + r] = 0.0f;
        }
        memset(memory_of(h) + p.out_at, 0, size_t(n_row)*p.dim_v*sizeof(float));
    }
    for (int32_t b = 0; b < n_block; ++b) {
        const int32_t first = b*BLOCK, n_here = n_of(first, BLOCK);
        const Mask kind = load_masks(a, p, u, u.cell + first, n_here, s.mask);
        s.is_hidden[b] = kind == Mask::HIDDEN;
        if (kind == Mask::HIDDEN) {
            continue;
        }
        for (int32_t c = first; c < first + n_here; c += group_k) {
            const int32_t n = n_of(c, group_k);
            for (int32_t h = 0; h < a.n_head_kv; ++h) {
                const char * from = k + c*a.k_cell + h*a.k_head;
                ask_ahead(k + (c + ahead_k)*a.k_cell, group_k*a.k_cell, h, a.n_head_kv);
                size_t step = a.k_cell;
                if (!of_k.is_direct) {
                    load_rows(from, step, a.type_k, n, a.head_dim_k, p.dim_k, s.k);
                    from = reinterpret_cast<const char *>(s.k);
                    step = p.dim_k*sizeof(float);
                }
                of_k.dots(q_of(h), p.dim_k, n_row, from, step, n, logits_of(h, c), stride);
            }
        }
        for (int32_t h = 0; h < a.n_head_kv; ++h) {
            mask_rows(a, p, u, s.mask, kind, logits_of(h, first), stride, memory_of(h));
        }
    }
    for (int32_t b = 0; b < n_block; ++b) {
        const int32_t first = b*BLOCK, n_here = n_of(first, BLOCK);
        for (int32_t h = 0; h < a.n_head_kv; ++h) {
            if (s.is_hidden[b]) {
                for (int32_t r = 0; r < n_row; ++r) {
                    memset(logits_of(h, first) + r*stride, 0, BLOCK*sizeof(float));
                }
            } else {
                exp_rows(n_row, logits_of(h, first), stride, memory_of(h), memory_of(h) + p.total_at);
                if (of_v.scale != nullptr) {
                    of_v.scale(logits_of(h, first), stride, n_row, v + first*a.v_cell + h*a.v_head, a.v_cell, n_here, scaled_of(h),
                               memory_of(h) + p.out_at, p.dim_v);
                }
            }
        }
        for (int32_t c = first; !s.is_hidden[b] && c < first + n_here; c += group_v) {
            const int32_t n = n_of(c, group_v);
            for (int32_t h = 0; h < a.n_head_kv; ++h) {
                const char * from = v + c*a.v_cell + h*a.v_head;
                ask_ahead(v + (c + ahead_v)*a.v_cell, group_v*a.v_cell, h, a.n_head_kv);
                size_t step = a.v_cell;
                if (!of_v.is_direct) {
                    load_values(a, from, n, p.dim_v, s.v);
                    from = reinterpret_cast<const char *>(s.v);
                    step = p.dim_v*sizeof(float);
                }
                const Weights e = of_v.scale == nullptr ? Weights{ logits_of(h, c), stride, 0 } :
                    Weights{ scaled_of(h) + c - first, BLOCK, size_t(n_row)*BLOCK };
                of_v.values(e, n_row, from, step, n, memory_of(h) + p.out_at, p.dim_v);
            }
        }
    }
    for (int32_t h = 0; a.scores != nullptr && !is_kept && h < a.n_head_kv; ++h) {
        softmax_shares(a, p, unit_of(h), memory_of(h), 1, 0, s.factor);
        weigh(a, p, unit_of(h), s.factor, s.weight);
        weigh_rows(logits_of(h, 0), stride, s.weight, n_row, u.n_cells, 1.0f, mass + h*p.mass_floats);
    }
}

} // namespace H2OG_ISA
} // namespace h2og
