// Products in bfloat16: sums in fp32, each rounded once. The order of a sum is the same for any number of rows, so that a row's result does
// not depend on the rows beside it: along K, lane by lane, and then over the lanes.
#pragma once

#include "threads.h"
#include "vectors.h"

#if defined(__AVX512F__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define PAIRS __attribute__((target("avx512bf16")))  // the processor's own products of pairs, where it has them
#endif

static constexpr int STEP = 2 * LANES;  // of K that one vector of weights holds
static constexpr int BESIDE = 4;        // rows of a weight that are multiplied together
static constexpr int MOST = 5;          // with at most so many rows of x

typedef float sums[MOST][BESIDE];

// The sums over the lanes of `acc` for one row of x and `WIDE` rows of a weight.
template <int WIDE>
static inline void over_lanes(const vec *acc, float *out) {
#ifdef __AVX512F__
    __m512 a = (__m512)acc[0], b = (__m512)acc[1], c = (__m512)acc[2], d = (__m512)acc[3];
    __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
    __m512 cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xee);
    __m512 each = _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd);
    each += _mm512_permute_ps(each, 0x4e);
    each += _mm512_permute_ps(each, 0xb1);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, each)));
#else
    for (int m = 0; m < WIDE; m++) out[m] = sum(acc[m]);
#endif
}

// BESIDE rows of a weight [., steps * STEP], `stride` apart, times ROWS rows of x, which lie as `laid` leaves them. `next` is read ahead.
template <int ROWS>
__attribute__((noinline)) static void dots(const bf16 *const *w, long steps, const char *x, float (*out)[BESIDE], const bf16 *next) {
    constexpr int WIDE = LANES == 16 ? BESIDE : BESIDE / 2;  // the registers hold the sums of so many
    for (int first = 0; first < BESIDE; first += WIDE) {
        vec acc[ROWS][WIDE] = {};
        const float *from = (const float *)x;
        for (long k = 0; k < steps; k++, from += ROWS * STEP) {
            uvec each[WIDE];
            for (int m = 0; m < WIDE; m++) {
                if (next) __builtin_prefetch(next + (k * BESIDE + first + m) * STEP, 0, 2);
                std::memcpy(&each[m], w[first + m] + k * STEP, sizeof(uvec));
            }
            for (int r = 0; r < ROWS; r++)
                for (int m = 0; m < WIDE; m++) {
                    acc[r][m] += (vec)(each[m] << 16) * load(from + r * STEP);
                    acc[r][m] += (vec)(each[m] & 0xffff0000u) * load(from + r * STEP + LANES);
                }
        }
        for (int r = 0; r < ROWS; r++) over_lanes<WIDE>(acc[r], out[r] + first);
    }
}

#ifdef PAIRS
template <int ROWS>
PAIRS static inline void dots_of_pairs(const bf16 *const *w, long steps, const char *x, float (*out)[BESIDE], const bf16 *next) {
    __m512 acc[ROWS][BESIDE] = {};
    for (long k = 0; k < steps; k++, x += ROWS * 64) {
        __m512bh each[BESIDE];
        for (int m = 0; m < BESIDE; m++) {
            if (next) __builtin_prefetch(next + (k * BESIDE + m) * STEP, 0, 2);
            each[m] = (__m512bh)_mm512_loadu_si512(w[m] + k * STEP);
        }
        for (int r = 0; r < ROWS; r++) {
            __m512bh row = (__m512bh)_mm512_loadu_si512(x + r * 64);
            for (int m = 0; m < BESIDE; m++) acc[r][m] = _mm512_dpbf16_ps(acc[r][m], each[m], row);
        }
    }
    for (int r = 0; r < ROWS; r++) over_lanes<BESIDE>((const vec *)acc[r], out[r]);
}
#endif

// How the rows of x lie for `dots`: in blocks of at most MOST rows, steps of K outermost; K is filled up with zeros.
struct Laid {
    long R, K, steps, blocks, bytes;  // `bytes` of a step of a row: the numbers, or as floats those with an even place before the others
    bool pairs;
    Laid(long R, long K, bool pairs)
        : R(R), K(K), steps((K + STEP - 1) / STEP), blocks((R + MOST - 1) / MOST), bytes(STEP * (pairs ? 2 : 4)), pairs(pairs) {}
    long first(long block) const { return R * block / blocks; }
    void lay(const bf16 *x, char *out, long from, long to) const {
        for (long block = 0; block < blocks; block++) {
            long begin = first(block), rows = first(block + 1) - begin;
            for (long k = from; k < to; k++)
                for (long r = 0; r < rows; r++) {
                    alignas(64) bf16 each[STEP] = {};
                    std::memcpy(each, x + (begin + r) * K + k * STEP, (K - k * STEP < STEP ? K - k * STEP : STEP) * sizeof(bf16));
                    char *to = out + ((begin * steps + k * rows) + r) * bytes;
                    if (pairs)
                        std::memcpy(to, each, sizeof each);
                    else {
                        uvec both;
                        std::memcpy(&both, each, sizeof both);
                        store((float *)to, (vec)(both << 16)), store((float *)to + LANES, (vec)(both & 0xffff0000u));
                    }
                }
        }
    }
};

#define EACH_COUNT(name)                                    \
    switch (rows) {                                         \
        case 1: name<1>(w, steps, at, out, next); break;    \
        case 2: name<2>(w, steps, at, out, next); break;    \
        case 3: name<3>(w, steps, at, out, next); break;    \
        case 4: name<4>(w, steps, at, out, next); break;    \
        default: name<5>(w, steps, at, out, next);          \
    }
typedef void Multiply(int rows, const bf16 *const *w, long steps, const char *at, float (*out)[BESIDE], const bf16 *next);
static void multiply(int rows, const bf16 *const *w, long steps, const char *at, float (*out)[BESIDE], const bf16 *next) {
    EACH_COUNT(dots)
}
#ifdef PAIRS
PAIRS static void multiply_pairs(int rows, const bf16 *const *w, long steps, const char *at, float (*out)[BESIDE], const bf16 *next) {
    EACH_COUNT(dots_of_pairs)
}
static bool has_pairs() { return __builtin_cpu_supports("avx512bf16"); }
#else
static Multiply *const multiply_pairs = multiply;
static bool has_pairs() { return false; }
#endif

// Rows `from` to `to` of a weight; the rows of y are M apart.
static void share_of(const Laid &laid, const char *x, const bf16 *w, const bf16 *bias, bf16 *y, long M, long from, long to) {
    long K = laid.K, whole = K / STEP * STEP, padded = laid.steps * STEP;
    Multiply *product = laid.pairs ? multiply_pairs : multiply;
    std::vector<float> &scratch = space(4, BESIDE * padded / 2);
    bf16 *filled = (bf16 *)scratch.data();
    for (long m = from; m < to; m += BESIDE) {
        const bf16 *rows[BESIDE];
        float added[BESIDE] = {};
        long count = to - m < BESIDE ? to - m : BESIDE;
        if (bias)
            for (long i = 0; i < count; i++) added[i] = wide(bias[m + i]);
        for (long i = 0; i < BESIDE; i++) {
            rows[i] = w + (m + (i < count ? i : count - 1)) * K;
            if (whole < K) {
                std::memset(filled + i * padded + whole, 0, STEP * sizeof(bf16));
                std::memcpy(filled + i * padded, rows[i], K * sizeof(bf16)), rows[i] = filled + i * padded;
            }
        }
        const bf16 *next = m + 2 * BESIDE <= to ? w + (m + BESIDE) * K : nullptr;
        for (long block = 0; block < laid.blocks; block++) {
            sums out;
            long first = laid.first(block), held = laid.first(block + 1) - first;
            product(held, rows, laid.steps, x + first * laid.steps * laid.bytes, out, block == 0 ? next : nullptr);
            for (long r = 0; r < held; r++) {
                bf16 each[BESIDE];
                for (int i = 0; i < BESIDE; i++) each[i] = narrow<bf16>(out[r][i] + added[i]);
                std::memcpy(y + (first + r) * M + m, each, count == BESIDE ? sizeof each : count * sizeof(bf16));
            }
        }
    }
}

// x [R, K] times each of `count` weights [M, K] transposed, plus its bias [M] or null -> y [R, all M side by side]; by products of pairs
// where `pairs`.
static void linear(const bf16 *x, const Weight<bf16> *weights, int count, bf16 *y, long R, long K, bool pairs, long threads) {
    Laid laid(R, K, pairs);
    long M = channels(weights, count);
    char *shared = R > 1 ? (char *)space(0, R * laid.steps * laid.bytes / sizeof(float)).data() : nullptr;
    int64_t began = now(), done = began, waited = 0;
    long used = 1;
#pragma omp parallel num_threads(team(threads))
    {
        long share = 1, mine = 0;
#ifdef _OPENMP
        share = omp_get_num_threads(), mine = omp_get_thread_num();
#endif
        if (mine == 0) waited = now() - began, used = share;
        char *rows = shared ? shared : (char *)space(0, laid.steps * laid.bytes / sizeof(float)).data();
        if (shared) {
            laid.lay(x, rows, laid.steps * mine / share, laid.steps * (mine + 1) / share);
            int64_t turning = now();
#pragma omp barrier
            if (mine == 0) waited += now() - turning;
        } else
            laid.lay(x, rows, 0, laid.steps);
        bf16 *out = y;
        for (int each = 0; each < count; out += weights[each++].M) {
            long own = weights[each].M, tiles = (own + BESIDE - 1) / BESIDE, to = tiles * (mine + 1) / share * BESIDE;
            share_of(laid, rows, weights[each].w, weights[each].bias, out, M, tiles * mine / share * BESIDE, to < own ? to : own);
        }
        if (mine == 0) done = now();
    }
    note(waited + now() - done, done - began - waited, used);
}
