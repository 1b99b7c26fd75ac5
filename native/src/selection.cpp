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
        keys[c] = -int32_t(evictable[c] != 0);  // all bits or none, in a loop of its own: types of two sizes make slow vectors
    }
    for (int32_t c = 0; c < n_cells; ++c) {
        const float score = scores[c] + 0.0f;
        int32_t bits;
        memcpy(&bits, &score, sizeof(bits));
        const int32_t key = bits ^ ((bits >> 31) & INT32_MAX);
        const int32_t may_go = keys[c];
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

// Marks the cells with a key above low, up to high.
H2OG_VECTORS
void mark(const int32_t * keys, int32_t n_cells, int32_t low, int32_t high, uint8_t * __restrict out) {
    for (int32_t c = 0; c < n_cells; ++c) {
        out[c] = (keys[c] > low) & (keys[c] <= high);
    }
}

// How many of some different numbers lie below each: its place in order, found without a branch, which nobody could predict.
H2OG_VECTORS
void count_below(const int64_t * numbers, int32_t n, int64_t * __restrict out) {
    for (int32_t i = 0; i < n; ++i) {
        int64_t n_below = 0;
        for (int32_t j = 0; j < n; ++j) {
            n_below += numbers[j] < numbers[i];
        }
        out[i] = n_below;
    }
}

// Marks the positions among the n from start on; those below 0 lie behind all others.
H2OG_VECTORS
void mark_within(const int32_t * pos, int64_t n_cells, uint32_t start, uint32_t n, uint8_t * __restrict out) {
    for (int64_t c = 0; c < n_cells; ++c) {
        out[c] = uint32_t(pos[c]) - start < n;
    }
}

// Two keys with the n-th lowest between them: above low, up to high.
struct Bracket {
    int32_t low, high;
    int32_t until_low, until_high;  // how many keys are up to each
};

// Narrows it until few keys are left between them, or equal ones.
Bracket narrowed(const Bracket & all, const std::vector<int32_t> & keys, int32_t n) {
    constexpr int32_t FEW = 16;
    int64_t low = all.low, high = all.high;
    int32_t until_low = all.until_low, until_high = all.until_high;
    // By proportion where keys lie evenly, by halves where they do not.
    for (bool by_halves = false; until_high - until_low > FEW && high - low > 1; by_halves = !by_halves) {
        const int64_t span = high - low;
        const int64_t step = by_halves ? span/2 : span*(n - until_low)/(until_high - until_low);
        const int64_t middle = low + std::clamp<int64_t>(step, 1, span - 1);
        const int32_t until_middle = count_until(keys.data(), int32_t(keys.size()), int32_t(middle));
        (until_middle < n ? low       : high)       = middle;
        (until_middle < n ? until_low : until_high) = until_middle;
    }
    return { int32_t(low), int32_t(high), until_low, until_high };
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

// A limit for the n lowest keys: n groups whose lowest is up to it hold n keys up to it, and few more.
int32_t limit_of(const std::vector<int32_t> & keys, const Bracket & all, int32_t n, std::vector<int32_t> & minima) {
    constexpr int64_t GROUPS_PER_CELL = 4;
    const int32_t n_cells = int32_t(keys.size());
    minima.assign(std::clamp<int64_t>(n*GROUPS_PER_CELL, 1, n_cells), NEVER);
    lower(keys.data(), n_cells, int32_t(minima.size()), minima.data());
    const int32_t n_groups = count_until(minima.data(), int32_t(minima.size()), all.high);
    return n_groups < n ? narrowed(all, keys, n).high : narrowed({ all.low, all.high, 0, n_groups }, minima, n).high;
}

// Finds the cells of a row with a key above low, up to high, and sorts them by key, and by position where keys are equal.
class Sorted {
public:
    const std::vector<int32_t> & operator()(const std::vector<int32_t> & keys, const int32_t * pos, int32_t low, int32_t high) {
        marks.resize(keys.size());
        mark(keys.data(), int32_t(keys.size()), low, high, marks.data());
        find_marked(marks, cells);
        sort_by_key(keys);
        for (auto start = cells.begin(), end = start; start != cells.end(); start = end) {
            end = std::find_if(start, cells.end(), [&](int32_t c) { return keys[c] != keys[*start]; });
            if (end - start > 1) {
                std::sort(start, end, [&](int32_t a, int32_t b) { return pos[a] < pos[b]; });
            }
        }
        return cells;
    }

private:
    void sort_by_key(const std::vector<int32_t> & keys) {
        constexpr size_t MANY = 256;  // from here on all pairs are too many
        numbers.resize(cells.size());
        std::transform(cells.begin(), cells.end(), numbers.begin(), [&](int32_t c) { return int64_t(keys[c])*(int64_t(1) << 32) + c; });
        if (cells.size() < MANY) {
            places.resize(cells.size());
            count_below(numbers.data(), int32_t(cells.size()), places.data());
            for (size_t i = 0; i < cells.size(); ++i) {
                cells[places[i]] = int32_t(numbers[i]);
            }
        } else {
            std::sort(numbers.begin(), numbers.end());
            std::transform(numbers.begin(), numbers.end(), cells.begin(), [](int64_t number) { return int32_t(number); });
        }
    }

    std::vector<uint8_t> marks;
    std::vector<int32_t> cells;
    std::vector<int64_t> numbers, places;
};

// Calls f(keys, the bracket that holds all of them, its index) for each row, of which n or more may be chosen.
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
            f(keys, { row.lowest - 1, row.highest, 0, row.n_evictable }, i);
        }
    }
    if (n_nan > 0) {
        fail(H2OG_POLICY, "%lld scores are NaN: a score must be a number or an infinity", (long long) n_nan);
    }
}

} // namespace

int32_t h2og_within(const int32_t * pos, int64_t n, int64_t start, int64_t end, uint8_t * out) {
    return guarded([&]() -> int32_t {
        constexpr int64_t N_POSITIONS = int64_t(1) << 31;
        start = std::clamp<int64_t>(start, 0, N_POSITIONS);
        mark_within(pos, n, uint32_t(start), uint32_t(std::clamp(end, start, N_POSITIONS) - start), out);
        return H2OG_OK;
    });
}

int32_t h2og_lowest(const float * scores, const int32_t * pos, const uint8_t * evictable, int64_t n_rows, int32_t n_cells, int32_t n,
                    int32_t * out) {
    return guarded([&]() -> int32_t {
        Sorted sorted;
        std::vector<int32_t> minima;
        for_rows(scores, evictable, n_rows, n_cells, n, [&](const std::vector<int32_t> & keys, const Bracket & all, int64_t i) {
            const int32_t limit = limit_of(keys, all, n, minima);
            std::copy_n(sorted(keys, pos + i*n_cells, INT32_MIN, limit).begin(), n, out + i*n);
        });
        return H2OG_OK;
    });
}

int32_t h2og_highest(const float * scores, const int32_t * pos, const uint8_t * evictable, int64_t n_rows, int32_t n_cells, int32_t n,
                     uint8_t * out) {
    return guarded([&]() -> int32_t {
        Sorted sorted;
        for_rows(scores, evictable, n_rows, n_cells, n, [&](const std::vector<int32_t> & keys, const Bracket & all, int64_t i) {
            const int32_t n_others = all.until_high - n;
            const Bracket bracket = narrowed(all, keys, n_others);
            mark(keys.data(), n_cells, bracket.high, NEVER - 1, out + i*n_cells);
            const std::vector<int32_t> & between = sorted(keys, pos + i*n_cells, bracket.low, bracket.high);
            std::for_each(between.end() - (bracket.until_high - n_others), between.end(), [&](int32_t c) { out[i*n_cells + c] = 1; });
        });
        return H2OG_OK;
    });
}
