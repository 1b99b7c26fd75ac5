// The queries of the newest tokens of every sequence, as the attention saw them: a ring of rows per stream and layer.
#pragma once

#include "ggml-cpp.h"
#include "ggml.h"

#include <cstdint>
#include <vector>

struct h2og_state;

namespace h2og {

struct Query { int32_t pos, rope_pos; };  // position in the sequence, -1 empty; the position it is rotated to

class Queries {
public:
    // n rows for each stream and layer, where the layer's keys are; throws if there is no memory for them.
    Queries(const h2og_state & state, int32_t n);

    // float32 [n_head*head_dim_k, n, n_stream]
    ggml_tensor * tensor(int32_t layer) const { return tensors[layer]; }

    // Chooses the rows that the newest of these tokens of a stream are written to: slots[min(n_token, n)].
    void place(int32_t stream, const int32_t * pos, int32_t n_token, int32_t rope_shift, int64_t * slots);

    void drop (int32_t stream, int32_t pos);  // the token at this position is gone
    void clear(int32_t stream);
    void copy (int32_t from, int32_t to);

    // What a stream has recorded, oldest first, and the rows of a layer in that order: float32 out[held][n_head][head_dim_k].
    std::vector<Query> held(int32_t stream) const;
    void read(int32_t stream, int32_t layer, float * out) const;

    // The other way: as many as there is room for, the newest.
    void restore(int32_t stream, const std::vector<Query> & held);
    void write(int32_t stream, int32_t layer, const float * rows, int32_t n_held);

    int64_t bytes() const;

    const int32_t n;

private:
    struct Ring {
        std::vector<Query> rows;
        int32_t next = 0;   // the row that is written next, the oldest of a full ring
    };

    std::vector<int32_t> order(int32_t stream) const;  // rows that hold something, oldest first

    std::vector<Ring>                    rings;  // [n_stream]
    std::vector<ggml_tensor *>           tensors;  // [n_layer]
    std::vector<ggml_context_ptr>        contexts;
    std::vector<ggml_backend_buffer_ptr> buffers;
};

} // namespace h2og
