// A random policy, and one sequence of a group with a shadow copy of every entry it should hold.
#pragma once

#include "state.h"
#include "tiny-model.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

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

// One sequence of a group and what it should hold.
struct Walker {
    llama_context & ctx;
    h2og_cache * cache;
    int32_t seq;
    size_t group;
    std::array<std::map<int32_t, std::pair<Row, Row>>, N_LAYER*tiny::N_HEAD_KV> shadow;  // position -> K row, V row
    std::map<int32_t, int32_t> own_cell;                                                 // position -> cell it was written to
    std::vector<int32_t> recorded;                                                       // positions, the newest N_OBSERVED
    std::array<std::map<int32_t, Row>, N_LAYER> queries;                                 // position -> query
    bool has_attic = false;                                                              // which holds all that was evicted

    h2og_view view() const {
        h2og_view v;
        CHECK(h2og_get_view(cache, seq, &v) == H2OG_OK, "%s", h2og_last_error());
        return v;
    }

    // Checks the invariants; rows must equal the shadow where it has them, and new ones are added to it.
    void check(bool keys_turned = false) {
        const h2og_view v = view();
        const int32_t rollback = h2og_rollback_min(cache, seq);
        const auto & books = h2og_access::cells(*h2og_access::cparams(ctx).h2og->groups[group]->cache, uint32_t(seq));
        const int32_t oldest = books.seq_pos_min(seq), newest = books.seq_pos_max(seq);
        CHECK(v.n_used == (newest < 0 ? 0 : newest - oldest + 1), "I2: %d used, books %d .. %d", v.n_used, oldest, newest);
        CHECK(v.n_past == newest + 1, "n_past %d, books end at %d", v.n_past, newest);

        std::vector<float> keys(size_t(v.n_head_kv)*v.n_cells*tiny::HEAD_DIM), values(keys.size());
        for (int32_t j = 0; j < v.n_layer; ++j) {
            CHECK(h2og_read_keys(cache, seq, j, nullptr, v.n_cells, keys.data()) == H2OG_OK, "%s", h2og_last_error());
            CHECK(h2og_read_values(cache, seq, j, nullptr, v.n_cells, values.data()) == H2OG_OK, "%s", h2og_last_error());
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
                        CHECK(keys_turned || found->second.first.empty() || found->second.first == key, "I4: key of position %d changed", p);
                        CHECK(found->second.second == value, "I4: value of position %d changed", p);
                        found->second.first = key;
                    }
                }
                for (auto it = own_cell.lower_bound(rollback); it != own_cell.end(); ++it) {
                    CHECK(v.pos[base + it->second] == it->first, "I3: cell %d holds position %d, not its own %d", it->second,
                          v.pos[base + it->second], it->first);
                }
                CHECK(n_used == v.n_used, "%d entries where %d are used", n_used, v.n_used);
                if (has_attic) {
                    check_attic(j, h, seen);
                    for (auto & [p, row] : rows) {
                        if (keys_turned && !seen.count(p)) {
                            row.first.clear();  // turned out of sight
                        }
                    }
                    continue;  // what is not seen may come back, and must be the same then
                }
                for (auto it = rows.begin(); it != rows.end();) {
                    it = seen.count(it->first) ? std::next(it) : rows.erase(it);
                }
            }
        }
    }

    // What is not in the cache is there, and nothing else.
    void check_attic(int32_t layer, int32_t head, const std::set<int32_t> & in_cache) {
        h2og_attic_info info;
        CHECK(h2og_get_attic(cache, seq, &info) == H2OG_OK, "%s", h2og_last_error());
        std::vector<int32_t> pos(size_t(info.n_entry)*tiny::N_HEAD_KV);
        CHECK(h2og_read_attic_pos(cache, seq, layer, pos.data()) == H2OG_OK, "%s", h2og_last_error());
        std::set<int32_t> all(in_cache);
        for (int32_t i = 0; i < info.n_entry; ++i) {
            CHECK(all.insert(pos[size_t(head)*info.n_entry + i]).second, "position %d is held twice", pos[size_t(head)*info.n_entry + i]);
        }
        const h2og_view v = view();
        CHECK(int32_t(all.size()) == v.n_past && (all.empty() || *all.rbegin() == v.n_past - 1), "%zu entries of %d, dropped %lld",
              all.size(), v.n_past, (long long) info.n_dropped);
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
        const int32_t n_layer = view().n_layer;
        for (int32_t j = 0; j < n_layer; ++j) {
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
