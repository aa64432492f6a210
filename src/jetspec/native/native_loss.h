/* What slots of a draft head lose against the target's law, and the gradient of it, row by row: `_learn` in train/loss.py is the readable
 * form.
 *
 * A row of logits is read three times (greatest, sum, law) while it lies in a core's cache, and the gradient takes its place.
 */
#ifndef JETSPEC_NATIVE_LOSS_H
#define JETSPEC_NATIVE_LOSS_H

#include "native_math.h"

#define NOWHERE -1e30f /* what stands behind a row's end: without mass, and finite */

typedef struct {
    int64_t rows, teachers, width;
    float *logits;         /* [rows][width]; out: gradient of each row's loss */
    const float *target;   /* [teachers][width] */
    const int64_t *place;  /* [rows], the teacher of each */
    const int64_t *labels; /* [rows], below 0: none; unread where ce is 0 */
    double kl, ce, l1;     /* weights of the terms */
    float *laws;           /* [teachers], scratch: log sum exp */
    int64_t *top;          /* [teachers], scratch: the likeliest token */
    float *value, *shared; /* out: [rows], loss and sum of min(p, q) */
    uint8_t *agree;        /* out: [rows], whether both laws have the same likeliest token */
} loss_job;

static inline lanes part_of_row(const float *x, int64_t left)
{
    if (left >= LANES) return *(const lanes *)x;
    lanes found = all(NOWHERE);
    memcpy(&found, x, sizeof(float) * (size_t)left);
    return found;
}

static inline void put_part(float *x, lanes value, int64_t left)
{
    memcpy(x, &value, sizeof(float) * (size_t)(left < LANES ? left : LANES));
}

/* The greatest of a row, and the first place where it stands; of a row without a number above NOWHERE (all NaN or minus infinity) the
 * first value, because what stands behind its end must not be found. */
static inline float greatest_of_row(const float *x, int64_t width, int64_t *where)
{
    lanes best = all(-INFINITY);
    integers at = {0}, here = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t i = 0; i < width; i += LANES, here += LANES) {
        lanes own = part_of_row(x + i, width - i);
        integers take = own > best;
        best = (lanes)(((integers)own & take) | ((integers)best & ~take));
        at = (here & take) | (at & ~take);
    }
    int first = 0;
    for (int i = 1; i < LANES; i++)
        if (best[i] > best[first] || (best[i] == best[first] && at[i] < at[first])) first = i;
    *where = at[first] < width ? at[first] : 0;
    return at[first] < width ? best[first] : x[0];
}

/* log sum exp of a row. */
static inline float log_mass_of_row(const float *x, int64_t width, float greatest)
{
    lanes sum = {0};
    for (int64_t i = 0; i < width; i += LANES) sum += exp_negative(part_of_row(x + i, width - i) - greatest);
    return greatest + logf(sum_lanes(sum));
}

static inline lanes sign_of(lanes x)
{
    integers up = x > 0.0f, down = x < 0.0f;
    return (lanes)(((integers)all(1.0f) & up) | ((integers)all(-1.0f) & down));
}

static void learn_row(const loss_job *j, int64_t row)
{
    int64_t width = j->width, teacher = j->place[row], label = j->ce != 0.0 ? j->labels[row] : -1, unused;
    float *x = j->logits + row * width, kl = (float)j->kl, l1 = (float)j->l1, ce = label < 0 ? 0.0f : (float)j->ce;
    const float *t = j->target + teacher * width;
    float law = j->laws[teacher], greatest = greatest_of_row(x, width, &unused), own = log_mass_of_row(x, width, greatest);
    float written = label < 0 ? 0.0f : x[label] - own;
    j->agree[row] = x[j->top[teacher]] >= greatest;
    lanes divergence = {0}, distance = {0}, leaning = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        lanes log_q = part_of_row(x + i, width - i) - own, log_p = part_of_row(t + i, width - i) - law;
        lanes q = exp_negative(log_q), p = exp_negative(log_p), gap = q - p;
        divergence += p * (log_p - log_q);
        distance += (lanes)((integers)gap & INT32_MAX);
        if (l1 != 0.0f) {
            leaning += q * sign_of(gap);
            put_part(x + i, q, width - i);
        } else {
            put_part(x + i, kl * gap + ce * q, width - i);
        }
    }
    float apart = sum_lanes(distance), lean = sum_lanes(leaning);
    for (int64_t i = 0; l1 != 0.0f && i < width; i += LANES) {
        lanes q = part_of_row(x + i, width - i), gap = q - exp_negative(part_of_row(t + i, width - i) - law);
        put_part(x + i, kl * gap + ce * q + l1 * q * (sign_of(gap) - lean), width - i);
    }
    if (label >= 0) x[label] -= ce;
    j->value[row] = kl * sum_lanes(divergence) + l1 * apart - ce * written;
    j->shared[row] = 1.0f - 0.5f * apart;
}

#endif
