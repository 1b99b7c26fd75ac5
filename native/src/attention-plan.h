// How the fused kernel cuts a layer's attention into units, and what a unit's memory is.  Shared by all instruction sets.
#pragma once

#include "attention.h"

namespace h2og {

constexpr int32_t BLOCK   = 64;  // cells loaded and multiplied at once
constexpr int32_t STRETCH = 4;   // blocks whose logits stay in a core's cache, where rows are many

// A tile of rows of one KV head, against a range of cells.  A row is a query with one of the G heads of the KV head,
// query-major; row r of a head is query r/G with head r%G.
struct Unit {
    int32_t stream, head;
    int32_t row, n_row;
    int32_t cell, n_cells;
};

struct Plan {
    Plan(const Attention & a, int32_t lanes);

    Unit unit(const Attention & a, int32_t i) const;
    size_t mass_at(const Attention & a, int32_t stream, int32_t chain, int32_t head) const;

    int32_t group;          // G, query heads of a KV head
    int32_t n_tile_row;     // rows of a tile
    int32_t n_tile;         // tiles of a KV head
    int32_t n_split_cells;  // cells of a unit
    int32_t n_split;        // ranges the cells are cut into
    int32_t n_unit;         // stream x tile x split x KV head, the last fastest
    int32_t n_joint;        // units computed together
    int32_t n_chain_tile;   // tiles of a chain: computed one after another by one thread, their cells' mass is summed
    int32_t n_chain;        // chains of a KV head
    bool    is_wide;        // which form of the kernel: many rows, or few
    int32_t width;          // n_tile_row, rounded up to whole vectors
    int32_t dim_k, dim_v;   // head sizes, rounded up likewise
    size_t  row_k, row_v;   // bytes of a key and of a value

    // A unit's part of the workspace, in floats: top[width], total[width], out[n_tile_row][dim_v], and, if scores are
    // wanted and there are several splits, e in the layout of the logits.
    size_t  unit_floats, total_at, out_at, e_at;
    // Behind the units, if scores are wanted and there is one split: the cells' mass of stream x chain x KV head.
    size_t  mass_floats, workspace_floats;
    int32_t n_logit_row;    // rows of logits of a KV head: width, or n_tile_row if narrow
    size_t  scaled_floats;  // of all KV heads
    size_t  logit_stride;   // n_split_cells, rounded up to whole blocks
};

// What a thread needs while it works on units of the same queries.
struct Scratch {
    Scratch(const Plan & p, std::vector<float> & memory);

    float * q;          // narrow [n_head_kv][width][dim_k]; wide [dim_k][width]
    float * k, * v;     // [BLOCK][dim_k], [BLOCK][dim_v]
    float * logits;     // narrow [n_head_kv][n_logit_row][logit_stride]; wide [logit_stride][width]
    float * scaled;     // narrow, quantized V: [n_head_kv][dim_v/32][n_tile_row][BLOCK]
    float * mask;       // [queries of a tile][BLOCK]
    float * weight;     // [width]
    float * factor;     // [n_split][width]
    float * tops;       // [stretches of a unit][width]
    float * is_hidden;  // [blocks of a unit]
    int32_t loaded = -1;  // number of the tile and head whose queries are in q
};

// Keys of one KV head.
struct Keys {
    const char * data;
    size_t    step;     // bytes from one to the next
    ggml_type type;
    int32_t   n;
    const float * hidden;  // [n] 0, or -inf where there is none; nullptr: all are there
};

// Queries that are held against keys, scaled, each of dim elements: head_dim, rounded up to whole vectors with zeros.  A few
// meet the keys one by one: q[n_row][dim].  More of them are the lanes of the vectors: q[dim][width], width being their number
// rounded up to whole vectors.
struct Question {
    const float * q;
    int32_t n_row, width;
    int32_t head_dim, dim;
    float   softcap;    // 0: none
};

constexpr int32_t FEW_ROWS = 16;

// The kernel for one instruction set.
struct Kernel {
    const char * name;
    int32_t lanes;
    // The narrow form computes the units of all KV heads over a range of cells at once.  memory: the unit's part of the
    // workspace; mass: what its cells' mass is added to, and mass_floats further the next head's.
    void (* attend_narrow)(const Attention & a, const Plan & p, const Unit & u, float * memory, float * mass, Scratch & s);
    void (* attend_wide)  (const Attention & a, const Plan & p, const Unit & u, float * memory, float * mass, Scratch & s);
    void (* combine)(const Attention & a, const Plan & p, const float * workspace, int32_t stream, int32_t head, int32_t part,
                     int32_t n_part, const Scratch & s);

    // For each query the largest logit and the sum of exp(logit - it), going on from those of other keys (-inf, 0).
    // memory: look_floats() of the question.
    void (* look)(const Keys & k, const Question & q, float * top, float * total, float * memory);
    // For each key the largest over the queries of logit - whole[query]; -inf where it is hidden.
    void (* find)(const Keys & k, const Question & q, const float * whole, float * best, float * memory);
};

inline size_t look_floats(const Question & q) { return size_t(BLOCK)*(q.width + q.dim) + size_t(FEW_ROWS)*q.dim; }

} // namespace h2og
