// The C edge: checks arguments, catches everything.
#include "api.h"

#include "layers.h"
#include "session.h"

#include <algorithm>

#ifndef H2OG_VERSION
#  define H2OG_VERSION "0.0.0"
#endif
#ifndef H2OG_LLAMA_VERSION
#  define H2OG_LLAMA_VERSION "unknown"
#endif

using namespace h2og;

namespace {

thread_local std::string last_error;

// Makes ctx and its caches know the state, or forget it.
void install(llama_context & ctx, const h2og_state & state, h2og_state * value) {
    h2og_access::cparams(ctx).h2og = value;
    for (h2og_state * group : state.groups) {
        h2og_access::state(*group->cache) = value != nullptr ? group : nullptr;
    }
    if (state.window != nullptr) {
        h2og_access::state(*state.window) = value;
    }
}

} // namespace

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

int32_t h2og_check(llama_context * ctx) {
    return guarded([&]() -> int32_t {
        require_pointer(ctx, "ctx");
        h2og_state::find_caches(*ctx);
        return H2OG_OK;
    });
}

int32_t h2og_attach(llama_context * ctx, const h2og_params * params, h2og_cache ** out) {
    return guarded([&]() -> int32_t {
        require_pointer(ctx, "ctx");
        require_pointer(params, "params");
        require_pointer(out, "out");
        *out = nullptr;
        if (h2og_access::cparams(*ctx).h2og != nullptr) {
            fail(H2OG_INVALID, "a cache is attached to this context already");
        }
        auto state = std::make_shared<h2og_state>(*ctx, *params);
        auto handle = std::make_unique<h2og_cache>();
        handle->state = state;
        // Freed with the context: the state outlives it for as long as the handle does, and knows.
        h2og_access::anchor(*ctx) = std::shared_ptr<void>(static_cast<void *>(state.get()),
            [state](void *) { state->context_gone(); });
        install(*ctx, *state, state.get());
        try {
            ctx->sched_reserve();  // builds the graphs that tell how each layer rotates its keys
        } catch (...) {
            install(*ctx, *state, nullptr);
            h2og_access::anchor(*ctx).reset();
            throw;
        }
        state->learn_rotations();
        for (size_t i = 1; i < state->groups.size(); ++i) {
            handle->others.push_back(std::make_unique<h2og_cache>());
            handle->others.back()->state = std::shared_ptr<h2og_state>(state, state->groups[i]);
        }
        *out = handle.release();
        return H2OG_OK;
    });
}

void h2og_detach(h2og_cache * cache) {
    if (cache == nullptr) {
        return;
    }
    const int32_t status = guarded([&]() -> int32_t {
        h2og_state & state = *cache->state;
        if (&state != state.first) {
            fail(H2OG_INVALID, "a group is detached with the first one, not alone");
        }
        if (state.in_callback) {
            fail(H2OG_INVALID, "a policy or an observer must not detach the cache it is shown");
        }
        if (llama_context * ctx = state.ctx) {
            ctx->synchronize();
            install(*ctx, state, nullptr);
            for (int32_t s = 0; s < state.n_stream; ++s) {
                const bool is_intact = std::all_of(state.groups.begin(), state.groups.end(), [s](const h2og_state * group) {
                    return group->streams[s].n_evicted == 0 && group->streams[s].rope_shift == 0;
                });
                if (!is_intact) {
                    // Only we know what its cells hold and where its keys point.
                    ctx->get_memory()->seq_rm(s, -1, -1);
                }
            }
            h2og_access::reserve_again(*ctx);
            ctx->sched_reserve();  // drops the graphs that point to this state
            h2og_access::anchor(*ctx).reset();
        }
        return H2OG_OK;
    });
    if (status == H2OG_OK) {
        delete cache;
    }
}

int32_t h2og_set_layer_cells(llama_model * model, const int32_t * n_cells, int32_t n) {
    return guarded([&]() -> int32_t {
        require_pointer(model, "model");
        if (n > 0) {
            require_pointer(n_cells, "n_cells");
        }
        set_layer_cells(*model, n_cells, n);
        return H2OG_OK;
    });
}

int32_t h2og_n_groups(h2og_cache * cache) {
    return guarded([&]() -> int32_t { return int32_t(state_of(cache).first->groups.size()); });
}

int32_t h2og_get_group(h2og_cache * cache, int32_t i, h2og_cache ** out) {
    return guarded([&]() -> int32_t {
        require_pointer(out, "out");
        *out = nullptr;
        const h2og_state & s = state_of(cache);
        if (&s != s.first) {
            fail(H2OG_INVALID, "groups are asked of the cache that was attached");
        }
        if (i < 0 || i >= int32_t(s.groups.size())) {
            fail(H2OG_INVALID, "group %d does not exist: there are %zu", i, s.groups.size());
        }
        *out = i == 0 ? cache : cache->others[i - 1].get();
        return H2OG_OK;
    });
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
        *out = { s.n_layer, s.n_head_kv, s.n_cells, s.n_stream, s.head_dim_k, s.head_dim_v,
                 layer.k->type, layer.v != nullptr ? layer.v->type : layer.k->type, s.n_pos_max, s.can_renumber, bytes,
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
