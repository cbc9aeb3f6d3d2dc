/* y = x W^T + bias over weights packed in panels of PANEL columns. */
#include "vec.h"

#define ROW_GROUP 192 /* rows of x that meet a panel while it is in the second-level cache */

/* One panel or two neighbours for rows [0, count) of x; `y` points at the first column. */
static void linear_block(const float *x, int64_t ldx, int64_t count, int64_t k, const float *packed,
                         int num_panels, int64_t width, const float *bias, float *y, int64_t ldy) {
    panels b = {packed, PANEL, k * PANEL, packed + num_panels * k * PANEL};
    if (width == num_panels * PANEL) {
        multiply_panels(count, num_panels, x, ldx, b, k, y, ldy, 0);
    } else { /* the last panel of a width that is no multiple of PANEL */
        float edge[ROW_GROUP * 2 * PANEL];
        multiply_panels(count, num_panels, x, ldx, b, k, edge, num_panels * PANEL, 0);
        for (int64_t r = 0; r < count; r++)
            memcpy(y + r * ldy, edge + r * num_panels * PANEL, (size_t)width * sizeof(float));
    }
    if (bias)
        for (int64_t r = 0; r < count; r++)
            for (int64_t j = 0; j < width; j++) y[r * ldy + j] += bias[j];
}

/* Packed layout: [ceil(n / PANEL)][k][PANEL], columns past n are zero.
 * x [rows, k] with row stride ldx; y [rows, n] contiguous; bias [n] or NULL. */
void hm_linear(const float *x, int64_t ldx, int64_t rows, int64_t k, const float *packed,
               int64_t n, const float *bias, float *y, int num_threads) {
    int64_t num_panels = (n + PANEL - 1) / PANEL;
    int64_t pairs = (num_panels + TILE_PANELS - 1) / TILE_PANELS;
    int64_t groups = (rows + ROW_GROUP - 1) / ROW_GROUP;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t item = 0; item < groups * pairs; item++) {
        int64_t first = item / pairs * ROW_GROUP;
        int64_t count = rows - first < ROW_GROUP ? rows - first : ROW_GROUP;
        int64_t p = item % pairs * TILE_PANELS;
        int here = (int)(num_panels - p < TILE_PANELS ? num_panels - p : TILE_PANELS);
        int64_t width = n - p * PANEL < here * PANEL ? n - p * PANEL : here * PANEL;
        linear_block(x + first * ldx, ldx, count, k, packed + p * PANEL * k, here, width,
                     bias ? bias + p * PANEL : 0, y + first * n + p * PANEL, n);
    }
}

/* Pack row-major W [n, k] into the layout above. `packed` holds ceil(n / PANEL) * k * PANEL. */
void hm_pack(const float *w, int64_t n, int64_t k, float *packed) {
    int64_t num_panels = (n + PANEL - 1) / PANEL;
    for (int64_t p = 0; p < num_panels; p++)
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < PANEL; j++) {
                int64_t col = p * PANEL + j;
                packed[(p * k + i) * PANEL + j] = col < n ? w[col * k + i] : 0.0f;
            }
}
