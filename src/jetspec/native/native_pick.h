/* The best of logits / T + noise in one walk: what `sampling.py` does with a copy of the logits in four. */
#ifndef JETSPEC_NATIVE_PICK_H
#define JETSPEC_NATIVE_PICK_H

#include "native_math.h"

/* The index of the largest logit / temperature + noise, the lowest of equal ones; -1 where any is NaN or the largest is infinite. */
static inline int64_t pick_of_row(const float *logits, const float *noise, float temperature, int64_t count)
{
    lanes best = all(-INFINITY);
    integers index = {0}, sick = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        lanes l = some_of(logits + i, count - i, -INFINITY), g = some_of(noise + i, count - i, 0.0f);
        lanes score = l / temperature + g;
        integers more = score > best, vector = (int32_t)(i / LANES) - (integers){0};
        best = (lanes)(((integers)score & more) | ((integers)best & ~more));
        index = (vector & more) | (index & ~more);
        sick |= score != score;
    }
    int64_t found = -1;
    float largest = -INFINITY;
    for (int l = 0; l < LANES; l++) {
        if (sick[l]) return -1;
        int64_t at = (int64_t)index[l] * LANES + l;
        if (best[l] > largest || (best[l] == largest && found >= 0 && at < found)) {
            largest = best[l];
            found = at;
        }
    }
    return largest < INFINITY ? found : -1;
}

#endif
