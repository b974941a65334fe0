// kernels/comm/zero.h alone, on flat arrays of no model. The program starts itself under mpirun on
// 1, 2 and 3 ranks: each trains its share of the same micro-batches, and rank 0 writes all arrays.
#include <math.h>

#include "../data/base/memory.h"
#include "../kernels/comm/comm.h"
#include "../kernels/comm/zero.h"
#include "scratch.h"

// Elements: an embedding, three layers of two matrices, a head, vectors
enum { ADDED = 200, ROWS = 24, COLS = 16, MATRIX = ROWS * COLS, HEAD = ADDED + 6 * MATRIX };
enum { DECAYED = 4104, NUM = 4504, MICROS = 7, STEPS = 4, BUCKETS = 4, ARENAS = 4 };
static const AdamW hyper = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0};

typedef struct {
    Zero zero;
    Arena arenas[ARENAS];
    floatX weights[NUM];
    real grads[NUM];
} Flat;

static void open_flat(Flat *f, ZeroSettings settings, bool muon) {
    const size_t ends[BUCKETS][2] = {{0, ADDED}, {DECAYED, NUM}, {ADDED, HEAD}, {HEAD, DECAYED}};
    ZeroShape shape = {.train = true, .num_elements = NUM, .num_decayed = DECAYED};
    shape.num_added = ADDED, shape.num_matrices = muon ? 6 : 0, shape.num_kinds = 2;
    shape.num_buckets = BUCKETS;
    shape.matrices = host_calloc(6, sizeof(ZeroMatrix), "test");
    shape.buckets = host_calloc(BUCKETS, sizeof(ZeroBucket), "test");
    for (int k = 0; k < 6; k++)
        shape.matrices[k] =
            (ZeroMatrix){(size_t)(ADDED + k * MATRIX), k % 2 ? COLS : ROWS, k % 2 ? ROWS : COLS};
    for (int k = 0; k < BUCKETS; k++)
        shape.buckets[k] = (ZeroBucket){.first = ends[k][0], .last = ends[k][1]};
    memset(f, 0, sizeof *f);
    zero_plan(&f->zero, settings, shape);
    for (int carve = 0; carve < 2; carve++) {
        zero_carve(&f->zero, f->weights, f->grads, f->arenas, f->arenas + 1, f->arenas + 2,
                   f->arenas + 3);
        for (int k = 0; k < ARENAS && carve == 0; k++) {
            CHECK(f->arenas[k].base = device_malloc(f->arenas[k].bytes));
            device_zero(f->arenas[k].base, f->arenas[k].bytes);
            f->arenas[k].bytes = 0;
        }
    }
    for (int i = 0; i < NUM; i++) f->weights[i] = sinf((float)i);
    for (int i = 0; i < NUM; i++) f->grads[i] = NAN;  // what is left over never shows
}

// As a backward pass does: buckets from the last to the first
static void micro_batch(Zero *z, int64_t step, int micro) {
    for (int b = BUCKETS - 1; b >= 0; b--) {
        const ZeroBucket *bucket = z->shape.buckets + b;
        for (int i = (int)bucket->first; i < (int)bucket->last; i++) {
            const bool adds = z->has_grads || i < ADDED || i >= DECAYED;
            z->grads[i] =
                (adds ? z->grads[i] : 0) + cosf((float)(0.37 * i + 1.3 * micro + (double)step));
        }
        zero_grads_done(z, b);
    }
    *z->loss_sum += 1.0 / (double)(step + 3 * micro);
}

// This rank's micro-batches: a block of them where sums are deterministic; else a third has none
static StepScalars train_step(Zero *z, int64_t step) {
    const ZeroSettings *s = &z->settings;
    int32_t own[MICROS], n = 0, first, last;
    AdamW h = hyper;
    rank_block(MICROS, s->rank, s->num_ranks, &first, &last);
    for (int32_t k = 0; k < MICROS; k++)
        if (s->deterministic ? k >= first && k < last : k % (s->num_ranks > 1 ? 2 : 1) == s->rank)
            own[n++] = k;
    zero_begin_step(z);
    for (int32_t k = 0; k < n; k++) {
        zero_begin_micro_batch(z, own[k], MICROS, k + 1 == n);
        micro_batch(z, step, own[k]);
    }
    zero_reduce(z);
    h.t = step;
    zero_update(z, h, 1);
    return zero_read_step(z);
}

// ---- Ranks: a file has all weights, then m and v, then loss and norm of the last step -----------

enum { FILE_FLOATS = 3 * NUM + 2 };

// Matrices have no v.
static void for_all_arrays(Zero *z, float *values, bool put) {
    for (int a = ZERO_WEIGHTS; a <= ZERO_V; a++)
        for (int i = 0, n; i < NUM; i += n) {  // a matrix at a time, at most
            n = i < ADDED ? ADDED : i < HEAD ? MATRIX : 100;
            if (a == ZERO_V && z->shape.num_matrices && i >= ADDED && i < HEAD) continue;
            if (put)
                zero_put(z, (ZeroArray)a, (size_t)i, values + a * NUM + i, (size_t)n);
            else
                zero_get(z, (ZeroArray)a, (size_t)i, values + a * NUM + i, (size_t)n);
        }
}

enum { DETERMINISTIC = 1, WITH_MUON = 2, BF16_MOMENTS = 4 };

// TO FROM FIRST LAST HOW: steps FIRST to LAST, from the file FROM, or - at the start
static int work_as_rank(const char *line) {
    static Flat f;
    static float file[FILE_FLOATS];
    char to[256], from[256];
    int first, last, how;
    StepScalars scalars = {0};
    if (sscanf(line, "%255s %255s %d %d %d", to, from, &first, &last, &how) != 5) return 1;
    comm_init();
    device_init(&(DeviceOptions){.threads = 1});
    const ZeroSettings settings = {
        comm_rank(), comm_num_ranks(), how & DETERMINISTIC, MICROS, MICROS, how & BF16_MOMENTS, 5};
    open_flat(&f, settings, how & WITH_MUON);
    FILE *in = strcmp(from, "-") ? fopen(from, "rb") : NULL;
    if (in && fread(file, sizeof file, 1, in) == 1) for_all_arrays(&f.zero, file, true);
    for (int step = first; step <= last; step++) scalars = train_step(&f.zero, step);
    zero_await_weights(&f.zero, BUCKETS - 1);
    float *gathered = host_calloc(NUM, sizeof(float), "test");
    weights_to_host(gathered, f.weights, NULL, NUM);
    for_all_arrays(&f.zero, file, false);
    // every rank has all weights
    if (comm_rank() == 0 && memcmp(gathered, file, NUM * sizeof(float)) != 0) return 1;
    file[3 * NUM] = (float)scalars.loss_sum, file[3 * NUM + 1] = scalars.grad_norm;
    FILE *out = comm_rank() == 0 ? fopen(to, "wb") : NULL;
    if (out && (fwrite(file, sizeof file, 1, out) != 1 || fclose(out) != 0)) return 1;
    comm_finalize();
    return 0;
}

static void run_ranks(float *file, int ranks, const char *to, const char *from, int first, int last,
                      int how) {
    const char *launcher = printed("mpirun --allow-run-as-root --oversubscribe -n %d", ranks);
    const char *line = printed("ZERO='%s %s %d %d %d' timeout 120 %s '%s' > '%s' 2>&1", scratch(to),
                               from[0] == '-' ? from : scratch(from), first, last, how,
                               ranks > 1 ? launcher : "", test_self(), scratch("said"));
    CHECK_MSG(system(line) == 0, "%s", line);
    FILE *in = fopen(scratch(to), "rb");
    CHECK(in && fread(file, FILE_FLOATS * sizeof *file, 1, in) == 1);
    fclose(in);
}

// A state that one number of ranks has saved is loaded by another number; without deterministic
// sums, only by the same number. All results are near the values of one rank.
static void check_ranks(int how) {
    static float plain[FILE_FLOATS], alone[FILE_FLOATS], several[FILE_FLOATS], resumed[FILE_FLOATS];
    const bool in_order = how & DETERMINISTIC;
    run_ranks(alone, 1, "1", "-", 1, STEPS, how);
    if (!in_order || how & BF16_MOMENTS) memcpy(plain, alone, sizeof plain);
    for (int ranks = 2; ranks <= 3; ranks++) {
        run_ranks(resumed, ranks, "half", "-", 1, 2, how);
        run_ranks(resumed, in_order ? 5 - ranks : ranks, "all", "half", 3, STEPS, how);
        if (!in_order) run_ranks(several, ranks, "several", "-", 1, STEPS, how);
        CHECK_MSG(memcmp(in_order ? alone : several, resumed, sizeof resumed) == 0,
                  "%d ranks, resumed", ranks);
        for (int i = 0; i < FILE_FLOATS; i++)
            CHECK_MSG(fabsf(resumed[i] - plain[i]) <= 1e-4f, "%d ranks, value %d: %g, alone %g",
                      ranks, i, (double)resumed[i], (double)plain[i]);
    }
}

TEST(steps_are_the_same_on_1_2_and_3_ranks) {
    if (system("command -v mpirun > /dev/null") != 0) SKIP("mpirun is not installed");
    for (int how = 0; how < 8; how++)
        if (how < BF16_MOMENTS || how & DETERMINISTIC) check_ranks(how);
}

// ---- Moments in bf16 ----------------------------------------------------------------------------

// x becomes its upper neighbour as often as it is near it, of m and of v independently.
TEST(rounding_at_random_is_unbiased) {
    enum { KEYS = 200000 };
    const float ulp = 0x1p-7f, at[] = {0.02f, 0.3f, 0.5f, 0.97f};
    for (int i = 0; i < 8; i++) {
        const float p = at[i % 4], sign = i < 4 ? 1 : -1;
        int m = 0, v = 0, both = 0;
        for (uint64_t k = 0; k < KEYS; k++) {
            const uint64_t random = mix64(1000 + k);
            const float x = sign * (1 + p * ulp), up = sign * (1 + ulp);
            const bool a = moment_widen(moment_narrow(x, random >> RANDOM_M)) == up,
                       b = moment_widen(moment_narrow(x, random >> RANDOM_V)) == up;
            m += a, v += b, both += a && b;
        }
        const double mean = KEYS * (double)p, sigma = sqrt(mean * (1 - (double)p));
        CHECK_MSG(fabs(m - mean) < 4 * sigma && fabs(v - mean) < 4 * sigma, "%g: %d, %d", p, m, v);
        CHECK(fabs(both - mean * (double)p) < 4 * sqrt(mean * (double)p));
    }
    for (uint32_t half = 0; half < 0x7f80; half++)  // what is a bf16 stays
        for (uint64_t random = 0; random < 3; random++)
            CHECK(moment_narrow(moment_widen((uint16_t)half), random * 0x7fff) == half);
    CHECK(moment_narrow(1 + 0.003f, TO_NEAREST) == 0x3f80);
}

int main(int argc, char **argv) {
    const char *line = getenv("ZERO");
    return line ? work_as_rank(line) : test_main(argc, argv);
}
