#!/usr/bin/env bash
# House rules that a compiler does not check: the include tree, host code in C, dead functions.
. "$(dirname "$0")/lib.sh"
cd "$root" || exit 1
# ---- includes point down -----------------------------------------------------------------------
check includes_are_a_tree_that_points_down python3 tests/include_tree.py
# ---- names and lines -------------------------------------------------------------------------------
lacks model_names_no_backend 'USE_CUDA|__CUDACC__|cuda[A-Z]|omp_|MPI_|nccl' train_llama.cu llama.h
lacks kernels_h_has_no_batch_and_time '\bint(64_t)? B,' kernels/kernels.h
lacks lines_up_to_100_columns '^.{101}' train_llama.cu llama.h data/*/*.[ch] kernels/*.h \
    kernels/*/* tests/*.[ch] tests/*.cu dev/simple/*.c dev/emu/*.cpp dev/emu/*.h dev/emu/include/* dev/emu/bugs/*
lacks results_have_no_machine_paths '(^|[^A-Za-z.])/(root|home|work|tmp|var)/' dev/results/{,witnesses/}*
# A comment is a sentence with a subject and a verb, or a noun with an article.
lacks no_comment_begins_with_what '(//|^ *#|""") ?What ' train_llama.cu llama.h data/*/*.[ch] data/*.py \
    kernels/*.h kernels/*/* tests/* dev/*.py dev/*/*.[ch]* dev/*/*.py scripts/*.py Makefile
# Ceilings in lines, so that growth is a decision: never raised in the commit that needs it.
lines_of() { git ls-files -z -- "$@" | xargs -0 -r cat | wc -l; }
ceiling() {     # ceiling MOST WHAT PATTERN...
    local most=$1 what=$2 n
    shift 2
    n=$(lines_of "$@")
    [ "$n" -gt 0 ] && [ "$n" -le "$most" ] || { echo "$what: $n lines, at most $most" && return 1; }
}
ceilings() {
    local wrong=0
    ceiling 26660 product 'data/*.[ch]' 'kernels/*.[ch]' 'kernels/*.cu*' '*.cu' '*.h' \
        ':!tests' ':!dev' || wrong=1
    ceiling 896 train_llama.cu train_llama.cu || wrong=1
    ceiling 1000 llama.h llama.h || wrong=1
    ceiling 353 kernels.h kernels/kernels.h || wrong=1
    ceiling 16480 tests 'tests/*.[ch]' 'tests/*.cu' 'tests/*.sh' 'tests/*.py' || wrong=1
    ceiling 11175 dev dev ':!dev/results' || wrong=1
    ceiling 2860 'scripts and data/*.py' scripts 'data/*.py' || wrong=1
    ceiling 145 Makefile Makefile || wrong=1
    ceiling 180 README README.md || wrong=1
    ceiling 400 dev/simple dev/simple/train_llama.c || wrong=1
    return $wrong
}
if git rev-parse --git-dir > /dev/null 2>&1; then
    judge top_level_is_the_agreed_one "$(git ls-files | cut -d/ -f1 | sort -u | grep -vxE 'Makefile|train_llama\.cu|llama\.h|kernels|data|scripts|tests|dev|README\.md|LICENSE|CHANGELOG\.md|SECURITY\.md|CONTRIBUTING\.md|Dockerfile|compile_flags\.txt|\.editorconfig|\.ci|\.clang-format|\.gitignore|\.dockerignore')"
    check ceilings_hold ceilings
else skip top_level_is_the_agreed_one 'not a git checkout'; fi
check_python readme_quotes_the_code_as_it_is <<'PY'
quoted = re.search(r"```c\n(.*?)```", open("README.md").read(), re.S).group(1)
import textwrap
assert textwrap.indent(quoted, "    ") in open("llama.h").read()
PY
check_python readme_quotes_the_newest_figures <<'PY'
sys.path.insert(0, "dev")
import figures
readme = " ".join(open("README.md").read().split())
for text in figures.quotes(): assert " ".join(text.split()) in readme, text
PY
check_python links_of_pages_lead_somewhere <<'PY'
def anchors(page):
    heads = re.findall(r"^#+ (.*)$", open(page).read(), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
for page in [p for p in glob.glob("**/*.md", recursive=True) if not p.startswith("build")]:
    for link in re.findall(r"\]\(([^)#\s]*#?[^)\s]*)\)", open(page).read()):
        path, _, anchor = link.partition("#")
        path = os.path.join(os.path.dirname(page), path) if path else page
        assert link.startswith("http") or os.path.exists(path), (page, link)
        assert not anchor or anchor in anchors(path), (page, link)
PY
if clang-format --version 2> /dev/null | grep -q 'version 14\.'; then
    check the_format_is_clang_formats clang-format --dry-run -Werror train_llama.cu llama.h data/*/*.[ch] \
        kernels/*.h kernels/*/*.[ch]* dev/simple/*.c
else skip the_format_is_clang_formats 'clang-format 14 is not installed'; fi
# ---- host code is C, and all of it is used ------------------------------------------------------------
syntax() {
    "$@" -fsyntax-only -x c -std=gnu11 -D_GNU_SOURCE -Wall -Wextra -Werror -DUNPAD_VERSION='""' train_llama.cu
}
check host_is_c_for_both_backends eval 'syntax gcc && syntax gcc -DBACKEND_CUDA'
# static inline hides dead functions of llama.h from the compiler
check every_function_of_the_model_is_used syntax gcc -Dinline=
# Every function that a header declares is called from another file of the product or a test.
functions_are_used() {
    local objects=(data/*/*.c)  # of these: an old build may hold others
    objects=("${objects[@]/#/build/cpu/}")
    objects=("${objects[@]/%.c/.o}")
    ls "${objects[@]}" build/asan/tests/test_{io,config,tokenizer,samples}.o > /dev/null || return
    nm -g --defined-only "${objects[@]}" | awk '$2 == "T" { print $3 }' | sort -u > "$work/defined"
    nm -u build/cpu/train_llama.o "${objects[@]}" build/cpu/kernels/*/*.o \
        build/asan/tests/*.o | awk '$1 == "U" { print $2 }' | sort -u > "$work/called"
    ! comm -23 "$work/defined" "$work/called" | grep .
}
check every_public_function_has_a_caller functions_are_used
# dev/simple stays readable in one sitting: one file, libc and libm only
simple=dev/simple/train_llama.c
plain_c() { "$@" -fsyntax-only -std=c11 -pedantic -Wall -Wextra -Werror $simple; }
lacks simple_includes_nothing_of_the_project '#include "' $simple
check simple_is_plain_c_for_gcc plain_c gcc
with_program simple_is_plain_c_for_clang clang && check simple_is_plain_c_for_clang plain_c clang
# every C file of the program and its tests, warnings as errors (the build does the same with gcc)
clang_accepts() {
    local f
    for f in data/*/*.c kernels/*/*.c tests/*.c; do
        clang -fsyntax-only -fopenmp -std=gnu11 -D_GNU_SOURCE -Wall -Wextra -Werror "$f" || return 1
    done
    syntax clang && syntax clang -DBACKEND_CUDA
}
echo '#include <omp.h>' | clang -fopenmp -fsyntax-only -x c - 2> /dev/null ||
    { skip everything_compiles_with_clang 'clang or its omp.h is not installed' && finish; }
check everything_compiles_with_clang clang_accepts
finish
