/* Norms and gates of a draft head in training, with their gradients: one walk where torch takes half a dozen.
 *
 * Rows are divided among threads in parts of a fixed size, and a weight's gradient is added up part by part, so that no bit depends on
 * the number of threads. Widths are multiples of 16.
 */
#ifndef JETSPEC_NATIVE_TRAIN_H
#define JETSPEC_NATIVE_TRAIN_H

#include "native_math.h"

#define PART_ROWS 128  /* of a norm */
#define PART_ITEMS 8192 /* of a gate */

/* With n = x * inverse and g = dy * weight: dx = inverse * (g - n * mean(g n)); dy * n is added to the weight's gradient. */
static inline void norm_row_back(const float *dy, const float *x, const float *weight, float inverse, int64_t width, float *dx,
                                 float *weight_grad)
{
    lanes acc = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        lanes n = *(const lanes *)(x + i) * inverse, d = *(const lanes *)(dy + i);
        acc += d * *(const lanes *)(weight + i) * n;
        *(lanes *)(weight_grad + i) += d * n;
    }
    if (!dx) return;
    float mean = sum_lanes(acc) / (float)width;
    for (int64_t i = 0; i < width; i += LANES) {
        lanes n = *(const lanes *)(x + i) * inverse;
        *(lanes *)(dx + i) = inverse * (*(const lanes *)(dy + i) * *(const lanes *)(weight + i) - n * mean);
    }
}

/* With s = 1 / (1 + exp(-gate)): d up = dy * gate * s, d gate = dy * up * s * (1 + gate * (1 - s)). */
static inline void gate_back(lanes dy, lanes gate, lanes up, lanes *d_gate, lanes *d_up)
{
    lanes s = gated(all(1.0f), gate);
    *d_up = dy * gate * s;
    *d_gate = dy * up * s * (1.0f + gate * (1.0f - s));
}

#endif
