// The state of each sequence is kept true to llama.cpp's books.
#include "state.h"

#include <algorithm>

using namespace h2og;

void h2og_state::clear_entry(int32_t stream, int32_t cell) {
    for (int32_t j = 0; j < n_layer; ++j) {
        for (int32_t ih = 0; ih < n_head_kv; ++ih) {
            const size_t i = index(stream, j, ih) + cell;
            pos[i] = rope_pos[i] = -1;
            scores[i] = 0.0f;
            recalled[i] = 0;
        }
    }
}

void h2og_state::follow_books(int32_t stream) {
    const llama_kv_cells & cells = h2og_access::cells(*cache, stream);
    Stream & s = streams[stream];

    if (cells.get_used() == 0 && s.n_used > 0) {
        forget(stream);
    }

    bool changed_scores = false;
    for (int32_t cell = 0; cell < n_cells; ++cell) {
        const int32_t p = cells.is_empty(cell) ? -1 : cells.pos_get(cell);
        if (p == s.books[cell]) {
            continue;
        }
        if (s.books[cell] != -1) {  // emptied, or refilled behind our back
            if (!changed_scores) {
                synchronize();  // what is uploaded below must be what the device has, but for these entries
            }
            clear_entry(stream, cell);
            changed_scores = true;
            if (queries != nullptr) {
                queries->drop(stream, s.books[cell]);
            }
        }
        s.books[cell] = p;
        if (p == -1) {
            continue;
        }
        for (int32_t j = 0; j < n_layer; ++j) {
            for (int32_t ih = 0; ih < n_head_kv; ++ih) {
                const size_t i = index(stream, j, ih) + cell;
                pos[i]      = p;
                rope_pos[i] = p - s.rope_shift;
            }
        }
    }
    if (attic != nullptr) {
        s.exact_from = std::max(s.exact_from, attic->exact_from(stream));
    }
    s.n_used = int32_t(cells.get_used());
    s.n_past = cells.seq_pos_max(stream) + 1;
    if (changed_scores) {
        upload_scores(stream);
    }
}

void h2og_state::forget(int32_t stream) {
    // All of it: cells that were filled after the books were last followed have scores as well.
    const size_t begin = index(stream, 0, 0), n = index(1, 0, 0);
    std::fill_n(pos.begin() + begin, n, -1);
    std::fill_n(rope_pos.begin() + begin, n, -1);
    std::fill_n(scores + begin, n, 0.0f);
    std::fill_n(recalled.begin() + begin, n, uint8_t(0));
    upload_scores(stream);
    if (queries != nullptr) {
        queries->clear(stream);
    }
    if (attic != nullptr) {
        attic->clear(stream);
    }
    next_recalls[stream].reset();
    streams[stream] = Stream{};
    streams[stream].books.assign(n_cells, -1);
}

void h2og_state::copy_stream(int32_t from, int32_t to) {
    if (from == to) {
        return;
    }
    settle();
    follow_books(from);
    const size_t n = index(1, 0, 0);
    std::copy_n(pos.begin()      + index(from, 0, 0), n, pos.begin()      + index(to, 0, 0));
    std::copy_n(rope_pos.begin() + index(from, 0, 0), n, rope_pos.begin() + index(to, 0, 0));
    std::copy_n(scores           + index(from, 0, 0), n, scores           + index(to, 0, 0));
    std::copy_n(recalled.begin() + index(from, 0, 0), n, recalled.begin() + index(to, 0, 0));
    streams[to] = streams[from];
    if (queries != nullptr) {
        queries->copy(from, to);
    }
    if (attic != nullptr) {
        attic->copy(from, to);
    }
    upload_scores(to);
}
