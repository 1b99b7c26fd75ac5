// Random walks of decoding, eviction, rollback, renumbering and clearing, with a shadow copy of every entry, in one cache and
// in groups of layers with budgets of their own.
//
// I1 occupied cells are the same for every layer and head; I2 llama.cpp's books hold the last n_used positions without gaps;
// I3 cells from rollback_min on hold their own entry in every head; I4 a moved row is bit-identical.
#include "walker.h"

#include <cmath>

namespace {

// All groups of a context, the attached cache first.
std::vector<h2og_cache *> groups_of(h2og_cache * cache) {
    std::vector<h2og_cache *> groups(size_t(h2og_n_groups(cache)));
    for (size_t i = 0; i < groups.size(); ++i) {
        CHECK(h2og_get_group(cache, int32_t(i), &groups[i]) == H2OG_OK, "%s", h2og_last_error());
    }
    CHECK(groups.at(0) == cache, "group 0 is another cache");
    return groups;
}

int64_t sum_of(const std::vector<h2og_cache *> & groups, int32_t seq, int64_t h2og_counters::* counter) {
    int64_t sum = 0;
    for (h2og_cache * group : groups) {
        h2og_counters counters;
        CHECK(h2og_get_counters(group, seq, &counters) == H2OG_OK, "%s", h2og_last_error());
        sum += counters.*counter;
    }
    return sum;
}

void walk(llama_model & model, const tiny::Options & o, int32_t attention, bool is_scored, int n_step, uint32_t seed,
          bool graph_moves = false, bool has_attic = false) {
    const auto ctx = tiny::make_context(model, o);
    const int32_t block = 16;
    RandomPolicy policy;
    policy.n_recent = 24;
    h2og_params params = { 100, block, attention, 0, 0.99f, is_scored, N_OBSERVED };
    h2og_cache * cache = nullptr;
    CHECK(h2og_attach(ctx.get(), &params, &cache) == H2OG_OK, "%s", h2og_last_error());
    const auto groups = groups_of(cache);
    CHECK(groups.size() == (o.layer_cells.empty() ? 1 : 2), "%zu groups", groups.size());
    std::vector<int32_t> budgets;
    for (size_t i = 0; i < groups.size(); ++i) {
        params.budget = i == 0 ? 100 : 40;
        budgets.push_back(params.budget);
        CHECK(h2og_set_params(groups[i], &params) == H2OG_OK, "%s", h2og_last_error());
        CHECK(h2og_set_policy(groups[i], RandomPolicy::victims, &policy) == H2OG_OK, "%s", h2og_last_error());
        h2og_access::cparams(*ctx).h2og->groups[i]->force_graph_moves = graph_moves;
        const h2og_attic_params attic = { has_attic ? 64 << 20 : 0, -1, -1, i == 0 ? "/tmp" : nullptr };
        CHECK(h2og_set_attic(groups[i], &attic) == H2OG_OK, "%s", h2og_last_error());
    }

    std::mt19937 rng(seed);
    std::vector<std::vector<Walker>> walkers(o.n_seq);  // by sequence and group
    for (uint32_t s = 0; s < o.n_seq; ++s) {
        for (size_t i = 0; i < groups.size(); ++i) {
            walkers[s].push_back({ *ctx, groups[i], int32_t(s), i, {}, {}, {}, {}, has_attic });
        }
    }
    auto * memory = llama_get_memory(ctx.get());
    for (int step = 0; step < n_step; ++step) {
        auto & sequence = walkers[rng() % walkers.size()];
        const auto forget = [&](int32_t from) {
            for (Walker & w : sequence) {
                w.forget(from);
            }
        };
        Walker & w = sequence[rng() % sequence.size()];
        const int64_t n_rebases = sum_of(groups, w.seq, &h2og_counters::n_rebases);
        const h2og_view v = w.view();
        const int32_t rollback = h2og_rollback_min(w.cache, w.seq);
        switch (rng() % 10) {
            case 0: {  // roll back as far as is exact
                if (v.n_past > 0 && rollback < v.n_past) {
                    const int32_t p = rollback + int32_t(rng() % uint32_t(v.n_past - rollback));
                    CHECK(llama_memory_seq_rm(memory, w.seq, p, -1), "rollback to %d refused, from %d on it is exact", p, rollback);
                    forget(p);
                }
                break;
            }
            case 1: {  // anything else is refused and changes nothing
                const int32_t oldest = llama_memory_seq_pos_min(memory, w.seq);
                if (sum_of(groups, w.seq, &h2og_counters::n_evicted) > 0 && rollback - 1 > oldest) {
                    CHECK(!llama_memory_seq_rm(memory, w.seq, rollback - 1, -1), "an inexact rollback was accepted");
                    CHECK(!llama_memory_seq_rm(memory, w.seq, oldest, oldest + 1), "removing a prefix was accepted");
                }
                break;
            }
            case 2: {
                if (rng() % 8 == 0) {
                    CHECK(llama_memory_seq_rm(memory, w.seq, -1, -1), "clearing was refused");
                    forget(0);
                } else if (v.n_used > 40) {
                    CHECK(h2og_make_room(w.cache, w.seq, v.n_used - 8) == 8, "%s", h2og_last_error());
                }
                break;
            }
            default: {
                const int32_t n = rng() % 3 == 0 ? 1 + int32_t(rng() % o.n_ubatch) : 1;
                for (size_t i = 0; has_attic && rng() % 2 == 0 && i < groups.size(); ++i) {
                    const h2og_span keep[] = { { 0, 2 }, { v.n_past - policy.n_recent, INT32_MAX } };
                    const h2og_recall_params how = { 1 + int32_t(rng() % 50), 4, 1 + int32_t(rng() % 3), 2, 8, H2OG_ALIKE_HEAD, 4 };
                    CHECK(h2og_recall_next(groups[i], w.seq, keep, 2, &how) == H2OG_OK, "%s", h2og_last_error());
                }
                CHECK(tiny::decode(*ctx, tiny::random_tokens(rng, n), w.seq) == 0, "%s", h2og_last_error());
                for (Walker & any : sequence) {
                    any.decoded(v.n_past, n);
                    CHECK(any.view().n_used <= budgets[any.group] + std::max(block, n), "%d entries", any.view().n_used);
                }
            }
        }
        const bool keys_turned = sum_of(groups, w.seq, &h2og_counters::n_rebases) != n_rebases;
        for (auto & other : walkers) {
            for (Walker & any : other) {
                any.check(keys_turned && &other == &sequence);
                any.check_queries(keys_turned && &other == &sequence);
                CHECK(h2og_rollback_min(any.cache, any.seq) == h2og_rollback_min(cache, any.seq), "groups roll back alike");
            }
        }
    }
    h2og_detach(cache);
}

// Of two entries with the same values, the one that the queries attend to comes back.
void recalls_what_is_asked_for(llama_model & model) {
    const auto ctx = tiny::make_context(model, {});
    const h2og_params params = { 100, 16, H2OG_ATTENTION_AUTO, 0, 1.0f, 1, 1 };
    h2og_cache * cache = nullptr;
    CHECK(h2og_attach(ctx.get(), &params, &cache) == H2OG_OK, "%s", h2og_last_error());
    const h2og_attic_params attic = { 64 << 20, -1, -1, nullptr };
    const h2og_recall_params how = { INT32_MAX, 1, 1, 2, 8, H2OG_ALIKE_HEAD, 4 };
    CHECK(h2og_recall_next(cache, 0, nullptr, 0, &how) == H2OG_INVALID, "recalled without an attic");
    CHECK(h2og_set_attic(cache, &attic) == H2OG_OK, "%s", h2og_last_error());
    std::mt19937 rng(9);
    for (int i = 0; i < 3; ++i) {
        CHECK(tiny::decode(*ctx, tiny::random_tokens(rng, 20)) == 0, "%s", h2og_last_error());
    }
    h2og_view v;
    CHECK(h2og_get_view(cache, 0, &v) == H2OG_OK, "%s", h2og_last_error());
    std::vector<float> keys(size_t(v.n_head_kv)*v.n_cells*tiny::HEAD_DIM);
    CHECK(h2og_read_keys(cache, 0, 0, nullptr, v.n_cells, keys.data()) == H2OG_OK, "%s", h2og_last_error());
    std::vector<int32_t> victims;
    for (int32_t i = 0; i < N_LAYER*tiny::N_HEAD_KV; ++i) {
        for (int32_t cell = 10; cell < 50; ++cell) {
            victims.push_back(cell);
        }
    }
    CHECK(h2og_evict(cache, 0, victims.data(), 40) == H2OG_OK, "%s", h2og_last_error());
    const h2og_span keep[] = { { 50, INT32_MAX } };
    CHECK(h2og_recall_next(cache, 0, keep, 1, &how) == H2OG_OK, "%s", h2og_last_error());
    CHECK(tiny::decode(*ctx, tiny::random_tokens(rng, 1)) == 0, "%s", h2og_last_error());
    std::vector<float> query(size_t(tiny::N_HEAD)*tiny::HEAD_DIM);
    CHECK(h2og_read_queries(cache, 0, 0, query.data()) == H2OG_OK, "%s", h2og_last_error());
    CHECK(h2og_get_view(cache, 0, &v) == H2OG_OK, "%s", h2og_last_error());
    for (int32_t h = 0; h < v.n_head_kv; ++h) {
        // Scores are logits less a number per query head, which is what all entries of then make.
        constexpr int32_t GROUP = tiny::N_HEAD/tiny::N_HEAD_KV;
        std::vector<double> score(60, -1e30);
        for (int32_t g = 0; g < GROUP; ++g) {
            std::vector<double> logit(60);
            double whole = 0.0;
            for (int32_t p = 0; p < 60; ++p) {
                for (int32_t d = 0; d < tiny::HEAD_DIM; ++d) {
                    logit[p] += double(query[(h*GROUP + g)*tiny::HEAD_DIM + d])*keys[(size_t(h)*v.n_cells + p)*tiny::HEAD_DIM + d]/8.0;
                }
                whole += p < 10 || p >= 50 ? std::exp(logit[p]) : 0.0;
            }
            for (int32_t p = 0; p < 60; ++p) {
                score[p] = std::max(score[p], logit[p] - std::log(whole));
            }
        }
        std::vector<std::pair<double, int32_t>> ranked;
        for (int32_t p = 0; p < 50; ++p) {
            ranked.push_back({ *std::max_element(score.begin() + std::max(0, p - 8), score.begin() + std::min(60, p + 3)), p });
        }
        std::sort(ranked.rbegin(), ranked.rend());
        std::set<int32_t> held;
        for (int32_t cell = 0; cell < v.n_cells; ++cell) {
            held.insert(v.pos[size_t(h)*v.n_cells + cell]);
        }
        for (int32_t i = 0; i < 50; ++i) {  // neighbours share a score: those of the tenth are either
            const bool is_in = held.count(ranked[i].second) != 0;
            CHECK(std::fabs(ranked[i].first - ranked[9].first) < 1e-3 || is_in == (i < 9), "position %d, rank %d of head %d",
                  ranked[i].second, i, h);
        }
    }
    h2og_detach(cache);
}

// Beyond its limit the attic drops what scores least, and says how many.
void keeps_a_limit(llama_model & model) {
    const auto ctx = tiny::make_context(model, {});
    const h2og_params params = { 32, 16, H2OG_ATTENTION_AUTO, 0, 1.0f, 1, 0 };
    RandomPolicy policy;
    policy.n_recent = 8;
    h2og_cache * cache = nullptr;
    CHECK(h2og_attach(ctx.get(), &params, &cache) == H2OG_OK, "%s", h2og_last_error());
    CHECK(h2og_set_policy(cache, RandomPolicy::victims, &policy) == H2OG_OK, "%s", h2og_last_error());
    const int64_t row = 2*tiny::HEAD_DIM*2, all = N_LAYER*tiny::N_HEAD_KV;
    for (const h2og_attic_params & bad : { h2og_attic_params{ 1000, -1, -1, nullptr }, { -1, -1, -1, nullptr }, { 1 << 20, 99, -1, nullptr },
                                           { 1 << 20, -1, -1, "/no/such/folder" }, { 1 << 20, GGML_TYPE_Q4_K, -1, nullptr } }) {
        CHECK(h2og_set_attic(cache, &bad) == H2OG_INVALID, "accepted %lld bytes of type %d", (long long) bad.max_bytes, bad.type_k);
    }
    const h2og_attic_params attic = { 2*256*all*row, -1, -1, nullptr };
    CHECK(h2og_set_attic(cache, &attic) == H2OG_OK, "%s", h2og_last_error());
    std::mt19937 rng(10);
    for (int i = 0; i < 100; ++i) {
        CHECK(tiny::decode(*ctx, tiny::random_tokens(rng, 16)) == 0, "%s", h2og_last_error());
    }
    h2og_attic_info info;
    CHECK(h2og_get_attic(cache, 0, &info) == H2OG_OK, "%s", h2og_last_error());
    h2og_counters counters;
    CHECK(h2og_get_counters(cache, 0, &counters) == H2OG_OK, "%s", h2og_last_error());
    CHECK(info.bytes <= attic.max_bytes && info.n_entry <= 512 && info.n_entry > 200, "%d entries", info.n_entry);
    CHECK(info.n_dropped == (counters.n_evicted - info.n_entry)*all, "%lld dropped of %lld", (long long) info.n_dropped,
          (long long) counters.n_evicted*all);
    CHECK(llama_memory_seq_rm(llama_get_memory(ctx.get()), 0, -1, -1), "clearing was refused");
    CHECK(h2og_get_attic(cache, 0, &info) == H2OG_OK && info.n_entry == 0 && info.bytes == 0 && info.n_dropped == 0, "not emptied");

    // Without any entry left llama.cpp counts from 0 again: another text begins, and nothing of the old one comes back.
    for (int i = 0; i < 20; ++i) {
        CHECK(tiny::decode(*ctx, tiny::random_tokens(rng, 16)) == 0, "%s", h2og_last_error());
    }
    policy.n_recent = 0;
    CHECK(h2og_make_room(cache, 0, 0) > 0, "%s", h2og_last_error());
    CHECK(h2og_get_attic(cache, 0, &info) == H2OG_OK && info.n_entry == 0, "%d entries of a text that is gone", info.n_entry);
    for (int i = 0; i < 8; ++i) {
        CHECK(tiny::decode(*ctx, tiny::random_tokens(rng, 16)) == 0, "%s", h2og_last_error());
        const h2og_recall_params how = { 8, 4, 1, 0, 0, H2OG_ALIKE_HEAD, 2 };
        CHECK(h2og_recall_next(cache, 0, nullptr, 0, &how) == H2OG_OK, "%s", h2og_last_error());
    }
    h2og_detach(cache);
}

// A bad victim is refused with words, and nothing has changed.
void refuses_bad_victims(llama_model & model) {
    const auto ctx = tiny::make_context(model, {});
    const h2og_params params = { 100, 16, H2OG_ATTENTION_AUTO, 0, 1.0f, 1, 0 };
    h2og_cache * cache = nullptr;
    CHECK(h2og_attach(ctx.get(), &params, &cache) == H2OG_OK, "%s", h2og_last_error());
    std::mt19937 rng(3);
    CHECK(tiny::decode(*ctx, tiny::random_tokens(rng, 20)) == 0, "%s", h2og_last_error());
    Walker w = { *ctx, cache, 0, 0, {}, {}, {}, {}, false };
    w.check();
    for (const std::array<int32_t, 2> bad : { std::array<int32_t, 2>{ 3, 3 }, { -1, 2 }, { 5, 255 }, { 1, 1000000 } }) {
        std::vector<int32_t> victims;
        for (int32_t i = 0; i < N_LAYER*tiny::N_HEAD_KV; ++i) {
            victims.push_back(i < 3 ? 0 : bad[0]);
            victims.push_back(i < 3 ? 1 : bad[1]);
        }
        CHECK(h2og_evict(cache, 0, victims.data(), 2) == H2OG_POLICY, "victims %d, %d were accepted", bad[0], bad[1]);
        w.check();
    }
    CHECK(h2og_evict(cache, 0, nullptr, 21) == H2OG_INVALID && h2og_evict(cache, 1, nullptr, 0) == H2OG_INVALID, "accepted");
    CHECK(h2og_make_room(cache, 0, 4) == H2OG_FULL, "made room without a policy");
    h2og_detach(cache);
}

std::vector<float> queries_of(h2og_cache * cache, int32_t seq, int32_t layer) {
    std::vector<float> rows(size_t(N_OBSERVED)*tiny::N_HEAD*tiny::HEAD_DIM);
    CHECK(h2og_read_queries(cache, seq, layer, rows.data()) == H2OG_OK, "%s", h2og_last_error());
    return rows;
}

// A copied sequence is the same sequence, positions, scores and queries included; part of one is not copied.
void copies_whole_sequences(llama_model & model, const std::vector<int32_t> & layer_cells) {
    tiny::Options o;
    o.n_seq = 2;
    o.layer_cells = layer_cells;
    const auto ctx = tiny::make_context(model, o);
    const h2og_params params = { 60, 16, H2OG_ATTENTION_AUTO, 0, 1.0f, 1, N_OBSERVED };
    RandomPolicy policy;
    policy.n_recent = 24;
    h2og_cache * cache = nullptr;
    CHECK(h2og_attach(ctx.get(), &params, &cache) == H2OG_OK, "%s", h2og_last_error());
    const auto groups = groups_of(cache);
    for (h2og_cache * group : groups) {
        CHECK(h2og_set_policy(group, RandomPolicy::victims, &policy) == H2OG_OK, "%s", h2og_last_error());
    }
    std::mt19937 rng(5);
    for (int i = 0; i < 20; ++i) {
        CHECK(tiny::decode(*ctx, tiny::random_tokens(rng, 20), 0) == 0, "%s", h2og_last_error());
    }
    auto * memory = llama_get_memory(ctx.get());
    llama_memory_seq_cp(memory, 0, 1, 3, 9);
    CHECK(llama_memory_seq_pos_max(memory, 1) == -1, "part of a sequence was copied");
    llama_memory_seq_cp(memory, 0, 1, -1, -1);
    const auto next = tiny::random_tokens(rng, 5);
    // Until the next decode, llama.cpp has only queued the copy: whoever moves rows carries it out first.
    for (h2og_cache * group : groups) {
        std::vector<std::vector<float>> keys(2, std::vector<float>(size_t(tiny::N_HEAD_KV)*o.n_ctx*tiny::HEAD_DIM));
        h2og_view v;
        CHECK(h2og_get_view(group, 0, &v) == H2OG_OK, "%s", h2og_last_error());
        for (int32_t seq = 0; seq < 2; ++seq) {
            policy.rng.seed(2);
            CHECK(h2og_make_room(group, seq, 50) > 0, "%s", h2og_last_error());
            CHECK(h2og_read_keys(group, seq, v.n_layer - 1, nullptr, v.n_cells, keys[seq].data()) == H2OG_OK, "%s", h2og_last_error());
        }
        CHECK(h2og_get_view(group, 0, &v) == H2OG_OK, "%s", h2og_last_error());
        for (int32_t head = 0; head < v.n_head_kv; ++head) {
            for (int32_t cell = 0; cell < v.n_cells; ++cell) {
                const size_t row = (size_t(head)*v.n_cells + cell)*tiny::HEAD_DIM;
                CHECK(v.pos[cell] == -1 || std::equal(&keys[0][row], &keys[0][row] + tiny::HEAD_DIM, &keys[1][row]),
                      "key of head %d, cell %d is not the copied one", head, cell);
            }
        }
        const int32_t last = v.n_layer - 1;
        CHECK(queries_of(group, 0, last) == queries_of(group, 1, last), "the queries are not the copied ones");
    }
    std::vector<float> logits[2];
    for (int32_t seq = 0; seq < 2; ++seq) {
        policy.rng.seed(1);
        CHECK(tiny::decode(*ctx, next, seq) == 0, "%s", h2og_last_error());
        logits[seq] = tiny::logits(*ctx);
    }
    CHECK(logits[0] == logits[1], "the copy goes on differently");
    for (h2og_cache * group : groups) {
        h2og_view a, b;
        CHECK(h2og_get_view(group, 0, &a) == H2OG_OK && h2og_get_view(group, 1, &b) == H2OG_OK, "%s", h2og_last_error());
        const size_t n = size_t(a.n_layer)*a.n_head_kv*a.n_cells;
        CHECK(std::equal(a.pos, a.pos + n, b.pos) && std::equal(a.scores, a.scores + n, b.scores), "the books differ");
    }
    h2og_detach(cache);
}

// The queries of sequences that are computed together are those of each computed alone.
void records_sequences_together(llama_model & model, int32_t attention) {
    tiny::Options o;
    o.n_seq = 3;
    const h2og_params params = { 0, 16, attention, 0, 1.0f, 1, N_OBSERVED };
    std::mt19937 rng(6);
    const int32_t n_before[] = { 3, 9, 14 };  // so that the rings stand at different rows
    std::vector<llama_token> tokens[3];
    for (auto & t : tokens) {
        t = tiny::random_tokens(rng, 30);
    }
    std::vector<float> rows[2][3];
    for (const bool is_together : { false, true }) {
        const auto ctx = tiny::make_context(model, o);
        h2og_cache * cache = nullptr;
        CHECK(h2og_attach(ctx.get(), &params, &cache) == H2OG_OK, "%s", h2og_last_error());
        llama_batch batch = llama_batch_init(o.n_ubatch, 0, 1);
        for (int32_t seq = 0; seq < 3; ++seq) {
            const auto middle = tokens[seq].begin() + n_before[seq];
            CHECK(tiny::decode(*ctx, { tokens[seq].begin(), middle }, seq) == 0, "%s", h2og_last_error());
            if (!is_together) {
                CHECK(tiny::decode(*ctx, { middle, middle + 10 }, seq) == 0, "%s", h2og_last_error());
            }
            for (int32_t i = 0; i < 10; ++i) {
                const int32_t at = batch.n_tokens++;
                batch.token[at]  = middle[i];
                batch.pos[at]    = n_before[seq] + i;
                batch.logits[at] = 0;
                batch.n_seq_id[at]  = 1;
                batch.seq_id[at][0] = seq;
            }
        }
        CHECK(!is_together || llama_decode(ctx.get(), batch) == 0, "%s", h2og_last_error());
        llama_batch_free(batch);
        for (int32_t seq = 0; seq < 3; ++seq) {
            rows[is_together][seq] = queries_of(cache, seq, N_LAYER - 1);
        }
        h2og_detach(cache);
    }
    for (int32_t seq = 0; seq < 3; ++seq) {
        for (size_t i = 0; i < rows[0][seq].size(); ++i) {
            CHECK(std::fabs(rows[0][seq][i] - rows[1][seq][i]) < 1e-3f, "a query of sequence %d differs", seq);
        }
    }
}

// Groups are borrowed: they end with the first, and are not detached or asked for groups themselves.
void groups_end_with_the_first(llama_model & model) {
    tiny::Options o;
    o.layer_cells = { 256, 200 };
    auto ctx = tiny::make_context(model, o);
    const h2og_params params = { 256, 16, H2OG_ATTENTION_AUTO, 0, 1.0f, 1, 0 };
    h2og_cache * cache = nullptr, * none = nullptr;
    CHECK(h2og_attach(ctx.get(), &params, &cache) == H2OG_OK, "%s", h2og_last_error());
    const auto groups = groups_of(cache);
    CHECK(groups.size() == 2 && h2og_n_groups(groups[1]) == 2, "not two groups");
    CHECK(h2og_get_group(groups[1], 0, &none) == H2OG_INVALID && none == nullptr, "a group gave groups");
    CHECK(h2og_get_group(cache, 2, &none) == H2OG_INVALID && h2og_get_group(cache, -1, &none) == H2OG_INVALID, "no such group");
    h2og_detach(groups[1]);  // refused
    CHECK(tiny::decode(*ctx, { 1, 2, 3 }) == 0, "%s", h2og_last_error());
    h2og_view v;
    CHECK(h2og_get_view(groups[1], 0, &v) == H2OG_OK && v.n_used == 3 && v.n_layer == 1 && v.layer_ids[0] == 1, "group 1");
    std::vector<int32_t> all;
    for (int32_t head = 0; head < v.n_head_kv; ++head) {
        all.insert(all.end(), { 0, 1, 2 });
    }
    CHECK(h2og_evict(groups[1], 0, all.data(), 3) == H2OG_INVALID, "one group was emptied");
    all.assign({ 0, 1, 1, 0 });
    CHECK(h2og_evict(groups[1], 0, all.data(), 2) == H2OG_OK, "%s", h2og_last_error());
    CHECK(h2og_rollback_min(cache, 0) == 3 && !llama_memory_seq_rm(llama_get_memory(ctx.get()), 0, 2, -1), "group 1 was emptied");
    CHECK(llama_memory_seq_rm(llama_get_memory(ctx.get()), 0, 0, -1), "both could not be emptied");
    ctx.reset();
    CHECK(h2og_get_view(groups[1], 0, &v) == H2OG_DETACHED, "a freed context was used");
    h2og_detach(cache);

    ctx = tiny::make_context(model, o);
    CHECK(tiny::decode(*ctx, { 1, 2, 3 }) == 0 && tiny::decode(*ctx, { 4 }) == 0, "without h2og");
    const auto expected = tiny::logits(*ctx);
    CHECK(llama_memory_seq_rm(llama_get_memory(ctx.get()), 0, 3, -1) && tiny::decode(*ctx, { 4 }) == 0, "without h2og");
    CHECK(tiny::logits(*ctx) == expected, "parts were not rolled back");
    const int32_t too_few[] = { 256 };
    CHECK(h2og_set_layer_cells(&model, too_few, 1) == H2OG_INVALID, "cells for one of two layers");
    CHECK(h2og_set_layer_cells(&model, nullptr, 0) == H2OG_OK, "%s", h2og_last_error());
}

// Handles and contexts may be freed in either order; a detached context goes on.
void outlives(llama_model & model) {
    const h2og_params params = { 100, 16, H2OG_ATTENTION_AUTO, 0, 1.0f, 1, 0 };
    auto ctx = tiny::make_context(model, {});
    h2og_cache * cache = nullptr, * second = nullptr;
    CHECK(h2og_attach(ctx.get(), &params, &cache) == H2OG_OK, "%s", h2og_last_error());
    CHECK(h2og_attach(ctx.get(), &params, &second) == H2OG_INVALID, "attached twice");
    CHECK(tiny::decode(*ctx, { 1, 2, 3 }) == 0, "%s", h2og_last_error());
    h2og_detach(cache);
    CHECK(tiny::decode(*ctx, { 4 }) == 0, "%s", h2og_last_error());
    CHECK(h2og_attach(ctx.get(), &params, &cache) == H2OG_OK, "%s", h2og_last_error());
    h2og_view v;
    CHECK(h2og_get_view(cache, 0, &v) == H2OG_OK && v.n_used == 4 && v.pos[3] == 3, "an attached cache knows what it holds");
    ctx.reset();
    CHECK(h2og_get_view(cache, 0, &v) == H2OG_DETACHED, "a freed context was used");
    h2og_detach(cache);
}

} // namespace

int main(int argc, char ** argv) {
    const int n_step = argc > 1 ? atoi(argv[1]) : 150;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    const auto model = tiny::load_model(N_LAYER);
    const ggml_type types[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
                                GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL };
    uint32_t seed = 1;
    for (const ggml_type type : types) {
        tiny::Options o;
        o.type_k = o.type_v = type;
        walk(*model, o, H2OG_ATTENTION_AUTO, true, n_step, seed++);
        walk(*model, o, H2OG_ATTENTION_COMPOSED, false, n_step/2, seed++, true);
    }
    tiny::Options transposed;
    transposed.flash = false;
    walk(*model, transposed, H2OG_ATTENTION_AUTO, true, n_step, seed++);
    tiny::Options many;
    many.n_seq = 3;
    walk(*model, many, H2OG_ATTENTION_AUTO, true, n_step, seed++);
    walk(*model, {}, H2OG_ATTENTION_COMPOSED, true, n_step, seed++);
    walk(*model, {}, H2OG_ATTENTION_COMPOSED, false, n_step, seed++);
    for (const uint32_t n_seq : { 1, 2 }) {
        tiny::Options grouped;
        grouped.n_seq = n_seq;
        grouped.layer_cells = { 256, 90 };
        walk(*model, grouped, H2OG_ATTENTION_AUTO, true, n_step, seed++);
        walk(*model, grouped, H2OG_ATTENTION_COMPOSED, true, n_step, seed++);
    }
    for (const auto & [type, n_seq] : { std::pair<ggml_type, uint32_t>{ GGML_TYPE_F16, 1 }, { GGML_TYPE_Q8_0, 2 }, { GGML_TYPE_IQ4_NL, 1 } }) {
        tiny::Options o;
        o.type_k = o.type_v = type;
        o.n_seq = n_seq;
        walk(*model, o, H2OG_ATTENTION_AUTO, true, n_step, seed++, false, true);
        o.layer_cells = { 256, 90 };
        walk(*model, o, H2OG_ATTENTION_COMPOSED, true, n_step, seed++, true, true);
    }
    walk(*model, transposed, H2OG_ATTENTION_AUTO, true, n_step, seed++, false, true);
    recalls_what_is_asked_for(*model);
    keeps_a_limit(*model);
    refuses_bad_victims(*model);
    copies_whole_sequences(*model, {});
    copies_whole_sequences(*model, { 256, 100 });
    records_sequences_together(*model, H2OG_ATTENTION_AUTO);
    records_sequences_together(*model, H2OG_ATTENTION_COMPOSED);
    groups_end_with_the_first(*model);
    outlives(*model);
    llama_backend_free();
    printf("walks passed\n");
    return 0;
}
