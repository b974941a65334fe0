// The arithmetic of tensor cores, bit for bit: 83,200 tiles of bf16 inputs, random and adversarial,
// against the hashes in dev/results/witnesses/arithmetic.txt, which come from a model by others. On
// a GPU the same program checks the GPU against them.
#include "cuda_test.h"
#include "../kernels/cuda/ptx.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#endif

constexpr int K = 16;

// ---- Tiles: those of arithmetic.py of the witnesses, made from the same numbers -----------------

static u64 mix(u64 z) {
    z = (z + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

enum { HALVES = 1, PAIRS = 2, COARSE = 4, SPECIAL = 8 };
enum { ZEROS = 16, RAMP = 32, CANCEL = 64, NO_MANTISSA = 128 };
struct Exponents {
    unsigned lo, span;
};
struct Kind {
    Exponents a, b, c;
    unsigned flags;
};
static const Kind KINDS[] = {{{124, 7}, {124, 7}, {124, 10}, 0},
                             {{0, 255}, {0, 255}, {0, 255}, 0},
                             {{117, 21}, {117, 21}, {107, 44}, 0},
                             {{50, 21}, {50, 26}, {0, 21}, 0},
                             {{0, 2}, {230, 25}, {100, 31}, 0},
                             {{120, 16}, {120, 16}, {90, 41}, HALVES},
                             {{120, 16}, {120, 16}, {90, 41}, PAIRS},
                             {{124, 7}, {124, 7}, {120, 36}, COARSE},
                             {{185, 7}, {185, 7}, {245, 10}, 0},
                             {{124, 7}, {124, 7}, {124, 10}, SPECIAL},
                             {{46, 10}, {52, 10}, {0, 11}, ZEROS},
                             {{118, 10}, {118, 10}, {140, 13}, 0},
                             {{97, 31}, {120, 10}, {120, 16}, COARSE},
                             {{0, 1}, {124, 7}, {0, 1}, ZEROS | NO_MANTISSA},
                             {{140, 5}, {120, 15}, {0, 1}, RAMP | CANCEL},
                             {{140, 5}, {120, 15}, {100, 40}, RAMP}};
constexpr size_t TILES_PER_KIND = 4;
static const Kind &kind_of(size_t tile) { return KINDS[tile / TILES_PER_KIND % std::size(KINDS)]; }

struct Number {
    u64 random;
    unsigned sign, exponent;
    bool zero, infinite;
    Number(const Exponents &e, unsigned flags, u64 stream, u64 i)
        : random(mix((stream << 40) + i)),
          sign(random >> 23 & 1),
          exponent(e.lo + (unsigned)((random & 0xffff) * e.span >> 16)),
          zero((flags & ZEROS) && (random >> 24 & 1)),
          infinite(false) {
        if (!(flags & SPECIAL) || (random >> 25 & 31) != 0) return;
        exponent = 255;
        infinite = (random >> 30 & 1) == 0;
    }
};

// (tiles, rows, K)
static std::vector<uint16_t> operand(bool is_a, size_t tiles, int rows, u64 stream) {
    std::vector<uint16_t> v(tiles * rows * K);
    for (size_t i = 0; i < v.size(); i++) {
        const Kind &kind = kind_of(i / (rows * K));
        const unsigned k = i % K;
        const size_t twin = kind.flags & HALVES && k >= 8      ? i - 8
                            : kind.flags & PAIRS && k % 2 == 1 ? i - 1
                                                               : i;
        const Number x(is_a ? kind.a : kind.b, kind.flags, stream, twin);
        unsigned mantissa = x.random >> 16 & 0x7f, exponent = x.exponent;
        if (is_a && kind.flags & RAMP) exponent -= 5 * k;
        if (kind.flags & COARSE) mantissa &= 0x60;
        if ((is_a && kind.flags & NO_MANTISSA) || x.infinite) mantissa = 0;
        v[i] = (uint16_t)(x.sign << 15 | (x.zero ? 0 : exponent << 7 | mantissa));
        if (is_a && twin != i) v[i] ^= 0x8000;
    }
    return v;
}

static float from_bf16(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

struct Tiles {
    int m, n;
    size_t count;
    std::vector<uint16_t> a, b;  // (count, m, K), (count, n, K)
    std::vector<float> c;        // (count, m, n)
    Tiles(int m_, int n_, size_t count_, u64 stream)
        : m(m_),
          n(n_),
          count(count_),
          a(operand(true, count, m, stream)),
          b(operand(false, count, n, stream + 1)),
          c(count * m * n) {
        for (size_t i = 0; i < c.size(); i++) {
            const size_t tile = i / (m * n), row = i / n % m, col = i % n;
            const Kind &kind = kind_of(tile);
            const Number x(kind.c, kind.flags, stream + 2, i);
            unsigned mantissa = x.random >> 32 & 0x7fffff;
            if (kind.flags & COARSE) mantissa &= 0x600000;
            if (x.infinite) mantissa = 0;
            const uint32_t bits = x.sign << 31 | (x.zero ? 0 : x.exponent << 23 | mantissa);
            memcpy(&c[i], &bits, sizeof bits);
            if (kind.flags & CANCEL)
                c[i] = -from_bf16(a[(tile * m + row) * K]) * from_bf16(b[(tile * n + col) * K]);
        }
    }
};

template <class T>
static u64 hash_of(const std::vector<T> &v, u64 which) {
    u64 sum = 0;
    for (size_t i = 0; i < v.size(); i++) {
        u64 bits = 0;
        memcpy(&bits, &v[i], sizeof(T));
        sum += mix((i | which << 28) << 32 | bits);
    }
    return sum;
}

// ---- Kernels: a block takes chains of DEPTH tiles, the accumulator that of the first ------------

template <int DEPTH>
__global__ void mma_kernel(float *out, const uint16_t *a, const uint16_t *b, const float *c,
                           int chains) {
    const int row = threadIdx.x / 4, col = threadIdx.x % 4 * 2;
    for (int64_t chain = blockIdx.x; chain < chains; chain += gridDim.x) {
        float d[4];
        for (int i = 0; i < 4; i++)
            d[i] = c[chain * DEPTH * 128 + (row + i / 2 * 8) * 8 + col + i % 2];
        for (int64_t tile = chain * DEPTH; tile < (chain + 1) * DEPTH; tile++) {
            uint32_t left[4], right[2];
            for (int i = 0; i < 4; i++)
                memcpy(&left[i], a + tile * 256 + (row + i % 2 * 8) * K + col + i / 2 * 8, 4);
            for (int i = 0; i < 2; i++)
                memcpy(&right[i], b + tile * 128 + row * K + col + i * 8, 4);
            mma_16816(d, left, right[0], right[1]);
        }
        for (int i = 0; i < 4; i++) out[chain * 128 + (row + i / 2 * 8) * 8 + col + i % 2] = d[i];
    }
}

constexpr int TILE_BYTES = 64 * 128;
#if HAS_WGMMA
// Operands in the first 16 of 64 columns of 128-byte-swizzled tiles, A and B in turn
__device__ __forceinline__ int swizzled(int row, int k) {
    return row * 128 + ((k / 8 ^ row % 8) << 4) + k % 8 * 2;
}
template <int DEPTH, bool A_IN_REGISTERS>
__device__ __forceinline__ void multiply(float (&d)[32], const unsigned char *tiles, int row,
                                         int col) {
    uint32_t left[DEPTH][4];
    for (int s = 0; s < DEPTH; s++)
        for (int i = 0; i < 4; i++)
            memcpy(&left[s][i],
                   tiles + s * 2 * TILE_BYTES + swizzled(row + i % 2 * 8, col + i / 2 * 8), 4);
    const uint64_t first = wgmma_desc_sw128(smem_u32(tiles), 16, 1024);
    wgmma_pin(d);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < DEPTH; s++) {
        const uint64_t at = first + (s * 2 * TILE_BYTES >> 4), right = at + (TILE_BYTES >> 4);
        if constexpr (A_IN_REGISTERS)
            wgmma_rs<0>(d, left[s], right, 1);
        else
            wgmma_ss<0, 0>(d, at, right, 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(d);
}
#endif

// Every other chain has A in registers.
template <int DEPTH>
__global__ void wgmma_kernel(float *out, const uint16_t *a, const uint16_t *b, const float *c,
                             int chains) {
#if HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char smem[];
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, col = lane % 4 * 2;
    for (int64_t chain = blockIdx.x; chain < chains; chain += gridDim.x) {
        float d[32];
        for (int i = 0; i < 32; i++)
            d[i] = c[chain * DEPTH * 4096 + (row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + col + i % 2];
        __syncthreads();  // earlier tiles are no longer read
        for (int i = threadIdx.x; i < DEPTH * 64 * K; i += 128) {
            const int64_t from = chain * DEPTH * 64 * K + i;
            unsigned char *to = smem + i / (64 * K) * 2 * TILE_BYTES + swizzled(i / K % 64, i % K);
            memcpy(to, a + from, 2);
            memcpy(to + TILE_BYTES, b + from, 2);
        }
        fence_proxy_async();
        __syncthreads();
        if (chain % 2)
            multiply<DEPTH, true>(d, smem, row, col);
        else
            multiply<DEPTH, false>(d, smem, row, col);
        for (int i = 0; i < 32; i++)
            out[chain * 4096 + (row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + col + i % 2] = d[i];
    }
#endif
}

typedef void Kernel(float *, const uint16_t *, const uint16_t *, const float *, int chains);
struct Instruction {
    const char *name;
    int m, n;
    size_t tiles;  // of a chunk
    u64 first_stream;
    Kernel *one, *four;  // a chain
    int threads;
};
static const Instruction MMA = {"mma", 16, 8, 40960, 0, mma_kernel<1>, mma_kernel<4>, 32};
static const Instruction WGMMA = {"wgmma",         64, 64, 1280, 1 << 16, wgmma_kernel<1>,
                                  wgmma_kernel<4>, 128};

static std::vector<float> run(const Instruction &what, const Tiles &t, int depth) {
    const int chains = (int)(t.count / depth);
    const size_t n = (size_t)chains * t.m * t.n;
    float *out = device_buffer<float>(n);
    Kernel *const kernel = depth == 1 ? what.one : what.four;
    const int shared_bytes = what.threads == 128 ? depth * 2 * TILE_BYTES : 0;
    CUDA_OK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    kernel<<<256, what.threads, shared_bytes>>>(out, to_device(t.a), to_device(t.b), to_device(t.c),
                                                chains);
    return to_host(out, n);
}

// All lines of the table for an instruction on an architecture: of single tiles, and of chains
static void hold_against_table(const Instruction &what, const char *arch) {
    const Tiles t(what.m, what.n, what.tiles, what.first_stream);
    const u64 found_inputs = hash_of(t.a, 0) + hash_of(t.b, 1) + hash_of(t.c, 2);
    char line[256], name[16], line_arch[16];
    int depth, lines = 0;
    size_t tiles;
    u64 inputs, outputs;
    const char *path = "dev/results/witnesses/arithmetic.txt";
    FILE *f = fopen(path, "r");
    CHECK_MSG(f != NULL, "%s: run this program from the repository root", path);
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%15s %15s %d %zu %*s %llx %llx", name, line_arch, &depth, &tiles, &inputs,
                   &outputs) != 6 ||
            strcmp(name, what.name) != 0 || strcmp(line_arch, arch) != 0)
            continue;
        CHECK_MSG(tiles == what.tiles && found_inputs == inputs,
                  "other inputs than the witness had");
        const u64 found = hash_of(run(what, t, depth), 0);
        CHECK_MSG(found == outputs, "%s of %s, depth %d: listed %016llx, found %016llx", name, arch,
                  depth, outputs, found);
        lines++;
    }
    fclose(f);
    CHECK(lines == 2);
}

// The GPU must be one that the table has; the emulator becomes one.
static void become(int min_arch, int max_arch) {
#if defined(__CUDACC__)
    begin(min_arch / 10, max_arch / 10);
#else
    (void)max_arch;
    begin(0, 99);
    emu::exact_tensor_cores(min_arch);
#endif
}

TEST(mma_of_sm_80) {
    become(80, 89);
    hold_against_table(MMA, "sm_80");
}
TEST(mma_of_sm_90) {
    become(90, 129);
    hold_against_table(MMA, "sm_90");
}
TEST(wgmma_of_sm_90) {
    become(90, 90);
    hold_against_table(WGMMA, "sm_90");
}

TEST_MAIN()
