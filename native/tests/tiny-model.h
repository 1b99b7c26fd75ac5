// A llama model of random weights, small enough to decode thousands of tokens a second, and a context on it.
#pragma once

#include "check.h"

#include "ggml.h"
#include "gguf.h"
#include "h2og.h"
#include "llama.h"

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace tiny {

constexpr int32_t N_VOCAB = 64, N_EMBD = 128, N_HEAD = 4, N_HEAD_KV = 2, HEAD_DIM = 64, N_FF = 64, N_CTX_TRAIN = 256;

inline void write_model(const std::string & path, int32_t n_layer) {
    gguf_context * file = gguf_init_empty();
    gguf_set_val_str(file, "general.architecture", "llama");
    gguf_set_val_u32(file, "llama.context_length", N_CTX_TRAIN);
    gguf_set_val_u32(file, "llama.embedding_length", N_EMBD);
    gguf_set_val_u32(file, "llama.block_count", uint32_t(n_layer));
    gguf_set_val_u32(file, "llama.feed_forward_length", N_FF);
    gguf_set_val_u32(file, "llama.attention.head_count", N_HEAD);
    gguf_set_val_u32(file, "llama.attention.head_count_kv", N_HEAD_KV);
    gguf_set_val_u32(file, "llama.attention.key_length", HEAD_DIM);
    gguf_set_val_u32(file, "llama.attention.value_length", HEAD_DIM);
    gguf_set_val_f32(file, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf_set_val_u32(file, "llama.rope.dimension_count", HEAD_DIM);
    gguf_set_val_u32(file, "llama.vocab_size", N_VOCAB);
    gguf_set_val_str(file, "tokenizer.ggml.model", "none");

    ggml_context * ctx = ggml_init({ size_t(16) << 20, nullptr, false });
    std::mt19937 rng(7);
    std::normal_distribution<float> gaussian;
    const auto add = [&](const std::string & name, int64_t ne0, int64_t ne1, float scale) {
        ggml_tensor * t = ne1 == 0 ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, ne0) : ggml_new_tensor_2d(ctx, GGML_TYPE_F32, ne0, ne1);
        ggml_set_name(t, name.c_str());
        for (int64_t i = 0; i < ggml_nelements(t); ++i) {
            static_cast<float *>(t->data)[i] = ne1 == 0 ? 1.0f : scale*gaussian(rng);
        }
        gguf_add_tensor(file, t);
    };
    add("token_embd.weight", N_EMBD, N_VOCAB, 1.0f);
    add("output_norm.weight", N_EMBD, 0, 0.0f);
    add("output.weight", N_EMBD, N_VOCAB, 0.1f);
    for (int32_t i = 0; i < n_layer; ++i) {
        const std::string blk = "blk." + std::to_string(i) + ".";
        add(blk + "attn_norm.weight", N_EMBD, 0, 0.0f);
        add(blk + "attn_q.weight", N_EMBD, N_HEAD*HEAD_DIM, 0.2f);
        add(blk + "attn_k.weight", N_EMBD, N_HEAD_KV*HEAD_DIM, 0.2f);
        add(blk + "attn_v.weight", N_EMBD, N_HEAD_KV*HEAD_DIM, 0.1f);
        add(blk + "attn_output.weight", N_HEAD*HEAD_DIM, N_EMBD, 0.1f);
        add(blk + "ffn_norm.weight", N_EMBD, 0, 0.0f);
        add(blk + "ffn_gate.weight", N_EMBD, N_FF, 0.1f);
        add(blk + "ffn_up.weight", N_EMBD, N_FF, 0.1f);
        add(blk + "ffn_down.weight", N_FF, N_EMBD, 0.1f);
    }
    CHECK(gguf_write_to_file(file, path.c_str(), false), "cannot write %s", path.c_str());
    gguf_free(file);
    ggml_free(ctx);
}

struct FreeModel   { void operator()(llama_model * m) const { llama_model_free(m); } };
struct FreeContext { void operator()(llama_context * c) const { llama_free(c); } };
using Model   = std::unique_ptr<llama_model, FreeModel>;
using Context = std::unique_ptr<llama_context, FreeContext>;

inline Model load_model(int32_t n_layer) {
    const std::string path = "h2og-tiny-" + std::to_string(n_layer) + ".gguf";
    write_model(path, n_layer);
    Model model(llama_model_load_from_file(path.c_str(), llama_model_default_params()));
    CHECK(model != nullptr, "cannot load %s", path.c_str());
    remove(path.c_str());
    return model;
}

struct Options {
    uint32_t n_ctx = 256, n_ubatch = 32, n_seq = 1;
    ggml_type type_k = GGML_TYPE_F16, type_v = GGML_TYPE_F16;
    bool flash = true;
    int32_t n_threads = 1;
    std::vector<int32_t> layer_cells;  // as h2og_set_layer_cells takes them
};

inline Context make_context(llama_model & model, const Options & o) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx = o.n_ctx*o.n_seq;
    p.n_batch = p.n_ubatch = o.n_ubatch;
    p.n_seq_max = o.n_seq;
    p.n_threads = p.n_threads_batch = o.n_threads;
    p.flash_attn_type = o.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    p.type_k = o.type_k;
    p.type_v = o.type_v;
    CHECK(h2og_set_layer_cells(&model, o.layer_cells.data(), int32_t(o.layer_cells.size())) == 0, "%s", h2og_last_error());
    Context ctx(llama_init_from_model(&model, p));
    CHECK(ctx != nullptr, "no context: K %s V %s", ggml_type_name(o.type_k), ggml_type_name(o.type_v));
    return ctx;
}

// llama_decode of tokens at the positions that follow; returns its code.
inline int32_t decode(llama_context & ctx, const std::vector<llama_token> & tokens, int32_t seq = 0) {
    const llama_pos first = llama_memory_seq_pos_max(llama_get_memory(&ctx), seq) + 1;
    llama_batch batch = llama_batch_init(int32_t(tokens.size()), 0, 1);
    batch.n_tokens = int32_t(tokens.size());
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        batch.token[i] = tokens[i];
        batch.pos[i] = first + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = i == batch.n_tokens - 1;
    }
    const int32_t code = llama_decode(&ctx, batch);
    llama_batch_free(batch);
    return code;
}

inline std::vector<float> logits(llama_context & ctx) {
    const float * row = llama_get_logits_ith(&ctx, -1);
    return std::vector<float>(row, row + N_VOCAB);
}

inline std::vector<llama_token> random_tokens(std::mt19937 & rng, int32_t n) {
    std::vector<llama_token> out(n);
    for (auto & t : out) {
        t = llama_token(rng() % N_VOCAB);
    }
    return out;
}

} // namespace tiny
