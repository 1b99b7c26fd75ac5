// Renumbering of evicted entries: their keys are turned as far as those beside them in the cache.
#include "state.h"

#include <algorithm>
#include <cmath>
#include <map>

using namespace h2og;

namespace {

// Turns heads by numbers of positions, most of which come again and again.
class Turner {
public:
    explicit Turner(std::vector<Pair> pairs) : pairs(std::move(pairs)) {}

    void turn(float * head, int32_t by) {
        auto & found = known[by];
        if (found.empty()) {
            for (const Pair & p : pairs) {
                found.push_back({ float(std::cos(by*p.angle)), float(std::sin(by*p.angle)) });
            }
        }
        for (size_t i = 0; i < pairs.size(); ++i) {
            float & x = head[pairs[i].first], & y = head[pairs[i].second];
            const float turned = x*found[i].cos - y*found[i].sin;
            y = x*found[i].sin + y*found[i].cos;
            x = turned;
        }
    }

private:
    struct Angle { float cos, sin; };

    const std::vector<Pair> pairs;
    std::map<int32_t, std::vector<Angle>> known;
};

} // namespace

// live: the entries of that head in the cache, by position.
void h2og_state::turn_attic(int32_t s, int32_t layer, int32_t head, const std::vector<Turned> & live) {
    if (attic == nullptr || live.empty()) {
        return;
    }
    Turner turner(pairs_of(layers[layer].il));
    int64_t n = 0;
    const auto * hadamard = hadamard_of(*cache, false, n);
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
        char * key = attic->keys(s, layer, head, int32_t(slot)/Attic::CHUNK) + (slot % Attic::CHUNK)*attic->key_bytes;
        convert_row(attic->type_k, key, GGML_TYPE_F32, reinterpret_cast<char *>(row.data()), head_dim_k);
        if (hadamard != nullptr) {
            undo_hadamard(row.data(), row.size(), *hadamard, n);
        }
        turner.turn(row.data(), to - entry.rope_pos);
        if (hadamard != nullptr) {
            undo_hadamard(row.data(), row.size(), *hadamard, n);  // its own inverse
        }
        convert_row(GGML_TYPE_F32, reinterpret_cast<const char *>(row.data()), attic->type_k, key, head_dim_k);
        entry.rope_pos = to;
    }
}
