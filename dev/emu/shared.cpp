// Shared memory: the thread-local storage of the OS thread that runs the block. Static __shared__
// variables lie wherever the linker puts thread-locals, the dynamic array is `smem`; 32-bit shared
// addresses count from a 1024-byte boundary below both.
#include "engine.h"

#include <algorithm>
#include <link.h>

alignas(1024) thread_local unsigned char smem[SMEM_MAX];
__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu {
__thread Cursor cur;

// The thread-local block of the module that holds the emulator
void find_shared_memory(Block *b) {
    struct Range {
        char *lo, *hi;
    } range{nullptr, nullptr};
    auto look = [](dl_phdr_info *info, size_t, void *p) {
        for (int k = 0; k < info->dlpi_phnum; k++) {
            char *lo = (char *)info->dlpi_tls_data;
            if (info->dlpi_phdr[k].p_type != PT_TLS || !lo) continue;
            char *hi = lo + info->dlpi_phdr[k].p_memsz;
            if ((char *)&cur < lo || (char *)&cur >= hi) continue;
            *(Range *)p = {lo, hi};
            return 1;
        }
        return 0;
    };
    dl_iterate_phdr(look, &range);
    if (!range.lo || (uintptr_t)smem % 1024)
        fail("cannot locate the thread-local block that backs shared memory");
    b->tls_lo = range.lo;
    b->tls_hi = range.hi;
    b->base = (char *)(((uintptr_t)range.lo - 1024) & ~(uintptr_t)1023);
    if (range.hi - b->base > 1 << 18)
        fail("shared memory over 256 KB: too many static __shared__ variables");
}

// NaN everywhere, except in the emulator's own variables; a mark follows the dynamic array.
void poison_shared_memory(Block *b) {
    memset(smem, 0xff, b->dynamic_smem);
    memset(smem + b->dynamic_smem, 0xA5, std::min<size_t>(SMEM_MAX - b->dynamic_smem, 1024));
#if !defined(__clang__) || !(defined(ASAN) || defined(EMU_TSAN))
    Cursor keep = cur;
    uint3 index[4] = {threadIdx, blockIdx, blockDim, gridDim};
    memset(b->tls_lo, 0xff, (size_t)((char *)smem - b->tls_lo));
    memset((char *)smem + SMEM_MAX, 0xff, (size_t)(b->tls_hi - ((char *)smem + SMEM_MAX)));
    cur = keep;
    threadIdx = index[0];
    blockIdx = index[1];
    blockDim = index[2];
    gridDim = index[3];
#endif
    if (!opt.proxy) return;
    b->view.assign((size_t)(b->tls_hi - b->base), (char)0xff);
    b->seen.assign(smem, smem + b->dynamic_smem);
    b->writer.assign(b->dynamic_smem / WORD + 1, nullptr);
    for (auto &f : b->fibers) f->unpublished.clear();
}

void check_past_dynamic_smem(Block *b) {
    for (size_t i = b->dynamic_smem; i < std::min(SMEM_MAX, b->dynamic_smem + 1024); i++)
        if (smem[i] != 0xA5)
            fail("write past dynamic shared memory: byte %zu of %zu", i, b->dynamic_smem);
}

// Each thread says it where the variable is declared; it counts once.
void static_smem(const void *p, size_t bytes) {
    Block *b = cur.blk;
    if (std::find(b->statics.begin(), b->statics.end(), p) != b->statics.end()) return;
    b->statics.push_back(p);
    b->static_smem += bytes;
    if (b->static_smem > b->static_limit)
        fail("%zu bytes of static shared memory beside %zu dynamic ones; sm_%d has room for %zu",
             b->static_smem, b->dynamic_smem, opt.arch, b->static_limit);
}

uint32_t smem_addr(const void *p) {
    Block *b = cur.blk;
    if ((char *)p < b->tls_lo || (char *)p >= b->tls_hi)
        fail("__cvta_generic_to_shared: %p is not shared memory", p);
    return (uint32_t)((char *)p - b->base);
}

void *smem_ptr(uint32_t a, size_t bytes, const char *what) {
    Block *b = cur.blk;
    char *p = b->base + a, *dynamic = (char *)smem;
    if (p < b->tls_lo || p + bytes > b->tls_hi)
        fail("%s: shared address 0x%x is outside shared memory", what, a);
    if (p >= dynamic && p < dynamic + SMEM_MAX && p + bytes > dynamic + b->dynamic_smem)
        fail("%s: %zu bytes at dynamic shared offset %zd run past the %zu bytes given at launch",
             what, bytes, p - dynamic, b->dynamic_smem);
    return p;
}

// With EMU_PROXY=1 TMA and wgmma see a copy of dynamic shared memory that only fences refresh: what
// a thread wrote without a fence of its own, they do not see. Whose a word is shows by what has
// changed when the thread stops.
char *async_view(uint32_t a, char *p) { return opt.proxy ? cur.blk->view.data() + a : p; }

void note_writes(Fiber *f) {
    Block *b = cur.blk;
    const size_t end = b->seen.size() / WORD * WORD, chunk = 1024;
    Quiet quiet;
    for (size_t i = 0; i < end; i += chunk) {
        if (memcmp(smem + i, b->seen.data() + i, std::min(chunk, end - i)) == 0) continue;
        for (size_t at = i; at < std::min(end, i + chunk); at += WORD) {
            if (memcmp(smem + at, b->seen.data() + at, WORD) == 0) continue;
            memcpy(b->seen.data() + at, smem + at, WORD);
            b->writer[at / WORD] = f;
            f->unpublished.push_back((uint32_t)at);
        }
    }
}

void fence_proxy_async() {
    Block *b = cur.blk;
    Fiber *f = cur.self;
    TSAN(__tsan_release(b->view.data());)
    if (opt.proxy) note_writes(f);
    for (uint32_t at : f->unpublished)
        if (b->writer[at / WORD] == f)
            memcpy(b->view.data() + ((char *)smem - b->base) + at, smem + at, WORD);
    f->unpublished.clear();
    yield_point();
}
}  // namespace emu
