// Few rows for each KV head, as when decoding: rows of K and V are read once, straight from the cache, in the order they
// lie in memory, and meet the queries of all heads there.  Logits are kept as [row][cell].
#pragma once

#include "attention-parts.h"
#include "attention-reader.h"

namespace h2og {
namespace H2OG_ISA {

constexpr size_t GROUP_BYTES = 36*64;  // read of one head before the next, and asked for at once, where rows are small

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
    const int32_t group_k = group_of(p.row_k), group_v = group_of(p.row_v);
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
