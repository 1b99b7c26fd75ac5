// Renumbering: every key is re-rotated to consecutive positions.  RoPE is additive, so one rotation by the difference does.
#include "rows.h"
#include "state.h"

#include "llama-impl.h"
#include "llama-model.h"

#include "ggml-alloc.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <cmath>
#include <numeric>

using namespace h2og;

namespace {

// A key row and how far its position moves.
struct Turn { int32_t row, by; };  // row = cell*n_head + head

constexpr size_t ROWS_AT_ONCE = 16384;  // so that their float32 copies stay small

// Rotates rows of one layer's keys through a graph on the layer's backend: dequantize, undo the Hadamard rotation, RoPE,
// redo, requantize.
void turn_keys(const llama_context & ctx, const llama_kv_cache & cache, const Rotation & r, int32_t il, ggml_tensor * k,
               int32_t stream, const Turn * turns, int64_t n) {
    const auto & hparams = ctx.get_model().hparams;
    const int64_t head_dim = hparams.n_embd_head_k(il);
    const int64_t n_rot    = r.n_dims;
    const int64_t begin    = first_rotated(r, int32_t(head_dim), hparams.n_lora_kv > 0);
    // YaRN also scales what it rotates; the keys have that factor already, so here it must be 1.
    const float attn_factor = r.ext_factor != 0.0f ? 1.0f/(1.0f + 0.1f*logf(1.0f/r.freq_scale)) : 1.0f;

    ggml_backend_t backend = backend_of(ctx, k);
    ggml_context_ptr gctx { ggml_init({ 64*ggml_tensor_overhead() + ggml_graph_overhead_custom(64, false), nullptr, true }) };
    ggml_context * g = gctx.get();

    ggml_tensor * all = ggml_new_tensor_2d(g, k->type, head_dim, k->ne[0]/head_dim*k->ne[1]);
    all->buffer = k->buffer;
    all->data   = static_cast<char *>(k->data) + stream*k->nb[2];

    ggml_tensor * row_in  = ggml_new_tensor_1d(g, GGML_TYPE_I32, n);
    ggml_tensor * row_out = ggml_new_tensor_1d(g, GGML_TYPE_I64, n);
    ggml_tensor * by      = ggml_new_tensor_1d(g, GGML_TYPE_I32, n);
    for (ggml_tensor * t : { row_in, row_out, by }) {
        ggml_set_input(t);
    }
    const Hadamard hadamard = hadamard_of(cache, false);
    ggml_tensor * had = nullptr;
    if (hadamard.matrix != nullptr) {
        had = ggml_new_tensor_2d(g, GGML_TYPE_F32, hadamard.n, hadamard.n);
        ggml_set_input(had);
    }

    ggml_tensor * cur = ggml_get_rows(g, all, row_in);  // float32 [head_dim, n]
    if (had != nullptr) {
        cur = llama_mul_mat_hadamard(g, cur, had);
    }
    cur = ggml_reshape_3d(g, ggml_cont(g, cur), head_dim, 1, n);
    ggml_tensor * part = begin == 0 ? cur : ggml_view_3d(g, cur, n_rot, 1, n, cur->nb[1], cur->nb[2], begin*sizeof(float));
    ggml_tensor * turned = ggml_rope_ext_inplace(g, part, by, r.factors, r.n_dims, r.mode, r.n_ctx_orig, r.freq_base,
        r.freq_scale, r.ext_factor, attn_factor, r.beta_fast, r.beta_slow);
    ggml_cgraph * graph = ggml_new_graph_custom(g, 64, false);
    ggml_build_forward_expand(graph, turned);
    cur = ggml_reshape_2d(g, begin == 0 ? turned : cur, head_dim, n);
    if (had != nullptr) {
        cur = llama_mul_mat_hadamard(g, cur, had);
    }
    ggml_build_forward_expand(graph, ggml_set_rows(g, all, ggml_cont(g, cur), row_out));

    ggml_gallocr_ptr alloc { ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)) };
    if (!ggml_gallocr_alloc_graph(alloc.get(), graph)) {
        fail(H2OG_NATIVE, "no memory to renumber %lld keys of layer %d", (long long) n, il);
    }
    std::vector<int32_t> in(n), shift(n);
    std::vector<int64_t> out(n);
    for (int64_t i = 0; i < n; ++i) {
        in[i]    = turns[i].row;
        out[i]   = turns[i].row;
        shift[i] = turns[i].by;
    }
    ggml_backend_tensor_set(row_in,  in.data(),    0, n*sizeof(int32_t));
    ggml_backend_tensor_set(row_out, out.data(),   0, n*sizeof(int64_t));
    ggml_backend_tensor_set(by,      shift.data(), 0, n*sizeof(int32_t));
    if (had != nullptr) {
        ggml_backend_tensor_set(had, hadamard.matrix->data(), 0, ggml_nbytes(had));
    }
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
        fail(H2OG_NATIVE, "the backend failed to renumber the keys of layer %d", il);
    }
}

// Turns all rows; done(i) is called when row turns[i] has been turned, so that a failure leaves the books true.
template <typename F>
void turn_all(const llama_context & ctx, const llama_kv_cache & cache, const Rotation & r, int32_t il, ggml_tensor * k,
              int32_t stream, const std::vector<Turn> & turns, F && done) {
    for (size_t i = 0; i < turns.size(); i += ROWS_AT_ONCE) {
        const size_t n = std::min(ROWS_AT_ONCE, turns.size() - i);
        if (r.kind == Rotation::ROPE) {
            turn_keys(ctx, cache, r, il, k, stream, turns.data() + i, int64_t(n));
        }
        for (size_t t = i; t < i + n; ++t) {
            done(t);
        }
    }
}

} // namespace

void h2og_state::require_rotations() const {
    for (const llama_kv_cache * c : { cache, window }) {
        if (c == nullptr) {
            continue;
        }
        for (const auto & layer : h2og_access::layers(*c)) {
            switch (first->rotations[layer.il].kind) {
                case Rotation::UNKNOWN:
                    fail(H2OG_NATIVE, "no graph was built that shows how layer %u rotates its keys", layer.il);
                case Rotation::ENTANGLED:
                    fail(H2OG_POSITION, "positions cannot be renumbered: layer %u changes its keys after rotating them", layer.il);
                default:
                    break;
            }
        }
    }
}

void h2og_state::require_renumbering() const {
    if (can_renumber) {
        return;
    }
    require_rotations();
    fail(H2OG_POSITION, "positions cannot be renumbered: this model's are learned");
}

void h2og_state::learn_rotations() {
    try {
        for (const h2og_state * group : groups) {
            group->require_rotations();
        }
    } catch (const Error &) {
        for (h2og_state * group : groups) {
            group->can_renumber = false;
        }
    }
}

// Rotates this group's entries to consecutive positions from begin on.
void h2og_state::turn_entries(int32_t s, int32_t begin) {
    const Stream & stream = streams[s];
    std::vector<int32_t> order;
    for (int32_t cell = 0; cell < n_cells; ++cell) {
        if (stream.books[cell] != -1) {
            order.push_back(cell);
        }
    }
    std::vector<Turn> turns;
    std::vector<size_t> entries;  // index into rope_pos of each turn
    std::vector<std::vector<Turned>> live(n_head_kv);
    for (int32_t j = 0; j < n_layer; ++j) {
        turns.clear();
        entries.clear();
        for (int32_t ih = 0; ih < n_head_kv; ++ih) {
            const size_t base = index(s, j, ih);
            std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return pos[base + a] < pos[base + b]; });
            live[ih].clear();
            for (size_t i = 0; i < order.size(); ++i) {
                const size_t at = base + order[i];
                const int32_t to = begin + int32_t(i);
                live[ih].push_back({ pos[at], rope_pos[at], to });
                if (to != rope_pos[at]) {
                    turns.push_back({ order[i]*n_head_kv + ih, to - rope_pos[at] });
                    entries.push_back(at);
                }
            }
        }
        turn_all(*ctx, *cache, first->rotations[layers[j].il], layers[j].il, layers[j].k, s, turns,
                 [&](size_t t) { rope_pos[entries[t]] += turns[t].by; });
        for (int32_t ih = 0; ih < n_head_kv; ++ih) {
            turn_attic(s, j, ih, live[ih]);
        }
    }
}

void h2og_state::rebase(int32_t s) {
    if (this != first) {
        return first->rebase(s);
    }
    require_context();
    require_renumbering();
    settle();
    ctx->sched_reserve();  // builds a graph, if none has been, to read the rotations from
    int32_t n_used = 0;  // of the fullest group: the graph has one position per token, so all groups end at the same
    for (h2og_state * group : groups) {
        group->follow_books(s);
        group->require_rotations();
        n_used = std::max(n_used, group->streams[s].n_used);
    }
    const Uninterrupted until_all_are_turned(*ctx);
    for (h2og_state * group : groups) {
        group->turn_entries(s, n_used - group->streams[s].n_used);
    }

    Stream & stream = streams[s];
    const int32_t shift = stream.n_past - n_used;
    if (window != nullptr) {
        // The window layers keep all their entries; they move with the queries, all by the same distance.
        const llama_kv_cells & cells = h2og_access::cells(*window, s);
        const auto & window_layers = h2og_access::layers(*window);
        stream.window_shift.resize(window_layers.size(), 0);
        std::vector<Turn> turns;
        for (size_t w = 0; w < window_layers.size(); ++w) {
            const auto & layer = window_layers[w];
            const int32_t n_head = int32_t(ctx->get_model().hparams.n_head_kv(layer.il));
            turns.clear();
            for (int32_t cell = 0; cell < int32_t(cells.size()); ++cell) {
                for (int32_t ih = 0; !cells.is_empty(cell) && ih < n_head; ++ih) {
                    turns.push_back({ cell*n_head + ih, stream.window_shift[w] - shift });
                }
            }
            turn_all(*ctx, *window, rotations[layer.il], int32_t(layer.il), layer.k, s, turns, [](size_t) {});
            stream.window_shift[w] = shift;
        }
    }
    for (h2og_state * group : groups) {
        group->streams[s].rope_shift = shift;
        group->streams[s].n_rebases += 1;
    }
}
