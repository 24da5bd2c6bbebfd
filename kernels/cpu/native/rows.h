/* Norms and activations of rows, and what adapters add to them: parts of steps, and calls of their own for networks that
   are computed layer by layer. The bits of a row depend on nothing but the row. */
#pragma once

#include "linear.h"

#define MOST_PARTS 3
#define OUTPUTS_AT_ONCE 256

/* The matrices of all slots of adapters for one matrix of a layer; see `kernels.linear.lora`. */
typedef struct {
    const float *a; /* [slots][parts][rank][inputs] */
    const float *b; /* [slots][rank][outputs] */
    int64_t parts, inputs, outputs;
    int64_t ends[MOST_PARTS]; /* the outputs up to the end of each part */
} Lora;

/* The adapters of rows. */
typedef struct {
    const int32_t *slots; /* [rows], -1 for none */
    const int64_t *ranks; /* [slots], at most `rank` */
    int64_t rank;
} AdaptersOfRows;

/* What adapters make of rows x, added to y or written to it; two loops. Each sum is of one row and its adapter, in an order
   that depends on nothing else. low: memory for rows * parts * rank numbers. y has `stride` numbers in a row. */
static void add_adapters(Pool *pool, int64_t loop, AdaptersOfRows all, int64_t rows, const Lora *l, const float *x, float *low, float *y, int64_t stride, int overwrites) {
    int64_t rank = all.rank, width = l->parts * rank;
    LOOP(pool, loop, rows * width, chunk_of(rows * width, pool->threads), first, end, {
        for (int64_t item = first; item < end; item++) {
            int64_t row = item / width, part = item % width / rank, r = item % rank, slot = all.slots[row];
            if (slot < 0 || r >= all.ranks[slot]) continue;
            const float *a = l->a + ((slot * l->parts + part) * rank + r) * l->inputs, *from = x + row * l->inputs;
            float16 total = splat(0);
            for (int64_t i = 0; i < l->inputs; i += LANES) total += load(from + i) * load(a + i);
            low[row * width + part * rank + r] = sum(total);
        }
    });
    int64_t tiles = (l->outputs + OUTPUTS_AT_ONCE - 1) / OUTPUTS_AT_ONCE;
    LOOP(pool, loop + 1, rows * tiles, chunk_of(rows * tiles, pool->threads), first, end, {
        for (int64_t item = first; item < end; item++) {
            int64_t row = item / tiles, start = item % tiles * OUTPUTS_AT_ONCE, slot = all.slots[row], part = 0;
            int64_t stop = start + OUTPUTS_AT_ONCE < l->outputs ? start + OUTPUTS_AT_ONCE : l->outputs;
            float *to = y + row * stride;
            if (slot < 0) {
                if (overwrites) memset(to + start, 0, (size_t)(stop - start) * sizeof(float));
                continue;
            }
            for (int64_t n = start; n < stop; n += LANES) {
                while (n >= l->ends[part]) part++;
                const float *of_part = low + row * width + part * rank, *b = l->b + slot * rank * l->outputs + n;
                float16 total = splat(0);
                for (int64_t r = 0; r < all.ranks[slot]; r++) total += of_part[r] * load(b + r * l->outputs);
                store(to + n, overwrites ? total : load(to + n) + total);
            }
        }
    });
}

/* What adapters add to the rows of a product, as an argument of a call. */
typedef struct {
    Lora matrices;
    AdaptersOfRows adapters;
    const float *x; /* [rows][inputs] */
    float *y;       /* [rows][stride] */
    int64_t stride, rows;
} Adaptation;

static void adapt_rows(Pool *pool, const void *argument, int thread) {
    (void)thread;
    const WorkersCall *call = argument;
    const Adaptation *a = call->argument;
    add_adapters(pool, 0, a->adapters, a->rows, &a->matrices, a->x, (float *)call->workers->memory, a->y, a->stride, 0);
}

/* Adds what adapters make of rows; returns 0, or 1 if memory does not suffice. */
int64_t tessera_adapt(Workers *w, const Adaptation *a) {
    WorkersCall call = {w, a};
    return run_alone(w, adapt_rows, &call, 2, carved(a->rows * a->matrices.parts * a->adapters.rank * 4));
}

enum RowOperation {
    RMS_NORM,        /* y = rms_norm(x) * weight */
    LAYER_NORM,      /* y = layer_norm(x) * weight + bias */
    SILU_GATE,       /* y = silu(x) * other */
    GELU_GATE,       /* y = gelu(x) * other, with the approximation by tanh */
    GELU,            /* y = gelu(x), likewise */
    MULTIPLY_SIGMOID /* y = x * sigmoid(other) */
};

/* One operation on rows. */
typedef struct {
    int64_t operation; /* enum RowOperation */
    int64_t rows, columns;
    const float *x;     /* [rows][x_stride] */
    int64_t x_stride;
    const float *other; /* [rows][other_stride]; NULL for none */
    int64_t other_stride;
    float *y;           /* [rows][columns] */
    const float *weight, *bias;
    double eps;
} Rows;

INLINE float16 of_elements(int64_t operation, float16 x, float16 other) {
    switch (operation) {
        case SILU_GATE: return silu(x) * other;
        case GELU_GATE: return gelu(x) * other;
        case GELU: return gelu(x);
        default: return x / (1.0f + vexp(-other));
    }
}

static void compute_rows(Pool *pool, const void *argument, int thread) {
    (void)thread;
    const Rows *r = ((const WorkersCall *)argument)->argument;
    int64_t columns = r->columns;
    LOOP(pool, 0, r->rows, chunk_of(r->rows, pool->threads), first, end, {
        for (int64_t row = first; row < end; row++) {
            const float *x = r->x + row * r->x_stride;
            const float *other = r->other == NULL ? x : r->other + row * r->other_stride;
            float *y = r->y + row * columns;
            if (r->operation == RMS_NORM) rms_norm(x, r->weight, columns, (float)r->eps, y);
            else if (r->operation == LAYER_NORM) layer_norm(x, r->weight, r->bias, columns, (float)r->eps, y);
            else
                for (int64_t i = 0; i < columns; i += LANES) store(y + i, of_elements(r->operation, load(x + i), load(other + i)));
        }
    });
}

/* Computes an operation on rows; returns 0. */
int64_t tessera_rows_of(Workers *w, const Rows *r) {
    WorkersCall call = {w, r};
    return run_alone(w, compute_rows, &call, 1, 0);
}
