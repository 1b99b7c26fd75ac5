// Who scores lowest or highest in rows of cells, on plain memory: for policies, which know no cache.
#include "error.h"
#include "plain-rows.h"

#include <algorithm>
#include <cstring>
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

// Sorts cells by key, and by position where keys are equal, which few are.
void sort(std::vector<int32_t> & cells, const std::vector<int32_t> & keys, const int32_t * pos, std::vector<int64_t> & by_key) {
    by_key.resize(cells.size());
    std::transform(cells.begin(), cells.end(), by_key.begin(), [&](int32_t c) { return int64_t(keys[c])*(int64_t(1) << 32) + c; });
    std::sort(by_key.begin(), by_key.end());
    std::transform(by_key.begin(), by_key.end(), cells.begin(), [](int64_t each) { return int32_t(each); });
    for (auto start = cells.begin(), end = start; start != cells.end(); start = end) {
        end = std::find_if(start, cells.end(), [&](int32_t c) { return keys[c] != keys[*start]; });
        if (end - start > 1) {
            std::sort(start, end, [&](int32_t a, int32_t b) { return pos[a] < pos[b]; });
        }
    }
}

// Writes those of first, first + step, ... that are wanted, without a branch, which nobody could predict; returns their end.
template <typename F>
int32_t * keep(int32_t first, int32_t end, int32_t step, int32_t * out, F && is_wanted) {
    for (int32_t i = first; i < end; i += step) {
        *out = i;
        out += is_wanted(i);
    }
    return out;
}

// Finds the n lowest cells of a row, and maybe a few more.
class Lowest {
public:
    const std::vector<int32_t> & operator()(const std::vector<int32_t> & keys, const Row & row, const int32_t * pos, int32_t n) {
        // n groups whose lowest key is up to a limit hold n keys up to it.  Other groups hold none.
        constexpr int64_t GROUPS_PER_CELL = 4;
        const int32_t n_cells = int32_t(keys.size());
        int32_t n_groups = int32_t(std::max<int64_t>(1, std::min<int64_t>(n*GROUPS_PER_CELL, n_cells)));
        minima.assign(n_groups, NEVER);
        lower(keys.data(), n_cells, n_groups, minima.data());
        int32_t n_there = count_until(minima.data(), n_groups, row.highest);
        if (n_there < n) {
            n_groups = n_cells;
            n_there = row.n_evictable;
            minima = keys;
        }
        const int32_t limit = limit_of(minima, n_there, row, n).key;
        groups.resize(n_groups);
        cells.resize(n_cells);
        const int32_t * key = keys.data(), * minimum = minima.data();
        const int32_t * end = keep(0, n_groups, 1, groups.data(), [=](int32_t g) { return minimum[g] <= limit; });
        int32_t * out = cells.data();
        for (const int32_t * group = groups.data(); group != end; ++group) {
            out = keep(*group, n_cells, n_groups, out, [=](int32_t c) { return key[c] <= limit; });
        }
        cells.resize(out - cells.data());
        sort(cells, keys, pos, by_key);
        return cells;
    }

private:
    std::vector<int32_t> minima, groups, cells;
    std::vector<int64_t> by_key;
};

// Calls f(keys, row, its index) for each row, of which n or more may be chosen.
template <typename F>
void for_rows(const float * scores, const uint8_t * evictable, int64_t n_rows, int32_t n_cells, int32_t n, F && f) {
    std::vector<int32_t> keys(n_cells);
    int64_t n_nan = 0;
    for (int64_t i = 0; i < n_rows; ++i) {
        const Row row = load(scores + i*n_cells, evictable + i*n_cells, n_cells, keys.data());
        if (row.n_evictable < n) {
            fail(H2OG_INVALID, "a budget too small to let %d entries of every row go: of row %lld only %d may", n, (long long) i,
                 row.n_evictable);
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
        Lowest lowest;
        for_rows(scores, evictable, n_rows, n_cells, n, [&](const std::vector<int32_t> & keys, const Row & row, int64_t i) {
            std::copy_n(lowest(keys, row, pos + i*n_cells, n).begin(), n, out + i*n);
        });
        return H2OG_OK;
    });
}

int32_t h2og_highest(const float * scores, const int32_t * pos, const uint8_t * evictable, int64_t n_rows, int32_t n_cells, int32_t n,
                     uint8_t * out) {
    return guarded([&]() -> int32_t {
        std::vector<int32_t> equal;
        std::vector<int64_t> by_key;
        for_rows(scores, evictable, n_rows, n_cells, n, [&](const std::vector<int32_t> & keys, const Row & row, int64_t i) {
            const int32_t n_others = row.n_evictable - n;
            const Limit limit = limit_of(keys, row.n_evictable, row, n_others);
            mark(keys.data(), n_cells, limit.key + 1, NEVER - 1, out + i*n_cells);
            if (limit.n_until > n_others) {  // of equal ones the newest are higher
                equal.resize(n_cells);
                equal.resize(keep(0, n_cells, 1, equal.data(), [&](int32_t c) { return keys[c] == limit.key; }) - equal.data());
                sort(equal, keys, pos + i*n_cells, by_key);
                std::for_each(equal.end() - (limit.n_until - n_others), equal.end(), [&](int32_t c) { out[i*n_cells + c] = 1; });
            }
        });
        return H2OG_OK;
    });
}
