// The only inline PTX: one short wrapper per instruction. In an emulated build the same names are
// functions of the emulator (dev/emu/include/emu_ptx.h); tests/test_conform.cu has a case for
// every wrapper, which both must pass. Addresses of shared memory are 32-bit.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#ifndef __CUDACC__
#include <emu_ptx.h>  // on the include path of emulated builds only
#else
#define PTX __device__ __forceinline__

PTX uint32_t smem_u32(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
// 2^x, subnormal results as 0
PTX float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x, hidden from the compiler: values that depend on it are computed where they are used, not kept
// in registers from before a loop.
PTX uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// ---- sm_80: ldmatrix, mma.sync, cp.async --------------------------------------------------------

PTX void ldmatrix_x4(uint32_t (&r)[4], uint32_t a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a)
                 : "memory");
}
PTX void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a)
                 : "memory");
}
// d (16, 8) += a (16, 16) b (16, 8), bf16 in, fp32 out
PTX void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// 16 bytes; zeros when not valid, and src is then not read.
PTX void cp_async16(uint32_t dst, const void *src, bool valid) {
    int n = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(n)
                 : "memory");
}
PTX void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
PTX void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Barrier `id` (1 to 15) of n threads, a multiple of 32: sync waits for all, arrive for none.
PTX void named_bar_sync(int id, int n) {
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(n) : "memory");
}
PTX void named_bar_arrive(int id, int n) {
    asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(n) : "memory");
}

// ---- sm_90: mbarrier, TMA -----------------------------------------------------------------------

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
PTX void mbar_init(uint32_t b, uint32_t n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
PTX void fence_mbar_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
PTX void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
PTX void mbar_arrive(uint32_t b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}
PTX void mbar_arrive_expect_tx(uint32_t b, uint32_t tx) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(tx)
                 : "memory");
}
PTX bool mbar_try_wait(uint32_t b, uint32_t parity) {
    uint32_t ok;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, "
        "0, p;\n}"
        : "=r"(ok)
        : "r"(b), "r"(parity)
        : "memory");
    return ok;
}
PTX void mbar_wait(uint32_t b, uint32_t parity) {
    while (!mbar_try_wait(b, parity)) {
    }
}
PTX void tma_prefetch(const CUtensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map));
}
PTX void tma_load_3d(uint32_t dst, const CUtensorMap *m, uint32_t bar, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3, %4, %5}], [%2];" ::"r"(dst),
        "l"(m), "r"(bar), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
PTX void tma_store_3d(const CUtensorMap *m, uint32_t src, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(m),
        "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
PTX void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
PTX void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
template <int N>
PTX void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
#endif

// ---- sm_90a: setmaxnreg, wgmma ------------------------------------------------------------------

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int N>
PTX void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
PTX void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
PTX void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PTX void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
PTX void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving accumulators across the asynchronous region.
template <int N>
PTX void wgmma_pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define P32                                                                                       \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
    "25,%26,%27,%28,%29,%30,%31"
#define P64                                                                                      \
    P32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%" \
        "53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// d (64, N) = a b, or += with sd; TA, TB: the operand is MN-major; ss: a in shared memory, rs: in
// registers. wgmma_fence before the first, wgmma_commit and wgmma_wait after the last of a group.
template <int TA, int TB>
PTX void wgmma_ss(float (&d)[32], uint64_t a, uint64_t b, int sd) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, "
        "0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" P32
        "}, %32, %33, p, 1, 1, %35, %36;\n}"
        : F16(d, 0), F16(d, 16)
        : "l"(a), "l"(b), "r"(sd), "n"(TA), "n"(TB)
        : "memory");
}
template <int TA, int TB>
PTX void wgmma_ss(float (&d)[64], uint64_t a, uint64_t b, int sd) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, "
        "0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" P64
        "}, %64, %65, p, 1, 1, %67, %68;\n}"
        : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)
        : "l"(a), "l"(b), "r"(sd), "n"(TA), "n"(TB)
        : "memory");
}
template <int TB>
PTX void wgmma_rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int sd) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, "
        "0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" P32
        "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"
        : F16(d, 0), F16(d, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(sd), "n"(TB)
        : "memory");
}
template <int TB>
PTX void wgmma_rs(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int sd) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, "
        "0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" P64
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}"
        : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(sd), "n"(TB)
        : "memory");
}
#endif

#endif

// ---- Plain CUDA on both sides -------------------------------------------------------------------

// Descriptor of a wgmma operand with 128-byte swizzle: start address, leading and stride offsets
__device__ __forceinline__ uint64_t wgmma_desc_sw128(uint32_t addr, uint32_t lbo_bytes,
                                                     uint32_t sbo_bytes) {
    return (uint64_t)((addr & 0x3ffff) >> 4) | (uint64_t)(lbo_bytes >> 4) << 16 |
           (uint64_t)(sbo_bytes >> 4) << 32 | (uint64_t)1 << 62;
}
