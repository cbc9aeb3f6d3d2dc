/* Attention over a paged KV cache: writes the step's K and V, then attends through block tables.
 *
 * Work is cut into items of (sequence, tile of query tokens, kv head); the rows of an item are
 * (token, query head of the group), so each K and V element is read once for all of them. An item
 * goes over the context in tiles of up to KEY_TILE tokens with a running maximum and sum (online
 * softmax). Few rows (decoding) read the blocks in place; many rows (prefill) copy a tile's K,
 * transposed, and V into scratch first, which their many passes pay back.
 */
#include "attention.h"
#include "vec.h"

#include <stdlib.h>

#define KEY_TILE 64
#define QUERY_ROWS 96 /* rows of an item aimed at */
#define FEW_ROWS 8    /* up to this many rows, dot products over blocks in place */

typedef struct {
    int64_t sequence, head, first_token, num_tokens;
    int64_t position; /* of the first token */
    int64_t rows;     /* num_tokens * group */
    int64_t seen_from, context; /* positions that its tokens see */
} item;

/* Per-thread memory: all parts are [rows or tokens][padded width]. */
typedef struct {
    float *q, *acc, *probs, *keys, *values, *max, *sum;
    int64_t width; /* head_dim rounded up to whole panels */
    item next;     /* what this thread works on next, more or less: for prefetches only */
} scratch;

static int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

static int64_t group_of(const attention_call *c) { return c->num_heads / c->num_kv_heads; }

static int64_t tokens_per_item(const attention_call *c) {
    int64_t tokens = QUERY_ROWS / group_of(c);
    return tokens > 0 ? tokens : 1;
}

static const float *block_of(const attention_call *c, const item *it, int64_t position) {
    int64_t index = c->table_start[it->sequence] + position / c->block_size;
    return c->cache + c->block_table[index] * c->block_stride;
}

static void write_kv(const attention_call *c) {
    int64_t head_floats = (int64_t)c->block_size * c->head_dim;
    size_t bytes = (size_t)c->head_dim * sizeof(float);
    for (int64_t s = 0; s < c->num_sequences; s++)
        for (int64_t t = c->query_start[s]; t < c->query_start[s + 1]; t++) {
            int64_t position = c->position_start[s] + t - c->query_start[s];
            int64_t index = c->table_start[s] + position / c->block_size;
            float *to = c->cache + c->block_table[index] * c->block_stride +
                        position % c->block_size * c->head_dim;
            for (int64_t h = 0; h < c->num_kv_heads; h++, to += head_floats) {
                memcpy(to, c->k + t * c->k_token_stride + h * c->k_head_stride, bytes);
                memcpy(to + c->num_kv_heads * head_floats,
                       c->v + t * c->v_token_stride + h * c->v_head_stride, bytes);
            }
        }
}

#define DOT_ROWS 3 /* with DOT_TOKENS: 12 sums, 3 queries and a key fill 16 registers */
#define DOT_TOKENS 4

/* logits[r][t] = q[r] . keys[t]; rows and tokens (1 or DOT_TOKENS) constant, dim a multiple of
 * LANES. A logit's bits do not depend on the tile that it is computed in. */
ALWAYS_INLINE void dot_tile(const int rows, const int tokens, const float *q, int64_t ldq,
                            const float *keys, int64_t dim, float *logits) {
    vec sums[DOT_ROWS][DOT_TOKENS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) sums[r][t] = splat(0.0f);
    for (int64_t d = 0; d < dim; d += LANES) {
        vec part[DOT_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) part[r] = load(q + r * ldq + d);
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) {
            vec key = load(keys + t * dim + d);
            KEEP_LOAD_HERE;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sums[r][t] += part[r] * key;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        vec *s = sums[r];
        if (tokens == 1)
            logits[r * KEY_TILE] = sum_lanes(s[0]);
        else
            *(vec4 *)(logits + r * KEY_TILE) = sum_each(s[0], s[1], s[2], s[3]);
    }
}

/* `dot_tile` for any number of rows. */
ALWAYS_INLINE void dot_rows(int64_t rows, const int tokens, const float *q, int64_t ldq,
                            const float *keys, int64_t dim, float *logits) {
    int64_t r = 0;
    for (; r + DOT_ROWS <= rows; r += DOT_ROWS)
        dot_tile(DOT_ROWS, tokens, q + r * ldq, ldq, keys, dim, logits + r * KEY_TILE);
    if (rows - r == 2)
        dot_tile(2, tokens, q + r * ldq, ldq, keys, dim, logits + r * KEY_TILE);
    else if (rows - r == 1)
        dot_tile(1, tokens, q + r * ldq, ldq, keys, dim, logits + r * KEY_TILE);
}

/* Tokens from `position` on that lie in one block, at most up to `end`. */
static int64_t run_length(const attention_call *c, int64_t position, int64_t end) {
    int64_t in_block = c->block_size - position % c->block_size;
    return end - position < in_block ? end - position : in_block;
}

/* K (which = 0) or V (1) of one token and this item's head, in its block. */
static const float *token_of(const attention_call *c, const item *it, int64_t position, int which) {
    return block_of(c, it, position) + ((which * c->num_kv_heads + it->head) * c->block_size +
                                        position % c->block_size) * c->head_dim;
}

/* Copy up to KEY_TILE tokens: K transposed to panels [width][PANEL], V to rows of `width`. */
static void gather_tile(const attention_call *c, const item *it, scratch *s, int64_t from,
                        int64_t count) {
    int64_t dim = c->head_dim;
    for (int64_t t = 0; t < count; t++) {
        const float *key = token_of(c, it, from + t, 0);
        float *panel = s->keys + t / PANEL * dim * PANEL + t % PANEL;
        for (int64_t d = 0; d < dim; d++) panel[d * PANEL] = key[d];
        memcpy(s->values + t * s->width, token_of(c, it, from + t, 1), (size_t)dim * sizeof(float));
    }
}

/* Ask for parts [part, end) of `parts` of what the next tile reads. A few lines between two pieces
 * of arithmetic: more at once would wait for the memory instead of overlapping with it. */
static void prefetch_part(const float *from, int64_t floats, int64_t part, int64_t end,
                          int64_t parts) {
    int64_t lines = floats / 16;
    for (int64_t i = lines * part / parts; i < lines * end / parts; i++)
        __builtin_prefetch(from + i * 16, 0, 2);
}

/* Where the K or V lies that is read one tile after the run at `position`, be it the next item's;
 * NULL at the end. */
static const float *token_ahead(const attention_call *c, const item *it, const item *next,
                                int64_t position, int which) {
    int64_t ahead = position + KEY_TILE, past = ahead - round_up(it->context, c->block_size);
    if (ahead < it->context) return token_of(c, it, ahead, which);
    ahead = next->seen_from + (past > 0 ? past : 0);
    return ahead < next->context ? token_of(c, next, ahead, which) : 0;
}

/* Floats to ask for there: a run's, which may be longer than the one being worked on. */
static int64_t floats_ahead(const attention_call *c) {
    return (c->block_size < KEY_TILE ? c->block_size : KEY_TILE) * c->head_dim;
}

/* Logits of few rows, straight from the blocks, while the tile after this one is on its way. */
static void few_logits(const attention_call *c, const item *it, scratch *s, int64_t from,
                       int64_t end) {
    int64_t dim = c->head_dim;
    for (int64_t position = from, run; position < end; position += run) {
        run = run_length(c, position, end);
        const float *keys = token_of(c, it, position, 0);
        const float *ahead = token_ahead(c, it, &s->next, position, 0);
        for (int64_t t = 0, tokens; t < run; t += tokens) {
            tokens = run - t < DOT_TOKENS ? 1 : DOT_TOKENS;
            float *logits = s->probs + (position - from) + t;
            if (ahead) prefetch_part(ahead, floats_ahead(c), t, t + tokens, run);
            if (tokens == DOT_TOKENS)
                dot_rows(it->rows, DOT_TOKENS, s->q, s->width, keys + t * dim, dim, logits);
            else
                dot_rows(it->rows, 1, s->q, s->width, keys + t * dim, dim, logits);
        }
    }
}

/* Logits of many rows from the gathered tile. */
static void many_logits(const attention_call *c, const item *it, scratch *s, int64_t count) {
    int64_t dim = c->head_dim;
    for (int64_t p = 0; p * PANEL < count; p += TILE_PANELS) {
        const float *keys = s->keys + p * dim * PANEL;
        panels b = {keys, PANEL, dim * PANEL, keys};
        multiply_panels(it->rows, TILE_PANELS, s->q, s->width, b, dim, s->probs + p * PANEL,
                        KEY_TILE, 0);
    }
}

/* Cap, mask, and turn the logits of one row into weights relative to its running maximum. */
static void softmax_row(const attention_call *c, const item *it, scratch *s, int64_t row,
                        int64_t from, int64_t count) {
    float *logits = s->probs + row * KEY_TILE;
    int64_t position = it->position + row / group_of(c);
    int64_t last = position - from + 1 < count ? position - from + 1 : count;
    int64_t first = c->window && position - c->window + 1 > from ? position - c->window + 1 - from : 0;
    if (c->softcap > 0.0f)
        for (int64_t t = first; t < last; t++) logits[t] = c->softcap * tanhf(logits[t] / c->softcap);
    float max = s->max[row];
    int64_t span = round_up(count, LANES);
    for (int64_t t = 0; t < first && t < span; t++) logits[t] = -INFINITY;
    for (int64_t t = last > 0 ? last : 0; t < span; t++) logits[t] = -INFINITY;
    vec maxima = splat(max);
    for (int64_t t = 0; t < span; t += LANES) {
        vec x = load(logits + t);
        maxima = select_vec(x > maxima, x, maxima);
    }
    for (int j = 0; j < LANES; j++) max = maxima[j] > max ? maxima[j] : max;
    if (max == -INFINITY) { /* nothing seen yet: all of this tile is masked for this row */
        memset(logits, 0, (size_t)span * sizeof(float));
        return;
    }
    if (max > s->max[row]) {
        float factor = expf(s->max[row] - max);
        s->sum[row] *= factor;
        for (int64_t d = 0; d < s->width; d += LANES)
            store(s->acc + row * s->width + d, load(s->acc + row * s->width + d) * factor);
        s->max[row] = max;
    }
    vec sums = splat(0.0f);
    for (int64_t t = 0; t < span; t += LANES) {
        vec weight = exp_vec(load(logits + t) - max);
        store(logits + t, weight);
        sums += weight;
    }
    s->sum[row] += sum_lanes(sums);
}

/* acc += weights x values for `count` tokens whose values lie `stride` floats apart; `ahead`, or
 * NULL, is what will be read a tile later. */
static void add_values(const attention_call *c, const item *it, scratch *s, const float *weights,
                       const float *values, int64_t stride, int64_t count, const float *ahead) {
    const int64_t step = TILE_PANELS * PANEL;
    for (int64_t d = 0; d < s->width; d += step) {
        panels b = {values + d, stride, PANEL, values + d};
        int64_t left = (s->width - d) / PANEL;
        if (ahead) prefetch_part(ahead, floats_ahead(c), d, d + step, s->width);
        multiply_panels(it->rows, (int)(left < TILE_PANELS ? left : TILE_PANELS), weights, KEY_TILE,
                        b, count, s->acc + d, s->width, 1);
    }
}

static void few_values(const attention_call *c, const item *it, scratch *s, int64_t from,
                       int64_t end) {
    for (int64_t position = from, run; position < end; position += run) {
        run = run_length(c, position, end);
        add_values(c, it, s, s->probs + (position - from), token_of(c, it, position, 1),
                   c->head_dim, run, token_ahead(c, it, &s->next, position, 1));
    }
}

static void load_queries(const attention_call *c, const item *it, scratch *s) {
    int64_t group = group_of(c);
    for (int64_t r = 0; r < it->rows; r++) {
        const float *q = c->q + (it->first_token + r / group) * c->q_token_stride +
                         (it->head * group + r % group) * c->q_head_stride;
        for (int64_t d = 0; d < c->head_dim; d++) s->q[r * s->width + d] = q[d] * c->scale;
        s->max[r] = -INFINITY;
        s->sum[r] = 0.0f;
    }
    memset(s->acc, 0, (size_t)(it->rows * s->width) * sizeof(float));
}

static void store_output(const attention_call *c, const item *it, scratch *s) {
    int64_t group = group_of(c);
    for (int64_t r = 0; r < it->rows; r++) {
        float *out = c->out + ((it->first_token + r / group) * c->num_heads + it->head * group +
                               r % group) * c->head_dim;
        float factor = 1.0f / s->sum[r];
        for (int64_t d = 0; d < c->head_dim; d++) out[d] = s->acc[r * s->width + d] * factor;
    }
}

static void attend(const attention_call *c, const item *it, scratch *s) {
    /* whole panels of V are read, so other widths need the padded copy */
    int in_place = it->rows <= FEW_ROWS && c->head_dim % PANEL == 0;
    load_queries(c, it, s);
    for (int64_t from = it->seen_from; from < it->context; from += KEY_TILE) {
        int64_t count = it->context - from < KEY_TILE ? it->context - from : KEY_TILE;
        if (in_place) {
            few_logits(c, it, s, from, from + count);
        } else {
            gather_tile(c, it, s, from, count);
            many_logits(c, it, s, count);
        }
        for (int64_t r = 0; r < it->rows; r++) softmax_row(c, it, s, r, from, count);
        if (in_place)
            few_values(c, it, s, from, from + count);
        else
            add_values(c, it, s, s->probs, s->values, s->width, count, 0);
    }
    store_output(c, it, s);
}

static int64_t items_of(const attention_call *c, int64_t sequence) {
    int64_t tokens = c->query_start[sequence + 1] - c->query_start[sequence];
    return (tokens + tokens_per_item(c) - 1) / tokens_per_item(c);
}

static item make_item(const attention_call *c, int64_t index) {
    item it = {0, index % c->num_kv_heads, 0, 0, 0, 0, 0, 0};
    int64_t tile_index = index / c->num_kv_heads, step = tokens_per_item(c);
    while (tile_index >= items_of(c, it.sequence)) tile_index -= items_of(c, it.sequence++);
    int64_t start = c->query_start[it.sequence], end = c->query_start[it.sequence + 1];
    it.first_token = start + tile_index * step;
    it.num_tokens = end - it.first_token < step ? end - it.first_token : step;
    it.position = c->position_start[it.sequence] + tile_index * step;
    it.rows = it.num_tokens * group_of(c);
    it.context = it.position + it.num_tokens;
    it.seen_from = c->window && it.position >= c->window ? it.position - c->window + 1 : 0;
    return it;
}

/* Returns 0, or 1 when a thread had no memory for its scratch (the output is then undefined). */
int hm_attention(const attention_call *c) {
    int64_t num_items = 0, rows = tokens_per_item(c) * group_of(c);
    int64_t width = round_up(c->head_dim, PANEL), failed = 0;
    write_kv(c);
    for (int64_t s = 0; s < c->num_sequences; s++) num_items += items_of(c, s) * c->num_kv_heads;
    /* The value rows' padding and the unused keys of a tile are read, so they must be finite. */
    size_t floats = (size_t)(rows * (2 * width + KEY_TILE + 2) + 2 * KEY_TILE * width);
#pragma omp parallel num_threads(c->num_threads) if (c->num_threads > 1) reduction(+ : failed)
    {
        float *memory = calloc(floats, sizeof(float));
        scratch s = {memory, 0, 0, 0, 0, 0, 0, width, {0}};
        if (memory) {
            s.acc = s.q + rows * width;
            s.probs = s.acc + rows * width;
            s.keys = s.probs + rows * KEY_TILE;
            s.values = s.keys + KEY_TILE * width;
            s.max = s.values + KEY_TILE * width;
            s.sum = s.max + rows;
        } else {
            failed++;
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_items; i++) {
            int64_t last = num_items - 1, after = i + c->num_threads;
            item it = make_item(c, last - i); /* the longest contexts first */
            s.next = after <= last ? make_item(c, last - after) : (item){0};
            if (memory) attend(c, &it, &s);
        }
        free(memory);
    }
    return failed != 0;
}
