//! What the builder writes: snapshots, determinism, legality, misuse.

#[path = "../examples/copy_scale.rs"]
mod copy_scale;
mod kernels;

use dualgemm_ptx::ast::Version;
use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::{OperandFormat, SmemLayout};
use dualgemm_ptx::legal::{Illegal, Problem};
use dualgemm_ptx::{Error, Target, parse};
use std::path::PathBuf;

/// Compares with `tests/snapshots/<name>.ptx`; `UPDATE_SNAPSHOTS=1` rewrites it.
fn snapshot(name: &str, text: &str) {
    let path: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "tests/snapshots", &format!("{name}.ptx")].iter().collect();
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = text.lines().zip(stored.lines()).position(|(a, b)| a != b);
    assert!(
        stored == text,
        "{} differs from line {:?} on; if that is meant, run with UPDATE_SNAPSHOTS=1",
        path.display(),
        differs.map(|line| line + 1)
    );
}

#[test]
fn example_text_is_as_stored() {
    copy_scale::main().unwrap();
    let module = copy_scale::copy_scale(Target::Sm90a).unwrap();
    assert_eq!(
        module.entry("copy_scale").unwrap().directive("reqntid"),
        Some(&[copy_scale::TILE.into(), 1, 1][..])
    );
    snapshot("copy_scale.sm_90a", &module.to_string());
}

#[test]
fn kernel_texts_are_as_stored() {
    for kernel in kernels::KERNELS {
        let module = kernels::module(&kernel).unwrap_or_else(|e| panic!("{}: {e}", kernel.0));
        snapshot(&format!("{}.{}", kernel.0, kernel.1), &module.to_string());
    }
}

/// A cache of assembled kernels is keyed by their text.
#[test]
fn building_twice_gives_the_same_text_exact() {
    for kernel in kernels::KERNELS {
        let [first, second] = [(), ()].map(|()| kernels::module(&kernel).unwrap().to_string());
        assert_eq!(first, second);
    }
}

#[test]
fn built_module_equals_its_text_read_back() {
    for kernel in kernels::KERNELS {
        let module = kernels::module(&kernel).unwrap();
        let read = parse::module(&module.to_string()).unwrap();
        // Line by line, since the trees are too large to print.
        for (read, built) in read.functions().zip(module.functions()) {
            for (read, built) in read.instructions().zip(built.instructions()) {
                assert_eq!(read, built, "{}", kernel.0);
            }
        }
        assert!(read == module, "{}", kernel.0);
    }
}

#[test]
fn missing_instruction_is_an_error_that_names_it_and_the_target() {
    let mut builder = Builder::new(Target::Sm100a, Version::new(8, 8));
    kernels::hopper::build(&mut builder);
    let Err(Error::Illegal(illegal)) = builder.finish() else { panic!("wgmma on sm_100a") };
    assert_eq!(illegal.len(), 7, "{illegal:#?}");
    for error in &illegal {
        assert!(matches!(error, Illegal::Instruction { problem: Problem::Target { .. }, .. }), "{error}");
        assert!(error.to_string().contains("wgmma"), "{error}");
        assert!(error.to_string().contains("does not exist on sm_100a"), "{error}");
    }
}

fn mistake(build: impl FnOnce(&mut Kernel)) -> String {
    let mut builder = Builder::new(Target::Sm90a, Version::new(8, 0));
    builder.kernel("k", build);
    builder.finish().unwrap_err().to_string()
}

#[test]
fn misuse_of_a_destination_is_an_error() {
    let message = mistake(|k| {
        let x = k.mov::<F32>(1.0f32);
        k.to(x).mov::<U32>(1u32);
    });
    assert_eq!(message, "kernel k: %f0 is declared .f32, the instruction gives .u32");
    let message = mistake(|k| {
        let x = k.mov::<U32>(1u32);
        k.to(x).cta_sync();
    });
    assert_eq!(
        message,
        "kernel k: %r0 (.b32) cannot be written by barrier.sync.aligned, which gives no single result"
    );
}

#[test]
fn counts_the_hardware_lacks_are_errors() {
    let message = mistake(|k| {
        let acc = k.zeros(6);
        let b = k.mov::<B64>(0u64);
        k.wgmma(WgmmaFormat::E4m3, &acc, WgmmaA::Desc(b), b, false);
    });
    assert!(message.contains("m64n12k32"), "{message}");
    let message = mistake(|k| k.setmaxnreg_inc(260));
    assert!(message.contains("operand 1 must be `n`: a number from 24 to 256"), "{message}");
    let message = mistake(|k| k.wgmma_wait(8));
    assert!(message.contains("operand 1 must be `n`: a number from 0 to 7"), "{message}");
}

#[test]
fn control_flow_is_structured_in_the_text() {
    let mut builder = Builder::new(Target::Sm80, Version::new(7, 0));
    builder.kernel("flow", |k| {
        let n = k.param::<U32>("n");
        let n = k.ld_param(&n);
        let sum = k.mov::<U32>(0u32);
        k.for_range("rows", 0u32, n, 2, |k, i, this| {
            let large = k.compare(Cmp::Gt, i, 9u32);
            k.break_if(this, large);
            k.if_else(
                large,
                "parity",
                |k| k.assign(sum, 1u32),
                |k| {
                    k.to(sum).add(sum, i);
                },
            );
        });
        k.do_while("rows", |k| {
            k.to(sum).shr(sum, 1u32);
            k.compare(Cmp::Ne, sum, 0u32)
        });
        k.comment("Two lines\nof comment.");
        let odd = k.compare(Cmp::Eq, sum, 1u32);
        k.unless(odd).trap();
    });
    snapshot("flow.sm_80", &builder.finish().unwrap().to_string());
}

/// Each method once, on the oldest target that has it: what it writes is in the table.
#[test]
fn every_remaining_method_writes_legal_instructions() {
    let mut smem = SmemLayout::new();
    let buffer = smem.alloc("buffer", 1024, 128);
    let barrier = smem.mbarriers("barrier", 1);
    let build = |target, version, body: fn(&mut Kernel, Addr<Shared>, Addr<Shared>, Addr<Global>)| {
        let mut builder = Builder::new(target, version);
        builder.kernel("k", |k| {
            let pointer = k.pointer("p");
            let base = k.shared(&smem);
            let global = k.ld_pointer(&pointer);
            body(k, base.at(buffer.offset), base.at(barrier.offset), global);
        });
        let result = builder.finish();
        assert!(result.is_ok(), "{}", result.unwrap_err());
    };
    build(Target::Sm80, Version::new(7, 8), |k, shared, barrier, global| {
        let x = k.ld::<F32, _>(shared);
        let i = k.ld_byte(global);
        let d = k.mov::<F64>(1.5f64);
        let h = k.f32_to_f16(x);
        let h2 = k.f32_to_f16x2(x, x);
        let _ =
            (k.sub(x, 1.0f32), k.min(x, 2.0f32), k.neg(x), k.lg2_approx(x), k.tanh_approx(x), k.fma(d, d, d));
        let _ = (k.fma(h2, h2, h2), k.mul_hi(i, 3u32), k.div(i, 3u32), k.rem(i, 3u32), k.not(i), k.add(h, h));
        let _ = (k.bit_field(i, 3u32, 4u32), k.bit_insert(i, i, 3u32, 4u32), k.permute(i, i, 0x3210u32));
        let _ = (k.funnel_left(i, i, 8u32), k.funnel_right(i, i, 8u32), k.popcount(i), k.leading_zeros(i));
        let _ = (k.f16_to_f32(h), k.f32_to_bf16(x), k.f32_to_bf16x2(x, x), k.int_to_float::<F32, _>(i));
        let _ = (k.f32_to_int::<S32>(x), k.to_bits(x), k.from_bits(i), k.pack_32(h, h), k.unpack_32(h2));
        let wide = k.pack_64(i, i);
        let _ = (k.unpack_64(wide), k.clock(), k.abs(d));
        let bytes = k.unpack_bytes(i);
        let word = k.pack_bytes(bytes);
        k.st_byte(global, i);
        k.st(shared, word);
        k.st(shared.at(4), h2);
        k.st_vector(shared.at(16), &[x, x]);
        let _ = k.ld_acquire::<U32, _>(Scope::Gpu, global);
        k.st_release(Scope::Gpu, global, i);
        let _ = k.compare_exchange(Semantics::Acquire, Scope::Gpu, global, 0u32, 1u32);
        let _ = k.atom(AtomOp::Exchange, Semantics::Relaxed, Scope::Cta, shared, i);
        let _ = k.atom(AtomOp::Max, Semantics::Relaxed, Scope::Sys, global, i);
        k.red(AtomOp::Add, Semantics::Release, Scope::Gpu, global, h2);
        k.red(AtomOp::Or, Semantics::Release, Scope::Gpu, global, word);
        let _ = k.create_policy(Eviction::First);
        let _ =
            k.ld_global::<F32, 4>(global, Hint { read_only: true, no_l1: true, l2: Some(Eviction::First) });
        k.prefetch_l2(global);
        k.mbarrier_init(barrier, 1u32);
        let _ = k.mbarrier_test_wait(barrier, 0u32);
        k.mbarrier_invalidate(barrier);
        k.fence(Semantics::AcquireRelease, Scope::Gpu);
        k.bar_arrive(2u32, 64u32);
        let p = k.compare(Cmp::Le, i, 3u32);
        let _ = (k.vote_any(p), k.vote_all(!p), k.redux(Redux::Max, i));
        k.nanosleep(100u32);
        let _ = (k.shuffle(Shuffle::Up, x, 1u32), k.shuffle(Shuffle::Down, x, 1u32));
        k.when(p).exit();
    });
    build(Target::Sm90a, Version::new(8, 3), |k, shared, barrier, global| {
        let x = k.ld::<F32, _>(shared);
        let _ = k.f32_to_e4m3x2(x, x);
        let half = k.f32_to_bf16(x);
        let _ = k.bf16_to_f32(half);
        let remote = k.map_to_rank(barrier, 1u32);
        k.mbarrier_arrive_remote(remote);
        k.mbarrier_arrive_remote_release(remote);
        k.mbarrier_wait_cluster(barrier, 0u32, "peer");
        let to = shared.cluster();
        k.st_async(to, x, remote);
        let _ = k.ld::<F32, _>(to);
        k.bulk_store(global, shared, 64u32);
        k.bulk_prefetch(global, 64u32);
        let map = global.base();
        let at = [1.into(), 2.into(), 3.into()];
        k.tensor_store(map, &at, shared);
        k.tensor_reduce(TmaReduce::Add, map, &at, shared);
        k.tensor_prefetch(map, &at);
        k.bulk_commit();
        k.bulk_wait(0);
        k.bulk_wait_read(0);
        k.fence_proxy_async();
        let options =
            TmaOptions { multicast: Some(3u16.into()), l2: Some(Eviction::Normal), ..TmaOptions::default() };
        k.tensor_load(shared, map, &at, barrier, &options);
        k.bulk_load(shared, global, 64u32, barrier, &options);
    });
    build(Target::Sm100a, Version::new(8, 8), |k, shared, barrier, global| {
        let x = k.ld::<F32, _>(shared);
        let bits = k.to_bits(x);
        let _ = k.f32_to_ue8m0x2(x, x);
        let _ = k.f32_to_e2m1x4_stochastic([x, x, x, x], bits);
        let tmem = Addr::<Tmem>::new(k.ld(shared));
        let desc = k.mov::<B64>(0u64);
        let registers = k.tmem_ld(TmemShape::Lanes16Bits256, 2, tmem);
        assert_eq!(registers.len(), 8);
        k.tmem_st(TmemShape::Lanes16Bits128, tmem, &registers);
        k.tmem_wait_st();
        k.tmem_cp_rows(CtaGroup::Two, tmem, desc);
        k.tmem_shift_down(CtaGroup::Two, tmem);
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
        let options = TmaOptions {
            multicast: Some(3u16.into()),
            cta_group: Some(CtaGroup::Two),
            ..TmaOptions::default()
        };
        k.tensor_load(shared, global.base(), &[0.into(), 0.into()], barrier, &options);
        let _ = k.ld_global::<F32, 8>(global, Hint::default());
        k.try_cancel_multicast(shared, barrier);
        let pair = k.mov::<F32x2>(desc.cast::<F32x2>());
        let _ = k.add(pair, pair);
    });
}
