// Products in fp32 of a few rows.
#pragma once

#include "threads.h"
#include "vectors.h"

// How many rows of a weight are multiplied together with `rows` rows of x: as many as the registers hold the sums of.
static constexpr int weights_beside(int rows) {
    int registers = LANES == 16 ? 32 : 16, room = (registers - 1) / (rows + 1);
    return room > 4 ? 4 : room < 1 ? 1 : room;
}

// Rows of x up to which a product's sums run along K, lane by lane; of more rows x is turned, so that the lanes are its rows. So many sums
// beside four rows of a weight fill the registers, and beside fewer the sums' ends take longer than the weights' reading.
static constexpr long FEW = LANES == 16 ? 6 : 4;

// `WIDE` rows of a weight times `ROWS` rows of x, which lie side by side in vectors: x [K / LANES, ROWS, LANES]. `tail` is x as it was, for
// what is left of K, and `next` the weights behind these, read ahead.
template <int ROWS, int WIDE>
static inline void dots(const float *w, long K, const float *x, const float *tail, float *y, long M, const float *bias, const float *next) {
    vec acc[WIDE][ROWS] = {};
    long k = 0;
    for (; k + LANES <= K; k += LANES, x += ROWS * LANES) {
        vec each[WIDE];
        for (int m = 0; m < WIDE; m++) {
            if (LANES == 16 || k % 16 == 0) __builtin_prefetch(next + k * WIDE + m * 16, 0, 2);
            each[m] = load(w + m * K + k);
        }
        for (int r = 0; r < ROWS; r++) {
            vec row = load(x + r * LANES);
            for (int m = 0; m < WIDE; m++) acc[m][r] += each[m] * row;
        }
    }
    for (int m = 0; m < WIDE; m++)
        for (int r = 0; r < ROWS; r++) {
            float total = sum(acc[m][r]);
            for (long at = k; at < K; at++) total += w[m * K + at] * tail[r * K + at];
            y[r * M + m] = bias ? total + bias[m] : total;
        }
}

// Rows `from` to `to` of a weight; the rows of y are M apart.
template <int ROWS>
static void few(const float *packed, const float *x, const float *w, const float *bias, float *y, long M, long K, long from, long to) {
    constexpr int WIDE = weights_beside(ROWS);
    long m = from;
    for (; m + WIDE <= to; m += WIDE)
        dots<ROWS, WIDE>(w + m * K, K, packed, x, y + m, M, bias ? bias + m : nullptr, w + (m + WIDE) * K);
    for (; m < to; m++) dots<ROWS, 1>(w + m * K, K, packed, x, y + m, M, bias ? bias + m : nullptr, w + (m + 1) * K);
}

// x [R, K] as the vectors that `dots` reads, those of `from` to `to`.
static void in_vectors(const float *x, long R, long K, float *out, long from, long to) {
    for (long v = from; v < to; v++)
        for (long r = 0; r < R; r++) store(out + (v * R + r) * LANES, load(x + r * K + v * LANES));
}

// Up to eight rows of x side by side: a vector of sixteen would be half empty, and takes some processors with AVX-512 (Zen 4) twice as long.
static constexpr long SLIM = 8;
typedef float slim __attribute__((vector_size(SLIM * 4)));
typedef float full __attribute__((vector_size(LANES * 4)));

template <typename V>  // which takes no attributes with it, so that an address need not be a vector's
static inline V from(const float *p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// `WIDE` rows of a weight times x, whose rows lie side by side in COLUMNS vectors V [K, COLUMNS * EACH]. `next` is what is multiplied next.
template <int WIDE, int COLUMNS, typename V = full>
static inline void block(const float *w, long stride, const float *x, long K, float *out, const float *next) {
    constexpr int EACH = sizeof(V) / 4;
    V acc[WIDE][COLUMNS] = {};
    long k = 0;
    for (; k + 16 <= K; k += 16) {
        if (next)
            for (int m = 0; m < WIDE; m++) __builtin_prefetch(next + k * WIDE + m * 16, 0, 2);
        for (int j = k; j < k + 16; j++)
            for (int m = 0; m < WIDE; m++)
                for (int c = 0; c < COLUMNS; c++) acc[m][c] += w[m * stride + j] * from<V>(x + (j * COLUMNS + c) * EACH);
    }
    for (; k < K; k++)
        for (int m = 0; m < WIDE; m++)
            for (int c = 0; c < COLUMNS; c++) acc[m][c] += w[m * stride + k] * from<V>(x + (k * COLUMNS + c) * EACH);
    for (int m = 0; m < WIDE; m++)
        for (int c = 0; c < COLUMNS; c++) std::memcpy(out + (m * COLUMNS + c) * EACH, &acc[m][c], sizeof(V));
}

// x [R, K] as groups of columns [K, side], zeros behind the last row.
static void side_by_side(const float *x, long R, long K, long side, float *out, long from, long to) {
    for (long group = 0; group * side < R; group++)
        for (long k = from; k < to; k++)
            for (long c = 0; c < side; c++) {
                long r = group * side + c;
                out[(group * K + k) * side + c] = r < R ? x[r * K + k] : 0.0f;
            }
}

template <int WIDE, int COLUMNS, typename V = full>
static void many(const float *columns, const float *w, const float *bias, float *y, long R, long M, long K, long from, long to) {
    constexpr long SIDE = COLUMNS * (sizeof(V) / 4);
    alignas(64) float out[WIDE * SIDE];
    for (long m = from; m < to; m += WIDE) {
        long count = to - m < WIDE ? to - m : WIDE;
        for (long first = 0; first < R; first += SIDE) {
            const float *x = columns + first * K;
            if (count == WIDE)
                block<WIDE, COLUMNS, V>(w + m * K, K, x, K, out, first == 0 ? w + (m + WIDE) * K : nullptr);
            else
                for (long i = 0; i < count; i++) block<1, COLUMNS, V>(w + (m + i) * K, K, x, K, out + i * SIDE, nullptr);
            long rows = R - first < SIDE ? R - first : SIDE;
            for (long r = 0; r < rows; r++)
                for (long i = 0; i < count; i++) y[(first + r) * M + m + i] = bias ? out[i * SIDE + r] + bias[m + i] : out[i * SIDE + r];
        }
    }
}

// x [R, K] times each of `count` weights [M, K] transposed, plus its bias [M] or null -> y [R, all M side by side].
static void linear(const float *x, const Weight<float> *weights, int count, float *y, long R, long K, long threads) {
    bool tall = R > LANES, along = R <= FEW;
    long side = R <= SLIM ? SLIM : (tall ? 2 : 1) * LANES, padded = (R + side - 1) / side * side;
    long vectors = K / LANES, M = channels(weights, count);
    float *turned = R > 1 ? space(0, (along ? R : padded) * K).data() : nullptr;
    int64_t began = now(), done = began, waited = 0;
    long used = 1;
#pragma omp parallel num_threads(team(threads))
    {
        long share = 1, mine = 0;
#ifdef _OPENMP
        share = omp_get_num_threads(), mine = omp_get_thread_num();
#endif
        if (mine == 0) waited = now() - began, used = share;
        if (R > 1) {
            if (along)
                in_vectors(x, R, K, turned, vectors * mine / share, vectors * (mine + 1) / share);
            else
                side_by_side(x, R, K, side, turned, K * mine / share, K * (mine + 1) / share);
            int64_t turning = now();
#pragma omp barrier
            if (mine == 0) waited += now() - turning;
        }
        float *out = y;
        for (int each = 0; each < count; out += weights[each++].M) {
            const float *w = weights[each].w, *bias = weights[each].bias;
            long own = weights[each].M, blocks = (own + 23) / 24, from = blocks * mine / share * 24, to = blocks * (mine + 1) / share * 24;
            to = to < own ? to : own;
            switch (along ? R : 0) {
                case 1: few<1>(x, x, w, bias, out, M, K, from, to); break;
                case 2: few<2>(turned, x, w, bias, out, M, K, from, to); break;
                case 3: few<3>(turned, x, w, bias, out, M, K, from, to); break;
                case 4: few<4>(turned, x, w, bias, out, M, K, from, to); break;
#ifdef __AVX512F__
                case 5: few<5>(turned, x, w, bias, out, M, K, from, to); break;
                case 6: few<6>(turned, x, w, bias, out, M, K, from, to); break;
#endif
                default:
                    if (R <= SLIM)
                        many<12, 1, slim>(turned, w, bias, out, R, M, K, from, to);
                    else if (tall)
                        many<LANES == 16 ? 8 : 6, 2>(turned, w, bias, out, R, M, K, from, to);
                    else
                        many<12, 1>(turned, w, bias, out, R, M, K, from, to);
            }
        }
        if (mine == 0) done = now();
    }
    note(waited + now() - done, done - began - waited, used);
}
