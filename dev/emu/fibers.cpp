// CUDA threads as fibers: one stack each, a switch of fifteen instructions on x86-64.
#include "engine.h"

#include <sys/mman.h>
#if !defined(__x86_64__) || defined(EMU_UCONTEXT)
#include <ucontext.h>
#define PORTABLE 1
#endif

namespace emu {
#if defined(ASAN) || defined(EMU_TSAN)
constexpr size_t STACK = 256 << 10;
#else
constexpr size_t STACK = 64 << 10;
#endif
constexpr size_t PAGE = 4096;

#if !defined(PORTABLE)
extern "C" void emu_switch(void **save, void *load);
asm(R"(.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
#else
// For other CPUs; many times slower, because every switch saves the signal mask by system call.
static void emu_switch(void **save, void *load) {
    ucontext_t u;
    *save = &u;
    swapcontext(&u, (ucontext_t *)load);
}
#endif

void to_fiber(Block *b, Fiber *f) {
    threadIdx = f->tid;
    cur.self = f;
    f->state = RUNNING;
    b->stats.switches++;
#if defined(ASAN)
    __sanitizer_start_switch_fiber(&b->asan_stack, f->stack, STACK);
#endif
    TSAN(__tsan_switch_to_fiber(f->tsan, 1);)
    emu_switch(&b->sched_sp, f->sp);
#if defined(ASAN)
    __sanitizer_finish_switch_fiber(b->asan_stack, nullptr, nullptr);
#endif
    cur.self = nullptr;
}

// In order, the next thread is known: switch to it without a detour through the scheduler.
static bool to_next_fiber(Fiber *f) {
#if !defined(ASAN) && !defined(EMU_TSAN) && !defined(PORTABLE)
    Block *b = cur.blk;
    if (opt.sched != FIFO || b->head >= b->ready.size() || b->head >= 4096) return false;
    Fiber *next = b->ready[b->head++];
    next->state = RUNNING;
    if (next == f) return true;
    threadIdx = next->tid;
    cur.self = next;
    b->stats.switches++;
    emu_switch(&f->sp, next->sp);
    return true;
#else
    (void)f;
    return false;
#endif
}

void to_sched(Fiber *f) {
    if (opt.proxy) note_writes(f);
    if (to_next_fiber(f)) return;
    Block *b = cur.blk;
#if defined(ASAN)
    __sanitizer_start_switch_fiber(&f->asan_stack, b->os_bottom, b->os_size);
#endif
    TSAN(__tsan_switch_to_fiber(b->tsan_main, 1);)
    emu_switch(&f->sp, b->sched_sp);
#if defined(ASAN)
    __sanitizer_finish_switch_fiber(f->asan_stack, &b->os_bottom, &b->os_size);
#endif
}

// A fiber outlives its CUDA thread: the next block gives it another one.
static void fiber_main() {
#if defined(ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &cur.blk->os_bottom, &cur.blk->os_size);
#endif
    for (;;) {
        Fiber *f = cur.self;
        Block *b = cur.blk;
        TSAN(__tsan_acquire(&b->tsan_start);)
        b->call(b->context);
        TSAN(__tsan_release(&b->tsan_end);)
        thread_exit(f);
        f->state = DONE;
        to_sched(f);
    }
}

// A page below the stack may not be touched: overflow is a fault, not a corrupted neighbour.
void make_fiber(Fiber *f) {
    char *m = (char *)mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m == MAP_FAILED) fail("no memory for the stacks of CUDA threads");
    mprotect(m, PAGE, PROT_NONE);
    f->stack = m + PAGE;
    f->stack_end = f->stack + STACK;
#if !defined(PORTABLE)
    // Stacks of neighbours start at different offsets, else they would share cache sets
    char *top = f->stack + STACK - 64 * (f->index % 32) - 16;
    void **s = (void **)((uintptr_t)top & ~(uintptr_t)15);
    *--s = nullptr;
    *--s = (void *)fiber_main;  // the return address leaves rsp = 8 mod 16, as at any entry
    for (int i = 0; i < 6; i++) *--s = nullptr;
    f->sp = s;
#else
    ucontext_t *u = new ucontext_t;
    getcontext(u);
    u->uc_stack.ss_sp = f->stack;
    u->uc_stack.ss_size = STACK;
    u->uc_link = nullptr;
    makecontext(u, fiber_main, 0);
    f->sp = u;
#endif
    TSAN(f->tsan = __tsan_create_fiber(0);)
}
}  // namespace emu
