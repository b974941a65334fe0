# unpad.c: `make` builds ./train_llama, `make test` runs every test, `make bench` measures.
# On a machine with a GPU: `make gpu-day` tests and measures.
#   BACKEND=cuda|cpu    default: cuda if nvcc and a GPU are present, else cpu (C and OpenMP)
#   CC=gcc|clang        WERROR= (empty: warnings are not errors)
#   MPI= NCCL=          empty: build for one rank only (default: used if installed)
#   CUDA_ARCHS="80 90a" GPU architectures; default: of 80 86 89 90a 100 120 those that nvcc supports;
#                       for others the driver compiles PTX at program start
# Objects go to build/<variant>: cuda, cpu, emulated, sanitizer and fp64 builds coexist.

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
ifeq ($(wildcard /usr/include/jansson.h /usr/local/include/jansson.h),)
ifneq ($(filter-out clean simple,$(or $(MAKECMDGOALS),all)),)
$(error Jansson is missing. Run: sudo apt-get install libjansson-dev)
endif
endif

comma   := ,

# Several ranks need MPI (Open MPI); without it everything else works
MPI     := $(shell mpicc --showme:compile >/dev/null 2>&1 && \
             echo '\#include <mpi.h>' | mpicc -E -xc - >/dev/null 2>&1 && echo found)
MPI_CFLAGS := $(if $(MPI),-DWITH_MPI $(shell mpicc --showme:compile))
MPI_LIBS := $(if $(MPI),$(shell mpicc --showme:link))
# As nvcc takes them
MPI_NVLIBS := $(filter -l% -L%,$(MPI_LIBS)) $(addprefix -Xlinker ,$(subst $(comma), ,\
             $(patsubst -Wl$(comma)%,%,$(filter -Wl$(comma)%,$(MPI_LIBS)))))
ON_cpu  := $(CC), $(if $(MPI),MPI found,\
             no MPI: one rank only (for more: apt-get install openmpi-bin libopenmpi-dev))

# Several GPUs need NCCL as well; set NCCL_HOME=DIR if it is neither in nvcc's prefix nor in /usr or
# /usr/local
NCCL_DIRS := $(NCCL_HOME) $(patsubst %/bin/nvcc,%,$(NVCC)) /usr /usr/local
NCCL_H  := $(firstword $(wildcard $(NCCL_DIRS:=/include/nccl.h)))
NCCL_SO := $(firstword $(wildcard $(foreach d,$(NCCL_DIRS),$(d)/lib64/libnccl.so \
             $(d)/lib/libnccl.so $(d)/lib/*-linux-gnu/libnccl.so)))
NCCL    := $(if $(and $(NCCL_H),$(NCCL_SO)),found)
NCCL_FLAGS := $(if $(NCCL),-DWITH_NCCL -I$(patsubst %/,%,$(dir $(NCCL_H))))
NCCL_LIBS := $(if $(NCCL),-L$(patsubst %/,%,$(dir $(NCCL_SO))) -lnccl)
ON_cuda := $(GPU), $(if $(and $(MPI),$(NCCL)),MPI and NCCL found,\
             no $(if $(MPI),NCCL,MPI): one GPU only (for more: apt-get install openmpi-bin \
             libopenmpi-dev libnccl2 libnccl-dev))

# gnu11 for POSIX and contraction to FMA; never -ffast-math: isfinite must work and the order of
# sums must not change.
WARN    := -Wall -Wextra $(WERROR)
CFLAGS  := -std=gnu11 -D_GNU_SOURCE -g $(WARN) -fopenmp -fno-math-errno -MMD -MP
LDLIBS  := -ljansson -lm -ldl -lpthread
OPT     := -O3
ASAN    := -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined \
           -fno-omit-frame-pointer -DPOISON -DNO_CLONES -U_FORTIFY_SOURCE

# Parts of a program: host code in C, the same in every build, and the kernels of one backend
CPU_COMM := kernels/comm/cpu.c
HOST    := $(filter-out $(CPU_COMM),$(wildcard data/*/*.c kernels/comm/*.c))
KERNELS := $(wildcard kernels/cpu/*.c) $(CPU_COMM)
CUDA_KERNELS := $(wildcard kernels/cuda/*.cu) kernels/comm/nccl.cu
CUDA_C  := $(patsubst tests/test_%.c,%,$(wildcard tests/test_cuda_*.c))
TESTS   := $(filter-out $(CUDA_C),$(patsubst tests/test_%.c,%,$(wildcard tests/test_*.c)))
EMU_TESTS := $(CUDA_C) $(patsubst tests/test_%.cu,%,$(wildcard tests/test_*.cu))
DEV     := $(patsubst dev/%.c,%,$(wildcard dev/*.c)) $(patsubst dev/%.cu,%,$(wildcard dev/*.cu))
FAULTS  := $(shell grep -l 'fault\.c' tests/test_*.c 2>/dev/null | sed 's,tests/test_\(.*\).c,\1,')
# Calls that tests/fault.c can make fail; only our own objects are wrapped
WRAP    := $(addprefix -Wl$(comma)--wrap=,open close write pread fsync rename unlink rmdir mkdir \
           opendir lstat fstat stat malloc calloc realloc)
GRADS   := $(shell grep -l GRADCHECK tests/test_*.c 2>/dev/null | sed 's,tests/test_\(.*\).c,\1,')
# Wrapped by tests/phase_fault.c for tests/test_ranks_failure.sh
RUN_FAULTS := $(addprefix -Wl$(comma)--wrap=,comm_phase comm_gather_begin fsync)

.PHONY: all test test-arm64 test-programs test-sanitizers test-schedules bench simple gpu-day \
        witnesses clean
all: train_llama
	@echo "built ./train_llama: backend $(BACKEND), $(ON_$(BACKEND))"

train_llama: build/$(BACKEND)/train_llama
	@cp $< $@.tmp && mv $@.tmp $@

# ------------------------------------------------------------------------------------------------
# Host code, compiled by the C compiler: $(1) = variant, $(2) = flags

define HOST_RULES
build/$(1)/%.o: %.c Makefile
	@mkdir -p $$(@D)
	$$(CC) $$(CFLAGS) $(2) -c $$< -o $$@
build/$(1)/train_llama.o: train_llama.cu Makefile
	@mkdir -p $$(@D)
	$$(CC) $$(CFLAGS) $(2) -x c -c $$< -o $$@
build/$(1)/libhost.a: $$(HOST:%.c=build/$(1)/%.o) Makefile
	@mkdir -p $$(@D) && rm -f $$@
	ar rcs $$@ $$(filter %.o,$$^)
.SECONDARY: $$(HOST:%.c=build/$(1)/%.o) $$(TESTS:%=build/$(1)/tests/test_%.o) \
            $$(EMU_TESTS:%=build/$(1)/tests/test_%.o)
endef

# Programs of a variant: $(1) = variant, $(2) = link command, $(3) = objects of the backend, $(4) =
# more prerequisites of tests
define PROGRAM_RULES
build/$(1)/train_llama: build/$(1)/train_llama.o build/$(1)/libhost.a $(3)
	$(2) $$(filter %.o,$$^) build/$(1)/libhost.a -o $$@ $$(LIBS_$(1))
build/$(1)/train_llama_faulty: build/$(1)/train_llama.o build/$(1)/tests/phase_fault.o \
                               build/$(1)/libhost.a $(3)
	$(2) $$(filter %.o,$$^) build/$(1)/libhost.a -o $$@ $$(LIBS_$(1)) $$(RUN_FAULTS)
build/$(1)/test_%: build/$(1)/tests/test_%.o build/$(1)/libhost.a $(3) $(4)
	$(2) $$(filter %.o,$$^) build/$(1)/libhost.a -o $$@ $$(LIBS_$(1)) \
	    $$(if $$(filter $$*,$$(FAULTS)),$$(WRAP))
$$(DEV:%=build/$(1)/%): build/$(1)/%: build/$(1)/dev/%.o build/$(1)/libhost.a $(3)
	$(2) $$(filter %.o,$$^) build/$(1)/libhost.a -o $$@ $$(LIBS_$(1))
endef

# ------------------------------------------------------------------------------------------------
# The CPU backend: release, sanitizers, and double precision for gradient checks

define CPU_VARIANT
LIBS_$(1) := $$(LDLIBS)
$(call HOST_RULES,$(1),$(2))
$(call PROGRAM_RULES,$(1),$$(CC) -fopenmp $(2),$$(KERNELS:%.c=build/$(1)/%.o))
.SECONDARY: $$(KERNELS:%.c=build/$(1)/%.o)
endef
$(eval $(call CPU_VARIANT,cpu,$(OPT)))
$(eval $(call CPU_VARIANT,asan,$(ASAN)))
$(eval $(call CPU_VARIANT,fp64,-O2 -DGRADCHECK))
LIBS_cpu += $(MPI_LIBS)
# Several ranks: not in the other variants, where sanitizers would report MPI's own leaks
WITH_MPI := build/cpu/$(CPU_COMM:.c=.o) $(foreach v,cpu cuda emu,build/$(v)/kernels/comm/mpi.o)
$(WITH_MPI): CFLAGS += $(MPI_CFLAGS)
# Rebuilt when MPI was installed or removed since the last build
$(WITH_MPI): build/mpi-$(or $(MPI),none)
build/mpi-%:
	@mkdir -p $(@D) && rm -f $(@D)/mpi-* && touch $@

# The CPU backend as a shared library: the reference that tests of CUDA kernels open
REFERENCE := build/reference/cpu_kernels.so
$(REFERENCE): $(wildcard kernels/cpu/*.[ch] data/base/*.h) data/base/clock.c data/base/error.c \
              kernels/kernels.h Makefile
	@mkdir -p $(@D)
	$(CC) $(filter-out -MMD -MP,$(CFLAGS)) -O2 -fPIC -shared -Wl,-Bsymbolic $(filter %.c,$^) -o $@ \
	    -lm -ldl

# ------------------------------------------------------------------------------------------------
# The CUDA backend: nvcc compiles kernels/cuda, kernels/comm/nccl.cu and their tests

KNOWN   := $(if $(NVCC),$(shell $(NVCC) --list-gpu-arch 2>/dev/null | sed 's/compute_//'))
CUDA_ARCHS ?= $(filter $(KNOWN) 90a,80 86 89 90a 100 120)
# PTX for sm_80 runs on every later GPU, PTX for 90a only on Hopper
GENCODE := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a)$(comma)code=sm_$(a)) \
           -gencode arch=compute_80$(comma)code=compute_80
CUDA    := $(CUDA_KERNELS:%.cu=build/cuda/%.o)
# For the run path, so that LD_LIBRARY_PATH is not needed
CUDA_LIB := $(firstword $(dir $(wildcard \
              $(patsubst %/bin/nvcc,%/lib64/libcublasLt.so,$(NVCC) $(realpath $(NVCC))))))
NCCL_LIB := $(if $(NCCL),$(filter-out /usr/lib/%,$(dir $(NCCL_SO))))
RPATHS  := $(patsubst %/,%,$(sort $(CUDA_LIB) $(NCCL_LIB)))
LIBS_cuda := $(LDLIBS) -lcublasLt $(NCCL_LIBS) $(MPI_NVLIBS) $(RPATHS:%=-Xlinker -rpath -Xlinker %)
# A register spill is an error: it halves a kernel's speed and no test would notice
NVFLAGS = -std=c++17 -O3 -lineinfo -DBACKEND_CUDA $(GENCODE) -MMD -MP \
           $(if $(WERROR),-Werror all-warnings -Xptxas -warn-spills$(comma)-Werror)
$(eval $(call HOST_RULES,cuda,$(OPT) -DBACKEND_CUDA))
$(eval $(call PROGRAM_RULES,cuda,$(NVCC),$(CUDA),$(REFERENCE)))
# Remarks C75xx of ptxas are errors too: serialised wgmma, ignored setmaxnreg
define NVCC_MAKES
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) $(1) $< -o $@ 2> $@.log || (cat $@.log >&2; exit 1)
	@cat $@.log >&2; ! grep -q 'C75[0-9][0-9]' $@.log || (rm $@; exit 1)
endef
build/cuda/%.o: %.cu Makefile
	$(call NVCC_MAKES,-c)
build/cuda/kernels/comm/nccl.o: NVFLAGS += $(NCCL_FLAGS)
build/cuda/kernels/comm/nccl.o: build/cuda/nccl-$(or $(NCCL),none)
build/cuda/nccl-%:
	@mkdir -p $(@D) && rm -f $(@D)/nccl-* && touch $@

# ------------------------------------------------------------------------------------------------
# Emulated CUDA (dev/emu): the same .cu files, compiled by a C++ compiler; every CUDA thread is a
# fiber

EMUFLAGS := -std=c++17 -g $(WARN) -Wno-unknown-pragmas -Wno-psabi -fno-strict-aliasing \
            -fno-extern-tls-init -pthread -DBACKEND_CUDA -DWITH_NCCL -MMD -MP \
            -Idev/emu/include -iquote . -iquote kernels/cuda -iquote tests
# nvcc contracts a * b + c to one rounding: do the same here if the CPU has FMA
FMA     := $(if $(shell grep -owm1 fma /proc/cpuinfo 2>/dev/null),-mfma) -ffp-contract=fast
EMU     := $(patsubst %.cpp,%.o,$(wildcard dev/emu/*.cpp))
EMULATED := $(CUDA_KERNELS:%.cu=%.o) $(EMU)

# $(1) = variant, $(2) = C++ compiler, and flags: $(3) for the emulator, $(4) for everything, $(5)
# for kernels and the linker
define EMULATED_VARIANT
LIBS_$(1) := $$(LDLIBS)
build/$(1)/dev/emu/%.o: dev/emu/%.cpp Makefile
	@mkdir -p $$(@D)
	$(2) $$(EMUFLAGS_$(1)) $(4) $(3) -c $$< -o $$@
build/$(1)/%.o: %.cu dev/emu/launch.pl Makefile
	@mkdir -p $$(@D)
	perl dev/emu/launch.pl $$< < $$< > $$(@:.o=.cpp)
	$(2) -iquote $$(<D) $$(EMUFLAGS_$(1)) $$(FMA) $(4) $(5) -c $$(@:.o=.cpp) -o $$@
$(call HOST_RULES,$(1),-O1 -DBACKEND_CUDA $(4))
$(call PROGRAM_RULES,$(1),$(2) -pthread $(4) $(5),$$(EMULATED:%=build/$(1)/%),$(REFERENCE))
build/$(1)/bugs: build/$(1)/dev/emu/bugs/bugs.o $$(EMU:%=build/$(1)/%)
	$(2) -pthread $(4) $(5) $$^ -o $$@
endef

EMUFLAGS_emu = $(EMUFLAGS)
$(eval $(call EMULATED_VARIANT,emu,g++,-O3,,-O2))
LIBS_emu += $(MPI_LIBS)
# ThreadSanitizer: kernels are instrumented; the emulator is not, because it annotates the order of
# events itself. clang++ finds more than g++, but its runtime is a separate package.
TSAN_CXX := $(if $(wildcard /usr/lib/llvm-*/lib/clang/*/include/sanitizer/tsan_interface.h),clang++,g++)
EMUFLAGS_tsan = $(filter-out -Werror $(if $(filter clang++,$(TSAN_CXX)),-fno-extern-tls-init),\
                  $(EMUFLAGS)) -DEMU_TSAN
$(eval $(call EMULATED_VARIANT,tsan,$(TSAN_CXX),-O2,,-O1 -fsanitize=thread))
EMUFLAGS_emusan = $(EMUFLAGS)
$(eval $(call EMULATED_VARIANT,emusan,g++,,-O1 -fsanitize=address$(comma)undefined \
    -fno-sanitize-recover=all -fno-omit-frame-pointer -U_FORTIFY_SOURCE,-fno-sanitize=vptr))

# ------------------------------------------------------------------------------------------------
# Tests, checks, measurements

PROGRAMS := $(TESTS:%=build/asan/test_%) $(GRADS:%=build/fp64/test_%) \
            $(EMU_TESTS:%=build/emu/test_%)
SANITIZED := build/emusan/test_cuda_kernels build/emusan/test_cuda_attention
test-programs: $(PROGRAMS) $(SANITIZED) build/asan/train_llama build/cpu/train_llama build/emu/train_llama \
               build/cpu/train_llama_faulty build/emu/train_llama_faulty \
               build/emu/bugs build/tsan/bugs train_llama
test: test-programs
	@tests/run.sh $(PROGRAMS)

# The CPU kernels for arm64 (NEON), cross-compiled and run by qemu: results, not speed; minutes.
# apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
ARM64_CC := aarch64-linux-gnu-gcc
ARM64   := $(addprefix build/arm64/test_,matmul kernels attention)
build/arm64/test_%: tests/test_%.c $(wildcard kernels/cpu/*.[ch]) kernels/kernels.h Makefile \
                    kernels/comm/mpi.c kernels/comm/cpu.c kernels/comm/watchdog.c data/base/clock.c data/base/error.c \
                    data/base/memory.c data/base/sum_tree.c
	@mkdir -p $(@D)
	$(ARM64_CC) $(filter-out -MMD -MP,$(CFLAGS)) -O2 -static -ffunction-sections \
	    -Wl,--gc-sections $(filter %.c,$^) -o $@ -lm -lpthread
test-arm64: $(ARM64)
	@for suite in $^; do echo "== $$suite" && OMP_WAIT_POLICY=passive qemu-aarch64 $$suite || exit 1; done

# On a machine with a GPU: tests and measurements
gpu-day:
	@dev/gpu_day.sh $(PARTS)
# Tensor-core arithmetic, layouts and barriers by models that are not ours: dev/witnesses/README.md
witnesses: build/emu/test_tensor_cores build/emu/test_layout
	@dev/witnesses/run.sh

# All cases of the emulated kernels under AddressSanitizer and UBSan (ThreadSanitizer:
# dev/emu/README.md)
test-sanitizers: $(SANITIZED)
	@for suite in $(SANITIZED); do echo "== $$suite" && \
	    ASAN_OPTIONS=detect_leaks=0 $$suite || exit 1; done

# The emulated kernels under 40 schedules: half an hour
test-schedules: build/emu/test_cuda_kernels build/emu/test_cuda_attention
	@SEEDS=20 tests/test_cuda_schedules.sh

# The whole idea in one file of plain C; tests/test_simple.c holds llama.h to it
simple: build/simple
build/simple: dev/simple/train_llama.c
	@mkdir -p $(@D)
	$(CC) -std=c11 -O2 $(WARN) $< -o $@ -lm

# A build against another, step by step in turns; with no other: every layout. dev/bench.py --help
bench: train_llama
	@dev/bench.py $(BENCH)

clean:
	rm -rf build train_llama

-include $(shell find build -name '*.d' 2>/dev/null)
