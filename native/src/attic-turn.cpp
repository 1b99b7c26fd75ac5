// Renumbering of evicted entries: their keys are turned as far as those beside them in the cache.
#include "state.h"

#include <algorithm>

using namespace h2og;

// live: the entries of that head in the cache, by position.
void h2og_state::turn_attic(int32_t s, int32_t layer, int32_t head, const std::vector<Turned> & live) {
    if (attic == nullptr || live.empty()) {
        return;
    }
    Turner turner(pairs_of(layers[layer].il));
    const Hadamard hadamard = hadamard_of(*cache, false);
    std::vector<float> row(head_dim_k);
    auto & entries = attic->entries(s, layer, head);
    for (size_t slot = 0; slot < entries.size(); ++slot) {
        auto & entry = entries[slot];
        auto next = std::upper_bound(live.begin(), live.end(), entry.pos, [](int32_t pos, const Turned & t) { return pos < t.pos; });
        const Turned & beside = next == live.begin() ? *next : *(next - 1);
        const int32_t to = std::clamp(entry.rope_pos + beside.to - beside.from, 0, live.back().to);
        if (to == entry.rope_pos) {
            continue;
        }
        char * key = attic->row(s, layer, head, int32_t(slot), false);
        convert_row(attic->type_k, key, GGML_TYPE_F32, row.data(), head_dim_k);
        hadamard.apply(row.data(), row.size());
        turner.turn(row.data(), to - entry.rope_pos);
        hadamard.apply(row.data(), row.size());
        convert_row(GGML_TYPE_F32, row.data(), attic->type_k, key, head_dim_k);
        entry.rope_pos = to;
    }
}
