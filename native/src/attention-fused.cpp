// Cuts the work into units, hands them to threads, and chooses the kernel for this CPU.
#include "attention-plan.h"

#include <algorithm>

namespace h2og {

extern const Kernel kernel_portable;
#if defined(__x86_64__)
extern const Kernel kernel_avx2, kernel_avx512;
#endif

namespace {

constexpr int32_t FEW_QUERIES  = 8;    // up to this many, the cells are split among threads
constexpr int32_t SPLIT_CELLS  = 256;
constexpr int32_t N_TILE_ROW   = 32;   // rows whose logits of a few thousand cells stay in a core's cache
constexpr int32_t N_PART       = 4;

constexpr int32_t round_up(int32_t n, int32_t to) { return (n + to - 1)/to*to; }

} // namespace

std::vector<const Kernel *> usable_kernels() {
    std::vector<const Kernel *> out;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        out.push_back(&kernel_avx512);
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        out.push_back(&kernel_avx2);
    }
#endif
    out.push_back(&kernel_portable);
    return out;
}

Plan::Plan(const Attention & a, int32_t lanes) {
    const bool is_few = a.n_query <= FEW_QUERIES;
    group         = a.n_head/a.n_head_kv;
    n_tile_row    = std::min(N_TILE_ROW, group*a.n_query);
    n_tile        = (group*a.n_query + n_tile_row - 1)/n_tile_row;
    n_split_cells = is_few ? std::min(a.n_cells, SPLIT_CELLS) : a.n_cells;
    n_split       = (a.n_cells + n_split_cells - 1)/n_split_cells;
    n_unit        = a.n_stream*n_tile*n_split*a.n_head_kv;
    n_part        = N_PART;
    is_wide       = n_tile_row > lanes/2;
    width         = is_wide ? round_up(n_tile_row, lanes) : n_tile_row;
    dim_k         = round_up(a.head_dim_k, lanes);
    dim_v         = round_up(a.head_dim_v, lanes);
    k_row_bytes   = ggml_row_size(a.type_k, a.head_dim_k);
    v_row_bytes   = a.v_element == 0 ? ggml_row_size(a.type_v, a.head_dim_v) : 0;
    logit_stride  = round_up(n_split_cells, BLOCK);
    total_at      = width;
    out_at        = total_at + width;
    rest_at       = out_at + size_t(n_tile_row)*dim_v;
    unit_floats   = rest_at + (a.scores == nullptr ? 0 : n_split == 1 ? a.n_cells : width*logit_stride);
}

Unit Plan::unit(const Attention & a, int32_t i) const {
    Unit u;
    u.head = i % a.n_head_kv;
    const int32_t split = i/a.n_head_kv % n_split, tile = i/(a.n_head_kv*n_split) % n_tile;
    u.stream  = i/(a.n_head_kv*n_split*n_tile);
    u.row     = tile*n_tile_row;
    u.n_row   = std::min(n_tile_row, group*a.n_query - u.row);
    u.cell    = split*n_split_cells;
    u.n_cells = std::min(n_split_cells, a.n_cells - u.cell);
    return u;
}

Scratch::Scratch(const Plan & p, std::vector<float> & memory) {
    const std::pair<float **, size_t> parts[] = {
        { &q, size_t(p.width)*p.dim_k }, { &k, size_t(BLOCK)*p.dim_k }, { &v, size_t(BLOCK)*p.dim_v },
        { &logits, p.logit_stride*p.width }, { &mask, size_t(p.n_tile_row + 1)*BLOCK }, 
        { &weight, p.width }, { &factor, size_t(p.n_split)*p.width },
        { &is_hidden, p.logit_stride/BLOCK },
    };
    constexpr size_t LINE = 16;
    size_t n = LINE;
    for (const auto & part : parts) {
        n += (part.second + LINE - 1)/LINE*LINE;
    }
    if (memory.size() < n) {
        memory.resize(n);
    }
    float * at = memory.data() + (LINE - reinterpret_cast<uintptr_t>(memory.data())/sizeof(float) % LINE) % LINE;
    for (const auto & part : parts) {
        *part.first = at;
        at += (part.second + LINE - 1)/LINE*LINE;
    }
}

FusedAttention::FusedAttention(const Attention & a, const Kernel & kernel) : kernel(kernel), plan(std::make_unique<Plan>(a, kernel.lanes)) {}
FusedAttention::FusedAttention(const Attention & a) : FusedAttention(a, *usable_kernels().front()) {}
FusedAttention::~FusedAttention() = default;

size_t FusedAttention::workspace_floats() const {
    return plan->n_unit*plan->unit_floats;
}

void FusedAttention::start() {
    next_unit = 0;
    next_part = 0;
}

void FusedAttention::attend(const Attention & a, float * workspace) {
    static thread_local std::vector<float> memory;
    const Scratch scratch(*plan, memory);
    int32_t i = next_unit.fetch_add(1, std::memory_order_relaxed);
    while (i < plan->n_unit) {
        const int32_t following = next_unit.fetch_add(1, std::memory_order_relaxed);
        const Unit unit = plan->unit(a, i), next = plan->unit(a, std::min(following, plan->n_unit - 1));
        kernel.attend(a, *plan, unit, following < plan->n_unit ? &next : nullptr, workspace + i*plan->unit_floats, scratch);
        i = following;
    }
}

void FusedAttention::combine(const Attention & a, const float * workspace) {
    static thread_local std::vector<float> memory;
    const Scratch scratch(*plan, memory);
    const int32_t n = a.n_stream*a.n_head_kv*plan->n_part;
    for (int32_t i; (i = next_part.fetch_add(1, std::memory_order_relaxed)) < n;) {
        const int32_t head = i/plan->n_part;
        kernel.combine(a, *plan, workspace, head/a.n_head_kv, head % a.n_head_kv, i % plan->n_part, scratch);
    }
}

} // namespace h2og
