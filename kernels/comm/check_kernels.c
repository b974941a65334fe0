#include "check_kernels.h"

#include <stdio.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "../../data/base/seen.h"
#include "../kernels.h"
#include "agree.h"
#include "comm.h"

// One line for each GPU, driver and program. device_describe has the version of CUDA that the
// driver supports, the file the driver's own.
static void describe_machine(char *text, size_t capacity) {
    RankFields f = {0};
    rank_field_program(&f);
    rank_field_file(&f, "driver", "/proc/driver/nvidia/version");
    snprintf(text, capacity, "kernels checked: %s, driver file %016lx, program %016lx\n",
             device_describe(), f.field[1].hash, f.field[0].hash);
}

void check_kernels(bool demanded) {
    char machine[512];
    if (!device_has_self_check()) return;
    describe_machine(machine, sizeof machine);
    if (!comm_max(demanded || !seen_before(machine))) return;
    const double start_ms = now_ms();
    const char *wrong = device_self_check(demanded);
    if (wrong)
        exit_with(EXIT_DEVICE_ERROR,
                  "kernels compute wrong numbers on this GPU: try another driver or CUDA Toolkit; "
                  "--self-check repeats the check",
                  "self-check: %s", wrong);
    if (comm_rank() == 0)
        printf("self-check of all kernels passed in %.1f s\n", (now_ms() - start_ms) * 1e-3);
    describe_machine(machine, sizeof machine);  // attention kernels may have been replaced
    seen_add(machine);
}
