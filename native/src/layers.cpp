// Layers with equal numbers of cells share a cache: which layer goes where, and the graph's inputs of each cache.
//
// llama.cpp's cache, where it is to hold layers of several sizes, holds those of its first layer's and makes a part, a cache
// like itself, for each further size.  Whatever is done to it is done to its parts.
#include "layers.h"
#include "access.h"
#include "error.h"
#include "h2og-hooks.h"

#include "llama-graph.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <algorithm>
#include <stdexcept>
#include <string>

void h2og::set_layer_cells(llama_model & model, const int32_t * n_cells, int32_t n) {
    const auto & hparams = model.hparams;
    if (n != 0 && n != int32_t(hparams.n_layer_all)) {
        fail(H2OG_INVALID, "cells for %d layers: the model has %u", n, hparams.n_layer_all);
    }
    if (n != 0 && hparams.n_layer_kv_from_start >= 0) {
        fail(H2OG_UNSUPPORTED, "architecture '%s': its upper layers read the caches of lower ones, so they have no number of "
                               "cells of their own", model.arch_name().c_str());
    }
    std::vector<uint32_t> cells;
    for (int32_t il = 0; il < n; ++il) {
        if (n_cells[il] < 0) {
            fail(H2OG_INVALID, "layer %d cannot have %d cells", il, n_cells[il]);
        }
        cells.push_back(uint32_t(n_cells[il]));
    }
    model.h2og_cells = std::move(cells);
}

uint32_t h2og_layer_size(const llama_model & model, int32_t il, uint32_t n_cells) {
    const uint32_t wanted = size_t(il) < model.h2og_cells.size() ? model.h2og_cells[il] : 0;
    return wanted != 0 ? wanted : n_cells;
}

std::vector<uint32_t> h2og_cache_sizes(
        const llama_model & model, const std::function<bool(int32_t)> & filter, bool has_window, uint32_t n_cells) {
    std::vector<uint32_t> sizes;
    if (model.h2og_cells.empty() || has_window) {
        return sizes;
    }
    for (uint32_t il = 0; il < model.hparams.n_layer_all; ++il) {
        if (!model.hparams.has_kv(il) || (filter && !filter(int32_t(il)))) {
            continue;
        }
        const uint32_t size = h2og_layer_size(model, int32_t(il), n_cells);
        if (size > n_cells) {
            throw std::runtime_error("layer " + std::to_string(il) + " is to have " + std::to_string(size) +
                                     " cells and the context has " + std::to_string(n_cells));
        }
        if (std::find(sizes.begin(), sizes.end(), size) == sizes.end()) {
            sizes.push_back(size);
        }
    }
    return sizes;
}

namespace {

const llama_kv_cache_context * evicted_context(const llama_memory_context_i * mctx) {
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_context *>(mctx)) {
        return hybrid->get_attn();
    }
    if (const auto * hybrid_iswa = dynamic_cast<const llama_memory_hybrid_iswa_context *>(mctx)) {
        return hybrid_iswa->get_attn()->get_base();
    }
    if (const auto * iswa = dynamic_cast<const llama_kv_cache_iswa_context *>(mctx)) {
        return iswa->get_base();
    }
    return static_cast<const llama_kv_cache_context *>(mctx);
}

void build_idxs(llm_graph_input_attn_k & in, ggml_context * ctx, const llama_ubatch & ubatch) {
    in.self_k_idxs = in.mctx->build_input_k_idxs(ctx, ubatch);
}

void build_idxs(llm_graph_input_attn_kv & in, ggml_context * ctx, const llama_ubatch & ubatch) {
    in.self_k_idxs = in.mctx->build_input_k_idxs(ctx, ubatch);
    in.self_v_idxs = in.mctx->build_input_v_idxs(ctx, ubatch);
    in.self_k_rot  = in.mctx->build_input_k_rot(ctx);
    in.self_v_rot  = in.mctx->build_input_v_rot(ctx);
}

// What llama.cpp's input of a cache is, for a part of it.  Base: llm_graph_input_attn_kv, or _k where V is part of K.
template <typename Base>
class PartInput : public Base {
public:
    PartInput(const llm_graph_context & g, size_t part, const llama_kv_cache_context * mctx) :
        Base(g.hparams, g.cparams, mctx), part(part) {
        build_idxs(*this, g.ctx0, g.ubatch);
        const int64_t n_stream = n_mask_stream(g.cparams, g.ubatch);
        this->self_kq_mask = ggml_new_tensor_4d(g.ctx0, g.cparams.flash_attn ? GGML_TYPE_F16 : GGML_TYPE_F32,
            mctx->get_n_kv(), g.ubatch.n_tokens/n_stream, 1, n_stream);
        ggml_set_input(this->self_kq_mask);
        this->self_kq_mask_cnv = this->self_kq_mask;
    }

    bool can_reuse(const llm_graph_params & params) override {
        this->mctx = h2og_access::parts(*evicted_context(params.mctx))[part].get();
        const int64_t n_tokens = params.ubatch.n_tokens, n_stream = n_mask_stream(params.cparams, params.ubatch);
        const ggml_tensor & mask = *this->self_kq_mask;
        return this->self_k_idxs->ne[0] == n_tokens &&
            mask.ne[0] == this->mctx->get_n_kv() && mask.ne[1] == n_tokens/n_stream && mask.ne[3] == n_stream;
    }

    const size_t part;

private:
    static int64_t n_mask_stream(const llama_cparams & cparams, const llama_ubatch & ubatch) {
        return cparams.kv_unified ? 1 : ubatch.n_seqs_unq;
    }
};

// The input of the part that holds layer il, made at its first layer; nullptr: no part does.
template <typename Base>
Base * part_input(const llm_graph_context & g, const llama_kv_cache_context * mctx, int il) {
    const auto & parts = h2og_access::parts(*mctx);
    for (size_t i = 0; i < parts.size(); ++i) {
        if (!h2og_access::holds(*parts[i], il)) {
            continue;
        }
        for (auto & input : g.res->inputs) {
            auto * in = dynamic_cast<PartInput<Base> *>(input.get());
            if (in != nullptr && in->part == i) {
                return in;
            }
        }
        return static_cast<Base *>(g.res->add_input(std::make_unique<PartInput<Base>>(g, i, parts[i].get())));
    }
    return nullptr;
}

} // namespace

llm_graph_input_attn_kv * h2og_part_input(const llm_graph_context & g, const llama_kv_cache_context * mctx, int il) {
    return part_input<llm_graph_input_attn_kv>(g, mctx, il);
}

llm_graph_input_attn_kv * h2og_input_of(const llm_graph_context & g, llm_graph_input_attn_kv * inp, int il) {
    auto * part = part_input<llm_graph_input_attn_kv>(g, inp->mctx, il);
    return part != nullptr ? part : inp;
}

llm_graph_input_attn_k * h2og_input_of(const llm_graph_context & g, llm_graph_input_attn_k * inp, int il) {
    auto * part = part_input<llm_graph_input_attn_k>(g, inp->mctx, il);
    return part != nullptr ? part : inp;
}
