// What the patched llama.cpp calls, apart from the attention node.
#include "h2og-hooks.h"
#include "state.h"

#include "llama-batch.h"
#include "llama-impl.h"

#include <algorithm>
#include <map>
#include <set>

using namespace h2og;

int h2og_before_batch(h2og_state * state, const llama_batch & batch) {
    state->batch_weights = std::move(state->query_weights);
    state->query_weights.clear();
    for (h2og_state * group : state->groups) {
        group->begin_recalls();
    }
    const int32_t status = guarded([&]() -> int32_t {
        std::map<int32_t, int32_t> n_tokens;
        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            ++n_tokens[batch.seq_id[i][0]];
        }
        for (const auto & [seq, n] : n_tokens) {
            state->before_batch(seq, n);
        }
        return H2OG_OK;
    });
    if (status == H2OG_OK) {
        return 0;
    }
    LLAMA_LOG_ERROR("%s: %s\n", __func__, h2og_last_error());
    return H2OG_DECODE_FAILED;
}

void h2og_after_ubatch(h2og_state * first, const llama_ubatch & ubatch) {
    for (h2og_state * state : first->groups) {
        if (state->observer == nullptr) {
            continue;
        }
        guarded([&]() -> int32_t {
            std::map<int32_t, int32_t> n_tokens;
            for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
                ++n_tokens[ubatch.seq_id[i][0]];
            }
            state->synchronize();
            for (const auto & [seq, n] : n_tokens) {
                const int32_t s = state->stream_of(seq);
                if (state->only_asks(s)) {
                    continue;
                }
                state->follow_books(s);
                const h2og_view view = state->view(s);
                const CallbackGuard guard(*state);
                state->observer(state->observer_user, &view, n);
            }
            return H2OG_OK;
        });
    }
}

// The window half of an iSWA cache holds all its entries, and is only told what the evicted half has agreed to; so are the
// parts of a cache, since what is asked of the first group is decided for all.

bool h2og_before_seq_rm(h2og_state * first, const llama_kv_cache * cache, int32_t seq_id, int32_t p0, int32_t p1) {
    if (cache != first->cache || first != first->first) {
        return true;
    }
    return guarded([&]() -> int32_t {
        const int32_t begin_seq = seq_id < 0 ? 0 : first->stream_of(seq_id);
        const int32_t end_seq   = seq_id < 0 ? first->n_stream : begin_seq + 1;
        std::vector<int32_t> emptied;
        for (int32_t s = begin_seq; s < end_seq; ++s) {
            const int32_t exact_from = first->rollback_min(s);
            const int32_t newest = first->streams[s].n_past - 1;
            const int32_t begin = std::max(p0, 0), end = p1 < 0 ? newest + 1 : p1;
            const auto count = [&](auto && holds) { return std::count_if(first->groups.begin(), first->groups.end(), holds); };
            const auto oldest = [&](const h2og_state * g) { return h2og_access::cells(*g->cache, s).seq_pos_min(s); };
            const auto n_group = count([](const h2og_state *) { return true; });
            // What was evicted is older than all that is held: only from the start on is nothing left of it.
            const auto start = [&](const h2og_state * g) { return g->streams[s].n_evicted > 0 ? 0 : oldest(g); };
            const auto n_all = count([&](const h2og_state * g) { return oldest(g) >= 0 && begin <= start(g) && end > newest; });
            const bool is_nothing = begin > newest || count([&](const h2og_state * g) { return end > oldest(g); }) == 0;
            const bool is_all     = n_all == n_group;
            const bool is_tail    = end > newest && begin >= exact_from && n_all == 0;
            const bool is_intact  = first->window == nullptr &&
                count([&](const h2og_state * g) { return g->streams[s].n_evicted > 0; }) == 0;
            if (!is_nothing && !is_all && !is_tail && !is_intact) {
                fail(H2OG_INVALID, "removing positions [%d, %d) would not be exact: only a tail from %d on can be removed",
                     begin, end, exact_from);
            }
            if (is_all) {
                emptied.push_back(s);
            }
        }
        for (const int32_t s : emptied) {
            for (h2og_state * group : first->groups) {
                group->forget(s);
            }
        }
        return H2OG_OK;
    }) == H2OG_OK;
}

void h2og_before_clear(h2og_state * state, const llama_kv_cache * cache) {
    if (cache == state->cache) {
        guarded([&]() -> int32_t {
            for (int32_t s = 0; s < state->n_stream; ++s) {
                state->forget(s);
            }
            return H2OG_OK;
        });
    }
}

bool h2og_before_seq_cp(h2og_state * state, const llama_kv_cache * cache, int32_t seq_src, int32_t seq_dst, int32_t p0, int32_t p1) {
    if (cache != state->cache || state != state->first) {
        return true;
    }
    return guarded([&]() -> int32_t {
        const int32_t newest = h2og_access::cells(*state->cache, uint32_t(state->stream_of(seq_src))).seq_pos_max(seq_src);
        if (p0 > 0 || (p1 >= 0 && p1 <= newest)) {
            fail(H2OG_INVALID, "only whole sequences can be copied, not positions [%d, %d)", p0, p1);
        }
        for (h2og_state * group : state->groups) {
            group->copy_stream(group->stream_of(seq_src), group->stream_of(seq_dst));
        }
        return H2OG_OK;
    }) == H2OG_OK;
}

bool h2og_before_shift(h2og_state *, const llama_kv_cache *) {
    LLAMA_LOG_ERROR("%s: positions of an evicted cache are not shifted; see llama_memory_can_shift\n", __func__);
    return false;
}
