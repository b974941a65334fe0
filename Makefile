# unpad.c: `make` builds ./train_llama, `make test` runs every test, `make bench` measures.
# On a machine with a GPU: `make gpu-check` checks, `make gpu-bench` measures.
#   BACKEND=cuda|cpu    default: cuda where nvcc and a GPU are, else cpu (C and OpenMP)
#   CC=gcc|clang        WERROR= (empty: warnings stay warnings)
#   MPI= NCCL=          empty: one rank only (found by themselves where installed)
#   CUDA_ARCHS="80 90a" GPU architectures; default: what nvcc knows of 80 86 89 90a 120
# Objects go to build/<variant>: cuda, cpu, emulated, sanitizer and fp64 builds live side by side.

CC      := $(if $(filter default,$(origin CC)),gcc,$(CC))
WERROR  ?= -Werror
NVCC    := $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
GPU     := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
BACKEND ?= $(if $(and $(NVCC),$(GPU)),cuda,cpu)

ifeq ($(filter $(BACKEND),cpu cuda),)
$(error BACKEND=$(BACKEND) is unknown. Run: make BACKEND=cpu, or make BACKEND=cuda)
endif
ifeq ($(BACKEND)$(NVCC),cuda)
$(error BACKEND=cuda needs nvcc. Install the CUDA Toolkit, or run: make BACKEND=cpu)
endif
ifeq ($(wildcard /usr/include/cjson/cJSON.h /usr/local/include/cjson/cJSON.h),)
ifneq ($(MAKECMDGOALS),clean)
$(error cJSON is missing. Run: sudo apt-get install libcjson-dev)
endif
endif

comma   := ,

# Many ranks on the CPU need MPI (Open MPI); without it everything else works
MPI     := $(shell mpicc --showme:compile >/dev/null 2>&1 && \
             echo '\#include <mpi.h>' | mpicc -E -xc - >/dev/null 2>&1 && echo found)
MPI_CFLAGS := $(if $(MPI),-DWITH_MPI $(shell mpicc --showme:compile))
MPI_LIBS := $(if $(MPI),$(shell mpicc --showme:link))
ON_cpu  := $(CC), $(if $(MPI),MPI found,\
             no MPI: one rank only (for more: apt-get install openmpi-bin libopenmpi-dev))

# Many GPUs need NCCL; NCCL_HOME=DIR when it lies neither beside nvcc nor in /usr or /usr/local
NCCL_DIRS := $(NCCL_HOME) $(patsubst %/bin/nvcc,%,$(NVCC)) /usr /usr/local
NCCL_H  := $(firstword $(wildcard $(NCCL_DIRS:=/include/nccl.h)))
NCCL_SO := $(firstword $(wildcard $(foreach d,$(NCCL_DIRS),$(d)/lib64/libnccl.so \
             $(d)/lib/libnccl.so $(d)/lib/*-linux-gnu/libnccl.so)))
NCCL    := $(if $(and $(NCCL_H),$(NCCL_SO)),found)
NCCL_FLAGS := $(if $(NCCL),-DWITH_NCCL -I$(patsubst %/,%,$(dir $(NCCL_H))))
NCCL_LIBS := $(if $(NCCL),-L$(patsubst %/,%,$(dir $(NCCL_SO))) -lnccl)
ON_cuda := $(GPU), $(if $(NCCL),NCCL found,\
             no NCCL: one GPU only (for more: apt-get install libnccl2 libnccl-dev))

# gnu11 for POSIX and contraction to FMA; never -ffast-math: isfinite must work, sums keep their
# order.
WARN    := -Wall -Wextra $(WERROR)
CFLAGS  := -std=gnu11 -g $(WARN) -fopenmp -fno-math-errno -MMD -MP
LDLIBS  := -lcjson -lm -ldl -lpthread
OPT     := -O3
ASAN    := -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined \
           -fno-omit-frame-pointer -DPOISON -DNO_CLONES -U_FORTIFY_SOURCE

KERNELS := $(wildcard kernels/cpu/*.c)
CUDA_KERNELS := $(wildcard kernels/cuda/*.cu)
TESTS   := $(patsubst tests/test_%.c,%,$(wildcard tests/test_*.c))
EMU_TESTS := $(patsubst tests/test_%.cu,%,$(wildcard tests/test_*.cu))
BENCHES := $(patsubst dev/bench_%.c,%,$(wildcard dev/bench_*.c))
FAULTS  := $(shell grep -l 'fault\.c' tests/test_*.c 2>/dev/null | sed 's,tests/test_\(.*\).c,\1,')
# Calls that tests/fault.c can make fail; only our own objects see the wrappers
WRAP    := $(addprefix -Wl$(comma)--wrap=,open close write pread fsync rename unlink rmdir mkdir \
           opendir lstat fstat stat malloc calloc realloc)
GRADS   := $(shell grep -l GRADCHECK tests/test_*.c 2>/dev/null | sed 's,tests/test_\(.*\).c,\1,')

.PHONY: all test test-programs test-sanitizers test-schedules bench bench-mpi calibrate packsim \
        gpu-check gpu-bench clean
all: train_llama
	@echo "built ./train_llama: backend $(BACKEND), $(ON_$(BACKEND))"

train_llama: build/$(BACKEND)/train_llama
	@cp $< $@.tmp && mv $@.tmp $@

# One rule set per variant: $(1) = name, $(2) = flags
define VARIANT
build/$(1)/%.o: %.c Makefile
	@mkdir -p $$(@D)
	$$(CC) $$(CFLAGS) $(2) -c $$< -o $$@
build/$(1)/train_llama.o: train_llama.cu Makefile
	@mkdir -p $$(@D)
	$$(CC) $$(CFLAGS) $(2) -x c -c $$< -o $$@
build/$(1)/train_llama: build/$(1)/train_llama.o $$(KERNELS:%.c=build/$(1)/%.o)
	$$(CC) -fopenmp $(2) $$^ -o $$@ $$(LDLIBS)
build/$(1)/test_%: build/$(1)/tests/test_%.o $$(KERNELS:%.c=build/$(1)/%.o)
	$$(CC) -fopenmp $(2) $$^ -o $$@ $$(LDLIBS) $$(if $$(filter $$*,$$(FAULTS)),$$(WRAP))
build/$(1)/bench_%: build/$(1)/dev/bench_%.o $$(KERNELS:%.c=build/$(1)/%.o)
	$$(CC) -fopenmp $(2) $$^ -o $$@ $$(LDLIBS)
build/$(1)/calibrate: build/$(1)/dev/calibrate.o $$(KERNELS:%.c=build/$(1)/%.o)
	$$(CC) -fopenmp $(2) $$^ -o $$@ $$(LDLIBS)
build/$(1)/packsim: build/$(1)/dev/packsim.o
	$$(CC) $(2) $$^ -o $$@ $$(LDLIBS)
.SECONDARY: $$(KERNELS:%.c=build/$(1)/%.o) $$(TESTS:%=build/$(1)/tests/test_%.o)
endef
$(eval $(call VARIANT,cpu,$(OPT)))
build/cpu/kernels/cpu/comm.o: CFLAGS += $(MPI_CFLAGS)
# The same program, which fails where tests/test_ranks_failure.sh wants it to
build/cpu/train_llama_faulty: build/cpu/train_llama.o build/cpu/tests/phase_fault.o \
                              $(KERNELS:%.c=build/cpu/%.o)
	$(CC) -fopenmp $^ -o $@ $(LDLIBS) -Wl,--wrap=comm_phase,--wrap=comm_gather_begin
build/cpu/train_llama build/cpu/train_llama_faulty: LDLIBS += $(MPI_LIBS)
build/cpu/bench_% build/cpu/calibrate: LDLIBS += $(MPI_LIBS)
# Made anew when MPI has come or gone since the last build
build/cpu/kernels/cpu/comm.o: build/cpu/mpi-$(or $(MPI),none)
build/cpu/mpi-%:
	@mkdir -p $(@D) && rm -f $(@D)/mpi-* && touch $@
$(eval $(call VARIANT,asan,$(ASAN)))
$(eval $(call VARIANT,fp64,-O2 -DGRADCHECK))

# CUDA: the same program against kernels/cuda
KNOWN   := $(if $(NVCC),$(shell $(NVCC) --list-gpu-arch 2>/dev/null | sed 's/compute_//'))
CUDA_ARCHS ?= $(filter $(KNOWN) 90a,80 86 89 90a 120)
NEWEST  := $(lastword $(CUDA_ARCHS))
GENCODE := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a)$(comma)code=sm_$(a)) \
           -gencode arch=compute_$(NEWEST)$(comma)code=compute_$(NEWEST)
CUDA    := $(CUDA_KERNELS:%.cu=build/cuda/%.o)
CUDA_LIBS = $(LDLIBS) -lcublasLt $(NCCL_LIBS)
# A register spill is an error: it halves a kernel's speed and shows in no test
NVFLAGS := -std=c++17 -O3 -lineinfo -DBACKEND_CUDA $(GENCODE) -MMD -MP \
           $(if $(WERROR),-Werror all-warnings -Xptxas -warn-spills$(comma)-Werror)
# So is C7508 and on, of which ptxas only informs: registers that setmaxnreg does not move, wgmma
# that does not overlap
build/cuda/%.o: %.cu Makefile
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) -c $< -o $@ 2> $(@:.o=.log) || (cat $(@:.o=.log) >&2; exit 1)
	@cat $(@:.o=.log) >&2; ! grep -q 'C75[0-9][0-9]' $(@:.o=.log) || (rm $@; exit 1)
build/cuda/kernels/cuda/comm.o: NVFLAGS += $(NCCL_FLAGS)
build/cuda/kernels/cuda/comm.o: build/cuda/nccl-$(or $(NCCL),none)
build/cuda/nccl-%:
	@mkdir -p $(@D) && rm -f $(@D)/nccl-* && touch $@
build/cuda/train_llama: build/cuda/train_llama.o $(CUDA)
	$(NVCC) $^ -o $@ $(CUDA_LIBS)
build/cuda/test_%: build/cuda/tests/test_%.o $(CUDA) build/twin/cpu_kernels.so
	$(NVCC) $(filter %.o,$^) -o $@ $(CUDA_LIBS)

build/cuda/bench_%: build/cuda/dev/bench_%.o $(CUDA)
	$(NVCC) $^ -o $@ $(CUDA_LIBS)

# C that is also C++, like the trainer
build/cuda/dev/calibrate.o: dev/calibrate.c Makefile
	@mkdir -p $(@D)
	$(NVCC) -x cu $(NVFLAGS) -c $< -o $@
build/cuda/calibrate: build/cuda/dev/calibrate.o $(CUDA)
	$(NVCC) $^ -o $@ $(CUDA_LIBS)

# The CPU backend as a library that tests of CUDA kernels open beside them: the twin of every op
build/twin/cpu_kernels.so: $(KERNELS) $(wildcard kernels/cpu/*.h) kernels/kernels.h Makefile
	@mkdir -p $(@D)
	$(CC) $(filter-out -MMD -MP,$(CFLAGS)) -O2 -fPIC -shared -Wl,-Bsymbolic $(KERNELS) -o $@ -lm -ldl

# Emulated CUDA (dev/emu): the same .cu files, compiled by g++, every CUDA thread a fiber
EMUFLAGS := -std=c++17 -g -O2 $(WARN) -Wno-unknown-pragmas -Wno-psabi -fno-strict-aliasing \
            -fno-extern-tls-init -pthread -DBACKEND_CUDA -DWITH_NCCL -MMD -MP \
            -Idev/emu/include -iquote . -iquote kernels/cuda -iquote tests
EMU     := $(patsubst dev/emu/%.cpp,build/emu/dev/emu/%.o,$(wildcard dev/emu/*.cpp))
EMULATED := $(CUDA_KERNELS:%.cu=build/emu/%.o) $(EMU)
build/emu/dev/emu/%.o: dev/emu/%.cpp Makefile
	@mkdir -p $(@D)
	g++ $(EMUFLAGS) -O3 -c $< -o $@
build/emu/%.o: %.cu dev/emu/launch.pl Makefile
	@mkdir -p $(@D)
	perl dev/emu/launch.pl $< < $< > $(@:.o=.cpp)
	g++ -iquote $(<D) $(EMUFLAGS) -c $(@:.o=.cpp) -o $@
build/emu/train_llama: build/emu/train_llama.o $(EMULATED)
	g++ -pthread $^ -o $@ $(LDLIBS)
build/emu/tests/phase_fault.o: tests/phase_fault.c Makefile
	@mkdir -p $(@D)
	g++ $(EMUFLAGS) -x c++ -c $< -o $@
build/emu/train_llama_faulty: build/emu/train_llama.o $(EMULATED) build/emu/tests/phase_fault.o
	g++ -pthread $^ -o $@ $(LDLIBS) -Wl,--wrap=comm_phase,--wrap=comm_gather_begin
build/emu/test_%: build/emu/tests/test_%.o $(EMULATED) build/twin/cpu_kernels.so
	g++ -pthread $(filter %.o,$^) -o $@ $(LDLIBS)

# Kernels with planted bugs, which tests/test_emu.sh expects to be found; and the same under
# ThreadSanitizer: kernels instrumented, the emulator not, because it says itself what is ordered
build/emu/bugs: build/emu/dev/emu/bugs/bugs.o $(EMU)
	g++ -pthread $^ -o $@
# clang++ reports more, but its runtime is a package of its own
TSAN_H  := $(wildcard /usr/lib/llvm-*/lib/clang/*/include/sanitizer/tsan_interface.h)
TSAN_CXX := $(if $(TSAN_H),clang++,g++)
GCC_ONLY := $(if $(filter clang++,$(TSAN_CXX)),-fno-extern-tls-init)
TSAN    := $(filter-out $(GCC_ONLY) -Werror,$(EMUFLAGS)) -DEMU_TSAN
build/tsan/dev/emu/%.o: dev/emu/%.cpp Makefile
	@mkdir -p $(@D)
	$(TSAN_CXX) $(TSAN) -c $< -o $@
build/tsan/%.o: %.cu dev/emu/launch.pl Makefile
	@mkdir -p $(@D)
	perl dev/emu/launch.pl $< < $< > $(@:.o=.cpp)
	$(TSAN_CXX) -iquote $(<D) $(TSAN) -O1 -fsanitize=thread -c $(@:.o=.cpp) -o $@
build/tsan/bugs: build/tsan/dev/emu/bugs/bugs.o $(EMU:build/emu/%=build/tsan/%)
	$(TSAN_CXX) -fsanitize=thread -pthread $^ -o $@
build/tsan/test_%: build/tsan/tests/test_%.o $(EMULATED:build/emu/%=build/tsan/%) \
                   build/twin/cpu_kernels.so
	$(TSAN_CXX) -fsanitize=thread -pthread $(filter %.o,$^) -o $@ $(LDLIBS)

# The emulated kernels under AddressSanitizer and UndefinedBehaviorSanitizer
EMUSAN  := $(filter-out -O2,$(EMUFLAGS)) -O1 -fsanitize=address,undefined -fno-sanitize=vptr \
           -fno-sanitize-recover=all -fno-omit-frame-pointer -U_FORTIFY_SOURCE
build/emusan/dev/emu/%.o: dev/emu/%.cpp Makefile
	@mkdir -p $(@D)
	g++ $(EMUSAN) -c $< -o $@
build/emusan/%.o: %.cu dev/emu/launch.pl Makefile
	@mkdir -p $(@D)
	perl dev/emu/launch.pl $< < $< > $(@:.o=.cpp)
	g++ -iquote $(<D) $(EMUSAN) -c $(@:.o=.cpp) -o $@
build/emusan/test_%: build/emusan/tests/test_%.o $(EMULATED:build/emu/%=build/emusan/%) \
                     build/twin/cpu_kernels.so
	g++ -fsanitize=address,undefined -pthread $(filter %.o,$^) -o $@ $(LDLIBS)

.SECONDARY: $(foreach v,emu tsan emusan,$(EMU_TESTS:%=build/$(v)/tests/test_%.o))
PROGRAMS := $(TESTS:%=build/asan/test_%) $(GRADS:%=build/fp64/test_%) \
            $(EMU_TESTS:%=build/emu/test_%)
test-programs: $(PROGRAMS) build/asan/train_llama build/cpu/train_llama build/emu/train_llama \
               build/cpu/train_llama_faulty build/emu/train_llama_faulty \
               build/cpu/packsim build/cpu/calibrate \
               build/emu/bugs build/tsan/bugs train_llama
test: test-programs
	@tests/run.sh $(PROGRAMS)

# On a machine with a GPU: what only it can show, and what it reaches
gpu-check:
	@dev/gpu_check.sh
gpu-bench:
	@dev/gpu_bench.sh

# The emulated kernels under AddressSanitizer and UBSan (ThreadSanitizer: dev/emu/README.md)
SANITIZED := build/emusan/test_cuda_kernels build/emusan/test_cuda_attention
test-sanitizers: $(SANITIZED)
	@for suite in $(SANITIZED); do echo "== $$suite" && \
	    ASAN_OPTIONS=detect_leaks=0 $$suite || exit 1; done

# The emulated kernels under 40 schedules: half an hour
test-schedules: $(EMU_TESTS:%=build/emu/test_%)
	@SEEDS=20 tests/test_cuda_schedules.sh

# What a token and an attention tile cost here, for --work-cost; what a plan does with your shards
calibrate: build/$(BACKEND)/calibrate
	@echo "built $<; see its --help"
packsim: build/cpu/packsim
	@echo "built $<; see its --help"

bench: train_llama $(BENCHES:%=build/cpu/bench_%)
	@dev/bench.sh
bench-mpi: train_llama build/cpu/calibrate
	@dev/bench_mpi.sh

clean:
	rm -rf build train_llama

-include $(shell find build -name '*.d' 2>/dev/null)
