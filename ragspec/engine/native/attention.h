// Attention of rows over their own pasts, and of prompts, in float32. Each piece of work is some queries and some slots;
// what a query makes of its pieces is merged by the logarithm of the sum of its weights. Keys and values are read once.

#pragma once

#include "vectors.h"

#ifndef RAGSPEC_HEAD  // the size of a head: a multiple of 8
#define RAGSPEC_HEAD 64
#endif
#if RAGSPEC_HEAD % RAGSPEC_WIDTH
#define RAGSPEC_LANES 8  // numbers in a vector that heads are made of
#else
#define RAGSPEC_LANES RAGSPEC_WIDTH
#endif

namespace {

constexpr int LANES = RAGSPEC_LANES;
constexpr int REGISTERS = WIDTH == 16 ? 16 : 8;  // of them, those that may hold results
constexpr int LONGEST = 512;                     // slots of a piece of work: their scores stay in the cache
constexpr int QUERIES = 4;                       // queries that values are read once for
constexpr int MANY = COLUMNS * 5 / 8;  // queries from which on side by side is faster, though columns stay empty

typedef Vector<LANES>::Floats Lanes;
typedef Vector<LANES>::Whole Whole;

inline Lanes load(const float* from) { return load<Lanes>(from); }

inline float sum_of(Lanes x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

// The sums of LANES vectors, as one vector: they are folded into each other until one is left.
inline Lanes sums_of(Lanes* x) {
#if !defined(__clang__) && __GNUC__ < 12  // which has no __builtin_shufflevector
    Lanes sums;
    for (int i = 0; i < LANES; i++) sums[i] = sum_of(x[i]);
    return sums;
#elif RAGSPEC_LANES == 16
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
#elif RAGSPEC_LANES == 8
    for (int i = 0; i < 4; i++)
        x[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
               __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        x[i] = __builtin_shufflevector(x[i], x[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(x[i], x[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(x[0], x[1], 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(x[0], x[1], 1, 9, 3, 11, 5, 13, 7, 15);
#else
    for (int i = 0; i < 2; i++)
        x[i] = __builtin_shufflevector(x[i], x[i + 2], 0, 1, 4, 5) +
               __builtin_shufflevector(x[i], x[i + 2], 2, 3, 6, 7);
    return __builtin_shufflevector(x[0], x[1], 0, 4, 2, 6) + __builtin_shufflevector(x[0], x[1], 1, 5, 3, 7);
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

// How scores become what is weighed: times `scale`, and then at most `cap` (cap * tanh(score / cap)), 0 for no cap.
struct Scores {
    float scale, cap;

    void soften(float* scores, int count) const {  // beyond `count` there is room for a whole vector
        if (cap > 0)
            for (int s = 0; s < count; s += LANES) store(scores + s, cap * hyperbolic(load(scores + s) / cap));
    }
};

// N queries' weighed values: (N, D), in `to` from its third number on.
template <int D, int N>
void weighed(const float (*weights)[LONGEST], const float* values, int count, float* const* to) {
    constexpr int WIDE = D / LANES, MOST = REGISTERS / N, AT_ONCE = WIDE % MOST ? 1 : MOST;
    for (int from = 0; from < WIDE; from += AT_ONCE) {
        Lanes out[N][AT_ONCE] = {};
        for (int s = 0; s < count; s++) {
            const float* value = values + int64_t(s) * D + from * LANES;
#pragma GCC unroll 16
            for (int d = 0; d < AT_ONCE; d++) {
                const Lanes here = load(value + d * LANES);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) out[n][d] += weights[n][s] * here;
            }
        }
        for (int n = 0; n < N; n++)
            for (int d = 0; d < AT_ONCE; d++) store(to[n] + 2 + (from + d) * LANES, out[n][d]);
    }
}

// N queries over the `count` slots from `first` on. to: for each query its largest score, the sum of its weights and the
// weighed values, D of them, as far as these slots say.
template <int D, int N>
void attend(const float* const* query, const int64_t* seen, const float* keys, const float* values, int64_t first,
            int count, const Scores& scores, float* const* to) {
    alignas(64) float weights[N][LONGEST], scaled[D];
    keys += first * D;
    for (int n = 0; n < N; n++) {
        for (int d = 0; d < D; d++) scaled[d] = query[n][d] * scores.scale;
        const int sees = int(std::clamp<int64_t>(seen[n] - first, 0, count));
        score<D>(scaled, keys, count, weights[n]);
        scores.soften(weights[n], count);
        to[n][0] = weigh(weights[n], count, sees, &to[n][1]);
    }
    weighed<D, N>(weights, values + first * D, count, to);
}

// At most COLUMNS queries over the `count` slots from `first` on, their scores side by side, block by block. Results as
// of attend().
template <int D>
void attend_many(const float* const* query, const int64_t* seen, int n, const float* keys, const float* values,
                 int64_t first, int64_t count, const Scores& scores, float* const* to) {
    constexpr int BLOCK = 128;  // slots whose scores, keys and values stay in the cache
    constexpr int WIDE = COLUMNS / LANES;
    constexpr int WHOLE = D / COLUMNS * COLUMNS, REST = D - WHOLE;  // of a head, in panels of COLUMNS
    constexpr int ROOM = WHOLE + (REST ? COLUMNS : 0);
    const float none = -std::numeric_limits<float>::infinity();
    alignas(64) float queries[D * COLUMNS], weights[BLOCK * COLUMNS], out[COLUMNS * ROOM] = {};
    alignas(64) float rest[REST ? BLOCK * COLUMNS : 1] = {}, shares[COLUMNS];
    Whole sees[WIDE];
    Lanes top[WIDE], sum[WIDE];
    for (int d = 0; d < D; d++)
        for (int c = 0; c < COLUMNS; c++) queries[d * COLUMNS + c] = c < n ? query[c][d] * scores.scale : 0;
    for (int c = 0; c < COLUMNS; c++) sees[c / LANES][c % LANES] = int(seen[std::min(c, n - 1)] - first);
    for (int j = 0; j < WIDE; j++) top[j] = Lanes{} + none, sum[j] = Lanes{};
    const auto range = std::minmax_element(seen, seen + n);
    const int64_t all = *range.first - first, some = std::min(count, *range.second - first);
    keys += first * D, values += first * D;
    for (int64_t begin = 0; begin < some; begin += BLOCK) {
        const int slots = int(std::min<int64_t>(BLOCK, some - begin));
        const bool masked = begin + slots > all;
        multiply(slots, {keys + begin * D, D, 1}, queries, COLUMNS, D, weights, COLUMNS, false);
        scores.soften(weights, slots * COLUMNS);
        for (int j = 0; j < WIDE; j++) {
            float* column = weights + j * LANES;
            Lanes most = top[j], total = {};
            for (int s = 0; s < slots; s++) {
                Lanes here = load(column + s * COLUMNS);
                if (masked) store(column + s * COLUMNS, here = sees[j] > int(begin) + s ? here : Lanes{} + none);
                most = here > most ? here : most;
            }
            const Lanes base = most == none ? Lanes{} : most;  // where nothing is seen yet
#pragma GCC unroll 4
            for (int s = 0; s < slots; s++) {
                const Lanes here = load(column + s * COLUMNS);
                Lanes weight = power(here - base);
                if (masked) weight = here == none ? Lanes{} : weight;
                store(column + s * COLUMNS, weight);
                total += weight;
            }
            const Lanes share = power(top[j] - base);
            store(shares + j * LANES, share);
            sum[j] = sum[j] * share + total;
            top[j] = most;
        }
        for (int c = 0; c < n; c++)
            if (shares[c] != 1)
                for (int d = 0; d < ROOM; d++) out[c * ROOM + d] *= shares[c];
        const Rows all_weights{weights, 1, COLUMNS};
        for (int d = 0; d < WHOLE; d += COLUMNS)
            multiply(n, all_weights, values + begin * D + d, D, slots, out + d, ROOM, true);
        if constexpr (REST > 0) {
            for (int s = 0; s < slots; s++)
                std::memcpy(rest + s * COLUMNS, values + (begin + s) * D + WHOLE, REST * sizeof(float));
            multiply(n, all_weights, rest, COLUMNS, slots, out + WHOLE, ROOM, true);
        }
    }
    for (int c = 0; c < n; c++) {
        to[c][0] = top[c / LANES][c % LANES];
        to[c][1] = sum[c / LANES][c % LANES];
        std::memcpy(to[c] + 2, out + c * ROOM, D * sizeof(float));
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

// Pieces of work, and what is merged of them. parts: first and last part of each token; none for those that attend
// elsewhere. scratch: for each part and head D + 2 numbers.
struct Work {
    const Piece* pieces;
    int64_t piece_count;
    const Entry* entries;
    const int64_t* parts;
    int64_t tokens;
    float* scratch;
};

// Attention of `groups` heads for each of the cache's. out: (tokens, heads, D). All threads of a team call this, and wait
// for each other.
template <int D>
void attend_all(const float* query, int64_t token_stride, int64_t head_stride, const Cache& cache, int64_t groups,
                const Scores& scores, const Work& work, float* out) {
    const int64_t heads = cache.kv_heads * groups;
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < work.piece_count * cache.kv_heads; job++) {
        const Piece& piece = work.pieces[job / cache.kv_heads];
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
            const Entry& entry = work.entries[i / groups];
            const int64_t head = kv * groups + i % groups;
            from[n] = query + entry.token * token_stride + head * head_stride;
            seen[n] = entry.seen;
            to[n] = work.scratch + (entry.part * heads + head) * (D + 2);
            if (++n < most && i + 1 < piece.end * groups) continue;
            if (wide)
                attend_many<D>(from, seen, n, keys, values, piece.first, count, scores, to);
            else if (n == 4)
                attend<D, 4>(from, seen, keys, values, piece.first, count, scores, to);
            else if (n == 3)
                attend<D, 3>(from, seen, keys, values, piece.first, count, scores, to);
            else if (n == 2)
                attend<D, 2>(from, seen, keys, values, piece.first, count, scores, to);
            else
                attend<D, 1>(from, seen, keys, values, piece.first, count, scores, to);
            n = 0;
        }
    }
#pragma omp for schedule(static)
    for (int64_t job = 0; job < work.tokens * heads; job++) {
        const int64_t token = job / heads, head = job % heads;
        const int64_t first = work.parts[2 * token], last = work.parts[2 * token + 1];
        if (first == last) continue;  // computed elsewhere
        float most = -std::numeric_limits<float>::infinity(), sum = 0, result[D] = {};
        for (int64_t p = first; p < last; p++) most = std::max(most, work.scratch[(p * heads + head) * (D + 2)]);
        for (int64_t p = first; p < last; p++) {
            const float* part = work.scratch + (p * heads + head) * (D + 2);
            const float share = part[1] > 0 ? power(part[0] - most) : 0.0f;
            sum += part[1] * share;
            for (int d = 0; d < D; d++) result[d] += part[2 + d] * share;
        }
        for (int d = 0; d < D; d++) out[(token * heads + head) * D + d] = result[d] / sum;
    }
}

}  // namespace
