// Whole decoder layers, one after another: what the kernels compute that are called one by one, without the calls.
#pragma once

#include "attention.h"
#include "layer.h"
#include "products.h"
#include "products_bf16.h"

// A layer as fastspec/kernels/layer/reference.py has it (PlainLayer), and where it stands in a pass (Place); stack.py fills it in.
template <typename T, typename Angle>
struct Layer {
    const T *norm, *mlp_norm, *q_norm, *k_norm;  // `norm` may be null in the first layer
    Weight<T> qkv[3], out, gate_up[2], down;
    long qkv_count, gate_up_count;
    T *k, *v;
    long k_row, k_head, v_row, v_head;
    const Angle *cos, *sin;
    long half;
    const int64_t *slots;
    const uint8_t *visible;
    long extent;
    T *tap;  // receives the sum that the layer's norm reads; or null
    double eps, offset, mlp_eps, mlp_offset, heads_eps, heads_offset, scale;
    long has_offset, mlp_has_offset, heads_have_offset;
};

static inline void multiply(const float *x, const Weight<float> *w, long count, float *y, long R, long K, long threads, bool) {
    linear(x, w, count, y, R, K, threads);
}
static inline void multiply(const bf16 *x, const Weight<bf16> *w, long count, bf16 *y, long R, long K, long threads, bool pairs) {
    linear(x, w, count, y, R, K, pairs, threads);
}

// total [B, N, H], which is the sum before the last layer's feed-forward in the end -> change [B, N, H], what that adds. `x` [B, N, width]
// is what the first layer reads where it has no norm. Taps are rows `tap_row` apart. Scratch: `rows` by H + qkv + 2 * Hq * D + 3 * I.
template <typename T, typename Angle>
static void stack(
    const Layer<T, Angle> *layers, long count, T *total, T *change, const T *x, long width, T *scratch, const int64_t *positions, long B,
    long N, long Hq, long Hkv, long D, long H, long I, long tap_row, long threads, bool pairs) {
    long R = B * N, heads = Hq * D, all = heads + 2 * Hkv * D;
    T *normed = scratch, *qkv = normed + R * H, *q = qkv + R * all, *mixed = q + R * heads, *gates = mixed + R * heads;
    T *open = gates + R * 2 * I;
    for (long at = 0; at < count; at++) {
        const Layer<T, Angle> &l = layers[at];
        const T *given = x;
        long depth = width;
        if (l.norm) {
            const T *of = at ? change : total, *residual = at ? total : nullptr;
            rms_norm(of, H, residual, H, l.norm, normed, H, total, H, R, H, l.eps, l.offset, l.has_offset, threads);
            given = normed, depth = H;
        }
        if (l.tap)
            for (long r = 0; r < R; r++) std::memcpy(l.tap + r * tap_row, total + r * H, H * sizeof(T));
        multiply(given, l.qkv, l.qkv_count, qkv, R, depth, threads, pairs);
        rope_cache(
            qkv, l.cos, l.sin, positions, l.slots, l.k, l.v, q, l.q_norm, l.k_norm, B, N, Hq, Hkv, D, l.half, l.k_row, l.k_head, l.v_row,
            l.v_head, l.heads_eps, l.heads_offset, l.heads_have_offset);
        tree_attention(
            q, l.k, l.v, l.visible, mixed, B, N, Hq, Hkv, D, l.extent, l.k_row, l.k_head, l.v_row, l.v_head, l.scale, threads);
        multiply(mixed, &l.out, 1, change, R, heads, threads, pairs);
        rms_norm(change, H, total, H, l.mlp_norm, normed, H, total, H, R, H, l.mlp_eps, l.mlp_offset, l.mlp_has_offset, threads);
        multiply(normed, l.gate_up, l.gate_up_count, gates, R, H, threads, pairs);
        swiglu(gates, open, R, I, threads);
        multiply(open, &l.down, 1, change, R, I, threads, pairs);
    }
}
