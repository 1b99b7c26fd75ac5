// Attention of one layer on plain memory, with the attention mass of every entry as a by-product.
//
//   p[t][h][c] = softmax over c of softcap(scale * q[t][h] . k[c][h/G]) + mask[t][c], with the head's sink in the denominator, and
//                what the query attends to elsewhere
//   out[t][h]  = sum over c of p[t][h][c] * v[c][h/G]
//   scores[h/G][c] = fade * scores[h/G][c] + sum over t and the G query heads of weight[t] * p[t][h][c]
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace h2og {

struct Attention {
    int32_t head_dim_k, head_dim_v;
    int32_t n_head, n_head_kv;
    int32_t n_query;    // per stream
    int32_t n_cells;    // attended: the cache's cells rounded down to what is in use
    int32_t n_stream;

    // Strides in bytes.
    const char * q;     // float32 [n_stream][n_head][n_query][head_dim_k]
    size_t q_query, q_head, q_stream;
    const char * k;     // type_k [n_stream][n_cells][n_head_kv][head_dim_k]
    size_t k_cell, k_head, k_stream;
    const char * v;     // type_v [n_stream][n_cells][n_head_kv][head_dim_v]; with v_element != 0 each element on its own
    size_t v_cell, v_head, v_stream;
    size_t v_element;   // 0: the elements of a row lie side by side
    ggml_type type_k, type_v;
    const char * mask;  // float16 or float32 [n_stream][n_query][n_cells]; nullptr: all visible
    size_t mask_query, mask_stream;
    ggml_type type_mask;
    const float * sinks;    // [n_head] or nullptr
    const float * elsewhere;  // [n_stream][n_query][n_head] log of the sum of exp(logit) over other entries; nullptr: there are none
    float scale, softcap;   // softcap 0: none

    float * out;            // [n_stream][n_query][n_head][head_dim_v]
    float * log_sums;       // [n_stream][n_query][n_head] log of the softmax's denominator; nullptr: not wanted

    float * scores;         // [n_stream][n_head_kv][n_cells] with the strides below; nullptr: none wanted
    size_t scores_head, scores_stream;  // in floats
    const float * weights;  // [n_stream][n_query]
    const float * fade;     // [n_stream]
};

// Textbook loops in double precision, on one thread.
void attention_reference(const Attention & a);

struct Kernel;
struct Plan;

// The kernels this CPU can run, the fastest first.
std::vector<const Kernel *> usable_kernels();

// The same, fast, in two steps with a barrier between them: after one start(), each of n_thread threads calls attend, then
// combine.  A thread begins with its own share of the work and then takes what others have not begun.  The result does not
// depend on how many threads there are, nor on which of them does what.
class FusedAttention {
public:
    explicit FusedAttention(const Attention & a);
    FusedAttention(const Attention & a, const Kernel & kernel);
    ~FusedAttention();

    size_t workspace_floats() const;

    void start();
    void attend (const Attention & a, float * workspace, int32_t i_thread, int32_t n_thread);
    void combine(const Attention & a, const float * workspace, int32_t i_thread, int32_t n_thread);

private:
    struct Work;

    const Kernel & kernel;
    std::unique_ptr<const Plan> plan;
    std::unique_ptr<Work> work;
};

} // namespace h2og
