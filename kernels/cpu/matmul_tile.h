// The register tile of matmul.c for one instruction set, included by each_set.h, and for sets that
// only multiply with these defined:
//   NAME(x)                 x with the set's suffix: mr and nv, the rows and vectors of the tile of
//                           C, and the functions: tile and, where the macros that they need are
//                           defined, pack (MERGE_*), few and, for tile registers, pack_tiles
//   TARGET, LANES, FMA      as in each_set.h
//   MERGE_LOW, MERGE_HIGH   the same, or undefined
//   TILE_ZERO(t), TILE_LOAD, TILE_STORE(t, p, stride), TILE_DOT(c, a, b)
//                           instead of FMA: tile registers 0 to 7 of 16 rows of 16 words, stride
//                           in bytes; c += a b, where words of a and b are pairs of bf16
//   TILE_ROUND(to, from)    16 words: 32 values as pairs
#ifndef NR  // expanded with the NAME of each set
#define vec NAME(vec)
#define vec_anywhere NAME(vec_anywhere)
#define MR NAME(mr)
#define NV NAME(nv)
#define NR NAME(nr)
#endif
typedef real vec __attribute__((vector_size(LANES * sizeof(real)), may_alias));
typedef vec vec_anywhere __attribute__((aligned(sizeof(real))));
enum { NR = NV * LANES };

#ifdef FMA
// sum += the products of the next `depth`, a constant, so that a and b advance once for all of
// them: on Intel each pointer addition costs a multiply-add slot.
TARGET static inline __attribute__((always_inline)) void NAME(multiply_add)(vec (*sum)[NV],
                                                                            const real *a,
                                                                            const real *b,
                                                                            const int depth) {
    unrolled_for (int k = 0; k < depth; k++) {
        vec row[NV];
        unrolled_for (int j = 0; j < NV; j++) row[j] = *(const vec *)(b + (k * NV + j) * LANES);
        unrolled_for (int i = 0; i < MR; i++)
            unrolled_for (int j = 0; j < NV; j++)
                sum[i][j] = FMA(SPLAT(a[k * MR + i]), row[j], sum[i][j]);
    }
}

// c (MR, NV * LANES) = addend + the sum over k of a[k][i] * b[k][j]; a (depth, MR) and
// b (depth, NV * LANES) are packed panels, b aligned to a vector. addend is laid out like c
// and may be c; NULL: zeros. All MR * NV sums stay in registers: each k loads MR + NV values for
// MR * NV multiply-adds. The inner loops have constant bounds and are fully unrolled, which lets
// the compiler keep sum[][] in registers. Meanwhile this tile's share, one of MC / MR, of a panel
// of the same depth is fetched into L2, from next on.
TARGET static void NAME(tile)(real *c, const real *addend, int64_t c_stride, const real *restrict a,
                              const real *restrict b, int64_t depth, const real *next) {
    enum { DEEP = 4 };
    vec sum[MR][NV];
    unrolled_for (int i = 0; i < MR; i++) {
        unrolled_for (int j = 0; j < NV; j++) {
            sum[i][j] = (vec){0};
            __builtin_prefetch(c + i * c_stride + j * LANES, 1);
        }
    }
    for (; depth >= DEEP; depth -= DEEP, a += DEEP * MR, b += DEEP * NR) {
        __builtin_prefetch(next, 0, 2);
        next += DEEP * MR * NR / MC;
        NAME(multiply_add)(sum, a, b, DEEP);
    }
    for (; depth > 0; depth--, a += MR, b += NR) NAME(multiply_add)(sum, a, b, 1);
    unrolled_for (int i = 0; i < MR; i++) {
        unrolled_for (int j = 0; j < NV; j++) {
            const int64_t at = i * c_stride + j * LANES;
            if (addend) sum[i][j] += *(const vec_anywhere *)(addend + at);
            *(vec_anywhere *)(c + at) = sum[i][j];
        }
    }
}
#endif

#ifdef MERGE_LOW
// Transposes n (a power of 2) rows of LANES: lane k of row i, stored at to[k * width + i].
// A perfect shuffle of the vectors rotates the bits of the index (row, lane) by one; log2(n) of
// them move the bits of the row after the bits of the lane. Rows from `rows` on are zeros.
TARGET static inline __attribute__((always_inline)) void NAME(pack_part)(real *to, int width,
                                                                         const real *from,
                                                                         int64_t stride, int rows,
                                                                         const int n) {
    typedef real_bits indices __attribute__((vector_size(sizeof(vec))));
    vec a[LANES], b[LANES];
    unrolled_for (int i = 0; i < n; i++)
        a[i] = i < rows ? *(const vec_anywhere *)(from + i * stride) : (vec){0};
    unrolled_for (int stage = 1; stage < n; stage *= 2) {
        unrolled_for (int i = 0; i < n; i++) b[i] = a[i];
        unrolled_for (int i = 0; i < n / 2; i++) {
            a[2 * i] = SHUFFLE(indices, b[i], b[i + n / 2], MERGE_LOW);
            a[2 * i + 1] = SHUFFLE(indices, b[i], b[i + n / 2], MERGE_HIGH);
        }
    }
    unrolled_for (int i = 0; i < n; i++) __builtin_prefetch(from + i * stride + PACK_DEPTH);
    if (n == width) width = LANES;  // several columns lie in a vector
    unrolled_for (int i = 0; i < n; i++) *(vec_anywhere *)(to + i * width) = a[i];
}

// One panel: panel[k][i] (depth, width) = x(i, k), 0 for rows <= i < width. x(i, .) is contiguous.
TARGET static void NAME(pack_transposed)(real *panel, Matrix x, int rows, int width,
                                         int64_t depth) {
    // rows transposed at a time; in the panels of A, fewer than a vector has lanes
    const int n = width % LANES && LANES % MR == 0 ? MR : LANES;
    const int64_t whole_k = depth / LANES * LANES;
    const int whole_i = width / n * n;
    for (int i = 0; i < whole_i; i += n) {
        const real *from = x.p + i * x.row;
        const bool whole = rows - i >= n;
        for (int64_t k = 0; k < whole_k; k += LANES) {
            real *to = panel + k * width + i;
            if (n == LANES && whole)  // constant arguments: unrolled
                NAME(pack_part)(to, width, from + k, x.row, LANES, LANES);
            else if (n == LANES)
                NAME(pack_part)(to, width, from + k, x.row, rows - i, LANES);
            else if (whole)
                NAME(pack_part)(to, MR, from + k, x.row, MR, MR);
            else
                NAME(pack_part)(to, MR, from + k, x.row, rows, MR);
        }
    }
    for (int64_t k = whole_i == width ? whole_k : 0; k < depth; k++)
        for (int i = k < whole_k ? whole_i : 0; i < width; i++)
            panel[k * width + i] = i < rows ? x.p[i * x.row + k] : 0;
}

// Panels of `width` rows (MR, or NV vectors), `stride` deep each: x(i, k), i < rows, k < depth;
// rows missing in the last panel are zeros. Neighbours share cache lines of x, so all panels
// advance together, and x is prefetched.
TARGET static void NAME(pack)(real *packed, Matrix x, int64_t rows, int width, int64_t depth,
                              int64_t stride) {
    enum { AHEAD = 32, LINE = 64 / sizeof(real) };
    for (int64_t k = 0; k < depth && x.col == 1; k += PACK_DEPTH)
        for (int64_t i = 0; i < rows; i += width) NAME(pack_transposed)
    (packed + i * stride + k * width, at(x, i, k), (int)at_most(width, rows - i), width,
     at_most(PACK_DEPTH, depth - k));
    for (int64_t k = 0; k < depth && x.col != 1; k++) {
        const real *from = x.p + k * x.col;
        real *to = packed + k * width;
        for (int64_t i = 0; i < rows; i += LINE) __builtin_prefetch(from + AHEAD * x.col + i);
        int64_t i = 0;
        if (width == NR)
            for (; i + NR <= rows; i += NR) memcpy(to + i * stride, from + i, NR * sizeof(real));
        else
            for (; i + MR <= rows; i += MR) memcpy(to + i * stride, from + i, MR * sizeof(real));
        for (int r = 0; r < width && i < rows; r++)
            to[i * stride + r] = i + r < rows ? from[i + r] : 0;
    }
}
#endif

#ifdef TILE_DOT
// The same as the tile above in 2 x 2 tile registers, where a has, for each 16 pairs of the depth,
// MR rows of 16 pairs. A chain is here: even and odd members of 16 pairs apart, then their sum.
TARGET static void NAME(tile)(real *c, const real *addend, int64_t c_stride, const real *restrict a,
                              const real *restrict b, int64_t depth, const real *next) {
    _Alignas(64) real sum[MR * NR];
    real *to = addend ? sum : c;
    const int64_t stride = addend ? NR : c_stride, bytes = stride * (int64_t)sizeof(real);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (; depth > 0; depth -= 16, a += 16 * MR, b += 16 * NR, next += 16 * MR * NR / MC) {
        for (int i = 0; i < 16 * MR * NR / MC; i += 16) __builtin_prefetch(next + i, 0, 2);
        TILE_LOAD(4, a, 64);
        TILE_LOAD(6, b, NR * sizeof(real));
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, b + 16, NR * sizeof(real));
        TILE_DOT(1, 4, 7);
        TILE_LOAD(5, a + 16 * 16, 64);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
    }
    TILE_STORE(0, to, bytes);
    TILE_STORE(1, to + 16, bytes);
    TILE_STORE(2, to + 16 * stride, bytes);
    TILE_STORE(3, to + 16 * stride + 16, bytes);
    for (int i = 0; i < MR && addend; i++)
        for (int j = 0; j < NR; j++)
            c[i * c_stride + j] = addend[i * c_stride + j] + sum[i * NR + j];
}

// panel (ceil(depth / 32), MR, 16) pairs of scale * x(i, k), zeros elsewhere. Rows are read as they
// lie; of a transpose, panel holds the pairs by column already, scaled.
TARGET static void NAME(pack_tiles)(real *panel, Matrix x, real scale, int64_t rows,
                                    int64_t depth) {
    for (int64_t k = 0; k < depth; k += 32, panel += 16 * MR) {
        real block[16 * MR], row[32];
        if (x.col != 1) memcpy(block, panel, sizeof block);
        for (int i = 0; i < MR && x.col != 1; i += 16)
            NAME(pack_part)(panel + i * 16, 16, block + i, MR, 16, 16);
        for (int i = 0; i < MR && x.col == 1; i++) {
            const int64_t n = i < rows ? at_most(depth - k, 32) : 0;
            for (int q = 0; q < 32 && n == 32; q++) row[q] = scale * x.p[i * x.row + k + q];
            for (int q = 0; q < 32 && n < 32; q++)
                row[q] = q < n ? scale * x.p[i * x.row + k + q] : 0;
            TILE_ROUND(panel + i * 16, row);
        }
    }
}
#endif

#if defined(FMA) && defined(MERGE_LOW) && !defined(GRADCHECK)
// c (rows, LANES) += a (rows, depth) b (LANES, depth)^T, with b read in place and
// transposed in registers, four of the depth at a time. Every sum is the tile's chain: blocks of kc
// from zero, added in order. The LANES rows after b are prefetched meanwhile: without that
// it takes about a third longer.
TARGET static inline __attribute__((always_inline)) void NAME(few_of)(real *restrict c,
                                                                      const real *restrict a,
                                                                      const real *restrict b,
                                                                      int64_t depth, int64_t kc,
                                                                      const int rows) {
    vec total[FEW_ROWS];
    unrolled_for (int i = 0; i < rows; i++) memcpy(&total[i], c + i * LANES, sizeof(vec));
    for (int64_t first = 0; first < depth; first += kc) {
        const int64_t end = at_most(first + kc, depth), whole = first + (end - first) / 4 * 4;
        vec sum[FEW_ROWS];
        unrolled_for (int i = 0; i < rows; i++) sum[i] = (vec){0};
        for (int64_t k = first; k < whole; k += 4) {
            unrolled_for (int line = 0; line < LANES / 4; line++)
                __builtin_prefetch(b + (depth + k) * LANES + line * 16);
            const real *p = b + k;
            const vec r0 = NAME(fours)(p, 4 * depth), r1 = NAME(fours)(p + depth, 4 * depth),
                      r2 = NAME(fours)(p + 2 * depth, 4 * depth),
                      r3 = NAME(fours)(p + 3 * depth, 4 * depth);
            const vec low01 = NAME(zip_low)(r0, r1), low23 = NAME(zip_low)(r2, r3),
                      high01 = NAME(zip_high)(r0, r1), high23 = NAME(zip_high)(r2, r3);
            const vec column[4] = {NAME(pairs)(low01, low23, 0x44), NAME(pairs)(low01, low23, 0xee),
                                   NAME(pairs)(high01, high23, 0x44),
                                   NAME(pairs)(high01, high23, 0xee)};
            unrolled_for (int q = 0; q < 4; q++)
                unrolled_for (int i = 0; i < rows; i++)
                    sum[i] = FMA(SPLAT(a[i * depth + k + q]), column[q], sum[i]);
        }
        for (int64_t k = whole; k < end; k++) {
            vec column;
            for (int r = 0; r < LANES; r++) column[r] = b[r * depth + k];
            unrolled_for (int i = 0; i < rows; i++)
                sum[i] = FMA(SPLAT(a[i * depth + k]), column, sum[i]);
        }
        unrolled_for (int i = 0; i < rows; i++) total[i] += sum[i];
    }
    unrolled_for (int i = 0; i < rows; i++) memcpy(c + i * LANES, &total[i], sizeof(vec));
}

// rows: 1, 2, 4 or 8
TARGET static void NAME(few)(real *restrict c, const real *restrict a, const real *restrict b,
                             int64_t depth, int64_t kc, int rows) {
    if (rows == 1) NAME(few_of)(c, a, b, depth, kc, 1);
    if (rows == 2) NAME(few_of)(c, a, b, depth, kc, 2);
    if (rows == 4) NAME(few_of)(c, a, b, depth, kc, 4);
    if (rows == 8) NAME(few_of)(c, a, b, depth, kc, 8);
}
#endif
#undef NAME
#undef TARGET
#undef LANES
#undef FMA
#undef MERGE_LOW
#undef MERGE_HIGH
#undef TILE_ZERO
#undef TILE_LOAD
#undef TILE_STORE
#undef TILE_DOT
#undef TILE_ROUND
