//! Every method of the builder, in modules of the targets that have it.

use dualgemm_ptx::ast::{Module, Version};
use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::{OperandFormat, SmemLayout, SmemTile, Swizzle};
use dualgemm_ptx::{Error, Target};

type Body = fn(&mut Kernel, Addr<Shared>, Addr<Shared>, Addr<Global>);

/// Name, target, version, and what builds it.
pub type Methods = (&'static str, Target, Version, Body);

pub const MODULES: [Methods; 8] = [
    ("ampere", Target::Sm80, Version::new(7, 8), ampere),
    ("hopper", Target::Sm90a, Version::new(8, 6), hopper),
    ("blackwell", Target::Sm100a, Version::new(8, 8), blackwell),
    ("blackwell", Target::Sm100f, Version::new(8, 8), blackwell),
    ("blackwell", Target::Sm103a, Version::new(8, 8), blackwell),
    ("pairs", Target::Sm100a, Version::new(8, 8), pairs),
    ("geforce", Target::Sm120a, Version::new(8, 7), geforce),
    ("geforce", Target::Sm121a, Version::new(8, 8), geforce),
];

pub fn module(&(name, target, version, body): &Methods) -> Result<Module, Error> {
    let mut smem = SmemLayout::new();
    let buffer = smem.alloc("buffer", 1024, 1024);
    let barrier = smem.mbarriers("barrier", 1);
    let mut builder = Builder::new(target, version);
    builder.header("Each method once.");
    builder.kernel(name, |k| {
        k.required_threads(128);
        let pointer = k.pointer("p");
        let base = k.shared(&smem);
        let global = k.ld_pointer(&pointer);
        body(k, base.at(buffer.offset), base.at(barrier.offset), global);
    });
    builder.finish()
}

fn ampere(k: &mut Kernel, shared: Addr<Shared>, barrier: Addr<Shared>, global: Addr<Global>) {
    let x = k.ld::<F32, _>(shared);
    let i = k.ld_byte(global);
    let d = k.mov::<F64>(1.5f64);
    let h = k.f32_to_f16(x);
    let h2 = k.f32_to_f16x2(x, x);
    let _ = (k.sub(x, 1.0f32), k.min(x, 2.0f32), k.neg(x), k.fma(d, d, d));
    let _ = (k.fma(h2, h2, h2), k.div(i, 3u32), k.not(i), k.add(h, h));
    let _ = (k.bit_field(i, 3u32, 4u32), k.permute(i, i, 0x3210u32));
    let _ = (k.funnel_left(i, i, 8u32), k.funnel_right(i, i, 8u32), k.popcount(i), k.leading_zeros(i));
    let _ = (k.f16_to_f32(h), k.f32_to_bf16(x), k.f32_to_bf16x2(x, x), k.int_to_float::<F32, _>(i));
    let _ = (k.to_bits(x), k.from_bits(i), k.pack_32(h, h), k.unpack_32(h2));
    let wide = k.pack_64(i, i);
    let _ = (wide, k.clock(), k.abs(d), k.rcp(x), k.rcp_approx(x), k.ex2_approx(x));
    let _ = k.unpack_bytes(i);
    let word = i.cast::<B32>();
    k.st_byte(global, i);
    k.st(shared, word);
    k.st(shared.at(4), h2);
    k.st_vector(shared.at(16), &[x, x]);
    let _ = k.ld_acquire::<U32, _>(Scope::Gpu, global);
    k.st_release(Scope::Gpu, global, i);
    let _ = k.atom(AtomOp::Exchange, Semantics::Relaxed, Scope::Cta, shared, i);
    let _ = k.atom(AtomOp::Max, Semantics::Relaxed, Scope::Sys, global, i);
    k.red(AtomOp::Add, Semantics::Release, Scope::Gpu, global, h2);
    k.red(AtomOp::Or, Semantics::Release, Scope::Gpu, global, word);
    k.prefetch_l2(global);
    k.mbarrier_init(barrier, 1u32);
    k.fence(Semantics::AcquireRelease, Scope::Gpu);
    let p = k.compare(Cmp::Le, i, 3u32);
    let _ = k.redux(Redux::Max, i);
    let _ = (k.shuffle(Shuffle::Up, x, 1u32), k.shuffle(Shuffle::Down, x, 1u32));
    let _ = (k.max(x, 2.0f32), k.min_nan(x, x), k.max_nan(x, x), k.div_exact(x, x), k.select(p, i, 7u32));
    let _ = (k.lop3(word, word, word, 0xEA), k.or(i, 3u32), k.xor(i, 1u32));
    let (wide_index, _) = (k.convert::<U64, U32>(i), k.ballot(p));
    let _ = k.mul(wide_index, 3u64);
    let _ = k.atom(AtomOp::Add, Semantics::AcquireRelease, Scope::Gpu, global, x);
    k.bar_sync(2u32, 64u32);
    k.warp_sync();
    k.cp_async_16(shared, global);
    k.cp_async_16_partial(shared, global, 8u32);
    k.cp_async_commit();
    k.cp_async_wait(0);
    k.mbarrier_arrive(barrier);
    let [low, high] = k.ld_vector::<F32, _, 2>(shared);
    let (a, b) = (k.ldmatrix::<4>(false, shared), k.ldmatrix::<2>(true, shared));
    let acc = [low, high, low, high];
    k.mma_half(HalfFormat::Bf16, &acc, &a, &b);
    let warp = k.warp_index();
    k.role(warp, 0..2, "both", |k| k.loop_("work", |k, this| k.break_if(this, p)));
    k.role(warp, 2..3, "one", |k| k.when(p).exit());
    k.when(p).ret();
}

fn hopper(k: &mut Kernel, shared: Addr<Shared>, barrier: Addr<Shared>, global: Addr<Global>) {
    let x = k.ld::<F32, _>(shared);
    let half = k.f32_to_bf16(x);
    let _ = k.bf16_to_f32(half);
    let remote = k.map_to_rank(barrier, 1u32);
    k.mbarrier_arrive_remote_release(remote);
    k.mbarrier_wait_cluster(barrier, 0u32, "peer");
    let to = shared.cluster();
    k.st_async_vector(to, &[x, x], remote);
    let _ = k.ld::<F32, _>(to);
    k.bulk_store(global, shared, 64u32);
    let map = global.base();
    let at = [1.into(), 2.into(), 3.into()];
    k.bulk_commit();
    k.bulk_wait(0);
    let options =
        TmaOptions { multicast: Some(3u16.into()), l2: Some(Eviction::Normal), ..TmaOptions::default() };
    k.tensor_load(shared, map, &at, barrier, &options);
    k.bulk_load(shared, global, 64u32, barrier, &options);
    let tokens = k.tensor_map("tokens");
    let tokens = k.tensor_map_address(&tokens);
    k.prefetch_tensor_map(tokens);
    k.min_ctas(1);
    k.cluster(2, 1, 1);
    k.fence_mbarrier_init();
    k.cluster_sync();
    k.cluster_arrive_relaxed();
    k.launch_dependents();
    k.grid_dependency_wait();
    k.mbarrier_arrive_expect_tx(barrier, 64u32);
    let ready = k.mbarrier_try_wait(barrier, 0u32);
    k.when(ready).bulk_commit();
    k.mbarrier_wait(barrier, 0u32, "full");
    k.fence_proxy_async_shared();
    k.setmaxnreg_dec(40);
    k.setmaxnreg_inc(232);
    multiply(k, shared);
    let parts = k.ld_vector::<B32, _, 4>(shared);
    k.stmatrix(true, shared, &parts);
}

/// Seven instructions that Hopper alone has.
pub fn multiply(k: &mut Kernel, shared: Addr<Shared>) {
    let tile = SmemTile::new(64, 128, Swizzle::B128).expect("a valid tile");
    let (acc, parts) = (k.zeros(32), k.ld_vector::<B32, _, 4>(shared));
    let b = k.mov::<B64>(tile.wgmma_desc());
    k.wgmma_fence();
    k.wgmma(WgmmaFormat::Half(HalfFormat::F16), &acc, WgmmaA::Regs(parts), b, true);
    k.wgmma(WgmmaFormat::Half(HalfFormat::Bf16), &acc, WgmmaA::Desc(b), b, false);
    k.wgmma(WgmmaFormat::E4m3, &acc, WgmmaA::Desc(b), b, true);
    k.wgmma_commit();
    k.wgmma_wait(1);
    k.wgmma_wait(0);
}

fn blackwell(k: &mut Kernel, shared: Addr<Shared>, barrier: Addr<Shared>, global: Addr<Global>) {
    let address = k.ld::<U32, _>(shared);
    let tmem = Addr::<Tmem>::new(address.cast());
    let (desc, bits) = (k.mov::<B64>(0u64), k.mov::<B32>(0x0820_0480u32));
    let p = k.elect();
    k.tmem_alloc(CtaGroup::One, shared, 256u32);
    k.tmem_relinquish(CtaGroup::One);
    k.cta_sync();
    k.tmem_cp_scales(CtaGroup::One, tmem, desc);
    let (group, collector) = (CtaGroup::One, Collector::Discard);
    let mma = Mma { group, collector, d: tmem, a: desc.into(), b: desc, desc: bits };
    k.tcgen05_mma_scaled(mma, ScaleVector::Nvf4Block16, tmem.at(128), tmem.at(144), p);
    k.tcgen05_commit(CtaGroup::One, barrier);
    let values = k.tmem_ld(TmemShape::Lanes32Bits32, 16, tmem);
    k.tmem_wait_ld();
    k.st_vector(global, &values[..4]);
    k.tmem_dealloc(CtaGroup::One, tmem, 256u32);
}

fn pairs(k: &mut Kernel, shared: Addr<Shared>, barrier: Addr<Shared>, global: Addr<Global>) {
    let x = k.ld::<F32, _>(shared);
    let bits = k.to_bits(x);
    let tmem = Addr::<Tmem>::new(k.ld(shared));
    let desc = k.mov::<B64>(0u64);
    let registers = k.tmem_ld(TmemShape::Lanes16Bits256, 2, tmem);
    assert_eq!(registers.len(), 8);
    k.tmem_st(TmemShape::Lanes16Bits128, tmem, &registers);
    k.tmem_wait_st();
    let p = k.elect();
    let mma = Mma {
        group: CtaGroup::Two,
        collector: Collector::Fill,
        d: tmem,
        a: desc.into(),
        b: desc,
        desc: bits,
    };
    k.tcgen05_mma(mma, OperandFormat::Bf16, p);
    k.tcgen05_mma(Mma { a: tmem.into(), ..mma }, OperandFormat::E4m3, p);
    let mma = Mma { collector: Collector::LastUse, ..mma };
    k.tcgen05_mma_scaled(mma, ScaleVector::Nvf4Vec4, tmem, tmem, p);
    let mma = Mma { collector: Collector::Use, ..mma };
    k.tcgen05_mma_scaled(mma, ScaleVector::Mxf4Block32, tmem, tmem, p);
    let mask = k.mov::<B16>(3u16);
    k.tcgen05_commit_multicast(CtaGroup::Two, barrier, mask);
    let options =
        TmaOptions { multicast: Some(3u16.into()), cta_group: Some(CtaGroup::Two), ..TmaOptions::default() };
    k.tensor_load(shared, global.base(), &[0.into(), 0.into()], barrier, &options);
    let pair = k.mov::<F32x2>(desc.cast::<F32x2>());
    let _ = k.add(pair, pair);
}

fn geforce(k: &mut Kernel, shared: Addr<Shared>, barrier: Addr<Shared>, global: Addr<Global>) {
    let parts = k.ld_vector::<B32, _, 4>(shared);
    let acc: [Reg<F32>; 4] = std::array::from_fn(|_| k.mov(0.0f32));
    let select = ScaleSelect { register: parts[0], byte: 0, thread: 0 };
    k.mma_nvfp4(&acc, &parts, &[parts[0], parts[1]], select, ScaleSelect { thread: 3, ..select });
    k.mma_mxfp4(&acc, &parts, &[parts[0], parts[1]], select, select);
    let [low, ..] = k.unpack_bytes(parts[0]);
    let _ = k.e2m1x2_to_f16x2(low);
    let eight = k.mov::<B16>(0x3838u16);
    let _ = k.e4m3x2_to_f16x2(eight);
    k.mbarrier_init(barrier, 1u32);
    k.try_cancel(shared, barrier);
    let _ = k.ld::<B128, _>(shared);
    k.st(global, parts[0]);
}
