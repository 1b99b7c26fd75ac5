// K and V rows of single heads: moved bit for bit inside a cache, or read as float32.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>
#include <utility>
#include <vector>

struct llama_context;
class  llama_kv_cache;

namespace h2og {

struct Move { int32_t head, from, to; };  // cells

// How the rows of one layer lie in their tensor.
struct RowLayout {
    ggml_tensor * tensor;      // [n_embd, n_cells, n_stream]
    int32_t n_head, head_dim;
    bool    is_transposed;     // element (cell, d) at d*n_cells + cell: V without flash attention
};

// Copies rows inside one stream directly; the tensor must be in host memory.
void move_rows_host(const RowLayout & rows, int32_t stream, const std::vector<Move> & moves);

// The same through a graph on a backend that owns the tensor's buffer; not for transposed rows.
void move_rows_graph(const RowLayout & rows, int32_t stream, const std::vector<Move> & moves, ggml_backend_t backend);

// One row as it lies in the cache, ggml_row_size() bytes.
void get_row(const RowLayout & rows, int32_t stream, int32_t head, int32_t cell, char * out);
void set_row(const RowLayout & rows, int32_t stream, int32_t head, int32_t cell, const char * row);

// float32 out[n_head][cells.size()][head_dim]
void read_rows(const RowLayout & rows, int32_t stream, const std::vector<int32_t> & cells, float * out);

// What llama.cpp multiplies a cache's keys (or values) with before it stores them.
struct Hadamard {
    const std::vector<float> * matrix = nullptr;  // [n][n], symmetric and its own inverse; nullptr: they are stored as they are
    int64_t n = 0;

    // Multiplies each run of n floats: done twice, they are what they were.
    void apply(float * data, size_t size) const;
};
Hadamard hadamard_of(const llama_kv_cache & cache, bool is_v);

// n elements of one type as another has them.
void convert_row(ggml_type from, const void * src, ggml_type to, void * dst, int64_t n);

// While it lives, no graph of the context is aborted: one that changes the cache would leave half of it changed.
class Uninterrupted {
public:
    explicit Uninterrupted(llama_context & ctx);
    ~Uninterrupted();

    Uninterrupted(const Uninterrupted &) = delete;
    Uninterrupted & operator=(const Uninterrupted &) = delete;

private:
    llama_context & ctx;
    const std::pair<ggml_abort_callback, void *> callback;
};

// The backend of ctx that computes on this tensor's buffer.
ggml_backend_t backend_of(const llama_context & ctx, const ggml_tensor * tensor);

} // namespace h2og
