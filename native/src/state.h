// Eviction state of one llama_context: entry positions and scores of its cache, and what is done to them.
//
// Where layers have caches of several sizes, each cache has a state, a group.  The first group knows all of them, and what
// belongs to the context: queries, rotations, the sliding-window half.  They share positions and the shift of rotary ones.
#pragma once

#include "access.h"
#include "attic.h"
#include "error.h"
#include "h2og.h"
#include "queries.h"
#include "recall.h"
#include "rotation.h"
#include "rows.h"

#include <memory>
#include <vector>

namespace h2og {

struct Layer {
    int32_t       il;              // model layer
    ggml_tensor * k;               // [n_embd_k, n_cells, n_stream]
    ggml_tensor * v;               // [n_embd_v, n_cells, n_stream]; nullptr where V is part of K (MLA)
    ggml_tensor * scores;          // float32 [n_cells, n_head_kv, n_stream] on the layer's device
    bool          is_host;
    int32_t       n_head;          // query heads

    // Read from the graph.
    float         scale   = 1.0f;
    float         softcap = 0.0f;        // 0: none
    const ggml_tensor * sinks = nullptr; // float32 [n_head], of the model
};

// One sequence.
struct Stream {
    std::vector<int32_t> books;    // [n_cells] llama.cpp's position of each cell as last seen, -1 empty
    int32_t n_used     = 0;        // occupied cells
    int32_t n_past     = 0;        // next position
    int32_t rope_shift = 0;        // position minus rotary position of new tokens
    std::vector<int32_t> window_shift;  // the same for the keys of each window layer
    int32_t exact_from = 0;        // cells with positions from here on hold their own entry in every head
    int64_t n_evicted  = 0;
    int64_t n_evictions = 0;
    int64_t n_rebases  = 0;
};

// Where the key of an entry was turned to.
struct Turned { int32_t pos, from, to; };

struct FreeGgml   { void operator()(ggml_context * c) const { ggml_free(c); } };
struct FreeBuffer { void operator()(ggml_backend_buffer_t b) const { ggml_backend_buffer_free(b); } };

} // namespace h2og

struct h2og_state {
    // Of the first group, and of all others with it; a budget beyond a group's cells is that of its cells.
    h2og_state(llama_context & ctx, const h2og_params & params);
    ~h2og_state();

    h2og_state(const h2og_state &) = delete;
    h2og_state & operator=(const h2og_state &) = delete;

    // The caches of ctx that concern us; throws H2OG_UNSUPPORTED with the reason.
    struct Caches {
        llama_kv_cache * evicted = nullptr;
        llama_kv_cache * window  = nullptr;  // sliding-window half of an iSWA cache
        bool             has_recurrent = false;
    };
    static Caches find_caches(llama_context & ctx);

    void set_params(const h2og_params & params);
    void set_attic(const h2og_attic_params & params);
    void context_gone();
    void require_context() const;

    // Follows llama.cpp's books: new cells get their position, emptied ones lose theirs.
    void follow_books(int32_t stream);

    // The sequence has been emptied, or is about to be.
    void forget(int32_t stream);

    // Makes room for n tokens of a sequence in all groups, renumbering positions first where they would pass n_pos_max.
    void before_batch(int32_t seq, int32_t n);

    int32_t make_room(int32_t seq, int32_t n_keep);
    void    evict(int32_t stream, const int32_t * victims, int32_t n);
    void    move_rows(const h2og::Layer & layer, int32_t stream, const std::vector<h2og::Move> & moves) const;
    void    rebase(int32_t stream);     // in all groups
    void    require_rotations() const;  // throws unless every layer's keys can be re-rotated
    void    require_renumbering() const; // throws, with the reason, unless can_renumber
    void    learn_rotations();          // decides can_renumber, once a graph has been built
    int32_t rollback_min(int32_t stream);  // of all groups

    // The view's scores are current after synchronize().
    h2og_view view(int32_t stream) const;
    void      synchronize();   // waits for the backends and fetches the scores of device layers
    void      settle();        // also carries out sequence copies that llama.cpp has only queued

    // Scores of device layers, host to device.
    void upload_scores(int32_t stream);

    // Takes over what llama.cpp is about to copy from one stream to another.
    void copy_stream(int32_t from, int32_t to);

    // Keys or values of a layer as the attention sees them: float32 out[n_head_kv][cells.size()][head_dim].
    void read_heads(int32_t stream, int32_t layer, bool is_v, const std::vector<int32_t> & cells, float * out) const;

    // The newest queries of a layer as the attention would see them now, beside the present keys, oldest first, 0 where there
    // are none yet: float32 out[n_observed][n_head][head_dim_k].  Only while queries are recorded.
    void read_queries(int32_t stream, int32_t layer, float * out) const;

    // Where the keys or values of a layer lie; without a tensor where V is part of K.
    h2og::RowLayout rows_of(const h2og::Layer & layer, bool is_v) const;

    // How a model layer of the evicted cache rotates.
    std::vector<h2og::Pair> pairs_of(int32_t il) const;

    int32_t stream_of(int32_t seq) const;

    size_t  index(int32_t stream, int32_t layer, int32_t head) const {
        return ((size_t(stream)*n_layer + layer)*n_head_kv + head)*n_cells;
    }

    h2og_state * const        first;            // group, which is this one unless a part was given
    std::vector<h2og_state *> groups;           // of the first: all of them, itself included

    llama_context *  ctx;
    llama_kv_cache * cache;
    llama_kv_cache * window;
    bool             has_recurrent;

    h2og_params params;
    int32_t     version = 0;         // of params; graphs of another version are not reused

    int32_t n_layer, n_head_kv, n_cells, n_stream;
    int32_t head_dim_k, head_dim_v;
    int32_t n_pos_max;
    bool    can_renumber;

    std::vector<h2og::Layer>  layers;
    std::vector<int32_t>      layer_ids;
    std::vector<h2og::Rotation> rotations;  // by model layer; of the first group
    std::vector<h2og::Stream> streams;
    std::unique_ptr<h2og::Queries> queries;  // nullptr: none are recorded
    std::unique_ptr<h2og::Attic>   attic;    // nullptr: what is evicted is lost

    // By stream, nullptr: none.
    std::vector<std::unique_ptr<h2og::Recall>> next_recalls;  // of the next batch
    std::vector<std::unique_ptr<h2og::Recall>> recalls;       // of the batch being decoded, until the next
    bool is_recalling() const;
    bool only_asks(int32_t stream) const;  // the batch being decoded, of that sequence
    void begin_recalls();                  // of a batch that is about to be decoded

    float *              scores = nullptr;  // [n_stream, n_layer, n_head_kv, n_cells]; host layers' tensors lie here
    std::vector<int32_t> pos;               // same shape
    std::vector<int32_t> rope_pos;          // same shape
    std::vector<uint8_t> recalled;          // same shape: fetched back by the last recall

    // Of the first group.
    bool in_callback = false;                  // a policy or an observer is running
    std::vector<float> query_weights;          // of the next batch, in batch order; empty: all 1
    std::vector<float> batch_weights;          // of the batch being decoded

    h2og_policy_fn   policy        = nullptr;
    void *           policy_user   = nullptr;
    h2og_observer_fn observer      = nullptr;
    void *           observer_user = nullptr;

    // Moves rows through graphs on the layer's backend even where they could be copied directly (tests).
    bool force_graph_moves = false;

private:
    h2og_state(llama_context & ctx, const Caches & caches, const h2og_params & params, h2og_state * first);

    std::vector<std::unique_ptr<h2og_state>> parts;  // of the first: the other groups
    std::vector<std::unique_ptr<ggml_context, h2og::FreeGgml>>                             score_ctxs;
    std::vector<std::unique_ptr<std::remove_pointer_t<ggml_backend_buffer_t>, h2og::FreeBuffer>> score_buffers;

    void make_room_for(int32_t seq, int32_t n);
    void turn_entries(int32_t stream, int32_t begin);
    void turn_attic(int32_t stream, int32_t layer, int32_t head, const std::vector<h2og::Turned> & live);
    int32_t exact_from(int32_t stream) const;
    void allocate_scores();
    void clear_entry(int32_t stream, int32_t cell);
};

namespace h2og {

// While it lives, a callback of the caller's runs.
class CallbackGuard {
public:
    explicit CallbackGuard(h2og_state & any) : state(*any.first) { state.in_callback = true; }
    ~CallbackGuard() { state.in_callback = false; }

    CallbackGuard(const CallbackGuard &) = delete;
    CallbackGuard & operator=(const CallbackGuard &) = delete;

private:
    h2og_state & state;
};

} // namespace h2og
