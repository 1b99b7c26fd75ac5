// The one place that reaches into private members of llama.cpp's classes.
#pragma once

#include "llama-context.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <utility>
#include <vector>

struct h2og_access {
    static h2og_state *&           state  (llama_kv_cache & c)       { return c.h2og; }
    static llama_kv_cells &        cells  (llama_kv_cache & c, uint32_t stream) { return c.v_cells[stream]; }
    static uint32_t                stream (const llama_kv_cache & c, llama_seq_id seq) { return c.seq_to_stream[seq]; }
    static bool                    v_trans(const llama_kv_cache & c) { return c.v_trans; }
    static bool                    shares (const llama_kv_cache & c) { return c.other != nullptr; }
    static const auto &            layers (const llama_kv_cache & c) { return c.layers; }

    // Caches of the layers with other numbers of cells, and their contexts of a batch.
    static const auto & parts(const llama_kv_cache & c) { return c.h2og_parts; }
    static const auto & parts(const llama_kv_cache_context & c) { return c.h2og_others; }
    static bool         holds(const llama_kv_cache_context & c, int32_t il) { return c.kv->map_layer_ids.count(il) != 0; }

    static uint32_t & search_from(llama_kv_cache & c, uint32_t stream) { return c.v_heads[stream]; }

    // Empties these cells of a stream, as removing their positions would.
    static void release(llama_kv_cache & c, uint32_t stream, const std::vector<int32_t> & cells) {
        for (const int32_t cell : cells) {
            c.v_cells[stream].rm(uint32_t(cell));
            c.v_heads[stream] = std::min(c.v_heads[stream], uint32_t(cell));  // where the search for free cells begins
        }
    }

    // Hadamard matrix that llama.cpp multiplies quantized keys (or values) with, n x n; nullptr if it does not.
    static const std::vector<float> * hadamard(const llama_kv_cache & c, int64_t n) {
        const auto it = c.attn_rot_hadamard.find(n);
        return it == c.attn_rot_hadamard.end() ? nullptr : &it->second;
    }
    static bool rotates_k(const llama_kv_cache & c) { return c.attn_rot_k; }
    static bool rotates_v(const llama_kv_cache & c) { return c.attn_rot_v; }
    static int32_t head_dim_k_all(const llama_kv_cache & c) { return c.n_embd_head_k_all; }

    static llama_cparams &         cparams(llama_context & c) { return c.cparams; }
    static std::shared_ptr<void> & anchor (llama_context & c) { return c.h2og_anchor; }
    static const auto &            backends(const llama_context & c) { return c.backends; }
    static auto abort_callback(const llama_context & c) { return std::make_pair(c.abort_callback, c.abort_callback_data); }
    static void                    reserve_again(llama_context & c) { c.sched_need_reserve = true; }
};
