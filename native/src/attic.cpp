#include "attic.h"

#include "state.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>

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

void convert_row(ggml_type from, const char * src, ggml_type to, char * dst, int64_t n) {
    if (from == to) {
        memcpy(dst, src, ggml_row_size(from, n));
        return;
    }
    std::vector<float> row(n);
    if (from == GGML_TYPE_F32) {
        memcpy(row.data(), src, n*sizeof(float));
    } else {
        ggml_get_type_traits(from)->to_float(src, row.data(), n);
    }
    if (to == GGML_TYPE_F32) {
        memcpy(dst, row.data(), n*sizeof(float));
    } else {
        ggml_get_type_traits(to)->from_float_ref(row.data(), dst, n);
    }
}

Attic::Attic(const h2og_state & state, const h2og_attic_params & params) :
    state(state), max_bytes(params.max_bytes),
    type_k(chosen_type(params.type_k, state.layers[0].k, state.head_dim_k)),
    type_v(chosen_type(params.type_v, state.layers[0].v, state.head_dim_v)),
    key_bytes(ggml_row_size(type_k, state.head_dim_k)),
    value_bytes(state.layers[0].v == nullptr ? 0 : ggml_row_size(type_v, state.head_dim_v)),
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

size_t Attic::row_of(int32_t layer, int32_t head) const {
    return size_t(layer)*state.n_head_kv + head;
}

char * Attic::keys(int32_t stream, int32_t layer, int32_t head, int32_t i) const {
    return streams[stream].chunks[i] + row_of(layer, head)*CHUNK*(key_bytes + value_bytes);
}

char * Attic::values(int32_t stream, int32_t layer, int32_t head, int32_t i) const {
    return keys(stream, layer, head, i) + CHUNK*key_bytes;
}

char * Attic::row(int32_t stream, int32_t layer, int32_t head, int32_t slot, bool is_v) const {
    return is_v ? values(stream, layer, head, slot/CHUNK) + (slot % CHUNK)*value_bytes
                : keys  (stream, layer, head, slot/CHUNK) + (slot % CHUNK)*key_bytes;
}

RowLayout Attic::layout(int32_t layer, bool is_v) const {
    const Layer & l = state.layers[layer];
    return { is_v ? l.v : l.k, state.n_head_kv, is_v ? state.head_dim_v : state.head_dim_k,
             is_v && h2og_access::v_trans(*state.cache) };
}

bool Attic::grow(int32_t stream) {
    if (is_full || n_chunk >= max_chunks) {
        return false;
    }
    char * chunk = chunks.get();
    if (chunk == nullptr) {
        is_full = true;
        return false;
    }
    streams[stream].chunks.push_back(chunk);
    ++n_chunk;
    return true;
}

void Attic::give_back(int32_t stream) {
    chunks.give_back(streams[stream].chunks.back());
    streams[stream].chunks.pop_back();
    --n_chunk;
    is_full = false;
}

// Another sequence that has two chunks more than this one drops what is in one of them.
bool Attic::grow_from_others(int32_t stream) {
    const auto most = std::max_element(streams.begin(), streams.end(), [](const Sequence & a, const Sequence & b) {
        return a.chunks.size() < b.chunks.size();
    });
    if (most->chunks.size() < streams[stream].chunks.size() + 2) {
        return false;
    }
    const int32_t other = int32_t(most - streams.begin());
    drop(other, std::max(0, most->n - (int32_t(most->chunks.size()) - 1)*CHUNK));
    give_back(other);
    return grow(stream);
}

// The least-scored of each head go, of equals the oldest; the last ones take their slots.
void Attic::drop(int32_t stream, int32_t n) {
    Sequence & sequence = streams[stream];
    std::vector<int32_t> order(sequence.n);
    std::vector<char> is_dropped;
    const int32_t n_left = sequence.n - n;
    for (int32_t j = 0; j < state.n_layer; ++j) {
        for (int32_t h = 0; h < state.n_head_kv; ++h) {
            auto & entries = sequence.entries[row_of(j, h)];
            for (int32_t i = 0; i < sequence.n; ++i) {
                order[i] = i;
            }
            std::nth_element(order.begin(), order.begin() + n, order.end(), [&](int32_t a, int32_t b) {
                return std::make_pair(entries[a].score, entries[a].pos) < std::make_pair(entries[b].score, entries[b].pos);
            });
            is_dropped.assign(sequence.n, 0);
            for (int32_t i = 0; i < n; ++i) {
                is_dropped[order[i]] = 1;
            }
            int32_t hole = 0;
            for (int32_t slot = n_left; slot < sequence.n; ++slot) {
                if (is_dropped[slot]) {
                    continue;
                }
                while (!is_dropped[hole]) {
                    ++hole;
                }
                entries[hole] = entries[slot];
                memcpy(row(stream, j, h, hole, false), row(stream, j, h, slot, false), key_bytes);
                memcpy(row(stream, j, h, hole, true),  row(stream, j, h, slot, true),  value_bytes);
                is_dropped[hole] = 0;
            }
            entries.resize(n_left);
        }
    }
    sequence.n = n_left;
    sequence.n_dropped += int64_t(n)*state.n_layer*state.n_head_kv;
}

int32_t Attic::extend(int32_t stream, int32_t n) {
    Sequence & sequence = streams[stream];
    n = std::min(n, CHUNK);
    while (sequence.n + n > int32_t(sequence.chunks.size())*CHUNK) {
        if (grow(stream) || grow_from_others(stream)) {
            continue;
        }
        if (sequence.chunks.empty()) {
            return 0;
        }
        // Many at once, since finding them takes a walk through all.
        drop(stream, std::min(sequence.n, std::max(n, std::min(CHUNK, sequence.n/8))));
    }
    sequence.n += n;
    for (auto & entries : sequence.entries) {
        entries.resize(sequence.n);
    }
    return n;
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
                const int32_t * cells = victims + row_of(j, h)*n + begin;
                const size_t at = state.index(stream, j, h);
                auto & entries = streams[stream].entries[row_of(j, h)];
                for (int32_t i = 0; i < more; ++i) {
                    entries[first + i] = { state.pos[at + cells[i]], state.rope_pos[at + cells[i]], state.scores[at + cells[i]] };
                }
                for (const bool is_v : { false, true }) {
                    if (is_v && value_bytes == 0) {
                        continue;
                    }
                    const RowLayout rows = layout(j, is_v);
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

void Attic::exchange(h2og_state & own, int32_t stream, int32_t layer, int32_t head, int32_t slot, int32_t cell) {
    for (const bool is_v : { false, true }) {
        if (is_v && value_bytes == 0) {
            continue;
        }
        const RowLayout rows = layout(layer, is_v);
        const ggml_type type = is_v ? type_v : type_k, cached = rows.tensor->type;
        std::vector<char> out(ggml_row_size(cached, rows.head_dim)), in(out.size());
        get_row(rows, stream, head, cell, out.data());
        char * here = row(stream, layer, head, slot, is_v);
        convert_row(type, here, cached, in.data(), rows.head_dim);
        set_row(rows, stream, head, cell, in.data());
        convert_row(cached, out.data(), type, here, rows.head_dim);
    }
    const size_t at = own.index(stream, layer, head) + cell;
    const Layer & l = state.layers[layer];
    const size_t score_at = stream*l.scores->nb[2] + head*l.scores->nb[1] + cell*sizeof(float);
    if (!l.is_host) {  // what the host has of it may be old
        ggml_backend_tensor_get(l.scores, &own.scores[at], score_at, sizeof(float));
    }
    Entry & entry = streams[stream].entries[row_of(layer, head)][slot];
    std::swap(entry.pos,      own.pos[at]);
    std::swap(entry.rope_pos, own.rope_pos[at]);
    std::swap(entry.score,    own.scores[at]);
    own.recalled[at] = 1;
    if (!l.is_host) {
        ggml_backend_tensor_set(l.scores, &own.scores[at], score_at, sizeof(float));
    }
}

void Attic::clear(int32_t stream) {
    Sequence & sequence = streams[stream];
    while (!sequence.chunks.empty()) {
        give_back(stream);
    }
    sequence = Sequence{};
    sequence.entries.resize(size_t(state.n_layer)*state.n_head_kv);
}

void Attic::copy(int32_t from, int32_t to) {
    if (from == to) {
        return;
    }
    clear(to);
    const Sequence & source = streams[from];
    Sequence & sequence = streams[to];
    for (size_t i = 0; i < source.chunks.size() && grow(to); ++i) {
        memcpy(sequence.chunks[i], source.chunks[i], chunks.bytes);
    }
    sequence.n       = std::min(source.n, int32_t(sequence.chunks.size())*CHUNK);
    sequence.entries = source.entries;
    for (auto & entries : sequence.entries) {
        entries.resize(sequence.n);
    }
    sequence.n_dropped  = source.n_dropped + int64_t(source.n - sequence.n)*state.n_layer*state.n_head_kv;
    sequence.n_recalled = source.n_recalled;
    sequence.exact_from = source.exact_from;
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
