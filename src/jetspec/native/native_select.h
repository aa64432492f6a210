/* The k largest of many floats, exactly and in one fixed order: the larger first, of equals the lower index first; NaN counts as
 * largest.
 *
 * Floats become integers of the same order, so no comparison can go astray. The k-th largest of the maxima of groups of 32 is a lower
 * bound for the k-th largest of all: at least k elements reach it, and few more than that. They are collected, cut to k and ranked.
 * The work hardly depends on the data, also where all are equal.
 */
#ifndef JETSPEC_NATIVE_SELECT_H
#define JETSPEC_NATIVE_SELECT_H

#include "native_math.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define GROUP 32                              /* vectors whose lanes have one maximum each */
#define LEAST INT32_MIN                       /* below every key */
#define KEY_OF_MINUS_INFINITY ((int32_t)0x807fffff)

/* n floats as keys. All arrays are whole vectors. */
typedef struct {
    int64_t vectors, groups; /* of keys; of maxima */
    int32_t *keys;           /* [vectors * 16], padded with the key of minus infinity, behind all others of that value */
    int32_t *maxima;         /* [groups * 16] */
    int32_t *found, *places; /* [vectors * 16], scratch: what reaches the bound, and its index */
} selection;

static inline integers key_of(lanes x)
{
    integers bits = (integers)x, nan = x != x;
    integers key = bits ^ ((bits >> 31) & 0x7fffffff);
    return (key & ~nan) | (nan & INT32_MAX);
}

static inline lanes value_of(integers key) { return (lanes)(key ^ ((key >> 31) & 0x7fffffff)); }

static inline float value_of_one(int32_t key) { return value_of(key - (integers){0})[0]; }

static inline int64_t vectors_of(int64_t n) { return (n + LANES - 1) / LANES; }
static inline int64_t groups_of(int64_t n) { return (vectors_of(n) + GROUP - 1) / GROUP; }

/* integers that `lay_out` needs */
static inline int64_t selection_scratch(int64_t n) { return (3 * vectors_of(n) + groups_of(n)) * LANES; }

static inline selection lay_out(int64_t n, int32_t *scratch)
{
    int64_t whole = vectors_of(n) * LANES;
    return (selection){vectors_of(n), groups_of(n), scratch, scratch + 3 * whole, scratch + whole, scratch + 2 * whole};
}

/* Keys and maxima of a + scale * b, or of a alone where b is null. Returns the largest key. */
static inline int32_t take_keys(selection *s, const float *a, const float *b, float scale, int64_t n)
{
    integers best = LEAST - (integers){0};
    for (int64_t g = 0; g < s->groups; g++) {
        integers own = LEAST - (integers){0};
        int64_t end = (g + 1) * GROUP < s->vectors ? (g + 1) * GROUP : s->vectors;
        for (int64_t v = g * GROUP; v < end; v++) {
            int64_t at = v * LANES;
            lanes x = some_of(a + at, n - at, -INFINITY), y = b ? some_of(b + at, n - at, 0.0f) : all(0.0f);
            integers key = key_of(b ? x + scale * y : x), more = key > own;
            *(integers *)(s->keys + v * LANES) = key;
            own = (key & more) | (own & ~more);
        }
        *(integers *)(s->maxima + g * LANES) = own;
        integers more = own > best;
        best = (own & more) | (best & ~more);
    }
    int32_t largest = best[0];
    for (int i = 1; i < LANES; i++) largest = best[i] > largest ? best[i] : largest;
    return largest;
}

static inline int64_t count_reaching(const int32_t *keys, int64_t vectors, int32_t bound)
{
    integers count = {0};
    for (int64_t v = 0; v < vectors; v++) count -= *(const integers *)(keys + v * LANES) >= bound;
    int64_t total = 0;
    for (int i = 0; i < LANES; i++) total += count[i];
    return total;
}

/* The largest bound that at least k keys reach, or one that exactly k reach; LEAST if there are fewer keys. */
static int32_t bound_of(const int32_t *keys, int64_t vectors, int64_t k)
{
    int64_t low = LEAST, high = INT32_MAX;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2, count = count_reaching(keys, vectors, (int32_t)middle);
        if (count >= k) low = middle;
        else high = middle - 1;
        if (count == k) break;
    }
    return (int32_t)low;
}

/* Bit i: whether lane i reaches the bound. */
static inline uint32_t reaching(const int32_t *keys, int32_t bound)
{
#ifdef __AVX512F__
    return _mm512_cmpge_epi32_mask(_mm512_loadu_si512(keys), _mm512_set1_epi32(bound));
#else
    uint32_t mask = 0;
    for (int i = 0; i < LANES; i++) mask |= (uint32_t)(keys[i] >= bound) << i;
    return mask;
#endif
}

/* Index and key of the k largest; k is not above the number of floats. */
static void select_largest(selection *s, int64_t k, int32_t *index, int32_t *keys)
{
    int32_t bound = bound_of(s->maxima, s->groups, k);
    int64_t count = 0;
    for (int64_t v = 0; v < s->vectors; v++)
        for (uint32_t mask = reaching(s->keys + v * LANES, bound); mask; mask &= mask - 1) {
            int32_t place = (int32_t)(v * LANES + __builtin_ctz(mask));
            s->found[count] = s->keys[place];
            s->places[count++] = place;
        }
    for (int64_t i = count; i % LANES; i++) s->found[i] = LEAST;
    int32_t last = bound_of(s->found, vectors_of(count), k);
    int64_t equals = k, kept = 0; /* how many of those that equal `last` are among the k */
    for (int64_t i = 0; i < count; i++) equals -= s->found[i] > last;
    for (int64_t i = 0; i < count; i++) {
        int32_t key = s->found[i];
        if (key < last || (key == last && equals-- <= 0)) continue;
        s->found[kept] = key;
        s->places[kept++] = s->places[i];
    }
    for (int64_t i = 0; i < k; i++) { /* they stand in the order of their indices */
        int32_t own = s->found[i], rank = 0;
        for (int64_t j = 0; j < i; j++) rank += s->found[j] >= own;
        for (int64_t j = i + 1; j < k; j++) rank += s->found[j] > own;
        index[rank] = s->places[i];
        keys[rank] = own;
    }
}

#endif
