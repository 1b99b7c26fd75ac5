// Queries held against keys: every kernel, type and head size beside plain loops in double precision.
#include "attention-plan.h"
#include "check.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

using namespace h2og;

namespace {

std::mt19937 rng(1);

std::vector<float> gaussian(size_t n) {
    std::normal_distribution<float> d;
    std::vector<float> out(n);
    for (float & x : out) {
        x = d(rng);
    }
    return out;
}

void run(const Kernel & kernel, ggml_type type, int32_t dim, int32_t n_key, int32_t n_query, float softcap, bool hides) {
    std::vector<char> rows(ggml_row_size(type, dim)*n_key);
    const auto written = gaussian(size_t(dim)*n_key);
    ggml_quantize_chunk(type, written.data(), rows.data(), 0, n_key, dim, nullptr);
    std::vector<float> keys(written.size());  // as they can be read back
    for (int32_t c = 0; c < n_key; ++c) {
        if (type == GGML_TYPE_F32) {
            std::copy_n(&written[size_t(c)*dim], dim, &keys[size_t(c)*dim]);
        } else {
            ggml_get_type_traits(type)->to_float(&rows[c*ggml_row_size(type, dim)], &keys[size_t(c)*dim], dim);
        }
    }
    const int32_t width = (n_query + kernel.lanes - 1)/kernel.lanes*kernel.lanes, n_dim = (dim + kernel.lanes - 1)/kernel.lanes*kernel.lanes;
    std::vector<float> q(size_t(n_dim)*width), hidden(n_key), top(width, -INFINITY), total(width), best(n_key);
    const bool is_few = n_query <= FEW_ROWS;
    const auto queries = gaussian(size_t(n_query)*dim);
    for (int32_t r = 0; r < n_query; ++r) {
        for (int32_t d = 0; d < dim; ++d) {
            q[is_few ? size_t(r)*n_dim + d : size_t(d)*width + r] = queries[size_t(r)*dim + d]*0.2f;
        }
    }
    for (int32_t c = 0; hides && c < n_key; c += 3) {
        hidden[c] = -INFINITY;
    }
    const Keys k = { rows.data(), ggml_row_size(type, dim), type, n_key, hides ? hidden.data() : nullptr };
    const Question question = { q.data(), n_query, width, dim, n_dim, softcap };
    std::vector<float> memory(look_floats(question));
    kernel.look(k, question, top.data(), total.data(), memory.data());

    std::vector<double> logits(size_t(n_query)*n_key), expected(n_key, -INFINITY);
    std::vector<float> whole(width, INFINITY);
    for (int32_t r = 0; r < n_query; ++r) {
        double sum = 0.0;
        for (int32_t c = 0; c < n_key; ++c) {
            double x = 0.0;
            for (int32_t d = 0; d < dim; ++d) {
                x += 0.2*queries[size_t(r)*dim + d]*keys[size_t(c)*dim + d];
            }
            x = softcap == 0.0f ? x : softcap*std::tanh(x/softcap);
            logits[size_t(r)*n_key + c] = x + hidden[c];
            sum += std::exp(x + hidden[c]);
        }
        const double seen = top[r] + std::log(double(total[r]));
        CHECK(std::fabs(seen - std::log(sum)) < 1e-4, "%s %s: query %d of %d: %g instead of %g", kernel.name, ggml_type_name(type), r, n_query,
              seen, std::log(sum));
        whole[r] = float(std::log(sum));
        for (int32_t c = 0; c < n_key; ++c) {
            expected[c] = std::max(expected[c], logits[size_t(r)*n_key + c] - std::log(sum));
        }
    }
    kernel.find(k, question, whole.data(), best.data(), memory.data());
    for (int32_t c = 0; c < n_key; ++c) {
        CHECK(best[c] == expected[c] || std::fabs(best[c] - expected[c]) < 1e-4, "%s %s: key %d of %d: %g instead of %g", kernel.name,
              ggml_type_name(type), c, n_key, double(best[c]), expected[c]);
    }
}

} // namespace

int main() {
    for (const Kernel * kernel : usable_kernels()) {
        for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
                                      GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL }) {
            for (const int32_t n_key : { 1, 64, 200 }) {
                run(*kernel, type, 64, n_key, 7, 0.0f, n_key > 1);
                run(*kernel, type, 64, n_key, 16, 5.0f, false);
                run(*kernel, type, 96, n_key, 33, 5.0f, false);
                run(*kernel, type, 96, n_key, 17, 0.0f, n_key > 1);
            }
        }
        run(*kernel, GGML_TYPE_F32, 40, 100, 16, 0.0f, true);
        run(*kernel, GGML_TYPE_F32, 40, 100, 20, 0.0f, true);  // no multiple of every kernel's lanes
    }
    printf("looks passed\n");
    return 0;
}
