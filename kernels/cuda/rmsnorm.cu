// RMSNorm. A row lives in the registers of its warps (common.cuh): one read, one sum over the row,
// one write. Gradients of the weights are sums over all rows: each block sums its own rows in
// registers, and a second kernel adds the blocks' sums in order. There are no atomics; the number
// of blocks depends only on T and C.

#include "common.cuh"

static RowGrid norm_grid(const char *op, int64_t T, int C) {
    const RowGrid grid = row_grid(op, T, C);
    if (C > ROW_MAX_COLUMNS) cuda_unsupported(op, "at most 16384 columns", C);
    return grid;
}

__global__ void __launch_bounds__(ROW_MAX_THREADS)
    rmsnorm_forward_kernel(floatX *__restrict__ normed, real *__restrict__ rstd,
                           const floatX *__restrict__ resid, const floatX *__restrict__ weight,
                           float eps, int64_t T, int C) {
    __shared__ float warp_sums[ROW_MAX_WARPS];
    const int64_t t = row_of_thread();
    const int columns = t < T ? C : 0;  // threads past the last row still meet the barrier
    Bf16x8 x[ROW_VECTORS];
    float squares = 0;
    unrolled_for (int i = 0; i < ROW_VECTORS; i++)
        if (vector_column(i) < columns) x[i] = load_vector(resid + t * C + vector_column(i));
    unrolled_for (int i = 0; i < ROW_VECTORS; i++) {
        if (vector_column(i) >= columns) continue;
        float a[8];
        unpack8(a, x[i]);
        for (int j = 0; j < 8; j++) squares += a[j] * a[j];
    }
    const float scale = 1.0f / sqrtf(row_sum(squares, warp_sums) / (float)C + eps);
    if (threadIdx.x == 0 && columns) rstd[t] = scale;
    unrolled_for (int i = 0; i < ROW_VECTORS; i++) {
        if (vector_column(i) >= columns) continue;
        float a[8], w[8];
        unpack8(a, x[i]);
        load8(w, weight + vector_column(i));
        for (int j = 0; j < 8; j++) a[j] *= scale * w[j];
        store8(normed + t * C + vector_column(i), a);
    }
}

void rmsnorm_forward(floatX *normed, real *rstd, const floatX *resid, const floatX *weight,
                     float eps, int64_t T, int C) {
    if (T == 0) return;
    const RowGrid grid = norm_grid("rmsnorm_forward", T, C);
    rmsnorm_forward_kernel<<<grid.blocks, grid.block, 0, cuda_stream()>>>(normed, rstd, resid,
                                                                          weight, eps, T, C);
    LAUNCH_CHECK("rmsnorm_forward_kernel");
}

// ---- Backward -----------------------------------------------------------------------------------

// Rows of one block summed in order of threadIdx.y: sums (blockDim.y, C) in shared memory, out (C)
__device__ __forceinline__ void store_block_sums(float *out, const float *sums, int C) {
    const int threads = (int)(blockDim.x * blockDim.y);
    for (int c = (int)(threadIdx.y * blockDim.x + threadIdx.x); c < C; c += threads) {
        float s = sums[c];
        for (int y = 1; y < (int)blockDim.y; y++) s += sums[y * C + c];
        out[c] = s;
    }
}

// y = x s w, s = (mean(x^2) + eps)^-1/2, so dx = s (w dy - x s^2 mean(x w dy)), dw = sum_t dy x s.
// partial (gridDim.x, C): each block's share of dw. Shared memory: blockDim.y * C floats, none when
// a block has one row only.
__global__ void __launch_bounds__(ROW_MAX_THREADS)
    rmsnorm_backward_kernel(floatX *__restrict__ dresid, float *__restrict__ partial,
                            const floatX *__restrict__ dnormed, const floatX *__restrict__ resid,
                            const floatX *__restrict__ weight, const real *__restrict__ rstd,
                            int64_t T, int C) {
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ float warp_sums[2][ROW_MAX_WARPS];
    float dw[ROW_VECTORS][8] = {};
    const int64_t stride = (int64_t)gridDim.x * blockDim.y;
    int turn = 0;
    // The bound is the block's, not the row's: all threads meet the barrier in row_sum.
    for (int64_t first = (int64_t)blockIdx.x * blockDim.y; first < T; first += stride, turn ^= 1) {
        const int64_t t = first + threadIdx.y;
        const int columns = t < T ? C : 0;
        const float s = columns ? rstd[t] : 0;
        Bf16x8 dy[ROW_VECTORS], x[ROW_VECTORS], dx[ROW_VECTORS];
        float dot = 0;
        unrolled_for (int i = 0; i < ROW_VECTORS; i++) {
            if (vector_column(i) >= columns) continue;
            const int64_t at = t * C + vector_column(i);
            dy[i] = load_vector(dnormed + at);
            x[i] = load_vector(resid + at);
            dx[i] = load_vector(dresid + at);
        }
        unrolled_for (int i = 0; i < ROW_VECTORS; i++) {
            if (vector_column(i) >= columns) continue;
            float g[8], a[8], w[8];
            unpack8(g, dy[i]);
            unpack8(a, x[i]);
            load8(w, weight + vector_column(i));
            for (int j = 0; j < 8; j++) {
                dot += a[j] * w[j] * g[j];
                dw[i][j] += g[j] * a[j] * s;
            }
        }
        // Two sets of sums in turn: the barrier inside also says that the set of the turn before
        // last has been read.
        const float mean = row_sum(dot, warp_sums[turn]) / (float)C * s * s;
        unrolled_for (int i = 0; i < ROW_VECTORS; i++) {
            if (vector_column(i) >= columns) continue;
            float g[8], a[8], w[8], d[8];
            unpack8(g, dy[i]);
            unpack8(a, x[i]);
            unpack8(d, dx[i]);
            load8(w, weight + vector_column(i));
            for (int j = 0; j < 8; j++) d[j] += s * (w[j] * g[j] - a[j] * mean);
            store8(dresid + t * C + vector_column(i), d);
        }
    }
    float *sums = reinterpret_cast<float *>(smem), *block_sums = partial + (int64_t)blockIdx.x * C;
    float *row = blockDim.y == 1 ? block_sums : sums + (int)threadIdx.y * C;
    unrolled_for (int i = 0; i < ROW_VECTORS; i++) {
        if (vector_column(i) >= C) continue;
        float4 *to = reinterpret_cast<float4 *>(row + vector_column(i));
        to[0] = make_float4(dw[i][0], dw[i][1], dw[i][2], dw[i][3]);
        to[1] = make_float4(dw[i][4], dw[i][5], dw[i][6], dw[i][7]);
    }
    __syncthreads();  // every row's sums are in shared memory
    if (blockDim.y > 1) store_block_sums(block_sums, sums, C);
}

enum { SUM_LANES = 8 };  // partial sums are added by this many threads a column

// dweight (C) += the rows of partial (num_partial, C): lane y adds rows y, y + 8, ..., then the
// lanes are added in order.
__global__ void add_partial_rows_kernel(real *dweight, const float *__restrict__ partial,
                                        int num_partial, int C) {
    __shared__ float lanes[SUM_LANES][WARP];
    const int c = (int)(blockIdx.x * WARP + threadIdx.x);
    float s = 0;
#pragma unroll 8
    for (int p = (int)threadIdx.y; p < num_partial; p += SUM_LANES)
        if (c < C) s += partial[(int64_t)p * C + c];
    lanes[threadIdx.y][threadIdx.x] = s;
    __syncthreads();  // all lanes are written before the first one adds them
    if (threadIdx.y != 0 || c >= C) return;
    for (int y = 1; y < SUM_LANES; y++) s += lanes[y][threadIdx.x];
    dweight[c] += s;
}

void add_partial_rows(real *dweight, const float *partial, int num_partial, int C) {
    const dim3 block(WARP, SUM_LANES);
    add_partial_rows_kernel<<<ceil_div(C, (int)WARP), block, 0, cuda_stream()>>>(dweight, partial,
                                                                                 num_partial, C);
    LAUNCH_CHECK("add_partial_rows_kernel");
}

void rmsnorm_backward(floatX *dresid, real *dweight, const floatX *dnormed, const floatX *resid,
                      const floatX *weight, const real *rstd, int64_t T, int C) {
    if (T == 0) return;
    const RowGrid grid = norm_grid("rmsnorm_backward", T, C);
    const unsigned blocks = grid.blocks < BACKWARD_BLOCKS ? grid.blocks : (unsigned)BACKWARD_BLOCKS;
    const size_t block_rows = grid.block.y > 1 ? grid.block.y : 0;
    const size_t sums_bytes = block_rows * (size_t)C * sizeof(float);  // at most 32 KiB
    float *partial = (float *)cuda_scratch();
    rmsnorm_backward_kernel<<<blocks, grid.block, sums_bytes, cuda_stream()>>>(
        dresid, partial, dnormed, resid, weight, rstd, T, C);
    LAUNCH_CHECK("rmsnorm_backward_kernel");
    if (dweight) add_partial_rows(dweight, partial, (int)blocks, C);
}

// ---- Query and key heads ------------------------------------------------------------------------
// A warp handles one head of one token, a lane a vector of it, so D <= 256; the second grid index
// says which heads. The norm is not kept: backward recomputes it.

enum { QUERIES, KEYS, VALUES, HEAD_WARPS = 8, HEAD_THREADS = HEAD_WARPS * WARP };

// The heads of one part: `count` from `first` on, of a token's `all`
struct HeadPart {
    int first, count, all;
    __device__ HeadPart(HeadShape heads, int part)
        : first(part == QUERIES ? 0 : heads.num_heads + (part - KEYS) * heads.num_kv_heads),
          count(part == QUERIES ? heads.num_heads : heads.num_kv_heads),
          all(heads.num_heads + 2 * heads.num_kv_heads) {}
    // The index among all tokens' heads of this part's head `row`
    __device__ int64_t head(int64_t row) const { return row / count * all + first + row % count; }
};

__device__ __forceinline__ float head_rstd(const float (&x)[8], float eps, int D) {
    float squares = 0;
    for (int j = 0; j < 8; j++) squares += x[j] * x[j];
    return 1.0f / sqrtf(warp_sum(squares) / (float)D + eps);
}

__global__ void __launch_bounds__(HEAD_THREADS)
    qk_norm_forward_kernel(floatX *__restrict__ out, const floatX *__restrict__ inp,
                           const floatX *__restrict__ weight, float eps, int64_t T,
                           HeadShape heads) {
    const HeadPart part(heads, (int)blockIdx.y);
    const int D = heads.head_dim, c = 8 * (int)threadIdx.x;
    const int64_t row = row_of_thread();
    if (row >= T * part.count) return;  // whole warps
    const int64_t at = part.head(row) * D + c;
    float x[8] = {}, w[8];
    if (c < D) load8(x, inp + at);
    const float rstd = blockIdx.y == VALUES ? 1 : head_rstd(x, eps, D);
    if (c >= D) return;
    if (blockIdx.y != VALUES) {
        load8(w, weight + (int)blockIdx.y * D + c);
        for (int j = 0; j < 8; j++) x[j] *= rstd * w[j];
    }
    store8(out + at, x);
}

// partial (2, gridDim.x * HEAD_WARPS, D): each warp's share of dweight
__global__ void __launch_bounds__(HEAD_THREADS)
    qk_norm_backward_kernel(floatX *__restrict__ dqkv, float *__restrict__ partial,
                            const floatX *__restrict__ inp, const floatX *__restrict__ weight,
                            float eps, int64_t T, HeadShape heads) {
    const HeadPart part(heads, (int)blockIdx.y);
    const int D = heads.head_dim, c = 8 * (int)threadIdx.x;
    const int64_t warps = (int64_t)gridDim.x * HEAD_WARPS;
    float dw[8] = {}, w[8] = {};
    if (c < D) load8(w, weight + (int)blockIdx.y * D + c);
    for (int64_t row = row_of_thread(); row < T * part.count; row += warps) {
        const int64_t at = part.head(row) * D + c;
        float x[8] = {}, dy[8] = {}, dot = 0;
        if (c < D) load8(x, inp + at), load8(dy, dqkv + at);
        const float s = head_rstd(x, eps, D);
        for (int j = 0; j < 8; j++) {
            dw[j] += dy[j] * x[j] * s;
            dy[j] *= w[j];
            dot += x[j] * dy[j];
        }
        const float mean = warp_sum(dot) / (float)D * s * s;
        for (int j = 0; j < 8; j++) dy[j] = s * (dy[j] - x[j] * mean);
        if (c < D) store8(dqkv + at, dy);
    }
    float *to = partial + (blockIdx.y * warps + row_of_thread()) * D + c;
    if (c >= D) return;
    for (int j = 0; j < 8; j++) to[j] = dw[j];
}

static unsigned qk_norm_blocks(const char *op, int64_t T, HeadShape heads) {
    const int D = heads.head_dim;
    if (D % 8 != 0 || D > 8 * WARP)
        cuda_unsupported(op, "a head_dim that is a multiple of 8, up to 256", D);
    return (unsigned)ceil_div<int64_t>(T * heads.num_heads, HEAD_WARPS);
}

void qk_norm_forward(floatX *out, const floatX *inp, const floatX *weight, float eps, int64_t T,
                     HeadShape heads) {
    if (T == 0) return;
    const dim3 grid(qk_norm_blocks("qk_norm_forward", T, heads), 3), block(WARP, HEAD_WARPS);
    qk_norm_forward_kernel<<<grid, block, 0, cuda_stream()>>>(out, inp, weight, eps, T, heads);
    LAUNCH_CHECK("qk_norm_forward_kernel");
}

void qk_norm_backward(floatX *dqkv, real *dweight, const floatX *inp, const floatX *weight,
                      float eps, int64_t T, HeadShape heads) {
    if (T == 0) return;
    const unsigned all = qk_norm_blocks("qk_norm_backward", T, heads);
    const dim3 grid(all < BACKWARD_BLOCKS ? all : (unsigned)BACKWARD_BLOCKS, 2);
    const int D = heads.head_dim, rows = (int)grid.x * HEAD_WARPS;
    float *partial = (float *)cuda_scratch();
    qk_norm_backward_kernel<<<grid, dim3(WARP, HEAD_WARPS), 0, cuda_stream()>>>(
        dqkv, partial, inp, weight, eps, T, heads);
    LAUNCH_CHECK("qk_norm_backward_kernel");
    for (int part = QUERIES; part <= KEYS && dweight; part++)
        add_partial_rows(dweight + part * D, partial + (int64_t)part * rows * D, rows, D);
}
