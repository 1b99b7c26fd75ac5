// Rows move bit for bit, directly and through a graph, whatever their type and size.
#include "check.h"
#include "rows.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <random>

using namespace h2og;

namespace {

void run(ggml_backend_t backend, ggml_type type, int32_t head_dim) {
    const int32_t n_head = 3, n_cells = 40, n_stream = 2;
    ggml_context_ptr ctx { ggml_init({ 4*ggml_tensor_overhead(), nullptr, true }) };
    ggml_tensor * direct = ggml_new_tensor_3d(ctx.get(), type, int64_t(n_head)*head_dim, n_cells, n_stream);
    ggml_tensor * graph  = ggml_new_tensor_3d(ctx.get(), type, int64_t(n_head)*head_dim, n_cells, n_stream);
    ggml_backend_buffer_ptr buffer { ggml_backend_alloc_ctx_tensors(ctx.get(), backend) };
    CHECK(buffer != nullptr, "no buffer");

    std::mt19937 rng(1);
    std::vector<uint8_t> before(ggml_nbytes(direct));
    std::generate(before.begin(), before.end(), [&] { return uint8_t(rng()); });  // NaN patterns included
    ggml_backend_tensor_set(direct, before.data(), 0, before.size());
    ggml_backend_tensor_set(graph,  before.data(), 0, before.size());

    std::vector<Move> moves;
    for (int32_t head = 0; head < n_head; ++head) {
        for (int32_t i = 0; i < 8; ++i) {
            moves.push_back({ head, i*2 + head, 30 + i });
        }
    }
    move_rows_host ({ direct, n_head, head_dim, false }, 1, moves);
    move_rows_graph({ graph,  n_head, head_dim, false }, 1, moves, backend);

    std::vector<uint8_t> a(before.size()), b(before.size());
    ggml_backend_tensor_get(direct, a.data(), 0, a.size());
    ggml_backend_tensor_get(graph,  b.data(), 0, b.size());
    CHECK(a == b, "%s rows of %d differ between the two ways", ggml_type_name(type), head_dim);

    const size_t row = ggml_row_size(type, head_dim), cell = direct->nb[1], stream = direct->nb[2];
    std::vector<uint8_t> expected(before);
    for (const Move & m : moves) {
        std::copy_n(before.begin() + stream + m.from*cell + m.head*row, row, expected.begin() + stream + m.to*cell + m.head*row);
    }
    CHECK(a == expected, "%s rows of %d were not moved as asked", ggml_type_name(type), head_dim);
}

} // namespace

int main() {
    ggml_backend_load_all();
    ggml_backend_ptr backend { ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr) };
    CHECK(backend != nullptr, "no CPU backend");
    for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
                                  GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL }) {
        for (const int32_t head_dim : { 32, 64, 96, 128, 256 }) {
            run(backend.get(), type, head_dim);
        }
    }
    printf("rows move bit for bit\n");
    return 0;
}
