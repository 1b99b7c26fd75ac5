// The C edge, as far as caches come and go: attached, in groups, and detached.
#include "api.h"

#include "layers.h"

#include <algorithm>

using namespace h2og;

namespace {

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
