// The C edge, as far as evicted entries stay and come back.
#include "api.h"

using namespace h2og;

int32_t h2og_set_attic(h2og_cache * cache, const h2og_attic_params * params) {
    return guarded([&]() -> int32_t {
        require_pointer(params, "params");
        if (params->max_bytes < 0) {
            fail(H2OG_INVALID, "max_bytes is %lld, and must not be negative", (long long) params->max_bytes);
        }
        idle_state_of(cache).set_attic(*params);
        return H2OG_OK;
    });
}

int32_t h2og_get_attic(h2og_cache * cache, int32_t seq, h2og_attic_info * out) {
    return guarded([&]() -> int32_t {
        require_pointer(out, "out");
        h2og_state & s = state_of(cache);
        const int32_t stream = s.stream_of(seq);
        s.follow_books(stream);
        *out = {};
        if (const Attic * attic = s.attic.get()) {
            *out = { attic->n_entry(stream), attic->type_k, attic->type_v, attic->bytes(), attic->max_bytes,
                     attic->n_dropped(stream), attic->n_recalled(stream) };
        }
        return H2OG_OK;
    });
}

int32_t h2og_read_attic_pos(h2og_cache * cache, int32_t seq, int32_t layer, int32_t * out) {
    return guarded([&]() -> int32_t {
        const h2og_state & s = state_of(cache);
        const int32_t stream = s.stream_of(seq);
        if (s.attic == nullptr || s.attic->n_entry(stream) == 0) {
            return H2OG_OK;
        }
        require_pointer(out, "out");
        if (layer < 0 || layer >= s.n_layer) {
            fail(H2OG_INVALID, "layer %d does not exist: there are %d", layer, s.n_layer);
        }
        for (int32_t h = 0; h < s.n_head_kv; ++h) {
            for (const auto & entry : s.attic->entries(stream, layer, h)) {
                *out++ = entry.pos;
            }
        }
        return H2OG_OK;
    });
}

int32_t h2og_recall_next(h2og_cache * cache, int32_t seq, const h2og_span * keep, int32_t n_keep, int32_t n_most, int32_t n_asked,
                         int32_t alike) {
    return guarded([&]() -> int32_t {
        h2og_state & s = idle_state_of(cache);
        const int32_t stream = s.stream_of(seq);
        if (s.attic == nullptr) {
            fail(H2OG_INVALID, "nothing can be recalled: evicted entries are not kept");
        }
        if (n_keep < 0 || (n_keep > 0 && keep == nullptr) || n_most < 0 || n_asked < 1) {
            fail(H2OG_INVALID, "%d protected spans, %d exchanges and %d queries: none may be negative, and a query is needed", n_keep,
                 n_most, n_asked);
        }
        if (alike < H2OG_ALIKE_HEAD || alike > H2OG_ALIKE_MODEL) {
            fail(H2OG_INVALID, "alike is %d, and must be one of H2OG_ALIKE_*", alike);
        }
        std::vector<Span> spans;
        for (int32_t i = 0; i < n_keep; ++i) {
            spans.emplace_back(keep[i].first, keep[i].end);
        }
        s.next_recalls[stream] = std::make_unique<Recall>(s, stream, std::move(spans), n_most, n_asked, Alike(alike));
        return H2OG_OK;
    });
}

int32_t h2og_withdraw_recall(h2og_cache * cache, int32_t seq) {
    return guarded([&]() -> int32_t {
        h2og_state & s = idle_state_of(cache);
        s.next_recalls[s.stream_of(seq)].reset();
        return H2OG_OK;
    });
}

int32_t h2og_recall_asked(h2og_cache * cache, int32_t seq) {
    return guarded([&]() -> int32_t {
        h2og_state & s = idle_state_of(cache);
        const int32_t stream = s.stream_of(seq);
        Recall * recall = s.recalls[stream].get();
        if (recall == nullptr || !recall->only_asks()) {
            fail(H2OG_INVALID, "the last batch asked for nothing: call h2og_recall_next with H2OG_ALIKE_MODEL before it");
        }
        s.follow_books(stream);
        recall->exchange_asked();
        return H2OG_OK;
    });
}
