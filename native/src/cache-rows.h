// Rows of a cache as float32, for every type a cache can have.
#pragma once

#include "simd.h"

namespace h2og {
namespace H2OG_ISA {

constexpr int32_t QUANTS = 32;  // elements of a quantized block of any cache type

// A block's 4-bit integers from element j on: the first half of them are the low parts of its bytes, the second the high.
template <typename Block>
H2OG_INLINE vi nibbles(const Block & b, int32_t j) {
    const vi both = load_u8(b.qs + j % (QUANTS/2));
    return j < QUANTS/2 ? both & 15 : both >> 4;
}

template <typename Block>
H2OG_INLINE vi fifth_bits(const Block & b, int32_t j) {
    int32_t bits;
    memcpy(&bits, b.qh, sizeof(bits));
    return ((vi{} + bits) >> (lane_numbers() + j) & 1) << 4;
}

// A block's elements from j on: levels(b, j)*b.d, and in types with a least value of a block, b.m more.
H2OG_INLINE vf levels(const block_q8_0 & b, int32_t j) { return to_float(load_i8(b.qs + j)); }
H2OG_INLINE vf levels(const block_q4_0 & b, int32_t j) { return to_float(nibbles(b, j) - 8); }
H2OG_INLINE vf levels(const block_q4_1 & b, int32_t j) { return to_float(nibbles(b, j)); }
H2OG_INLINE vf levels(const block_q5_0 & b, int32_t j) { return to_float((nibbles(b, j) | fifth_bits(b, j)) - 16); }
H2OG_INLINE vf levels(const block_q5_1 & b, int32_t j) { return to_float(nibbles(b, j) | fifth_bits(b, j)); }
H2OG_INLINE vf levels(const block_iq4_nl & b, int32_t j) {
    static constexpr float values[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };
    return look_up(values, nibbles(b, j));
}

template <typename Block>
constexpr bool HAS_LEAST = false;
template <>
constexpr bool HAS_LEAST<block_q4_1> = true;
template <>
constexpr bool HAS_LEAST<block_q5_1> = true;

// A type's rows: at(row, d, j) is LANES elements from d + j on; d is a multiple of STEP, and j of LANES below STEP.  parts are
// the same before they are multiplied with what the elements of a Block have in common, if HAS_FACTOR.
template <typename T, vf (* load_lanes)(const T *)>
struct PlainRow {
    static constexpr int32_t STEP = LANES;
    static constexpr bool HAS_FACTOR = false;
    H2OG_INLINE vf at(const char * row, int32_t d, int32_t) { return load_lanes(reinterpret_cast<const T *>(row) + d); }
    H2OG_INLINE vf parts(const char * row, int32_t d, int32_t j) { return at(row, d, j); }
};

template <typename B>
struct BlockRow {
    using Block = B;
    static constexpr int32_t STEP = QUANTS;
    static constexpr bool HAS_FACTOR = true;
    H2OG_INLINE const Block & block(const char * row, int32_t d) { return reinterpret_cast<const Block *>(row)[d/QUANTS]; }
    H2OG_INLINE vf parts(const char * row, int32_t d, int32_t j) { return levels(block(row, d), j); }
    H2OG_INLINE vf at(const char * row, int32_t d, int32_t j) {
        const Block & b = block(row, d);
        if constexpr (HAS_LEAST<Block>) {
            return levels(b, j)*half(b.d) + half(b.m);
        } else {
            return levels(b, j)*half(b.d);
        }
    }
};

H2OG_INLINE uint16_t bits16(const char * p) {
    uint16_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

// The float16 of LANES rows as float32, from p on; of those behind the n rows there are, the last one again.
H2OG_INLINE vf load_halves(const char * p, size_t step, int32_t n) {
    vh h;
    if (n >= LANES) {
        for (int32_t c = 0; c < LANES; ++c) {
            h[c] = bits16(p + c*step);
        }
    } else {
        for (int32_t c = 0; c < LANES; ++c) {
            h[c] = bits16(p + (c < n ? c : n - 1)*step);
        }
    }
    return from_f16(h);
}

using RowF32 = PlainRow<float, load>;

// Calls f with the Row of a type.  Types a cache cannot have are refused when the graph is built.
template <typename F>
H2OG_INLINE auto with_row(ggml_type type, const F & f) {
    switch (type) {
        case GGML_TYPE_F16:    return f(PlainRow<uint16_t, load_f16>{});
        case GGML_TYPE_BF16:   return f(PlainRow<uint16_t, load_bf16>{});
        case GGML_TYPE_Q8_0:   return f(BlockRow<block_q8_0>{});
        case GGML_TYPE_Q5_0:   return f(BlockRow<block_q5_0>{});
        case GGML_TYPE_Q5_1:   return f(BlockRow<block_q5_1>{});
        case GGML_TYPE_Q4_0:   return f(BlockRow<block_q4_0>{});
        case GGML_TYPE_Q4_1:   return f(BlockRow<block_q4_1>{});
        case GGML_TYPE_IQ4_NL: return f(BlockRow<block_iq4_nl>{});
        default:               return f(RowF32{});
    }
}

// dst[c][0 .. width) of n rows; 0 behind the dim elements there are.
template <typename Row>
H2OG_INLINE void convert_rows(const char * src, size_t step, int32_t n, int32_t dim, int32_t width, size_t element, float * dst) {
    for (int32_t c = 0; c < n; ++c) {
        const char * row = src + c*step;
        float * to = dst + size_t(c)*width;
        int32_t d = 0;
        for (; d + Row::STEP <= dim; d += Row::STEP) {
            for (int32_t j = 0; j < Row::STEP; j += LANES) {
                store(to + d + j, Row::at(row, d, j));
            }
        }
        if (d < dim) {  // never in a quantized row
            char rest[LANES*sizeof(float)] = {};
            float out[LANES];
            memcpy(rest, row + d*element, (dim - d)*element);
            store(out, Row::at(rest, 0, 0));
            memcpy(to + d, out, (dim - d)*sizeof(float));
            d = dim;
        }
        for (; d < width; ++d) {
            to[d] = 0.0f;
        }
    }
}

static void load_rows(const char * src, size_t step, ggml_type type, int32_t n, int32_t dim, int32_t width, float * dst) {
    const size_t element = type == GGML_TYPE_F32 ? sizeof(float) : sizeof(uint16_t);
    with_row(type, [&](auto row) { convert_rows<decltype(row)>(src, step, n, dim, width, element, dst); });
}

} // namespace H2OG_ISA
} // namespace h2og
