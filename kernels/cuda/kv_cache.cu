// Key-value cache: attention of single tokens over the cached text before them. A warp handles one
// query head of one token, with its keys in order: the plain form. Its speed was not measured.
#include "common.cuh"

__global__ void kv_store_kernel(floatX *__restrict__ cache, const floatX *__restrict__ qkv,
                                const int32_t *__restrict__ first_rows,
                                const int32_t *__restrict__ position_ids, int64_t T, int q_width,
                                int width) {
    const int64_t t = row_of_thread();
    if (t >= T) return;
    floatX *to = cache + ((int64_t)first_rows[t] + position_ids[t]) * width;
    const floatX *from = qkv + t * (q_width + width) + q_width;
    for (int c = 8 * (int)threadIdx.x; c < width; c += 8 * (int)blockDim.x)
        store_vector(to + c, load_vector(from + c));
}

void kv_store(floatX *cache, const floatX *qkv, const int32_t *first_rows,
              const int32_t *position_ids, int64_t T, HeadShape heads) {
    if (T == 0) return;
    const int width = 2 * heads.num_kv_heads * heads.head_dim;
    const RowGrid grid = row_grid("kv_store", T, width);
    kv_store_kernel<<<grid.blocks, grid.block, 0, cuda_stream()>>>(
        cache, qkv, first_rows, position_ids, T, heads.num_heads * heads.head_dim, width);
    LAUNCH_CHECK("kv_store_kernel");
}

enum { DECODE_WARPS = 4 };  // of a block

// A lane has D / 32 consecutive elements of the query, the keys, the values and the output.
template <int D>
__global__ void __launch_bounds__(DECODE_WARPS *WARP)
    attention_decode_kernel(floatX *__restrict__ out, const floatX *__restrict__ qkv,
                            const floatX *__restrict__ cache,
                            const int32_t *__restrict__ first_rows,
                            const int32_t *__restrict__ position_ids, int64_t T, int H, int Hkv,
                            float scale) {
    enum { N = D / WARP };
    const int64_t item = (int64_t)blockIdx.x * DECODE_WARPS + threadIdx.y;
    if (item >= T * H) return;
    const int64_t t = item / H, row = 2 * (int64_t)Hkv * D;
    const int h = (int)(item % H), at = N * (int)threadIdx.x, length = position_ids[t] + 1;
    const floatX *key = cache + first_rows[t] * row + h / (H / Hkv) * D + at;
    const floatX *query = qkv + (t * (H + 2 * Hkv) + h) * D + at;
    float q[N], acc[N] = {}, top = -INFINITY, sum = 0;
    unrolled_for (int i = 0; i < N; i++) q[i] = __bfloat162float(query[i]) * scale;
    for (int j = 0; j < length; j++, key += row) {
        float score = 0;
        unrolled_for (int i = 0; i < N; i++) score += q[i] * __bfloat162float(key[i]);
        score = warp_sum(score);
        const float larger = fmaxf(top, score);
        const float alpha = expf(top - larger), p = expf(score - larger);
        const floatX *value = key + Hkv * D;
        top = larger;
        sum = sum * alpha + p;
        unrolled_for (int i = 0; i < N; i++)
            acc[i] = acc[i] * alpha + p * __bfloat162float(value[i]);
    }
    unrolled_for (int i = 0; i < N; i++) out[item * D + at + i] = __float2bfloat16(acc[i] / sum);
}

void attention_decode(floatX *out, const floatX *qkv, const floatX *cache,
                      const int32_t *first_rows, const int32_t *position_ids, int64_t T,
                      HeadShape heads) {
    if (T == 0) return;
    const int D = heads.head_dim, H = heads.num_heads;
    if (D != 64 && D != 128) cuda_unsupported("attention_decode", "a head_dim of 64 or 128", D);
    const unsigned blocks = (unsigned)ceil_div<int64_t>(T * H, DECODE_WARPS);
    const auto kernel = D == 64 ? attention_decode_kernel<64> : attention_decode_kernel<128>;
    kernel<<<blocks, dim3(WARP, DECODE_WARPS), 0, cuda_stream()>>>(
        out, qkv, cache, first_rows, position_ids, T, H, heads.num_kv_heads, 1 / sqrtf((float)D));
    LAUNCH_CHECK("attention_decode_kernel");
}
