// Vectors of bytes, and sums of products of them: where the instruction set has those, H2OG_BYTES is defined.
#pragma once

#include "simd.h"

#if defined(H2OG_AVX512) && defined(__AVX512VNNI__)
#  define H2OG_BYTES 1

namespace h2og {
namespace H2OG_ISA {

typedef uint8_t vb __attribute__((vector_size(32)));

H2OG_INLINE vb load_bytes(const void * p) {
    vb v;
    memcpy(&v, p, sizeof(v));
    return v;
}

// The low halves of 16 bytes, then the high ones.
H2OG_INLINE vb split_bytes(const uint8_t * p) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)), low = _mm_set1_epi8(15);
    return vb(_mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(both, 4), low), _mm_and_si128(both, low)));
}

// x, with 16 added where the bit of that number is set.
H2OG_INLINE vb add_sixteens(vb x, uint32_t bits) {
    return vb(_mm256_mask_add_epi8(__m256i(x), bits, __m256i(x), _mm256_set1_epi8(16)));
}

// Byte i of the result is table[x[i]], of 16 entries.
H2OG_INLINE vb look_up(const uint8_t * table, vb x) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
    return vb(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), __m256i(x)));
}

// Lane c of columns[g] is the bytes 4*g .. 4*g + 3 of row(c).
template <typename F>
H2OG_INLINE void transpose(const F & row, vi * columns) {
    __m512i x[8], y[8];
    for (int i = 0; i < 8; ++i) {
        const int c = i < 4 ? i : i + 4;
        x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(__m256i(row(c))), __m256i(row(c + 4)), 1);
    }
    for (int i = 0; i < 8; i += 2) {
        y[i]     = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; ++j) {
            x[i + 2*j]     = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
            x[i + 2*j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
        }
    }
    for (int g = 0; g < 4; ++g) {
        columns[g]     = vi(_mm512_shuffle_i32x4(x[g], x[g + 4], 0x88));
        columns[g + 4] = vi(_mm512_shuffle_i32x4(x[g], x[g + 4], 0xDD));
    }
}

// sum, and the products of each lane's four bytes a, without sign, with the four of b, with sign.
H2OG_INLINE vi add_products(vi sum, vi a, const int8_t * b) {
    int32_t four;
    memcpy(&four, b, sizeof(four));
    return vi(_mm512_dpbusd_epi32(__m512i(sum), __m512i(a), _mm512_set1_epi32(four)));
}

// The low byte of each lane.
H2OG_INLINE void store_bytes(int8_t * p, vi x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(__m512i(x)));
}

// To the nearest integer.
H2OG_INLINE vi rounded(vf x) {
    return vi(_mm512_cvtps_epi32(x));
}

} // namespace H2OG_ISA
} // namespace h2og

#endif
