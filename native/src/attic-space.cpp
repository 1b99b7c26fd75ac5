// Which sequence has how much of an attic's space, and which entries are dropped for want of it.
#include "attic.h"

#include "state.h"

#include <algorithm>
#include <cstring>

namespace h2og {

bool Attic::grow(int32_t stream) {
    if (is_full || n_chunk >= max_chunks) {
        return false;
    }
    char * chunk = chunks.get();
    if (chunk == nullptr) {
        is_full = true;
        return false;
    }
    streams[stream].chunks.push_back(chunk);
    ++n_chunk;
    return true;
}

void Attic::give_back(int32_t stream) {
    chunks.give_back(streams[stream].chunks.back());
    streams[stream].chunks.pop_back();
    --n_chunk;
    is_full = false;
}

// Another sequence that has two chunks more than this one drops what is in one of them.
bool Attic::grow_from_others(int32_t stream) {
    const auto most = std::max_element(streams.begin(), streams.end(), [](const Sequence & a, const Sequence & b) {
        return a.chunks.size() < b.chunks.size();
    });
    if (most->chunks.size() < streams[stream].chunks.size() + 2) {
        return false;
    }
    const int32_t other = int32_t(most - streams.begin());
    drop(other, std::max(0, most->n - (int32_t(most->chunks.size()) - 1)*CHUNK));
    give_back(other);
    return grow(stream);
}

// The least-scored of each head go, of equals the oldest; the last ones take their slots.
void Attic::drop(int32_t stream, int32_t n) {
    Sequence & sequence = streams[stream];
    std::vector<int32_t> order(sequence.n);
    std::vector<char> is_dropped;
    const int32_t n_left = sequence.n - n;
    for (int32_t j = 0; j < state.n_layer; ++j) {
        for (int32_t h = 0; h < state.n_head_kv; ++h) {
            auto & entries = sequence.entries[index_of(j, h)];
            for (int32_t i = 0; i < sequence.n; ++i) {
                order[i] = i;
            }
            std::nth_element(order.begin(), order.begin() + n, order.end(), [&](int32_t a, int32_t b) {
                return std::make_pair(entries[a].score, entries[a].pos) < std::make_pair(entries[b].score, entries[b].pos);
            });
            is_dropped.assign(sequence.n, 0);
            for (int32_t i = 0; i < n; ++i) {
                is_dropped[order[i]] = 1;
            }
            int32_t hole = 0;
            for (int32_t slot = n_left; slot < sequence.n; ++slot) {
                if (is_dropped[slot]) {
                    continue;
                }
                while (!is_dropped[hole]) {
                    ++hole;
                }
                entries[hole] = entries[slot];
                memcpy(row(stream, j, h, hole, false), row(stream, j, h, slot, false), key_bytes);
                memcpy(row(stream, j, h, hole, true),  row(stream, j, h, slot, true),  value_bytes);
                is_dropped[hole] = 0;
            }
            entries.resize(n_left);
        }
    }
    sequence.n = n_left;
    sequence.n_dropped += int64_t(n)*state.n_layer*state.n_head_kv;
}

int32_t Attic::extend(int32_t stream, int32_t n) {
    Sequence & sequence = streams[stream];
    n = std::min(n, CHUNK);
    while (sequence.n + n > int32_t(sequence.chunks.size())*CHUNK) {
        if (grow(stream) || grow_from_others(stream)) {
            continue;
        }
        if (sequence.chunks.empty()) {
            return 0;
        }
        // Many at once, since finding them takes a walk through all.
        drop(stream, std::min(sequence.n, std::max(n, std::min(CHUNK, sequence.n/8))));
    }
    sequence.n += n;
    for (auto & entries : sequence.entries) {
        entries.resize(sequence.n);
    }
    return n;
}

void Attic::clear(int32_t stream) {
    Sequence & sequence = streams[stream];
    while (!sequence.chunks.empty()) {
        give_back(stream);
    }
    sequence = Sequence{};
    sequence.entries.resize(size_t(state.n_layer)*state.n_head_kv);
}

void Attic::copy(int32_t from, int32_t to) {
    if (from == to) {
        return;
    }
    clear(to);
    const Sequence & source = streams[from];
    Sequence & sequence = streams[to];
    for (size_t i = 0; i < source.chunks.size() && grow(to); ++i) {
        memcpy(sequence.chunks[i], source.chunks[i], chunks.bytes);
    }
    sequence.n       = std::min(source.n, int32_t(sequence.chunks.size())*CHUNK);
    sequence.entries = source.entries;
    for (auto & entries : sequence.entries) {
        entries.resize(sequence.n);
    }
    sequence.n_dropped  = source.n_dropped + int64_t(source.n - sequence.n)*state.n_layer*state.n_head_kv;
    sequence.n_recalled = source.n_recalled;
    sequence.exact_from = source.exact_from;
}

} // namespace h2og
