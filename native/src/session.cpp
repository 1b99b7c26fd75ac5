// What a saved llama.cpp state lacks: positions, scores and counters, cell by cell in the order llama.cpp saves them.
#include "state.h"

#include "session.h"

#include <cstring>

namespace h2og {

namespace {

constexpr uint32_t MAGIC = 0x474F3248;  // "H2OG"
constexpr uint32_t VERSION = 1;

struct Header {
    uint32_t magic, version;
    int32_t  n_layer, n_head_kv, n_used, n_past;
    int32_t  rope_shift, exact_from;
    int64_t  n_evicted, n_evictions, n_rebases;
};

struct Entry { int32_t pos, rope_pos; float score; };

std::vector<int32_t> occupied(const h2og_state & state, int32_t s) {
    std::vector<int32_t> cells;
    for (int32_t cell = 0; cell < state.n_cells; ++cell) {
        if (state.streams[s].books[cell] != -1) {
            cells.push_back(cell);
        }
    }
    return cells;
}

size_t size_of(const h2og_state & state, int32_t n_used) {
    return sizeof(Header) + size_t(state.n_layer)*state.n_head_kv*n_used*sizeof(Entry);
}

} // namespace

int64_t state_size(h2og_state & state, int32_t s) {
    state.follow_books(s);
    return int64_t(size_of(state, state.streams[s].n_used));
}

void state_save(h2og_state & state, int32_t s, uint8_t * out, int64_t size) {
    state.settle();
    if (size != state_size(state, s)) {
        fail(H2OG_INVALID, "the saved state takes %lld bytes, not %lld", (long long) state_size(state, s), (long long) size);
    }
    const Stream & st = state.streams[s];
    const Header header = { MAGIC, VERSION, state.n_layer, state.n_head_kv, st.n_used, st.n_past,
                            st.rope_shift, st.exact_from, st.n_evicted, st.n_evictions, st.n_rebases };
    memcpy(out, &header, sizeof(header));
    out += sizeof(header);
    const auto cells = occupied(state, s);
    for (int32_t j = 0; j < state.n_layer; ++j) {
        for (int32_t ih = 0; ih < state.n_head_kv; ++ih) {
            const size_t i = state.index(s, j, ih);
            for (const int32_t cell : cells) {
                const Entry e = { state.pos[i + cell], state.rope_pos[i + cell], state.scores[i + cell] };
                memcpy(out, &e, sizeof(e));
                out += sizeof(e);
            }
        }
    }
}

void state_load(h2og_state & state, int32_t s, const uint8_t * data, int64_t size) {
    state.follow_books(s);
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
    const auto cells = occupied(state, s);
    Stream & st = state.streams[s];
    if (header.n_used != st.n_used || header.n_past != st.n_past || header.n_used != int32_t(cells.size())) {
        fail(H2OG_STATE, "the saved state has %d entries up to position %d, llama.cpp restored %d up to %d",
             header.n_used, header.n_past, st.n_used, st.n_past);
    }
    if (size != int64_t(size_of(state, header.n_used))) {
        fail(H2OG_STATE, "the saved state has %lld bytes instead of %zu", (long long) size, size_of(state, header.n_used));
    }
    data += sizeof(header);
    for (int32_t j = 0; j < state.n_layer; ++j) {
        for (int32_t ih = 0; ih < state.n_head_kv; ++ih) {
            const size_t i = state.index(s, j, ih);
            for (const int32_t cell : cells) {
                Entry e;
                memcpy(&e, data, sizeof(e));
                data += sizeof(e);
                state.pos[i + cell]      = e.pos;
                state.rope_pos[i + cell] = e.rope_pos;
                state.scores[i + cell]   = e.score;
            }
        }
    }
    st.rope_shift  = header.rope_shift;
    st.window_shift.assign(state.window != nullptr ? h2og_access::layers(*state.window).size() : 0, header.rope_shift);
    st.exact_from  = header.exact_from;
    st.n_evicted   = header.n_evicted;
    st.n_evictions = header.n_evictions;
    st.n_rebases   = header.n_rebases;
    state.upload_scores(s);
}

} // namespace h2og
