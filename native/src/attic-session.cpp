// Evicted entries in a saved state: as they lie, head by head.
#include "attic.h"

#include "state.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace h2og {

namespace {

struct Header {
    int32_t n_entry, type_k, type_v, exact_from;
    int64_t n_dropped, n_recalled;
};

size_t bytes_of(const h2og_state & state, const Header & header, ggml_type type_k, ggml_type type_v, bool has_v) {
    const size_t row = ggml_row_size(type_k, state.head_dim_k) + (has_v ? ggml_row_size(type_v, state.head_dim_v) : 0);
    return sizeof(Header) + size_t(state.n_layer)*state.n_head_kv*header.n_entry*(sizeof(Attic::Entry) + row);
}

bool is_type(int32_t type, int64_t head_dim) {
    return type >= 0 && type < GGML_TYPE_COUNT && ggml_blck_size(ggml_type(type)) > 0 && head_dim % ggml_blck_size(ggml_type(type)) == 0 &&
        (type == GGML_TYPE_F32 || ggml_get_type_traits(ggml_type(type))->to_float != nullptr);
}

} // namespace

const size_t Attic::EMPTY_BYTES = sizeof(Header);

size_t Attic::saved_bytes(int32_t stream) const {
    Header header = {};
    header.n_entry = n_entry(stream);
    return bytes_of(state, header, type_k, type_v, value_bytes != 0);
}

void Attic::save(int32_t stream, uint8_t * out) const {
    const Sequence & sequence = streams[stream];
    const Header header = { sequence.n, type_k, type_v, sequence.exact_from, sequence.n_dropped, sequence.n_recalled };
    const auto put = [&](const void * data, size_t n) {
        if (n > 0) {
            memcpy(out, data, n);
            out += n;
        }
    };
    put(&header, sizeof(header));
    for (int32_t j = 0; j < state.n_layer; ++j) {
        for (int32_t h = 0; h < state.n_head_kv; ++h) {
            const auto & known = entries(stream, j, h);
            put(known.data(), known.size()*sizeof(Entry));
            for (int32_t first = 0; first < sequence.n; first += CHUNK) {
                const size_t n = std::min(CHUNK, sequence.n - first);
                put(keys  (stream, j, h, first/CHUNK), n*key_bytes);
                put(values(stream, j, h, first/CHUNK), n*value_bytes);
            }
        }
    }
}

size_t Attic::check_saved(const h2og_state & state, const uint8_t * data, size_t size, int32_t n_past) {
    Header header;
    if (size < sizeof(header)) {
        fail(H2OG_STATE, "the saved state is cut short in front of its evicted entries");
    }
    memcpy(&header, data, sizeof(header));
    const bool has_v = state.layers[0].v != nullptr;
    if (header.n_entry < 0 || header.n_entry > n_past || !is_type(header.type_k, state.head_dim_k) ||
        (has_v && !is_type(header.type_v, state.head_dim_v))) {
        fail(H2OG_STATE, "the saved state's %d evicted entries are of no known kind", header.n_entry);
    }
    const size_t n = bytes_of(state, header, ggml_type(header.type_k), ggml_type(header.type_v), has_v);
    if (size < n) {
        fail(H2OG_STATE, "the saved state has %zu bytes of evicted entries instead of %zu", size, n);
    }
    const size_t row = n == sizeof(Header) ? 0 : (n - sizeof(Header))/(size_t(state.n_layer)*state.n_head_kv);
    for (int32_t i = 0; i < state.n_layer*state.n_head_kv; ++i) {
        for (int32_t slot = 0; slot < header.n_entry; ++slot) {
            Entry entry;
            memcpy(&entry, data + sizeof(Header) + i*row + slot*sizeof(Entry), sizeof(entry));
            if (entry.pos < 0 || entry.pos >= n_past || entry.rope_pos < 0 || std::isnan(entry.score)) {
                fail(H2OG_STATE, "the saved state has an evicted entry at position %d of %d", entry.pos, n_past);
            }
        }
    }
    return n;
}

void Attic::load(int32_t stream, const uint8_t * data) {
    Header header;
    memcpy(&header, data, sizeof(header));
    data += sizeof(header);
    const ggml_type saved_k = ggml_type(header.type_k), saved_v = ggml_type(header.type_v);
    const size_t saved_key = ggml_row_size(saved_k, state.head_dim_k);
    const size_t saved_value = value_bytes == 0 ? 0 : ggml_row_size(saved_v, state.head_dim_v);
    const size_t head_bytes = size_t(header.n_entry)*(sizeof(Entry) + saved_key + saved_value);
    clear(stream);
    for (int32_t first = 0; first < header.n_entry; first += CHUNK) {
        const int32_t n = extend(stream, std::min(CHUNK, header.n_entry - first));
        const int32_t begin = streams[stream].n - n;
        for (size_t i = 0; n > 0 && i < streams[stream].entries.size(); ++i) {
            const int32_t j = int32_t(i)/state.n_head_kv, h = int32_t(i) % state.n_head_kv;
            const uint8_t * head = data + i*head_bytes, * rows = head + header.n_entry*sizeof(Entry) + first*(saved_key + saved_value);
            memcpy(&streams[stream].entries[i][begin], head + first*sizeof(Entry), n*sizeof(Entry));
            for (int32_t k = 0; k < n; ++k) {
                convert_row(saved_k, reinterpret_cast<const char *>(rows) + k*saved_key, type_k, row(stream, j, h, begin + k, false), state.head_dim_k);
                if (value_bytes != 0) {
                    convert_row(saved_v, reinterpret_cast<const char *>(rows) + n*saved_key + k*saved_value, type_v,
                                row(stream, j, h, begin + k, true), state.head_dim_v);
                }
            }
        }
        if (n == 0) {
            streams[stream].n_dropped += int64_t(header.n_entry - first)*state.n_layer*state.n_head_kv;
            break;
        }
    }
    streams[stream].n_dropped  += header.n_dropped;
    streams[stream].n_recalled  = header.n_recalled;
    streams[stream].exact_from  = header.exact_from;
}

} // namespace h2og
