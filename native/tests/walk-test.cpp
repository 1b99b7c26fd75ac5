// Random walks of decoding, eviction, rollback, renumbering and clearing, with a shadow copy of every entry.
//
// I1 occupied cells are the same for every layer and head; I2 llama.cpp's books hold the last n_used positions without gaps;
// I3 cells from rollback_min on hold their own entry in every head; I4 a moved row is bit-identical.
#include "state.h"
#include "tiny-model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

namespace {

constexpr int32_t N_LAYER = 2, N_OBSERVED = 12;

// Names random cells, never the newest n_recent positions.
struct RandomPolicy {
    std::mt19937 rng{ 11 };
    int32_t n_recent;

    static int32_t victims(void * user, const h2og_view * view, int32_t n, int32_t * out) {
        auto & self = *static_cast<RandomPolicy *>(user);
        for (int32_t i = 0; i < view->n_layer*view->n_head_kv; ++i) {
            const int32_t * pos = view->pos + size_t(i)*view->n_cells;
            std::vector<int32_t> allowed;
            for (int32_t cell = 0; cell < view->n_cells; ++cell) {
                if (pos[cell] >= 0 && pos[cell] < view->n_past - self.n_recent) {
                    allowed.push_back(cell);
                }
            }
            if (int32_t(allowed.size()) < n) {
                return 1;
            }
            std::shuffle(allowed.begin(), allowed.end(), self.rng);
            std::copy_n(allowed.begin(), n, out + size_t(i)*n);
        }
        return 0;
    }
};

using Row = std::vector<float>;

// One sequence of a cache and what it should hold.
struct Walker {
    llama_context & ctx;
    h2og_cache * cache;
    int32_t seq;
    std::array<std::map<int32_t, std::pair<Row, Row>>, N_LAYER*tiny::N_HEAD_KV> shadow;  // position -> K row, V row
    std::map<int32_t, int32_t> own_cell;                                                 // position -> cell it was written to
    std::vector<int32_t> recorded;                                                       // positions, the newest N_OBSERVED
    std::array<std::map<int32_t, Row>, N_LAYER> queries;                                 // position -> query

    h2og_view view() const {
        h2og_view v;
        CHECK(h2og_get_view(cache, seq, &v) == H2OG_OK, "%s", h2og_last_error());
        return v;
    }

    // Checks the invariants; rows must equal the shadow where it has them, and new ones are added to it.
    void check(bool keys_turned = false) {
        const h2og_view v = view();
        const int32_t rollback = h2og_rollback_min(cache, seq);
        auto * memory = llama_get_memory(&ctx);
        const int32_t oldest = llama_memory_seq_pos_min(memory, seq), newest = llama_memory_seq_pos_max(memory, seq);
        CHECK(v.n_used == (newest < 0 ? 0 : newest - oldest + 1), "I2: %d used, books %d .. %d", v.n_used, oldest, newest);
        CHECK(v.n_past == newest + 1, "n_past %d, books end at %d", v.n_past, newest);

        std::vector<float> keys(size_t(v.n_head_kv)*v.n_cells*tiny::HEAD_DIM), values(keys.size());
        for (int32_t j = 0; j < v.n_layer; ++j) {
            CHECK(h2og_read_keys(cache, seq, j, keys.data()) == H2OG_OK, "%s", h2og_last_error());
            CHECK(h2og_read_values(cache, seq, j, values.data()) == H2OG_OK, "%s", h2og_last_error());
            for (int32_t h = 0; h < v.n_head_kv; ++h) {
                const size_t base = (size_t(j)*v.n_head_kv + h)*v.n_cells;
                auto & rows = shadow[size_t(j)*v.n_head_kv + h];
                std::set<int32_t> seen;
                int32_t n_used = 0;
                for (int32_t cell = 0; cell < v.n_cells; ++cell) {
                    const int32_t p = v.pos[base + cell];
                    CHECK((p == -1) == (v.pos[cell] == -1), "I1: cell %d is used in some heads only", cell);
                    CHECK((p == -1) == (v.rope_pos[base + cell] == -1), "rope_pos of cell %d", cell);
                    if (p == -1) {
                        CHECK(v.scores[base + cell] == 0.0f, "an empty cell has a score");
                        continue;
                    }
                    ++n_used;
                    CHECK(seen.insert(p).second, "position %d is held twice", p);
                    CHECK(v.rope_pos[base + cell] >= 0 && v.rope_pos[base + cell] < tiny::N_CTX_TRAIN, "rotary position %d",
                          v.rope_pos[base + cell]);
                    const float * k = keys.data()   + (size_t(h)*v.n_cells + cell)*tiny::HEAD_DIM;
                    const float * w = values.data() + (size_t(h)*v.n_cells + cell)*tiny::HEAD_DIM;
                    const Row key(k, k + tiny::HEAD_DIM), value(w, w + tiny::HEAD_DIM);
                    const auto found = rows.find(p);
                    if (found == rows.end()) {
                        const auto cell_of = own_cell.emplace(p, cell).first;
                        CHECK(cell_of->second == cell, "position %d is new in cells %d and %d", p, cell_of->second, cell);
                        rows[p] = { key, value };
                    } else {
                        CHECK(keys_turned || found->second.first == key, "I4: key of position %d changed", p);
                        CHECK(found->second.second == value, "I4: value of position %d changed", p);
                        found->second.first = key;
                    }
                }
                for (auto it = own_cell.lower_bound(rollback); it != own_cell.end(); ++it) {
                    CHECK(v.pos[base + it->second] == it->first, "I3: cell %d holds position %d, not its own %d", it->second,
                          v.pos[base + it->second], it->first);
                }
                CHECK(n_used == v.n_used, "%d entries where %d are used", n_used, v.n_used);
                for (auto it = rows.begin(); it != rows.end();) {
                    it = seen.count(it->first) ? std::next(it) : rows.erase(it);
                }
            }
        }
    }

    void decoded(int32_t first, int32_t n) {
        for (int32_t p = first; p < first + n; ++p) {
            recorded.push_back(p);
        }
        recorded.erase(recorded.begin(), recorded.end() - std::min(recorded.size(), size_t(N_OBSERVED)));
    }

    // Queries are those that were recorded first for their position, and the newest.
    void check_queries(bool are_turned) {
        std::vector<int32_t> pos(N_OBSERVED), expected(N_OBSERVED - recorded.size(), -1);
        expected.insert(expected.end(), recorded.begin(), recorded.end());
        CHECK(h2og_read_query_pos(cache, seq, pos.data()) == H2OG_OK, "%s", h2og_last_error());
        CHECK(pos == expected, "queries up to position %d are recorded, expected up to %d", pos.back(), expected.back());
        constexpr size_t width = size_t(tiny::N_HEAD)*tiny::HEAD_DIM;
        std::vector<float> rows(N_OBSERVED*width);
        for (int32_t j = 0; j < N_LAYER; ++j) {
            CHECK(h2og_read_queries(cache, seq, j, rows.data()) == H2OG_OK, "%s", h2og_last_error());
            std::map<int32_t, Row> now;
            for (int32_t i = 0; i < N_OBSERVED; ++i) {
                Row row(rows.begin() + i*width, rows.begin() + (i + 1)*width);
                if (pos[i] == -1) {
                    CHECK(row == Row(width), "there is no query, and yet it is not 0");
                    continue;
                }
                const auto found = queries[j].find(pos[i]);
                CHECK(row != Row(width) && (are_turned || found == queries[j].end() || found->second == row),
                      "the query of position %d is another one", pos[i]);
                now[pos[i]] = std::move(row);
            }
            queries[j] = std::move(now);
        }
    }

    void forget(int32_t from) {
        recorded.erase(std::lower_bound(recorded.begin(), recorded.end(), from), recorded.end());
        for (auto & of_layer : queries) {
            of_layer.erase(of_layer.lower_bound(from), of_layer.end());
        }
        for (auto & rows : shadow) {
            rows.erase(rows.lower_bound(from), rows.end());
        }
        own_cell.erase(own_cell.lower_bound(from), own_cell.end());
    }
};

void walk(llama_model & model, const tiny::Options & o, int32_t attention, bool is_scored, int n_step, uint32_t seed,
          bool graph_moves = false) {
    const auto ctx = tiny::make_context(model, o);
    const int32_t budget = 100, block = 16;
    RandomPolicy policy;
    policy.n_recent = 24;
    const h2og_params params = { budget, block, attention, 0, 0.99f, is_scored, N_OBSERVED };
    h2og_cache * cache = nullptr;
    CHECK(h2og_attach(ctx.get(), &params, &cache) == H2OG_OK, "%s", h2og_last_error());
    CHECK(h2og_set_policy(cache, RandomPolicy::victims, &policy) == H2OG_OK, "%s", h2og_last_error());
    h2og_access::cparams(*ctx).h2og->force_graph_moves = graph_moves;

    std::mt19937 rng(seed);
    std::vector<Walker> walkers;
    for (uint32_t s = 0; s < o.n_seq; ++s) {
        walkers.push_back({ *ctx, cache, int32_t(s), {}, {}, {}, {} });
    }
    auto * memory = llama_get_memory(ctx.get());
    for (int step = 0; step < n_step; ++step) {
        Walker & w = walkers[rng() % walkers.size()];
        h2og_counters before, after;
        CHECK(h2og_get_counters(cache, w.seq, &before) == H2OG_OK, "%s", h2og_last_error());
        const h2og_view v = w.view();
        const int32_t rollback = h2og_rollback_min(cache, w.seq);
        switch (rng() % 10) {
            case 0: {  // roll back as far as is exact
                if (v.n_past > 0 && rollback < v.n_past) {
                    const int32_t p = rollback + int32_t(rng() % uint32_t(v.n_past - rollback));
                    CHECK(llama_memory_seq_rm(memory, w.seq, p, -1), "rollback to %d refused, from %d on it is exact", p, rollback);
                    w.forget(p);
                }
                break;
            }
            case 1: {  // anything else is refused and changes nothing
                const int32_t oldest = llama_memory_seq_pos_min(memory, w.seq);
                if (before.n_evicted > 0 && rollback - 1 > oldest) {
                    CHECK(!llama_memory_seq_rm(memory, w.seq, rollback - 1, -1), "an inexact rollback was accepted");
                    CHECK(!llama_memory_seq_rm(memory, w.seq, oldest, oldest + 1), "removing a prefix was accepted");
                }
                break;
            }
            case 2: {
                if (rng() % 8 == 0) {
                    CHECK(llama_memory_seq_rm(memory, w.seq, -1, -1), "clearing was refused");
                    w.forget(0);
                } else if (v.n_used > 40) {
                    CHECK(h2og_make_room(cache, w.seq, v.n_used - 8) == 8, "%s", h2og_last_error());
                }
                break;
            }
            default: {
                const int32_t n = rng() % 3 == 0 ? 1 + int32_t(rng() % o.n_ubatch) : 1;
                CHECK(tiny::decode(*ctx, tiny::random_tokens(rng, n), w.seq) == 0, "%s", h2og_last_error());
                w.decoded(v.n_past, n);
                CHECK(w.view().n_used <= budget + std::max(block, n), "%d entries", w.view().n_used);
            }
        }
        CHECK(h2og_get_counters(cache, w.seq, &after) == H2OG_OK, "%s", h2og_last_error());
        w.check(after.n_rebases != before.n_rebases);
        w.check_queries(after.n_rebases != before.n_rebases);
        for (Walker & other : walkers) {
            other.check();
            other.check_queries(false);
        }
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
    Walker w = { *ctx, cache, 0, {}, {}, {}, {} };
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
void copies_whole_sequences(llama_model & model) {
    tiny::Options o;
    o.n_seq = 2;
    const auto ctx = tiny::make_context(model, o);
    const h2og_params params = { 60, 16, H2OG_ATTENTION_AUTO, 0, 1.0f, 1, N_OBSERVED };
    RandomPolicy policy;
    policy.n_recent = 24;
    h2og_cache * cache = nullptr;
    CHECK(h2og_attach(ctx.get(), &params, &cache) == H2OG_OK, "%s", h2og_last_error());
    CHECK(h2og_set_policy(cache, RandomPolicy::victims, &policy) == H2OG_OK, "%s", h2og_last_error());
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
    std::vector<std::vector<float>> keys(2, std::vector<float>(size_t(tiny::N_HEAD_KV)*o.n_ctx*tiny::HEAD_DIM));
    for (int32_t seq = 0; seq < 2; ++seq) {
        policy.rng.seed(2);
        CHECK(h2og_make_room(cache, seq, 50) > 0, "%s", h2og_last_error());
        CHECK(h2og_read_keys(cache, seq, 1, keys[seq].data()) == H2OG_OK, "%s", h2og_last_error());
    }
    h2og_view v;
    CHECK(h2og_get_view(cache, 0, &v) == H2OG_OK, "%s", h2og_last_error());
    for (int32_t head = 0; head < v.n_head_kv; ++head) {
        for (int32_t cell = 0; cell < v.n_cells; ++cell) {
            const size_t row = (size_t(head)*v.n_cells + cell)*tiny::HEAD_DIM;
            CHECK(v.pos[cell] == -1 || std::equal(&keys[0][row], &keys[0][row] + tiny::HEAD_DIM, &keys[1][row]),
                  "key of head %d, cell %d is not the copied one", head, cell);
        }
    }
    CHECK(queries_of(cache, 0, 1) == queries_of(cache, 1, 1), "the queries are not the copied ones");
    std::vector<float> logits[2];
    for (int32_t seq = 0; seq < 2; ++seq) {
        policy.rng.seed(1);
        CHECK(tiny::decode(*ctx, next, seq) == 0, "%s", h2og_last_error());
        logits[seq] = tiny::logits(*ctx);
    }
    CHECK(logits[0] == logits[1], "the copy goes on differently");
    h2og_view a, b;
    CHECK(h2og_get_view(cache, 0, &a) == H2OG_OK && h2og_get_view(cache, 1, &b) == H2OG_OK, "%s", h2og_last_error());
    const size_t n = size_t(a.n_layer)*a.n_head_kv*a.n_cells;
    CHECK(std::equal(a.pos, a.pos + n, b.pos) && std::equal(a.scores, a.scores + n, b.scores), "the books differ");
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
    refuses_bad_victims(*model);
    copies_whole_sequences(*model);
    records_sequences_together(*model, H2OG_ATTENTION_AUTO);
    records_sequences_together(*model, H2OG_ATTENTION_COMPOSED);
    outlives(*model);
    llama_backend_free();
    printf("walks passed\n");
    return 0;
}
