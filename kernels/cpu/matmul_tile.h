// The register tile of matmul.c for one instruction set, included once per set with these defined:
//   TILE_NAME               name of the function
//   TARGET                  attribute that allows the instructions
//   VECTOR_LENGTH, MR, NV   the tile is MR rows by NV vectors of VECTOR_LENGTH columns of C
//   FMA(a, b, c)            a * b + c, scalar a, vectors b and c; one rounding if the CPU has FMA
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
#undef TILE_NAME
#undef TARGET
#undef VECTOR_LENGTH
#undef MR
#undef NV
#undef FMA
