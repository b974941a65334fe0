// The notebook's check on its own figures: attention of two packed sequences against each alone,
// and against the outputs that the notebook printed.
//   make build/cpu/notebook && build/cpu/notebook
// On the CPU backend, in fp32 rounded to bf16 for the comparison: head_dim is 8.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/kernels.h"
#include "../tests/notebook.h"

enum { T = NOTEBOOK_TOKENS, D = NOTEBOOK_DIM, FIRST = NOTEBOOK_FIRST };

// Attention of the tokens first..first+n, whose documents end at cu_seqlens. The values of sequence
// 1 are not published: its printed outputs stand in for them.
static void attend(float (*out)[D], int first, int n, const int32_t *cu_seqlens, int num_docs) {
    const HeadShape heads = {1, 1, D};
    float qkv[T][3][D], lse[T];
    int32_t *work = malloc(attention_plan_size(n, num_docs) * sizeof(int32_t));
    if (!work) exit(5);
    attention_plan(work, cu_seqlens, num_docs, heads);
    for (int t = 0; t < n; t++) {
        const int at = first + t;
        memcpy(qkv[t][0], notebook_q[at], sizeof qkv[t][0]);
        memcpy(qkv[t][1], notebook_k[at], sizeof qkv[t][1]);
        memcpy(qkv[t][2], at < FIRST ? notebook_out_first[at] : notebook_v_second[at - FIRST],
               sizeof qkv[t][2]);
    }
    const VarlenInfo docs = {cu_seqlens, work, n, num_docs, n < FIRST ? n : FIRST};
    attention_forward(out[0], lse, qkv[0][0], &docs, heads);
    free(work);
}

static double to_bf16(double x) {
    int exponent;
    const double fraction = frexp(x, &exponent);  // 8 significant bits, to nearest even
    return ldexp(nearbyint(ldexp(fraction, 8)), exponent - 8);
}

// A bf16 step at the printed value, and half of its last decimal.
static double tolerance(double printed) { return ldexp(1, ilogb(printed) - 7) + 0.5e-4; }

int main(void) {
    static _Alignas(64) float packed[T][D], alone[T][D];
    attend(packed, 0, T, (int32_t[]){0, FIRST, T}, 2);
    attend(alone, 0, FIRST, (int32_t[]){0, FIRST}, 1);
    attend(alone + FIRST, FIRST, T - FIRST, (int32_t[]){0, T - FIRST}, 1);
    double delta = 0, worst = 0;
    int exact = 0, printed = 0, bad = 0;
    for (int t = 0; t < T; t++)
        for (int x = 0; x < D; x++) {
            delta = fmax(delta, fabs((double)packed[t][x] - (double)alone[t][x]));
            if (t < FIRST) continue;
            const double want = notebook_out_second[t - FIRST][x],
                         difference = fabs(to_bf16(packed[t][x]) - want);
            worst = fmax(worst, difference);
            exact += difference <= 0.5001e-4;
            bad += difference > tolerance(want);
            printed++;
        }
    printf("sequence 2, last token\n  printed ");
    for (int x = 0; x < D; x++) printf(" %.4f", (double)notebook_out_second[T - FIRST - 1][x]);
    printf("\n  ours    ");
    for (int x = 0; x < D; x++) printf(" %.4f", to_bf16(packed[T - 1][x]));
    printf("\nmax |ours - printed|    %.4f; %d of %d equal to the last printed decimal\n", worst,
           exact, printed);
    printf("max |packed - alone|    %g%s\n", delta, delta == 0 ? "  (bit for bit)" : "");
    return bad || delta > 0 ? 1 : 0;
}
