// The tile code of attention.c, included once per instruction set by each_set.h. Idea and sizes: at
// the top of attention.c.

#ifndef INLINE  // expanded with the NAME and TARGET of each set
#define V NAME(vec)
#define MAX NAME(max)
#define BLOCK_ROWS NAME(rows)
#define BLOCK_VECS NAME(vecs)
#define BITS NAME(bits)
#define UNALIGNED NAME(unaligned)
#define load NAME(load)
#define store NAME(store)
#define splat NAME(splat)
#define keep NAME(keep)
#define prefetch NAME(prefetch)
#define sees NAME(sees)
#define pow2 NAME(pow2)
#define block NAME(block)
#define any_block NAME(any_block)
#define gemm NAME(gemm)
#define pack NAME(pack)
#define transpose NAME(transpose)
#define unpack NAME(unpack)
#define softmax NAME(softmax)
#define forward_tile NAME(forward_tile)
#define forward_item NAME(forward_item)
#define dot NAME(dot)
#define dsoftmax NAME(dsoftmax)
#define backward_tile NAME(backward_tile)
#define load_queries NAME(load_queries)
#define backward_queries NAME(backward_queries)
#define backward_item NAME(backward_item)
#define INLINE static inline __attribute__((always_inline)) TARGET
#endif

typedef real V __attribute__((vector_size(LANES * sizeof(real))));
typedef real_bits BITS __attribute__((vector_size(LANES * sizeof(real))));
typedef real UNALIGNED
    __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real)), may_alias));

INLINE V load(const real *p) { return *(const UNALIGNED *)p; }
INLINE void store(real *p, V x) { *(UNALIGNED *)p = x; }
INLINE V splat(real x) { return x - (V){0}; }
INLINE V keep(V x, BITS mask) { return (V)((BITS)x & mask); }  // x where mask, else 0

// All ones in the lanes whose query may attend to the key `ahead` positions after the first lane
INLINE BITS sees(int ahead) {
    V lane;
    for (int i = 0; i < LANES; i++) lane[i] = (real)i;
    return (BITS)(lane >= splat((real)ahead));
}

// 2^x for x <= 0 (and up to 126): 2^n 2^f, |f| <= 1/2, 2^f by a minimax polynomial (relative
// error 2.6e-9 before rounding), n from the low bits of x + 1.5 * 2^23. Exactly 1 at 0 and 0 at
// -inf; 0 below 2^-126; NaN stays NaN.
INLINE V pow2(V x) {
#ifdef GRADCHECK
    for (int i = 0; i < LANES; i++) x[i] = exp2(x[i]);
    return x;
#else
    V shifted = x + 0x1.8p23f, f = x - (shifted - 0x1.8p23f);
    V y = FMA(splat(0x1.470b4ap-13f), f, splat(0x1.5f7276p-10f));
    y = FMA(y, f, splat(0x1.3b270ep-7f));
    y = FMA(y, f, splat(0x1.c6ae72p-5f));
    y = FMA(y, f, splat(0x1.ebfbe2p-3f));
    y = FMA(y, f, splat(0x1.62e432p-1f));
    y = FMA(y, f, splat(1.0f));
    y = y * (V)(((BITS)shifted << 23) + 0x3f800000u);
    return keep(y, ~(BITS)(x < -126.0f));
#endif
}

// ---- Small matrix products ----------------------------------------------------------------------

// A block of C of constant size: rows from r, vectors from v, depth from k to end
INLINE void block(const Product *g, int r, int v, int k, int end, const int rows, const int vecs) {
    const ptrdiff_t a_row = g->a.row, a_step = g->a.step, b_row = g->b_row;
    const real *a = g->a.p + r * a_row + k * a_step, *b = g->b + k * b_row + v * LANES;
    real *c = g->c + r * g->c_row + v * LANES;
    V acc[BLOCK_ROWS][BLOCK_VECS];
    unrolled_for (int i = 0; i < rows; i++)
        unrolled_for (int j = 0; j < vecs; j++) acc[i][j] = (V){0};
    if (g->start.read) {
        unrolled_for (int i = 0; i < rows; i++)
            unrolled_for (int j = 0; j < vecs; j++) {
                acc[i][j] = load(c + i * g->c_row + j * LANES);
                if (g->start.alpha) acc[i][j] *= splat(g->start.alpha[r + i]);
            }
    }
    for (; k < end; k++, a += a_step, b += b_row) {
        V row[BLOCK_VECS];
        unrolled_for (int j = 0; j < vecs; j++) row[j] = load(b + j * LANES);
        unrolled_for (int i = 0; i < rows; i++) {
            V x = splat(a[i * a_row]);
            unrolled_for (int j = 0; j < vecs; j++) acc[i][j] = FMA(x, row[j], acc[i][j]);
        }
    }
    unrolled_for (int i = 0; i < rows; i++)
        unrolled_for (int j = 0; j < vecs; j++) store(c + i * g->c_row + j * LANES, acc[i][j]);
}

static TARGET void any_block(const Product *g, int r, int v, int k, int end, int rows, int vecs) {
// clang-format off
#define CASE(m, n)                                                                          \
    case (m) * 8 + (n):                                                                     \
        if ((m) <= BLOCK_ROWS && (n) <= BLOCK_VECS) block(g, r, v, k, end, (m), (n)); \
        break;
    switch (rows * 8 + vecs) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
        CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2)
        CASE(1, 3) CASE(2, 3) CASE(3, 3) CASE(4, 3) CASE(5, 3) CASE(6, 3)
        CASE(1, 4) CASE(2, 4) CASE(3, 4) CASE(4, 4) CASE(5, 4) CASE(6, 4)
    }
#undef CASE
    // clang-format on
}

static TARGET void gemm(real *c, ptrdiff_t c_row, Start start, View a, const real *b,
                        ptrdiff_t b_row, Size size, TilePart part) {
    const Product g = {c, c_row, start, a, b, b_row};
    for (int v = 0; v < size.vecs; v += BLOCK_VECS) {
        int v_end = at_most(v + BLOCK_VECS, size.vecs);
        for (int r = 0; r < size.rows; r += BLOCK_ROWS) {
            int first = v, k = 0, end = size.depth, rows = at_most(BLOCK_ROWS, size.rows - r);
            if (part == COLUMNS_FROM_ROW) first = at_least(v, r / LANES);
            if (part == DEPTH_TO_ROW) end = at_most(end, r + BLOCK_ROWS);
            if (part == DEPTH_FROM_ROW) k = r;
            if (first < v_end) any_block(&g, r, first, k, end, rows, v_end - first);
        }
    }
}

// ---- Packing ------------------------------------------------------------------------------------

// The row of a head AHEAD tokens on: rows are a token apart, too far for the hardware's prefetchers
INLINE void prefetch(const floatX *p, ptrdiff_t row, int d) {
    p += AHEAD * row;
    for (int x = 0; x < d; x += ALIGN / (int)sizeof(floatX)) __builtin_prefetch(p + x);
}

// dst (n, padded) = scale * src (n, d), zero-filled to the padded width
static TARGET void pack(real *dst, int padded, const floatX *src, ptrdiff_t src_row, int n, int d,
                        real scale) {
    for (int r = 0; r < n; r++, dst += padded, src += src_row) {
        prefetch(src, src_row, d);
        int x = 0;
        for (; x + LANES <= d; x += LANES) store(dst + x, load(src + x) * scale);
        for (; x < d; x++) dst[x] = src[x] * scale;
        for (; x < padded; x++) dst[x] = 0;
    }
}

// dst (padded, width) = transpose of src (n, padded); width: n rounded up to a vector, filled with
// finite numbers. A square of vectors is transposed by log2(LANES) perfect shuffles, each of which
// rotates the bits of the (row, column) index by one; one or two rows (a tiny document) are cheaper
// to broadcast.
static TARGET void transpose(real *dst, const real *src, int n, int padded) {
    if (n <= 2) {
        const BITS second = sees(1);
        for (int x = 0; x < padded; x++) {
            V a = splat(src[x]), b = splat(src[(n - 1) * padded + x]);
            store(dst + x * LANES, (V)(((BITS)a & ~second) | ((BITS)b & second)));
        }
        return;
    }
    const int width = round_up(n, LANES);
    for (int r = 0; r < n; r += LANES) {
        for (int x = 0; x < padded; x += LANES) {
            V a[LANES], b[LANES];
            unrolled_for (int i = 0; i < LANES; i++)
                a[i] = r + i < n ? load(src + (r + i) * padded + x) : (V){0};
            unrolled_for (int stage = 1; stage < LANES; stage *= 2) {
                unrolled_for (int i = 0; i < LANES; i++) b[i] = a[i];
                unrolled_for (int i = 0; i < LANES / 2; i++) {
                    a[2 * i] = SHUFFLE(BITS, b[i], b[i + LANES / 2], MERGE_LOW);
                    a[2 * i + 1] = SHUFFLE(BITS, b[i], b[i + LANES / 2], MERGE_HIGH);
                }
            }
            unrolled_for (int i = 0; i < LANES; i++) store(dst + (x + i) * width + r, a[i]);
        }
    }
}

// dst (n, d) = scale * src (n, padded), times factor[row] unless factor is NULL
static TARGET void unpack(floatX *dst, ptrdiff_t dst_row, const real *src, int padded, int n, int d,
                          real scale, const real *factor) {
    for (int r = 0; r < n; r++, dst += dst_row, src += padded) {
        prefetch(dst, dst_row, d);
        real f = factor ? scale * factor[r] : scale;
        int x = 0;
        for (; x + LANES <= d; x += LANES) store(dst + x, load(src + x) * f);
        for (; x < d; x++) dst[x] = src[x] * f;
    }
}

// ---- Forward ------------------------------------------------------------------------------------

// p (keys, queries): scores in, probabilities relative to the running maximum out. top and sum
// (queries): state of the online softmax, updated; alpha (queries): factor that rescales the output
// so far.
static TARGET void softmax(real *p, real *top, real *sum, real *alpha, int keys, int queries,
                           int diagonal) {
    for (int q = 0; q < queries; q += LANES) {
        int clear = diagonal ? at_most(q, keys) : keys;  // keys that no lane masks
        int rows = diagonal ? at_most(keys, round_up(q + LANES, BLOCK_ROWS)) : keys;
        V before = load(top + q), now = before, total = {0};
        int k = 0;
        for (; k < clear; k++) now = MAX(load(p + k * TILE + q), now);
        for (; k < rows; k++) {
            BITS mask = sees(k - q);
            V s = load(p + k * TILE + q);
            s = (V)(((BITS)s & mask) | ((BITS)splat(-INFINITY) & ~mask));
            store(p + k * TILE + q, s);
            now = MAX(s, now);
        }
        for (k = 0; k < rows; k++) {
            V e = pow2(load(p + k * TILE + q) - now);
            store(p + k * TILE + q, e);
            total += e;
        }
        V factor = pow2(before - now);
        store(alpha + q, factor);
        store(sum + q, FMA(load(sum + q), factor, total));
        store(top + q, now);
    }
}

// One tile pair of one head: adds the tile's keys to the running output of the tile's queries
static TARGET void forward_tile(const Call *f, const Scratch *s, const floatX *keys, int g,
                                int num_keys, int num_queries, int diagonal, int first) {
    const AttentionShape *h = &f->shape;
    const int width = round_up(num_queries, LANES);
    const size_t at = (size_t)g * TILE * h->padded;
    // S^T = K Q^T
    gemm(s->p, TILE, FRESH, (View){keys, h->qkv_row, 1}, s->q_t + at, width,
         (Size){num_keys, width / LANES, h->head_dim}, diagonal ? COLUMNS_FROM_ROW : WHOLE);
    softmax(s->p, s->top + g * TILE, s->sum + g * TILE, s->alpha, num_keys, num_queries, diagonal);
    // O = alpha O + P V
    gemm(s->acc + at, h->padded, first ? FRESH : (Start){true, s->alpha}, (View){s->p, 1, TILE},
         s->kv, h->padded, (Size){num_queries, h->padded / LANES, num_keys},
         diagonal ? DEPTH_TO_ROW : WHOLE);
}

// Queries of one tile, all heads of the group of kv_head, against all keys up to them
static TARGET void forward_item(const Call *f, const Item *item, int kv_head, const Scratch *s) {
    const AttentionShape *h = &f->shape;
    const int tile = item->first;
    const int64_t row = tile_row(f->docs, item->doc, tile);
    const int num_queries = at_most(TILE, f->docs->cu_seqlens[item->doc + 1] - row);
    for (int g = 0; g < h->group; g++) {
        const floatX *q = f->qkv + row * h->qkv_row + (kv_head * h->group + g) * h->head_dim;
        pack(s->q, h->padded, q, h->qkv_row, num_queries, h->head_dim, h->scale * LOG2E);
        transpose(s->q_t + (size_t)g * TILE * h->padded, s->q, num_queries, h->padded);
    }
    for (int i = 0; i < h->group * TILE; i++) s->top[i] = -INFINITY, s->sum[i] = 0;

    for (int k = 0; k <= tile; k++) {
        const int num_keys = k == tile ? num_queries : TILE;
        const floatX *keys = f->qkv + tile_row(f->docs, item->doc, k) * h->qkv_row +
                             (h->num_heads + kv_head) * h->head_dim;
        pack(s->kv, h->padded, keys + h->num_kv_heads * h->head_dim, h->qkv_row, num_keys,
             h->head_dim, 1);
        for (int g = 0; g < h->group; g++)
            forward_tile(f, s, keys, g, num_keys, num_queries, k == tile, k == 0);
    }

    for (int g = 0; g < h->group; g++) {
        const int head = kv_head * h->group + g;
        for (int i = 0; i < num_queries; i++) {
            const real sum = s->sum[g * TILE + i];
            f->new_lse[head * h->num_tokens + row + i] = s->top[g * TILE + i] * LN2 + log_real(sum);
            s->alpha[i] = 1 / sum;
        }
        unpack(f->out + row * h->out_row + head * h->head_dim, h->out_row,
               s->acc + (size_t)g * TILE * h->padded, h->padded, num_queries, h->head_dim, 1,
               s->alpha);
    }
}

// ---- Backward -----------------------------------------------------------------------------------

static TARGET real dot(const floatX *a, const floatX *b, int d) {
    V acc = {0};
    real sum = 0;
    int x = 0;
    for (; x + LANES <= d; x += LANES) acc = FMA(load(a + x), load(b + x), acc);
    for (; x < d; x++) sum += a[x] * b[x];
    for (int i = 0; i < LANES; i++) sum += acc[i];
    return sum;
}

// p (keys, queries): scores in, P^T out; ds: dP^T in, dS^T = P^T (dP^T - delta) out
static TARGET void dsoftmax(real *p, real *ds, const real *lse, const real *delta, int keys,
                            int queries, int diagonal) {
    for (int q = 0; q < queries; q += LANES) {
        int rows = diagonal ? at_most(keys, round_up(q + LANES, BLOCK_ROWS)) : keys;
        V l = load(lse + q), d = load(delta + q);
        for (int k = 0; k < rows; k++) {
            V e = pow2(load(p + k * TILE + q) - l);
            if (diagonal && k > q) e = keep(e, sees(k - q));
            store(p + k * TILE + q, e);
            store(ds + k * TILE + q, e * (load(ds + k * TILE + q) - d));
        }
    }
}

// One tile pair of one head: dq of the tile's queries += (PASS_DQ) and dk, dv of its keys +=
// (PASS_DKV)
static TARGET void backward_tile(const Call *f, const Scratch *s, const floatX *values, int g,
                                 real *dk, real *dv, int num_keys, int num_queries, int diagonal,
                                 int pass) {
    const AttentionShape *h = &f->shape;
    const int width = round_up(num_queries, LANES), wide = h->padded / LANES;
    const size_t at = (size_t)g * TILE * h->padded;
    const Size scores = {num_keys, width / LANES, h->head_dim};
    const TilePart columns = diagonal ? COLUMNS_FROM_ROW : WHOLE;
    // S^T = K Q^T, dP^T = V dO^T
    gemm(s->p, TILE, FRESH, (View){s->kv, h->padded, 1}, s->q_t + at, width, scores, columns);
    gemm(s->ds, TILE, FRESH, (View){values, h->qkv_row, 1}, s->dout_t + at, width, scores, columns);
    dsoftmax(s->p, s->ds, s->top + g * TILE, s->sum + g * TILE, num_keys, num_queries, diagonal);
    if (pass & PASS_DKV) {
        const Size keys = {num_keys, wide, num_queries};
        const TilePart part = diagonal ? DEPTH_FROM_ROW : WHOLE;
        // dV += P^T dO, dK += dS^T Q
        gemm(dv, h->padded, ADD, (View){s->p, TILE, 1}, s->dout + at, h->padded, keys, part);
        gemm(dk, h->padded, ADD, (View){s->ds, TILE, 1}, s->q + at, h->padded, keys, part);
    }
    // dQ += dS K
    if (pass & PASS_DQ)
        gemm(s->acc + at, h->padded, ADD, (View){s->ds, 1, TILE}, s->kv, h->padded,
             (Size){num_queries, wide, num_keys}, diagonal ? DEPTH_TO_ROW : WHOLE);
}

// Packs q and dout of n queries from `row` on, for all heads of the group, with their lse and delta
static TARGET void load_queries(const Call *f, const Scratch *s, int64_t row, int n, int kv_head) {
    const AttentionShape *h = &f->shape;
    for (int g = 0; g < h->group; g++) {
        const size_t at = (size_t)g * TILE * h->padded;
        const int64_t head = kv_head * h->group + g;
        const floatX *q = f->qkv + row * h->qkv_row + head * h->head_dim;
        const floatX *dout = f->dout + row * h->out_row + head * h->head_dim;
        pack(s->q + at, h->padded, q, h->qkv_row, n, h->head_dim, h->scale * LOG2E);
        pack(s->dout + at, h->padded, dout, h->out_row, n, h->head_dim, 1);
        transpose(s->q_t + at, s->q + at, n, h->padded);
        transpose(s->dout_t + at, s->dout + at, n, h->padded);
        for (int i = 0; i < TILE; i++) {
            int64_t t = head * h->num_tokens + row + i;
            s->top[g * TILE + i] = i < n ? f->lse[t] * LOG2E : 0;
            s->sum[g * TILE + i] = i < n ? f->delta[t] : 0;
        }
    }
}

// Queries of document doc x the item's keys that they see; the item's pass selects the gradients.
// first_row: of the keys in s->dk and s->dv.
static TARGET void backward_queries(const Call *f, const Item *item, int doc, int64_t first_row,
                                    int kv_head, const Scratch *s) {
    const AttentionShape *h = &f->shape;
    const int len = doc_len(f->docs, doc), shared = num_shared(f->docs, doc) / TILE;
    const int key_begin = item->pass == PASS_DKV ? item->first : 0;
    const int key_end = item->pass == PASS_DKV && doc != item->doc ? at_most(item->end, shared)
                        : item->pass == PASS_BOTH                  ? num_tiles(len)
                                                                   : item->end;
    const int query_end = item->pass == PASS_DQ ? item->end : num_tiles(len);
    const int64_t k_at = (h->num_heads + kv_head) * h->head_dim,
                  v_at = k_at + h->num_kv_heads * h->head_dim;
    for (int tile = doc == item->doc ? item->first : shared; tile < query_end; tile++) {
        const int64_t row = tile_row(f->docs, doc, tile);
        const int num_queries = at_most(TILE, len - tile * TILE);
        load_queries(f, s, row, num_queries, kv_head);
        memset(s->acc, 0, sizeof(real) * h->group * TILE * h->padded);
        for (int k = key_begin; k < key_end && k <= tile; k++) {
            const int num_keys = k == tile ? num_queries : TILE;
            const int64_t key_row = tile_row(f->docs, doc, k);
            const int64_t at = item->pass & PASS_DKV ? (key_row - first_row) * h->padded : 0;
            const floatX *rows = f->qkv + key_row * h->qkv_row;
            pack(s->kv, h->padded, rows + k_at, h->qkv_row, num_keys, h->head_dim, 1);
            for (int g = 0; g < h->group; g++)
                backward_tile(f, s, rows + v_at, g, s->dk + at, s->dv + at, num_keys, num_queries,
                              k == tile, item->pass);
        }
        for (int g = 0; g < h->group && (item->pass & PASS_DQ); g++)
            unpack(f->dqkv + row * h->qkv_row + (kv_head * h->group + g) * h->head_dim, h->qkv_row,
                   s->acc + (size_t)g * TILE * h->padded, h->padded, num_queries, h->head_dim,
                   h->scale, NULL);
    }
}

// The item's keys, for one kv head, and the queries that see them
static TARGET void backward_item(const Call *f, const Item *item, int kv_head, const Scratch *s) {
    const AttentionShape *h = &f->shape;
    const int32_t *cu_seqlens = f->docs->cu_seqlens;
    const int readers = readers_end(f->docs, item->doc, item->first, item->pass);
    const int64_t row = tile_row(f->docs, item->doc, item->first);
    const int64_t end = item->pass == PASS_BOTH ? cu_seqlens[readers]
                                                : at_most(tile_row(f->docs, item->doc, item->end),
                                                          cu_seqlens[item->doc + 1]);
    const int num_rows = (int)(end - row);
    if (item->pass & PASS_DKV) {
        memset(s->dk, 0, sizeof(real) * num_rows * h->padded);
        memset(s->dv, 0, sizeof(real) * num_rows * h->padded);
    }
    for (int doc = item->doc; doc < readers; doc++) backward_queries(f, item, doc, row, kv_head, s);
    if (item->pass & PASS_DKV) {
        floatX *dk = f->dqkv + row * h->qkv_row + (h->num_heads + kv_head) * h->head_dim;
        unpack(dk, h->qkv_row, s->dk, h->padded, num_rows, h->head_dim, LN2, NULL);
        unpack(dk + h->num_kv_heads * h->head_dim, h->qkv_row, s->dv, h->padded, num_rows,
               h->head_dim, 1, NULL);
    }
}

#undef NAME
#undef TARGET
#undef LANES
#undef FMA
#undef MERGE_LOW
#undef MERGE_HIGH
