//! One NVFP4 tile with tensor memory: TMA loads, scale copies, block-scaled MMA, epilogue from tensor memory.

use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::{BlockScaledDesc, SmemLayout, SmemTile, Swizzle, tcgen05_smem_desc};

const GROUP: CtaGroup = CtaGroup::One;

pub fn build(module: &mut Builder) {
    let operand = SmemTile::new(128, 128, Swizzle::B128).expect("a valid tile");
    let desc = BlockScaledDesc::nvfp4(128, 128).encode().expect("a valid shape");
    let mut smem = SmemLayout::new();
    let a = smem.alloc("a", operand.bytes(), operand.alignment());
    let b = smem.alloc("b", operand.bytes(), operand.alignment());
    let scales = smem.alloc_parts("scales of a, b", 2048, 2, 16);
    let full = smem.mbarriers("full", 1);
    let done = smem.mbarriers("done", 1);
    let tmem_address = smem.alloc("tmem address", 4, 4);

    module.kernel("blackwell", |k| {
        k.required_threads(128);
        let (map_a, map_b) = (k.tensor_map("map_a"), k.tensor_map("map_b"));
        let (scales_in, out) = (k.pointer("scales"), k.pointer("out"));
        let base = k.shared(&smem);
        let warp = k.warp_index();
        let first_warp = k.compare(Cmp::Eq, warp, 0u32);

        k.if_(first_warp, "setup", |k| {
            k.tmem_alloc(GROUP, base.at(tmem_address.offset), 256u32);
            k.tmem_relinquish(GROUP);
            let leader = k.elect();
            k.when(leader).mbarrier_init(base.at(full.offset), 1u32);
            k.when(leader).mbarrier_init(base.at(done.offset), 1u32);
            k.when(leader).fence_mbarrier_init();
        });
        k.tcgen05_fence_before();
        k.cta_sync();
        k.tcgen05_fence_after();
        let tmem = Addr::<Tmem>::new(k.ld(base.at(tmem_address.offset)));
        let (sfa, sfb) = (tmem.at(128), tmem.at(144));

        k.role(warp, 0..1, "load and multiply", |k| {
            let leader = k.elect();
            k.if_(leader, "issue", |k| {
                let full = base.at(full.offset);
                let total = 2 * operand.bytes() + scales.bytes();
                k.mbarrier_arrive_expect_tx(full, total);
                for (param, to) in [(&map_a, a), (&map_b, b)] {
                    let map = k.tensor_map_address(param);
                    k.prefetch_tensor_map(map);
                    let zero = [0.into(), 0.into()];
                    k.tensor_load(base.at(to.offset), map, &zero, full, &TmaOptions::default());
                }
                let from = k.ld_pointer(&scales_in);
                k.bulk_load(base.at(scales.offset), from, scales.bytes(), full, &TmaOptions::default());
                k.mbarrier_wait(full, 0u32, "full");

                k.comment("Scales to tensor memory: 512 bytes and 4 columns per k64 step.");
                for (part, to) in [(0, sfa), (1, sfb)] {
                    let source = tcgen05_smem_desc(0, 16, 128, Swizzle::None);
                    let from = smem_desc(k, base, scales.part(part), source);
                    for step in 0..4u32 {
                        let from = k.add(from.cast::<U64>(), u64::from(step) * 32);
                        let column = k.add(to.base(), to.offset() as u32 + 4 * step);
                        k.tmem_cp_scales(GROUP, Addr::new(column), from.cast());
                    }
                }

                k.comment("Four steps of K = 64; the first one overwrites the accumulator.");
                let (a, b) = (
                    smem_desc(k, base, a.offset, operand.tcgen05_desc()),
                    smem_desc(k, base, b.offset, operand.tcgen05_desc()),
                );
                let desc = k.mov::<B32>(desc);
                for step in 0..4u32 {
                    let advance = operand.advance_k(32 * step);
                    let [a, b] = [a, b].map(|d| k.add(d.cast::<U64>(), advance).cast());
                    let accumulate =
                        k.compare(Cmp::Ne, desc.cast::<U32>(), if step == 0 { 0x0820_0480u32 } else { 0 });
                    let mma =
                        Mma { group: GROUP, collector: Collector::Discard, d: tmem, a: a.into(), b, desc };
                    let at = 4 * i64::from(step);
                    k.tcgen05_mma_scaled(mma, ScaleVector::Nvf4Block16, sfa.at(at), sfb.at(at), accumulate);
                }
                k.tcgen05_commit(GROUP, base.at(done.offset));
            });
            k.warp_sync();
        });

        k.mbarrier_wait(base.at(done.offset), 0u32, "done");
        k.tcgen05_fence_after();
        k.comment("Each warp reads its 32 lanes.");
        let lane = k.shl(warp, 21u32);
        let mine = k.offset(tmem, lane);
        let values = k.tmem_ld(TmemShape::Lanes32Bits32, 16, mine);
        k.tmem_wait_ld();
        let thread = k.special(Special::TidX);
        let out = k.ld_pointer(&out);
        let row = k.mul_wide(thread, 64u32);
        let row = k.offset(out, row);
        for (i, eight) in values.chunks(8).enumerate() {
            k.st_global(row.at(32 * i as i64), eight, Hint::default());
        }
        k.tcgen05_fence_before();
        k.cta_sync();
        k.if_(first_warp, "free", |k| k.tmem_dealloc(GROUP, tmem, 256u32));
    });
}

/// A descriptor with the address of a region put in.
fn smem_desc(k: &mut Kernel, base: Addr<Shared>, offset: u32, desc: u64) -> Reg<B64> {
    let address = k.add(base.base(), offset);
    let field = k.shr(address, 4u32);
    let field = k.convert::<U64, U32>(field);
    k.or(field.cast::<B64>(), desc)
}
