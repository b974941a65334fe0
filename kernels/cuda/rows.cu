// Rows by index: gather and scatter, what an unpad / re-pad around attention costs, and token
// embedding.

#include "common.cuh"

// out[out_rows ? out_rows[i] : i] = inp[inp_rows ? inp_rows[i] : i] for i < n
__global__ void copy_rows_kernel(floatX *__restrict__ out, const floatX *__restrict__ inp,
                                 const int32_t *out_rows, const int32_t *inp_rows, int64_t n,
                                 int C) {
    const int64_t i = row_of_thread();
    if (i >= n) return;
    floatX *to = out + (out_rows ? (int64_t)out_rows[i] : i) * C;
    const floatX *from = inp + (inp_rows ? (int64_t)inp_rows[i] : i) * C;
#pragma unroll 4
    for (int c = 8 * (int)threadIdx.x; c < C; c += 8 * (int)blockDim.x)
        store_vector(to + c, load_vector(from + c));
}

void gather_rows(floatX *out, const floatX *inp, const int32_t *rows, int64_t n, int64_t C) {
    if (n == 0) return;
    const RowGrid grid = row_grid("gather_rows", n, C);
    copy_rows_kernel<<<grid.blocks, grid.block, 0, cuda_stream()>>>(out, inp, nullptr, rows, n,
                                                                    (int)C);
    LAUNCH_CHECK("copy_rows_kernel");
}

// Zeros first, then the rows: filled rows are written twice, as in any re-padding by "zeros, then
// index put".
void scatter_rows(floatX *out, const floatX *inp, const int32_t *rows, int64_t n, int64_t T,
                  int64_t C) {
    if (T == 0) return;
    device_zero(out, (size_t)T * (size_t)C * sizeof(floatX));
    if (n == 0) return;
    const RowGrid grid = row_grid("scatter_rows", n, C);
    copy_rows_kernel<<<grid.blocks, grid.block, 0, cuda_stream()>>>(out, inp, rows, nullptr, n,
                                                                    (int)C);
    LAUNCH_CHECK("copy_rows_kernel");
}

void embedding_forward(floatX *out, const int32_t *tokens, const floatX *weight, int64_t T, int C) {
    gather_rows(out, weight, tokens, T, C);
}

// ---- Backward of the embedding is a sum over runs of equal tokens in the sorted `order` ---------
// The order is cut into spans of equal length, so that a token that fills the buffer is shared by
// many blocks: a span's block adds the runs that lie inside it straight to dweight, which no other
// block touches, and leaves the sums of a run that crosses its borders in scratch memory; a second
// kernel adds those in order. No atomics, and the same sums on every GPU.

enum { MIN_SPAN = 32, AHEAD = 8, SPAN_THREADS = 128, SUM_LANES = 8, SUM_VECTOR = 4 };

// The sorted tokens, in spans
struct Runs {
    const int32_t *tokens, *order;
    int64_t T;
    int span;
    __device__ int32_t token(int64_t i) const { return tokens[order[i]]; }
    __device__ bool starts_before(int64_t i) const { return i > 0 && token(i - 1) == token(i); }
};

// Sums of the run that a span shares with the span before it, and with the one after it
__device__ __forceinline__ float *head_sum(float *scratch, int64_t span, int C) {
    return scratch + 2 * span * C;
}
__device__ __forceinline__ float *tail_sum(float *scratch, int64_t span, int C) {
    return scratch + (2 * span + 1) * C;
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ void store_sum(float *to, const float (&sum)[8], bool add) {
    float4 *p = reinterpret_cast<float4 *>(to);
    float4 low = make_float4(sum[0], sum[1], sum[2], sum[3]);
    float4 high = make_float4(sum[4], sum[5], sum[6], sum[7]);
    p[0] = add ? add4(p[0], low) : low;
    p[1] = add ? add4(p[1], high) : high;
}

// Block (span, slab of columns); a thread owns 8 columns and walks the span.
__global__ void embedding_spans_kernel(real *dweight, float *scratch,
                                       const floatX *__restrict__ dout,
                                       const int32_t *__restrict__ tokens,
                                       const int32_t *__restrict__ order, int64_t T, int C,
                                       int span) {
    const Runs runs = {tokens, order, T, span};
    const int c = 8 * (int)(blockIdx.y * blockDim.x + threadIdx.x);
    if (c >= C) return;
    const int64_t first = (int64_t)blockIdx.x * span, last = first + span < T ? first + span : T;
    int32_t current = runs.token(first);
    bool from_before = runs.starts_before(first);
    float sum[8] = {};
    for (int64_t i = first; i < last; i += AHEAD) {
        Bf16x8 row[AHEAD];
        int32_t token[AHEAD];
        unrolled_for (int j = 0; j < AHEAD; j++) {  // independent loads, all in flight at once
            if (i + j >= last) continue;
            token[j] = runs.token(i + j);
            row[j] = load_vector(dout + (int64_t)order[i + j] * C + c);
        }
        unrolled_for (int j = 0; j < AHEAD; j++) {
            if (i + j >= last) continue;
            if (token[j] != current) {  // the run ended inside the span
                float *to =
                    from_before ? head_sum(scratch, blockIdx.x, C) : dweight + (int64_t)current * C;
                store_sum(to + c, sum, !from_before);
                from_before = false;
                current = token[j];
                unrolled_for (int k = 0; k < 8; k++) sum[k] = 0;
            }
            float x[8];
            unpack8(x, row[j]);
            unrolled_for (int k = 0; k < 8; k++) sum[k] += x[k];
        }
    }
    const bool goes_on = last < T && runs.token(last) == current;
    float *to = from_before ? head_sum(scratch, blockIdx.x, C)
                : goes_on   ? tail_sum(scratch, blockIdx.x, C)
                            : dweight + (int64_t)current * C;
    store_sum(to + c, sum, !from_before && !goes_on);
}

// Block (span, slab of columns), with work where a run starts in the span and continues past it:
// its tail, and the heads of the spans that it reaches, of which thread y of a column adds every
// SUM_LANES-th.
__global__ void embedding_crossing_kernel(real *dweight, float *scratch,
                                          const int32_t *__restrict__ tokens,
                                          const int32_t *__restrict__ order, int64_t T, int C,
                                          int span) {
    __shared__ float4 lanes[SUM_LANES][WARP];
    const Runs runs = {tokens, order, T, span};
    const int64_t first = (int64_t)blockIdx.x * span, last = first + span;
    if (last >= T) return;
    const int32_t token = runs.token(last);
    if (runs.token(last - 1) != token) return;  // no run crosses the border
    if (runs.token(first) == token && runs.starts_before(first)) return;  // an earlier span's
    const int c = SUM_VECTOR * (int)(blockIdx.y * WARP + threadIdx.x);
    float4 sum = make_float4(0, 0, 0, 0);
    if (threadIdx.y == 0 && c < C)
        sum = *reinterpret_cast<const float4 *>(tail_sum(scratch, blockIdx.x, C) + c);
#pragma unroll 4
    for (int64_t s = (int64_t)blockIdx.x + 1 + threadIdx.y;
         c < C && s * span < T && runs.token(s * span) == token; s += SUM_LANES) {
        sum = add4(sum, *reinterpret_cast<const float4 *>(head_sum(scratch, s, C) + c));
    }
    lanes[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // all lanes are written before the first one adds them
    if (threadIdx.y != 0 || c >= C) return;
    for (int y = 1; y < SUM_LANES; y++) sum = add4(sum, lanes[y][threadIdx.x]);
    float4 *to = reinterpret_cast<float4 *>(dweight + (int64_t)token * C + c);
    *to = add4(*to, sum);
}

// The shortest span, from MIN_SPAN on, whose sums fit the scratch memory
static int64_t span_for(int64_t T, int C) {
    int64_t span = MIN_SPAN;
    while ((size_t)ceil_div(T, span) * 2 * (size_t)C * sizeof(float) > CUDA_SCRATCH_BYTES)
        span *= 2;
    return span;
}

void embedding_backward(real *dweight, const floatX *dout, const int32_t *tokens,
                        const int32_t *order, int64_t T, int C) {
    if (T == 0 || !dweight) return;
    row_grid("embedding_backward", T, C);  // checks C
    float *scratch = (float *)cuda_scratch();
    const int64_t span = span_for(T, C);
    const unsigned spans = (unsigned)ceil_div(T, span);
    const dim3 grid(spans, (unsigned)ceil_div(C, 8 * (int)SPAN_THREADS));
    embedding_spans_kernel<<<grid, SPAN_THREADS, 0, cuda_stream()>>>(dweight, scratch, dout, tokens,
                                                                     order, T, C, (int)span);
    LAUNCH_CHECK("embedding_spans_kernel");
    const dim3 sum_grid(spans, (unsigned)ceil_div(C, SUM_VECTOR * (int)WARP));
    const dim3 sum_block(WARP, SUM_LANES);
    embedding_crossing_kernel<<<sum_grid, sum_block, 0, cuda_stream()>>>(dweight, scratch, tokens,
                                                                         order, T, C, (int)span);
    LAUNCH_CHECK("embedding_crossing_kernel");
}
