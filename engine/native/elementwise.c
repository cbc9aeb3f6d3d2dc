/* Normalisation and gating, one pass over memory each. */
#include "vec.h"

/* out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight; x and out [rows][dim] contiguous. */
void hm_rms_norm(const float *x, int64_t rows, int64_t dim, const float *weight, float eps,
                 float *out, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && rows > 64)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = x + r * dim;
        vec sums = splat(0.0f);
        float sum = 0.0f;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) sums += load(row + i) * load(row + i);
        for (; i < dim; i++) sum += row[i] * row[i];
        sum += sum_lanes(sums);
        float factor = 1.0f / sqrtf(sum / (float)dim + eps);
        for (i = 0; i < dim; i++) out[r * dim + i] = row[i] * factor * weight[i];
    }
}

/* out[r][i] = silu(x[r][i]) * x[r][n + i]; x [rows][2 n] and out [rows][n] contiguous. */
void hm_silu_mul(const float *x, int64_t rows, int64_t n, float *out, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && rows > 64)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = x + r * 2 * n, *up = gate + n;
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) {
            vec g = load(gate + i);
            g = select_vec(g > -80.0f, g, splat(-80.0f)); /* within exp_vec's range; silu is 0 there */
            store(out + r * n + i, g / (exp_vec(-g) + 1.0f) * load(up + i));
        }
        for (; i < n; i++) out[r * n + i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}
