/* The call of the paged attention, shared by its own entry and by whole layers. */
#ifndef HALFMOON_ATTENTION_H
#define HALFMOON_ATTENTION_H

#include <stdint.h>

/* Mirrored by `AttentionCall` in engine/kernels.py. Strides are in floats; q, k, v [tokens][heads]
 * [head_dim] with unit stride in head_dim; out [tokens][num_heads][head_dim] contiguous. `cache`
 * points at this layer's K in block 0; K and V are [num_kv_heads][block_size][head_dim]. Sequence
 * s has the tokens query_start[s] to query_start[s + 1] at positions from position_start[s]; its
 * block table begins at block_table[table_start[s]]. window: a token sees itself and the
 * `window - 1` before it, 0 for all. softcap: logits become softcap * tanh(logit / softcap). */
typedef struct {
    const float *q, *k, *v;
    float *out, *cache;
    const int32_t *query_start, *position_start, *table_start, *block_table;
    int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride,
        v_head_stride, block_stride;
    int32_t num_sequences, num_heads, num_kv_heads, head_dim, block_size, window, num_threads;
    float scale, softcap;
} attention_call;

int hm_attention(const attention_call *c);

#endif
