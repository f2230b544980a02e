//! Whole MLPs and mixtures of them, against their f64 references.

use dualgemm::check::{RowSample, mixture_rows, mlp_rows};
use dualgemm::gemm::{
    Bounded, GatedMlp, Linear, MlpDesc, OutScale, RouterWeights, Routing, mixture_reference, mlp_reference,
};
use dualgemm::{Error, MixtureDesc, MixturePlan, MlpPlan, PackedMixture};
use half::{bf16, f16};

use super::*;

pub fn mlp(n: usize, k: usize, h: usize, e: usize) -> GatedMlp<'static> {
    let bias = |len: usize| Some((0..len).map(|i| (i as f32).cos()).collect::<Vec<_>>().into());
    let gate_up = GateUp { up_bias: bias(n), ..expert(n, k, e) };
    GatedMlp { gate_up, down: Linear { weight: quantized("down", h, n, 0.9 + e as f32), bias: bias(h) } }
}

pub fn desc(m: usize, [n, k, h]: [usize; 3], a: AFormat, between: OutFormat, out: OutFormat) -> MlpDesc {
    let gate_up = DualGemmDesc::new(m, n, k, a, BlockFormat::Nvfp4);
    MlpDesc::new(DualGemmDesc { out: between, ..gate_up }, h, BlockFormat::Nvfp4, out)
}

pub fn activations(a: AFormat, rows: usize, k: usize) -> AOperand<'static> {
    let values = (0..rows * k).map(|i| (i as f32 * 0.31).sin() * 2.0);
    match a {
        AFormat::F16 => {
            let values: Vec<f16> = values.map(f16::from_f32).collect();
            AOperand::Float(FloatMatrix::F16(Matrix::new("a", rows, k, values).unwrap()))
        }
        AFormat::Bf16 => {
            let values: Vec<bf16> = values.map(bf16::from_f32).collect();
            AOperand::Float(FloatMatrix::Bf16(Matrix::new("a", rows, k, values).unwrap()))
        }
        AFormat::Nvfp4 => AOperand::Quantized(quantized("a", rows, k, 0.31)),
        _ => AOperand::Float(floats(rows, k, 0.31)),
    }
}

pub fn nvfp4(global_scale: OutScale) -> OutFormat {
    OutFormat::Nvfp4 { scale_layout: dualgemm::formats::ScaleLayout::Sf128x4, global_scale }
}

#[track_caller]
pub fn assert_within(c: &[f32], want: &[Bounded], what: &str) {
    assert_eq!(c.len(), want.len());
    for (at, (c, want)) in c.iter().zip(want).enumerate() {
        assert!(want.error < 0.2 * want.value.abs() + 20.0, "{what} at {at}: {want:?} says nothing");
        assert!((f64::from(*c) - want.value).abs() <= want.error, "{what} at {at}: {c:e}, want {want:?}");
    }
}

#[test]
fn mlps_are_within_the_bounds_of_f64_whatever_is_between() {
    let betweens = [
        OutFormat::F32,
        OutFormat::F16,
        OutFormat::Bf16,
        nvfp4(OutScale::Static(0.01)),
        nvfp4(OutScale::Dynamic),
    ];
    for between in betweens {
        for (m, a) in [(1, AFormat::Bf16), (5, AFormat::F32), (33, AFormat::Nvfp4)] {
            let shape = [80, 96, 48];
            let desc = desc(m, shape, a, between, OutFormat::F32);
            let (a, mlp) = (activations(a, m, 96), mlp(80, 96, 48, 1));
            let plan = MlpPlan::new(&desc, &Target::default()).unwrap();
            let packed = plan.prepack(&mlp).unwrap();
            let mut c = vec![f32::NAN; m * 48];
            let mut runner = plan.runner(1).unwrap();
            // Twice, since the buffer between holds something then.
            for _ in 0..2 {
                runner.run(&a, &packed, OutputMut::F32(&mut c)).unwrap();
                assert_within(&c, &mlp_reference(&desc, &a, 0..m, &mlp), &plan.to_string());
            }
        }
    }
}

pub fn mixture(
    tokens: usize,
    a: AFormat,
    between: OutFormat,
    out: OutFormat,
    router: RouterWeights,
) -> MixtureDesc {
    let mlp = desc(tokens, [32, 64, 48], a, between, out);
    MixtureDesc { mlp, experts: 5, top_k: 2, router, shared: None }
}

/// Expert 3 is elsewhere; expert 4 gets no row of these.
pub const IDS: [i32; 14] = [1, 0, 2, 1, -1, 0, 3, 2, 0, 2, 1, 3, 2, 0];

pub fn weights() -> [f32; 14] {
    std::array::from_fn(|i| 0.1 + i as f32 / 7.0)
}

fn packed(plan: &MixturePlan, experts: &[Option<GatedMlp<'_>>]) -> PackedMixture {
    plan.prepack(experts.iter().cloned().map(Ok::<_, Error>), None).unwrap()
}

fn experts() -> Vec<Option<GatedMlp<'static>>> {
    (0..5).map(|e| (e != 3).then(|| mlp(32, 64, 48, e))).collect()
}

#[test]
fn mixtures_are_within_the_bounds_of_f64() {
    let ways = [
        (AFormat::Bf16, OutFormat::Bf16, RouterWeights::Output),
        (AFormat::Bf16, OutFormat::F32, RouterWeights::Input),
        (AFormat::F32, OutFormat::F16, RouterWeights::Input),
        (AFormat::F16, OutFormat::F16, RouterWeights::Input),
        (AFormat::Nvfp4, OutFormat::Bf16, RouterWeights::Output),
        (AFormat::Bf16, nvfp4(OutScale::Static(0.01)), RouterWeights::Output),
    ];
    for (a_format, between, router) in ways {
        let desc = mixture(9, a_format, between, OutFormat::F32, router);
        let plan = MixturePlan::new(&desc, &Target::default()).unwrap();
        let (a, all, weights) = (activations(a_format, 7, 64), experts(), weights());
        let routing = Routing { ids: &IDS, weights: &weights };
        let want = mixture_reference(&desc.mlp, router, &a, routing, &all);
        let packed = packed(&plan, &all);
        let mut runner = plan.runner().unwrap();
        let mut c = vec![f32::NAN; 7 * 48];
        for _ in 0..2 {
            runner.run(&a, routing, &packed, OutputMut::F32(&mut c), false).unwrap();
            assert_within(&c, &want, &format!("{a_format} {router:?}"));
        }
        // Another rank has the experts that are missing here; results are added to what is there.
        let mut more = vec![100.0f32; 7 * 48];
        runner.run(&a, routing, &packed, OutputMut::F32(&mut more), true).unwrap();
        assert!(more.iter().zip(&c).all(|(more, c)| *more == 100.0 + c));
    }
}

#[test]
fn outputs_in_16_bits_are_the_rounded_sums_exact() {
    let (a, all, weights) = (activations(AFormat::Bf16, 7, 64), experts(), weights());
    let routing = Routing { ids: &IDS, weights: &weights };
    let run = |out, c: OutputMut<'_>| {
        let desc = mixture(7, AFormat::Bf16, OutFormat::Bf16, out, RouterWeights::Output);
        let plan = MixturePlan::new(&desc, &Target::default()).unwrap();
        plan.runner().unwrap().run(&a, routing, &packed(&plan, &all), c, false).unwrap();
    };
    let (mut wide, mut half, mut brain) =
        (vec![0.0; 7 * 48], vec![f16::ZERO; 7 * 48], vec![bf16::ZERO; 7 * 48]);
    run(OutFormat::F32, OutputMut::F32(&mut wide));
    run(OutFormat::F16, OutputMut::F16(&mut half));
    run(OutFormat::Bf16, OutputMut::Bf16(&mut brain));
    assert!(half.iter().zip(&wide).all(|(c, w)| *c == f16::from_f32(*w)));
    assert!(brain.iter().zip(&wide).all(|(c, w)| *c == bf16::from_f32(*w)));
}

/// A term of the sum like any other, rounded once with it, whatever its own width is.
#[test]
fn a_shared_expert_is_added_before_the_sum_is_rounded_exact() {
    let (a, all, weights) = (activations(AFormat::Bf16, 7, 64), experts(), weights());
    let routing = Routing { ids: &IDS, weights: &weights };
    let (both, alone) =
        (mlp(48, 64, 48, 9), desc(7, [48, 64, 48], AFormat::Bf16, OutFormat::Bf16, OutFormat::F32));
    let sums = |out, shared: Option<&GatedMlp<'_>>, c: OutputMut<'_>| {
        let routed = mixture(7, AFormat::Bf16, OutFormat::Bf16, out, RouterWeights::Output);
        let plan =
            MixturePlan::new(&MixtureDesc { shared: shared.map(|_| alone), ..routed }, &Target::default())
                .unwrap();
        let packed = plan.prepack(all.iter().cloned().map(Ok::<_, Error>), shared).unwrap();
        plan.runner().unwrap().run(&a, routing, &packed, c, false).unwrap();
        plan.desc
    };
    let (mut wide, mut narrow) = (vec![0f32; 7 * 48], vec![bf16::ZERO; 7 * 48]);
    let desc = sums(OutFormat::F32, Some(&both), OutputMut::F32(&mut wide));
    let want = mixture_rows(&desc, &a, &RowSample::all(7), routing, (&all, Some(&both)), &|_| {}).unwrap();
    assert_within(&wide, &want, "shared");
    sums(OutFormat::Bf16, Some(&both), OutputMut::Bf16(&mut narrow));
    assert!(narrow.iter().zip(&wide).all(|(c, w)| *c == bf16::from_f32(*w)));
    // It makes a difference.
    let mut without = vec![0f32; 7 * 48];
    sums(OutFormat::F32, None, OutputMut::F32(&mut without));
    assert!(without.iter().zip(&wide).all(|(a, b)| a != b));
}

/// A token's result depends on the token alone: not on who shares the call, nor on threads.
#[test]
fn tokens_of_a_mixture_do_not_depend_on_each_other_or_on_threads_exact() {
    let desc = mixture(7, AFormat::Nvfp4, OutFormat::Bf16, OutFormat::F32, RouterWeights::Output);
    let (a, all, weights) = (quantized("a", 7, 64, 0.31), experts(), weights());
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let plan = MixturePlan::new(&desc, &Target::default()).unwrap();
            let (packed, mut runner) = (packed(&plan, &all), plan.runner().unwrap());
            let mut whole = vec![0.0; 7 * 48];
            let operand = AOperand::Quantized(a.clone());
            let routing = Routing { ids: &IDS, weights: &weights };
            runner.run(&operand, routing, &packed, OutputMut::F32(&mut whole), false).unwrap();
            for token in 0..7 {
                let choices = 2 * token..2 * token + 2;
                let one = AOperand::Quantized(a.slice_rows(token..token + 1).unwrap());
                let routing = Routing { ids: &IDS[choices.clone()], weights: &weights[choices] };
                let mut c = [0.0; 48];
                runner.run(&one, routing, &packed, OutputMut::F32(&mut c), false).unwrap();
                assert_eq!(c, whole[48 * token..][..48], "token {token}, {threads} threads");
            }
            whole
        })
    };
    assert_eq!(with(1), with(3));
}

#[test]
fn tokens_without_an_expert_here_are_zero_or_left_alone() {
    let desc = mixture(2, AFormat::Bf16, OutFormat::Bf16, OutFormat::F32, RouterWeights::Output);
    let plan = MixturePlan::new(&desc, &Target::default()).unwrap();
    let (packed, mut runner) = (packed(&plan, &experts()), plan.runner().unwrap());
    let routing = Routing { ids: &[-1, 3, 3, -1], weights: &[1.0; 4] };
    let mut c = [7.0; 96];
    runner.run(&activations(AFormat::Bf16, 2, 64), routing, &packed, OutputMut::F32(&mut c), true).unwrap();
    assert_eq!(c, [7.0; 96]);
    runner.run(&activations(AFormat::Bf16, 2, 64), routing, &packed, OutputMut::F32(&mut c), false).unwrap();
    assert_eq!(c, [0.0; 96]);
}

#[test]
fn what_does_not_fit_is_refused_by_name_and_c_stays() {
    let desc = mixture(2, AFormat::Bf16, OutFormat::Bf16, OutFormat::F32, RouterWeights::Output);
    let plan = MixturePlan::new(&desc, &Target::default()).unwrap();
    let (packed, mut runner) = (packed(&plan, &experts()), plan.runner().unwrap());
    let mut refused = |a: AOperand<'_>, ids: &[i32], weights: &[f32], experts: &PackedMixture, len: usize| {
        let mut c = vec![7.0; len];
        let error =
            runner.run(&a, Routing { ids, weights }, experts, OutputMut::F32(&mut c), false).unwrap_err();
        assert!(c.iter().all(|&c| c == 7.0));
        error.to_string()
    };
    let (a, ids, ones) = (|m| activations(AFormat::Bf16, m, 64), [0, 1, 2, 0], [1.0; 4]);
    let cases = [
        (
            refused(a(2), &[0, 1, 5, 0], &ones, &packed, 96),
            "topk_ids[1, 0] is 5; the problem asks for numbers below 5",
        ),
        (refused(a(2), &ids, &[1.0, f32::INFINITY, 1.0, 1.0], &packed, 96), "topk_weights[0, 1] is inf"),
        (
            refused(a(2), &ids[..3], &ones, &packed, 96),
            "topk_ids is of 3 numbers; the problem asks for [2, 2]",
        ),
        (
            refused(a(3), &ids, &ones, &packed, 96),
            "A is bf16 [3, 64]; the problem asks for bf16 [up to 2, 64]",
        ),
        (refused(activations(AFormat::F32, 2, 64), &ids, &ones, &packed, 96), "A is f32 [2, 64]"),
        (
            refused(a(2), &ids, &ones, &packed, 95),
            "C is f32 of 95 values; the problem asks for f32 of 2 × 48",
        ),
    ];
    for (message, want) in cases {
        assert!(message.starts_with(want), "{message}, want {want}");
    }
    let few = plan.prepack(experts().into_iter().skip(1).map(Ok::<_, Error>), None).unwrap_err();
    assert_eq!(few.to_string(), "experts is 4 MLPs; the problem asks for 5 MLPs");
    let unasked =
        plan.prepack(experts().into_iter().map(Ok::<_, Error>), Some(&mlp(32, 64, 48, 9))).unwrap_err();
    assert!(unasked.to_string().starts_with("the shared expert is there"), "{unasked}");
    let shared = desc.mlp.gate_up.m + 1;
    let other = MixtureDesc {
        shared: Some(self::desc(shared, [32, 64, 48], AFormat::Bf16, OutFormat::Bf16, OutFormat::F32)),
        ..desc
    };
    let message = MixturePlan::new(&other, &Target::default()).unwrap_err().to_string();
    assert!(message.starts_with("the shared expert is "), "{message}");
    let quantized = mixture(2, AFormat::Nvfp4, OutFormat::Bf16, OutFormat::F32, RouterWeights::Input);
    let message = MixturePlan::new(&quantized, &Target::default()).unwrap_err().to_string();
    assert!(message.ends_with("floats, where the router's weights multiply it"), "{message}");
    let none = MixtureDesc { experts: 0, ..desc };
    assert!(matches!(MixturePlan::new(&none, &Target::default()), Err(Error::Gemm(_))));
}

/// The down projection of the checkpoint in the tree, after its gate and up.
#[test]
fn the_mlp_of_a_real_layer_is_within_the_bounds_of_f64() {
    let checkpoint = Checkpoint::open(&testdata("modelopt-nvfp4"), &OpenOptions::default()).unwrap();
    let layer = checkpoint.layers()[0];
    let (gate_up, down) = (checkpoint.gate_up(layer).unwrap(), checkpoint.down(layer).unwrap());
    let scale = down.input_scale().unwrap().map(|scale| scale.value());
    let mlp = GatedMlp {
        gate_up: dualgemm::weights(gate_up),
        down: Linear { weight: down.weight, bias: down.bias.map(Into::into) },
    };
    let (n, k, h) = (mlp.gate_up.n(), mlp.gate_up.k(), mlp.down.n());
    for between in [OutFormat::Bf16, nvfp4(scale.map_or(OutScale::Dynamic, OutScale::Static))] {
        let desc = desc(3, [n, k, h], AFormat::Bf16, between, OutFormat::F32);
        let plan = MlpPlan::new(&desc, &Target::default()).unwrap();
        let a = activations(AFormat::Bf16, 3, k);
        let mut c = vec![0.0; 3 * h];
        plan.runner(1).unwrap().run(&a, &plan.prepack(&mlp).unwrap(), OutputMut::F32(&mut c)).unwrap();
        let want = mlp_reference(&desc, &a, 0..3, &mlp);
        let outside = c.iter().zip(&want).filter(|(c, w)| (f64::from(**c) - w.value).abs() > w.error).count();
        assert_eq!(outside, 0, "{plan}");
    }
}

/// On a simulated H100: linear layers, and MLPs whose rows are between the products on the GPU.
#[cfg(feature = "sim")]
mod on_a_gpu {
    use dualgemm::device::Stream;
    use dualgemm::strategies::Buffer;
    use dualgemm::{
        AnyDesc, AnyPlan, AnyWeights, DeviceA, DeviceC, DeviceCall, DeviceRouting, GpuId, GpuOptions,
        Launchers, SimArch,
    };

    use super::*;

    fn target(strategy: Option<&str>) -> Target {
        let options = GpuOptions { strategy: strategy.map(Into::into), ..GpuOptions::default() };
        Target::Gpu(GpuId::Sim(SimArch::Sm90a), options)
    }

    #[test]
    fn linear_layers_are_within_the_bounds_of_f64() {
        let ways = [
            (1, AFormat::F16, Some("decode")),
            (9, AFormat::Bf16, Some("fused")),
            (9, AFormat::Nvfp4, Some("persistent")),
            (33, AFormat::F16, Some("stream-k")),
            (5, AFormat::Nvfp4, None),
        ];
        for (m, a, strategy) in ways {
            let desc = DualGemmDesc::linear(m, 136, 224, a, BlockFormat::Nvfp4);
            let layer = mlp(224, 32, 136, 2).down;
            let plan = DualGemm::plan(&desc, &target(strategy)).unwrap();
            let (a, packed) = (activations(a, m, 224), plan.prepack(&layer).unwrap());
            let c = plan.run_to_vec(&a, &packed).unwrap();
            let want = dualgemm::gemm::bounded_reference(&desc.epilogue, &a, 0..m, &layer);
            assert_within(&c, &want, &plan.to_string());
        }
        for other in ["waves", "plain", "baseline"] {
            let desc = DualGemmDesc::linear(1, 136, 224, AFormat::F16, BlockFormat::Nvfp4);
            let message = DualGemm::plan(&desc, &target(Some(other))).unwrap_err().to_string();
            assert!(message.ends_with("a linear layer; it computes gate and up"), "{message}");
        }
    }

    #[test]
    fn weights_packed_for_the_other_operation_are_refused() {
        let desc = DualGemmDesc::linear(1, 64, 64, AFormat::F16, BlockFormat::Nvfp4);
        let linear = DualGemm::plan(&desc, &target(None)).unwrap();
        let pair = DualGemm::plan(&DualGemmDesc { op: Default::default(), ..desc }, &target(None)).unwrap();
        let packed = pair.prepack(&expert(64, 64, 1)).unwrap();
        let message = linear.run_to_vec(&activations(AFormat::F16, 1, 64), &packed).unwrap_err().to_string();
        assert!(message.contains("asks for packed for a linear layer"), "{message}");
        assert!(linear.prepack(&expert(64, 64, 1)).is_err());
    }

    #[test]
    fn mlps_are_within_the_bounds_of_f64_whatever_is_between() {
        let ways = [
            (AFormat::Bf16, OutFormat::Bf16),
            (AFormat::F16, OutFormat::F16),
            (AFormat::F16, nvfp4(OutScale::Static(0.01))),
            (AFormat::Nvfp4, nvfp4(OutScale::Static(0.01))),
        ];
        for (a_format, between) in ways {
            let (m, shape) = (5, [80, 96, 48]);
            let desc = desc(m, shape, a_format, between, OutFormat::F32);
            let (a, mlp) = (activations(a_format, m, 96), mlp(80, 96, 48, 1));
            let plan = MlpPlan::new(&desc, &target(None)).unwrap();
            let (packed, mut runner) = (plan.prepack(&mlp).unwrap(), plan.runner(1).unwrap());
            let mut c = vec![f32::NAN; m * 48];
            runner.run(&a, &packed, OutputMut::F32(&mut c)).unwrap();
            assert_within(&c, &mlp_reference(&desc, &a, 0..m, &mlp), &plan.to_string());
            let AOperand::Float(FloatMatrix::F16(rows)) = &a else { continue };
            let gpu = GpuId::Sim(SimArch::Sm90a).open().unwrap();
            let bytes: Vec<u8> = rows.as_dense().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect();
            let (a, on_device) = (Buffer::of(gpu, &bytes).unwrap(), Buffer::zeroed(gpu, m * 48 * 4).unwrap());
            let call = DeviceCall {
                m,
                a: DeviceA::Float { values: a.ptr(), pitch: 2 * 96 },
                c: DeviceC::Float(on_device.ptr()),
            };
            runner.warm(&packed).unwrap();
            for _ in 0..2 {
                // SAFETY: the buffers have the sizes of the call, and live until they are read, which waits.
                unsafe { runner.run_device(&call, &packed, Stream::Own) }.unwrap();
            }
            let mut bytes = vec![0; m * 48 * 4];
            on_device.read(&mut bytes).unwrap();
            let found: Vec<f32> =
                bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            assert_eq!(found, c, "{plan}");
        }
        let dynamic = desc(1, [32, 32, 32], AFormat::F16, nvfp4(OutScale::Dynamic), OutFormat::F32);
        let message = MlpPlan::new(&dynamic, &target(None)).unwrap_err().to_string();
        assert!(
            message.contains("with a dynamic scale; on a GPU a static scale, or f16 or bf16 is"),
            "{message}"
        );
    }

    /// Tokens whose experts are not there, experts without tokens, calls of fewer tokens than planned, twice.
    #[test]
    fn mixtures_are_within_the_bounds_of_f64() {
        let gpu = GpuId::Sim(SimArch::Sm90a).open().unwrap();
        let all: Vec<GatedMlp<'_>> = (0..5).map(|e| mlp(32, 64, 48, e)).collect();
        let experts: Vec<Option<GatedMlp<'_>>> = all.iter().cloned().map(Some).collect();
        // Expert 3 gets no row; -1 and 7 are skipped, which the reference takes for experts that are elsewhere.
        let ids: [i32; 14] = [1, 0, 2, 1, -1, 0, 4, 2, 0, 2, 1, 7, 2, 0];
        let seen = ids.map(|id| if id == 7 { -1 } else { id });
        let buffer = |bytes: Vec<u8>| Buffer::of(gpu, &bytes).unwrap();
        let weights = weights();
        for (out, between, add) in [
            (OutFormat::F32, OutFormat::F16, false),
            (OutFormat::F32, OutFormat::F16, true),
            (OutFormat::F32, nvfp4(OutScale::Static(0.01)), false),
        ] {
            let desc = mixture(9, AFormat::F16, between, out, RouterWeights::Output);
            let plan = MixturePlan::new(&desc, &target(None)).unwrap();
            let (packed, mut runner) = (self::packed(&plan, &experts), plan.runner().unwrap());
            runner.warm(&packed).unwrap();
            for tokens in [7, 3] {
                let choices = 2 * tokens;
                let a = activations(AFormat::F16, tokens, 64);
                let AOperand::Float(FloatMatrix::F16(rows)) = &a else { panic!("A is f16") };
                let a_bytes = rows.as_dense().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect();
                let on_device = [
                    buffer(a_bytes),
                    buffer(ids[..choices].iter().flat_map(|id| id.to_le_bytes()).collect()),
                    buffer(weights[..choices].iter().flat_map(|w| w.to_le_bytes()).collect()),
                    buffer((0..tokens * 48).flat_map(|_| 100f32.to_le_bytes()).collect()),
                ];
                let [a_at, ids_at, weights_at, c_at] = on_device.each_ref().map(Buffer::ptr);
                let (values, pitch) = (a_at, 2 * 64);
                let call =
                    DeviceCall { m: tokens, a: DeviceA::Float { values, pitch }, c: DeviceC::Float(c_at) };
                let call = dualgemm::MixtureCall { call, ids: ids_at, weights: weights_at, add };
                // SAFETY: the buffers have the sizes of the call, and live until C is read, which waits.
                unsafe { runner.run_device(&call, &packed, Stream::Own) }.unwrap();
                let mut bytes = vec![0; tokens * 48 * 4];
                on_device[3].read(&mut bytes).unwrap();
                let offset = if add { 100.0 } else { 0.0 };
                let found: Vec<f32> =
                    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes) - offset).collect();
                let routing = Routing { ids: &seen[..choices], weights: &weights[..choices] };
                let mut want = mixture_reference(&desc.mlp, RouterWeights::Output, &a, routing, &experts);
                // What a call on the host's operands gives, where it may be asked for; 7 is no expert there.
                let routing_on_host = Routing { ids: &seen[..choices], ..routing };
                let mut copied = vec![0.0; tokens * 48];
                runner.run(&a, routing_on_host, &packed, OutputMut::F32(&mut copied), false).unwrap();
                assert!(add || copied == found, "{} {between}", plan.mlp);
                // What is added to rounds once more.
                want.iter_mut().for_each(|want| want.error += f64::from(offset) * 1e-6);
                assert_within(&found, &want, &format!("{} {between} {add}", plan.mlp));
            }
        }
    }

    /// By address, on a stream, through the runners that weights of one shape share: as with operands of the host, twice.
    #[test]
    fn operations_in_device_memory_equal_those_on_the_hosts_operands_exact() {
        let gpu = GpuId::Sim(SimArch::Sm90a).open().unwrap();
        let (n, k, h, m) = (32, 64, 48, 3);
        let ids = [1, 0, 2, -1, 4, 2];
        let weights: Vec<f32> = weights()[..6].to_vec();
        let routing = Routing { ids: &ids, weights: &weights };
        let mlp_desc = |m| desc(m, [n, k, h], AFormat::F16, OutFormat::F16, OutFormat::F32);
        let linear =
            move |m| AnyDesc::Product(DualGemmDesc::linear(m, n, k, AFormat::F16, BlockFormat::Nvfp4));
        let whole = move |m| AnyDesc::Mlp(mlp_desc(m));
        let mixed = move |m| {
            AnyDesc::Mixture(mixture(m, AFormat::F16, OutFormat::F16, OutFormat::F32, RouterWeights::Output))
        };
        let operations: [(&dyn Fn(usize) -> AnyDesc, usize); 3] = [(&linear, n), (&whole, h), (&mixed, h)];
        let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        for (at, (describe, features)) in operations.into_iter().enumerate() {
            let routing = (at == 2).then_some(routing);
            for layer in 0..2 {
                let plan = AnyPlan::new(&describe(m), &target(None)).unwrap();
                let packed = match &plan {
                    AnyPlan::Product(plan) => {
                        AnyWeights::Product(plan.prepack(&mlp(k, 32, n, layer).down).unwrap())
                    }
                    AnyPlan::Mlp(plan) => AnyWeights::Mlp(plan.prepack(&mlp(n, k, h, layer)).unwrap()),
                    AnyPlan::Mixture(plan) => {
                        let all = (0..5).map(|e| Ok::<_, Error>(Some(mlp(n, k, h, layer + e))));
                        AnyWeights::Mixture(plan.prepack(all, None).unwrap())
                    }
                };
                let a = activations(AFormat::F16, m, k);
                let mut c = vec![0.0; m * features];
                let to = (OutputMut::F32(&mut c), false);
                plan.runner().unwrap().run(&a, &packed, routing, to).unwrap();
                let AOperand::Float(FloatMatrix::F16(rows)) = &a else { panic!("A is f16") };
                let halves: Vec<u8> = rows.as_dense().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect();
                let ids: Vec<u8> = ids.iter().flat_map(|id: &i32| id.to_le_bytes()).collect();
                let on_device = [halves, ids, bytes(&weights), vec![0; 4 * c.len()]]
                    .map(|bytes| Buffer::of(gpu, &bytes).unwrap());
                let [values, ids, weights, to] = on_device.each_ref().map(Buffer::ptr);
                let call =
                    DeviceCall { m, a: DeviceA::Float { values, pitch: 2 * k }, c: DeviceC::Float(to) };
                let launchers = Launchers::default();
                let lists = routing.map(|_| DeviceRouting { ids, weights, add: false });
                let run = |routing| {
                    let layout = dualgemm::formats::ScaleLayout::Linear;
                    // SAFETY: the buffers have the sizes of the call, and live until C is read, which waits.
                    unsafe { launchers.run((describe, layout), &target(None), &packed, (&call, routing), 0) }
                };
                for _ in 0..2 {
                    run(lists).unwrap();
                }
                let mut found = vec![0; 4 * c.len()];
                on_device[3].read(&mut found).unwrap();
                assert_eq!(found, bytes(&c), "{plan}");
                // Only a mixture has a router.
                let other = lists.xor(Some(DeviceRouting { ids, weights, add: false }));
                let message = run(other).unwrap_err().to_string();
                assert!(message.starts_with("the weights is those of "), "{message}");
            }
        }
    }

    #[test]
    fn mixtures_that_a_gpu_does_not_take_are_refused_by_name() {
        let refused = |desc: &MixtureDesc| MixturePlan::new(desc, &target(None)).unwrap_err().to_string();
        let desc = mixture(2, AFormat::F16, OutFormat::F16, OutFormat::F32, RouterWeights::Output);
        let input = MixtureDesc { router: RouterWeights::Input, ..desc };
        assert!(refused(&input).starts_with("what the router's weights multiply is A; on a GPU the output"));
        let quantized = mixture(2, AFormat::Nvfp4, OutFormat::F16, OutFormat::F32, RouterWeights::Output);
        assert!(refused(&quantized).starts_with("A of a mixture is nvfp4; on a GPU f16 or bf16 is needed"));
        let plan = MixturePlan::new(&desc, &target(None)).unwrap();
        let message = plan.prepack(experts().into_iter().map(Ok::<_, Error>), None).unwrap_err().to_string();
        assert!(message.starts_with("the list of experts is without number 3; on a GPU"), "{message}");
        let on_cpu = MixturePlan::new(&desc, &Target::default()).unwrap();
        let (packed, mut runner) = (self::packed(&on_cpu, &experts()), on_cpu.runner().unwrap());
        assert!(matches!(runner.warm(&packed), Err(Error::NotOnGpu)));
        let mut gpu = plan.runner().unwrap();
        let (a, routing) =
            (activations(AFormat::F16, 2, 64), Routing { ids: &[0, 1, 2, 0], weights: &[1.0; 4] });
        let mut c = [0.0; 96];
        let message = gpu.run(&a, routing, &packed, OutputMut::F32(&mut c), false).unwrap_err().to_string();
        assert_eq!(message, "these weights were packed for the processor; the plan is for a GPU");
        let all: Vec<_> = (0..5).map(|e| Ok::<_, Error>(Some(mlp(32, 64, 48, e)))).collect();
        let packed = plan.prepack(all, None).unwrap();
        let message = gpu.run(&a, routing, &packed, OutputMut::F32(&mut c), true).unwrap_err().to_string();
        assert!(message.starts_with("C of a mixture is added to in the host's memory"), "{message}");
        let message =
            runner.run(&a, routing, &packed, OutputMut::F32(&mut c), false).unwrap_err().to_string();
        assert!(message.starts_with("these weights were packed for a GPU"), "{message}");
    }

    /// As on the processor: C in 16 bits is the sum with the shared expert, rounded once.
    #[test]
    fn a_shared_expert_is_added_in_f32_on_a_gpu_too() {
        let all: Vec<Option<GatedMlp<'_>>> = (0..5).map(|e| Some(mlp(32, 64, 48, e))).collect();
        let shared = mlp(48, 64, 48, 9);
        let (a, weights) = (activations(AFormat::F16, 7, 64), weights());
        let routing = Routing { ids: &IDS, weights: &weights };
        let mlp = |out| desc(7, [48, 64, 48], AFormat::F16, OutFormat::F16, out);
        let run = |out, c: OutputMut<'_>| {
            let routed = mixture(7, AFormat::F16, OutFormat::F16, out, RouterWeights::Output);
            let desc = MixtureDesc { shared: Some(mlp(out)), ..routed };
            let plan = MixturePlan::new(&desc, &target(None)).unwrap();
            let packed = plan.prepack(all.iter().cloned().map(Ok::<_, Error>), Some(&shared)).unwrap();
            plan.runner().unwrap().run(&a, routing, &packed, c, false).unwrap();
            desc
        };
        let (mut wide, mut narrow) = (vec![0f32; 7 * 48], vec![bf16::ZERO; 7 * 48]);
        let desc = run(OutFormat::F32, OutputMut::F32(&mut wide));
        let sample = RowSample::all(7);
        let want = mixture_rows(&desc, &a, &sample, routing, (&all, Some(&shared)), &|_| {}).unwrap();
        assert_within(&wide, &want, "shared");
        run(OutFormat::Bf16, OutputMut::Bf16(&mut narrow));
        assert!(narrow.iter().zip(&wide).all(|(c, w)| *c == bf16::from_f32(*w)));
    }
}

/// What large problems are compared with, a sample of the rows in runs of features, is the plain reference.
#[test]
fn sampled_references_are_the_plain_ones_exact() {
    let sample = RowSample::spread(7, 3);
    let rows = |y: Vec<Bounded>| sample.pick(&y, 48);
    for between in [OutFormat::Bf16, nvfp4(OutScale::Static(0.01)), nvfp4(OutScale::Dynamic)] {
        let desc = desc(7, [80, 96, 48], AFormat::Bf16, between, OutFormat::F32);
        let (a, mlp) = (activations(AFormat::Bf16, 7, 96), mlp(80, 96, 48, 1));
        let want = rows(mlp_reference(&desc, &a, 0..7, &mlp));
        assert_eq!(mlp_rows(&desc, &a, &sample, &mlp, &|_| ()).unwrap(), want, "{between}");
    }
    for router in [RouterWeights::Output, RouterWeights::Input] {
        let desc = mixture(7, AFormat::Bf16, OutFormat::Bf16, OutFormat::F32, router);
        let (a, all, weights) = (activations(AFormat::Bf16, 7, 64), experts(), weights());
        let routing = Routing { ids: &IDS, weights: &weights };
        let want = rows(mixture_reference(&desc.mlp, router, &a, routing, &all));
        assert_eq!(
            mixture_rows(&desc, &a, &sample, routing, (&all, None), &|_| ()).unwrap(),
            want,
            "{router:?}"
        );
    }
}
