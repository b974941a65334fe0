// Rotary position embedding: each pair (i, i + D/2) of a query or key head turns by position *
// frequency i. A thread handles 8 pairs: a vector of the lower half and its partner in the upper
// half. A block handles whole tokens, so that the H + Hkv heads of a token find its cosines and
// sines in L1. Value heads are neither read nor written.

#include "common.cuh"

enum { BLOCK = 256, BLOCK_ITEMS = 512 };  // threads, and about how many groups of 8 pairs they take

// angles: 8 pairs (cos, sin) of one position
__device__ __forceinline__ void rotate8(floatX *low, floatX *high, const float4 *angles) {
    float a[8], b[8];
    load8(a, low);
    load8(b, high);
    unrolled_for (int i = 0; i < 4; i++) {
        const float4 two = angles[i];
        const float cosine[2] = {two.x, two.z}, sine[2] = {two.y, two.w};
        unrolled_for (int j = 0; j < 2; j++) {
            const float x = a[2 * i + j], y = b[2 * i + j];
            a[2 * i + j] = x * cosine[j] - y * sine[j];
            b[2 * i + j] = y * cosine[j] + x * sine[j];
        }
    }
    store8(low, a);
    store8(high, b);
}

__global__ void rope_kernel(floatX *__restrict__ qkv, const int32_t *__restrict__ position_ids,
                            const float *__restrict__ rope_table, int64_t T, int tokens_per_block,
                            int rotated_heads, int all_heads, int D) {
    const int groups = D / 16, per_token = rotated_heads * groups;
    const int64_t first = (int64_t)blockIdx.x * tokens_per_block;
    const int tokens = T - first < tokens_per_block ? (int)(T - first) : tokens_per_block;
    for (int item = (int)threadIdx.x; item < tokens * per_token; item += BLOCK) {
        const int token = item / per_token, head = item % per_token / groups;
        const int pair = 8 * (item % groups);  // per_token is a multiple of groups
        floatX *low = qkv + ((first + token) * all_heads + head) * D + pair;
        const float *angles = rope_table + (int64_t)position_ids[first + token] * D + 2 * pair;
        rotate8(low, low + D / 2, reinterpret_cast<const float4 *>(angles));
    }
}

void rope_forward(floatX *qkv, const int32_t *position_ids, const real *rope_table, int64_t T,
                  HeadShape heads) {
    if (T == 0) return;
    const int D = heads.head_dim, rotated = heads.num_heads + heads.num_kv_heads;
    if (D <= 0 || D % 16 != 0)
        cuda_unsupported("rope_forward", "a head_dim that is a multiple of 16", D);
    const int per_token = rotated * (D / 16);
    const int tokens = per_token < BLOCK_ITEMS ? BLOCK_ITEMS / per_token : 1;
    const unsigned blocks = (unsigned)ceil_div<int64_t>(T, tokens);
    rope_kernel<<<blocks, BLOCK, 0, cuda_stream()>>>(qkv, position_ids, rope_table, T, tokens,
                                                     rotated, rotated + heads.num_kv_heads, D);
    LAUNCH_CHECK("rope_kernel");
}
