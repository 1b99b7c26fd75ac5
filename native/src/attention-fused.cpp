#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#  define H2OG_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#  define H2OG_CLONES
#endif
#define H2OG_INLINE __attribute__((always_inline)) static inline

namespace h2og {

namespace {

constexpr int32_t BLOCK       = 64;   // cells dequantized and multiplied at once
constexpr int32_t MAX_ROWS    = 32;   // rows of a tile where queries are many
constexpr int32_t SPLIT_CELLS = 256;  // cells of a unit where queries are few
constexpr int32_t FEW_QUERIES = 8;

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

// exp for x <= 0, to float32 rounding (relative error below 2e-7); 0 below -87.
H2OG_INLINE float exp_nonpositive(float x) {
    const float clamped = x < -87.0f ? -87.0f : x;
    const float shifted = clamped*1.44269504088896341f + 12582912.0f;  // rounds to an integer in the low bits
    int32_t bits;
    memcpy(&bits, &shifted, sizeof(bits));
    const float n = shifted - 12582912.0f;
    const float r = (clamped - n*0.693145751953125f) - n*1.42860682030941723e-6f;
    float p = 1.0f/5040.0f;
    p = p*r + 1.0f/720.0f;
    p = p*r + 1.0f/120.0f;
    p = p*r + 1.0f/24.0f;
    p = p*r + 1.0f/6.0f;
    p = p*r + 0.5f;
    p = p*r + 1.0f;
    p = p*r + 1.0f;
    const int32_t exponent = (bits - 0x4B400000 + 127) << 23;
    float scale;
    memcpy(&scale, &exponent, sizeof(scale));
    return x < -87.0f ? 0.0f : p*scale;
}

H2OG_INLINE float half_to_float(uint16_t h) {
    // A float16's exponent and mantissa, moved to float32's places, are too small by 2^112; infinities are set apart.
    const uint32_t sign = uint32_t(h & 0x8000) << 16;
    const uint32_t rest = uint32_t(h & 0x7FFF) << 13;
    float magnitude;
    memcpy(&magnitude, &rest, sizeof(magnitude));
    magnitude *= 5.192296858534828e33f;
    uint32_t bits;
    memcpy(&bits, &magnitude, sizeof(bits));
    bits = (rest >= 0x0F800000 ? (rest | 0x7F800000) : bits) | sign;
    float out;
    memcpy(&out, &bits, sizeof(out));
    return out;
}

// One row as float32.
H2OG_INLINE void load_row(const char * src, ggml_type type, ggml_to_float_t to_float, int32_t n, float * __restrict dst) {
    if (type == GGML_TYPE_F32) {
        memcpy(dst, src, n*sizeof(float));
    } else if (type == GGML_TYPE_F16) {
        const uint16_t * __restrict h = reinterpret_cast<const uint16_t *>(src);
        for (int32_t i = 0; i < n; ++i) {
            dst[i] = half_to_float(h[i]);
        }
    } else if (type == GGML_TYPE_BF16) {
        const uint16_t * __restrict h = reinterpret_cast<const uint16_t *>(src);
        for (int32_t i = 0; i < n; ++i) {
            const uint32_t bits = uint32_t(h[i]) << 16;
            memcpy(dst + i, &bits, sizeof(bits));
        }
    } else {
        to_float(src, dst, n);
    }
}

struct Loader {
    ggml_type type;
    ggml_to_float_t to_float;

    explicit Loader(ggml_type type) : type(type), to_float(ggml_get_type_traits(type)->to_float) {}
};

// Queries of a tile, its cells, and what it leaves: the unit's part of the workspace.
struct Unit {
    int32_t stream, head, tile, split;  // head: KV head
    int32_t query, n_query;             // first query of the tile and how many
    int32_t cell, n_cells;              // first cell and how many
};

struct UnitMemory { float * largest, * sum, * out, * mass; };  // [n_row], [n_row], [n_row][head_dim_v], mass see attend

template <typename F>
UnitMemory unit_memory(F * base, int32_t n_row, int32_t head_dim_v) {
    float * p = const_cast<float *>(base);
    return { p, p + n_row, p + 2*n_row, p + 2*n_row + size_t(n_row)*head_dim_v };
}

// The mask of one query over n cells as float32; false if every cell is hidden.
H2OG_INLINE bool load_mask(const Attention & a, int32_t stream, int32_t query, int32_t cell, int32_t n, float * __restrict dst) {
    if (a.mask == nullptr) {
        for (int32_t c = 0; c < n; ++c) {
            dst[c] = 0.0f;
        }
        return true;
    }
    const char * row = a.mask + stream*a.mask_stream + query*a.mask_query;
    float largest = NEG_INF;
    if (a.type_mask == GGML_TYPE_F16) {
        const uint16_t * h = reinterpret_cast<const uint16_t *>(row) + cell;
        for (int32_t c = 0; c < n; ++c) {
            dst[c] = half_to_float(h[c]);
        }
    } else {
        memcpy(dst, reinterpret_cast<const float *>(row) + cell, n*sizeof(float));
    }
    for (int32_t c = 0; c < n; ++c) {
        largest = dst[c] > largest ? dst[c] : largest;
    }
    return largest != NEG_INF;
}

// logits[row][0 .. n) of one block, few rows: dot products along head_dim.
H2OG_INLINE void dot_block(const float * __restrict q, int32_t n_row, const float * __restrict k, int32_t n, int32_t head_dim,
                           float * __restrict logits, size_t stride) {
    for (int32_t c = 0; c < n; ++c) {
        const float * __restrict kc = k + size_t(c)*head_dim;
        for (int32_t r = 0; r < n_row; ++r) {
            const float * __restrict qr = q + size_t(r)*head_dim;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int32_t d = 0; d < head_dim; ++d) {
                sum += qr[d]*kc[d];
            }
            logits[r*stride + c] = sum;
        }
    }
}

// The same for many rows: k is transposed to kt[d][BLOCK], and a row's logits of the whole block stay in registers.
H2OG_INLINE void outer_block(const float * __restrict q, int32_t n_row, const float * __restrict kt, int32_t n, int32_t head_dim,
                             float * __restrict logits, size_t stride) {
    for (int32_t r = 0; r < n_row; ++r) {
        const float * __restrict qr = q + size_t(r)*head_dim;
        float acc[BLOCK];
        for (int32_t c = 0; c < BLOCK; ++c) {
            acc[c] = 0.0f;
        }
        for (int32_t d = 0; d < head_dim; ++d) {
            const float qd = qr[d];
            const float * __restrict kd = kt + size_t(d)*BLOCK;
#pragma omp simd
            for (int32_t c = 0; c < BLOCK; ++c) {
                acc[c] += qd*kd[c];
            }
        }
        memcpy(logits + r*stride, acc, n*sizeof(float));
    }
}

// out[row] += sum over the block's cells of e[row][c] * v[c].
H2OG_INLINE void add_values(const float * __restrict e, size_t stride, int32_t n_row, const float * __restrict v, int32_t n,
                            int32_t head_dim, float * __restrict out) {
    for (int32_t r = 0; r < n_row; ++r) {
        const float * __restrict er = e + r*stride;
        float * __restrict o = out + size_t(r)*head_dim;
        int32_t c = 0;
        for (; c + 4 <= n; c += 4) {
            const float e0 = er[c], e1 = er[c + 1], e2 = er[c + 2], e3 = er[c + 3];
            const float * __restrict v0 = v + size_t(c)*head_dim;
#pragma omp simd
            for (int32_t d = 0; d < head_dim; ++d) {
                o[d] += (e0*v0[d] + e1*v0[d + head_dim]) + (e2*v0[d + 2*head_dim] + e3*v0[d + 3*head_dim]);
            }
        }
        for (; c < n; ++c) {
            const float * __restrict vc = v + size_t(c)*head_dim;
#pragma omp simd
            for (int32_t d = 0; d < head_dim; ++d) {
                o[d] += er[c]*vc[d];
            }
        }
    }
}

struct Scratch {
    std::vector<float> q, k, kt, v, logits, mask;
    std::vector<char>  is_visible;  // of each block
};

// Softmax attention of one unit.  Leaves, for every row r (query-major, G heads each): the largest logit, the sum of
// e = exp(logit - largest), and sum of e*v.  mass: with one split, the weighted probabilities summed over rows, [n_cells];
// with several, e itself, [n_row][SPLIT_CELLS].
H2OG_CLONES
void attend_unit(const Attention & a, const Unit & u, bool is_split, UnitMemory mem, Scratch & scratch) {
    const Loader load_k(a.type_k), load_v(a.type_v);
    const int32_t group  = a.n_head/a.n_head_kv;
    const int32_t n_row  = group*u.n_query;
    const int32_t dk = a.head_dim_k, dv = a.head_dim_v;
    const int32_t n_block = (u.n_cells + BLOCK - 1)/BLOCK;
    const size_t  stride = size_t(n_block)*BLOCK;
    const bool    is_wide = n_row >= 8;

    float * __restrict q      = scratch.q.data();
    float * __restrict logits = scratch.logits.data();
    float * __restrict k      = scratch.k.data();
    float * __restrict kt     = scratch.kt.data();
    float * __restrict v      = scratch.v.data();

    for (int32_t t = 0; t < u.n_query; ++t) {
        for (int32_t g = 0; g < group; ++g) {
            const float * src = reinterpret_cast<const float *>(
                a.q + u.stream*a.q_stream + (u.head*group + g)*a.q_head + (u.query + t)*a.q_query);
            float * dst = q + size_t(t*group + g)*dk;
            for (int32_t d = 0; d < dk; ++d) {
                dst[d] = src[d]*a.scale;
            }
        }
    }

    for (int32_t r = 0; r < n_row; ++r) {
        mem.largest[r] = NEG_INF;
    }
    for (int32_t b = 0; b < n_block; ++b) {
        const int32_t cell = u.cell + b*BLOCK;
        const int32_t n    = std::min(BLOCK, u.n_cells - b*BLOCK);
        bool is_visible = false;
        for (int32_t t = 0; t < u.n_query; ++t) {
            is_visible |= load_mask(a, u.stream, u.query + t, cell, n, scratch.mask.data() + size_t(t)*BLOCK);
        }
        scratch.is_visible[b] = is_visible;
        if (!is_visible) {
            continue;
        }
        for (int32_t c = 0; c < n; ++c) {
            load_row(a.k + u.stream*a.k_stream + (cell + c)*a.k_cell + u.head*a.k_head, load_k.type, load_k.to_float, dk,
                     k + size_t(c)*dk);
        }
        float * __restrict block = logits + size_t(b)*BLOCK;
        if (is_wide) {
            for (int32_t c = 0; c < BLOCK; ++c) {
                for (int32_t d = 0; d < dk; ++d) {
                    kt[size_t(d)*BLOCK + c] = c < n ? k[size_t(c)*dk + d] : 0.0f;
                }
            }
            outer_block(q, n_row, kt, n, dk, block, stride);
        } else {
            dot_block(q, n_row, k, n, dk, block, stride);
        }
        for (int32_t r = 0; r < n_row; ++r) {
            float * __restrict row = block + r*stride;
            const float * __restrict m = scratch.mask.data() + size_t(r/group)*BLOCK;
            if (a.softcap != 0.0f) {
                for (int32_t c = 0; c < n; ++c) {
                    row[c] = a.softcap*tanhf(row[c]/a.softcap);
                }
            }
            float largest = mem.largest[r];
            for (int32_t c = 0; c < n; ++c) {
                row[c] += m[c];
                largest = row[c] > largest ? row[c] : largest;
            }
            mem.largest[r] = largest;
        }
    }

    memset(mem.sum, 0, n_row*sizeof(float));
    memset(mem.out, 0, size_t(n_row)*dv*sizeof(float));
    for (int32_t b = 0; b < n_block; ++b) {
        const int32_t cell = u.cell + b*BLOCK;
        const int32_t n    = std::min(BLOCK, u.n_cells - b*BLOCK);
        float * __restrict block = logits + size_t(b)*BLOCK;
        for (int32_t r = 0; r < n_row; ++r) {
            float * __restrict row = block + r*stride;
            if (!scratch.is_visible[b] || mem.largest[r] == NEG_INF) {
                memset(row, 0, n*sizeof(float));
                continue;
            }
            const float largest = mem.largest[r];
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int32_t c = 0; c < n; ++c) {
                row[c] = exp_nonpositive(row[c] - largest);
                sum += row[c];
            }
            mem.sum[r] += sum;
        }
        if (!scratch.is_visible[b]) {
            continue;
        }
        for (int32_t c = 0; c < n; ++c) {
            const char * src = a.v + u.stream*a.v_stream + (cell + c)*a.v_cell + u.head*a.v_head;
            if (a.v_element == 0) {
                load_row(src, load_v.type, load_v.to_float, dv, v + size_t(c)*dv);
            } else {
                for (int32_t d = 0; d < dv; ++d) {
                    load_row(src + d*a.v_element, load_v.type, load_v.to_float, 1, v + size_t(c)*dv + d);
                }
            }
        }
        add_values(block, stride, n_row, v, n, dv, mem.out);
    }

    if (a.scores == nullptr) {
        return;
    }
    if (is_split) {
        for (int32_t r = 0; r < n_row; ++r) {
            memcpy(mem.mass + size_t(r)*SPLIT_CELLS, logits + r*stride, u.n_cells*sizeof(float));
        }
        return;
    }
    memset(mem.mass, 0, u.n_cells*sizeof(float));
    for (int32_t r = 0; r < n_row; ++r) {
        float sum = mem.sum[r];
        if (a.sinks != nullptr && mem.largest[r] != NEG_INF) {
            sum += expf(a.sinks[u.head*group + r%group] - mem.largest[r]);
        }
        const float w = sum > 0.0f ? a.weights[u.stream*a.n_query + u.query + r/group]/sum : 0.0f;
        if (w == 0.0f) {
            continue;
        }
        const float * __restrict row = logits + r*stride;
        float * __restrict mass = mem.mass;
#pragma omp simd
        for (int32_t c = 0; c < u.n_cells; ++c) {
            mass[c] += w*row[c];
        }
    }
}

} // namespace

FusedAttention::FusedAttention(const Attention & a) {
    const int32_t group = a.n_head/a.n_head_kv;
    const bool is_few = a.n_query <= FEW_QUERIES;
    n_tile_query  = is_few ? a.n_query : std::max(1, MAX_ROWS/group);
    n_tile        = (a.n_query + n_tile_query - 1)/n_tile_query;
    n_split_cells = is_few ? SPLIT_CELLS : a.n_cells;
    n_split       = (a.n_cells + n_split_cells - 1)/n_split_cells;
    n_unit        = a.n_stream*a.n_head_kv*n_tile*n_split;
    n_row         = group*n_tile_query;
    const size_t mass = a.scores == nullptr ? 0 : is_few ? size_t(n_row)*SPLIT_CELLS : size_t(a.n_cells);
    unit_floats = size_t(n_row)*(2 + a.head_dim_v) + mass;
}

void FusedAttention::attend(const Attention & a, float * workspace, int32_t i_thread, int32_t n_thread) const {
    const int32_t n_block = (n_split_cells + BLOCK - 1)/BLOCK;
    static thread_local Scratch scratch;
    scratch.q.resize(size_t(n_row)*a.head_dim_k);
    scratch.k.resize(size_t(BLOCK)*a.head_dim_k);
    scratch.kt.resize(size_t(BLOCK)*a.head_dim_k);
    scratch.v.resize(size_t(BLOCK)*a.head_dim_v);
    scratch.logits.resize(size_t(n_row)*n_block*BLOCK);
    scratch.mask.resize(size_t(n_tile_query)*BLOCK);
    scratch.is_visible.resize(n_block);

    for (int32_t i = i_thread; i < n_unit; i += n_thread) {
        Unit u;
        u.split  = i % n_split;
        u.tile   = i/n_split % n_tile;
        u.head   = i/(n_split*n_tile) % a.n_head_kv;
        u.stream = i/(n_split*n_tile*a.n_head_kv);
        u.query   = u.tile*n_tile_query;
        u.n_query = std::min(n_tile_query, a.n_query - u.query);
        u.cell    = u.split*n_split_cells;
        u.n_cells = std::min(n_split_cells, a.n_cells - u.cell);
        attend_unit(a, u, a.n_query <= FEW_QUERIES, unit_memory(workspace + i*unit_floats, n_row, a.head_dim_v),
                    scratch);
    }
}

void FusedAttention::combine(const Attention & a, const float * workspace, int32_t i_thread, int32_t n_thread) const {
    const int32_t group = a.n_head/a.n_head_kv;
    const int32_t dv = a.head_dim_v;
    const bool is_few = a.n_query <= FEW_QUERIES;
    std::vector<float> factor(size_t(n_row)*n_split);  // what a split's e is to be multiplied with

    // A piece of work: one tile of one head, plus, once per head, the scores.
    for (int32_t i = i_thread; i < a.n_stream*a.n_head_kv*n_tile; i += n_thread) {
        const int32_t tile = i % n_tile, head = i/n_tile % a.n_head_kv, stream = i/(n_tile*a.n_head_kv);
        const int32_t n_query = std::min(n_tile_query, a.n_query - tile*n_tile_query);
        const float * first = workspace + size_t(i)*n_split*unit_floats;

        for (int32_t r = 0; r < group*n_query; ++r) {
            const int32_t h = head*group + r%group;
            float largest = a.sinks != nullptr ? a.sinks[h] : NEG_INF;
            for (int32_t s = 0; s < n_split; ++s) {
                largest = std::max(largest, unit_memory(first + s*unit_floats, n_row, dv).largest[r]);
            }
            float sum = a.sinks != nullptr ? expf(a.sinks[h] - largest) : 0.0f;
            for (int32_t s = 0; s < n_split; ++s) {
                const UnitMemory m = unit_memory(first + s*unit_floats, n_row, dv);
                const float f = m.largest[r] == NEG_INF ? 0.0f : expf(m.largest[r] - largest);
                factor[size_t(r)*n_split + s] = f;
                sum += f*m.sum[r];
            }
            const int32_t t = tile*n_tile_query + r/group;
            float * out = a.out + ((size_t(stream)*a.n_query + t)*a.n_head + h)*dv;
            memset(out, 0, dv*sizeof(float));
            for (int32_t s = 0; s < n_split && sum > 0.0f; ++s) {
                float & f = factor[size_t(r)*n_split + s];
                f /= sum;
                const float * part = unit_memory(first + s*unit_floats, n_row, dv).out + size_t(r)*dv;
                for (int32_t d = 0; d < dv && f != 0.0f; ++d) {
                    out[d] += f*part[d];
                }
            }
        }

        if (a.scores == nullptr || tile != 0) {
            continue;
        }
        float * scores = a.scores + stream*a.scores_stream + head*a.scores_head;
        const float fade = a.fade[stream];
        for (int32_t c = 0; c < a.n_cells; ++c) {
            scores[c] *= fade;
        }
        if (!is_few) {
            for (int32_t other = 0; other < n_tile; ++other) {
                const float * mass = unit_memory(first + other*unit_floats, n_row, dv).mass;
                for (int32_t c = 0; c < a.n_cells; ++c) {
                    scores[c] += mass[c];
                }
            }
            continue;
        }
        for (int32_t s = 0; s < n_split; ++s) {
            const float * mass = unit_memory(first + s*unit_floats, n_row, dv).mass;
            const int32_t cell = s*n_split_cells;
            const int32_t n = std::min(n_split_cells, a.n_cells - cell);
            for (int32_t r = 0; r < group*n_query; ++r) {
                const float w = factor[size_t(r)*n_split + s]*a.weights[stream*a.n_query + r/group];
                for (int32_t c = 0; c < n; ++c) {
                    scores[cell + c] += w*mass[size_t(r)*SPLIT_CELLS + c];
                }
            }
        }
    }
}

} // namespace h2og
