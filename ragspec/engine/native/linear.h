// Linear layers in float32. The weight lies in panels of COLUMNS outputs and is read once, in order, for few tokens;
// many are computed in chunks that stay in the cache while all panels pass.

#pragma once

#include <omp.h>

#include "vectors.h"

namespace {

constexpr int DEPTH = 256;  // features of a panel that stay in the first cache while all tokens pass
constexpr int CHUNK = 144;  // tokens whose features of that depth stay in the second one

// Some tokens by one panel, `columns` of it real, for `depth` features. stride: of y.
template <int FETCHED>
inline void by_panel(int rows, const float* x, int64_t k, const float* panel, const float* ahead, int depth, float* y,
                     int64_t stride, int columns, bool add) {
    if (columns == COLUMNS) {
        blocks<TOKENS, FETCHED>(rows, {x, k, 1}, panel, COLUMNS, ahead, depth, y, stride, add);
        return;
    }
    float whole[TOKENS * COLUMNS];
    for (int m = 0; add && m < rows; m++)
        for (int j = 0; j < COLUMNS; j++) whole[m * COLUMNS + j] = j < columns ? y[m * stride + j] : 0;
    blocks<TOKENS, FETCHED>(rows, {x, k, 1}, panel, COLUMNS, ahead, depth, whole, COLUMNS, add);
    for (int m = 0; m < rows; m++) std::memcpy(y + m * stride, whole + m * COLUMNS, columns * sizeof(float));
}

// Put the bias, or nothing, where sums begin.
inline void begin(const float* bias, int64_t first, int columns, float* y, int64_t tokens, int64_t stride) {
    for (int64_t m = 0; m < tokens; m++) std::memcpy(y + m * stride + first, bias + first, columns * sizeof(float));
}

struct Layer {
    const float *weight, *bias;  // (panels, k, COLUMNS), and n or none
    int64_t k, n;

    int64_t panels() const { return (n + COLUMNS - 1) / COLUMNS; }
    int columns(int64_t panel) const { return int(std::min<int64_t>(COLUMNS, n - panel * COLUMNS)); }
    int64_t depth() const {
        const int64_t steps = (k + DEPTH - 1) / DEPTH;
        return (k + steps - 1) / steps;
    }
};

// At most CHUNK tokens: bound by reading the weight. What comes next of it is fetched while the tokens pass.
inline void few(const Layer& layer, const float* x, int64_t tokens, float* y) {
    const int64_t k = layer.k, n = layer.n, depth = layer.depth();
    const int64_t parts = (tokens + TOKENS - 1) / TOKENS, size = (tokens + parts - 1) / parts;
#pragma omp for schedule(static) nowait
    for (int64_t p = 0; p < layer.panels(); p++) {
        const int columns = layer.columns(p);
        float* const out = y + p * COLUMNS;
        if (layer.bias) begin(layer.bias, p * COLUMNS, columns, y, tokens, n);
        for (int64_t i = 0; i < k; i += depth) {
            const int here = int(std::min(depth, k - i));
            const float *panel = layer.weight + (p * k + i) * COLUMNS, *next = panel + here * COLUMNS;
            const bool add = i > 0 || layer.bias;
            for (int64_t part = 0; part < parts; part++) {
                const int rows = int(std::min(size, tokens - part * size));
                const float* const from = x + part * size * k + i;
                float* const to = out + part * size * n;
                const int64_t share = here / 4 * COLUMNS * part;  // where this part's share of what comes next begins
                if (parts == 1)
                    by_panel<4>(rows, from, k, panel, next, here, to, n, columns, add);
                else if (parts < 4)
                    by_panel<2>(rows, from, k, panel, next + 2 * share, here, to, n, columns, add);
                else if (part < 4)
                    by_panel<1>(rows, from, k, panel, next + share, here, to, n, columns, add);
                else
                    by_panel<0>(rows, from, k, panel, next, here, to, n, columns, add);
            }
        }
    }
}

// Many tokens: bound by arithmetic.
inline void many(const Layer& layer, const float* x, int64_t tokens, float* y) {
    const int threads = omp_get_num_threads();
    const int64_t k = layer.k, n = layer.n, depth = layer.depth(), panels = layer.panels();
    const int64_t least = (tokens + CHUNK - 1) / CHUNK;
    const int64_t size = ((tokens + least - 1) / least + TOKENS - 1) / TOKENS * TOKENS;
    const int64_t chunks = (tokens + size - 1) / size;
    const int64_t groups = chunks % threads ? std::min<int64_t>(threads, panels) : 1;  // of panels
#pragma omp for schedule(dynamic) nowait
    for (int64_t job = 0; job < chunks * groups; job++) {
        const int64_t begins = job / groups * size, ends = std::min(tokens, begins + size), group = job % groups;
        const int64_t first = panels * group / groups, last = panels * (group + 1) / groups;
        for (int64_t i = 0; i < k; i += depth) {
            const int here = int(std::min(depth, k - i));
            for (int64_t p = first; p < last; p++) {
                const int columns = layer.columns(p);
                if (layer.bias && i == 0) begin(layer.bias, p * COLUMNS, columns, y + begins * n, ends - begins, n);
                const float* const panel = layer.weight + (p * k + i) * COLUMNS;
                for (int64_t m = begins; m < ends; m += TOKENS)
                    by_panel<0>(int(std::min<int64_t>(TOKENS, ends - m)), x + m * k + i, k, panel, panel, here,
                                y + m * n + p * COLUMNS, n, columns, i > 0 || layer.bias);
            }
        }
    }
}

// y: (tokens, n) = x: (tokens, k) by the layer. All threads of a team call this; they do not wait for each other.
inline void multiply_layer(const Layer& layer, const float* x, int64_t tokens, float* y) {
    if (tokens > CHUNK)
        many(layer, x, tokens, y);
    else if (tokens > 0)
        few(layer, x, tokens, y);
}

}  // namespace
