// The operations of a round on the CPU in fp32, for a few rows: what they compute is specified by the references of the same names in
// fastspec/kernels. Compiled on the machine that runs them (build.py); Python calls them through ctypes (ops.py).
//
// Letters as there: B rows (sequences), N nodes, Hq query heads, Hkv key heads, D head size, V tokens, H width. A product is of R rows, M
// output channels and K input channels. All matrices are row by row. `threads` is torch's number, and OpenMP is the one that torch loaded.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static constexpr float LOWEST = -std::numeric_limits<float>::infinity();
static constexpr long SMALL = 1 << 15;  // elements below which a second thread costs more than it brings

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec x) { *(vec *)p = x; }
static inline vec all(float x) { return x - vec{}; }

static inline float sum(vec x) {
    typedef float half __attribute__((vector_size(LANES * 2)));
    typedef float quarter __attribute__((vector_size(LANES)));
    half low, high;
    std::memcpy(&low, &x, sizeof low), std::memcpy(&high, (const char *)&x + sizeof low, sizeof high);
    low += high;
    quarter first, second;
    std::memcpy(&first, &low, sizeof first), std::memcpy(&second, (const char *)&low + sizeof first, sizeof second);
    first += second;
    float total = 0;
    for (int i = 0; i < LANES / 4; i++) total += first[i];
    return total;
}

static inline vec largest(vec a, vec b) { return a > b ? a : b; }

// e^x: x is cut to where floats are normal; 2^n times a polynomial in the rest, |rest| <= ln(2) / 2, whose error is below a rounding.
static inline vec exponential(vec x) {
    const vec low = all(-87.3f), high = all(88.0f);
    vec cut = x < low ? low : x > high ? high : x;
    vec scaled = cut * 1.44269504f, shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    vec whole = (scaled + shift) - shift;
    vec rest = (cut - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln(2) in two parts, the first exact in products
    vec power = all(1.0f / 5040);
    power = power * rest + 1.0f / 720;
    power = power * rest + 1.0f / 120;
    power = power * rest + 1.0f / 24;
    power = power * rest + 1.0f / 6;
    power = power * rest + 0.5f;
    power = power * rest + 1.0f;
    power = power * rest + 1.0f;
    ivec exponent = (__builtin_convertvector(whole, ivec) + 127) << 23;
    vec result = power * (vec)exponent;
    return x < low ? vec{} : result;
}

// How many rows of a weight are multiplied together with `rows` rows of x: as many as the registers hold the sums of.
static constexpr int wide(int rows) {
    int registers = LANES == 16 ? 32 : 16, room = (registers - 1) / (rows + 1);
    return room > 4 ? 4 : room < 1 ? 1 : room;
}

// Rows of x up to which a product's sums run along K, lane by lane; of more rows x is turned, so that the lanes are its rows.
static constexpr long FEW = LANES == 16 ? 8 : 4;

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

template <int ROWS>
static void few(const float *packed, const float *x, const float *w, const float *bias, float *y, long M, long K, long from, long to) {
    constexpr int WIDE = wide(ROWS);
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

// `WIDE` rows of a weight times x, whose rows lie side by side in COLUMNS vectors [K, COLUMNS * LANES]. `next` is what is multiplied next.
template <int WIDE, int COLUMNS>
static inline void block(const float *w, long stride, const float *x, long K, float *out, const float *next) {
    vec acc[WIDE][COLUMNS] = {};
    long k = 0;
    for (; k + 16 <= K; k += 16) {
        if (next)
            for (int m = 0; m < WIDE; m++) __builtin_prefetch(next + k * WIDE + m * 16, 0, 2);
        for (int j = k; j < k + 16; j++)
            for (int m = 0; m < WIDE; m++)
                for (int c = 0; c < COLUMNS; c++) acc[m][c] += w[m * stride + j] * load(x + (j * COLUMNS + c) * LANES);
    }
    for (; k < K; k++)
        for (int m = 0; m < WIDE; m++)
            for (int c = 0; c < COLUMNS; c++) acc[m][c] += w[m * stride + k] * load(x + (k * COLUMNS + c) * LANES);
    for (int m = 0; m < WIDE; m++)
        for (int c = 0; c < COLUMNS; c++) store(out + (m * COLUMNS + c) * LANES, acc[m][c]);
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

template <int WIDE, int COLUMNS>
static void many(const float *columns, const float *w, const float *bias, float *y, long R, long M, long K, long from, long to) {
    constexpr long SIDE = COLUMNS * LANES;
    alignas(64) float out[WIDE * SIDE];
    for (long m = from; m < to; m += WIDE) {
        long count = to - m < WIDE ? to - m : WIDE;
        for (long first = 0; first < R; first += SIDE) {
            const float *x = columns + first * K;
            if (count == WIDE)
                block<WIDE, COLUMNS>(w + m * K, K, x, K, out, first == 0 ? w + (m + WIDE) * K : nullptr);
            else
                for (long i = 0; i < count; i++) block<1, COLUMNS>(w + (m + i) * K, K, x, K, out + i * SIDE, nullptr);
            long rows = R - first < SIDE ? R - first : SIDE;
            for (long r = 0; r < rows; r++)
                for (long i = 0; i < count; i++) y[(first + r) * M + m + i] = bias ? out[i * SIDE + r] + bias[m + i] : out[i * SIDE + r];
        }
    }
}

static std::vector<float> &space(int which, size_t floats) {
    static thread_local std::vector<float> held[4];
    if (held[which].size() < floats) held[which].resize(floats);
    return held[which];
}

extern "C" {

int fastspec_lanes() { return LANES; }

// x [R, K] times weight [M, K] transposed, plus bias [M] or null -> y [R, M].
void fastspec_linear(const float *x, const float *w, const float *bias, float *y, long R, long M, long K, long threads) {
    bool tall = R > LANES, along = R <= FEW;
    long side = (tall ? 2 : 1) * LANES, padded = (R + side - 1) / side * side, vectors = K / LANES;
    float *turned = R > 1 ? space(0, (along ? R : padded) * K).data() : nullptr;
#pragma omp parallel num_threads(threads)
    {
        long share = 1, mine = 0;
#ifdef _OPENMP
        share = omp_get_num_threads(), mine = omp_get_thread_num();
#endif
        long blocks = (M + 23) / 24, from = blocks * mine / share * 24, to = blocks * (mine + 1) / share * 24;
        to = to < M ? to : M;
        if (R > 1) {
            if (along)
                in_vectors(x, R, K, turned, vectors * mine / share, vectors * (mine + 1) / share);
            else
                side_by_side(x, R, K, side, turned, K * mine / share, K * (mine + 1) / share);
#pragma omp barrier
        }
        switch (R) {
            case 1: few<1>(x, x, w, bias, y, M, K, from, to); break;
            case 2: few<2>(turned, x, w, bias, y, M, K, from, to); break;
            case 3: few<3>(turned, x, w, bias, y, M, K, from, to); break;
            case 4: few<4>(turned, x, w, bias, y, M, K, from, to); break;
#ifdef __AVX512F__
            case 5: few<5>(turned, x, w, bias, y, M, K, from, to); break;
            case 6: few<6>(turned, x, w, bias, y, M, K, from, to); break;
            case 7: few<7>(turned, x, w, bias, y, M, K, from, to); break;
            case 8: few<8>(turned, x, w, bias, y, M, K, from, to); break;
#endif
            default:
                if (tall)
                    many<LANES == 16 ? 8 : 6, 2>(turned, w, bias, y, R, M, K, from, to);
                else
                    many<12, 1>(turned, w, bias, y, R, M, K, from, to);
        }
    }
}

// See layer/reference.py: `residual`, `weight` may be null (a norm without a weight); `offset` is used where has_offset.
void fastspec_rms_norm(
    const float *x, long x_stride, const float *residual, long residual_stride, const float *weight, float *out, long out_stride,
    float *total, long total_stride, long rows, long H, float eps, float offset, long has_offset, long threads) {
#pragma omp parallel for num_threads(threads) if (rows * H > SMALL)
    for (long row = 0; row < rows; row++) {
        const float *a = x + row * x_stride, *b = residual ? residual + row * residual_stride : nullptr;
        float *t = total + row * total_stride, *o = out + row * out_stride;
        vec acc = {};
        float squares = 0;
        long h = 0;
        for (; h + LANES <= H; h += LANES) {
            vec each = b ? load(a + h) + load(b + h) : load(a + h);
            store(t + h, each);
            acc += each * each;
        }
        for (; h < H; h++) {
            float each = b ? a[h] + b[h] : a[h];
            t[h] = each;
            squares += each * each;
        }
        float scale = 1.0f / std::sqrt((sum(acc) + squares) / H + eps);
        for (h = 0; h < H; h++) {
            float normed = t[h] * scale;
            o[h] = has_offset ? normed * (offset + weight[h]) : weight[h] * normed;
        }
    }
}

// The gated half: in [rows, 2 * I], the gates first -> silu(gate) * up [rows, I].
void fastspec_swiglu(const float *in, float *out, long rows, long I, long threads) {
#pragma omp parallel for num_threads(threads) if (rows * I > SMALL / 2)
    for (long row = 0; row < rows; row++) {
        const float *gate = in + row * 2 * I, *up = gate + I;
        float *o = out + row * I;
        long i = 0;
        for (; i + LANES <= I; i += LANES) {
            vec g = load(gate + i);
            store(o + i, g / (1.0f + exponential(-g)) * load(up + i));
        }
        for (; i < I; i++) o[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    }
}

static void turn_head(const float *in, float *out, const float *cos, const float *sin, long D, long half, const float *norm, float eps,
                      float offset, long has_offset) {
    float scratch[1024];
    if (norm) {
        float squares = 0;
        for (long d = 0; d < D; d++) squares += in[d] * in[d];
        float scale = 1.0f / std::sqrt(squares / D + eps);
        for (long d = 0; d < D; d++) scratch[d] = has_offset ? in[d] * scale * (offset + norm[d]) : norm[d] * (in[d] * scale);
        in = scratch;
    }
    for (long i = 0; i < half; i++) {
        float a = in[i], b = in[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[i] + a * sin[i];
    }
    for (long d = 2 * half; d < D; d++) out[d] = in[d];
}

// See layer/reference.py: neox halves; q_norm, k_norm null or both; D at most 1024. Strides of the caches are those of B and Hkv.
void fastspec_rope_cache(
    const float *qkv, const float *cos, const float *sin, const int64_t *positions, const int64_t *slots, float *k_cache, float *v_cache,
    float *q, const float *q_norm, const float *k_norm, long B, long N, long Hq, long Hkv, long D, long half, long k_row, long k_head,
    long v_row, long v_head, float eps, float offset, long has_offset) {
    for (long at = 0; at < B * N; at++) {
        const float *in = qkv + at * (Hq + 2 * Hkv) * D, *c = cos + positions[at] * half, *s = sin + positions[at] * half;
        long row = at / N, slot = slots[at];
        for (long h = 0; h < Hq; h++, in += D) turn_head(in, q + (at * Hq + h) * D, c, s, D, half, q_norm, eps, offset, has_offset);
        for (long h = 0; h < Hkv; h++, in += D)
            turn_head(in, k_cache + row * k_row + h * k_head + slot * D, c, s, D, half, k_norm, eps, offset, has_offset);
        for (long h = 0; h < Hkv; h++, in += D) std::memcpy(v_cache + row * v_row + h * v_head + slot * D, in, D * sizeof(float));
    }
}

// See attention/reference.py: q [B, N, Hq, D] over E slots of the caches under visible [B, N, E] -> out [B, N, Hq, D].
void fastspec_tree_attention(
    const float *q, const float *k, const float *v, const uint8_t *visible, float *out, long B, long N, long Hq, long Hkv, long D, long E,
    long k_row, long k_head, long v_row, long v_head, float scale, long threads) {
    long group = Hq / Hkv, rows = group * N, chunks = (rows + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (B * Hq * N * E * D > SMALL)
    for (long task = 0; task < B * Hkv * chunks; task++) {
        long b = task / (Hkv * chunks), head = task / chunks % Hkv, first = task % chunks * LANES;
        long count = rows - first < LANES ? rows - first : LANES;
        const float *keys = k + b * k_row + head * k_head, *values = v + b * v_row + head * v_head;
        float *scores = space(1, E * LANES).data(), *turned = space(2, D * LANES).data();
        const uint8_t *seen[LANES];
        for (long r = 0; r < LANES; r++) {  // stacked as rows: the queries of a group, head by head
            long row = first + (r < count ? r : 0), node = row % N;
            const float *from = q + ((b * N + node) * Hq + head * group + row / N) * D;
            for (long d = 0; d < D; d++) turned[d * LANES + r] = from[d] * scale;
            seen[r] = visible + (b * N + node) * E;
        }
        long e = 0;
        for (; e + 8 <= E; e += 8) block<8, 1>(keys + e * D, D, turned, D, scores + e * LANES, nullptr);
        for (; e < E; e++) block<1, 1>(keys + e * D, D, turned, D, scores + e * LANES, nullptr);
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
            float *to = out + ((b * N + row % N) * Hq + head * group + row / N) * D;
            long d = 0;
            for (; d + 4 * LANES <= D; d += 4 * LANES) {
                vec acc[4] = {};
                for (e = 0; e < E; e++)
                    for (int i = 0; i < 4; i++) acc[i] += scores[e * LANES + r] * load(values + e * D + d + i * LANES);
                for (int i = 0; i < 4; i++) store(to + d + i * LANES, acc[i] * share[r]);
            }
            for (; d < D; d++) {
                float acc = 0;
                for (e = 0; e < E; e++) acc += scores[e * LANES + r] * values[e * D + d];
                to[d] = acc * share[r];
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

// The place of the highest of x [rows, V], the lowest among equals; one that is not a number is above all, as in torch.
void fastspec_argmax(const float *x, int64_t *out, long rows, long V, long threads) {
#pragma omp parallel for num_threads(threads) if (rows * V > SMALL)
    for (long row = 0; row < rows; row++) out[row] = first_largest(x + row * V, V);
}

// Log-probabilities and places of the `count` highest of logits [rows, V], in falling order, the lower place first among equals.
void fastspec_topk_logprobs(const float *logits, float *values, int64_t *places, long rows, long V, long count, long threads) {
#pragma omp parallel for num_threads(threads) if (rows * V > SMALL / 4)
    for (long row = 0; row < rows; row++) {
        const float *x = logits + row * V;
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
}
