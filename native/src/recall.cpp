// What a batch's queries attend to, of what the cache holds and of what was evicted.
#include "recall.h"

#include "attention-plan.h"
#include "state.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace h2og {

namespace {

int32_t round_up(int32_t n, int32_t to) { return (n + to - 1)/to*to; }

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

std::vector<float> & scratch(size_t n) {
    static thread_local std::vector<float> memory;
    memory.resize(std::max(memory.size(), n));
    return memory;
}

} // namespace

Recall::Recall(h2og_state & state, int32_t stream, std::vector<Span> protected_, const h2og_recall_params & params) :
    stream(stream), state(state), kernel(*usable_kernels().front()), protected_spans(std::move(protected_)), params(params),
    heads(state.n_head_kv) {}

// Query-major, the newest last.
void Recall::load_queries(Head & head, int32_t ih, const LayerQueries & queries) const {
    const int32_t group = queries.n_head/state.n_head_kv, every = params.ask_every;
    const int32_t n = (std::min(queries.n_query, params.n_asked) - 1)/every + 1;
    head.n_row = n*group;
    head.whole.assign(round_up(head.n_row, kernel.lanes), std::numeric_limits<float>::infinity());
    const Question to = question_of(head, queries);
    head.q.assign(size_t(to.dim)*to.width, 0.0f);
    const bool is_few = to.n_row <= FEW_ROWS;
    const size_t row_step = is_few ? to.dim : 1, dim_step = is_few ? 1 : to.width;
    for (int32_t r = 0; r < head.n_row; ++r) {
        const float * src = reinterpret_cast<const float *>(
            queries.q + (ih*group + r % group)*queries.q_head + (queries.n_query - 1 - (n - 1 - r/group)*every)*queries.q_query);
        for (int32_t d = 0; d < state.head_dim_k; ++d) {
            head.q[r*row_step + d*dim_step] = src[d]*queries.scale;
        }
        head.whole[r] = queries.sinks != nullptr ? queries.sinks[ih*group + r % group] : NEG_INF;
    }
}

Question Recall::question_of(const Head & head, const LayerQueries & queries) const {
    return { head.q.data(), head.n_row, int32_t(head.whole.size()), state.head_dim_k, round_up(state.head_dim_k, kernel.lanes), queries.softcap };
}

void Recall::look_at_cache(int32_t layer, const LayerQueries & queries, int32_t i_thread, int32_t n_thread) {
    if (i_thread == 0) {
        next_search   = 0;
        next_exchange = 0;
        make_parts(queries);
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
        load_queries(head, ih, queries);
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
        const Question q = question_of(head, queries);
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

void Recall::search_attic(int32_t layer, const LayerQueries & queries) {
    const Attic & attic = *state.attic;
    const int32_t n = attic.n_entry(stream), n_chunk = (n + Attic::CHUNK - 1)/Attic::CHUNK;
    for (int32_t i; (i = next_search.fetch_add(1, std::memory_order_relaxed)) < n_chunk*state.n_head_kv;) {
        const int32_t ih = i % state.n_head_kv, chunk = i/state.n_head_kv, first = chunk*Attic::CHUNK;
        Head & head = heads[ih];
        const Keys k = { attic.keys(stream, layer, ih, chunk), attic.key_bytes, attic.type_k, std::min(Attic::CHUNK, n - first), nullptr };
        const Question q = question_of(head, queries);
        std::vector<float> & memory = scratch(look_floats(q));
        kernel.find(k, q, head.whole.data(), head.in_attic.data() + first, memory.data());
    }
}

void Recall::look(int32_t layer, const LayerQueries & queries, int32_t i_thread, int32_t n_thread) {
    unless_failed([&] { look_at_cache(layer, queries, i_thread, n_thread); });
}

void Recall::search(int32_t layer, const LayerQueries & queries) {
    unless_failed([&] { search_attic(layer, queries); });
}

} // namespace h2og
