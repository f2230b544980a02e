// D = A B with CUTLASS 4: A (M x K) by rows, B (N x K) by rows, D (M x N) by rows; sums in f32, D in f32 or bf16.
//
// One kernel of CUTLASS's collectives per compilation, chosen by -DKERNEL=n; compiled for PTX only:
//   nvcc -std=c++17 -O2 -gencode arch=compute_90a,code=compute_90a -no-compress --expt-relaxed-constexpr -DNDEBUG
//        -DKERNEL=1 -I cutlass/include -I cutlass/tools/util/include -cudart none -c gemm.cu
// Linked with the simulator's CUDA runtime (examples/cudart) and run with SIM_RECORD=directory it writes the PTX and
// the launch that lie beside this file. Buffers are allocated in the order A, B, D, scales of A, scales of B.

#include <cuda_runtime.h>
#include <cstdio>
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

using namespace cute;
using cutlass::arch::OpClassTensorOp;
using cutlass::arch::OpClassBlockScaledTensorOp;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;

#if KERNEL == 1  // Hopper: warp-specialized, cooperative, f16
using A = cutlass::half_t; using B = cutlass::half_t; using D = float;
using Arch = cutlass::arch::Sm90; using Class = OpClassTensorOp;
using CtaTile = Shape<_128, _64, _64>; using Cluster = Shape<_2, _1, _1>;
using Loop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using Tail = cutlass::epilogue::TmaWarpSpecializedCooperative;
#elif KERNEL == 2  // Hopper: warp-specialized, pingpong, e4m3
using A = cutlass::float_e4m3_t; using B = cutlass::float_e4m3_t; using D = cutlass::bfloat16_t;
using Arch = cutlass::arch::Sm90; using Class = OpClassTensorOp;
using CtaTile = Shape<_64, _64, _128>; using Cluster = Shape<_1, _2, _1>;
using Loop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using Tail = cutlass::epilogue::TmaWarpSpecialized;
#elif KERNEL == 3  // Hopper: mixed inputs, int8 converted to f16 in registers
using A = int8_t; using B = cutlass::half_t; using D = float;
using Arch = cutlass::arch::Sm90; using Class = OpClassTensorOp;
using CtaTile = Shape<_128, _64, _64>; using Cluster = Shape<_1, _1, _1>;
using Loop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using Tail = cutlass::epilogue::TmaWarpSpecializedCooperative;
#elif KERNEL == 4  // Blackwell: one CTA, f16
using A = cutlass::half_t; using B = cutlass::half_t; using D = float;
using Arch = cutlass::arch::Sm100; using Class = OpClassTensorOp;
using CtaTile = Shape<_128, _64, _64>; using Cluster = Shape<_1, _1, _1>;
using Loop = cutlass::gemm::KernelTmaWarpSpecialized1SmSm100;
using Tail = cutlass::epilogue::TmaWarpSpecialized1Sm;
#elif KERNEL == 5  // Blackwell: pairs of CTAs, nvfp4
using A = cutlass::nv_float4_t<cutlass::float_e2m1_t>; using B = A; using D = cutlass::bfloat16_t;
using Arch = cutlass::arch::Sm100; using Class = OpClassBlockScaledTensorOp;
using CtaTile = Shape<_256, _128, _256>; using Cluster = Shape<_2, _1, _1>;
using Loop = cutlass::gemm::KernelTmaWarpSpecialized2SmNvf4Sm100;
using Tail = cutlass::epilogue::TmaWarpSpecialized2Sm;
#elif KERNEL == 6  // Blackwell GeForce: nvfp4
using A = cutlass::nv_float4_t<cutlass::float_e2m1_t>; using B = A; using D = cutlass::bfloat16_t;
using Arch = cutlass::arch::Sm120; using Class = OpClassBlockScaledTensorOp;
using CtaTile = Shape<_128, _128, _128>; using Cluster = Shape<_1, _1, _1>;
using Loop = cutlass::gemm::collective::KernelScheduleAuto;
using Tail = cutlass::epilogue::collective::EpilogueScheduleAuto;
#elif KERNEL == 7  // Blackwell: pairs of CTAs, e4m3
using A = cutlass::float_e4m3_t; using B = cutlass::float_e4m3_t; using D = float;
using Arch = cutlass::arch::Sm100; using Class = OpClassTensorOp;
using CtaTile = Shape<_128, _64, _128>; using Cluster = Shape<_2, _1, _1>;
using Loop = cutlass::gemm::KernelTmaWarpSpecialized2SmSm100;
using Tail = cutlass::epilogue::TmaWarpSpecialized2Sm;
#elif KERNEL == 8  // Blackwell: one CTA, mxf8 by mxf4
using A = cutlass::mx_float8_t<cutlass::float_e4m3_t>; using B = cutlass::mx_float4_t<cutlass::float_e2m1_t>;
using D = float;
using Arch = cutlass::arch::Sm100; using Class = OpClassBlockScaledTensorOp;
using CtaTile = Shape<_128, _128, _128>; using Cluster = Shape<_1, _1, _1>;
using Loop = cutlass::gemm::KernelTmaWarpSpecialized1SmMxf8f6f4Sm100;
using Tail = cutlass::epilogue::TmaWarpSpecialized1Sm;
#endif


template <class T> struct Bits { static constexpr int value = cutlass::sizeof_bits<T>::value; };
template <class T> struct Bits<cutlass::nv_float4_t<T>> { static constexpr int value = 4; };
template <class T> struct Bits<cutlass::mx_float4_t<T>> { static constexpr int value = 4; };
template <class T> struct Bits<cutlass::mx_float8_t<T>> { static constexpr int value = 8; };

#if KERNEL == 8  // Narrow operands of mixed width are aligned to 128 elements.
constexpr int align_a = 16, align_b = 128;
#else
constexpr int align_a = 128 / Bits<A>::value, align_b = 128 / Bits<B>::value;
#endif
constexpr int align_d = 128 / Bits<D>::value;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    Arch, Class, CtaTile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row, align_d, D, Row,
    align_d, Tail>::CollectiveOp;
using Stages = cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename Epilogue::SharedStorage)>;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    Arch, Class, A, Row, align_a, B, Column, align_b, float, CtaTile, Cluster, Stages, Loop>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue, void>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

template <class T> T* allocate(size_t bytes) {
    void* p = nullptr;
    cudaMalloc(&p, bytes);
    return static_cast<T*>(p);
}

int main(int argc, char** argv) {
    int m = atoi(argv[1]), n = atoi(argv[2]), k = atoi(argv[3]);
    auto* a = allocate<typename Gemm::ElementA>(size_t(m) * k * Bits<A>::value / 8);
    auto* b = allocate<typename Gemm::ElementB>(size_t(n) * k * Bits<B>::value / 8);
    auto* d = allocate<D>(size_t(m) * n * sizeof(D));
    auto sa = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1});
    auto sb = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1});
    auto sd = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1});
    typename Kernel::MainloopArguments mainloop{a, sa, b, sb};
#if KERNEL == 5 || KERNEL == 6 || KERNEL == 8
    using Config = typename Mainloop::Sm1xxBlkScaledConfig;
    auto la = Config::tile_atom_to_shape_SFA(make_shape(m, n, k, 1));
    auto lb = Config::tile_atom_to_shape_SFB(make_shape(m, n, k, 1));
    using SF = typename Mainloop::ElementSF;
    mainloop = {a, sa, b, sb, allocate<SF>(size(filter_zeros(la))), la, allocate<SF>(size(filter_zeros(lb))), lb};
#endif
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm, {m, n, k, 1}, mainloop, {{1.0f, 0.0f}, nullptr, {}, d, sd}};
    arguments.hw_info.sm_count = 132;
    Gemm gemm;
    void* workspace = allocate<char>(Gemm::get_workspace_size(arguments));
    if (gemm.can_implement(arguments) != cutlass::Status::kSuccess) return puts("cannot"), 1;
    if (gemm.initialize(arguments, workspace) != cutlass::Status::kSuccess) return puts("initialize"), 1;
    return gemm.run() != cutlass::Status::kSuccess;
}
