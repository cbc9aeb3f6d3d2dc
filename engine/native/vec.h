/* Portable SIMD for the kernels: compiler vector extensions, one width per instruction set.
 *
 * The same source is compiled once per instruction set (see hatch_build.py); everything here is
 * static, so the libraries share no symbols but the exported ones. Plain GNU C: gcc and clang.
 */
#ifndef HALFMOON_VEC_H
#define HALFMOON_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define PANEL 16 /* columns of a packed panel: one cache line of floats */
#if defined(__AVX512F__)
#define LANES 16
#define TILE_ROWS 8 /* a register tile of 8 rows x 2 panels: 16 of 32 registers */
#define TILE_PANELS 2
#elif defined(__AVX__)
#define LANES 8
#define TILE_ROWS 6 /* 6 rows x 1 panel: 12 of 16 registers */
#define TILE_PANELS 1
#else
#define LANES 4
#define TILE_ROWS 4
#define TILE_PANELS 1
#endif

/* With 16 registers, gcc loads all rows' factors first and spills accumulators for them. */
#if LANES == 16
#define KEEP_LOAD_HERE
#else
#define KEEP_LOAD_HERE __asm__ volatile("" ::: "memory")
#endif

#define PANEL_VECS (PANEL / LANES)
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* aligned(4): loads and stores take any float address. */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

ALWAYS_INLINE vec load(const float *p) { return *(const vec *)p; }
ALWAYS_INLINE void store(float *p, vec v) { *(vec *)p = v; }
/* x - 0 folds to a plain broadcast for every x; 0 + x would not, for the sake of -0. */
ALWAYS_INLINE vec splat(float x) { return x - (vec){0}; }

ALWAYS_INLINE vec select_vec(ivec mask, vec a, vec b) {
    return (vec)(((ivec)a & mask) | ((ivec)b & ~mask));
}

/* exp(x) for x <= 88; below -87 the result is 0. Cephes' expf: relative error about 2e-7. */
ALWAYS_INLINE vec exp_vec(vec x) {
    ivec tiny = x < splat(-87.0f);
    x = select_vec(tiny, splat(-87.0f), x);
    vec shifted = x * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23 rounds to an integer */
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec bits = (ivec)shifted << 23; /* the integer n sits in the low bits of `shifted` */
    vec result = (vec)((ivec)p + bits);
    return select_vec(tiny, splat(0.0f), result);
}

/* Neighbours within each 128 bits: shuffles that stay there take one instruction. */
#if LANES == 16
#define EVEN_LANES 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define ODD_LANES 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#elif LANES == 8
#define EVEN_LANES 0, 2, 8, 10, 4, 6, 12, 14
#define ODD_LANES 1, 3, 9, 11, 5, 7, 13, 15
#else
#define EVEN_LANES 0, 2, 4, 6
#define ODD_LANES 1, 3, 5, 7
#endif

/* Sums of neighbouring lanes: in each 128 bits those of a, then those of b. */
ALWAYS_INLINE vec add_pairs(vec a, vec b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, EVEN_LANES) + __builtin_shufflevector(a, b, ODD_LANES);
#else
    return __builtin_shuffle(a, b, (ivec){EVEN_LANES}) + __builtin_shuffle(a, b, (ivec){ODD_LANES});
#endif
}

typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

/* The sum over each of four vectors; the same bits whatever the other three are. */
ALWAYS_INLINE vec4 sum_each(vec a, vec b, vec c, vec d) {
    vec sums = add_pairs(add_pairs(a, b), add_pairs(c, d));
    vec4 parts[LANES / 4];
    memcpy(parts, &sums, sizeof sums);
#pragma GCC unroll 4
    for (int width = LANES / 8; width > 0; width /= 2)
#pragma GCC unroll 4
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
}

ALWAYS_INLINE float sum_lanes(vec v) { return sum_each(v, v, v, v)[0]; }

/* A matrix cut into panels of PANEL columns: element (k, p * PANEL + j) is at
 * data[p * panel_stride + k * row_stride + j]. Row-major is panel_stride = PANEL.
 * `ahead`, laid out alike, is asked of the memory meanwhile; data that is at hand names itself. */
typedef struct {
    const float *data;
    int64_t row_stride;
    int64_t panel_stride;
    const float *ahead;
} panels;

/* c[rows][num_panels * PANEL] (+)= x[rows][depth] * b[depth][..]; rows and num_panels constant.
 *
 * Every element is one chain of multiply-adds in the order of k, whatever the tile's shape, so a
 * row's result does not depend on how many rows are computed with it. One step of k asks for
 * what lies `ahead_stride` floats on. */
ALWAYS_INLINE void tile(const int rows, const int num_panels, const float *x, int64_t ldx,
                        panels b, int64_t ahead_stride, int64_t depth, float *c, int64_t ldc,
                        int accumulate) {
    vec acc[TILE_ROWS][TILE_PANELS * PANEL_VECS];
    const int vecs = num_panels * PANEL_VECS;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < vecs; j++)
            acc[r][j] = accumulate ? load(c + r * ldc + j * LANES) : splat(0.0f);
#pragma GCC unroll 2
    for (int64_t k = 0; k < depth; k++) {
        vec w[TILE_PANELS * PANEL_VECS];
#pragma GCC unroll 8
        for (int j = 0; rows >= 4 && j < num_panels; j++) /* a thin tile is one fast stream anyway */
            __builtin_prefetch(b.ahead + j * b.panel_stride + k * ahead_stride, 0, 2);
#pragma GCC unroll 8
        for (int j = 0; j < vecs; j++)
            w[j] = load(b.data + (j / PANEL_VECS) * b.panel_stride + k * b.row_stride +
                        (j % PANEL_VECS) * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vec a = splat(x[r * ldx + k]);
            KEEP_LOAD_HERE;
#pragma GCC unroll 8
            for (int j = 0; j < vecs; j++) acc[r][j] += a * w[j];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < vecs; j++) store(c + r * ldc + j * LANES, acc[r][j]);
}

/* `tile` for 1 to TILE_ROWS rows, known at run time. */
ALWAYS_INLINE void tile_rows(int rows, const int num_panels, const float *x, int64_t ldx, panels b,
                             int64_t ahead_stride, int64_t depth, float *c, int64_t ldc,
                             int accumulate) {
#define TILE_CASE(R)                                                             \
    case R:                                                                      \
        tile(R, num_panels, x, ldx, b, ahead_stride, depth, c, ldc, accumulate); \
        break;
    switch (rows) {
        TILE_CASE(1)
        TILE_CASE(2)
        TILE_CASE(3)
        TILE_CASE(4)
#if TILE_ROWS > 4
        TILE_CASE(5)
        TILE_CASE(6)
#endif
#if TILE_ROWS > 6
        TILE_CASE(7)
        TILE_CASE(8)
#endif
    }
#undef TILE_CASE
}

/* c[rows][num_panels * PANEL] (+)= x[rows][depth] * b[depth][..] for any number of rows.
 *
 * Requests for `b.ahead` are spread evenly over the passes: in one pass they would come faster than
 * the memory answers, and the arithmetic would wait for them. */
ALWAYS_INLINE void multiply_panels(int64_t rows, int num_panels, const float *x, int64_t ldx,
                                   panels b, int64_t depth, float *c, int64_t ldc,
                                   int accumulate) {
    int64_t passes = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t ahead_stride = (b.row_stride + passes - 1) / passes;
    for (int64_t r = 0; r < rows; b.ahead += depth * ahead_stride) {
        int64_t left = rows - r;
        /* two even parts rather than a full tile and a thin rest */
        int n = (int)(left <= TILE_ROWS ? left : left < 2 * TILE_ROWS ? (left + 1) / 2 : TILE_ROWS);
        if (num_panels == TILE_PANELS)
            tile_rows(n, TILE_PANELS, x + r * ldx, ldx, b, ahead_stride, depth, c + r * ldc, ldc,
                      accumulate);
        else
            tile_rows(n, 1, x + r * ldx, ldx, b, ahead_stride, depth, c + r * ldc, ldc,
                      accumulate);
        r += n;
    }
}

#endif
