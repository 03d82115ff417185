// Choices among logits.
#pragma once

#include "threads.h"
#include "vectors.h"

static constexpr long SPAN = 8 * LANES;  // numbers that are looked at together

// The largest of SPAN numbers that are numbers.
static inline float peak(const float *x) {
    vec most = load(x);
    for (int i = 1; i < 8; i++) most = largest(load(x + i * LANES), most);
    float best = most[0];
    for (int lane = 1; lane < LANES; lane++) best = most[lane] > best ? most[lane] : best;
    return best;
}

static long first_largest(const float *x, long V) {
    float best = LOWEST;
    long found = 0, i = 0;
    vec odd = {};
    for (; i + SPAN <= V; i += SPAN) {
        for (int each = 0; each < 8; each++) {
            vec one = load(x + i + each * LANES);
            odd += one - one;  // not a number where one is not, or is infinite
        }
        float most = peak(x + i);
        if (most > best) best = most, found = i;
    }
    bool plain = sum(odd) == 0.0f;
    for (; i < V; i++) {
        if (x[i] > best) best = x[i], found = i;
        plain = plain && x[i] == x[i];
    }
    if (!plain)
        for (i = 0; i < V; i++)
            if (x[i] != x[i]) return i;
    while (found < V - 1 && x[found] != best) found++;
    return found;
}

// A row of logits as floats.
static inline const float *as_floats(const float *x, long) { return x; }
static inline const float *as_floats(const bf16 *x, long V) {
    float *out = space(3, V).data();
    for (long i = 0; i < V; i++) out[i] = wide(x[i]);
    return out;
}

// The place of the highest of x [rows, V], the lowest among equals; one that is not a number is above all, as in torch.
template <typename T>
static void argmax(const T *x, int64_t *out, long rows, long V, long threads) {
#pragma omp parallel for num_threads(team(threads)) if (rows * V > SMALL)
    for (long row = 0; row < rows; row++) out[row] = first_largest(as_floats(x + row * V, V), V);
}

// Log-probabilities and places of the `count` highest of logits [rows, V], in falling order, the lower place first among equals.
template <typename T>
static void topk_logprobs(const T *logits, float *values, int64_t *places, long rows, long V, long count, long threads) {
#pragma omp parallel for num_threads(team(threads)) if (rows * V > SMALL / 4)
    for (long row = 0; row < rows; row++) {
        const float *x = as_floats(logits + row * V, V);
        float *best = values + row * count;
        int64_t *at = places + row * count;
        long held = 0;
        for (long i = 0; i < V;) {
            if (held == count && i + SPAN <= V && !(peak(x + i) > best[count - 1])) {
                i += SPAN;
                continue;
            }
            long end = i + SPAN < V ? i + SPAN : V;
            for (; i < end; i++) {
                if (held == count && !(x[i] > best[count - 1])) continue;
                long place = held < count ? held++ : count - 1;
                for (; place > 0 && x[i] > best[place - 1]; place--) best[place] = best[place - 1], at[place] = at[place - 1];
                best[place] = x[i], at[place] = i;
            }
        }
        vec acc = {};
        float most = best[0], rest = 0;
        long i = 0;
        for (; i + LANES <= V; i += LANES) acc += exponential(load(x + i) - most);
        for (; i < V; i++) rest += std::exp(x[i] - most);
        float mass = most + std::log(sum(acc) + rest);
        for (long c = 0; c < count; c++) {
            float logp = best[c] - mass;
            best[c] = logp > 0.0f ? 0.0f : logp;
        }
    }
}
