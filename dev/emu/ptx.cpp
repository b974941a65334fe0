// Kernels that nvcc has compiled: which one runs in place of another. It is found by its name,
// which the table of symbols of the program has: the sources of the kernels know nothing of it.
#include "ptx.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine.h"

namespace ptx {
using emu::opt;

// name<arguments> of a mangled function: the two compilers have other names for unnamed namespaces
static std::string plain_name(const char *symbol) {
    int status;
    char *demangled = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
    std::string name = demangled ? demangled : symbol;
    free(demangled);
    for (const char *unnamed : {"(anonymous namespace)::", "void "})
        for (size_t at; (at = name.find(unnamed)) != std::string::npos && at < name.find('<');)
            name.erase(at, strlen(unnamed));
    int depth = 0;
    for (size_t i = 0; i < name.size(); i++) {
        depth += (name[i] == '<') - (name[i] == '>');
        if (depth == 0 && name[i] == '(') name.resize(i);
    }
    return name;
}

// Functions of this program, static ones too, by address
static std::map<const void *, std::string> functions() {
    const int fd = open("/proc/self/exe", O_RDONLY);
    struct stat st;
    if (fd < 0 || fstat(fd, &st)) emu::fail("cannot read /proc/self/exe");
    char *file = (char *)mmap(nullptr, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    const auto *header = (const ElfW(Ehdr) *)file;
    const auto *sections = (const ElfW(Shdr) *)(file + header->e_shoff);
    uintptr_t base = 0;
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *p) {
            *(uintptr_t *)p = info->dlpi_addr;
            return 1;
        },
        &base);
    std::map<const void *, std::string> found;
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        const auto *symbols = (const ElfW(Sym) *)(file + sections[i].sh_offset);
        const char *names = file + sections[sections[i].sh_link].sh_offset;
        for (size_t k = 0; k < sections[i].sh_size / sizeof *symbols; k++)
            if (ELF64_ST_TYPE(symbols[k].st_info) == STT_FUNC)
                found[(const void *)(base + symbols[k].st_value)] = names + symbols[k].st_name;
    }
    munmap(file, (size_t)st.st_size);
    close(fd);
    return found;
}

// By name and architecture
static std::map<std::string, std::map<std::string, const Kernel *>> &registered() {
    static std::map<std::string, std::map<std::string, const Kernel *>> all;
    return all;
}
Registered::Registered(const Kernel *kernels) {
    for (; kernels->arch; kernels++)
        registered()[plain_name(kernels->symbol)][kernels->arch] = kernels;
}

// PTX runs on later architectures too, that of 90a on 90 only
static const Kernel *best(const std::string &name) {
    const Kernel *best = nullptr;
    int best_arch = 0;
    for (auto &[of, kernel] : registered()[name]) {
        const int runs_on = atoi(of.c_str());
        if (runs_on > best_arch && (of.back() == 'a' ? runs_on == opt.arch : runs_on <= opt.arch))
            best = kernel, best_arch = runs_on;
    }
    return best;
}
}  // namespace ptx

emu::Compiled emu::compiled_kernel(const void *kernel, std::initializer_list<size_t> sizes) {
    if (ptx::registered().empty()) return nullptr;
    static const auto names = ptx::functions();
    const auto symbol = names.find(kernel);
    const std::string name = symbol == names.end() ? "?" : ptx::plain_name(symbol->second.c_str());
    const ptx::Kernel *found = ptx::best(name);
    if (!found) fail("no PTX of %s for sm_%d", name.c_str(), opt.arch);
    const size_t *expected = found->sizes;
    for (size_t size : sizes)
        if (size != *expected++)
            fail("%s: parameter %td has %zu bytes, in PTX %zu", name.c_str(),
                 expected - found->sizes, size, expected[-1]);
    if (*expected) fail("%s: PTX has more than %zu parameters", name.c_str(), sizes.size());
    return found->function;
}
