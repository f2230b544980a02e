//! C^T = W X^T with 4-bit weights as the register operand of wgmma: producer warps, two consumer warpgroups, a
//! ring of stages, an epilogue through stmatrix and DSMEM. Shortened from a kernel measured on an H100.

use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::{SmemLayout, SmemTile, Swizzle};

const STAGES: u32 = 3;
const TOKENS: u32 = 64;
const CONSUMERS: u32 = 2;
const CHUNK: u32 = 2304;

/// Eight 4-bit codes to the four A registers of one k16 step: codes at half bits 11..9, scaled by one multiply.
fn decode(k: &mut Kernel, codes: Reg<B32>, scale: Reg<F16x2>) -> [Reg<B32>; 4] {
    const TOP: u32 = 0x8E00_8E00;
    let a0 = k.and(codes, TOP);
    let shifted = k.shl(codes, 3u32);
    let a1 = k.and(shifted, TOP);
    let mut parts = [a0, a1, a0, a1];
    for (i, (left, right)) in [(6u32, 1u32), (9, 2)].into_iter().enumerate() {
        let low = k.shl(codes, left);
        let low = k.and(low, 0x0E00_0E00u32);
        let high = k.shl(codes, right);
        // (high & 0x80008000) | low
        let mask = k.mov::<B32>(0x8000_8000u32);
        parts[2 + i] = k.lop3(high, mask, low, 0xEA);
    }
    parts.map(|part| k.mul(part.cast::<F16x2>(), scale).cast())
}

pub fn build(module: &mut Builder) {
    let tokens = SmemTile::new(TOKENS, 128, Swizzle::B128).expect("a valid tile");
    let mut smem = SmemLayout::new();
    let token_stages = smem.alloc_parts("tokens", tokens.bytes(), STAGES, tokens.alignment());
    let weight_stages = smem.alloc_parts("weights", CONSUMERS * CHUNK, STAGES, 16);
    let full = smem.mbarriers("full", STAGES);
    let empty = smem.mbarriers("empty", STAGES);
    let exchange = smem.mbarriers("exchange", 1);

    module.kernel("hopper", |k| {
        k.max_threads(CONSUMERS * 128 + 128);
        k.min_ctas(1);
        k.cluster(2, 1, 1);
        let map = k.tensor_map("tokens");
        let weights = k.pointer("weights");
        let out = k.pointer("out");
        let steps = k.param::<U32>("steps");

        let base = k.shared(&smem);
        let warp = k.warp_index();
        let thread = k.special(Special::TidX);
        let steps = k.ld_param(&steps);
        let lane = k.and(thread, 31u32);

        k.comment("Barriers: one thread sets them up, the cluster waits for it.");
        let first = k.compare(Cmp::Eq, thread, 0u32);
        k.if_(first, "init", |k| {
            for stage in 0..STAGES {
                k.mbarrier_init(base.at(full.part(stage)), 1u32);
                k.mbarrier_init(base.at(empty.part(stage)), CONSUMERS * 4);
            }
            k.mbarrier_init(base.at(exchange.offset), 1u32);
            k.fence_mbarrier_init();
        });
        k.cluster_sync();
        k.launch_dependents();
        let leader = k.elect();

        k.role(warp, CONSUMERS * 4..CONSUMERS * 4 + 4, "producer", |k| {
            k.setmaxnreg_dec(40);
            let loads = k.compare_and(Cmp::Eq, warp, CONSUMERS * 4, leader);
            k.if_(loads, "load", |k| {
                let map = k.tensor_map_address(&map);
                k.prefetch_tensor_map(map);
                let weights = k.ld_pointer(&weights);
                k.grid_dependency_wait();
                let stage = k.mov::<U32>(0u32);
                let parity = k.mov::<U32>(1u32);
                k.for_range("load_step", 0u32, steps, 1, |k, step, _| {
                    let bytes = k.shl(stage, 3u32);
                    let barrier = k.offset(base, bytes);
                    k.mbarrier_wait(barrier.at(empty.offset), parity, "empty");
                    let full = barrier.at(full.offset);
                    k.mbarrier_arrive_expect_tx(full, tokens.bytes() + weight_stages.stride);
                    let at = k.mul(stage, token_stages.stride);
                    let at = k.offset(base.at(token_stages.offset), at);
                    let column = k.shl(step, 6u32);
                    let options = TmaOptions { l2: Some(Eviction::Last), ..TmaOptions::default() };
                    k.tensor_load(at, map, &[column.cast().into(), 0.into()], full, &options);
                    let at = k.mul(stage, weight_stages.stride);
                    let at = k.offset(base.at(weight_stages.offset), at);
                    let from = k.mul_wide(step, weight_stages.stride);
                    let from = k.offset(weights, from);
                    k.bulk_load(at, from, weight_stages.stride, full, &TmaOptions::default());
                    next_stage(k, stage, parity);
                });
            });
            k.warp_sync();
        });

        k.role(warp, 0..CONSUMERS * 4, "consumers", |k| {
            k.setmaxnreg_inc(232);
            let group = k.shr(warp, 2u32);
            let acc = k.zeros(TOKENS as usize / 2);
            let stage = k.mov::<U32>(0u32);
            let parity = k.mov::<U32>(0u32);
            let own = k.and(thread, 127u32);
            let code_offset = k.shl(own, 4u32);
            let code_offset = k.mad(group, CHUNK, code_offset);
            let codes_at = k.offset(base.at(weight_stages.offset), code_offset);
            k.for_range("multiply_step", 0u32, steps, 1, |k, _, _| {
                let bytes = k.shl(stage, 3u32);
                let barrier = k.offset(base, bytes);
                k.mbarrier_wait(barrier.at(full.offset), parity, "full");

                k.comment("Four words of codes: the A fragments of four k16 steps.");
                let at = k.mul(stage, weight_stages.stride);
                let at = k.offset(codes_at, at);
                let codes = k.ld_vector::<B32, _, 4>(at);
                let scales = k.ld_vector::<B32, _, 2>(at.at(2048));
                let fragments: Vec<[Reg<B32>; 4]> =
                    (0..4).map(|i| decode(k, codes[i], scales[i / 2].cast())).collect();

                k.comment("Descriptor of this stage's tokens.");
                let at = k.mul(stage, token_stages.stride);
                let at = k.offset(base, at);
                let field = k.shr(at.base(), 4u32);
                let field = k.convert::<U64, U32>(field);
                let desc = k.or(field.cast::<B64>(), tokens.wgmma_desc());
                k.wgmma_fence();
                for (i, a) in fragments.into_iter().enumerate() {
                    let b = k.add(desc.cast::<U64>(), tokens.advance_k(32 * i as u32));
                    let format = WgmmaFormat::Half(HalfFormat::F16);
                    k.wgmma(format, &acc, WgmmaA::Regs(a), b.cast(), true);
                }
                k.wgmma_commit();
                k.wgmma_wait(0);
                let one = k.compare(Cmp::Eq, lane, 0u32);
                k.when(one).mbarrier_arrive(barrier.at(empty.offset));
                next_stage(k, stage, parity);
            });
            k.bar_sync(1u32, CONSUMERS * 128);

            k.comment("silu(gate) * up; then through shared memory to rows of tokens.");
            let outputs: Vec<Reg<F16x2>> = acc
                .chunks(4)
                .map(|c| {
                    let [low, high] = [0, 1].map(|i| swiglu(k, c[i], c[i + 2]));
                    k.f32_to_f16x2(low, high)
                })
                .collect();
            let row = k.mul(thread, 144u32);
            let row = k.offset(base, row);
            for four in outputs.chunks(4) {
                k.stmatrix(true, row, four);
            }
            k.fence_proxy_async_shared();
            k.bar_sync(1u32, CONSUMERS * 128);
            k.if_(first, "send", |k| {
                let rank = k.special(Special::ClusterCtaRank);
                let peer = k.xor(rank, 1u32);
                let to = k.map_to_rank(base.at(4096), peer);
                let done = k.map_to_rank(base.at(exchange.offset), peer);
                k.mbarrier_arrive_expect_tx(base.at(exchange.offset), 4096u32);
                k.bulk_copy_cluster(to, base, 4096u32, done);
                k.mbarrier_wait(base.at(exchange.offset), 0u32, "exchange");
            });
            let out = k.ld_pointer(&out);
            let bytes = k.mul_wide(thread, 16u32);
            let out = k.offset(out, bytes);
            let values = k.ld_vector::<B32, _, 4>(row.at(4096));
            k.st_global(out, &values, Hint { no_l1: true, l2: Some(Eviction::First), ..Hint::default() });
        });
        k.cluster_sync();
    });
}

/// The next stage of the ring; the parity turns when it starts over.
fn next_stage(k: &mut Kernel, stage: Reg<U32>, parity: Reg<U32>) {
    k.to(stage).add(stage, 1u32);
    let wrap = k.compare(Cmp::Eq, stage, STAGES);
    let turned = k.xor(parity, 1u32);
    k.when(wrap).assign(stage, 0u32);
    k.when(wrap).assign(parity, turned);
}

/// `gate / (1 + e^-gate) * up`
fn swiglu(k: &mut Kernel, gate: Reg<F32>, up: Reg<F32>) -> Reg<F32> {
    let power = k.mul(gate, -std::f32::consts::LOG2_E);
    let power = k.ex2_approx(power);
    let below = k.add(power, 1.0f32);
    let silu = k.div_approx(gate, below);
    k.mul(silu, up)
}
