/* Vectors of 16 floats, and the elementwise functions of a decoder layer.
 *
 * Everything here works element by element or row by row in one fixed order, so a row's result never depends on how many rows there
 * are or where it stands. The compiler may fuse a multiplication with the addition that follows it, but must not reorder sums: the
 * flags leave -ffast-math out.
 */
#ifndef JETSPEC_NATIVE_MATH_H
#define JETSPEC_NATIVE_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
typedef float lanes __attribute__((vector_size(64), aligned(4)));
typedef float aligned_lanes __attribute__((vector_size(64), aligned(64)));
typedef int32_t integers __attribute__((vector_size(64), aligned(4)));
typedef uint16_t shorts __attribute__((vector_size(32), aligned(2)));
typedef float half_lanes __attribute__((vector_size(32), aligned(4)));
typedef double doubles __attribute__((vector_size(64), aligned(8)));
typedef int64_t longs __attribute__((vector_size(64), aligned(8)));

static inline lanes all(float x) { return x - (lanes){0}; }

static inline lanes larger(lanes a, lanes b)
{
    integers take = a > b;
    return (lanes)(((integers)a & take) | ((integers)b & ~take));
}

/* 2^n times a polynomial on [-ln2/2, ln2/2], for |x| < 88; relative error below 3e-7. */
static inline lanes exp_in_range(lanes x)
{
    const float rounder = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    lanes n = (x * 1.44269504f + rounder) - rounder;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes p = all(1.9875691e-4f);
    p = p * r + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665795e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 5.0000001e-1f;
    p = p * r * r + r + 1.0f;
    integers bits = (__builtin_convertvector(n, integers) + 127) << 23;
    return p * (lanes)bits;
}

/* exp for x <= 0; 0 below -87, and for minus infinity. */
static inline lanes exp_negative(lanes x)
{
    integers tiny = x < -87.0f;
    lanes safe = (lanes)((integers)x & ~tiny);
    return (lanes)((integers)exp_in_range(safe) & ~tiny);
}

/* x / (1 + exp(-gate)), which is x times the logistic function of `gate` */
static inline lanes gated(lanes x, lanes gate)
{
    lanes z = -gate;
    integers high = z > 87.0f, low = z < -87.0f;
    z = (lanes)(((integers)z & ~high & ~low) | ((integers)all(87.0f) & high) | ((integers)all(-87.0f) & low));
    lanes below = 1.0f + exp_in_range(z);
    below = (lanes)(((integers)below & ~high) | ((integers)all(INFINITY) & high));
    return x / below;
}

static inline lanes silu(lanes x) { return gated(x, x); }

/* The first of 16 floats, as far as there are any `left`, and `rest` behind them */
static inline lanes some_of(const float *x, int64_t left, float rest)
{
    if (left >= LANES) return *(const lanes *)x;
    lanes y = all(rest);
    memcpy(&y, x, sizeof(float) * (size_t)left);
    return y;
}

static inline void put_some(float *to, lanes x, int64_t left)
{
    if (left >= LANES) *(lanes *)to = x;
    else memcpy(to, &x, sizeof(float) * (size_t)left);
}

#define ROUNDER 0x1.8p52         /* adding it rounds a double to an integer, which its last bits then are */
#define LN2_HIGH 0x1.62e42feep-1 /* times an exponent it is exact */
#define LN2_LOW 0x1.a39ef35793c76p-33

/* exp for x <= 0 to about one unit in the last place; 0 below -700, where nothing is left beside the largest. 2^n times the series of
 * exp on [-ln2/2, ln2/2], whose next term is below 1e-17. */
static inline doubles exp_double(doubles x)
{
    longs tiny = x < -700.0;
    x = (doubles)((longs)x & ~tiny);
    doubles n = (x * 0x1.71547652b82fep0 + ROUNDER) - ROUNDER;
    doubles r = x - n * LN2_HIGH - n * LN2_LOW, p = 1.0 / 6227020800.0 - (doubles){0};
    p = p * r + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    longs power = ((longs)(n + ROUNDER) << 52) + 0x3ff0000000000000;
    return (doubles)((longs)(p * (doubles)power) & ~tiny);
}

/* The natural logarithm of positive normal numbers. x = 2^k (1 + f) with 1 + f between sqrt(1/2) and sqrt(2); with s = f / (2 + f),
 * log(1 + f) = 2 atanh(s) = 2 s + s R, R = 2 (s^2 / 3 + s^4 / 5 + ...), is summed as f - (h - s (h + R)) with h = f^2 / 2, because f is
 * exact and s is not (the arrangement is that of e_log.c in fdlibm, Sun Microsystems 1993). */
static inline doubles log_of(doubles x)
{
    longs root = 0x3fe6a09e667f3bcd - (longs){0}; /* sqrt(1/2) */
    longs k = ((longs)x - root) >> 52;
    doubles f = (doubles)((longs)x - (k << 52)) - 1.0;
    doubles whole = (doubles)(k + 0x4338000000000000) - ROUNDER; /* k as a double */
    doubles s = f / (2.0 + f), z = s * s;
    doubles r = z * (2.0 / 21) + 2.0 / 19; /* the next term is below 1e-17 of the sum */
    r = r * z + 2.0 / 17;
    r = r * z + 2.0 / 15;
    r = r * z + 2.0 / 13;
    r = r * z + 2.0 / 11;
    r = r * z + 2.0 / 9;
    r = r * z + 2.0 / 7;
    r = r * z + 2.0 / 5;
    r = r * z + 2.0 / 3;
    r *= z;
    doubles h = 0.5 * f * f;
    return whole * LN2_HIGH - ((h - (s * (h + r) + whole * LN2_LOW)) - f);
}

static inline float sum_lanes(lanes a)
{
    float s[LANES];
    memcpy(s, &a, sizeof s);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) s[i] += s[i + step];
    return s[0];
}

/* out = x / sqrt(mean(x^2) + eps) * weight, one row; returns what x was multiplied with. */
static inline float rms_norm(const float *restrict x, const float *restrict weight, int64_t width, float eps, float *restrict out)
{
    lanes acc = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) acc += *(const lanes *)(x + i) * *(const lanes *)(x + i);
    float sum = sum_lanes(acc);
    for (; i < width; i++) sum = fmaf(x[i], x[i], sum);
    float inverse = 1.0f / sqrtf(sum / (float)width + eps);
    for (i = 0; i + LANES <= width; i += LANES)
        *(lanes *)(out + i) = *(const lanes *)(x + i) * inverse * *(const lanes *)(weight + i);
    for (; i < width; i++) out[i] = x[i] * inverse * weight[i];
    return inverse;
}

/* Turn one head by its position's angles (half-split layout): the first half of `sine` carries the minus sign. */
static inline void rotate(float *restrict x, const float *restrict cosine, const float *restrict sine, int64_t rotary)
{
    int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = fmaf(b, sine[i], a * cosine[i]);
        x[i + half] = fmaf(a, sine[i + half], b * cosine[i + half]);
    }
}

#endif
