#   make                builds ./train_llama; make install, uninstall: PREFIX (/usr/local)
#   make test           every test of the program, without a GPU; make test-dev: those of dev/
#   make check          every operation on this machine, on its GPU if it has one
#   make fuzz           looks for files that break a reader (FUZZ_S=60 TARGET=config; needs clang)
#   make bench          measures; make figures: all that README quotes
#   make gpu-day        all that needs a GPU, SECONDS=420; make gpu-kit: as a folder to take there
#   make simple         the whole idea in one C file; make clean removes what was built
#   BACKEND=cuda|cpu    default: cuda if nvcc and a GPU are present, else cpu (C and OpenMP)
#   CC=gcc|clang        WERROR= (empty: warnings are not errors)     V=1 (shows whole commands)
#   MPI= NCCL= EDIT=    empty: build for one rank only, without line editing (default: if installed)
#   CUDA_ARCHS="80 90a" GPU architectures; default: of 80 86 89 90a 100 120 those that nvcc knows;
#                       for others the driver compiles PTX at program start
# Objects: build/<variant>. Rules of tests: tests/tests.mk; of emulated CUDA: dev/emu/emu.mk.

CC      := $(if $(filter default,$(origin CC)),gcc,$(CC))
WERROR  ?= -Werror
NVCC    := $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
GPU     := $(shell nvidia-smi -L 2>/dev/null | grep -m 1 '^GPU ')
COMMIT  := $(shell git describe --always --dirty --exclude '*' 2>/dev/null)
VERSION := 0.1.0
BACKEND ?= $(if $(and $(NVCC),$(GPU)),cuda,cpu)
comma   := ,
# One short line a command; none with make -s
quiet   := $(findstring s,$(firstword -$(MAKEFLAGS)))
say      = $(if $(V),,@$(if $(quiet),,printf '%-4s %s\n' $(1) $(2) && ))

$(if $(filter cpu cuda,$(BACKEND)),,\
    $(error BACKEND=$(BACKEND) is unknown. Run: make BACKEND=cpu, or make BACKEND=cuda))
$(if $(filter cuda,$(BACKEND)$(NVCC)),\
    $(error BACKEND=cuda needs nvcc. Install the CUDA Toolkit. Or run: make BACKEND=cpu))
LACKING := $(strip $(foreach h,jansson pcre2 uninorm,\
             $(if $(wildcard /usr/include/$(h).h /usr/local/include/$(h).h),,$(h).h)))
$(if $(filter-out clean simple help,$(or $(MAKECMDGOALS),all)),$(if $(LACKING),$(error $(LACKING) missing.\
    Run: sudo apt-get install libjansson-dev libpcre2-dev libunistring-dev)))

# gnu11 for POSIX and contraction to FMA; never -ffast-math: isfinite must work and the order of
# sums must not change.
WARN    := -Wall -Wextra $(WERROR)
CFLAGS  := -std=gnu11 -D_GNU_SOURCE -g $(WARN) -fopenmp -fno-math-errno -MMD -MP
# Line editing of --generate in a terminal
EDIT    := $(if $(wildcard /usr/include/histedit.h /usr/local/include/histedit.h),found)
LDLIBS  := -ljansson -lpcre2-8 -lunistring $(if $(EDIT),-ledit) -lm -ldl -lpthread
%/data/base/ask.o: CFLAGS += $(if $(EDIT),-DWITH_EDIT)
# Parts of a program: host code in C, the same in every build, and the kernels of one backend
CPU_COMM := kernels/comm/cpu.c
HOST    := $(filter-out $(CPU_COMM),$(wildcard data/*/*.c kernels/comm/*.c))
KERNELS := $(wildcard kernels/cpu/*.c) $(CPU_COMM)
CUDA_KERNELS := $(wildcard kernels/cuda/*.cu) kernels/comm/nccl.cu
.PHONY: all help install uninstall bench figures clean
all: train_llama
	@echo "built ./train_llama: backend $(BACKEND), $(ON_$(BACKEND))"
train_llama: build/$(BACKEND)/train_llama build/with/backend-$(BACKEND)
	@cp $< $@.tmp && mv $@.tmp $@

# A variant of the build: $(1) = its name, $(2) = flags of host code, $(3) = link command, $(4) =
# objects of the backend
define VARIANT
build/$(1)/%.o: %.c Makefile
	@mkdir -p $$(@D)
	$$(call say,CC,$$<)$$(CC) $$(CFLAGS) $(2) $$(CFLAGS_$$*) -c $$< -o $$@
build/$(1)/train_llama.o: train_llama.cu Makefile
	@mkdir -p $$(@D)
	$$(call say,CC,$$<)$$(CC) $$(CFLAGS) $(2) -DUNPAD_VERSION='"$(VERSION) ($(COMMIT:%=commit %$(comma) )$(1) backend)"' -x c -c $$< -o $$@
build/$(1)/train_llama.o: build/with/version-$(firstword $(COMMIT) none)
build/$(1)/libhost.a: $$(HOST:%.c=build/$(1)/%.o) Makefile
	@mkdir -p $$(@D) && rm -f $$@
	$$(call say,AR,$$@)ar rcs $$@ $$(filter %.o,$$^)
build/$(1)/train_llama: build/$(1)/train_llama.o build/$(1)/libhost.a $(4)
	$$(call say,LINK,$$@)$(3) $$(filter %.o,$$^) build/$(1)/libhost.a -o $$@ $$(LIBS_$(1))
.SECONDARY: $$(HOST:%.c=build/$(1)/%.o) $(4)
endef

# ---- Several ranks need MPI (Open MPI); without it everything else works. Other variants have one
# rank: sanitizers would report MPI's own leaks.
MPI     := $(shell mpicc --showme:compile >/dev/null 2>&1 && \
             echo '\#include <mpi.h>' | mpicc -E -xc - >/dev/null 2>&1 && echo found)
MPI_LIBS := $(if $(MPI),$(shell mpicc --showme:link))
WITH_MPI := $(foreach v,cpu cuda emu,$(addprefix build/$(v)/kernels/comm/,cpu.o mpi.o))
$(WITH_MPI): CFLAGS += $(if $(MPI),-DWITH_MPI $(shell mpicc --showme:compile))

ON_cpu  := $(CC), $(if $(MPI),MPI found,no MPI: one rank only \
             (for more: apt-get install openmpi-bin libopenmpi-dev))
LIBS_cpu := $(LDLIBS) $(MPI_LIBS)
$(eval $(call VARIANT,cpu,-O3,$(CC) -fopenmp -O3,$(KERNELS:%.c=build/cpu/%.o)))

# ---- CUDA: nvcc compiles kernels/cuda and kernels/comm/nccl.cu. Several GPUs need NCCL too; set
# NCCL_HOME=DIR if it is neither in nvcc's prefix nor in /usr or /usr/local.
NCCL_DIRS := $(NCCL_HOME) $(patsubst %/bin/nvcc,%,$(NVCC)) /usr /usr/local
NCCL_H  := $(firstword $(wildcard $(NCCL_DIRS:=/include/nccl.h)))
NCCL_SO := $(firstword $(wildcard $(foreach d,$(NCCL_DIRS),$(d)/lib64/libnccl.so \
             $(d)/lib/libnccl.so $(d)/lib/*-linux-gnu/libnccl.so)))
NCCL    := $(if $(and $(NCCL_H),$(NCCL_SO)),found)
ON_cuda := $(or $(GPU),no GPU here), $(if $(and $(MPI),$(NCCL)),MPI and NCCL found,\
             no $(if $(MPI),NCCL: one GPU only (for more: apt-get install libnccl2 libnccl-dev),\
             MPI: one GPU only (for more: apt-get install openmpi-bin libopenmpi-dev)))
# For the run path, so that LD_LIBRARY_PATH is not needed
CUDA_LIB := $(firstword $(dir $(wildcard \
              $(patsubst %/bin/nvcc,%/lib64/libcublasLt.so,$(NVCC) $(realpath $(NVCC))))))
RPATHS  := $(patsubst %/,%,$(sort $(CUDA_LIB) \
             $(if $(NCCL),$(filter-out /usr/lib/%,$(dir $(NCCL_SO))))))
LIBS_cuda := $(LDLIBS) -lcublasLt $(if $(NCCL),-L$(patsubst %/,%,$(dir $(NCCL_SO))) -lnccl) \
             $(RPATHS:%=-Xlinker -rpath -Xlinker %) $(filter -l% -L%,$(MPI_LIBS)) $(addprefix \
             -Xlinker ,$(subst $(comma), ,$(patsubst -Wl$(comma)%,%,$(filter -Wl%,$(MPI_LIBS)))))
KNOWN   := $(if $(NVCC),$(shell $(NVCC) --list-gpu-arch 2>/dev/null | sed 's/compute_//'))
CUDA_ARCHS ?= $(filter $(KNOWN) 90a,80 86 89 90a 100 120)
# PTX for sm_80 runs on every later GPU, PTX for 90a only on Hopper
GENCODE := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a)$(comma)code=sm_$(a)) \
           -gencode arch=compute_80$(comma)code=compute_80
# A register spill is an error: it halves a kernel's speed and no test would notice. So are remarks
# C75xx of ptxas: serialised wgmma, ignored setmaxnreg.
NVFLAGS = -std=c++17 -O3 -lineinfo -DBACKEND_CUDA $(GENCODE) -MMD -MP \
           $(if $(WERROR),-Werror all-warnings -Xptxas -warn-spills$(comma)-Werror)
CUDA    := $(CUDA_KERNELS:%.cu=build/cuda/%.o)
$(eval $(call VARIANT,cuda,-O3 -DBACKEND_CUDA,$(NVCC),$(CUDA)))
# The objects of each set of architectures have a folder; build/cuda has copies of the set in use.
ARCH_SET := $(subst $() ,-,$(strip $(CUDA_ARCHS)))
build/cuda/%.o: build/cuda/$(ARCH_SET)/%.o
	@mkdir -p $(@D) && cp $(<:.o=.[do]) $(@D)
.SECONDARY: $(CUDA:build/cuda/%=build/cuda/$(ARCH_SET)/%)
$(patsubst %.cu,build/cuda/%.o,$(wildcard kernels/*/*.cu tests/*.cu dev/*/*.cu)): build/with/archs-$(ARCH_SET)
build/cuda/$(ARCH_SET)/%.o: %.cu Makefile
	@mkdir -p $(@D)
	$(call say,NVCC,$<)$(NVCC) $(NVFLAGS) -c $< -o $@ 2> $@.log || (cat $@.log >&2; exit 1)
	@sed '/^ptxas info/d; /bytes stack/d' $@.log >&2; ! grep -q 'C75[0-9][0-9]' $@.log || (rm $@; exit 1)
build/cuda/$(ARCH_SET)/kernels/comm/nccl.o: NVFLAGS += $(if $(NCCL),-DWITH_NCCL -I$(dir $(NCCL_H)))

# Rebuilt when MPI or NCCL was installed or removed since the last build
$(WITH_MPI): build/with/mpi-$(MPI)
build/cuda/$(ARCH_SET)/kernels/comm/nccl.o: build/with/nccl-$(NCCL)
$(foreach v,cpu cuda emu asan,build/$(v)/data/base/ask.o): build/with/edit-$(EDIT)
build/with/%:
	@mkdir -p $(@D) && rm -f $(@D)/$(firstword $(subst -, ,$*))-* && touch $@

bench: train_llama bench-ops     # dev/bench.py --help
	@dev/bench.py $(BENCH)
figures: ; @dev/figures.py $(PARTS)
help:
	@sed -n '1,/^$$/s/^# \{0,3\}//p' Makefile
install: train_llama
install uninstall:
	@dev/install.sh $@ '$(DESTDIR)$(or $(PREFIX),/usr/local)'
clean:
	rm -rf build train_llama
include tests/tests.mk dev/emu/emu.mk
-include $(shell find build -name '*.d' 2>/dev/null)
