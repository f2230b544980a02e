//! Plans on Blackwell through the facade, on simulated cards with every check on: the strategy `native`, which no card
//! has run yet.

use dualgemm::check::{Reference, RowSample};
use dualgemm::device::Stream;
use dualgemm::formats::quantize::mxfp4::quantize_mxfp4;
use dualgemm::formats::{BlockFormat, QuantizedMatrix, ScaleLayout};
use dualgemm::gemm::{
    AFormat, AOperand, DualGemmDesc, GateUp, Operation, OutFormat, OutScale, OutputMut, QuantizeA,
    RouterWeights, Routing,
};
use dualgemm::{DualGemm, Error, GpuId, GpuOptions, LayerShape, MixturePlan, Plan, Rows, SimArch, Target};

use crate::gpu::{assert_rows, error, operand};
use crate::on_device::pair_on;
use crate::{expert, floats, mlp, quantized, rel_l2};

const CARDS: [GpuId; 2] = [GpuId::Sim(SimArch::Sm100a), GpuId::Sim(SimArch::Sm120a)];

fn plan(id: &GpuId, desc: &DualGemmDesc) -> Plan {
    DualGemm::plan(desc, &Target::Gpu(id.clone(), GpuOptions::default())).unwrap_or_else(|e| panic!("{e}"))
}

fn named(id: &GpuId, strategy: &str) -> Target {
    Target::Gpu(id.clone(), GpuOptions { strategy: Some(strategy.into()), ..GpuOptions::default() })
}

fn strategy(plan: &Plan) -> &str {
    let Plan::Gpu { plan, .. } = plan else { panic!("a GPU plan") };
    &plan.strategy
}

/// Weights that are on the card give what those of the host give, in every order of their scales.
#[test]
fn weights_on_the_device_are_taken_exact() {
    let id = &CARDS[0];
    let in_mxfp4 = (AOperand::Quantized(mxfp4("a", 9, 224, 0.37)), mxfp4_pair(80, 224, 0));
    for (a, weights) in [(operand(9, 224, AFormat::Nvfp4), expert(80, 224, 0)), in_mxfp4] {
        let format = weights.gate.format();
        let plan = plan(id, &DualGemmDesc::new(9, 80, 224, AFormat::of(&a), format));
        let want = plan.run_to_vec(&a, &plan.prepack(&weights).unwrap()).unwrap();
        for layout in ScaleLayout::ALL {
            let (on_device, _buffers) = pair_on(id, &weights, layout);
            // SAFETY: the operands were allocated here, as large as the problem.
            let packed = unsafe { plan.prepack_device(&on_device, Stream::Own) }.unwrap();
            assert!(plan.run_to_vec(&a, &packed).unwrap() == want, "{format} {layout}");
            let for_floats =
                DualGemm::plan(&DualGemmDesc { a: AFormat::F16, ..*plan.desc() }, &named(id, "portable"));
            // SAFETY: it is refused; nothing is launched.
            let refused = unsafe { for_floats.unwrap().prepack_device(&on_device, Stream::Own) };
            assert_eq!(refused.is_ok(), format == BlockFormat::Nvfp4, "mxfp4 is packed on the host");
        }
    }
}

pub(crate) fn mxfp4(name: &str, rows: usize, k: usize, step: f32) -> QuantizedMatrix<'static> {
    quantize_mxfp4(name, &floats(rows, k, step)).unwrap()
}

pub(crate) fn mxfp4_pair(n: usize, k: usize, e: usize) -> GateUp<'static> {
    GateUp::new(mxfp4("gate", n, k, 0.7 + e as f32), mxfp4("up", n, k, 1.3 + e as f32))
}

fn mxfp4_desc(m: usize, n: usize, k: usize) -> DualGemmDesc {
    DualGemmDesc::new(m, n, k, AFormat::Mxfp4, BlockFormat::Mxfp4)
}

#[test]
fn experts_in_mxfp4_take_one_launch_close() {
    let (m, n, k) = (9, 40, 96);
    let experts: Vec<GateUp<'_>> = (0..3).map(|e| mxfp4_pair(n, k, e)).collect();
    let a = AOperand::Quantized(mxfp4("a", m, k, 0.37));
    for id in &CARDS {
        let options = GpuOptions { groups: 3, ..GpuOptions::default() };
        let plan = DualGemm::plan(&mxfp4_desc(m, n, k), &Target::Gpu(id.clone(), options)).unwrap();
        let packed = plan.prepack_experts(&experts).unwrap();
        let ranges = [(0, 4), (4, 0), (4, 5)];
        let of = |((first, count), weights)| Rows { first, count, weights };
        let rows: Vec<Rows<'_>> = ranges.into_iter().zip(packed.iter()).map(of).collect();
        let mut c = vec![f32::NAN; m * n];
        plan.runner(3).unwrap().run_grouped(&a, &rows, OutputMut::F32(&mut c)).unwrap();
        for (range, weights) in ranges.into_iter().zip(&experts) {
            assert_rows(&c, range, &a, weights, (1e-6, &id.to_string()));
        }
    }
}

/// Weights that are packed for their own format serve floats, too, which some other kernel multiplies.
#[test]
fn one_packing_serves_every_format_of_a_close() {
    let bias: Vec<f32> = (0..40).map(|i| i as f32 / 64.0).collect();
    let (m, n, k) = (5, 40, 96);
    for (format, weights) in
        [(BlockFormat::Nvfp4, expert(n, k, 0)), (BlockFormat::Mxfp4, mxfp4_pair(n, k, 0))]
    {
        let weights = GateUp { gate_bias: Some(bias.clone().into()), ..weights };
        for id in &CARDS {
            let target = Target::Gpu(id.clone(), GpuOptions::default());
            let packed = LayerShape::gate_up(n, k, format)
                .plan_for_packing(&target)
                .unwrap()
                .prepack(&weights)
                .unwrap();
            let quantized = match format {
                BlockFormat::Nvfp4 => operand(m, k, AFormat::Nvfp4),
                BlockFormat::Mxfp4 => AOperand::Quantized(mxfp4("a", m, k, 0.37)),
            };
            for a in [quantized, operand(m, k, AFormat::F16), operand(m, k, AFormat::Bf16)] {
                let plan = plan(id, &DualGemmDesc::new(m, n, k, AFormat::of(&a), format));
                for _ in 0..2 {
                    let got = plan.run_to_vec(&a, &packed).unwrap();
                    let found = rel_l2(&got, &plan.desc().epilogue, &a, &weights);
                    assert!(found < 1e-5, "{plan}: {found:e}");
                }
            }
        }
    }
}

/// Floats become nvfp4 on the way in, never mxfp4; beside mxfp4 weights they take the portable kernel.
/// An address of one GPU says nothing on another, and packs of both formats are of one order and size.
#[test]
fn weights_of_another_gpu_or_format_are_refused() {
    let (m, n, k) = (2, 32, 64);
    let [sm100, sm120] = &CARDS;
    let on = |id: &GpuId, desc: &DualGemmDesc, groups: usize| {
        DualGemm::plan(desc, &Target::Gpu(id.clone(), GpuOptions { groups, ..GpuOptions::default() }))
            .unwrap()
    };
    let nvfp4 = DualGemmDesc::new(m, n, k, AFormat::Nvfp4, BlockFormat::Nvfp4);
    let mxfp4 = DualGemmDesc::new(m, n, k, AFormat::Mxfp4, BlockFormat::Mxfp4);
    let a = AOperand::Quantized(quantized("a", m, k, 0.37));
    let (here, there) = (on(sm100, &nvfp4, 2), on(sm120, &nvfp4, 2));
    let other_gpu = there.prepack_experts(&[expert(n, k, 0)]).unwrap();
    let other_format = on(sm100, &mxfp4, 2).prepack_experts(&[mxfp4_pair(n, k, 0)]).unwrap();
    let elsewhere = "the weights is in the memory of another GPU";
    let mut runner = here.runner(2).unwrap();
    for (wrong, wanted) in [(&other_gpu, elsewhere), (&other_format, "the weights is mxfp4 [32, 64]")] {
        let said = |result: Result<(), dualgemm::Error>| {
            let message = result.unwrap_err().to_string();
            assert!(message.starts_with(wanted), "{message}");
        };
        said(runner.warm(&wrong[0]));
        said(runner.warm_experts(wrong));
        said(here.run_to_vec(&a, &wrong[0]).map(drop));
        let rows = [Rows { first: 0, count: 1, weights: &wrong[0] }];
        said(runner.run_grouped(&a, &rows, OutputMut::F32(&mut vec![0.0; m * n])).map(drop));
    }
}

/// As docs/strategies.md has it: the library's strategies do it, if they are named.
#[test]
fn rounding_gate_and_up_is_left_to_the_library() {
    let mut desc = DualGemmDesc::new(4, 32, 64, AFormat::Nvfp4, BlockFormat::Nvfp4);
    desc.epilogue.round_gate_up_to_bf16 = true;
    desc.out = OutFormat::F16;
    for id in &CARDS {
        let unasked = Target::Gpu(id.clone(), GpuOptions::default());
        let message = DualGemm::plan(&desc, &unasked).unwrap_err().to_string();
        assert!(message.contains("no GPU strategy can take"), "{id} {desc}: {message}");
        // Each reason is said once, with the strategies that have it.
        assert!(message.matches("its kernel is for sm_90a").count() <= 1, "{message}");
        assert!(DualGemm::plan(&desc, &named(id, "baseline")).is_ok(), "{id} {desc}");
    }
}

#[test]
fn what_no_tensor_core_multiplies_with_mxfp4_is_said() {
    let plan = |id: &GpuId, desc: &DualGemmDesc| {
        DualGemm::plan(desc, &Target::Gpu(id.clone(), GpuOptions::default())).map_err(|e| e.to_string())
    };
    let wanted =
        "A is mxfp4; GPU kernels take nvfp4, f16 and bf16, and mxfp4 with mxfp4 weights on Blackwell";
    let mixed = DualGemmDesc { b: AFormat::Nvfp4, ..mxfp4_desc(3, 32, 64) };
    assert_eq!(plan(&CARDS[0], &mixed).unwrap_err(), wanted);
    assert_eq!(plan(&GpuId::Sim(SimArch::Sm90a), &mxfp4_desc(3, 32, 64)).unwrap_err(), wanted);
    let floats = DualGemmDesc { a: AFormat::F32, quantize_a: QuantizeA::Dynamic, ..mxfp4_desc(3, 32, 64) };
    let floats = plan(&CARDS[0], &floats).unwrap();
    assert_eq!(strategy(&floats), "portable");
    assert!(error(&floats, &operand(3, 64, AFormat::F32), &mxfp4_pair(32, 64, 0)) < 1e-5);
    let message = DualGemm::plan(&mixed, &named(&CARDS[1], "native")).unwrap_err().to_string();
    assert!(message.contains("A is mxfp4, B is nvfp4, K = 64; it takes nvfp4"), "{message}");
}

#[test]
fn pairs_do_not_take_the_weights_of_linear_layers() {
    for (id, m, a) in
        [(&CARDS[0], 9, AFormat::Nvfp4), (&CARDS[0], 1, AFormat::F16), (&CARDS[1], 1, AFormat::Nvfp4)]
    {
        let desc = DualGemmDesc::linear(m, 296, 224, a, BlockFormat::Nvfp4);
        let packed = plan(id, &desc).prepack(&mlp::mlp(224, 32, 296, 2).down).unwrap();
        let pair = DualGemmDesc { op: Operation::GateUp, ..desc };
        let pair = DualGemm::plan(&pair, &named(id, "native")).unwrap();
        let message = pair.run_to_vec(&mlp::activations(a, m, 224), &packed).unwrap_err().to_string();
        assert!(message.contains("for a linear layer; the plan asks for rows of codes"), "{message}");
    }
}

#[test]
fn mixtures_are_within_the_bounds_of_f64() {
    let [datacenter, workstation] = &CARDS;
    let codes = mlp::nvfp4(OutScale::Static(0.01));
    let experts: Vec<_> = (0..5).map(|e| Some(mlp::mlp(32, 64, 48, e))).collect();
    let (weights, a) = (mlp::weights(), mlp::activations(AFormat::F16, 7, 64));
    let routing = Routing { ids: &mlp::IDS, weights: &weights };
    for (id, between, quantize_a) in [
        (datacenter, OutFormat::F16, QuantizeA::No),
        (datacenter, codes, QuantizeA::No),
        (workstation, codes, QuantizeA::Static(0.02)),
        (workstation, OutFormat::F16, QuantizeA::No),
    ] {
        let mut desc = mlp::mixture(7, AFormat::F16, between, OutFormat::F32, RouterWeights::Output);
        desc.mlp.gate_up.quantize_a = quantize_a;
        let plan = MixturePlan::new(&desc, &Target::Gpu(id.clone(), GpuOptions::default())).unwrap();
        let packed = plan.prepack(experts.iter().cloned().map(Ok::<_, Error>), None).unwrap();
        let mut c = vec![f32::NAN; 7 * 48];
        plan.runner().unwrap().run(&a, routing, &packed, OutputMut::F32(&mut c), false).unwrap();
        let (a, all) = (dualgemm::quantize_a(&a, quantize_a).unwrap(), RowSample::all(7));
        let want = Reference::new(&a, &all).mixture(&desc, routing, (&experts, None)).unwrap();
        mlp::assert_within(&c, &want, &plan.mlp.to_string());
    }
}
