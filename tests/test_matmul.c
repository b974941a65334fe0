// The three products of a linear layer against a naive fp64 triple loop, for every instruction set
// of this CPU, over sizes around the edges of tiles and blocks. Also built with -DGRADCHECK, where
// real is double.
//
// Bound: a sum of n products in any order, every operation rounded, differs from the exact one by
// at most gamma(n) * sum |a||b| with gamma(n) = n u / (1 - n u) (Higham, Accuracy and Stability of
// Numerical Algorithms, section 3.1). Every matrix ends at an inaccessible page and begins after
// NaN words that must not change.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // MAP_ANONYMOUS
#endif
#include "test.h"
#include "../kernels/cpu/common.h"

#include <math.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

// -------------------------------------------------------------------------------------------------
// Matrices between NaN words and an inaccessible page

typedef struct {
    real *p;  // the matrix
    char *pages;
    size_t readable, mapped;  // bytes
} Guarded;

static void fill_nan(real *p, size_t n) { memset(p, 0xff, n * sizeof(real)); }

static Guarded guarded_new(int64_t n) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = (size_t)n * sizeof(real);
    Guarded g = {.readable = (bytes + 64 + page - 1) / page * page};
    g.mapped = g.readable + page;
    g.pages = mmap(NULL, g.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g.pages == MAP_FAILED || mprotect(g.pages + g.readable, page, PROT_NONE) != 0) abort();
    g.p = (real *)(g.pages + g.readable - bytes);
    fill_nan((real *)g.pages, g.readable / sizeof(real));
    return g;
}

static Guarded guarded_uniform(int64_t n) {
    Guarded g = guarded_new(n);
    for (int64_t i = 0; i < n; i++) g.p[i] = (real)(2 * test_rng_uniform() - 1);
    return g;
}

// Frees it. Are the words before the matrix unchanged since guarded_new?
static bool guarded_free(Guarded g) {
    bool intact = true;
    const unsigned char *first = (unsigned char *)g.pages, *end = (unsigned char *)g.p;
    for (const unsigned char *c = first; c < end; c++) intact &= *c == 0xff;
    munmap(g.pages, g.mapped);
    return intact;
}

// -------------------------------------------------------------------------------------------------
// Reference

static double as_bf16(double x)  // round to nearest, ties to even
{
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits += 0x7fff + (bits >> 16 & 1);
    bits &= 0xffff0000u;
    memcpy(&f, &bits, 4);
    return f;
}

static double read_as(real x, int bf16) { return bf16 ? as_bf16(x) : x; }

typedef struct {
    const real *p;
    int64_t row, col;
} Strided;  // (i, k) is p[i * row + k * col]

// c (m, n) against start + A B^T, start NULL: 0. Returns the largest error in units of the bound if
// that is over 1, else 0; a NaN counts as infinite.
static double worst_error(const real *c, const real *start, Strided a, Strided b, int64_t m,
                          int64_t n, int64_t depth, int bf16) {
    double u = sizeof(real) == 8 ? 0x1p-53 : 0x1p-24, worst = 0;
    double gamma = (double)(depth + 1) * u / (1 - (double)(depth + 1) * u);
    if (sizeof(real) == 8) gamma *= 2;  // the reference then rounds as much
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = start ? start[i * n + j] : 0, size = fabs(sum);
            for (int64_t k = 0; k < depth; k++) {
                double x = read_as(a.p[i * a.row + k * a.col], bf16) *
                           read_as(b.p[j * b.row + k * b.col], bf16);
                sum += x;
                size += fabs(x);
            }
            double error = fabs((double)c[i * n + j] - sum);
            if (error <= gamma * size) continue;
            worst = fmax(worst, isfinite(error) ? error / (gamma * size) : INFINITY);
        }
    }
    return worst;
}

// All products at one size.
static void check_products(int64_t T, int64_t K, int64_t N, int bf16) {
    Guarded inp = guarded_uniform(T * K), weight = guarded_uniform(N * K);
    Guarded dout = guarded_uniform(T * N), dweight = guarded_uniform(N * K);
    Guarded out = guarded_new(T * N), dinp = guarded_new(T * K);
    Guarded before = guarded_new(N * K), fresh = guarded_new(N * K), resid = guarded_uniform(T * N),
            sum = guarded_new(T * N);
    memcpy(before.p, dweight.p, (size_t)(N * K) * sizeof(real));

    matmul_forward(out.p, inp.p, weight.p, T, K, N);
    matmul_forward_add(sum.p, resid.p, inp.p, weight.p, T, K, N);
    matmul_backward_input(dinp.p, dout.p, weight.p, T, K, N);
    matmul_backward_weight(dweight.p, dout.p, inp.p, true, T, K, N);
    matmul_backward_weight(fresh.p, dout.p, inp.p, false, T, K, N);

    double forward =
        worst_error(out.p, NULL, (Strided){inp.p, K, 1}, (Strided){weight.p, K, 1}, T, N, K, bf16);
    double forward_add = worst_error(sum.p, resid.p, (Strided){inp.p, K, 1},
                                     (Strided){weight.p, K, 1}, T, N, K, bf16);
    matmul_forward_add(resid.p, resid.p, inp.p, weight.p, T, K, N);
    bool same_in_place = memcmp(resid.p, sum.p, (size_t)(T * N) * sizeof(real)) == 0;
    double backward_input = worst_error(dinp.p, NULL, (Strided){dout.p, N, 1},
                                        (Strided){weight.p, 1, K}, T, K, N, bf16);
    double backward_weight = worst_error(dweight.p, before.p, (Strided){dout.p, 1, N},
                                         (Strided){inp.p, 1, K}, N, K, T, bf16);
    double overwritten = 0;  // T = 0 does nothing
    for (int64_t i = 0; i < N * K && T == 0; i++) overwritten += !isnan(fresh.p[i]);
    if (T > 0)
        overwritten = worst_error(fresh.p, NULL, (Strided){dout.p, 1, N}, (Strided){inp.p, 1, K}, N,
                                  K, T, bf16);
    int intact = guarded_free(inp) + guarded_free(weight) + guarded_free(dout) + guarded_free(out) +
                 guarded_free(dinp) + guarded_free(dweight) + guarded_free(sum) +
                 guarded_free(fresh);
    guarded_free(before), guarded_free(resid);
    CHECK_MSG(forward == 0 && forward_add == 0 && backward_input == 0 && backward_weight == 0 &&
                  overwritten == 0,
              "%s, T %d K %d N %d: forward %.3g, forward_add %.3g, dinp %.3g, dweight %.3g, "
              "overwritten %.3g times the bound",
              matmul_describe(), (int)T, (int)K, (int)N, forward, forward_add, backward_input,
              backward_weight, overwritten);
    CHECK(same_in_place);
    CHECK_MSG(intact == 8, "%s, T %d K %d N %d: words before a matrix changed", matmul_describe(),
              (int)T, (int)K, (int)N);
}

// -------------------------------------------------------------------------------------------------
// Accuracy

// Should this CPU and this build have instruction set `name`?
static bool is_there(const char *name, int bf16) {
#if defined(__x86_64__) && !defined(GRADCHECK)
    if (bf16) return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
    if (strcmp(name, "avx512") == 0) return __builtin_cpu_supports("avx512f");
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return !bf16 && strcmp(name, "portable") == 0;
}

// Selects it, skips the case if it is missing, and checks that nothing else was selected.
static void select_or_skip(const char *name, int bf16) {
    const bool selected = matmul_select(name, bf16);
    CHECK_MSG(selected == is_there(name, bf16), "%s", name);
    if (!selected) SKIP("%s is not available here", name);
    CHECK_MSG(strncmp(matmul_describe(), name, strlen(name)) == 0, "%s, expected %s",
              matmul_describe(), name);
}

// Sizes around the edges of the register tile mr x nr, around the blocks of matmul.c, then any.
static void check_sizes(const char *name, int bf16) {
    select_or_skip(name, bf16);
    int mr, nr;
    CHECK(sscanf(matmul_describe(), "%*s %dx%d", &mr, &nr) == 2);
    int edges[] = {0, 1, 2, 3, mr - 1, mr, mr + 1, 2 * mr + 1, nr - 1, nr, nr + 1, 2 * nr + 1};
    uint32_t num_edges = sizeof(edges) / sizeof(edges[0]);
    for (uint32_t i = 0; i < num_edges; i++) {
        for (uint32_t j = 0; j < num_edges; j++) {
            int any = edges[test_rng_below(num_edges)];
            check_products(edges[i], edges[j], any, bf16);
            check_products(edges[i], any, edges[j], bf16);
            check_products(any, edges[i], edges[j], bf16);
        }
    }
    for (int size = 0; size <= 2 * nr + 1; size++) {
        check_products(size, 5, 7, bf16);
        check_products(6, size, 3, bf16);
        check_products(5, 9, size, bf16);
    }
    int blocks[] = {511, 512, 513, 1025, 2047, 2049, 4101};
    for (int i = 0; i < 7; i++) {
        check_products(blocks[i], 5, 17, bf16);
        check_products(9, blocks[i], 6, bf16);
        check_products(3, 10, blocks[i], bf16);
    }
    for (int i = 0; i < 20; i++)
        check_products(test_rng_below(130), test_rng_below(130), test_rng_below(130), bf16);
}

TEST(portable) { check_sizes("portable", 0); }
TEST(avx2) { check_sizes("avx2", 0); }
TEST(avx512) { check_sizes("avx512", 0); }
TEST(bf16) { check_sizes("avx512_bf16", 1); }
// -------------------------------------------------------------------------------------------------
// Bits

typedef struct {
    const char *name;
    int bf16;
} Choice;
static const Choice choices[] = {
    {"portable", 0},
    {"avx2", 0},
    {"avx512", 0},
    {"avx512_bf16", 1},
};
enum { NUM_CHOICES = sizeof(choices) / sizeof(choices[0]) };

static bool same_bits(const real *a, const real *b, int64_t n) {
    return memcmp(a, b, (size_t)n * sizeof(real)) == 0;
}

TEST(a_row_does_not_depend_on_other_rows) {
    enum { T = 67, K = 1301, N = 131 };
    static const int ranges[][2] = {{0, 1}, {66, 67}, {7, 8}, {5, 40}, {1, 67}, {0, 66}, {8, 16}};
    for (int c = 0; c < NUM_CHOICES; c++) {
        if (!matmul_select(choices[c].name, choices[c].bf16)) continue;
        Guarded inp = guarded_uniform(T * K), weight = guarded_uniform(N * K);
        Guarded dout = guarded_uniform(T * N), out = guarded_new(T * N);
        Guarded dinp = guarded_new(T * K), part = guarded_new(T * K);
        matmul_forward(out.p, inp.p, weight.p, T, K, N);
        matmul_backward_input(dinp.p, dout.p, weight.p, T, K, N);
        bool same = true;
        for (size_t r = 0; r < sizeof(ranges) / sizeof(ranges[0]); r++) {
            int a = ranges[r][0], rows = ranges[r][1] - a;
            matmul_forward(part.p, inp.p + a * K, weight.p, rows, K, N);
            same &= same_bits(part.p, out.p + a * N, rows * N);
            matmul_backward_input(part.p, dout.p + a * N, weight.p, rows, K, N);
            same &= same_bits(part.p, dinp.p + a * K, rows * K);
        }
        guarded_free(inp), guarded_free(weight), guarded_free(dout);
        guarded_free(out), guarded_free(dinp), guarded_free(part);
        CHECK_MSG(same, "%s", matmul_describe());
    }
}

#ifdef _OPENMP
typedef struct {
    Guarded out, dinp, dweight;
} Products;

static Products products_with(int threads, Guarded inp, Guarded weight, Guarded dout, int64_t T,
                              int64_t K, int64_t N) {
    Products p = {guarded_new(T * N), guarded_new(T * K), guarded_new(N * K)};
    memset(p.dweight.p, 0, (size_t)(N * K) * sizeof(real));
    int usual = omp_get_max_threads();
    omp_set_num_threads(threads);
    matmul_forward(p.out.p, inp.p, weight.p, T, K, N);
    matmul_backward_input(p.dinp.p, dout.p, weight.p, T, K, N);
    matmul_backward_weight(p.dweight.p, dout.p, inp.p, true, T, K, N);
    omp_set_num_threads(usual);
    return p;
}

// All products with one thread and with each number of threads from 2 to `threads`.
static void check_thread_counts(int threads, int64_t T, int64_t K, int64_t N) {
    Guarded inp = guarded_uniform(T * K), weight = guarded_uniform(N * K);
    Guarded dout = guarded_uniform(T * N);
    Products one = products_with(1, inp, weight, dout, T, K, N);
    bool same = true;
    for (int t = 2; t <= threads; t++) {
        Products many = products_with(t, inp, weight, dout, T, K, N);
        same &= same_bits(one.out.p, many.out.p, T * N);
        same &= same_bits(one.dinp.p, many.dinp.p, T * K);
        same &= same_bits(one.dweight.p, many.dweight.p, N * K);
        guarded_free(many.out), guarded_free(many.dinp), guarded_free(many.dweight);
    }
    double last_row =
        worst_error(one.out.p + (T - 1) * N, NULL, (Strided){inp.p + (T - 1) * K, K, 1},
                    (Strided){weight.p, K, 1}, 1, N, K, 0);
    guarded_free(one.out), guarded_free(one.dinp), guarded_free(one.dweight);
    guarded_free(inp), guarded_free(weight), guarded_free(dout);
    CHECK_MSG(same, "%s, T %d K %d N %d", matmul_describe(), (int)T, (int)K, (int)N);
    CHECK_MSG(last_row == 0 || strstr(matmul_describe(), "bf16"),
              "%s, last row: %g times the bound", matmul_describe(), last_row);
}

TEST(bits_do_not_depend_on_the_number_of_threads) {
    for (int c = 0; c < NUM_CHOICES; c++) {
        if (!matmul_select(choices[c].name, choices[c].bf16)) continue;
        check_thread_counts(7, 301, 203, 700);
    }
}

TEST(many_blocks_each_way_with_threads) {
    CHECK(matmul_select(NULL, 0));
    check_thread_counts(3, 2060, 1030, 60);  // each product has two of its sizes cut
    check_thread_counts(3, 60, 1030, 2060);  // into blocks in one of these
    check_thread_counts(3, 2060, 60, 2060);
}
#endif

// -------------------------------------------------------------------------------------------------
// Values that are not finite

TEST(nan_and_inf_stay_in_their_row) {
    enum { T = 33, K = 41, N = 37 };
    uint32_t nan_bits = 0x7f800001u;  // a NaN only by bits that bf16 drops
    float low_nan;
    memcpy(&low_nan, &nan_bits, 4);
    for (int c = 0; c < NUM_CHOICES; c++) {
        if (!matmul_select(choices[c].name, choices[c].bf16)) continue;
        real inp[T * K], weight[N * K], out[T * N];
        for (int i = 0; i < T * K; i++) inp[i] = 1;
        for (int i = 0; i < N * K; i++) weight[i] = 1;
        inp[7 * K + 40] = low_nan;
        inp[20 * K + 3] = INFINITY;
        weight[5 * K + 3] = 0;
        matmul_forward(out, inp, weight, T, K, N);
        for (int t = 0; t < T; t++) {
            for (int n = 0; n < N; n++) {
                real x = out[t * N + n];
                bool right = x == K - (n == 5);
                if (t == 20) right = n == 5 ? isnan(x) : isinf(x) && x > 0;  // inf * 0 is NaN
                if (t == 7) right = isnan(x);
                CHECK_MSG(right, "%s: out[%d][%d] is %g", matmul_describe(), t, n, (double)x);
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// The choice

TEST(select) {
    CHECK(matmul_select(NULL, 0));
    CHECK(matmul_select("portable", 0));
    CHECK(!matmul_select("no-such", 0));
    CHECK(!matmul_select("portable", 1));
    CHECK_MSG(strncmp(matmul_describe(), "portable", 8) == 0,
              "a refused choice must leave the old one, not %s", matmul_describe());
}

TEST_MAIN()
