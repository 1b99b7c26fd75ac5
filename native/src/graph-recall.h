// The nodes of a layer's recalls, around those of its attention.
#pragma once

#include "recall.h"

#include <memory>
#include <vector>

struct ggml_tensor;
struct llm_graph_context;

namespace h2og {

// What the nodes of one layer need besides their source tensors.  Owned by the graph's input object.
struct RecallNode {
    struct Sequence { Recall & recall; int32_t i_stream; };  // of those in the graph

    std::vector<Sequence> sequences;
    int32_t  layer;
    float    scale, softcap;
    bool     is_exact;                 // whether queries of any attend to what stays evicted

    // [n_stream][n_query][n_head], of exact queries: the log of their sum over the attic, else -inf; and of attention's denominators.
    std::vector<float> elsewhere;
    const float * log_sums = nullptr;
};

// Adds nodes for the sequences of the graph that recall, the first of all being `stream`; nullptr: none does.  q: the layer's queries,
// float32 [head_dim, n_query, n_head, n_stream].  may_join: whether build_join() can follow.
std::unique_ptr<RecallNode> build_recall(const llm_graph_context & g, h2og_state & state, int32_t layer, int32_t stream, ggml_tensor * q,
                                         ggml_tensor * sinks, float scale, float softcap, bool may_join);

// Adds a node that completes attention's outputs, where queries are exact.
ggml_tensor * build_join(const llm_graph_context & g, RecallNode & node, ggml_tensor * out, const float * log_sums);

} // namespace h2og
