// The functions behind the wrappers of kernels/cuda/ptx.cuh in an emulated build.
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
void cp_commit();
void cp_wait(int n);

// mbarrier
void mbar_init(uint32_t bar, uint32_t count, const char *file, int line);
void mbar_arrive(uint32_t bar, uint32_t n, uint32_t tx, const char *file, int line);
bool mbar_try_wait(uint32_t bar, uint32_t parity, const char *file, int line);
void fence_mbar();

// TMA and bulk copies
void fence_proxy();
void tma_load(uint32_t dst, const CUtensorMap *map, uint32_t bar, int rank, int c0, int c1, int c2,
              const char *file, int line);
void tma_store(const CUtensorMap *map, uint32_t src, int rank, int c0, int c1, int c2,
               const char *file, int line);
void bulk_commit();
void bulk_wait(int n);

// wgmma
void wgmma(float *d, int n, const uint32_t *a_registers, uint64_t da, uint64_t db, int scale_d,
           bool ta, bool tb, const char *file, int line);
void wgmma_fence(const char *file, int line);
void wgmma_commit(const char *file, int line);
void wgmma_wait(int n, const char *file, int line);
void setmaxnreg(int n, bool increase, const char *file, int line);
}  // namespace emu
