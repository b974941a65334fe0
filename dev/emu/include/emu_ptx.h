// The wrappers of kernels/cuda/ptx.cuh in an emulated build, and the emulator's functions behind
// them.
#pragma once
#include "cuda.h"
#include "cuda_emu.h"

namespace emu {
// Warp-wide tensor operations
void ldmatrix(uint32_t *r, int n, bool trans, uint32_t addr, const char *file, int line);
void mma16816(float *d, const uint32_t *a, const uint32_t *b, const char *file, int line);
float ex2(float x);
void exact_tensor_cores(int arch);  // from now on as with EMU_EXACT=1 and EMU_ARCH=arch

// cp.async
void cp_async(uint32_t dst, const void *src, int bytes, int valid, const char *file, int line);
void cp_async_commit();
void cp_wait(int n);

// mbarrier
void mbar_init(uint32_t bar, uint32_t count, EMU_LOC);
void mbar_arrive(uint32_t bar, uint32_t n, uint32_t tx, const char *file, int line);
bool mbar_try_wait(uint32_t bar, uint32_t parity, EMU_LOC);
void fence_mbar_init();

// TMA
void fence_proxy_async();
void tma_load(uint32_t dst, const CUtensorMap *map, uint32_t bar, int rank, int c0, int c1, int c2,
              const char *file, int line);
void tma_store(const CUtensorMap *map, uint32_t src, int rank, int c0, int c1, int c2,
               const char *file, int line);
void bulk_commit();
void bulk_wait(int n);

// wgmma
void wgmma(float *d, int n, const uint32_t *a_registers, uint64_t da, uint64_t db, int scale_d,
           bool ta, bool tb, const char *file, int line);
void wgmma_fence(EMU_LOC);
void wgmma_commit(EMU_LOC);
void wgmma_wait(int n, const char *file, int line);
void setmaxnreg(int n, bool increase, const char *file, int line);
}  // namespace emu

#define PTX inline
using emu::bulk_commit, emu::cp_async_commit, emu::ex2, emu::fence_mbar_init,
    emu::fence_proxy_async, emu::mbar_init, emu::mbar_try_wait, emu::wgmma_commit, emu::wgmma_fence;
PTX uint32_t smem_u32(const void *p) { return emu::smem_addr(p); }
PTX uint32_t opaque(uint32_t x) { return x; }
PTX void ldmatrix_x4(uint32_t (&r)[4], uint32_t a, EMU_LOC) {
    emu::ldmatrix(r, 4, false, a, EMU_AT);
}
PTX void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t a, EMU_LOC) {
    emu::ldmatrix(r, 4, true, a, EMU_AT);
}
PTX void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_LOC) {
    uint32_t b[2] = {b0, b1};
    emu::mma16816(d, a, b, EMU_AT);
}
PTX void named_bar_sync(int id, int n, EMU_LOC) { emu::bar(id, n, true, EMU_AT); }
PTX void named_bar_arrive(int id, int n, EMU_LOC) { emu::bar(id, n, false, EMU_AT); }
PTX void cp_async16(uint32_t dst, const void *src, bool valid, EMU_LOC) {
    emu::cp_async(dst, src, 16, valid ? 16 : 0, EMU_AT);
}
template <int N>
PTX void cp_async_wait() {
    emu::cp_wait(N);
}
PTX void mbar_arrive(uint32_t b, EMU_LOC) { emu::mbar_arrive(b, 1, 0, EMU_AT); }
PTX void mbar_arrive_expect_tx(uint32_t b, uint32_t tx, EMU_LOC) {
    emu::mbar_arrive(b, 1, tx, EMU_AT);
}
PTX void mbar_wait(uint32_t b, uint32_t parity, EMU_LOC) {
    while (!mbar_try_wait(b, parity, EMU_AT)) {
    }
}
PTX void tma_prefetch(const CUtensorMap &) {}
PTX void tma_load_3d(uint32_t dst, const CUtensorMap *m, uint32_t bar, int c0, int c1, int c2,
                     EMU_LOC) {
    emu::tma_load(dst, m, bar, 3, c0, c1, c2, EMU_AT);
}
PTX void tma_store_3d(const CUtensorMap *m, uint32_t src, int c0, int c1, int c2, EMU_LOC) {
    emu::tma_store(m, src, 3, c0, c1, c2, EMU_AT);
}
template <int N>
PTX void bulk_wait() {
    emu::bulk_wait(N);
}
template <int N>
PTX void bulk_wait_read() {
    emu::bulk_wait(N);
}
template <int N>
PTX void setmaxnreg_inc(EMU_LOC) {
    emu::setmaxnreg(N, true, EMU_AT);
}
template <int N>
PTX void setmaxnreg_dec(EMU_LOC) {
    emu::setmaxnreg(N, false, EMU_AT);
}
template <int N>
PTX void wgmma_wait(EMU_LOC) {
    emu::wgmma_wait(N, EMU_AT);
}
template <int N>
PTX void wgmma_pin(float (&)[N]) {}
template <int TA, int TB, int N>
PTX void wgmma_ss(float (&d)[N], uint64_t a, uint64_t b, int sd, EMU_LOC) {
    emu::wgmma(d, N * 2, nullptr, a, b, sd, TA, TB, EMU_AT);
}
template <int TB, int N>
PTX void wgmma_rs(float (&d)[N], const uint32_t (&a)[4], uint64_t b, int sd, EMU_LOC) {
    emu::wgmma(d, N * 2, a, 0, b, sd, false, TB, EMU_AT);
}
