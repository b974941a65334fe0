// Matrix multiplication. The products of a linear layer share one loop nest over
// C(i,j) += A(i,k) B(j,k), in which A and B have any two strides, so that a transpose needs no
// special case. Blocks of A and B are copied ("packed") into the order in which the register tile
// (matmul_tile.h) reads them; the tile keeps MR x NR sums of C in registers. This is Goto &
// van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (TOMS 2008), with the packed
// layout and the letters of BLIS (Van Zee & van de Geijn, TOMS 2015).
//
// Determinism. Every C(i,j) is the same chain of multiply-adds, independent of other elements: k in
// blocks whose size depends only on the depth, each block one chain from zero in order of k, blocks
// added in order. Edge tiles run the same code on zero-filled panels into a spare tile. So the bits
// of a row do not depend on T, on the row's position or on the number of threads, but they do
// depend on the instruction set.
//
// For few rows (up to FEW_MOST of A, forward only: decoding), packing B would cost more than the
// product. B is then read once, in place, and each output is the same chain as above: on Zen 5 one
// core streams weights at about 0.7 of its read bandwidth, against 0.25 through packed panels.
//
// bf16 rounds while packing: a word of a panel then holds two bf16 values adjacent in k, and the
// tile is the same code with a dot product of pairs as its multiply-add and half the depth. AMX
// multiplies pairs in registers of 16 x 16 words: B's panels are the same, A's have 16 pairs of a
// row together. For few rows the operands change places: weights are read in order.
//
// Blocking. All threads pack a part of B (NC x KC, 5 MB, in L3). Then each packs the rows of A (MC
// x KC, 240 kB) of its own item, so that they stay in its L2, and multiplies them by one panel of B
// (NR x KC) after the other, while the tiles prefetch the next panel into L2. KC is also
// the number of terms summed between accesses to C: a larger KC saves memory traffic, a smaller one
// reduces rounding error and a panel's size. dev/SPEED.md lists other variants that were tried.
#include <assert.h>
#include <sys/mman.h>

#include "common.h"

enum {
    KC = 640,                 // depth of a block, even: 576 fits in one
    MC = 96,                  // rows of A of an item: 12 tiles of 8
    PACK_DEPTH = 64,          // columns of A or B packed at a time, panel by panel
    A_SIZE = 96 * 1024,       // elements of A packed at a time, at least MC * KC
    NC = 2048,                // rows of B packed at a time
    MAX_TILE = 32 * 32,       // elements of the largest register tile
    FEW_ROWS = 8,             // of A that share a pass over an unpacked B
    FEW_MOST = 16,            // rows of A: for more, packing B pays
    FEW_MAX_WIDTH = 16,       // rows of B that such a pass handles at a time
    WORTH_THREADS = 1 << 18,  // multiply-adds, about 5 us: below that, waking threads takes longer
};

// A dense matrix or its transpose: element (i, k) is p[i * row + k * col]; row or col is 1.
typedef struct {
    const real *p;
    int64_t row, col;
} Matrix;

static Matrix at(Matrix x, int64_t i, int64_t k) {
    return (Matrix){x.p + i * x.row + k * x.col, x.row, x.col};
}

// ---- Register tiles, one per instruction set ----------------------------------------------------

typedef void Tile(real *c, const real *addend, int64_t c_stride, const real *restrict a,
                  const real *restrict b, int64_t depth, const real *next);

typedef void Pack(real *packed, Matrix x, int64_t rows, int width, int64_t depth, int64_t stride);

typedef void Few(real *restrict c, const real *restrict a, const real *restrict b, int64_t depth,
                 int64_t kc, int rows);

typedef struct {
    const char *name;
    Tile *tile;
    int mr, nr;
    Pack *pack;
    Few *few;  // for few rows of A; NULL: they use the tile
    int few_width;
    // panel[k][i] = panel[2k][i] and panel[2k+1][i] as bf16 in one word; NULL: an fp32 set
    void (*round_pairs)(real *panel, int64_t pairs, int width);
    // AMX, else NULL: the tiles of a panel of A, and their registers for this thread or for no one
    void (*pack_tiles)(real *panel, Matrix x, real scale, int64_t rows, int64_t depth);
    void (*configure)(bool on);
} InstructionSet;

// Register tiles: rows, and vectors of columns. NEON has twice the registers of SSE.
enum { mr_avx512 = 8, nv_avx512 = 3 };
enum { mr_avx2 = 4, nv_avx2 = 3 };
#ifdef NEON
enum { mr_portable = 6, nv_portable = 4 };
#else
enum { mr_portable = 4, nv_portable = 2 };
#endif
enum { mr_avx512_bf16 = 8, nv_avx512_bf16 = 3 };
enum { mr_amx = 32, nv_amx = 2 };

// For `few`:
//   fours(p, step)          a vector of quadruples, the one at p, then p + step, p + 2 * step ...
//   zip_low, zip_high(a, b) in each quadruple: a0 b0 a1 b1, a2 b2 a3 b3
//   pairs(a, b, which)      in each quadruple: a0 a1 b0 b1 (which 0x44), a2 a3 b2 b3 (0xee)
#define QUAD(p) _mm_loadu_ps(p)
#define fours_avx512(p, step)                                                                 \
    _mm512_insertf32x4(_mm512_insertf32x4(_mm512_insertf32x4(_mm512_castps128_ps512(QUAD(p)), \
                                                             QUAD((p) + (step)), 1),          \
                                          QUAD((p) + 2 * (step)), 2),                         \
                       QUAD((p) + 3 * (step)), 3)
#define zip_low_avx512(a, b) _mm512_unpacklo_ps(a, b)
#define zip_high_avx512(a, b) _mm512_unpackhi_ps(a, b)
#define pairs_avx512(a, b, which) _mm512_shuffle_ps(a, b, which)
#define fours_avx2(p, step) \
    _mm256_insertf128_ps(_mm256_castps128_ps256(QUAD(p)), QUAD((p) + (step)), 1)
#define zip_low_avx2(a, b) _mm256_unpacklo_ps(a, b)
#define zip_high_avx2(a, b) _mm256_unpackhi_ps(a, b)
#define pairs_avx2(a, b, which) _mm256_shuffle_ps(a, b, which)
#ifdef GRADCHECK
#define few_portable NULL
#else
typedef int32_t index4 __attribute__((vector_size(16)));
#define fours_portable(p, step) (*(const vec_anywhere_portable *)(p))
#define zip_low_portable(a, b) SHUFFLE(index4, a, b, 0, 4, 1, 5)
#define zip_high_portable(a, b) SHUFFLE(index4, a, b, 2, 6, 3, 7)
#define pairs_portable(a, b, which) \
    ((which) == 0x44 ? SHUFFLE(index4, a, b, 0, 1, 4, 5) : SHUFFLE(index4, a, b, 2, 3, 6, 7))
#endif
#define SPLAT(x) ((x) - (vec){0})

#define AVX512 "avx512f"
#define CODE "matmul_tile.h"
#include "each_set.h"

#ifdef X86
#define NAME(x) x##_avx512_bf16
#define TARGET __attribute__((target("avx512f,avx512bf16")))
#define LANES 16
#define FMA(a, b, c) _mm512_dpbf16_ps(c, (__m512bh)(a), (__m512bh)(b))
TARGET static void round_pairs_avx512_bf16(real *panel, int64_t pairs, int width) {
    for (int64_t k = 0; k < pairs; k++) {
        for (int i = 0; i < width; i += 16) {
            __mmask16 mask = (__mmask16)(width - i < 16 ? (1 << (width - i)) - 1 : 0xffff);
            const real *even = panel + 2 * k * width + i, *odd = even + width;
            __m256i low = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, even));
            __m256i high = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, odd));
            __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
            __m512i pair = _mm512_or_si512(_mm512_cvtepu16_epi32(low), upper);
            _mm512_mask_storeu_epi32(panel + k * width + i, mask, pair);
        }
    }
}
#include "matmul_tile.h"

#define NAME(x) x##_amx
#define MERGE_LOW LOW_16
#define MERGE_HIGH HIGH_16
#define TARGET __attribute__((target("avx512f,avx512bf16,amx-tile,amx-bf16")))
#define LANES 16
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, p, stride) _tile_loadd(t, p, stride)
#define TILE_STORE(t, p, stride) _tile_stored(t, p, stride)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#define TILE_ROUND(to, from) \
    _mm512_storeu_si512(     \
        to, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps((from) + 16), _mm512_loadu_ps(from)))
#include "matmul_tile.h"

__attribute__((target("amx-tile"))) static void configure_amx(bool on) {
    static const struct {  // gcc 12 would drop the stores to a local one
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    if (on) _tile_loadconfig(&config);
    if (!on) _tile_release();  // so that the kernel need not keep them
}
#endif

#ifdef AMX_MODEL
#include AMX_MODEL  // of the tests: tile registers in C
#endif

static const InstructionSet instruction_sets[] = {
// best first
#ifdef X86
    {"amx_bf16", tile_amx, mr_amx, nr_amx, pack_amx, NULL, 0, round_pairs_avx512_bf16,
     pack_tiles_amx, configure_amx},
    {"avx512_bf16", tile_avx512_bf16, mr_avx512_bf16, nr_avx512_bf16, pack_avx512, NULL, 0,
     round_pairs_avx512_bf16, NULL, NULL},
    {"avx512", tile_avx512, mr_avx512, nr_avx512, pack_avx512, few_avx512, 16, NULL, NULL, NULL},
    {"avx2", tile_avx2, mr_avx2, nr_avx2, pack_avx2, few_avx2, 8, NULL, NULL, NULL},
#endif
    {"portable", tile_portable, mr_portable, nr_portable, pack_portable, few_portable, 4, NULL,
     NULL, NULL},
#ifdef AMX_MODEL
    MODEL_SET,
#endif
};

// ---- The loop nest ------------------------------------------------------------------------------

static const InstructionSet *chosen;  // NULL until matmul_select

// Packed panels of B, two buffers: while some threads read one, others pack the next, so one
// barrier per block suffices. Static, so that no allocation can fail; untouched pages cost nothing.
static _Alignas(1 << 21) real packed_b[2][(size_t)NC * KC];

// C (m, n) = addend + scale A (m, span) B (n, span)^T, the part of the product that is packed at
// once. A panel is `stride` deep and may hold several blocks of kc. Rows of C lie c_stride apart,
// columns c_col; other columns than adjacent ones are for products of fewer columns than a tile.
typedef struct {
    real *c;
    const real *addend, *a, *b;
    int64_t c_stride, c_col, m, n, span, kc, stride;
    real scale;
} Packed;

// Depths of panels are multiples of this: of pairs, of tile registers.
static int64_t depth_unit(void) { return chosen->pack_tiles ? 32 : 2; }

// The tile of panel i of A and panel j of B over the whole span.
static void compute_tile(const Packed *p, int64_t i, int64_t j) {
    const int64_t first = i * chosen->mr * p->c_stride + j * chosen->nr * p->c_col;
    real *c = p->c + first, spare[MAX_TILE];
    const real *addend = p->addend ? p->addend + first : NULL;
    int64_t rows = at_most(chosen->mr, p->m - i * chosen->mr),
            cols = at_most(chosen->nr, p->n - j * chosen->nr);
    bool whole = rows == chosen->mr && cols == chosen->nr;
    for (int64_t k = 0; k < p->span; k += p->kc, addend = c) {
        const real *a = p->a + (i * p->stride + k) * chosen->mr;
        const real *b = p->b + (j * p->stride + k) * chosen->nr;
        int64_t depth = at_most(p->kc, p->span - k);
        if (chosen->round_pairs) depth = round_up(depth, depth_unit()) / 2;
        const real *next = b + p->stride * chosen->nr + i * chosen->mr * chosen->nr * depth / MC;
        chosen->tile(whole ? c : spare, whole ? addend : NULL, whole ? p->c_stride : chosen->nr, a,
                     b, depth, next);
        for (int64_t r = 0; r < rows && !whole; r++) {
            const int64_t row = r * p->c_stride;
            const real *from = spare + r * chosen->nr;
            for (int64_t s = 0; s < cols; s++) {
                const int64_t at = row + s * p->c_col;
                c[at] = addend ? addend[at] + from[s] : from[s];
            }
        }
    }
}

// Packs scale * x(i, k), i < rows, k < depth, into panels of `width` rows that are `stride` deep.
static void pack_panels(real *packed, Matrix x, real scale, int64_t rows, int width, int64_t depth,
                        int64_t stride) {
    const int64_t full = round_up(depth, depth_unit());
    chosen->pack(packed, x, rows, width, depth, stride);
    for (int64_t i = 0; i < rows && (chosen->round_pairs || scale != 1); i += width) {
        real *panel = packed + i * stride;
        for (int64_t k = 0; k < depth * width && scale != 1; k++) panel[k] *= scale;
        if (!chosen->round_pairs) continue;
        memset(panel + depth * width, 0, (size_t)((full - depth) * width) * sizeof(real));
        chosen->round_pairs(panel, full / 2, width);
    }
}

// Called by all threads of a team: packs the panels of B.
static void pack_b(real *packed, Matrix b, const Packed *p) {
    const int64_t width = chosen->nr, panels = ceil_div(p->n, width);
#pragma omp for schedule(dynamic) nowait
    for (int64_t item = 0; item < panels * ceil_div(p->span, p->kc); item++) {
        int64_t j = item % panels * width, k = item / panels * p->kc;
        pack_panels(packed + j * p->stride + k * width, at(b, j, k), 1, at_most(width, p->n - j),
                    (int)width, at_most(p->kc, p->span - k), p->stride);
    }
}

// Packs the rows of A of an item.
static void pack_a(real *packed, Matrix a, const Packed *p) {
    const int mr = chosen->mr;
    for (int64_t k = 0; k < p->span; k += p->kc) {
        const int64_t depth = at_most(p->kc, p->span - k);
        if (!chosen->pack_tiles || a.col != 1)
            pack_panels(packed + k * mr, at(a, 0, k), p->scale, p->m, mr, depth, p->stride);
        for (int64_t i = 0; i < p->m && chosen->pack_tiles; i += mr)
            chosen->pack_tiles(packed + i * p->stride + k * mr, at(a, i, k), p->scale,
                               at_most(mr, p->m - i), depth);
    }
}

// Called by all threads of a team. Each packs the rows of A of its item, which stay in its L2, and
// multiplies them by all panels of B, or by some if there are too few row blocks for the threads.
static void compute_packed(Packed p, Matrix a, int64_t mc, int64_t m) {
    _Alignas(64) real packed_a[A_SIZE];
    real *c = p.c;
    const real *addend = p.addend;
    int64_t tiles_n = ceil_div(p.n, chosen->nr), cols = tiles_n, packed = -1;
    while (ceil_div(m, mc) * ceil_div(tiles_n, cols) < 8 * cpu_threads() && cols > 1)
        cols = (cols + 1) / 2;
    const int64_t pieces = ceil_div(tiles_n, cols);
    p.a = packed_a;
#pragma omp for schedule(dynamic) nowait
    for (int64_t item = 0; item < ceil_div(m, mc) * pieces; item++) {
        const int64_t i = item / pieces * mc, j0 = item % pieces * cols;
        p.m = at_most(mc, m - i);
        p.c = c + i * p.c_stride, p.addend = addend ? addend + i * p.c_stride : NULL;
        if (packed != i) pack_a(packed_a, at(a, i, 0), &p);
        packed = i;
        for (int64_t j = j0; j < at_most(j0 + cols, tiles_n); j++)
            for (int64_t t = 0; t * chosen->mr < p.m; t++) compute_tile(&p, t, j);
    }
}

// The depth of a block; depends only on the whole depth.
static int64_t block_depth(int64_t depth) {
    return round_up(ceil_div(depth, ceil_div(depth, KC)), depth_unit());
}

// C (m, n) = addend + A (m, depth) B (n, depth)^T for few rows of A: takes about as long as reading
// B once. The last panel of B overlaps the one before.
static void multiply_few(real *c, const real *addend, const real *a, const real *b, int64_t m,
                         int64_t n, int64_t depth) {
    const int64_t width = chosen->few_width, kc = block_depth(depth);
#pragma omp parallel for schedule(static) if (m * n * depth > WORTH_THREADS)
    for (int64_t j = 0; j < n; j += width) {
        const int64_t from = at_most(j, n - width), fresh = from + width - j;
        for (int64_t i = 0, rows; i < m; i += rows) {
            real out[FEW_ROWS * FEW_MAX_WIDTH] = {0};
            for (rows = FEW_ROWS; rows > m - i; rows /= 2) continue;
            for (int64_t r = 0; r < rows && addend; r++)
                memcpy(out + (r + 1) * width - fresh, addend + (i + r) * n + j,
                       (size_t)fresh * sizeof(real));
            chosen->few(out, a + i * depth, b + from * depth, depth, kc, (int)rows);
            for (int64_t r = 0; r < rows; r++)
                memcpy(c + (i + r) * n + j, out + (r + 1) * width - fresh,
                       (size_t)fresh * sizeof(real));
        }
    }
}

// C (m, n) = addend + scale A (m, depth) B (n, depth)^T; c_stride, c_col: of C and addend, which
// may be NULL
static void multiply(real *c, const real *addend, int64_t c_stride, int64_t c_col, real scale,
                     Matrix a, Matrix b, int64_t m, int64_t n, int64_t depth) {
    if (!chosen) matmul_select(NULL, false);
    if (!c || m == 0 || n == 0 || depth == 0) return;  // a frozen weight, or T = 0
    const int64_t mc = MC / chosen->mr * chosen->mr, kc = block_depth(depth);
    const int64_t nc = at_most(NC / chosen->nr * chosen->nr, round_up(n, chosen->nr));
    const int64_t span = kc * at_most(A_SIZE / (mc * kc), NC * KC / (nc * kc));
    bool worth_threads = (double)m * (double)n * (double)depth > WORTH_THREADS;
    assert(chosen->mr * chosen->nr <= MAX_TILE && (c_col == 1 || n < chosen->nr));
#pragma omp parallel if (worth_threads)
    {
        Packed p = {.c_stride = c_stride, .c_col = c_col, .kc = kc, .scale = scale};
        int turn = 0;
        if (chosen->configure) chosen->configure(true);
        for (int64_t j = 0; j < n; j += nc) {
            for (int64_t k = 0; k < depth; k += span, turn ^= 1) {
                p.n = at_most(nc, n - j), p.span = at_most(span, depth - k);
                p.b = packed_b[turn], p.stride = round_up(p.span, depth_unit());
                const real *sum = k > 0 ? c : addend;  // so far
                p.c = c + j * c_col, p.addend = sum ? sum + j * c_col : NULL;
                pack_b(packed_b[turn], at(b, j, k), &p);
#pragma omp barrier  // packing is done, and no thread still reads the buffer to be packed next
                compute_packed(p, at(a, 0, k), mc, m);
            }
        }
        if (chosen->configure) chosen->configure(false);
    }
}

// ---- Selection, and the products ----------------------------------------------------------------

bool matmul_select(const char *name, bool bf16) {
    madvise(packed_b, sizeof packed_b, MADV_HUGEPAGE);  // fewer TLB misses: 1 % of a product
    for (size_t i = 0; i < sizeof(instruction_sets) / sizeof(instruction_sets[0]); i++) {
        const InstructionSet *set = &instruction_sets[i];
        if (name && strcmp(name, set->name) != 0) continue;
        if ((set->round_pairs != NULL) != bf16) continue;
        if (!cpu_has(set->name) && !strstr(set->name, "model")) continue;
        chosen = set;
        return true;
    }
    return false;
}

const char *matmul_describe(void) {
    static char text[64];
    if (!chosen) matmul_select(NULL, false);
    snprintf(text, sizeof text, "%s %dx%d", chosen->name, chosen->mr, chosen->nr);
    return text;
}

void matmul_forward(floatX *out, const floatX *resid, const floatX *inp, const floatX *weight,
                    int64_t T, int64_t K, int64_t N) {
    if (!chosen) matmul_select(NULL, false);
    if (chosen->few && T <= FEW_MOST && N >= chosen->few_width)
        multiply_few(out, resid, inp, weight, T, N, K);
    else if (chosen->pack_tiles && T <= FEW_MOST)  // the transpose
        multiply(out, resid, 1, N, 1, (Matrix){weight, K, 1}, (Matrix){inp, K, 1}, N, T, K);
    else
        multiply(out, resid, N, 1, 1, (Matrix){inp, K, 1}, (Matrix){weight, K, 1}, T, N, K);
}

void matmul_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, bool accumulate,
                           int64_t T, int64_t K, int64_t N) {
    multiply(dinp, accumulate ? dinp : NULL, K, 1, 1, (Matrix){dout, N, 1}, (Matrix){weight, 1, K},
             T, K, N);
}

void matmul_backward_weight(real *dweight, const floatX *dout, const floatX *inp, bool accumulate,
                            int64_t T, int64_t K, int64_t N) {
    multiply(dweight, accumulate ? dweight : NULL, K, 1, 1, (Matrix){dout, 1, N},
             (Matrix){inp, 1, K}, N, K, T);
}

void matmul_forward_columns(floatX *out, const floatX *resid, const floatX *inp,
                            const floatX *weight, float scale, int64_t T, int64_t K, int64_t N,
                            int64_t inp_stride, int64_t out_stride) {
    multiply(out, resid, out_stride, 1, scale, (Matrix){inp, inp_stride, 1}, (Matrix){weight, K, 1},
             T, N, K);
}

void matmul_backward_columns(floatX *dinp, real *dweight, const floatX *dout, const floatX *inp,
                             const floatX *weight, float scale, bool accumulate, int64_t T,
                             int64_t K, int64_t N, int64_t inp_stride, int64_t out_stride) {
    multiply(dinp, NULL, inp_stride, 1, scale, (Matrix){dout, out_stride, 1},
             (Matrix){weight, 1, K}, T, K, N);
    multiply(dweight, accumulate ? dweight : NULL, K, 1, scale, (Matrix){dout, 1, out_stride},
             (Matrix){inp, 1, inp_stride}, N, K, T);
}
