//! One NVFP4 warp tile with mma.sync, and the conversions and lane instructions kernels of this family use.

use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::SmemLayout;

pub fn build(module: &mut Builder) {
    let mut smem = SmemLayout::new();
    let tile = smem.alloc("tile", 4096, 128);
    let answer = smem.alloc("answer", 16, 16);
    let full = smem.mbarriers("full", 1);

    module.kernel("geforce", |k| {
        k.max_threads(32);
        k.max_registers(128);
        let (input, out) = (k.pointer("input"), k.pointer("out"));
        let base = k.shared(&smem);
        let lane = k.special(Special::LaneId);
        let row = k.shl(lane, 4u32);
        let row = k.offset(base.at(tile.offset), row);
        let input = k.ld_pointer(&input);
        let from = k.mul_wide(lane, 16u32);
        let from = k.offset(input, from);
        k.cp_async_16(row, from);
        k.cp_async_16_partial(row.at(512), from.at(512), 8u32);
        k.cp_async_commit();
        k.cp_async_wait(0);
        k.warp_sync();

        let a = k.ldmatrix::<4>(false, row);
        let b = k.ldmatrix::<2>(false, row.at(512));
        let scale = k.ld::<B32, _>(base.at(2048));
        let acc: [Reg<F32>; 4] = std::array::from_fn(|_| k.mov(0.0f32));
        let select = ScaleSelect { register: scale, byte: 0, thread: 0 };
        k.mma_nvfp4(&acc, &a, &b, select, ScaleSelect { thread: 3, ..select });
        k.mma_half(HalfFormat::Bf16, &acc, &a, &b);
        k.mma_e4m3(&acc, &a, &b);

        k.comment("Quantise: the largest magnitude of the quad gives the scale.");
        let mut amax = k.abs(acc[0]);
        for x in &acc[1..] {
            let magnitude = k.abs(*x);
            amax = k.max(amax, magnitude);
        }
        for step in [1u32, 2] {
            let other = k.shuffle(Shuffle::Xor, amax, step);
            k.to(amax).max(amax, other);
        }
        let inverse = k.rcp_approx(amax);
        let scaled = acc.map(|x| k.mul(x, inverse));
        let low = k.f32_to_e2m1x2(scaled[0], scaled[1]);
        let high = k.f32_to_e2m1x2(scaled[2], scaled[3]);
        let codes = k.pack_16(low, high);
        let wide = k.convert::<U32, U16>(codes.cast());
        let back = k.e2m1x2_to_f16x2(low);
        let sum = k.add(back, back);
        let eight = k.f16x2_to_e4m3x2(sum);
        let halves = k.e4m3x2_to_f16x2(eight);
        let any = k.compare(Cmp::Gt, amax, 0.0f32);
        let voted = k.ballot(any);
        let total = k.redux(Redux::Add, wide);
        let picked = k.select(any, total, 7u32);
        let out = k.ld_pointer(&out);
        let place = k.mul_wide(lane, 16u32);
        let out = k.offset(out, place);
        k.st_vector(out, &[picked.cast(), voted, halves.cast(), sum.cast::<B32>()]);
        k.red::<U32, _>(AtomOp::Add, Semantics::Relaxed, Scope::Gpu, out.at(16), 1u32);
        let old = k.atom(AtomOp::Add, Semantics::AcquireRelease, Scope::Gpu, out.at(20), 2.0f32);
        k.st(out.at(24), old);

        k.comment("Ask for more work.");
        let leader = k.elect();
        k.if_(leader, "ask", |k| {
            k.mbarrier_init(base.at(full.offset), 1u32);
            k.fence_mbarrier_init();
            k.mbarrier_arrive_expect_tx(base.at(full.offset), 16u32);
            k.try_cancel(base.at(answer.offset), base.at(full.offset));
            k.mbarrier_wait(base.at(full.offset), 0u32, "answer");
        });
        k.warp_sync();
        let reply = k.ld::<B128, _>(base.at(answer.offset));
        let more = k.is_canceled(reply);
        let [x, ..] = k.first_ctaid(reply);
        k.when(more).st(out.at(28), x);
    });
}
