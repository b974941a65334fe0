# `make test` tests the program, `make test-dev` the tools of dev/: the emulator, dev/simple, dev/gpu_day, what
# the witnesses said.

CUDA_C  := $(patsubst tests/test_%.c,%,$(wildcard tests/test_cuda_*.c))
CPU_TESTS := power rank_faults
TESTS   := $(filter-out $(CUDA_C) $(CPU_TESTS),$(patsubst tests/test_%.c,%,$(wildcard tests/test_*.c)))
EMU_TESTS := $(CUDA_C) $(patsubst tests/test_%.cu,%,$(wildcard tests/test_*.cu))
GRADS   := $(shell grep -l GRADCHECK tests/test_*.c 2>/dev/null | sed 's,tests/test_\(.*\).c,\1,')
DEV_TESTS := emu conform tensor_cores simple gpu_day
# Calls that tests/fault.c can make fail; only our own objects are wrapped
FAULTS  := $(shell grep -lE 'fault\.c|whole_runs' tests/test_*.c 2>/dev/null | sed 's,tests/test_\(.*\).c,\1,')
WRAP    := $(addprefix -Wl$(comma)--wrap=,open fopen close write pwrite pread ftruncate fsync \
           rename unlink unlinkat mkdir opendir openat fdopen fdopendir lstat fstat fstatat stat \
           malloc calloc realloc aligned_alloc strdup)
# Wrapped by tests/run_fault.c for suites of whole runs
RUN_FAULTS := $(addprefix -Wl$(comma)--wrap=,comm_phase comm_finalize comm_gather_begin fsync attention_forward \
           host_memory_free now_ms)

MINUTES ?= 60

.PHONY: check bench-ops gpu-kit gpu-day mutants fuzz soak test test-races test-dev test-faults test-programs \
        test-dev-programs test-arm64 test-sanitizers test-schedules test-ptx ptx-90a cuda-80-90a simple

# Of one suite: checksums for dev/fuzz/fuzz.c, control groups for test_io.c, saves that wait for test_power.c
WRAP_fuzz  := -Wl,--wrap=crc32c
WRAP_io    := -Wl,--wrap=fopen
WRAP_power := -Wl,--wrap=host_memory_free
build/emu/test_faults: WRAP_faults := -Wl,--wrap=comm_connect

# Programs of a variant: $(1) = its name, $(2) = link command, $(3) = objects of the backend
define TEST_RULES
build/$(1)/train_llama_faulty: build/$(1)/train_llama.o build/$(1)/tests/run_fault.o \
                               build/$(1)/libhost.a $(3)
	$$(call say,LINK,$$@)$(2) $$(filter %.o,$$^) build/$(1)/libhost.a -o $$@ $$(LIBS_$(1)) \
	    $$(RUN_FAULTS)
build/$(1)/test_%: build/$(1)/tests/test_%.o build/$(1)/libhost.a $(3)
	$$(call say,LINK,$$@)$(2) $$(filter %.o,$$^) build/$(1)/libhost.a -o $$@ $$(LIBS_$(1)) \
	    $$(if $$(filter $$*,$$(FAULTS)),$$(WRAP)) $$(WRAP_$$*)
build/$(1)/bench: build/$(1)/dev/gpu_day/bench.o build/$(1)/libhost.a $(3)
	$$(call say,LINK,$$@)$(2) $$(filter %.o,$$^) build/$(1)/libhost.a -o $$@ $$(LIBS_$(1))
.SECONDARY: $$(TESTS:%=build/$(1)/tests/test_%.o) $$(EMU_TESTS:%=build/$(1)/tests/test_%.o) \
            build/$(1)/dev/gpu_day/bench.o
endef

# The CPU backend with sanitizers, and in double precision for gradient checks. At -O1 a product of
# matrices would take four times as long.
O_asan   = $(if $(filter build/asan/kernels/cpu/%,$@),-O3,-O1)
ASAN    := -fsanitize=address,undefined -fno-sanitize-recover=undefined \
           -fno-omit-frame-pointer -DPOISON -DNO_CLONES -U_FORTIFY_SOURCE
# and with AMX's tile registers in C
build/asan/kernels/cpu/matmul.o build/asan/tests/test_ops.o: \
    CFLAGS += -DAMX_MODEL='"../../tests/amx_model.h"'
# The plain code of the table of operations makes up the time of a suite: with this CPU's vectors, and
# without sanitizers, which watch the kernels
CFLAGS_tests/test_ops := -O3 $(if $(shell grep -owm1 avx2 /proc/cpuinfo 2>/dev/null),-mavx2 -mfma)
%san/tests/test_ops.o: CFLAGS_tests/test_ops += -fno-sanitize=all
LIBS_asan := $(LDLIBS)
LIBS_fp64 := $(LDLIBS)
$(eval $(call VARIANT,asan,$$(O_asan) $(ASAN),$(CC) -fopenmp $(ASAN),$(KERNELS:%.c=build/asan/%.o)))
$(eval $(call VARIANT,fp64,-O2 -DGRADCHECK,$(CC) -fopenmp,$(KERNELS:%.c=build/fp64/%.o)))
$(eval $(call TEST_RULES,cpu,$(CC) -fopenmp,$(KERNELS:%.c=build/cpu/%.o)))
$(eval $(call TEST_RULES,asan,$(CC) -fopenmp $(ASAN),$(KERNELS:%.c=build/asan/%.o)))
$(eval $(call TEST_RULES,fp64,$(CC) -fopenmp,$(KERNELS:%.c=build/fp64/%.o)))

$(eval $(call TEST_RULES,cuda,$(NVCC),$(CUDA)))

ALL_PROGRAMS := $(TESTS:%=build/asan/test_%) $(CPU_TESTS:%=build/cpu/test_%) $(GRADS:%=build/fp64/test_%) \
                $(EMU_TESTS:%=build/emu/test_%) build/emu/test_ops build/emu/test_faults
of_dev   = $(foreach f,$(1),$(if $(filter $(DEV_TESTS:%=test_%),$(basename $(notdir $(f)))),$(f)))
SCRIPTS  := $(wildcard tests/test_*.sh)
DEV_PROGRAMS := $(call of_dev,$(ALL_PROGRAMS))
DEV_SCRIPTS := $(call of_dev,$(SCRIPTS))
PROGRAMS := $(filter-out $(DEV_PROGRAMS),$(ALL_PROGRAMS))
SANITIZED := build/emusan/test_ops
test-programs: $(PROGRAMS) $(SANITIZED) build/asan/train_llama build/cpu/train_llama \
               build/emu/train_llama build/cpu/train_llama_faulty build/emu/train_llama_faulty \
               train_llama $(if $(NVCC),ptx-90a cuda-80-90a)
# The part of test-ptx that make test runs
ptx-90a: build/emu/train_llama build/cpu/train_llama
	@$(MAKE) -s PTX_ARCHS=90a $(addprefix build/ptx/,test_conform test_ops train_llama)
# The whole CUDA backend as users build it: only ptxas sees a spilled register. test_cuda_build.sh reads
# what it says of Hopper's attention.
build/cuda/80-90a/%_sm90.o: NVFLAGS += -Xptxas -v
cuda-80-90a: train_llama
	@$(MAKE) --no-print-directory BACKEND=cuda CUDA_ARCHS='80 90a' build/cuda/train_llama
test-dev-programs: $(DEV_PROGRAMS) build/emu/bugs build/tsan/bugs build/emu/test_ops build/emu/bench \
                   build/emu/train_llama build/cpu/train_llama
test: test-programs
	@echo 'the suites of dev/ are not among these: make test-dev'
	@tests/run.sh $(PROGRAMS) $(filter-out $(DEV_SCRIPTS),$(SCRIPTS))
test-dev: test-dev-programs
	@PTX=all ARCHS=default tests/run.sh $(DEV_PROGRAMS) $(DEV_SCRIPTS) tests/test_ptx.sh tests/test_cuda_build.sh

# Every operation on this machine: on its GPU, or on the CPU backend if it has none
check: build/$(BACKEND)/test_ops
	@$< --limit 120
# All that needs a GPU (dev/gpu_day), of programs for CUDA_ARCHS. SECONDS=420, STEPS="machine checks": some of
# it; OUT=DIR instead of dev/results/gpu-DATE
gpu-kit:
	@dev/gpu_day/build.sh
gpu-day: $(if $(GPU),gpu-kit)
	@dev/gpu_day/day.py $(SECONDS) $(STEPS)
# Every call fails, and every state after a power loss: minutes; make test takes a part of them
test-faults: build/asan/test_faults build/emu/test_faults build/emu/test_rank_faults \
             $(CPU_TESTS:%=build/cpu/test_%)
	@FAULTS=all SUITE_LIMIT_S=7200 tests/run.sh $^
# The suites with one generated fault at a time: MUTANTS="--files data/batches/* --seed 2"
mutants:
	@dev/mutants.py $(MUTANTS)
# An hour of kills, stops, full disks and flipped bits; MINUTES=N
soak: train_llama
	@dev/soak.py --minutes $(MINUTES)
# Looks for inputs of the readers of foreign files that show a fault, FUZZ_S seconds for each of the
# targets of dev/fuzz/fuzz.c, or for TARGET=name; needs clang
FUZZ_S  ?= 60
FUZZED   = $(if $(filter %/fuzz.o,$@),-DFUZZING,-fsanitize=fuzzer-no-link)
$(eval $(call VARIANT,fuzz,-O2 $$(ASAN) $$(FUZZED),false,))
$(eval $(call VARIANT,fast,-O2 -fsanitize=undefined $$(TRAPS) $$(FUZZED),false,))
TRAPS   := -fsanitize-undefined-trap-on-error -DNO_CLONES
build/fuzz/% build/fast/%: CC := clang
build/fast/fuzz: ASAN :=
build/fuzz/fuzz build/fast/fuzz: build/%/fuzz: build/%/dev/fuzz/fuzz.o build/%/libhost.a
	$(call say,LINK,$@)$(CC) $(ASAN) -fsanitize=fuzzer $(WRAP_fuzz) $^ -o $@ $(LDLIBS)
# The threads of loader, saver, tokenizer and CPU kernels under ThreadSanitizer, to which clang's OpenMP
# explains its barriers
TSAN    := clang -fopenmp -fsanitize=thread
LIBS_race := $(LDLIBS)
build/race/%: CC := clang
$(eval $(call VARIANT,race,-O1 -DNO_CLONES -fsanitize=thread,$(TSAN),$(KERNELS:%.c=build/race/%.o)))
$(eval $(call TEST_RULES,race,$(TSAN),$(KERNELS:%.c=build/race/%.o)))
test-races: export TSAN_OPTIONS := ignore_noninstrumented_modules=1
test-races: $(addprefix build/race/,test_loader train_llama)
	@build/race/test_loader
	@dir=$$(mktemp -d) && build/race/train_llama --train README.md --out $$dir --steps 3 --save-every 1 --threads 2 \
	    --max-seqlen 64 --micro-batch-tokens 128 --batch-tokens 256 > /dev/null; \
	    status=$$?; rm -rf $$dir; exit $$status
fuzz:
	@if echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' | \
	    clang -fsanitize=fuzzer,address -xc - -o /dev/null 2> /dev/null; then \
	    $(MAKE) --no-print-directory build/fuzz/fuzz && \
	    dev/fuzz/fuzz.py --seconds $(FUZZ_S) $(TARGET:%=--target %); \
	else echo 'skipped: no fuzzing without clang and its libFuzzer (apt-get install clang)'; fi
bench-ops: build/$(BACKEND)/test_ops
	@$< --bench

# All cases of the emulated kernels under AddressSanitizer and UBSan (ThreadSanitizer:
# dev/emu/README.md)
test-sanitizers: $(SANITIZED)
	@ASAN_OPTIONS=detect_leaks=0 $(SANITIZED)

# The emulated kernels under 40 schedules: half an hour
test-schedules: build/emu/test_ops
	@SEEDS=20 tests/test_emu.sh

# The kernels as nvcc compiles them, in the emulator; make test takes a part of it
test-ptx:
	@PTX=all tests/test_ptx.sh

# The whole idea in one file of plain C; tests/test_simple.c holds llama.h to it
simple: build/simple
build/simple: dev/simple/train_llama.c
	@mkdir -p $(@D)
	$(call say,CC,$<)$(CC) -std=c11 -O2 $(WARN) $< -o $@ -lm

# The CPU kernels for arm64 (NEON), cross-compiled and run by qemu: results, not speed; minutes.
# apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
ARM64_CC := aarch64-linux-gnu-gcc
ARM64   := build/arm64/test_ops
build/arm64/test_%: tests/test_%.c $(wildcard kernels/cpu/*.[ch]) kernels/kernels.h Makefile \
                    $(addprefix kernels/comm/,cpu.c mpi.c world.c) \
                    $(addprefix data/base/,clock.c error.c hash.c machine.c memory.c)
	@mkdir -p $(@D)
	$(call say,LINK,$@)$(ARM64_CC) $(filter-out -MMD -MP,$(CFLAGS)) -O2 -static \
	    -ffunction-sections -Wl,--gc-sections $(filter %.c,$^) -o $@ -lm -lpthread
test-arm64: $(ARM64)
	@OMP_WAIT_POLICY=passive qemu-aarch64 $^
