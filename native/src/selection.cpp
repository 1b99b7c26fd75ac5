// Who scores lowest or highest in rows of cells, on plain memory: for policies, which know no cache.
#include "error.h"
#include "plain-rows.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

using namespace h2og;

namespace {

constexpr int32_t NEVER = INT32_MAX;  // the key of what may not be chosen, above that of any number

struct Row {
    int32_t n_evictable = 0, n_nan = 0;
    int32_t lowest = NEVER, highest = INT32_MIN;  // keys of the evictable
};

// Keys are integers in the order of scores; both zeros are equal.
H2OG_VECTORS
Row load(const float * scores, const uint8_t * evictable, int32_t n_cells, int32_t * __restrict keys) {
    Row row;
    for (int32_t c = 0; c < n_cells; ++c) {
        const float score = scores[c] + 0.0f;
        int32_t bits;
        memcpy(&bits, &score, sizeof(bits));
        const int32_t key = bits ^ ((bits >> 31) & INT32_MAX);
        const int32_t may_go = -int32_t(evictable[c] != 0);  // all bits or none
        const int32_t or_never = (key & may_go) | (NEVER & ~may_go), or_least = (key & may_go) | (INT32_MIN & ~may_go);
        row.lowest  = or_never < row.lowest  ? or_never : row.lowest;
        row.highest = or_least > row.highest ? or_least : row.highest;
        row.n_evictable -= may_go;
        row.n_nan -= may_go & -int32_t(score != score);
        keys[c] = or_never;
    }
    return row;
}

H2OG_VECTORS
int32_t count_until(const int32_t * keys, int32_t n_cells, int32_t limit) {
    int32_t n = 0;
    for (int32_t c = 0; c < n_cells; ++c) {
        n += keys[c] <= limit;
    }
    return n;
}

// Marks the cells with a key from first to last.
H2OG_VECTORS
void mark(const int32_t * keys, int32_t n_cells, int32_t first, int32_t last, uint8_t * __restrict out) {
    for (int32_t c = 0; c < n_cells; ++c) {
        out[c] = (keys[c] >= first) & (keys[c] <= last);
    }
}

// Lowers each of n_groups minima to the lowest of every n_groups-th key.
H2OG_VECTORS
void lower(const int32_t * keys, int32_t n_cells, int32_t n_groups, int32_t * __restrict minima) {
    for (int32_t start = 0; start < n_cells; start += n_groups) {
        const int32_t n = std::min(n_groups, n_cells - start);
        for (int32_t i = 0; i < n; ++i) {
            minima[i] = keys[start + i] < minima[i] ? keys[start + i] : minima[i];
        }
    }
}

struct Limit {
    int32_t key = INT32_MIN;
    int32_t n_until = 0;  // keys up to it
};

// A limit for the n lowest of some keys of a row, of which n_evictable may be chosen.  Until it there are more only if the highest
// of these are equal.
Limit limit_of(const std::vector<int32_t> & keys, int32_t n_evictable, const Row & row, int32_t n) {
    if (n == 0) {
        return {};
    }
    int64_t low = int64_t(row.lowest) - 1, high = row.highest;
    int32_t until_low = 0, until_high = n_evictable;
    // By proportion where keys lie evenly, by halves where they do not.
    for (bool by_halves = false; until_high > n && high - low > 1; by_halves = !by_halves) {
        const int64_t span = high - low;
        const int64_t step = by_halves ? span/2 : span*(n - until_low)/(until_high - until_low);
        const int64_t middle = low + std::clamp<int64_t>(step, 1, span - 1);
        const int32_t until_middle = count_until(keys.data(), int32_t(keys.size()), int32_t(middle));
        (until_middle < n ? low       : high)       = middle;
        (until_middle < n ? until_low : until_high) = until_middle;
    }
    return { int32_t(high), until_high };
}

// A key up to which there are n keys or a few more.  n groups whose lowest is up to a limit hold n keys up to it.
int32_t limit_near(const std::vector<int32_t> & keys, const Row & row, int32_t n, std::vector<int32_t> & minima) {
    constexpr int32_t GROUPS_PER_KEY = 4;
    const int64_t n_groups = int64_t(n)*GROUPS_PER_KEY;
    if (2*n_groups < int64_t(keys.size())) {
        minima.assign(n_groups, NEVER);
        lower(keys.data(), int32_t(keys.size()), int32_t(n_groups), minima.data());
        const int32_t n_there = count_until(minima.data(), int32_t(n_groups), row.highest);
        if (n_there >= n) {
            return limit_of(minima, n_there, row, n).key;
        }
    }
    return limit_of(keys, row.n_evictable, row, n).key;
}

struct Found {
    int64_t order;  // by key, then position
    int32_t cell;

    bool operator<(const Found & other) const { return order < other.order; }
};

// The cells with a key from first to last, in order.
class Finder {
public:
    std::vector<Found> & operator()(const std::vector<int32_t> & keys, const int32_t * pos, int32_t first, int32_t last) {
        marks.resize(keys.size());
        mark(keys.data(), int32_t(keys.size()), first, last, marks.data());
        find_marked(marks, cells);
        found.clear();
        for (const int32_t cell : cells) {
            found.push_back({ (int64_t(keys[cell]) << 32) + pos[cell], cell });
        }
        std::sort(found.begin(), found.end());
        return found;
    }

private:
    std::vector<uint8_t> marks;
    std::vector<int32_t> cells;
    std::vector<Found> found;
};

// Calls f(keys, row's facts, scores index) for each row.
template <typename F>
void for_rows(const float * scores, const uint8_t * evictable, int64_t n_rows, int32_t n_cells, int32_t n, F && f) {
    std::vector<int32_t> keys(n_cells);
    int64_t n_nan = 0;
    for (int64_t i = 0; i < n_rows; ++i) {
        const Row row = load(scores + i*n_cells, evictable + i*n_cells, n_cells, keys.data());
        if (row.n_evictable < n) {
            fail(H2OG_INVALID, "%d entries of row %lld must be chosen, but only %d may", n, (long long) i, row.n_evictable);
        }
        n_nan += row.n_nan;
        if (n_nan == 0) {
            f(keys, row, i);
        }
    }
    if (n_nan > 0) {
        fail(H2OG_POLICY, "%lld scores are NaN: a score must be a number or an infinity", (long long) n_nan);
    }
}

} // namespace

int32_t h2og_lowest(const float * scores, const int32_t * pos, const uint8_t * evictable, int64_t n_rows, int32_t n_cells, int32_t n,
                    int32_t * out) {
    return guarded([&]() -> int32_t {
        std::vector<int32_t> minima;
        Finder find;
        for_rows(scores, evictable, n_rows, n_cells, n, [&](const std::vector<int32_t> & keys, const Row & row, int64_t i) {
            const auto & found = find(keys, pos + i*n_cells, INT32_MIN, limit_near(keys, row, n, minima));
            std::transform(found.begin(), found.begin() + n, out + i*n, [](const Found & each) { return each.cell; });
        });
        return H2OG_OK;
    });
}

int32_t h2og_highest(const float * scores, const int32_t * pos, const uint8_t * evictable, int64_t n_rows, int32_t n_cells, int32_t n,
                     uint8_t * out) {
    return guarded([&]() -> int32_t {
        Finder find;
        for_rows(scores, evictable, n_rows, n_cells, n, [&](const std::vector<int32_t> & keys, const Row & row, int64_t i) {
            const int32_t n_others = row.n_evictable - n;
            const Limit limit = limit_of(keys, row.n_evictable, row, n_others);
            mark(keys.data(), n_cells, limit.key + 1, NEVER - 1, out + i*n_cells);
            if (limit.n_until > n_others) {  // of equal ones the newest are higher
                const auto & equal = find(keys, pos + i*n_cells, limit.key, limit.key);
                std::for_each(equal.end() - (limit.n_until - n_others), equal.end(), [&](const Found & each) { out[i*n_cells + each.cell] = 1; });
            }
        });
        return H2OG_OK;
    });
}
