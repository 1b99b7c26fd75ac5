// Where evicted entries of a cache stay: raw rows on the host, by sequence, layer and KV head, with what is known of each.
//
// Each eviction takes as many entries from every head, so all heads of a sequence have the same number here; it stays so
// while entries are exchanged with the cache, and where the least-scored are dropped for want of space.
#pragma once

#include "chunks.h"
#include "h2og.h"

#include "ggml.h"

#include <cstdint>
#include <mutex>
#include <vector>

struct h2og_state;

namespace h2og {

class Attic {
public:
    static constexpr int32_t CHUNK = 256;  // entries of each head whose rows lie side by side

    struct Entry {
        int32_t pos, rope_pos;
        float   score;

        bool fits(int32_t n_past) const;  // whether a saved one can be of a sequence with positions below n_past
    };

    Attic(h2og_state & state, const h2og_attic_params & params);
    ~Attic();

    Attic(const Attic &) = delete;
    Attic & operator=(const Attic &) = delete;

    int32_t n_entry(int32_t stream) const { return streams[stream].n; }  // of each head
    std::vector<Entry> & entries(int32_t stream, int32_t layer, int32_t head) { return streams[stream].entries[index_of(layer, head)]; }
    const std::vector<Entry> & entries(int32_t stream, int32_t layer, int32_t head) const { return streams[stream].entries[index_of(layer, head)]; }

    // The key or value in a slot.
    char * row(int32_t stream, int32_t layer, int32_t head, int32_t slot, bool is_v) const;

    // The keys of slots [i*CHUNK, (i + 1)*CHUNK), key_bytes apart; values likewise.
    char * keys  (int32_t stream, int32_t layer, int32_t head, int32_t i) const;
    char * values(int32_t stream, int32_t layer, int32_t head, int32_t i) const;

    // Copies the entries in these cells, victims[n_layer][n_head_kv][n], before they are overwritten; how many of each head
    // there was room for.  The other way: forgets the last n it took.
    int32_t take  (int32_t stream, const int32_t * victims, int32_t n);
    void    untake(int32_t stream, int32_t n);

    // Puts the entry of a slot into a cell of the cache, and what was there into the slot. Different heads may be exchanged
    // at the same time.
    void exchange(int32_t stream, int32_t layer, int32_t head, int32_t slot, int32_t cell);

    // Makes n empty slots more; how many there was room for.
    int32_t extend(int32_t stream, int32_t n);

    void clear(int32_t stream);
    void copy (int32_t from, int32_t to);

    // A sequence's entries in a saved state.  check_saved throws unless they fit this cache; it returns their bytes.
    static const size_t EMPTY_BYTES;  // without any
    size_t    saved_bytes(int32_t stream) const;
    void      save(int32_t stream, uint8_t * out) const;
    static size_t check_saved(const h2og_state & state, const uint8_t * data, size_t size, int32_t n_past);
    void      load(int32_t stream, const uint8_t * data);

    int64_t bytes() const;  // of all sequences' rows, as allocated

    const int64_t max_bytes;
    const ggml_type type_k, type_v;
    const size_t key_bytes, value_bytes;   // of a row

    // Of a sequence.
    int64_t n_dropped (int32_t stream) const { return streams[stream].n_dropped; }
    int64_t n_recalled(int32_t stream) const { return streams[stream].n_recalled; }
    void    count_recalled(int32_t stream, int64_t n, int32_t exact_from);
    int32_t exact_from(int32_t stream) const { return streams[stream].exact_from; }

private:
    struct Sequence {
        int32_t n = 0;
        std::vector<std::vector<Entry>> entries;  // [n_layer*n_head_kv][n]
        std::vector<char *> chunks;
        int64_t n_dropped  = 0;   // entries, of all heads
        int64_t n_recalled = 0;   // likewise
        int32_t exact_from = 0;   // cells with positions from here on were not exchanged
    };

    size_t index_of(int32_t layer, int32_t head) const;
    void   drop(int32_t stream, int32_t n);
    bool   grow(int32_t stream);
    bool   grow_from_others(int32_t stream);
    void   give_back(int32_t stream);

    h2og_state & state;
    Chunks chunks;
    int32_t max_chunks, n_chunk = 0;
    bool    is_full = false;       // the memory or the disk had no more, and nothing was given back since
    std::vector<Sequence> streams;
    std::mutex counting;
};

} // namespace h2og
