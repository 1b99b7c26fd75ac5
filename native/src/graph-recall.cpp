#include "graph-recall.h"

#include "state.h"

#include "llama-graph.h"

#include <limits>

namespace h2og {

namespace {

// Calls f(recall, its queries) for each sequence.
template <typename F>
void for_sequences(const ggml_tensor * dst, void * userdata, const F & f) {
    const RecallNode & node = *static_cast<const RecallNode *>(userdata);
    const ggml_tensor * q = dst->src[0], * sinks = dst->src[1];
    for (const auto & [recall, i_stream] : node.sequences) {
        const int32_t n_query = int32_t(q->ne[1]);
        f(recall, node.layer,
          LayerQueries{ static_cast<const char *>(q->data) + i_stream*q->nb[3], q->nb[1], q->nb[2], n_query, int32_t(q->ne[2]),
                        node.is_exact ? recall.n_exact(n_query) : 0, node.scale, node.softcap,
                        sinks != nullptr ? static_cast<const float *>(sinks->data) : nullptr });
    }
}

// The first row of a stream's exact queries, as [n_stream][n_query][n_head].
size_t first_exact(int32_t n_query, int32_t n_exact, int32_t n_head, int32_t i_stream) {
    return (size_t(i_stream)*n_query + n_query - n_exact)*n_head;
}

void compute_look(ggml_tensor * dst, int ith, int nth, void * userdata) {
    for_sequences(dst, userdata, [&](Recall & recall, int32_t layer, const LayerQueries & q) { recall.look(layer, q, ith, nth); });
}

void compute_search(ggml_tensor * dst, int, int, void * userdata) {
    for_sequences(dst, userdata, [](Recall & recall, int32_t layer, const LayerQueries & q) { recall.search(layer, q); });
}

void compute_exchange(ggml_tensor * dst, int, int, void * userdata) {
    for_sequences(dst, userdata, [](Recall & recall, int32_t layer, const LayerQueries &) { recall.exchange(layer); });
}

void compute_attend(ggml_tensor * dst, int, int, void * userdata) {
    RecallNode & node = *static_cast<RecallNode *>(userdata);
    auto sequence = node.sequences.begin();
    for_sequences(dst, userdata, [&](Recall & recall, int32_t layer, const LayerQueries & q) {
        recall.attend(layer, q, node.elsewhere.data() + first_exact(q.n_query, q.n_exact, q.n_head, (sequence++)->i_stream));
    });
}

// In place: [head_dim_v, n_head, n_query, n_stream].
void compute_join(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const RecallNode & node = *static_cast<const RecallNode *>(userdata);
    const int32_t n_head = int32_t(dst->ne[1]), n_query = int32_t(dst->ne[2]);
    for (const auto & [recall, i_stream] : node.sequences) {
        const int32_t n_exact = recall.n_exact(n_query);
        const size_t first = first_exact(n_query, n_exact, n_head, i_stream);
        recall.join(n_exact*n_head, static_cast<float *>(dst->data) + first*dst->ne[0], node.log_sums + first, ith, nth);
    }
}

} // namespace

std::unique_ptr<RecallNode> build_recall(const llm_graph_context & g, h2og_state & state, int32_t layer, int32_t stream, ggml_tensor * q,
                                         ggml_tensor * sinks, float scale, float softcap, bool may_join) {
    auto node = std::make_unique<RecallNode>(RecallNode{ {}, layer, scale, softcap, false, {}, nullptr });
    for (int32_t i = 0; i < q->ne[3]; ++i) {
        if (Recall * recall = state.recalls[stream + i].get()) {
            node->sequences.push_back({ *recall, i });
            node->is_exact |= may_join && recall->n_exact(1) > 0;
        }
    }
    if (node->sequences.empty()) {
        return nullptr;
    }
    ggml_tensor * src[] = { q, sinks };
    const auto add = [&](ggml_custom_op_t compute) {
        ggml_build_forward_expand(g.gf, ggml_custom_4d(g.ctx0, GGML_TYPE_F32, 1, 1, 1, 1, src, sinks != nullptr ? 2 : 1, compute,
                                                       GGML_N_TASKS_MAX, node.get()));
    };
    add(compute_look);
    add(compute_search);
    add(compute_exchange);
    if (node->is_exact) {
        node->elsewhere.assign(size_t(q->ne[1]*q->ne[2]*q->ne[3]), -std::numeric_limits<float>::infinity());
        add(compute_attend);
    }
    return node;
}

ggml_tensor * build_join(const llm_graph_context & g, RecallNode & node, ggml_tensor * out, const float * log_sums) {
    node.log_sums = log_sums;
    return ggml_custom_inplace(g.ctx0, out, nullptr, 0, compute_join, GGML_N_TASKS_MAX, &node);
}

} // namespace h2og
