#include "recall.h"

#include "attention-plan.h"
#include "state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace h2og {

namespace {

int32_t round_up(int32_t n, int32_t to) { return (n + to - 1)/to*to; }

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

// x[i] becomes the largest of x[i] .. x[i + n - 1], n times the window so far at most doubling.
void widen(std::vector<float> & x, size_t window) {
    for (size_t have = 1; have < window;) {
        const size_t step = std::min(have, window - have);
        for (size_t i = 0; i + step < x.size(); ++i) {
            x[i] = std::max(x[i], x[i + step]);
        }
        have += step;
    }
}

std::vector<float> & scratch(size_t n) {
    static thread_local std::vector<float> memory;
    memory.resize(std::max(memory.size(), n));
    return memory;
}

} // namespace

Recall::Recall(h2og_state & state, int32_t stream, std::vector<Span> protected_, int32_t n_most, int32_t n_asked, Alike alike) :
    stream(stream), state(state), kernel(*usable_kernels().front()), protected_spans(std::move(protected_)), n_most(n_most),
    n_asked(n_asked), alike(alike), heads(state.n_head_kv) {}

bool Recall::is_protected(int32_t pos) const {
    return std::any_of(protected_spans.begin(), protected_spans.end(),
                       [&](const Span & span) { return pos >= span.first && pos < span.second; });
}

// Query-major, the newest n_asked of them.
void Recall::load_queries(Head & head, int32_t ih, const Asked & asked) const {
    const int32_t group = asked.n_head/state.n_head_kv, n = std::min(asked.n_query, n_asked);
    head.n_row = n*group;
    head.whole.assign(round_up(head.n_row, kernel.lanes), std::numeric_limits<float>::infinity());
    const Question to = question_of(head, asked);
    head.q.assign(size_t(to.dim)*to.width, 0.0f);
    const bool is_few = to.n_row <= FEW_ROWS;
    const size_t row_step = is_few ? to.dim : 1, dim_step = is_few ? 1 : to.width;
    for (int32_t r = 0; r < head.n_row; ++r) {
        const float * src = reinterpret_cast<const float *>(
            asked.q + (ih*group + r % group)*asked.q_head + (asked.n_query - n + r/group)*asked.q_query);
        for (int32_t d = 0; d < state.head_dim_k; ++d) {
            head.q[r*row_step + d*dim_step] = src[d]*asked.scale;
        }
        head.whole[r] = asked.sinks != nullptr ? asked.sinks[ih*group + r % group] : NEG_INF;
    }
}

Question Recall::question_of(const Head & head, const Asked & asked) const {
    return { head.q.data(), head.n_row, int32_t(head.whole.size()), state.head_dim_k, round_up(state.head_dim_k, kernel.lanes), asked.softcap };
}

void Recall::look_at_cache(int32_t layer, const Asked & asked, int32_t i_thread, int32_t n_thread) {
    if (i_thread == 0) {
        next_search   = 0;
        next_exchange = 0;
    }
    const Layer & l = state.layers[layer];
    const size_t step = l.k->nb[1], row = ggml_row_size(l.k->type, state.head_dim_k);
    const char * keys = static_cast<const char *>(l.k->data) + stream*l.k->nb[2];
    std::vector<char> fetched;
    if (!l.is_host && i_thread < state.n_head_kv) {
        fetched.resize(l.k->nb[2]);
        ggml_backend_tensor_get(l.k, fetched.data(), stream*l.k->nb[2], fetched.size());
        keys = fetched.data();
    }
    for (int32_t ih = i_thread; ih < state.n_head_kv; ih += n_thread) {
        Head & head = heads[ih];
        load_queries(head, ih, asked);
        const int32_t width = int32_t(head.whole.size());
        const int32_t * pos = state.pos.data() + state.index(stream, layer, ih);
        std::vector<float> hidden(state.n_cells), top(head.whole), total(width);
        for (int32_t cell = 0; cell < state.n_cells; ++cell) {
            hidden[cell] = pos[cell] < 0 ? NEG_INF : 0.0f;  // the batch's own entries are not in the books yet
        }
        for (int32_t r = 0; r < width; ++r) {
            total[r] = top[r] == NEG_INF ? 0.0f : 1.0f;  // the sink's share
        }
        const Keys k = { keys + ih*row, step, l.k->type, state.n_cells, hidden.data() };
        const Question q = question_of(head, asked);
        std::vector<float> & memory = scratch(look_floats(q));
        kernel.look(k, q, top.data(), total.data(), memory.data());
        for (int32_t r = 0; r < width; ++r) {
            head.whole[r] = total[r] > 0.0f ? top[r] + std::log(total[r]) : std::numeric_limits<float>::infinity();
        }
        head.in_cache.resize(state.n_cells);
        kernel.find(k, q, head.whole.data(), head.in_cache.data(), memory.data());
        head.in_attic.resize(state.attic->n_entry(stream));
    }
}

void Recall::search_attic(int32_t layer, const Asked & asked) {
    const Attic & attic = *state.attic;
    const int32_t n = attic.n_entry(stream), n_chunk = (n + Attic::CHUNK - 1)/Attic::CHUNK;
    for (int32_t i; (i = next_search.fetch_add(1, std::memory_order_relaxed)) < n_chunk*state.n_head_kv;) {
        const int32_t ih = i % state.n_head_kv, chunk = i/state.n_head_kv, first = chunk*Attic::CHUNK;
        Head & head = heads[ih];
        const Keys k = { attic.keys(stream, layer, ih, chunk), attic.key_bytes, attic.type_k, std::min(Attic::CHUNK, n - first), nullptr };
        const Question q = question_of(head, asked);
        std::vector<float> & memory = scratch(look_floats(q));
        kernel.find(k, q, head.whole.data(), head.in_attic.data() + first, memory.data());
    }
}

// Threads of a graph must not throw; a layer that others have looked at only in part is left as it is.
template <typename F>
void Recall::unless_failed(const F & f) noexcept {
    if (has_failed) {
        return;
    }
    try {
        f();
    } catch (...) {
        has_failed = true;
    }
}

void Recall::look(int32_t layer, const Asked & asked, int32_t i_thread, int32_t n_thread) {
    unless_failed([&] { look_at_cache(layer, asked, i_thread, n_thread); });
}

void Recall::search(int32_t layer, const Asked & asked) {
    unless_failed([&] { search_attic(layer, asked); });
}

void Recall::exchange(int32_t layer) {
    unless_failed([&] {
        const int32_t n_alike = alike == Alike::head ? 1 : state.n_head_kv;
        for (int32_t i; (i = next_exchange.fetch_add(1, std::memory_order_relaxed)) < state.n_head_kv/n_alike;) {
            if (only_asks()) {
                vote(layer);
                continue;
            }
            std::vector<HeadOf> together;
            for (int32_t h = 0; h < n_alike; ++h) {
                together.push_back({ layer, i*n_alike + h });
            }
            exchange_alike(scores_by_position(layer, i*n_alike, n_alike), together);
        }
    });
}

// What is attended to in a layer counts as much as there is of it, and no more than all.  The lower half of the layers looks for
// words that are alike, wherever they stand; the upper half for what they mean.
void Recall::vote(int32_t layer) {
    if (layer < state.n_layer/2) {
        return;
    }
    const std::vector<float> by_pos = scores_by_position(layer, 0, state.n_head_kv);
    votes.resize(by_pos.size());
    for (size_t i = 0; i < votes.size(); ++i) {
        votes[i] += std::exp(std::min(by_pos[i], 0.0f));
    }
}

void Recall::exchange_asked() {
    if (has_failed || votes.empty()) {
        return;
    }
    std::vector<HeadOf> together;
    for (int32_t il = 0; il < state.n_layer; ++il) {
        for (int32_t ih = 0; ih < state.n_head_kv; ++ih) {
            together.push_back({ il, ih });
        }
    }
    votes.resize(state.streams[stream].n_past + AFTER + BEFORE);  // a batch that was not rolled back had no vote on itself
    exchange_alike(votes, together);
    votes.clear();
}

// The largest score of each position and of those it comes with, over the heads: as many as there are positions.
std::vector<float> Recall::scores_by_position(int32_t layer, int32_t first, int32_t n_alike) const {
    // Moved up by AFTER, so that what is found at a position began that far before it.
    std::vector<float> by_pos(state.streams[stream].n_past + AFTER + BEFORE, NEG_INF);
    const auto put = [&](int32_t pos, float score) { by_pos[pos + AFTER] = std::max(by_pos[pos + AFTER], score); };
    for (int32_t ih = first; ih < first + n_alike; ++ih) {
        const int32_t * pos = state.pos.data() + state.index(stream, layer, ih);
        for (int32_t cell = 0; cell < state.n_cells; ++cell) {
            if (pos[cell] >= 0) {
                put(pos[cell], heads[ih].in_cache[cell]);
            }
        }
        const auto & entries = state.attic->entries(stream, layer, ih);
        for (size_t slot = 0; slot < entries.size(); ++slot) {
            put(entries[slot].pos, heads[ih].in_attic[slot]);
        }
    }
    widen(by_pos, BEFORE + 1 + AFTER);
    return by_pos;
}

// Heads that are alike have the same positions in a cell; an attic that was full may have dropped them in some.
std::vector<std::vector<int32_t>> Recall::slots_by_position(const std::vector<HeadOf> & together) const {
    std::vector<std::vector<int32_t>> slots;
    for (const auto & [layer, head] : together) {
        slots.emplace_back(state.streams[stream].n_past, -1);
        const auto & entries = state.attic->entries(stream, layer, head);
        for (size_t slot = 0; slot < entries.size(); ++slot) {
            slots.back()[entries[slot].pos] = int32_t(slot);
        }
    }
    return slots;
}

void Recall::exchange_alike(const std::vector<float> & by_pos, const std::vector<HeadOf> & together) {
    Attic & attic = *state.attic;
    const auto & [layer, head] = together.front();
    const auto & entries = attic.entries(stream, layer, head);
    const int32_t * pos = state.pos.data() + state.index(stream, layer, head);

    // By score; neighbours share one, and then by position, so that it does not matter where they lie.
    struct Ranked { float score; int32_t pos, at; };
    const auto is_worse  = [](const Ranked & a, const Ranked & b) { return a.score != b.score ? a.score < b.score : a.pos < b.pos; };
    const auto is_better = [](const Ranked & a, const Ranked & b) { return a.score != b.score ? a.score > b.score : a.pos < b.pos; };
    std::vector<Ranked> out, in;
    for (int32_t cell = 0; cell < state.n_cells; ++cell) {
        if (pos[cell] >= 0 && !is_protected(pos[cell])) {
            out.push_back({ by_pos[pos[cell]], pos[cell], cell });
        }
    }
    if (out.empty() || entries.empty()) {
        return;
    }
    std::sort(out.begin(), out.end(), is_worse);
    std::vector<std::vector<int32_t>> slots;
    if (together.size() > 1) {
        slots = slots_by_position(together);
    }
    const auto is_everywhere = [&](int32_t p) {
        return std::all_of(slots.begin(), slots.end(), [&](const auto & of_head) { return of_head[p] >= 0; });
    };
    for (size_t slot = 0; slot < entries.size(); ++slot) {
        const float score = by_pos[entries[slot].pos];
        if (score > out[0].score && is_everywhere(entries[slot].pos)) {
            in.push_back({ score, entries[slot].pos, int32_t(slot) });
        }
    }
    const size_t n = std::min({ in.size(), out.size(), size_t(n_most) });
    std::partial_sort(in.begin(), in.begin() + n, in.end(), is_better);
    int64_t n_exchanged = 0;
    int32_t exact_from = 0;
    for (size_t i = 0; i < n && in[i].score > out[i].score; ++i) {
        for (size_t h = 0; h < together.size(); ++h, ++n_exchanged) {
            const int32_t slot = slots.empty() ? in[i].at : slots[h][in[i].pos];
            attic.exchange(state, stream, together[h].layer, together[h].head, slot, out[i].at);
        }
        exact_from = std::max(exact_from, state.streams[stream].books[out[i].at] + 1);
    }
    attic.count_recalled(stream, n_exchanged, exact_from);
}

} // namespace h2og
