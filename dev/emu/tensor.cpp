// ldmatrix, mma.sync and wgmma: the documented layouts of fragments, descriptors and swizzles.
#include "engine.h"

namespace emu {
static float from_bf16(uint16_t h) { return bits<float>((uint32_t)h << 16); }
static float low(uint32_t v) { return from_bf16((uint16_t)v); }
static float high(uint32_t v) { return from_bf16((uint16_t)(v >> 16)); }

static float toward_zero(double x) {
    float f = (float)x;
    return std::fabs((double)f) > std::fabs(x) ? std::nextafterf(f, 0.0f) : f;
}

// The hardware unit flushes subnormals, in and out.
float ex2(float x) {
    float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

// EMU_FAST_MATH=1: as far off as CUDA's programming guide allows __expf, 2 + 1.173 |x| ulp, up or
// down by the bits of x; of 0 it is 1, as the PTX manual promises.
float expf_of_a_gpu(float x) {
    const float y = expf(x);
    if (!opt.fast_math || x == 0 || !(fabsf(x) < 87)) return y;
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    const float error = (2 + floorf(1.173f * fabsf(x))) * ldexpf(1, ilogbf(y) - 23);
    return splitmix(bits) & 1 ? y + error : y - error;
}

// ---- ldmatrix -----------------------------------------------------------------------------------

struct LdArg {
    uint32_t *r;
    uint32_t addr;
};

template <int N, bool TRANS>
static void fn_ldmatrix(void **slot, uint32_t) {
    cur.blk->stats.ldmatrix++;
    for (int m = 0; m < N; m++) {
        const uint16_t *row[8];
        uint32_t banks = 0;
        for (int i = 0; i < 8; i++) {
            uint32_t a = ((LdArg *)slot[m * 8 + i])->addr;
            if (a & 15)
                fail("ldmatrix row address 0x%x (lane %d) is not 16-byte aligned", a, m * 8 + i);
            row[i] = (const uint16_t *)smem_ptr(a, 16, "ldmatrix");
            banks |= 1u << (a >> 4 & 7);
            TSAN(__tsan_read_range((void *)row[i], 16);)
        }
        cur.blk->stats.ldmatrix_conflicts += banks != 0xff;
        for (int l = 0; l < 32; l++) {
            int g = l >> 2, t = (l & 3) * 2;
            uint32_t first = TRANS ? row[t][g] : row[g][t];
            uint32_t second = TRANS ? row[t + 1][g] : row[g][t + 1];
            ((LdArg *)slot[l])->r[m] = first | second << 16;
        }
    }
}

void ldmatrix(uint32_t *r, int n, bool trans, uint32_t addr, const char *file, int line) {
    LdArg a{r, addr};
    CollFn fn = n == 4   ? (trans ? fn_ldmatrix<4, true> : fn_ldmatrix<4, false>)
                : n == 2 ? (trans ? fn_ldmatrix<2, true> : fn_ldmatrix<2, false>)
                         : (trans ? fn_ldmatrix<1, true> : fn_ldmatrix<1, false>);
    warp_coll(~0u, fn, trans ? "ldmatrix.trans" : "ldmatrix", &a, file, line, true);
}

// ---- Products of 16 rows, 16 deep ---------------------------------------------------------------
// EMU_EXACT=1: rounded bit for bit as the tensor cores of EMU_ARCH round, for which
// dev/results/witnesses has two models that are not ours and samples of GPUs.

// So many products and the accumulator are one sum: its terms are cut to a grid of so many bits
// below the largest exponent among them, added exactly, and the sum is cut to fp32.
struct Rounding {
    int terms, fraction_bits;
};
void exact_tensor_cores(int arch) { opt.exact = 1, opt.arch = arch; }
static Rounding tensor_core() { return opt.arch < 90 ? Rounding{8, 24} : Rounding{16, 25}; }

static int exponent(float x) { return std::max((int)(bits<uint32_t>(x) >> 23 & 255), 1) - 127; }

template <int COLS>
static float fused_sum(float c, const float *a, const float (*b)[COLS], int col, Rounding r) {
    double terms[17] = {c}, plain = c, sum = 0;
    int top = c != 0 ? exponent(c) : -108 - r.fraction_bits;  // a zero counts as so small
    for (int k = 0; k < r.terms; k++) {
        terms[k + 1] = (double)a[k] * b[k][col];
        plain += terms[k + 1];
        if (terms[k + 1] != 0) top = std::max(top, exponent(a[k]) + exponent(b[k][col]));
    }
    if (std::isnan(plain)) return bits<float>(0x7fffffffu);
    if (std::isinf(plain)) return (float)plain;
    const double grid = std::ldexp(1, top - r.fraction_bits), per_grid = 1 / grid;
    for (int k = 0; k <= r.terms; k++) sum += (double)(int64_t)(terms[k] * per_grid);
    sum *= grid;
    return std::fabs(sum) < 0x1p128 ? toward_zero(sum) + 0.0f : (float)sum;  // never -0
}

// Of arrays of constant size, and most of the time: not sanitized
template <int COLS>
__attribute__((no_sanitize("address", "undefined"))) static void multiply_16x16(
    float (*d)[COLS], const float (*a)[16], const float (*b)[COLS], int cols) {
    const Rounding r = tensor_core();
    for (int i = 0; i < 16; i++) {
        if (opt.exact)
            for (int k = 0; k < 16; k += r.terms)
                for (int j = 0; j < cols; j++) d[i][j] = fused_sum(d[i][j], a[i] + k, b + k, j, r);
        else
            for (int k = 0; k < 16; k++)
                for (int j = 0; j < cols; j++) d[i][j] += a[i][k] * b[k][j];
    }
}

// One lane's part of a 16 x 16 A fragment: rows g and g + 8, columns t.. and t + 8..
static void unpack_a(float (*a)[16], int lane, const uint32_t *r) {
    int g = lane >> 2, t = (lane & 3) * 2;
    for (int i = 0; i < 4; i++) {
        int row = g + (i & 1) * 8, k = t + (i >> 1) * 8;
        a[row][k] = low(r[i]);
        a[row][k + 1] = high(r[i]);
    }
}

struct MmaArg {
    float *d;
    const uint32_t *a, *b;
};

static void fn_mma(void **slot, uint32_t) {
    cur.blk->stats.mma++;
    float A[16][16], B[16][8], D[16][8];
    for (int l = 0; l < 32; l++) {
        MmaArg *x = (MmaArg *)slot[l];
        int g = l >> 2, t = (l & 3) * 2;
        unpack_a(A, l, x->a);
        for (int i = 0; i < 2; i++) {
            B[t + i * 8][g] = low(x->b[i]);
            B[t + 1 + i * 8][g] = high(x->b[i]);
        }
        for (int i = 0; i < 4; i++) D[g + (i >> 1) * 8][t + (i & 1)] = x->d[i];
    }
    multiply_16x16<8>(D, A, B, 8);
    for (int l = 0; l < 32; l++) {
        MmaArg *x = (MmaArg *)slot[l];
        int g = l >> 2, t = (l & 3) * 2;
        for (int i = 0; i < 4; i++) x->d[i] = D[g + (i >> 1) * 8][t + (i & 1)];
    }
}

void mma16816(float *d, const uint32_t *a, const uint32_t *b, const char *file, int line) {
    MmaArg x{d, a, b};
    warp_coll(~0u, fn_mma, "mma.sync", &x, file, line, true);
}

// ---- wgmma: operands through descriptors --------------------------------------------------------

// Shared address of element (mn, k) before swizzling. Fields of a descriptor, in units of 16 bytes:
// start [13:0], leading offset LBO [29:16], stride offset SBO [45:32], swizzle mode [63:62].
static uint32_t operand_address(uint64_t d, int mn, int k, bool mn_major) {
    uint32_t start = (uint32_t)(d & 0x3fff) << 4, lbo = (uint32_t)(d >> 16 & 0x3fff) << 4,
             sbo = (uint32_t)(d >> 32 & 0x3fff) << 4;
    uint32_t m = (uint32_t)mn, kk = (uint32_t)k;
    int mode = (int)(d >> 62);
    uint32_t width = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16, elements = width / 2;
    if (!mn_major && mode) return start + m % 8 * width + m / 8 * sbo + kk * 2;
    if (!mn_major) return start + m % 8 * 16 + m / 8 * sbo + kk / 8 * lbo + kk % 8 * 2;
    if (mode) return start + m / elements * lbo + m % elements * 2 + kk % 8 * width + kk / 8 * sbo;
    return start + m / 8 * sbo + m % 8 * 2 + kk % 8 * 16 + kk / 8 * lbo;
}

// Elements [first, first + count) of all 16 k, of which eight lie together, in whichever direction:
// (mn, k) to to[(mn - first) * mn_step + k * k_step]
static void read_operand(uint64_t d, int first, int count, bool mn_major, float *to, int mn_step,
                         int k_step) {
    for (int mn = 0; mn < count; mn += mn_major ? 8 : 1)
        for (int k = 0; k < 16; k += mn_major ? 1 : 8) {
            uint16_t v[8];
            uint32_t a = swizzle(operand_address(d, first + mn, k, mn_major), (int)(d >> 62));
            char *p = (char *)smem_ptr(a, sizeof v, "wgmma operand");
            TSAN(__tsan_read_range(p, sizeof v);)
            memcpy(v, async_view(a, p), sizeof v);
            for (int i = 0; i < 8; i++)
                to[mn * mn_step + k * k_step + i * (mn_major ? mn_step : k_step)] = from_bf16(v[i]);
        }
}
static void read_operands(const WgOp &o, int warp) {
    Block *b = cur.blk;
    read_operand(o.db, 0, o.n, o.tb, b->wg_b[0], 1, (int)std::size(b->wg_b[0]));
    if (!o.rs) read_operand(o.da, (warp & 3) * 16, 16, o.ta, b->wg_a[0], 16, 1);
}

// For ThreadSanitizer: what this warp's quarter will read, seen from the moment of issue.
static void touch_operands(const WgOp &o, int warp) {
    (void)o, (void)warp;
    TSAN(Async context(my_warp(), true, "wgmma", o.file, o.line); read_operands(o, warp);)
}

static void do_wgmma(const WgOp &o, int warp) {
    Async context(my_warp(), false, "wgmma", o.file, o.line);
    Block *b = cur.blk;
    int N = o.n;
    read_operands(o, warp);
    for (int l = 0; l < 32; l++) {
        int g = l >> 2, t = (l & 3) * 2;
        if (o.rs) unpack_a(b->wg_a, l, o.a[l]);
        for (int i = 0; i < N / 2; i++)
            b->wg_d[g + (i >> 1 & 1) * 8][i / 4 * 8 + t + (i & 1)] = o.scale ? o.d[l][i] : 0.0f;
    }
    multiply_16x16<256>(b->wg_d, b->wg_a, b->wg_b, N);
    for (int l = 0; l < 32; l++) {
        int g = l >> 2, t = (l & 3) * 2;
        for (int i = 0; i < N / 2; i++)
            o.d[l][i] = b->wg_d[g + (i >> 1 & 1) * 8][i / 4 * 8 + t + (i & 1)];
    }
}

// ---- wgmma: issue, and the rules that a GPU does not check --------------------------------------

struct WgArg {
    WgOp op;
    float *d;
    const uint32_t *a;
};

static void check_descriptor(const WgOp &o, uint64_t d, char which) {
    uint32_t start = (uint32_t)(d & 0x3fff) << 4;
    if (d >> 49 & 7) fail("%s:%d wgmma: base_offset is not emulated", o.file, o.line);
    if (d >> 62 == 1 && (start & 0x380))
        fail("%s:%d wgmma: 128B-swizzle operand %c starts off the 1024-byte pattern (0x%x)", o.file,
             o.line, which, start);
}

// The four warps of a warpgroup issue the same sequence; each is compared with the first one.
static void check_warpgroup(const WgOp &o, int warp) {
    Block *b = cur.blk;
    if (b->n < (warp / 4 + 1) * 128)
        fail("%s:%d wgmma: warp %d has no complete warpgroup", o.file, o.line, warp);
    std::vector<WgSignature> &issued = b->wg_signatures[(size_t)warp / 4];
    WgSignature mine{o.da, o.db, o.n, o.ta | o.tb << 1 | o.rs << 2 | o.scale << 3, o.line};
    Warp *w = b->warps[(size_t)warp].get();
    if (w->wg_issued < issued.size()) {
        WgSignature &first = issued[w->wg_issued];
        if (first.da != mine.da || first.db != mine.db || first.n != mine.n ||
            first.flags != mine.flags)
            fail(
                "%s:%d wgmma: warp %d issues another operation than an earlier warp of its "
                "warpgroup (line %d)",
                o.file, o.line, warp, first.line);
    } else {
        issued.push_back(mine);
    }
    w->wg_issued++;
    bool all = true;
    Warp *group[4];
    for (int i = 0; i < 4; i++) {
        group[i] = b->warps[(size_t)(warp / 4 * 4 + i)].get();
        all &= group[i]->wg_issued == issued.size();
    }
    if (!all) return;
    issued.clear();
    for (Warp *member : group) member->wg_issued = 0;
}

static WgOp gather(void **slot) {
    Quiet quiet;
    int warp = cur.self->warp;
    Warp *w = my_warp();
    WgOp o = ((WgArg *)slot[0])->op;
    for (int l = 0; l < 32; l++) {
        WgArg *x = (WgArg *)slot[l];
        if (x->op.da != o.da || x->op.db != o.db || x->op.scale != o.scale)
            fail("%s:%d wgmma: descriptors differ between the lanes of a warp", o.file, o.line);
        o.d[l] = x->d;
        if (o.rs) memcpy(o.a[l], x->a, sizeof o.a[l]);
    }
    if (!w->wg_fence)
        fail(
            "%s:%d wgmma.mma_async without a preceding wgmma.fence since the accumulators were "
            "last accessible",
            o.file, o.line);
    if (!o.rs) check_descriptor(o, o.da, 'A');
    check_descriptor(o, o.db, 'B');
    check_warpgroup(o, warp);
    o.group = w->wg_groups;
    cur.blk->stats.wgmma++;
    return o;
}

static void fn_wgmma(void **slot, uint32_t) {
    WgOp o = gather(slot);
    Warp *w = my_warp();
    int warp = cur.self->warp;
    touch_operands(o, warp);
    bool now = opt.async == EAGER || (opt.async == EITHER && (rnd(cur.blk) & 1) && w->wg.empty());
    if (now) {
        do_wgmma(o, warp);
    } else {
        Quiet quiet;
        w->wg.push_back(o);
    }
}

// Registers of A lie on the thread's stack: what it held at the fence is kept, and an operand that
// differs was written after it. (Sanitizers have a stack of their own.)
static void remember_registers() {
#if !defined(ASAN) && !defined(EMU_TSAN)
    Fiber *f = cur.self;
    f->fenced_from = (char *)__builtin_frame_address(0);
    f->fenced.assign(f->fenced_from, f->stack_end);
#endif
}

static void check_registers(const uint32_t *a, const char *file, int line) {
    const Fiber *f = cur.self;
    const char *at = (const char *)a;
    if (f->fenced.empty() || at < f->fenced_from || at >= f->stack_end) return;
    if (memcmp(at, f->fenced.data() + (at - f->fenced_from), 4 * sizeof *a) != 0)
        fail("%s:%d wgmma.mma_async: registers of A were written after the last wgmma.fence", file,
             line);
}

void wgmma(float *d, int n, const uint32_t *a_registers, uint64_t da, uint64_t db, int scale_d,
           bool ta, bool tb, const char *file, int line) {
    WgArg x;
    if (a_registers) check_registers(a_registers, file, line);
    x.op.n = n;
    x.op.scale = scale_d != 0;
    x.op.ta = ta;
    x.op.tb = tb;
    x.op.rs = a_registers != nullptr;
    x.op.da = da;
    x.op.db = db;
    x.op.file = file;
    x.op.line = line;
    x.d = d;
    x.a = a_registers;
    warp_coll(~0u, fn_wgmma, "wgmma.mma_async", &x, file, line, true);
}

static void fn_fence(void **, uint32_t) { my_warp()->wg_fence = true; }
static void fn_commit(void **, uint32_t) { my_warp()->wg_groups++; }
static void fn_wait(void **slot, uint32_t) {
    Warp *w = my_warp();
    int n = *(int *)slot[0];
    size_t done = 0;
    for (; done < w->wg.size() && w->wg[done].group < w->wg_groups - n; done++)
        do_wgmma(w->wg[done], cur.self->warp);
    Quiet quiet;
    w->wg.erase(w->wg.begin(), w->wg.begin() + (ptrdiff_t)done);
    if (n != 0) return;
    w->wg_fence = false;
    if (!w->wg.empty())
        fail("wgmma_wait<0> with uncommitted wgmma from %s:%d", w->wg[0].file, w->wg[0].line);
}
void wgmma_fence(const char *file, int line) {
    remember_registers();
    warp_coll(~0u, fn_fence, "wgmma.fence", nullptr, file, line, true);
}
void wgmma_commit(const char *file, int line) {
    warp_coll(~0u, fn_commit, "wgmma.commit_group", nullptr, file, line, true);
}
void wgmma_wait(int n, const char *file, int line) {
    warp_coll(~0u, fn_wait, "wgmma.wait_group", &n, file, line, true);
    async_done();
}

// Registers are only counted: what the warps of a block take must have been released by others.
static void fn_setmaxnreg(void **slot, uint32_t) {
    Warp *w = my_warp();
    const int n = *(int *)slot[0];
    cur.blk->registers_free += 32 * (w->registers - n);
    w->registers = n;
}
void setmaxnreg(int n, bool increase, const char *file, int line) {
    if (n % 8 || n < 24 || n > 256 || increase != (n > my_warp()->registers))
        fail("%s:%d setmaxnreg %d of %d registers", file, line, n, my_warp()->registers);
    warp_coll(~0u, fn_setmaxnreg, "setmaxnreg", &n, file, line, true);
}
}  // namespace emu
