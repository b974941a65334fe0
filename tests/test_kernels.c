// The small operations of kernels.h against plain fp64 formulas; with -DGRADCHECK in double against
// central differences. Attention and matmul have their own suites.
#include "../kernels/comm/comm.h"
#include "../kernels/kernels.h"

#include <math.h>
#include <omp.h>
#include <time.h>

#include "test.h"

static floatX *random_floats(size_t n, double scale, double offset) {
    floatX *x = (floatX *)device_malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = (floatX)(scale * test_rng_normal() + offset);
    return x;
}

static real *zeros(size_t n) {
    real *x = (real *)device_malloc(n * sizeof *x);
    device_zero(x, n * sizeof *x);
    return x;
}

// ------------------------------------------------------------------------------------------------

#ifndef GRADCHECK

// The time between two marks; the marks do not wait.
TEST(timer_is_within_the_clock) {
    const uint64_t waits = device_memory().waits;
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    device_timer_start();
    device_free(random_floats(100000, 1, 0));
    device_timer_stop();
    CHECK(device_memory().waits == waits);
    device_synchronize();
    clock_gettime(CLOCK_MONOTONIC, &b);
    const double clock_ms =
        (double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) * 1e-6;
    const double ms = (double)device_timer_ms();
    CHECK_MSG(ms > 0 && ms <= clock_ms + 1e-3, "%g ms of %g", ms, clock_ms);
    CHECK(device_memory().waits == waits + 1);
}

static const double UNIT = 0x1p-24;  // half an ulp of 1

static bool near(double got, double expected, double bound) {
    return fabs(got - expected) <= bound;
}

enum { SIZES = 5 };
static const int sizes_T[SIZES] = {0, 1, 3, 17, 64}, sizes_C[SIZES] = {8, 1, 16, 33, 576};

static void check_rmsnorm(int T, int C) {
    const float eps = 1e-5f;
    size_t n = (size_t)T * (size_t)C;
    floatX *resid = random_floats(n, 1, 0.5), *w = random_floats((size_t)C, 0.3, 1),
           *normed = random_floats(n, 1, 0);
    real *rstd = zeros((size_t)T + 1);
    rmsnorm_forward(normed, rstd, resid, w, eps, T, C);
    for (int t = 0; t < T; t++) {
        double sum = 0;
        for (int c = 0; c < C; c++) sum += pow((double)resid[t * C + c], 2);
        double s = 1 / sqrt(sum / C + (double)eps);
        CHECK_MSG(near((double)rstd[t], s, 8 * UNIT * s), "rstd %g %g", (double)rstd[t],
                  s);  // sum of positives
        for (int c = 0; c < C; c++) {
            double y = (double)resid[t * C + c] * s * (double)w[c];
            CHECK_MSG(near((double)normed[t * C + c], y, 12 * UNIT * fabs(y)), "%g %g",
                      (double)normed[t * C + c], y);
        }
    }
    void *all[] = {resid, w, normed, rstd};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) device_free(all[i]);
}

TEST(rmsnorm_forward_matches_formula) {
    for (int i = 0; i < SIZES; i++)
        for (int j = 0; j < SIZES; j++) check_rmsnorm(sizes_T[i], sizes_C[j]);
}

TEST(swiglu_forward_matches_formula) {
    const int T = 7, F = 45;
    floatX *gu = random_floats((size_t)T * 2 * F, 4, 0), *out = random_floats((size_t)T * F, 1, 0);
    gu[0] = -200, gu[1] = 200, gu[2] = 0, gu[3] = -87.3f;
    swiglu_forward(out, gu, T, F);
    for (int t = 0; t < T; t++)
        for (int f = 0; f < F; f++) {
            double g = (double)gu[2 * t * F + f], u = (double)gu[(2 * t + 1) * F + f],
                   y = g / (1 + exp(-g)) * u;
            CHECK_MSG(near((double)out[t * F + f], y, 16 * UNIT * fabs(y) + 1e-35),
                      "gate %g: %g, expected %g", g, (double)out[t * F + f], y);
        }
    device_free(gu);
    device_free(out);
}

TEST(swiglu_propagates_nan) {
    floatX *gu = random_floats(2 * 40, 1, 0), *out = random_floats(40, 1, 0);
    gu[7] = NAN, gu[40 + 9] = NAN;
    swiglu_forward(out, gu, 1, 40);
    for (int f = 0; f < 40; f++) CHECK(isnan((double)out[f]) == (f == 7 || f == 9));
    device_free(gu);
    device_free(out);
}

static double reference_loss(const floatX *x, int target, int V) {
    double max = -INFINITY, sum = 0;
    for (int v = 0; v < V; v++) max = fmax(max, (double)x[v]);
    for (int v = 0; v < V; v++) sum += exp((double)x[v] - max);
    return log(sum) + max - (double)x[target];
}

static void check_cross_entropy(int V, double scale) {
    const int T = 6;
    floatX *x = random_floats((size_t)T * (size_t)V, scale, 1);
    floatX *before = random_floats((size_t)T * (size_t)V, 1, 0);
    int32_t targets[6] = {0, -1, V - 1, V / 2, -1, V / 3};
    real *losses = zeros(T), *losses2 = zeros(T);
    const real loss_scale = 0.25f;
    memcpy(before, x, (size_t)T * (size_t)V * sizeof *x);
    cross_entropy_forward(losses, x, targets, T, V);
    CHECK(memcmp(before, x, (size_t)T * (size_t)V * sizeof *x) == 0);
    cross_entropy_forward_backward(losses2, x, targets, &loss_scale, T, V);
    CHECK(memcmp(losses, losses2, (size_t)T * sizeof *losses) == 0);
    for (int t = 0; t < T; t++) {
        double loss = targets[t] < 0 ? 0 : reference_loss(before + t * V, targets[t], V),
               largest = 0;
        for (int v = 0; v < V; v++) largest = fmax(largest, fabs((double)before[t * V + v]));
        // rounding of the logits' difference and of a sum of V positive terms in 16 lanes
        double bound = UNIT * (4 * largest + V / 16.0 + 16);
        CHECK_MSG(near((double)losses[t], loss, bound), "loss %g, expected %g", (double)losses[t],
                  loss);
        for (int v = 0; v < V; v++) {
            double p = targets[t] < 0 ? 0 : exp(-reference_loss(before + t * V, v, V));
            double d = targets[t] < 0 ? 0 : 0.25 * (p - (v == targets[t]));
            CHECK_MSG(near((double)x[t * V + v], d, 0.25 * bound * p + UNIT),
                      "dlogit %g, expected %g", (double)x[t * V + v], d);
        }
    }
    device_free(x);
    device_free(before);
    device_free(losses);
    device_free(losses2);
}

TEST(cross_entropy_matches_formula) {
    const int vocabs[] = {1, 2, 15, 16, 17, 97, 1000};
    for (int i = 0; i < 7; i++)
        for (double scale = 1; scale < 100; scale *= 6) check_cross_entropy(vocabs[i], scale);
}

TEST(cross_entropy_of_nan_is_nan) {
    floatX *x = random_floats(50, 1, 0);
    real *loss = zeros(1);
    int32_t target = 3;
    x[20] = NAN;
    cross_entropy_forward(loss, x, &target, 1, 50);
    CHECK(isnan((double)loss[0]));
    device_free(x);
    device_free(loss);
}

TEST(embedding_and_its_backward) {
    enum { T = 200, V = 13, C = 24 };
    floatX *w = random_floats(V * C, 1, 0), *out = random_floats(T * C, 1, 0),
           *dout = random_floats(T * C, 1, 0);
    real *dw = zeros(V * C);
    double expected[V * C] = {0}, magnitude[V * C] = {0};
    int32_t tokens[T], order[T], n = 0;
    for (int t = 0; t < T; t++) tokens[t] = (int32_t)test_rng_below(V);
    int count[V] = {0};
    for (int v = 0; v < V; v++)
        for (int t = 0; t < T; t++)
            if (tokens[t] == v) order[n++] = t, count[v]++;
    embedding_forward(out, tokens, w, T, C);
    embedding_backward(dw, dout, tokens, order, T, C);
    embedding_backward(dw, dout, tokens, order, T, C);  // += : twice is double
    for (int t = 0; t < T; t++)
        for (int c = 0; c < C; c++) {
            CHECK(out[t * C + c] == w[tokens[t] * C + c]);
            expected[tokens[t] * C + c] += 2 * (double)dout[t * C + c];
            magnitude[tokens[t] * C + c] += 2 * fabs((double)dout[t * C + c]);
        }
    // n additions in fp32, in any order: n units of the sum of magnitudes (Higham, section 4.2)
    for (int i = 0; i < V * C; i++)
        CHECK(near((double)dw[i], expected[i], 2 * count[i / C] * UNIT * magnitude[i]));
    device_free(w), device_free(out), device_free(dout), device_free(dw);
}

TEST(gather_then_scatter) {
    enum { T = 9, C = 5, N = 4 };
    const int32_t rows[N] = {0, 3, 4, 8};
    floatX *x = random_floats(T * C, 1, 0), *g = random_floats(N * C, 1, 0),
           *s = random_floats(T * C, 1, 0);
    gather_rows(g, x, rows, N, C);
    scatter_rows(s, g, rows, N, T, C);
    for (int t = 0, i = 0; t < T; t++) {
        bool real_row = i < N && rows[i] == t;
        for (int c = 0; c < C; c++) CHECK(s[t * C + c] == (real_row ? x[t * C + c] : 0));
        i += real_row;
    }
    device_free(x), device_free(g), device_free(s);
}

// Tokens at these positions of texts that lie one after another in the cache, in any order; stored,
// then attended to.
static void check_decode(HeadShape heads, const int32_t *lengths, int num_texts) {
    enum { MAX_TEXTS = 8 };
    const int D = heads.head_dim, H = heads.num_heads, Hkv = heads.num_kv_heads, G = H / Hkv;
    const int width = (H + 2 * Hkv) * D, row = 2 * Hkv * D;
    int32_t first[MAX_TEXTS], positions[MAX_TEXTS], rows = 3;
    for (int t = 0; t < num_texts; rows += lengths[t++]) {
        first[num_texts - 1 - t] = rows;
        positions[num_texts - 1 - t] = lengths[t] - 1;
    }
    floatX *cache = random_floats((size_t)(rows + 2) * (size_t)row, 1, 0.2);
    floatX *before = random_floats((size_t)(rows + 2) * (size_t)row, 1, 0);
    floatX *qkv = random_floats((size_t)(num_texts * width), 1.5, 0.1);
    floatX *out = random_floats((size_t)(num_texts * H * D), 1, 0);
    for (int i = 0; i < (rows + 2) * row; i++) before[i] = cache[i];
    kv_store(cache, qkv, first, positions, num_texts, heads);
    for (int t = 0; t < num_texts; t++)
        for (int i = 0; i < row; i++)
            before[(first[t] + positions[t]) * row + i] = qkv[t * width + H * D + i];
    CHECK(memcmp(cache, before, (size_t)((rows + 2) * row) * sizeof(floatX)) == 0);
    attention_decode(out, qkv, cache, first, positions, num_texts, heads);
    for (int item = 0; item < num_texts * H; item++) {
        const int t = item / H, h = item % H, n = positions[t] + 1;
        const floatX *q = qkv + t * width + h * D, *k = cache + first[t] * row + h / G * D;
        double score[1000], top = -INFINITY, error = 0, sum = 0;
        for (int j = 0; j < n; j++) {
            double dot = 0, size = 0;
            for (int d = 0; d < D; d++) {
                dot += (double)q[d] * (double)k[j * row + d];
                size += fabs((double)q[d] * (double)k[j * row + d]);
            }
            score[j] = dot / sqrt(D);
            top = fmax(top, score[j]);
            error = fmax(error, (D + 6) * UNIT * size / sqrt(D));  // of a score
        }
        for (int j = 0; j < n; j++) sum += score[j] = exp(score[j] - top);
        // weights and their sum: exp of two scores and their difference, exp_fast, alphas, n sums
        const double relative = 6 * error + (2 * n + 40) * UNIT;
        for (int d = 0; d < D; d++) {
            double expected = 0, size = 0;
            for (int j = 0; j < n; j++) {
                const double v = (double)k[j * row + Hkv * D + d];
                expected += score[j] / sum * v;
                size += score[j] / sum * fabs(v);
            }
            CHECK_MSG(near((double)out[item * D + d], expected, relative * size),
                      "%d/%d x %d, token %d of %d keys, head %d: %g, not %g", H, Hkv, D, t, n, h,
                      (double)out[item * D + d], expected);
        }
    }
    device_free(cache), device_free(before), device_free(qkv), device_free(out);
}

TEST(attention_decode) {
    const int32_t lengths[] = {1, 2, 63, 64, 65, 200, 333, 7};
    const HeadShape shapes[] = {{9, 3, 64}, {2, 2, 6}, {5, 1, 34}, {4, 2, 128}};
    for (int i = 0; i < 4; i++)
        for (int n = 0; n <= 8; n += i == 0 ? 1 : 8) check_decode(shapes[i], lengths, n);
}

TEST(global_norm_and_clip_scale) {
    const size_t n = 100003;
    real *x = zeros(n);
    double sum = 0, got = 1.5;
    for (size_t i = 0; i < n; i++)
        x[i] = (real)test_rng_normal(), sum += (double)x[i] * (double)x[i];
    global_norm_squared(&got, x, n);
    // squares of floats are exact in fp64; the two sums of n of them add in different orders
    CHECK(near(got, sum + 1.5, 2 * (double)n * 0x1p-53 * sum));
    StepScalars s = {1, 16, 0, 0};
    clip_scale(&s, 1);
    CHECK(s.grad_norm == 4 && s.scale == 0.25f);
    clip_scale(&s, 0);
    CHECK(s.scale == 1);
    s.norm_squared = NAN;
    clip_scale(&s, 1);
    CHECK(s.scale == 0);
    s.norm_squared = 1, s.loss_sum = INFINITY;
    clip_scale(&s, 1);
    CHECK(s.scale == 0);
    device_free(x);
}

// The largest gradient that is not skipped, with all of the norm in one element, over many steps.
TEST(no_gradient_overflows_the_optimizer_state) {
    real *m = zeros(1), *v = zeros(1), *g = zeros(1);
    floatX *w = random_floats(1, 1, 0);
    AdamW h = {1e-3f, 0.9f, 0.95f, 1e-8f, 0, 0};
    StepScalars s = {1, 1e38, 0, 0}, over = {1, 1.1e38, 0, 0};
    clip_scale(&s, 0);
    CHECK(s.scale == 1);
    g[0] = (real)1e19;
    for (h.t = 1; h.t <= 300; h.t++) adamw_update(w, NULL, m, v, g, &s, h, 1);
    CHECK_MSG(isfinite(v[0]) && isfinite(m[0]) && isfinite(w[0]) && w[0] < 0, "v %g, w %g",
              (double)v[0], (double)w[0]);
    clip_scale(&over, 0);
    CHECK(over.scale == 0);
    clip_scale(&over, 1);
    CHECK(over.scale > 0);
    device_free(m), device_free(v), device_free(g), device_free(w);
}

TEST(sums_of_gradients_and_of_parts) {
    enum { N = 40001 };
    real *x = random_floats(N, 1, 0), *y = random_floats(N, 1, 0), *sum = zeros(N);
    device_copy(sum, x, N * sizeof(real));
    grads_add(sum, y, N);
    for (int i = 0; i < N; i++) CHECK(sum[i] == x[i] + y[i]);
    double parts[] = {1e16, 1, -1e16, 3}, total = 0.5;  // 1e16 + 1 = 1e16: the order matters
    comm_sum_in_order(&total, parts, 0, 4);
    CHECK(total == 3.5);
    device_free(x), device_free(y), device_free(sum);
}

TEST(adamw_matches_formula_and_skips_nonfinite_steps) {
    enum { N = 40000 };
    floatX *w = random_floats(N, 1, 0);
    real *m = zeros(N), *v = zeros(N), *g = zeros(N);
    double *rw = calloc(N, sizeof *rw), *rm = calloc(N, sizeof *rm), *rv = calloc(N, sizeof *rv);
    AdamW h = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0};
    for (int i = 0; i < N; i++) rw[i] = (double)w[i];
    for (int step = 1; step <= 5; step++) {
        StepScalars s = {1, 1, 1, 0.5f};
        h.t = step;
        for (int i = 0; i < N; i++) {
            g[i] = (real)test_rng_normal();
            double gi = 0.5 * (double)g[i];
            rm[i] = (double)h.beta1 * rm[i] + (1 - (double)h.beta1) * gi;
            rv[i] = (double)h.beta2 * rv[i] + (1 - (double)h.beta2) * gi * gi;
            double mh = rm[i] / (1 - pow((double)h.beta1, step)),
                   vh = rv[i] / (1 - pow((double)h.beta2, step));
            rw[i] -=
                (double)h.lr * ((double)h.weight_decay * rw[i] + mh / (sqrt(vh) + (double)h.eps));
        }
        adamw_update(w, NULL, m, v, g, &s, h, N);
    }
    // five updates of at most lr / (1 - beta1) each, a few roundings apiece
    for (int i = 0; i < N; i++)
        CHECK_MSG(near((double)w[i], rw[i], 5 * 8 * UNIT * (fabs(rw[i]) + 1)), "%d: %.9g %.9g", i,
                  (double)w[i], rw[i]);
    floatX first = w[0];
    StepScalars skip = {NAN, 1, 1, 0};
    g[0] = NAN;
    adamw_update(w, NULL, m, v, g, &skip, h, N);
    CHECK(w[0] == first && isfinite((double)m[0]) && isfinite((double)v[0]));
    device_free(w), device_free(m), device_free(v), device_free(g);
    free(rw), free(rm), free(rv);
}

TEST(results_do_not_depend_on_the_number_of_threads) {
    enum { T = 77, C = 200, N = 50001 };
    floatX *x = random_floats(T * C, 1, 0), *dy = random_floats(T * C, 1, 0),
           *w = random_floats(C, 1, 1);
    floatX *dx[2] = {random_floats(T * C, 1, 0), random_floats(T * C, 1, 0)};
    real *rstd = zeros(T), *dw[2] = {zeros(C), zeros(C)}, *g = random_floats(N, 1, 0);
    double norm[2] = {0, 0};
    for (int t = 0; t < T; t++) rstd[t] = (real)1.1;
    memcpy(dx[1], dx[0], T * C * sizeof(floatX));
    for (int k = 0; k < 2; k++) {
        omp_set_num_threads(k == 0 ? 1 : 3);
        rmsnorm_backward(dx[k], dw[k], dy, x, w, rstd, T, C);
        qk_norm_backward(dx[k], dw[k], x, w, 1e-5f, T, (HeadShape){6, 2, 20});
        bias_backward(dw[k], dy, T, C);
        global_norm_squared(&norm[k], g, N);
    }
    CHECK(memcmp(dx[0], dx[1], T * C * sizeof(floatX)) == 0);
    CHECK(memcmp(dw[0], dw[1], C * sizeof(real)) == 0);
    CHECK(norm[0] == norm[1]);
    void *all[] = {x, dy, w, dx[0], dx[1], rstd, dw[0], dw[1], g};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) device_free(all[i]);
}

#else  // GRADCHECK

// d(loss)/d(x[i]) by central differences of fourth order, against `analytic`; relative L2 error.
static double difference_error(double (*loss)(void), floatX *x, size_t n, const floatX *analytic) {
    const double h = 1e-3;
    double error = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        double x0 = x[i], f[4], steps[4] = {-2 * h, -h, h, 2 * h};
        for (int k = 0; k < 4; k++) {
            x[i] = x0 + steps[k];
            f[k] = loss();
        }
        x[i] = x0;
        double d = (f[0] - 8 * f[1] + 8 * f[2] - f[3]) / (12 * h);
        error += (d - analytic[i]) * (d - analytic[i]);
        norm += d * d;
    }
    return sqrt(error / norm);
}

static int gT, gC;
static floatX *gx, *gw, *gy, *gdy;
static real *grstd, *glosses;
static int32_t *gtargets;

static double dot(const floatX *a, const floatX *b, size_t n) {
    double s = 0;
    for (size_t i = 0; i < n; i++) s += a[i] * b[i];
    return s;
}

static double rmsnorm_loss(void) {
    rmsnorm_forward(gy, grstd, gx, gw, 1e-5f, gT, gC);
    return dot(gy, gdy, (size_t)gT * (size_t)gC);
}

TEST(rmsnorm_gradient) {
    for (int round = 0; round < 20; round++) {
        gT = 1 + (int)test_rng_below(5), gC = 1 + (int)test_rng_below(40);
        size_t n = (size_t)gT * (size_t)gC;
        gx = random_floats(n, 1, 0.3), gw = random_floats((size_t)gC, 0.5, 1),
        gdy = random_floats(n, 1, 0);
        gy = random_floats(n, 1, 0), grstd = zeros((size_t)gT);
        real *dx = zeros(n), *dw = zeros((size_t)gC);
        rmsnorm_loss();
        rmsnorm_backward(dx, dw, gdy, gx, gw, grstd, gT, gC);
        double ew = difference_error(rmsnorm_loss, gw, (size_t)gC, dw),
               ex = difference_error(rmsnorm_loss, gx, n, dx);
        CHECK_MSG(ew <= 1e-8, "dweight %g", ew);
        CHECK_MSG(ex <= 1e-8 || gC == 1, "dx %g",
                  ex);  // C = 1: the gradient is only eps's, nothing to compare
        void *all[] = {gx, gw, gdy, gy, grstd, dx, dw};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) device_free(all[i]);
    }
}

static double swiglu_loss(void) {
    swiglu_forward(gy, gx, gT, gC);
    return dot(gy, gdy, (size_t)gT * (size_t)gC);
}

static HeadShape gheads;
static size_t gn;
static double qk_norm_loss(void) {
    qk_norm_forward(gy, gx, gw, 1e-5f, gT, gheads);
    return dot(gy, gdy, gn);
}

TEST(qk_norm_gradient) {
    for (int round = 0; round < 20; round++) {
        gT = 1 + (int)test_rng_below(5);
        gheads = (HeadShape){4, 1 + (int)test_rng_below(2), 2 + 2 * (int)test_rng_below(20)};
        const size_t D = (size_t)gheads.head_dim;
        gn = (size_t)gT * (size_t)(4 + 2 * gheads.num_kv_heads) * D;
        gx = random_floats(gn, 1, 0.3), gw = random_floats(2 * D, 0.5, 1),
        gdy = random_floats(gn, 1, 0);
        gy = random_floats(gn, 1, 0);
        real *dw = zeros(2 * D);
        const double loss = qk_norm_loss();
        floatX *dx = random_floats(gn, 1, 0);
        memcpy(dx, gdy, gn * sizeof *dx);
        qk_norm_backward(dx, dw, gx, gw, 1e-5f, gT, gheads);
        const double ew = difference_error(qk_norm_loss, gw, 2 * D, dw),
                     ex = difference_error(qk_norm_loss, gx, gn, dx);
        CHECK_MSG(isfinite(loss) && ew <= 1e-8 && ex <= 1e-8, "dweight %g, dx %g", ew, ex);
        void *all[] = {gx, gw, gdy, gy, dx, dw};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) device_free(all[i]);
    }
}

TEST(swiglu_gradient) {
    gT = 5, gC = 33;
    size_t n = (size_t)gT * (size_t)gC;
    gx = random_floats(2 * n, 1.5, 0), gy = random_floats(n, 1, 0), gdy = random_floats(n, 1, 0);
    real *dx = zeros(2 * n);
    swiglu_backward(dx, gdy, gx, gT, gC);
    double e = difference_error(swiglu_loss, gx, 2 * n, dx);
    CHECK_MSG(e <= 1e-8, "error %g", e);
    device_free(gx), device_free(gy), device_free(gdy), device_free(dx);
}

static double cross_entropy_loss(void) {
    cross_entropy_forward(glosses, gx, gtargets, gT, gC);
    double s = 0;
    losses_sum(&s, glosses, gT);
    return s * 0.125;
}

TEST(cross_entropy_gradient) {
    int32_t targets[6] = {0, -1, 36, 12, -1, 5};
    const real loss_scale = 0.125;
    gT = 6, gC = 37, gtargets = targets;
    size_t n = (size_t)gT * (size_t)gC;
    gx = random_floats(n, 2, 0), glosses = zeros((size_t)gT);
    floatX *dx = random_floats(n, 1, 0);
    memcpy(dx, gx, n * sizeof *dx);
    cross_entropy_forward_backward(glosses, dx, targets, &loss_scale, gT, gC);
    double e = difference_error(cross_entropy_loss, gx, n, dx);
    CHECK_MSG(e <= 1e-8, "error %g", e);
    device_free(gx), device_free(glosses), device_free(dx);
}

#endif

TEST_MAIN()
