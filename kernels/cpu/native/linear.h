/* Products outside the steps of step.c, for networks that are computed layer by layer: one call for a product with the
   norm before it, and the activation or the residual after it. */
#pragma once

#include "loops.h"

/* Threads for calls that follow each other, and memory that is theirs during a call. */
typedef struct {
    Pool *pool;
    pthread_mutex_t mutex;
    char *memory;
    int64_t bytes;
} Workers;

/* The argument of what they compute. */
typedef struct { Workers *workers; const void *argument; } WorkersCall;

/* NULL if they cannot be started. */
Workers *tessera_workers(int64_t threads) {
    Workers *w = calloc(1, sizeof *w);
    if (w == NULL) return NULL;
    pthread_mutex_init(&w->mutex, NULL);
    w->pool = pool_start((int)threads);
    if (w->pool != NULL) return w;
    free(w);
    return NULL;
}

/* Makes room for a call; returns 0 if there is no memory. */
static int make_room(Workers *w, int64_t bytes) {
    if (bytes <= w->bytes) return 1;
    free(w->memory);
    w->bytes = 0;
    w->memory = aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
    if (w->memory == NULL) return 0;
    w->bytes = bytes;
    return 1;
}

/* Runs `work` alone on the workers with `bytes` of memory; returns 1 if memory does not suffice, else 0. */
static int64_t run_alone(Workers *w, Work *work, const void *argument, int64_t loops, int64_t bytes) {
    pthread_mutex_lock(&w->mutex);
    int has_room = make_room(w, bytes);
    if (has_room) pool_run(w->pool, work, argument, loops);
    pthread_mutex_unlock(&w->mutex);
    return !has_room;
}

static void *carve(char **next, int64_t bytes) {
    void *at = *next;
    *next += (bytes + 63) / 64 * 64;
    return at;
}

static int64_t carved(int64_t bytes) { return (bytes + 63) / 64 * 64; }

typedef struct {
    const Matrix *matrix;
    const float *x;          /* [rows][inputs] */
    float *y;                /* [rows][outputs], or half of them with a gate */
    int64_t rows;
    int64_t result;          /* enum Result */
    const float *norm;       /* [inputs], weight of the norm of x; NULL for none */
    const float *norm_bias;  /* of a layer norm; NULL for an RMS norm */
    double eps;
    const float *post_norm;  /* [outputs], weight of the RMS norm of the result, which is added to y; NULL for none */
    double post_eps;
} Linear;

/* Source: Ba et al., Layer Normalization, 2016. */
static void layer_norm(const float *x, const float *weight, const float *bias, int64_t size, float eps, float *y) {
    float16 total = splat(0), squares = splat(0);
    for (int64_t i = 0; i < size; i += LANES) total += load(x + i);
    float mean = sum(total) / (float)size;
    for (int64_t i = 0; i < size; i += LANES) {
        float16 centred = load(x + i) - mean;
        squares += centred * centred;
    }
    float factor = 1.0f / __builtin_sqrtf(sum(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i += LANES) store(y + i, (load(x + i) - mean) * factor * load(weight + i) + load(bias + i));
}

static int64_t bytes_of_linear(const Linear *l) {
    const Matrix *m = l->matrix;
    int64_t groups = l->rows * (m->inputs / m->group);
    return carved(bytes_of(m, l->rows * m->inputs)) + 3 * carved(groups * 4) + (l->post_norm == NULL ? 0 : carved(l->rows * m->outputs * 4));
}

static void compute_linear(Pool *pool, const void *argument, int thread) {
    (void)thread;
    const WorkersCall *call = argument;
    const Linear *l = call->argument;
    const Matrix *m = l->matrix;
    int64_t groups = l->rows * (m->inputs / m->group), inputs = m->inputs, outputs = m->outputs;
    char *next = call->workers->memory;
    Activations a;
    a.values = carve(&next, bytes_of(m, l->rows * inputs));
    a.scales = carve(&next, groups * 4);
    a.sums = carve(&next, groups * 4);
    a.corrections = carve(&next, groups * 4);
    if (l->norm == NULL) {
        quantize_rows(pool, 0, l->x, l->rows, m, a);
    } else {
        LOOP(pool, 0, l->rows, chunk_of(l->rows, pool->threads), first, end, {
            for (int64_t row = first; row < end; row++) {
                float normed[inputs] __attribute__((aligned(64)));
                if (l->norm_bias == NULL) rms_norm(l->x + row * inputs, l->norm, inputs, (float)l->eps, normed);
                else layer_norm(l->x + row * inputs, l->norm, l->norm_bias, inputs, (float)l->eps, normed);
                quantize_row(m, normed, a, row, 0, inputs);
            }
        });
    }
    if (l->post_norm == NULL) {
        int is_gated = l->result == GATE || l->result == GATE_GELU;
        product(pool, 1, m, NULL, a, l->rows, l->y, is_gated ? outputs / 2 : outputs, (enum Result)l->result, NULL);
        return;
    }
    float *made = carve(&next, l->rows * outputs * 4);
    product(pool, 1, m, NULL, a, l->rows, made, outputs, STORE, NULL);
    LOOP(pool, 2, l->rows, chunk_of(l->rows, pool->threads), first, end, {
        for (int64_t row = first; row < end; row++) {
            float *from = made + row * outputs;
            float *to = l->y + row * outputs;
            rms_norm(from, l->post_norm, outputs, (float)l->post_eps, from);
            for (int64_t i = 0; i < outputs; i += LANES) store(to + i, load(to + i) + load(from + i));
        }
    });
}

/* Computes a product; returns 0, or 1 if memory does not suffice. */
int64_t tessera_linear(Workers *w, const Linear *l) {
    WorkersCall call = {w, l};
    return run_alone(w, compute_linear, &call, 3, bytes_of_linear(l));
}

/* Copies rows of a matrix, [count][inputs], as numbers to x. */
void tessera_rows(const Matrix *m, const int64_t *rows, int64_t count, float *x) {
    for (int64_t i = 0; i < count; i++) embed(m, rows[i], x + i * m->inputs);
}
