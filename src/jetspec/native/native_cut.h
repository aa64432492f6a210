/* What top-k, top-p and min-p leave of a row of scores; everything else becomes minus infinity. One row at a time, so that no bit
 * depends on other rows. `sampling.py` says what each option means.
 */
#ifndef JETSPEC_NATIVE_CUT_H
#define JETSPEC_NATIVE_CUT_H

#include "native_select.h"

#define DIGIT_BITS 11
#define DIGITS (1 << DIGIT_BITS)

/* The largest score; NaN if there is one. */
static inline float largest_of(const float *scores, int64_t count)
{
    lanes best = all(-INFINITY);
    integers sick = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        lanes x = some_of(scores + i, count - i, -INFINITY);
        sick |= x != x;
        best = larger(x, best);
    }
    float largest = best[0];
    for (int l = 0; l < LANES; l++) {
        if (sick[l]) return NAN;
        largest = best[l] > largest ? best[l] : largest;
    }
    return largest;
}

/* The sum of exp(score - largest), in one fixed order. */
static inline double mass_of(const float *scores, int64_t count, float largest)
{
    doubles sums[2] = {{0}, {0}};
    for (int64_t i = 0; i < count; i += LANES) {
        lanes x = some_of(scores + i, count - i, -INFINITY);
        half_lanes halves[2];
        memcpy(halves, &x, sizeof x);
        for (int h = 0; h < 2; h++) sums[h] += exp_double(__builtin_convertvector(halves[h], doubles) - (double)largest);
    }
    double total = 0.0;
    for (int h = 0; h < 2; h++)
        for (int l = 0; l < LANES / 2; l++) total += sums[h][l];
    return total;
}

static inline void drop_below(float *scores, int64_t count, float least)
{
    for (int64_t i = 0; i < count; i++)
        if (scores[i] < least) scores[i] = -INFINITY;
}

/* Keep the k largest, and all that equal the least of them. scratch: as for a selection. */
static void keep_top_k(float *scores, int64_t count, int64_t k, int32_t *scratch)
{
    selection s = lay_out(count, scratch);
    take_keys(&s, scores, 0, 0.0f, count);
    int32_t bound = bound_of(s.keys, s.vectors, k), least = INT32_MAX;
    integers lowest = INT32_MAX - (integers){0}; /* of those that reach it: a bound may lie between the two zeros, which are equal */
    for (int64_t v = 0; v < s.vectors; v++) {
        integers key = *(const integers *)(s.keys + v * LANES), lower = (key >= bound) & (key < lowest);
        lowest = (key & lower) | (lowest & ~lower);
    }
    for (int l = 0; l < LANES; l++) least = lowest[l] < least ? lowest[l] : least;
    drop_below(scores, count, value_of_one(least));
}

/* Falling keys, by three passes over digits; `spare` is as long. */
static void sort_falling(uint32_t *keys, uint32_t *spare, int64_t count)
{
    for (int shift = 0; shift < 32; shift += DIGIT_BITS) {
        int64_t starts[DIGITS] = {0}, sum = 0;
        for (int64_t i = 0; i < count; i++) starts[~keys[i] >> shift & (DIGITS - 1)]++;
        for (int d = 0; d < DIGITS; d++) {
            int64_t own = starts[d];
            starts[d] = sum;
            sum += own;
        }
        for (int64_t i = 0; i < count; i++) spare[starts[~keys[i] >> shift & (DIGITS - 1)]++] = keys[i];
        memcpy(keys, spare, sizeof(uint32_t) * (size_t)count);
    }
}

/* Keep the largest scores until their mass reaches top_p, of equal ones the first. Those far below the largest are looked at only if
 * the near ones do not reach it. scratch: [2 * count]. */
static void keep_top_p(float *scores, int64_t count, float largest, double top_p, uint32_t *scratch)
{
    double total = mass_of(scores, count, largest);
    for (float reach = 8.0f;; reach = reach < 64.0f ? reach * 2.0f : INFINITY) {
        float least = largest - reach;
        int64_t found = 0;
        for (int64_t i = 0; i < count; i++) {
            if (!(scores[i] >= least)) continue;
            int32_t bits;
            memcpy(&bits, scores + i, sizeof bits);
            scratch[found++] = (uint32_t)(bits < 0 ? ~bits : bits | INT32_MIN); /* of the order of the floats */
        }
        sort_falling(scratch, scratch + count, found);
        double mass = 0.0;
        int64_t kept = 0, above = 0;
        float last = largest;
        while (kept < found && (kept == 0 || mass < top_p)) {
            int32_t bits = (int32_t)scratch[kept];
            bits = bits < 0 ? bits ^ INT32_MIN : ~bits;
            float value;
            memcpy(&value, &bits, sizeof value);
            if (value < last) above = kept;
            last = value;
            mass += exp((double)value - largest) / total;
            kept++;
        }
        if (mass < top_p && reach < INFINITY) continue;
        int64_t equals = kept - above;
        for (int64_t i = 0; i < count; i++)
            if (scores[i] < last || (scores[i] == last && equals-- <= 0)) scores[i] = -INFINITY;
        return;
    }
}

/* A row as it is drawn from. A row without a finite largest score stays as it is. top_k 0, top_p 1 and min_p 0 are off; scratch:
 * integers for a selection. */
static void cut_row(float *scores, int64_t count, int64_t top_k, double top_p, double log_min_p, int32_t *scratch)
{
    float largest = largest_of(scores, count);
    if (!(largest > -INFINITY && largest < INFINITY)) return;
    if (top_k > 0 && top_k < count) keep_top_k(scores, count, top_k, scratch);
    if (top_p < 1.0) keep_top_p(scores, count, largest, top_p, (uint32_t *)scratch);
    if (log_min_p > -INFINITY) drop_below(scores, count, largest + (float)log_min_p);
}

#endif
