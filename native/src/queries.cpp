#include "queries.h"

#include "rows.h"
#include "state.h"

#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>

using namespace h2og;

namespace h2og {

Queries::Queries(const h2og_state & state, int32_t n) : n(n), rings(state.n_stream) {
    for (int32_t s = 0; s < state.n_stream; ++s) {
        clear(s);
    }
    for (const Layer & layer : state.layers) {
        contexts.emplace_back(ggml_init({ 2*ggml_tensor_overhead(), nullptr, true }));
        ggml_tensor * t = ggml_new_tensor_3d(contexts.back().get(), GGML_TYPE_F32, int64_t(layer.n_head)*state.head_dim_k, n,
                                             state.n_stream);
        ggml_format_name(t, "h2og_queries_%d", layer.il);
        auto * type = layer.is_host ? ggml_backend_cpu_buffer_type() : ggml_backend_buffer_get_type(layer.k->buffer);
        buffers.emplace_back(ggml_backend_alloc_ctx_tensors_from_buft(contexts.back().get(), type));
        if (buffers.back() == nullptr) {
            fail(H2OG_NATIVE, "out of memory: %zu bytes for the last %d queries of layer %d", ggml_nbytes(t), n, layer.il);
        }
        tensors.push_back(t);
    }
}

void Queries::place(int32_t stream, const int32_t * pos, int32_t n_token, int32_t rope_shift, int64_t * slots) {
    Ring & ring = rings[stream];
    for (int32_t t = std::max(0, n_token - n); t < n_token; ++t) {
        *slots++ = ring.next;
        ring.rows[ring.next] = { pos[t], pos[t] - rope_shift };
        ring.next = (ring.next + 1) % n;
    }
}

void Queries::drop(int32_t stream, int32_t pos) {
    Ring & ring = rings[stream];
    for (Query & row : ring.rows) {
        if (row.pos == pos) {
            row.pos = -1;
        }
    }
    // The newest are gone first, as a rule: what comes in their place shall not push out older ones.
    for (int32_t i = 0; i < n && ring.rows[(ring.next + n - 1) % n].pos == -1; ++i) {
        ring.next = (ring.next + n - 1) % n;
    }
}

void Queries::clear(int32_t stream) {
    rings[stream].rows.assign(n, { -1, -1 });
    rings[stream].next = 0;
}

void Queries::copy(int32_t from, int32_t to) {
    rings[to] = rings[from];
    std::vector<char> data;
    for (ggml_tensor * t : tensors) {
        data.resize(t->nb[2]);
        ggml_backend_tensor_get(t, data.data(), from*t->nb[2], data.size());
        ggml_backend_tensor_set(t, data.data(), to  *t->nb[2], data.size());
    }
}

std::vector<int32_t> Queries::order(int32_t stream) const {
    std::vector<int32_t> rows;
    for (int32_t i = 0; i < n; ++i) {
        const int32_t row = (rings[stream].next + i) % n;
        if (rings[stream].rows[row].pos != -1) {
            rows.push_back(row);
        }
    }
    return rows;
}

std::vector<Query> Queries::held(int32_t stream) const {
    std::vector<Query> out;
    for (const int32_t row : order(stream)) {
        out.push_back(rings[stream].rows[row]);
    }
    return out;
}

void Queries::read(int32_t stream, int32_t layer, float * out) const {
    const ggml_tensor * t = tensors[layer];
    const size_t width = size_t(t->ne[0]);
    std::vector<float> data(width*n);
    ggml_backend_tensor_get(t, data.data(), stream*t->nb[2], t->nb[2]);
    for (const int32_t row : order(stream)) {
        out = std::copy_n(data.begin() + row*width, width, out);
    }
}

void Queries::restore(int32_t stream, const std::vector<Query> & held) {
    clear(stream);
    const int32_t n_kept = std::min(n, int32_t(held.size()));
    std::copy(held.end() - n_kept, held.end(), rings[stream].rows.begin());
    rings[stream].next = n_kept % n;
}

int64_t Queries::bytes() const {
    int64_t sum = 0;
    for (const ggml_tensor * t : tensors) {
        sum += int64_t(ggml_nbytes(t));
    }
    return sum;
}

void Queries::write(int32_t stream, int32_t layer, const float * rows, int32_t n_held) {
    const ggml_tensor * t = tensors[layer];
    const int32_t n_kept = std::min(n, n_held);
    ggml_backend_tensor_set(tensors[layer], rows + (n_held - n_kept)*t->ne[0], stream*t->nb[2], n_kept*t->nb[1]);
}

} // namespace h2og

void h2og_state::read_queries(int32_t s, int32_t layer, float * out) const {
    const Layer & l = layers[layer];
    const size_t width = size_t(l.n_head)*head_dim_k;
    const auto held = queries->held(s);
    const size_t n_empty = size_t(queries->n) - held.size();
    std::fill_n(out, n_empty*width, 0.0f);
    out += n_empty*width;
    queries->read(s, layer, out);

    hadamard_of(*cache, false).apply(out, held.size()*width);
    Turner turner(pairs_of(l.il));
    for (const Query & query : held) {
        // A key of that position is rotated to this one now.
        const int32_t by = query.pos - streams[s].rope_shift - query.rope_pos;
        for (int32_t h = 0; h < l.n_head; ++h, out += head_dim_k) {
            turner.turn(out, by);
        }
    }
}

std::vector<Pair> h2og_state::pairs_of(int32_t il) const {
    const auto & hparams = ctx->get_model().hparams;
    return h2og::pairs_of(first->rotations[il], first_rotated(first->rotations[il], head_dim_k, hparams.n_lora_kv > 0));
}
