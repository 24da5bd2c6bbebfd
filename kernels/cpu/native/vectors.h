/* Vectors of 16 lanes, in the compiler's vector extensions, so that one source serves every instruction set.

   A 16-lane vector is one AVX-512 register, two of AVX2, or four of NEON; the compiler splits it. Only the integer dot
   products use intrinsics. */
#pragma once

#include <stdint.h>
#include <stddef.h>
#include <string.h>

#define LANES 16

typedef float float16 __attribute__((vector_size(64)));
typedef int32_t int32x16 __attribute__((vector_size(64)));
typedef int16_t int16x16 __attribute__((vector_size(32)));
typedef int16_t int16x32 __attribute__((vector_size(64)));
typedef int8_t int8x16 __attribute__((vector_size(16)));
typedef uint8_t uint8x16 __attribute__((vector_size(16)));
typedef uint8_t uint8x32 __attribute__((vector_size(32)));
typedef uint8_t uint8x64 __attribute__((vector_size(64)));
typedef _Float16 half16 __attribute__((vector_size(32)));
typedef uint16_t uint16x16 __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("clang loop unroll(full)")

INLINE float16 splat(float x) { return (float16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE int32x16 splat_int(int32_t x) { return (int32x16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE float16 load(const float *p) { float16 v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, float16 v) { memcpy(p, &v, sizeof v); }
INLINE float16 load_half(const _Float16 *p) { half16 v; memcpy(&v, p, sizeof v); return __builtin_convertvector(v, float16); }
INLINE float16 floats(int32x16 v) { return __builtin_convertvector(v, float16); }
INLINE int32x16 bits(float16 v) { int32x16 b; memcpy(&b, &v, sizeof b); return b; }
INLINE float16 from_bits(int32x16 b) { float16 v; memcpy(&v, &b, sizeof v); return v; }
INLINE float16 vmax(float16 a, float16 b) { return __builtin_elementwise_max(a, b); }
INLINE float16 vmin(float16 a, float16 b) { return __builtin_elementwise_min(a, b); }

/* Adds the lanes in a fixed order. */
INLINE float sum(float16 v) {
    typedef float float8 __attribute__((vector_size(32)));
    typedef float float4 __attribute__((vector_size(16)));
    float8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    float4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

/* Adds the lanes of each of 16 vectors: lane i of the result is the sum of v[i]. Shorter than 16 calls of `sum`. */
INLINE float16 sum_each(float16 v[LANES]) {
#define FOLD(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))
    float16 w[8], x[4], y[2];
    UNROLL for (int i = 0; i < 8; i++) {
        float16 a = v[i], b = v[i + 8];
        w[i] = FOLD(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
             + FOLD(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    } /* w[i]: 8 partial sums of v[i], then 8 of v[i + 8] */
    UNROLL for (int i = 0; i < 4; i++) {
        float16 a = w[i], b = w[i + 4];
        x[i] = FOLD(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
             + FOLD(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    } /* x[i]: 4 of v[i], v[i + 4], v[i + 8], v[i + 12] */
    UNROLL for (int i = 0; i < 2; i++) {
        float16 a = x[i], b = x[i + 2];
        y[i] = FOLD(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
             + FOLD(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    } /* y[i]: 2 each of v[i], v[i + 2], v[i + 4], ..., v[i + 14] */
    float16 a = y[0], b = y[1];
    return FOLD(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
         + FOLD(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#undef FOLD
}

/* e^x to 2 units in the last place; 0 below -87, NaN for NaN.
   Source: range reduction by ln 2 in two parts (Cody and Waite), Taylor polynomial of degree 6 on |r| <= ln(2) / 2. */
INLINE float16 vexp(float16 x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which the low bits hold */
    float16 clamped = vmin(vmax(x, splat(-87.3f)), splat(88.0f));
    float16 rounded = clamped * 1.44269504f + shift;
    float16 n = rounded - shift;
    float16 r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float16 p = splat(1.0f / 720);
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32x16 exponent = (bits(rounded) - 0x4B400000 + 127) << 23;
    float16 result = p * from_bits(exponent);
    int32x16 small = x < splat(-87.3f);
    result = from_bits(bits(result) & ~small);
    int32x16 is_nan = x != x;
    return from_bits((bits(result) & ~is_nan) | (bits(x) & is_nan));
}
