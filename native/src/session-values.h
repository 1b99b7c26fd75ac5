// The values of a saved state, one behind the other, wherever that lets them lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace h2og {

// Each moves on behind the values it copied; data may be null where there are none.

template <typename T>
void put_values(uint8_t *& out, const T * data, size_t n) {
    if (n > 0) {
        memcpy(out, data, n*sizeof(T));
        out += n*sizeof(T);
    }
}

template <typename T>
void take_values(const uint8_t *& in, T * data, size_t n) {
    if (n > 0) {
        memcpy(data, in, n*sizeof(T));
        in += n*sizeof(T);
    }
}

} // namespace h2og
