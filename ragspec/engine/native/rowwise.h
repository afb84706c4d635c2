// What a layer does with each token on its own: arithmetic, number by number, and sums over rows. Used by the code that
// source.py writes.

#pragma once

#include "vectors.h"

namespace {

typedef Vector<WIDTH>::Floats Wide;

// -- functions of a number, or of a vector of them --------------------------------------------------------------------

inline Wide root(Wide x) {
    for (int i = 0; i < WIDTH; i++) x[i] = std::sqrt(x[i]);
    return x;
}

inline float root(float x) { return std::sqrt(x); }

template <typename T>
inline T larger(T x, T y) {
    return x > y ? x : y;
}

template <typename T>
inline T smaller(T x, T y) {
    return x < y ? x : y;
}

template <typename T>
inline T positive(T x) {
    return x > 0.0f ? x : T{};
}

template <typename T>
inline T absolute(T x) {
    return x < 0.0f ? -x : x;
}

template <typename T>
inline T sigmoid(T x) {
    return 1.0f / (1.0f + power(-x));
}

template <typename T>
inline T silu(T x) {
    return x / (1.0f + power(-x));
}

template <typename T>
inline T error_function(T x) {  // to an absolute error of 1.5e-7 (Abramowitz and Stegun, 7.1.26)
    const T far = absolute(x), t = 1.0f / (1.0f + 0.3275911f * far);
    const T p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const T y = 1.0f - p * power(-far * far);
    return x < 0.0f ? -y : y;
}

template <typename T>
inline T gelu(T x) {
    return 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f));
}

template <typename T>
inline T gelu_tanh(T x) {
    return 0.5f * x * (1.0f + hyperbolic(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

// -- rows of numbers --------------------------------------------------------------------------------------------------

struct Along {  // one number after the other
    const float* at;
    Wide wide(int i) const { return load<Wide>(at + i); }
    float one(int i) const { return at[i]; }
};

struct Same {  // the same number everywhere
    float value;
    Wide wide(int) const { return Wide{} + value; }
    float one(int) const { return value; }
};

template <typename F, typename... Operands>
inline void map(int n, float* to, F f, Operands... operands) {
    int i = 0;
    for (; i + WIDTH <= n; i += WIDTH) store(to + i, Wide(f(operands.wide(i)...)));
    for (; i < n; i++) to[i] = f(operands.one(i)...);
}

inline float sum(int n, const float* x) {
    Wide sums[2] = {};
    int i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
        sums[0] += load<Wide>(x + i);
        sums[1] += load<Wide>(x + i + WIDTH);
    }
    float all = 0;
    for (; i < n; i++) all += x[i];
    const Wide both = sums[0] + sums[1];
    for (int j = 0; j < WIDTH; j++) all += both[j];
    return all;
}

// Layer norm of n numbers; weight and bias may be none.
inline void layer_norm(int n, float* to, const float* x, const float* weight, const float* bias, float epsilon) {
    const float mean = sum(n, x) / n;
    map(n, to, [mean](auto a) { return a - mean; }, Along{x});
    Wide squares = {};
    float rest = 0;
    int i = 0;
    for (; i + WIDTH <= n; i += WIDTH) squares += load<Wide>(to + i) * load<Wide>(to + i);
    for (; i < n; i++) rest += to[i] * to[i];
    for (int j = 0; j < WIDTH; j++) rest += squares[j];
    const float scale = 1.0f / std::sqrt(rest / n + epsilon);
    map(n, to, [scale](auto a) { return a * scale; }, Along{to});
    if (weight) map(n, to, [](auto a, auto b) { return a * b; }, Along{to}, Along{weight});
    if (bias) map(n, to, [](auto a, auto b) { return a + b; }, Along{to}, Along{bias});
}

}  // namespace
