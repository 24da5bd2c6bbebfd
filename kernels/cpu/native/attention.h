/* Attention of a few rows over the paged cache.

   A row is a query head of a token. Keys are read in blocks that begin at multiples of KEYS, with an online softmax; a
   score is summed over the head dim in order, and an output over the keys in order. So a row's result depends only on
   its own position: not on the other rows, on how a prompt was divided into chunks, or on whether it was computed as a
   prompt or as a decode step.
   Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1; PagedAttention (arXiv 2309.06180) for the block table. */
#pragma once

#include "vectors.h"

#define KEYS 32
#define MOST_HEAD_DIM 256
#define MOST_QUERY_ROWS 16

/* Rows whose scores or outputs are accumulated in registers at once, and vectors of 16 lanes that the registers hold. */
#if defined(__AVX512F__)
#define ACCUMULATORS 16
#define MOST_SCORED 8
#define SCORED UP_TO_8
#define MOST_ADDED 4
#define ADDED UP_TO_4
#else
#define ACCUMULATORS 4
#define MOST_SCORED 2
#define SCORED UP_TO_2
#define MOST_ADDED 2
#define ADDED UP_TO_2
#endif

/* Cases of a switch over the number of rows, which is then a constant. */
#define UP_TO_2 ROWS(1) ROWS(2)
#define UP_TO_4 UP_TO_2 ROWS(3) ROWS(4)
#define UP_TO_8 UP_TO_4 ROWS(5) ROWS(6) ROWS(7) ROWS(8)

/* For up to so many rows, numbers are converted to float32 where they are used, for more once before. */
#define MOST_DIRECT 4

/* One layer's cache: for keys and for values, the blocks in order, and in each its key-value heads. A head's values are
   [block_size][head_dim]. Its keys are [block_size / tile][head_dim][tile], so that a vector holds one number of 16 keys
   and scores need no sums across lanes. Where `by_token`, in float32 alone, the library only reads the cache, in which
   keys and values of a block are [block_size][kv_heads][head_dim]; tiles of keys are transposed then. */
typedef struct {
    void *keys;
    void *values;
    int64_t is_half; /* float16; else float32 */
    int64_t block_size;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t by_token;
} Cache;

/* Sequences with neighbouring rows. */
typedef struct {
    int64_t count, columns;
    int64_t queries; /* of decode rows: the most rows of a sequence; `count * queries` rows are theirs */
    const int32_t *first_row; /* [count + 1], in the rows of these sequences */
    const int32_t *lengths;   /* [count], tokens of the sequence, these rows included; 0 for an unused one */
    const int32_t *tables;    /* [count][columns] */
} Sequences;

/* What becomes of scores before their softmax. */
typedef struct {
    float scale;   /* multiplies queries */
    float softcap; /* scores are softcap * tanh(score / softcap); 0 for none */
    int64_t window; /* tokens that a token attends to, itself included; 0 for all */
} Scores;

/* Keys in a tile: the largest power of two up to 16 that divides the block size. */
INLINE int64_t tile_of(const Cache *cache) {
    int64_t power = cache->block_size & -cache->block_size;
    return power < LANES ? power : LANES;
}

/* Index of the first number of a head in a block. */
INLINE int64_t head_in_block(const Cache *cache, int64_t block, int64_t head) {
    return (block * cache->kv_heads + head) * cache->block_size * cache->head_dim;
}

INLINE float16 number(const void *p, int64_t index, int is_half) {
    return is_half ? load_half((const _Float16 *)p + index) : load((const float *)p + index);
}

INLINE const void *address(const void *p, int64_t index, int is_half) { return (const char *)p + index * (is_half ? 2 : 4); }

/* float16 has no number above 65504: larger ones are limited. NaN stays NaN. */
INLINE half16 limited(float16 v) {
    float16 inside = vmax(vmin(v, splat(65504.0f)), splat(-65504.0f));
    int32x16 is_nan = v != v;
    return __builtin_convertvector(from_bits((bits(inside) & ~is_nan) | (bits(v) & is_nan)), half16);
}

/* Writes the key and the value of a token. */
INLINE void write_head(const Cache *cache, int64_t slot, int64_t head, const float *key, const float *value) {
    int64_t dim = cache->head_dim, tile = tile_of(cache), offset = slot % cache->block_size;
    int64_t first = head_in_block(cache, slot / cache->block_size, head);
    int64_t of_key = first + offset / tile * tile * dim + offset % tile, of_value = first + offset * dim;
    for (int64_t i = 0; i < dim; i += LANES) {
        if (cache->is_half) {
            half16 narrow = limited(load(key + i));
            for (int64_t j = 0; j < LANES; j++) ((_Float16 *)cache->keys)[of_key + (i + j) * tile] = narrow[j];
            narrow = limited(load(value + i));
            memcpy((_Float16 *)cache->values + of_value + i, &narrow, sizeof narrow);
        } else {
            for (int64_t j = 0; j < LANES; j++) ((float *)cache->keys)[of_key + (i + j) * tile] = key[i + j];
            store((float *)cache->values + of_value + i, load(value + i));
        }
    }
}

/* Where the keys or values of 16 positions are. */
typedef struct {
    const void *at; /* keys: [head_dim][LANES]; values: [LANES][head_dim] */
    int is_half;
} Tile;

/* A tile in the cache; only for tiles of 16 keys. */
INLINE Tile tile_in_cache(const Cache *cache, const void *half_of_cache, const int32_t *table, int64_t head, int64_t position) {
    int64_t first = head_in_block(cache, table[position / cache->block_size], head);
    int is_half = cache->is_half != 0;
    return (Tile){address(half_of_cache, first + position % cache->block_size * cache->head_dim, is_half), is_half};
}

/* The numbers of a token's head where the cache is `by_token`. */
INLINE const float *head_of_token(const Cache *cache, const void *half_of_cache, const int32_t *table, int64_t head, int64_t position) {
    int64_t slot = table[position / cache->block_size] * cache->block_size + position % cache->block_size;
    return (const float *)half_of_cache + (slot * cache->kv_heads + head) * cache->head_dim;
}

/* Transposes 16 vectors: interleaving the two halves rotates the bits of row and column by one, four times by four. */
INLINE void transpose(float16 v[LANES]) {
    UNROLL for (int round = 0; round < 4; round++) {
        float16 w[LANES];
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            float16 a = v[i], b = v[i + LANES / 2];
            w[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            w[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        UNROLL for (int i = 0; i < LANES; i++) v[i] = w[i];
    }
}

/* `copy_keys` where the cache is `by_token`; others of the 16 keys are zeros. */
static void transpose_keys(const Cache *cache, const int32_t *table, int64_t head, int64_t base, int64_t first, int64_t end, float *to) {
    const float *keys[LANES];
    for (int64_t i = 0; i < LANES; i++) keys[i] = base + i >= first && base + i < end ? head_of_token(cache, cache->keys, table, head, base + i) : NULL;
    for (int64_t d = 0; d < cache->head_dim; d += LANES) {
        float16 v[LANES];
        for (int i = 0; i < LANES; i++) v[i] = keys[i] == NULL ? splat(0) : load(keys[i] + d);
        transpose(v);
        for (int i = 0; i < LANES; i++) store(to + (d + i) * LANES, v[i]);
    }
}

/* Copies the keys of positions [first, end) of the 16 from `base` on to a tile in float32. */
INLINE void copy_keys(const Cache *cache, const int32_t *table, int64_t head, int64_t base, int64_t first, int64_t end, float *to) {
    int64_t dim = cache->head_dim, tile = tile_of(cache);
    if (cache->by_token) {
        transpose_keys(cache, table, head, base, first, end, to);
        return;
    }
    if (tile == LANES) {
        Tile from = tile_in_cache(cache, cache->keys, table, head, base);
        for (int64_t i = 0; i < dim * LANES; i += LANES) store(to + i, number(from.at, i, from.is_half));
        return;
    }
    for (int64_t p = first; p < end; p++) {
        int64_t offset = p % cache->block_size;
        int64_t from = head_in_block(cache, table[p / cache->block_size], head) + offset / tile * tile * dim + offset % tile;
        for (int64_t d = 0; d < dim; d++) {
            int64_t i = from + d * tile;
            to[d * LANES + p - base] = cache->is_half ? (float)((const _Float16 *)cache->keys)[i] : ((const float *)cache->keys)[i];
        }
    }
}

/* Copies the values of positions [first, end) to a tile in float32. */
INLINE void copy_values(const Cache *cache, const int32_t *table, int64_t head, int64_t first, int64_t end, float *to) {
    int64_t dim = cache->head_dim;
    for (int64_t p = first; p < end && cache->by_token; p++) {
        memcpy(to + (p - first) * dim, head_of_token(cache, cache->values, table, head, p), (size_t)dim * sizeof(float));
    }
    for (int64_t p = first; p < end && !cache->by_token; p++, to += dim) {
        int64_t from = head_in_block(cache, table[p / cache->block_size], head) + p % cache->block_size * dim;
        for (int64_t d = 0; d < dim; d += LANES) store(to + d, number(cache->values, from + d, cache->is_half != 0));
    }
}

/* Asks for the keys and values of positions [first, end), into the second-level cache. */
INLINE void prefetch_heads(const Cache *cache, const int32_t *table, int64_t head, int64_t first, int64_t end) {
    int64_t size = cache->is_half ? 2 : 4;
    for (int64_t position = first; position < end && cache->by_token; position++)
        for (int64_t i = 0; i < cache->head_dim; i += LANES) {
            __builtin_prefetch(head_of_token(cache, cache->keys, table, head, position) + i, 0, 2);
            __builtin_prefetch(head_of_token(cache, cache->values, table, head, position) + i, 0, 2);
        }
    if (cache->by_token) return;
    for (int64_t position = first; position < end;) {
        int64_t offset = position % cache->block_size;
        int64_t run = cache->block_size - offset < end - position ? cache->block_size - offset : end - position;
        int64_t from = (head_in_block(cache, table[position / cache->block_size], head) + offset * cache->head_dim) * size;
        for (int64_t i = 0; i < run * cache->head_dim * size; i += 64) {
            __builtin_prefetch((const char *)cache->keys + from + i, 0, 2);
            __builtin_prefetch((const char *)cache->values + from + i, 0, 2);
        }
        position += run;
    }
}

/* softcap * tanh(x / softcap), or x without one. */
INLINE float16 capped(float16 x, float softcap) {
    if (softcap == 0) return x;
    return softcap - 2 * softcap / (1.0f + vexp(x * (2 / softcap)));
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

/* Scores of `rows` rows with the keys of two tiles. q: [row][dim]; scores: [row][KEYS]. */
INLINE void score(int rows, int is_half, const float *q, const Tile *tiles, int64_t dim, float *scores) {
    float16 low[MOST_SCORED], high[MOST_SCORED];
    UNROLL for (int r = 0; r < rows; r++) low[r] = high[r] = splat(0);
    for (int64_t d = 0; d < dim; d++) {
        float16 first = number(tiles[0].at, d * LANES, is_half), second = number(tiles[1].at, d * LANES, is_half);
        UNROLL for (int r = 0; r < rows; r++) {
            low[r] += first * q[r * dim + d];
            high[r] += second * q[r * dim + d];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        store(scores + r * KEYS, low[r]);
        store(scores + r * KEYS + LANES, high[r]);
    }
}

/* out += p V of positions [first, end) of a block, for `rows` rows. p: [row][KEYS]; out: [row][dim]. */
INLINE void add_values(int rows, int is_half, const float *p, const Tile *tiles, int64_t first, int64_t end, int64_t dim, float *out) {
    int64_t d = 0;
#define COLUMNS(n) \
    for (; d + (n) * LANES <= dim; d += (n) * LANES) { \
        float16 acc[MOST_ADDED][n]; \
        UNROLL for (int r = 0; r < rows; r++) \
            UNROLL for (int i = 0; i < (n); i++) acc[r][i] = load(out + r * dim + d + i * LANES); \
        for (int64_t j = first; j < end; j++) { \
            const void *values = tiles[j / LANES].at; \
            float16 v[n]; \
            UNROLL for (int i = 0; i < (n); i++) v[i] = number(values, j % LANES * dim + d + i * LANES, is_half); \
            UNROLL for (int r = 0; r < rows; r++) \
                UNROLL for (int i = 0; i < (n); i++) acc[r][i] += v[i] * p[r * KEYS + j]; \
        } \
        UNROLL for (int r = 0; r < rows; r++) \
            UNROLL for (int i = 0; i < (n); i++) store(out + r * dim + d + i * LANES, acc[r][i]); \
    }
    if (rows * 8 <= ACCUMULATORS) COLUMNS(8)
    if (rows * 4 <= ACCUMULATORS) COLUMNS(4)
    if (rows * 2 <= ACCUMULATORS) COLUMNS(2)
    COLUMNS(1)
#undef COLUMNS
}

static void score_rows(int rows, const float *q, const Tile *tiles, int64_t dim, float *scores) {
    for (int r = 0; r < rows; r += MOST_SCORED) {
        const float *query = q + r * dim;
        float *row = scores + r * KEYS;
#define ROWS(n) \
    case n: \
        if (tiles->is_half) score(n, 1, query, tiles, dim, row); \
        else score(n, 0, query, tiles, dim, row); \
        break;
        switch (rows - r < MOST_SCORED ? rows - r : MOST_SCORED) { SCORED }
#undef ROWS
    }
}

/* Adds the values of positions [first, ends[r]) of a block to each row r; neighbouring rows see more or nothing. */
static void add_values_of_rows(int rows, const float *p, const Tile *tiles, int64_t first, const int64_t *ends, int64_t dim, float *out) {
    for (int r = 0; r < rows; r += MOST_ADDED) {
        int count = rows - r < MOST_ADDED ? rows - r : MOST_ADDED;
        const float *weights = p + r * KEYS;
        float *row = out + r * dim;
#define ROWS(n) \
    case n: \
        if (tiles->is_half) add_values(n, 1, weights, tiles, first, ends[r], dim, row); \
        else add_values(n, 0, weights, tiles, first, ends[r], dim, row); \
        break;
        switch (count) { ADDED }
#undef ROWS
        /* The values of later tokens must not meet the weights 0 of the first row, for they may be NaN. */
        for (int i = 1; i < count; i++) {
            if (ends[r + i] <= ends[r]) continue;
            if (tiles->is_half) add_values(1, 1, weights + i * KEYS, tiles, ends[r], ends[r + i], dim, row + i * dim);
            else add_values(1, 0, weights + i * KEYS, tiles, ends[r], ends[r + i], dim, row + i * dim);
        }
    }
}

/* Attention of `tokens` neighbouring tokens and the `group` query heads of one key-value head, at most MOST_QUERY_ROWS
   rows.

   q: [tokens][q_stride], its heads at q + head * head_dim. out: [tokens][out_stride]. The first token is at
   `position`; keys up to each token's position are in the cache. */
static void attend(const Cache *cache, const int32_t *table, int64_t kv_head, int64_t group, const float *q, int64_t q_stride, int64_t tokens, int64_t position, Scores of, float *out, int64_t out_stride) {
    int64_t dim = cache->head_dim, window = of.window;
    int rows = (int)(tokens * group);
    int copies = cache->by_token || tile_of(cache) != LANES || rows > MOST_DIRECT;
    /* Keys, then values: both at once do not fit the first-level cache. */
    float block[KEYS * MOST_HEAD_DIM] __attribute__((aligned(64)));
    float queries[MOST_QUERY_ROWS * MOST_HEAD_DIM] __attribute__((aligned(64)));
    float outputs[MOST_QUERY_ROWS * MOST_HEAD_DIM] __attribute__((aligned(64)));
    float scores[MOST_QUERY_ROWS * KEYS] __attribute__((aligned(64)));
    float sums[MOST_QUERY_ROWS], most[MOST_QUERY_ROWS];
    int64_t ends[MOST_QUERY_ROWS];
    for (int r = 0; r < rows; r++) {
        sums[r] = 0;
        most[r] = -__builtin_inff();
        const float *query = q + r / group * q_stride + r % group * dim;
        for (int64_t d = 0; d < dim; d += LANES) store(queries + r * dim + d, load(query + d) * of.scale);
    }
    memset(outputs, 0, (size_t)(rows * dim) * sizeof(float));
    int64_t first = window > 0 && position - window + 1 > 0 ? position - window + 1 : 0;
    int64_t end = position + tokens;
    for (int64_t from = first / KEYS * KEYS; from < end; from += KEYS) {
        int64_t middle = from + LANES, to = from + KEYS < end ? from + KEYS : end, start_of_block = from > first ? from : first;
        int has[2] = {start_of_block < middle, middle < to};
        int64_t starts[2] = {start_of_block, middle > first ? middle : first}, stops[2] = {to < middle ? to : middle, to};
        prefetch_heads(cache, table, kv_head, to, to + KEYS < end ? to + KEYS : end);
        Tile tiles[2];
        for (int i = 0; i < 2; i++) {
            if (!has[i]) continue;
            if (copies) {
                float *copy = block + i * LANES * dim;
                copy_keys(cache, table, kv_head, from + i * LANES, starts[i], stops[i], copy);
                tiles[i] = (Tile){copy, 0};
            } else {
                tiles[i] = tile_in_cache(cache, cache->keys, table, kv_head, from + i * LANES);
            }
        }
        /* Scores of a tile that no row sees are not used. */
        if (!has[0]) tiles[0] = tiles[1];
        if (!has[1]) tiles[1] = tiles[0];
        score_rows(rows, queries, tiles, dim, scores);
        for (int r = 0; r < rows; r++) {
            int64_t at = position + r / group, last = at + 1 < to ? at + 1 : to; /* after the last visible key */
            int64_t start = window > 0 && at - window + 1 > from ? at - window + 1 : from; /* the first one */
            float *row = scores + r * KEYS;
            if (start >= last) {
                store(row, splat(0));
                store(row + LANES, splat(0));
                ends[r] = 0;
                continue;
            }
            ends[r] = last - from;
            float16 low = visible(capped(load(row), of.softcap), start - from, last - from);
            float16 high = visible(capped(load(row + LANES), of.softcap), start - from - LANES, last - from - LANES);
            float largest = largest_of(low, high, most[r]);
            if (most[r] != largest) {
                float alpha = vexp(splat(most[r] - largest))[0];
                for (int64_t d = 0; d < dim; d += LANES) store(outputs + r * dim + d, load(outputs + r * dim + d) * alpha);
                sums[r] *= alpha;
                most[r] = largest;
            }
            low = vexp(low - largest);
            high = vexp(high - largest);
            store(row, low);
            store(row + LANES, high);
            sums[r] += sum(low + high);
        }
        if (copies) copy_values(cache, table, kv_head, start_of_block, to, block + (start_of_block - from) * dim);
        for (int i = 0; i < 2; i++) {
            if (copies) tiles[i] = (Tile){block + i * LANES * dim, 0};
            else if (has[i]) tiles[i] = tile_in_cache(cache, cache->values, table, kv_head, from + i * LANES);
        }
        add_values_of_rows(rows, scores, tiles, start_of_block - from, ends, dim, outputs);
    }
    for (int r = 0; r < rows; r++) {
        float *row = out + r / group * out_stride + r % group * dim;
        float inverse = 1.0f / sums[r];
        for (int64_t d = 0; d < dim; d += LANES) store(row + d, load(outputs + r * dim + d) * inverse);
    }
}

static int64_t tokens_at_once(int64_t group) { return group >= MOST_QUERY_ROWS ? 1 : MOST_QUERY_ROWS / group; }
