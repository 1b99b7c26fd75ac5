// The fused kernel against the reference: every cache type, head size, group size, mask, split and number of threads.
#include "attention-plan.h"
#include "check.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <thread>
#include <vector>

using namespace h2og;

namespace {

struct Case {
    ggml_type type_k, type_v;
    int32_t head_dim_k, head_dim_v, n_head, n_head_kv, n_query, n_cells, n_stream;
    float softcap;
    bool has_mask, has_sinks, is_v_transposed;
    int32_t n_thread;
};

std::mt19937 rng(1);

std::vector<float> gaussian(size_t n, float scale = 1.0f) {
    std::normal_distribution<float> d(0.0f, scale);
    std::vector<float> out(n);
    for (float & x : out) {
        x = d(rng);
    }
    return out;
}

std::vector<char> rows_of(ggml_type type, const std::vector<float> & x, int64_t row) {
    std::vector<char> out(ggml_row_size(type, row)*(x.size()/row));
    ggml_quantize_chunk(type, x.data(), out.data(), 0, int64_t(x.size())/row, row, nullptr);
    return out;
}

void compute(FusedAttention & fused, const Attention & a, int32_t n_thread) {
    std::vector<float> workspace(fused.workspace_floats(), NAN);
    fused.start();
    const auto on_all_threads = [&](const auto & step) {
        std::vector<std::thread> threads;
        for (int32_t i = 0; i < n_thread; ++i) {
            threads.emplace_back([&step, i] { step(i); });
        }
        for (std::thread & thread : threads) {
            thread.join();
        }
    };
    on_all_threads([&](int32_t i) { fused.attend(a, workspace.data(), i, n_thread); });
    on_all_threads([&](int32_t i) { fused.combine(a, workspace.data(), i, n_thread); });
}

void run(const Case & c, const Kernel & kernel) {
    const int64_t n_kv = int64_t(c.n_stream)*c.n_cells*c.n_head_kv;
    auto q = gaussian(size_t(c.n_stream)*c.n_head*c.n_query*c.head_dim_k, 2.0f);
    std::fill_n(q.begin(), c.head_dim_k, 0.0f);  // a query that nothing is alike
    const auto k = rows_of(c.type_k, gaussian(n_kv*c.head_dim_k), c.head_dim_k);
    const auto v_rows = gaussian(n_kv*c.head_dim_v);
    std::vector<char> v = rows_of(c.type_v, v_rows, c.head_dim_v);
    const size_t v_row = ggml_row_size(c.type_v, c.head_dim_v), element = ggml_type_size(c.type_v);
    if (c.is_v_transposed) {  // [stream][head][head_dim_v][n_cells]
        std::vector<char> t(v.size());
        for (int64_t s = 0; s < c.n_stream; ++s) {
            for (int64_t i = 0; i < c.n_cells; ++i) {
                for (int64_t h = 0; h < c.n_head_kv; ++h) {
                    for (int64_t d = 0; d < c.head_dim_v; ++d) {
                        const char * from = v.data() + ((s*c.n_cells + i)*c.n_head_kv + h)*v_row + d*element;
                        std::copy_n(from, element, t.data() + (((s*c.n_head_kv + h)*c.head_dim_v + d)*c.n_cells + i)*element);
                    }
                }
            }
        }
        v = t;
    }
    std::vector<ggml_fp16_t> mask(size_t(c.n_stream)*c.n_query*c.n_cells);
    std::bernoulli_distribution hidden(0.3);
    std::normal_distribution<float> bias(0.0f, 2.0f);
    for (int32_t s = 0; s < c.n_stream; ++s) {
        for (int32_t t = 0; t < c.n_query; ++t) {
            for (int32_t i = 0; i < c.n_cells; ++i) {
                // The second block of cells is hidden from all, and so is everything from the last query of several.
                const bool is_hidden = hidden(rng) || (i >= 64 && i < 128) || (c.n_query > 1 && t == c.n_query - 1);
                const float seen = s > 0 ? bias(rng) : 0.0f;  // a mask need not be one of zeros
                mask[(size_t(s)*c.n_query + t)*c.n_cells + i] = ggml_fp32_to_fp16(is_hidden ? -INFINITY : seen);
            }
        }
    }
    auto sinks = gaussian(c.n_head);
    auto weights = gaussian(size_t(c.n_stream)*c.n_query, 0.2f);
    for (float & w : weights) {
        w = fabsf(w);
    }
    weights[0] = 0.0f;
    std::vector<float> fade(c.n_stream, 0.9f);

    Attention a{};
    a.head_dim_k = c.head_dim_k; a.head_dim_v = c.head_dim_v;
    a.n_head = c.n_head; a.n_head_kv = c.n_head_kv;
    a.n_query = c.n_query; a.n_cells = c.n_cells; a.n_stream = c.n_stream;
    a.q = reinterpret_cast<const char *>(q.data());
    a.q_query = c.head_dim_k*sizeof(float); a.q_head = a.q_query*c.n_query; a.q_stream = a.q_head*c.n_head;
    a.k = k.data();
    a.k_head = ggml_row_size(c.type_k, c.head_dim_k); a.k_cell = a.k_head*c.n_head_kv; a.k_stream = a.k_cell*c.n_cells;
    a.v = v.data();
    if (c.is_v_transposed) {
        a.v_cell = element; a.v_element = element*c.n_cells; a.v_head = a.v_element*c.head_dim_v;
        a.v_stream = a.v_head*c.n_head_kv;
    } else {
        a.v_head = v_row; a.v_cell = a.v_head*c.n_head_kv; a.v_stream = a.v_cell*c.n_cells;
    }
    a.type_k = c.type_k; a.type_v = c.type_v;
    if (c.has_mask) {
        a.mask = reinterpret_cast<const char *>(mask.data());
        a.type_mask = GGML_TYPE_F16;
        a.mask_query = c.n_cells*sizeof(ggml_fp16_t); a.mask_stream = a.mask_query*c.n_query;
    }
    a.sinks = c.has_sinks ? sinks.data() : nullptr;
    a.scale = 1.0f/sqrtf(float(c.head_dim_k));
    a.softcap = c.softcap;
    a.weights = weights.data();
    a.fade = fade.data();
    a.scores_head = c.n_cells; a.scores_stream = size_t(c.n_cells)*c.n_head_kv;

    const size_t n_out = size_t(c.n_stream)*c.n_query*c.n_head*c.head_dim_v;
    const auto start = gaussian(size_t(c.n_stream)*c.n_head_kv*c.n_cells);
    std::vector<float> out_ref(n_out), out(n_out, NAN), scores_ref(start), scores(start);
    std::vector<float> logs_ref(n_out/c.head_dim_v), logs(logs_ref.size(), NAN);

    auto elsewhere = gaussian(logs_ref.size(), 3.0f);
    elsewhere[0] = -INFINITY;
    a.elsewhere = c.n_query % 2 == 1 ? elsewhere.data() : nullptr;
    a.out = out_ref.data(); a.scores = scores_ref.data(); a.log_sums = logs_ref.data();
    attention_reference(a);

    a.out = out.data(); a.scores = scores.data(); a.log_sums = logs.data();
    FusedAttention fused(a, kernel);
    compute(fused, a, c.n_thread);

    // Probabilities carry the rounding of a dot product of head_dim terms, |q||k|/sqrt(d)*2^-24*sqrt(d): a few 1e-6.
    const auto compare = [&](const std::vector<float> & x, const std::vector<float> & ref, const char * what) {
        for (size_t i = 0; i < x.size(); ++i) {
            CHECK(x[i] == ref[i] || std::fabs(x[i] - ref[i]) <= 2e-5f*(1.0f + std::fabs(ref[i])), "%s[%zu]: %g, reference %g; K %s V %s dk %d dv %d "
                  "heads %d/%d queries %d cells %d threads %d, %s", what, i, double(x[i]), double(ref[i]), ggml_type_name(c.type_k),
                  ggml_type_name(c.type_v), c.head_dim_k, c.head_dim_v, c.n_head, c.n_head_kv, c.n_query, c.n_cells, c.n_thread, kernel.name);
        }
    };
    compare(out, out_ref, "out");
    compare(scores, scores_ref, "scores");
    compare(logs, logs_ref, "log_sums");
    a.log_sums = nullptr;

    // On one thread scores are the same, bit for bit.
    std::vector<float> alone(start);
    a.scores = alone.data();
    FusedAttention single(a, kernel);
    compute(single, a, 1);
    CHECK(alone == scores, "the scores depend on the number of threads");

    // Without scores, on one thread and computed again, the output is the same, bit for bit.
    std::vector<float> plain(n_out, NAN);
    a.out = plain.data(); a.scores = nullptr;
    FusedAttention bare(a, kernel);
    compute(bare, a, 1);
    compute(bare, a, 1);
    CHECK(plain == out, "the output depends on whether scores are wanted, or on the number of threads");
}

} // namespace

int main() {
    const ggml_type types[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
                                GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL };
    int n = 0;
    const auto go = [&](const Case & c) {
        for (const Kernel * kernel : usable_kernels()) {
            run(c, *kernel);
            ++n;
        }
    };
    for (const ggml_type type : types) {
        for (const int32_t n_query : { 1, 3, 40 }) {
            go({ type, type, 64, 64, 6, 2, n_query, 300, 1, 0.0f, true, false, false, 2 });
        }
        go({ type, GGML_TYPE_F16, 128, 64, 4, 4, 9, 256, 1, 0.0f, true, true, false, 3 });
        for (const int32_t group : { 1, 2, 4, 7, 8 }) {
            go({ type, type, 96, 32, 2*group, 2, 1, 275, 1, 0.0f, true, false, false, 2 });
            go({ type, type, 32, 160, group, 1, 1, 17, 2, 0.0f, false, true, false, 1 });
        }
        go({ type, type, 320, 64, 4, 2, 1, 300, 1, 0.0f, true, false, false, 2 });  // few cells of large rows at a time
    }
    for (const int32_t head_dim : { 32, 64, 80, 96, 128, 192, 256, 576 }) {
        for (const int32_t n_query : { 1, 33 }) {
            go({ GGML_TYPE_F16, GGML_TYPE_F16, head_dim, std::min(head_dim, 512), 8, 1, n_query, 129, 1, 0.0f, true, false, false, 2 });
        }
    }
    for (const int32_t n_query : { 1, 8, 9, 65 }) {
        for (const int32_t n_cells : { 1, 63, 64, 65, 256, 257, 1024 }) {
            go({ GGML_TYPE_F16, GGML_TYPE_F16, 64, 64, 9, 3, n_query, n_cells, 1, 0.0f, true, false, false, 2 });
            go({ GGML_TYPE_F16, GGML_TYPE_F16, 64, 64, 2, 2, n_query, n_cells, 3, 0.0f, true, true, false, 5 });
        }
        go({ GGML_TYPE_F16, GGML_TYPE_F16, 64, 64, 9, 3, n_query, 200, 1, 20.0f, true, false, false, 2 });
        go({ GGML_TYPE_F16, GGML_TYPE_F16, 64, 64, 9, 3, n_query, 200, 2, 5.0f, true, true, false, 3 });
        go({ GGML_TYPE_F16, GGML_TYPE_F16, 64, 64, 9, 3, n_query, 200, 1, 0.0f, false, false, false, 2 });
        go({ GGML_TYPE_F16, GGML_TYPE_F16, 64, 64, 9, 3, n_query, 200, 2, 0.0f, true, false, true, 2 });
    }
    // Rows that are no whole vectors, and more threads than there are counters and work.
    for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16 }) {
        for (const int32_t n_query : { 1, 33 }) {
            go({ type, type, 1, 3, 5, 5, n_query, 70, 1, 0.0f, true, false, false, 1 });
            go({ type, type, 40, 72, 6, 2, n_query, 70, 2, 0.0f, true, true, false, 17 });
        }
    }
    // So many tiles that several of them share an array of mass.
    go({ GGML_TYPE_F16, GGML_TYPE_F16, 64, 64, 192, 64, 65, 130, 2, 0.0f, true, false, false, 3 });
    printf("%d cases\n", n);
    return 0;
}
