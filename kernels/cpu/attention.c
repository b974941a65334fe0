// Causal attention over packed documents: FlashAttention-2 (arXiv 2307.08691, algorithms 1 and 2)
// on the CPU.
//
// Idea. A tile of 64 x 64 scores stays in cache and is stored transposed: keys are rows, queries
// are vector lanes. The running maximum, the sum, lse and delta are then plain vectors, no
// reduction crosses lanes, and only Q (and dO) are transposed, once per tile of queries. The six
// products S = K Q^T, O += P V, dP = V dO^T, dV += P^T dO, dK += dS^T Q, dQ += dS K use one small
// GEMM with a block of C in registers (attention_tiles.h). On a diagonal tile it skips masked
// register blocks: almost half of the work for documents of 64 tokens.
//
// Position independence. Tiles are counted from the document's first token; an element of any
// product is one chain of FMAs in ascending order of queries or keys, independent of the blocking,
// the split into items and the number of threads. So a document's bits do not depend on its place.
//
// Work. An item is a range of tiles of one document, for one kv head and all query heads of its
// group, which share the packed tile of K or V. Threads take items from one list, costliest first:
//   PASS_FORWARD  a tile of queries, all keys up to it
//   PASS_BOTH     backward of a whole document: dQ of a tile of queries stays in cache, dK and dV
//                 of the document are summed in scratch; 5 products
//   PASS_DQ       a tile of queries: 3 products
//   PASS_DKV      KEY_SPAN tiles of keys: 4 products
// The last two replace PASS_BOTH for the kv heads of a document that would leave threads idle: a
// document of three heads takes two threads as long as 1.73 heads take one, not two. They cost
// 7 / 5 of the work (measured: 1.46 of the time, 2048 tokens). Both forms give the same bits. To
// PASS_BOTH a leader and its borrowers are one document; in PASS_DKV the queries of all of them
// pass by the leader's keys.
//
// Sizes. TILE 64: Q^T, V and P of a tile are 16 KB each at head_dim 64, four AVX-512 vectors wide.
// Register blocks: 6 x 4 vectors (24 of 32 registers) with AVX-512, 6 x 2 (12 of 16) with AVX2,
// where 4 x 3 was as fast and 5 x 2 slower. KEY_SPAN 4: packing Q and dO serves 256 keys.
//
// Rejected: transposed tiles always TILE wide (a document of one token then touches 64 cache lines
// per head, all in a quarter of the cache's sets); the full shuffle network for one or two rows.
#include <assert.h>
#include <omp.h>

#include "../../data/base/error.h"
#include "../arena.h"
#include "common.h"

#define TILE 64     // queries and keys of a tile of scores
#define KEY_SPAN 4  // key tiles of an item of the dK, dV pass
#define AHEAD 8     // rows prefetched
#define ALIGN 64    // bytes
#define LOG2E ((real)1.44269504088896340736)
#define LN2 ((real)0.69314718055994530942)

static inline int num_tiles(int n) { return (int)ceil_div(n, TILE); }

// ---- Documents, which may borrow a prefix of their leader ---------------------------------------

static inline int num_shared(const VarlenInfo *docs, int doc) {
    return docs->shared_len ? docs->shared_len[doc] : 0;
}
static inline int num_own(const VarlenInfo *docs, int doc) {
    return docs->cu_seqlens[doc + 1] - docs->cu_seqlens[doc];
}
static inline int doc_len(const VarlenInfo *docs, int doc) {
    return num_shared(docs, doc) + num_own(docs, doc);
}
// Where a tile begins
static inline int64_t tile_row(const VarlenInfo *docs, int doc, int tile) {
    const int64_t at = (int64_t)tile * TILE, shared = num_shared(docs, doc);
    return at < shared ? docs->shared_first[doc] + at : docs->cu_seqlens[doc] + at - shared;
}
// Query-key pairs of a document's own queries
static int64_t doc_pairs(const VarlenInfo *docs, int doc) {
    const int64_t own = num_own(docs, doc);
    return own * (own + 1) / 2 + own * num_shared(docs, doc);
}

// -------------------------------------------------------------------------------------------------
// The work list: a header, the forward items, the backward items. Each covers all kv heads, but
// PASS_BOTH only a document's first ones, and the other backward passes the rest.

enum { PASS_FORWARD = 0, PASS_DQ = 1, PASS_DKV = 2, PASS_BOTH = PASS_DQ | PASS_DKV };

typedef struct {
    int32_t num_forward, num_backward, max_key_span;
} WorkHeader;
typedef struct {
    int32_t doc, first, end, pass, cost;
    int32_t whole_heads;  // kv heads of PASS_BOTH
} Item;                   // tiles [first, end) of document doc

enum {
    HEADER_INTS = sizeof(WorkHeader) / sizeof(int32_t),
    ITEM_INTS = sizeof(Item) / sizeof(int32_t)
};

// The document after the last one whose queries pass by the item's keys
static int readers_end(const VarlenInfo *docs, int doc, int first, int pass) {
    int end = doc + 1;
    while (pass & PASS_DKV && end < docs->num_segments && num_shared(docs, end) > first * TILE)
        end++;
    return end;
}

size_t attention_work_list_size(int64_t max_tokens, int64_t max_segments) {
    int64_t docs = at_most(max_segments, max_tokens);  // upper bound on non-empty ones
    int64_t tiles = max_tokens / TILE + docs;
    return HEADER_INTS + (size_t)(3 * tiles) * ITEM_INTS;  // forward, dQ, dK and dV
}

// Multiply-adds of an item in units of 64 query-key pairs of one GEMM, saturated
static Item make_item(const VarlenInfo *docs, int doc, int first, int end, int pass) {
    static const int gemms[] = {2, 3, 4, 5};
    const int64_t len = doc_len(docs, doc);
    const int readers = readers_end(docs, doc, first, pass);
    int64_t a = (int64_t)first * TILE, b = at_most(end * TILE, len);
    int64_t pairs = (b - a) * (b - a + 1) / 2;
    pairs += pass == PASS_DKV ? (b - a) * (len - b) : (b - a) * a;
    for (int d = doc + 1; d < readers; d++)
        pairs += pass == PASS_BOTH ? doc_pairs(docs, d)
                                   : num_own(docs, d) * (at_most(b, num_shared(docs, d)) - a);
    int64_t cost = (pairs * gemms[pass] + 63) / 64;
    return (Item){doc, first, end, pass, cost < INT32_MAX ? (int32_t)cost : INT32_MAX, 0};
}

static int costlier_first(const void *x, const void *y) {
    const Item *a = x, *b = y;
    if (a->cost != b->cost) return a->cost > b->cost ? -1 : 1;
    if (a->doc != b->doc) return a->doc < b->doc ? -1 : 1;
    if (a->pass != b->pass) return a->pass < b->pass ? -1 : 1;
    return (a->first > b->first) - (a->first < b->first);
}

// Adds items of `span` of the document's own tiles.
static Item *add_items(Item *item, const VarlenInfo *docs, int doc, int span, int pass) {
    const int tiles = num_tiles(doc_len(docs, doc));
    for (int t = num_shared(docs, doc) / TILE; t < tiles; t += span)
        *item++ = make_item(docs, doc, t, at_most(t + span, tiles), pass);
    return item;
}

// The number of kv heads that PASS_BOTH takes so that the threads end earliest: all or none of a
// document of one tile, for which the list has no room. pairs: of the document and a head; others:
// of the other documents and all heads
static int choose_whole_heads(double pairs, double others, int heads, int tiles) {
    const int threads = cpu_threads();
    double least = INFINITY;
    int best = 0;
    for (int whole = 0; whole <= heads; whole += tiles > 1 ? 1 : heads) {
        const double work = others + pairs * (whole + 1.46 * (heads - whole)),
                     time = fmax(work / threads, pairs * (double)ceil_div(whole, threads));
        if (time > least) continue;
        least = time;
        best = whole;
    }
    return best;
}

size_t attention_work_list(int32_t *work_host, const int32_t *cu_seqlens_host,
                           const int32_t *shared_first_host, const int32_t *shared_len_host,
                           int num_segments, HeadShape heads) {
    const VarlenInfo docs = {.cu_seqlens = cu_seqlens_host,
                             .num_segments = num_segments,
                             .shared_first = shared_first_host,
                             .shared_len = shared_len_host};
    WorkHeader *header = (WorkHeader *)work_host;
    Item *forward = (Item *)(work_host + HEADER_INTS), *item = forward;
    double all = 0;  // query-key pairs of one kv head
    for (int doc = 0; doc < num_segments; doc++) {
        all += (double)doc_pairs(&docs, doc);
        item = add_items(item, &docs, doc, 1, PASS_FORWARD);
    }
    Item *backward = item;
    *header = (WorkHeader){.num_forward = (int32_t)(backward - forward)};
    for (int doc = 0, end; doc < num_segments; doc = end) {
        const int rows_of_doc = num_own(&docs, doc);
        double pairs = 0;
        end = readers_end(&docs, doc, 0, PASS_BOTH);
        for (int d = doc; d < end; d++) pairs += (double)doc_pairs(&docs, d);
        if (rows_of_doc == 0) continue;
        const int kv_heads = heads.num_kv_heads;
        const int span = num_tiles(cu_seqlens_host[end] - cu_seqlens_host[doc]);
        const int whole = choose_whole_heads(pairs, (all - pairs) * kv_heads, kv_heads, span);
        header->max_key_span =
            at_least(header->max_key_span, whole ? span : at_most(KEY_SPAN, span));
        Item *first = item;
        if (whole) *item++ = make_item(&docs, doc, 0, num_tiles(rows_of_doc), PASS_BOTH);
        for (int d = doc; d < end && whole < kv_heads; d++) {
            item = add_items(item, &docs, d, KEY_SPAN, PASS_DKV);
            item = add_items(item, &docs, d, 1, PASS_DQ);
        }
        for (; first < item; first++) first->whole_heads = whole;
    }
    header->num_backward = (int32_t)(item - backward);
    qsort(forward, (size_t)header->num_forward, sizeof(Item), costlier_first);
    qsort(backward, (size_t)header->num_backward, sizeof(Item), costlier_first);
    return (size_t)((int32_t *)item - work_host);
}

// ---- Arguments of one call, and scratch ---------------------------------------------------------

typedef struct {
    int64_t num_tokens, qkv_row, out_row;  // rows in elements
    int64_t num_heads, num_kv_heads;
    int group, head_dim, padded;  // query heads per kv head; head_dim rounded up to 64 bytes
    real scale;
} AttentionShape;

typedef struct {
    AttentionShape shape;
    const VarlenInfo *docs;
    const floatX *qkv;  // (T, H + 2*Hkv, D)
    // forward
    floatX *out;    // (T, H, D)
    real *new_lse;  // (H, T)
    // backward
    floatX *dqkv;             // as qkv
    const floatX *dout;       // (T, H, D)
    const real *lse, *delta;  // (H, T)
} Call;

// One thread's tiles; shapes with P = padded, G = group
typedef struct {
    real *q, *dout;      // (G, TILE, P)       q is scaled by softmax_scale * log2(e)
    real *q_t, *dout_t;  // (G, P, <= TILE)    their transposes, queries rounded up to a vector
    real *acc;           // (G, TILE, P)       O in forward, dQ in backward
    real *top, *sum;     // (G, TILE)          maximum and sum in forward; lse and delta in backward
    real *alpha;         // (TILE)
    real *kv;            // (TILE, P)          V in forward, K in backward
    real *p, *ds;        // (TILE, TILE)       keys are rows, queries are lanes
    real *dk, *dv;       // (key span * TILE, P)
} Scratch;

// C (rows, vecs vectors) = alpha[row] * C + A B. A (rows, depth) has any two strides, B (depth,
// vecs vectors) and C are row-major. Each element of C is one chain of FMAs in order of depth with
// any blocking, so edges and splits do not change a bit.
typedef struct {
    const real *p;
    ptrdiff_t row, step;
} View;
typedef struct {
    int rows, vecs, depth;
} Size;
// A whole tile, or the unmasked part of a diagonal one
typedef enum { WHOLE, COLUMNS_FROM_ROW, DEPTH_TO_ROW, DEPTH_FROM_ROW } TilePart;
// The value of C before the product is added
typedef struct {
    bool read;          // else 0
    const real *alpha;  // (rows) factors; NULL: 1
} Start;
static const Start FRESH = {.read = false}, ADD = {.read = true};
typedef struct {
    real *c;
    ptrdiff_t c_row;
    Start start;
    View a;
    const real *b;
    ptrdiff_t b_row;
} Product;

static AttentionShape make_shape(HeadShape heads, int64_t num_tokens) {
    if (heads.num_kv_heads <= 0 || heads.num_heads % heads.num_kv_heads || heads.head_dim <= 0 ||
        heads.head_dim % 2)
        kernel_fatal(
            "attention: %d heads, %d kv heads, head_dim %d; expected heads a multiple of "
            "kv heads, head_dim even",
            heads.num_heads, heads.num_kv_heads, heads.head_dim);
    return (AttentionShape){
        .num_tokens = num_tokens,
        .qkv_row = (int64_t)(heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim,
        .out_row = (int64_t)heads.num_heads * heads.head_dim,
        .num_heads = heads.num_heads,
        .num_kv_heads = heads.num_kv_heads,
        .group = heads.num_heads / heads.num_kv_heads,
        .head_dim = heads.head_dim,
        .padded = round_up(heads.head_dim, ALIGN / sizeof(real)),
        .scale = (real)(1 / sqrt(heads.head_dim)),
    };
}

// Takes one thread's scratch from an arena, or measures it.
static void carve(Scratch *s, Arena *a, const AttentionShape *h, int key_span) {
    const size_t tile = (size_t)TILE * h->padded, group = (size_t)h->group, span = tile * key_span;
    real **const tiles[] = {&s->q, &s->dout, &s->q_t, &s->dout_t, &s->acc};
    for (int i = 0; i < 5; i++) *tiles[i] = arena_take(a, group * tile, sizeof(real));
    s->top = arena_take(a, group * TILE, sizeof(real));
    s->sum = arena_take(a, group * TILE, sizeof(real));
    s->alpha = arena_take(a, TILE, sizeof(real));
    s->kv = arena_take(a, tile, sizeof(real));
    s->p = arena_take(a, TILE * TILE, sizeof(real));
    s->ds = arena_take(a, TILE * TILE, sizeof(real));
    s->dk = arena_take(a, span, sizeof(real));
    s->dv = arena_take(a, span, sizeof(real));
}

// The scratch of all threads, kept between calls and grown when needed. Call outside parallel
// regions.
static char *scratch_of_all(size_t bytes_of_each) {
    static Arena all;
    const size_t bytes = bytes_of_each * (size_t)omp_get_max_threads();
    if (bytes > all.bytes) {
        free(all.base);
        all = (Arena){aligned_alloc(ALIGN, bytes), bytes};
        if (!all.base)
            exit_with(EXIT_HOST_MEMORY, "fewer threads, or shorter documents (--max-seqlen)",
                      "host memory: attention needs %zu bytes of scratch for %d threads", bytes,
                      omp_get_max_threads());
    }
    return all.base;
}

// ---- The same code for several instruction sets; this CPU's best is selected at run time --------

// Register blocks of gemm: at most 6 rows of 4 vectors
enum { rows_avx512 = 6, vecs_avx512 = 4 };
enum { rows_avx2 = 6, vecs_avx2 = 2 };
#ifdef NEON
enum { rows_portable = 4, vecs_portable = 4 };
#else
enum { rows_portable = 4, vecs_portable = 2 };
#endif

// a > b ? a : b on vectors: b if one of them is NaN
#define max_avx512(a, b) _mm512_max_ps(a, b)
#define max_avx2(a, b) _mm256_max_ps(a, b)
#define max_portable(a, b)                                              \
    ((vec_portable)(((bits_portable)(a) & (bits_portable)((a) > (b))) | \
                    ((bits_portable)(b) & ~(bits_portable)((a) > (b)))))

#define AVX512 "avx512f,avx512dq,avx512vl,avx512bw,fma"
#define CODE "attention_tiles.h"
#include "each_set.h"

typedef void ItemCode(const Call *, const Item *, int kv_head, const Scratch *);
typedef struct {
    const char *name;
    ItemCode *forward, *backward;
    real (*delta)(const floatX *dout, const floatX *out, int head_dim);
} Isa;

static const Isa isas[] = {
#ifdef X86
    {"avx512", forward_item_avx512, backward_item_avx512, dot_avx512},
    {"avx2", forward_item_avx2, backward_item_avx2, dot_avx2},
#endif
    {"portable", forward_item_portable, backward_item_portable, dot_portable},
};
static const Isa *isa;

int attention_select(const char *name) {
    const bool any = strcmp(name, "auto") == 0 || strcmp(name, "unprobed") == 0;
    for (size_t i = 0; i < sizeof(isas) / sizeof(isas[0]); i++) {
        if ((!any && strcmp(name, isas[i].name) != 0) || !cpu_has(isas[i].name)) continue;
        isa = &isas[i];
        return 0;
    }
    return -1;
}

static const Isa *selected(void) {
    if (!isa) attention_select("auto");
    return isa;
}
const char *attention_describe(void) { return selected()->name; }

// ---- Entry points -------------------------------------------------------------------------------

static void run_items(const Call *c, ItemCode *code, bool backward) {
    const VarlenInfo *docs = c->docs;
    if (docs->total_tokens == 0) return;
    assert(docs->cu_seqlens[docs->num_segments] == docs->total_tokens);
    const WorkHeader *work = (const WorkHeader *)docs->work;
    const Item *items = (const Item *)(work + 1) + (backward ? work->num_forward : 0);
    const int num_items = backward ? work->num_backward : work->num_forward,
              key_span = backward ? work->max_key_span : 0, kv_heads = (int)c->shape.num_kv_heads;
    Arena each = {0};
    carve(&(Scratch){0}, &each, &c->shape, key_span);
    char *all = scratch_of_all(each.bytes);
#pragma omp parallel
    {
        Scratch s;
        carve(&s, &(Arena){all + each.bytes * omp_get_thread_num(), 0}, &c->shape, key_span);
#pragma omp for schedule(dynamic)
        for (int i = 0; i < num_items * kv_heads; i++) {
            const Item *item = &items[i / kv_heads];
            if ((i % kv_heads < item->whole_heads) == (item->pass == PASS_BOTH))
                code(c, item, i % kv_heads, &s);
        }
    }
}

void attention_forward(floatX *out, real *lse, const floatX *qkv, const VarlenInfo *docs,
                       HeadShape heads) {
    const Call c = {.shape = make_shape(heads, docs->total_tokens),
                    .docs = docs,
                    .qkv = qkv,
                    .out = out,
                    .new_lse = lse};
    run_items(&c, selected()->forward, false);
}

size_t attention_sums_size(int64_t max_tokens, int head_dim) {
    (void)max_tokens, (void)head_dim;
    return 0;
}

void attention_backward(floatX *dqkv, real *delta, real *sums, const floatX *dout,
                        const floatX *qkv, const floatX *out, const real *lse,
                        const int32_t *position_ids, const real *rope_table, const VarlenInfo *docs,
                        HeadShape heads) {
    (void)sums;
    const Call c = {.shape = make_shape(heads, docs->total_tokens),
                    .docs = docs,
                    .qkv = qkv,
                    .dqkv = dqkv,
                    .dout = dout,
                    .lse = lse,
                    .delta = delta};
    const int64_t T = docs->total_tokens, H = heads.num_heads, D = heads.head_dim;
    const Isa *kernels = selected();
#pragma omp parallel for
    for (int64_t t = 0; t < T; t++)
        for (int64_t h = 0; h < H; h++)
            delta[h * T + t] =
                kernels->delta(dout + (t * H + h) * D, out + (t * H + h) * D, (int)D);
    run_items(&c, kernels->backward, true);
    rope_inverse(dqkv, position_ids, rope_table, T, heads);
}
