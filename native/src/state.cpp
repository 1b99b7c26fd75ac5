// What hangs on a context: made, told its parameters, and shown.
#include "state.h"
#include "pages.h"

#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstdint>

using namespace h2og;

namespace {

// The rotary positions a model was trained on.  LongRoPE models choose their short factors by the size of the context
// they are given, which here is the number of cells; with those factors only the original context is trained.
int32_t trained_positions(const llama_model & model, const llama_cparams & cparams) {
    const auto & hparams = model.hparams;
    const bool uses_short_factors = hparams.rope_type != LLAMA_ROPE_TYPE_NONE && !model.layers.empty() &&
        model.layers[0].rope_freqs == nullptr && model.layers[0].rope_short != nullptr &&
        cparams.n_ctx_seq <= hparams.n_ctx_orig_yarn;
    return uses_short_factors ? std::min(hparams.n_ctx_train, hparams.n_ctx_orig_yarn) : hparams.n_ctx_train;
}

h2og_params of_group(h2og_params params, const llama_kv_cache & cache, bool is_only) {
    params.budget = is_only ? params.budget : std::min(params.budget, int32_t(cache.get_size()));
    return params;
}

bool has_learned_positions(const llama_model & model) {
    return model.pos_embd != nullptr;
}

} // namespace

h2og_state::h2og_state(llama_context & ctx, const h2og_params & wanted) : h2og_state(ctx, find_caches(ctx), wanted, nullptr) {
    groups.push_back(this);
    for (const auto & part : h2og_access::parts(*cache)) {
        Caches caches;
        caches.evicted = part.get();
        parts.emplace_back(new h2og_state(ctx, caches, wanted, this));
        groups.push_back(parts.back().get());
    }
}

h2og_state::h2og_state(llama_context & ctx, const Caches & caches, const h2og_params & wanted, h2og_state * first) :
    first(first != nullptr ? first : this), ctx(&ctx) {
    const auto & model   = ctx.get_model();
    const auto & hparams = model.hparams;
    const auto & kv_layers = h2og_access::layers(*caches.evicted);
    const uint32_t il0 = kv_layers[0].il;

    cache         = caches.evicted;
    window        = caches.window;
    has_recurrent = caches.has_recurrent;
    n_layer    = int32_t(kv_layers.size());
    n_head_kv  = int32_t(hparams.n_head_kv(il0));
    n_cells    = int32_t(cache->get_size());
    n_stream   = int32_t(cache->get_n_stream());
    head_dim_k = int32_t(hparams.n_embd_head_k(il0));
    head_dim_v = int32_t(hparams.n_embd_head_v(il0));
    can_renumber = !has_learned_positions(model);
    rotations.resize(first != nullptr ? 0 : hparams.n_layer_all);

    for (const auto & layer : kv_layers) {
        layer_ids.push_back(int32_t(layer.il));
        layers.push_back({ int32_t(layer.il), layer.k, layer.v, nullptr, ggml_backend_buffer_is_host(layer.k->buffer),
                           int32_t(hparams.n_head(layer.il)) });
        if (layers.back().is_host && (layers.size() == 1 || layers[layers.size() - 2].k->buffer != layer.k->buffer)) {
            prefer_large_pages(ggml_backend_buffer_get_base(layer.k->buffer), ggml_backend_buffer_get_size(layer.k->buffer));
        }
    }

    set_params(of_group(wanted, *cache, first == nullptr && h2og_access::parts(*cache).empty()));

    next_recalls.resize(n_stream);
    recalls.resize(n_stream);
    streams.resize(n_stream);
    for (auto & s : streams) {
        s.books.assign(n_cells, -1);
    }
    pos.assign(size_t(n_stream)*n_layer*n_head_kv*n_cells, -1);
    rope_pos = pos;
    recalled.assign(pos.size(), 0);
    allocate_scores();
    for (int32_t s = 0; s < n_stream; ++s) {
        follow_books(s);
    }
}

h2og_state::~h2og_state() = default;

void h2og_state::context_gone() {
    for (h2og_state * group : groups) {
        group->ctx = nullptr;
    }
}

void h2og_state::set_params(const h2og_params & wanted) {
    require_context();
    if (wanted.budget < 0 || wanted.budget > n_cells) {
        fail(H2OG_INVALID, "a budget of %d does not fit: the cache has %d cells", wanted.budget, n_cells);
    }
    if (wanted.block < 1) {
        fail(H2OG_INVALID, "block is %d, and must be at least 1", wanted.block);
    }
    if (!(wanted.decay > 0.0f && wanted.decay <= 1.0f)) {
        fail(H2OG_INVALID, "decay is %g, and must be in (0, 1]", double(wanted.decay));
    }
    if (wanted.attention < H2OG_ATTENTION_AUTO || wanted.attention > H2OG_ATTENTION_REFERENCE) {
        fail(H2OG_INVALID, "attention is %d, and there is no such kind", wanted.attention);
    }
    if (wanted.n_pos_max < 0) {
        fail(H2OG_INVALID, "n_pos_max is %d, and must not be negative", wanted.n_pos_max);
    }
    const bool on_host = std::all_of(layers.begin(), layers.end(), [](const Layer & l) { return l.is_host; });
    if (!on_host && (wanted.attention == H2OG_ATTENTION_FUSED || wanted.attention == H2OG_ATTENTION_REFERENCE)) {
        fail(H2OG_INVALID, "the CPU attention kernels need every evicted layer in host memory");
    }
    if (window != nullptr) {
        const auto & cparams = ctx->get_cparams();
        const uint32_t need = ctx->get_model().hparams.n_swa + cparams.n_ubatch;
        if (window->get_size() < need) {
            fail(H2OG_INVALID, "the sliding-window layers got %u cells and need %u (window + ubatch): create the context with "
                 "n_ctx of at least %u", window->get_size(), need, need);
        }
    }
    if (wanted.n_observed < 0) {
        fail(H2OG_INVALID, "n_observed is %d, and must not be negative", wanted.n_observed);
    }
    if (wanted.n_observed != (queries != nullptr ? queries->n : 0)) {
        ctx->synchronize();  // who may still write to the old ones
        queries = wanted.n_observed > 0 ? std::make_unique<Queries>(*this, wanted.n_observed) : nullptr;
    }
    params = wanted;
    const auto & hparams = ctx->get_model().hparams;
    const bool has_positions = hparams.rope_type != LLAMA_ROPE_TYPE_NONE || has_learned_positions(ctx->get_model());
    const int32_t trained = has_positions ? trained_positions(ctx->get_model(), ctx->get_cparams()) : INT32_MAX;
    n_pos_max = wanted.n_pos_max > 0 ? wanted.n_pos_max : trained;
    if (has_learned_positions(ctx->get_model())) {
        n_pos_max = std::min(n_pos_max, trained);  // there is no embedding for any position beyond
    }
    ++version;
    h2og_access::reserve_again(*ctx);
}

void h2og_state::set_attic(const h2og_attic_params & wanted) {
    settle();
    for (int32_t s = 0; s < n_stream; ++s) {
        follow_books(s);  // what was exchanged with the old one is in the books
    }
    attic = wanted.max_bytes > 0 ? std::make_unique<Attic>(*this, wanted) : nullptr;
    for (auto & recall : next_recalls) {
        recall.reset();
    }
}

void h2og_state::begin_recalls() {
    std::swap(recalls, next_recalls);
    for (int32_t s = 0; s < n_stream; ++s) {
        next_recalls[s].reset();
        if (recalls[s] != nullptr) {
            std::fill_n(recalled.begin() + index(s, 0, 0), index(1, 0, 0), uint8_t(0));
        }
    }
}

bool h2og_state::is_recalling() const {
    return std::any_of(recalls.begin(), recalls.end(), [](const auto & recall) { return recall != nullptr; });
}

bool h2og_state::only_asks(int32_t stream) const {
    return recalls[stream] != nullptr && recalls[stream]->only_asks();
}

void h2og_state::require_context() const {
    if (ctx == nullptr) {
        fail(H2OG_DETACHED, "the llama_context of this cache has been freed");
    }
}

int32_t h2og_state::stream_of(int32_t seq) const {
    if (seq < 0 || seq >= n_stream) {
        fail(H2OG_INVALID, "sequence %d does not exist: there are %d", seq, n_stream);
    }
    return seq;
}

void h2og_state::settle() {
    require_context();
    ctx->memory_update(false);
    synchronize();
}

h2og_view h2og_state::view(int32_t stream) const {
    const Stream & s = streams[stream];
    const size_t i = index(stream, 0, 0);
    return { stream, n_layer, n_head_kv, n_cells, s.n_used, s.n_past, params.decay,
             layer_ids.data(), scores + i, pos.data() + i, rope_pos.data() + i, recalled.data() + i };
}
