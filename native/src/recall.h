// Recall: before a layer attends, the newest queries fetch back what they need of what was evicted.
//
//   score[c] = max over the queries t and the G query heads of  logit(t, c) - log(sum over the cache's entries of exp(logit))
//
// for the entries of cache and attic.  An entry comes with its neighbours: the score that counts is the largest of the n_after
// positions before and the n_before positions behind.  The best of the attic are exchanged with the worst of the cache that are not
// protected, in each layer and KV head on its own; or, where policies evict alike, in all heads of a layer or of the model.  For the
// last, the batch only asks: its upper layers vote, what they vote for is exchanged after it, and it is decoded again.
//
// Queries may also attend to what then is in the attic, as if nothing had been evicted: softmax and values over it, by the same kernel as
// over the cache, whose denominators have the sums of both.
#pragma once

#include "attic.h"
#include "h2og.h"

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

struct h2og_state;

namespace h2og {

struct Attention;
struct Kernel;
struct Plan;
struct Question;

using Span = std::pair<int32_t, int32_t>;  // positions, the end not included

// What a layer asks with.
struct LayerQueries {
    const char * q;                    // float32 [n_head][n_query][head_dim_k] of one sequence, with these strides in bytes
    size_t  q_query, q_head;
    int32_t n_query, n_head;
    int32_t n_exact;                   // the newest of them that attend to the attic
    float   scale, softcap;
    const float * sinks;               // [n_head] or nullptr
};

struct HeadId { int32_t layer, head; };

// Of one sequence, for one batch.  Layers follow each other, each in three steps that all threads take part in and that
// no thread begins before all have ended the one before.
class Recall {
public:
    // protected_: entries that are not exchanged.  Where heads of a layer are alike, their largest score counts; where all are, the
    // sum of what the upper layers attend to.
    Recall(h2og_state & state, int32_t stream, std::vector<Span> protected_, const h2og_recall_params & params);

    // The steps: scores of the cache's entries, scores of the attic's, and the exchange or the vote. None of them throws.
    void look    (int32_t layer, const LayerQueries & queries, int32_t i_thread, int32_t n_thread);
    void search  (int32_t layer, const LayerQueries & queries);
    void exchange(int32_t layer);

    // A fourth: what exact queries attend to in the attic, and log_sums, [n_exact][n_head], of exp(logit) over it, which attention has
    // in its denominators; and behind attention, with the logs of those, that added to its outputs, [n_exact*n_head][head_dim_v].
    void attend(int32_t layer, const LayerQueries & queries, float * log_sums);
    void join(int32_t n_row, float * out, const float * log_sums, int32_t i_thread, int32_t n_thread);
    int32_t n_exact(int32_t n_query) const { return n_query < params.n_exact ? n_query : params.n_exact; }

    // Whether the batch only asks; then, after it, exchanges what it asked for.
    bool only_asks() const { return params.alike == H2OG_ALIKE_MODEL; }
    void exchange_asked();

    const int32_t stream;

private:
    struct Head {
        std::vector<float> q, whole;             // as a Question has them; [width]
        int32_t n_row;
        std::vector<float> in_cache, in_attic;   // scores of cells and of slots
    };

    // Over some entries, for each query and query head: the largest logit, the sum of e = exp(logit - it), and of e times the value.
    struct Sums { std::vector<float> tops, totals, outs; };

    Attention attention_to_attic(int32_t layer, const LayerQueries & queries, int32_t chunk) const;
    void make_parts(const LayerQueries & queries);
    void sum_parts(float * log_sums) const;
    void attend_part(int32_t layer, const LayerQueries & queries, const Plan & p, int32_t part, int32_t tile, int32_t head);

    void look_at_cache(int32_t layer, const LayerQueries & queries, int32_t i_thread, int32_t n_thread);
    void search_attic (int32_t layer, const LayerQueries & queries);
    void load_queries(Head & head, int32_t ih, const LayerQueries & queries) const;
    Question question_of(const Head & head, const LayerQueries & queries) const;

    bool is_protected(int32_t pos) const;
    std::vector<float> scores_by_position(int32_t layer, int32_t first, int32_t n_alike) const;
    void vote(int32_t layer);
    void exchange_best(const std::vector<float> & by_pos, const std::vector<HeadId> & together);

    // Threads of a graph must not throw; a layer that others have looked at only in part is left as it is.
    template <typename F>
    void unless_failed(const F & f) noexcept {
        if (has_failed) {
            return;
        }
        try {
            f();
        } catch (...) {
            has_failed = true;
        }
    }

    h2og_state & state;
    const Kernel & kernel;
    const std::vector<Span> protected_spans;
    const h2og_recall_params params;
    std::vector<Head> heads;                                // of the layer at hand
    std::vector<float> votes;                               // by position
    std::vector<Sums> parts;                                // of the attic, in the same order whatever threads do: [query][head]
    std::atomic<bool>    has_failed{false};                 // for want of memory: nothing more comes back
    std::atomic<int32_t> next_search{0}, next_exchange{0}, next_part{0};  // of a layer: what no thread has begun
    std::atomic<int32_t> n_done{0};                         // of its parts
};

} // namespace h2og
