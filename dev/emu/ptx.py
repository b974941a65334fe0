#!/usr/bin/env python3
"""PTX as nvcc writes it -> C++ functions for the emulator's fibers, one a kernel: dev/emu/ptx.py IN.ptx > OUT.cpp

A kernel's parameters come as pointers, its registers are variables, its branches goto. What an instruction does
stands in RULES; one that no rule fits is an error with its line. The functions that are not the emulator's own
are in ptx.h."""
import functools, os, re, sys

# opcode   operands => C++.   Before "=" the outputs; {0}, {1}, ... are the inputs, \1 a group of the opcode.
#   f32, u32, ...  a value read as that type, or written; pred: a predicate
#   f32*4          {four of them}: an array `d` that the C++ fills, or an array of its own; f32*1 or f32*: one
#   #     =1       an immediate; the operand is exactly this
#   @     @s       [address]: generic, a pointer; in shared memory, 32 bits
#   @m             [map, {x, y, z}]: {n[0]} is the map, {n[1]} are the coordinates
#   f32~32         {registers} that are used after the instruction, until it is waited for: a pointer to them
# One output is what the C++ computes ({D}: its type); AT stands for file and line.
RULES = r"""
mov\.pred                          pred = pred => {0}
mov\.[busf](16|32|64)              b\1 = b\1 => {0}
mov\.b32                           b32 = b16*2 => {0}[0] | (uint32_t){0}[1] << 16
mov\.b64                           b64 = b32*2 => {0}[0] | (uint64_t){0}[1] << 32
mov\.b32                           b16*2 = b32 => d[0] = (uint16_t){0}, d[1] = (uint16_t)({0} >> 16)
mov\.b64                           b32*2 = b64 => d[0] = (uint32_t){0}, d[1] = (uint32_t)({0} >> 32)
cvta\.(?:to\.global|param)\.u64    u64 = u64 => {0}
cvta\.shared\.u64                  u64 = u64 => (uint64_t)emu::smem_ptr((uint32_t){0}, 0, "cvta.shared")
cvt\.([us]\d+)\.([us]\d+)          \1 = \2 => {0}
cvt\.rn\.(f32|f64)\.([us]\d+)      \1 = \2 => {0}
cvt\.f64\.f32                      f64 = f32 => {0}
cvt\.rn\.f32\.f64                  f32 = f64 => {0}
cvt\.sat\.f32\.f32                 f32 = f32 => {0} > 0 ? std::min({0}, 1.0f) : 0
cvt\.rn\.bf16\.f32                 b16 = f32 => ptx::to_bf16({0})
cvt\.rn\.bf16x2\.f32               b32 = f32 f32 => (uint32_t)ptx::to_bf16({0}) << 16 | ptx::to_bf16({1})
cvt\.f32\.bf16                     f32 = b16 => ptx::as<float>((uint32_t){0} << 16)
setp\.(eq|ne|lt|le|gt|ge)\.([busf]\d+)  pred = \2 \2 => ptx::\1({0}, {1})
setp\.(eq|ne|lt|le|gt|ge)u\.(f\d+) pred = \2 \2 => !({0} == {0}) || !({1} == {1}) || ptx::\1({0}, {1})
selp\.([busf]\d+)                  \1 = \1 \1 pred => {2} ? {0} : {1}
and\.(pred|b\d+)                   \1 = \1 \1 => {0} & {1}
or\.(pred|b\d+)                    \1 = \1 \1 => {0} | {1}
xor\.(pred|b\d+)                   \1 = \1 \1 => {0} ^ {1}
not\.pred                          pred = pred => !{0}
not\.(b\d+)                        \1 = \1 => ~{0}
shl\.b(\d+)                        b\1 = b\1 u32 => {1} < \1 ? {0} << {1} : 0
shr\.[ub](\d+)                     u\1 = u\1 u32 => {1} < \1 ? {0} >> {1} : 0
shr\.s(\d+)                        s\1 = s\1 u32 => {0} >> std::min({1}, \1u - 1)
bfi\.b32                           b32 = b32 b32 u32 u32 => ptx::bfi({0}, {1}, {2}, {3})
prmt\.b32                          b32 = b32 b32 b32 => ptx::prmt({0}, {1}, {2})
add\.[us](\d+)                     u\1 = u\1 u\1 => {0} + {1}
sub\.[us](\d+)                     u\1 = u\1 u\1 => {0} - {1}
neg\.s(\d+)                        u\1 = u\1 => 0 - {0}
mul\.lo\.[us](\d+)                 u\1 = u\1 u\1 => 1u * {0} * {1}
mad\.lo\.[us](\d+)                 u\1 = u\1 u\1 u\1 => 1u * {0} * {1} + {2}
mul\.wide\.([us])32                \g<1>64 = \g<1>32 \g<1>32 => ({D}){0} * {1}
mul\.hi\.([us])(32|64)             \1\2 = \1\2 \1\2 => ({D})((__int128){0} * {1} >> \2)
div\.([us]\d+)                     \1 = \1 \1 => {0} / {1}
rem\.([us]\d+)                     \1 = \1 \1 => {0} % {1}
(min|max)\.([us]\d+)               \2 = \2 \2 => std::\1({0}, {1})
(min|max)\.(f32|f64)               \2 = \2 \2 => std::f\1({0}, {1})
add(?:\.rn)?\.(f32|f64)            \1 = \1 \1 => {0} + {1}
sub(?:\.rn)?\.(f32|f64)            \1 = \1 \1 => {0} - {1}
mul(?:\.rn)?\.(f32|f64)            \1 = \1 \1 => {0} * {1}
div\.rn\.(f32|f64)                 \1 = \1 \1 => {0} / {1}
div\.(?:approx|full)\.f32          f32 = f32 f32 => {0} / {1}
fma\.rn\.(f32|f64)                 \1 = \1 \1 \1 => std::fma({0}, {1}, {2})
fma\.rm\.f32                       f32 = f32 f32 f32 => ptx::fma_rm({0}, {1}, {2})
neg\.(f32|f64)                     \1 = \1 => -{0}
abs\.(f32|f64)                     \1 = \1 => std::fabs({0})
rcp\.rn\.(f32|f64)                 \1 = \1 => 1 / {0}
rcp\.approx\.ftz\.f64              f64 = f64 => ptx::rcp_upper({0})
sqrt\.rn\.(f32|f64)                \1 = \1 => std::sqrt({0})
ex2\.approx\.ftz\.f32              f32 = f32 => emu::ex2({0})
ex2\.approx\.f32                   f32 = f32 => exp2f({0})
ld(?:\.global(?:\.nc|\.cg)?|\.param)?(?:\.v([24]))?\.([busf]\d+) \2*\1 = @ => ptx::load(d, {0}, AT)
ld\.shared(?:\.v([24]))?\.([busf]\d+)                        \2*\1 = @s => ptx::load(d, {0}, AT)
st(?:\.global)?(?:\.v([24]))?\.([busf]\d+)                   @ \2*\1 => ptx::store({0}, {1}, AT)
st\.shared(?:\.v([24]))?\.([busf]\d+)                        @s \2*\1 => ptx::store({0}, {1}, AT)
atom\.global\.inc\.u32             u32 = @ u32 => atomicInc((unsigned *)ptx::at({0}, 4, AT), {1})
shfl\.sync\.(idx|bfly)\.b32        b32*1|pred*1 = b32 u32 u32 u32 => ptx::shfl_\1(d, p, {0}, {1}, {2}, {3}, AT)
vote\.sync\.any\.pred              pred = pred u32 => emu::vote({1}, {0}, "vote.sync", AT) != 0
bar\.warp\.sync                    u32 => emu::warp_coll({0}, emu::fn_sync, "bar.warp.sync", nullptr, AT, false)
bar\.sync                          s32 => emu::bar({0}, -1, true, AT)
barrier\.cta\.sync\.aligned        s32 s32 => emu::bar({0}, {1}, true, AT)
barrier\.cta\.arrive\.aligned      s32 s32 => emu::bar({0}, {1}, false, AT)
membar\.gl|fence\.acq_rel\.gpu      => __threadfence()
trap                               => emu::fail("%s:%d trap", AT)

ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16         b32*4 = @s => emu::ldmatrix(d, 4, false, {0}, AT)
ldmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16  b32*4 = @s => emu::ldmatrix(d, 4, true, {0}, AT)
mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32 \
    f32*4 = b32*4 b32*2 f32*4 => ptx::mma(d, {0}, {1}, {2}, AT)
cp\.async\.cg\.shared\.global\.L2::128B  @s @ =16 s32 => ptx::copy({0}, {1}, {3}, AT)
cp\.async\.commit_group            => emu::cp_async_commit()
cp\.async\.wait_group              # => emu::cp_wait({0})

mbarrier\.init\.shared::cta\.b64   @s u32 => emu::mbar_init({0}, {1}, AT)
mbarrier\.arrive\.shared::cta\.b64 =_ @s => emu::mbar_arrive({1}, 1, 0, AT)
mbarrier\.arrive\.expect_tx\.shared::cta\.b64  =_ @s u32 => emu::mbar_arrive({1}, 1, {2}, AT)
mbarrier\.try_wait\.parity\.shared::cta\.b64   pred = @s u32 => emu::mbar_try_wait({0}, {1}, AT)
fence\.mbarrier_init\.release\.cluster  => emu::fence_mbar_init()
fence\.proxy\.async\.shared::cta   => emu::fence_proxy_async()
prefetch\.tensormap                @ => ptx::at({0}, 64, AT)
cp\.async\.bulk\.tensor\.3d\.shared::cluster\.global\.mbarrier::complete_tx::bytes \
    @s @m @s => emu::tma_load({0}, {1[0]}, {2}, 3, {1[1]}, AT)
cp\.async\.bulk\.tensor\.3d\.global\.shared::cta\.bulk_group \
    @m @s => emu::tma_store({0[0]}, {1}, 3, {0[1]}, AT)
cp\.async\.bulk\.commit_group      => emu::bulk_commit()
cp\.async\.bulk\.wait_group(?:\.read)?  # => emu::bulk_wait({0})

wgmma\.fence\.sync\.aligned        => emu::wgmma_fence(AT)
wgmma\.commit_group\.sync\.aligned => emu::wgmma_commit(AT)
wgmma\.wait_group\.sync\.aligned   # => emu::wgmma_wait({0}, AT)
wgmma\.mma_async\.sync\.aligned\.m64n64k16\.f32\.bf16\.bf16 \
    f32~32 u64 u64 pred =1 =1 # # => emu::wgmma({0}, 64, nullptr, {1}, {2}, {3}, {6}, {7}, AT)
wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16\.bf16 \
    f32~64 u64 u64 pred =1 =1 # # => emu::wgmma({0}, 128, nullptr, {1}, {2}, {3}, {6}, {7}, AT)
wgmma\.mma_async\.sync\.aligned\.m64n64k16\.f32\.bf16\.bf16 \
    f32~32 b32~4 u64 pred =1 =1 # => emu::wgmma({0}, 64, {1}, 0, {2}, {3}, false, {6}, AT)
wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16\.bf16 \
    f32~64 b32~4 u64 pred =1 =1 # => emu::wgmma({0}, 128, {1}, 0, {2}, {3}, false, {6}, AT)
setmaxnreg\.inc\.sync\.aligned\.u32  # => emu::setmaxnreg({0}, true, AT)
setmaxnreg\.dec\.sync\.aligned\.u32  # => emu::setmaxnreg({0}, false, AT)
"""
RULES = [re.match(r"(\S+)\s+(.*?)\s*=> (.*)", line).groups() for line in RULES.replace("\\\n", "").split("\n") if line]
C_TYPES = {"pred": "bool", "f32": "float", "f64": "double",
           **{f"{k}{n}": f"{c}{n}_t" for k, c in zip("bus", ("uint", "uint", "int")) for n in (8, 16, 32, 64)}}
SPECIAL = {"%laneid": "(uint32_t)emu::lane_id()",
           **{f"%{reg}.{i}": f"{var}.{i}" for i in "xyz" for reg, var in
              (("tid", "threadIdx"), ("ctaid", "blockIdx"), ("ntid", "blockDim"), ("nctaid", "gridDim"))}}
SHARED = r"\.shared \.align (\d+) \.(\w+) (\w+)(?:\[(\d+)\])?$"


class Unknown(Exception):
    pass


@functools.cache
def rules_for(op):
    return [(m, signature, code) for pattern, signature, code in RULES if (m := re.fullmatch(pattern, op))]


def split(text):
    """Operands: at the commas that stand in no brackets"""
    return [x.strip() for x in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)]


def members(operand, n=None):
    """{a, b} -> [a, b]; with n: None if they are not so many, or one is in brackets"""
    found = [x.strip() for x in operand.strip("{} ").split(",")]
    return found if n is None or len(found) == int(n or 1) and (operand[0] == "{") == (len(found) > 1) else None


class Module:
    """One file: what stands between its kernels, and these"""
    def __init__(self, path):
        self.path, source = path, open(path).read()
        text = re.sub(r"//[^\n]*|^[ \t]*\.(?:version|target|address_size|file|loc)\s[^\n]*", "", source, flags=re.M)
        self.text = text.split("\t.section\t")[0]
        self.arch = re.search(r"^\.target sm_(\w+)", source, re.M)[1]
        self.globals, self.shared = {}, []

    def fail(self, at, why):
        sys.exit(f"{self.path}:{self.line(at)}: {why}")

    def line(self, at):
        return self.text.count("\n", 0, at) + 1

    def declarations(self, begin, end):
        for m in re.compile(r"\s*([^;\s][^;]*);?").finditer(self.text, begin, end):
            s = " ".join(m[1].split())
            if g := re.fullmatch(r"(?:\.visible )?\.global \.align (\d+) \.(\w+) (\w+)(\[\d+\])?(?: = (\w+))?", s):
                self.globals[g[3]] = f"alignas({g[1]}) static {C_TYPES[g[2]]} {g[3]}{g[4] or ''} = {{{g[5] or 0}}};"
            elif g := re.match(SHARED, s): self.shared.append(g.groups())
            elif s != ".extern .shared .align 1024 .b8 smem[]": self.fail(m.start(1), f"unknown declaration: {s[:80]}")

    def translate(self):
        kernels, out, end = [], [], 0
        for m in re.finditer(r"(?:\.visible )?\.entry (\w+)\(([^)]*)\)([^{]*)\{", self.text):
            self.declarations(end, m.start())
            depth, end = 1, m.end()
            while depth:
                depth += {"{": 1, "}": -1}.get(self.text[end], 0)
                end += 1
            kernel = Kernel(self, m)
            out += kernel.translate(f"kernel_{len(kernels)}", m.end(), end - 1)
            sizes = ", ".join(map(str, kernel.sizes))
            kernels.append(f'    {{"{self.arch}", "{m[1]}", kernel_{len(kernels)}, {{{sizes}}}}},')
        self.declarations(end, len(self.text))
        print("\n".join(['#include "dev/emu/ptx.h"', f'#define AT "{self.path}"', *self.globals.values(), *out,
                         "static const ptx::Kernel kernels[] = {", *kernels, "    {}};",
                         "static const ptx::Registered registered(kernels);"]))


class Kernel:
    def __init__(self, module, entry):
        self.module, self.registers, self.tuples, self.params, self.sizes = module, {}, {}, {}, []
        self.shared, self.shared_bytes = {}, 0
        for variable in module.shared: self.add_shared(*variable)
        for p in filter(None, re.split(r",\s*", entry[2].strip())):
            m = re.fullmatch(r"\.param (?:\.align \d+ )?\.(\w+) (?:\.ptr(?: \.\w+)*(?: \d+)? )?(\w+)(?:\[(\d+)\])?", p)
            if not m: module.fail(entry.start(2), f"unknown parameter: {p}")
            self.params[m[2]] = len(self.sizes)
            self.sizes.append(int(m[3] or int(m[1][1:]) // 8))
        m = re.search(r"\.maxntid ([\d, ]+)", entry[3])
        self.most_threads = m[1].replace(",", " *").strip() if m else "1024"

    def add_shared(self, align, c_type, name, count):
        self.shared_bytes = -(-self.shared_bytes // int(align)) * int(align)
        self.shared[name] = self.shared_bytes
        self.shared_bytes += int(count or 1) * int(c_type[1:]) // 8

    def variable(self, register):
        return self.tuples.get(register) or register.replace("%", "r_")

    def symbol(self, x):
        """The address that a name stands for; in shared memory, 32 bits"""
        if x in self.params: return f"(uint64_t)P[{self.params[x]}]"
        if x == "smem": return "(uint32_t)emu::smem_addr(smem)"
        if x in self.shared: return f"(uint32_t)emu::smem_addr(ptx::statics + {self.shared[x]})"
        if x in self.module.globals: return f"(uint64_t)&{x}"
        raise Unknown(f"unknown name {x}")

    def value(self, x, t):
        c = C_TYPES[t]
        if x in SPECIAL: return SPECIAL[x]
        if x in self.registers: return f"ptx::as<{c}>({self.variable(x)})"
        if m := re.fullmatch(r"0[fd]([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})", x):
            return f"ptx::as<{c}>(uint{len(m[1]) * 4}_t(0x{m[1]}))"
        if t == "pred" and x in ("0", "-1"): return f"{x} != 0"
        if t == "pred": raise Unknown(f"unknown predicate {x}")
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", x): return f"({c}){int(x.rstrip('U'), 0) & (2**int(t[1:]) - 1)}u"
        m = re.fullmatch(r"(\w+)(?:\+(\d+))?", x)
        if not m: raise Unknown(f"unknown operand {x}")
        return f"({c})({self.symbol(m[1])} + {m[2] or 0})"

    def address(self, x, t):
        m = re.fullmatch(r"([%\w]+?)\s*(?:\+\s*(-?\d+))?", x.strip())
        if not m: raise Unknown(f"unknown address {x}")
        base = self.value(m[1], t) if m[1] in self.registers else self.symbol(m[1])
        if m[1] not in self.registers and base.startswith("(uint32_t)") != (t == "u32"):
            raise Unknown(f"address of another state space: {x}")
        return f"{base} + ({m[2] or 0})"

    def input(self, x, kind, name, before):
        """C++ of an operand, with declarations that go before it; None: it does not have this form"""
        if kind == "#": return x if x.isdigit() else None
        if kind[0] == "=": return x if x == kind[1:] else None
        if kind == "@m":
            m = re.fullmatch(r"\[\s*(\S+),\s*(\{[^}]*\})\s*\]", x)
            return m and (f"(const CUtensorMap *)({self.address(m[1], 'u64')})",
                          ", ".join(self.value(c, "s32") for c in members(m[2])))
        if kind[0] == "@":
            if x[0] != "[" or "{" in x: return None
            return self.address(x[1:-1], "u32") if kind == "@s" else f"(void *)({self.address(x[1:-1], 'u64')})"
        if "~" in kind: return self.tuple(x, int(kind.split("~")[1])) if x[0] == "{" else None
        if "*" in kind:
            t, n = kind.split("*")
            if not members(x, n): return None
            before.append(f"{C_TYPES[t]} {name}[] = {{{', '.join(self.value(y, t) for y in members(x))}}};")
            return name
        return None if x[0] in "{[" else self.value(x, kind)

    def tuple(self, x, n):
        """Registers that one instruction uses as a whole, and until it is waited for: elements of one array"""
        names = members(x)
        if len(names) != n or len(set(names)) != n: raise Unknown(f"{len(set(names))} different registers, expected {n}")
        array, first = self.tuples[names[0]].strip("]").split("[")
        if [self.tuples[y] for y in names] != [f"{array}[{int(first) + i}]" for i in range(n)]:
            raise Unknown("registers that overlap with those of another instruction")
        return f"{array} + {first}"

    def apply(self, m, signature, code, operands, at):
        """The C++ of an instruction by one rule; None: its operands have other forms"""
        outputs, _, inputs = m.expand(signature).rpartition("= ")
        outputs, inputs, before, after = outputs.strip(), inputs.split(), [], ""
        if len(operands) != len(inputs) + bool(outputs): return None
        code = re.sub(r"\bAT\b", f"AT, {self.module.line(at)}", m.expand(code))
        for x, kind, name in zip(operands[0].split("|") + ["_"], outputs.split("|"), "dp") if "*" in outputs else ():
            t, n = kind.split("*")
            if not members(x, n): return None
            before.append(f"{C_TYPES[t]} {name}[{n or 1}];")
            after += "".join(f" ptx::put({self.variable(y)}, {name}[{i}]);" for i, y in enumerate(members(x)) if y != "_")
        values = [self.input(x, kind, f"a{i}", before) for i, (x, kind) in
                  enumerate(zip(operands[bool(outputs):], inputs))]
        if None in values or outputs and not before and operands[0][0] in "{[": return None
        code = code.format(*values, D=C_TYPES.get(outputs))
        if outputs in C_TYPES: code = f"ptx::put<{C_TYPES[outputs]}>({self.variable(operands[0])}, {code})"
        return f"{{ {' '.join(before)} {code};{after} }}" if before else f"{code};"

    def instruction(self, op, rest, at):
        if op in ("ret", "exit"): return "return;"
        if op in ("bra", "bra.uni"): return f"goto {rest.strip('$')};"
        operands = split(rest)
        for rule in rules_for(op):
            if text := self.apply(*rule, operands, at): return text
        raise Unknown(f"no rule for {op} {rest}")

    def declare(self, s):
        """Variables of .reg .b32 %r<9>, or of .reg .pred p, q"""
        t, names = re.fullmatch(r"\.reg \.(\w+) (.*)", s).groups()
        fresh = []
        for name, n in re.findall(r"(%?\w+)(?:<(\d+)>)?", names):
            fresh += [f"{name}{i}" for i in range(int(n))] if n else [name]
        self.registers.update(dict.fromkeys(fresh, t))
        fresh = [self.variable(x) for x in fresh if x not in self.tuples and (x[0] != "%" or x in self.used)]
        return f"{C_TYPES[t]} {', '.join(fresh)};" if fresh else ""

    def find_tuples(self, statements):
        arrays = []
        for at, _, s in statements:
            for x, t in zip(split(s.split(None, 1)[1]), ("float", "uint32_t")) if s.startswith("wgmma.mma_async") else ():
                if x[0] != "{" or all(y in self.tuples for y in members(x)): continue
                arrays.append(f"{t} t{len(arrays)}[{len(members(x))}];")
                for i, y in enumerate(members(x)):
                    if y in self.tuples: self.module.fail(at, f"{y} is used by two instructions, in different places")
                    self.tuples[y] = f"t{len(arrays) - 1}[{i}]"
        return arrays

    def translate(self, function, begin, end):
        self.used = set(re.findall(r"%\w+", self.module.text[begin:end]))
        statement = re.compile(r"\s*(?:(\$?\w+):(?!:)|([{}])|((?:[^;{}]|\{[^;{}]*\})*);)")   # label, brace, other
        statements = [(m.start(m.lastindex), m[1], m[2] or " ".join((m[3] or "").split()))
                      for m in statement.finditer(self.module.text, begin, end)]
        out = self.find_tuples(statements)
        for at, label, s in statements:
            try:
                if label: out.append(f"{label.strip('$')}:;")
                elif s in "{}": out.append(s)
                elif s.startswith(".reg "): out.append(self.declare(s))
                elif m := re.match(SHARED, s): self.add_shared(*m.groups())
                elif not s.startswith(".pragma "):
                    unless, guard, op, rest = re.fullmatch(r"(?:@(!?)(%?\w+) )?([\w.:]+)\s*(.*)", s).groups()
                    text = self.instruction(op, rest, at)
                    out.append(f"if ({unless}{self.variable(guard)}) {{ {text} }}" if guard else text)
            except Unknown as why:
                self.module.fail(at, why)
        return [f"static void {function}([[maybe_unused]] void *const *P) {{",
                f"ptx::enter({self.most_threads}, {self.shared_bytes});", *out, "}\n"]


if __name__ == "__main__":
    Module(os.path.relpath(sys.argv[1])).translate()
