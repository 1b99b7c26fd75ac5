// Evicted entries in a saved state: as they lie, head by head.
#include "attic.h"

#include "session-values.h"
#include "state.h"

#include <algorithm>
#include <cmath>

namespace h2og {

namespace {

struct AtticHeader {
    int32_t n_entry, type_k, type_v, exact_from;
    int64_t n_dropped, n_recalled;
};

struct Bytes {
    size_t key, value;  // a row; 0 where V is part of K
    size_t head, all;   // all entries of a head; of all heads, the header included
};

Bytes bytes_of(const h2og_state & state, const AtticHeader & header) {
    Bytes bytes;
    bytes.key   = ggml_row_size(ggml_type(header.type_k), state.head_dim_k);
    bytes.value = state.layers[0].v != nullptr ? ggml_row_size(ggml_type(header.type_v), state.head_dim_v) : 0;
    bytes.head  = header.n_entry*(sizeof(Attic::Entry) + bytes.key + bytes.value);
    bytes.all   = sizeof(AtticHeader) + size_t(state.n_layer)*state.n_head_kv*bytes.head;
    return bytes;
}

bool is_type(int32_t type, int64_t head_dim) {
    return type >= 0 && type < GGML_TYPE_COUNT && ggml_blck_size(ggml_type(type)) > 0 && head_dim % ggml_blck_size(ggml_type(type)) == 0 &&
        (type == GGML_TYPE_F32 || ggml_get_type_traits(ggml_type(type))->to_float != nullptr);
}

} // namespace

const size_t Attic::EMPTY_BYTES = sizeof(AtticHeader);

bool Attic::Entry::fits(int32_t n_past) const {
    return pos >= 0 && pos < n_past && rope_pos >= 0 && !std::isnan(score);
}

size_t Attic::saved_bytes(int32_t stream) const {
    AtticHeader header = {};
    header.n_entry = n_entry(stream);
    header.type_k  = type_k;
    header.type_v  = type_v;
    return bytes_of(state, header).all;
}

void Attic::save(int32_t stream, uint8_t * out) const {
    const Sequence & sequence = streams[stream];
    const AtticHeader header = { sequence.n, type_k, type_v, sequence.exact_from, sequence.n_dropped, sequence.n_recalled };
    put_values(out, &header, 1);
    for (int32_t j = 0; j < state.n_layer; ++j) {
        for (int32_t h = 0; h < state.n_head_kv; ++h) {
            const auto & known = entries(stream, j, h);
            put_values(out, known.data(), known.size());
            for (int32_t first = 0; first < sequence.n; first += CHUNK) {
                const size_t n = std::min(CHUNK, sequence.n - first);
                put_values(out, keys  (stream, j, h, first/CHUNK), n*key_bytes);
                put_values(out, values(stream, j, h, first/CHUNK), n*value_bytes);
            }
        }
    }
}

size_t Attic::check_saved(const h2og_state & state, const uint8_t * data, size_t size, int32_t n_past) {
    if (size < sizeof(AtticHeader)) {
        fail(H2OG_STATE, "the saved state is cut short in front of its evicted entries");
    }
    AtticHeader header;
    take_values(data, &header, 1);
    const bool has_v = state.layers[0].v != nullptr;
    if (header.n_entry < 0 || header.n_entry > n_past || !is_type(header.type_k, state.head_dim_k) ||
        (has_v && !is_type(header.type_v, state.head_dim_v))) {
        fail(H2OG_STATE, "the saved state's %d evicted entries are of no known kind", header.n_entry);
    }
    const Bytes bytes = bytes_of(state, header);
    if (size < bytes.all) {
        fail(H2OG_STATE, "the saved state has %zu bytes of evicted entries instead of %zu", size, bytes.all);
    }
    for (int32_t i = 0; i < state.n_layer*state.n_head_kv; ++i, data += bytes.head) {
        for (int32_t slot = 0; slot < header.n_entry; ++slot) {
            Entry entry;
            memcpy(&entry, data + slot*sizeof(entry), sizeof(entry));
            if (!entry.fits(n_past)) {
                fail(H2OG_STATE, "the saved state has an evicted entry at position %d of %d", entry.pos, n_past);
            }
        }
    }
    return bytes.all;
}

void Attic::load(int32_t stream, const uint8_t * data) {
    AtticHeader header;
    take_values(data, &header, 1);
    const ggml_type saved_k = ggml_type(header.type_k), saved_v = ggml_type(header.type_v);
    const Bytes bytes = bytes_of(state, header);
    clear(stream);
    Sequence & sequence = streams[stream];
    for (int32_t first = 0; first < header.n_entry; first += CHUNK) {
        const int32_t n = extend(stream, std::min(CHUNK, header.n_entry - first));
        if (n == 0) {
            sequence.n_dropped += int64_t(header.n_entry - first)*state.n_layer*state.n_head_kv;
            break;
        }
        const int32_t begin = sequence.n - n;
        for (size_t i = 0; i < sequence.entries.size(); ++i) {
            const int32_t j = int32_t(i)/state.n_head_kv, h = int32_t(i) % state.n_head_kv;
            const uint8_t * head = data + i*bytes.head;
            const uint8_t * saved_keys   = head + header.n_entry*sizeof(Entry) + first*(bytes.key + bytes.value);
            const uint8_t * saved_values = saved_keys + n*bytes.key;
            memcpy(&sequence.entries[i][begin], head + first*sizeof(Entry), n*sizeof(Entry));
            for (int32_t k = 0; k < n; ++k) {
                convert_row(saved_k, saved_keys + k*bytes.key, type_k, row(stream, j, h, begin + k, false), state.head_dim_k);
                if (bytes.value != 0) {
                    convert_row(saved_v, saved_values + k*bytes.value, type_v, row(stream, j, h, begin + k, true), state.head_dim_v);
                }
            }
        }
    }
    sequence.n_dropped  += header.n_dropped;
    sequence.n_recalled  = header.n_recalled;
    sequence.exact_from  = header.exact_from;
}

} // namespace h2og
