// Which kernels of a program ran on the GPU, and when (CUPTI): a line each of start and end in
// nanoseconds, and its name. The driver loads it:
//   CUDA_INJECTION64_PATH=libtrace.so TRACE=FILE PROGRAM       (the file is complete at its exit)
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>

static FILE *out;

static void give(uint8_t **buffer, size_t *size, size_t *most_records) {
    *size = 8 << 20, *most_records = 0;
    *buffer = aligned_alloc(64, *size);
}

static void take(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    CUpti_Activity *record = NULL;
    (void)context, (void)stream, (void)size;
    while (valid && cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        const CUpti_ActivityKernel9 *k = (const CUpti_ActivityKernel9 *)record;
        fprintf(out, "%llu %llu %s\n", (unsigned long long)k->start, (unsigned long long)k->end,
                k->name);
    }
    free(buffer);
}

static void finish(void) {
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    fclose(out);
}

int InitializeInjection(void) {
    const char *path = getenv("TRACE");
    if (!path || !(out = fopen(path, "w"))) return 0;
    cuptiActivityRegisterCallbacks(give, take);
    if (cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) != CUPTI_SUCCESS)
        fprintf(stderr, "trace: CUPTI refuses to record kernels\n");
    return atexit(finish) == 0;
}
