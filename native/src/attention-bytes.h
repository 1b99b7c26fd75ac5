// Dot products with a quantized K in integers.  A query's elements become three bytes each, which is as exact as float32;
// cells are the lanes of the vectors, so that nothing is summed across lanes and no byte of K becomes a float.
#pragma once

#include "cache-rows.h"
#include "simd-bytes.h"

#if defined(H2OG_BYTES)

namespace h2og {
namespace H2OG_ISA {

constexpr int PARTS = 3;

// QUANTS elements of a query, in the place of as many floats: step*(65536*part[0] + 256*part[1] + part[2]).
struct QueryBlock {
    int8_t  part[PARTS][QUANTS];
    int32_t start[PARTS];  // what a sum of products has to start from, so that bytes of K count from their zero
    float   step, sum;     // sum: of the elements
};
static_assert(sizeof(QueryBlock) <= QUANTS*sizeof(float));

// A block's elements are bytes(b) - ZERO, times b.d, and b.m more where a type has that.
template <typename Block> constexpr int32_t ZERO = 0;
template <> constexpr int32_t ZERO<block_q8_0>   = 128;
template <> constexpr int32_t ZERO<block_q4_0>   = 8;
template <> constexpr int32_t ZERO<block_q5_0>   = 16;
template <> constexpr int32_t ZERO<block_iq4_nl> = 128;

H2OG_INLINE uint32_t bits(const uint8_t * p) {
    uint32_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

H2OG_INLINE vb bytes(const block_q8_0 & b) { return load_bytes(b.qs) ^ 128; }
H2OG_INLINE vb bytes(const block_q4_0 & b) { return split_bytes(b.qs); }
H2OG_INLINE vb bytes(const block_q4_1 & b) { return split_bytes(b.qs); }
H2OG_INLINE vb bytes(const block_q5_0 & b) { return add_sixteens(split_bytes(b.qs), bits(b.qh)); }
H2OG_INLINE vb bytes(const block_q5_1 & b) { return add_sixteens(split_bytes(b.qs), bits(b.qh)); }
H2OG_INLINE vb bytes(const block_iq4_nl & b) {
    static constexpr uint8_t values[16] = { 1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241 };
    return look_up(values, split_bytes(b.qs));
}

template <typename Block>
static void split_query(float * q, int32_t n) {
    for (int32_t i = 0; i < n; i += QUANTS) {
        vf x[QUANTS/LANES], most = vf{}, all_of = vf{};
        for (int j = 0; j < QUANTS/LANES; ++j) {
            x[j] = load(q + i + j*LANES);
            most = larger(most, larger(x[j], -x[j]));
            all_of += x[j];
        }
        QueryBlock b;
        b.sum  = sum(all_of);
        b.step = largest(most)*0x1p-22f + 0.0f*b.sum;  // not a number if one of the elements is none
        const float inverse = b.step > 0.0f ? 1.0f/b.step : 0.0f;
        vi totals[PARTS] = {};
        for (int j = 0; j < QUANTS/LANES; ++j) {
            vi left = rounded(x[j]*inverse);
            for (int p = PARTS - 1; p >= 0; --p) {
                const vi byte = left << 24 >> 24;
                left = (left - byte) >> 8;
                store_bytes(b.part[p] + j*LANES, byte);
                totals[p] += byte;
            }
        }
        for (int p = 0; p < PARTS; ++p) {
            b.start[p] = -ZERO<Block>*int32_t(sum(to_float(totals[p])));
        }
        memcpy(q + i, &b, sizeof(b));
    }
}

// logits[r][0 .. LANES) = q[r] . k[c] for R rows and n cells.
template <typename Block, int R>
H2OG_INLINE void byte_dots(const float * q, int32_t dim, const char * k, size_t k_step, int32_t n, float * logits, size_t stride) {
    const auto query = [&](int r, int32_t d) {
        return reinterpret_cast<const QueryBlock *>(q + size_t(r)*dim + d);
    };
    vf acc[R] = {};
    for (int32_t d = 0; d < dim; d += QUANTS, k += sizeof(Block)) {
        vi columns[QUANTS/4], sums[R][PARTS];
        const auto row = [&](int c) { return bytes(*reinterpret_cast<const Block *>(k + c*k_step)); };
        if (n >= LANES) {
            transpose(row, columns);
        } else {
            transpose([&](int c) { return row(c < n ? c : n - 1); }, columns);
        }
        for (int r = 0; r < R; ++r) {
            for (int p = 0; p < PARTS; ++p) {
                sums[r][p] = vi{} + query(r, d)->start[p];
            }
        }
        for (int g = 0; g < QUANTS/4; ++g) {
            for (int r = 0; r < R; ++r) {
                for (int p = 0; p < PARTS; ++p) {
                    sums[r][p] = add_products(sums[r][p], columns[g], query(r, d)->part[p] + 4*g);
                }
            }
        }
        const vf factor = load_halves(k + offsetof(Block, d), k_step, n);
        for (int r = 0; r < R; ++r) {
            const vf whole = (to_float(sums[r][0])*65536.0f + to_float(sums[r][1])*256.0f) + to_float(sums[r][2]);
            acc[r] += whole*query(r, d)->step*factor;
        }
        if constexpr (HAS_LEAST<Block>) {
            const vf least = load_halves(k + offsetof(Block, m), k_step, n);
            for (int r = 0; r < R; ++r) {
                acc[r] += query(r, d)->sum*least;
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        store(logits + r*stride, acc[r]);
    }
}

} // namespace H2OG_ISA
} // namespace h2og

#endif
