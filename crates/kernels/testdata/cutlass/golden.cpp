// Prints what CUTLASS's headers say of descriptors and layouts, for ../../tests/others/cutlass.rs. Run once; see README.md.

#include <cstddef>

// Descriptors hold addresses of shared memory: here, offsets in a buffer.
static char* shared_base();
static inline std::size_t __cvta_generic_to_shared(void const* p) { return static_cast<char const*>(p) - shared_base(); }
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1

#include <cstdint>
#include <cstdio>
#include <utility>

#include <cute/tensor.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/atom/copy_traits_sm100.hpp>
#include <cutlass/detail/sm100_blockscaled_layout.hpp>
#include <cutlass/version.h>

using namespace cute;

alignas(1024) static char buffer[1 << 18];
static char* shared_base() { return buffer; }

template <int M, int N>
void instruction() {
  constexpr auto K = UMMA::Major::K;
  auto nvfp4 = UMMA::make_instr_desc_block_scaled<float_e2m1_t, float_e2m1_t, float, float_ue4m3_t, M, N, K, K>();
  auto mxfp4 = UMMA::make_instr_desc_block_scaled<float_e2m1_t, float_e2m1_t, float, float_ue8m0_t, M, N, K, K>();
  auto f16 = UMMA::make_instr_desc<half_t, half_t, float, M, N, K, K>();
  auto bf16 = UMMA::make_instr_desc<bfloat16_t, bfloat16_t, float, M, N, K, K>();
  std::printf("instruction %d %d %x %x %x %x\n", M, N, uint32_t(nvfp4), uint32_t(mxfp4), uint32_t(f16), uint32_t(bf16));
}

template <int M, int... Eighths>
void instructions(std::integer_sequence<int, Eighths...>) {
  (instruction<M, 8 * (Eighths + 1)>(), ...);
}

// A tile of rows of `row_bytes`, and every 32 bytes of K of it, which is a step of any kind.
template <class Atom, int Rows, int RowBytes>
void operand(int swizzle) {
  auto tile = make_tensor(make_smem_ptr(reinterpret_cast<uint8_t*>(buffer)),
                          tile_to_shape(Atom{}, Shape<Int<Rows>, Int<RowBytes>>{}));
  for_each(make_int_sequence<RowBytes / 32>{}, [&](auto step) {
    auto part = local_tile(tile, Shape<Int<Rows>, _32>{}, make_coord(_0{}, step));
    auto desc = UMMA::make_umma_desc<UMMA::Major::K>(part);
    std::printf("operand %d %d %d %d %llx\n", swizzle, Rows, RowBytes, int(step), (unsigned long long)uint64_t(desc));
  });
}

template <int Rows>
void operands() {
  operand<UMMA::Layout_K_SW128_Atom<uint8_t>, Rows, 128>(128);
  operand<UMMA::Layout_K_SW64_Atom<uint8_t>, Rows, 64>(64);
  operand<UMMA::Layout_K_SW32_Atom<uint8_t>, Rows, 32>(32);
  operand<UMMA::Layout_K_INTER_Atom<uint8_t>, Rows, 32>(0);
}

// One atom of scales, 32 rows of 16 bytes, as get_utccp_smem_desc_tensor describes it to tcgen05.cp: each eight rows `Apart`
// bytes from the next.
template <int Apart>
void atom() {
  auto rows = make_layout(Shape<Shape<_8, _4>, _16>{}, Stride<Stride<_16, Int<Apart>>, _1>{});
  auto desc = UMMA::make_umma_desc<UMMA::Major::K>(make_tensor(make_smem_ptr(reinterpret_cast<uint8_t*>(buffer)), rows));
  std::printf("atom %d %llx\n", Apart, (unsigned long long)uint64_t(desc));
}

// Where the scale of a row and a K block lies in global memory.
template <int Vec>
void scales(int rows, int k) {
  auto layout = cutlass::detail::Sm1xxBlockScaledConfig<Vec>::tile_atom_to_shape_SFA(make_shape(rows, rows, k, 1));
  auto other = cutlass::detail::Sm1xxBlockScaledConfig<Vec>::tile_atom_to_shape_SFB(make_shape(rows, rows, k, 1));
  for (int row = 0; row < rows; row += row % 2 ? 12 : 1) {
    std::printf("scales %d %d %d %d", Vec, rows, k, row);
    for (int block = 0; block * Vec < k; ++block) {
      int offset = int(layout(row, block * Vec, 0));
      if (offset != int(other(row, block * Vec, 0))) std::abort();
      std::printf(" %d", offset);
    }
    std::printf("\n");
  }
}

// Tensor memory: rows are data paths, in units of 2^16 of an address of words.
template <int N>
void sums() {
  auto one = UMMA::tmem_frg_1sm<float>::make(make_shape(Shape<_128, Int<N>>{}, _1{}, _1{}));
  auto two = UMMA::tmem_frg_2sm<float>::make(make_shape(Shape<_128, Int<N>>{}, _1{}, _1{}));
  for (int m = 0; m < 128; m += 31) {
    for (int n = 0; n < N; n += 7) {
      auto at = make_coord(make_coord(m, n), 0, 0);
      std::printf("sums %d %d %d %x %x\n", N, m, n, unsigned(one.layout()(at)), unsigned(two.layout()(at)));
    }
  }
}

// Tensor memory of the scales of one step: bytes; the fourth of the copies for each warp of data paths.
template <int Rows, int Vec>
void scale_columns() {
  using Shape_ = Shape<Shape<Int<Rows>, Shape<Int<Vec>, Int<64 / Vec>>>, _1, _1>;
  auto frg = UMMA::tmem_sf_frg<float_ue4m3_t, Vec, 1, true>::make(Shape_{});
  auto b = UMMA::tmem_sf_frg<float_ue4m3_t, Vec, 2, false>::make(Shape_{});
  constexpr int dp = TMEM::DP<float_ue4m3_t>{};
  for (int row = 0; row < Rows; row += 5) {
    for (int copy = 0; copy < 4; ++copy) {
      for (int block = 0; block < 64 / Vec; ++block) {
        auto at = make_coord(make_coord(make_coord(make_coord(row % 32, row / 32), copy), make_coord(0, block)), 0, 0);
        int place = int(frg.layout()(at));
        if (place != int(b.layout()(at))) std::abort();
        std::printf("scale_columns %d %d %d %d %d %d %d\n", Rows, Vec, row, copy, block, place / dp, place % dp);
      }
    }
  }
}

// Tensor memory of rows of A of a 16-bit product, as the instruction that takes A from there has them: half words.
void multiplicand() {
  constexpr auto K = UMMA::Major::K;
  using Traits = MMA_Traits<SM100_MMA_F16BF16_TS<half_t, half_t, float, 128, 64, K, K>>;
  auto rows = Traits::FrgTypeA::make(make_shape(Shape<_128, _16>{}, _1{}, _4{}));
  constexpr int dp = TMEM::DP<half_t>{};
  for (int row = 0; row < 128; row += 9) {
    for (int k = 0; k < 64; k += 7) {
      int place = int(rows.layout()(make_coord(make_coord(row, k % 16), 0, k / 16)));
      std::printf("multiplicand %d %d %d %d\n", row, k, place / dp, place % dp);
    }
  }
}

int main() {
  std::printf("cutlass %d.%d.%d\n", CUTLASS_MAJOR, CUTLASS_MINOR, CUTLASS_PATCH);
  instructions<128>(std::make_integer_sequence<int, 32>{});
  instructions<256>(std::make_integer_sequence<int, 32>{});
  operands<8>();
  operands<32>();
  operands<48>();
  operands<56>();
  operands<64>();
  operands<128>();
  atom<128>();
  atom<256>();
  atom<512>();
  scales<16>(128, 64);
  scales<16>(384, 512);
  scales<16>(200, 208);
  scales<32>(256, 512);
  sums<64>();
  sums<96>();
  sums<112>();
  sums<128>();
  scale_columns<128, 16>();
  scale_columns<256, 16>();
  scale_columns<128, 32>();
  multiplicand();
}
