// Speed of attention alone for a token that is decoded: how fast it goes through keys and values, scores included, beside how fast
// as many threads read the same memory.  In turns, since a shared machine is not always as fast.
//
//   attention-speed [TYPE KV_HEADS GROUP HEAD_DIM CELLS THREADS MIB]      f16 3 3 64 7500 2 192 unless said
#include "attention.h"
#include "pages.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <new>
#include <random>
#include <thread>
#include <vector>

using namespace h2og;

namespace {

constexpr size_t MIB = size_t(1) << 20;
constexpr std::align_val_t LARGE_PAGE{2*MIB};
constexpr int REPEATS = 15;

// Threads that wait for each other without sleeping, as those of a graph do.
class Team {
public:
    explicit Team(int n) : n(n) {}

    void wait() {
        const int round = rounds.load();
        if (arrived.fetch_add(1) == n - 1) {
            arrived = 0;
            rounds.fetch_add(1);
        }
        while (rounds.load() == round) {}
    }

    // Of step(i) on each of them.
    template <typename F>
    double seconds(const F & step) {
        std::vector<std::thread> others;
        for (int i = 1; i < n; ++i) {
            others.emplace_back([this, &step, i] {
                wait();
                step(i);
                wait();
            });
        }
        wait();
        const auto start = std::chrono::steady_clock::now();
        step(0);
        wait();
        const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
        for (std::thread & other : others) {
            other.join();
        }
        return time.count();
    }

    const int n;

private:
    std::atomic<int> arrived{0}, rounds{0};
};

// A layer's keys or values, where the runtime would have them.
struct Rows {
    explicit Rows(const std::vector<char> & contents) : n(contents.size()), data(static_cast<char *>(operator new(n, LARGE_PAGE))) {
        prefer_large_pages(data, n);
        memcpy(data, contents.data(), n);
    }
    ~Rows() { operator delete(data, LARGE_PAGE); }
    Rows(const Rows &) = delete;

    const size_t n;
    char * const data;
};

uint64_t read(const Rows & rows, int i, int n_part) {
    uint64_t sum = 0, word;
    for (size_t at = rows.n/8*i/n_part*8; at < rows.n/8*(i + 1)/n_part*8; at += sizeof(word)) {
        memcpy(&word, rows.data + at, sizeof(word));
        sum += word;
    }
    return sum;
}

ggml_type type_of(const char * name) {
    for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
                                  GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL }) {
        if (strcmp(ggml_type_name(type), name) == 0) {
            return type;
        }
    }
    fprintf(stderr, "%s is no type of a cache\n", name);
    exit(2);
}

int32_t number_of(const char * word) {
    char * end;
    const long number = strtol(word, &end, 10);
    if (*end != 0 || number < 1 || number > 1 << 20) {
        fprintf(stderr, "%s is no number from 1 to %d\n", word, 1 << 20);
        exit(2);
    }
    return int32_t(number);
}

void print(const char * what, std::vector<double> values, const char * unit) {
    std::sort(values.begin(), values.end());
    printf("%-12s %6.2f %s (%.2f .. %.2f)\n", what, values[values.size()/2], unit, values[values.size()/4], values[values.size()*3/4]);
}

} // namespace

int main(int argc, char ** argv) {
    const auto number = [&](int i, int32_t otherwise) { return argc > i ? number_of(argv[i]) : otherwise; };
    const ggml_type type = type_of(argc > 1 ? argv[1] : "f16");
    const int32_t n_head_kv = number(2, 3), group = number(3, 3), head_dim = number(4, 64), n_cells = number(5, 7500);
    Team team(number(6, 2));
    const size_t enough = number(7, 192)*MIB;  // more than caches hold
    if (head_dim % ggml_blck_size(type) != 0) {
        fprintf(stderr, "heads of %d elements are no whole blocks of %s\n", head_dim, ggml_type_name(type));
        return 2;
    }

    std::mt19937 rng(1);
    std::normal_distribution<float> gaussian;
    const int64_t n_row = int64_t(n_cells)*n_head_kv;
    std::vector<float> numbers(n_row*head_dim), q(size_t(n_head_kv)*group*head_dim), out(q.size());
    std::generate(numbers.begin(), numbers.end(), [&] { return gaussian(rng); });
    std::generate(q.begin(), q.end(), [&] { return gaussian(rng); });
    std::vector<char> contents(n_row*ggml_row_size(type, head_dim));
    ggml_quantize_chunk(type, numbers.data(), contents.data(), 0, n_row, head_dim, nullptr);

    const size_t n_layer = (enough + 2*contents.size() - 1)/(2*contents.size());
    std::deque<Rows> rows;
    for (size_t i = 0; i < 2*n_layer; ++i) {
        rows.emplace_back(contents);
    }
    std::vector<std::vector<float>> scores(n_layer, std::vector<float>(n_row));
    const std::vector<ggml_fp16_t> mask(n_cells, ggml_fp32_to_fp16(0.0f));
    const float weight = 1.0f, fade = 0.9995f;

    Attention a{};
    a.head_dim_k = a.head_dim_v = head_dim;
    a.n_head = n_head_kv*group; a.n_head_kv = n_head_kv;
    a.n_query = a.n_stream = 1; a.n_cells = n_cells;
    a.q = reinterpret_cast<const char *>(q.data()); a.q_head = head_dim*sizeof(float); a.q_query = a.q_head*a.n_head;
    a.k_head = a.v_head = ggml_row_size(type, head_dim); a.k_cell = a.v_cell = a.k_head*n_head_kv;
    a.type_k = a.type_v = type;
    a.mask = reinterpret_cast<const char *>(mask.data()); a.type_mask = GGML_TYPE_F16; a.mask_query = n_cells*sizeof(ggml_fp16_t);
    a.scale = 1.0f/std::sqrt(float(head_dim));
    a.out = out.data();
    a.scores_head = n_cells; a.scores_stream = n_row; a.weights = &weight; a.fade = &fade;
    a.scores = scores[0].data();
    FusedAttention fused(a);
    std::vector<float> workspace(fused.workspace_floats());

    const double gigabytes = 2e-9*double(n_layer)*double(contents.size());
    std::atomic<uint64_t> total{0};  // so that reading is for something
    std::vector<double> reading, attending, shares;
    for (int r = 0; r < REPEATS; ++r) {
        reading.push_back(gigabytes/team.seconds([&](int i) {
            uint64_t sum = 0;
            for (const Rows & each : rows) {
                sum += read(each, i, team.n);
            }
            total += sum;
        }));
        attending.push_back(gigabytes/team.seconds([&](int i) {
            Attention layer = a;
            for (size_t l = 0; l < n_layer; ++l) {
                layer.k = rows[2*l].data;
                layer.v = rows[2*l + 1].data;
                layer.scores = scores[l].data();
                if (i == 0) {
                    fused.start();
                }
                team.wait();
                fused.attend(layer, workspace.data(), i, team.n);
                team.wait();
                fused.combine(layer, workspace.data(), i, team.n);
                team.wait();
            }
        }));
        shares.push_back(100.0*attending.back()/reading.back());
    }
    printf("%s, %d KV heads of %d, %d queries each, %zu layers of %d cells, threads: %d, %d repeats, medians and quartiles\n",
           ggml_type_name(type), n_head_kv, head_dim, group, n_layer, n_cells, team.n, REPEATS);
    print("reading", reading, "GB/s");
    print("attention", attending, "GB/s");
    print("of reading", shares, "%");
    return 0;
}
