/* Integer dot products of weights and activations, for each instruction set.

   Weights are stored without a sign (w + 128 in 8 bits, w + 8 in 4 bits) because the instruction of x86 multiplies
   unsigned by signed bytes. The caller corrects for the offset once for each group.

   8 bits: a vector holds WIDE8 consecutive inputs of each of 16 outputs; one step multiplies them by the same inputs of
   a row.
   4 bits: 64 bytes hold 8 consecutive inputs of each of 16 outputs: the low halves of 4 bytes the first four inputs, the
   high halves the others. */
#pragma once

#include "vectors.h"

INLINE uint8x64 load_bytes(const uint8_t *p) { uint8x64 v; memcpy(&v, p, sizeof v); return v; }
INLINE int32_t load_word(const void *p) { int32_t w; memcpy(&w, p, sizeof w); return w; }

#if defined(__AVX512VNNI__)
#include <immintrin.h>

#define INSTRUCTIONS "AVX-512 VNNI"
#define WIDE8 4
#define MOST_ROWS 8         /* rows that are accumulated in registers at once */
#define MANY_ROWS 8         /* the same of more rows than these, where groups have scales */
#define VECTORS(rows) ((rows) <= 4 ? 2 : 1) /* vectors of outputs that are accumulated at once */
typedef int8_t input8;      /* activations of a product with 8-bit weights */
typedef uint8x64 weights8;
typedef int32x16 sums4;     /* accumulator of a product with 4-bit weights */

INLINE weights8 load_weights8(const uint8_t *p) { return load_bytes(p); }
INLINE int32x16 dot8(int32x16 acc, weights8 w, const input8 *x) {
    return (int32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(load_word(x)));
}
INLINE sums4 start4(int32_t correction) { return splat_int(correction); }
INLINE sums4 dot4(sums4 acc, uint8x64 w, const int8_t *x) { return dot8(acc, w, x); }
INLINE int32x16 finish4(sums4 acc, int32_t correction) { (void)correction; return acc; }

#elif defined(__AVX2__)
#include <immintrin.h>

#if defined(__AVXVNNI__)
#define INSTRUCTIONS "AVX-VNNI"
#define WIDE8 4
#define MOST_ROWS 6
#define MANY_ROWS 4
#define VECTORS(rows) 1
typedef int8_t input8;
typedef uint8x64 weights8;
typedef int32x16 sums4;
typedef struct { __m256i low, high; } halves;

INLINE weights8 load_weights8(const uint8_t *p) { return load_bytes(p); }
INLINE int32x16 dot8(int32x16 acc, weights8 w, const input8 *x) {
    halves a, b;
    memcpy(&a, &acc, sizeof a);
    memcpy(&b, &w, sizeof b);
    __m256i wide = _mm256_set1_epi32(load_word(x));
    a.low = _mm256_dpbusd_avx_epi32(a.low, b.low, wide);
    a.high = _mm256_dpbusd_avx_epi32(a.high, b.high, wide);
    memcpy(&acc, &a, sizeof a);
    return acc;
}
INLINE sums4 start4(int32_t correction) { return splat_int(correction); }
INLINE sums4 dot4(sums4 acc, uint8x64 w, const int8_t *x) { return dot8(acc, w, x); }
INLINE int32x16 finish4(sums4 acc, int32_t correction) { (void)correction; return acc; }

#else
/* Without the dot product instruction, bytes are widened to 16 bits: the product of bytes with sums in 16 bits would
   saturate with 8-bit weights. With 4-bit weights the sums of 32 inputs fit: 8 * 2 * 15 * 127 < 2^15. */
#define INSTRUCTIONS "AVX2"
#define WIDE8 2
#define MOST_ROWS 6
#define MANY_ROWS 4
#define VECTORS(rows) 1
typedef int16_t input8;
typedef int16x32 weights8;
typedef int16x32 sums4;
typedef struct { __m256i low, high; } halves;

/* Keeps the compiler from adding products in another order, for which it needs more registers than there are. */
INLINE void in_this_order(halves *sums) { __asm__("" : "+x"(sums->low), "+x"(sums->high)); }

INLINE weights8 load_weights8(const uint8_t *p) {
    halves h = {_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(p + 16)))};
    weights8 w;
    memcpy(&w, &h, sizeof w);
    return w;
}
INLINE int32x16 dot8(int32x16 acc, weights8 w, const input8 *x) {
    halves a, b;
    memcpy(&a, &acc, sizeof a);
    memcpy(&b, &w, sizeof b);
    __m256i pair = _mm256_set1_epi32(load_word(x));
    a.low = _mm256_add_epi32(a.low, _mm256_madd_epi16(b.low, pair));
    a.high = _mm256_add_epi32(a.high, _mm256_madd_epi16(b.high, pair));
    in_this_order(&a);
    memcpy(&acc, &a, sizeof a);
    return acc;
}
INLINE sums4 start4(int32_t correction) { (void)correction; return (sums4){0}; }
INLINE sums4 dot4(sums4 acc, uint8x64 w, const int8_t *x) {
    halves a, b;
    memcpy(&a, &acc, sizeof a);
    memcpy(&b, &w, sizeof b);
    __m256i four = _mm256_set1_epi32(load_word(x));
    a.low = _mm256_add_epi16(a.low, _mm256_maddubs_epi16(b.low, four));
    a.high = _mm256_add_epi16(a.high, _mm256_maddubs_epi16(b.high, four));
    in_this_order(&a);
    memcpy(&acc, &a, sizeof a);
    return acc;
}
INLINE int32x16 finish4(sums4 acc, int32_t correction) {
    halves a;
    memcpy(&a, &acc, sizeof a);
    __m256i ones = _mm256_set1_epi16(1);
    a.low = _mm256_madd_epi16(a.low, ones);
    a.high = _mm256_madd_epi16(a.high, ones);
    int32x16 total;
    memcpy(&total, &a, sizeof total);
    return total + correction;
}
#endif

#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>

#define INSTRUCTIONS "NEON dot product"
#define WIDE8 4
#define MOST_ROWS 4
#define MANY_ROWS 4
#define VECTORS(rows) 1
typedef int8_t input8;
typedef uint8x64 weights8;
typedef int32x16 sums4;
typedef struct { int32x4_t part[4]; } quarters;
typedef struct { int8x16_t part[4]; } byte_quarters;

INLINE weights8 load_weights8(const uint8_t *p) { return load_bytes(p); }
/* The instruction multiplies signed bytes; both offsets become signed values of the same bits plus a multiple. */
INLINE int32x16 dot_signed(int32x16 acc, uint8x64 w, const int8_t *x) {
    quarters a;
    byte_quarters b;
    memcpy(&a, &acc, sizeof a);
    memcpy(&b, &w, sizeof b);
    int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(load_word(x)));
    UNROLL for (int i = 0; i < 4; i++) a.part[i] = vdotq_s32(a.part[i], b.part[i], four);
    memcpy(&acc, &a, sizeof a);
    return acc;
}
#define SIGNED_WEIGHTS 1
INLINE int32x16 dot8(int32x16 acc, weights8 w, const input8 *x) { return dot_signed(acc, w ^ 128, x); }
INLINE sums4 start4(int32_t correction) { return splat_int(correction); }
INLINE sums4 dot4(sums4 acc, uint8x64 w, const int8_t *x) { return dot_signed(acc, w, x); }
INLINE int32x16 finish4(sums4 acc, int32_t correction) { (void)correction; return acc; }
#else
#error "no dot products for this instruction set"
#endif

#ifndef SIGNED_WEIGHTS
#define SIGNED_WEIGHTS 0
#endif
