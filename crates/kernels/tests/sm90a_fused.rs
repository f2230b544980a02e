//! The fused Hopper kernel in the simulator, all checkers on, against the f64 reference.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_cuda::Cuda;
use dualgemm_device::{Device, DevicePtr};
use dualgemm_formats::quantize::Quantizer;
use dualgemm_formats::{
    BlockFormat, FloatMatrix, FloatType, GlobalScale, Matrix, Producer, ScaleLayout, Search,
};
use dualgemm_gemm::{
    AOperand, Activation, Bounded, Comparison, Epilogue, GateUp, Linear, bounded_reference, reference,
};
use dualgemm_kernels::sm90a::config::Config;
use dualgemm_kernels::sm90a::host::{Fused, FusedArgs};
use dualgemm_kernels::sm90a::operands::Operands;
use dualgemm_kernels::sm90a::pack::Pack;
use dualgemm_kernels::sm90a::variant::{Out, Products, Scheduler, Variant};
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::{Checks, Gpu};

type Shape = (usize, usize, usize);

fn operands(variant: &Variant, (m, n, k): Shape) -> (FloatMatrix<'static>, GateUp<'static>) {
    let mut inputs = Inputs::seeded(7);
    let mut half = |name, scale| {
        let sets = (CodeSet::Full, ScaleSet::Unit);
        inputs.quantized(name, BlockFormat::Nvfp4, (n, k), sets, GlobalScale::multiplier(scale)).unwrap()
    };
    let mut weights = GateUp::new(half("gate", 0.011), half("up", 0.023));
    if variant.bias {
        weights.gate_bias = Some((0..n).map(|i| i as f32 / 64.0 - 0.5).collect());
        weights.up_bias = Some((0..n).map(|i| 0.5 - i as f32 / 32.0).collect());
    }
    let ty = match variant.compute {
        HalfFormat::F16 => FloatType::F16,
        HalfFormat::Bf16 => FloatType::Bf16,
    };
    (inputs.floats("a", ty, m, k).unwrap(), weights)
}

fn silu() -> Variant {
    Variant::new(Activation::Silu.program())
}

/// Half a unit in the last place of C, as relative error; f32 has what sums and the activation leave.
fn bound(out: Out) -> f64 {
    match out {
        Out::F16 => 3e-4,
        Out::Bf16 => 2.4e-3,
        Out::F32 | Out::Nvfp4 { .. } => 2e-6,
    }
}

fn epilogue(variant: &Variant, activation: Activation) -> Epilogue {
    Epilogue { activation, round_gate_up_to_bf16: variant.round_gate_up_to_bf16, ..Epilogue::default() }
}

/// Launches several times: each launch leaves the same bits, near the reference, and nothing behind C.
fn check_on(
    gpu: &dyn Device,
    config: Config,
    variant: Variant,
    activation: Activation,
    shape: Shape,
    launches: usize,
) {
    let (m, n, k) = shape;
    let variant = variant.for_weights(n, k);
    let (a, weights) = operands(&variant, shape);
    let kernel = Fused::new(gpu, config, &variant).unwrap();
    let on_device = Operands::upload(gpu, &kernel, &a, &Pack::new(&weights).unwrap()).unwrap();
    let want = reference(&epilogue(&variant, activation), &AOperand::Float(a), 0..m, &weights);
    let mut first = None;
    for _ in 0..launches {
        // SAFETY: the operands were allocated here, as large as the launch says.
        unsafe { kernel.launch(on_device.args()) }.unwrap_or_else(|e| panic!("{kernel:?}: {e}"));
        let bytes = on_device.read_c(gpu).unwrap();
        let got = on_device.read_values(gpu).unwrap();
        let comparison = Comparison::new(&got, &want, n).unwrap();
        assert!(comparison.rel_l2 < bound(variant.out), "{kernel:?} {m}x{n}x{k}: {comparison:?}");
        assert!(on_device.guard_is_whole(gpu).unwrap(), "{kernel:?} {m}x{n}x{k} wrote behind C");
        assert!(first.get_or_insert(bytes.clone()) == &bytes, "{kernel:?} {m}x{n}x{k}: other bits");
        gpu.memset(on_device.args().output.c, 0xEE, bytes.len()).unwrap();
    }
    on_device.free(gpu).unwrap();
}

fn check(config: Config, variant: Variant, shape: Shape) {
    // Twice with stream-K: what a launch leaves behind must not disturb the next one.
    let launches = if variant.scheduler == Scheduler::StreamK { 2 } else { 1 };
    check_on(&simulator(), config, variant, Activation::Silu, shape, launches);
}

fn simulator() -> Gpu {
    Gpu::new(dualgemm_sim::Config::default().checks(Checks::ALL))
}

/// An nvfp4 C is what the CPU path makes of the same kernel's f32 C.
fn check_nvfp4(gpu: &dyn Device, config: Config, layout: ScaleLayout, (m, n, k): Shape) {
    let float = Variant { out: Out::F32, ..silu() }.for_weights(n, k);
    let (a, weights) = operands(&float, (m, n, k));
    let pack = Pack::new(&weights).unwrap();
    let kernel = Fused::new(gpu, config, &float).unwrap();
    let on_device = Operands::upload(gpu, &kernel, &a, &pack).unwrap();
    // SAFETY: the operands were allocated here, as large as the launch says.
    unsafe { kernel.launch(on_device.args()) }.unwrap();
    let values = on_device.read_values(gpu).unwrap();
    on_device.free(gpu).unwrap();
    let scale = 0.003;
    let quantizer =
        Quantizer::new(Producer::Te, GlobalScale::multiplier(scale), FloatType::F32, Search::Plain);
    let want = quantizer.matrix("c", &FloatMatrix::F32(Matrix::new("c", m, n, values).unwrap())).unwrap();
    let want = want.with_scale_layout(layout);

    let variant = Variant { out: Out::Nvfp4 { scale_layout: layout }, ..silu() }.for_weights(n, k);
    let kernel = Fused::new(gpu, config, &variant).unwrap();
    let mut on_device = Operands::upload(gpu, &kernel, &a, &pack).unwrap();
    on_device.args_mut().output.scale = scale;
    // SAFETY: the operands were allocated here, as large as the launch says.
    unsafe { kernel.launch(on_device.args()) }.unwrap_or_else(|e| panic!("{e}"));
    assert!(on_device.read_c(gpu).unwrap() == want.codes(), "{kernel:?}: codes");
    assert!(on_device.read_scales(gpu).unwrap() == want.scales(), "{kernel:?}: scales");
    assert!(on_device.guard_is_whole(gpu).unwrap());
    on_device.free(gpu).unwrap();
}

/// Groups of these sizes, some of them empty, each with weights of its own.
fn check_groups(gpu: &dyn Device, config: Config, variant: Variant, sizes: &[u32], (n, k): (usize, usize)) {
    let variant = Variant { grouped: true, ..variant }.for_weights(n, k);
    let rows: Vec<u32> = std::iter::once(0)
        .chain(sizes.iter().scan(0, |sum, size| Some(*sum + size).inspect(|s| *sum = *s)))
        .collect();
    let m = rows[sizes.len()] as usize;
    let mut inputs = Inputs::seeded(11);
    let weights: Vec<GateUp<'_>> = (0..sizes.len())
        .map(|group| {
            let mut half = |scale| {
                let sets = (CodeSet::Full, ScaleSet::Unit);
                let scale = GlobalScale::multiplier(scale * (group + 1) as f32);
                inputs.quantized("w", BlockFormat::Nvfp4, (n, k), sets, scale).unwrap()
            };
            let mut weights = GateUp::new(half(0.011), half(0.023));
            if variant.bias {
                weights.up_bias = Some((0..n).map(|i| group as f32 - i as f32 / 32.0).collect());
            }
            weights
        })
        .collect();
    let packs: Vec<Pack> = weights.iter().map(|weights| Pack::new(weights).unwrap()).collect();
    let a = inputs.floats("a", FloatType::F16, m, k).unwrap();
    let kernel = Fused::new(gpu, config, &variant).unwrap();
    let mut on_device = Operands::upload_groups(gpu, &kernel, &a, &packs, &rows).unwrap();
    let epilogue = Epilogue { alpha_gate: 0.5, alpha_up: -2.0, ..Epilogue::default() };
    on_device.args_mut().output.alpha = [epilogue.alpha_gate, epilogue.alpha_up];
    // SAFETY: the operands were allocated here, as large as the launch says.
    unsafe { kernel.launch(on_device.args()) }.unwrap_or_else(|e| panic!("{e}"));
    let got = on_device.read_values(gpu).unwrap();
    let a = AOperand::Float(a);
    let want: Vec<f64> = weights
        .iter()
        .zip(rows.windows(2))
        .flat_map(|(weights, rows)| reference(&epilogue, &a, rows[0] as usize..rows[1] as usize, weights))
        .collect();
    let comparison = Comparison::new(&got, &want, n).unwrap();
    assert!(comparison.rel_l2 < bound(variant.out), "{kernel:?}: {comparison:?}");
    assert!(on_device.guard_is_whole(gpu).unwrap());
    on_device.free(gpu).unwrap();
}

/// Gate in one launch and up in a second one, whose epilogue reads gate's sums: the bits of one launch, near the
/// reference.
fn check_apart(gpu: &dyn Device, config: Config, variant: Variant, activation: Activation, shape: Shape) {
    let (m, n, k) = shape;
    let both = Variant { program: activation.program(), ..variant }.for_weights(n, k);
    let up = Variant { products: Products::Up, ..both.clone() };
    let (a, weights) = operands(&both, shape);
    let kernel = Fused::new(gpu, config, &both).unwrap();
    let on_device = Operands::upload(gpu, &kernel, &a, &Pack::new(&weights).unwrap()).unwrap();
    // SAFETY: the operands were allocated here, as large as the launch says.
    unsafe { kernel.launch(on_device.args()) }.unwrap();
    let whole = (on_device.read_c(gpu).unwrap(), on_device.read_scales(gpu).unwrap());
    let bias = on_device.args().output.bias;

    let [gate, up] = [up.gate_before(), up].map(|variant| Fused::new(gpu, config, &variant).unwrap());
    let [gate_pack, up_pack] = [&weights.gate, &weights.up].map(|half| Pack::of_matrix(half).unwrap());
    let mut apart = Operands::upload(gpu, &up, &a, &up_pack).unwrap();
    let output = &mut apart.args_mut().output;
    (output.bias, output.alpha) = (bias, [gate_pack.alpha()[0], up_pack.alpha()[0]]);
    let pack = gpu.alloc(gate_pack.bytes().len()).unwrap();
    gpu.copy_to(pack, gate_pack.bytes()).unwrap();
    let args = *apart.args();
    // SAFETY: the operands were allocated here, as large as the launch says.
    unsafe { gate.launch(&FusedArgs { pack, ..args }) }
        .unwrap_or_else(|e| panic!("{gate:?} {m}x{n}x{k}: {e}"));
    // SAFETY: the operands were allocated here, as large as the launch says.
    unsafe { up.launch(&args) }.unwrap_or_else(|e| panic!("{up:?} {m}x{n}x{k}: {e}"));
    let got = apart.read_values(gpu).unwrap();
    if !got.is_empty() {
        let want = reference(&epilogue(&both, activation), &AOperand::Float(a), 0..m, &weights);
        let comparison = Comparison::new(&got, &want, n).unwrap();
        assert!(comparison.rel_l2 < bound(both.out), "{up:?} {m}x{n}x{k}: {comparison:?}");
    }
    assert!((apart.read_c(gpu).unwrap(), apart.read_scales(gpu).unwrap()) == whole, "{up:?} {m}x{n}x{k}");
    assert!(apart.guard_is_whole(gpu).unwrap(), "{up:?} {m}x{n}x{k} wrote behind C");
    gpu.free(pack).unwrap();
    apart.free(gpu).unwrap();
    on_device.free(gpu).unwrap();
}

/// Linear layers, one for each group of rows: every value within the bound of its reference.
fn check_linear(gpu: &dyn Device, config: Config, variant: Variant, sizes: &[u32], (n, k): (usize, usize)) {
    let variant =
        Variant { products: Products::Linear, grouped: sizes.len() > 1, ..variant }.for_weights(n, k);
    let rows: Vec<u32> = (0..=sizes.len()).map(|g| sizes[..g].iter().sum()).collect();
    let mut inputs = Inputs::seeded(17);
    let layers: Vec<Linear<'_>> = (0..sizes.len())
        .map(|group| {
            let scale = GlobalScale::multiplier(0.011 * (group + 1) as f32);
            let sets = (CodeSet::Full, ScaleSet::Unit);
            let weight = inputs.quantized("w", BlockFormat::Nvfp4, (n, k), sets, scale).unwrap();
            let bias = (0..n).map(|i| group as f32 - i as f32 / 32.0).collect();
            Linear { weight, bias: variant.bias.then_some(bias) }
        })
        .collect();
    let packs: Vec<Pack> = layers.iter().map(|layer| Pack::of_matrix(&layer.weight).unwrap()).collect();
    let a = inputs.floats("a", FloatType::F16, rows[sizes.len()] as usize, k).unwrap();
    let kernel = Fused::new(gpu, config, &variant).unwrap();
    let mut on_device = match &packs[..] {
        [pack] => Operands::upload(gpu, &kernel, &a, pack),
        _ => Operands::upload_groups(gpu, &kernel, &a, &packs, &rows),
    }
    .unwrap();
    if variant.bias {
        let all: Vec<u8> =
            layers.iter().flat_map(|l| l.bias.as_deref().unwrap()).flat_map(|b| b.to_le_bytes()).collect();
        gpu.copy_to(on_device.args().output.bias[0], &all).unwrap();
    }
    let epilogue = Epilogue { alpha_gate: 0.5, ..Epilogue::default() };
    on_device.args_mut().output.alpha[0] *= 0.5;
    // SAFETY: the operands were allocated here, as large as the launch says.
    unsafe { kernel.launch(on_device.args()) }.unwrap_or_else(|e| panic!("{kernel:?}: {e}"));
    let got = on_device.read_values(gpu).unwrap();
    let a = AOperand::Float(a);
    let of_group = |(layer, rows): (&Linear<'_>, &[u32])| {
        bounded_reference(&epilogue, &a, rows[0] as usize..rows[1] as usize, layer)
    };
    let want: Vec<Bounded> = layers.iter().zip(rows.windows(2)).flat_map(of_group).collect();
    let comparison = Comparison::new(&got, &want, n).unwrap();
    assert!(comparison.rel_l2 < bound(variant.out), "{kernel:?}: {comparison:?}");
    if variant.out == Out::F32 {
        let within = |(got, want): (&f32, &Bounded)| (f64::from(*got) - want.value).abs() <= want.error;
        assert!(got.iter().zip(&want).all(within), "{kernel:?}");
    }
    assert!(on_device.guard_is_whole(gpu).unwrap());
    on_device.free(gpu).unwrap();
}

const P: Config = Config::new(2, 64, 2, 3, 1);
const D: Config = Config::new(1, 8, 4, 3, 4);

#[test]
fn one_tile_close() {
    check(P, silu(), (64, 64, 256));
}

#[test]
fn tails_in_every_dimension_close() {
    check(P, silu(), (65, 72, 336));
    check(P, silu(), (3, 37, 80));
}

#[test]
fn k_groups_close() {
    check(D, silu(), (1, 64, 512));
    check(D, silu(), (9, 40, 336));
    check(D, silu(), (2, 32, 64));
}

#[test]
fn every_end_in_three_turns_of_the_ring_close() {
    // The loop's body is one turn, or two where a turn is odd.
    let configs = [Config::new(2, 8, 2, 2, 1), Config::new(2, 8, 1, 3, 1), Config::new(1, 8, 2, 3, 2)];
    for config in configs {
        for blocks in 1..=3 * (config.stages * config.blocks_per_stage) as usize + 1 {
            check(config, silu(), (3, 32, 64 * blocks));
        }
    }
}

#[test]
fn every_activation_close() {
    for activation in Activation::EXAMPLES {
        check_on(&simulator(), D, Variant::new(activation.program()), activation, (2, 32, 128), 1);
    }
}

#[test]
fn bf16_in_and_every_float_out_close() {
    for (config, shape) in [(Config::new(2, 16, 2, 2, 1), (9, 68, 128)), (D, (5, 36, 256))] {
        for out in [Out::F16, Out::Bf16, Out::F32] {
            check(config, Variant { compute: HalfFormat::Bf16, out, ..silu() }, shape);
        }
        check(config, Variant { out: Out::F32, ..silu() }, (3, 35, 80));
    }
}

#[test]
fn bias_and_rounded_products_close() {
    for (config, shape) in [(Config::new(2, 16, 2, 2, 1), (9, 68, 128)), (D, (5, 36, 256))] {
        check(config, Variant { bias: true, out: Out::F32, ..silu() }, shape);
        check(config, Variant { bias: true, out: Out::F32, round_gate_up_to_bf16: true, ..silu() }, shape);
    }
}

#[test]
fn persistent_close() {
    let persistent = || Variant { scheduler: Scheduler::Persistent, ..silu() };
    // More tiles than the card has multiprocessors; the last stage holds one block of two.
    check(Config::new(2, 8, 2, 2, 1), persistent(), (9, 4400, 192));
    check(Config::new(1, 8, 2, 3, 2), persistent(), (9, 2200, 192));
}

#[test]
fn stream_k_close_and_repeatable() {
    let stream = || Variant { scheduler: Scheduler::StreamK, ..silu() };
    check(Config::new(2, 16, 2, 2, 1), stream(), (40, 136, 720));
    check(D, stream(), (9, 72, 2048));
}

#[test]
fn two_ctas_that_split_k_close() {
    for (shape, stages) in [((17, 68, 448), 2), ((5, 32, 336), 3), ((3, 32, 64), 2)] {
        check(Config::new(2, 16, 2, stages, 1).split_k(), silu(), shape);
        check(Config::new(2, 16, 2, 3, 2).split_k(), Variant { out: Out::F32, ..silu() }, shape);
    }
}

#[test]
fn gate_and_up_in_launches_of_their_own_equal_one_launch_exact() {
    let gpu = simulator();
    let check = |config, variant, shape| check_apart(&gpu, config, variant, Activation::Silu, shape);
    check(P, silu(), (65, 200, 336));
    check(P, Variant { out: Out::F32, bias: true, ..silu() }, (3, 37, 80));
    for config in [D, Config::new(2, 16, 2, 2, 1).split_k(), Config::new(2, 16, 2, 3, 2).split_k()] {
        check(config, silu(), (17, 140, 448));
        check(
            config,
            Variant { compute: HalfFormat::Bf16, out: Out::Bf16, bias: true, ..silu() },
            (9, 35, 80),
        );
    }
    for config in [Config::new(2, 16, 2, 2, 1), D] {
        let out = Out::Nvfp4 { scale_layout: ScaleLayout::Linear };
        check(config, Variant { out, round_gate_up_to_bf16: true, ..silu() }, (9, 80, 128));
    }
    let oai = Activation::SWIGLU_OAI;
    check_apart(&gpu, Config::new(1, 24, 2, 3, 2), silu(), oai, (21, 70, 144));
}

#[test]
fn linear_layers_close() {
    let gpu = simulator();
    let check = |config, variant, sizes: &[u32], shape| check_linear(&gpu, config, variant, sizes, shape);
    let wide = || Variant { out: Out::F32, bias: true, ..silu() };
    check(P, silu(), &[65], (200, 336));
    check(P, wide(), &[3], (37, 80));
    for config in [D, Config::new(2, 16, 2, 2, 1).split_k(), Config::new(2, 16, 2, 3, 2).split_k()] {
        check(config, silu(), &[17], (140, 448));
        check(config, wide(), &[9], (35, 80));
    }
    check(D, wide(), &[0, 9, 0, 1, 8, 0], (72, 256));
    let scheduled = |scheduler| Variant { scheduler, ..wide() };
    check(Config::new(2, 8, 2, 2, 1), scheduled(Scheduler::Persistent), &[3, 0, 17], (4000, 64));
    check(Config::new(2, 16, 2, 2, 1), scheduled(Scheduler::StreamK), &[40], (264, 720));
    check(D, scheduled(Scheduler::StreamK), &[9], (136, 2048));
}

#[test]
fn nvfp4_out_is_the_cpu_paths_exact() {
    check_nvfp4(&simulator(), Config::new(2, 16, 2, 2, 1), ScaleLayout::Sf128x4, (9, 80, 128));
    check_nvfp4(&simulator(), D, ScaleLayout::Linear, (9, 48, 256));
    check_nvfp4(&simulator(), Config::new(2, 16, 2, 2, 1).split_k(), ScaleLayout::Sf8x4, (17, 32, 256));
    check_nvfp4(&simulator(), Config::new(1, 16, 2, 3, 2).split_k(), ScaleLayout::Linear, (17, 32, 256));
}

#[test]
fn groups_with_empty_ones_and_tails_close() {
    check_groups(&simulator(), D, silu(), &[0, 9, 0, 1, 8, 0], (40, 256));
    let many: Vec<u32> = (0..35).map(|group| group % 3).collect();
    check_groups(&simulator(), D, Variant { bias: true, ..silu() }, &many, (32, 64));
    let persistent = Variant { scheduler: Scheduler::Persistent, ..silu() };
    check_groups(&simulator(), Config::new(2, 8, 2, 2, 1), persistent, &[3, 0, 17], (2000, 64));
}

#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    let gpu = simulator();
    let (a, weights) = operands(&silu(), (2, 32, 64));
    let (wide, _) = operands(&silu(), (2, 32, 80));
    let pack = Pack::new(&weights).unwrap();
    let kernel = Fused::new(&gpu, D, &silu().for_weights(40, 64)).unwrap();
    let message = Operands::upload(&gpu, &kernel, &wide, &pack).unwrap_err().to_string();
    assert_eq!(message, "A is [2, 80]; the problem asks for [M, 64], as the weights are");
    let on_device = Operands::upload(&gpu, &kernel, &a, &pack).unwrap();
    let args = *on_device.args();
    // SAFETY: the operands were allocated here, as large as the launch says.
    let message = unsafe { kernel.launch(&FusedArgs { n: 36, ..args }) }.unwrap_err().to_string();
    assert_eq!(message, "C is N = 36; the problem asks for a multiple of 8, which the kernel was made for");
    // SAFETY: the operands were allocated here, as large as the launch says.
    let message =
        unsafe { kernel.launch(&FusedArgs { a: args.a.offset(2), ..args }) }.unwrap_err().to_string();
    assert!(message.starts_with("A is at 0x") && message.ends_with("on a multiple of 16 bytes"), "{message}");
    let grouped = Variant { grouped: true, scheduler: Scheduler::StreamK, ..silu() };
    let message = Fused::new(&gpu, D, &grouped).unwrap_err().to_string();
    assert_eq!(message, "sm90a fused: grouped problems run on the grid or persistent scheduler");
    let apart = |scheduler| Variant { products: Products::Up, scheduler, ..silu() }.for_weights(32, 64);
    let message = Fused::new(&gpu, D, &apart(Scheduler::Persistent)).unwrap_err().to_string();
    assert!(message.ends_with("gate and up apart are products of one problem on the grid scheduler"));
    let kernel = Fused::new(&gpu, D, &apart(Scheduler::Grid)).unwrap();
    // SAFETY: the operands were allocated here, as large as the launch says.
    let message =
        unsafe { kernel.launch(&FusedArgs { gate_sums: DevicePtr::NULL, ..args }) }.unwrap_err().to_string();
    assert!(message.starts_with("gate's sums is at "), "{message}");
}

/// The shapes that a simulator takes too long for, every configuration, on a card.
#[test]
#[ignore = "needs sm_90a"]
fn on_a_card_close_and_repeatable() {
    let gpu = Cuda::open(0).unwrap();
    let shapes =
        [(1, 200, 464), (2, 513, 464), (15, 96, 1024), (16, 257, 464), (17, 1000, 2048), (64, 520, 464)];
    let tall = [(65, 200, 464), (127, 193, 1024), (129, 513, 464), (255, 1000, 2048)];
    for config in Config::MENU {
        for shape in shapes.iter().chain(&tall).filter(|shape| shape.0 <= 3 * config.tokens as usize) {
            check_on(&gpu, config, silu(), Activation::Silu, *shape, 5);
        }
        check_nvfp4(&gpu, config, ScaleLayout::Sf128x4, (130, 1040, 464));
        let oai = Activation::SWIGLU_OAI;
        let float = Variant { out: Out::F32, bias: true, ..Variant::new(oai.program()) };
        check_on(&gpu, config, float.clone(), oai, (33, 130, 1040), 2);
        check_on(&gpu, config, Variant { compute: HalfFormat::Bf16, ..float }, oai, (33, 130, 1040), 2);
        for (m, n, k) in [(64, 520, 464), (130, 1000, 2048)] {
            check_apart(&gpu, config, silu(), Activation::Silu, (m, n, k));
        }
        if config.k_split == 1 {
            let sizes = [0, 70, 1, 0, 130, 33, 0];
            check_groups(&gpu, config, silu(), &sizes, (500, 464));
        }
    }
    for scheduler in [Scheduler::Persistent, Scheduler::StreamK] {
        for config in [Config::new(1, 8, 4, 8, 4), Config::new(2, 128, 2, 4, 1), Config::new(2, 256, 1, 5, 1)]
        {
            for shape in [(1, 4096, 1024), (130, 5000, 464), (255, 513, 7168)] {
                check_on(&gpu, config, Variant { scheduler, ..silu() }, Activation::Silu, shape, 5);
            }
        }
    }
}

/// Two launches of different tiles share a problem: the bits of both are those of whole launches.
#[test]
fn ranges_of_features_are_parts_of_the_whole_exact() {
    let (m, n, k) = (40, 192, 144);
    let gpu = simulator();
    let variant = Variant { bias: true, ..silu() }.for_weights(n, k);
    let (a, weights) = operands(&variant, (m, n, k));
    let pack = Pack::new(&weights).unwrap();
    let [large, small] = [Config::new(4, 16, 2, 2, 1), Config::new(2, 32, 2, 2, 1)]
        .map(|config| Fused::new(&gpu, config, &variant).unwrap());
    let on_device = Operands::upload(&gpu, &large, &a, &pack).unwrap();
    // SAFETY: the operands were allocated here, as large as the launch says.
    unsafe { large.launch(on_device.args()) }.unwrap();
    let whole = on_device.read_c(&gpu).unwrap();
    gpu.memset(on_device.args().output.c, 0xEE, whole.len()).unwrap();
    for (kernel, range) in [(&large, 0..128), (&small, 128..192)] {
        // SAFETY: the operands were allocated here, as large as the launch says.
        unsafe { gpu.launch(&kernel.spec_of(on_device.args(), range).unwrap()) }.unwrap();
    }
    assert!(on_device.read_c(&gpu).unwrap() == whole);
    assert!(on_device.guard_is_whole(&gpu).unwrap());
    let refused =
        |range: std::ops::Range<usize>| large.spec_of(on_device.args(), range).unwrap_err().to_string();
    assert!(refused(16..144).contains("multiple of 32"), "{}", refused(16..144));
    assert!(refused(128..192).contains("whole tiles"), "{}", refused(128..192));
    assert!(refused(128..256).contains("within N"), "{}", refused(128..256));
}
