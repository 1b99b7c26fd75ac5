#include "graph-recall.h"

#include "state.h"

#include "llama-graph.h"

namespace h2og {

namespace {

LayerQueries queries_of(const RecallNode & node, const ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0], * sinks = dst->src[1];
    return { static_cast<const char *>(q->data) + node.i_stream*q->nb[3], q->nb[1], q->nb[2], int32_t(q->ne[1]), int32_t(q->ne[2]),
             node.scale, node.softcap, sinks != nullptr ? static_cast<const float *>(sinks->data) : nullptr };
}

void compute_look(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const RecallNode & node = *static_cast<const RecallNode *>(userdata);
    node.recall.look(node.layer, queries_of(node, dst), ith, nth);
}

void compute_search(ggml_tensor * dst, int, int, void * userdata) {
    const RecallNode & node = *static_cast<const RecallNode *>(userdata);
    node.recall.search(node.layer, queries_of(node, dst));
}

void compute_exchange(ggml_tensor *, int, int, void * userdata) {
    const RecallNode & node = *static_cast<const RecallNode *>(userdata);
    node.recall.exchange(node.layer);
}

void compute_attend(ggml_tensor * dst, int, int, void * userdata) {
    const RecallNode & node = *static_cast<const RecallNode *>(userdata);
    node.recall.attend(node.layer, queries_of(node, dst));
}

// In place: the first source is the output.
void compute_join(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const RecallNode & node = *static_cast<const RecallNode *>(userdata);
    const int32_t n_head = int32_t(dst->ne[1]), n_query = int32_t(dst->ne[2]);
    const size_t first = size_t(node.i_stream)*n_query*n_head;
    node.recall.join(n_query, n_head, static_cast<float *>(dst->data) + first*dst->ne[0], node.log_sums + first, ith, nth);
}

} // namespace

void build_recall(const llm_graph_context & g, h2og_state & state, int32_t layer, int32_t stream, ggml_tensor * q, ggml_tensor * sinks,
                  float scale, float softcap, bool joins, std::vector<std::unique_ptr<RecallNode>> & nodes) {
    for (int32_t i = 0; i < q->ne[3]; ++i) {
        Recall * recall = state.recalls[stream + i].get();
        if (recall == nullptr) {
            continue;
        }
        nodes.push_back(std::make_unique<RecallNode>(RecallNode{ *recall, layer, i, scale, softcap }));
        ggml_tensor * src[] = { q, sinks };
        const auto add = [&](ggml_custom_op_t compute) {
            ggml_build_forward_expand(g.gf, ggml_custom_4d(g.ctx0, GGML_TYPE_F32, 1, 1, 1, 1, src, sinks != nullptr ? 2 : 1, compute,
                                                           GGML_N_TASKS_MAX, nodes.back().get()));
        };
        add(compute_look);
        add(compute_search);
        add(compute_exchange);
        if (joins && recall->n_exact(1) > 0) {
            add(compute_attend);
        }
    }
}

ggml_tensor * build_join(const llm_graph_context & g, int32_t layer, ggml_tensor * out, const float * log_sums,
                         const std::vector<std::unique_ptr<RecallNode>> & nodes) {
    for (const auto & node : nodes) {
        if (node->layer == layer && node->recall.n_exact(1) > 0) {
            node->log_sums = log_sums;
            out = ggml_custom_inplace(g.ctx0, out, nullptr, 0, compute_join, GGML_N_TASKS_MAX, node.get());
        }
    }
    return out;
}

} // namespace h2og
