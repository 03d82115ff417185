// Vectors of floats, and bfloat16 numbers, which are the upper half of a float's bits: what the kernels are written in.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
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
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t uhalf __attribute__((vector_size(LANES * 2)));

static constexpr float LOWEST = -std::numeric_limits<float>::infinity();
static constexpr long SMALL = 1 << 15;  // elements below which a second thread costs more than it brings

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec x) { *(vec *)p = x; }
static inline vec all(float x) { return x - vec{}; }

struct bf16 {
    uint16_t bits;
};

static inline float wide(float x) { return x; }
static inline float wide(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// Rounded to the nearest, and to the even one of two; what is not a number stays none.
template <typename T>
static inline T narrow(float x);
template <>
inline float narrow<float>(float x) {
    return x;
}
template <>
inline bf16 narrow<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return {(uint16_t)(x == x ? nearest : 0x7fc0)};
}

// As it is after it was rounded to T.
template <typename T>
static inline float rounded(float x) {
    return wide(narrow<T>(x));
}

static inline vec load(const bf16 *p) {
    uhalf each;
    std::memcpy(&each, p, sizeof each);
    return (vec)(__builtin_convertvector(each, uvec) << 16);
}

static inline void store(bf16 *p, vec x) {
    uvec bits = (uvec)x, nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uhalf out = __builtin_convertvector(x == x ? nearest : 0x7fc0 + uvec{}, uhalf);
    std::memcpy(p, &out, sizeof out);
}

static inline vec rounded(vec x, float) { return x; }
static inline vec rounded(vec x, bf16) {
    uvec bits = (uvec)x, nearest = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    return x == x ? (vec)nearest : x;
}

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

// e^x, 0 and infinity beyond where floats are normal; 2^n times a polynomial in the rest, |rest| <= ln(2) / 2, whose error is below a rounding.
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
    return x < low ? vec{} : x > high ? all(-LOWEST) : result;
}

// A weight [M, K] and its bias [M], or null. Several that read one input are multiplied together.
template <typename T>
struct Weight {
    const T *w, *bias;
    long M;
};

template <typename T>
static long channels(const Weight<T> *weights, int count) {
    long all = 0;
    for (int each = 0; each < count; each++) all += weights[each].M;
    return all;
}

static std::vector<float> &space(int which, size_t floats) {
    static thread_local std::vector<float> held[5];
    if (held[which].size() < floats) held[which].resize(floats);
    return held[which];
}
