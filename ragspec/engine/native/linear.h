// Linear layers in float32. The weight lies in panels of COLUMNS outputs and is read once, in order, for few tokens;
// many are computed in chunks that stay in the cache while all panels pass. A weight all of whose numbers have 16 bits is
// kept in these: half as much is read, and results are the same to the last bit.

#pragma once

#include <omp.h>
#include <unistd.h>

#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int FEW = 144;            // tokens up to which copying them does not pay
constexpr int DEPTH = 256;          // features of a panel that stay in the first cache while few tokens pass
constexpr int DEEP = 576;           // features of many tokens that stay in the second one
constexpr int APART = DEEP + LINE / int(sizeof(float));  // between two tokens: steps of 4 KiB would share one place
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
template <int FETCHED, typename T>
inline void by_panel(int rows, const float* x, int64_t k, const T* panel, const char* ahead, int depth, float* y,
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

// The numbers of a panel as they are, or written to `room`.
inline const float* widened(const float* panel, int, std::vector<float>&) { return panel; }

template <typename T>
inline const float* widened(const T* panel, int depth, std::vector<float>& room) {
    room.resize(size_t(depth) * COLUMNS);
    for (int i = 0; i < depth * COLUMNS; i += WIDTH) store(&room[i], numbers(panel + i));
    return room.data();
}

enum Kept : int64_t { FLOATS, UPPERS, HALF };  // what a weight is kept as

struct Layer {
    const void* weight;  // (panels, k, COLUMNS)
    const float* bias;   // n, or none
    int64_t k, n;
    Kept kept;

    int64_t panels() const { return (n + COLUMNS - 1) / COLUMNS; }
    int columns(int64_t panel) const { return int(std::min<int64_t>(COLUMNS, n - panel * COLUMNS)); }
    int64_t depth(int64_t most) const {  // of equal steps
        const int64_t steps = (k + most - 1) / most;
        return (k + steps - 1) / steps;
    }
};

// Few tokens: bound by reading the weight. What comes next of it is fetched while the tokens pass.
template <typename T>
inline void few(const Layer& layer, const float* x, int64_t tokens, float* y) {
    static thread_local std::vector<float> room;
    constexpr int ROW = COLUMNS * sizeof(T);
    const int64_t k = layer.k, n = layer.n, depth = layer.depth(DEPTH);
    const int64_t parts = (tokens + TOKENS - 1) / TOKENS, size = (tokens + parts - 1) / parts;
#pragma omp for schedule(static) nowait
    for (int64_t p = 0; p < layer.panels(); p++) {
        const int columns = layer.columns(p);
        float* const out = y + p * COLUMNS;
        if (layer.bias) begin(layer.bias + p * COLUMNS, columns, out, tokens, n);
        for (int64_t i = 0; i < k; i += depth) {
            const int here = int(std::min(depth, k - i));
            const T* const panel = static_cast<const T*>(layer.weight) + (p * k + i) * COLUMNS;
            const char* const next = reinterpret_cast<const char*>(panel + here * COLUMNS);
            const bool add = i > 0 || layer.bias;
            if (parts == 1) {
                by_panel<4 * ROW>(int(tokens), x + i, k, panel, next, here, out, n, columns, add);
                continue;
            }
            const float* const wide = widened(panel, here, room);
            for (int64_t part = 0; part < parts; part++) {
                const int rows = int(std::min(size, tokens - part * size));
                const float* const from = x + part * size * k + i;
                float* const to = out + part * size * n;
                const int64_t share = here / 4 * ROW * part;  // where this part's share of what comes next begins
                if (parts < 4)
                    by_panel<2 * ROW>(rows, from, k, wide, next + 2 * share, here, to, n, columns, add);
                else if (part < 4)
                    by_panel<ROW>(rows, from, k, wide, next + share, here, to, n, columns, add);
                else
                    by_panel<0>(rows, from, k, wide, next, here, to, n, columns, add);
            }
        }
    }
}

// Many tokens: bound by arithmetic. What stays in the cache is copied there; panels are read from where they are.
template <typename T>
inline void many(const Layer& layer, const float* x, int64_t tokens, float* y) {
    static thread_local std::vector<float> kept, room;
    constexpr int ROW = COLUMNS * sizeof(T);
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
                const float* const panel =
                    widened(static_cast<const T*>(layer.weight) + (p * k + i) * COLUMNS, here, room);
                float* const to = y + begins * n + p * COLUMNS;
                if (layer.bias && i == 0) begin(layer.bias + p * COLUMNS, columns, to, rows, n);
                const char* next = static_cast<const char*>(layer.weight) + ((p + 1) * k + i) * ROW;
                const bool fetches = !std::is_same<T, float>::value && p + 1 < last;  // what is to be widened next
                for (int64_t m = 0; m < rows; m += TOKENS) {
                    const int some = int(std::min<int64_t>(TOKENS, rows - m));
                    const float* const from = &kept[m * APART];
                    const bool add = i > 0 || layer.bias;
                    if (fetches && m < 4 * TOKENS) {
                        by_panel<ROW>(some, from, APART, panel, next, here, to + m * n, n, columns, add);
                        next += here / 4 * ROW;
                    } else {
                        by_panel<0>(some, from, APART, panel, nullptr, here, to + m * n, n, columns, add);
                    }
                }
            }
        }
    }
}

template <typename T>
inline void multiply_by(const Layer& layer, const float* x, int64_t tokens, float* y) {
    if (tokens > FEW)
        many<T>(layer, x, tokens, y);
    else if (tokens > 0)
        few<T>(layer, x, tokens, y);
}

// y: (tokens, n) = x: (tokens, k) by the layer. All threads of a team call this; they do not wait for each other.
inline void multiply_layer(const Layer& layer, const float* x, int64_t tokens, float* y) {
    if (layer.kept == UPPERS)
        multiply_by<Upper>(layer, x, tokens, y);
    else if (layer.kept == HALF)
        multiply_by<Half>(layer, x, tokens, y);
    else
        multiply_by<float>(layer, x, tokens, y);
}

}  // namespace
