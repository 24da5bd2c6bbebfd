/* Products of rows of activations with a packed matrix of 8-bit or 4-bit weights.

   Outputs are padded to a multiple of PAIR and computed in tiles of 16. A result depends on its row and the matrix
   alone, never on the other rows of the call: every row is summed in the same order.

   Activations are quantized for each row and group of inputs: x ~ scale * q with q in -127 .. 127. The sum over a group
   is exact in integers; sums of groups are float32. */
#pragma once

#include "dot.h"

#define PAIR 32
#define GROUP8 64
#define GROUP4 32

typedef struct {
    const uint8_t *weights; /* as `pack8` or `pack4` writes them */
    const void *scales;     /* 8 bits: float32 of each output; 4 bits: float16 [tile][group][16] */
    const float *bias;      /* of each output, or NULL */
    int64_t outputs;
    int64_t padded;         /* outputs, rounded up to a multiple of PAIR */
    int64_t inputs;         /* a multiple of the group */
    int64_t bits;           /* 8 or 4 */
} Matrix;

/* Rows of quantized activations. */
typedef struct {
    void *values;         /* input8 for 8-bit weights, int8 for 4-bit weights: [row][input] */
    float *scales;        /* [row][group] */
    int32_t *corrections; /* [row][group]: start of the integer sum, which cancels the offset of the weights */
} Activations;

INLINE int64_t group_of(const Matrix *m) { return m->bits == 8 ? GROUP8 : GROUP4; }

/* Quantizes a group of inputs. A group with a value that is not finite gets the scale NaN, so its outputs are NaN. */
INLINE void quantize_group(const float *x, int size, int bits_of_weights, void *values, float *scale, int32_t *correction) {
    int32x16 largest = {0};
    for (int i = 0; i < size; i += LANES) largest = __builtin_elementwise_max(largest, bits(load(x + i)) & 0x7FFFFFFF);
    int32_t most_bits = __builtin_reduce_max(largest);
    float most;
    memcpy(&most, &most_bits, sizeof most);
    int is_finite = most_bits < 0x7F800000;
    float inverse = is_finite && most > 1e-30f ? 127.0f / most : 0.0f;
    int32x16 total = {0};
    for (int i = 0; i < size; i += LANES) {
        /* Adding 1.5 * 2^23 rounds half to even. */
        int32x16 q = bits(load(x + i) * inverse + 12582912.0f) - 0x4B400000;
        total += q;
        if (bits_of_weights == 8 && sizeof(input8) == 2) {
            int16x16 narrow = __builtin_convertvector(q, int16x16);
            memcpy((int16_t *)values + i, &narrow, sizeof narrow);
        } else {
            int8x16 narrow = __builtin_convertvector(q, int8x16);
            memcpy((int8_t *)values + i, &narrow, sizeof narrow);
        }
    }
    *scale = is_finite ? most * (1.0f / 127.0f) : __builtin_nanf("");
    int32_t offset = bits_of_weights == 8 ? (SIGNED_WEIGHTS ? 0 : 128) : 8;
    *correction = -offset * __builtin_reduce_add(total);
}

INLINE int64_t bytes_of(const Matrix *m, int64_t inputs) { return m->bits == 8 ? inputs * (int64_t)sizeof(input8) : inputs; }

/* Quantizes inputs [first, end) of a row, both multiples of the group. */
static void quantize_row(const Matrix *m, const float *x, Activations to, int64_t row, int64_t first, int64_t end) {
    int64_t group = group_of(m), groups = m->inputs / group;
    char *values = (char *)to.values + bytes_of(m, row * m->inputs);
    for (int64_t i = first; i < end; i += group) {
        int64_t g = row * groups + i / group;
        if (m->bits == 8) quantize_group(x + i, GROUP8, 8, values + bytes_of(m, i), to.scales + g, to.corrections + g);
        else quantize_group(x + i, GROUP4, 4, values + i, to.scales + g, to.corrections + g);
    }
}

/* A pass over the weights of a pair of tiles, of which there is one for each MOST_ROWS rows. */
typedef struct {
    int64_t index, passes;
    int64_t weights, scales; /* bytes from those of this pair to those that the thread needs next, as far as known */
} Pass;

/* Whether this pass asks for the part of the next pair's memory where this group is in this pair. The passes divide the
   groups among them, so that the memory is busy all the time. Processors ask for memory ahead by themselves, but no
   further than a page, and wait for a third of the time then. */
INLINE int asks(Pass pass, int64_t group) { return group % pass.passes == pass.index; }

/* Asks for memory that is needed after the current pair of tiles, into the second-level cache. */
INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }

/* Multiplies `rows` rows by `vectors` tiles; both are constants where it is inlined. */
INLINE void tile8(const Matrix *m, int64_t tile, int vectors, int rows, const input8 *x, const float *scales, const int32_t *corrections, Pass pass, float16 (*out)[2]) {
    int64_t inputs = m->inputs, groups = inputs / GROUP8;
    const uint8_t *w = m->weights + tile * LANES * inputs;
    float16 total[MOST_ROWS][2];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) total[r][v] = splat(0);
    for (int64_t g = 0; g < groups; g++) {
        int32x16 acc[MOST_ROWS][2];
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) acc[r][v] = splat_int(corrections[r * groups + g]);
        int64_t next = asks(pass, g) ? pass.weights : 0;
        _Pragma("clang loop unroll(disable)")
        for (int64_t k = g * GROUP8; k < (g + 1) * GROUP8; k += WIDE8) {
            weights8 weights[2];
            UNROLL for (int v = 0; v < vectors; v++) {
                const uint8_t *at = w + (v * inputs + k) * LANES;
                weights[v] = load_weights8(at);
                prefetch(at + next);
            }
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int v = 0; v < vectors; v++) acc[r][v] = dot8(acc[r][v], weights[v], x + r * inputs + k);
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < vectors; v++) total[r][v] += floats(acc[r][v]) * scales[r * groups + g];
    }
    UNROLL for (int v = 0; v < vectors; v++) {
        float16 scale = load((const float *)m->scales + (tile + v) * LANES);
        UNROLL for (int r = 0; r < rows; r++) out[r][v] = total[r][v] * scale;
    }
}

INLINE void tile4(const Matrix *m, int64_t tile, int vectors, int rows, const int8_t *x, const float *scales, const int32_t *corrections, Pass pass, float16 (*out)[2]) {
    int64_t inputs = m->inputs, groups = inputs / GROUP4;
    const uint8_t *w = m->weights + tile * (LANES / 2) * inputs;
    const _Float16 *weight_scales = (const _Float16 *)m->scales + tile * groups * LANES;
    float16 total[MOST_ROWS][2];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) total[r][v] = splat(0);
    for (int64_t g = 0; g < groups; g++) {
        sums4 acc[MOST_ROWS][2];
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) acc[r][v] = start4(corrections[r * groups + g]);
        int64_t next = asks(pass, g) ? pass.weights : 0;
        UNROLL for (int64_t i = 0; i < GROUP4; i += 8) {
            int64_t k = g * GROUP4 + i;
            uint8x64 low[2], high[2];
            UNROLL for (int v = 0; v < vectors; v++) {
                const uint8_t *at = w + (v * inputs + k) * (LANES / 2);
                uint8x64 both = load_bytes(at);
                prefetch(at + next);
                low[v] = both & 15;
                high[v] = both >> 4;
            }
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int v = 0; v < vectors; v++) {
                    acc[r][v] = dot4(acc[r][v], low[v], x + r * inputs + k);
                    acc[r][v] = dot4(acc[r][v], high[v], x + r * inputs + k + 4);
                }
        }
        UNROLL for (int v = 0; v < vectors; v++) {
            const _Float16 *at = weight_scales + (v * groups + g) * LANES;
            float16 scale = load_half(at);
            prefetch((const char *)at + (asks(pass, g) ? pass.scales : 0));
            UNROLL for (int r = 0; r < rows; r++)
                total[r][v] += floats(finish4(acc[r][v], corrections[r * groups + g])) * (scale * scales[r * groups + g]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) out[r][v] = total[r][v];
}

/* Computes the 32 outputs of a pair of tiles for up to MOST_ROWS rows, bias included. */
static void pair_of_tiles(const Matrix *m, int64_t pair, Activations a, int64_t row, int rows, Pass pass, float16 (*out)[2]) {
    int64_t groups = m->inputs / group_of(m);
    const float *scales = a.scales + row * groups;
    const int32_t *corrections = a.corrections + row * groups;
    const void *x = (const char *)a.values + bytes_of(m, row * m->inputs);
#define TILES(kernel, count) \
    UNROLL for (int v = 0; v < 2; v += VECTORS(count)) \
        kernel(m, 2 * pair + v, VECTORS(count), count, x, scales, corrections, pass, (float16 (*)[2])&out[0][v])
#define ROWS(count) \
    case count: \
        if (m->bits == 8) TILES(tile8, count); \
        else TILES(tile4, count); \
        break;
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if MOST_ROWS > 4
        ROWS(5) ROWS(6)
#endif
#if MOST_ROWS > 6
        ROWS(7) ROWS(8)
#endif
    }
#undef ROWS
#undef TILES
    if (m->bias != NULL)
        for (int v = 0; v < 2; v++) {
            float16 bias = load(m->bias + (2 * pair + v) * LANES);
            for (int r = 0; r < rows; r++) out[r][v] += bias;
        }
}

/* What becomes of the outputs. */
enum Result {
    STORE, /* y = x W^T */
    ADD,   /* y += x W^T */
    GATE,  /* tiles alternate between gate and up: y = silu(gate) * up, half as many outputs */
};

/* Where the weights and scales of a pair of tiles are. */
typedef struct { const char *weights, *scales; } Place;

INLINE Place place_of(const Matrix *m, int64_t pair) {
    int64_t inputs = pair * PAIR * m->inputs;
    return (Place){(const char *)m->weights + inputs * m->bits / 8, (const char *)m->scales + (m->bits == 8 ? pair * PAIR * 4 : inputs / GROUP4 * 2)};
}

/* Computes the outputs of pairs [first, end) for rows [row, row_end). `others`: pairs after `end` that other threads
   probably compute. following: what is multiplied after this matrix, or NULL. y has `stride` numbers in a row. */
static void multiply(const Matrix *m, Activations a, int64_t first, int64_t end, int64_t others, const Matrix *following, int64_t row, int64_t row_end, float *y, int64_t stride, enum Result result) {
    int64_t pairs = m->padded / PAIR, passes = (row_end - row + MOST_ROWS - 1) / MOST_ROWS;
    int64_t at_once = passes > 0 ? (row_end - row + passes - 1) / passes : 1;
    for (int64_t pair = first; pair < end; pair++) {
        Place here = place_of(m, pair), next = place_of(m, pair + 1 < end ? pair + 1 : end + others);
        if (end + others >= pairs && pair + 1 == end)
            next = following == NULL ? here : place_of(following, end + others - pairs);
        for (int64_t r0 = row; r0 < row_end; r0 += at_once) {
            float16 out[MOST_ROWS][2];
            int rows = (int)(row_end - r0 < at_once ? row_end - r0 : at_once);
            pair_of_tiles(m, pair, a, r0, rows, (Pass){(r0 - row) / at_once, passes, next.weights - here.weights, next.scales - here.scales}, out);
            for (int r = 0; r < rows; r++) {
                float *at = y + (r0 + r) * stride + pair * (result == GATE ? LANES : PAIR);
                if (result == GATE) {
                    float16 gate = out[r][0];
                    store(at, gate / (1.0f + vexp(-gate)) * out[r][1]);
                } else if (result == ADD) {
                    store(at, load(at) + out[r][0]);
                    store(at + LANES, load(at + LANES) + out[r][1]);
                } else if ((pair + 1) * PAIR <= m->outputs) {
                    store(at, out[r][0]);
                    store(at + LANES, out[r][1]);
                } else {
                    memcpy(at, out[r], (size_t)(m->outputs - pair * PAIR) * sizeof(float));
                }
            }
        }
    }
}

/* Position of an 8-bit weight in the packed matrix. */
INLINE int64_t position8(const Matrix *m, int64_t output, int64_t input) {
    return output / LANES * LANES * m->inputs + input / WIDE8 * LANES * WIDE8 + output % LANES * WIDE8 + input % WIDE8;
}

/* Copies one row of weights, as numbers, to x. */
static void embed(const Matrix *m, int64_t output, float *x) {
    int64_t groups = m->inputs / GROUP4, tile = output / LANES, lane = output % LANES;
    if (m->bits == 8) {
        float scale = ((const float *)m->scales)[output];
        for (int64_t i = 0; i < m->inputs; i++) x[i] = (float)(m->weights[position8(m, output, i)] - 128) * scale;
        return;
    }
    for (int64_t i = 0; i < m->inputs; i++) {
        float scale = (float)((const _Float16 *)m->scales)[(tile * groups + i / GROUP4) * LANES + lane];
        uint8_t both = m->weights[tile * (LANES / 2) * m->inputs + i / 8 * 64 + lane * 4 + i % 4];
        x[i] = (float)((i % 8 < 4 ? both & 15 : both >> 4) - 8) * scale;
    }
}
