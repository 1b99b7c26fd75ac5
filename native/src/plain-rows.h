// What work on rows of cells in plain memory has in common.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

// Loops without branches, which compilers turn into vectors, for more than the base of the architecture.
#if defined(__x86_64__) && defined(__GLIBC__)
#define H2OG_VECTORS __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define H2OG_VECTORS
#endif

namespace h2og {

// The cells that are marked with 1, where others are 0 and most words of them have none.
inline void find_marked(const std::vector<uint8_t> & marks, std::vector<int32_t> & cells) {
    cells.clear();
    size_t start = 0;
    for (uint64_t word; start + sizeof(word) <= marks.size(); start += sizeof(word)) {
        memcpy(&word, marks.data() + start, sizeof(word));
        for (; word != 0; word &= word - 1) {
            cells.push_back(int32_t(start) + __builtin_ctzll(word)/8);
        }
    }
    for (; start < marks.size(); ++start) {
        if (marks[start] != 0) {
            cells.push_back(int32_t(start));
        }
    }
}

} // namespace h2og
