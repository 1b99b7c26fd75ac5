// Making room: which cells are released, which rows move, and what llama.cpp's books are told.
#include "rows.h"
#include "state.h"

#include "llama-model.h"

#include <algorithm>
#include <climits>

using namespace h2og;

namespace {

// Victims of one head must be distinct occupied cells; marks them in is_victim.
void mark_victims(const int32_t * victims, int32_t n, const std::vector<int32_t> & books, std::vector<char> & is_victim,
                  int32_t layer, int32_t head) {
    std::fill(is_victim.begin(), is_victim.end(), 0);
    for (int32_t i = 0; i < n; ++i) {
        const int32_t cell = victims[i];
        if (cell < 0 || cell >= int32_t(books.size())) {
            fail(H2OG_POLICY, "victim %d of layer %d, head %d is not a cell: there are %zu", cell, layer, head, books.size());
        }
        if (books[cell] == -1) {
            fail(H2OG_POLICY, "victim %d of layer %d, head %d is empty", cell, layer, head);
        }
        if (is_victim[cell]) {
            fail(H2OG_POLICY, "victim %d of layer %d, head %d is named twice", cell, layer, head);
        }
        is_victim[cell] = 1;
    }
}

} // namespace

void h2og_state::before_batch(int32_t seq, int32_t n) {
    require_context();
    const int32_t s = stream_of(seq);
    int32_t n_positions = INT32_MAX;
    bool evicts = false;
    for (h2og_state * group : groups) {
        group->make_room_for(seq, n);
        n_positions = std::min(n_positions, group->n_pos_max);
        evicts = evicts || group->params.budget > 0;
    }
    const Stream & stream = streams[s];
    if (evicts && stream.n_past - stream.rope_shift + n > n_positions) {
        require_renumbering();
        const int32_t keep = n_positions - std::max(n, std::min(params.block, n_positions/2));
        if (keep < 1) {
            fail(H2OG_POSITION, "a batch of %d tokens does not fit into %d positions", n, n_positions);
        }
        for (h2og_state * group : groups) {
            group->make_room(seq, keep);
        }
        if (stream.n_used > 0) {
            rebase(s);
        }
    }
}

void h2og_state::make_room_for(int32_t seq, int32_t n) {
    const int32_t s = stream_of(seq);
    follow_books(s);
    const Stream & stream = streams[s];
    if (params.budget == 0) {
        return;  // never evict: llama.cpp itself says when the cache is full
    }
    if (n > n_cells) {
        fail(H2OG_FULL, "a batch of %d tokens does not fit into %d cells", n, n_cells);
    }
    const bool is_over = stream.n_used > params.budget && (n > params.block || stream.n_used + n > params.budget + params.block);
    if (is_over || stream.n_used + n > n_cells) {
        make_room(seq, std::min(params.budget, n_cells - n));
    }
}

int32_t h2og_state::make_room(int32_t seq, int32_t n_keep) {
    require_context();
    const int32_t s = stream_of(seq);
    if (n_keep < 0) {
        fail(H2OG_INVALID, "n_keep is %d, and must not be negative", n_keep);
    }
    follow_books(s);
    const int32_t n = streams[s].n_used - n_keep;
    if (n <= 0) {
        return 0;
    }
    if (policy == nullptr) {
        fail(H2OG_FULL, "the cache holds %d entries per head where %d are allowed, and there is no policy to name victims",
             streams[s].n_used, n_keep);
    }
    settle();
    std::vector<int32_t> victims(size_t(n_layer)*n_head_kv*n, -1);
    const h2og_view v = view(s);
    const int32_t code = [&] {
        const CallbackGuard guard(*this);
        return policy(policy_user, &v, n, victims.data());
    }();
    if (code != 0) {
        fail(H2OG_POLICY, "the policy failed to name %d victims (code %d)", n, code);
    }
    evict(s, victims.data(), n);
    return n;
}

void h2og_state::evict(int32_t s, const int32_t * victims, int32_t n) {
    settle();
    follow_books(s);
    Stream & stream = streams[s];
    if (n < 0 || n > stream.n_used) {
        fail(H2OG_INVALID, "cannot evict %d of %d entries", n, stream.n_used);
    }
    if (n == 0) {
        return;
    }
    if (n == stream.n_used && first->groups.size() > 1) {
        fail(H2OG_INVALID, "the layers of one size cannot be emptied alone: all %d entries would go, and other layers' stay", n);
    }

    // The cells to release: those with the oldest positions in llama.cpp's books, the same for every layer and head.
    const auto & by_pos = h2og_access::cells(*cache, s).seq_pos_get(s);
    std::vector<int32_t> released;
    std::vector<char> is_released(n_cells, 0);
    for (auto it = by_pos.begin(); int32_t(released.size()) < n; ++it) {
        released.push_back(int32_t(it->second));
        is_released[it->second] = 1;
    }

    // Every plan is made before the first row moves, so that a bad victim changes nothing.
    std::vector<std::vector<Move>> moves(n_layer);
    std::vector<char> is_victim(n_cells);
    std::vector<int32_t> holes;
    for (int32_t j = 0; j < n_layer; ++j) {
        for (int32_t ih = 0; ih < n_head_kv; ++ih) {
            const int32_t * names = victims + (size_t(j)*n_head_kv + ih)*n;
            mark_victims(names, n, stream.books, is_victim, j, ih);
            holes.clear();
            for (int32_t i = 0; i < n; ++i) {
                if (!is_released[names[i]]) {
                    holes.push_back(names[i]);
                }
            }
            std::sort(holes.begin(), holes.end());
            size_t hole = 0;
            for (const int32_t cell : released) {
                if (!is_victim[cell]) {
                    moves[j].push_back({ ih, cell, holes[hole++] });
                }
            }
        }
    }

    const int32_t n_taken = attic != nullptr ? attic->take(s, victims, n) : 0;
    try {
        for (int32_t j = 0; j < n_layer; ++j) {
            move_rows(layers[j], s, moves[j]);
            for (const Move & m : moves[j]) {
                const size_t i = index(s, j, m.head);
                pos     [i + m.to] = pos     [i + m.from];
                rope_pos[i + m.to] = rope_pos[i + m.from];
                scores  [i + m.to] = scores  [i + m.from];
                recalled[i + m.to] = recalled[i + m.from];
                stream.exact_from = std::max(stream.exact_from, stream.books[m.to] + 1);
            }
        }
    } catch (...) {
        if (attic != nullptr) {
            attic->untake(s, n_taken);  // they are evicted again when room is asked for again
        }
        throw;
    }
    for (const int32_t cell : released) {
        clear_entry(s, cell);
        stream.books[cell] = -1;
    }
    upload_scores(s);

    h2og_access::release(*cache, s, released);

    stream.n_used      -= n;
    if (stream.n_used == 0 && attic != nullptr) {
        attic->clear(s);  // llama.cpp counts from 0 again: what was there is of another text
    }
    stream.n_evicted   += n;
    stream.n_evictions += 1;
}

void h2og_state::move_rows(const Layer & layer, int32_t s, const std::vector<Move> & moves) const {
    const Uninterrupted until_all_are_moved(*ctx);
    for (const bool is_v : { false, true }) {
        const RowLayout rows = rows_of(layer, is_v);
        if (rows.tensor == nullptr) {
            continue;
        }
        if (layer.is_host && (!force_graph_moves || rows.is_transposed)) {
            move_rows_host(rows, s, moves);
        } else {
            move_rows_graph(rows, s, moves, backend_of(*ctx, rows.tensor));
        }
    }
}

int32_t h2og_state::rollback_min(int32_t s) {
    int32_t res = 0;
    for (h2og_state * group : first->groups) {
        group->follow_books(s);
        res = std::max(res, group->exact_from(s));
    }
    return std::min(res, streams[s].n_past);
}

int32_t h2og_state::exact_from(int32_t s) const {
    const Stream & stream = streams[s];
    const auto & cells = h2og_access::cells(*cache, s);
    // Of what was evicted from one entry must stay: without any, llama.cpp's books would count from 0 again.
    int32_t res = stream.n_evicted > 0 ? std::max(stream.exact_from, cells.seq_pos_min(s) + 1) : 0;
    if (has_recurrent) {
        res = std::max(res, stream.n_past);
    }
    if (window != nullptr) {
        // The next query looks back n_swa - 1 positions into the window layers.
        const int32_t oldest = h2og_access::cells(*window, s).seq_pos_min(s);
        if (oldest > 0) {
            res = std::max(res, oldest + int32_t(ctx->get_model().hparams.n_swa) - 1);
        }
    }
    return std::max(0, std::min(res, stream.n_past));
}
