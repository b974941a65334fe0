// Wrong attention: wraps attention_forward (--wrap), so that the program itself has no code for it.
// For tests/test_probe.sh WRONG_ATTENTION=result|gradient|hang|crash, while sm90 is selected; and
// the faults flip and nan of phase_fault.c.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../kernels/kernels.h"

extern int flip_attention, nan_attention;
void __real_attention_forward(floatX *out, real *lse, const floatX *qkv, const VarlenInfo *docs,
                              HeadShape heads);
void __wrap_attention_forward(floatX *out, real *lse, const floatX *qkv, const VarlenInfo *docs,
                              HeadShape heads);
void __wrap_attention_forward(floatX *out, real *lse, const floatX *qkv, const VarlenInfo *docs,
                              HeadShape heads) {
    const char *wrong = getenv("WRONG_ATTENTION");
    if (!wrong || strcmp(attention_describe(), "sm90") != 0) wrong = "";
    if (strcmp(wrong, "crash") == 0) abort();
    while (strcmp(wrong, "hang") == 0) pause();
    __real_attention_forward(out, lse, qkv, docs, heads);
    // device memory is the host's, in the CPU backend and in the emulator
    if (nan_attention) memset((void *)out, 0xff, sizeof *out);
    if (flip_attention) *(unsigned char *)out ^= 1;
    flip_attention = 0;
    if (strcmp(wrong, "gradient") == 0) device_zero(lse, 64 * sizeof *lse);
    if (strcmp(wrong, "result") == 0)  // one row is that of its neighbour
        device_copy(out, out + heads.num_heads * heads.head_dim,
                    (size_t)(heads.num_heads * heads.head_dim) * sizeof *out);
}
