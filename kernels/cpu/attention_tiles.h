// The tile text of attention.c, included there once per instruction set. The includer defines
//   NAME(x)      adds the instruction set's suffix      TARGET       function attribute, or nothing
//   LANES        reals in a vector                      BLOCK_ROWS, BLOCK_VECS    register block of gemm
//   FMA(a, b, c) a * b + c on vectors                   MAX(a, b)    a > b ? a : b on vectors
// No include guard, on purpose. Tile layouts and names: head of attention.c.

#define V NAME(vec)
#define BITS NAME(bits)
#define INLINE static inline __attribute__((always_inline)) TARGET

typedef real V __attribute__((vector_size(LANES * sizeof(real))));
typedef real_bits BITS __attribute__((vector_size(LANES * sizeof(real))));
typedef real NAME(unaligned)
    __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real)), may_alias));

INLINE V NAME(load)(const real *p) { return *(const NAME(unaligned) *)p; }
INLINE void NAME(store)(real *p, V x) { *(NAME(unaligned) *)p = x; }
INLINE V NAME(splat)(real x) { return x - (V){0}; }
INLINE V NAME(keep)(V x, BITS mask) { return (V)((BITS)x & mask); }   // x where mask, else 0

// All ones where the query of a lane may see the key that is `ahead` places after the first lane
INLINE BITS NAME(sees)(int ahead) {
    V lane;
    for (int i = 0; i < LANES; i++) lane[i] = (real)i;
    return (BITS)(lane >= NAME(splat)((real)ahead));
}

// 2^x for x <= 0 (and up to 126): 2^n 2^f, |f| <= 1/2, 2^f by a minimax polynomial (relative error 2.6e-9 before
// rounding), n from the low bits of x + 1.5 * 2^23. Exactly 1 at 0 and 0 at -inf; 0 below 2^-126; NaN stays NaN.
INLINE V NAME(exp2)(V x) {
#ifdef GRADCHECK
    for (int i = 0; i < LANES; i++) x[i] = exp2(x[i]);
    return x;
#else
    V shifted = x + 0x1.8p23f, f = x - (shifted - 0x1.8p23f);
    V y = FMA(NAME(splat)(0x1.470b4ap-13f), f, NAME(splat)(0x1.5f7276p-10f));
    y = FMA(y, f, NAME(splat)(0x1.3b270ep-7f));
    y = FMA(y, f, NAME(splat)(0x1.c6ae72p-5f));
    y = FMA(y, f, NAME(splat)(0x1.ebfbe2p-3f));
    y = FMA(y, f, NAME(splat)(0x1.62e432p-1f));
    y = FMA(y, f, NAME(splat)(1.0f));
    y = y * (V)(((BITS)shifted << 23) + 0x3f800000u);
    return NAME(keep)(y, ~(BITS)(x < -126.0f));
#endif
}

// ---------------------------------------------------------------------------------------------------------
// Small matrix products

INLINE void NAME(block)(const Gemm *g, int r, int v, int k, int end, const int rows, const int vecs) {
    const real *a = g->a + r * g->a_row + k * g->a_step, *b = g->b + k * g->b_row + v * LANES;
    const ptrdiff_t a_row = g->a_row, a_step = g->a_step, b_row = g->b_row;
    real *c = g->c + r * g->c_row + v * LANES;
    V acc[BLOCK_ROWS][BLOCK_VECS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vecs; j++) acc[i][j] = (V){0};
    if (!g->fresh) {
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int j = 0; j < vecs; j++) {
                acc[i][j] = NAME(load)(c + i * g->c_row + j * LANES);
                if (g->alpha) acc[i][j] *= NAME(splat)(g->alpha[r + i]);
            }
    }
    for (; k < end; k++, a += a_step, b += b_row) {
        V row[BLOCK_VECS];
        UNROLL for (int j = 0; j < vecs; j++) row[j] = NAME(load)(b + j * LANES);
        UNROLL for (int i = 0; i < rows; i++) {
            V x = NAME(splat)(a[i * a_row]);
            UNROLL for (int j = 0; j < vecs; j++) acc[i][j] = FMA(x, row[j], acc[i][j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vecs; j++) NAME(store)(c + i * g->c_row + j * LANES, acc[i][j]);
}

static TARGET void NAME(any_block)(const Gemm *g, int r, int v, int k, int end, int rows, int vecs) {
#define CASE(m, n)                                                                            \
    case (m) * 8 + (n):                                                                       \
        if ((m) <= BLOCK_ROWS && (n) <= BLOCK_VECS) NAME(block)(g, r, v, k, end, (m), (n));   \
        break;
    switch (rows * 8 + vecs) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
        CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2)
        CASE(1, 3) CASE(2, 3) CASE(3, 3) CASE(4, 3) CASE(5, 3) CASE(6, 3)
        CASE(1, 4) CASE(2, 4) CASE(3, 4) CASE(4, 4) CASE(5, 4) CASE(6, 4)
    }
#undef CASE
}

static TARGET void NAME(gemm)(const Gemm *g) {
    for (int v = 0; v < g->vecs; v += BLOCK_VECS) {
        int v_end = at_most(v + BLOCK_VECS, g->vecs);
        for (int r = 0; r < g->rows; r += BLOCK_ROWS) {
            int first = v, k = 0, end = g->depth, rows = at_most(BLOCK_ROWS, g->rows - r);
            if (g->part == COLUMNS_FROM_ROW) first = at_least(v, r / LANES);
            if (g->part == DEPTH_TO_ROW) end = at_most(end, r + BLOCK_ROWS);
            if (g->part == DEPTH_FROM_ROW) k = r;
            if (first < v_end) NAME(any_block)(g, r, first, k, end, rows, v_end - first);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Packing

// dst (n, padded) = scale * src (n, d), zeros up to the padded width
static TARGET void NAME(pack)(real *dst, int padded, const floatX *src, ptrdiff_t src_row, int n, int d, real scale) {
    for (int r = 0; r < n; r++, dst += padded, src += src_row) {
        int x = 0;
        for (; x + LANES <= d; x += LANES) NAME(store)(dst + x, NAME(load)(src + x) * scale);
        for (; x < d; x++) dst[x] = src[x] * scale;
        for (; x < padded; x++) dst[x] = 0;
    }
}

// dst (padded, TILE) = transpose of src (n, padded), zeros up to a whole vector of rows. A square of vectors is
// transposed by log2(LANES) perfect shuffles, each of which rotates the bits of the (row, column) index by one.
static TARGET void NAME(transpose)(real *dst, const real *src, int n, int padded) {
    for (int r = 0; r < n; r += LANES) {
        for (int x = 0; x < padded; x += LANES) {
            V a[LANES], b[LANES];
            UNROLL for (int i = 0; i < LANES; i++)
                a[i] = r + i < n ? NAME(load)(src + (r + i) * padded + x) : (V){0};
            UNROLL for (int stage = 1; stage < LANES; stage *= 2) {
                UNROLL for (int i = 0; i < LANES; i++) b[i] = a[i];
                UNROLL for (int i = 0; i < LANES / 2; i++) {
                    a[2 * i] = SHUFFLE(BITS, b[i], b[i + LANES / 2], ZIP_LOW);
                    a[2 * i + 1] = SHUFFLE(BITS, b[i], b[i + LANES / 2], ZIP_HIGH);
                }
            }
            UNROLL for (int i = 0; i < LANES; i++) NAME(store)(dst + (x + i) * TILE + r, a[i]);
        }
    }
}

// dst (n, d) = scale * src (n, padded), times the row's own factor if there is one
static TARGET void NAME(unpack)(floatX *dst, ptrdiff_t dst_row, const real *src, int padded, int n, int d,
                                real scale, const real *factor) {
    for (int r = 0; r < n; r++, dst += dst_row, src += padded) {
        real f = factor ? scale * factor[r] : scale;
        int x = 0;
        for (; x + LANES <= d; x += LANES) NAME(store)(dst + x, NAME(load)(src + x) * f);
        for (; x < d; x++) dst[x] = src[x] * f;
    }
}

// ---------------------------------------------------------------------------------------------------------
// Forward

// p (keys, queries): scores in, probabilities relative to the running maximum out. top and sum: the online
// softmax's state per query; alpha: what the output so far must be multiplied with.
static TARGET void NAME(softmax)(real *p, real *top, real *sum, real *alpha, int keys, int queries, int diagonal) {
    for (int q = 0; q < queries; q += LANES) {
        int clear = diagonal ? at_most(q, keys) : keys;      // keys that all lanes see
        int rows = diagonal ? at_most(keys, round_up(q + LANES, BLOCK_ROWS)) : keys;
        V before = NAME(load)(top + q), now = before, total = {0};
        int k = 0;
        for (; k < clear; k++) now = MAX(NAME(load)(p + k * TILE + q), now);
        for (; k < rows; k++) {
            BITS mask = NAME(sees)(k - q);
            V s = NAME(load)(p + k * TILE + q);
            s = (V)(((BITS)s & mask) | ((BITS)NAME(splat)(-INFINITY) & ~mask));
            NAME(store)(p + k * TILE + q, s);
            now = MAX(s, now);
        }
        for (k = 0; k < rows; k++) {
            V e = NAME(exp2)(NAME(load)(p + k * TILE + q) - now);
            NAME(store)(p + k * TILE + q, e);
            total += e;
        }
        V factor = NAME(exp2)(before - now);
        NAME(store)(alpha + q, factor);
        NAME(store)(sum + q, FMA(NAME(load)(sum + q), factor, total));
        NAME(store)(top + q, now);
    }
}

static TARGET void NAME(forward_tile)(const Forward *f, const Scratch *s, const floatX *keys, int g,
                                      int num_keys, int num_queries, int diagonal, int first) {
    const Shape *h = &f->shape;
    int vecs = round_up(num_queries, LANES) / LANES;
    real *acc = s->acc + (size_t)g * TILE * h->padded;
    NAME(gemm)(&(Gemm){.c = s->p, .c_row = TILE, .fresh = 1,                             // S = K Q^T
                             .a = keys, .a_row = h->qkv_row, .a_step = 1,
                             .b = s->qt + (size_t)g * TILE * h->padded, .b_row = TILE,
                             .rows = num_keys, .vecs = vecs, .depth = h->head_dim,
                             .part = diagonal ? COLUMNS_FROM_ROW : WHOLE});
    NAME(softmax)(s->p, s->top + g * TILE, s->sum + g * TILE, s->alpha, num_keys, num_queries, diagonal);
    NAME(gemm)(&(Gemm){.c = acc, .c_row = h->padded, .fresh = first, .alpha = s->alpha,  // O += P V
                             .a = s->p, .a_row = 1, .a_step = TILE,
                             .b = s->kv, .b_row = h->padded,
                             .rows = num_queries, .vecs = h->padded / LANES, .depth = num_keys,
                             .part = diagonal ? DEPTH_TO_ROW : WHOLE});
}

// Queries of one tile, all heads of the group of kv_head, against all keys up to them
static TARGET void NAME(forward_item)(const Forward *f, const Item *item, int kv_head, const Scratch *s) {
    const Shape *h = &f->shape;
    int64_t doc_row = f->cu_seqlens[item->doc];
    int doc_len = f->cu_seqlens[item->doc + 1] - f->cu_seqlens[item->doc];
    for (int tile = item->first; tile < item->end; tile++) {
        int64_t row = doc_row + (int64_t)tile * TILE;
        int num_queries = at_most(TILE, doc_len - tile * TILE);
        for (int g = 0; g < h->group; g++) {
            const floatX *q = f->qkv + row * h->qkv_row + (kv_head * h->group + g) * h->head_dim;
            NAME(pack)(s->q, h->padded, q, h->qkv_row, num_queries, h->head_dim, h->scale_log2e);
            NAME(transpose)(s->qt + (size_t)g * TILE * h->padded, s->q, num_queries, h->padded);
        }
        for (int i = 0; i < h->group * TILE; i++) s->top[i] = -INFINITY, s->sum[i] = 0;

        for (int k = 0; k <= tile; k++) {
            int num_keys = k == tile ? num_queries : TILE;
            const floatX *keys = f->qkv + (doc_row + (int64_t)k * TILE) * h->qkv_row +
                                 (h->num_heads + kv_head) * h->head_dim;
            NAME(pack)(s->kv, h->padded, keys + h->num_kv_heads * h->head_dim, h->qkv_row, num_keys,
                       h->head_dim, 1);
            for (int g = 0; g < h->group; g++)
                NAME(forward_tile)(f, s, keys, g, num_keys, num_queries, k == tile, k == 0);
        }

        for (int g = 0; g < h->group; g++) {
            int head = kv_head * h->group + g;
            for (int i = 0; i < num_queries; i++) {
                real sum = s->sum[g * TILE + i];
                f->lse[head * h->num_tokens + row + i] = s->top[g * TILE + i] * LN2 + log_real(sum);
                s->alpha[i] = 1 / sum;
            }
            NAME(unpack)(f->out + row * h->out_row + head * h->head_dim, h->out_row,
                         s->acc + (size_t)g * TILE * h->padded, h->padded, num_queries, h->head_dim, 1, s->alpha);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Backward

static TARGET real NAME(dot)(const floatX *a, const floatX *b, int d) {
    V acc = {0};
    real sum = 0;
    int x = 0;
    for (; x + LANES <= d; x += LANES) acc = FMA(NAME(load)(a + x), NAME(load)(b + x), acc);
    for (; x < d; x++) sum += a[x] * b[x];
    for (int i = 0; i < LANES; i++) sum += acc[i];
    return sum;
}

// p (keys, queries): scores in, P^T out; ds: dP^T in, dS^T = P^T (dP^T - delta) out
static TARGET void NAME(dsoftmax)(real *p, real *ds, const real *lse, const real *delta, int keys, int queries,
                                  int diagonal) {
    for (int q = 0; q < queries; q += LANES) {
        int rows = diagonal ? at_most(keys, round_up(q + LANES, BLOCK_ROWS)) : keys;
        V l = NAME(load)(lse + q), d = NAME(load)(delta + q);
        for (int k = 0; k < rows; k++) {
            V e = NAME(exp2)(NAME(load)(p + k * TILE + q) - l);
            if (diagonal && k > q) e = NAME(keep)(e, NAME(sees)(k - q));
            NAME(store)(p + k * TILE + q, e);
            NAME(store)(ds + k * TILE + q, e * (NAME(load)(ds + k * TILE + q) - d));
        }
    }
}

// One tile pair of one head: dq of the tile's queries += and dk, dv of its keys +=, as the item's pass asks.
static TARGET void NAME(backward_tile)(const Backward *f, const Scratch *s, const floatX *values, int g, real *dk,
                                       real *dv, int num_keys, int num_queries, int diagonal, int pass) {
    const Shape *h = &f->shape;
    const int vecs = round_up(num_queries, LANES) / LANES, wide = h->padded / LANES;
    const size_t at = (size_t)g * TILE * h->padded;
    Gemm scores = {.c = s->p, .c_row = TILE, .fresh = 1,                                 // S^T = K Q^T
                         .a = s->kv, .a_row = h->padded, .a_step = 1,
                         .b = s->qt + at, .b_row = TILE,
                         .rows = num_keys, .vecs = vecs, .depth = h->head_dim,
                         .part = diagonal ? COLUMNS_FROM_ROW : WHOLE};
    NAME(gemm)(&scores);
    scores.c = s->ds, scores.a = values, scores.a_row = h->qkv_row, scores.b = s->dot + at;   // dP^T = V dO^T
    NAME(gemm)(&scores);
    NAME(dsoftmax)(s->p, s->ds, s->top + g * TILE, s->sum + g * TILE, num_keys, num_queries, diagonal);
    if (pass & PASS_DKV) {
        Gemm keys = {.c = dv, .c_row = h->padded,                                        // dV += P^T dO
                           .a = s->p, .a_row = TILE, .a_step = 1,
                           .b = s->dout + at, .b_row = h->padded,
                           .rows = num_keys, .vecs = wide, .depth = num_queries,
                           .part = diagonal ? DEPTH_FROM_ROW : WHOLE};
        NAME(gemm)(&keys);
        keys.c = dk, keys.a = s->ds, keys.b = s->q + at;                                       // dK += dS^T Q
        NAME(gemm)(&keys);
    }
    if (pass & PASS_DQ)
        NAME(gemm)(&(Gemm){.c = s->acc + at, .c_row = h->padded,                         // dQ += dS K
                                 .a = s->ds, .a_row = 1, .a_step = TILE,
                                 .b = s->kv, .b_row = h->padded,
                                 .rows = num_queries, .vecs = wide, .depth = num_keys,
                                 .part = diagonal ? DEPTH_TO_ROW : WHOLE});
}

static TARGET void NAME(load_queries)(const Backward *f, const Scratch *s, int64_t row, int n, int kv_head) {
    const Shape *h = &f->shape;
    for (int g = 0; g < h->group; g++) {
        const size_t at = (size_t)g * TILE * h->padded;
        const int64_t head = kv_head * h->group + g;
        const floatX *q = f->qkv + row * h->qkv_row + head * h->head_dim;
        const floatX *dout = f->dout + row * h->out_row + head * h->head_dim;
        NAME(pack)(s->q + at, h->padded, q, h->qkv_row, n, h->head_dim, h->scale_log2e);
        NAME(pack)(s->dout + at, h->padded, dout, h->out_row, n, h->head_dim, 1);
        NAME(transpose)(s->qt + at, s->q + at, n, h->padded);
        NAME(transpose)(s->dot + at, s->dout + at, n, h->padded);
        for (int i = 0; i < TILE; i++) {
            int64_t t = head * h->num_tokens + row + i;
            s->top[g * TILE + i] = i < n ? f->lse[t] * LOG2E : 0;
            s->sum[g * TILE + i] = i < n ? f->delta[t] : 0;
        }
    }
}

// Query tiles x key tiles of one document and kv head; the item's pass says which gradients
static TARGET void NAME(backward_item)(const Backward *f, const Item *item, int kv_head, const Scratch *s) {
    const Shape *h = &f->shape;
    const int64_t doc_row = f->cu_seqlens[item->doc];
    const int doc_len = f->cu_seqlens[item->doc + 1] - f->cu_seqlens[item->doc];
    const int key_begin = item->pass == PASS_DQ ? 0 : item->first;
    const int query_end = item->pass == PASS_DQ ? item->end : num_tiles(doc_len);
    const int64_t k_at = (h->num_heads + kv_head) * h->head_dim, v_at = k_at + h->num_kv_heads * h->head_dim;
    const int span_rows = at_most(item->end * TILE, doc_len) - item->first * TILE;
    if (item->pass & PASS_DKV) {
        memset(s->dk, 0, sizeof(real) * span_rows * h->padded);
        memset(s->dv, 0, sizeof(real) * span_rows * h->padded);
    }
    for (int tile = item->first; tile < query_end; tile++) {
        const int64_t row = doc_row + (int64_t)tile * TILE;
        const int num_queries = at_most(TILE, doc_len - tile * TILE);
        NAME(load_queries)(f, s, row, num_queries, kv_head);
        memset(s->acc, 0, sizeof(real) * h->group * TILE * h->padded);
        for (int k = key_begin; k < item->end && k <= tile; k++) {
            const int num_keys = k == tile ? num_queries : TILE;
            const size_t at = (size_t)(k - key_begin) * TILE * h->padded;
            const floatX *rows = f->qkv + (doc_row + (int64_t)k * TILE) * h->qkv_row;
            NAME(pack)(s->kv, h->padded, rows + k_at, h->qkv_row, num_keys, h->head_dim, 1);
            for (int g = 0; g < h->group; g++)
                NAME(backward_tile)(f, s, rows + v_at, g, s->dk + at, s->dv + at, num_keys, num_queries, k == tile,
                                    item->pass);
        }
        for (int g = 0; g < h->group && (item->pass & PASS_DQ); g++)
            NAME(unpack)(f->dqkv + row * h->qkv_row + (kv_head * h->group + g) * h->head_dim, h->qkv_row,
                         s->acc + (size_t)g * TILE * h->padded, h->padded, num_queries, h->head_dim, h->scale, NULL);
    }
    if (item->pass & PASS_DKV) {
        floatX *rows = f->dqkv + (doc_row + (int64_t)item->first * TILE) * h->qkv_row;
        NAME(unpack)(rows + k_at, h->qkv_row, s->dk, h->padded, span_rows, h->head_dim, LN2, NULL);
        NAME(unpack)(rows + v_at, h->qkv_row, s->dv, h->padded, span_rows, h->head_dim, 1, NULL);
    }
}

#undef V
#undef BITS
#undef INLINE
#undef NAME
#undef TARGET
#undef LANES
#undef BLOCK_ROWS
#undef BLOCK_VECS
#undef FMA
#undef MAX
#undef ZIP_LOW
#undef ZIP_HIGH
