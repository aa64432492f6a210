/* The path scorer of a block draft head in one call: from the logits of every depth to its candidates and their log-probs below each
 * candidate of the depth before. `MarkovScorer.proposals` in draft/path_scorer.py is the readable form.
 *
 * One parallel region; its threads meet at barriers between the stages. A task is one depth of one sequence and works in one fixed
 * order, and the products give a row the same bits in any company, so nothing depends on the threads or on the rest of the batch.
 */
#ifndef JETSPEC_NATIVE_SCORER_H
#define JETSPEC_NATIVE_SCORER_H

#include <stdlib.h>

#include "native_product.h"
#include "native_select.h"

typedef struct {
    int64_t depth, width, rank, candidates, parents; /* D, Vd, r, K <= Vd, P <= Vd */
    const float *parent_rows;                        /* [V][r], by token id */
    const float *child_rows;                         /* [Vd][r] */
    const int64_t *vocab;                            /* [Vd], ids */
    matrix children;                                 /* child_rows, packed */
    matrix state_gate, row_gate;                     /* [r][H] with the bias, [r][r]; no data: no gate */
} markov_head;

typedef struct {
    int64_t batch;
    const int64_t *roots; /* [B], ids */
    const float *hidden;  /* [B][D][H], unread without a gate */
    const float *base;    /* [B][D][Vd], scores before the scorer */
    const float *scale;   /* [B][D], weight of what the scorer adds; null: 1 */
    int64_t *tokens;      /* out: [B][D][K] */
    float *first;         /* out: [B][K], log-probs below the root */
    float *table;         /* out: [B][D-1][K][K], log-probs below each candidate */
} markov_job;

/* Rows of scratch are whole vectors. Shared by all threads: */
typedef struct {
    int64_t row;     /* r, rounded up */
    float *gates;    /* [B * D][row], the slots' part */
    float *terms;    /* [B * D][row], gated row of the expected parent */
    float *added;    /* [B * D][Vd], what it adds to each logit */
    float *cover;    /* [B * D], log of the mass of the candidates */
    int32_t *chosen; /* [B * D][K], the candidates as rows of the draft vocabulary */
} markov_shared;

/* And of one thread: */
typedef struct {
    selection pick;
    int32_t *index, *keys; /* [max(K, P)] */
    float *rows, *gate;    /* [K][row], of parents */
    float *packed;         /* [panels][r][32], rows of children */
    float *scores;         /* [K][panels * 32] */
    float *base;           /* [panels * 32] */
} markov_scratch;

static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
static inline int64_t panels_width(const markov_head *h) { return round_up(h->candidates, PANEL); }
static inline float scale_of(const markov_job *j, int64_t task) { return j->scale ? j->scale[task] : 1.0f; }

static inline float largest_lane(lanes a)
{
    float best = a[0];
    for (int i = 1; i < LANES; i++) best = a[i] > best ? a[i] : best;
    return best;
}

/* log of the sum of exp(x - best), best being the largest of whole vectors of x; NaN if it is not finite. */
static inline float log_sum(const float *x, int64_t vectors, float best)
{
    lanes sum = {0};
    for (int64_t v = 0; v < vectors; v++) sum += exp_negative(*(const lanes *)(x + v * LANES) - best);
    return isfinite(best) ? logf(sum_lanes(sum)) : NAN;
}

/* rows [n][row] times the logistic function of the slot's gate plus their own. */
static void gate_rows(const markov_head *h, float *rows, int64_t n, int64_t row, const float *slot, float *own)
{
    if (!h->row_gate.data) return;
    product(&h->row_gate, rows, row, n, STORE, own, row, 0, 1, 0);
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < row; c += LANES) {
            lanes *x = (lanes *)(rows + i * row + c);
            *x = gated(*x, *(const lanes *)(own + i * row + c) + *(const lanes *)(slot + c));
        }
}

/* The weighted row of the parent that a depth can expect: the root's for the first, else the mean over likely tokens before it. */
static void expected_term(const markov_head *h, const markov_job *j, markov_shared *w, markov_scratch *s, int64_t task)
{
    float *term = w->terms + task * w->row, share[h->parents], sum = 0.0f;
    if (task % h->depth == 0) {
        memcpy(term, h->parent_rows + j->roots[task / h->depth] * h->rank, sizeof(float) * (size_t)h->rank);
    } else {
        take_keys(&s->pick, j->base + (task - 1) * h->width, 0, 0.0f, h->width);
        select_largest(&s->pick, h->parents, s->index, s->keys);
        for (int64_t i = 0; i < h->parents; i++) sum += share[i] = expf(value_of_one(s->keys[i]) - value_of_one(s->keys[0]));
        for (int64_t i = 0; i < h->parents; i++) {
            const float *from = h->parent_rows + h->vocab[s->index[i]] * h->rank;
            for (int64_t c = 0; c < h->rank; c++) term[c] = fmaf(share[i] / sum, from[c], term[c]);
        }
    }
    gate_rows(h, term, 1, w->row, w->gates + task * w->row, s->gate);
    for (int64_t c = 0; c < h->rank; c++) term[c] *= scale_of(j, task);
}

/* The candidates of a depth, and the mass that they have below the expected parent. */
static void choose(const markov_head *h, const markov_job *j, markov_shared *w, markov_scratch *s, int64_t task)
{
    int64_t k = h->candidates;
    int32_t *index = w->chosen + task * k;
    float best = value_of_one(take_keys(&s->pick, j->base + task * h->width, w->added + task * h->width, 1.0f, h->width));
    lanes sum = {0}, sum_of_chosen = {0};
    for (int64_t v = 0; v < s->pick.vectors; v++) sum += exp_negative(value_of(*(const integers *)(s->pick.keys + v * LANES)) - best);
    float all_mass = isfinite(best) ? logf(sum_lanes(sum)) : NAN;
    select_largest(&s->pick, k, index, s->keys);
    for (int64_t i = 0; i < k; i++) j->tokens[task * k + i] = h->vocab[index[i]];
    for (int64_t i = k; i % LANES; i++) s->keys[i] = KEY_OF_MINUS_INFINITY;
    for (int64_t i = 0; i < k; i += LANES) sum_of_chosen += exp_negative(value_of(*(const integers *)(s->keys + i)) - best);
    w->cover[task] = logf(sum_lanes(sum_of_chosen)) - all_mass;
    if (task % h->depth) return;
    for (int64_t i = 0; i < k; i++) j->first[task / h->depth * k + i] = value_of_one(s->keys[i]) - best - all_mass;
}

/* Rows of the candidates as a product wants them: panels of 32 columns, zeros behind the last. */
static void pack_children(const markov_head *h, const int32_t *index, float *packed)
{
    for (int64_t c = 0; c < panels_width(h); c++) {
        const float *from = c < h->candidates ? h->child_rows + index[c] * h->rank : 0;
        float *to = packed + c / PANEL * h->rank * PANEL + c % PANEL;
        for (int64_t i = 0; i < h->rank; i++) to[i * PANEL] = from ? from[i] : 0.0f;
    }
}

/* Log-probs of a depth's candidates below each candidate of the depth before. */
static void condition(const markov_head *h, const markov_job *j, markov_shared *w, markov_scratch *s, int64_t task)
{
    int64_t k = h->candidates, wide = panels_width(h), row = w->row;
    const int32_t *own = w->chosen + task * k, *before = own - k;
    float scale = scale_of(j, task), cover = w->cover[task];
    float *out = j->table + (task / h->depth * (h->depth - 1) + task % h->depth - 1) * k * k;
    for (int64_t a = 0; a < k; a++)
        memcpy(s->rows + a * row, h->parent_rows + h->vocab[before[a]] * h->rank, sizeof(float) * (size_t)h->rank);
    gate_rows(h, s->rows, k, row, w->gates + task * row, s->gate);
    pack_children(h, own, s->packed);
    matrix children = {s->packed, 0, wide, h->rank, FLOAT32, 0};
    product(&children, s->rows, row, k, STORE, s->scores, wide, 0, 1, 0);
    for (int64_t b = 0; b < wide; b++) s->base[b] = b < k ? j->base[task * h->width + own[b]] : -INFINITY;
    for (int64_t a = 0; a < k; a++) {
        float *x = s->scores + a * wide;
        lanes best = all(-INFINITY);
        for (int64_t b = 0; b < wide; b += LANES) {
            *(lanes *)(x + b) = *(const lanes *)(s->base + b) + *(const lanes *)(x + b) * scale;
            best = larger(*(const lanes *)(x + b), best);
        }
        float most = largest_lane(best), norm = most + log_sum(x, wide / LANES, most) - cover;
        for (int64_t b = 0; b < wide; b += LANES) *(lanes *)(x + b) -= norm;
        memcpy(out + a * k, x, sizeof(float) * (size_t)k);
    }
}

/* Zeroed, so that what stands behind a row's end is finite. Returns 0, or 1 without memory. */
static int lay_out_shared(const markov_head *h, int64_t tasks, markov_shared *w)
{
    w->row = round_up(h->rank, LANES);
    int64_t rows = round_up(tasks * w->row, LANES), logits = round_up(tasks * h->width, LANES);
    float *at = calloc((size_t)(2 * rows + tasks * (1 + h->candidates)), sizeof(float));
    w->added = malloc(sizeof(float) * (size_t)(logits + 1));
    w->gates = at;
    w->terms = at + rows;
    w->cover = at + 2 * rows;
    w->chosen = (int32_t *)(w->cover + tasks);
    if (at && w->added) return 0;
    free(at);
    free(w->added);
    return 1;
}

static void *lay_out_scratch(const markov_head *h, int64_t row, markov_scratch *s)
{
    int64_t k = h->candidates, wide = panels_width(h), most = round_up(k > h->parents ? k : h->parents, LANES);
    int64_t packed = wide * h->rank, rows = k * row, scores = k * wide;
    size_t count = (size_t)(packed + 2 * rows + scores + wide + 2 * most + selection_scratch(h->width));
    float *at = aligned_alloc(64, round_up((int64_t)(sizeof(float) * count), 64));
    if (!at) return 0;
    s->packed = at; /* first: a product wants whole cache lines */
    s->rows = at + packed;
    s->gate = s->rows + rows;
    s->scores = s->gate + rows;
    s->base = s->scores + scores;
    s->index = (int32_t *)(s->base + wide);
    s->keys = s->index + most;
    s->pick = lay_out(h->width, s->keys + most);
    memset(s->rows, 0, sizeof(float) * (size_t)(2 * rows));
    return at;
}

static void score_stages(const markov_head *h, const markov_job *j, markov_shared *w, markov_scratch *s, int64_t id, int64_t threads)
{
    int64_t tasks = j->batch * h->depth;
    if (h->state_gate.data) product(&h->state_gate, j->hidden, h->state_gate.k, tasks, STORE, w->gates, w->row, id, threads, 0);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tasks; t++) expected_term(h, j, w, s, t);
    product(&h->children, w->terms, w->row, tasks, STORE, w->added, h->width, id, threads, 0);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tasks; t++) choose(h, j, w, s, t);
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < tasks; t++)
        if (t % h->depth) condition(h, j, w, s, t);
}

#endif
