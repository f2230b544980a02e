//! GPU plans through the facade, on a simulated H100 with every check on: each strategy that needs no library, every
//! format of A and C, groups, weights that are on the device already, and misuse.

use dualgemm::check::select_rows;
use dualgemm::device::{Device as _, DevicePtr, Stream};
use dualgemm::formats::{
    BlockFormat, Float, QuantizedMatrix, ScaleLayout, match_floats, scalar::e2m1, scalar::e4m3,
};
use dualgemm::gemm::compare::Element;
use dualgemm::gemm::{
    AFormat, AOperand, Activation, Comparison, DualGemmDesc, Epilogue, GateUp, OutFormat, OutScale, OutputMut,
};
use dualgemm::strategies::{Buffer, Gpu, Rounding, STRATEGIES, measure};
use dualgemm::{
    DeviceA, DeviceC, DeviceCall, DeviceGateUp, DualGemm, GpuId, GpuOptions, OwnedMatrix, PackedWeights,
    Plan, Rows, Runner, SimArch, Target,
};
use half::f16;

use crate::on_device::{a_bytes, desc, pair_on, read};
use crate::{a_of, expert, quantized, rel_l2};

const ID: GpuId = GpuId::Sim(SimArch::Sm90a);

fn gpu() -> &'static Gpu {
    ID.open().unwrap()
}

fn plan(desc: &DualGemmDesc, strategy: Option<&str>) -> Plan {
    let options = GpuOptions { strategy: strategy.map(Into::into), ..GpuOptions::default() };
    DualGemm::plan(desc, &Target::Gpu(ID, options)).unwrap_or_else(|e| panic!("{e}"))
}

pub(crate) fn operand(m: usize, k: usize, format: AFormat) -> AOperand<'static> {
    a_of(format, m, k, 0.37)
}

/// Runs a plan on the host's operands and gives the relative L2 error.
pub(crate) fn error(plan: &Plan, a: &AOperand<'_>, weights: &GateUp<'_>) -> f64 {
    let (desc, packed) = (plan.desc(), plan.prepack(weights).unwrap());
    let (m, n) = (a.rows(), desc.n);
    let mut c = filled(desc, f32::NAN);
    let scale = plan.runner(1).unwrap().run(a, &packed, c.output(m, n)).unwrap();
    assert_eq!(scale.is_some(), matches!(desc.out, OutFormat::Nvfp4 { .. }), "nvfp4 has a tensor scale");
    c.set_global_scale(scale);
    rel_l2(&values(&c, m, n), &desc.epilogue, &dualgemm::quantize_a(a, desc.quantize_a).unwrap(), weights)
}

/// Compares the rows of C that a group has, if it has any, with what its weights give.
pub(crate) fn assert_rows<T: Element>(
    c: &[T],
    (first, count): (usize, usize),
    a: &AOperand<'_>,
    weights: &GateUp<'_>,
    (bound, what): (f64, &str),
) {
    if count > 0 {
        let (a, n) = (select_rows(a, &Vec::from_iter(first..first + count)).unwrap(), weights.n());
        let found = rel_l2(&c[first * n..][..count * n], &Epilogue::default(), &a, weights);
        assert!(found < bound, "{what}, rows from {first} on: {found:e}");
    }
}

/// A C that holds this everywhere; where it is nvfp4, scales of NaN.
pub(crate) fn filled(desc: &DualGemmDesc, x: f32) -> OwnedMatrix {
    let mut c = OwnedMatrix::of_c("c", desc).unwrap();
    match_floats!(&mut c, OwnedMatrix(c) => c.fill(Float::nearest(x)),
        OwnedMatrix::Quantized { codes, scales, .. } => {
            codes.fill(0xFF);
            scales.fill(0xFF);
        }
    );
    c
}

/// The first rows of a C.
pub(crate) fn values(c: &OwnedMatrix, rows: usize, n: usize) -> Vec<f32> {
    let c = c.operand("c", rows, n).unwrap();
    (0..rows * n).map(|i| c.value(i / n, i % n) as f32).collect()
}

fn bound(plan: &Plan) -> f64 {
    let Plan::Gpu { plan, .. } = plan else { panic!("a GPU plan") };
    measure::bound(plan).unwrap()
}

#[test]
fn every_strategy_without_a_library_is_right_close() {
    // Waves take more features than a simulator has time for; native is for other cards.
    let others = ["waves", "native"];
    for s in STRATEGIES.iter().filter(|s| !s.needs_library() && !others.contains(&s.name())) {
        // More than one group of eight.
        let m = 9;
        let plan = plan(&desc(m, 72, 224, AFormat::Nvfp4, OutFormat::F16), Some(s.name()));
        let found = error(&plan, &operand(m, 224, AFormat::Nvfp4), &expert(72, 224, 0));
        let bound = if s.rounding() == Rounding::Nothing { 4e-4 } else { bound(&plan) };
        assert!(found < bound, "{}: {found:e}", s.name());
    }
}

fn hard(a: AFormat) -> DualGemmDesc {
    let mut desc = desc(5, 40, 112, a, OutFormat::F32);
    desc.epilogue.activation = Activation::SWIGLU_OAI;
    (desc.epilogue.alpha_gate, desc.epilogue.alpha_up) = (0.5, -2.0);
    desc
}

fn biased() -> GateUp<'static> {
    let bias = (0..40).map(|i| i as f32 / 64.0).collect::<Vec<_>>();
    GateUp { up_bias: Some(bias.into()), ..expert(40, 112, 1) }
}

/// The strategy of e4m3 against a reference whose operands are rounded as it says: what is left are sums of
/// fewer bits than f32 has.
#[test]
fn fp8_is_the_product_of_rounded_operands_close() {
    for a_format in [AFormat::F16, AFormat::Bf16, AFormat::Nvfp4] {
        let (desc, a, weights) = (hard(a_format), operand(5, 112, a_format), biased());
        let plan = plan(&desc, Some("fp8"));
        let got = plan.run_to_vec(&a, &plan.prepack(&weights).unwrap()).unwrap();
        let rounded = |x: f32, inverse: f32| f64::from(e4m3::decode(e4m3::encode(x * inverse)));
        // Rows of numbers, and what they are multiplied by.
        let codes = |m: &QuantizedMatrix<'_>, over: f32| -> (Vec<f64>, f64) {
            let place = (0..m.rows()).flat_map(|row| (0..m.k()).map(move |k| (row, k)));
            let value = |(row, k)| e2m1::decode(m.code(row, k)) * e4m3::decode(m.scale_byte(row, k / 16));
            let values = place.map(|at| rounded(value(at), 1.0 / over)).collect();
            (values, f64::from(over) * f64::from(m.global_scale().value()))
        };
        let (a, a_scale) = match &a {
            AOperand::Quantized(a) => codes(a, 6.0),
            AOperand::Float(a) => {
                let values: Vec<f32> = (0..5 * 112).map(|i| a.value(i / 112, i % 112)).collect();
                let divisor = 2688.0 / values.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                let inverse = divisor * (1.0 / 6.0);
                (values.into_iter().map(|x| rounded(x, inverse)).collect(), 6.0 / f64::from(divisor))
            }
        };
        let halves = [&weights.gate, &weights.up].map(|half| {
            let blocks = (0..half.rows()).flat_map(|row| (0..half.blocks()).map(move |block| (row, block)));
            let largest =
                blocks.map(|(row, block)| e4m3::decode(half.scale_byte(row, block))).fold(0.0, f32::max);
            codes(half, largest * 6.0 / 448.0)
        });
        let program = desc.epilogue.activation.program();
        let want: Vec<f64> = (0..5 * 40)
            .map(|i| {
                let (row, feature) = (i / 40, i % 40);
                let [gate, up] = [(0, 0.5), (1, -2.0)].map(|(half, alpha): (usize, f64)| {
                    let (weights, scale) = &halves[half];
                    let pairs = a[row * 112..][..112].iter().zip(&weights[feature * 112..][..112]);
                    pairs.map(|(a, w)| a * w).sum::<f64>() * scale * a_scale * alpha
                });
                program.eval_f64(gate, up + feature as f64 / 64.0)
            })
            .collect();
        let found = Comparison::new(&got, &want, 40).unwrap().rel_l2;
        assert!(found < 2e-4, "A {a_format}: {found:e}");
        let (loss, bound) = (error(&plan, &operand(5, 112, a_format), &weights), bound(&plan));
        assert!((0.02..bound).contains(&loss), "A {a_format}, operands as they are: {loss:e}");
    }
}

/// Runs of features are one scale for all of e4m3, whichever run has the largest.
#[test]
fn weights_in_runs_are_the_whole_weights_exact() {
    for strategy in ["fused-epilogue", "fp8"] {
        let (n, k) = (160, 64);
        let plan = plan(&desc(3, n, k, AFormat::F16, OutFormat::F32), Some(strategy));
        let (whole, a) = (expert(n, k, 0), operand(3, k, AFormat::F16));
        let want = plan.run_to_vec(&a, &plan.prepack(&whole).unwrap()).unwrap();
        let runs = plan.prepack_runs([0..64, 64..160].map(|rows| Ok(whole.features(rows)?))).unwrap();
        assert_eq!(plan.run_to_vec(&a, &runs).unwrap(), want, "{strategy}");
    }
}

/// Operands of the host come in any order and are read in the plan's, also where A has fewer rows than the plan.
#[test]
fn scales_of_the_hosts_a_take_the_order_of_the_plan_exact() {
    let (n, k) = (16, 96);
    for arch in SimArch::ALL {
        for (m, strategy) in [(130, None), (9, Some("portable"))] {
            let plan = |a_scale_layout| {
                let strategy = strategy.map(Into::into);
                let options = GpuOptions { a_scale_layout, strategy, ..GpuOptions::default() };
                let desc = desc(m, n, k, AFormat::Nvfp4, OutFormat::F32);
                DualGemm::plan(&desc, &Target::Gpu(GpuId::Sim(arch), options)).unwrap()
            };
            let plans = ScaleLayout::ALL.map(plan);
            let weights = plans[0].prepack(&expert(n, k, 0)).unwrap();
            for rows in [m, m - 3] {
                let a = quantized("a", rows, k, 0.37);
                let run = |plan: &Plan, layout| {
                    let a = AOperand::Quantized(a.clone().with_scale_layout(layout));
                    plan.run_to_vec(&a, &weights).unwrap()
                };
                let want = run(&plans[0], ScaleLayout::Linear);
                for (plan, layout) in plans.iter().zip(ScaleLayout::ALL) {
                    for given in [ScaleLayout::Linear, layout] {
                        assert_eq!(run(plan, given), want, "{arch:?} {layout}, given {given}: {plan}");
                    }
                }
            }
            let Plan::Gpu { plan: chosen, .. } = &plans[1] else { panic!("a GPU plan") };
            assert_eq!(chosen.a_scale_layout, ScaleLayout::Sf128x4);
            let groups = [(0, 2), (2, 7)].map(|(first, count)| Rows { first, count, weights: &weights });
            let (a, mut c) = (operand(9, k, AFormat::Nvfp4), vec![0.0; 9 * n]);
            let run = |plan: &Plan, c: &mut [f32]| {
                plan.runner(2).unwrap().run_grouped(&a, &groups, OutputMut::F32(c)).map(drop)
            };
            run(&plans[0], &mut c).unwrap();
            let message = run(&plans[1], &mut c).unwrap_err().to_string();
            assert!(message.ends_with("plan with GpuOptions::a_scale_layout linear"), "{message}");
        }
    }
}

/// Whatever the padding of scales in device memory is, behind the last block of a row and behind the last row: here NaN.
#[test]
fn padding_of_scales_does_not_count_exact() {
    let (m, n) = (5, 16);
    for arch in SimArch::ALL {
        // Two blocks of padding in a row; none.
        for (k, layout) in [(96, ScaleLayout::Sf128x4), (96, ScaleLayout::Sf8x4), (128, ScaleLayout::Sf128x4)]
        {
            let id = GpuId::Sim(arch);
            let desc = desc(m, n, k, AFormat::Nvfp4, OutFormat::F32);
            let options = GpuOptions { a_scale_layout: layout, ..GpuOptions::default() };
            let plan = DualGemm::plan(&desc, &Target::Gpu(id.clone(), options)).unwrap();
            let weights = plan.prepack(&expert(n, k, 0)).unwrap();
            let a = quantized("a", m, k, 0.37);
            let want = plan.run_to_vec(&AOperand::Quantized(a.clone()), &weights).unwrap();

            let mut scales = vec![0x7F; layout.len(m, a.blocks())];
            for (row, block) in (0..m).flat_map(|row| (0..a.blocks()).map(move |block| (row, block))) {
                scales[layout.offset(row, block, a.blocks())] = a.scale_byte(row, block);
            }
            let (codes, _) = a_bytes(&AOperand::Quantized(a.clone()));
            let [codes, scales, c] = [codes, scales, vec![0; m * n * 4]]
                .map(|bytes| Buffer::of(id.open().unwrap(), &bytes).unwrap());
            let global_scale = a.global_scale().value();
            let call = DeviceCall {
                m,
                a: DeviceA::Blocks {
                    format: BlockFormat::Nvfp4,
                    codes: codes.ptr(),
                    scales: scales.ptr(),
                    global_scale,
                },
                c: DeviceC::Float(c.ptr()),
            };
            // SAFETY: the operands were allocated here, as large as the problem.
            unsafe { plan.runner(1).unwrap().run_device(&call, &weights, Stream::Own) }.unwrap();
            let want: Vec<u8> = want.iter().flat_map(|x| x.to_le_bytes()).collect();
            assert!(read(&c) == want, "K = {k}, scales {layout}: {plan}");
        }
    }
}

/// Padding of the scales of an nvfp4 C is zero, also where a call before had more rows.
#[test]
fn fewer_rows_leave_no_scales_of_the_call_before_exact() {
    let (n, k, scale_layout) = (32, 64, ScaleLayout::Sf128x4);
    for arch in SimArch::ALL {
        for global_scale in [OutScale::Static(2e-3), OutScale::Dynamic] {
            let desc = desc(9, n, k, AFormat::Nvfp4, OutFormat::Nvfp4 { scale_layout, global_scale });
            let target = Target::Gpu(GpuId::Sim(arch), GpuOptions::default());
            let plan = DualGemm::plan(&desc, &target).unwrap();
            let weights = plan.prepack(&expert(n, k, 0)).unwrap();
            let mut runner = plan.runner(1).unwrap();
            for m in [9, 2] {
                let (mut codes, mut scales) =
                    (vec![0xFF; m * n / 2], vec![0xFF; scale_layout.len(m, n / 16)]);
                let c = OutputMut::Nvfp4 { codes: &mut codes, scales: &mut scales };
                runner.run(&operand(m, k, AFormat::Nvfp4), &weights, c).unwrap();
                for (row, block) in (m..128).flat_map(|row| [(row, 0), (row, 1)]) {
                    assert_eq!(
                        scales[scale_layout.offset(row, block, n / 16)],
                        0,
                        "{plan}, row {row} of {m}"
                    );
                }
            }
        }
    }
}

#[test]
fn grouped_rows_equal_single_products_exact() {
    crate::grouped_rows_equal_single_products(&Target::Gpu(ID, GpuOptions::default()), "rows 0 to 3");
}

/// On a simulated GPU and on a card: a call whose A, rows of `row` bytes, or C lies where kernels cannot read or write it.
pub(crate) fn misplaced_operands_are_refused_by_name(
    runner: &Runner,
    packed: &PackedWeights,
    call: &DeviceCall,
    row: usize,
) {
    let DeviceA::Float { values, pitch } = call.a else { panic!("A is floats") };
    // SAFETY: it is refused; nothing is launched.
    let message =
        |call: DeviceCall| unsafe { runner.run_device(&call, packed, Stream::Own) }.unwrap_err().to_string();
    let a = |values, pitch| message(DeviceCall { a: DeviceA::Float { values, pitch }, ..*call });
    let misaligned = a(values.offset(4), pitch);
    assert!(
        misaligned.starts_with("A is at ") && misaligned.contains("multiple of 16 bytes"),
        "{misaligned}"
    );
    let stride =
        format!("A: row stride in bytes is 100; the problem asks for a multiple of 16, at least {row}");
    assert_eq!(a(values, 100), stride);
    assert!(message(DeviceCall { c: DeviceC::Float(DevicePtr::NULL), ..*call }).starts_with("C is at "));
}

/// What an engine does: weights and activations on the device, calls on a stream, nothing copied.
#[test]
fn device_operands_give_the_same_bits_as_the_hosts_exact() {
    let (m, n, k) = (5, 40, 96);
    let plan = plan(&desc(m, n, k, AFormat::F16, OutFormat::F16), Some("fused"));
    let (weights, a) = (expert(n, k, 0), operand(m, k, AFormat::F16));
    let mut want = vec![f16::ZERO; m * n];
    plan.run(&a, &plan.prepack(&weights).unwrap(), OutputMut::F16(&mut want)).unwrap();

    let (on_device, buffers) = pair_on(&ID, &weights, ScaleLayout::Linear);
    let switched = |mut pair: [DevicePtr; 2]| {
        pair.reverse();
        pair
    };
    let other =
        DeviceGateUp { codes: switched(on_device.codes), scales: switched(on_device.scales), ..on_device };
    // SAFETY: the operands were allocated here, as large as the problem.
    let packed = unsafe { plan.prepack_device(&other, Stream::Own) }.unwrap();
    let scaled = DeviceGateUp { global_scales: [1.0, 7.0], ..on_device };
    // SAFETY: as above.
    let refused = unsafe { packed.refill_device(&scaled, Stream::Own) }.unwrap_err().to_string();
    assert!(refused.contains("packed once"), "{refused}");
    // SAFETY: as above.
    unsafe { packed.refill_device(&on_device, Stream::Own) }.unwrap();
    gpu().synchronize().unwrap();
    drop(buffers);
    let (values, c) =
        (Buffer::of(gpu(), &a_bytes(&a).0).unwrap(), Buffer::of(gpu(), &vec![0xEE; m * n * 2 + 64]).unwrap());
    let call = DeviceCall {
        m,
        a: DeviceA::Float { values: values.ptr(), pitch: 2 * k },
        c: DeviceC::Float(c.ptr()),
    };
    let runner = plan.runner(1).unwrap();
    runner.warm(&packed).unwrap();
    for _ in 0..2 {
        // SAFETY: the operands were allocated here, as large as the problem.
        unsafe { runner.run_device(&call, &packed, Stream::Own) }.unwrap();
    }
    let got = read(&c);
    let want: Vec<u8> = want.iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(got[..m * n * 2], want);
    assert!(got[m * n * 2..].iter().all(|&b| b == 0xEE), "nothing is written behind C");

    // One row fewer writes one row fewer.
    gpu().memset(c.ptr(), 0xEE, c.bytes()).unwrap();
    // SAFETY: the operands were allocated here, as large as the problem.
    unsafe { runner.run_device(&DeviceCall { m: m - 1, ..call }, &packed, Stream::Own) }.unwrap();
    let got = read(&c);
    assert_eq!(got[..(m - 1) * n * 2], want[..(m - 1) * n * 2]);
    assert!(got[(m - 1) * n * 2..].iter().all(|&b| b == 0xEE));

    misplaced_operands_are_refused_by_name(&runner, &packed, &call, 2 * k);
    // SAFETY: it is refused; nothing is launched.
    let message =
        |call: DeviceCall| unsafe { runner.run_device(&call, &packed, Stream::Own) }.unwrap_err().to_string();
    assert_eq!(message(DeviceCall { m: 6, ..call }), "A is [6, 96]; the problem asks for 1 to 5 rows");
    let codes = DeviceA::Blocks {
        format: BlockFormat::Nvfp4,
        codes: values.ptr(),
        scales: values.ptr(),
        global_scale: 1.0,
    };
    assert_eq!(message(DeviceCall { a: codes, ..call }), "A is nvfp4; the plan asks for floats");
}

#[test]
fn what_a_gpu_cannot_do_is_said() {
    let f32_a = desc(2, 32, 64, AFormat::F32, OutFormat::F32);
    let target = |strategy: Option<&str>| {
        Target::Gpu(ID, GpuOptions { strategy: strategy.map(Into::into), ..GpuOptions::default() })
    };
    let message = |desc: &DualGemmDesc, t: &Target| DualGemm::plan(desc, t).unwrap_err().to_string();
    assert!(message(&f32_a, &target(None)).contains("round it to f16 or bf16"));
    let f16_a = desc(2, 32, 64, AFormat::F16, OutFormat::F32);
    assert!(message(&f16_a, &target(Some("quick"))).contains("there are baseline, "));
    let library = plan(&f16_a, Some("baseline")).runner(1).unwrap_err().to_string();
    assert!(library.contains("cannot run NVIDIA's libraries"), "{library}");
    let on_gpu = plan(&f16_a, None);
    let packed = on_gpu.prepack(&expert(32, 64, 0)).unwrap();
    let on_cpu = DualGemm::plan(&f16_a, &Target::default()).unwrap();
    let a = operand(2, 64, AFormat::F16);
    assert_eq!(
        on_cpu.run_to_vec(&a, &packed).unwrap_err().to_string(),
        "these weights were packed for a GPU; the plan is for the processor"
    );
    let mut c = vec![f16::ZERO; 2 * 32];
    let wrong_c = on_gpu.run(&a, &packed, OutputMut::F16(&mut c)).unwrap_err().to_string();
    assert!(wrong_c.starts_with("C is f16 of 64 values"), "{wrong_c}");
    assert!(on_gpu.measure_limits().unwrap_err().to_string().contains("has no clock"));
}

#[test]
fn gpu_plans_survive_json() {
    let plan = plan(&desc(2, 32, 64, AFormat::F16, OutFormat::F32), None);
    let text = serde_json::to_string(&plan).unwrap();
    assert!(text.contains("\"sim:sm_90a\""), "{text}");
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
}

/// A plan that was written by another build, or by hand, is checked before it runs.
#[test]
fn gpu_plans_that_cannot_be_are_refused() {
    let id = GpuId::Sim(SimArch::Sm100a);
    let info = id.open().unwrap().info();
    let target = Target::Gpu(id, GpuOptions::default());
    let few = DualGemm::plan(&desc(9, 32, 64, AFormat::Nvfp4, OutFormat::F32), &target).unwrap();
    let text = serde_json::to_string(&few).unwrap();
    let kernel = few.kernel();
    // One that splits K among more CTAs than there is work for.
    let native = dualgemm::strategies::strategy("native").unwrap();
    let kernels = |k| native.kernels(&desc(9, 32, k, AFormat::Nvfp4, OutFormat::F32), 1, info).unwrap();
    let split = kernels(4096).into_iter().find(|name| !kernels(64).contains(name)).unwrap();
    for (from, to, said) in [
        ("\"k\":64", "\"k\":24", "K = 24 is not a multiple of 16"),
        ("\"a\":\"nvfp4\"", "\"a\":\"f16\"", "has no kernel"),
        ("\"native\"", "\"fused\"", "its kernel is for sm_90a"),
        ("\"native\"", "\"portable\"", "has no kernel"),
        (kernel, "none", "has no kernel \"none\""),
        (kernel, &split, "has no kernel"),
    ] {
        assert!(text.contains(from), "{from}: {text}");
        let plan: Plan = serde_json::from_str(&text.replace(from, to)).unwrap();
        let message = plan.runner(1).unwrap_err().to_string();
        assert!(message.contains(said), "{to}: {message}");
    }
}
