// The attention node of a layer inside llama.cpp's graph: ours (fused or reference), or llama.cpp's own watched for scores.
#include "graph-input.h"
#include "h2og-hooks.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>

using namespace h2og;

namespace {

Input & input_of(const llm_graph_context & graph, h2og_state & state) {
    for (auto & input : graph.res->inputs) {
        auto * in = dynamic_cast<Input *>(input.get());
        if (in != nullptr && &in->state == &state) {
            return *in;
        }
    }
    return *static_cast<Input *>(graph.res->add_input(std::make_unique<Input>(state, *graph.res, graph.ubatch)));
}

void want_weights(Input & in, const llm_graph_context & graph, int64_t n_query, int64_t n_stream) {
    if (in.weights == nullptr) {
        in.weights = ggml_new_tensor_2d(graph.ctx0, GGML_TYPE_F32, n_query, n_stream);
        in.fade    = ggml_new_tensor_1d(graph.ctx0, GGML_TYPE_F32, n_stream);
        ggml_set_input(in.weights);
        ggml_set_input(in.fade);
    }
}

// The layer whose cache k is a view of, and its group, or nullptr and the first group: a window layer, or attention without a
// cache.
std::pair<h2og_state *, Layer *> layer_of(h2og_state & first, const ggml_tensor * k) {
    const ggml_tensor * storage = k->view_src != nullptr ? k->view_src : k;
    for (h2og_state * group : first.groups) {
        for (Layer & layer : group->layers) {
            if (layer.k == storage) {
                return { group, &layer };
            }
        }
    }
    return { &first, nullptr };
}

// Sources of the custom nodes, in this order; those that are absent are left out.
enum { SRC_Q, SRC_K, SRC_V, SRC_WEIGHTS, SRC_FADE, SRC_MASK, SRC_SINKS };

// Sizes, types and strides of permuted tensors: q [head_dim_k, n_query, n_head, n_stream], k [head_dim_k, n_cells, n_head_kv, n_stream],
// v likewise, or transposed [n_cells, head_dim_v, n_head_kv, n_stream]; mask: nullptr where all is visible.
Attention shape_of(const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * v, bool is_transposed, const ggml_tensor * mask) {
    Attention a{};
    a.head_dim_k = int32_t(k->ne[0]);
    a.head_dim_v = int32_t(v->ne[is_transposed ? 1 : 0]);
    a.n_head     = int32_t(q->ne[2]);
    a.n_head_kv  = int32_t(k->ne[2]);
    a.n_query    = int32_t(q->ne[1]);
    a.n_cells    = int32_t(k->ne[1]);
    a.n_stream   = int32_t(q->ne[3]);
    a.q_query = q->nb[1]; a.q_head = q->nb[2]; a.q_stream = q->nb[3];
    a.k_cell  = k->nb[1]; a.k_head = k->nb[2]; a.k_stream = k->nb[3];
    a.v_cell  = v->nb[is_transposed ? 0 : 1];
    a.v_head  = v->nb[2]; a.v_stream = v->nb[3];
    a.v_element = is_transposed ? v->nb[1] : 0;
    a.type_k = k->type;
    a.type_v = v->type;
    if (mask != nullptr) {
        a.type_mask = mask->type;
        a.mask_query = mask->nb[1]; a.mask_stream = mask->nb[3];
    }
    return a;
}

// The sources of a node lie behind a workspace in the second of the two fused nodes.
Attention bind(const Node & node, ggml_tensor * const * src) {
    Attention a = node.shape;
    const auto bytes = [](const ggml_tensor * t) { return static_cast<const char *>(t->data); };
    a.q = bytes(src[SRC_Q]);
    a.k = bytes(src[SRC_K]);
    a.v = bytes(src[SRC_V]);
    a.weights = static_cast<const float *>(src[SRC_WEIGHTS]->data);
    a.fade    = static_cast<const float *>(src[SRC_FADE]->data);
    a.mask  = a.mask_query != 0 ? bytes(src[SRC_MASK]) : nullptr;
    a.sinks = src[SRC_SINKS] != src[SRC_FADE] ? static_cast<const float *>(src[SRC_SINKS]->data) : nullptr;
    a.scores = node.scores;
    a.elsewhere = node.elsewhere;
    return a;
}

// Each thread copies some of the queries that are recorded.
void record(const Node & node, const Attention & a, int ith, int nth) {
    if (node.queries == nullptr) {
        return;
    }
    const ggml_tensor & rows = *node.queries;
    const std::vector<int64_t> & slots = *node.slots;
    const size_t n = slots.size()/a.n_stream;
    for (size_t i = ith; i < slots.size(); i += nth) {
        const size_t s = i/n, t = a.n_query - n + i % n;
        char * row = static_cast<char *>(rows.data) + (node.stream + s)*rows.nb[2] + slots[i]*rows.nb[1];
        for (int32_t h = 0; h < a.n_head; ++h) {
            const size_t bytes = a.head_dim_k*sizeof(float);
            memcpy(row + h*bytes, a.q + s*a.q_stream + h*a.q_head + t*a.q_query, bytes);
        }
    }
}

void compute_attend(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const Node & node = *static_cast<const Node *>(userdata);
    const Attention a = bind(node, dst->src);
    node.fused->attend(a, static_cast<float *>(dst->data), ith, nth);
    record(node, a, ith, nth);
}

void compute_combine(ggml_tensor * dst, int ith, int nth, void * userdata) {
    Node & node = *static_cast<Node *>(userdata);
    Attention a = bind(node, dst->src + 1);
    a.out = static_cast<float *>(dst->data);
    a.log_sums = node.log_sums.empty() ? nullptr : node.log_sums.data();
    node.fused->combine(a, static_cast<const float *>(dst->src[0]->data), ith, nth);
}

void compute_reference(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith == 0) {
        Node & node = *static_cast<Node *>(userdata);
        Attention a = bind(node, dst->src);
        a.out = static_cast<float *>(dst->data);
        a.log_sums = node.log_sums.empty() ? nullptr : node.log_sums.data();
        attention_reference(a);
        record(node, a, 0, 1);
    }
}

// Adds nodes that compute the scores from llama.cpp's operators.  q and k are permuted to [head_dim, n, n_head, n_stream].
void watch(const llm_graph_context & g, Input & in, const Layer & layer, int32_t stream, ggml_tensor * q, ggml_tensor * k,
           ggml_tensor * mask, ggml_tensor * sinks, float scale, float softcap) {
    ggml_context * ctx = g.ctx0;
    const int64_t n_kv = k->ne[1], n_query = q->ne[1], n_head = q->ne[2], n_head_kv = k->ne[2], n_stream = k->ne[3];

    ggml_tensor * p = ggml_mul_mat(ctx, k, q);
    ggml_prec_set_acc(p, GGML_PREC_F32);
    if (softcap != 0.0f) {
        p = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, p, scale/softcap)), softcap);
        scale = 1.0f;
    }
    p = ggml_soft_max_ext(ctx, p, mask, scale, 0.0f);
    ggml_soft_max_add_sinks(p, sinks);
    p = ggml_mul(ctx, p, ggml_reshape_4d(ctx, in.weights, 1, n_query, 1, n_stream));
    // Sum over queries, then over the query heads of a KV head.
    p = ggml_sum_rows(ctx, ggml_cont(ctx, ggml_permute(ctx, p, 1, 0, 2, 3)));                     // [1, n_kv, n_head, n_stream]
    p = ggml_reshape_4d(ctx, p, n_kv, n_head/n_head_kv, n_head_kv, n_stream);
    p = ggml_sum_rows(ctx, ggml_cont(ctx, ggml_permute(ctx, p, 1, 0, 2, 3)));                     // [1, n_kv, n_head_kv, n_stream]
    p = ggml_reshape_3d(ctx, p, n_kv, n_head_kv, n_stream);

    ggml_tensor * t = layer.scores;
    ggml_tensor * old = ggml_view_3d(ctx, t, n_kv, n_head_kv, n_stream, t->nb[1], t->nb[2], stream*t->nb[2]);
    ggml_tensor * sum = ggml_add(ctx, ggml_mul(ctx, old, ggml_reshape_3d(ctx, in.fade, 1, 1, n_stream)), p);
    ggml_build_forward_expand(g.gf, ggml_cpy(ctx, sum, old));
}

// Adds nodes that record queries with llama.cpp's operators.
void record(const llm_graph_context & g, Input & in, ggml_tensor * rows, int32_t stream, ggml_tensor * q) {
    ggml_context * ctx = g.ctx0;
    const int64_t n_query = q->ne[1], n_head = q->ne[2], n_stream = q->ne[3], n = std::min(n_query, rows->ne[1]);
    if (in.slots_in == nullptr) {
        in.slots_in = ggml_new_tensor_2d(ctx, GGML_TYPE_I64, n, n_stream);
        ggml_set_input(in.slots_in);
    }
    ggml_tensor * newest = ggml_view_4d(ctx, q, q->ne[0], n_head, n, n_stream, q->nb[2], q->nb[1], q->nb[3],
                                        (n_query - n)*q->nb[1]);
    newest = ggml_cont_3d(ctx, newest, rows->ne[0], n, n_stream);
    rows = ggml_view_3d(ctx, rows, rows->ne[0], rows->ne[1], n_stream, rows->nb[1], rows->nb[2], stream*rows->nb[2]);
    ggml_build_forward_expand(g.gf, ggml_set_rows(ctx, rows, newest, in.slots_in));
}

} // namespace

ggml_tensor * h2og_build_attention(
        const llm_graph_context & g,
        ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla,
        float kq_scale, int il) {
    h2og_state & first = *g.cparams.h2og;
    const auto [group, layer] = layer_of(first, k);
    h2og_state & state = *group;
    Input & in = input_of(g, state);
    first.rotations[il] = find_rotation(q);
    if (layer == nullptr || kq_b != nullptr) {
        return nullptr;
    }
    ggml_context * ctx = g.ctx0;
    const bool v_trans = v->nb[1] > v->nb[2];
    const int64_t n_stream = k->ne[3];
    const int64_t n_query  = q->ne[2]/n_stream;
    const int32_t stream   = int32_t(k->view_offs/k->nb[3]);
    want_weights(in, g, n_query, n_stream);

    q = ggml_view_4d(ctx, q, q->ne[0], q->ne[1], n_query, n_stream, q->nb[1], q->nb[2], q->nb[2]*n_query, 0);
    q = ggml_permute(ctx, q, 0, 2, 1, 3);  // [head_dim_k, n_query, n_head, n_stream]
    k = ggml_permute(ctx, k, 0, 2, 1, 3);  // [head_dim_k, n_cells, n_head_kv, n_stream]
    v = ggml_permute(ctx, v, 0, 2, 1, 3);  // [head_dim_v, n_cells, n_head_kv, n_stream], or [n_cells, head_dim_v, ...]
    float softcap = g.hparams.attn_soft_cap ? g.hparams.f_attn_logit_softcapping : 0.0f;
    if (g.arch == LLM_ARCH_GROK) {  // which llama.cpp scales and caps by rules of its own
        kq_scale = g.hparams.f_attn_out_scale;
        softcap  = g.hparams.f_attn_logit_softcapping;
    }

    const bool is_fused = state.params.attention == H2OG_ATTENTION_FUSED ||
        (state.params.attention == H2OG_ATTENTION_AUTO && layer->is_host);
    const bool is_ours = is_fused || state.params.attention == H2OG_ATTENTION_REFERENCE;

    ggml_tensor * queries = nullptr;
    RecallNode  * recalls = nullptr;
    if (layer->il == il) {  // and no other layer that uses its cache
        layer->scale   = kq_scale;
        layer->softcap = softcap;
        layer->sinks   = sinks;
        auto node = build_recall(g, state, int32_t(layer - state.layers.data()), stream, q, sinks, kq_scale, softcap, is_ours);
        if (node != nullptr) {
            in.recalls.push_back(std::move(node));
            recalls = in.recalls.back().get();
        }
        queries = state.queries != nullptr ? state.queries->tensor(int32_t(layer - state.layers.data())) : nullptr;
    }

    if (!is_ours) {
        if (state.params.is_scored) {
            watch(g, in, *layer, stream, q, k, kq_mask, sinks, kq_scale, softcap);
        }
        if (queries != nullptr) {
            record(g, in, queries, stream, q);
        }
        return nullptr;
    }

    auto node = std::make_unique<Node>();
    Attention & a = node->shape;
    a = shape_of(q, k, v, v_trans, kq_mask);
    a.scale = kq_scale;
    a.softcap = softcap;
    if (state.params.is_scored) {
        node->scores = static_cast<float *>(layer->scores->data) + stream*(layer->scores->nb[2]/sizeof(float));
    }
    node->queries = queries;
    node->stream  = stream;
    node->slots   = &in.slots;
    a.scores = node->scores;
    a.scores_head   = layer->scores->nb[1]/sizeof(float);
    a.scores_stream = layer->scores->nb[2]/sizeof(float);

    ggml_tensor * src[] = { nullptr, q, k, v, in.weights, in.fade, kq_mask != nullptr ? kq_mask : in.fade,
                            sinks != nullptr ? sinks : in.fade };
    const int n_src = int(std::size(src));
    ggml_tensor * cur;
    if (is_fused) {
        node->fused = std::make_unique<FusedAttention>(a);
        src[0] = ggml_custom_4d(ctx, GGML_TYPE_F32, int64_t(node->fused->workspace_floats()), 1, 1, 1, src + 1, n_src - 1,
                                compute_attend, GGML_N_TASKS_MAX, node.get());
        cur = ggml_custom_4d(ctx, GGML_TYPE_F32, a.head_dim_v, a.n_head, a.n_query, a.n_stream, src, n_src,
                             compute_combine, GGML_N_TASKS_MAX, node.get());
    } else {
        cur = ggml_custom_4d(ctx, GGML_TYPE_F32, a.head_dim_v, a.n_head, a.n_query, a.n_stream, src + 1, n_src - 1,
                             compute_reference, GGML_N_TASKS_MAX, node.get());
    }
    if (recalls != nullptr && recalls->is_exact) {
        node->log_sums.resize(size_t(a.n_head)*a.n_query*a.n_stream);
        node->elsewhere = recalls->elsewhere.data();
        cur = build_join(g, *recalls, cur, node->log_sums.data());
    }
    in.nodes.push_back(std::move(node));

    if (v_mla != nullptr) {  // MLA: back from the latent space to the heads
        cur = ggml_permute(ctx, cur, 0, 2, 1, 3);
        cur = ggml_mul_mat(ctx, v_mla, cur);
        cur = ggml_cont(ctx, ggml_permute(ctx, cur, 0, 2, 1, 3));
    }
    cur = ggml_reshape_2d(ctx, cur, cur->ne[0]*cur->ne[1], cur->ne[2]*cur->ne[3]);
    ggml_build_forward_expand(g.gf, cur);
    return cur;
}
