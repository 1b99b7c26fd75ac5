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

} // namespace

void build_recall(const llm_graph_context & g, h2og_state & state, int32_t layer, int32_t stream, ggml_tensor * q, ggml_tensor * sinks,
                  float scale, float softcap, std::vector<std::unique_ptr<RecallNode>> & nodes) {
    for (int32_t i = 0; i < q->ne[3]; ++i) {
        Recall * recall = state.recalls[stream + i].get();
        if (recall == nullptr) {
            continue;
        }
        nodes.push_back(std::make_unique<RecallNode>(RecallNode{ *recall, layer, i, scale, softcap }));
        ggml_tensor * src[] = { q, sinks };
        for (const auto compute : { compute_look, compute_search, compute_exchange }) {
            ggml_build_forward_expand(g.gf, ggml_custom_4d(g.ctx0, GGML_TYPE_F32, 1, 1, 1, 1, src, sinks != nullptr ? 2 : 1, compute,
                                                           GGML_N_TASKS_MAX, nodes.back().get()));
        }
    }
}

} // namespace h2og
