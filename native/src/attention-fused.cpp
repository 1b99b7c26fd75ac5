// Cuts the work into units, hands them to threads, and chooses the kernel for this CPU.
#include "attention-plan.h"

#include <algorithm>
#include <atomic>

namespace h2og {

extern const Kernel kernel_portable;
#if defined(__x86_64__)
extern const Kernel kernel_avx2, kernel_avx512, kernel_avx512vnni;
#endif

namespace {

constexpr int32_t FEW_QUERIES     = 8;    // up to this many, the cells are split among threads
constexpr int32_t SPLIT_CELLS     = 256;
constexpr int32_t NARROW_ROWS     = 8;    // up to this many rows of a KV head the narrow form is used
constexpr int32_t N_TILE_ROW      = 96;   // rows that share a conversion of K and V, and whose logits stay in a core's cache
constexpr int32_t N_MASS          = 128;  // mass arrays of a stream's KV heads: enough units for many threads, bounded memory
constexpr int32_t PARTS_OF_THREAD = 2;    // parts the combining work of a KV head is cut into
constexpr size_t  LINE            = 16;   // floats of a cache line

constexpr int32_t ceil_div(int32_t n, int32_t by) { return (n + by - 1)/by; }
constexpr int32_t round_up(int32_t n, int32_t to) { return ceil_div(n, to)*to; }
constexpr size_t  whole_lines(size_t n)           { return (n + LINE - 1)/LINE*LINE; }

} // namespace

std::vector<const Kernel *> usable_kernels() {
    std::vector<const Kernel *> out;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        if (__builtin_cpu_supports("avx512vnni")) {
            out.push_back(&kernel_avx512vnni);
        }
        out.push_back(&kernel_avx512);
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {  // each such CPU also has F16C
        out.push_back(&kernel_avx2);
    }
#endif
    out.push_back(&kernel_portable);
    return out;
}

Plan::Plan(const Attention & a, int32_t lanes) {
    const bool is_few = a.n_query <= FEW_QUERIES;
    group         = a.n_head/a.n_head_kv;
    const int32_t n_row = group*a.n_query;
    n_tile_row    = std::min(n_row, round_up(ceil_div(n_row, ceil_div(n_row, N_TILE_ROW)), 2*lanes));
    n_tile        = ceil_div(n_row, n_tile_row);
    n_split_cells = is_few ? std::min(a.n_cells, SPLIT_CELLS) : a.n_cells;
    n_split       = ceil_div(a.n_cells, n_split_cells);
    n_unit        = a.n_stream*n_tile*n_split*a.n_head_kv;
    is_wide       = n_tile_row > NARROW_ROWS;
    n_joint       = is_wide ? 1 : a.n_head_kv;
    width         = round_up(n_tile_row, lanes);
    dim_k         = round_up(a.head_dim_k, lanes);
    dim_v         = round_up(a.head_dim_v, lanes);
    row_k         = ggml_row_size(a.type_k, a.head_dim_k);
    row_v         = ggml_row_size(a.type_v, a.head_dim_v);
    logit_stride  = round_up(n_split_cells, BLOCK);
    n_chain_tile  = n_split > 1 || a.scores == nullptr ? 1 : ceil_div(n_tile, std::max(1, N_MASS/a.n_head_kv));
    n_chain       = ceil_div(n_tile, n_chain_tile);
    total_at      = width;
    out_at        = total_at + width;
    e_at          = out_at + size_t(n_tile_row)*dim_v;
    n_logit_row   = is_wide ? width : n_tile_row;
    scaled_floats = is_wide || !ggml_is_quantized(a.type_v) ? 0 : n_joint*(dim_v/ggml_blck_size(a.type_v))*n_tile_row*BLOCK;
    unit_floats   = whole_lines(e_at + (a.scores == nullptr || n_split == 1 ? 0 : n_logit_row*logit_stride));
    mass_floats   = a.scores == nullptr || n_split > 1 ? 0 : whole_lines(a.n_cells);

    workspace_floats = mass_at(a, a.n_stream, 0, 0);
}

size_t Plan::mass_at(const Attention & a, int32_t stream, int32_t chain, int32_t head) const {
    return n_unit*unit_floats + ((size_t(stream)*n_chain + chain)*a.n_head_kv + head)*mass_floats;
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
        { &q, size_t(p.n_joint)*p.width*p.dim_k }, { &k, size_t(BLOCK)*p.dim_k }, { &v, size_t(BLOCK)*p.dim_v },
        { &logits, p.n_joint*p.logit_stride*p.n_logit_row }, { &scaled, p.scaled_floats },
        { &mask, size_t(p.n_tile_row + 1)*BLOCK },
        { &weight, p.width }, { &factor, size_t(p.n_split)*p.width },
        { &tops, (p.logit_stride/(STRETCH*BLOCK) + 1)*p.width },
        { &is_hidden, p.logit_stride/BLOCK },
    };
    size_t n = LINE;
    for (const auto & part : parts) {
        n += whole_lines(part.second);
    }
    if (memory.size() < n) {
        memory.resize(n);
    }
    float * at = memory.data() + (LINE - reinterpret_cast<uintptr_t>(memory.data())/sizeof(float) % LINE) % LINE;
    for (const auto & part : parts) {
        *part.first = at;
        at += whole_lines(part.second);
    }
}

namespace {

// Hands out 0 .. n - 1, each to one thread: first what lies in a thread's own range, so that what it wrote in one step is
// in its cache in the next, then what is left of the others'.
class Shares {
public:
    void start() {
        for (Range & range : ranges) {
            range.taken.store(0, std::memory_order_relaxed);
        }
    }

    template <typename F>
    void run(int32_t n, int32_t i_thread, int32_t n_thread, const F & f) {
        const int32_t n_range = std::min(n_thread, N_RANGE);
        for (int32_t k = 0; k < n_range; ++k) {
            const int32_t r = (int32_t(int64_t(i_thread)*n_range/n_thread) + k) % n_range;
            const int32_t first = int32_t(int64_t(n)*r/n_range), end = int32_t(int64_t(n)*(r + 1)/n_range);
            for (int32_t i; (i = first + ranges[r].taken.fetch_add(1, std::memory_order_relaxed)) < end;) {
                f(i);
            }
        }
    }

private:
    static constexpr int32_t N_RANGE = 16;
    struct alignas(64) Range { std::atomic<int32_t> taken{0}; };
    Range ranges[N_RANGE];
};

// Of the thread, for either step.
std::vector<float> & scratch_memory() {
    static thread_local std::vector<float> memory;
    return memory;
}

} // namespace

struct FusedAttention::Work {
    Shares units, parts;
};

FusedAttention::FusedAttention(const Attention & a, const Kernel & kernel) :
    kernel(kernel), plan(std::make_unique<Plan>(a, kernel.lanes)), work(std::make_unique<Work>()) {}
FusedAttention::FusedAttention(const Attention & a) : FusedAttention(a, *usable_kernels().front()) {}
FusedAttention::~FusedAttention() = default;

size_t FusedAttention::workspace_floats() const {
    return plan->workspace_floats;
}

void FusedAttention::start() {
    work->units.start();
    work->parts.start();
}

void FusedAttention::attend(const Attention & a, float * workspace, int32_t i_thread, int32_t n_thread) {
    Scratch scratch(*plan, scratch_memory());
    const auto compute = plan->is_wide ? kernel.attend_wide : kernel.attend_narrow;
    const Plan & p = *plan;
    work->units.run(a.n_stream*p.n_chain*p.n_split*a.n_head_kv/p.n_joint, i_thread, n_thread, [&](int32_t i) {
        i *= p.n_joint;
        const int32_t head = i % a.n_head_kv, split = i/a.n_head_kv % p.n_split;
        const int32_t chain = i/(a.n_head_kv*p.n_split) % p.n_chain, stream = i/(a.n_head_kv*p.n_split*p.n_chain);
        float * mass = workspace + p.mass_at(a, stream, chain, head);
        std::fill_n(mass, p.n_joint*p.mass_floats, 0.0f);
        const int32_t first = chain*p.n_chain_tile, end = std::min(first + p.n_chain_tile, p.n_tile);
        for (int32_t tile = first; tile < end; ++tile) {
            const int32_t unit = ((stream*p.n_tile + tile)*p.n_split + split)*a.n_head_kv + head;
            compute(a, p, p.unit(a, unit), workspace + unit*p.unit_floats, mass, scratch);
        }
    });
}

void FusedAttention::combine(const Attention & a, const float * workspace, int32_t i_thread, int32_t n_thread) {
    const Scratch scratch(*plan, scratch_memory());
    const int32_t n_part = PARTS_OF_THREAD*n_thread;
    work->parts.run(a.n_stream*n_part*a.n_head_kv, i_thread, n_thread, [&](int32_t i) {
        const int32_t head = i % a.n_head_kv, part = i/a.n_head_kv % n_part, stream = i/(a.n_head_kv*n_part);
        kernel.combine(a, *plan, workspace, stream, head, part, n_part, scratch);
    });
}

} // namespace h2og
