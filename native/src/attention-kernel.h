// The fused kernel for one instruction set: attention-avx512.cpp and its neighbours define H2OG_ISA and include this.
#pragma once

#include "attention-look.h"
#include "attention-narrow.h"
#include "attention-wide.h"

namespace h2og {
namespace H2OG_ISA {

// One of n_part parts of a KV head's outputs, and of its cells' scores.
static void combine(const Attention & a, const Plan & p, const float * workspace, int32_t stream, int32_t head, int32_t part,
                    int32_t n_part, const Scratch & s) {
    // Whole units, so that the thread that computed one is likely to find it in its cache.
    const int32_t grain = p.n_split > 1 ? p.n_split_cells : 1;
    const int32_t n_grain = (a.n_cells + grain - 1)/grain;
    const int32_t first = int32_t(int64_t(n_grain)*part/n_part)*grain;
    const int32_t last  = int32_t(int64_t(n_grain)*(part + 1)/n_part)*grain;
    const int32_t end   = last < a.n_cells ? last : a.n_cells;
    float * scores = a.scores == nullptr ? nullptr : a.scores + stream*a.scores_stream + head*a.scores_head;
    for (int32_t tile = 0; tile < p.n_tile; ++tile) {
        const int32_t i_unit = (stream*p.n_tile + tile)*p.n_split*a.n_head_kv + head;
        const Unit u = p.unit(a, i_unit);
        const float * memory = workspace + i_unit*p.unit_floats;
        const size_t next = a.n_head_kv*p.unit_floats;  // to the same rows' next range of cells
        const float  keep = tile == 0 ? a.fade[stream] : 1.0f;
        const auto   ask  = [&](int32_t cell) {
            if (scores != nullptr && p.n_split > 1 && cell < end) {
                ask_ahead(reinterpret_cast<const char *>(memory + cell/p.n_split_cells*next + p.e_at),
                          size_t(p.is_wide ? p.width : u.n_row)*p.logit_stride*sizeof(float));
            }
        };
        ask(first);
        softmax_shares(a, p, u, memory, p.n_split, next, s.factor, a.log_sums == nullptr ? nullptr : s.weight);
        for (int32_t r = part; r < u.n_row; r += n_part) {
            const size_t i_row = output_row(a, p, u, r);
            if (a.log_sums != nullptr) {
                a.log_sums[i_row] = s.weight[r];
            }
            float * dst = a.out + i_row*a.head_dim_v;
            memset(dst, 0, a.head_dim_v*sizeof(float));
            for (int32_t split = 0; split < p.n_split; ++split) {
                const float * out = memory + split*next + p.out_at + size_t(r)*p.dim_v;
                const float f = s.factor[size_t(split)*p.width + r];
                for (int32_t d = 0; d < a.head_dim_v; ++d) {
                    dst[d] += f*out[d];
                }
            }
        }
        if (scores != nullptr && p.n_split == 1 && tile % p.n_chain_tile == 0) {
            const float * mass = workspace + p.mass_at(a, stream, tile/p.n_chain_tile, head);
            for (int32_t c = first; c < end; ++c) {
                scores[c] = scores[c]*keep + mass[c];
            }
        }
        for (int32_t cell = first; scores != nullptr && p.n_split > 1 && cell < end; cell += p.n_split_cells) {
            const int32_t split = cell/p.n_split_cells;
            ask(cell + p.n_split_cells);
            const int32_t n = a.n_cells - cell < p.n_split_cells ? a.n_cells - cell : p.n_split_cells;
            weigh(a, p, u, s.factor + size_t(split)*p.width, s.weight);
            const float * e = memory + split*next + p.e_at;
            if (p.is_wide) {
                weigh_columns(e, p.width, s.weight, n, keep, scores + cell);
            } else {
                weigh_rows(e, p.logit_stride, s.weight, u.n_row, n, keep, scores + cell);
            }
        }
    }
}

} // namespace H2OG_ISA

#define H2OG_NAME_(isa) #isa
#define H2OG_NAME(isa) H2OG_NAME_(isa)
#define H2OG_KERNEL_(isa) kernel_##isa
#define H2OG_KERNEL(isa) H2OG_KERNEL_(isa)
extern const Kernel H2OG_KERNEL(H2OG_ISA) = { H2OG_NAME(H2OG_ISA), H2OG_ISA::LANES, H2OG_ISA::attend_narrow, H2OG_ISA::attend_wide,
                                           H2OG_ISA::combine, H2OG_ISA::look, H2OG_ISA::find };

} // namespace h2og
