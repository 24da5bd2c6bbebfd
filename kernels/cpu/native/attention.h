/* Attention of a few rows over the paged cache.

   A row is a query head of a token. Keys are read in blocks that begin at multiples of KEYS, with an online softmax, so
   a row's result depends only on its own position: not on the other rows, on how a prompt was divided into chunks, or on
   whether it was computed as a prompt or as a decode step.
   Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1; PagedAttention (arXiv 2309.06180) for the block table. */
#pragma once

#include "vectors.h"

#define KEYS 32
#define MOST_HEAD_DIM 256
#define MOST_QUERY_ROWS 16

/* One layer's cache, [2, blocks, block_size, kv_heads, head_dim]: keys, then values. */
typedef struct {
    void *keys;
    void *values;
    int64_t is_half; /* float16; else float32 */
    int64_t block_size;
    int64_t kv_heads;
    int64_t head_dim;
} Cache;

INLINE void write_head(const Cache *cache, void *half_of_cache, int64_t slot, int64_t head, const float *x) {
    int64_t first = (slot * cache->kv_heads + head) * cache->head_dim;
    for (int64_t i = 0; i < cache->head_dim; i += LANES) {
        if (cache->is_half) {
            /* float16 has no number above 65504. NaN stays NaN. */
            float16 v = load(x + i), limited = vmax(vmin(v, splat(65504.0f)), splat(-65504.0f));
            int32x16 is_nan = v != v;
            v = from_bits((bits(limited) & ~is_nan) | (bits(v) & is_nan));
            half16 narrow = __builtin_convertvector(v, half16);
            memcpy((_Float16 *)half_of_cache + first + i, &narrow, sizeof narrow);
        } else {
            store((float *)half_of_cache + first + i, load(x + i));
        }
    }
}

/* Copies the keys or values of positions [first, end) of a head as float32: [KEYS][head_dim]. */
INLINE void read_heads(const Cache *cache, const void *half_of_cache, const int32_t *table, int64_t head, int64_t first, int64_t end, float *to) {
    int64_t dim = cache->head_dim, stride = cache->kv_heads * dim;
    for (int64_t position = first; position < end;) {
        int64_t offset = position % cache->block_size;
        int64_t slot = table[position / cache->block_size] * cache->block_size + offset;
        int64_t run = cache->block_size - offset < end - position ? cache->block_size - offset : end - position;
        int64_t from = slot * stride + head * dim;
        for (int64_t i = 0; i < run; i++, from += stride, to += dim)
            for (int64_t d = 0; d < dim; d += LANES) {
                if (cache->is_half) store(to + d, load_half((const _Float16 *)half_of_cache + from + d));
                else store(to + d, load((const float *)half_of_cache + from + d));
            }
        position += run;
    }
}

/* Asks for the keys and values of positions [first, end), whose addresses the processor cannot guess. */
INLINE void prefetch_heads(const Cache *cache, const int32_t *table, int64_t head, int64_t first, int64_t end) {
    int64_t size = cache->is_half ? 2 : 4, bytes = cache->head_dim * size;
    for (int64_t position = first; position < end; position++) {
        int64_t slot = table[position / cache->block_size] * cache->block_size + position % cache->block_size;
        int64_t from = (slot * cache->kv_heads + head) * bytes;
        for (int64_t i = 0; i < bytes; i += 64) {
            __builtin_prefetch((const char *)cache->keys + from + i);
            __builtin_prefetch((const char *)cache->values + from + i);
        }
    }
}

/* Scores of keys [start, end) of 16; -infinity for the others. */
INLINE float16 visible(float16 scores, int64_t start, int64_t end) {
    const int32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int32x16 seen = (lane >= (int32_t)start) & (lane < (int32_t)end);
    return from_bits((bits(scores) & seen) | (bits(splat(-__builtin_inff())) & ~seen));
}

/* The largest score of a row so far. 0 if one is NaN: exp(NaN) then makes the row NaN. */
INLINE float largest_of(float16 low, float16 high, float before) {
    int32x16 is_nan = (low != low) | (high != high);
    float16 scores = vmax(low, high);
    if (__builtin_reduce_or(is_nan) != 0) return 0;
    float largest = before;
    float parts[LANES];
    store(parts, vmax(scores, __builtin_shufflevector(scores, scores, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)));
    for (int i = 0; i < LANES / 2; i++) largest = parts[i] > largest ? parts[i] : largest;
    return largest;
}

/* out = out * alpha + p V for `rows` query heads of a token, a few vectors of the head dim at a time, so that the sums
   stay in registers. p: [row][KEYS]; out: [row][dim]. */
INLINE void add_values(int rows, const float *p, const float *values, int64_t count, int64_t dim, const float *alpha, float *out) {
    int64_t d = 0;
#define COLUMNS(n) \
    for (; d + (n) * LANES <= dim; d += (n) * LANES) { \
        float16 acc[2][n]; \
        UNROLL for (int r = 0; r < rows; r++) \
            UNROLL for (int i = 0; i < (n); i++) acc[r][i] = load(out + r * dim + d + i * LANES) * alpha[r]; \
        for (int64_t j = 0; j < count; j++) { \
            float16 v[n]; \
            UNROLL for (int i = 0; i < (n); i++) v[i] = load(values + j * dim + d + i * LANES); \
            UNROLL for (int r = 0; r < rows; r++) \
                UNROLL for (int i = 0; i < (n); i++) acc[r][i] += v[i] * p[r * KEYS + j]; \
        } \
        UNROLL for (int r = 0; r < rows; r++) \
            UNROLL for (int i = 0; i < (n); i++) store(out + r * dim + d + i * LANES, acc[r][i]); \
    }
    COLUMNS(4)
    COLUMNS(2)
    COLUMNS(1)
#undef COLUMNS
}

/* Scores of `rows` query heads of a token with up to 32 keys; those beyond `count` are undefined. q: [row][dim];
   scores: [row][KEYS]. */
INLINE void score(int rows, const float *q, const float *keys, int64_t count, int64_t dim, float *scores) {
    const int at_once = LANES / rows;
    for (int64_t first = 0; first < count; first += at_once) {
        float16 parts[LANES];
        int found = (int)(count - first < at_once ? count - first : at_once);
        if (found == at_once) {
            UNROLL for (int j = 0; j < at_once; j++) {
                float16 k = load(keys + (first + j) * dim);
                UNROLL for (int r = 0; r < rows; r++) parts[r * at_once + j] = load(q + r * dim) * k;
            }
            for (int64_t d = LANES; d < dim; d += LANES) {
                UNROLL for (int j = 0; j < at_once; j++) {
                    float16 k = load(keys + (first + j) * dim + d);
                    UNROLL for (int r = 0; r < rows; r++) parts[r * at_once + j] += load(q + r * dim + d) * k;
                }
            }
        } else {
            for (int i = 0; i < LANES; i++) parts[i] = splat(0);
            for (int j = 0; j < found; j++)
                for (int r = 0; r < rows; r++) {
                    float16 part = load(q + r * dim) * load(keys + (first + j) * dim);
                    for (int64_t d = LANES; d < dim; d += LANES) part += load(q + r * dim + d) * load(keys + (first + j) * dim + d);
                    parts[r * at_once + j] = part;
                }
        }
        float16 sums = sum_each(parts);
        for (int r = 0; r < rows; r++) memcpy(scores + r * KEYS + first, (const float *)&sums + r * at_once, (size_t)at_once * sizeof(float));
    }
}

/* Attention of `tokens` neighbouring tokens and the `group` query heads of one key-value head.

   q: [tokens][q_stride], its heads at q + head * head_dim, scaled. out: [tokens][out_stride]. The first token is at
   `position`; keys up to each token's own position are in the cache. window: tokens that a token attends to, itself
   included; 0 for all. */
static void attend(const Cache *cache, const int32_t *table, int64_t kv_head, int64_t group, const float *q, int64_t q_stride, int64_t tokens, int64_t position, int64_t window, float *out, int64_t out_stride) {
    int64_t dim = cache->head_dim;
    /* Keys, then values: both at once do not fit the first-level cache. */
    float block[KEYS * MOST_HEAD_DIM] __attribute__((aligned(64)));
    float scores[MOST_QUERY_ROWS][KEYS] __attribute__((aligned(64)));
    float sums[MOST_QUERY_ROWS], most[MOST_QUERY_ROWS], alphas[MOST_QUERY_ROWS];
    for (int64_t r = 0; r < tokens * group; r++) {
        sums[r] = 0;
        most[r] = -__builtin_inff();
        memset(out + r / group * out_stride + r % group * dim, 0, (size_t)dim * sizeof(float));
    }
    int64_t first = window > 0 && position - window + 1 > 0 ? position - window + 1 : 0;
    int64_t end = position + tokens;
    for (int64_t from = first; from < end;) {
        int64_t to = (from / KEYS + 1) * KEYS < end ? (from / KEYS + 1) * KEYS : end;
        prefetch_heads(cache, table, kv_head, to, to + KEYS < end ? to + KEYS : end);
        read_heads(cache, cache->keys, table, kv_head, from, to, block);
        for (int64_t t = 0; t < tokens; t++) {
            int64_t at = position + t;
            int64_t last = at + 1 < to ? at + 1 : to;                                  /* after the last visible key */
            int64_t start = window > 0 && at - window + 1 > from ? at - window + 1 : from; /* the first one */
            if (start >= last) continue;
            for (int64_t h = 0; h < group; h += 2) {
                const float *heads = q + t * q_stride + h * dim;
                if (h + 1 < group) score(2, heads, block, last - from, dim, scores[t * group + h]);
                else score(1, heads, block, last - from, dim, scores[t * group + h]);
            }
            for (int64_t r = t * group; r < (t + 1) * group; r++) {
                float16 low = visible(load(scores[r]), start - from, last - from);
                float16 high = visible(load(scores[r] + LANES), start - from - LANES, last - from - LANES);
                float largest = largest_of(low, high, most[r]);
                alphas[r] = most[r] == largest ? 1.0f : vexp(splat(most[r] - largest))[0];
                most[r] = largest;
                low = vexp(low - largest);
                high = vexp(high - largest);
                store(scores[r], low);
                store(scores[r] + LANES, high);
                sums[r] = sums[r] * alphas[r] + sum(low + high);
            }
        }
        read_heads(cache, cache->values, table, kv_head, from, to, block);
        for (int64_t t = 0; t < tokens; t++) {
            int64_t at = position + t, last = at + 1 < to ? at + 1 : to;
            if ((window > 0 && at - window + 1 > from ? at - window + 1 : from) >= last) continue;
            for (int64_t h = 0; h < group; h += 2) {
                int64_t r = t * group + h;
                float *rows = out + t * out_stride + h * dim;
                if (h + 1 < group) add_values(2, scores[r], block, last - from, dim, alphas + r, rows);
                else add_values(1, scores[r], block, last - from, dim, alphas + r, rows);
            }
        }
        from = to;
    }
    for (int64_t r = 0; r < tokens * group; r++) {
        float *row = out + r / group * out_stride + r % group * dim;
        float inverse = 1.0f / sums[r];
        for (int64_t d = 0; d < dim; d += LANES) store(row + d, load(row + d) * inverse);
    }
}
