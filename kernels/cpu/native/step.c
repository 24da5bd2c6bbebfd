/* A step of a decoder on a CPU, as one call: embedding, layers, final norm and logits.

   The structures are those of `kernels/cpu/decoder.py`; every member is 8 bytes wide, so that both sides lay them out
   alike. Rows of a step are tokens; see `model.executors.columns` for their order. */
#include "layer_attention.h"
#include "linear.h"
#include "recurrent.h"
#include "rows.h"

typedef struct {
    Matrix qkv, output, gate_up, down;
    const float *input_norm, *mlp_norm;
    const float *q_norm, *k_norm; /* of each head; NULL for none */
    int64_t window;               /* 0 for full attention */
} Layer;

typedef struct {
    int64_t layers, hidden, inner, heads, kv_heads, head_dim;
    double eps, softmax_scale;
    const Layer *layer;
    const float *norm;
    const Matrix *head, *embedding; /* the same one if tied */
} Model;

typedef struct { Lora qkv, output, gate_up, down; } LoraLayer;

/* The adapters of a step. */
typedef struct {
    const LoraLayer *layers;
    AdaptersOfRows rows;
} Adapters;

typedef struct {
    int64_t rows;
    const int64_t *token_ids; /* -1 - i stands for sampled[i] */
    const int64_t *sampled;
    const int64_t *positions;
    const int32_t *slots; /* -1 writes nothing */
    const float *cos, *sin; /* [position][head_dim]; the first half of sin is negated */
    Sequences decode, prompts;
    const Cache *caches; /* of each layer */
    int64_t num_logits;
    const int64_t *logits_rows; /* NULL for all rows */
    float *normed;              /* [rows][hidden], the final norm of all rows; NULL to compute logits instead */
    float *logits;              /* [num_logits][outputs of the head] */
    int64_t *best;              /* [num_logits], the argmax of each row; -1 where it is not finite. NULL for none */
    const Adapters *adapters;   /* NULL if no row has one */
} Step;

/* Memory for the values between the products, for `rows` rows. */
typedef struct {
    float *hidden, *qkv, *attended, *gated;
    Activations activations;
    int64_t rows;
    float *normed, *low, *added; /* of steps with adapters: inputs, x A^T, and what is added to gate and up */
    int64_t adapted_rows, rank;  /* that `normed`, `low` and `added` have memory for */
} Workspace;

typedef struct {
    const Model *model;
    const Step *step;
    Workspace space;
} Computation;

/* Of the functions and structures, as `kernels.cpu.library.VERSION`. */
#define TESSERA_VERSION 7
#define LOOPS_OF_LAYER 10
#define LOOPS_OF_ADAPTERS 8

const char *tessera_instructions(void) { return INSTRUCTIONS; }

int64_t tessera_version(void) { return TESSERA_VERSION; }

/* Bytes of a packed matrix and of its scales. */
int64_t tessera_weight_bytes(const Matrix *m) { return m->padded * m->inputs * m->bits / 8; }

int64_t tessera_scale_bytes(const Matrix *m) { return m->padded * scales_of(m) * (int64_t)sizeof(_Float16); }

/* Packs rows [first, first + rows) of a matrix, whose factors are set. numbers: [rows][inputs], 0 .. 255 or 0 .. 15;
   scales and shifts: [rows][scale group], float32, divided by the factors; NULL for none. Rows up to `padded` that are
   never packed must be zero bytes. */
void tessera_pack(const Matrix *m, int64_t first, int64_t rows, const uint8_t *numbers, const float *scales, const float *shifts) {
    uint8_t *weights = (uint8_t *)m->weights;
    for (int64_t r = 0; r < rows; r++) {
        int64_t output = first + r;
        const uint8_t *row = numbers + r * m->inputs;
        for (int64_t g = 0; g < m->scale_groups; g++) {
            _Float16 *at = (_Float16 *)m->scales + index_of_scale(m, output, g);
            at[0] = (_Float16)scales[r * m->scale_groups + g];
            if (m->has_shifts) at[LANES] = (_Float16)shifts[r * m->scale_groups + g];
        }
        if (m->bits == 8) {
            for (int64_t i = 0; i < m->inputs; i++) weights[position8(m, output, i)] = row[i];
            continue;
        }
        for (int64_t i = 0; i < m->inputs; i += 8)
            for (int64_t j = i; j < i + 4; j++) weights[position4(m, output, j)] = (uint8_t)(row[j] | row[j + 4] << 4);
    }
}

/* Source: Su et al., RoFormer, 2021, eq. 34, with the pairs half a head apart. */
static void rotate(float *x, const float *cos, const float *sin, int64_t dim) {
    for (int64_t i = 0; i < dim / 2; i += LANES) {
        float16 a = load(x + i), b = load(x + dim / 2 + i);
        store(x + i, a * load(cos + i) + b * load(sin + i));
        store(x + dim / 2 + i, b * load(cos + dim / 2 + i) + a * load(sin + dim / 2 + i));
    }
}

/* Norm and rotation of a token's query heads of one key-value head, and of its key; writes key and value. */
static void prepare_heads(const Computation *c, int64_t layer, int64_t row, int64_t kv_head) {
    const Model *m = c->model;
    const Step *s = c->step;
    const Layer *l = &m->layer[layer];
    const Cache *cache = &s->caches[layer];
    int64_t dim = m->head_dim, group = m->heads / m->kv_heads, width = (m->heads + 2 * m->kv_heads) * dim;
    float *qkv = c->space.qkv + row * width, *key = qkv + (m->heads + kv_head) * dim;
    const float *cos = s->cos + s->positions[row] * dim, *sin = s->sin + s->positions[row] * dim;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
        float *q = qkv + h * dim;
        if (l->q_norm != NULL) rms_norm(q, l->q_norm, dim, (float)m->eps, q);
        rotate(q, cos, sin, dim);
        for (int64_t i = 0; i < dim; i += LANES) store(q + i, load(q + i) * (float)m->softmax_scale);
    }
    if (l->k_norm != NULL) rms_norm(key, l->k_norm, dim, (float)m->eps, key);
    rotate(key, cos, sin, dim);
    if (s->slots[row] < 0) return;
    write_head(cache, s->slots[row], kv_head, key, qkv + (m->heads + m->kv_heads + kv_head) * dim);
}

/* Attention of one key-value head for tokens [token, token + tokens) of a sequence; `base` is the first row of `all`. */
static void attend_tokens(const Computation *c, int64_t layer, const Sequences *all, int64_t base, int64_t sequence, int64_t token, int64_t tokens, int64_t kv_head) {
    const Model *m = c->model;
    int64_t dim = m->head_dim, group = m->heads / m->kv_heads;
    int64_t width = (m->heads + 2 * m->kv_heads) * dim, out_width = m->heads * dim;
    int64_t row = base + all->first_row[sequence] + token, length = all->lengths[sequence];
    int64_t of_sequence = all->first_row[sequence + 1] - all->first_row[sequence];
    const float *q = c->space.qkv + row * width + kv_head * group * dim;
    float *out = c->space.attended + row * out_width + kv_head * group * dim;
    if (length <= 0) {
        for (int64_t t = 0; t < tokens; t++) memset(out + t * out_width, 0, (size_t)(group * dim) * sizeof(float));
        return;
    }
    attend(&c->step->caches[layer], all->tables + sequence * all->columns, kv_head, group, q, width, tokens, length - of_sequence + token, (Scores){1, 0, m->layer[layer].window}, out, out_width);
}

/* Tiles of tokens of each decode row; those of a row with fewer tokens may be empty. */
static int64_t decode_tiles(const Computation *c) {
    int64_t at_once = tokens_at_once(c->model->heads / c->model->kv_heads);
    return (c->step->decode.queries + at_once - 1) / at_once;
}

/* Attention for the n-th item of a step: a few tokens of a decode row or of a prompt, and one key-value head. */
static void attend_item(const Computation *c, int64_t layer, int64_t item) {
    const Step *s = c->step;
    int64_t kv_heads = c->model->kv_heads, kv_head = item % kv_heads, tile = item / kv_heads;
    int64_t at_once = tokens_at_once(c->model->heads / kv_heads), of_row = decode_tiles(c);
    if (tile < s->decode.count * of_row) {
        int64_t row = tile / of_row, first = tile % of_row * at_once;
        int64_t tokens = s->decode.first_row[row + 1] - s->decode.first_row[row] - first;
        if (tokens > 0) attend_tokens(c, layer, &s->decode, 0, row, first, tokens < at_once ? tokens : at_once, kv_head);
        return;
    }
    tile -= s->decode.count * of_row;
    for (int64_t i = 0; i < s->prompts.count; i++) {
        int64_t tokens = s->prompts.first_row[i + 1] - s->prompts.first_row[i], tiles = (tokens + at_once - 1) / at_once;
        if (tile < tiles) {
            int64_t first = tile * at_once;
            attend_tokens(c, layer, &s->prompts, s->decode.count * s->decode.queries, i, first, tokens - first < at_once ? tokens - first : at_once, kv_head);
            return;
        }
        tile -= tiles;
    }
}

static int64_t attention_items(const Computation *c) {
    const Sequences *p = &c->step->prompts;
    int64_t at_once = tokens_at_once(c->model->heads / c->model->kv_heads), tiles = c->step->decode.count * decode_tiles(c);
    for (int64_t i = 0; i < p->count; i++) tiles += (p->first_row[i + 1] - p->first_row[i] + at_once - 1) / at_once;
    return tiles * c->model->kv_heads;
}

/* Norm and quantization of rows, for a product with `m`. rows_of: indices of the rows of x, or NULL. kept: gets the
   rows before they are quantized; NULL for nothing. */
static void norm_rows(Pool *pool, int64_t loop, const Computation *c, const float *x, const int64_t *rows_of, int64_t rows, const float *weight, const Matrix *m, float *kept) {
    int64_t hidden = c->model->hidden;
    LOOP(pool, loop, rows, chunk_of(rows, pool->threads), first, end, {
        for (int64_t row = first; row < end; row++) {
            float normed[hidden] __attribute__((aligned(64)));
            rms_norm(x + (rows_of == NULL ? row : rows_of[row]) * hidden, weight, hidden, (float)c->model->eps, normed);
            quantize_row(m, normed, c->space.activations, row, 0, hidden);
            if (kept != NULL) memcpy(kept + row * hidden, normed, (size_t)hidden * sizeof(float));
        }
    });
}

/* What the adapters of a step make of rows x, for one matrix; two loops. */
static void adapt(Pool *pool, int64_t loop, const Computation *c, const Lora *l, const float *x, float *y, int overwrites) {
    add_adapters(pool, loop, c->step->adapters->rows, c->step->rows, l, x, c->space.low, y, l->outputs, overwrites);
}

static void compute_layer(Pool *pool, int64_t loop, const Computation *c, int64_t index) {
    const Model *m = c->model;
    const Layer *l = &m->layer[index];
    const Workspace *w = &c->space;
    const LoraLayer *adapted = c->step->adapters == NULL ? NULL : &c->step->adapters->layers[index];
    float *kept = adapted == NULL ? NULL : w->normed, *added = adapted == NULL ? NULL : w->added;
    int64_t rows = c->step->rows, width = (m->heads + 2 * m->kv_heads) * m->head_dim, more = loop + LOOPS_OF_LAYER;
    norm_rows(pool, loop, c, w->hidden, NULL, rows, l->input_norm, &l->qkv, kept);
    product(pool, loop + 1, &l->qkv, &l->output, w->activations, rows, w->qkv, width, STORE, NULL);
    if (adapted != NULL) adapt(pool, more, c, &adapted->qkv, w->normed, w->qkv, 0);
    LOOP(pool, loop + 2, rows * m->kv_heads, chunk_of(rows * m->kv_heads, pool->threads), first, end, {
        for (int64_t item = first; item < end; item++) prepare_heads(c, index, item / m->kv_heads, item % m->kv_heads);
    });
    LOOP(pool, loop + 3, attention_items(c), 1, first, end, { attend_item(c, index, first); });
    quantize_rows(pool, loop + 4, w->attended, rows, &l->output, w->activations);
    product(pool, loop + 5, &l->output, &l->gate_up, w->activations, rows, w->hidden, m->hidden, ADD, NULL);
    if (adapted != NULL) adapt(pool, more + 2, c, &adapted->output, w->attended, w->hidden, 0);
    norm_rows(pool, loop + 6, c, w->hidden, NULL, rows, l->mlp_norm, &l->gate_up, kept);
    if (adapted != NULL) adapt(pool, more + 4, c, &adapted->gate_up, w->normed, w->added, 1);
    product(pool, loop + 7, &l->gate_up, &l->down, w->activations, rows, w->gated, m->inner, GATE, added);
    quantize_rows(pool, loop + 8, w->gated, rows, &l->down, w->activations);
    product(pool, loop + 9, &l->down, index + 1 < m->layers ? &l[1].qkv : m->head, w->activations, rows, w->hidden, m->hidden, ADD, NULL);
    if (adapted != NULL) adapt(pool, more + 6, c, &adapted->down, w->gated, w->hidden, 0);
}

/* Loops of a layer in a step. */
static int64_t loops_of_layer(const Step *s) { return LOOPS_OF_LAYER + (s->adapters == NULL ? 0 : LOOPS_OF_ADAPTERS); }

/* The smallest index of the largest number; -1 if that is not finite or a number is NaN. */
static int64_t argmax(const float *x, int64_t size) {
    float16 largest = splat(-__builtin_inff());
    int32x16 is_nan = {0};
    int64_t i = 0, whole = size / LANES * LANES;
    for (; i < whole; i += LANES) {
        float16 v = load(x + i);
        is_nan |= v != v;
        largest = vmax(largest, v);
    }
    float most = -__builtin_inff();
    for (int lane = 0; lane < LANES; lane++) most = largest[lane] > most ? largest[lane] : most;
    if (__builtin_reduce_or(is_nan) != 0) return -1;
    for (; i < size; i++) {
        if (x[i] != x[i]) return -1;
        most = x[i] > most ? x[i] : most;
    }
    if (most == __builtin_inff() || most == -__builtin_inff()) return -1;
    for (i = 0; i < whole; i += LANES) {
        int32x16 found = load(x + i) == splat(most);
        if (__builtin_reduce_or(found) != 0) break;
    }
    while (x[i] != most) i++;
    return i;
}

static void compute_step(Pool *pool, const void *argument, int thread) {
    (void)thread;
    const Computation *c = argument;
    const Model *m = c->model;
    const Step *s = c->step;
    const Workspace *w = &c->space;
    LOOP(pool, 0, s->rows, chunk_of(s->rows, pool->threads), first, end, {
        for (int64_t row = first; row < end; row++) {
            int64_t id = s->token_ids[row];
            embed(m->embedding, id < 0 ? s->sampled[-1 - id] : id, w->hidden + row * m->hidden);
        }
    });
    int64_t of_layer = loops_of_layer(s), loop = 1 + m->layers * of_layer;
    for (int64_t i = 0; i < m->layers; i++) compute_layer(pool, 1 + i * of_layer, c, i);
    if (s->normed != NULL) {
        LOOP(pool, loop, s->rows, chunk_of(s->rows, pool->threads), first, end, {
            for (int64_t row = first; row < end; row++) rms_norm(w->hidden + row * m->hidden, m->norm, m->hidden, (float)m->eps, s->normed + row * m->hidden);
        });
    } else if (s->num_logits > 0) {
        norm_rows(pool, loop, c, w->hidden, s->logits_rows, s->num_logits, m->norm, m->head, NULL);
        product(pool, loop + 1, m->head, NULL, w->activations, s->num_logits, s->logits, m->head->outputs, STORE, NULL);
        if (s->best == NULL) return;
        LOOP(pool, loop + 2, s->num_logits, 1, row, end, { s->best[row] = argmax(s->logits + row * m->head->outputs, m->head->outputs); (void)end; });
    }
}

/* The logits of normalized hidden states: step->normed to step->logits. */
static void compute_logits(Pool *pool, const void *argument, int thread) {
    (void)thread;
    const Computation *c = argument;
    const Matrix *head = c->model->head;
    quantize_rows(pool, 0, c->step->normed, c->step->num_logits, head, c->space.activations);
    product(pool, 1, head, NULL, c->space.activations, c->step->num_logits, c->step->logits, head->outputs, STORE, NULL);
}

typedef struct {
    Pool *pool;
    void *memory;
    void *adapted; /* memory of steps with adapters */
    Workspace space;
} Engine;

/* Makes room for the rows of a step; returns 0 if there is no memory. */
static int reserve(Engine *e, const Model *m, int64_t rows) {
    if (rows <= e->space.rows) return 1;
    int64_t attended = m->heads * m->head_dim, width = attended + 2 * m->kv_heads * m->head_dim;
    int64_t widest = m->inner > m->hidden ? m->inner : m->hidden;
    if (attended > widest) widest = attended;
    int64_t groups = widest / NARROW_GROUP;
    int64_t row_bytes = 4 * (m->hidden + width + attended + m->inner) + 2 * widest + 12 * groups + 64 * 8;
    free(e->memory);
    e->space.rows = 0;
    e->memory = aligned_alloc(64, (size_t)((rows * row_bytes + 64 * 16 + 63) / 64 * 64));
    if (e->memory == NULL) return 0;
    char *next = e->memory;
    e->space.hidden = carve(&next, rows * m->hidden * 4);
    e->space.qkv = carve(&next, rows * width * 4);
    e->space.attended = carve(&next, rows * attended * 4);
    e->space.gated = carve(&next, rows * m->inner * 4);
    e->space.activations.values = carve(&next, rows * widest * 2);
    e->space.activations.scales = carve(&next, rows * groups * 4);
    e->space.activations.sums = carve(&next, rows * groups * 4);
    e->space.activations.corrections = carve(&next, rows * groups * 4);
    e->space.rows = rows;
    return 1;
}

/* Makes room for the adapters of a step; returns 0 if there is no memory. */
static int reserve_adapters(Engine *e, const Model *m, const Step *s) {
    Workspace *w = &e->space;
    if (s->adapters == NULL || (s->rows <= w->adapted_rows && s->adapters->rows.rank <= w->rank)) return 1;
    int64_t row_floats = m->hidden + MOST_PARTS * s->adapters->rows.rank + 2 * m->inner;
    free(e->adapted);
    w->adapted_rows = 0;
    e->adapted = aligned_alloc(64, (size_t)((s->rows * row_floats * 4 + 64 * 4) / 64 * 64));
    if (e->adapted == NULL) return 0;
    char *next = e->adapted;
    w->normed = carve(&next, s->rows * m->hidden * 4);
    w->low = carve(&next, s->rows * MOST_PARTS * s->adapters->rows.rank * 4);
    w->added = carve(&next, s->rows * 2 * m->inner * 4);
    w->adapted_rows = s->rows;
    w->rank = s->adapters->rows.rank;
    return 1;
}

/* An engine: threads and memory for the steps of one model. NULL if it cannot be made. */
Engine *tessera_start(int64_t threads) {
    Engine *e = calloc(1, sizeof *e);
    if (e == NULL) return NULL;
    e->pool = pool_start((int)threads);
    if (e->pool != NULL) return e;
    free(e);
    return NULL;
}

void tessera_end(Engine *e) {
    pool_end(e->pool);
    free(e->memory);
    free(e->adapted);
    free(e);
}

/* Computes a step; returns 0, or 1 if memory does not suffice. */
int64_t tessera_step(Engine *e, const Model *m, const Step *s) {
    if (!reserve(e, m, s->rows) || !reserve_adapters(e, m, s)) return 1;
    Computation c = {m, s, e->space};
    /* No sequence writes the unused rows, which are computed like the others. */
    int64_t attended = m->heads * m->head_dim, used = s->decode.first_row[s->decode.count];
    memset(e->space.attended + used * attended, 0, (size_t)((s->decode.count * s->decode.queries - used) * attended) * sizeof(float));
    pool_run(e->pool, compute_step, &c, 4 + m->layers * loops_of_layer(s));
    return 0;
}

/* Computes the logits of `step->num_logits` rows of `step->normed`; returns as `tessera_step`. */
int64_t tessera_logits(Engine *e, const Model *m, const Step *s) {
    if (!reserve(e, m, s->num_logits)) return 1;
    Computation c = {m, s, e->space};
    pool_run(e->pool, compute_logits, &c, 2);
    return 0;
}
