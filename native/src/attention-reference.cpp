#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace h2og {

namespace {

double element(const char * row, ggml_type type, int64_t i, int64_t n, std::vector<float> & scratch) {
    if (type == GGML_TYPE_F32) {
        return reinterpret_cast<const float *>(row)[i];
    }
    scratch.resize(n);
    ggml_get_type_traits(type)->to_float(row, scratch.data(), n);
    return scratch[i];
}

void row_to_double(const char * row, ggml_type type, size_t stride, std::vector<double> & out) {
    std::vector<float> scratch;
    const int64_t n = int64_t(out.size());
    if (stride != 0) {
        for (int64_t i = 0; i < n; ++i) {
            out[i] = element(row + i*stride, type, 0, 1, scratch);
        }
    } else if (type == GGML_TYPE_F32) {
        for (int64_t i = 0; i < n; ++i) {
            out[i] = reinterpret_cast<const float *>(row)[i];
        }
    } else {
        scratch.resize(n);
        ggml_get_type_traits(type)->to_float(row, scratch.data(), n);
        out.assign(scratch.begin(), scratch.end());
    }
}

} // namespace

void attention_reference(const Attention & a) {
    const int32_t group = a.n_head/a.n_head_kv;
    std::vector<double> k(a.head_dim_k), v(a.head_dim_v), logit(a.n_cells), out(a.head_dim_v);
    std::vector<float> scratch;

    for (int32_t s = 0; s < a.n_stream; ++s) {
        if (a.scores != nullptr) {
            for (int32_t h = 0; h < a.n_head_kv; ++h) {
                for (int32_t c = 0; c < a.n_cells; ++c) {
                    a.scores[s*a.scores_stream + h*a.scores_head + c] *= a.fade[s];
                }
            }
        }
        for (int32_t t = 0; t < a.n_query; ++t) {
            for (int32_t h = 0; h < a.n_head; ++h) {
                const int32_t ih = h/group;
                const float * q = reinterpret_cast<const float *>(a.q + s*a.q_stream + h*a.q_head + t*a.q_query);
                double largest = -std::numeric_limits<double>::infinity();
                for (int32_t c = 0; c < a.n_cells; ++c) {
                    row_to_double(a.k + s*a.k_stream + c*a.k_cell + ih*a.k_head, a.type_k, 0, k);
                    double dot = 0.0;
                    for (int32_t d = 0; d < a.head_dim_k; ++d) {
                        dot += double(q[d])*k[d];
                    }
                    dot *= a.scale;
                    if (a.softcap != 0.0f) {
                        dot = a.softcap*std::tanh(dot/a.softcap);
                    }
                    if (a.mask != nullptr) {
                        const char * row = a.mask + s*a.mask_stream + t*a.mask_query + c*ggml_type_size(a.type_mask);
                        dot += element(row, a.type_mask, 0, 1, scratch);
                    }
                    logit[c] = dot;
                    largest = std::max(largest, dot);
                }
                if (a.sinks != nullptr) {
                    largest = std::max(largest, double(a.sinks[h]));
                }
                const size_t i_row = (size_t(s)*a.n_query + t)*a.n_head + h;
                if (a.elsewhere != nullptr) {
                    largest = std::max(largest, double(a.elsewhere[i_row]));
                }
                double sum = a.sinks != nullptr ? std::exp(a.sinks[h] - largest) : 0.0;
                if (a.elsewhere != nullptr && !std::isinf(largest)) {
                    sum += std::exp(a.elsewhere[i_row] - largest);
                }
                for (int32_t c = 0; c < a.n_cells; ++c) {
                    logit[c] = std::isinf(largest) ? 0.0 : std::exp(logit[c] - largest);
                    sum += logit[c];
                }
                out.assign(a.head_dim_v, 0.0);
                for (int32_t c = 0; c < a.n_cells && sum > 0.0; ++c) {
                    if (logit[c] == 0.0) {
                        continue;
                    }
                    const double p = logit[c]/sum;
                    row_to_double(a.v + s*a.v_stream + c*a.v_cell + ih*a.v_head, a.type_v, a.v_element, v);
                    for (int32_t d = 0; d < a.head_dim_v; ++d) {
                        out[d] += p*v[d];
                    }
                    if (a.scores != nullptr) {
                        float & score = a.scores[s*a.scores_stream + ih*a.scores_head + c];
                        score = float(score + a.weights[s*a.n_query + t]*p);
                    }
                }
                if (a.log_sums != nullptr) {
                    a.log_sums[i_row] = float(std::isinf(largest) ? largest : largest + std::log(sum));
                }
                float * dst = a.out + i_row*a.head_dim_v;
                for (int32_t d = 0; d < a.head_dim_v; ++d) {
                    dst[d] = float(out[d]);
                }
            }
        }
    }
}

} // namespace h2og
