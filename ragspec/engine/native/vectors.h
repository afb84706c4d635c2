// Vectors of the machine's own width, and the one small product that everything here is made of.
//
// Nothing is left to a compiler's own vectorizing: what it makes of plain loops, or of vectors wider than the machine's,
// may be thirty times as slow.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define RAGSPEC_WIDTH 16  // numbers in a vector
#elif defined(__AVX__)
#define RAGSPEC_WIDTH 8
#else
#define RAGSPEC_WIDTH 4
#endif

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TOKENS = 12;  // rows of a block of results that fits into the registers
#else
constexpr int TOKENS = 6;
#endif
constexpr int WIDTH = RAGSPEC_WIDTH;
constexpr int COLUMNS = 2 * WIDTH;  // columns of such a block
constexpr int LINE = 64;            // bytes that memory is read by

struct Upper { uint16_t bits; };  // the upper half of a number whose lower half is zero (bfloat16)
struct Half { uint16_t bits; };   // float16
#if defined(__F16C__) || defined(__AVX512F__)
constexpr bool HALVES = true;
#else
constexpr bool HALVES = false;  // too slow, or not tried
#endif

template <int N>
struct Vector {
    typedef float Floats __attribute__((vector_size(N * sizeof(float))));
    typedef int32_t Whole __attribute__((vector_size(N * sizeof(int32_t))));
    typedef uint32_t Bits __attribute__((vector_size(N * sizeof(uint32_t))));
    typedef uint16_t Uppers __attribute__((vector_size(N * sizeof(uint16_t))));
};

template <typename T>
inline T load(const void* from) {
    T lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

template <typename T>
inline void store(float* to, T lanes) {
    std::memcpy(to, &lanes, sizeof lanes);
}

// A vector of numbers, from what they are kept as.
inline Vector<WIDTH>::Floats numbers(const float* from) { return load<Vector<WIDTH>::Floats>(from); }

inline Vector<WIDTH>::Floats numbers(const Upper* from) {
    const auto upper = load<Vector<WIDTH>::Uppers>(from);
    const Vector<WIDTH>::Bits bits = __builtin_convertvector(upper, Vector<WIDTH>::Bits) << 16;
    Vector<WIDTH>::Floats lanes;
    std::memcpy(&lanes, &bits, sizeof lanes);
    return lanes;
}

inline Vector<WIDTH>::Floats numbers(const Half* from) {
#if defined(__AVX512F__)
    return Vector<WIDTH>::Floats(_mm512_cvtph_ps(load<__m256i>(from)));
#elif defined(__F16C__)
    return Vector<WIDTH>::Floats(_mm256_cvtph_ps(load<__m128i>(from)));
#else
    __builtin_trap();  // nobody keeps a weight so
#endif
}

// e to the x, to a relative error of 2e-7 (Cephes' polynomial), and hardly more than nothing for x < -87.
template <typename T>
inline T power(T x) {
    typedef decltype(x < x) Whole;
    constexpr float ROUND = 12582912.0f;  // adding it leaves no digits after the point
    x = x < -87.0f ? T{} - 87.0f : x;
    x = x > 88.0f ? T{} + 88.0f : x;
    const T n = (x * 1.44269504088896341f + ROUND) - ROUND;
    const T r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    T p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Whole bits = (__builtin_convertvector(n, Whole) + 127) << 23;
    T scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

template <>
inline float power(float x) {
    typedef typename Vector<WIDTH>::Floats Lanes;
    return power(Lanes{} + x)[0];
}

template <typename T>
inline T hyperbolic(T x) {  // the tangent, to an absolute error of 2e-7
    return 1.0f - 2.0f / (1.0f + power(2.0f * x));
}

// Numbers in rows: rows are `row` from each other, the numbers of one are `step` from each other.
struct Rows {
    const float* at;
    int64_t row, step;

    Rows from(int64_t first) const { return {at + first * row, row, step}; }
};

// A block of M rows, COLUMNS wide, of results: rows of numbers times a panel of `depth` rows of COLUMNS, `wide` from each
// other. add: to what is in `y`; else `y` is written. FETCHED bytes from `ahead` on are fetched for every four rows of the
// panel.
template <int M, int FETCHED, typename T>
inline __attribute__((always_inline)) void block(Rows x, const T* panel, int64_t wide, const char* ahead, int depth,
                                                 float* y, int64_t stride, bool add) {
    typedef typename Vector<WIDTH>::Floats Lanes;
    Lanes sum[M][2];
    const float* rows[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        sum[m][0] = add ? load<Lanes>(y + m * stride) : Lanes{};
        sum[m][1] = add ? load<Lanes>(y + m * stride + WIDTH) : Lanes{};
        rows[m] = x.at + m * x.row;
    }
    const auto next = [&](int64_t i) __attribute__((always_inline)) {
        const Lanes left = numbers(panel + i * wide), right = numbers(panel + i * wide + WIDTH);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const float value = rows[m][i * x.step];
            sum[m][0] += value * left;
            sum[m][1] += value * right;
        }
    };
    int i = 0;
    if constexpr (FETCHED > 0)
        for (; i + 4 <= depth; i += 4) {
#pragma GCC unroll 8
            for (int at = 0; at < FETCHED; at += LINE) __builtin_prefetch(ahead + at, 0, 3);
            ahead += FETCHED;
            next(i), next(i + 1), next(i + 2), next(i + 3);
        }
    for (; i < depth; i++) next(i);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        store(y + m * stride, sum[m][0]);
        store(y + m * stride + WIDTH, sum[m][1]);
    }
}

// The same for up to M rows: `rows` is known only when it runs.
template <int M, int FETCHED, typename T>
void blocks(int rows, Rows x, const T* panel, int64_t wide, const char* ahead, int depth, float* y, int64_t stride,
            bool add) {
    if constexpr (M > 0) {
        if (rows == M)
            block<M, FETCHED, T>(x, panel, wide, ahead, depth, y, stride, add);
        else
            blocks<M - 1, FETCHED, T>(rows, x, panel, wide, ahead, depth, y, stride, add);
    }
}

// The same for any number of rows, of a panel that is in the cache.
inline void multiply(int rows, Rows x, const float* panel, int64_t wide, int depth, float* y, int64_t stride, bool add) {
    for (int m = 0; m < rows; m += TOKENS)
        blocks<TOKENS, 0>(std::min(TOKENS, rows - m), x.from(m), panel, wide, nullptr, depth, y + m * stride, stride, add);
}

}  // namespace
