// Linear layers in float32. The weight lies in panels of COLUMNS outputs and is read once, in order, for few tokens;
// many are computed in chunks that stay in the cache while all panels pass.

#pragma once

#include <omp.h>
#include <unistd.h>

#include <vector>

#include "vectors.h"

namespace {

constexpr int FEW = 144;            // tokens up to which copying them does not pay
constexpr int DEPTH = 256;          // features of a panel that stay in the first cache while few tokens pass
constexpr int DEEP = 576;           // features of many tokens that stay in the second one
constexpr int APART = DEEP + LINE;  // between two tokens there: a multiple of 4 KiB would have all share one place
constexpr int64_t USUAL = 1 << 19;  // bytes of the second cache where the system does not say

// Tokens whose features of that depth take half of the second cache.
inline int64_t chunk() {
    static const int64_t tokens = [] {
        int64_t bytes = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
        bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
        const int64_t half = (bytes > 0 ? bytes : USUAL) / 2 / int64_t(APART * sizeof(float));
        return std::max<int64_t>(1, half / TOKENS) * TOKENS;
    }();
    return tokens;
}

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

// Put the bias where sums begin.
inline void begin(const float* bias, int columns, float* y, int64_t tokens, int64_t stride) {
    for (int64_t m = 0; m < tokens; m++) std::memcpy(y + m * stride, bias, columns * sizeof(float));
}

struct Layer {
    const float *weight, *bias;  // (panels, k, COLUMNS), and n or none
    int64_t k, n;

    int64_t panels() const { return (n + COLUMNS - 1) / COLUMNS; }
    int columns(int64_t panel) const { return int(std::min<int64_t>(COLUMNS, n - panel * COLUMNS)); }
    int64_t depth(int64_t most) const {  // of equal steps
        const int64_t steps = (k + most - 1) / most;
        return (k + steps - 1) / steps;
    }
};

// Few tokens: bound by reading the weight. What comes next of it is fetched while the tokens pass.
inline void few(const Layer& layer, const float* x, int64_t tokens, float* y) {
    const int64_t k = layer.k, n = layer.n, depth = layer.depth(DEPTH);
    const int64_t parts = (tokens + TOKENS - 1) / TOKENS, size = (tokens + parts - 1) / parts;
#pragma omp for schedule(static) nowait
    for (int64_t p = 0; p < layer.panels(); p++) {
        const int columns = layer.columns(p);
        float* const out = y + p * COLUMNS;
        if (layer.bias) begin(layer.bias + p * COLUMNS, columns, out, tokens, n);
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

// Many tokens: bound by arithmetic. What stays in the cache is copied there; panels are read from where they are.
inline void many(const Layer& layer, const float* x, int64_t tokens, float* y) {
    static thread_local std::vector<float> kept;
    const int threads = omp_get_num_threads();
    const int64_t k = layer.k, n = layer.n, depth = layer.depth(DEEP), panels = layer.panels();
    const int64_t least = (tokens + chunk() - 1) / chunk();
    const int64_t size = ((tokens + least - 1) / least + TOKENS - 1) / TOKENS * TOKENS;
    const int64_t chunks = (tokens + size - 1) / size;
    const int64_t groups = chunks % threads ? std::min<int64_t>(threads, panels) : 1;  // of panels
    kept.resize(size * APART);
#pragma omp for schedule(dynamic) nowait
    for (int64_t job = 0; job < chunks * groups; job++) {
        const int64_t begins = job / groups * size, rows = std::min(tokens - begins, size), group = job % groups;
        const int64_t first = panels * group / groups, last = panels * (group + 1) / groups;
        for (int64_t i = 0; i < k; i += depth) {
            const int here = int(std::min(depth, k - i));
            for (int64_t m = 0; m < rows; m++)
                std::memcpy(&kept[m * APART], x + (begins + m) * k + i, here * sizeof(float));
            for (int64_t p = first; p < last; p++) {
                const int columns = layer.columns(p);
                const float* const panel = layer.weight + (p * k + i) * COLUMNS;
                float* const to = y + begins * n + p * COLUMNS;
                if (layer.bias && i == 0) begin(layer.bias + p * COLUMNS, columns, to, rows, n);
                for (int64_t m = 0; m < rows; m += TOKENS)
                    by_panel<0>(int(std::min<int64_t>(TOKENS, rows - m)), &kept[m * APART], APART, panel, panel, here,
                                to + m * n, n, columns, i > 0 || layer.bias);
            }
        }
    }
}

// y: (tokens, n) = x: (tokens, k) by the layer. All threads of a team call this; they do not wait for each other.
inline void multiply_layer(const Layer& layer, const float* x, int64_t tokens, float* y) {
    if (tokens > FEW)
        many(layer, x, tokens, y);
    else if (tokens > 0)
        few(layer, x, tokens, y);
}

}  // namespace
