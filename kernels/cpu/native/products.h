/* Products of rows of activations with a packed matrix of 8-bit or 4-bit weights.

       w = ((number - offset) * scale + shift) * factor

   Outputs are padded to a multiple of PAIR and computed in tiles of 16. A result depends on its row and the matrix
   alone, never on the other rows of the call: every row is summed in the same order.

   Activations are quantized for each row and group of inputs: x ~ scale * q with q in -127 .. 127. The sum over a group
   is exact in integers; sums of groups are float32. */
#pragma once

#include "dot.h"

#define PAIR 32
#define GROUP 32       /* inputs whose activations share a scale */
#define NARROW_GROUP 16 /* the same of a matrix with a scale for each 16 inputs */
#define WIDE_GROUP 64   /* the same of one with 8 bits and only a factor for each output */

typedef struct {
    const uint8_t *weights; /* as `tessera_pack` writes them, without a sign */
    const _Float16 *scales; /* [tile][scale group][16], each group followed by its 16 shifts if there are any */
    const float *factors;   /* of each output: its scales and shifts are multiplied by it */
    const float *bias;      /* of each output, or NULL */
    int64_t outputs;
    int64_t padded;         /* outputs, rounded up to a multiple of PAIR */
    int64_t inputs;         /* a multiple of the group */
    int64_t bits;           /* 8 or 4 */
    int64_t group;          /* of the activations: GROUP, or with 8 bits NARROW_GROUP, or WIDE_GROUP without scales */
    int64_t scale_groups;   /* scales of an output, one for each 2^group_bits groups; 0 if there are only factors */
    int64_t group_bits;
    int64_t has_shifts;
    int64_t offset;         /* the number that stands for 0, apart from shifts */
} Matrix;

/* Rows of quantized activations. */
typedef struct {
    void *values;         /* input8 for 8-bit weights, int8 for 4-bit weights: [row][input] */
    float *scales;        /* [row][group] */
    float *sums;          /* [row][group]: sums of the activations, which the shifts multiply */
    int32_t *corrections; /* [row][group]: start of the integer sum, which cancels the offset of the weights */
} Activations;

/* Quantizes a group of inputs. A group with a value that is not finite gets the scale NaN, so its outputs are NaN.
   offset: of the weights as they are multiplied. */
INLINE void quantize_group(const float *x, int size, int is_wide, int32_t offset, void *values, float *scale, float *sum, int32_t *correction) {
    int32x16 largest = {0};
    for (int i = 0; i < size; i += LANES) largest = __builtin_elementwise_max(largest, bits(load(x + i)) & 0x7FFFFFFF);
    int32_t most_bits = __builtin_reduce_max(largest);
    if (most_bits >= 0x7F800000) {
        memset(values, 0, (size_t)size * (is_wide ? sizeof(int16_t) : 1));
        *scale = *sum = __builtin_nanf("");
        *correction = 0;
        return;
    }
    float most;
    memcpy(&most, &most_bits, sizeof most);
    float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
    int32x16 total = {0};
    for (int i = 0; i < size; i += LANES) {
        /* Adding 1.5 * 2^23 rounds half to even. */
        int32x16 q = bits(load(x + i) * inverse + 12582912.0f) - 0x4B400000;
        total += q;
        if (is_wide) {
            int16x16 narrow = __builtin_convertvector(q, int16x16);
            memcpy((int16_t *)values + i, &narrow, sizeof narrow);
        } else {
            int8x16 narrow = __builtin_convertvector(q, int8x16);
            memcpy((int8_t *)values + i, &narrow, sizeof narrow);
        }
    }
    int32_t added = __builtin_reduce_add(total);
    *scale = most * (1.0f / 127.0f);
    *sum = (float)added * *scale;
    *correction = -offset * added;
}

INLINE int64_t bytes_of(const Matrix *m, int64_t inputs) { return m->bits == 8 ? inputs * (int64_t)sizeof(input8) : inputs; }

/* Quantizes inputs [first, end) of a row, both multiples of the group. */
static void quantize_row(const Matrix *m, const float *x, Activations to, int64_t row, int64_t first, int64_t end) {
    int64_t groups = m->inputs / m->group;
    int is_wide = m->bits == 8 && sizeof(input8) == 2;
    int32_t offset = (int32_t)m->offset - (m->bits == 8 && SIGNED_WEIGHTS ? 128 : 0);
    char *values = (char *)to.values + bytes_of(m, row * m->inputs);
    for (int64_t i = first; i < end; i += m->group) {
        int64_t g = row * groups + i / m->group;
        void *at = values + bytes_of(m, i);
        if (m->group == GROUP) quantize_group(x + i, GROUP, is_wide, offset, at, to.scales + g, to.sums + g, to.corrections + g);
        else if (m->group == WIDE_GROUP) quantize_group(x + i, WIDE_GROUP, is_wide, offset, at, to.scales + g, to.sums + g, to.corrections + g);
        else quantize_group(x + i, NARROW_GROUP, is_wide, offset, at, to.scales + g, to.sums + g, to.corrections + g);
    }
}

/* Scales and shifts of an output. */
INLINE int64_t scales_of(const Matrix *m) { return m->scale_groups * (1 + m->has_shifts); }

/* A pass over the weights of a pair of tiles with a few of the rows. */
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

/* What differs between products; constants where `tile` is inlined. */
typedef struct {
    int bits, group;
    int by_row;     /* without scales besides the factors */
    int has_shifts;
} Kind;

/* Starts integer sums with corrections and adds the products of a group; those of 4 bits have to be finished. */
INLINE void add_group8(Kind kind, int64_t inputs, int64_t groups, int64_t g, const uint8_t *w, int vectors, int rows, const input8 *x, const int32_t *corrections, int64_t next, int32x16 (*acc)[2]) {
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) acc[r][v] = splat_int(corrections[r * groups + g]);
    UNROLL for (int64_t i = 0; i < kind.group; i += WIDE8) {
        int64_t k = g * kind.group + i;
        weights8 weights[2];
        UNROLL for (int v = 0; v < vectors; v++) {
            const uint8_t *at = w + (v * inputs + k) * LANES;
            weights[v] = load_weights8(at);
            prefetch(at + next);
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < vectors; v++) acc[r][v] = dot8(acc[r][v], weights[v], x + r * inputs + k);
    }
}

INLINE void add_group4(int64_t inputs, int64_t groups, int64_t g, const uint8_t *w, int vectors, int rows, const int8_t *x, const int32_t *corrections, int64_t next, sums4 (*acc)[2]) {
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) acc[r][v] = start4(corrections[r * groups + g]);
    UNROLL for (int64_t i = 0; i < GROUP; i += 8) {
        int64_t k = g * GROUP + i;
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
}

/* Multiplies `rows` rows by `vectors` tiles; both are constants where it is inlined. */
INLINE void tile(Kind kind, const Matrix *m, int64_t tile, int vectors, int rows, const void *x, Activations a, Pass pass, float16 (*out)[2]) {
    int64_t inputs = m->inputs, groups = inputs / kind.group, of_tile = scales_of(m) * LANES, of_group = LANES * (1 + kind.has_shifts);
    const uint8_t *w = m->weights + tile * LANES * inputs * kind.bits / 8;
    const _Float16 *weight_scales = m->scales + tile * of_tile;
    float16 total[MOST_ROWS][2];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) total[r][v] = splat(0);
    for (int64_t g = 0; g < groups; g++) {
        int32x16 acc8[MOST_ROWS][2];
        sums4 acc4[MOST_ROWS][2];
        int64_t next = asks(pass, g) ? pass.weights : 0;
        /* Before the products, which a branch among them would slow down. Scales of two groups share a line of the cache. */
        if (!kind.by_row && pass.index == 0 && (kind.has_shifts || g % 2 == 0))
            UNROLL for (int v = 0; v < vectors; v++) prefetch((const char *)(weight_scales + v * of_tile + (g >> m->group_bits) * of_group) + pass.scales);
        if (kind.bits == 8) add_group8(kind, inputs, groups, g, w, vectors, rows, x, a.corrections, next, acc8);
        else add_group4(inputs, groups, g, w, vectors, rows, x, a.corrections, next, acc4);
#define SUM(r, v) floats(kind.bits == 8 ? acc8[r][v] : finish4(acc4[r][v], a.corrections[(r) * groups + g]))
        UNROLL for (int v = 0; v < vectors; v++) {
            if (kind.by_row) {
                UNROLL for (int r = 0; r < rows; r++) total[r][v] += SUM(r, v) * a.scales[r * groups + g];
                continue;
            }
            const _Float16 *at = weight_scales + v * of_tile + (g >> m->group_bits) * of_group;
            float16 scale = load_half(at);
            UNROLL for (int r = 0; r < rows; r++) total[r][v] += SUM(r, v) * (scale * a.scales[r * groups + g]);
            if (!kind.has_shifts) continue;
            float16 shift = load_half(at + LANES);
            UNROLL for (int r = 0; r < rows; r++) total[r][v] += shift * a.sums[r * groups + g];
        }
#undef SUM
    }
    UNROLL for (int v = 0; v < vectors; v++) {
        float16 factor = load(m->factors + (tile + v) * LANES);
        UNROLL for (int r = 0; r < rows; r++) out[r][v] = total[r][v] * factor;
    }
}

/* Computes the 32 outputs of a pair of tiles for up to MOST_ROWS rows, bias excluded. */
INLINE void two_tiles(Kind kind, const Matrix *m, int64_t pair, Activations a, int64_t row, int rows, Pass pass, float16 (*out)[2]) {
    int64_t groups = m->inputs / kind.group;
    const void *x = (const char *)a.values + bytes_of(m, row * m->inputs);
    a.scales += row * groups;
    a.sums += row * groups;
    a.corrections += row * groups;
#define ROWS(count) \
    case count: \
        UNROLL for (int v = 0; v < 2; v += VECTORS(count)) \
            tile(kind, m, 2 * pair + v, VECTORS(count), count, x, a, pass, (float16 (*)[2])&out[0][v]); \
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
}

typedef void Tiles(const Matrix *m, int64_t pair, Activations a, int64_t row, int rows, Pass pass, float16 (*out)[2]);

#define KIND(name, ...) \
    static void name(const Matrix *m, int64_t pair, Activations a, int64_t row, int rows, Pass pass, float16 (*out)[2]) { \
        two_tiles((Kind){__VA_ARGS__}, m, pair, a, row, rows, pass, out); \
    }
KIND(tiles8_by_row, 8, WIDE_GROUP, 1, 0)
KIND(tiles8, 8, GROUP, 0, 0)
KIND(tiles8_shifted, 8, GROUP, 0, 1)
KIND(tiles8_narrow, 8, NARROW_GROUP, 0, 0)
KIND(tiles8_narrow_shifted, 8, NARROW_GROUP, 0, 1)
KIND(tiles4, 4, GROUP, 0, 0)
KIND(tiles4_shifted, 4, GROUP, 0, 1)
#undef KIND

static Tiles *tiles_of(const Matrix *m) {
    if (m->bits == 4) return m->has_shifts ? tiles4_shifted : tiles4;
    if (m->group == NARROW_GROUP) return m->has_shifts ? tiles8_narrow_shifted : tiles8_narrow;
    if (m->has_shifts) return tiles8_shifted;
    return m->scale_groups == 0 ? tiles8_by_row : tiles8;
}

/* What becomes of the outputs. */
enum Result {
    STORE,      /* y = x W^T */
    ADD,        /* y += x W^T */
    GATE,       /* tiles alternate between gate and up: y = silu(gate) * up, half as many outputs */
    GATE_GELU,  /* the same with the approximation of GELU by tanh */
    STORE_GELU, /* y = gelu(x W^T), likewise */
};

INLINE float16 silu(float16 x) { return x / (1.0f + vexp(-x)); }

/* Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016: x / 2 (1 + tanh(u)) = x / (1 + e^-2u). */
INLINE float16 gelu(float16 x) {
    float16 twice = x * (1.59576912f + 0.0713548163f * (x * x));
    return x / (1.0f + vexp(-twice));
}

/* Where the weights and scales of a pair of tiles are. */
typedef struct { const char *weights, *scales; } Place;

INLINE Place place_of(const Matrix *m, int64_t pair) {
    return (Place){(const char *)m->weights + pair * PAIR * m->inputs * m->bits / 8, (const char *)(m->scales + pair * PAIR * scales_of(m))};
}

/* Computes the outputs of pairs [first, end) for rows [row, row_end). `others`: pairs after `end` that other threads
   probably compute. following: what is multiplied after this matrix, or NULL. y has `stride` numbers in a row. added: what
   is added to gates, [row][stride], and then to the other outputs before they are multiplied; NULL for nothing. */
static void multiply(const Matrix *m, Activations a, int64_t first, int64_t end, int64_t others, const Matrix *following, int64_t row, int64_t row_end, float *y, int64_t stride, enum Result result, const float *added) {
    Tiles *tiles = tiles_of(m);
    int is_gated = result == GATE || result == GATE_GELU;
    int64_t pairs = m->padded / PAIR, count = row_end - row;
    int64_t most = count <= MOST_ROWS || m->scale_groups == 0 ? MOST_ROWS : MANY_ROWS, passes = (count + most - 1) / most;
    int64_t at_once = passes > 0 ? (count + passes - 1) / passes : 1;
    for (int64_t pair = first; pair < end; pair++) {
        Place here = place_of(m, pair), next = place_of(m, pair + 1 < end ? pair + 1 : end + others);
        if (end + others >= pairs && pair + 1 == end)
            next = following == NULL ? here : place_of(following, end + others - pairs);
        for (int64_t r0 = row; r0 < row_end; r0 += at_once) {
            float16 out[MOST_ROWS][2];
            int rows = (int)(row_end - r0 < at_once ? row_end - r0 : at_once);
            tiles(m, pair, a, r0, rows, (Pass){(r0 - row) / at_once, passes, next.weights - here.weights, next.scales - here.scales}, out);
            for (int v = 0; v < 2 && m->bias != NULL; v++) {
                float16 bias = load(m->bias + (2 * pair + v) * LANES);
                for (int r = 0; r < rows; r++) out[r][v] += bias;
            }
            for (int r = 0; r < rows; r++) {
                float *at = y + (r0 + r) * stride + pair * (is_gated ? LANES : PAIR);
                if (result == STORE_GELU)
                    for (int v = 0; v < 2; v++) out[r][v] = gelu(out[r][v]);
                if (is_gated) {
                    float16 gate = out[r][0], up = out[r][1];
                    if (added != NULL) {
                        const float *more = added + (r0 + r) * 2 * stride + pair * LANES;
                        gate += load(more);
                        up += load(more + stride);
                    }
                    store(at, (result == GATE ? silu(gate) : gelu(gate)) * up);
                } else if ((pair + 1) * PAIR <= m->outputs) {
                    for (int v = 0; v < 2; v++) store(at + v * LANES, result == ADD ? load(at + v * LANES) + out[r][v] : out[r][v]);
                } else if (result == ADD) {
                    const float *sums = (const float *)out[r];
                    for (int64_t i = 0; i < m->outputs - pair * PAIR; i++) at[i] += sums[i];
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

/* Position of two 4-bit weights: of `input`, if input % 8 < 4, in the low half, and of input + 4 in the high half. */
INLINE int64_t position4(const Matrix *m, int64_t output, int64_t input) {
    return output / LANES * (LANES / 2) * m->inputs + input / 8 * 64 + output % LANES * 4 + input % 4;
}

/* Index of a scale among all; its shift is LANES further. */
INLINE int64_t index_of_scale(const Matrix *m, int64_t output, int64_t scale_group) {
    return (output / LANES * m->scale_groups + scale_group) * (1 + m->has_shifts) * LANES + output % LANES;
}

/* Copies one row of weights, as numbers, to x. */
static void embed(const Matrix *m, int64_t output, float *x) {
    for (int64_t i = 0; i < m->inputs; i += m->group) {
        int64_t index = index_of_scale(m, output, i / m->group >> m->group_bits);
        float scale = m->scale_groups == 0 ? 1.0f : (float)m->scales[index], shift = m->has_shifts ? (float)m->scales[index + LANES] : 0.0f;
        for (int64_t j = i; j < i + m->group; j++) {
            int number = m->bits == 8 ? m->weights[position8(m, output, j)] : m->weights[position4(m, output, j)] >> (j % 8 < 4 ? 0 : 4) & 15;
            x[j] = ((float)(number - (int)m->offset) * scale + shift) * m->factors[output];
        }
    }
}
