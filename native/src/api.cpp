// The C edge: checks arguments, catches everything.
#include "api.h"

#include "session.h"

#include <algorithm>

#ifndef H2OG_VERSION
#  define H2OG_VERSION "0.0.0"
#endif
#ifndef H2OG_LLAMA_VERSION
#  define H2OG_LLAMA_VERSION "unknown"
#endif

using namespace h2og;

static thread_local std::string last_error;

void h2og::set_last_error(const std::string & text) {
    last_error = text;
}

h2og_state & h2og::state_of(h2og_cache * cache) {
    if (cache == nullptr) {
        fail(H2OG_INVALID, "the cache is NULL");
    }
    cache->state->require_context();
    return *cache->state;
}

h2og_state & h2og::idle_state_of(h2og_cache * cache) {
    h2og_state & state = state_of(cache);
    if (state.first->in_callback) {
        fail(H2OG_INVALID, "a policy or an observer must not change the cache it is shown");
    }
    return state;
}

void h2og::require_pointer(const void * p, const char * name) {
    if (p == nullptr) {
        fail(H2OG_INVALID, "%s is NULL", name);
    }
}

const char * h2og_version(void) {
    return H2OG_VERSION " (llama-cpp-python " H2OG_LLAMA_VERSION ")";
}

const char * h2og_last_error(void) {
    return last_error.c_str();
}

h2og_params h2og_default_params(void) {
    return { /*budget*/ 0, /*block*/ 64, H2OG_ATTENTION_AUTO, /*n_pos_max*/ 0, /*decay*/ 1.0f, /*is_scored*/ 1,
             /*n_observed*/ 0 };
}

int32_t h2og_get_info(h2og_cache * cache, h2og_info * out) {
    return guarded([&]() -> int32_t {
        require_pointer(out, "out");
        const h2og_state & s = state_of(cache);
        int64_t bytes = 0;
        for (llama_kv_cache * c : { s.cache, s.window }) {
            if (c != nullptr) {
                for (const auto & layer : h2og_access::layers(*c)) {
                    bytes += int64_t(ggml_nbytes(layer.k)) + (layer.v != nullptr ? int64_t(ggml_nbytes(layer.v)) : 0);
                }
            }
        }
        const Layer & layer = s.layers[0];
        const bool is_host = std::all_of(s.layers.begin(), s.layers.end(), [](const Layer & l) { return l.is_host; });
        *out = { s.n_layer, s.n_head_kv, s.n_cells, s.n_stream, s.head_dim_k, s.head_dim_v,
                 layer.k->type, layer.v != nullptr ? layer.v->type : layer.k->type, s.n_pos_max, s.can_renumber, is_host, bytes,
                 s.queries != nullptr ? s.queries->bytes() : 0 };
        return H2OG_OK;
    });
}

int32_t h2og_get_counters(h2og_cache * cache, int32_t seq, h2og_counters * out) {
    return guarded([&]() -> int32_t {
        require_pointer(out, "out");
        h2og_state & s = state_of(cache);
        const int32_t stream = s.stream_of(seq);
        s.follow_books(stream);
        *out = { s.streams[stream].n_evicted, s.streams[stream].n_evictions, s.streams[stream].n_rebases };
        return H2OG_OK;
    });
}

int32_t h2og_get_view(h2og_cache * cache, int32_t seq, h2og_view * out) {
    return guarded([&]() -> int32_t {
        require_pointer(out, "out");
        h2og_state & s = idle_state_of(cache);
        s.settle();
        s.follow_books(s.stream_of(seq));
        *out = s.view(s.stream_of(seq));
        return H2OG_OK;
    });
}

int32_t h2og_set_params(h2og_cache * cache, const h2og_params * params) {
    return guarded([&]() -> int32_t {
        require_pointer(params, "params");
        idle_state_of(cache).set_params(*params);
        return H2OG_OK;
    });
}

int32_t h2og_set_query_weights(h2og_cache * cache, const float * weights, int32_t n) {
    return guarded([&]() -> int32_t {
        h2og_state & s = state_of(cache);
        if (n < 0 || (n > 0 && weights == nullptr)) {
            fail(H2OG_INVALID, "%d query weights", n);
        }
        s.first->query_weights.assign(weights, weights + n);
        return H2OG_OK;
    });
}

int32_t h2og_set_policy(h2og_cache * cache, h2og_policy_fn fn, void * user) {
    return guarded([&]() -> int32_t {
        h2og_state & s = idle_state_of(cache);
        s.policy      = fn;
        s.policy_user = user;
        return H2OG_OK;
    });
}

int32_t h2og_set_observer(h2og_cache * cache, h2og_observer_fn fn, void * user) {
    return guarded([&]() -> int32_t {
        h2og_state & s = idle_state_of(cache);
        s.observer      = fn;
        s.observer_user = user;
        return H2OG_OK;
    });
}

int32_t h2og_evict(h2og_cache * cache, int32_t seq, const int32_t * victims, int32_t n) {
    return guarded([&]() -> int32_t {
        h2og_state & s = idle_state_of(cache);
        if (n > 0) {
            require_pointer(victims, "victims");
        }
        s.evict(s.stream_of(seq), victims, n);
        return H2OG_OK;
    });
}

int32_t h2og_make_room(h2og_cache * cache, int32_t seq, int32_t n_keep) {
    return guarded([&]() -> int32_t { return idle_state_of(cache).make_room(seq, n_keep); });
}

int32_t h2og_rebase(h2og_cache * cache, int32_t seq) {
    return guarded([&]() -> int32_t {
        h2og_state & s = idle_state_of(cache);
        s.rebase(s.stream_of(seq));
        return H2OG_OK;
    });
}

int32_t h2og_rollback_min(h2og_cache * cache, int32_t seq) {
    return guarded([&]() -> int32_t {
        h2og_state & s = state_of(cache);
        return s.rollback_min(s.stream_of(seq));
    });
}

int64_t h2og_state_size(h2og_cache * cache, int32_t seq) {
    return guarded([&]() -> int64_t {
        h2og_state & s = idle_state_of(cache);
        return state_size(s, s.stream_of(seq));
    });
}

int32_t h2og_state_save(h2og_cache * cache, int32_t seq, uint8_t * out, int64_t size) {
    return guarded([&]() -> int32_t {
        require_pointer(out, "out");
        h2og_state & s = idle_state_of(cache);
        state_save(s, s.stream_of(seq), out, size);
        return H2OG_OK;
    });
}

int32_t h2og_state_load(h2og_cache * cache, int32_t seq, const uint8_t * data, int64_t size) {
    return guarded([&]() -> int32_t {
        require_pointer(data, "data");
        h2og_state & s = idle_state_of(cache);
        state_load(s, s.stream_of(seq), data, size);
        return H2OG_OK;
    });
}
