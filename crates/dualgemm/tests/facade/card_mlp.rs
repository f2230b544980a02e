//! Whole MLPs and mixtures on a real card: right, and how long they take beside their parts and the reading of their weights.

use dualgemm::device::Stream;
use dualgemm::formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm::gemm::{
    AFormat, AOperand, Activation, DualGemmDesc, GateUp, GatedMlp, Linear, MlpDesc, OutFormat, OutScale,
    OutputMut, RouterWeights, Routing, mixture_reference, mlp_reference,
};
use dualgemm::strategies::{Buffer, Gpu, Launches, measure};
use dualgemm::{
    DeviceA, DeviceC, DeviceCall, GpuId, MixtureDesc, MixturePlan, MlpPlan, PackedMlp, Plan, Target,
};
use half::bf16;

const ID: GpuId = GpuId::Cuda(0);

fn card() -> &'static Gpu {
    ID.open().unwrap_or_else(|e| panic!("{e}"))
}

fn random(seed: u64) -> impl FnMut() -> u32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    }
}

fn matrix(format: BlockFormat, rows: usize, k: usize, seed: u64) -> QuantizedMatrix<'static> {
    let mut bits = random(seed);
    let codes: Vec<u8> = (0..rows * k / 2).map(|_| bits() as u8).collect();
    let middle = if format == BlockFormat::Nvfp4 { 0x20 } else { 118 };
    let scales: Vec<u8> = (0..rows * k / format.block_len()).map(|_| middle + (bits() % 8) as u8).collect();
    QuantizedMatrix::new("w", format, rows, k, codes, scales, ScaleLayout::Linear, GlobalScale::ONE).unwrap()
}

fn mlp(format: BlockFormat, [n, k, h]: [usize; 3], bias: bool, seed: u64) -> GatedMlp<'static> {
    let of = |len: usize| bias.then(|| (0..len).map(|i| (i as f32).sin()).collect::<Vec<_>>().into());
    let gate_up = GateUp {
        gate_bias: of(n),
        up_bias: of(n),
        ..GateUp::new(matrix(format, n, k, seed), matrix(format, n, k, seed + 1))
    };
    GatedMlp { gate_up, down: Linear { weight: matrix(format, h, n, seed + 2), bias: of(h) } }
}

/// Rows of A, in the host's memory and the card's, with room for C in bf16.
fn operands(m: usize, k: usize, h: usize) -> (AOperand<'static>, [Buffer; 2], DeviceCall) {
    let mut bits = random(5);
    let values: Vec<bf16> =
        (0..m * k).map(|_| bf16::from_f32(bits() as f32 / (1 << 30) as f32 - 1.0)).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let buffers = [Buffer::of(card(), &bytes).unwrap(), Buffer::zeroed(card(), m * h * 2).unwrap()];
    let a = DeviceA::Float { values: buffers[0].ptr(), pitch: 2 * k };
    let call = DeviceCall { m, a, c: DeviceC::Float(buffers[1].ptr()) };
    (AOperand::Float(FloatMatrix::Bf16(Matrix::new("a", m, k, values).unwrap())), buffers, call)
}

fn first_row(c: &[bf16], h: usize) -> Vec<f64> {
    c[..h].iter().map(|c| c.to_f64()).collect()
}

#[track_caller]
fn assert_near(found: &[f64], want: &[dualgemm::gemm::Bounded]) {
    for (at, (found, want)) in found.iter().zip(want).enumerate() {
        let most = want.error + want.value.abs() / 256.0;
        assert!((found - want.value).abs() <= most, "{at}: {found}, want {want:?}");
    }
}

fn desc(m: usize, [n, k, h]: [usize; 3], format: BlockFormat, between: OutFormat, out: OutFormat) -> MlpDesc {
    let gate_up = DualGemmDesc::new(m, n, k, AFormat::Bf16, format);
    MlpDesc::new(DualGemmDesc { out: between, ..gate_up }, h, format, out)
}

fn median(plan: &Plan, call: &DeviceCall, weights: &[&dualgemm::PackedWeights]) -> f64 {
    let runner = plan.runner(1).unwrap();
    weights.iter().for_each(|weights| runner.warm(weights).unwrap());
    // SAFETY: the call is on operands of the plan's size, which live until it has ended.
    let run = |i: usize| unsafe { runner.run_device(call, weights[i % weights.len()], Stream::Own) };
    let time = measure::time(
        card().card().unwrap(),
        Launches::Recorded,
        weights.len(),
        measure::Protocol::default(),
        run,
    );
    time.unwrap().median_us
}

#[test]
#[ignore = "needs an sm_90 GPU"]
fn whole_mlps_take_little_more_than_their_parts() {
    let nvfp4 = OutFormat::Nvfp4 { scale_layout: ScaleLayout::Linear, global_scale: OutScale::Static(0.01) };
    for shape in [[14336, 4096, 4096], [4096, 7168, 7168]] {
        let [n, k, h] = shape;
        let weights = mlp(BlockFormat::Nvfp4, shape, false, 1);
        let mut copies = Vec::new();
        for between in [OutFormat::Bf16, nvfp4] {
            for m in [1, 8, 16, 64, 256] {
                let desc = desc(m, shape, BlockFormat::Nvfp4, between, OutFormat::Bf16);
                let plan = MlpPlan::new(&desc, &Target::cuda(0)).unwrap();
                while copies.len() < 4 {
                    copies.push(plan.prepack(&weights).unwrap());
                }
                let mut runner = plan.runner(1).unwrap();
                let (a, _buffers, call) = operands(m, k, h);
                let mut c = vec![bf16::ZERO; m * h];
                runner.run(&a, &copies[0], OutputMut::Bf16(&mut c)).unwrap();
                let whole = runner.time(&a, &copies[0]).unwrap().unwrap().median_us;
                if m == 1 {
                    assert_near(&first_row(&c, h), &mlp_reference(&desc, &a, 0..1, &weights));
                }
                let hidden = [m * n * 2, m * n / 8].map(|bytes| Buffer::zeroed(card(), bytes).unwrap());
                let [values, scales] = hidden.each_ref().map(Buffer::ptr);
                let (c, a) = match between {
                    OutFormat::Bf16 => (DeviceC::Float(values), DeviceA::Float { values, pitch: 2 * n }),
                    _ => (
                        DeviceC::Nvfp4 { codes: values, scales, global_scale: values },
                        DeviceA::Nvfp4 { codes: values, scales, global_scale: 0.01 },
                    ),
                };
                let of = |part: fn(&PackedMlp) -> &dualgemm::PackedWeights| {
                    copies.iter().map(part).collect::<Vec<_>>()
                };
                let gate_up = median(&plan.gate_up, &DeviceCall { c, ..call }, &of(|mlp| &mlp.gate_up));
                let down = median(&plan.down, &DeviceCall { a, ..call }, &of(|mlp| &mlp.down));
                println!(
                    "mlp {n}x{k}->{h} m={m} between {}: {whole:.2} us, gate/up {gate_up:.2} + down {down:.2} = {:.3} of it; {}, {}",
                    between.name(),
                    whole / (gate_up + down),
                    plan.gate_up.kernel(),
                    plan.down.kernel(),
                );
            }
        }
    }
}

#[test]
#[ignore = "needs an sm_90 GPU"]
fn mixtures_are_right_and_near_the_reading_of_their_weights() {
    let bytes_per_us = measure::limits(card(), measure::Protocol::default()).unwrap().bytes_per_s / 1e6;
    let oai = Activation::SWIGLU_OAI;
    for (name, format, shape, experts, top_k, activation, bias) in [
        ("deepseek-v3", BlockFormat::Nvfp4, [2048, 7168, 7168], 256, 8, Activation::Silu, false),
        ("gpt-oss", BlockFormat::Mxfp4, [2880, 2880, 2880], 128, 4, oai, true),
    ] {
        let [n, k, h] = shape;
        let two = [mlp(format, shape, bias, 1), mlp(format, shape, bias, 7)];
        let all: Vec<GatedMlp<'_>> = (0..experts).map(|e| two[e % 2].clone()).collect();
        let mut packed = None;
        for tokens in [1, 4, 16, 64, 512] {
            let mut mlp = desc(tokens, shape, format, OutFormat::Bf16, OutFormat::Bf16);
            mlp.gate_up.epilogue.activation = activation;
            let desc = MixtureDesc { mlp, experts, top_k, router: RouterWeights::Output, shared: None };
            let plan = MixturePlan::new(&desc, &Target::cuda(0)).unwrap();
            // Plans for any number of tokens share them.
            let each = || all.iter().cloned().map(|mlp| Ok::<_, dualgemm::Error>(Some(mlp)));
            let packed = packed.get_or_insert_with(|| plan.prepack(each(), None).unwrap());
            let (packed, mut runner) = (&*packed, plan.runner().unwrap());
            let (a, ..) = operands(tokens, k, h);
            let mut bits = random(9);
            // Turns of other experts, so that few come from the cache.
            let turns = 16usize.min(4 * experts / (tokens * top_k)).max(1);
            let ids = |_| {
                let of_token = |_| {
                    let first = bits() as usize;
                    (0..top_k).map(move |j| ((first + j * 29) % experts) as i32)
                };
                (0..tokens).flat_map(of_token).collect::<Vec<i32>>()
            };
            let lists: Vec<Vec<i32>> = (0..turns).map(ids).collect();
            let weights = vec![1.0 / top_k as f32; tokens * top_k];
            let routings: Vec<_> = lists.iter().map(|ids| Routing { ids, weights: &weights }).collect();
            let mut c = vec![bf16::ZERO; tokens * h];
            runner.run(&a, routings[0], packed, OutputMut::Bf16(&mut c), false).unwrap();
            let one = Routing { ids: &lists[0][..top_k], weights: &weights[..top_k] };
            let experts_of: Vec<_> = all.iter().cloned().map(Some).collect();
            let row = dualgemm::check::select_rows(&a, &[0]).unwrap();
            let want = mixture_reference(&desc.mlp, RouterWeights::Output, &row, one, &experts_of);
            assert_near(&first_row(&c, h), &want);
            let us = runner.time(&a, &routings, packed).unwrap().unwrap().median_us;
            let hit =
                lists.iter().map(|ids| ids.iter().collect::<std::collections::HashSet<_>>().len() as f64);
            let hit = hit.sum::<f64>() / turns as f64;
            let bits_per_weight = if format == BlockFormat::Nvfp4 { 4.5 } else { 4.25 };
            let read = hit * (3 * n * k) as f64 * bits_per_weight / 8.0 / bytes_per_us;
            println!(
                "{name} tokens={tokens}: {us:.1} us, {hit:.0} experts hit, reading them {read:.1} us, {:.2} x; {}, {}",
                us / read,
                plan.mlp.gate_up.kernel(),
                plan.mlp.down.kernel(),
            );
        }
    }
}
