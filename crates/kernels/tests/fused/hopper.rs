//! The fused Hopper kernel.

use dualgemm_formats::ScaleLayout;
use dualgemm_gemm::Activation;
use dualgemm_kernels::fused::{Config, Fused, FusedArgs};
use dualgemm_kernels::operands::Operands;
use dualgemm_kernels::parts::operand::Operand;
use dualgemm_kernels::parts::variant::{Out, Products, Scheduler, Variant};
use dualgemm_kernels::sm90a::config::Config as Sm90a;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::Card;

use crate::problem::{self, Shape, check_on, linear, operands, simulator};

const P: Sm90a = Sm90a::new(2, 64, 2, 3, 1);
const D: Sm90a = Sm90a::new(1, 8, 4, 3, 4);
/// A small tile of two warpgroups.
const S: Sm90a = Sm90a::new(2, 16, 2, 2, 1);

fn check(config: Sm90a, variant: &Variant, shape: Shape) {
    problem::check(Config::Sm90a(config), variant, shape);
}

fn check_groups(config: Sm90a, variant: &Variant, sizes: &[u32], weights: (usize, usize)) {
    problem::check_groups(Config::Sm90a(config), variant, sizes, weights);
}

fn silu() -> Variant {
    Variant::new(Activation::Silu.program())
}

fn float() -> Variant {
    problem::float(Activation::Silu)
}

fn nvfp4(scale_layout: ScaleLayout) -> Variant {
    Variant { out: Out::Nvfp4 { scale_layout }, ..silu() }
}

fn scheduled(scheduler: Scheduler) -> Variant {
    Variant { scheduler, ..silu() }
}

#[test]
fn one_tile_and_tails_in_every_dimension_close() {
    for shape in [(64, 64, 256), (65, 72, 336), (3, 37, 80)] {
        check(P, &silu(), shape);
    }
    for shape in [(1, 64, 512), (9, 40, 336), (2, 32, 64)] {
        check(D, &silu(), shape);
    }
}

#[test]
fn every_end_in_three_turns_of_the_ring_close() {
    // The loop's body is one turn, or two where a turn is odd.
    for config in [Sm90a::new(2, 8, 2, 2, 1), Sm90a::new(2, 8, 1, 3, 1), Sm90a::new(1, 8, 2, 3, 2)] {
        for blocks in 1..=3 * (config.stages * config.blocks_per_stage) as usize + 1 {
            check(config, &silu(), (3, 32, 64 * blocks));
        }
    }
}

#[test]
fn every_activation_close() {
    for activation in Activation::EXAMPLES {
        check(D, &Variant::new(activation.program()), (2, 32, 128));
    }
}

#[test]
fn bf16_in_and_every_float_out_bias_and_rounded_products_close() {
    for (config, shape) in [(S, (9, 68, 128)), (D, (5, 36, 256))] {
        for out in [Out::F16, Out::Bf16, Out::F32] {
            check(config, &Variant { compute: HalfFormat::Bf16, out, ..silu() }, shape);
        }
        check(config, &float(), (3, 35, 80));
        check(config, &Variant { bias: true, a_scale: true, ..float() }, shape);
        check(config, &Variant { bias: true, round_gate_up_to_bf16: true, ..float() }, shape);
    }
}

/// One warpgroup adds up all of K: 65 sums, each of which loses what does not fit f32.
#[test]
fn a_long_sum_close() {
    let variant = Variant { bias: true, ..problem::float(Activation::SWIGLU_OAI) };
    check(Sm90a::new(2, 8, 2, 10, 1).two_per_sm(), &variant, (33, 130, 1040));
}

#[test]
fn persistent_close() {
    // More tiles than the card has multiprocessors; the last stage holds one block of two.
    check(Sm90a::new(2, 8, 2, 2, 1), &scheduled(Scheduler::Persistent), (9, 4400, 192));
    check(Sm90a::new(1, 8, 2, 3, 2), &scheduled(Scheduler::Persistent), (9, 2200, 192));
}

#[test]
fn stream_k_close_and_repeatable() {
    check(S, &scheduled(Scheduler::StreamK), (40, 136, 720));
    check(D, &scheduled(Scheduler::StreamK), (9, 72, 2048));
}

/// Each CTA of a pair has half of a stage's blocks of their common row group; of the last stage maybe none.
#[test]
fn pairs_with_a_row_group_in_common_close() {
    for config in [Sm90a::new(2, 16, 2, 3, 1).common(), Sm90a::new(3, 8, 4, 2, 1).common()] {
        for blocks in 1..=4 * (config.stages * config.blocks_per_stage) as usize + 1 {
            check(config, &silu(), (3, 32 * config.row_groups as usize, 64 * blocks));
        }
    }
    // A pair that is not full, several pairs and tiles of tokens, tails.
    let config = Sm90a::new(2, 16, 2, 3, 1).common();
    let more = Variant { bias: true, a_scale: true, ..float() };
    check(config, &more, (33, 212, 592));
    check(config, &nvfp4(ScaleLayout::Sf128x4), (17, 272, 640));
    check(config, &Variant { compute: HalfFormat::Bf16, out: Out::Bf16, ..silu() }, (9, 97, 528));
    check(config, &linear(true), (20, 250, 640));
    check(Sm90a::new(4, 64, 4, 3, 1).common(), &silu(), (64, 224, 1408));
}

#[test]
fn two_ctas_that_split_k_close() {
    for (shape, stages) in [((17, 68, 448), 2), ((5, 32, 336), 3), ((3, 32, 64), 2)] {
        check(Sm90a::new(2, 16, 2, stages, 1).split_k(), &silu(), shape);
        check(Sm90a::new(2, 16, 2, 3, 2).split_k(), &float(), shape);
    }
}

#[test]
fn gate_and_up_in_launches_of_their_own_equal_one_launch_exact() {
    let up = |variant| Variant { products: Products::Up, ..variant };
    check(P, &up(silu()), (65, 200, 336));
    check(P, &up(Variant { bias: true, ..float() }), (3, 37, 80));
    for config in [D, S.split_k(), Sm90a::new(2, 16, 2, 3, 2).split_k()] {
        check(config, &up(silu()), (17, 140, 448));
        let bf16 = Variant { compute: HalfFormat::Bf16, out: Out::Bf16, bias: true, ..silu() };
        check(config, &up(bf16), (9, 35, 80));
    }
    for config in [S, D] {
        let rounded = Variant { round_gate_up_to_bf16: true, ..nvfp4(ScaleLayout::Linear) };
        check(config, &up(rounded), (9, 80, 128));
    }
    check(Sm90a::new(1, 24, 2, 3, 2), &up(Variant::new(Activation::SWIGLU_OAI.program())), (21, 70, 144));
}

#[test]
fn linear_layers_close() {
    let f16 = || Variant { out: Out::F16, ..linear(false) };
    check(P, &f16(), (65, 200, 336));
    check(P, &linear(true), (3, 37, 80));
    for config in [D, S.split_k(), Sm90a::new(2, 16, 2, 3, 2).split_k()] {
        check(config, &f16(), (17, 140, 448));
        check(config, &linear(true), (9, 35, 80));
    }
    check_groups(D, &linear(true), &[0, 9, 0, 1, 8, 0], (72, 256));
    let scheduled = |scheduler| Variant { scheduler, ..linear(true) };
    check_groups(Sm90a::new(2, 8, 2, 2, 1), &scheduled(Scheduler::Persistent), &[3, 0, 17], (4000, 64));
    check(S, &scheduled(Scheduler::StreamK), (40, 264, 720));
    check(D, &scheduled(Scheduler::StreamK), (9, 136, 2048));
}

#[test]
fn nvfp4_out_is_the_cpu_paths_exact() {
    check(S, &nvfp4(ScaleLayout::Sf128x4), (9, 80, 128));
    check(D, &nvfp4(ScaleLayout::Linear), (9, 48, 256));
    check(S.split_k(), &nvfp4(ScaleLayout::Sf8x4), (17, 32, 256));
    check(Sm90a::new(1, 16, 2, 3, 2).split_k(), &nvfp4(ScaleLayout::Linear), (17, 32, 256));
}

#[test]
fn groups_with_empty_ones_and_tails_close() {
    check_groups(D, &silu(), &[0, 9, 0, 1, 8, 0], (40, 256));
    let many: Vec<u32> = (0..35).map(|group| group % 3).collect();
    check_groups(D, &Variant { bias: true, ..silu() }, &many, (32, 64));
    check_groups(Sm90a::new(2, 8, 2, 2, 1), &scheduled(Scheduler::Persistent), &[3, 0, 17], (2000, 64));
}

#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    let (gpu, config) = (simulator(Card::H100), Config::Sm90a(D));
    let load = |variant: &Variant| Fused::new(&gpu, config, variant);
    let kernel = load(&silu().for_weights(40, 64)).unwrap();
    let (a, weights) = operands(&config, &silu(), 1, (2, 32, 64));
    let there = Operands::upload(&kernel, &a, &weights, &[]).unwrap();
    let args = there.args;
    let message = |args: &FusedArgs| kernel.spec(args).unwrap_err().to_string();
    let found = message(&FusedArgs { size: (2, 36, 64), ..args });
    assert_eq!(found, "C is N = 36; the problem asks for a multiple of 8, which the kernel was made for");
    assert_eq!(
        message(&FusedArgs { size: (2, 32, 128), ..args }),
        "A is [2, 64]; the problem asks for [2, 128]"
    );
    let mut moved = args;
    moved.a.codes = args.a.codes.offset(2);
    let found = message(&moved);
    assert!(found.starts_with("A is at 0x") && found.ends_with("on a multiple of 16 bytes"), "{found}");
    for (variant, rule) in [
        (
            Variant { grouped: true, ..scheduled(Scheduler::StreamK) },
            "grouped problems run on the grid or persistent",
        ),
        (
            Variant { products: Products::Up, ..scheduled(Scheduler::Persistent) },
            "gate and up apart are products of one problem on the grid scheduler",
        ),
        (Variant { codes: Some(ScaleLayout::Linear), ..silu() }, "it does not expand codes of A"),
    ] {
        let message = load(&variant).unwrap_err().to_string();
        assert!(message.starts_with("sm90a fused: ") && message.contains(rule), "{message}");
    }
    let up = load(&Variant { products: Products::Up, ..silu() }.for_weights(32, 64)).unwrap();
    let message = up.spec(&args).unwrap_err().to_string();
    assert!(message.starts_with("gate's sums is at "), "{message}");
}

/// The shapes that a simulator takes too long for, every configuration, on a card.
#[test]
#[ignore = "needs sm_90a"]
fn on_a_card_close_and_repeatable() {
    let gpu = dualgemm_cuda::Cuda::open(0).unwrap();
    let check = |config, variant: &Variant, (m, n, k): Shape, launches| {
        check_on(&gpu, Config::Sm90a(config), variant, &[m as u32], (n, k), launches);
    };
    let shapes =
        [(1, 200, 464), (2, 513, 464), (15, 96, 1024), (16, 257, 464), (17, 1000, 2048), (64, 520, 464)];
    let tall = [(65, 200, 464), (127, 193, 1024), (129, 513, 464), (255, 1000, 2048)];
    for config in Sm90a::MENU {
        for shape in shapes.iter().chain(&tall).filter(|shape| shape.0 <= 3 * config.tokens as usize) {
            check(config, &silu(), *shape, 5);
        }
        check(config, &nvfp4(ScaleLayout::Sf128x4), (130, 1040, 464), 1);
        let float = Variant { bias: true, ..problem::float(Activation::SWIGLU_OAI) };
        check(config, &float, (33, 130, 1040), 2);
        check(config, &Variant { compute: HalfFormat::Bf16, ..float }, (33, 130, 1040), 2);
        if !config.common {
            for shape in [(64, 520, 464), (130, 1000, 2048)] {
                check(config, &Variant { products: Products::Up, ..silu() }, shape, 1);
            }
        }
        if config.cluster() == 1 {
            let sizes = [0, 70, 1, 0, 130, 33, 0];
            check_on(&gpu, Config::Sm90a(config), &silu(), &sizes, (500, 464), 1);
        }
    }
    for scheduler in [Scheduler::Persistent, Scheduler::StreamK] {
        for config in [Sm90a::new(1, 8, 4, 8, 4), Sm90a::new(2, 128, 2, 4, 1), Sm90a::new(2, 256, 1, 5, 1)] {
            for shape in [(1, 4096, 1024), (130, 5000, 464), (255, 513, 7168)] {
                check(config, &scheduled(scheduler), shape, 5);
            }
        }
    }
}

/// A in blocks of 64 columns, as a kernel before expands it, gives the bits of A row by row.
#[test]
fn blocks_of_columns_are_read_as_rows_exact() {
    let (gpu, (m, n, k)) = (simulator(Card::H100), (70, 72, 448));
    let variant = silu().for_weights(n, k);
    let load = |config| Fused::new(&gpu, Config::Sm90a(config), &variant).unwrap();
    let kernel = load(Sm90a::new(1, 64, 3, 3, 3));
    let (a, weights) = operands(kernel.config(), &variant, 1, (m, n, k));
    let there = Operands::upload(&kernel, &a, &weights, &[]).unwrap();
    let run = |args: &FusedArgs| {
        // SAFETY: the operands were allocated here, as large as the launch says.
        unsafe { dualgemm_device::Device::launch(&gpu, &kernel.spec(args).unwrap()) }.unwrap();
        there.read_c().unwrap()
    };
    let rows = run(&there.args);
    let mut bytes = vec![0; 2 * m * k];
    dualgemm_device::Device::copy_from(&gpu, &mut bytes, there.args.a.codes).unwrap();
    let blocks: Vec<u8> = (0..k / 64)
        .flat_map(|block| (0..m).map(move |row| 2 * row * k + 128 * block))
        .flat_map(|at| bytes[at..at + 128].to_vec())
        .collect();
    dualgemm_device::Device::copy_to(&gpu, there.args.a.codes, &blocks).unwrap();
    dualgemm_device::Device::memset(&gpu, there.args.output.c, 0xEE, rows.len()).unwrap();
    let blocked = Operand { pitch: 128, blocked: true, ..there.args.a };
    let args = FusedArgs { a: blocked, ..there.args };
    assert!(run(&args) == rows && there.guard_is_whole().unwrap());
    let refused = load(Sm90a::new(2, 128, 2, 4, 1)).spec(&args).unwrap_err().to_string();
    assert!(refused.contains("blocks of 64 columns"), "{refused}");
}

/// Two launches of different tiles share a problem: the bits of both are those of whole launches.
#[test]
fn ranges_of_features_are_parts_of_the_whole_exact() {
    let (gpu, (m, n, k)) = (simulator(Card::H100), (40, 192, 144));
    let variant = Variant { bias: true, ..silu() }.for_weights(n, k);
    let [large, small] = [Sm90a::new(4, 16, 2, 2, 1), Sm90a::new(2, 32, 2, 2, 1)]
        .map(|config| Fused::new(&gpu, Config::Sm90a(config), &variant).unwrap());
    let (a, weights) = operands(large.config(), &variant, 1, (m, n, k));
    let there = Operands::upload(&large, &a, &weights, &[]).unwrap();
    let launch = |spec| {
        // SAFETY: the operands were allocated here, as large as the launch says.
        unsafe { dualgemm_device::Device::launch(&gpu, &spec) }.unwrap();
    };
    launch(large.spec(&there.args).unwrap());
    let whole = there.read_c().unwrap();
    dualgemm_device::Device::memset(&gpu, there.args.output.c, 0xEE, whole.len()).unwrap();
    launch(large.spec_of(&there.args, 0..128).unwrap());
    launch(small.spec_of(&there.args, 128..192).unwrap());
    assert!(there.read_c().unwrap() == whole && there.guard_is_whole().unwrap());
    let refused = |range| large.spec_of(&there.args, range).unwrap_err().to_string();
    for (range, rule) in [(16..144, "multiple of 32"), (128..192, "whole tiles"), (128..256, "within N")] {
        assert!(refused(range.clone()).contains(rule), "{}", refused(range));
    }
}
