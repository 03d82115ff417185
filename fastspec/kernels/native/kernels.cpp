// The operations of a round on the CPU in fp32 and bfloat16, for a few rows: what they compute is specified by the references of the same
// names in fastspec/kernels. Compiled on the machine that runs them (build.py); Python calls them through ctypes (ops.py).
//
// Letters as there: B rows (sequences), N nodes, Hq query heads, Hkv key heads, D head size, V tokens, H width. A product is of R rows, M
// output channels and K input channels. All matrices are row by row. `threads` is torch's number, the most that a kernel takes, and OpenMP is
// the one that torch loaded. In bfloat16 a result is computed in fp32 and rounded where the reference rounds.

#include "attention.h"
#include "choices.h"
#include "layer.h"
#include "products.h"
#include "products_bf16.h"
#include "stack.h"
#include "threads.h"
#include "vectors.h"

extern "C" {

int fastspec_lanes() { return LANES; }
int fastspec_has_pairs() { return has_pairs(); }
long fastspec_team(long threads) { return team(threads); }
void fastspec_note(long waited, long worked, long used) { note(waited, worked, used); }

void fastspec_linear(const float *x, const Weight<float> *weights, long count, float *y, long R, long K, long threads) {
    linear(x, weights, count, y, R, K, threads);
}

void fastspec_linear_bf16(const bf16 *x, const Weight<bf16> *weights, long count, bf16 *y, long R, long K, long threads, long pairs) {
    linear(x, weights, count, y, R, K, pairs && has_pairs(), threads);
}

// The other operations of numbers T, under names that end in SUFFIX.
#define OPERATIONS(T, SUFFIX)                                                                                                             \
    void fastspec_rms_norm##SUFFIX(                                                                                                       \
        const T *x, long x_stride, const T *residual, long residual_stride, const T *weight, T *out, long out_stride, T *total,           \
        long total_stride, long rows, long H, float eps, float offset, long has_offset, long threads) {                                   \
        rms_norm(x, x_stride, residual, residual_stride, weight, out, out_stride, total, total_stride, rows, H, eps, offset, has_offset,  \
                 threads);                                                                                                                \
    }                                                                                                                                     \
    void fastspec_swiglu##SUFFIX(const T *in, T *out, long rows, long I, long threads) { swiglu(in, out, rows, I, threads); }             \
    void fastspec_tree_attention##SUFFIX(                                                                                                 \
        const T *q, const T *k, const T *v, const uint8_t *visible, T *out, long B, long N, long Hq, long Hkv, long D, long E,            \
        long k_row, long k_head, long v_row, long v_head, float scale, long threads) {                                                    \
        tree_attention(q, k, v, visible, out, B, N, Hq, Hkv, D, E, k_row, k_head, v_row, v_head, scale, threads);                         \
    }                                                                                                                                     \
    void fastspec_argmax##SUFFIX(const T *x, int64_t *out, long rows, long V, long threads) { argmax(x, out, rows, V, threads); }         \
    void fastspec_topk_logprobs##SUFFIX(                                                                                                  \
        const T *logits, float *values, int64_t *places, long rows, long V, long count, long threads) {                                   \
        topk_logprobs(logits, values, places, rows, V, count, threads);                                                                   \
    }
OPERATIONS(float, )
OPERATIONS(bf16, _bf16)

// The same with cosines and sines of a type of their own.
#define ROTATION(T, Angle, SUFFIX)                                                                                                        \
    void fastspec_rope_cache##SUFFIX(                                                                                                     \
        const T *qkv, const Angle *cos, const Angle *sin, const int64_t *positions, const int64_t *slots, T *k_cache, T *v_cache, T *q,   \
        const T *q_norm, const T *k_norm, long B, long N, long Hq, long Hkv, long D, long half, long k_row, long k_head, long v_row,      \
        long v_head, float eps, float offset, long has_offset) {                                                                          \
        rope_cache(qkv, cos, sin, positions, slots, k_cache, v_cache, q, q_norm, k_norm, B, N, Hq, Hkv, D, half, k_row, k_head, v_row,    \
                   v_head, eps, offset, has_offset);                                                                                      \
    }                                                                                                                                     \
    void fastspec_stack##SUFFIX(                                                                                                          \
        const Layer<T, Angle> *layers, long count, T *total, T *change, const T *x, long width, T *scratch, const int64_t *positions,     \
        long B, long N, long Hq, long Hkv, long D, long H, long I, long tap_row, long threads, long pairs) {                              \
        stack(layers, count, total, change, x, width, scratch, positions, B, N, Hq, Hkv, D, H, I, tap_row, threads,                       \
              pairs && has_pairs());                                                                                                      \
    }
ROTATION(float, float, )
ROTATION(bf16, bf16, _bf16)
ROTATION(bf16, float, _bf16_fp32)
}
