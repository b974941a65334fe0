// The instruction sets of this CPU, and the threads that its kernels use.
#pragma once

#include <stdbool.h>
#include <stddef.h>

// Does this CPU have the instruction set "amx_bf16", "avx512_bf16", "avx512", "avx2" or "portable"
// (always)? "avx512" means F, DQ, VL and BW; "avx2" includes FMA. "amx_bf16" asks Linux for the
// tile registers, which it grants to threads that start later.
bool cpu_has(const char *set);

// A remark about --bf16-matmul on this CPU, from measurements in dev/SPEED.md; "": none
const char *cpu_bf16_note(bool bf16_matmul);

// Sets how many threads the kernels use: `asked`, 0: see machine_threads of data/base/machine.h.
// All ranks call it. text: "2 threads of 64 cores (CPU quota)"
void cpu_set_threads(int asked, char *text, size_t capacity);
// That number. omp_get_max_threads is right only in the thread that called cpu_set_threads.
int cpu_threads(void);
