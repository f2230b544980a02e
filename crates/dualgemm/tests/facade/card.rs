//! The same on a real card: `cargo test -p dualgemm --test facade --release -- --ignored card --test-threads=1`, one after the
//! other, since nothing else may use the card while a graph is recorded.

use std::time::Instant;

use dualgemm::check::{Reference, RowSample};
use dualgemm::device::{Device as _, DevicePtr, Error as DeviceError, Stream};
use dualgemm::formats::{BlockFormat, QuantizedMatrix};
use dualgemm::gemm::{
    AFormat, AOperand, Activation, Comparison, DualGemmDesc, GateUp, GatedMlp, Linear, MlpDesc, OutFormat,
    OutScale, OutputMut, QuantizeA, RouterWeights, Routing, mixture_reference,
};
use dualgemm::strategies::{Buffer, Gpu, Rounding, STRATEGIES, measure};
use dualgemm::{
    DeviceA, DeviceC, DeviceCall, DualGemm, GpuId, GpuOptions, MixturePlan, PackedWeights, Plan, Rows, Target,
};
use half::f16;

use crate::blackwell::{mxfp4, mxfp4_pair};
use crate::gpu::{assert_rows, error, misplaced_operands_are_refused_by_name, operand};
use crate::{expert, experts, mlp, quantized, rel_l2};

const ID: GpuId = GpuId::Cuda(0);

fn card() -> &'static Gpu {
    ID.open().unwrap_or_else(|e| panic!("{e}"))
}

fn plan(desc: &DualGemmDesc, strategy: &str) -> Result<Plan, dualgemm::Error> {
    let options = GpuOptions { strategy: Some(strategy.into()), ..GpuOptions::default() };
    DualGemm::plan(desc, &Target::Gpu(ID, options))
}

fn desc(m: usize, n: usize, k: usize, a: AFormat) -> DualGemmDesc {
    DualGemmDesc { out: OutFormat::F16, ..DualGemmDesc::new(m, n, k, a, BlockFormat::Nvfp4) }
}

/// A call whose operands lie among bytes that nobody may touch.
struct Guarded {
    a: Buffer,
    c: Buffer,
    call: DeviceCall,
}

const GUARD: usize = 4096;
const POISON: u8 = 0xEE;

impl Guarded {
    fn new(desc: &DualGemmDesc, a: &[u8]) -> Self {
        let &DualGemmDesc { m, n, k, .. } = desc;
        let around = |bytes: &[u8]| {
            let guard = vec![POISON; GUARD];
            Buffer::of(card(), &[&guard, bytes, &guard].concat()).unwrap()
        };
        let (a, c) = (around(a), around(&vec![POISON; m * n * 2]));
        let at = |buffer: &Buffer| buffer.ptr().offset(GUARD as u64);
        let call =
            DeviceCall { m, a: DeviceA::Float { values: at(&a), pitch: 2 * k }, c: DeviceC::Float(at(&c)) };
        Self { a, c, call }
    }

    /// C, after a look at what surrounds it.
    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.c.bytes()];
        self.c.read(&mut bytes).unwrap();
        let c = bytes.split_off(GUARD);
        let (c, behind) = c.split_at(c.len() - GUARD);
        assert!(bytes.iter().chain(behind).all(|&b| b == POISON), "bytes around C were written");
        c.to_vec()
    }
}

fn bytes(a: &AOperand<'_>) -> Vec<u8> {
    let AOperand::Float(dualgemm::formats::FloatMatrix::F16(a)) = a else { panic!("A is f16") };
    (0..a.rows()).flat_map(|row| a.row(row)).flat_map(|x| x.to_le_bytes()).collect()
}

/// The shapes that `compute-sanitizer` runs over, too: one row, one more or less than a tile, odd N, K of 464.
#[test]
#[ignore = "needs an sm_90 GPU"]
fn ragged_shapes_are_right_and_write_nothing_else_close() {
    for (m, n, k) in
        [(1, 64, 64), (1, 37, 464), (127, 96, 464), (129, 33, 80), (130, 256, 1056), (3, 4104, 512)]
    {
        let strategies =
            ["fused", "persistent", "stream-k", "decode", "warpwise", "fused-epilogue", "plain", "portable"];
        for strategy in strategies {
            let desc = desc(m, n, k, AFormat::F16);
            let Ok(plan) = plan(&desc, strategy) else { continue };
            let (weights, a) = (expert(n, k, 0), operand(m, k, AFormat::F16));
            let packed = plan.prepack(&weights).unwrap();
            let runner = plan.runner(1).unwrap();
            let guarded = Guarded::new(&desc, &bytes(&a));
            // SAFETY: the operands were allocated here, as large as the problem.
            unsafe { runner.run_device(&guarded.call, &packed, Stream::Own) }.unwrap();
            let got: Vec<f16> =
                guarded.read().chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
            let found = rel_l2(&got, &desc.epilogue, &a, &weights);
            assert!(found < 5e-4, "{strategy} {m}x{n}x{k}: {found:e}");
            assert!(guarded.a.bytes() > 2 * GUARD);
        }
    }
}

#[test]
#[ignore = "needs an sm_90 GPU"]
fn every_strategy_is_right_close() {
    let mut ran = Vec::new();
    // Those of Blackwell have no card to run on.
    let others = ["native", "library-nvfp4"];
    for s in STRATEGIES.iter().filter(|s| !others.contains(&s.name())) {
        for (a, out) in [
            (AFormat::F16, OutFormat::F16),
            (AFormat::Nvfp4, OutFormat::F32),
            (AFormat::Bf16, OutFormat::Bf16),
        ] {
            // What only takes K in whole steps, and what needs more tiles than the card has multiprocessors.
            let (n, k) = match s.name() {
                "plain" => (128, 480),
                "waves" => (136 * 128, 512),
                _ => (128, 464),
            };
            let m = if s.name() == "warpwise" { 8 } else { 64 };
            let desc = DualGemmDesc { out, ..desc(m, n, k, a) };
            let plan = match plan(&desc, s.name()) {
                Ok(plan) => plan,
                Err(e) if a == AFormat::Bf16 && e.to_string().contains("it takes f16") => continue,
                Err(e) => panic!("{}: {e}", s.name()),
            };
            match plan.runner(1) {
                Err(e) if e.to_string().contains("cuBLASLt") => continue,
                other => drop(other.unwrap_or_else(|e| panic!("{}: {e}", s.name()))),
            }
            let found = error(&plan, &operand(m, k, a), &expert(n, k, 1));
            let Plan::Gpu { plan, .. } = &plan else { panic!("a GPU plan") };
            // These operands are sine waves, whose sums cancel: what e4m3 takes from them is a third of C.
            let bound = match s.rounding() {
                Rounding::Operands => 0.5,
                Rounding::Nothing | Rounding::Products => measure::bound(plan).unwrap(),
            };
            assert!(found < bound, "{} A {a}: {found:e}", s.name());
            ran.push(s.name());
        }
    }
    assert!(ran.contains(&"fused") && ran.contains(&"decode"), "{ran:?}");
    println!("ran: {ran:?}");
}

#[test]
#[ignore = "needs an sm_90 GPU"]
fn experts_without_rows_and_ragged_ones_equal_the_reference_close() {
    let (m, n, k) = (300, 96, 464);
    let plan = plan(&desc(m, n, k, AFormat::Nvfp4), "fused").unwrap();
    let experts: Vec<_> = (0..4).map(|e| expert(n, k, e)).collect();
    let packed: Vec<PackedWeights> = experts.iter().map(|e| plan.prepack(e).unwrap()).collect();
    let a = AOperand::Quantized(quantized("a", m, k, 0.3));
    let ranges = [(0, 129), (129, 0), (129, 1), (130, 127)];
    let groups: Vec<Rows<'_>> =
        packed.iter().zip(ranges).map(|(weights, (first, count))| Rows { first, count, weights }).collect();
    let mut c = vec![f16::NEG_ONE; m * n];
    plan.runner(4).unwrap().run_grouped(&a, &groups, OutputMut::F16(&mut c)).unwrap();
    for (expert, range) in experts.iter().zip(ranges) {
        assert_rows(&c, range, &a, expert, (5e-4, "fused"));
    }
    assert!(c[257 * n..].iter().all(|&x| x == f16::NEG_ONE), "rows of nobody stay");
}

/// One launch for all experts; how many rows each has is changed on the device, between replays of one graph.
#[test]
#[ignore = "needs an sm_90 GPU"]
fn experts_change_their_rows_between_replays_close() {
    let tables: [&[u32]; 5] = [
        &[0, 129, 129, 130, 257, 257, 300],
        &[0, 0, 300, 300, 300, 300, 300],
        &[3, 4, 5, 6, 7, 8, 9],
        &[300; 7],
        &[0, 50, 100, 150, 200, 250, 300],
    ];
    for strategy in ["fused", "persistent", "decode"] {
        for a in [AFormat::F16, AFormat::Nvfp4] {
            for (n, k) in [(96, 464), (1032, 1024)] {
                let options =
                    GpuOptions { strategy: Some(strategy.into()), groups: 6, ..GpuOptions::default() };
                experts::check(&ID, (&desc(300, n, k, a), options), a == AFormat::F16, &tables, 5e-4);
            }
        }
    }
}

/// A graph holds addresses; contents change between replays, and equal contents give equal bits every time.
#[test]
#[ignore = "needs an sm_90 GPU"]
fn ten_thousand_replays_with_changing_contents_give_the_same_bits_exact() {
    const REPLAYS: usize = 10_000;
    let strategies = [
        ("warpwise", 2),
        ("warpwise", 16),
        ("decode", 16),
        ("decode", 64),
        ("stream-k", 64),
        ("fused", 130),
        ("fused-epilogue", 130),
        ("fp8", 130),
    ];
    for (strategy, m) in strategies {
        let desc = desc(m, 264, 1040, AFormat::F16);
        let plan = plan(&desc, strategy).unwrap();
        let packed = plan.prepack(&expert(264, 1040, 0)).unwrap();
        let runner = plan.runner(1).unwrap();
        runner.warm(&packed).unwrap();
        let contents: Vec<Vec<u8>> = (0..4)
            .map(|turn| {
                let a = bytes(&operand(m, 1040, AFormat::F16));
                a.iter()
                    .enumerate()
                    .map(|(i, b)| if i % 2 == 0 { b.wrapping_add(turn * 37) } else { *b })
                    .collect()
            })
            .collect();
        let guarded = Guarded::new(&desc, &contents[0]);
        let gpu = card().card().unwrap();
        let graph = gpu
            .record(|| {
                // SAFETY: the operands were allocated here, as large as the problem.
                let call = unsafe { runner.run_device(&guarded.call, &packed, Stream::Own) };
                call.map_err(|e| DeviceError::Kernel(e.to_string()))
            })
            .unwrap();
        let DeviceA::Float { values, .. } = guarded.call.a else { panic!("A is f16") };
        let mut first: Vec<Option<Vec<u8>>> = vec![None; contents.len()];
        for replay in 0..REPLAYS {
            let turn = replay * 7 % contents.len();
            card().copy_to(values, &contents[turn]).unwrap();
            // SAFETY: the operands were allocated here, as large as the problem.
            unsafe { graph.replay() }.unwrap();
            let c = guarded.read();
            match &first[turn] {
                None => first[turn] = Some(c),
                Some(want) => assert!(c == *want, "{strategy}: replay {replay} differs"),
            }
        }
        let distinct = first.iter().flatten().collect::<std::collections::HashSet<_>>();
        assert_eq!(distinct.len(), contents.len(), "contents matter");
    }
}

/// Calls that come again are replays; each reads its operands anew.
#[test]
#[ignore = "needs an sm_90 GPU"]
fn calls_that_come_again_give_the_same_bits_exact() {
    let (n, k) = (264, 1040);
    for m in [3, 130] {
        let plan = DualGemm::plan(&desc(m, n, k, AFormat::Nvfp4), &Target::cuda(0)).unwrap();
        let packed = plan.prepack(&expert(n, k, 0)).unwrap();
        let mut runner = plan.runner(1).unwrap();
        // Of one tensor scale, so that the calls are the same.
        let mut other = quantized("a", m, k, 0.37).codes().to_vec();
        other.rotate_left(8);
        let first = quantized("a", m, k, 0.37);
        let (scales, layout, scale) = (first.scales().to_vec(), first.scale_layout(), first.global_scale());
        let second =
            QuantizedMatrix::new("a", BlockFormat::Nvfp4, m, k, other, scales, layout, scale).unwrap();
        let contents = [first, second].map(AOperand::Quantized);
        let mut first: [Option<Vec<f16>>; 2] = [None, None];
        for call in 0..24 {
            let mut c = vec![f16::NAN; m * n];
            runner.run(&contents[call % 2], &packed, OutputMut::F16(&mut c)).unwrap();
            match &first[call % 2] {
                None => first[call % 2] = Some(c),
                Some(want) => assert!(c == *want, "call {call} differs"),
            }
        }
        assert!(first[0] != first[1], "contents matter");
    }
}

/// What a call costs the host: planned, prepared and warm, nothing is left but to look up and start the launches.
#[test]
#[ignore = "needs an sm_90 GPU"]
fn a_call_costs_the_host_at_most_five_microseconds() {
    for (strategy, a) in [("decode", AFormat::F16), ("decode", AFormat::Nvfp4), ("fused", AFormat::F16)] {
        let desc = desc(1, 64, 64, a);
        let plan = plan(&desc, strategy).unwrap();
        let packed = plan.prepack(&expert(64, 64, 0)).unwrap();
        let runner = plan.runner(1).unwrap();
        runner.warm(&packed).unwrap();
        let guarded = Guarded::new(&desc, &[0; 128]);
        let mut call = guarded.call;
        if a == AFormat::Nvfp4 {
            let DeviceA::Float { values, .. } = call.a else { panic!("made so") };
            call.a = DeviceA::Blocks {
                format: BlockFormat::Nvfp4,
                codes: values,
                scales: values,
                global_scale: 1.0,
            };
        }
        let mut each: Vec<f64> = (0..20)
            .map(|_| {
                card().synchronize().unwrap();
                let start = Instant::now();
                for _ in 0..100 {
                    // SAFETY: the operands were allocated here, as large as the problem.
                    unsafe { runner.run_device(&call, &packed, Stream::Own) }.unwrap();
                }
                start.elapsed().as_secs_f64() * 1e4
            })
            .collect();
        each.sort_by(f64::total_cmp);
        println!("{strategy}, A {a}: {:.2} us per call on the host", each[10]);
        assert!(each[10] <= 5.0, "{strategy}, A {a}: {} us", each[10]);
    }
}

#[test]
#[ignore = "needs an sm_90 GPU"]
fn the_most_rows_and_offsets_beyond_32_bits_are_right_close() {
    let (m, n, k) = (262_141, 8200, 64);
    let plan = plan(&desc(m, n, k, AFormat::F16), "fused").unwrap();
    let (weights, a) = (expert(n, k, 0), operand(m, k, AFormat::F16));
    let packed = plan.prepack(&weights).unwrap();
    let values = Buffer::of(card(), &bytes(&a)).unwrap();
    let c = Buffer::new(card(), m * n * 2).unwrap();
    let call = DeviceCall {
        m,
        a: DeviceA::Float { values: values.ptr(), pitch: 2 * k },
        c: DeviceC::Float(c.ptr()),
    };
    // SAFETY: the operands were allocated here, as large as the problem.
    unsafe { plan.runner(1).unwrap().run_device(&call, &packed, Stream::Own) }.unwrap();
    let sample = RowSample::spread(m, 7);
    let want = Reference::new(&a, &sample).values(&plan.desc().epilogue, &weights).unwrap();
    let mut got = Vec::new();
    for row in sample.rows() {
        let mut bytes = vec![0; 2 * n];
        card().copy_from(&mut bytes, c.ptr().offset((row * n * 2) as u64)).unwrap();
        got.extend(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])));
    }
    let found = Comparison::new(&got, &want, n).unwrap().rel_l2;
    assert!(found < 5e-4, "{found:e}");
}

/// Each is one clear error, and the card goes on working.
#[test]
#[ignore = "needs an sm_90 GPU"]
fn what_goes_wrong_is_said_and_leaves_the_card_usable_close() {
    let message = |e: DeviceError| e.to_string();
    let other = ".version 8.8\n.target sm_100a\n.address_size 64\n.visible .entry k()\n{\n\tret;\n}\n";
    let wrong_arch = message(card().load(other).unwrap_err());
    assert!(wrong_arch.contains("sm_100a"), "{wrong_arch}");
    let newer = ".version 99.0\n.target sm_90\n.address_size 64\n.visible .entry k()\n{\n\tret;\n}\n";
    let too_new = message(card().load(newer).unwrap_err());
    assert!(too_new.contains("99.0"), "{too_new}");
    let memory = message(card().alloc(1 << 44).unwrap_err());
    assert!(memory.contains("are free"), "{memory}");
    assert!(message(card().free(DevicePtr(64)).unwrap_err()).contains("live allocation"));
    let desc = desc(4, 64, 64, AFormat::F16);
    let plan = plan(&desc, "fused").unwrap();
    let packed = plan.prepack(&expert(64, 64, 0)).unwrap();
    let runner = plan.runner(1).unwrap();
    let guarded = Guarded::new(&desc, &bytes(&operand(4, 64, AFormat::F16)));
    misplaced_operands_are_refused_by_name(&runner, &packed, &guarded.call, 2 * 64);
    let found = error(&plan, &operand(4, 64, AFormat::F16), &expert(64, 64, 0));
    assert!(found < 5e-4, "{found:e}");
}

/// `dualgemm bench --op mlp` and `--op moe` time them.
#[test]
#[ignore = "needs an sm_90 GPU"]
fn mlps_and_mixtures_are_within_the_bounds_of_f64() {
    let target = Target::cuda(0);
    for between in [OutFormat::Bf16, mlp::nvfp4(OutScale::Static(0.01))] {
        for (m, a) in [(1, AFormat::Bf16), (16, AFormat::F16), (130, AFormat::Nvfp4)] {
            mlp::check_mlp(&target, (m, [1040, 1024, 520]), (a, QuantizeA::No), between);
        }
    }
    let all: Vec<_> = (0..5).map(|e| Some(mlp::mlp(32, 64, 48, e))).collect();
    mlp::check_shared(&target, OutFormat::F16, OutFormat::Bf16, &all);
    // As gpt-oss has them: mxfp4, biases, and its own function.
    let gpt_oss = |e: usize| {
        let bias = || Some((0..64).map(|i| (i as f32).sin()).collect::<Vec<_>>().into());
        let gate_up = GateUp { gate_bias: bias(), up_bias: bias(), ..mxfp4_pair(64, 96, e) };
        GatedMlp { gate_up, down: Linear::new(mxfp4("down", 96, 64, 0.9 + e as f32)) }
    };
    let all: Vec<_> = (0..5).map(|e| Some(gpt_oss(e))).collect();
    let mut desc = mlp::mixture(7, AFormat::Bf16, OutFormat::Bf16, OutFormat::F32, RouterWeights::Output);
    let gate_up = DualGemmDesc::new(7, 64, 96, AFormat::Bf16, BlockFormat::Mxfp4);
    let gate_up = DualGemmDesc { out: OutFormat::Bf16, ..gate_up };
    desc.mlp = MlpDesc::new(gate_up, 96, BlockFormat::Mxfp4, OutFormat::F32);
    desc.mlp.gate_up.epilogue.activation = Activation::SWIGLU_OAI;
    let (a, weights) = (mlp::activations(AFormat::Bf16, 7, 96), mlp::weights());
    let routing = Routing { ids: &mlp::IDS, weights: &weights };
    let plan = MixturePlan::new(&desc, &target).unwrap();
    let packed = plan.prepack(all.iter().cloned().map(Ok::<_, dualgemm::Error>), None).unwrap();
    let mut c = vec![f32::NAN; 7 * 96];
    plan.runner().unwrap().run(&a, routing, &packed, OutputMut::F32(&mut c), false).unwrap();
    let want = mixture_reference(&desc.mlp, RouterWeights::Output, &a, routing, &all);
    mlp::assert_within(&c, &want, "gpt-oss");
}
