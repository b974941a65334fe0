# Emulated CUDA: the same .cu files, compiled by a C++ compiler; every CUDA thread is a fiber

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
build/$(1)/dev/emu/%.o: dev/emu/%.cpp Makefile dev/emu/emu.mk
	@mkdir -p $$(@D)
	$$(call say,CXX,$$<)$(2) $$(EMUFLAGS_$(1)) $$(FMA) $(4) $(3) -c $$< -o $$@
build/$(1)/%.o: %.cu dev/emu/launch.pl Makefile dev/emu/emu.mk
	@mkdir -p $$(@D)
	@perl dev/emu/launch.pl $$< < $$< > $$(@:.o=.cpp)
	$$(call say,CXX,$$<)$(2) -iquote $$(<D) $$(EMUFLAGS_$(1)) $$(FMA) $(4) $(5) -c $$(@:.o=.cpp) -o $$@
$(call VARIANT,$(1),-O1 -DBACKEND_CUDA $(4),$(2) -pthread $(4) $(5),$$(EMULATED:%=build/$(1)/%))
$(call TEST_RULES,$(1),$(2) -pthread $(4) $(5),$$(EMULATED:%=build/$(1)/%))
build/$(1)/bugs: build/$(1)/dev/emu/bugs/bugs.o $$(EMU:%=build/$(1)/%)
	$$(call say,LINK,$$@)$(2) -pthread $(4) $(5) $$^ -o $$@
endef

EMUFLAGS_emu = $(EMUFLAGS)
$(eval $(call EMULATED_VARIANT,emu,g++,-O3,-fno-omit-frame-pointer,-O2))
LIBS_emu += $(MPI_LIBS)
# ThreadSanitizer: kernels are instrumented; the emulator is not, because it annotates the order of
# events itself. clang++ finds more than g++, but its runtime is a separate package.
TSAN_CXX := $(if $(wildcard /usr/lib/llvm-*/lib/clang/*/include/sanitizer/tsan_interface.h),clang++,g++)
EMUFLAGS_tsan = $(filter-out -Werror $(if $(filter clang++,$(TSAN_CXX)),-fno-extern-tls-init),\
                  $(EMUFLAGS)) -DEMU_TSAN
$(eval $(call EMULATED_VARIANT,tsan,$(TSAN_CXX),-O2,,-O1 -fsanitize=thread))
EMUFLAGS_emusan = $(EMUFLAGS)
$(eval $(call EMULATED_VARIANT,emusan,g++,-O3,-O1 -fsanitize=address$(comma)undefined \
    -fno-sanitize-recover=all -fno-omit-frame-pointer -U_FORTIFY_SOURCE,-fno-sanitize=vptr))

# The kernels as nvcc compiles them: their PTX as C++ (ptx.py), linked beside those of build/emu, whose
# place they take
PTX_ARCHS ?= $(filter $(KNOWN) 90a,80 90a 120)
PTX_FILES := $(shell grep -l __global__ $(CUDA_KERNELS))
PTX_OF   = $(foreach a,$(PTX_ARCHS),$(1:%.cu=build/ptx/$(a)/%.o))
PTX_CXX  = g++ $(filter-out -W%,$(EMUFLAGS)) $(filter -m%,$(FMA)) -ffp-contract=off -O1
define PTX_RULES
build/ptx/$(1)/%.ptx: %.cu Makefile dev/emu/emu.mk build/ptx/nccl/nccl.h
	@mkdir -p $$(@D)
	$$(call say,NVCC,$$<)$(NVCC) -std=c++17 -O3 -lineinfo -DBACKEND_CUDA -DWITH_NCCL -Ibuild/ptx/nccl \
	    -MMD -MP -MF $$@.d -MT $$@ -arch=compute_$(1) -ptx $$< -o $$@
build/ptx/$(1)/%.cpp: build/ptx/$(1)/%.ptx dev/emu/ptx.py
	$$(call say,PTX,$$<)dev/emu/ptx.py $$< > $$@ || (rm $$@; exit 1)
build/ptx/$(1)/%.o: build/ptx/$(1)/%.cpp dev/emu/ptx.h
	$$(call say,CXX,$$<)$(PTX_CXX) -c $$< -o $$@
endef
$(foreach a,$(PTX_ARCHS),$(eval $(call PTX_RULES,$(a))))
build/ptx/nccl/nccl.h: dev/emu/include/nccl.h   # without the emulated CUDA beside it
	@mkdir -p $(@D) && cp $< $@
PTX_LINK = $(call say,LINK,$@)g++ -pthread $(filter %.o,$^) build/emu/libhost.a -o $@ $(LIBS_emu)
PTX_PARTS := build/emu/libhost.a $(EMULATED:%=build/emu/%) $(call PTX_OF,$(PTX_FILES))
build/ptx/train_llama: build/emu/train_llama.o $(PTX_PARTS)
	$(PTX_LINK)
build/ptx/test_%: build/emu/tests/test_%.o $(PTX_PARTS)
	$(PTX_LINK)
build/ptx/test_conform: build/ptx/90a/tests/test_conform.o
.SECONDARY: $(foreach e,ptx cpp o,$(patsubst %.o,%.$(e),$(call PTX_OF,$(PTX_FILES) tests/test_conform.cu)))
