/* What Python calls of the compiled kernels. The largest is a decoder's layers on the CPU in one call: norm, QKV, rotation, cache,
 * attention, output, norm, gate/up, down.
 *
 * One parallel region covers all layers; its threads meet at barriers between the stages, and each stage is divided so that no result
 * depends on the division. Activations are float32 [M][width], the residual stream `x` is updated in place.
 */
#include <stdlib.h>
#include <time.h>

#include "native_attention.h"
#include "native_cut.h"
#include "native_loss.h"
#include "native_math.h"
#include "native_noise.h"
#include "native_pick.h"
#include "native_product.h"
#include "native_scorer.h"
#include "native_train.h"

#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct {
    const float *input_norm, *post_norm, *q_norm, *k_norm; /* q_norm, k_norm may be null */
    matrix qkv, out, gate_up, down;
    int64_t window; /* 0 = unlimited */
} layer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, dim, rotary, inner;
    double eps;
    const layer *table;
    int64_t rows;               /* M */
    const float *cosine, *sine; /* [M][rotary] */
    segments plan;
    float *x;            /* [M][hidden] */
    const int64_t *taps; /* per layer: address where its output goes, or 0 */
    int64_t tap_row;     /* floats per row there */
    int64_t *stages;     /* nanoseconds per stage are added here, waiting included; or null */
} job;

enum { NORM, QKV, PLACE, ATTENTION, OUT, GATE_UP, DOWN, TAP, STAGES };

typedef struct {
    float *normed, *qkv, *mixed, *gated;
    attention_task *tasks;
    int32_t *row_segment;
    int64_t task_count, qkv_row;
} workspace;

/* Which weight kinds a product can read here: bit 0 float32, bit 1 bfloat16, bit 2 float16. */
int jetspec_kinds(void)
{
#if defined(__AVX512F__) || defined(__F16C__)
    return 7;
#else
    return 3;
#endif
}

int64_t jetspec_packed_elements(const matrix *m) { return panels_of(m) * m->k * PANEL; }

/* w [N][K] -> panels; elements are moved as they are, padding is zero. In blocks of 16 k, so that reads and writes stay in the first
 * cache. */
void jetspec_pack(const matrix *m, const void *w, void *packed)
{
    int64_t k_count = m->k, panels = panels_of(m);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t from = 0; from < k_count; from += LANES) {
            int64_t to = from + LANES < k_count ? from + LANES : k_count;
            for (int64_t c = 0; c < PANEL; c++) {
                int64_t n = packed_output(m->n, m->gated, panel, c), at = panel * k_count * PANEL + c;
                if (m->kind == FLOAT32) {
                    const float *row = (const float *)w + n * k_count;
                    for (int64_t k = from; k < to; k++) ((float *)packed)[at + k * PANEL] = n < 0 ? 0.0f : row[k];
                } else {
                    const uint16_t *row = (const uint16_t *)w + n * k_count;
                    for (int64_t k = from; k < to; k++) ((uint16_t *)packed)[at + k * PANEL] = n < 0 ? 0 : row[k];
                }
            }
        }
}

static int64_t thread_id(void)
{
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static int64_t thread_count(void)
{
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

/* One product for all threads. Rows of x and y are apart by x_row and y_row floats. */
void jetspec_product(const matrix *m, const float *x, int64_t x_row, int64_t rows, int64_t mode, float *y, int64_t y_row)
{
#pragma omp parallel
    product(m, x, x_row, rows, (int)mode, y, y_row, thread_id(), thread_count(), 0);
}

/* Rows `index` of x, normed, times the output matrix: hidden [n][H] keeps the normed rows, logits [n][V],
 * or null. */
void jetspec_output(const float *weight, double eps, const matrix *m, const float *x, const int64_t *index, int64_t rows, float *hidden,
                    float *logits)
{
    int64_t width = m->k;
#pragma omp parallel
    {
        int64_t id = thread_id(), threads = thread_count();
        for (int64_t r = id; r < rows; r += threads)
            rms_norm(x + (index ? index[r] : r) * width, weight, width, (float)eps, hidden + r * width);
#pragma omp barrier
        if (logits) product(m, hidden, width, rows, STORE, logits, m->n, id, threads, 0);
    }
}

/* Norm and turn the heads of one row, and write its key and value behind the committed rows. */
static void place_row(const job *j, const layer *l, int64_t index, workspace *w, int64_t row, float *spare)
{
    int64_t dim = j->dim, kv = j->kv_heads, n = w->row_segment[row];
    float *own = w->qkv + row * w->qkv_row;
    const float *cosine = j->cosine + row * j->rotary, *sine = j->sine + row * j->rotary;
    for (int64_t h = 0; h < j->heads + kv; h++) {
        const float *norm = h < j->heads ? l->q_norm : l->k_norm;
        float *head = own + h * dim;
        if (norm) {
            rms_norm(head, norm, dim, (float)j->eps, spare);
            memcpy(head, spare, sizeof(float) * (size_t)dim);
        }
        rotate(head, cosine, sine, j->rotary);
    }
    head_shape shape = {j->heads, kv, dim, 0};
    int64_t at = (j->plan.committed[n] + row - j->plan.starts[n]) * dim;
    for (int64_t h = 0; h < kv; h++) {
        float *keys = keys_of(&j->plan, &shape, index, n, h);
        float *values = keys + kv * j->plan.capacity[n] * dim;
        memcpy(keys + at, own + (j->heads + h) * dim, sizeof(float) * (size_t)dim);
        memcpy(values + at, own + (j->heads + kv + h) * dim, sizeof(float) * (size_t)dim);
    }
}

/* Keys and values of all layers that were made elsewhere, rows [count][2][layers * kv_heads][dim]: norm and turn the keys, and write all
 * into a cache block from row `start` on. norm: [layers * kv_heads][dim]. */
void jetspec_place(const float *rows, const float *norm, const float *cosine, const float *sine, float *block, int64_t count,
                   int64_t layers, int64_t kv_heads, int64_t dim, int64_t rotary, int64_t capacity, int64_t start, double eps)
{
    int64_t heads = layers * kv_heads;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < heads; n++) {
        float *keys = block + ((n / kv_heads * 2 * kv_heads + n % kv_heads) * capacity + start) * dim;
        float *values = keys + kv_heads * capacity * dim;
        for (int64_t r = 0; r < count; r++) {
            const float *own = rows + (r * 2 * heads + n) * dim;
            rms_norm(own, norm + n * dim, dim, (float)eps, keys + r * dim);
            rotate(keys + r * dim, cosine + r * rotary, sine + r * rotary, rotary);
            memcpy(values + r * dim, own + heads * dim, sizeof(float) * (size_t)dim);
        }
    }
}

static int64_t nanoseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The first thread's time since the last call goes to `stage`. */
static inline void count_time(const job *j, int64_t id, int stage, int64_t *since)
{
    if (!j->stages || id) return;
    int64_t now = nanoseconds();
    j->stages[stage] += now - *since;
    *since = now;
}

static void run_layer(const job *j, int64_t index, workspace *w, float *scratch, int64_t id, int64_t threads)
{
    int64_t since = j->stages ? nanoseconds() : 0;
    const layer *l = j->table + index, *next = index + 1 < j->layers ? l + 1 : 0;
    int64_t hidden = j->hidden, rows = j->rows, wide = j->heads * j->dim;
    head_shape shape = {j->heads, j->kv_heads, j->dim, l->window};
    for (int64_t r = id; r < rows; r += threads)
        rms_norm(j->x + r * hidden, l->input_norm, hidden, (float)j->eps, w->normed + r * hidden);
#pragma omp barrier
    count_time(j, id, NORM, &since);
    product(&l->qkv, w->normed, hidden, rows, STORE, w->qkv, w->qkv_row, id, threads, first_panel(&l->out, id, threads));
#pragma omp barrier
    count_time(j, id, QKV, &since);
    for (int64_t r = id; r < rows; r += threads) place_row(j, l, index, w, r, scratch);
#pragma omp barrier
    count_time(j, id, PLACE, &since);
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < w->task_count; t++)
        attend_task(&j->plan, &shape, index, w->tasks[t], w->qkv, w->qkv_row, w->mixed, scratch);
    count_time(j, id, ATTENTION, &since);
    product(&l->out, w->mixed, wide, rows, ADD, j->x, hidden, id, threads, first_panel(&l->gate_up, id, threads));
#pragma omp barrier
    count_time(j, id, OUT, &since);
    for (int64_t r = id; r < rows; r += threads)
        rms_norm(j->x + r * hidden, l->post_norm, hidden, (float)j->eps, w->normed + r * hidden);
#pragma omp barrier
    count_time(j, id, NORM, &since);
    product(&l->gate_up, w->normed, hidden, rows, GATE, w->gated, j->inner, id, threads, first_panel(&l->down, id, threads));
#pragma omp barrier
    count_time(j, id, GATE_UP, &since);
    product(&l->down, w->gated, j->inner, rows, ADD, j->x, hidden, id, threads, next ? first_panel(&next->qkv, id, threads) : 0);
#pragma omp barrier
    count_time(j, id, DOWN, &since);
    float *tap = (float *)(intptr_t)j->taps[index];
    if (!tap) return;
    for (int64_t r = id; r < rows; r += threads) memcpy(tap + r * j->tap_row, j->x + r * hidden, sizeof(float) * (size_t)hidden);
    count_time(j, id, TAP, &since);
}

static int prepare(const job *j, workspace *w)
{
    head_shape shape = {j->heads, j->kv_heads, j->dim, 0};
    int64_t m = j->rows;
    w->qkv_row = (j->heads + 2 * j->kv_heads) * j->dim;
    w->task_count = 0;
    for (int64_t s = 0; s < j->plan.count; s++) w->task_count += attention_blocks(j->plan.counts[s], &shape) * j->kv_heads;
    size_t floats = (size_t)(m * (j->hidden + w->qkv_row + j->heads * j->dim + j->inner)) + 64;
    w->normed = malloc(sizeof(float) * floats);
    w->tasks = malloc(sizeof(attention_task) * (size_t)(w->task_count + 1));
    w->row_segment = malloc(sizeof(int32_t) * (size_t)(m + 1));
    if (!w->normed || !w->tasks || !w->row_segment) return 1;
    w->qkv = w->normed + m * j->hidden;
    w->mixed = w->qkv + m * w->qkv_row;
    w->gated = w->mixed + m * j->heads * j->dim;
    int64_t n = 0;
    for (int64_t s = 0; s < j->plan.count; s++) {
        for (int64_t i = 0; i < j->plan.counts[s]; i++) w->row_segment[j->plan.starts[s] + i] = (int32_t)s;
        for (int64_t b = 0; b < attention_blocks(j->plan.counts[s], &shape); b++)
            for (int64_t h = 0; h < j->kv_heads; h++) w->tasks[n++] = (attention_task){(int32_t)s, (int32_t)h, (int32_t)b};
    }
    return 0;
}

/* All layers of a plan. Returns 0, or 1 without memory. */
int jetspec_layers(const job *j)
{
    workspace w = {0};
    head_shape shape = {j->heads, j->kv_heads, j->dim, 0};
    size_t scratch_bytes = sizeof(float) * (size_t)attention_scratch(&j->plan, &shape) + 64;
    int failed = prepare(j, &w);
    if (!failed) {
#pragma omp parallel
        {
            float *scratch = aligned_alloc(64, (scratch_bytes + 63) / 64 * 64);
            if (!scratch) {
#pragma omp atomic write
                failed = 1;
            }
#pragma omp barrier
            if (!failed)
                for (int64_t index = 0; index < j->layers; index++)
                    run_layer(j, index, &w, scratch, thread_id(), thread_count());
            free(scratch);
        }
    }
    free(w.normed);
    free(w.tasks);
    free(w.row_segment);
    return failed;
}

/* Read `count` floats once, as fast as the memory gives them; for measuring what it gives. */
float jetspec_read(const float *data, int64_t count)
{
    float total = 0.0f;
#pragma omp parallel reduction(+ : total)
    {
        int64_t share = count / thread_count() / 64 * 64;
        const float *from = data + share * thread_id();
        lanes a = {0}, b = {0}, c = {0}, d = {0};
        for (int64_t i = 0; i + 64 <= share; i += 64) {
            for (int64_t line = 0; line < 64; line += 16) __builtin_prefetch(from + i + 4096 + line, 0, 2);
            a += *(const lanes *)(from + i);
            b += *(const lanes *)(from + i + 16);
            c += *(const lanes *)(from + i + 32);
            d += *(const lanes *)(from + i + 48);
        }
        total += sum_lanes(a + b + c + d);
    }
    return total;
}

/* Attention alone, of one layer, for decoders whose other parts run elsewhere. q, k, v: first element and floats per row. */
int jetspec_attend(const segments *plan, int64_t layer_index, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, const float *q,
                   int64_t q_row, const float *k, int64_t k_row, const float *v, int64_t v_row, float *out)
{
    head_shape shape = {heads, kv_heads, dim, window};
    size_t scratch_bytes = sizeof(float) * (size_t)attention_scratch(plan, &shape) + 64;
    int failed = 0;
#pragma omp parallel
    {
        float *scratch = aligned_alloc(64, (scratch_bytes + 63) / 64 * 64);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t n = 0; n < plan->count; n++)
            for (int64_t h = 0; h < kv_heads; h++) {
                float *keys = keys_of(plan, &shape, layer_index, n, h) + plan->committed[n] * dim;
                float *values = keys + kv_heads * plan->capacity[n] * dim;
                for (int64_t i = 0; i < plan->counts[n]; i++) {
                    memcpy(keys + i * dim, k + (plan->starts[n] + i) * k_row + h * dim, sizeof(float) * (size_t)dim);
                    memcpy(values + i * dim, v + (plan->starts[n] + i) * v_row + h * dim, sizeof(float) * (size_t)dim);
                }
            }
        if (!failed)
            for (int64_t n = 0; n < plan->count; n++) {
                int64_t blocks = attention_blocks(plan->counts[n], &shape);
#pragma omp for schedule(dynamic, 1) nowait
                for (int64_t t = 0; t < blocks * kv_heads; t++)
                    attend_task(plan, &shape, layer_index, (attention_task){(int32_t)n, (int32_t)(t % kv_heads), (int32_t)(t / kv_heads)},
                                q, q_row, out, scratch);
            }
        free(scratch);
    }
    return failed;
}

/* A path scorer's candidates and their log-probs for a batch. Returns 0, or 1 without memory. */
int jetspec_markov(const markov_head *h, const markov_job *j)
{
    markov_shared w;
    if (lay_out_shared(h, j->batch * h->depth, &w)) return 1;
    int failed = 0;
#pragma omp parallel
    {
        markov_scratch s;
        void *scratch = lay_out_scratch(h, w.row, &s);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) score_stages(h, j, &w, &s, thread_id(), thread_count());
        free(scratch);
    }
    free(w.gates);
    free(w.added);
    return failed;
}

/* The loss of slots against the target's law, and its gradient. */
void jetspec_loss(const loss_job *j)
{
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t n = 0; n < j->teachers; n++) {
            const float *x = j->target + n * j->width;
            float greatest = greatest_of_row(x, j->width, j->top + n);
            j->laws[n] = log_mass_of_row(x, j->width, greatest);
        }
#pragma omp for schedule(static)
        for (int64_t n = 0; n < j->rows; n++) learn_row(j, n);
    }
}

/* Noise: out [rows][count], for each row's seed in two halves and its position. ids [count], or null for 0, 1, 2, ... */
void jetspec_noise(const uint32_t *low, const uint32_t *high, const uint32_t *positions, int64_t rows, const int64_t *ids, int64_t count,
                   float *out)
{
    int64_t blocks = (count + NOISE_BLOCK - 1) / NOISE_BLOCK;
#pragma omp parallel for schedule(static) if (rows * blocks > 1)
    for (int64_t n = 0; n < rows * blocks; n++) {
        int64_t row = n / blocks, from = n % blocks * NOISE_BLOCK, to = from + NOISE_BLOCK < count ? from + NOISE_BLOCK : count;
        uint32_t key_a, key_b;
        keys_of_row(low[row], high[row], positions[row], &key_a, &key_b);
        noise_in_row(key_a, key_b, ids, from, to, out + row * count);
    }
}

/* Rows [rows][count] of scores as they are drawn from, in place. Returns 0, or 1 without memory. */
int jetspec_cut(float *scores, int64_t rows, int64_t count, int64_t top_k, double top_p, double log_min_p)
{
    int failed = 0;
#pragma omp parallel if (rows > 1)
    {
        int32_t *scratch = malloc(sizeof(int32_t) * (size_t)selection_scratch(count));
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < rows; n++)
            if (scratch) cut_row(scores + n * count, count, top_k, top_p, log_min_p, scratch);
        free(scratch);
    }
    return failed;
}

/* The picks of rows with noise of their own: logits [rows][count], `row` floats apart; noise: address of each row's. */
void jetspec_pick(const float *logits, int64_t row, const int64_t *noise, double temperature, int64_t rows, int64_t count, int64_t *picks)
{
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t n = 0; n < rows; n++)
        picks[n] = pick_of_row(logits + n * row, (const float *)(intptr_t)noise[n], (float)temperature, count);
}

/* Rows [rows][width], normed; inverse [rows]. */
void jetspec_norm(const float *x, const float *weight, double eps, int64_t rows, int64_t width, float *y, float *inverse)
{
#pragma omp parallel for schedule(static) if (rows > PART_ROWS)
    for (int64_t part = 0; part < (rows + PART_ROWS - 1) / PART_ROWS; part++)
        for (int64_t r = part * PART_ROWS; r < rows && r < (part + 1) * PART_ROWS; r++)
            inverse[r] = rms_norm(x + r * width, weight, width, (float)eps, y + r * width);
}

/* Gradients of a norm: dx [rows][width], or null; weight_grad [width]. Returns 0, or 1 without memory. */
int jetspec_norm_back(const float *dy, const float *x, const float *weight, const float *inverse, int64_t rows, int64_t width, float *dx,
                      float *weight_grad)
{
    int64_t parts = (rows + PART_ROWS - 1) / PART_ROWS;
    float *sums = calloc((size_t)(parts * width + 1), sizeof(float));
    if (!sums) return 1;
#pragma omp parallel for schedule(static) if (parts > 1)
    for (int64_t part = 0; part < parts; part++)
        for (int64_t r = part * PART_ROWS; r < rows && r < (part + 1) * PART_ROWS; r++)
            norm_row_back(dy + r * width, x + r * width, weight, inverse[r], width, dx ? dx + r * width : 0, sums + part * width);
    memset(weight_grad, 0, sizeof(float) * (size_t)width);
    for (int64_t part = 0; part < parts; part++)
        for (int64_t i = 0; i < width; i++) weight_grad[i] += sums[part * width + i];
    free(sums);
    return 0;
}

/* silu(gate) * up for `count` items */
void jetspec_gate(const float *gate, const float *up, int64_t count, float *y)
{
#pragma omp parallel for schedule(static) if (count > PART_ITEMS)
    for (int64_t i = 0; i < count; i += LANES) {
        lanes g = some_of(gate + i, count - i, 0.0f), u = some_of(up + i, count - i, 0.0f);
        put_some(y + i, silu(g) * u, count - i);
    }
}

/* Gradients of that */
void jetspec_gate_back(const float *dy, const float *gate, const float *up, int64_t count, float *d_gate, float *d_up)
{
#pragma omp parallel for schedule(static) if (count > PART_ITEMS)
    for (int64_t i = 0; i < count; i += LANES) {
        lanes for_gate, for_up;
        lanes own = some_of(dy + i, count - i, 0.0f), g = some_of(gate + i, count - i, 0.0f), u = some_of(up + i, count - i, 0.0f);
        gate_back(own, g, u, &for_gate, &for_up);
        put_some(d_gate + i, for_gate, count - i);
        put_some(d_up + i, for_up, count - i);
    }
}
