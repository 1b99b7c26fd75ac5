// What every graph built while attached is given anew each time it is computed: query weights, fading, where queries are
// recorded, and renumbered positions.
#pragma once

#include "attention.h"
#include "graph-recall.h"
#include "state.h"

#include "llama-graph.h"

#include <memory>
#include <vector>

namespace h2og {

// What a custom node needs besides its source tensors.  Owned by the graph's input object.
struct Node {
    Attention shape;                        // sizes, types and scales; pointers are filled in when it is computed
    std::unique_ptr<FusedAttention> fused;  // nullptr: reference
    float * scores = nullptr;               // of the first stream of the graph; nullptr: none wanted
    ggml_tensor * queries = nullptr;        // recorded queries; nullptr: none wanted
    int32_t stream = 0;                     // the first of the graph
    const std::vector<int64_t> * slots = nullptr;  // of the input
    std::vector<float> log_sums;            // of the outputs, where a recall joins them
    const float * elsewhere = nullptr;      // likewise what it finds
};

class Input : public llm_graph_input_i {
public:
    Input(h2og_state & state, llm_graph_result & res, const llama_ubatch & ubatch) :
        state(state), res(res), version(state.version), n_tokens(ubatch.n_tokens) {}

    void set_input(const llama_ubatch * ubatch) override;

    bool can_reuse(const llm_graph_params & params) override {
        return version == state.version && n_tokens == params.ubatch.n_tokens && recalls.empty() && !state.is_recalling();
    }

    h2og_state & state;
    llm_graph_result & res;
    const int32_t  version;
    const uint32_t n_tokens;

    ggml_tensor * weights = nullptr;  // float32 [n_query, n_stream]
    ggml_tensor * fade    = nullptr;  // float32 [n_stream]
    std::vector<int64_t> slots;       // [n_stream][n] rows that the newest n queries are recorded in
    ggml_tensor * slots_in = nullptr; // int64 [n, n_stream], the same for llama.cpp's operators
    std::vector<std::unique_ptr<Node>> nodes;
    std::vector<std::unique_ptr<RecallNode>> recalls;

private:
    void set_weights(const llama_ubatch & ubatch);
    void set_slots(const llama_ubatch & ubatch);
    void shift_positions(const llama_ubatch & ubatch);
};

} // namespace h2og
