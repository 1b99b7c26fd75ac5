// Rows of a cache as float32, for every type a cache can have.
#pragma once

#include "simd.h"

#define GGML_COMMON_IMPL_CPP
#include "ggml-common.h"

namespace h2og {
namespace H2OG_ISA {

constexpr int32_t QUANTS = 32;  // elements of a quantized block of any cache type

H2OG_INLINE void low_and_high(const uint8_t * nibbles, int8_t * q) {
    for (int32_t i = 0; i < QUANTS/2; ++i) {
        q[i]            = int8_t(nibbles[i] & 15);
        q[i + QUANTS/2] = int8_t(nibbles[i] >> 4);
    }
}

H2OG_INLINE void add_fifth_bit(const uint8_t * bits, int8_t * q) {
    uint32_t b;
    memcpy(&b, bits, sizeof(b));
    for (int32_t i = 0; i < QUANTS; ++i) {
        q[i] = int8_t(q[i] | ((b >> i & 1) << 4));
    }
}

// Every unpack leaves the block's integers in q; an element is q*scale + offset.
struct Scale { float scale, offset; };

H2OG_INLINE Scale unpack(const block_q8_0 & b, int8_t * q) {
    memcpy(q, b.qs, QUANTS);
    return { half(b.d), 0.0f };
}

H2OG_INLINE Scale unpack(const block_q4_0 & b, int8_t * q) {
    low_and_high(b.qs, q);
    const float d = half(b.d);
    return { d, -8.0f*d };
}

H2OG_INLINE Scale unpack(const block_q4_1 & b, int8_t * q) {
    low_and_high(b.qs, q);
    return { half(b.d), half(b.m) };
}

H2OG_INLINE Scale unpack(const block_q5_0 & b, int8_t * q) {
    low_and_high(b.qs, q);
    add_fifth_bit(b.qh, q);
    const float d = half(b.d);
    return { d, -16.0f*d };
}

H2OG_INLINE Scale unpack(const block_q5_1 & b, int8_t * q) {
    low_and_high(b.qs, q);
    add_fifth_bit(b.qh, q);
    return { half(b.d), half(b.m) };
}

H2OG_INLINE Scale unpack(const block_iq4_nl & b, int8_t * q) {
    low_and_high(b.qs, q);
#if defined(H2OG_AVX512) || defined(H2OG_AVX2)
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i *>(kvalues_iq4nl));
    __m128i * halves = reinterpret_cast<__m128i *>(q);
    for (int i = 0; i < 2; ++i) {
        _mm_storeu_si128(halves + i, _mm_shuffle_epi8(table, _mm_loadu_si128(halves + i)));
    }
#else
    for (int32_t i = 0; i < QUANTS; ++i) {
        q[i] = kvalues_iq4nl[q[i]];
    }
#endif
    return { half(b.d), 0.0f };
}

template <typename Block> H2OG_INLINE void load_quantized(const char * src, int32_t n, float * dst) {
    const Block * blocks = reinterpret_cast<const Block *>(src);
    for (int32_t i = 0; i < n/QUANTS; ++i) {
        alignas(16) int8_t q[QUANTS];
        const Scale s = unpack(blocks[i], q);
        for (int32_t j = 0; j < QUANTS; j += LANES) {
            store(dst + i*QUANTS + j, load_i8(q + j)*s.scale + s.offset);
        }
    }
}

template <vf (* load_lanes)(const uint16_t *)> H2OG_INLINE void load_halves(const char * src, int32_t n, float * dst) {
    const uint16_t * h = reinterpret_cast<const uint16_t *>(src);
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        store(dst + i, load_lanes(h + i));
    }
    if (i < n) {
        uint16_t last[LANES] = {};
        float    out [LANES];
        memcpy(last, h + i, (n - i)*sizeof(uint16_t));
        store(out, load_lanes(last));
        memcpy(dst + i, out, (n - i)*sizeof(float));
    }
}

// dst[0 .. n) of one row.  Types a cache cannot have are refused when the node is built.
H2OG_INLINE void load_row(const char * src, ggml_type type, int32_t n, float * dst) {
    switch (type) {
        case GGML_TYPE_F32:    memcpy(dst, src, n*sizeof(float));            break;
        case GGML_TYPE_F16:    load_halves<load_f16>(src, n, dst);           break;
        case GGML_TYPE_BF16:   load_halves<load_bf16>(src, n, dst);          break;
        case GGML_TYPE_Q8_0:   load_quantized<block_q8_0>(src, n, dst);      break;
        case GGML_TYPE_Q5_0:   load_quantized<block_q5_0>(src, n, dst);      break;
        case GGML_TYPE_Q5_1:   load_quantized<block_q5_1>(src, n, dst);      break;
        case GGML_TYPE_Q4_0:   load_quantized<block_q4_0>(src, n, dst);      break;
        case GGML_TYPE_Q4_1:   load_quantized<block_q4_1>(src, n, dst);      break;
        case GGML_TYPE_IQ4_NL: load_quantized<block_iq4_nl>(src, n, dst);    break;
        default: break;
    }
}

} // namespace H2OG_ISA
} // namespace h2og
