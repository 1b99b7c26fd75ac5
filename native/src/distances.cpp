// How far vectors point away from the mean of their directions, on plain memory.
#include "error.h"
#include "plain-rows.h"

#include <cfloat>
#include <cmath>

using namespace h2og;

namespace {

H2OG_VECTORS
void square(const float * vectors, int64_t n, int32_t dim, float * __restrict out) {
    for (int64_t i = 0; i < n; ++i) {
        const float * a = vectors + i*dim;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int32_t d = 0; d < dim; ++d) {
            sum += a[d]*a[d];
        }
        out[i] = sum;
    }
}

H2OG_VECTORS
void multiply(const float * vectors, const float * other, int32_t n, int32_t dim, float * __restrict out) {
    for (int32_t i = 0; i < n; ++i) {
        const float * a = vectors + int64_t(i)*dim;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int32_t d = 0; d < dim; ++d) {
            sum += a[d]*other[d];
        }
        out[i] = sum;
    }
}

H2OG_VECTORS
void add(const float * vectors, const float * factors, int32_t n, int32_t dim, float * __restrict sum) {
    for (int32_t i = 0; i < n; ++i) {
        const float * a = vectors + int64_t(i)*dim;
        for (int32_t d = 0; d < dim; ++d) {
            sum[d] += a[d]*factors[i];
        }
    }
}

float inverse_length(float square) {
    return 1.0f/std::max(std::sqrt(square), FLT_MIN);
}

} // namespace

int32_t h2og_distances(const float * vectors, int64_t n_rows, int32_t n, int32_t dim, int32_t n_last, float * out) {
    return guarded([&]() -> int32_t {
        constexpr int32_t BLOCK = 16;  // stay near the processor until they are added
        std::vector<float> mean(dim), factors(n);
        for (int64_t row = 0; row < n_rows; ++row, vectors += int64_t(n)*dim, out += n_last) {
            std::fill(mean.begin(), mean.end(), 0.0f);
            for (int32_t start = 0; start < n; start += BLOCK) {
                const float * some = vectors + int64_t(start)*dim;
                const int32_t m = std::min(BLOCK, n - start);
                square(some, m, dim, &factors[start]);
                std::transform(&factors[start], &factors[start] + m, &factors[start], inverse_length);
                add(some, &factors[start], m, dim, mean.data());
            }
            float of_mean;
            square(mean.data(), 1, dim, &of_mean);
            multiply(vectors + int64_t(n - n_last)*dim, mean.data(), n_last, dim, out);
            for (int32_t i = 0; i < n_last; ++i) {
                out[i] = 1.0f - out[i]*inverse_length(of_mean)*factors[n - n_last + i];
            }
        }
        return H2OG_OK;
    });
}

int32_t h2og_lengths(const float * vectors, int64_t n, int32_t dim, float * out) {
    return guarded([&]() -> int32_t {
        square(vectors, n, dim, out);
        std::transform(out, out + n, out, [](float each) { return std::sqrt(each); });
        return H2OG_OK;
    });
}
