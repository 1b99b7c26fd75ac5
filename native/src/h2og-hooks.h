// The functions that the patched llama.cpp calls.  None of them throws.
#pragma once

#include <cstdint>

struct ggml_tensor;
struct llama_batch;
struct llama_context;
struct llama_ubatch;
struct llm_graph_context;
class  llama_kv_cache;

struct h2og_state;

// Attention of one layer, or nullptr to let llama.cpp build its own.
ggml_tensor * h2og_build_attention(
        const llm_graph_context & graph,
        ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla,
        float kq_scale, int il);

// Before a batch is placed: makes room.  0 to go on, else what llama_decode returns.
int h2og_before_batch(h2og_state * state, const llama_batch & batch);

// After a ubatch has been handed to the backends.
void h2og_after_ubatch(h2og_state * state, const llama_ubatch & ubatch);

// Before llama.cpp removes positions [p0, p1) of a sequence: false if that would not be exact.
bool h2og_before_seq_rm(h2og_state * state, const llama_kv_cache * cache, int32_t seq_id, int32_t p0, int32_t p1);

// Before llama.cpp empties the cache.
void h2og_before_clear(h2og_state * state, const llama_kv_cache * cache);

// Before llama.cpp copies a sequence: false to leave it alone.  Entries differ per head, so only whole streams are copied.
bool h2og_before_seq_cp(h2og_state * state, const llama_kv_cache * cache, int32_t seq_src, int32_t seq_dst, int32_t p0, int32_t p1);

// Before llama.cpp shifts positions: always false, since positions here are renumbered by re-rotation alone.
bool h2og_before_shift(h2og_state * state, const llama_kv_cache * cache);
