// The functions that the patched llama.cpp calls.  None of them throws, but for h2og_cache_sizes.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

struct ggml_tensor;
struct llama_batch;
struct llama_context;
struct llama_model;
struct llama_ubatch;
struct llm_graph_context;
class  llama_kv_cache;
class  llama_kv_cache_context;
class  llm_graph_input_attn_k;
class  llm_graph_input_attn_kv;

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

// Numbers of cells that the layers of a cache of n_cells shall have, each once, by first layer; at most one: a single cache.
// Throws std::runtime_error, which makes llama_init_from_model fail, where they do not fit the model or the context.
std::vector<uint32_t> h2og_cache_sizes(
        const llama_model & model, const std::function<bool(int32_t)> & filter, bool has_window, uint32_t n_cells);

// Cells of one layer where the context has n_cells.
uint32_t h2og_layer_size(const llama_model & model, int32_t il, uint32_t n_cells);

// The graph's input for the part of a cache that holds a layer, or nullptr: the first cache holds it.
llm_graph_input_attn_kv * h2og_part_input(const llm_graph_context & graph, const llama_kv_cache_context * mctx, int il);

// The same, or inp itself.
llm_graph_input_attn_kv * h2og_input_of(const llm_graph_context & graph, llm_graph_input_attn_kv * inp, int il);
llm_graph_input_attn_k *  h2og_input_of(const llm_graph_context & graph, llm_graph_input_attn_k * inp, int il);
