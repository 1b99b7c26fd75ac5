#include "graph-input.h"

#include "llama-batch.h"

#include <algorithm>
#include <cmath>

namespace h2og {

void Input::set_input(const llama_ubatch * ubatch) {
    for (const auto & node : nodes) {
        if (node->fused != nullptr) {
            node->fused->start();
        }
    }
    if (weights != nullptr && weights->buffer != nullptr) {
        set_weights(*ubatch);
    }
    if (weights != nullptr && state.queries != nullptr) {
        set_slots(*ubatch);
    }
    if (&state == state.first) {
        shift_positions(*ubatch);  // which all groups share
    }
}

void Input::set_weights(const llama_ubatch & ubatch) {
    // Within a ubatch the newer queries have faded less: weight w of query t counts w*decay^(n - 1 - t).
    const float decay = state.params.decay;
    const auto & batch_weights = state.first->batch_weights;
    const int64_t n = weights->ne[0], n_stream = weights->ne[1];
    std::vector<float> w(n*n_stream), f(n_stream, powf(decay, float(n)));
    for (int64_t s = 0; s < n_stream; ++s) {
        if (state.only_asks(ubatch.seq_id[s*n][0])) {
            f[s] = 1.0f;  // and weights of 0: it will be decoded again
            continue;
        }
        for (int64_t t = 0; t < n; ++t) {
            const int64_t i = s*n + t;
            const size_t in_batch = ubatch.data ? size_t(ubatch.data->batch_idxs[i]) : size_t(i);
            const float q = in_batch < batch_weights.size() ? batch_weights[in_batch] : 1.0f;
            w[i] = q*powf(decay, float(n - 1 - t));
        }
    }
    ggml_backend_tensor_set(weights, w.data(), 0, w.size()*sizeof(float));
    ggml_backend_tensor_set(fade,    f.data(), 0, f.size()*sizeof(float));
}

void Input::set_slots(const llama_ubatch & ubatch) {
    const int32_t n = int32_t(weights->ne[0]), n_stream = int32_t(weights->ne[1]);
    const int32_t n_slot = std::min(n, state.queries->n);
    slots.resize(size_t(n_stream)*n_slot);
    for (int32_t s = 0; s < n_stream; ++s) {
        const int32_t stream = ubatch.seq_id[s*n][0];
        state.queries->place(stream, ubatch.pos + s*n, n, state.streams[stream].rope_shift, slots.data() + s*n_slot);
    }
    if (slots_in != nullptr) {
        ggml_backend_tensor_set(slots_in, slots.data(), 0, slots.size()*sizeof(slots[0]));
    }
}

// llama.cpp has just written the sequence's positions; RoPE gets the renumbered ones.
void Input::shift_positions(const llama_ubatch & ubatch) {
    const bool is_shifted = std::any_of(state.streams.begin(), state.streams.end(),
                                        [](const Stream & s) { return s.rope_shift != 0; });
    if (!is_shifted || ubatch.pos == nullptr || !state.can_renumber) {
        return;
    }
    for (auto & input : res.inputs) {
        const auto * in = dynamic_cast<const llm_graph_input_pos *>(input.get());
        if (in == nullptr || in->pos == nullptr || in->pos->buffer == nullptr) {
            continue;
        }
        std::vector<int32_t> p(in->pos->ne[0]);
        ggml_backend_tensor_get(in->pos, p.data(), 0, p.size()*sizeof(int32_t));
        // M-RoPE has several sections of n_tokens each; the last of four is unused on text.
        const size_t n_section = p.size()/n_tokens;
        for (size_t k = 0; k < n_section; ++k) {
            for (uint32_t t = 0; t < n_tokens; ++t) {
                if (k < 3) {
                    p[k*n_tokens + t] -= state.streams[ubatch.seq_id[t][0]].rope_shift;
                }
            }
        }
        ggml_backend_tensor_set(in->pos, p.data(), 0, p.size()*sizeof(int32_t));
    }
}

} // namespace h2og
