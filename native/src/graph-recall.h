// The nodes of a layer's recall, before those of its attention.
#pragma once

#include "recall.h"

#include <memory>
#include <vector>

struct ggml_tensor;
struct llm_graph_context;

namespace h2og {

// What the nodes of one layer and sequence need besides their source tensors.  Owned by the graph's input object.
struct RecallNode {
    Recall & recall;
    int32_t  layer;
    int32_t  i_stream;   // of those in the graph
    float    scale, softcap;
    const float * log_sums = nullptr;  // of all streams' attention; set before the join is added
};

// Adds nodes for each sequence of the graph, the first of which is `stream`, that recalls.  q: the layer's queries, float32
// [head_dim, n_query, n_head, n_stream].  joins: whether build_join() follows.
void build_recall(const llm_graph_context & g, h2og_state & state, int32_t layer, int32_t stream, ggml_tensor * q, ggml_tensor * sinks,
                  float scale, float softcap, bool joins, std::vector<std::unique_ptr<RecallNode>> & nodes);

// Adds nodes behind attention that complete its outputs, where tokens are exact.  log_sums: the logs of its denominators.
ggml_tensor * build_join(const llm_graph_context & g, int32_t layer, ggml_tensor * out, const float * log_sums,
                         const std::vector<std::unique_ptr<RecallNode>> & nodes);

} // namespace h2og
