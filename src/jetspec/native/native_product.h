/* Products of a few rows with a frozen matrix: y [M][N] = x [M][K] W [N][K]^T.
 *
 * The weight is packed once into panels of 32 outputs, [N/32][K][32]. A product reads each panel from memory once and keeps one
 * accumulator per row and output in registers. Every output is the sum over k = 0, 1, ... in this order, so its bits depend neither on
 * M nor on the row's place nor on the number of threads. While one panel is worked on, the next is fetched.
 *
 * Weights of 16 bits (bfloat16, float16) widen exactly, so they give the same bits as their float32 copies at half the traffic.
 */
#ifndef JETSPEC_NATIVE_PRODUCT_H
#define JETSPEC_NATIVE_PRODUCT_H

#include "native_math.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define PANEL 32
#ifdef __AVX512F__
#define TILE_ROWS 12 /* 24 accumulators, two weights and a broadcast fit 32 registers */
#else
#define TILE_ROWS 3 /* the same for 16 registers of half the width */
#endif

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum { STORE = 0, ADD = 1, GATE = 2 }; /* y = p; y += p; y [M][N/2] = silu(gate) * up */

typedef struct {
    const void *data;  /* packed */
    const float *bias; /* [panels * 32], packed like the outputs, or null */
    int64_t n, k, kind;
    int64_t gated; /* a panel holds 16 outputs of the first half of N and their 16 partners of the second */
} matrix;

static inline int64_t panels_of(const matrix *m) { return m->gated ? (m->n / 2 + 15) / 16 : (m->n + PANEL - 1) / PANEL; }
static inline int64_t element_bytes(int64_t kind) { return kind == FLOAT32 ? 4 : 2; }

/* Which output of W stands in column c of a panel; -1 for padding. */
static inline int64_t packed_output(int64_t n, int64_t gated, int64_t panel, int64_t c)
{
    int64_t half = n / 2, row = gated ? panel * 16 + c % 16 : panel * PANEL + c;
    if (!gated) return row < n ? row : -1;
    return row >= half ? -1 : c < 16 ? row : half + row;
}

__attribute__((always_inline)) static inline lanes widen(const void *w, int64_t at, const int kind)
{
    if (kind == FLOAT32) return *(const aligned_lanes *)((const float *)w + at);
    const uint16_t *from = (const uint16_t *)w + at;
    if (kind == BFLOAT16) return (lanes)(__builtin_convertvector(*(const shorts *)from, integers) << 16);
#if defined(__AVX512F__) /* compilers convert vectors of halves one by one, so ask for the instruction */
    return (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    lanes wide;
    for (int half = 0; half < 2; half++) {
        __m256 part = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8 * half)));
        memcpy((float *)&wide + 8 * half, &part, sizeof part);
    }
    return wide;
#else
    return (lanes){0}; /* never packed so: see jetspec_kinds */
#endif
}

/* One panel times `rows` rows; both are constants after inlining. `fetch` and `stride`: bytes to prefetch per k. */
__attribute__((always_inline)) static inline void tile(const int rows, const int kind, const float *restrict x, int64_t row,
                                                       const void *restrict w, int64_t k_count, const char *fetch, int64_t stride,
                                                       float (*restrict out)[PANEL])
{
    lanes a[TILE_ROWS], b[TILE_ROWS];
    for (int m = 0; m < rows; m++) a[m] = b[m] = (lanes){0};
    for (int64_t k = 0; k < k_count; k++) {
        lanes w0 = widen(w, k * PANEL, kind), w1 = widen(w, k * PANEL + LANES, kind);
        if (stride) __builtin_prefetch(fetch + k * stride, 0, 2);
        if (stride == 128) __builtin_prefetch(fetch + k * stride + 64, 0, 2);
        _Pragma("GCC unroll 16") for (int m = 0; m < rows; m++)
        {
            lanes s = all(x[m * row + k]);
            a[m] += s * w0;
            b[m] += s * w1;
        }
    }
    for (int m = 0; m < rows; m++) {
        *(lanes *)out[m] = a[m];
        *(lanes *)(out[m] + LANES) = b[m];
    }
}

#define TILE_CASE(rows) \
    case rows: \
        if (stride == 128) tile(rows, kind, x, row, w, k, fetch, 128, out); \
        else if (stride == 64) tile(rows, kind, x, row, w, k, fetch, 64, out); \
        else tile(rows, kind, x, row, w, k, fetch, 0, out); \
        break;
#define TILES(name, kind_) \
    static void name(int64_t rows, const float *x, int64_t row, const void *w, int64_t k, const char *fetch, int64_t stride, \
                     float (*out)[PANEL]) \
    { \
        const int kind = kind_; \
        switch (rows) { \
            TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASES \
        } \
    }
#if TILE_ROWS == 12
#define TILE_CASES \
    TILE_CASE(4) TILE_CASE(5) TILE_CASE(6) TILE_CASE(7) TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12)
#else
#define TILE_CASES
#endif
TILES(tile_float32, FLOAT32)
TILES(tile_bfloat16, BFLOAT16)
TILES(tile_float16, FLOAT16)

static void finish_tile(const matrix *m, int64_t panel, int64_t rows, float (*t)[PANEL], int mode, float *y, int64_t y_row)
{
    const float *bias = m->bias ? m->bias + panel * PANEL : 0;
    int64_t width = mode == GATE ? m->n / 2 - panel * 16 : m->n - panel * PANEL;
    int64_t limit = mode == GATE ? 16 : PANEL;
    if (width > limit) width = limit;
    for (int64_t r = 0; r < rows; r++) {
        float *to = y + r * y_row + panel * limit;
        lanes p[2];
        memcpy(p, t[r], sizeof p);
        if (bias) {
            p[0] += *(const lanes *)bias;
            p[1] += *(const lanes *)(bias + LANES);
        }
        if (mode == GATE) p[0] = silu(p[0]) * p[1];
        if (mode == ADD && width == PANEL) {
            p[0] += *(const lanes *)to;
            p[1] += *(const lanes *)(to + LANES);
        } else if (mode == ADD) {
            for (int64_t c = 0; c < width; c++) ((float *)p)[c] += to[c];
        }
        memcpy(to, p, sizeof(float) * (size_t)width);
    }
}

/* The panels of thread `id` of `threads`. `after`: what the thread reads next from memory, or null. */
static void product(const matrix *m, const float *x, int64_t x_row, int64_t rows, int mode, float *y, int64_t y_row, int64_t id,
                    int64_t threads, const char *after)
{
    int64_t panels = panels_of(m), first = panels * id / threads, last = panels * (id + 1) / threads;
    int64_t blocks = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t bytes = m->k * PANEL * element_bytes(m->kind);
    int64_t lines_per_k = PANEL * element_bytes(m->kind) / 64;
    float t[TILE_ROWS][PANEL] __attribute__((aligned(64)));
    for (int64_t panel = first; panel < last; panel++) {
        const char *w = (const char *)m->data + panel * bytes;
        const char *next = panel + 1 < last ? w + bytes : after;
        int64_t done = 0;
        for (int64_t block = 0; block < blocks; block++) {
            int64_t count = (rows - done + blocks - block - 1) / (blocks - block);
            int64_t stride = !next || block >= lines_per_k ? 0 : blocks == 1 ? 64 * lines_per_k : 64;
            const char *fetch = next ? next + block * m->k * 64 : 0;
            const float *from = x + done * x_row;
            if (m->kind == FLOAT32) tile_float32(count, from, x_row, w, m->k, fetch, stride, t);
            else if (m->kind == BFLOAT16) tile_bfloat16(count, from, x_row, w, m->k, fetch, stride, t);
            else tile_float16(count, from, x_row, w, m->k, fetch, stride, t);
            finish_tile(m, panel, count, t, mode, y + done * y_row, y_row);
            done += count;
        }
    }
}

/* Where a thread begins to read a matrix. */
static inline const char *first_panel(const matrix *m, int64_t id, int64_t threads)
{
    return (const char *)m->data + panels_of(m) * id / threads * m->k * PANEL * element_bytes(m->kind);
}

#endif
