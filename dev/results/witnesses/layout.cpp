// The maps of tensor-core operands as NVIDIA's CuTe headers have them, printed by a host program;
// tests/test_conform.cu holds kernels/cuda/ptx.cuh, the kernels' own products and the emulator to
// them. Built and run by dev/results/witnesses/run.sh.
//
// Every map is linear over bits: index i goes to the XOR of the listed numbers over the bits set in
// i. This program checks that for all indices and prints only the numbers.
#include <cstdio>
#include <cstdlib>
#include <cute/tensor.hpp>
#include <cutlass/version.h>

using namespace cute;
typedef cute::bfloat16_t bf16;
using SM90::GMMA::Major;

template <class Map>
static void print_map(FILE *out, const char *name, int size, Map map) {
    fprintf(out, "map %s", name);
    for (int bit = 1; bit < size; bit *= 2) fprintf(out, " %d", map(bit));
    fprintf(out, "\n");
    for (int i = 0; i < size; i++) {
        int sum = 0;
        for (int bit = 1; bit < size; bit *= 2)
            if (i & bit) sum ^= map(bit);
        if (sum == map(i)) continue;
        fprintf(stderr, "error: %s is not linear at %d\n", name, i);
        exit(1);
    }
}

// (thread, value) -> row + rows * column
template <class Layout>
static void print_fragment(FILE *out, const char *name, Layout layout) {
    const int threads = size<0>(layout);
    print_map(out, name, size(layout), [&](int i) { return layout(i % threads, i / threads); });
}

// (lane, half of a register, register) -> element in the rows that the lanes point at, eight each
template <class Op>
static void print_ldmatrix(FILE *out, const char *name) {
    const typename Copy_Traits<Op>::SrcLayout source;
    const typename Copy_Traits<Op>::DstLayout target;
    static_assert(decltype(size(source))::value == 4096 && decltype(size(target))::value == 4096);
    const auto from = left_inverse(source);  // bit -> lane + 32 * bit of its row
    print_map(out, name, 32 * 8, [&](int i) {
        const int bit = from(target(i % 32, i / 32 * 16));
        return bit % 32 * 8 + bit / 32 / 16;
    });
}

// Element (mn, k) of a tile -> byte in shared memory, and the descriptors of its products
template <int MN, int DEPTH, class Atom, class Mma, class Order, bool IS_A>
static void print_operand(FILE *out, const char *name, Atom atom, Mma op, Order order) {
    const auto layout = tile_to_shape(atom, Shape<Int<MN>, Int<DEPTH>>{}, order);
    // of elements rather than of bytes, as the swizzles of pointers are
    const auto elements = as_position_independent_swizzle_layout(layout);
    print_map(out, name, MN * DEPTH, [&](int i) { return (int)elements(i % MN, i / MN) * 2; });
    const auto tile = make_tensor(make_smem_ptr((bf16 *)nullptr), layout);
    const auto mma = make_tiled_mma(op).get_slice(0);
    fprintf(out, "descriptors %s", name);
    for (int k = 0; k < DEPTH / 16; k++) {
        uint64_t word;
        if constexpr (IS_A)
            word = (*mma.make_fragment_A(mma.partition_A(tile))(_, 0, k).data()).desc_;
        else
            word = (*mma.make_fragment_B(mma.partition_B(tile))(_, 0, k).data()).desc_;
        fprintf(out, " %016llx", (unsigned long long)word);
    }
    fprintf(out, "\n");
}

int main(int argc, char **argv) {
    // make_gmma_desc complains on standard output that a host has no shared memory
    FILE *out = argc > 1 ? fopen(argv[1], "w") : nullptr;
    if (!out) return fprintf(stderr, "usage: layout FILE\n"), 2;
    fprintf(out,
            "# Written by dev/results/witnesses/layout.cpp from CUTLASS %d.%d.%d; checked by "
            "tests/test_conform.cu.\n",
            CUTLASS_MAJOR, CUTLASS_MINOR, CUTLASS_PATCH);

    typedef MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN> Mma;
    print_fragment(out, "mma_a", Mma::ALayout{});
    print_fragment(out, "mma_b", Mma::BLayout{});
    print_fragment(out, "mma_c", Mma::CLayout{});
    print_ldmatrix<SM75_U32x4_LDSM_N>(out, "ldmatrix");
    print_ldmatrix<SM75_U16x8_LDSM_T>(out, "ldmatrix_trans");

    typedef SM90_64x64x16_F32BF16BF16_RS<Major::K, Major::K> Rs;
    typedef SM90_64x64x16_F32BF16BF16_SS<Major::K, Major::K> N64;
    typedef SM90_64x64x16_F32BF16BF16_SS<Major::MN, Major::MN> N64mn;
    typedef SM90_64x128x16_F32BF16BF16_SS<Major::K, Major::K> N128;
    typedef SM90_64x128x16_F32BF16BF16_SS<Major::MN, Major::MN> N128mn;
    print_fragment(out, "wgmma_a", MMA_Traits<Rs>::ALayout{});
    print_fragment(out, "wgmma_c64", MMA_Traits<N64>::CLayout{});
    print_fragment(out, "wgmma_c128", MMA_Traits<N128>::CLayout{});

    // K-major: panels of 64 columns one after the other; MN-major: likewise, of 64 rows
    const SM90::GMMA::Layout_K_SW128_Atom<bf16> k;
    const SM90::GMMA::Layout_MN_SW128_Atom<bf16> mn;
    typedef Step<_1, _2> Down;
    typedef Step<_2, _1> Across;
    print_operand<64, 64, decltype(k), N64, Down, true>(out, "a_64x64", k, N64{}, {});
    print_operand<64, 128, decltype(k), N64, Down, true>(out, "a_64x128", k, N64{}, {});
    print_operand<64, 64, decltype(mn), N64mn, Across, true>(out, "a_mn_64x64", mn, N64mn{}, {});
    print_operand<64, 64, decltype(k), N64, Down, false>(out, "b_64x64", k, N64{}, {});
    print_operand<64, 128, decltype(k), N64, Down, false>(out, "b_64x128", k, N64{}, {});
    print_operand<128, 64, decltype(k), N128, Down, false>(out, "b_128x64", k, N128{}, {});
    print_operand<128, 128, decltype(k), N128, Down, false>(out, "b_128x128", k, N128{}, {});
    print_operand<64, 64, decltype(mn), N64mn, Across, false>(out, "b_mn_64x64", mn, N64mn{}, {});
    print_operand<64, 128, decltype(mn), N64mn, Across, false>(out, "b_mn_64x128", mn, N64mn{}, {});
    print_operand<128, 64, decltype(mn), N128mn, Across, false>(out, "b_mn_128x64", mn, N128mn{},
                                                                {});
    print_operand<128, 128, decltype(mn), N128mn, Across, false>(out, "b_mn_128x128", mn, N128mn{},
                                                                 {});
    return fclose(out) ? 1 : 0;
}
