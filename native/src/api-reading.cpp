// The C edge, as far as it only reads: contents of the cache, recorded queries, and how a layer attends.
#include "api.h"

#include "rows.h"

#include <algorithm>
#include <numeric>

using namespace h2og;

namespace {

// Inside a callback everything has been waited for already.
h2og_state & settled_state_of(h2og_cache * cache) {
    h2og_state & state = state_of(cache);
    if (!state.first->in_callback) {
        state.settle();
    }
    return state;
}

const Layer & layer_of(const h2og_state & state, int32_t layer) {
    if (layer < 0 || layer >= state.n_layer) {
        fail(H2OG_INVALID, "layer %d does not exist: there are %d", layer, state.n_layer);
    }
    return state.layers[layer];
}

const Queries & queries_of(const h2og_state & state) {
    if (state.queries == nullptr) {
        fail(H2OG_INVALID, "no queries are recorded: n_observed is 0");
    }
    return *state.queries;
}

std::vector<int32_t> checked_cells(const h2og_state & state, const int32_t * cells, int32_t n) {
    if (n < 0 || (cells == nullptr && n != state.n_cells)) {
        fail(H2OG_INVALID, "%d cells cannot be read: there are %d", n, state.n_cells);
    }
    std::vector<int32_t> res(n);
    if (cells == nullptr) {
        std::iota(res.begin(), res.end(), 0);
        return res;
    }
    std::copy_n(cells, n, res.begin());
    for (const int32_t cell : res) {
        if (cell < 0 || cell >= state.n_cells) {
            fail(H2OG_INVALID, "cell %d does not exist: there are %d", cell, state.n_cells);
        }
    }
    return res;
}

int32_t read_rows_of(h2og_cache * cache, int32_t seq, int32_t layer, const int32_t * cells, int32_t n, float * out, bool is_v) {
    return guarded([&]() -> int32_t {
        require_pointer(out, "out");
        const h2og_state & s = settled_state_of(cache);
        layer_of(s, layer);
        s.read_heads(s.stream_of(seq), layer, is_v, checked_cells(s, cells, n), out);
        return H2OG_OK;
    });
}

} // namespace

int32_t h2og_read_keys(h2og_cache * cache, int32_t seq, int32_t layer, const int32_t * cells, int32_t n, float * out) {
    return read_rows_of(cache, seq, layer, cells, n, out, false);
}

int32_t h2og_read_values(h2og_cache * cache, int32_t seq, int32_t layer, const int32_t * cells, int32_t n, float * out) {
    return read_rows_of(cache, seq, layer, cells, n, out, true);
}

int32_t h2og_read_query_pos(h2og_cache * cache, int32_t seq, int32_t * out) {
    return guarded([&]() -> int32_t {
        require_pointer(out, "out");
        h2og_state & s = state_of(cache);
        s.follow_books(s.stream_of(seq));
        const auto held = queries_of(s).held(s.stream_of(seq));
        out = std::fill_n(out, size_t(s.queries->n) - held.size(), -1);
        std::transform(held.begin(), held.end(), out, [](const Query & q) { return q.pos; });
        return H2OG_OK;
    });
}

int32_t h2og_read_queries(h2og_cache * cache, int32_t seq, int32_t layer, float * out) {
    return guarded([&]() -> int32_t {
        require_pointer(out, "out");
        h2og_state & s = settled_state_of(cache);
        layer_of(s, layer);
        queries_of(s);
        s.follow_books(s.stream_of(seq));
        s.read_queries(s.stream_of(seq), layer, out);
        return H2OG_OK;
    });
}

int32_t h2og_get_layer(h2og_cache * cache, int32_t layer, h2og_layer * out) {
    return guarded([&]() -> int32_t {
        require_pointer(out, "out");
        const h2og_state & s = state_of(cache);
        const Layer & l = layer_of(s, layer);
        *out = { l.n_head, l.scale, l.softcap, l.sinks != nullptr, int32_t(s.pairs_of(l.il).size()) };
        return H2OG_OK;
    });
}

int32_t h2og_read_sinks(h2og_cache * cache, int32_t layer, float * out) {
    return guarded([&]() -> int32_t {
        require_pointer(out, "out");
        const Layer & l = layer_of(state_of(cache), layer);
        if (l.sinks == nullptr) {
            fail(H2OG_INVALID, "layer %d has no sinks", layer);
        }
        ggml_backend_tensor_get(l.sinks, out, 0, l.n_head*sizeof(float));
        return H2OG_OK;
    });
}

int32_t h2og_read_rotation(h2og_cache * cache, int32_t layer, int32_t * first, int32_t * second, double * angle) {
    return guarded([&]() -> int32_t {
        require_pointer(first, "first");
        require_pointer(second, "second");
        require_pointer(angle, "angle");
        const h2og_state & s = state_of(cache);
        for (const Pair & pair : s.pairs_of(layer_of(s, layer).il)) {
            *first++  = pair.first;
            *second++ = pair.second;
            *angle++  = pair.angle;
        }
        return H2OG_OK;
    });
}
