// Which entries of cache and attic change places, and that they do.
#include "recall.h"

#include "state.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace h2og {

namespace {

// x[i] becomes the largest of x[i] .. x[i + window - 1]; each pass at most doubles how many of them it is of.
void widen(std::vector<float> & x, size_t window) {
    for (size_t have = 1; have < window;) {
        const size_t step = std::min(have, window - have);
        for (size_t i = 0; i + step < x.size(); ++i) {
            x[i] = std::max(x[i], x[i + step]);
        }
        have += step;
    }
}

std::vector<HeadId> heads_of(int32_t layer, int32_t end_layer, int32_t head, int32_t end_head) {
    std::vector<HeadId> heads;
    for (; layer < end_layer; ++layer) {
        for (int32_t ih = head; ih < end_head; ++ih) {
            heads.push_back({ layer, ih });
        }
    }
    return heads;
}

} // namespace

void Recall::exchange(int32_t layer) {
    unless_failed([&] {
        const int32_t n_alike = params.alike == H2OG_ALIKE_HEAD ? 1 : state.n_head_kv;
        for (int32_t first; (first = n_alike*next_exchange.fetch_add(1, std::memory_order_relaxed)) < state.n_head_kv;) {
            if (only_asks()) {
                vote(layer);
            } else {
                exchange_best(scores_by_position(layer, first, n_alike), heads_of(layer, layer + 1, first, first + n_alike));
            }
        }
    });
}

// What is attended to in a layer counts as much as there is of it, and no more than all.  The lower half of the layers looks for
// words that are alike, wherever they stand; the upper half for what they mean.
void Recall::vote(int32_t layer) {
    if (layer < state.n_layer/2) {
        return;
    }
    const std::vector<float> by_pos = scores_by_position(layer, 0, state.n_head_kv);
    votes.resize(by_pos.size());
    for (size_t i = 0; i < votes.size(); ++i) {
        votes[i] += std::exp(std::min(by_pos[i], 0.0f));
    }
}

void Recall::exchange_asked() {
    if (has_failed || votes.empty()) {
        return;
    }
    votes.resize(state.streams[stream].n_past + params.n_after + params.n_before);  // a batch that was not rolled back had no vote on itself
    exchange_best(votes, heads_of(0, state.n_layer, 0, state.n_head_kv));
    votes.clear();
}

bool Recall::is_protected(int32_t pos) const {
    return std::any_of(protected_spans.begin(), protected_spans.end(),
                       [&](const Span & span) { return pos >= span.first && pos < span.second; });
}

// The largest score of each position and of those it comes with, over the heads: as many as there are positions.
std::vector<float> Recall::scores_by_position(int32_t layer, int32_t first, int32_t n_alike) const {
    // Moved up by n_after, so that what is found at a position began that far before it.
    std::vector<float> by_pos(state.streams[stream].n_past + params.n_after + params.n_before, -std::numeric_limits<float>::infinity());
    const auto put = [&](int32_t pos, float score) { by_pos[pos + params.n_after] = std::max(by_pos[pos + params.n_after], score); };
    for (int32_t ih = first; ih < first + n_alike; ++ih) {
        const int32_t * pos = state.pos.data() + state.index(stream, layer, ih);
        for (int32_t cell = 0; cell < state.n_cells; ++cell) {
            if (pos[cell] >= 0) {
                put(pos[cell], heads[ih].in_cache[cell]);
            }
        }
        const auto & entries = state.attic->entries(stream, layer, ih);
        for (size_t slot = 0; slot < entries.size(); ++slot) {
            put(entries[slot].pos, heads[ih].in_attic[slot]);
        }
    }
    widen(by_pos, params.n_before + 1 + params.n_after);
    return by_pos;
}

// The best of the attic for the worst of the cache, as far as they are better.
void Recall::exchange_best(const std::vector<float> & by_pos, const std::vector<HeadId> & together) {
    Attic & attic = *state.attic;
    const Stream & sequence = state.streams[stream];
    if (attic.n_entry(stream) == 0) {
        return;
    }
    // Neighbours share a score: of equals the oldest come and go first, wherever they lie.
    const auto rank = [](float score, int32_t p) { return std::make_pair(score, p); };

    // The same cells in all heads: those that are alike have the same position in a cell.
    const int32_t * pos = state.pos.data() + state.index(stream, together[0].layer, together[0].head);
    std::vector<int32_t> out;
    for (int32_t cell = 0; cell < state.n_cells; ++cell) {
        if (pos[cell] >= 0 && !is_protected(pos[cell])) {
            out.push_back(cell);
        }
    }
    if (out.empty()) {
        return;
    }
    std::sort(out.begin(), out.end(), [&](int32_t a, int32_t b) {
        return rank(by_pos[pos[a]], pos[a]) < rank(by_pos[pos[b]], pos[b]);
    });

    // The same positions, which may lie in other slots; an attic that was full may have dropped them in some heads.
    std::vector<size_t> n_holding(sequence.n_past, 0);
    for (const auto & [layer, head] : together) {
        for (const auto & entry : attic.entries(stream, layer, head)) {
            ++n_holding[entry.pos];
        }
    }
    std::vector<int32_t> in;
    for (int32_t p = 0; p < sequence.n_past; ++p) {
        if (n_holding[p] == together.size() && by_pos[p] > by_pos[pos[out[0]]]) {
            in.push_back(p);
        }
    }
    const size_t most = std::min({ in.size(), out.size(), size_t(params.n_most) });
    std::partial_sort(in.begin(), in.begin() + most, in.end(), [&](int32_t a, int32_t b) {
        return rank(-by_pos[a], a) < rank(-by_pos[b], b);
    });

    size_t n = 0;
    int32_t exact_from = 0;
    for (; n < most && by_pos[in[n]] > by_pos[pos[out[n]]]; ++n) {
        exact_from = std::max(exact_from, sequence.books[out[n]] + 1);
    }
    if (n == 0) {
        return;
    }
    std::vector<int32_t> slot_of(sequence.n_past);
    for (const auto & [layer, head] : together) {
        const auto & entries = attic.entries(stream, layer, head);
        for (size_t slot = 0; slot < entries.size(); ++slot) {
            slot_of[entries[slot].pos] = int32_t(slot);
        }
        for (size_t i = 0; i < n; ++i) {
            attic.exchange(stream, layer, head, slot_of[in[i]], out[i]);
        }
    }
    attic.count_recalled(stream, int64_t(n*together.size()), exact_from);
}

} // namespace h2og
