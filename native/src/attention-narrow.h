// Few rows for each KV head, as when decoding: rows of K and V are read once, straight from the cache, in the order they
// lie in memory, and meet the queries of all heads there.  Logits are kept as [row][cell].
#pragma once

#include "attention-parts.h"
#include "attention-reader.h"

namespace h2og {
namespace H2OG_ISA {

constexpr size_t  GROUP_BYTES = 36*64;    // read of one head before the next, where rows are small
constexpr size_t  NEAR_BYTES  = 24*1024;  // a part of a core's first cache
constexpr int32_t FEW_CELLS   = 8;        // of a group, where rows are large
constexpr int32_t FEW_LANES   = LANES > FEW_CELLS ? LANES : FEW_CELLS;  // the same where cells are the lanes of vectors

// Cells read of one head before the next: a part of a block.
H2OG_INLINE int32_t group_of(size_t row, int32_t least) {
    int32_t n = BLOCK;
    while (n > least && n*row > GROUP_BYTES) {
        n /= 2;
    }
    return n;
}

// How many cells ahead of a group memory is asked for: two groups where they are near, else one.
H2OG_INLINE int32_t cells_ahead(int32_t group, size_t cell) {
    return 2*group*cell <= NEAR_BYTES ? 2*group : group;
}

// What to ask for while a head's group of cells is read, given where the first head's rows lie that are as far ahead: a share of all
// heads' rows where they lie side by side, else the head's own.
H2OG_INLINE Ahead ahead_of(const Attention & a, const char * at, size_t cell, size_t head, size_t row, int32_t i_head, int32_t group) {
    if (cell == a.n_head_kv*row) {
        return { at + i_head*group*row, int32_t(row) };
    }
    return cell == row ? Ahead{ at + i_head*head, int32_t(row) } : Ahead{};
}

// A block's logits, capped and masked.
H2OG_INLINE void mask_rows(const Attention & a, const Plan & p, const Unit & u, const float * mask, Mask kind, float * logits,
                           size_t stride) {
    if (kind == Mask::OPEN && a.softcap == 0.0f) {
        return;
    }
    for (int32_t r = 0; r < u.n_row; ++r) {
        const float * m = mask + size_t((u.row + r)/p.group - u.row/p.group)*BLOCK;
        float * row = logits + r*stride;
        for (int32_t c = 0; c < BLOCK; c += LANES) {
            const vf x = cap(load(row + c), a.softcap);
            store(row + c, load(m + c) == NEG_INF ? all(NEG_INF) : x + load(m + c));
        }
    }
}

// The largest of a row's logits, in the blocks that are not hidden.
H2OG_INLINE float largest_of(const float * logits, int32_t n_block, const float * is_hidden) {
    vf most = all(NEG_INF);
    for (int32_t b = 0; b < n_block; ++b) {
        for (int32_t c = 0; !is_hidden[b] && c < BLOCK; c += LANES) {
            most = larger(load(logits + b*BLOCK + c), most);
        }
    }
    return largest(most);
}

// A row's logits become e = exp(logit - top), in the blocks that are not hidden; returns their sum.  Where top is -inf all are 0.
H2OG_INLINE float exp_row(float * logits, int32_t n_block, const float * is_hidden, float top) {
    const vf t = all(top == NEG_INF ? 0.0f : top);
    vf sum_of = vf{};
    for (int32_t b = 0; b < n_block; ++b) {
        for (int32_t c = 0; !is_hidden[b] && c < BLOCK; c += LANES) {
            float * at = logits + b*BLOCK + c;
            const vf e = exp_nonpositive(load(at) - t);
            store(at, e);
            sum_of += e;
        }
    }
    return sum(sum_of);
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

static void attend_narrow(const Attention & a, const Plan & p, const Unit & u, float * memory, float * mass, Scratch & s) {
    const int32_t n_row = u.n_row, n_block = (u.n_cells + BLOCK - 1)/BLOCK;
    const size_t stride = p.logit_stride;
    const Reader of_k = reader_of(a.type_k, a.head_dim_k, false), of_v = reader_of(a.type_v, a.head_dim_v, a.v_element != 0);
    const char * k = a.k + u.stream*a.k_stream + u.cell*a.k_cell;
    const char * v = a.v + u.stream*a.v_stream + u.cell*a.v_cell;
    // What blocks of V have in common is read a block of cells at once.
    const int32_t group_k = group_of(p.row_k, of_k.split == nullptr ? FEW_CELLS : FEW_LANES), group_v = group_of(p.row_v, FEW_CELLS);
    const int32_t ahead_k = cells_ahead(group_k, a.k_cell), ahead_v = cells_ahead(group_v, a.v_cell) + (of_v.scale == nullptr ? 0 : BLOCK);
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

    const bool is_new = !has_loaded(a, p, u, s);
    for (int32_t h = 0; is_new && h < a.n_head_kv; ++h) {
        load_queries(a, p, unit_of(h), q_of(h), p.dim_k, 1);
        for (int32_t r = 0; of_k.split != nullptr && r < n_row; ++r) {
            of_k.split(q_of(h) + size_t(r)*p.dim_k, p.dim_k);
        }
    }
    for (int32_t h = 0; h < a.n_head_kv; ++h) {
        for (int32_t r = n_row; r < p.width; ++r) {
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
            for (int32_t i = 0; i < a.n_head_kv*n_row; ++i) {
                memset(logits_of(i/n_row, first) + i % n_row*stride, 0, BLOCK*sizeof(float));
            }
            continue;
        }
        for (int32_t c = first; c < first + n_here; c += group_k) {
            const int32_t n = n_of(c, group_k);
            for (int32_t h = 0; h < a.n_head_kv; ++h) {
                const char * from = k + c*a.k_cell + h*a.k_head;
                const Ahead ahead = ahead_of(a, k + (c + ahead_k)*a.k_cell, a.k_cell, a.k_head, p.row_k, h, group_k);
                size_t step = a.k_cell;
                if (!of_k.is_direct) {
                    load_rows(from, step, a.type_k, n, a.head_dim_k, p.dim_k, s.k);
                    from = reinterpret_cast<const char *>(s.k);
                    step = p.dim_k*sizeof(float);
                }
                of_k.dots(q_of(h), p.dim_k, n_row, from, step, n, logits_of(h, c), stride, ahead);
            }
        }
        for (int32_t h = 0; h < a.n_head_kv; ++h) {
            mask_rows(a, p, u, s.mask, kind, logits_of(h, first), stride);
        }
    }
    for (int32_t i = 0; i < a.n_head_kv*n_row; ++i) {
        float * top = memory_of(i/n_row) + i % n_row, * total = top + p.total_at;
        float * row = logits_of(i/n_row, 0) + i % n_row*stride;
        *top   = largest_of(row, n_block, s.is_hidden);
        *total = exp_row(row, n_block, s.is_hidden, *top);
    }
    for (int32_t b = 0; b < n_block; ++b) {
        const int32_t first = b*BLOCK, n_here = n_of(first, BLOCK);
        if (s.is_hidden[b]) {
            continue;
        }
        for (int32_t h = 0; of_v.scale != nullptr && h < a.n_head_kv; ++h) {
            of_v.scale(logits_of(h, first), stride, n_row, v + first*a.v_cell + h*a.v_head, a.v_cell, n_here, scaled_of(h),
                       memory_of(h) + p.out_at, p.dim_v);
        }
        for (int32_t c = first; c < first + n_here; c += group_v) {
            const int32_t n = n_of(c, group_v);
            for (int32_t h = 0; h < a.n_head_kv; ++h) {
                const char * from = v + c*a.v_cell + h*a.v_head;
                const Ahead ahead = ahead_of(a, v + (c + ahead_v)*a.v_cell, a.v_cell, a.v_head, p.row_v, h, group_v);
                size_t step = a.v_cell;
                if (!of_v.is_direct) {
                    load_values(a, from, n, p.dim_v, s.v);
                    from = reinterpret_cast<const char *>(s.v);
                    step = p.dim_v*sizeof(float);
                }
                const Weights e = of_v.scale == nullptr ? Weights{ logits_of(h, c), stride, 0 } :
                    Weights{ scaled_of(h) + c - first, BLOCK, size_t(n_row)*BLOCK };
                of_v.values(e, n_row, from, step, n, memory_of(h) + p.out_at, p.dim_v, ahead);
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
