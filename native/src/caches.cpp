// Which of a context's caches entries are evicted from, and why there may be none.
#include "state.h"

#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <string>

using namespace h2og;

h2og_state::Caches h2og_state::find_caches(llama_context & ctx) {
    const llama_model & model = ctx.get_model();
    const auto & hparams = model.hparams;
    const std::string arch = model.arch_name();

    Caches res;
    llama_memory_i * memory = ctx.get_memory();
    if (memory == nullptr) {
        fail(H2OG_UNSUPPORTED, "architecture '%s' has no KV cache", arch.c_str());
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        res.evicted = hybrid->get_mem_attn();
        res.has_recurrent = true;
    } else if (auto * hybrid_iswa = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        res.evicted = hybrid_iswa->get_mem_attn()->get_base();
        res.window  = hybrid_iswa->get_mem_attn()->get_swa();
        res.has_recurrent = true;
    } else if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        res.evicted = iswa->get_base();
        res.window  = iswa->get_swa();
    } else if (auto * plain = dynamic_cast<llama_kv_cache *>(memory)) {
        res.evicted = plain;
    } else if (dynamic_cast<llama_memory_recurrent *>(memory)) {
        fail(H2OG_UNSUPPORTED, "architecture '%s' is recurrent: it has no KV cache, and its state does not grow", arch.c_str());
    } else {
        fail(H2OG_UNSUPPORTED, "architecture '%s' keeps a sparse-attention index beside its cache, which would still "
                               "hold what was evicted", arch.c_str());
    }

    const llama_kv_cache & cache = *res.evicted;
    auto layers = h2og_access::layers(cache);
    for (const auto & part : h2og_access::parts(cache)) {
        const auto & more = h2og_access::layers(*part);
        layers.insert(layers.end(), more.begin(), more.end());
    }
    const auto & cparams = ctx.get_cparams();
    if (layers.empty()) {
        fail(H2OG_UNSUPPORTED, "architecture '%s': every attention layer has a sliding window, so its cache is bounded already",
             arch.c_str());
    }
    if (h2og_access::shares(cache)) {
        fail(H2OG_UNSUPPORTED, "this context shares its KV cache with another one");
    }
    if (hparams.use_alibi || hparams.f_max_alibi_bias > 0.0f) {
        fail(H2OG_UNSUPPORTED, "architecture '%s' uses ALiBi: its bias is read from cell positions, which after per-head "
                               "eviction are not those of the entries", arch.c_str());
    }
    if (hparams.n_rel_attn_bkts > 0) {
        fail(H2OG_UNSUPPORTED, "architecture '%s' uses relative position buckets, read from cell positions", arch.c_str());
    }
    if (hparams.ple_n_heads > 0) {
        fail(H2OG_UNSUPPORTED, "architecture '%s' reads earlier tokens from the cells' books", arch.c_str());
    }
    if (!cparams.causal_attn) {
        fail(H2OG_UNSUPPORTED, "this context has non-causal attention");
    }
    if (cparams.n_seq_max > 1 && cparams.kv_unified) {
        fail(H2OG_UNSUPPORTED, "a unified cache shares cells between sequences; create the context with kv_unified = false");
    }
    const uint32_t il0 = layers[0].il;
    for (const auto & layer : layers) {
        if (hparams.n_head_kv(layer.il) != hparams.n_head_kv(il0) ||
            hparams.n_embd_head_k(layer.il) != hparams.n_embd_head_k(il0) ||
            hparams.n_embd_head_v(layer.il) != hparams.n_embd_head_v(il0)) {
            fail(H2OG_UNSUPPORTED, "architecture '%s': its layers differ in KV heads or head size (layer %u against layer %u)",
                 arch.c_str(), layer.il, il0);
        }
        if (h2og_access::v_trans(cache) && !ggml_backend_buffer_is_host(layer.k->buffer)) {
            fail(H2OG_UNSUPPORTED, "V is transposed on a device; turn flash attention on");
        }
    }
    return res;
}
