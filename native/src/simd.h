// Vectors of float32, as wide as the instruction set the including file is compiled for: AVX-512, AVX2, NEON, or
// whatever the compiler makes of vectors of four.  Everything lies in a namespace named after it, H2OG_ISA, so that
// one program can hold several; nothing here or in the including file may use the inline functions of a library, of
// which the linker would keep one copy for all.
#pragma once

#include "ggml.h"
#define GGML_COMMON_DECL_C
#include "ggml-common.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#  define H2OG_AVX512 1
#  define H2OG_LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#  define H2OG_AVX2 1
#  define H2OG_LANES 8
#elif defined(__aarch64__)
#  define H2OG_NEON 1
#  define H2OG_LANES 4
#else
#  define H2OG_LANES 4
#endif
#if defined(H2OG_AVX512) || defined(H2OG_AVX2)
#  include <immintrin.h>
#elif defined(H2OG_NEON)
#  include <arm_neon.h>
#endif

#define H2OG_INLINE __attribute__((always_inline)) static inline

namespace h2og {
namespace H2OG_ISA {

constexpr int LANES = H2OG_LANES;
typedef float   vf __attribute__((vector_size(4*H2OG_LANES)));
typedef int32_t vi __attribute__((vector_size(4*H2OG_LANES)));
typedef uint16_t vh __attribute__((vector_size(2*H2OG_LANES)));

constexpr float NEG_INF = -__builtin_huge_valf();

H2OG_INLINE vf load(const float * p) {
    vf v;
    memcpy(&v, p, sizeof(v));
    return v;
}

H2OG_INLINE void store(float * p, vf v) {
    memcpy(p, &v, sizeof(v));
}

H2OG_INLINE vf all(float x) {
#if defined(H2OG_AVX512)
    return _mm512_set1_ps(x);
#elif defined(H2OG_AVX2)
    return _mm256_set1_ps(x);
#else
    return vf{ x, x, x, x };
#endif
}

H2OG_INLINE vf larger(vf a, vf b) {
    return a > b ? a : b;
}

// op of all lanes; in pairs, so that few wait for others.
template <typename Op>
H2OG_INLINE float fold(vf v, const Op & op) {
#if defined(H2OG_AVX512)
    v = op(v, vf(_mm512_shuffle_f32x4(v, v, 0x4E)));
    v = op(v, vf(_mm512_shuffle_f32x4(v, v, 0xB1)));
    v = op(v, vf(_mm512_permute_ps(v, 0x4E)));
    v = op(v, vf(_mm512_permute_ps(v, 0xB1)));
#elif defined(H2OG_AVX2)
    v = op(v, vf(_mm256_permute2f128_ps(v, v, 0x01)));
    v = op(v, vf(_mm256_permute_ps(v, 0x4E)));
    v = op(v, vf(_mm256_permute_ps(v, 0xB1)));
#else
    v = op(v, vf{ v[2], v[3], v[0], v[1] });
    v = op(v, vf{ v[1], v[0], v[3], v[2] });
#endif
    return v[0];
}

H2OG_INLINE float sum(vf v) {
    return fold(v, [](vf a, vf b) { return a + b; });
}

H2OG_INLINE float largest(vf v) {
    return fold(v, [](vf a, vf b) { return larger(a, b); });
}

// The sums of LANES vectors, as one vector.
H2OG_INLINE vf sums(const vf * v) {
#if defined(H2OG_AVX512) || defined(H2OG_AVX2)
    vf quad[LANES/4];  // the sums of four vectors in each part of four lanes
    for (int i = 0; i < LANES/4; ++i) {
        const vf * w = v + 4*i;
#  if defined(H2OG_AVX512)
        const __m512d ab = (__m512d) (vf(_mm512_unpacklo_ps(w[0], w[1])) + vf(_mm512_unpackhi_ps(w[0], w[1])));
        const __m512d cd = (__m512d) (vf(_mm512_unpacklo_ps(w[2], w[3])) + vf(_mm512_unpackhi_ps(w[2], w[3])));
        quad[i] = vf(_mm512_unpacklo_pd(ab, cd)) + vf(_mm512_unpackhi_pd(ab, cd));
#  else
        const __m256d ab = (__m256d) (vf(_mm256_unpacklo_ps(w[0], w[1])) + vf(_mm256_unpackhi_ps(w[0], w[1])));
        const __m256d cd = (__m256d) (vf(_mm256_unpacklo_ps(w[2], w[3])) + vf(_mm256_unpackhi_ps(w[2], w[3])));
        quad[i] = vf(_mm256_unpacklo_pd(ab, cd)) + vf(_mm256_unpackhi_pd(ab, cd));
#  endif
    }
#  if defined(H2OG_AVX512)
    const vf low  = vf(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88)) + vf(_mm512_shuffle_f32x4(quad[0], quad[1], 0xDD));
    const vf high = vf(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88)) + vf(_mm512_shuffle_f32x4(quad[2], quad[3], 0xDD));
    return vf(_mm512_shuffle_f32x4(low, high, 0x88)) + vf(_mm512_shuffle_f32x4(low, high, 0xDD));
#  else
    return vf(_mm256_permute2f128_ps(quad[0], quad[1], 0x20)) + vf(_mm256_permute2f128_ps(quad[0], quad[1], 0x31));
#  endif
#elif defined(H2OG_NEON)
    return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
#else
    vf s;
    for (int i = 0; i < LANES; ++i) {
        s[i] = sum(v[i]);
    }
    return s;
#endif
}

H2OG_INLINE vf from_f16(vh x) {
#if defined(H2OG_AVX512)
    return _mm512_cvtph_ps(__m256i(x));
#elif defined(H2OG_AVX2)
    return _mm256_cvtph_ps(__m128i(x));
#elif defined(H2OG_NEON)
    return vcvt_f32_f16(float16x4_t(x));
#else
    // A float16's exponent and mantissa, moved to float32's places, are too small by 2^112; infinities are set apart.
    const vi h = __builtin_convertvector(x, vi), rest = (h & 0x7FFF) << 13;
    const vf scaled = vf(rest)*5.192296858534828e33f;
    const vi bits = rest >= 0x0F800000 ? (rest | 0x7F800000) : vi(scaled);
    return vf(bits | ((h & 0x8000) << 16));
#endif
}

H2OG_INLINE vf load_f16(const uint16_t * p) {
    vh h;
    memcpy(&h, p, sizeof(h));
    return from_f16(h);
}

H2OG_INLINE vf load_bf16(const uint16_t * p) {
#if defined(H2OG_AVX512)
    return vf(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))), 16));
#elif defined(H2OG_AVX2)
    return vf(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))), 16));
#else
    vi h;
    for (int i = 0; i < LANES; ++i) {
        h[i] = int32_t(uint32_t(p[i]) << 16);
    }
    return vf(h);
#endif
}

H2OG_INLINE vi load_i8(const int8_t * p) {
#if defined(H2OG_AVX512)
    return vi(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif defined(H2OG_AVX2)
    return vi(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#else
    return vi{ p[0], p[1], p[2], p[3] };
#endif
}

H2OG_INLINE vi load_u8(const uint8_t * p) {
#if defined(H2OG_AVX512)
    return vi(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif defined(H2OG_AVX2)
    return vi(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#else
    return vi{ p[0], p[1], p[2], p[3] };
#endif
}

H2OG_INLINE vf to_float(vi x) {
    return __builtin_convertvector(x, vf);
}

// Lane i of the result is table[x[i]], of 16 entries.
H2OG_INLINE vf look_up(const float * table, vi x) {
#if defined(H2OG_AVX512)
    return vf(_mm512_permutexvar_ps(__m512i(x), load(table)));
#elif defined(H2OG_AVX2)
    const __m256 low  = _mm256_permutevar8x32_ps(load(table), __m256i(x));
    const __m256 high = _mm256_permutevar8x32_ps(load(table + 8), __m256i(x));
    return x > 7 ? vf(high) : vf(low);
#else
    return vf{ table[x[0]], table[x[1]], table[x[2]], table[x[3]] };
#endif
}

// Lane i of the result is i.
H2OG_INLINE vi lane_numbers() {
    constexpr int32_t numbers[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    vi v;
    memcpy(&v, numbers, sizeof(v));
    return v;
}

H2OG_INLINE float half(uint16_t h) {
#if defined(H2OG_AVX512) || defined(H2OG_AVX2)
    return _cvtsh_ss(h);
#else
    return from_f16(vh{ h })[0];
#endif
}

// exp for x <= 0, to float32 rounding (relative error below 2e-7); 0 below -87.
H2OG_INLINE vf exp_nonpositive(vf x) {
    const vf clamped = larger(x, all(-87.0f));
    const vf shifted = clamped*1.44269504088896341f + 12582912.0f;  // rounds to an integer in the low bits
    const vf n = shifted - 12582912.0f;
    const vf r = (clamped - n*0.693145751953125f) - n*1.42860682030941723e-6f;
    vf p = all(1.0f/5040.0f);
    p = p*r + 1.0f/720.0f;
    p = p*r + 1.0f/120.0f;
    p = p*r + 1.0f/24.0f;
    p = p*r + 1.0f/6.0f;
    p = p*r + 0.5f;
    p = p*r + 1.0f;
    p = p*r + 1.0f;
    const vf scale = vf((vi(shifted) - (0x4B400000 - 127)) << 23);
    return x < -87.0f ? vf{} : p*scale;
}

H2OG_INLINE vf tanh(vf x) {
    const vf magnitude = x < 0.0f ? -x : x;
    const vf e = exp_nonpositive(-2.0f*magnitude);
    const vf t = (1.0f - e)/(1.0f + e);
    return x < 0.0f ? -t : t;
}

} // namespace H2OG_ISA
} // namespace h2og
