// Muon's update of one matrix, on the backend it is linked with: of a matrix with known singular
// vectors and values Newton-Schulz keeps the vectors, and of the values it computes a polynomial.
#include "../kernels/muon.h"

#include <math.h>

#include "test.h"

enum { STEPS = 3, MOST = 1 << 13, MOST_RANK = 64 };
static const float LR = 0.5f, DECAY = 0.25f;  // exact, and so is their product
// Errors of an update, whose singular values are near 1, relative to its norm. Each of five steps
// rounds the matrix and its polynomial, which raises what is small by up to 3.4 a step: of values
// down to 1/100 of the norm by 80 in all. Where there are none, what is raised by 480 is noise.
#ifdef BACKEND_CUDA
static const double ROUNDING = 12 * 0x1p-9, NOISE = 0.25;
#else
static const double ROUNDING = 80 * 0x1p-24, NOISE = 480 * 0x1p-24;
#endif

static double left[MOST], right[MOST];  // (rows,rank), (cols,rank): singular vectors
static double want[MOST], momentum[MOST_RANK], moved[MOST];
static float weights[MOST], before[MOST], grads[MOST];

typedef struct {
    int rows, cols, rank;
    floatX *weights;
    uint16_t *low_bits;
    real *momentum, *grads;
    StepScalars *step;
    MuonScratch scratch;
    char *memory;
} Matrix;

static double polynomial(double s) {
    for (int i = 0; i < 5; i++) s = 3.4445 * s - 4.7750 * pow(s, 3) + 2.0315 * pow(s, 5);
    return s;
}

// q (n,k): orthonormal columns, by Gram-Schmidt, twice
static void orthonormal(double *q, int n, int k) {
    for (int c = 0; c < 2 * k; c++) {
        double *own = q + c % k, squares = 0;
        for (int i = 0; i < n && c < k; i++) own[i * k] = test_rng_normal();
        for (int b = 0; b < c % k; b++) {
            double dot = 0;
            for (int i = 0; i < n; i++) dot += q[i * k + b] * own[i * k];
            for (int i = 0; i < n; i++) own[i * k] -= dot * q[i * k + b];
        }
        for (int i = 0; i < n; i++) squares += own[i * k] * own[i * k];
        for (int i = 0; i < n; i++) own[i * k] /= sqrt(squares);
    }
}

static Matrix open_matrix(int rows, int cols, int rank) {
    const DeviceOptions options = {0, 0};
    const char *missing = device_init(&options);
    if (missing) SKIP("%s", missing);
    const size_t bytes = 8 * (size_t)(rows * cols + 32) / 256 * 256 + 256;  // of each buffer
    Matrix m = {rows, cols, rank, .memory = device_malloc(10 * bytes)};
    char *p = m.memory;
    device_zero(p, 10 * bytes);
    m.weights = (floatX *)p, m.grads = (real *)(p + bytes), m.momentum = (real *)(p + 2 * bytes);
    m.low_bits = master_lo_bytes() ? (uint16_t *)(p + 3 * bytes) : NULL;
    m.step = (StepScalars *)(p + 4 * bytes);
    m.scratch = (MuonScratch){(floatX *)(p + 5 * bytes), (floatX *)(p + 6 * bytes),
                              (floatX *)(p + 7 * bytes), (floatX *)(p + 8 * bytes),
                              (double *)(p + 9 * bytes)};
    orthonormal(left, rows, rank);
    orthonormal(right, cols, rank);
    memset(momentum, 0, sizeof momentum);
    for (int i = 0; i < rows * cols; i++) want[i] = weights[i] = (float)test_rng_normal();
    weights_from_host(m.weights, m.low_bits, weights, (size_t)(rows * cols));
    return m;
}

// x (rows,cols) =  left diag(values) right^T
static void compose(double *x, const Matrix *m, const double *values) {
    for (int i = 0; i < m->rows * m->cols; i++) {
        x[i] = 0;
        for (int k = 0; k < m->rank; k++)
            x[i] += values[k] * left[i / m->cols * m->rank + k] * right[i % m->cols * m->rank + k];
    }
}

// One update by these gradients, which the step scales
static void update(const Matrix *m, const double *gradient, float scale) {
    const size_t n = (size_t)(m->rows * m->cols);
    const StepScalars step = {1, 1, 1, scale};
    for (size_t i = 0; i < n; i++)
        before[i] = weights[i], grads[i] = scale == 0 ? NAN : (float)(gradient[i] / (double)scale);
    device_upload(m->grads, grads, n * sizeof *grads);
    device_upload(m->step, &step, sizeof step);
    muon_update(m->weights, m->low_bits, m->momentum, m->grads, m->step, LR, DECAY, m->rows,
                m->cols, m->scratch);
    weights_to_host(weights, m->weights, m->low_bits, n);
}

// Of step t: gradients whose values are 1 to 1/20 times `size`, in another order; want and moved:
// the weights after it, and what is orthogonalised of them
static void next_step(const Matrix *m, int t, double size, float scale) {
    static double x[MOST];
    double values[MOST_RANK], squares = 0;
    for (int k = 0; k < m->rank; k++) {
        const double g = size * pow(20, -(double)((k + 3 * t) % m->rank) / m->rank);
        momentum[k] = 0.95 * momentum[k] + 0.05 * g;
        x[k] = 0.95 * momentum[k] + 0.05 * g;
        values[k] = g, squares += x[k] * x[k];
    }
    compose(moved, m, values);
    for (int k = 0; k < m->rank; k++) values[k] = polynomial(x[k] / fmax(sqrt(squares), 1e-7));
    update(m, moved, scale);
    compose(x, m, values);
    const double keep = 1 - (double)LR * (double)DECAY,
                 step = (double)LR * 0.2 * sqrt(fmax(m->rows, m->cols));
    for (int i = 0; i < m->rows * m->cols; i++) {
        want[i] = keep * want[i] - step * x[i];
        moved[i] = (keep * (double)before[i] - (double)weights[i]) / step;
    }
}

static void check(int rows, int cols, int rank, double size, float scale) {
    const Matrix m = open_matrix(rows, cols, rank);
    const int side = rows < cols ? rows : cols;
    for (int t = 0; t < STEPS; t++) {
        double error = 0;
        next_step(&m, t, size, scale);
        for (int i = 0; i < rows * cols; i++) error += pow((double)weights[i] - want[i], 2);
        error = sqrt(error / side / fmax(rows, cols)) / (double)LR / 0.2;
        const double bound = (t + 1) * (rank < side ? NOISE : ROUNDING);
        CHECK_MSG(error <= bound, "%d x %d of rank %d, step %d: error %.2g, at most %.2g", rows,
                  cols, rank, t, error, bound);
        for (int k = 0; k < rank && size > 1e-6; k++) {  // 0.68 to 1.21, for all above 1/600
            double value = 0;
            for (int i = 0; i < rows * cols; i++)
                value += left[i / cols * rank + k] * right[i % cols * rank + k] * moved[i];
            CHECK_MSG(value > 0.68 - bound && value < 1.21 + bound,
                      "%d x %d, step %d: a singular value of %g", rows, cols, t, value);
        }
    }
    device_free(m.memory);
}

TEST(updates_keep_singular_vectors_and_raise_values_to_about_one) {
    check(24, 64, 24, 1, 1);
    check(64, 24, 24, 1, 0.37f);
    check(40, 40, 40, 1, 1);
    check(8, 200, 8, 1e18, 1);
    check(200, 8, 8, 1, 1e-6f);
}
TEST(matrices_without_full_rank) {
    check(24, 64, 7, 1, 1);
    check(64, 24, 1, 1, 1);
    check(16, 16, 0, 1, 1);
}
TEST(gradients_next_to_nothing) { check(24, 64, 24, 1e-9, 1); }
#ifndef BACKEND_CUDA
TEST(sizes_that_are_no_multiples) {
    check(5, 7, 5, 1, 1);
    check(7, 5, 5, 1, 1);
    check(1, 9, 1, 1, 1);
    check(9, 1, 1, 1, 1);
}
#endif

TEST(a_skipped_step_changes_no_bit) {
    const Matrix m = open_matrix(24, 64, 24);
    static float momentum_before[24 * 64], momentum_after[24 * 64];
    next_step(&m, 0, 1, 1);
    device_download(momentum_before, m.momentum, sizeof momentum_before);
    update(&m, moved, 0);
    device_download(momentum_after, m.momentum, sizeof momentum_after);
    CHECK(memcmp(weights, before, 24 * 64 * sizeof *weights) == 0);
    CHECK(memcmp(momentum_after, momentum_before, sizeof momentum_before) == 0);
    next_step(&m, 1, 1, 1);  // nothing of the skipped one is left
    for (int i = 0; i < 24 * 64; i++) CHECK(isfinite(weights[i]));
    device_free(m.memory);
}
TEST_MAIN()
