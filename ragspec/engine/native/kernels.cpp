// What a decode step spends its time on, for CPUs and float32: linear layers over few tokens, and attention of many
// rows over their own pasts. Plain loops that a compiler turns into vector instructions; kernels.py builds and calls
// them. Weights and cache are read once, in order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifndef RAGSPEC_HEAD  // the size of a head: a multiple of 8
#define RAGSPEC_HEAD 64
#endif

namespace {

// -- linear layers ---------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int COLUMNS = 32, TOKENS = 12;  // a block of results that fits into the registers
#else
constexpr int COLUMNS = 16, TOKENS = 6;
#endif
constexpr int DEPTH = 512;  // features of a panel that stay in the cache while all tokens pass
constexpr int AHEAD = 64;   // rows of a panel to fetch ahead

template <int M>
void block(const float* x, int64_t width, const float* w, const float* ahead, int depth, float* y, int64_t stride,
           int columns, bool first) {
    float sum[M][COLUMNS];
    for (int m = 0; m < M; m++)
        for (int j = 0; j < COLUMNS; j++) sum[m][j] = first || j >= columns ? 0 : y[m * stride + j];
    for (int i = 0; i < depth; i++) {
        const float* row = w + int64_t(i) * COLUMNS;
        for (int j = 0; j < COLUMNS; j += 16) __builtin_prefetch(ahead + int64_t(i) * COLUMNS + j, 0, 3);
        for (int m = 0; m < M; m++) {
            const float value = x[m * width + i];
            for (int j = 0; j < COLUMNS; j++) sum[m][j] += value * row[j];
        }
    }
    if (columns == COLUMNS)
        for (int m = 0; m < M; m++)
            for (int j = 0; j < COLUMNS; j++) y[m * stride + j] = sum[m][j];
    else
        for (int m = 0; m < M; m++)
            for (int j = 0; j < columns; j++) y[m * stride + j] = sum[m][j];
}

template <int M>
void blocks(int tokens, const float* x, int64_t width, const float* w, const float* ahead, int depth, float* y,
            int64_t stride, int columns, bool first) {
    if constexpr (M > 0) {
        if (tokens == M)
            block<M>(x, width, w, ahead, depth, y, stride, columns, first);
        else
            blocks<M - 1>(tokens, x, width, w, ahead, depth, y, stride, columns, first);
    }
}

// -- attention -------------------------------------------------------------------------------------------------------

constexpr int LANES = RAGSPEC_HEAD % 16 ? 8 : 16;
constexpr int LONGEST = 512;  // slots of a piece of work: their scores stay in the cache
constexpr int QUERIES = RAGSPEC_HEAD <= 64 ? 4 : 2;  // queries whose results fit into the registers
constexpr int MANY = COLUMNS * 5 / 8;  // queries from which on side by side is faster, though columns stay empty

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Whole __attribute__((vector_size(LANES * sizeof(int32_t))));

inline Lanes load(const float* from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

inline Lanes power(Lanes x) {  // e to the x for x <= 0, to a relative error of 2e-7 (Cephes' polynomial)
    constexpr float ROUND = 12582912.0f;  // adding it leaves no digits after the point
    x = x < -87.0f ? Lanes{} - 87.0f : x;
    const Lanes n = (x * 1.44269504088896341f + ROUND) - ROUND;
    const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Whole bits = (__builtin_convertvector(n, Whole) + 127) << 23;
    Lanes scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

inline float power(float x) { return power(Lanes{} + x)[0]; }

inline float sum_of(Lanes x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

// The sums of LANES vectors, as one vector: they are folded into each other until one is left.
inline Lanes sums_of(Lanes* x) {
#if RAGSPEC_HEAD % 16 == 0
    for (int i = 0; i < 8; i++)
        x[i] = __builtin_shufflevector(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        x[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        x[i] = __builtin_shufflevector(x[i], x[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(x[i], x[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return __builtin_shufflevector(x[0], x[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(x[0], x[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#else
    for (int i = 0; i < 4; i++)
        x[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
               __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        x[i] = __builtin_shufflevector(x[i], x[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(x[i], x[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(x[0], x[1], 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(x[0], x[1], 1, 9, 3, 11, 5, 13, 7, 15);
#endif
}

// Turn the scores of `count` slots, of which the first `sees` are seen, into weights; return the largest score, and put
// the sum of the weights into `sum`. Beyond `count` there is room for a whole vector.
inline float weigh(float* scores, int count, int sees, float* sum) {
    const float none = -std::numeric_limits<float>::infinity();
    for (int s = sees; s < (count + LANES - 1) / LANES * LANES; s++) scores[s] = none;
    Lanes top = Lanes{} + none, total = {};
    for (int s = 0; s < count; s += LANES) {
        const Lanes here = load(scores + s);
        top = here > top ? here : top;
    }
    float most = none;
    for (int i = 0; i < LANES; i++) most = std::max(most, top[i]);
    for (int s = 0; s < count; s += LANES) {
        const Lanes here = load(scores + s);
        const Lanes weight = here == none ? Lanes{} : power(here - most);
        store(scores + s, weight);
        total += weight;
    }
    *sum = sum_of(total);
    return most;
}

// The scores of one query, already scaled, with the keys of `count` slots.
template <int D>
void score(const float* query, const float* keys, int count, float* scores) {
    constexpr int WIDE = D / LANES;
    Lanes q[WIDE], sums[LANES];
    for (int d = 0; d < WIDE; d++) q[d] = load(query + d * LANES);
    for (int s = 0; s < count; s += LANES) {
        const int last = count - s - 1;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            const float* key = keys + int64_t(s + std::min(i, last)) * D;
            sums[i] = q[0] * load(key);
#pragma GCC unroll 16
            for (int d = 1; d < WIDE; d++) sums[i] += q[d] * load(key + d * LANES);
        }
        store(scores + s, sums_of(sums));
    }
}

// N queries' weighed values: (N, D), in `to` from its third number on.
template <int D, int N>
void weighed(const float (*weights)[LONGEST], const float* values, int count, float* const* to) {
    constexpr int WIDE = D / LANES;
    Lanes out[N][WIDE] = {};
    for (int s = 0; s < count; s++) {
        const float* value = values + int64_t(s) * D;
#pragma GCC unroll 16
        for (int d = 0; d < WIDE; d++) {
            const Lanes here = load(value + d * LANES);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) out[n][d] += weights[n][s] * here;
        }
    }
    for (int n = 0; n < N; n++)
        for (int d = 0; d < WIDE; d++) store(to[n] + 2 + d * LANES, out[n][d]);
}

// N queries over the `count` slots from `first` on. to: for each query its largest score, the sum of its weights and the
// weighed values, D of them, as far as these slots say.
template <int D, int N>
void attend(const float* const* query, const int64_t* seen, const float* keys, const float* values, int64_t first,
            int count, float scale, float* const* to) {
    alignas(64) float weights[N][LONGEST], scaled[D];
    keys += first * D;
    for (int n = 0; n < N; n++) {
        for (int d = 0; d < D; d++) scaled[d] = query[n][d] * scale;
        const int sees = int(std::clamp<int64_t>(seen[n] - first, 0, count));
        score<D>(scaled, keys, count, weights[n]);
        to[n][0] = weigh(weights[n], count, sees, &to[n][1]);
    }
    weighed<D, N>(weights, values + first * D, count, to);
}

// M rows of results, COLUMNS wide, += M rows of numbers times a panel of (depth, COLUMNS). Numbers are at x[m * ROW +
// i * STEP].
template <int M, int ROW, int STEP, bool ADD>
void multiply(const float* x, const float* panel, int depth, float* y) {
    constexpr int WIDE = COLUMNS / LANES;
    Lanes sum[M][WIDE];
    for (int m = 0; m < M; m++)
        for (int j = 0; j < WIDE; j++) sum[m][j] = ADD ? load(y + m * COLUMNS + j * LANES) : Lanes{};
    for (int i = 0; i < depth; i++) {
        Lanes row[WIDE];
        for (int j = 0; j < WIDE; j++) row[j] = load(panel + i * COLUMNS + j * LANES);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const float value = x[m * ROW + int64_t(i) * STEP];
#pragma GCC unroll 4
            for (int j = 0; j < WIDE; j++) sum[m][j] += value * row[j];
        }
    }
    for (int m = 0; m < M; m++)
        for (int j = 0; j < WIDE; j++) store(y + m * COLUMNS + j * LANES, sum[m][j]);
}

template <int ROW, int STEP, bool ADD>
void multiply_all(int rows, const float* x, const float* panel, int depth, float* y) {
    constexpr int AT_ONCE = TOKENS > 8 ? 8 : 4;  // divides the size of a head
    int m = 0;
    for (; m + AT_ONCE <= rows; m += AT_ONCE)
        multiply<AT_ONCE, ROW, STEP, ADD>(x + int64_t(m) * ROW, panel, depth, y + m * COLUMNS);
    for (; m < rows; m++) multiply<1, ROW, STEP, ADD>(x + int64_t(m) * ROW, panel, depth, y + m * COLUMNS);
}

// At most COLUMNS queries over the `count` slots from `first` on, their scores side by side, block by block. Results as
// of attend().
template <int D>
void attend_many(const float* const* query, const int64_t* seen, int n, const float* keys, const float* values,
                 int64_t first, int64_t count, float scale, float* const* to) {
    constexpr int BLOCK = 128;  // slots whose scores, keys and values stay in the cache
    constexpr int WIDE = COLUMNS / LANES;
    const float none = -std::numeric_limits<float>::infinity();
    alignas(64) float queries[D * COLUMNS], weights[BLOCK * COLUMNS], out[D * COLUMNS] = {};
    Whole sees[WIDE];
    Lanes top[WIDE], sum[WIDE];
    for (int d = 0; d < D; d++)
        for (int c = 0; c < COLUMNS; c++) queries[d * COLUMNS + c] = c < n ? query[c][d] * scale : 0;
    for (int c = 0; c < COLUMNS; c++) sees[c / LANES][c % LANES] = int(seen[std::min(c, n - 1)] - first);
    for (int j = 0; j < WIDE; j++) top[j] = Lanes{} + none, sum[j] = Lanes{};
    const auto range = std::minmax_element(seen, seen + n);
    const int64_t all = *range.first - first, some = std::min(count, *range.second - first);
    keys += first * D, values += first * D;
    for (int64_t begin = 0; begin < some; begin += BLOCK) {
        const int slots = int(std::min<int64_t>(BLOCK, some - begin));
        multiply_all<D, 1, false>(slots, keys + begin * D, queries, D, weights);
        for (int j = 0; j < WIDE; j++) {
            float* column = weights + j * LANES;
            if (begin + slots > all)
                for (int s = 0; s < slots; s++) {
                    const Lanes here = load(column + s * COLUMNS);
                    store(column + s * COLUMNS, sees[j] > int(begin) + s ? here : Lanes{} + none);
                }
            Lanes most = top[j], total = {};
            for (int s = 0; s < slots; s++) {
                const Lanes here = load(column + s * COLUMNS);
                most = here > most ? here : most;
            }
            const Lanes base = most == none ? Lanes{} : most;  // where nothing is seen yet
#pragma GCC unroll 4
            for (int s = 0; s < slots; s++) {
                const Lanes here = load(column + s * COLUMNS);
                const Lanes weight = here == none ? Lanes{} : power(here - base);
                store(column + s * COLUMNS, weight);
                total += weight;
            }
            const Lanes share = power(top[j] - base);
            sum[j] = sum[j] * share + total;
            top[j] = most;
            for (int d = 0; d < D; d++) store(out + d * COLUMNS + j * LANES, load(out + d * COLUMNS + j * LANES) * share);
        }
        multiply_all<1, D, true>(D, values + begin * D, weights, slots, out);
    }
    for (int c = 0; c < n; c++) {
        to[c][0] = top[c / LANES][c % LANES];
        to[c][1] = sum[c / LANES][c % LANES];
        for (int d = 0; d < D; d++) to[c][2 + d] = out[d * COLUMNS + c];
    }
}

struct Cache {
    float *keys, *values;  // (kv_heads, rows, slots, D)
    int64_t kv_heads, rows, slots;
};

// A piece of work: slots [first, last) of `row`, seen by queries [begin, end) of the list.
struct Piece {
    int64_t row, first, last, begin, end;
};

// An entry of the list: a token, how many slots it sees, and the number of its part (parts of a token are neighbours).
struct Entry {
    int64_t token, seen, part;
};

template <int D>
void attend_all(const float* query, int64_t token_stride, int64_t head_stride, const Cache& cache, int64_t groups,
                float scale, const Piece* pieces, int64_t piece_count, const Entry* entries, const int64_t* parts,
                int64_t tokens, float* scratch, float* out, int threads) {
    const int64_t heads = cache.kv_heads * groups;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t job = 0; job < piece_count * cache.kv_heads; job++) {
            const Piece& piece = pieces[job / cache.kv_heads];
            const int64_t kv = job % cache.kv_heads, base = (kv * cache.rows + piece.row) * cache.slots * D;
            const int count = int(piece.last - piece.first);
            const float *keys = cache.keys + base, *values = cache.values + base;
            const bool wide = (piece.end - piece.begin) * groups >= MANY || piece.last - piece.first > LONGEST;
            const int most = wide ? COLUMNS : QUERIES;
            const float* from[COLUMNS];
            int64_t seen[COLUMNS];
            float* to[COLUMNS];
            int n = 0;
            for (int64_t i = piece.begin * groups; i < piece.end * groups; i++) {
                const Entry& entry = entries[i / groups];
                const int64_t head = kv * groups + i % groups;
                from[n] = query + entry.token * token_stride + head * head_stride;
                seen[n] = entry.seen;
                to[n] = scratch + (entry.part * heads + head) * (D + 2);
                if (++n < most && i + 1 < piece.end * groups) continue;
                if (wide)
                    attend_many<D>(from, seen, n, keys, values, piece.first, count, scale, to);
                else if (n == 4)
                    attend<D, QUERIES>(from, seen, keys, values, piece.first, count, scale, to);
                else if (n == 3)
                    attend<D, std::min(3, QUERIES)>(from, seen, keys, values, piece.first, count, scale, to);
                else if (n == 2)
                    attend<D, 2>(from, seen, keys, values, piece.first, count, scale, to);
                else
                    attend<D, 1>(from, seen, keys, values, piece.first, count, scale, to);
                n = 0;
            }
        }
#pragma omp for schedule(static)
        for (int64_t job = 0; job < tokens * heads; job++) {
            const int64_t token = job / heads, head = job % heads;
            if (parts[2 * token] == parts[2 * token + 1]) continue;  // computed elsewhere
            float most = -std::numeric_limits<float>::infinity(), sum = 0, result[D] = {};
            for (int64_t p = parts[2 * token]; p < parts[2 * token + 1]; p++)
                most = std::max(most, scratch[(p * heads + head) * (D + 2)]);
            for (int64_t p = parts[2 * token]; p < parts[2 * token + 1]; p++) {
                const float* part = scratch + (p * heads + head) * (D + 2);
                const float share = part[1] > 0 ? power(part[0] - most) : 0.0f;
                sum += part[1] * share;
                for (int d = 0; d < D; d++) result[d] += part[2 + d] * share;
            }
            for (int d = 0; d < D; d++) out[(token * heads + head) * D + d] = result[d] / sum;
        }
    }
}

}  // namespace

extern "C" {

int64_t ragspec_columns() { return COLUMNS; }

// w: (n, k). out: panels of COLUMNS outputs, each (k, COLUMNS), the last one filled up with zeros.
void ragspec_pack(const float* w, int64_t n, int64_t k, float* out) {
    const int64_t panels = (n + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for
    for (int64_t p = 0; p < panels; p++)
        for (int64_t i = 0; i < k; i++)
            for (int j = 0; j < COLUMNS; j++) {
                const int64_t column = p * COLUMNS + j;
                out[(p * k + i) * COLUMNS + j] = column < n ? w[column * k + i] : 0;
            }
}

// y: (tokens, n) = x: (tokens, k) by the packed weight, plus a bias of n or none.
void ragspec_linear(const float* x, int64_t tokens, int64_t k, const float* w, int64_t n, const float* bias, float* y,
                    int threads) {
    if (tokens == 0) return;
    const int64_t panels = (n + COLUMNS - 1) / COLUMNS;
    const int64_t parts = (tokens + TOKENS - 1) / TOKENS, size = (tokens + parts - 1) / parts;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        const int columns = int(std::min<int64_t>(COLUMNS, n - p * COLUMNS));
        const float* panel = w + p * k * COLUMNS;
        for (int64_t i = 0; i < k; i += DEPTH) {
            const int depth = int(std::min<int64_t>(DEPTH, k - i));
            for (int64_t m = 0; m < tokens; m += size) {
                const bool final = m + size >= tokens;  // then what comes next is the rest of the weight
                const float* ahead = panel + (final ? i + depth : i + AHEAD) * COLUMNS;
                blocks<TOKENS>(int(std::min(size, tokens - m)), x + m * k + i, k, panel + i * COLUMNS, ahead, depth,
                               y + m * n + p * COLUMNS, n, columns, i == 0);
            }
        }
        if (bias)
            for (int64_t m = 0; m < tokens; m++)
                for (int j = 0; j < columns; j++) y[m * n + p * COLUMNS + j] += bias[p * COLUMNS + j];
    }
}

// Write the keys and values of `tokens` tokens, (kv_heads, tokens, D) with strides, to their places row x slots + slot.
void ragspec_write(const float* keys, int64_t key_head, int64_t key_token, const float* values, int64_t value_head,
                   int64_t value_token, const int64_t* places, int64_t tokens, int64_t size, float* to_keys,
                   float* to_values, int64_t kv_heads, int64_t capacity) {
    for (int64_t head = 0; head < kv_heads; head++)
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t to = (head * capacity + places[t]) * size;
            std::memcpy(to_keys + to, keys + head * key_head + t * key_token, size * sizeof(float));
            std::memcpy(to_values + to, values + head * value_head + t * value_token, size * sizeof(float));
        }
}

// Attention as in attend_all, of heads of RAGSPEC_HEAD numbers.
void ragspec_attend(const float* query, int64_t token_stride, int64_t head_stride, float* keys, float* values,
                    int64_t kv_heads, int64_t rows, int64_t slots, int64_t groups, float scale, const int64_t* pieces,
                    int64_t piece_count, const int64_t* entries, const int64_t* parts, int64_t tokens, float* scratch,
                    float* out, int threads) {
    const Cache cache{keys, values, kv_heads, rows, slots};
    attend_all<RAGSPEC_HEAD>(query, token_stride, head_stride, cache, groups, scale,
                             reinterpret_cast<const Piece*>(pieces), piece_count,
                             reinterpret_cast<const Entry*>(entries), parts, tokens, scratch, out, threads);
}
}
