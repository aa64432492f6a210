/* Attention of a packed plan, straight on the cache.
 *
 * Up to 16 query rows that share a key head are the lanes of one vector, so a key is multiplied with all of them at once and no sum
 * runs across lanes. Per query the operations are those of a sequence that holds only the keys it may see, in the order of their
 * positions: a hidden key takes part with weight 0, which leaves every sum of finite values as it was. So a row has the same bits
 * alone, in a tree and in any batch.
 *
 * Cache block of a sequence: [layers][2][kv_heads][capacity][dim]; dim is a multiple of 16.
 */
#ifndef JETSPEC_NATIVE_ATTENTION_H
#define JETSPEC_NATIVE_ATTENTION_H

#include "native_math.h"

#define KEYS 8   /* scored at once: enough independent sums to hide the latency of each */
#define AHEAD 16 /* rows of keys and values that are fetched before they are needed */

typedef struct {
    int64_t count;                                        /* segments */
    const int64_t *starts, *counts, *committed, *capacity; /* per segment */
    const int64_t *blocks;                                /* address of each sequence's cache block */
    const int64_t *masks;                                 /* address of uint8 [count][count], 0 = causal */
    const int64_t *positions;                             /* [M], absolute */
    int64_t longest;                                      /* largest committed + count */
} segments;

typedef struct {
    int64_t heads, kv_heads, dim, window; /* window 0 = unlimited */
} head_shape;

typedef struct {
    int32_t segment, kv_head, block; /* block: 16 lanes out of counts * groups */
} attention_task;

static inline int64_t attention_blocks(int64_t rows, const head_shape *h) { return (rows * (h->heads / h->kv_heads) + LANES - 1) / LANES; }

/* floats that one thread needs */
static inline int64_t attention_scratch(const segments *s, const head_shape *h)
{
    return (s->longest + h->dim) * LANES + (s->longest + LANES - 1) / LANES * LANES;
}

static inline float *keys_of(const segments *s, const head_shape *h, int64_t layer, int64_t segment, int64_t kv_head)
{
    float *base = (float *)(intptr_t)s->blocks[segment];
    return base + (layer * 2 * h->kv_heads + kv_head) * s->capacity[segment] * h->dim;
}

/* The row `ahead` rows behind this one will be needed soon. A sequence's rows come from memory, and the processor's own look ahead ends
 * with each page. The row need not exist, so its address is a number. */
static inline void fetch(const float *row, int64_t ahead, int64_t dim)
{
    uintptr_t address = (uintptr_t)row + (uintptr_t)(ahead * dim) * sizeof(float);
    for (int64_t d = 0; d < dim; d += LANES) __builtin_prefetch((const void *)(address + (uintptr_t)d * sizeof(float)));
}

/* Scores of `count` keys (a constant after inlining) for all lanes: each is a sum over d = 0, 1, ... */
__attribute__((always_inline)) static inline void scores(const int count, const float *restrict q, const float *const *keys, int64_t dim,
                                                         lanes *restrict out)
{
    lanes acc[KEYS];
    for (int c = 0; c < count; c++) acc[c] = (lanes){0};
    for (int64_t d = 0; d < dim; d++) {
        lanes own = *(const aligned_lanes *)(q + d * LANES);
        for (int c = 0; c < count; c++) acc[c] += own * keys[c][d];
    }
    for (int c = 0; c < count; c++) out[c] = acc[c];
}

/* out of four lanes += weights x values, `width` (a constant after inlining) vectors of 16 dimensions. first: the values have not been
 * read yet. */
__attribute__((always_inline)) static inline void mix(const int width, int first, int64_t total, int64_t committed, const int32_t *own,
                                                      const float *weights, const float *values, int64_t dim, lanes (*acc)[4])
{
    for (int l = 0; l < 4; l++)
        for (int i = 0; i < width; i++) acc[l][i] = (lanes){0};
    for (int64_t j = 0; j < total; j++) {
        const float *row = values + (j < committed ? j : committed + own[j - committed]) * dim;
        const float *w = weights + j * LANES;
        lanes v[4];
        if (first) fetch(row, AHEAD, dim);
        for (int i = 0; i < width; i++) v[i] = *(const lanes *)(row + i * LANES);
        for (int l = 0; l < 4; l++)
            for (int i = 0; i < width; i++) acc[l][i] += w[l] * v[i];
    }
}

/* q: first element, floats per row; head h of row r at q + r * q_row + h * dim. out: [M][heads][dim]. */
static void attend_task(const segments *s, const head_shape *h, int64_t layer, attention_task task, const float *q, int64_t q_row,
                        float *out, float *scratch)
{
    int64_t groups = h->heads / h->kv_heads, dim = h->dim, n = task.segment;
    int64_t start = s->starts[n], count = s->counts[n], committed = s->committed[n];
    const uint8_t *mask = (const uint8_t *)(intptr_t)s->masks[n];
    const float *keys = keys_of(s, h, layer, n, task.kv_head);
    const float *values = keys + h->kv_heads * s->capacity[n] * dim;
    float *weights = scratch, *qt = weights + s->longest * LANES;
    int32_t *own = (int32_t *)(qt + dim * LANES);
    int64_t first = task.block * LANES, used = count * groups - first;
    if (used > LANES) used = LANES;
    float scale = 1.0f / sqrtf((float)dim);

    int64_t rows[LANES];
    for (int64_t l = 0; l < LANES; l++) {
        rows[l] = (first + (l < used ? l : used - 1)) / groups; /* idle lanes repeat the last one */
        int64_t head = task.kv_head * groups + (first + (l < used ? l : used - 1)) % groups;
        const float *from = q + (start + rows[l]) * q_row + head * dim;
        for (int64_t d = 0; d < dim; d++) qt[d * LANES + l] = from[d] * scale;
    }
    int64_t seen = 0;
    for (int64_t j = 0; j < count; j++) { /* own rows that some lane sees */
        int visible = 0;
        for (int64_t l = 0; l < used && !visible; l++) visible = mask ? mask[rows[l] * count + j] : j <= rows[l];
        if (visible) own[seen++] = (int32_t)j;
    }
    int64_t low[LANES], begin = 0, hidden_below = 0;
    for (int64_t l = 0; l < LANES; l++) low[l] = 0;
    if (h->window) { /* a row sees the `window` latest positions, its own included */
        for (int64_t l = 0; l < LANES; l++) {
            low[l] = s->positions[start + rows[l]] - h->window + 1;
            if (low[l] < 0) low[l] = 0;
            begin = l == 0 || low[l] < begin ? low[l] : begin;
            hidden_below = low[l] > hidden_below ? low[l] : hidden_below;
        }
        if (begin > committed) begin = committed;
    }
    const float *near_keys = keys + begin * dim, *near_values = values + begin * dim;
    int64_t before = committed - begin, total = before + seen;
    lanes best = all(-INFINITY);
    for (int64_t j = 0; j < total; j += KEYS) {
        const float *some[KEYS];
        lanes got[KEYS];
        int64_t left = total - j < KEYS ? total - j : KEYS;
        for (int64_t c = 0; c < left; c++) {
            some[c] = near_keys + (j + c < before ? j + c : before + own[j + c - before]) * dim;
            fetch(some[c], AHEAD, dim);
        }
        if (left == KEYS) scores(KEYS, qt, some, dim, got);
        else
            for (int64_t c = 0; c < left; c++) scores(1, qt, some + c, dim, got + c);
        for (int64_t c = 0; c < left; c++) {
            int64_t at = j + c;
            lanes score = got[c];
            if (at >= before && (count > 1 || h->window)) {
                int64_t node = own[at - before];
                for (int64_t l = 0; l < LANES; l++) {
                    int visible = mask ? mask[rows[l] * count + node] : node <= rows[l];
                    if (!visible || (h->window && s->positions[start + node] < low[l])) score[l] = -INFINITY;
                }
            } else if (begin + at < hidden_below) {
                for (int64_t l = 0; l < LANES; l++)
                    if (begin + at < low[l]) score[l] = -INFINITY;
            }
            *(lanes *)(weights + at * LANES) = score;
            best = larger(score, best);
        }
    }
    lanes sum = {0};
    for (int64_t j = 0; j < total; j++) {
        lanes e = exp_negative(*(lanes *)(weights + j * LANES) - best);
        *(lanes *)(weights + j * LANES) = e;
        sum += e;
        if (j < AHEAD) fetch(near_values, j, dim);
    }
    lanes inverse = 1.0f / sum;
    for (int64_t l = 0; l < used; l += 4)
        for (int64_t d = 0; d < dim; d += 4 * LANES) {
            lanes acc[4][4];
            int64_t width = dim - d < 4 * LANES ? (dim - d) / LANES : 4;
            const float *w = weights + l, *v = near_values + d;
            if (width == 4) mix(4, l == 0, total, before, own, w, v, dim, acc);
            else if (width == 3) mix(3, l == 0, total, before, own, w, v, dim, acc);
            else if (width == 2) mix(2, l == 0, total, before, own, w, v, dim, acc);
            else mix(1, l == 0, total, before, own, w, v, dim, acc);
            for (int64_t i = l; i < l + 4 && i < used; i++) {
                int64_t head = task.kv_head * groups + (first + i) % groups;
                float *to = out + ((start + rows[i]) * h->heads + head) * dim + d;
                for (int64_t c = 0; c < width; c++) *(lanes *)(to + c * LANES) = acc[i - l][c] * inverse[i];
            }
        }
}

#endif
