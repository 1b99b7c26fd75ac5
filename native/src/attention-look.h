// Queries held against keys outside of attention: what a softmax over them would be divided by, and which keys stand out.
#pragma once

#include "attention-narrow.h"
#include "attention-wide.h"

namespace h2og {
namespace H2OG_ISA {

// Few queries: logits are kept as [query][key].
struct FewQueries {
    const Question & q;
    const Keys & k;
    float * logits, * keys, * rows;
    Reader reader;

    FewQueries(const Question & q, const Keys & k, float * memory) :
        q(q), k(k), logits(memory), keys(logits + size_t(q.width)*BLOCK), rows(keys + BLOCK*q.dim), reader(reader_of(k.type, q.head_dim, false)) {
        memcpy(rows, q.q, size_t(q.n_row)*q.dim*sizeof(float));
        for (int32_t r = 0; reader.split != nullptr && r < q.n_row; ++r) {
            reader.split(rows + size_t(r)*q.dim, q.dim);
        }
    }

    // Of at most BLOCK keys from the first on; -inf behind those there are.
    void compute(int32_t first) const {
        const int32_t n = k.n - first < BLOCK ? k.n - first : BLOCK;
        const char * from = k.data + first*k.step;
        size_t step = k.step;
        const Ahead ahead{ from + BLOCK*step, int32_t(step) };
        if (!reader.is_direct) {
            load_rows(from, step, k.type, n, q.head_dim, q.dim, keys);
            from = reinterpret_cast<const char *>(keys);
            step = q.dim*sizeof(float);
        }
        reader.dots(rows, q.dim, q.n_row, from, step, n, logits, BLOCK, ahead);
        float hidden[BLOCK];
        for (int32_t c = 0; c < BLOCK; ++c) {
            hidden[c] = c >= n ? NEG_INF : k.hidden == nullptr ? 0.0f : k.hidden[first + c];
        }
        for (int32_t r = 0; r < q.n_row; ++r) {
            for (int32_t c = 0; c < BLOCK; c += LANES) {
                float * at = logits + r*BLOCK + c;
                const vf h = load(hidden + c);
                store(at, h == NEG_INF ? h : cap(load(at), q.softcap));
            }
        }
    }
};

constexpr float OPEN_BLOCK = 0.0f;  // one that is not hidden

static void look_few(const Keys & k, const Question & q, float * top, float * total, float * memory) {
    const FewQueries few(q, k, memory);
    for (int32_t first = 0; first < k.n; first += BLOCK) {
        few.compute(first);
        for (int32_t r = 0; r < q.n_row; ++r) {
            const float here = largest_of(few.logits + r*BLOCK, 1, &OPEN_BLOCK), now = here > top[r] ? here : top[r];
            total[r] = total[r]*faded(all(top[r]), all(now))[0] + exp_row(few.logits + r*BLOCK, 1, &OPEN_BLOCK, now);
            top[r] = now;
        }
    }
}

static void find_few(const Keys & k, const Question & q, const float * whole, float * best, float * memory) {
    const FewQueries few(q, k, memory);
    for (int32_t first = 0; first < k.n; first += BLOCK) {
        few.compute(first);
        for (int32_t c = 0; c < BLOCK && first + c < k.n; c += LANES) {
            vf most = all(NEG_INF);
            for (int32_t r = 0; r < q.n_row; ++r) {
                most = larger(load(few.logits + r*BLOCK + c) - all(whole[r]), most);
            }
            float out[LANES];
            store(out, most);
            memcpy(best + first + c, out, (k.n - first - c < LANES ? k.n - first - c : LANES)*sizeof(float));
        }
    }
}

// Many queries: logits of at most BLOCK keys from the first on, as [key][query].
H2OG_INLINE int32_t logits_of(const Keys & k, const Question & q, int32_t first, float * keys, float * logits) {
    const int32_t n = k.n - first < BLOCK ? k.n - first : BLOCK;
    load_rows(k.data + first*k.step, k.step, k.type, n, q.head_dim, q.dim, keys);
    product(keys, q.dim, 1, q.q, q.width, q.head_dim, logits, q.width, n, q.width, false);
    if (q.softcap == 0.0f && k.hidden == nullptr) {
        return n;
    }
    for (int32_t c = 0; c < n; ++c) {
        const vf hidden = all(k.hidden == nullptr ? 0.0f : k.hidden[first + c]);
        for (int32_t r = 0; r < q.width; r += LANES) {
            float * at = logits + size_t(c)*q.width + r;
            store(at, cap(load(at), q.softcap) + hidden);
        }
    }
    return n;
}

static void look(const Keys & k, const Question & q, float * top, float * total, float * memory) {
    if (q.n_row <= FEW_ROWS) {
        look_few(k, q, top, total, memory);
        return;
    }
    float * logits = memory;
    float * keys = memory + size_t(BLOCK)*q.width;
    for (int32_t first = 0; first < k.n; first += BLOCK) {
        const int32_t n = logits_of(k, q, first, keys, logits);
        for (int32_t r = 0; r < q.width; r += LANES) {
            const vf before = load(top + r);
            vf most = before;
            for (int32_t c = 0; c < n; ++c) {
                most = larger(load(logits + size_t(c)*q.width + r), most);
            }
            store(top + r, most);
            store(total + r, load(total + r)*faded(before, most));
        }
        exp_columns(q.width, n, logits, top, total);
    }
}

static void find(const Keys & k, const Question & q, const float * whole, float * best, float * memory) {
    if (q.n_row <= FEW_ROWS) {
        find_few(k, q, whole, best, memory);
        return;
    }
    float * logits = memory;
    float * keys = memory + size_t(BLOCK)*q.width;
    for (int32_t first = 0; first < k.n; first += BLOCK) {
        const int32_t n = logits_of(k, q, first, keys, logits);
        for (int32_t c = 0; c < n; ++c) {
            vf most = all(NEG_INF);
            for (int32_t r = 0; r < q.width; r += LANES) {
                most = larger(load(logits + size_t(c)*q.width + r) - load(whole + r), most);
            }
            best[first + c] = largest(most);
        }
    }
}

} // namespace H2OG_ISA
} // namespace h2og
