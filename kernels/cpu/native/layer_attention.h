/* Attention of a layer over a cache whose keys and values PyTorch has written, for networks that are computed layer by
   layer: one call for all sequences of a phase. */
#pragma once

#include "attention.h"
#include "linear.h"

typedef struct {
    Cache cache;
    Sequences sequences;
    const float *q;   /* [rows][q_stride], heads beside each other */
    int64_t q_stride;
    float *out;       /* [rows][heads][head_dim] */
    int64_t rows, heads;
    double scale, softcap; /* see `Scores` */
    int64_t window;
} Attention;

static void compute_attention(Pool *pool, const void *argument, int thread) {
    (void)thread;
    const Attention *a = ((const WorkersCall *)argument)->argument;
    const Sequences *all = &a->sequences;
    const Cache *cache = &a->cache;
    int64_t group = a->heads / cache->kv_heads, at_once = tokens_at_once(group), width = a->heads * cache->head_dim, tiles = 0;
    Scores of = {(float)a->scale, (float)a->softcap, a->window};
    for (int64_t i = 0; i < all->count; i++) tiles += (all->first_row[i + 1] - all->first_row[i] + at_once - 1) / at_once;
    LOOP(pool, 0, tiles * cache->kv_heads, 1, item, end, {
        (void)end;
        int64_t tile = item / cache->kv_heads;
        int64_t i = 0;
        for (;; i++) {
            int64_t of_sequence = (all->first_row[i + 1] - all->first_row[i] + at_once - 1) / at_once;
            if (tile < of_sequence) break;
            tile -= of_sequence;
        }
        int64_t head = item % cache->kv_heads;
        int64_t queries = all->first_row[i + 1] - all->first_row[i];
        int64_t first = tile * at_once;
        int64_t tokens = queries - first < at_once ? queries - first : at_once;
        int64_t row = all->first_row[i] + first;
        float *out = a->out + row * width + head * group * cache->head_dim;
        if (all->lengths[i] > 0) {
            attend(cache, all->tables + i * all->columns, head, group, a->q + row * a->q_stride + head * group * cache->head_dim, a->q_stride, tokens, all->lengths[i] - queries + first, of, out, width);
        } else {
            for (int64_t t = 0; t < tokens; t++) memset(out + t * width, 0, (size_t)(group * cache->head_dim) * sizeof(float));
        }
    });
}

/* Returns 0, or 1 if memory does not suffice. Rows after those of the sequences become zeros. */
int64_t tessera_attention(Workers *w, const Attention *a) {
    int64_t width = a->heads * a->cache.head_dim, used = a->sequences.first_row[a->sequences.count];
    memset(a->out + used * width, 0, (size_t)((a->rows - used) * width) * sizeof(float));
    WorkersCall call = {w, a};
    return run_alone(w, compute_attention, &call, 1, 0);
}
