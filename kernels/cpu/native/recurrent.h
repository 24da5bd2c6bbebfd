/* Recurrent mixers between their products: causal convolutions, the gated delta rule, Mamba-2.

   Every mixer computes the tokens of a sequence one after the other, in an order of sums that depends on nothing else: a
   result and a state have the same bits however a prompt is divided into steps, and whatever other sequences a step has.
   Threads share the heads and channels of all sequences, in parts whose state stays in the first-level cache while the
   tokens pass.

   Sums that have to be equal wherever they are computed are written with `fma`, which leaves the compiler no choice. */
#pragma once

#include "linear.h"

#define LANES_AT_ONCE 4      /* vectors of channels that a convolution computes at once */
#define MOST_WIDTH 8         /* taps of a convolution */
#define CHANNELS_AT_ONCE (LANES_AT_ONCE * LANES)
#define MOST_STATE 256       /* key dim of the gated delta rule, state dim of Mamba-2 */
#define VALUES_AT_ONCE 32    /* values of a head that the gated delta rule computes at once */

INLINE float16 fma(float16 a, float16 b, float16 c) { return __builtin_elementwise_fma(a, b, c); }

/* The sequences of a step: `rows` of one token each, then prompts; see `kernels.recurrent.segments`. */
typedef struct {
    int64_t rows, prompts;
    const int32_t *cu_seqlens; /* [prompts + 1] */
    const int32_t *slots;      /* [rows + prompts][2], read and written */
    const int32_t *kept;       /* [tokens of prompts], slots that get the state after a token too, or -1; NULL for none */
} Segments;

typedef struct { int64_t first, count, read, write; } Segment;

INLINE Segment segment_of(const Segments *s, int64_t index) {
    Segment it = {index, 1, s->slots[2 * index], s->slots[2 * index + 1]};
    if (index >= s->rows) {
        it.first = s->rows + s->cu_seqlens[index - s->rows];
        it.count = s->cu_seqlens[index - s->rows + 1] - s->cu_seqlens[index - s->rows];
    }
    return it;
}

/* Takes the next part of a sequence: up to a token after which the state is kept, in a slot at which the rest begins.
   Returns 0 after the last part. */
INLINE int next_part(const Segments *s, Segment *rest, Segment *part) {
    if (rest->count < 0) return 0;
    *part = *rest;
    for (int64_t i = 0; s->kept != NULL && rest->first >= s->rows && i < rest->count; i++) {
        int64_t slot = s->kept[rest->first - s->rows + i];
        if (slot < 0) continue;
        part->count = i + 1;
        part->write = slot;
        *rest = (Segment){rest->first + i + 1, rest->count - i - 1, slot, rest->write};
        return 1;
    }
    rest->count = -1;
    return 1;
}

/* Tokens of a step. */
INLINE int64_t tokens_of(const Segments *s) { return s->rows + s->cu_seqlens[s->prompts]; }

/* A causal convolution of each channel. */
typedef struct {
    const float *weight; /* [width][channels], the last one is that of the token itself */
    const float *bias;   /* [channels], or NULL */
    float *state;        /* [slots][width - 1][channels], the inputs before the next token */
    int64_t slot;        /* numbers from the state of a slot to the next one */
    int64_t channels, width;
} Convolution;

/* Inputs of a convolution: of token t the product of a and b, or a alone if b is NULL. */
typedef struct { const float *a, *b; int64_t stride; } Inputs;

INLINE float16 input_at(Inputs in, int64_t token, int64_t channel) {
    float16 a = load(in.a + token * in.stride + channel);
    return in.b == NULL ? a : a * load(in.b + token * in.stride + channel);
}

/* Puts the states after a sequence to `next`, [width - 1][CHANNELS_AT_ONCE], of channels [first, first + 16 * vectors). */
INLINE void next_state(const Convolution *c, Inputs in, Segment s, int64_t first, int vectors, float *next) {
    int64_t kept = c->width - 1;
    for (int64_t i = 0; i < kept; i++) {
        int64_t token = s.count - kept + i;
        for (int v = 0; v < vectors; v++) {
            float16 value = splat(0);
            if (token >= 0) value = input_at(in, s.first + token, first + v * LANES);
            else if (s.read >= 0) value = load(c->state + s.read * c->slot + (token + kept) * c->channels + first + v * LANES);
            store(next + i * CHANNELS_AT_ONCE + v * LANES, value);
        }
    }
}

INLINE void write_state(const Convolution *c, Segment s, int64_t first, int vectors, const float *next) {
    int64_t kept = c->width - 1;
    if (s.write < 0) return;
    for (int64_t i = 0; i < kept; i++)
        for (int v = 0; v < vectors; v++)
            store(c->state + s.write * c->slot + i * c->channels + first + v * LANES, load(next + i * CHANNELS_AT_ONCE + v * LANES));
}

/* The convolution of a token of a sequence in 16 channels. */
INLINE float16 convolve(const Convolution *c, Inputs in, Segment s, int64_t token, int64_t channel) {
    int64_t kept = c->width - 1;
    float16 total = c->bias == NULL ? splat(0) : load(c->bias + channel);
    for (int64_t i = 0; i <= kept; i++) {
        int64_t from = token - kept + i;
        float16 value;
        if (from >= 0) value = input_at(in, s.first + from, channel);
        else if (s.read >= 0) value = load(c->state + s.read * c->slot + (from + kept) * c->channels + channel);
        else continue;
        total = fma(value, load(c->weight + i * c->channels + channel), total);
    }
    return total;
}

INLINE int64_t parts_of_channels(const Convolution *c) { return (c->channels + CHANNELS_AT_ONCE - 1) / CHANNELS_AT_ONCE; }

/* silu(convolution) of x in place, [tokens][stride], and the states after it. The last token of a part is first, since
   those before it are its inputs. */
static void convolve_in_place(Pool *pool, int64_t loop, const Convolution *c, const Segments *all, float *x, int64_t stride) {
    int64_t parts = parts_of_channels(c), count = (all->rows + all->prompts) * parts;
    LOOP(pool, loop, count, chunk_of(count, pool->threads), item, end, {
        for (int64_t i = item; i < end; i++) {
            Segment rest = segment_of(all, i / parts);
            Segment s;
            int64_t first = i % parts * CHANNELS_AT_ONCE;
            int64_t left = (c->channels - first) / LANES;
            int vectors = (int)(left < LANES_AT_ONCE ? left : LANES_AT_ONCE);
            float next[MOST_WIDTH * CHANNELS_AT_ONCE] __attribute__((aligned(64)));
            Inputs in = {x, NULL, stride};
            while (next_part(all, &rest, &s)) {
                if (s.count == 0) continue;
                next_state(c, in, s, first, vectors, next);
                for (int64_t t = s.count - 1; t >= 0; t--)
                    for (int v = 0; v < vectors; v++)
                        store(x + (s.first + t) * stride + first + v * LANES, silu(convolve(c, in, s, t, first + v * LANES)));
                write_state(c, s, first, vectors, next);
            }
        }
    });
}

/* log(1 + e^x) to a few units in the last place.
   Source: log(1 + u) = 2 artanh(u / (2 + u)), by its series, whose argument is at most 1 / 3. */
INLINE float16 softplus(float16 x) {
    float16 u = vexp(vmin(x, -x)), s = u / (2.0f + u), square = s * s;
    float16 series = splat(1.0f / 17);
    for (int i = 15; i > 0; i -= 2) series = fma(series, square, splat(1.0f / (float)i));
    return vmax(x, splat(0)) + 2.0f * s * series;
}

/* Loads and stores up to 16 numbers. */
INLINE float16 load_some(const float *p, int64_t count) {
    float16 v = splat(0);
    memcpy(&v, p, (size_t)(count < LANES ? count : LANES) * sizeof(float));
    return v;
}
INLINE void store_some(float *p, float16 v, int64_t count) { memcpy(p, &v, (size_t)(count < LANES ? count : LANES) * sizeof(float)); }

/* What all mixers take. */
typedef struct {
    const Segments *segments;
    float *x;            /* [tokens][stride], results of the product; overwritten */
    int64_t stride;
    float *y;            /* [tokens][inner] */
    Convolution convolution;
} Mixer;

/* y = c * convolution(b * x) of [b | c | x]. */
static void compute_short_conv(Pool *pool, const void *argument, int thread) {
    (void)thread;
    const Mixer *m = ((const WorkersCall *)argument)->argument;
    const Convolution *c = &m->convolution;
    int64_t parts = parts_of_channels(c), count = (m->segments->rows + m->segments->prompts) * parts, size = c->channels;
    LOOP(pool, 0, count, chunk_of(count, pool->threads), item, end, {
        for (int64_t i = item; i < end; i++) {
            Segment rest = segment_of(m->segments, i / parts);
            Segment s;
            int64_t first = i % parts * CHANNELS_AT_ONCE;
            int64_t left = (size - first) / LANES;
            int vectors = (int)(left < LANES_AT_ONCE ? left : LANES_AT_ONCE);
            float next[MOST_WIDTH * CHANNELS_AT_ONCE] __attribute__((aligned(64)));
            Inputs in = {m->x, m->x + 2 * size, m->stride};
            while (next_part(m->segments, &rest, &s)) {
                if (s.count == 0) continue;
                next_state(c, in, s, first, vectors, next);
                for (int64_t t = 0; t < s.count; t++)
                    for (int v = 0; v < vectors; v++) {
                        int64_t channel = first + v * LANES;
                        float16 gate = load(m->x + (s.first + t) * m->stride + size + channel);
                        store(m->y + (s.first + t) * size + channel, gate * convolve(c, in, s, t, channel));
                    }
                write_state(c, s, first, vectors, next);
            }
        }
    });
}

/* Returns 0, or 1 if memory does not suffice; so do the others. */
int64_t tessera_short_conv(Workers *w, const Mixer *m) {
    WorkersCall call = {w, m};
    return run_alone(w, compute_short_conv, &call, 1, 0);
}

/* The gated delta rule; see `kernels.recurrent.problem.GatedDeltaShape`. */
typedef struct {
    Mixer mixer;           /* of [q | k | v | z] */
    int64_t heads, key_heads, key_dim, value_dim;
    double eps;
    const float *gates;    /* [tokens][gates_stride], [b | a] */
    int64_t gates_stride;
    const float *a, *bias; /* [heads], exp(a_log) and dt_bias */
    const float *norm;     /* [value_dim] */
    float *state;          /* [slots][heads][key_dim][value_dim] */
    int64_t slot;          /* numbers from the state of a slot to the next one */
} GatedDelta;

/* Gates of a token: decays exp(g) and beta, [heads] each. */
INLINE void delta_gates(const GatedDelta *d, int64_t token, float *decays, float *betas) {
    const float *b = d->gates + token * d->gates_stride, *a = b + d->heads;
    for (int64_t h = 0; h < d->heads; h += LANES) {
        int64_t left = d->heads - h;
        float16 rate = softplus(load_some(a + h, left) + load_some(d->bias + h, left));
        store_some(decays + h, vexp(-load_some(d->a + h, left) * rate), left);
        store_some(betas + h, 1.0f / (1.0f + vexp(-load_some(b + h, left))), left);
    }
}

/* Scales a vector to a length of `length`. */
INLINE void normalize(float *x, int64_t size, float length) {
    float16 squares = splat(0);
    for (int64_t i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float factor = length / __builtin_sqrtf(sum(squares) + 1e-6f);
    for (int64_t i = 0; i < size; i += LANES) store(x + i, load(x + i) * factor);
}

/* Values [first, first + 16 * vectors) of a head for all tokens of a sequence. Each pass over the state adds the update
   of the token before and multiplies by this one's key and query:

       S' = decay S + k d^T,  d = beta (v - decay S^T k),  o = S'^T q = decay S^T q + (k q) d

   so a token takes one load and one store of the state. */
INLINE void delta_values(const GatedDelta *d, Segment s, int64_t head, int64_t first, int vectors, const float *decays, const float *betas) {
    int64_t dim = d->key_dim, values = d->value_dim, keys = d->key_heads * dim, stride = d->mixer.stride;
    int64_t group = head / (d->heads / d->key_heads) * dim, size = dim * values;
    float scratch[MOST_STATE * VALUES_AT_ONCE] __attribute__((aligned(64)));
    float *to = scratch;
    const float *from = scratch;
    int64_t to_row = VALUES_AT_ONCE, from_row = VALUES_AT_ONCE;
    if (s.count == 0) return;
    if (s.write >= 0) to = d->state + s.write * d->slot + head * size + first, to_row = values;
    if (s.read >= 0) from = d->state + s.read * d->slot + head * size + first, from_row = values;
    else {
        for (int64_t k = 0; k < dim; k++) UNROLL for (int v = 0; v < vectors; v++) store(to + k * to_row + v * LANES, splat(0));
        from = to, from_row = to_row;
    }
    const float *before = NULL; /* the key of the token before */
    float decay_before = 1;
    float16 delta[VALUES_AT_ONCE / LANES];
    for (int64_t t = 0; t < s.count; t++) {
        const float *x = d->mixer.x + (s.first + t) * stride, *q = x + group, *key = x + keys + group, *value = x + 2 * keys + head * values + first;
        const float *ahead = t + 1 < s.count ? x + stride : x;
        for (int64_t i = 0; i < dim; i += LANES) {
            prefetch(ahead + group + i);
            prefetch(ahead + keys + group + i);
        }
        float16 of_key[VALUES_AT_ONCE / LANES], of_query[VALUES_AT_ONCE / LANES], both = splat(0);
        UNROLL for (int v = 0; v < vectors; v++) {
            of_key[v] = of_query[v] = splat(0);
            prefetch(ahead + 2 * keys + head * values + first + v * LANES);
        }
        for (int64_t i = 0; i < dim; i += LANES) both = fma(load(q + i), load(key + i), both);
        if (before == NULL) {
            for (int64_t k = 0; k < dim; k++)
                UNROLL for (int v = 0; v < vectors; v++) {
                    float16 state = load(from + k * from_row + v * LANES);
                    of_key[v] = fma(state, splat(key[k]), of_key[v]);
                    of_query[v] = fma(state, splat(q[k]), of_query[v]);
                }
        } else {
            for (int64_t k = 0; k < dim; k++)
                UNROLL for (int v = 0; v < vectors; v++) {
                    float16 state = fma(splat(before[k]), delta[v], load(from + k * from_row + v * LANES) * decay_before);
                    store(to + k * to_row + v * LANES, state);
                    of_key[v] = fma(state, splat(key[k]), of_key[v]);
                    of_query[v] = fma(state, splat(q[k]), of_query[v]);
                }
            from = to, from_row = to_row;
        }
        float decay = decays[(s.first + t) * d->heads + head], beta = betas[(s.first + t) * d->heads + head], product = sum(both);
        float *y = d->mixer.y + (s.first + t) * d->heads * values + head * values + first;
        UNROLL for (int v = 0; v < vectors; v++) {
            delta[v] = beta * fma(of_key[v], splat(-decay), load(value + v * LANES));
            store(y + v * LANES, fma(delta[v], splat(product), of_query[v] * decay));
        }
        before = key;
        decay_before = decay;
    }
    if (before == NULL || s.write < 0) return;
    for (int64_t k = 0; k < dim; k++)
        UNROLL for (int v = 0; v < vectors; v++)
            store(to + k * to_row + v * LANES, fma(splat(before[k]), delta[v], load(from + k * from_row + v * LANES) * decay_before));
}

static void delta_values_of_2(const GatedDelta *d, Segment s, int64_t head, int64_t first, const float *decays, const float *betas) {
    delta_values(d, s, head, first, 2, decays, betas);
}

static void delta_values_of_1(const GatedDelta *d, Segment s, int64_t head, int64_t first, const float *decays, const float *betas) {
    delta_values(d, s, head, first, 1, decays, betas);
}

static void compute_gated_delta(Pool *pool, const void *argument, int thread) {
    (void)thread;
    const WorkersCall *call = argument;
    const GatedDelta *d = call->argument;
    const Segments *all = d->mixer.segments;
    int64_t tokens = tokens_of(all), heads = d->heads, values = d->value_dim, dim = d->key_dim, stride = d->mixer.stride;
    char *next = call->workers->memory;
    float *decays = carve(&next, tokens * heads * 4), *betas = carve(&next, tokens * heads * 4);
    convolve_in_place(pool, 0, &d->mixer.convolution, all, d->mixer.x, stride);
    LOOP(pool, 1, tokens * d->key_heads, chunk_of(tokens * d->key_heads, pool->threads), item, end, {
        for (int64_t i = item; i < end; i++) {
            int64_t token = i / d->key_heads;
            float *q = d->mixer.x + token * stride + i % d->key_heads * dim;
            normalize(q, dim, 1.0f / __builtin_sqrtf((float)dim));
            normalize(q + d->key_heads * dim, dim, 1.0f);
            if (i % d->key_heads == 0) delta_gates(d, token, decays + token * heads, betas + token * heads);
        }
    });
    int64_t parts = (values + VALUES_AT_ONCE - 1) / VALUES_AT_ONCE, count = (all->rows + all->prompts) * heads * parts;
    LOOP(pool, 2, count, 1, item, end, {
        (void)end;
        Segment rest = segment_of(all, item / (heads * parts));
        Segment s;
        int64_t first = item % parts * VALUES_AT_ONCE;
        int64_t head = item / parts % heads;
        while (next_part(all, &rest, &s)) {
            if (values - first >= VALUES_AT_ONCE) delta_values_of_2(d, s, head, first, decays, betas);
            else delta_values_of_1(d, s, head, first, decays, betas);
        }
    });
    LOOP(pool, 3, tokens * heads, chunk_of(tokens * heads, pool->threads), item, end, {
        for (int64_t i = item; i < end; i++) {
            float *y = d->mixer.y + i * values;
            const float *z = d->mixer.x + i / heads * stride + d->mixer.convolution.channels + i % heads * values;
            rms_norm(y, d->norm, values, (float)d->eps, y);
            for (int64_t j = 0; j < values; j += LANES) store(y + j, load(y + j) * silu(load(z + j)));
        }
    });
}

int64_t tessera_gated_delta(Workers *w, const GatedDelta *d) {
    WorkersCall call = {w, d};
    return run_alone(w, compute_gated_delta, &call, 4, 2 * carved(tokens_of(d->mixer.segments) * d->heads * 4));
}

/* Mamba-2; see `kernels.recurrent.problem.Mamba2Shape`. */
typedef struct {
    Mixer mixer;              /* of [z | x | b | c | dt] */
    int64_t heads, head_dim, state_dim, groups;
    double eps;
    int64_t norm_first;       /* whether the norm comes before the gate */
    double least, most;       /* of dt */
    const float *a, *bias;    /* [heads], exp(a_log) and dt_bias */
    const float *d;           /* [heads] */
    const float *norm;        /* [inner], or NULL for none */
    float *state;             /* [slots][heads][head_dim][state_dim] */
    int64_t slot;             /* numbers from the state of a slot to the next one */
} Mamba2;

/* Elements [first, first + 16) of a head for all tokens of a sequence. */
static void mamba_elements(const Mamba2 *m, Segment s, int64_t head, int64_t first, const float *decays, const float *steps) {
    int64_t size = m->state_dim, inner = m->heads * m->head_dim, group = head / (m->heads / m->groups) * size, stride = m->mixer.stride;
    float scratch[LANES * MOST_STATE] __attribute__((aligned(64)));
    float *to = s.write < 0 ? scratch : m->state + s.write * m->slot + (head * m->head_dim + first) * size;
    const float *from = s.read < 0 ? to : m->state + s.read * m->slot + (head * m->head_dim + first) * size;
    if (s.count == 0) return;
    if (s.read < 0) memset(to, 0, (size_t)(LANES * size) * sizeof(float));
    for (int64_t t = 0; t < s.count; t++) {
        const float *x = m->mixer.x + (s.first + t) * stride + inner, *at = x + head * m->head_dim + first;
        const float *b = x + inner + group, *c = b + m->groups * size, *ahead = t + 1 < s.count ? b + stride : b;
        for (int64_t n = 0; n < size; n += LANES) {
            prefetch(ahead + n);
            prefetch(ahead + m->groups * size + n);
        }
        float decay = decays[(s.first + t) * m->heads + head];
        float16 values = load(at), moved = values * steps[(s.first + t) * m->heads + head], total[LANES];
        UNROLL for (int p = 0; p < LANES; p += 4) {
            float16 sums[4] = {splat(0), splat(0), splat(0), splat(0)};
            for (int64_t n = 0; n < size; n += LANES) {
                float16 key = load(b + n), query = load(c + n);
                UNROLL for (int i = 0; i < 4; i++) {
                    float16 state = fma(splat(moved[p + i]), key, load(from + (p + i) * size + n) * decay);
                    store(to + (p + i) * size + n, state);
                    sums[i] = fma(state, query, sums[i]);
                }
            }
            UNROLL for (int i = 0; i < 4; i++) total[p + i] = sums[i];
        }
        store(m->mixer.y + (s.first + t) * inner + head * m->head_dim + first, fma(values, splat(m->d[head]), sum_each(total)));
        from = to;
    }
}

static void compute_mamba2(Pool *pool, const void *argument, int thread) {
    (void)thread;
    const WorkersCall *call = argument;
    const Mamba2 *m = call->argument;
    const Segments *all = m->mixer.segments;
    int64_t tokens = tokens_of(all), heads = m->heads, inner = heads * m->head_dim, stride = m->mixer.stride;
    char *next = call->workers->memory;
    float *decays = carve(&next, tokens * heads * 4), *steps = carve(&next, tokens * heads * 4);
    convolve_in_place(pool, 0, &m->mixer.convolution, all, m->mixer.x + inner, stride);
    LOOP(pool, 1, tokens, chunk_of(tokens, pool->threads), item, end, {
        for (int64_t token = item; token < end; token++) {
            const float *dt = m->mixer.x + token * stride + inner + m->mixer.convolution.channels;
            for (int64_t h = 0; h < heads; h += LANES) {
                int64_t left = heads - h;
                float16 step = softplus(load_some(dt + h, left) + load_some(m->bias + h, left));
                step = vmin(vmax(step, splat((float)m->least)), splat((float)m->most));
                store_some(steps + token * heads + h, step, left);
                store_some(decays + token * heads + h, vexp(-load_some(m->a + h, left) * step), left);
            }
        }
    });
    int64_t parts = m->head_dim / LANES, count = (all->rows + all->prompts) * heads * parts;
    LOOP(pool, 2, count, 1, item, end, {
        (void)end;
        Segment rest = segment_of(all, item / (heads * parts));
        Segment s;
        while (next_part(all, &rest, &s)) mamba_elements(m, s, item / parts % heads, item % parts * LANES, decays, steps);
    });
    int64_t of_norm = inner / m->groups;
    LOOP(pool, 3, tokens * m->groups, chunk_of(tokens * m->groups, pool->threads), item, end, {
        for (int64_t i = item; i < end; i++) {
            int64_t offset = i % m->groups * of_norm;
            float *y = m->mixer.y + i * of_norm;
            const float *z = m->mixer.x + i / m->groups * stride + offset;
            int norm_first = m->norm != NULL && m->norm_first;
            if (norm_first) rms_norm(y, m->norm + offset, of_norm, (float)m->eps, y);
            for (int64_t j = 0; j < of_norm; j += LANES) store(y + j, load(y + j) * silu(load(z + j)));
            if (m->norm != NULL && !norm_first) rms_norm(y, m->norm + offset, of_norm, (float)m->eps, y);
        }
    });
}

int64_t tessera_mamba2(Workers *w, const Mamba2 *m) {
    WorkersCall call = {w, m};
    return run_alone(w, compute_mamba2, &call, 4, 2 * carved(tokens_of(m->mixer.segments) * m->heads * 4));
}
