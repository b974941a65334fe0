// As tests/test_faults.c for one of two ranks under mpirun: the other one ends too, with one
// report, and the next start leads to the results. Under `make test` one of PARTS parts.
#include "whole_runs.h"

enum { PARTS = 20 };
#define TWO NEW "--steps 2 --batch-tokens 128 --deterministic --heartbeat-seconds 5 " ATTENTION
#ifdef BACKEND_CUDA
#define ATTENTION "--attention sm90 "
#else
#define ATTENTION
#endif

TEST(a_call_of_one_of_two_ranks_fails) {
    static const struct {
        int rank, kind, calls;  // about so many has an undisturbed run
    } of[] = {
#ifdef BACKEND_CUDA
        {0, FAULT_DEVICE, 400}, {1, FAULT_DEVICE, 400}};
#else
        {0, FAULT_IO, 320}, {1, FAULT_IO, 60}, {0, FAULT_ALLOC, 8000}, {1, FAULT_ALLOC, 5000}};
#endif
    enum { ROWS = sizeof of / sizeof *of };
    int failed = 0;
    if (system("command -v mpirun > /dev/null") != 0) SKIP("mpirun is not installed");
    make_inputs();
    start_over(NULL);
    must_run(TWO);
    const uint64_t expected = results(true);
    for (int i = 0; i < ROWS * PARTS; i++) {
        const int at = i / ROWS, which = i % ROWS, nth = 1 + at * of[which].calls / PARTS;
        if (!all_parts() && at != part_of(PARTS)) continue;
        start_over(NULL);
        const char *line = printed(
            "cd '%s' && EMU_DEVICES=2 RANK_FAULT=%d:%d:%d timeout -k 5 60 mpirun "
            "--allow-run-as-root --oversubscribe -n 2 '%s' %s > stdout 2> stderr",
            scratch_root.dir, of[which].rank, of[which].kind, nth, test_self(), TWO);
        const time_t began = time(NULL);
        const int status = system(line), code = WEXITSTATUS(status);
        const double seconds = difftime(time(NULL), began);
        read_said();
        // a disk that fails from then on: each save that fails is an error
        const int errors = count("error: "), most = nth % 2 ? MAX_FAILED_SAVES : 1;
        const bool good = code == 0 ? results(false) == expected && errors <= 1
                                    : code <= EXIT_DEVICE_ERROR && errors >= 1 && errors <= most &&
                                          count("hint: ") == errors;
        failed += code != 0;
        if (!good) printf("    %s\n", said);
        CHECK_MSG(good, "call %d of kind %d of rank %d: exit code %d after %.0f s", nth,
                  of[which].kind, of[which].rank, code, seconds);
        CHECK_MSG(run(TWO, "--resume", NULL) == 0 && results(true) == expected, "%d: %s", nth,
                  said);
    }
    printf("    %d runs ended with an error\n", failed);
}

int main(int argc, char **argv) {
    const char *fault = getenv("RANK_FAULT"), *rank = getenv("OMPI_COMM_WORLD_RANK");
    int on, kind, nth;
    if (!fault) return test_main(argc, argv);
    if (sscanf(fault, "%d:%d:%d", &on, &kind, &nth) == 3 && rank && atoi(rank) == on)
        fault_arm(kind, nth, kind == FAULT_ALLOC ? ENOMEM : EIO, nth % 2);
    return train_llama_main(argc, argv);
}
