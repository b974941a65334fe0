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
	$$(call say,CXX,$$<)$(2) $$(EMUFLAGS_$(1)) $(4) $(3) -c $$< -o $$@
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
$(eval $(call EMULATED_VARIANT,emusan,g++,,-O1 -fsanitize=address$(comma)undefined \
    -fno-sanitize-recover=all -fno-omit-frame-pointer -U_FORTIFY_SOURCE,-fno-sanitize=vptr))
