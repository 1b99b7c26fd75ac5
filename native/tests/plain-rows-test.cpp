// Work on rows of cells against plain loops and whole sorts: random rows, ties, infinities, both zeros, what cannot be chosen.
#include "check.h"
#include "h2og.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();

std::mt19937 rng(1);

int32_t draw(int32_t n) { return int32_t(rng()%uint32_t(n)); }

struct Table {
    int32_t n_rows, n_cells;
    std::vector<float> scores;
    std::vector<int32_t> pos;
    std::vector<uint8_t> evictable;

    Table(int32_t n_rows, int32_t n_cells, int32_t n_levels) : n_rows(n_rows), n_cells(n_cells) {
        const float special[] = { INF, -INF, 0.0f, -0.0f, 1e-45f, -1e-45f, 3e38f, -3e38f };
        for (int32_t row = 0; row < n_rows; ++row) {
            std::vector<int32_t> order(n_cells);
            for (int32_t c = 0; c < n_cells; ++c) {
                order[c] = c;
                scores.push_back(draw(8) == 0 ? special[draw(8)] : float(draw(n_levels) - n_levels/2)/4);
                evictable.push_back(draw(4) != 0);
            }
            std::shuffle(order.begin(), order.end(), rng);
            pos.insert(pos.end(), order.begin(), order.end());
        }
    }

    // The evictable cells of a row, lowest and oldest first.
    std::vector<int32_t> in_order(int32_t row) const {
        const size_t at = size_t(row)*n_cells;
        std::vector<int32_t> cells;
        for (int32_t c = 0; c < n_cells; ++c) {
            if (evictable[at + c]) {
                cells.push_back(c);
            }
        }
        std::sort(cells.begin(), cells.end(), [&](int32_t a, int32_t b) {
            return scores[at + a] != scores[at + b] ? scores[at + a] < scores[at + b] : pos[at + a] < pos[at + b];
        });
        return cells;
    }

    int32_t fewest() const {
        size_t n = n_cells;
        for (int32_t row = 0; row < n_rows; ++row) {
            n = std::min(n, in_order(row).size());
        }
        return int32_t(n);
    }
};

void check_selection(const Table & t, int32_t n) {
    std::vector<int32_t> lowest(size_t(t.n_rows)*n);
    std::vector<uint8_t> highest(t.scores.size(), 7);
    CHECK(h2og_lowest (t.scores.data(), t.pos.data(), t.evictable.data(), t.n_rows, t.n_cells, n, lowest.data())  == H2OG_OK, "%s", h2og_last_error());
    CHECK(h2og_highest(t.scores.data(), t.pos.data(), t.evictable.data(), t.n_rows, t.n_cells, n, highest.data()) == H2OG_OK, "%s", h2og_last_error());
    for (int32_t row = 0; row < t.n_rows; ++row) {
        const std::vector<int32_t> expected = t.in_order(row);
        CHECK(std::equal(expected.begin(), expected.begin() + n, lowest.begin() + row*n), "row %d of %d cells, the %d lowest", row, t.n_cells, n);
        std::vector<uint8_t> marks(t.n_cells, 0);
        std::for_each(expected.end() - n, expected.end(), [&](int32_t c) { marks[c] = 1; });
        CHECK(std::equal(marks.begin(), marks.end(), highest.begin() + row*t.n_cells), "row %d of %d cells, the %d highest", row, t.n_cells, n);
    }
}

void check_refusals() {
    Table t(3, 40, 9);
    std::vector<int32_t> out(3*40);
    std::vector<uint8_t> marks(3*40);
    const int32_t n = t.fewest();
    CHECK(h2og_lowest (t.scores.data(), t.pos.data(), t.evictable.data(), 3, 40, n + 1, out.data())   == H2OG_INVALID, "too few");
    CHECK(h2og_highest(t.scores.data(), t.pos.data(), t.evictable.data(), 3, 40, n + 1, marks.data()) == H2OG_INVALID, "too few");
    for (const float nan : { std::nanf(""), -std::nanf("") }) {
        t.scores[45] = nan;
        t.evictable[45] = 0;
        CHECK(h2og_lowest (t.scores.data(), t.pos.data(), t.evictable.data(), 3, 40, n/2, out.data())   == H2OG_OK, "NaN that cannot go");
        t.evictable[45] = 1;
        CHECK(h2og_lowest (t.scores.data(), t.pos.data(), t.evictable.data(), 3, 40, n/2, out.data())   == H2OG_POLICY, "NaN");
        CHECK(h2og_highest(t.scores.data(), t.pos.data(), t.evictable.data(), 3, 40, n/2, marks.data()) == H2OG_POLICY, "NaN");
    }
    CHECK(strstr(h2og_last_error(), "1 scores are NaN"), "%s", h2og_last_error());
}

// Of n_was positions some leave, some move, and new ones come.
void check_carried(int32_t n_was, int32_t n_now) {
    const int32_t n_rows = 3, n_numbers = 2;
    std::vector<int32_t> was, now;
    for (int32_t row = 0; row < n_rows; ++row) {
        std::vector<int32_t> held(n_was);
        for (int32_t c = 0; c < n_was; ++c) {
            held[c] = draw(5) == 0 ? -1 - draw(2) : c*1024 + row;  // positions whose lowest bits are equal
        }
        std::shuffle(held.begin(), held.end(), rng);
        was.insert(was.end(), held.begin(), held.end());
        held.resize(n_now, 7);
        for (int32_t i = 0; i < n_now/2; ++i) {
            std::swap(held[draw(n_now)], held[draw(n_now)]);
            held[draw(n_now)] = draw(3) == 0 ? -1 : 2000000 + i;
        }
        now.insert(now.end(), held.begin(), held.end());
    }
    std::vector<float> numbers(size_t(n_numbers)*n_rows*n_was), out(size_t(n_numbers)*n_rows*n_now, 5.0f);
    std::generate(numbers.begin(), numbers.end(), [] { return float(draw(1000) + 1); });
    CHECK(h2og_carried(numbers.data(), was.data(), now.data(), n_numbers, n_rows, n_was, n_now, out.data()) == H2OG_OK, "%s", h2og_last_error());
    for (int32_t i = 0; i < n_numbers*n_rows*n_now; ++i) {
        const int32_t row = i/n_now%n_rows, number = i/n_now/n_rows, wanted = now[row*n_now + i%n_now];
        float expected = 0.0f;
        for (int32_t c = 0; c < n_was && wanted >= 0; ++c) {
            if (was[row*n_was + c] == wanted) {
                expected = numbers[(size_t(number)*n_rows + row)*n_was + c];
            }
        }
        CHECK(out[i] == expected, "number %d of row %d: %g, not %g", number, row, out[i], expected);
    }
}

void check_within(int64_t start, int64_t end) {
    std::vector<int32_t> pos = { -1, -2, INT32_MIN, 0, 1, 2, INT32_MAX - 1, INT32_MAX };
    for (int32_t i = 0; i < 60; ++i) {
        pos.push_back(draw(40) - 5);
    }
    std::vector<uint8_t> out(pos.size(), 7);
    CHECK(h2og_within(pos.data(), int64_t(pos.size()), start, end, out.data()) == H2OG_OK, "%s", h2og_last_error());
    for (size_t i = 0; i < pos.size(); ++i) {
        CHECK(out[i] == (pos[i] >= start && pos[i] < end), "position %d from %lld to %lld", pos[i], (long long) start, (long long) end);
    }
}

void check_rates(int32_t n) {
    const int32_t n_past = 500, n_sums = 100;
    std::vector<float> scores(n), sums(n_sums), out(n);
    std::vector<int32_t> pos(n);
    for (int32_t i = 0; i < n_sums; ++i) {
        sums[i] = 1.0f + 0.5f*i;
    }
    for (int32_t i = 0; i < n; ++i) {
        scores[i] = float(draw(1000));
        pos[i] = draw(n_past + 1) - 1;
    }
    CHECK(h2og_rates(scores.data(), pos.data(), n, n_past, sums.data(), n_sums, out.data()) == H2OG_OK, "%s", h2og_last_error());
    for (int32_t i = 0; i < n; ++i) {
        CHECK(out[i] == scores[i]/sums[std::min(n_past - pos[i], n_sums - 1)], "rate %d is %g", i, out[i]);
    }
}

void check_distances(int32_t n, int32_t dim, int32_t n_last) {
    std::normal_distribution<float> normal(0.3f);
    std::vector<float> vectors(size_t(2)*n*dim), out(size_t(2)*n_last);
    std::generate(vectors.begin(), vectors.end(), [&] { return normal(rng); });
    std::fill_n(vectors.begin() + (n - 1)*dim, dim, 0.0f);  // the last of the first row has no direction
    CHECK(h2og_distances(vectors.data(), 2, n, dim, n_last, out.data()) == H2OG_OK, "%s", h2og_last_error());
    for (int32_t row = 0; row < 2; ++row) {
        const float * v = vectors.data() + size_t(row)*n*dim;
        const auto product = [&](const auto * a, const auto * b) {
            double sum = 0;
            for (int32_t d = 0; d < dim; ++d) {
                sum += double(a[d])*b[d];
            }
            return sum;
        };
        std::vector<double> mean(dim);
        for (int32_t i = 0; i < n; ++i) {
            for (int32_t d = 0; d < dim; ++d) {
                mean[d] += v[i*dim + d]/std::max(std::sqrt(product(v + i*dim, v + i*dim)), 1e-30);
            }
        }
        for (int32_t i = 0; i < n_last; ++i) {
            const float * a = v + (n - n_last + i)*dim;
            const double lengths = std::sqrt(product(a, a)*product(mean.data(), mean.data()));
            const double expected = 1 - product(a, mean.data())/std::max(lengths, 1e-30);
            CHECK(std::fabs(out[row*n_last + i] - expected) < 1e-5, "distance %d is %g, not %g", i, out[row*n_last + i], expected);
        }
    }
}

void check_lengths(int32_t dim) {
    std::vector<float> vectors(size_t(3)*dim), out(3);
    for (int32_t i = 0; i < 3; ++i) {
        std::fill_n(vectors.begin() + i*dim, dim, 2.0f*i);  // of length 2 i times the root of dim
    }
    CHECK(h2og_lengths(vectors.data(), 3, dim, out.data()) == H2OG_OK, "%s", h2og_last_error());
    for (int32_t i = 0; i < 3; ++i) {
        CHECK(std::fabs(out[i] - 2*i*std::sqrt(double(dim))) < 1e-5*dim, "length %d is %g", i, out[i]);
    }
}

} // namespace

int main() {
    for (const int32_t n_cells : { 1, 2, 7, 8, 40, 257, 3000 }) {
        for (const int32_t n_levels : { 1, 3, 50, 1000000 }) {
            Table t(4, n_cells, n_levels);
            for (int32_t pass = 0; pass < 4; ++pass) {
                const int32_t n = t.fewest();
                for (const int32_t some : { 0, std::min(n, 1), n/20, n/3, n }) {
                    check_selection(t, some);
                }
                if (pass == 0) {  // all may go; then the evictable are few, and beside each other; then none
                    std::fill(t.evictable.begin(), t.evictable.end(), 1);
                } else {
                    for (size_t i = 0; i < t.evictable.size(); ++i) {
                        t.evictable[i] = pass == 1 && int32_t(i)%n_cells < n_cells/9;
                    }
                }
            }
        }
    }
    check_refusals();
    for (const int32_t n_was : { 1, 9, 300 }) {
        for (const int32_t n_now : { 1, 9, 8, 300, 513 }) {
            check_carried(n_was, n_now);
        }
    }
    for (const int64_t start : { int64_t(0), int64_t(3), int64_t(INT32_MAX), int64_t(1) << 40 }) {
        for (const int64_t end : { int64_t(0), int64_t(3), int64_t(20), int64_t(INT32_MAX), int64_t(1) << 40 }) {
            check_within(start, end);
        }
    }
    for (const int32_t n : { 1, 255, 256, 1000 }) {
        check_rates(n);
    }
    check_distances(1, 8, 1);
    check_distances(40, 64, 40);
    check_distances(50, 100, 3);
    check_distances(16, 128, 0);
    for (const int32_t dim : { 1, 8, 100, 128 }) {
        check_lengths(dim);
    }
    printf("ok\n");
    return 0;
}
