// Wrong attention of Hopper, for tests/test_probe.sh: wraps attention_forward (--wrap), so that the
// program itself has no code for it. WRONG_ATTENTION=result|gradient|hang|crash: of sm90.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../kernels/kernels.h"

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
    if (strcmp(wrong, "gradient") == 0)
        device_zero(lse, 64 * sizeof *lse);  // only backward reads it
    if (strcmp(wrong, "result") == 0)        // one row is that of its neighbour
        device_copy(out, out + heads.num_heads * heads.head_dim,
                    (size_t)(heads.num_heads * heads.head_dim) * sizeof *out);
}
