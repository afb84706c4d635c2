// What a layer that source.py wrote is called with, and its attention.

#pragma once

#include <omp.h>

#include "attention.h"
#include "linear.h"

namespace {

// One call of a layer: `tokens` of them. given, result: tensors of (tokens, size). scratch: room for all that is stored.
struct Call {
    int64_t tokens;
    int64_t threads;
    const float* const* given;
    float* const* result;
    float* scratch;
    float *keys, *values;  // (kv_heads, rows, slots, size)
    int64_t rows, slots;
    const int64_t* places;  // of each attending token, row x slots + slot
    int64_t attending;      // those tokens; any beyond them are padding
    const int64_t *pieces, *entries, *parts;
    int64_t piece_count;
    float* merging;  // scratch of attention
    float scale, cap;
    double* seconds;  // when the last half of a stage ended, then what each took; or none

    void took(int half) const {  // -1: the first begins
        if (!seconds) return;
#pragma omp master
        {
            const double now = omp_get_wtime();
            seconds[half + 1] += now - seconds[0];
            seconds[0] = now;
        }
    }
};

// Write keys and values to the cache, and attend to it. query: (tokens, heads, size); keys, values: (tokens, kv_heads,
// size). All threads of a team call this, and wait for each other.
inline void attend_layer(const Call& call, const float* query, const float* keys, const float* values, int64_t heads,
                         int64_t kv_heads, float* out) {
    constexpr int D = RAGSPEC_HEAD;
    const int64_t capacity = call.rows * call.slots;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < call.attending; t++)
        for (int64_t head = 0; head < kv_heads; head++) {
            const int64_t from = (t * kv_heads + head) * D, to = (head * capacity + call.places[t]) * D;
            std::memcpy(call.keys + to, keys + from, D * sizeof(float));
            std::memcpy(call.values + to, values + from, D * sizeof(float));
        }
    const Cache cache{call.keys, call.values, kv_heads, call.rows, call.slots};
    const Work work{reinterpret_cast<const Piece*>(call.pieces), call.piece_count,
                    reinterpret_cast<const Entry*>(call.entries), call.parts, call.attending, call.merging};
    attend_all<D>(query, heads * D, D, cache, heads / kv_heads, Scores{call.scale, call.cap}, work, out);
#pragma omp for schedule(static)
    for (int64_t t = call.attending; t < call.tokens; t++) std::memset(out + t * heads * D, 0, heads * D * sizeof(float));
}

}  // namespace
