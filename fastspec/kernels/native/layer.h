// Norms, gates and rotation.
#pragma once

#include "threads.h"
#include "vectors.h"

// See layer/reference.py: `residual`, `weight` may be null (a norm without a weight); `offset` is used where has_offset.
template <typename T>
static void rms_norm(
    const T *x, long x_stride, const T *residual, long residual_stride, const T *weight, T *out, long out_stride, T *total,
    long total_stride, long rows, long H, float eps, float offset, long has_offset, long threads) {
#pragma omp parallel for num_threads(team(threads)) if (rows * H > SMALL)
    for (long row = 0; row < rows; row++) {
        const T *a = x + row * x_stride, *b = residual ? residual + row * residual_stride : nullptr;
        T *t = total + row * total_stride, *o = out + row * out_stride;
        vec acc = {};
        float squares = 0;
        long h = 0;
        for (; h + LANES <= H; h += LANES) {
            vec each = b ? rounded(load(a + h) + load(b + h), T()) : load(a + h);
            store(t + h, each);
            acc += each * each;
        }
        for (; h < H; h++) {
            float each = b ? rounded<T>(wide(a[h]) + wide(b[h])) : wide(a[h]);
            t[h] = narrow<T>(each);
            squares += each * each;
        }
        float scale = 1.0f / std::sqrt((sum(acc) + squares) / H + eps);
        for (h = 0; h < H; h++) {
            float normed = wide(t[h]) * scale;
            o[h] = narrow<T>(has_offset ? normed * (offset + wide(weight[h])) : wide(weight[h]) * rounded<T>(normed));
        }
    }
}

// The gated half: in [rows, 2 * I], the gates first -> silu(gate) * up [rows, I].
template <typename T>
static void swiglu(const T *in, T *out, long rows, long I, long threads) {
#pragma omp parallel for num_threads(team(threads)) if (rows * I > SMALL / 2)
    for (long row = 0; row < rows; row++) {
        const T *gate = in + row * 2 * I, *up = gate + I;
        T *o = out + row * I;
        long i = 0;
        for (; i + LANES <= I; i += LANES) {
            vec g = load(gate + i);
            store(o + i, rounded(g / (1.0f + exponential(-g)), T()) * load(up + i));
        }
        for (; i < I; i++) o[i] = narrow<T>(rounded<T>(wide(gate[i]) / (1.0f + std::exp(-wide(gate[i])))) * wide(up[i]));
    }
}

template <typename T, typename Angle>
static void turn_head(const T *in, T *out, const Angle *cos, const Angle *sin, long D, long half, const T *norm, float eps, float offset,
                      long has_offset) {
    T scratch[1024];
    if (norm) {
        float squares = 0;
        for (long d = 0; d < D; d++) squares += wide(in[d]) * wide(in[d]);
        float scale = 1.0f / std::sqrt(squares / D + eps);
        for (long d = 0; d < D; d++) {
            float normed = wide(in[d]) * scale;
            scratch[d] = narrow<T>(has_offset ? normed * (offset + wide(norm[d])) : wide(norm[d]) * rounded<T>(normed));
        }
        in = scratch;
    }
    for (long i = 0; i < half; i++) {
        float a = wide(in[i]), b = wide(in[half + i]), c = wide(cos[i]), s = wide(sin[i]);
        out[i] = narrow<T>(a * c - b * s);
        out[half + i] = narrow<T>(b * c + a * s);
    }
    for (long d = 2 * half; d < D; d++) out[d] = in[d];
}

// See layer/reference.py: neox halves; q_norm, k_norm null or both; D at most 1024. Strides of the caches are those of B and Hkv.
template <typename T, typename Angle>
static void rope_cache(
    const T *qkv, const Angle *cos, const Angle *sin, const int64_t *positions, const int64_t *slots, T *k_cache, T *v_cache, T *q,
    const T *q_norm, const T *k_norm, long B, long N, long Hq, long Hkv, long D, long half, long k_row, long k_head, long v_row,
    long v_head, float eps, float offset, long has_offset) {
    for (long at = 0; at < B * N; at++) {
        const T *in = qkv + at * (Hq + 2 * Hkv) * D;
        const Angle *c = cos + positions[at] * half, *s = sin + positions[at] * half;
        long row = at / N, slot = slots[at];
        for (long h = 0; h < Hq; h++, in += D) turn_head(in, q + (at * Hq + h) * D, c, s, D, half, q_norm, eps, offset, has_offset);
        for (long h = 0; h < Hkv; h++, in += D)
            turn_head(in, k_cache + row * k_row + h * k_head + slot * D, c, s, D, half, k_norm, eps, offset, has_offset);
        for (long h = 0; h < Hkv; h++, in += D) std::memcpy(v_cache + row * v_row + h * v_head + slot * D, in, D * sizeof(T));
    }
}
