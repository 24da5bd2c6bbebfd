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

/* The largest score of a row so far. 0 if one is NaN: then exp(NaN) makes the row NaN. */
INLINE float largest_of(float16 scores, float before) {
    int32x16 is_nan = scores != scores;
    if (__builtin_reduce_or(is_nan) != 0) return 0;
    float largest = before;
    float parts[LANES];
    store(parts, vmax(scores, __builtin_shufflevector(scores, scores, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)));
    for (int i = 0; i < LANES / 2; i++) largest = parts[i] > largest ? parts[i] : largest;
    return largest;
}

/* Adds up to 8 vectors of the head dim at a time, so that the sums stay in registers. */
INLINE void add_values(const float *p, const float *values, int64_t count, int64_t dim, float alpha, float *out) {
    int64_t d = 0;
#define COLUMNS(n) \
    for (; d + (n) * LANES <= dim; d += (n) * LANES) { \
        float16 acc[n]; \
        UNROLL for (int i = 0; i < (n); i++) acc[i] = load(out + d + i * LANES) * alpha; \
        for (int64_t j = 0; j < count; j++) { \
            UNROLL for (int i = 0; i < (n); i++) acc[i] += load(values + j * dim + d + i * LANES) * p[j]; \
        } \
        UNROLL for (int i = 0; i < (n); i++) store(out + d + i * LANES, acc[i]); \
    }
    COLUMNS(4)
    COLUMNS(2)
    COLUMNS(1)
#undef COLUMNS
}

/* Scores of one row with up to 32 keys; those beyond `count` are undefined. */
INLINE void score(const float *q, const float *keys, int64_t count, int64_t dim, float *scores) {
    for (int64_t first = 0; first < count; first += LANES) {
        const float *k = keys + first * dim;
        float16 parts[LANES];
        if (count - first >= LANES) {
            UNROLL for (int j = 0; j < LANES; j++) parts[j] = load(q) * load(k + j * dim);
            for (int64_t d = LANES; d < dim; d += LANES) {
                float16 x = load(q + d);
                UNROLL for (int j = 0; j < LANES; j++) parts[j] += x * load(k + j * dim + d);
            }
        } else {
            for (int j = 0; j < LANES; j++) {
                parts[j] = splat(0);
                if (first + j >= count) continue;
                parts[j] = load(q) * load(k + j * dim);
                for (int64_t d = LANES; d < dim; d += LANES) parts[j] += load(q + d) * load(k + j * dim + d);
            }
        }
        store(scores + first, sum_each(parts));
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
        for (int64_t r = 0; r < tokens * group; r++) {
            int64_t at = position + r / group;
            int64_t last = at + 1 < to ? at + 1 : to;                                  /* after the last visible key */
            int64_t start = window > 0 && at - window + 1 > from ? at - window + 1 : from; /* the first one */
            alphas[r] = -1;
            if (start >= last) continue;
            score(q + r / group * q_stride + r % group * dim, block, last - from, dim, scores[r]);
            float16 low = visible(load(scores[r]), start - from, last - from);
            float16 high = visible(load(scores[r] + LANES), start - from - LANES, last - from - LANES);
            float largest = largest_of(vmax(low, high), most[r]);
            alphas[r] = most[r] == largest ? 1.0f : vexp(splat(most[r] - largest))[0];
            most[r] = largest;
            low = vexp(low - largest);
            high = vexp(high - largest);
            store(scores[r], low);
            store(scores[r] + LANES, high);
            sums[r] = sums[r] * alphas[r] + sum(low + high);
        }
        read_heads(cache, cache->values, table, kv_head, from, to, block);
        for (int64_t r = 0; r < tokens * group; r++) {
            if (alphas[r] < 0) continue;
            int64_t visible_keys = position + r / group + 1 - from;
            add_values(scores[r], block, visible_keys < to - from ? visible_keys : to - from, dim, alphas[r], out + r / group * out_stride + r % group * dim);
        }
        from = to;
    }
    for (int64_t r = 0; r < tokens * group; r++) {
        float *row = out + r / group * out_stride + r % group * dim;
        float inverse = 1.0f / sums[r];
        for (int64_t d = 0; d < dim; d += LANES) store(row + d, load(row + d) * inverse);
    }
}
