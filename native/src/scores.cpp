// Scores of all layers in host memory, and their copies on the devices of layers that lie there.
#include "state.h"

#include "ggml-backend.h"

using namespace h2og;

void h2og_state::allocate_scores() {
    const size_t n = size_t(n_stream)*n_layer*n_head_kv*n_cells;
    ggml_backend_buffer_t host = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), n*sizeof(float));
    if (host == nullptr) {
        fail(H2OG_NATIVE, "out of memory: %zu bytes for the scores", n*sizeof(float));
    }
    score_buffers.emplace_back(host);
    ggml_backend_buffer_clear(host, 0);
    scores = static_cast<float *>(ggml_backend_buffer_get_base(host));

    for (int32_t j = 0; j < n_layer; ++j) {
        score_ctxs.emplace_back(ggml_init({ 2*ggml_tensor_overhead(), nullptr, true }));
        ggml_tensor * t = ggml_new_tensor_3d(score_ctxs.back().get(), GGML_TYPE_F32, n_cells, n_head_kv, n_stream);
        ggml_format_name(t, "h2og_scores_%d", layer_ids[j]);
        if (layers[j].is_host) {
            t->nb[2] = index(1, 0, 0)*sizeof(float);
            t->nb[3] = t->nb[2]*n_stream;
            if (ggml_backend_tensor_alloc(host, t, scores + index(0, j, 0)) != GGML_STATUS_SUCCESS) {
                fail(H2OG_NATIVE, "the backend refused the score tensor of layer %d", layer_ids[j]);
            }
        } else {
            auto * buft = ggml_backend_buffer_get_type(layers[j].k->buffer);
            ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(score_ctxs.back().get(), buft);
            if (buffer == nullptr) {
                fail(H2OG_NATIVE, "the device has no memory for the scores of layer %d", layer_ids[j]);
            }
            score_buffers.emplace_back(buffer);
            ggml_backend_buffer_clear(buffer, 0);
        }
        layers[j].scores = t;
    }
}

void h2og_state::synchronize() {
    require_context();
    ctx->synchronize();
    for (int32_t j = 0; j < n_layer; ++j) {
        if (layers[j].is_host) {
            continue;
        }
        const size_t bytes = size_t(n_head_kv)*n_cells*sizeof(float);
        for (int32_t s = 0; s < n_stream; ++s) {
            ggml_backend_tensor_get(layers[j].scores, scores + index(s, j, 0), s*layers[j].scores->nb[2], bytes);
        }
    }
}

void h2og_state::upload_scores(int32_t stream) {
    for (int32_t j = 0; j < n_layer; ++j) {
        if (!layers[j].is_host) {
            const size_t bytes = size_t(n_head_kv)*n_cells*sizeof(float);
            ggml_backend_tensor_set(layers[j].scores, scores + index(stream, j, 0), stream*layers[j].scores->nb[2], bytes);
        }
    }
}
