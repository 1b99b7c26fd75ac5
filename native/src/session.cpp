// What a saved llama.cpp state lacks: cells, positions, scores, counters, recorded queries and evicted entries, in the order llama.cpp saves its cells.
#include "session.h"

#include "rows.h"
#include "session-values.h"
#include "state.h"

#include <algorithm>
#include <cstring>

namespace h2og {

namespace {

constexpr uint32_t MAGIC = 0x474F3248;  // "H2OG"
constexpr uint32_t VERSION = 4;

struct Header {
    uint32_t magic, version;
    int32_t  n_layer, n_head_kv, n_used, n_past;
    int32_t  rope_shift, exact_from;
    int32_t  n_cells, search_from;  // of the cache that was saved; search_from: where llama.cpp looks for free cells
    int64_t  n_evicted, n_evictions, n_rebases;
    int32_t  n_query, n_query_floats;  // recorded queries, and what all layers have of each
    int64_t  attic_bytes;              // of the evicted entries behind them
};

struct SavedEntry { Attic::Entry entry; int32_t is_recalled; };

int32_t query_floats(const h2og_state & state) {
    int32_t n = 0;
    for (const Layer & layer : state.layers) {
        n += layer.n_head*state.head_dim_k;
    }
    return n;
}

std::vector<int32_t> occupied(const h2og_state & state, int32_t s) {
    std::vector<int32_t> cells;
    for (int32_t cell = 0; cell < state.n_cells; ++cell) {
        if (state.streams[s].books[cell] != -1) {
            cells.push_back(cell);
        }
    }
    return cells;
}

// Without the evicted entries.
size_t size_of(const h2og_state & state, int32_t n_used, int32_t n_query) {
    return sizeof(Header) + size_t(n_used)*sizeof(int32_t) + size_t(state.n_layer)*state.n_head_kv*n_used*sizeof(SavedEntry) +
        size_t(n_query)*(sizeof(Query) + query_floats(state)*sizeof(float));
}

size_t attic_bytes(const h2og_state & state, int32_t s) {
    return state.attic != nullptr ? state.attic->saved_bytes(s) : 0;
}

std::vector<Query> recorded(const h2og_state & state, int32_t s) {
    return state.queries != nullptr ? state.queries->held(s) : std::vector<Query>{};
}

// llama.cpp restores cells side by side from the first on. Moves them to where they were, so that every sum runs in the
// order it would have run in, and a restored sequence goes on bit for bit.
void put_back(h2og_state & state, int32_t s, const std::vector<int32_t> & now, const std::vector<int32_t> & before) {
    std::vector<Move> moves;
    for (size_t i = now.size(); i-- > 0;) {  // from the last on: a cell only moves to one that is free already
        for (int32_t ih = 0; now[i] != before[i] && ih < state.n_head_kv; ++ih) {
            moves.push_back({ ih, now[i], before[i] });
        }
    }
    for (const Layer & layer : state.layers) {
        state.move_rows(layer, s, moves);
    }
    llama_kv_cells & cells = h2og_access::cells(*state.cache, s);
    for (size_t i = now.size(); i-- > 0;) {
        if (now[i] != before[i]) {
            const llama_pos pos = cells.pos_get(now[i]);
            const llama_kv_cell_ext ext = cells.ext_get(now[i]);
            cells.rm(now[i]);
            cells.pos_set(before[i], pos);
            cells.ext_set(before[i], ext);
            cells.seq_add(before[i], s);
        }
    }
    state.follow_books(s);
}

// Without saved queries, or with none recorded here, the rings stay empty.
void load_queries(h2og_state & state, int32_t s, const Header & header, const uint8_t * data) {
    if (state.queries == nullptr) {
        return;
    }
    std::vector<Query> queries(header.n_query);
    take_values(data, queries.data(), queries.size());
    state.queries->restore(s, queries);
    std::vector<float> rows;
    for (int32_t j = 0; j < state.n_layer; ++j) {
        rows.resize(queries.size()*state.layers[j].n_head*state.head_dim_k);
        take_values(data, rows.data(), rows.size());
        state.queries->write(s, j, rows.data(), header.n_query);
    }
}

// Throws unless these bytes are all of a sequence that llama.cpp has just restored.
Header checked_header(const h2og_state & state, int32_t s, const uint8_t * data, int64_t size) {
    Header header;
    if (size < int64_t(sizeof(header))) {
        fail(H2OG_STATE, "the saved state is cut short: %lld bytes", (long long) size);
    }
    memcpy(&header, data, sizeof(header));
    if (header.magic != MAGIC || header.version != VERSION) {
        fail(H2OG_STATE, "this is no saved state of version %u", VERSION);
    }
    if (header.n_layer != state.n_layer || header.n_head_kv != state.n_head_kv) {
        fail(H2OG_STATE, "the saved state has %d layers of %d KV heads, this cache %d of %d",
             header.n_layer, header.n_head_kv, state.n_layer, state.n_head_kv);
    }
    if (header.n_query < 0 || (header.n_query > 0 && header.n_query_floats != query_floats(state))) {
        fail(H2OG_STATE, "the saved state has %d queries of %d numbers, this cache's have %d", header.n_query,
             header.n_query_floats, query_floats(state));
    }
    const Stream & st = state.streams[s];
    if (header.n_used != st.n_used || header.n_past != st.n_past || header.n_used != int32_t(occupied(state, s).size())) {
        fail(H2OG_STATE, "the saved state has %d entries up to position %d, llama.cpp restored %d up to %d",
             header.n_used, header.n_past, st.n_used, st.n_past);
    }
    const size_t expected = size_of(state, header.n_used, header.n_query);
    if (header.attic_bytes < 0 || size - header.attic_bytes != int64_t(expected)) {
        fail(H2OG_STATE, "the saved state has %lld bytes instead of %zu and %lld of evicted entries", (long long) size, expected,
             (long long) header.attic_bytes);
    }
    if (header.attic_bytes > int64_t(Attic::EMPTY_BYTES) && header.n_evicted == 0) {
        fail(H2OG_STATE, "the saved state has evicted entries, and none was ever evicted");
    }
    if (header.attic_bytes > 0 && Attic::check_saved(state, data + expected, size_t(header.attic_bytes), header.n_past) != size_t(header.attic_bytes)) {
        fail(H2OG_STATE, "the saved state has %lld bytes of evicted entries, and not as many as they take", (long long) header.attic_bytes);
    }
    const uint8_t * entries = data + sizeof(header) + header.n_used*sizeof(int32_t);
    for (size_t i = 0; i < size_t(state.n_layer)*state.n_head_kv*header.n_used; ++i) {
        SavedEntry saved;
        take_values(entries, &saved, 1);
        if (!saved.entry.fits(header.n_past)) {
            fail(H2OG_STATE, "the saved state has an entry at position %d of %d", saved.entry.pos, header.n_past);
        }
    }
    return header;
}

} // namespace

int64_t state_size(h2og_state & state, int32_t s) {
    state.follow_books(s);
    return int64_t(size_of(state, state.streams[s].n_used, int32_t(recorded(state, s).size())) + attic_bytes(state, s));
}

void state_save(h2og_state & state, int32_t s, uint8_t * out, int64_t size) {
    state.settle();
    if (size != state_size(state, s)) {
        fail(H2OG_INVALID, "the saved state takes %lld bytes, not %lld", (long long) state_size(state, s), (long long) size);
    }
    const Stream & st = state.streams[s];
    const auto queries = recorded(state, s);
    const Header header = { MAGIC, VERSION, state.n_layer, state.n_head_kv, st.n_used, st.n_past,
                            st.rope_shift, st.exact_from, state.n_cells, int32_t(h2og_access::search_from(*state.cache, s)),
                            st.n_evicted, st.n_evictions, st.n_rebases, int32_t(queries.size()), query_floats(state), int64_t(attic_bytes(state, s)) };
    const auto cells = occupied(state, s);
    put_values(out, &header, 1);
    put_values(out, cells.data(), cells.size());
    for (int32_t j = 0; j < state.n_layer; ++j) {
        for (int32_t ih = 0; ih < state.n_head_kv; ++ih) {
            const size_t i = state.index(s, j, ih);
            for (const int32_t cell : cells) {
                const SavedEntry saved = { { state.pos[i + cell], state.rope_pos[i + cell], state.scores[i + cell] },
                                           state.recalled[i + cell] };
                put_values(out, &saved, 1);
            }
        }
    }
    put_values(out, queries.data(), queries.size());
    std::vector<float> rows;
    for (int32_t j = 0; !queries.empty() && j < state.n_layer; ++j) {
        rows.resize(queries.size()*state.layers[j].n_head*state.head_dim_k);
        state.queries->read(s, j, rows.data());
        put_values(out, rows.data(), rows.size());
    }
    if (state.attic != nullptr) {
        state.attic->save(s, out);
    }
}

void state_load(h2og_state & state, int32_t s, const uint8_t * data, int64_t size) {
    state.settle();
    state.follow_books(s);
    const Header header = checked_header(state, s, data, size);
    const uint8_t * saved_attic = data + size - header.attic_bytes;
    auto cells = occupied(state, s);
    data += sizeof(header);
    std::vector<int32_t> before(cells.size());
    take_values(data, before.data(), before.size());
    bool can_put_back = header.n_cells == state.n_cells && header.search_from >= 0 && header.search_from <= state.n_cells;
    for (size_t i = 0; i < before.size(); ++i) {
        can_put_back = can_put_back && before[i] >= cells[i] && before[i] < state.n_cells && (i == 0 || before[i] > before[i - 1]);
    }
    if (can_put_back) {
        put_back(state, s, cells, before);
        h2og_access::search_from(*state.cache, s) = uint32_t(header.search_from);
        cells = before;
    }
    for (int32_t j = 0; j < state.n_layer; ++j) {
        for (int32_t ih = 0; ih < state.n_head_kv; ++ih) {
            const size_t i = state.index(s, j, ih);
            for (const int32_t cell : cells) {
                SavedEntry saved;
                take_values(data, &saved, 1);
                state.pos[i + cell]      = saved.entry.pos;
                state.rope_pos[i + cell] = saved.entry.rope_pos;
                state.scores[i + cell]   = saved.entry.score;
                state.recalled[i + cell] = saved.is_recalled != 0;
            }
        }
    }
    load_queries(state, s, header, data);
    if (state.attic != nullptr && header.attic_bytes > 0) {
        state.attic->load(s, saved_attic);
    }
    Stream & st = state.streams[s];
    st.rope_shift  = header.rope_shift;
    st.window_shift.assign(state.window != nullptr ? h2og_access::layers(*state.window).size() : 0, header.rope_shift);
    st.exact_from  = header.exact_from;
    st.n_evicted   = header.n_evicted;
    st.n_evictions = header.n_evictions;
    st.n_rebases   = header.n_rebases;
    state.upload_scores(s);
}

} // namespace h2og
