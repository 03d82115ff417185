// The operations of a round on the CPU in fp32 and bfloat16, for a few rows: what they compute is specified by the references of the same
// names in fastspec/kernels. Compiled on the machine that runs them (build.py); Python calls them through ctypes (ops.py).
//
// Letters as there: B rows (sequences), N nodes, Hq query heads, Hkv key heads, D head size, V tokens, H width. A product is of R rows, M
// output channels and K input channels. All matrices are row by row. `threads` is torch's number, the most that a kernel takes, and OpenMP is
// the one that torch loaded. In bfloat16 a result is computed in fp32 and rounded where the reference rounds.

#include "products.h"
#include "products_bf16.h"
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
                    for (int i = 0; i < 4; i++) acc[i] += scores[e * LANES + r] * load(values + e * D + d + i * LANES);
                for (int i = 0; i < 4; i++) store(to + d + i * LANES, acc[i] * share[r]);
            }
            for (; d < D; d++) {
                float acc = 0;
                for (e = 0; e < E; e++) acc += scores[e * LANES + r] * wide(values[e * D + d]);
                to[d] = narrow<T>(acc * share[r]);
            }
        }
    }
}

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

extern "C" {

int fastspec_lanes() { return LANES; }
int fastspec_has_pairs() { return has_pairs(); }
long fastspec_team(long threads) { return team(threads); }
void fastspec_note(long waited, long worked) { note(waited, worked); }

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
    }
ROTATION(float, float, )
ROTATION(bf16, bf16, _bf16)
ROTATION(bf16, float, _bf16_fp32)
}
