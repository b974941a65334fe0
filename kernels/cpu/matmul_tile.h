// The register tile of matmul.c for one instruction set, included once per set with these defined:
//   TILE_NAME, FEW_NAME     names of the functions; FEW_NAME needs the last three, too
//   TARGET                  attribute that allows the instructions
//   VECTOR_LENGTH, MR, NV   the tile is MR rows by NV vectors of VECTOR_LENGTH columns of C
//   FMA(a, b, c)            a * b + c, scalar a, vectors b and c; one rounding if the CPU has FMA
//   FOURS(p, step)          a vector of quadruples, the one at p, then p + step, p + 2 * step ...
//   ZIP_LOW, ZIP_HIGH(a, b) in each quadruple: a0 b0 a1 b1, a2 b2 a3 b3
//   PAIRS(a, b, which)      in each quadruple: a0 a1 b0 b1 (which 0x44), a2 a3 b2 b3 (0xee)
//
// c (MR, NV * VECTOR_LENGTH) = addend + the sum over k of a[k][i] * b[k][j]; a (depth, MR) and
// b (depth, NV * VECTOR_LENGTH) are packed panels, b aligned to a vector. addend is laid out like c
// and may be c; NULL: zeros. All MR * NV sums stay in
// registers: each k loads MR + NV values for MR * NV multiply-adds. The inner loops have constant
// bounds and are fully unrolled, which lets the compiler keep sum[][] in registers.
TARGET static void TILE_NAME(real *c, const real *addend, int64_t c_stride, const real *RESTRICT a,
                             const real *RESTRICT b, int64_t depth) {
    typedef real vec __attribute__((vector_size(VECTOR_LENGTH * sizeof(real)), may_alias));
    typedef vec vec_anywhere __attribute__((aligned(sizeof(real))));
    vec sum[MR][NV];
    UNROLL for (int i = 0; i < MR; i++) {
        UNROLL for (int j = 0; j < NV; j++) {
            sum[i][j] = (vec){0};
            __builtin_prefetch(c + i * c_stride + j * VECTOR_LENGTH, 1);
        }
    }
    for (int64_t k = 0; k < depth; k++, a += MR, b += NV * VECTOR_LENGTH) {
        vec row[NV];
        UNROLL for (int j = 0; j < NV; j++) row[j] = *(const vec *)(b + j * VECTOR_LENGTH);
        UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NV; j++) sum[i][j] =
            FMA(a[i], row[j], sum[i][j]);
    }
    UNROLL for (int i = 0; i < MR; i++) {
        UNROLL for (int j = 0; j < NV; j++) {
            const int64_t at = i * c_stride + j * VECTOR_LENGTH;
            if (addend) sum[i][j] += *(const vec_anywhere *)(addend + at);
            *(vec_anywhere *)(c + at) = sum[i][j];
        }
    }
}

#ifdef FEW_NAME
// c (rows, VECTOR_LENGTH) += a (rows, depth) b (VECTOR_LENGTH, depth)^T, b read where it lies and
// transposed in registers, four of the depth at a time. Every sum is the chain of the tile: blocks
// of kc from zero, added in order. The VECTOR_LENGTH rows that follow b are prefetched meanwhile:
// without that it takes about a third longer.
TARGET static inline __attribute__((always_inline)) void FEW_OF(FEW_NAME)(real *RESTRICT c,
                                                                          const real *RESTRICT a,
                                                                          const real *RESTRICT b,
                                                                          int64_t depth, int64_t kc,
                                                                          const int rows) {
    typedef real vec __attribute__((vector_size(VECTOR_LENGTH * sizeof(real)), may_alias));
    vec total[FEW_ROWS];
    UNROLL for (int i = 0; i < rows; i++) memcpy(&total[i], c + i * VECTOR_LENGTH, sizeof(vec));
    for (int64_t first = 0; first < depth; first += kc) {
        const int64_t end = at_most(first + kc, depth), whole = first + (end - first) / 4 * 4;
        vec sum[FEW_ROWS];
        UNROLL for (int i = 0; i < rows; i++) sum[i] = (vec){0};
        for (int64_t k = first; k < whole; k += 4) {
            UNROLL for (int line = 0; line < VECTOR_LENGTH / 4; line++)
                __builtin_prefetch(b + (depth + k) * VECTOR_LENGTH + line * 16);
            const real *p = b + k;
            const vec r0 = FOURS(p, 4 * depth), r1 = FOURS(p + depth, 4 * depth),
                      r2 = FOURS(p + 2 * depth, 4 * depth), r3 = FOURS(p + 3 * depth, 4 * depth);
            const vec low01 = ZIP_LOW(r0, r1), low23 = ZIP_LOW(r2, r3), high01 = ZIP_HIGH(r0, r1),
                      high23 = ZIP_HIGH(r2, r3);
            const vec column[4] = {PAIRS(low01, low23, 0x44), PAIRS(low01, low23, 0xee),
                                   PAIRS(high01, high23, 0x44), PAIRS(high01, high23, 0xee)};
            UNROLL for (int q = 0; q < 4; q++) UNROLL for (int i = 0; i < rows; i++) sum[i] =
                FMA(a[i * depth + k + q], column[q], sum[i]);
        }
        for (int64_t k = whole; k < end; k++) {
            vec column;
            for (int r = 0; r < VECTOR_LENGTH; r++) column[r] = b[r * depth + k];
            UNROLL for (int i = 0; i < rows; i++) sum[i] = FMA(a[i * depth + k], column, sum[i]);
        }
        UNROLL for (int i = 0; i < rows; i++) total[i] += sum[i];
    }
    UNROLL for (int i = 0; i < rows; i++) memcpy(c + i * VECTOR_LENGTH, &total[i], sizeof(vec));
}

// rows: 1, 2, 4 or 8
TARGET static void FEW_NAME(real *RESTRICT c, const real *RESTRICT a, const real *RESTRICT b,
                            int64_t depth, int64_t kc, int rows) {
    if (rows == 1) FEW_OF(FEW_NAME)(c, a, b, depth, kc, 1);
    if (rows == 2) FEW_OF(FEW_NAME)(c, a, b, depth, kc, 2);
    if (rows == 4) FEW_OF(FEW_NAME)(c, a, b, depth, kc, 4);
    if (rows == 8) FEW_OF(FEW_NAME)(c, a, b, depth, kc, 8);
}
#endif
#undef TILE_NAME
#undef FEW_NAME
#undef FOURS
#undef ZIP_LOW
#undef ZIP_HIGH
#undef PAIRS
#undef TARGET
#undef VECTOR_LENGTH
#undef MR
#undef NV
#undef FMA
