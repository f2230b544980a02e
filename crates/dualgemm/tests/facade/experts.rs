//! Mixtures of experts on simulated cards with every check on: one launch for the rows of all, whose numbers are in
//! device memory. C is poisoned before, so is A where rows belong to nobody.

use dualgemm::check::select_rows;
use dualgemm::device::{Device as _, Error as DeviceError, Stream};
use dualgemm::formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm::gemm::{AFormat, AOperand, DualGemmDesc, GateUp, OutFormat, OutScale, OutputMut, QuantizeA};
use dualgemm::{
    DeviceCall, DualGemm, GpuId, GpuOptions, GroupedCall, PackedExperts, PackedWeights, Plan, Rows, SimArch,
    Target,
};
use half::f16;

use crate::gpu::{assert_rows, filled, operand, values};
use crate::on_device::{POISON, a_bytes, desc, on_device, on_device_as, pair_on, read};
use crate::{expert, quantized, rel_l2};

const SIM: GpuId = GpuId::Sim(SimArch::Sm90a);
const BLACKWELL: [GpuId; 2] = [GpuId::Sim(SimArch::Sm100a), GpuId::Sim(SimArch::Sm120a)];

fn plan_on(id: &GpuId, desc: &DualGemmDesc, options: GpuOptions) -> Plan {
    DualGemm::plan(desc, &Target::Gpu(id.clone(), options)).unwrap_or_else(|e| panic!("{e}"))
}

fn plan(desc: &DualGemmDesc, options: GpuOptions) -> Plan {
    plan_on(&SIM, desc, options)
}

fn groups(groups: usize) -> GpuOptions {
    GpuOptions { groups, ..GpuOptions::default() }
}

/// Experts whose tensor scales differ, gate's from up's and one's from another's; some have a bias.
fn mixture(count: usize, n: usize, k: usize, biased: bool) -> Vec<GateUp<'static>> {
    let scaled = |half: QuantizedMatrix<'static>, factor: f32| {
        let scale = GlobalScale::multiplier(half.global_scale().value() * factor);
        let (codes, scales) = (half.codes().to_vec(), half.scales().to_vec());
        let layout = half.scale_layout();
        QuantizedMatrix::new(half.name().to_owned(), BlockFormat::Nvfp4, n, k, codes, scales, layout, scale)
            .unwrap()
    };
    let weights = |e: usize| {
        let GateUp { gate, up, .. } = expert(n, k, e);
        let factor = 0.25 * (e + 1) as f32;
        let mut weights = GateUp::new(scaled(gate, factor), scaled(up, 3.0 - factor));
        if biased && e != 1 {
            weights.up_bias = Some((0..n).map(|i| e as f32 - i as f32 / 32.0).collect());
        }
        weights
    };
    (0..count).map(weights).collect()
}

/// Runs a mixture in one launch, again for each table of first rows, which only the device is told; compares every row
/// with the reference of its expert, and those of nobody with poison. On a card the calls are replays of one graph.
pub(crate) fn check(
    id: &GpuId,
    (desc, options): (&DualGemmDesc, GpuOptions),
    biased: bool,
    tables: &[&[u32]],
    bound: f64,
) {
    let (layout, wanted) = (options.a_scale_layout, options.groups);
    let (plan, &DualGemmDesc { n, k, .. }) = (plan_on(id, desc, options), desc);
    let Plan::Gpu { plan: chosen, .. } = &plan else { panic!("a GPU plan") };
    assert_eq!(chosen.groups, wanted, "{plan}");
    let experts = mixture(tables[0].len() - 1, n, k, biased);
    let packed = plan.prepack_experts(&experts).unwrap();
    let device = on_device_as(id, desc, layout, tables[0]);
    let runner = plan.runner(experts.len()).unwrap();
    runner.warm_experts(&packed).unwrap();
    // SAFETY: the operands were allocated here, as large as the problem.
    let run = || unsafe { runner.run_device_grouped(&device.call, &packed, Stream::Own) };
    let graph = id.open().unwrap().card().map(|card| {
        card.record(|| run().map_err(|e| DeviceError::Kernel(e.to_string())))
            .unwrap_or_else(|e| panic!("{e}"))
    });
    for &first_rows in tables {
        device.set(first_rows);
        match &graph {
            // SAFETY: the operands were allocated here, as large as the problem.
            Some(graph) => unsafe { graph.replay() }.unwrap(),
            None => run().unwrap_or_else(|e| panic!("{plan}: {e}")),
        }
        let bytes = read(&device.c);
        let size = desc.out.bits_per_element() as usize / 8;
        let value = |i: usize| match desc.out {
            OutFormat::F32 => f32::from_le_bytes(bytes[4 * i..][..4].try_into().unwrap()),
            OutFormat::F16 => f16::from_le_bytes(bytes[2 * i..][..2].try_into().unwrap()).to_f32(),
            other => panic!("{other} is not compared here"),
        };
        let (first, last) = (first_rows[0] as usize, first_rows[experts.len()] as usize);
        // Rows of nobody do not count in a dynamic scale.
        let of_groups: Vec<usize> = (first..last).collect();
        let seen = (first < last).then(|| {
            dualgemm::quantize_a(&select_rows(&device.a, &of_groups).unwrap(), desc.quantize_a).unwrap()
        });
        for (expert, range) in
            experts.iter().zip(first_rows.windows(2)).filter(|(_, range)| range[0] < range[1])
        {
            let rows = range[0] as usize..range[1] as usize;
            let got: Vec<f32> = (rows.start * n..rows.end * n).map(value).collect();
            let own: Vec<usize> = rows.map(|row| row - first).collect();
            let a = select_rows(seen.as_ref().unwrap(), &own).unwrap();
            let found = rel_l2(&got, &desc.epilogue, &a, expert);
            assert!(found < bound, "{plan}, rows {range:?}: {found:e}");
        }
        let (before, behind) = (&bytes[..first * n * size], &bytes[last * n * size..]);
        assert!(before.iter().chain(behind).all(|&b| b == POISON), "{plan}: rows of nobody");
    }
}

/// Whatever is chosen where no card says what is fastest; K is enough for all that split it.
#[test]
fn every_kernel_of_sm100_for_groups_in_nvfp4_is_right_close() {
    let (id, desc) = (&BLACKWELL[0], desc(9, 40, 800, AFormat::Nvfp4, OutFormat::F32));
    let native = dualgemm::strategies::strategy("native").unwrap();
    let kernels = native.kernels(&desc, 2, id.open().unwrap().info()).unwrap();
    assert!(kernels.len() > 3, "{kernels:?}");
    for kernel in kernels {
        let options = GpuOptions { strategy: Some("native".into()), kernel: Some(kernel), ..groups(2) };
        check(id, (&desc, options), false, &[&[0, 5, 5, 9]], 1e-5);
    }
}

/// The same kernel gives each expert's rows the bits that it gives them alone; a re-quantized C has the block scales of one
/// matrix.
#[test]
fn one_launch_gives_the_bits_of_a_launch_for_each_exact() {
    let [sm100, sm120] = &BLACKWELL;
    for (id, strategy, k) in [(&SIM, "fused", 80), (sm100, "native", 96), (sm120, "native", 96)] {
        check_bits(id, strategy, k);
    }
}

fn check_bits(id: &GpuId, strategy: &str, k: usize) {
    let (m, n) = (9, 48);
    let experts = mixture(3, n, k, false);
    let first_rows = [0u32, 4, 4, 9];
    let nvfp4 = |scale_layout| OutFormat::Nvfp4 { scale_layout, global_scale: OutScale::Static(2e-3) };
    for out in [OutFormat::Bf16, nvfp4(ScaleLayout::Linear), nvfp4(ScaleLayout::Sf128x4)] {
        let desc = desc(m, n, k, AFormat::Nvfp4, out);
        let at_once = plan_on(id, &desc, GpuOptions { strategy: Some(strategy.into()), ..groups(3) });
        let packed = at_once.prepack_experts(&experts).unwrap();
        let device = on_device(id, &desc, &first_rows);
        let runner = at_once.runner(3).unwrap();
        // SAFETY: the operands were allocated here, as large as the problem.
        unsafe { runner.run_device_grouped(&device.call, &packed, Stream::Own) }.unwrap();
        let got = (read(&device.c), read(&device.c_scales));

        // All rows with each expert's weights; the expert's own rows are taken.
        let row_bytes = n * desc.out.bits_per_element() as usize / 8;
        for (weights, range) in packed.iter().zip(first_rows.windows(2)) {
            let alone = on_device(id, &desc, &[0, m as u32]);
            // SAFETY: the operands were allocated here, as large as the problem.
            unsafe { runner.run_device(&alone.call.call, weights, Stream::Own) }.unwrap();
            let want = (read(&alone.c), read(&alone.c_scales));
            let bytes = range[0] as usize * row_bytes..range[1] as usize * row_bytes;
            assert!(got.0[bytes.clone()] == want.0[bytes], "{id} {out}, rows {range:?}");
            let OutFormat::Nvfp4 { scale_layout, .. } = out else { continue };
            for (row, block) in
                (range[0] as usize..range[1] as usize).flat_map(|r| (0..n / 16).map(move |b| (r, b)))
            {
                let at = scale_layout.offset(row, block, n / 16);
                assert_eq!(got.1[at], want.1[at], "{id} {out}, row {row}, block {block}");
            }
        }
    }
}

/// On operands of the host: experts of one stack run at once, others one by one, with the same result.
#[test]
fn groups_of_the_hosts_rows_equal_the_reference_close() {
    for id in [&SIM, &BLACKWELL[0]] {
        check_rows_of_the_host(id);
    }
}

fn check_rows_of_the_host(id: &GpuId) {
    let (m, n, k) = (11, 40, 64);
    let experts = mixture(3, n, k, true);
    let a = AOperand::Quantized(quantized("a", m, k, 0.37));
    let plan = plan_on(id, &desc(m, n, k, AFormat::Nvfp4, OutFormat::F32), groups(3));
    let stack = plan.prepack_experts(&experts).unwrap();
    let single: Vec<PackedWeights> = experts.iter().map(|e| plan.prepack(e).unwrap()).collect();
    let mut runner = plan.runner(3).unwrap();
    // Rows 2 and 7 to 9 belong to nobody; the second order of experts is not that of the stack.
    let ranges = [(0, 2), (3, 0), (3, 4)];
    for order in [[0, 1, 2], [2, 1, 0]] {
        for packed in [&stack[..], &single[..]] {
            let of =
                |(&(first, count), e): (&(usize, usize), usize)| Rows { first, count, weights: &packed[e] };
            let rows: Vec<Rows<'_>> = ranges.iter().zip(order).map(of).collect();
            let mut c = vec![-1f32; m * n];
            runner.run_grouped(&a, &rows, OutputMut::F32(&mut c)).unwrap();
            for (range, e) in ranges.into_iter().zip(order) {
                assert_rows(&c, range, &a, &experts[e], (1e-5, &format!("{id} {order:?}")));
            }
            assert!(c[2 * n..3 * n].iter().chain(&c[7 * n..]).all(|&x| x == -1.0), "rows of nobody stay");
        }
    }
}

/// Anything may lie in rows that no group has: NaN block scales are no fault, large numbers take no precision.
#[test]
fn rows_of_nobody_on_the_host_hold_anything_exact() {
    let (m, n, k) = (7, 40, 64);
    let rows_of_groups = [(1, 2), (4, 2)];
    let nobody =
        |row: &usize| !rows_of_groups.iter().any(|(first, count)| (*first..first + count).contains(row));
    let AOperand::Quantized(clean) = operand(m, k, AFormat::Nvfp4) else { panic!("A is nvfp4") };
    let (codes, mut scales) = a_bytes(&AOperand::Quantized(clean.clone()));
    let floats = operand(m, k, AFormat::F32);
    let mut values: Vec<f32> = (0..m * k).map(|i| floats.value(i / k, i % k) as f32).collect();
    for row in (0..m).filter(nobody) {
        scales[row * k / 16..][..k / 16].fill(0x7F);
        values[row * k..][..k].fill(if row == 0 { f32::NAN } else { 1e30 });
    }
    let dirty = QuantizedMatrix::new(
        "a",
        clean.format(),
        m,
        k,
        codes,
        scales,
        ScaleLayout::Linear,
        clean.global_scale(),
    );
    let dirty = AOperand::Quantized(dirty.unwrap());
    let dirty_floats = AOperand::Float(FloatMatrix::F32(Matrix::new("a", m, k, values).unwrap()));
    let cases =
        [(QuantizeA::No, AOperand::Quantized(clean), dirty), (QuantizeA::Dynamic, floats, dirty_floats)];
    for (id, (quantize_a, clean, dirty)) in
        [&SIM, &BLACKWELL[0], &BLACKWELL[1]].iter().flat_map(|id| cases.iter().map(move |case| (id, case)))
    {
        let problem =
            DualGemmDesc { quantize_a: *quantize_a, ..desc(m, n, k, AFormat::of(clean), OutFormat::F32) };
        let plan = plan_on(id, &problem, groups(2));
        let experts = mixture(2, n, k, false);
        let stack = plan.prepack_experts(&experts).unwrap();
        let single: Vec<PackedWeights> = experts.iter().map(|e| plan.prepack(e).unwrap()).collect();
        // Groups that take turns share no dynamic scale.
        let in_turns = (*quantize_a == QuantizeA::No).then_some(&single[..]);
        for packed in [Some(&stack[..]), in_turns].into_iter().flatten() {
            let rows = [0, 1].map(|e| Rows {
                first: rows_of_groups[e].0,
                count: rows_of_groups[e].1,
                weights: &packed[e],
            });
            let run = |a: &AOperand<'_>| {
                let mut c = vec![-1f32; m * n];
                plan.runner(2).unwrap().run_grouped(a, &rows, OutputMut::F32(&mut c)).unwrap();
                c
            };
            let got = run(dirty);
            assert_eq!(got, run(clean), "{plan}");
            let untouched = |row: usize| got[row * n..][..n].iter().all(|&x| x == -1.0);
            assert!((0..m).all(|row| untouched(row) == nobody(&row)), "{plan}");
        }
    }
}

/// Rows of C that start anywhere: of groups that take turns only the first one's is where C is.
#[test]
fn groups_in_turns_take_any_number_of_features_exact() {
    let (m, k) = (6, 64);
    let every = |a, strategy| [&SIM, &BLACKWELL[0], &BLACKWELL[1]].map(|id| (id, a, strategy));
    let named = [(&SIM, AFormat::F16, Some("plain")), (&SIM, AFormat::Nvfp4, Some("fp8"))];
    let cases = every(AFormat::Nvfp4, None).into_iter().chain(every(AFormat::F16, Some("portable")));
    for (id, a_format, strategy) in cases.chain(named) {
        for (n, out) in [(17, OutFormat::F32), (20, OutFormat::F16), (13, OutFormat::Bf16)] {
            let options = GpuOptions { strategy: strategy.map(Into::into), ..groups(1) };
            let plan = plan_on(id, &desc(m, n, k, a_format, out), options);
            let a = operand(m, k, a_format);
            let weights = [0, 1].map(|e| plan.prepack(&expert(n, k, e)).unwrap());
            let rows = [(0, 1), (1, 4)];
            let rows = [0, 1].map(|e| Rows { first: rows[e].0, count: rows[e].1, weights: &weights[e] });
            let run = |groups: &[Rows<'_>]| -> Vec<f32> {
                let (mut runner, mut c) = (plan.runner(2).unwrap(), filled(plan.desc(), -1.0));
                let done = runner.run_grouped(&a, groups, c.output(m, n));
                done.unwrap_or_else(|e| panic!("{plan}: {e}"));
                values(&c, m, n)
            };
            let whole = [0, 1].map(|e| run(&[Rows { first: 0, count: m, weights: &weights[e] }]));
            let want = [&whole[0][..n], &whole[1][n..5 * n], &vec![-1.0; n]].concat();
            assert_eq!(run(&rows), want, "{plan}");
        }
    }
}

#[test]
fn experts_that_are_on_the_device_pack_to_the_same_exact() {
    let [sm100, sm120] = &BLACKWELL;
    for (id, a) in [(&SIM, AFormat::F16), (sm100, AFormat::F16), (sm120, AFormat::Nvfp4)] {
        check_on_device(id, a);
    }
}

fn check_on_device(id: &GpuId, a: AFormat) {
    let (m, n, k) = (5, 40, 96);
    let experts = mixture(2, n, k, true);
    let plan = plan_on(id, &desc(m, n, k, a, OutFormat::F16), groups(2));
    let (on_gpu, _buffers): (Vec<_>, Vec<_>) =
        experts.iter().map(|expert| pair_on(id, expert, ScaleLayout::Linear)).unzip();
    let runner = plan.runner(2).unwrap();
    let run = |packed: &PackedExperts| {
        let device = on_device(id, plan.desc(), &[0, 2, 5]);
        // SAFETY: the operands were allocated here, as large as the problem.
        unsafe { runner.run_device_grouped(&device.call, packed, Stream::Own) }.unwrap();
        read(&device.c)
    };
    let from_host = plan.prepack_experts(&experts).unwrap();
    let want = run(&from_host);
    // SAFETY: the operands were allocated here, as large as the problem.
    assert!(want == run(&unsafe { plan.prepack_experts_device(&on_gpu, Stream::Own) }.unwrap()));

    // A copy of one expert is that expert.
    let PackedWeights::Gpu(weights) = &from_host[0] else { panic!("on a GPU") };
    let copy = PackedWeights::Gpu(weights.duplicate(id.open().unwrap()).unwrap().into());
    let one = |weights: &PackedWeights| {
        let device = on_device(id, plan.desc(), &[0, 5]);
        // SAFETY: the operands were allocated here, as large as the problem.
        unsafe { runner.run_device(&device.call.call, weights, Stream::Own) }.unwrap();
        read(&device.c)
    };
    assert!(one(&from_host[0]) == one(&copy));
    assert!(one(&from_host[1]) != one(&copy));
}

#[test]
fn what_groups_cannot_be_is_said() {
    let (m, n, k) = (5, 32, 64);
    let problem = desc(m, n, k, AFormat::F16, OutFormat::F16);
    let (one, many) = (plan(&problem, groups(1)), plan(&problem, groups(2)));
    let experts = mixture(2, n, k, false);
    let packed = many.prepack_experts(&experts).unwrap();
    let device = on_device(&SIM, &problem, &[0, 2, 5]);
    let runner = one.runner(2).unwrap();
    // SAFETY: it is refused; nothing is launched.
    let message =
        unsafe { runner.run_device_grouped(&device.call, &packed, Stream::Own) }.unwrap_err().to_string();
    let wanted =
        "plan with GpuOptions::groups, which fused, persistent, decode, warpwise, portable, native take";
    assert!(message.ends_with(wanted), "{message}");
    assert!(runner.warm_experts(&packed).is_err());

    let runner = many.runner(2).unwrap();
    let run =
        // SAFETY: it is refused; nothing is launched.
        |call: GroupedCall| unsafe { runner.run_device_grouped(&call, &packed, Stream::Own) }.unwrap_err().to_string();
    let misaligned = GroupedCall { rows: device.call.rows.offset(2), ..device.call };
    assert!(run(misaligned).starts_with("the groups' rows"), "{}", run(misaligned));
    let many_rows = GroupedCall { call: DeviceCall { m: 6, ..device.call.call }, ..device.call };
    assert_eq!(run(many_rows), "A is [6, 64]; the problem asks for 1 to 5 rows");
    let other = plan(&desc(m, 48, k, AFormat::F16, OutFormat::F16), groups(2));
    // SAFETY: it is refused; nothing is launched.
    let other = unsafe { other.runner(2).unwrap().run_device_grouped(&device.call, &packed, Stream::Own) };
    assert!(other.unwrap_err().to_string().contains("[32, 64]"));

    let message = |e: Result<PackedExperts, dualgemm::Error>| e.unwrap_err().to_string();
    assert!(message(many.prepack_experts(&[])).contains("at least one expert"));
    let uneven = [mixture(1, n, k, false).remove(0), mixture(1, 48, k, false).remove(0)];
    assert!(message(many.prepack_experts(&uneven)).contains("[48, 64]"));

    // What groups of the host's rows cannot share, in an order that is not that of the stack, and what would do.
    let nvfp4 = OutFormat::Nvfp4 { scale_layout: ScaleLayout::Linear, global_scale: OutScale::Static(0.05) };
    let dynamic = DualGemmDesc { quantize_a: QuantizeA::Dynamic, ..problem };
    for (id, problem, wanted) in [
        (&SIM, dynamic, "use a static scale"),
        (&BLACKWELL[0], desc(m, n, k, AFormat::Nvfp4, nvfp4), "a static scale of C and run_device_grouped"),
    ] {
        let plan = plan_on(id, &problem, groups(2));
        let packed = plan.prepack_experts(&experts).unwrap();
        let rows = [0, 1].map(|e| Rows { first: 2 * e, count: 2, weights: &packed[1 - e] });
        let (mut codes, mut scales) = (vec![0; m * n / 2], vec![0; m * n / 16]);
        let c = OutputMut::Nvfp4 { codes: &mut codes, scales: &mut scales };
        let message = plan.runner(2).unwrap().run_grouped(&operand(m, k, problem.a), &rows, c).unwrap_err();
        assert!(message.to_string().ends_with(wanted), "{message}");
    }

    // A processor takes groups of the host's rows only; GPUs without a kernel for them take them one by one.
    let cpu = DualGemm::plan(&problem, &Target::default()).unwrap();
    let on_cpu = cpu.prepack_experts(&experts).unwrap();
    let runner = cpu.runner(2).unwrap();
    // SAFETY: it is refused; nothing is launched.
    assert!(unsafe { runner.run_device_grouped(&device.call, &on_cpu, Stream::Own) }.is_err());
    let dynamic = OutFormat::Nvfp4 { scale_layout: ScaleLayout::Linear, global_scale: OutScale::Dynamic };
    let plan = plan_on(&BLACKWELL[1], &DualGemmDesc { out: dynamic, ..problem }, groups(2));
    let Plan::Gpu { plan: chosen, .. } = &plan else { panic!("a GPU plan") };
    assert_eq!((chosen.groups, &*chosen.strategy), (1, "portable"));
    let (runner, apart) = (plan.runner(2).unwrap(), plan.prepack_experts(&experts).unwrap());
    assert_eq!(apart.len(), 2);
    // SAFETY: it is refused; nothing is launched.
    assert!(unsafe { runner.run_device_grouped(&device.call, &apart, Stream::Own) }.is_err());
}
