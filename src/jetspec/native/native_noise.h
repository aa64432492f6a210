/* Gumbel noise as a function of seed, position and token id: the bits of `noise.py`, one walk over a row.
 *
 * Integers are those of the readable version. The logarithm is correct to less than one unit in the last place of a double, as the C
 * library's is, so a value rounded to float differs from the readable one's in about one of 2^28, by one unit.
 */
#ifndef JETSPEC_NATIVE_NOISE_H
#define JETSPEC_NATIVE_NOISE_H

#include "native_math.h"

#define NOISE_BLOCK 4096 /* numbers that one thread makes in one go */

typedef uint32_t words __attribute__((vector_size(64), aligned(4)));
typedef uint32_t half_words __attribute__((vector_size(32), aligned(4)));

/* A bijection on 32 bits: lowbias32 of C. Wellons, public domain. */
static inline words mixed(words w)
{
    w ^= w >> 16;
    w *= 0x7feb352du;
    w ^= w >> 15;
    w *= 0x846ca68bu;
    return w ^ (w >> 16);
}

static inline uint32_t mixed_one(uint32_t w) { return mixed(w - (words){0})[0]; }

/* The keys of a row: what is asked for, its seed in two halves and the position, and two keys out of them. */
static inline void keys_of_row(uint32_t low, uint32_t high, uint32_t position, uint32_t *key_a, uint32_t *key_b)
{
    uint32_t first = mixed_one(low ^ mixed_one(high ^ 0x9e3779b9u)), second = mixed_one(high ^ mixed_one(low ^ 0x3c6ef372u));
    *key_a = mixed_one(mixed_one(position + first) ^ second);
    *key_b = mixed_one(mixed_one(position ^ second) ^ first);
}

/* -log(-log u) for u = (bits + 1/2) / 2^32 */
static inline half_lanes gumbel_of(half_words bits)
{
    doubles u = (doubles)(__builtin_convertvector(bits, longs) | 0x4330000000000000) - 0x1p52;
    return __builtin_convertvector(-log_of(-log_of((u + 0.5) * 0x1p-32)), half_lanes);
}

/* The noise of 16 tokens of one row */
static inline lanes noise_of(words tokens, uint32_t key_a, uint32_t key_b)
{
    words bits = mixed(mixed(tokens + key_a) ^ key_b);
    half_words halves[2];
    half_lanes found[2];
    lanes out;
    memcpy(halves, &bits, sizeof bits);
    for (int i = 0; i < 2; i++) found[i] = gumbel_of(halves[i]);
    memcpy(&out, found, sizeof out);
    return out;
}

/* Numbers `from` .. `to` - 1 of a row. ids: null stands for 0, 1, 2, ... */
static inline void noise_in_row(uint32_t key_a, uint32_t key_b, const int64_t *ids, int64_t from, int64_t to, float *out)
{
    for (int64_t i = from; i < to; i += LANES) {
        int64_t rest = to - i < LANES ? to - i : LANES;
        words tokens = {0};
        for (int64_t n = 0; n < rest; n++) tokens[n] = (uint32_t)(ids ? ids[i + n] : i + n);
        lanes found = noise_of(tokens, key_a, key_b);
        memcpy(out + i, &found, sizeof(float) * (size_t)rest);
    }
}

#endif
