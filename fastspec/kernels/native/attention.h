// Attention over the slots of a cache.
#pragma once

#include "products.h"

// The products of 8 keys, or of one, with the queries in `turned`: keys as they lie, or widened first.
template <int COUNT>
static inline void scored(const float *keys, long D, const float *turned, float *scores, float *) {
    block<COUNT, 1>(keys, D, turned, D, scores, nullptr);
}
template <int COUNT>
static inline void scored(const bf16 *keys, long D, const float *turned, float *scores, float *widened) {
    for (long d = 0; d < COUNT * D; d++) widened[d] = wide(keys[d]);
    block<COUNT, 1>(widened, D, turned, D, scores, nullptr);
}

// See attention/reference.py: q [B, N, Hq, D] over E slots of the caches under visible [B, N, E] -> out [B, N, Hq, D].
template <typename T>
static void tree_attention(
    const T *q, const T *k, const T *v, const uint8_t *visible, T *out, long B, long N, long Hq, long Hkv, long D, long E,
    long k_row, long k_head, long v_row, long v_head, float scale, long threads) {
    long group = Hq / Hkv, rows = group * N, chunks = (rows + LANES - 1) / LANES;
#pragma omp parallel for num_threads(team(threads)) schedule(dynamic) if (B * Hq * N * E * D > SMALL)
    for (long task = 0; task < B * Hkv * chunks; task++) {
        long b = task / (Hkv * chunks), head = task / chunks % Hkv, first = task % chunks * LANES;
        long count = rows - first < LANES ? rows - first : LANES;
        const T *keys = k + b * k_row + head * k_head, *values = v + b * v_row + head * v_head;
        float *scores = space(1, E * LANES).data(), *turned = space(2, D * LANES).data(), *widened = space(3, 8 * D).data();
        const uint8_t *seen[LANES];
        for (long r = 0; r < LANES; r++) {  // stacked as rows: the queries of a group, head by head
            long row = first + (r < count ? r : 0), node = row % N;
            const T *from = q + ((b * N + node) * Hq + head * group + row / N) * D;
            for (long d = 0; d < D; d++) turned[d * LANES + r] = wide(from[d]) * scale;
            seen[r] = visible + (b * N + node) * E;
        }
        long e = 0;
        for (; e + 8 <= E; e += 8) scored<8>(keys + e * D, D, turned, scores + e * LANES, widened);
        for (; e < E; e++) scored<1>(keys + e * D, D, turned, scores + e * LANES, widened);
        for (long r = 0; r < LANES; r++)
            for (e = 0; e < E; e++) scores[e * LANES + r] = seen[r][e] ? scores[e * LANES + r] : LOWEST;
        vec most = all(LOWEST), total = {};
        for (e = 0; e < E; e++) most = largest(load(scores + e * LANES), most);
        most = most == LOWEST ? vec{} : most;
        for (e = 0; e < E; e++) {
            vec weight = exponential(load(scores + e * LANES) - most);
            store(scores + e * LANES, weight);
            total += weight;
        }
        vec share = total > 0.0f ? 1.0f / total : vec{};
        for (long r = 0; r < count; r++) {
            long row = first + r;
            T *to = out + ((b * N + row % N) * Hq + head * group + row / N) * D;
            long d = 0;
            for (; d + 4 * LANES <= D; d += 4 * LANES) {
                vec acc[4] = {};
                for (e = 0; e < E; e++)
                    if (seen[r][e])  // 0 * NaN is NaN
                        for (int i = 0; i < 4; i++) acc[i] += scores[e * LANES + r] * load(values + e * D + d + i * LANES);
                for (int i = 0; i < 4; i++) store(to + d + i * LANES, acc[i] * share[r]);
            }
            for (; d < D; d++) {
                float acc = 0;
                for (e = 0; e < E; e++)
                    if (seen[r][e]) acc += scores[e * LANES + r] * wide(values[e * D + d]);
                to[d] = narrow<T>(acc * share[r]);
            }
        }
    }
}
