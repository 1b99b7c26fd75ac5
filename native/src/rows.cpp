#include "rows.h"

#include "access.h"
#include "error.h"
#include "state.h"

#include "ggml-alloc.h"
#include "ggml-cpp.h"

#include <cstring>

namespace h2og {

namespace {

size_t offset_of(const RowLayout & rows, int32_t stream, int32_t head, int32_t cell) {
    return stream*rows.tensor->nb[2] + cell*rows.tensor->nb[1] + ggml_row_size(rows.tensor->type, int64_t(head)*rows.head_dim);
}

// Of an element of a transposed row.
size_t offset_of(const RowLayout & rows, int32_t stream, int32_t head, int32_t cell, int64_t d) {
    const ggml_tensor * t = rows.tensor;
    return stream*t->nb[2] + ((int64_t(head)*rows.head_dim + d)*t->ne[1] + cell)*ggml_type_size(t->type);
}

} // namespace

void move_rows_host(const RowLayout & rows, int32_t stream, const std::vector<Move> & moves) {
    char * data = static_cast<char *>(rows.tensor->data);
    if (!rows.is_transposed) {
        const size_t bytes = ggml_row_size(rows.tensor->type, rows.head_dim);
        for (const Move & m : moves) {
            memcpy(data + offset_of(rows, stream, m.head, m.to), data + offset_of(rows, stream, m.head, m.from), bytes);
        }
        return;
    }
    const size_t element = ggml_type_size(rows.tensor->type);
    for (const Move & m : moves) {
        for (int64_t d = 0; d < rows.head_dim; ++d) {
            memcpy(data + offset_of(rows, stream, m.head, m.to, d), data + offset_of(rows, stream, m.head, m.from, d), element);
        }
    }
}

namespace {

// For rows whose size no graph can move: the stream travels to the host and back.
void move_rows_through_host(const RowLayout & rows, int32_t stream, const std::vector<Move> & moves) {
    const ggml_tensor * t = rows.tensor;
    std::vector<char> data(t->nb[2]);
    ggml_backend_tensor_get(t, data.data(), stream*t->nb[2], data.size());
    const size_t bytes = ggml_row_size(t->type, rows.head_dim);
    for (const Move & m : moves) {
        memcpy(data.data() + offset_of(rows, 0, m.head, m.to), data.data() + offset_of(rows, 0, m.head, m.from), bytes);
    }
    ggml_backend_tensor_set(rows.tensor, data.data(), stream*t->nb[2], data.size());
}

} // namespace

void move_rows_graph(const RowLayout & rows, int32_t stream, const std::vector<Move> & moves, ggml_backend_t backend) {
    if (moves.empty()) {
        return;
    }
    ggml_tensor * t = rows.tensor;
    const int64_t n_rows = int64_t(rows.n_head)*t->ne[1];
    const size_t  row_bytes = ggml_row_size(t->type, rows.head_dim);
    if (row_bytes % sizeof(float) != 0) {
        move_rows_through_host(rows, stream, moves);
        return;
    }

    ggml_context_ptr ctx { ggml_init({ 16*ggml_tensor_overhead() + ggml_graph_overhead_custom(16, false), nullptr, true }) };

    // Head h of cell c is row c*n_head + h, since heads lie side by side in a cell. Rows are seen as float32, whatever
    // their type, because backends copy that unchanged: they move bit for bit.
    ggml_tensor * all = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, int64_t(row_bytes/sizeof(float)), n_rows);
    all->buffer = t->buffer;
    all->data   = static_cast<char *>(t->data) + stream*t->nb[2];
    ggml_tensor * from = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, int64_t(moves.size()));
    ggml_tensor * to   = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, int64_t(moves.size()));
    ggml_set_input(from);
    ggml_set_input(to);

    ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 16, false);
    ggml_build_forward_expand(graph, ggml_set_rows(ctx.get(), all, ggml_get_rows(ctx.get(), all, from), to));

    ggml_gallocr_ptr alloc { ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)) };
    if (!ggml_gallocr_alloc_graph(alloc.get(), graph)) {
        fail(H2OG_NATIVE, "the device has no memory to move %zu rows", moves.size());
    }
    std::vector<int32_t> i_from(moves.size());
    std::vector<int64_t> i_to(moves.size());
    for (size_t i = 0; i < moves.size(); ++i) {
        i_from[i] = moves[i].from*rows.n_head + moves[i].head;
        i_to[i]   = int64_t(moves[i].to)*rows.n_head + moves[i].head;
    }
    ggml_backend_tensor_set(from, i_from.data(), 0, i_from.size()*sizeof(i_from[0]));
    ggml_backend_tensor_set(to,   i_to.data(),   0, i_to.size()*sizeof(i_to[0]));
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
        fail(H2OG_NATIVE, "the device failed to move %zu rows", moves.size());
    }
}

void get_row(const RowLayout & rows, int32_t stream, int32_t head, int32_t cell, char * out) {
    const ggml_tensor * t = rows.tensor;
    if (!rows.is_transposed) {
        ggml_backend_tensor_get(t, out, offset_of(rows, stream, head, cell), ggml_row_size(t->type, rows.head_dim));
        return;
    }
    const size_t element = ggml_type_size(t->type);
    for (int64_t d = 0; d < rows.head_dim; ++d) {
        ggml_backend_tensor_get(t, out + d*element, offset_of(rows, stream, head, cell, d), element);
    }
}

void set_row(const RowLayout & rows, int32_t stream, int32_t head, int32_t cell, const char * row) {
    ggml_tensor * t = rows.tensor;
    if (!rows.is_transposed) {
        ggml_backend_tensor_set(t, row, offset_of(rows, stream, head, cell), ggml_row_size(t->type, rows.head_dim));
        return;
    }
    const size_t element = ggml_type_size(t->type);
    for (int64_t d = 0; d < rows.head_dim; ++d) {
        ggml_backend_tensor_set(t, row + d*element, offset_of(rows, stream, head, cell, d), element);
    }
}

void convert_row(ggml_type from, const void * src, ggml_type to, void * dst, int64_t n) {
    if (from == to) {
        memcpy(dst, src, ggml_row_size(from, n));
    } else if (to == GGML_TYPE_F32) {
        ggml_get_type_traits(from)->to_float(src, static_cast<float *>(dst), n);
    } else {
        std::vector<float> row(n);
        convert_row(from, src, GGML_TYPE_F32, row.data(), n);
        ggml_get_type_traits(to)->from_float_ref(row.data(), dst, n);
    }
}

void read_rows(const RowLayout & rows, int32_t stream, const std::vector<int32_t> & cells, float * out) {
    const ggml_tensor * t = rows.tensor;
    const size_t n = cells.size();
    if (rows.is_transposed) {  // a cell's elements lie all over the layer
        std::vector<char> data(t->nb[2]);
        ggml_backend_tensor_get(t, data.data(), stream*t->nb[2], data.size());
        for (int32_t head = 0; head < rows.n_head; ++head) {
            for (int64_t d = 0; d < rows.head_dim; ++d) {
                for (size_t i = 0; i < n; ++i) {
                    convert_row(t->type, data.data() + offset_of(rows, 0, head, cells[i], d), GGML_TYPE_F32,
                                out + (head*n + i)*rows.head_dim + d, 1);
                }
            }
        }
        return;
    }
    std::vector<char> data;
    for (size_t begin = 0, end; begin < n; begin = end) {  // one transfer for neighbouring cells
        for (end = begin + 1; end < n && cells[end] == cells[end - 1] + 1; ++end) {}
        data.resize((end - begin)*t->nb[1]);
        ggml_backend_tensor_get(t, data.data(), stream*t->nb[2] + cells[begin]*t->nb[1], data.size());
        for (size_t i = begin; i < end; ++i) {
            for (int32_t head = 0; head < rows.n_head; ++head) {
                const size_t in_row = ggml_row_size(t->type, int64_t(head)*rows.head_dim);
                convert_row(t->type, data.data() + (i - begin)*t->nb[1] + in_row, GGML_TYPE_F32, out + (head*n + i)*rows.head_dim,
                            rows.head_dim);
            }
        }
    }
}

Uninterrupted::Uninterrupted(llama_context & ctx) : ctx(ctx), callback(h2og_access::abort_callback(ctx)) {
    ctx.set_abort_callback(nullptr, nullptr);
}

Uninterrupted::~Uninterrupted() { ctx.set_abort_callback(callback.first, callback.second); }

ggml_backend_t backend_of(const llama_context & ctx, const ggml_tensor * tensor) {
    auto * buft = ggml_backend_buffer_get_type(tensor->buffer);
    ggml_backend_t host = nullptr;
    for (const auto & backend : h2og_access::backends(ctx)) {
        if (ggml_backend_get_default_buffer_type(backend.get()) == buft) {
            return backend.get();
        }
        if (ggml_backend_dev_type(ggml_backend_get_device(backend.get())) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            host = backend.get();
        }
    }
    if (host == nullptr || !ggml_backend_buffer_is_host(tensor->buffer)) {
        fail(H2OG_UNSUPPORTED, "no backend of this context computes in buffer '%s'", ggml_backend_buffer_name(tensor->buffer));
    }
    return host;
}

void Hadamard::apply(float * data, size_t size) const {
    if (matrix == nullptr) {
        return;
    }
    std::vector<float> out(n);
    for (float * run = data; run < data + size; run += n) {
        for (int64_t i = 0; i < n; ++i) {
            float sum = 0.0f;
            for (int64_t j = 0; j < n; ++j) {
                sum += (*matrix)[i*n + j]*run[j];
            }
            out[i] = sum;
        }
        std::copy(out.begin(), out.end(), run);
    }
}

Hadamard hadamard_of(const llama_kv_cache & cache, bool is_v) {
    if (!(is_v ? h2og_access::rotates_v(cache) : h2og_access::rotates_k(cache))) {
        return {};
    }
    int64_t n = 64;
    while (!is_v && h2og_access::head_dim_k_all(cache) % (2*n) == 0) {
        n *= 2;
    }
    return { h2og_access::hadamard(cache, n), n };
}

} // namespace h2og

h2og::RowLayout h2og_state::rows_of(const h2og::Layer & layer, bool is_v) const {
    return { is_v ? layer.v : layer.k, n_head_kv, is_v ? head_dim_v : head_dim_k, is_v && h2og_access::v_trans(*cache) };
}

void h2og_state::read_heads(int32_t stream, int32_t layer, bool is_v, const std::vector<int32_t> & cells, float * out) const {
    const h2og::Layer & l = layers[layer];
    const int32_t head_dim = is_v ? head_dim_v : head_dim_k;
    const size_t n_row = size_t(n_head_kv)*cells.size();
    if (is_v && l.v == nullptr) {  // MLA: the first part of the keys
        std::vector<float> keys(n_row*head_dim_k);
        read_heads(stream, layer, false, cells, keys.data());
        for (size_t row = 0; row < n_row; ++row) {
            std::copy_n(keys.data() + row*head_dim_k, head_dim, out + row*head_dim);
        }
        return;
    }
    h2og::read_rows(rows_of(l, is_v), stream, cells, out);
    h2og::hadamard_of(*cache, is_v).apply(out, n_row*head_dim);
}
