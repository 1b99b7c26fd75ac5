#include "attic.h"

#include "state.h"

#include "ggml-backend.h"

#include <algorithm>

namespace h2og {

namespace {

ggml_type chosen_type(int32_t wanted, const ggml_tensor * t, int64_t head_dim) {
    if (wanted < 0 || t == nullptr) {
        return t == nullptr ? GGML_TYPE_F32 : t->type;
    }
    const ggml_type type = ggml_type(wanted);
    const auto * traits = wanted < GGML_TYPE_COUNT ? ggml_get_type_traits(type) : nullptr;
    const bool is_known = traits != nullptr && (type == GGML_TYPE_F32 || (traits->to_float && traits->from_float_ref));
    if (!is_known) {
        fail(H2OG_INVALID, "evicted entries cannot be kept as type %d", wanted);
    }
    if (head_dim % ggml_blck_size(type) != 0) {
        fail(H2OG_INVALID, "evicted entries cannot be kept as %s: its blocks have %lld elements and a head has %lld",
             ggml_type_name(type), (long long) ggml_blck_size(type), (long long) head_dim);
    }
    return type;
}

} // namespace

Attic::Attic(h2og_state & state, const h2og_attic_params & params) :
    max_bytes(params.max_bytes),
    type_k(chosen_type(params.type_k, state.layers[0].k, state.head_dim_k)),
    type_v(chosen_type(params.type_v, state.layers[0].v, state.head_dim_v)),
    key_bytes(ggml_row_size(type_k, state.head_dim_k)),
    value_bytes(state.layers[0].v == nullptr ? 0 : ggml_row_size(type_v, state.head_dim_v)),
    state(state),
    chunks(size_t(state.n_layer)*state.n_head_kv*CHUNK*(key_bytes + value_bytes), params.folder != nullptr ? params.folder : ""),
    streams(state.n_stream) {
    max_chunks = int32_t(std::min<int64_t>(max_bytes/int64_t(chunks.bytes), INT32_MAX/CHUNK));
    if (max_chunks < 1) {
        fail(H2OG_INVALID, "%lld bytes are too few to keep evicted entries in: %d of each head take %zu", (long long) max_bytes,
             CHUNK, chunks.bytes);
    }
    for (int32_t s = 0; s < state.n_stream; ++s) {
        clear(s);
    }
}

Attic::~Attic() {
    for (int32_t s = 0; s < int32_t(streams.size()); ++s) {
        clear(s);
    }
}

size_t Attic::index_of(int32_t layer, int32_t head) const {
    return size_t(layer)*state.n_head_kv + head;
}

char * Attic::keys(int32_t stream, int32_t layer, int32_t head, int32_t i) const {
    return streams[stream].chunks[i] + index_of(layer, head)*CHUNK*(key_bytes + value_bytes);
}

char * Attic::values(int32_t stream, int32_t layer, int32_t head, int32_t i) const {
    return keys(stream, layer, head, i) + CHUNK*key_bytes;
}

char * Attic::row(int32_t stream, int32_t layer, int32_t head, int32_t slot, bool is_v) const {
    return is_v ? values(stream, layer, head, slot/CHUNK) + (slot % CHUNK)*value_bytes
                : keys  (stream, layer, head, slot/CHUNK) + (slot % CHUNK)*key_bytes;
}

int32_t Attic::take(int32_t stream, const int32_t * victims, int32_t n) {
    std::vector<char> raw(std::max(ggml_row_size(state.layers[0].k->type, state.head_dim_k),
                                   value_bytes == 0 ? 0 : ggml_row_size(state.layers[0].v->type, state.head_dim_v)));
    for (int32_t begin = 0; begin < n;) {
        const int32_t more = extend(stream, n - begin);
        if (more == 0) {
            streams[stream].n_dropped += int64_t(n - begin)*state.n_layer*state.n_head_kv;
            return begin;
        }
        const int32_t first = streams[stream].n - more;
        for (int32_t j = 0; j < state.n_layer; ++j) {
            for (int32_t h = 0; h < state.n_head_kv; ++h) {
                const int32_t * cells = victims + index_of(j, h)*n + begin;
                const size_t at = state.index(stream, j, h);
                auto & entries = streams[stream].entries[index_of(j, h)];
                for (int32_t i = 0; i < more; ++i) {
                    entries[first + i] = { state.pos[at + cells[i]], state.rope_pos[at + cells[i]], state.scores[at + cells[i]] };
                }
                for (const bool is_v : { false, true }) {
                    if (is_v && value_bytes == 0) {
                        continue;
                    }
                    const RowLayout rows = state.rows_of(state.layers[j], is_v);
                    const ggml_type type = is_v ? type_v : type_k;
                    for (int32_t i = 0; i < more; ++i) {
                        get_row(rows, stream, h, cells[i], raw.data());
                        convert_row(rows.tensor->type, raw.data(), type, row(stream, j, h, first + i, is_v), rows.head_dim);
                    }
                }
            }
        }
        begin += more;
    }
    return n;
}

void Attic::untake(int32_t stream, int32_t n) {
    Sequence & sequence = streams[stream];
    sequence.n -= std::min(n, sequence.n);
    for (auto & entries : sequence.entries) {
        entries.resize(sequence.n);
    }
}

void Attic::exchange(int32_t stream, int32_t layer, int32_t head, int32_t slot, int32_t cell) {
    for (const bool is_v : { false, true }) {
        if (is_v && value_bytes == 0) {
            continue;
        }
        const RowLayout rows = state.rows_of(state.layers[layer], is_v);
        const ggml_type type = is_v ? type_v : type_k, cached = rows.tensor->type;
        std::vector<char> out(ggml_row_size(cached, rows.head_dim)), in(out.size());
        get_row(rows, stream, head, cell, out.data());
        char * here = row(stream, layer, head, slot, is_v);
        convert_row(type, here, cached, in.data(), rows.head_dim);
        set_row(rows, stream, head, cell, in.data());
        convert_row(cached, out.data(), type, here, rows.head_dim);
    }
    const size_t at = state.index(stream, layer, head) + cell;
    const Layer & l = state.layers[layer];
    const size_t score_at = stream*l.scores->nb[2] + head*l.scores->nb[1] + cell*sizeof(float);
    if (!l.is_host) {  // what the host has of it may be old
        ggml_backend_tensor_get(l.scores, &state.scores[at], score_at, sizeof(float));
    }
    Entry & entry = entries(stream, layer, head)[slot];
    std::swap(entry.pos,      state.pos[at]);
    std::swap(entry.rope_pos, state.rope_pos[at]);
    std::swap(entry.score,    state.scores[at]);
    state.recalled[at] = 1;
    if (!l.is_host) {
        ggml_backend_tensor_set(l.scores, &state.scores[at], score_at, sizeof(float));
    }
}

int64_t Attic::bytes() const {
    return int64_t(n_chunk)*int64_t(chunks.bytes);
}

void Attic::count_recalled(int32_t stream, int64_t n, int32_t exact_from) {
    const std::lock_guard<std::mutex> guard(counting);
    streams[stream].n_recalled += n;
    streams[stream].exact_from = std::max(streams[stream].exact_from, exact_from);
}

} // namespace h2og
