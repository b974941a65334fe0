# unpad.c: `make` builds ./train_llama, `make test` runs every test, `make bench` measures.
#   BACKEND=cpu     the C backend (OpenMP). The CUDA backend is not part of this version yet.
#   CC=gcc|clang    WERROR= (empty: warnings stay warnings)
# Objects go to build/<variant>, so that release, sanitizer and fp64 builds live side by side.

BACKEND ?= cpu
CC      := $(if $(filter default,$(origin CC)),gcc,$(CC))
WERROR  ?= -Werror

ifneq ($(BACKEND),cpu)
$(error BACKEND=$(BACKEND) is not available: this version has the cpu backend. Run: make BACKEND=cpu)
endif
ifeq ($(wildcard /usr/include/cjson/cJSON.h /usr/local/include/cjson/cJSON.h),)
ifneq ($(MAKECMDGOALS),clean)
$(error cJSON is missing. Run: sudo apt-get install libcjson-dev)
endif
endif

comma   := ,

# gnu11 for POSIX and contraction to FMA; never -ffast-math: isfinite must work, sums must keep their order.
WARN    := -Wall -Wextra $(WERROR)
CFLAGS  := -std=gnu11 -g $(WARN) -fopenmp -fno-math-errno -MMD -MP
LDLIBS  := -lcjson -lm -ldl -lpthread
OPT     := -O3
ASAN    := -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -DPOISON -DNO_CLONES \
           -U_FORTIFY_SOURCE

KERNELS := $(wildcard kernels/$(BACKEND)/*.c)
TESTS   := $(patsubst tests/test_%.c,%,$(wildcard tests/test_*.c))
BENCHES := $(patsubst dev/bench_%.c,%,$(wildcard dev/bench_*.c))
FAULTS  := $(shell grep -l 'fault\.c' tests/test_*.c 2>/dev/null | sed 's,tests/test_\(.*\).c,\1,')
# Calls that tests/fault.c can make fail; only our own objects see the wrappers
WRAP    := $(addprefix -Wl$(comma)--wrap=,open close write pread fsync rename unlink rmdir mkdir opendir lstat fstat \
           stat malloc calloc realloc)
GRADS   := $(shell grep -l GRADCHECK tests/test_*.c 2>/dev/null | sed 's,tests/test_\(.*\).c,\1,')

.PHONY: all test test-programs bench check-format clean
all: train_llama
	@echo "built ./train_llama: backend $(BACKEND), $(CC)"

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
.SECONDARY: $$(KERNELS:%.c=build/$(1)/%.o) $$(TESTS:%=build/$(1)/tests/test_%.o)
endef
$(eval $(call VARIANT,$(BACKEND),$(OPT)))
$(eval $(call VARIANT,asan,$(ASAN)))
$(eval $(call VARIANT,fp64,-O2 -DGRADCHECK))

test-programs: $(TESTS:%=build/asan/test_%) $(GRADS:%=build/fp64/test_%) build/asan/train_llama train_llama
test: test-programs
	@tests/run.sh $(TESTS:%=build/asan/test_%) $(GRADS:%=build/fp64/test_%)

bench: train_llama $(BENCHES:%=build/$(BACKEND)/bench_%)
	@dev/bench.sh

clean:
	rm -rf build train_llama

-include $(shell find build -name '*.d' 2>/dev/null)
