// What the newest queries attend to in the attic, joined to what they attend to in the cache: as if nothing had been evicted.
#include "recall.h"

#include "attention-plan.h"
#include "state.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace h2og {

namespace {

constexpr int32_t PART   = 8;  // chunks whose sums are one
constexpr float  NEG_INF = -std::numeric_limits<float>::infinity();

int32_t ceil_div(int32_t n, int32_t by) { return (n + by - 1)/by; }

// Adds sums over other entries: more is out's, of n elements.
void add(float & top, float & total, float * out, float more_top, float more_total, const float * more, int32_t n) {
    const float most = std::max(top, more_top);
    if (most == NEG_INF) {
        return;
    }
    const float keep = std::exp(top - most), f = std::exp(more_top - most);
    if (keep == 0.0f) {  // these may be the first: what lies there can be anything
        total = 0.0f;
        std::fill_n(out, n, 0.0f);
    }
    top   = most;
    total = total*keep + more_total*f;
    for (int32_t i = 0; i < n; ++i) {
        out[i] = out[i]*keep + more[i]*f;
    }
}

struct Memory { std::vector<float> unit, scratch; };

Memory & memory_of_thread() {
    static thread_local Memory memory;
    return memory;
}

} // namespace

// Exact queries against a chunk, as a problem for the kernel.
Attention Recall::attention_to_attic(int32_t layer, const LayerQueries & queries, int32_t chunk) const {
    const Attic & attic = *state.attic;
    const bool has_v = attic.value_bytes > 0;  // else values are the first part of the keys (MLA)
    Attention a{};
    a.head_dim_k = state.head_dim_k;
    a.head_dim_v = state.head_dim_v;
    a.n_head     = queries.n_head;
    a.n_head_kv  = state.n_head_kv;
    a.n_query    = queries.n_exact;
    a.n_cells    = Attic::CHUNK;
    a.n_stream   = 1;
    a.q = queries.q + (queries.n_query - a.n_query)*queries.q_query;
    a.q_query = queries.q_query;
    a.q_head  = queries.q_head;
    a.k = attic.keys(stream, layer, 0, chunk);
    a.v = has_v ? attic.values(stream, layer, 0, chunk) : a.k;
    a.k_cell = attic.key_bytes;
    a.v_cell = has_v ? attic.value_bytes : attic.key_bytes;
    a.k_head = a.v_head = Attic::CHUNK*(attic.key_bytes + attic.value_bytes);
    a.type_k = attic.type_k;
    a.type_v = has_v ? attic.type_v : attic.type_k;
    a.scale   = queries.scale;
    a.softcap = queries.softcap;
    return a;
}

void Recall::make_parts(const LayerQueries & queries) {
    next_part = 0;
    n_done    = 0;
    const size_t n_row = size_t(queries.n_exact)*queries.n_head;
    parts.resize(n_row == 0 ? 0 : ceil_div(state.attic->n_entry(stream), PART*Attic::CHUNK));
    for (Sums & part : parts) {
        part.tops.assign(n_row, NEG_INF);
        part.totals.resize(n_row);
        part.outs.resize(n_row*state.head_dim_v);
    }
}

void Recall::attend_part(int32_t layer, const LayerQueries & queries, const Plan & p, int32_t part, int32_t tile, int32_t head) {
    Memory & memory = memory_of_thread();
    Scratch scratch(p, memory.scratch);
    memory.unit.resize(p.n_joint*p.unit_floats);
    const int32_t n = state.attic->n_entry(stream), n_chunk = ceil_div(n, Attic::CHUNK);
    Sums & sums = parts[part];
    for (int32_t chunk = part*PART; chunk < std::min(n_chunk, (part + 1)*PART); ++chunk) {
        const Attention a = attention_to_attic(layer, queries, chunk);
        Unit u = p.unit(a, tile*state.n_head_kv + head);
        u.n_cells = std::min(u.n_cells, n - chunk*Attic::CHUNK);
        (p.is_wide ? kernel.attend_wide : kernel.attend_narrow)(a, p, u, memory.unit.data(), nullptr, scratch);
        for (int32_t i = 0; i < p.n_joint*u.n_row; ++i) {
            const int32_t r = i % u.n_row, row = u.row + r, ih = head + i/u.n_row;
            const float * unit = memory.unit.data() + i/u.n_row*p.unit_floats;
            const size_t to = size_t(row/p.group)*queries.n_head + ih*p.group + row % p.group;
            add(sums.tops[to], sums.totals[to], sums.outs.data() + to*state.head_dim_v,
                unit[r], unit[p.total_at + r], unit + p.out_at + size_t(r)*p.dim_v, state.head_dim_v);
        }
    }
}

void Recall::attend(int32_t layer, const LayerQueries & queries, float * log_sums) {
    unless_failed([&] {
        if (parts.empty()) {
            return;
        }
        const Plan p(attention_to_attic(layer, queries, 0), kernel.lanes);
        GGML_ASSERT(p.n_split == 1);
        const int32_t n_joint_head = state.n_head_kv/p.n_joint, n = int32_t(parts.size())*p.n_tile*n_joint_head;
        for (int32_t i; (i = next_part.fetch_add(1, std::memory_order_relaxed)) < n;) {
            attend_part(layer, queries, p, i/(n_joint_head*p.n_tile), i/n_joint_head % p.n_tile, i % n_joint_head*p.n_joint);
            if (n_done.fetch_add(1) + 1 == n) {  // whoever ends last
                sum_parts(log_sums);
            }
        }
    });
}

void Recall::sum_parts(float * log_sums) const {
    for (size_t i = 0; i < parts[0].tops.size(); ++i) {
        float top = NEG_INF, total = 0.0f;
        for (const Sums & part : parts) {
            add(top, total, nullptr, part.tops[i], part.totals[i], nullptr, 0);
        }
        log_sums[i] = top + std::log(total);
    }
}

void Recall::join(int32_t n_row, float * out, const float * log_sums, int32_t i_thread, int32_t n_thread) {
    unless_failed([&] {
        for (int32_t i = i_thread; i < n_row; i += n_thread) {
            float * row = out + size_t(i)*state.head_dim_v;
            for (const Sums & part : parts) {
                const float share = std::exp(part.tops[i] - log_sums[i]);
                const float * more = part.outs.data() + size_t(i)*state.head_dim_v;
                for (int32_t d = 0; d < state.head_dim_v; ++d) {
                    row[d] += share*more[d];
                }
            }
        }
    });
}

} // namespace h2og
