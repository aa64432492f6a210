/* Attention of a packed plan on the CPU, float32.
 *
 * One task is one key head of one segment. A task first writes the segment's new keys and values behind the committed rows, then
 * works through its query rows. Each query row is computed by the same sequence of operations whatever else is in the plan, so the
 * result of a row does not depend on the batch or on the tree around it.
 *
 * Cache block of a sequence: [layers][2][kv_heads][capacity][dim]; dim is a multiple of 16.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
typedef float lanes __attribute__((vector_size(64), aligned(4)));

/* exp for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2]; relative error below 3e-7, 0 below -87. */
static inline float exp_negative(float x)
{
    float n = nearbyintf(x * 1.44269504f);
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691e-4f;
    p = fmaf(p, r, 1.3981999e-3f);
    p = fmaf(p, r, 8.3334519e-3f);
    p = fmaf(p, r, 4.1665795e-2f);
    p = fmaf(p, r, 1.6666665e-1f);
    p = fmaf(p, r, 5.0000001e-1f);
    p = fmaf(p * r, r, r) + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

static inline float sum_lanes(lanes a)
{
    float s[LANES];
    memcpy(s, &a, sizeof s);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) s[i] += s[i + step];
    return s[0];
}

/* out[dim] = softmax over the visible keys x values. Visible are the first `committed` rows and then `seen` rows of the segment itself,
 * named by `own`; hidden rows take no part, so the operations are those of a sequence that never had them. */
static void one_query(const float *q, const float *keys, const float *values, int64_t committed, int64_t seen, const int32_t *own,
                      int64_t dim, float scale, float *weights, float *out)
{
    int64_t total = committed + seen;
    float best = -INFINITY;
    for (int64_t j = 0; j < total; j++) {
        const float *key = keys + (j < committed ? j : committed + own[j - committed]) * dim;
        lanes acc = {0};
        for (int64_t d = 0; d < dim; d += LANES) acc += *(const lanes *)(q + d) * *(const lanes *)(key + d);
        float s = sum_lanes(acc) * scale;
        weights[j] = s;
        best = s > best ? s : best;
    }
    for (int64_t j = 0; j < total; j++) weights[j] = exp_negative(weights[j] - best);
    float sum = 0.0f;
    for (int64_t j = 0; j < total; j++) sum += weights[j];
    float inverse = 1.0f / sum;
    for (int64_t d = 0; d < dim; d += 4 * LANES) {
        int64_t width = dim - d < 4 * LANES ? (dim - d) / LANES : 4;
        lanes acc[4] = {{0}, {0}, {0}, {0}};
        for (int64_t j = 0; j < total; j++) {
            const float *row = values + (j < committed ? j : committed + own[j - committed]) * dim + d;
            float w = weights[j];
            if (width == 4)
                for (int i = 0; i < 4; i++) acc[i] += w * *(const lanes *)(row + i * LANES);
            else
                for (int64_t i = 0; i < width; i++) acc[i] += w * *(const lanes *)(row + i * LANES);
        }
        for (int64_t i = 0; i < width; i++) *(lanes *)(out + d + i * LANES) = acc[i] * inverse;
    }
}

/* segments: number of segments; starts, counts, committed, capacity: per segment; blocks: address of each sequence's cache block;
 * masks: address of uint8 [count][count] per segment, 0 = causal. q, k, v: first element and floats per row. out: [M][heads][dim].
 * longest: largest committed + count. Returns 0, or 1 without memory. */
int jetspec_attend(int64_t segments, const int64_t *starts, const int64_t *counts, const int64_t *committed, const int64_t *capacity,
                   const int64_t *blocks, const int64_t *masks, int64_t layer, int64_t heads, int64_t kv_heads, int64_t dim,
                   const float *q, int64_t q_row, const float *k, int64_t k_row, const float *v, int64_t v_row, float *out,
                   int64_t longest)
{
    int64_t groups = heads / kv_heads;
    float scale = 1.0f / sqrtf((float)dim);
    int failed = 0;
#pragma omp parallel
    {
        float *weights = malloc(sizeof(float) * (size_t)longest);
        int32_t *own = malloc(sizeof(int32_t) * (size_t)longest);
        if (!weights || !own) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t task = 0; task < segments * kv_heads; task++) {
                int64_t s = task / kv_heads, h = task % kv_heads;
                int64_t start = starts[s], count = counts[s], length = committed[s];
                float *base = (float *)(intptr_t)blocks[s];
                float *keys = base + ((layer * 2) * kv_heads + h) * capacity[s] * dim;
                float *values = keys + kv_heads * capacity[s] * dim;
                for (int64_t i = 0; i < count; i++) {
                    memcpy(keys + (length + i) * dim, k + (start + i) * k_row + h * dim, sizeof(float) * (size_t)dim);
                    memcpy(values + (length + i) * dim, v + (start + i) * v_row + h * dim, sizeof(float) * (size_t)dim);
                }
                const uint8_t *mask = (const uint8_t *)(intptr_t)masks[s];
                for (int64_t i = 0; i < count; i++) {
                    int64_t seen = 0, last = mask ? count : i + 1;
                    for (int64_t j = 0; j < last; j++)
                        if (!mask || mask[i * count + j]) own[seen++] = (int32_t)j;
                    for (int64_t g = 0; g < groups; g++) {
                        int64_t head = h * groups + g;
                        one_query(q + (start + i) * q_row + head * dim, keys, values, length, seen, own, dim, scale, weights,
                                  out + ((start + i) * heads + head) * dim);
                    }
                }
            }
        }
        free(weights);
        free(own);
    }
    return failed;
}
