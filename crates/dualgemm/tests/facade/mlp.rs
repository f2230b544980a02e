//! Whole MLPs and mixtures of them, against their f64 references.

use dualgemm::check::{Reference, RowSample};
use dualgemm::cpu::Team;
use dualgemm::gemm::{
    Bounded, GatedMlp, Linear, MlpDesc, OutScale, QuantizeA, RouterWeights, Routing, Weight,
    mixture_reference, mlp_reference,
};
use dualgemm::{Error, MixtureDesc, MixturePlan, MlpPlan, PackedMixture};
use half::{bf16, f16};

use super::*;

#[cfg(feature = "sim")]
mod on_a_gpu;

pub fn mlp(n: usize, k: usize, h: usize, e: usize) -> GatedMlp<'static> {
    let bias = |len: usize| Some((0..len).map(|i| (i as f32).cos()).collect::<Vec<_>>().into());
    let gate_up = GateUp { up_bias: bias(n), ..expert(n, k, e) };
    GatedMlp {
        gate_up,
        down: Linear { weight: quantized("down", h, n, 0.9 + e as f32).into(), bias: bias(h) },
    }
}

pub fn desc(m: usize, [n, k, h]: [usize; 3], a: AFormat, between: OutFormat, out: OutFormat) -> MlpDesc {
    let gate_up = DualGemmDesc::new(m, n, k, a, BlockFormat::Nvfp4);
    MlpDesc::new(DualGemmDesc { out: between, ..gate_up }, h, BlockFormat::Nvfp4, out)
}

pub fn activations(a: AFormat, rows: usize, k: usize) -> AOperand<'static> {
    a_of(a, rows, k, 0.31)
}

pub fn nvfp4(global_scale: OutScale) -> OutFormat {
    OutFormat::Nvfp4 { scale_layout: dualgemm::formats::ScaleLayout::Sf128x4, global_scale }
}

#[track_caller]
pub fn assert_within(c: &[f32], want: &[Bounded], what: &str) {
    assert_eq!(c.len(), want.len());
    let size = (want.iter().map(|want| want.value * want.value).sum::<f64>() / want.len() as f64).sqrt();
    for (at, (c, want)) in c.iter().zip(want).enumerate() {
        assert!(want.error < 2.0 * size, "{what} at {at}: {want:?} says nothing where {size} is usual");
        assert!((f64::from(*c) - want.value).abs() <= want.error, "{what} at {at}: {c:e}, want {want:?}");
    }
}

/// A whole MLP on a target, `m` rows, N, K and features of Y: its plan, A, and Y, which is right.
pub fn check_mlp(
    target: &Target,
    (m, shape): (usize, [usize; 3]),
    (a, quantize_a): (AFormat, QuantizeA),
    between: OutFormat,
) -> (MlpPlan, AOperand<'static>, Vec<f32>) {
    let [n, k, h] = shape;
    let mut desc = desc(m, shape, a, between, OutFormat::F32);
    desc.gate_up.quantize_a = quantize_a;
    let (a, mlp) = (activations(a, m, k), mlp(n, k, h, 1));
    let plan = MlpPlan::new(&desc, target).unwrap();
    let (packed, mut runner) = (plan.prepack(&mlp).unwrap(), plan.runner(1).unwrap());
    let want = mlp_reference(&desc, &dualgemm::quantize_a(&a, quantize_a).unwrap(), 0..m, &mlp);
    let mut c = vec![f32::NAN; m * h];
    // Twice, since the buffer between holds something then.
    for _ in 0..2 {
        runner.run(&a, &packed, OutputMut::F32(&mut c)).unwrap();
        assert_within(&c, &want, &plan.to_string());
    }
    (plan, a, c)
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
            check_mlp(&Target::default(), (m, [80, 96, 48]), (a, QuantizeA::No), between);
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

pub fn experts() -> Vec<Option<GatedMlp<'static>>> {
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
        let mut on_team = vec![f32::NAN; 7 * 48];
        let run = || runner.run(&a, routing, &packed, OutputMut::F32(&mut on_team), false);
        Team::new(3).unwrap().install(run).unwrap();
        assert_eq!(on_team, c, "{a_format}");
        // Another rank has the experts that are missing here; results are added to what is there.
        let mut more = vec![100.0f32; 7 * 48];
        runner.run(&a, routing, &packed, OutputMut::F32(&mut more), true).unwrap();
        assert!(more.iter().zip(&c).all(|(more, c)| *more == 100.0 + c));
    }
}

/// Down as recipes leave it, in floats, with its bias.
fn with_float_down(float: FloatType, mlp: GatedMlp<'static>) -> GatedMlp<'static> {
    let GatedMlp { gate_up, down: Linear { weight, bias } } = mlp;
    let (h, n) = (weight.rows(), weight.k());
    let values = (0..h * n).map(|at| weight.value(at / n, at % n) as f32);
    let weight = FloatMatrix::rounded("down", float, h, n, values).unwrap();
    GatedMlp { gate_up, down: Linear { weight: Weight::Floats("down".into(), weight), bias } }
}

#[test]
fn down_projections_in_floats_are_within_the_bounds_of_f64() {
    let ways = [
        (FloatType::Bf16, AFormat::Bf16, OutFormat::Bf16),
        (FloatType::Bf16, AFormat::F32, OutFormat::F32),
        (FloatType::F16, AFormat::Nvfp4, OutFormat::F32),
        (FloatType::F32, AFormat::F16, OutFormat::F16),
    ];
    for (float, a_format, between) in ways {
        let of = |desc: MlpDesc| MlpDesc::new(desc.gate_up, desc.down.n, float, desc.down.out);
        for m in [1, 33] {
            let desc = of(desc(m, [80, 96, 48], a_format, between, OutFormat::F32));
            let (a, mlp) = (activations(a_format, m, 96), with_float_down(float, mlp(80, 96, 48, 1)));
            let plan = MlpPlan::new(&desc, &Target::default()).unwrap();
            let (packed, mut runner) = (plan.prepack(&mlp).unwrap(), plan.runner(1).unwrap());
            let mut c = vec![f32::NAN; m * 48];
            runner.run(&a, &packed, OutputMut::F32(&mut c)).unwrap();
            assert_within(&c, &mlp_reference(&desc, &a, 0..m, &mlp), &plan.to_string());
        }
        let desc = mixture(7, a_format, between, OutFormat::F32, RouterWeights::Output);
        let desc = MixtureDesc { mlp: of(desc.mlp), ..desc };
        let all = experts().into_iter().map(|mlp| mlp.map(|mlp| with_float_down(float, mlp)));
        let (a, all, weights) = (activations(a_format, 7, 64), all.collect::<Vec<_>>(), weights());
        let routing = Routing { ids: &IDS, weights: &weights };
        let plan = MixturePlan::new(&desc, &Target::default()).unwrap();
        let mut c = vec![f32::NAN; 7 * 48];
        plan.runner().unwrap().run(&a, routing, &packed(&plan, &all), OutputMut::F32(&mut c), false).unwrap();
        let want = mixture_reference(&desc.mlp, RouterWeights::Output, &a, routing, &all);
        assert_within(&c, &want, &plan.to_string());
        // An expert of another format than the plan's is refused, and so is what nothing multiplies.
        let mixed = plan.prepack(experts().into_iter().map(Ok::<_, Error>), None).unwrap_err().to_string();
        assert_eq!(mixed, format!("down is nvfp4 [48, 32]; the problem asks for {float} [48, 32]"));
        let gate_up = DualGemmDesc { out: nvfp4(OutScale::Dynamic), ..desc.mlp.gate_up };
        let quantized = MlpDesc::new(gate_up, 48, float, OutFormat::F32);
        let message = MlpPlan::new(&quantized, &Target::default()).unwrap_err().to_string();
        assert_eq!(
            message,
            format!("A is nvfp4; the problem asks for floats that stay so, by one matrix in {float}")
        );
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

/// The shared expert is a term of the sum like any other, rounded once with it, whatever its own width is. A, and what is
/// between, are of a float type.
pub fn check_shared(target: &Target, float: OutFormat, own: OutFormat, all: &[Option<GatedMlp<'_>>]) {
    let (a, weights) = (activations(float.into(), 7, 64), weights());
    let routing = Routing { ids: &IDS, weights: &weights };
    let (both, alone) = (mlp(48, 64, 48, 9), desc(7, [48, 64, 48], float.into(), float, own));
    let sums = |out, shared: Option<&GatedMlp<'_>>, c: OutputMut<'_>| {
        let routed = mixture(7, float.into(), float, out, RouterWeights::Output);
        let plan =
            MixturePlan::new(&MixtureDesc { shared: shared.map(|_| alone), ..routed }, target).unwrap();
        let packed = plan.prepack(all.iter().cloned().map(Ok::<_, Error>), shared).unwrap();
        plan.runner().unwrap().run(&a, routing, &packed, c, false).unwrap();
        plan.desc
    };
    let (mut wide, mut narrow) = (vec![0f32; 7 * 48], vec![bf16::ZERO; 7 * 48]);
    let desc = sums(OutFormat::F32, Some(&both), OutputMut::F32(&mut wide));
    let want = Reference::new(&a, &RowSample::all(7)).mixture(&desc, routing, (all, Some(&both))).unwrap();
    assert_within(&wide, &want, "shared");
    sums(OutFormat::Bf16, Some(&both), OutputMut::Bf16(&mut narrow));
    assert!(narrow.iter().zip(&wide).all(|(c, w)| *c == bf16::from_f32(*w)));
    // It makes a difference.
    let mut without = vec![0f32; 7 * 48];
    sums(OutFormat::F32, None, OutputMut::F32(&mut without));
    assert!(without.iter().zip(&wide).all(|(a, b)| a != b));
}

#[test]
fn a_shared_expert_is_added_before_the_sum_is_rounded_exact() {
    check_shared(&Target::default(), OutFormat::Bf16, OutFormat::F32, &experts());
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
    let down = checkpoint.down_source(layer, Which::Dense).unwrap();
    let scale = down.input_scale().unwrap().map(|scale| scale.value());
    let mlp = GatedMlp { gate_up: checkpoint.gate_up(layer).unwrap(), down: down.read().unwrap() };
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

/// What large problems are compared with, a sample of the rows in runs of features, is the plain reference.
#[test]
fn sampled_references_are_the_plain_ones_exact() {
    let sample = RowSample::spread(7, 3);
    let rows = |y: Vec<Bounded>| sample.pick(&y, 48);
    for between in [OutFormat::Bf16, nvfp4(OutScale::Static(0.01)), nvfp4(OutScale::Dynamic)] {
        let desc = desc(7, [80, 96, 48], AFormat::Bf16, between, OutFormat::F32);
        let (a, mlp) = (activations(AFormat::Bf16, 7, 96), mlp(80, 96, 48, 1));
        let want = rows(mlp_reference(&desc, &a, 0..7, &mlp));
        assert_eq!(Reference::new(&a, &sample).mlp(&desc, &mlp).unwrap(), want, "{between}");
    }
    for router in [RouterWeights::Output, RouterWeights::Input] {
        let desc = mixture(7, AFormat::Bf16, OutFormat::Bf16, OutFormat::F32, router);
        let (a, all, weights) = (activations(AFormat::Bf16, 7, 64), experts(), weights());
        let routing = Routing { ids: &IDS, weights: &weights };
        let want = rows(mixture_reference(&desc.mlp, router, &a, routing, &all));
        let got = Reference::new(&a, &sample).mixture(&desc, routing, (&all, None));
        assert_eq!(got.unwrap(), want, "{router:?}");
    }
}
