// The C edge, as far as evicted entries stay and come back.
#include "api.h"

using namespace h2og;

namespace {

constexpr int32_t MAX_NEIGHBOURS = 1 << 20;

} // namespace

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

int32_t h2og_recall_next(h2og_cache * cache, int32_t seq, const h2og_span * keep, int32_t n_keep, const h2og_recall_params * params) {
    return guarded([&]() -> int32_t {
        h2og_state & s = idle_state_of(cache);
        const int32_t stream = s.stream_of(seq);
        if (s.attic == nullptr) {
            fail(H2OG_INVALID, "nothing can be recalled: evicted entries are not kept");
        }
        require_pointer(params, "params");
        if (n_keep < 0 || (n_keep > 0 && keep == nullptr)) {
            fail(H2OG_INVALID, "%d protected spans: none may be missing", n_keep);
        }
        const h2og_recall_params & p = *params;
        if (p.n_most < 0 || p.n_asked < 1 || p.ask_every < 1 || p.n_before < 0 || p.n_after < 0 || p.n_exact < 0) {
            fail(H2OG_INVALID, "%d exchanges, each %d. of %d queries, %d exact, %d + %d neighbours: none may be negative, and a query is needed",
                 p.n_most, p.ask_every, p.n_asked, p.n_exact, p.n_before, p.n_after);
        }
        if (p.n_before > MAX_NEIGHBOURS || p.n_after > MAX_NEIGHBOURS) {
            fail(H2OG_INVALID, "%d + %d neighbours: there may be %d on each side", p.n_before, p.n_after, MAX_NEIGHBOURS);
        }
        if (p.alike < H2OG_ALIKE_HEAD || p.alike > H2OG_ALIKE_MODEL) {
            fail(H2OG_INVALID, "alike is %d, and must be one of H2OG_ALIKE_*", p.alike);
        }
        std::vector<Span> spans;
        for (int32_t i = 0; i < n_keep; ++i) {
            spans.emplace_back(keep[i].first, keep[i].end);
        }
        s.next_recalls[stream] = std::make_unique<Recall>(s, stream, std::move(spans), p);
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
