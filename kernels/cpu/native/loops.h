/* Norms of vectors, and the loops of a product, which the threads of a pool share. */
#pragma once

#include "pool.h"
#include "products.h"

#define MOST_PANEL 96

/* Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019. */
static void rms_norm(const float *x, const float *weight, int64_t size, float eps, float *y) {
    float16 squares = splat(0);
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    float factor = 1.0f / __builtin_sqrtf(sum(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i += LANES) store(y + i, load(x + i) * factor * load(weight + i));
}

static int64_t chunk_of(int64_t items, int threads) {
    int64_t chunk = items / (threads * 8);
    return chunk > 0 ? chunk : 1;
}

/* A product as a loop over chunks of outputs and panels of rows. following: see `multiply`. */
static void product(Pool *pool, int64_t loop, const Matrix *m, const Matrix *following, Activations a, int64_t rows, float *y, int64_t stride, enum Result result, const float *added) {
    int64_t pairs = m->padded / PAIR, panels = (rows + MOST_PANEL - 1) / MOST_PANEL;
    int64_t panel = panels > 0 ? ((rows + panels - 1) / panels + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS : 1;
    int64_t chunk = chunk_of(pairs, pool->threads), chunks = (pairs + chunk - 1) / chunk;
    panels = (rows + panel - 1) / panel;
    LOOP(pool, loop, chunks * panels, 1, item, item_end, {
        int64_t first = item % chunks * chunk, row = item / chunks * panel;
        multiply(m, a, first, first + chunk < pairs ? first + chunk : pairs, chunk * (pool->threads - 1), following, row, row + panel < rows ? row + panel : rows, y, stride, result, added);
    });
}

static void quantize_rows(Pool *pool, int64_t loop, const float *x, int64_t rows, const Matrix *m, Activations to) {
    /* Parts of a row are items too, since a decode step of one sequence has one row. */
    int64_t size = m->inputs, part = size <= 512 ? size : 512, parts = (size + part - 1) / part;
    LOOP(pool, loop, rows * parts, chunk_of(rows * parts, pool->threads), first, end, {
        for (int64_t item = first; item < end; item++) {
            int64_t row = item / parts, from = item % parts * part;
            quantize_row(m, x + row * size, to, row, from, from + part < size ? from + part : size);
        }
    });
}
