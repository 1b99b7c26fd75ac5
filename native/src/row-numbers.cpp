// Numbers of the entries in rows of cells, on plain memory: found again after entries moved, or divided by what their age tells.
#include "error.h"
#include "plain-rows.h"

#include <vector>

using namespace h2og;

namespace {

// Where positions lie among some cells of a row.
class Places {
public:
    void hold(const int32_t * row, int32_t n_cells, const std::vector<int32_t> & cells) {
        pos = row;
        shift = 31;
        while ((size_t(1) << (32 - shift)) < 16*cells.size()) {  // so that hardly two meet in one
            --shift;
        }
        slots.assign(size_t(1) << (32 - shift), -1);
        for (const int32_t cell : cells) {
            if (cell < n_cells && pos[cell] >= 0) {
                slots[slot_of(pos[cell])] = cell;
            }
        }
    }

    // -1: in none of them.
    int32_t cell_of(int32_t wanted) const { return slots[slot_of(wanted)]; }

private:
    size_t slot_of(int32_t wanted) const {
        size_t i = (uint32_t(wanted)*2654435769u) >> shift;  // Fibonacci hashing: neighbours lie apart
        while (slots[i] >= 0 && pos[slots[i]] != wanted) {
            i = (i + 1) & (slots.size() - 1);
        }
        return i;
    }

    const int32_t * pos = nullptr;
    std::vector<int32_t> slots;
    int32_t shift = 31;
};

// Marks the cells that hold another entry than they did, or none.
H2OG_VECTORS
void mark_changed(const int32_t * was, const int32_t * now, int32_t n, uint8_t * __restrict out) {
    for (int32_t c = 0; c < n; ++c) {
        out[c] = (was[c] != now[c]) | (now[c] < 0);
    }
}

constexpr int32_t BLOCK = 256;

H2OG_VECTORS
void divide(const float * scores, const int32_t * pos, int32_t n, int32_t n_past, const float * sums, int32_t n_sums,
            float * __restrict out) {
    uint32_t ages[BLOCK];
    float divisors[BLOCK];
    for (int32_t i = 0; i < n; ++i) {
        const uint32_t age = uint32_t(n_past) - uint32_t(pos[i]), last = uint32_t(n_sums) - 1;
        ages[i] = age < last ? age : last;
    }
    for (int32_t i = 0; i < n; ++i) {
        divisors[i] = sums[ages[i]];
    }
    for (int32_t i = 0; i < n; ++i) {
        out[i] = scores[i]/divisors[i];
    }
}

} // namespace

int32_t h2og_carried(const float * numbers, const int32_t * was, const int32_t * now, int32_t n_numbers, int64_t n_rows, int32_t n_was,
                     int32_t n_now, float * out) {
    return guarded([&]() -> int32_t {
        const int32_t n_both = std::min(n_was, n_now);
        std::vector<uint8_t> marks(std::max(n_was, n_now), 1);
        std::vector<int32_t> changed;
        Places places;
        for (int64_t row = 0; row < n_rows; ++row, was += n_was, now += n_now) {
            mark_changed(was, now, n_both, marks.data());
            find_marked(marks, changed);
            places.hold(was, n_was, changed);
            const auto end = std::lower_bound(changed.begin(), changed.end(), n_now);
            for (int32_t i = 0; i < n_numbers; ++i) {
                const float * from = numbers + (i*n_rows + row)*n_was;
                float       * to   = out     + (i*n_rows + row)*n_now;
                std::copy_n(from, n_both, to);
                std::for_each(changed.begin(), end, [&](int32_t cell) {
                    const int32_t source = now[cell] < 0 ? -1 : places.cell_of(now[cell]);
                    to[cell] = source < 0 ? 0.0f : from[source];
                });
            }
        }
        return H2OG_OK;
    });
}

int32_t h2og_rates(const float * scores, const int32_t * pos, int64_t n, int32_t n_past, const float * sums, int32_t n_sums, float * out) {
    return guarded([&]() -> int32_t {
        for (int64_t i = 0; i < n; i += BLOCK) {
            divide(scores + i, pos + i, int32_t(std::min<int64_t>(BLOCK, n - i)), n_past, sums, n_sums, out + i);
        }
        return H2OG_OK;
    });
}
