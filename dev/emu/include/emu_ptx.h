// emu_ptx.h - host emulation behind the PTX wrappers (included by ptx.cuh in host builds only)
#pragma once
#include "cuda_emu.h"
namespace emu {
void ldmatrix(uint32_t *r, int n, bool trans, uint32_t addr, const char *, int);
void mma16816(float *d, const uint32_t *a, const uint32_t *b, const char *, int);
void cp_async(uint32_t dst, const void *src, int bytes, int valid, const char *, int);
void cp_commit();
void cp_wait(int n);
void mbar_init(uint32_t b, uint32_t n, const char *, int);
void mbar_arrive(uint32_t b, uint32_t n, uint32_t tx, const char *, int);
bool mbar_try_wait(uint32_t b, uint32_t parity, bool block, const char *, int);
void fence_proxy();
void fence_mbar();
void tma_load(uint32_t dst, const CUtensorMap *m, uint32_t bar, int rank, int c0, int c1, int c2,
              const char *, int);
void tma_store(const CUtensorMap *m, uint32_t src, int rank, int c0, int c1, int c2, const char *,
               int);
void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar, const char *, int);
void bulk_reduce_add(float *dst, uint32_t src, uint32_t bytes, const char *, int);
void bulk_commit();
void bulk_wait(int n);
void wgmma(float *d, int n, const uint32_t *areg, uint64_t da, uint64_t db, int scale_d, bool ta,
           bool tb, const char *, int);
void wgmma_fence(const char *, int);
void wgmma_commit(const char *, int);
void wgmma_wait(int n, const char *, int);
void setmaxnreg(int n, bool inc, const char *, int);
bool elect(const char *, int);
}  // namespace emu
