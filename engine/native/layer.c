/* One decoder layer of the Llama pattern in one call, so that a step costs no Python per operation:
 *
 *   h = x + out(attention(rope(qkv(norm(x)))));   y = h + down(silu(gate(norm(h))) * up(norm(h)))
 */
#include "attention.h"
#include "vec.h"

void hm_linear(const float *x, int64_t ldx, int64_t rows, int64_t k, const float *packed,
               int64_t n, const float *bias, float *y, int num_threads);
void hm_rms_norm(const float *x, int64_t rows, int64_t dim, const float *weight, float eps,
                 float *out, int num_threads);
void hm_silu_mul(const float *x, int64_t rows, int64_t n, float *out, int num_threads);

/* All mirrored in engine/kernels.py. */
typedef struct {
    const float *packed, *bias; /* bias NULL for none */
    int64_t n, k;
} linear_weights;

typedef struct {
    const float *weight; /* NULL: no norm here */
    float eps;
} norm_weights;

typedef struct {
    linear_weights qkv, out, gate_up, down; /* q, k, v and gate, up side by side */
    norm_weights input_norm, q_norm, k_norm, mlp_norm;
} layer_weights;

static void apply_linear(const linear_weights *w, const float *x, int64_t rows, float *y,
                         int num_threads) {
    hm_linear(x, w->k, rows, w->k, w->packed, w->n, w->bias, y, num_threads);
}

/* Rotate pairs (d, d + dim / 2), as transformers' rotate_half does. */
static void rotate_head(float *x, int64_t dim, const float *cos, const float *sin) {
    int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d++) {
        float low = x[d], high = x[d + half];
        x[d] = low * cos[d] - high * sin[d];
        x[d + half] = high * cos[d + half] + low * sin[d + half];
    }
}

/* Norm, where there is one, and rotation of the q and k heads of qkv [rows][heads][dim]. */
static void rotate_rows(const layer_weights *w, const attention_call *a, int64_t rows, float *qkv,
                        const float *cos, const float *sin) {
    int64_t dim = a->head_dim, rotated = a->num_heads + a->num_kv_heads;
#pragma omp parallel for schedule(static) num_threads(a->num_threads) \
    if (a->num_threads > 1 && rows > 64)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < rotated; h++) {
            float *head = qkv + r * w->qkv.n + h * dim;
            const norm_weights *norm = h < a->num_heads ? &w->q_norm : &w->k_norm;
            if (norm->weight) hm_rms_norm(head, 1, dim, norm->weight, norm->eps, head, 1);
            rotate_head(head, dim, cos + r * dim, sin + r * dim);
        }
}

static void add(const float *a, const float *b, int64_t rows, int64_t dim, float *out,
                int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && rows > 64)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = r * dim; d < (r + 1) * dim; d++) out[d] = a[d] + b[d];
}

/* x and y [rows][hidden]; cos and sin [rows][head_dim]; scratch as `LayerWeights.scratch_floats`
 * in engine/kernels.py. Of `a`, everything but q, k, v, out and the strides in them is given.
 * Returns what hm_attention does. */
int hm_layer(const layer_weights *w, attention_call *a, int64_t rows, const float *x,
             const float *cos, const float *sin, float *scratch, float *y) {
    int threads = a->num_threads;
    int64_t hidden = w->qkv.k, dim = a->head_dim;
    float *mixed = scratch; /* a row of `hidden` between two operations */
    float *qkv = mixed + rows * hidden, *attended = qkv + rows * w->qkv.n;
    float *gate_up = attended + rows * w->out.k, *gated = gate_up + rows * w->gate_up.n;

    hm_rms_norm(x, rows, hidden, w->input_norm.weight, w->input_norm.eps, mixed, threads);
    apply_linear(&w->qkv, mixed, rows, qkv, threads);
    rotate_rows(w, a, rows, qkv, cos, sin);
    a->q = qkv;
    a->k = qkv + a->num_heads * dim;
    a->v = a->k + a->num_kv_heads * dim;
    a->out = attended;
    a->q_token_stride = a->k_token_stride = a->v_token_stride = w->qkv.n;
    a->q_head_stride = a->k_head_stride = a->v_head_stride = dim;
    int failed = hm_attention(a);
    apply_linear(&w->out, attended, rows, mixed, threads);
    add(x, mixed, rows, hidden, y, threads);

    hm_rms_norm(y, rows, hidden, w->mlp_norm.weight, w->mlp_norm.eps, mixed, threads);
    apply_linear(&w->gate_up, mixed, rows, gate_up, threads);
    hm_silu_mul(gate_up, rows, w->down.k, gated, threads);
    apply_linear(&w->down, gated, rows, mixed, threads);
    add(y, mixed, rows, hidden, y, threads);
    return failed;
}
