// What a step spends its time on, for CPUs and float32: linear layers (linear.h) and attention (attention.h).
// kernels.py builds and calls them.

#include "attention.h"
#include "linear.h"

extern "C" {

int64_t ragspec_columns() { return COLUMNS; }

int64_t ragspec_halves() { return HALVES; }

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
void ragspec_linear(const float* x, int64_t tokens, int64_t k, const void* w, int64_t kept, int64_t n,
                    const float* bias, float* y, int threads) {
#pragma omp parallel num_threads(threads)
    multiply_layer(Layer{w, bias, k, n, Kept(kept)}, x, tokens, y);
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
                    int64_t kv_heads, int64_t rows, int64_t slots, int64_t groups, float scale, float cap,
                    const int64_t* pieces, int64_t piece_count, const int64_t* entries, const int64_t* parts,
                    int64_t tokens, float* scratch, float* out, int threads) {
    const Cache cache{keys, values, kv_heads, rows, slots};
    const Work work{reinterpret_cast<const Piece*>(pieces), piece_count, reinterpret_cast<const Entry*>(entries),
                    parts, tokens, scratch};
#pragma omp parallel num_threads(threads)
    attend_all<RAGSPEC_HEAD>(query, token_stride, head_stride, cache, groups, Scores{scale, cap}, work, out);
}
}
