// h2og: eviction of single KV cache entries, per layer and per KV head, for llama.cpp.
//
// Words.  A cell is one row index of the cache, shared by all layers and heads.  An entry is one K and V pair at
// (layer, KV head, cell).  Layer indices count the layers of the evicted cache, 0 .. n_layer - 1; layer_ids tells the
// model layer of each.  Positions are those of the sequence; they grow for ever, whatever is evicted or re-rotated.
//
// Errors.  Every function that can fail returns H2OG_OK or a negative h2og_status and leaves a text in
// h2og_last_error() of the calling thread.  No exception and no abort crosses this edge.
//
// Groups.  Layers may have different numbers of cells (h2og_set_layer_cells).  Those of an equal number are a group: a cache
// with its own view, budget, policy and counters, whose layers are numbered on their own.  All groups hold the same sequence:
// llama_decode makes room in each, a rollback is exact where it is in all, and their rotary positions are renumbered together.
// Without different numbers of cells there is one group.
//
// Threads.  A cache belongs to its llama_context: calls on both from several threads at once are the caller's to prevent.
#ifndef H2OG_H
#define H2OG_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(LLAMA_BUILD)
#  define H2OG_API __declspec(dllexport)
#elif defined(__GNUC__)
#  define H2OG_API __attribute__((visibility("default")))
#else
#  define H2OG_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;
struct llama_model;

// cffi: begin
typedef struct h2og_cache h2og_cache;

enum h2og_status {
    H2OG_OK            =  0,
    H2OG_INVALID       = -1,  // an argument is out of range
    H2OG_UNSUPPORTED   = -2,  // this model or this context cannot be evicted from
    H2OG_FULL          = -3,  // no room, and nobody to name victims
    H2OG_POLICY        = -4,  // the policy failed, or named cells that cannot be evicted
    H2OG_POSITION      = -5,  // the trained context is reached and positions cannot be renumbered
    H2OG_NATIVE        = -6,  // llama.cpp or the backend failed
    H2OG_DETACHED      = -7,  // the llama_context is gone
    H2OG_STATE         = -8,  // a saved state does not fit this cache
};

// What llama_decode returns when room could not be made; the reason is h2og_last_error().
enum { H2OG_DECODE_FAILED = -100 };

enum h2og_attention {
    H2OG_ATTENTION_AUTO      = 0,  // fused where the layer is in host memory, composed elsewhere
    H2OG_ATTENTION_FUSED     = 1,  // our CPU kernel
    H2OG_ATTENTION_COMPOSED  = 2,  // llama.cpp's own; scores, if wanted, from stock graph nodes, on any backend
    H2OG_ATTENTION_REFERENCE = 3,  // plain scalar loops in double precision: slow, for tests
};

// Read-only picture of one sequence's cache, valid during the callback or until the next call on the cache.
typedef struct h2og_view {
    int32_t         seq;
    int32_t         n_layer, n_head_kv, n_cells;
    int32_t         n_used;     // entries per KV head
    int32_t         n_past;     // next position
    float           decay;      // per token decay of the scores
    const int32_t * layer_ids;  // [n_layer] model layer
    const float   * scores;     // [n_layer, n_head_kv, n_cells] decayed sum of attention mass
    const int32_t * pos;        // [n_layer, n_head_kv, n_cells] position of the entry, -1 empty
    const int32_t * rope_pos;   // [n_layer, n_head_kv, n_cells] position its key is rotated to, -1 empty
    const uint8_t * recalled;   // [n_layer, n_head_kv, n_cells] 1: the sequence's last recall fetched the entry back
} h2og_view;

// Names n victims per KV head: victims[n_layer][n_head_kv][n], cells.  Returns 0, or anything else to fail the decode.
// Called from inside llama_decode, on its thread, before the batch is placed.  A callback only looks: it must not decode, and
// calls that would change the cache or detach it fail with H2OG_INVALID.
typedef int32_t (*h2og_policy_fn)(void * user, const h2og_view * view, int32_t n, int32_t * victims);

// Called after each computed ubatch of n_tokens tokens.
typedef void (*h2og_observer_fn)(void * user, const h2og_view * view, int32_t n_tokens);

typedef struct h2og_params {
    int32_t budget;      // entries per KV head after an eviction, 1 .. n_cells; 0: never evict
    int32_t block;       // entries evicted at once while decoding, >= 1; 1 is the paper's one-token eviction
    int32_t attention;   // h2og_attention
    int32_t n_pos_max;   // rotary positions stay below this; 0: the trained context
    float   decay;       // per token decay of the scores, (0, 1]; 1: plain sum
    int32_t is_scored;   // 0: no scores are summed, they stay as they are
    int32_t n_observed;  // tokens of each sequence, the newest, whose queries are recorded; 0: none
} h2og_params;

typedef struct h2og_info {
    int32_t n_layer, n_head_kv, n_cells, n_stream;
    int32_t head_dim_k, head_dim_v;
    int32_t type_k, type_v;   // ggml_type
    int32_t n_pos_max;
    int32_t can_renumber;     // keys can be re-rotated to new positions
    int32_t is_host;          // all layers lie in host memory
    int64_t kv_bytes;         // K and V as allocated: evicted cache and sliding-window cache
    int64_t query_bytes;      // of the recorded queries
} h2og_info;

typedef struct h2og_counters {
    int64_t n_evicted;        // entries evicted per KV head since the sequence was cleared
    int64_t n_evictions;      // calls of the policy
    int64_t n_rebases;        // times the keys were re-rotated
} h2og_counters;

// Version of this library and of the llama.cpp it is built from, for example "0.1.0 (llama-cpp-python 0.3.36)".  Static.
H2OG_API const char * h2og_version(void);

// Text of the last error on this thread, "" if none.  Valid until the next call on this thread.
H2OG_API const char * h2og_last_error(void);

// H2OG_OK if caches of this context can be evicted from, else H2OG_UNSUPPORTED with the reason in h2og_last_error().
H2OG_API int32_t h2og_check(struct llama_context * ctx);

H2OG_API h2og_params h2og_default_params(void);

// Attaches to the KV cache of ctx, empty or not.  On success *out is owned by the caller: free it with h2og_detach(),
// before or after llama_free(ctx).  Detaching clears the sequences that entries were evicted from or whose positions were
// renumbered, since llama.cpp alone cannot go on with them; the others stay.
H2OG_API int32_t h2og_attach(struct llama_context * ctx, const h2og_params * params, h2og_cache ** out);
H2OG_API void    h2og_detach(h2og_cache * cache);

// Before a context of this model is made: how many cells the cache of each layer shall have, n = the model's layers; 0: as many
// as the context (n_ctx, the most that is allowed).  Layers of equal numbers share a cache, whose cells are rounded up to a
// multiple of 256, as n_ctx is; all are counted per sequence.  Sliding-window and recurrent layers ignore theirs.  n = 0 forgets them.  Contexts made already stay as they are.  H2OG_UNSUPPORTED: layers
// of this model read other layers' caches.
H2OG_API int32_t h2og_set_layer_cells(struct llama_model * model, const int32_t * n_cells, int32_t n);

// How many groups the layers form, or a status; and the i-th, by first layer.  Group 0 is the attached cache itself; the others
// are borrowed from it, and end with it.  h2og_attach() gave each the same params, its budget at most its cells:
// h2og_set_params() on a group gives it its own.  h2og_rebase(), h2og_rollback_min(), h2og_set_query_weights() and the least
// n_pos_max are those of all groups, whichever is asked.
H2OG_API int32_t h2og_n_groups (h2og_cache * cache);
H2OG_API int32_t h2og_get_group(h2og_cache * cache, int32_t i, h2og_cache ** out);

H2OG_API int32_t h2og_get_info(h2og_cache * cache, h2og_info * out);
H2OG_API int32_t h2og_get_counters(h2og_cache * cache, int32_t seq, h2og_counters * out);

// Refreshes the picture of a sequence: waits for the backends, follows llama.cpp's books, copies scores from devices.
// The memory behind it lives until h2og_detach().
H2OG_API int32_t h2og_get_view(h2og_cache * cache, int32_t seq, h2og_view * out);

// Changes any of them, checked as in h2og_attach.  Another n_observed starts without recorded queries.
H2OG_API int32_t h2og_set_params(h2og_cache * cache, const h2og_params * params);

// Weights of the next batch's queries in the scores, in batch order; n = 0: all 1.  Copied; used by the next llama_decode, whether
// it succeeds or not.
H2OG_API int32_t h2og_set_query_weights(h2og_cache * cache, const float * weights, int32_t n);

// user is handed to fn; fn = NULL takes the callback away.
H2OG_API int32_t h2og_set_policy  (h2og_cache * cache, h2og_policy_fn   fn, void * user);
H2OG_API int32_t h2og_set_observer(h2og_cache * cache, h2og_observer_fn fn, void * user);

// Evicts victims[n_layer][n_head_kv][n] now; where there are several groups, not all of one.
H2OG_API int32_t h2og_evict(h2og_cache * cache, int32_t seq, const int32_t * victims, int32_t n);

// Asks the policy until no more than n_keep entries per KV head are left.  Returns how many were evicted, or a status.
H2OG_API int32_t h2og_make_room(h2og_cache * cache, int32_t seq, int32_t n_keep);

// Re-rotates every key to consecutive positions per layer and head, which end where those of the fullest group do.
H2OG_API int32_t h2og_rebase(h2og_cache * cache, int32_t seq);

// The smallest p for which llama_memory_seq_rm(mem, seq, p, -1) is exact; below it, llama_memory_seq_rm returns false.
H2OG_API int32_t h2og_rollback_min(h2og_cache * cache, int32_t seq);

// The reading functions below may be called from a policy or an observer.

// Keys or values in n cells of a layer as the attention sees them: float32 out[n_head_kv][n][head_dim].  cells = NULL: all of
// them, with n = n_cells.
H2OG_API int32_t h2og_read_keys  (h2og_cache * cache, int32_t seq, int32_t layer, const int32_t * cells, int32_t n, float * out);
H2OG_API int32_t h2og_read_values(h2og_cache * cache, int32_t seq, int32_t layer, const int32_t * cells, int32_t n, float * out);

// Positions of the recorded queries, oldest first: out[n_observed]; -1 where there are none yet, which come first.
H2OG_API int32_t h2og_read_query_pos(h2og_cache * cache, int32_t seq, int32_t * out);

// The recorded queries of a layer in that order, as its attention saw them, before scaling; 0 where there are none yet:
// float32 out[n_observed][n_head][head_dim_k].  Query head h attends to KV head h/(n_head/n_head_kv).  After a renumbering they
// are turned with the keys, to where a query of their position would be now.
H2OG_API int32_t h2og_read_queries(h2og_cache * cache, int32_t seq, int32_t layer, float * out);

// A layer's attention: the softmax over softcap*tanh(scale*q.k/softcap), or over scale*q.k where softcap is 0.
typedef struct h2og_layer {
    int32_t n_head;      // query heads
    float   scale, softcap;
    int32_t has_sinks;   // each head has a logit of its own in the softmax
    int32_t n_pair;      // pairs of elements of a head that the layer rotates; 0: it does not
} h2og_layer;

H2OG_API int32_t h2og_get_layer (h2og_cache * cache, int32_t layer, h2og_layer * out);
H2OG_API int32_t h2og_read_sinks(h2og_cache * cache, int32_t layer, float * out);  // float32 out[n_head]

// How the layer rotates queries and keys: p positions turn elements (x, y) = (first[i], second[i]) of a head by a = p*angle[i]
// to (x*cos(a) - y*sin(a), x*sin(a) + y*cos(a)).  [n_pair] each, angles in radians.
H2OG_API int32_t h2og_read_rotation(h2og_cache * cache, int32_t layer, int32_t * first, int32_t * second, double * angle);

// Where evicted entries stay, so that they can be recalled.
typedef struct h2og_attic_params {
    int64_t max_bytes;        // of their rows, of all sequences; beyond it the least-scored are dropped.  0: nothing is kept
    int32_t type_k, type_v;   // ggml_type they are kept as; -1: the cache's own
    const char * folder;      // NULL: host memory; else of a file that is mapped, and that nobody else sees
} h2og_attic_params;

typedef struct h2og_attic_info {
    int32_t n_entry;          // per KV head, of the sequence
    int32_t type_k, type_v;
    int64_t bytes;            // of rows, as allocated, of all sequences
    int64_t max_bytes;
    int64_t n_dropped;        // entries of all heads since the sequence was cleared
    int64_t n_recalled;       // likewise
} h2og_attic_info;

// Forgets what an attic held before.  Each group has its own.  Beyond max_bytes the sequence that needs room drops its own
// least-scored, unless another has much more: then that one does, until all that need room have about as much.
H2OG_API int32_t h2og_set_attic(h2og_cache * cache, const h2og_attic_params * params);
H2OG_API int32_t h2og_get_attic(h2og_cache * cache, int32_t seq, h2og_attic_info * out);

// Positions of a layer's entries there, in no order: out[n_head_kv][n_entry].
H2OG_API int32_t h2og_read_attic_pos(h2og_cache * cache, int32_t seq, int32_t layer, int32_t * out);

typedef struct h2og_span { int32_t first, end; } h2og_span;  // positions, end not included

enum { H2OG_ALIKE_HEAD = 0, H2OG_ALIKE_LAYER = 1, H2OG_ALIKE_MODEL = 2 };

typedef struct h2og_recall_params {
    int32_t n_most;           // exchanges of each KV head
    int32_t n_asked;          // the newest of the batch's queries, among which those lie that ask
    int32_t ask_every;        // each how-manieth of them does, from the newest back
    int32_t n_before, n_after;  // neighbours that come with what is asked for, positions before it and behind
    int32_t alike;            // H2OG_ALIKE_*: whose heads exchange the same positions, for policies that evict so
    int32_t n_exact;          // the newest of the batch's queries, which attend to what stays evicted too
} h2og_recall_params;

// While the next batch is decoded, before each layer attends, queries of the sequence's tokens in it fetch back entries that they
// attend to, in place of entries they do not, other than those at positions to keep.  Each ubatch of the batch does so for
// itself.  h2og_rollback_min() rises above the positions whose entries were exchanged: keep the newest, if they are to be rolled
// back.  Used by the next batch that is placed; emptying the sequence withdraws it.  Of each group on its own.
// The outputs of a layer for its n_exact newest queries are those of the cache and of all evicted entries that are kept: what a full
// cache would give them, to rounding.  Not with llama.cpp's own attention, nor in layers that use the cache of another layer.
// With H2OG_ALIKE_MODEL no layer knows what to fetch before all have asked: the batch only asks, and counts neither for scores nor
// for observers.  Roll it back then, exchange with h2og_recall_asked(), and decode it again; or first let it ask once more, since
// upper layers ask otherwise after a recall.  What came the first time is an entry like others then: sparing it as well was
// measured, and finds less.
H2OG_API int32_t h2og_recall_next(h2og_cache * cache, int32_t seq, const h2og_span * keep, int32_t n_keep, const h2og_recall_params * params);
H2OG_API int32_t h2og_recall_asked(h2og_cache * cache, int32_t seq);
H2OG_API int32_t h2og_withdraw_recall(h2og_cache * cache, int32_t seq);  // whether there is one or not

// What llama.cpp's own saved state lacks, and cannot be restored without once entries were evicted: positions, scores,
// counters, recorded queries, and evicted entries as far as they are kept, which are most of it.  Save after llama_state_get_data and load after
// llama_state_set_data of the same state.  h2og_state_size returns bytes (or a status); save writes exactly those.
H2OG_API int64_t h2og_state_size(h2og_cache * cache, int32_t seq);
H2OG_API int32_t h2og_state_save(h2og_cache * cache, int32_t seq, uint8_t * out, int64_t size);
H2OG_API int32_t h2og_state_load(h2og_cache * cache, int32_t seq, const uint8_t * data, int64_t size);

// Work on rows of cells for policies, on plain memory of the caller's and of no cache; a row is n_cells long and follows on the one
// before it.  A score must be a number or an infinity: otherwise H2OG_POLICY.

// The n lowest-scored of each row's evictable cells, lowest first, and of equal ones the oldest first: out[n_rows][n].  H2OG_INVALID:
// a row has fewer.
H2OG_API int32_t h2og_lowest(const float * scores, const int32_t * pos, const uint8_t * evictable, int64_t n_rows, int32_t n_cells,
                             int32_t n, int32_t * out);

// Marks the n highest-scored of them instead, of equal ones the newest: out[n_rows][n_cells], 1 or 0.
H2OG_API int32_t h2og_highest(const float * scores, const int32_t * pos, const uint8_t * evictable, int64_t n_rows, int32_t n_cells,
                              int32_t n, uint8_t * out);

// Marks the positions from start on, before end, both 0 or more: out[n], 1 or 0.
H2OG_API int32_t h2og_within(const int32_t * pos, int64_t n, int64_t start, int64_t end, uint8_t * out);

// Scores divided by sums[n_past - pos], or by the last of sums where there are fewer; [n] of each.
H2OG_API int32_t h2og_rates(const float * scores, const int32_t * pos, int64_t n, int32_t n_past, const float * sums, int32_t n_sums,
                            float * out);

// The numbers of entries whose positions were was[n_rows][n_was], in the order of now[n_rows][n_now]; 0 in empty cells and where
// was lacks the position: numbers[n_numbers][n_rows][n_was], out[n_numbers][n_rows][n_now].
H2OG_API int32_t h2og_carried(const float * numbers, const int32_t * was, const int32_t * now, int32_t n_numbers, int64_t n_rows,
                              int32_t n_was, int32_t n_now, float * out);

// 1 - cos between the last of vectors[n_rows][n][dim] and the mean of their row's directions, 1 for a vector of 0:
// out[n_rows][n_last].
H2OG_API int32_t h2og_distances(const float * vectors, int64_t n_rows, int32_t n, int32_t dim, int32_t n_last, float * out);

// Lengths of vectors[n][dim]: out[n].
H2OG_API int32_t h2og_lengths(const float * vectors, int64_t n, int32_t dim, float * out);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif
