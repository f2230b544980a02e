//! The fused Hopper kernel: operands that it refuses, a card, and launches that share a problem.

use dualgemm_device::Device;
use dualgemm_formats::ScaleLayout;
use dualgemm_gemm::Activation;
use dualgemm_kernels::fused::{Config, Fused, FusedArgs};
use dualgemm_kernels::operands::Operands;
use dualgemm_kernels::parts::operand::Operand;
use dualgemm_kernels::parts::variant::{Out, Products, Scheduler, Variant};
use dualgemm_kernels::sm90a::config::Config as Sm90a;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::Card;

use crate::problem::{self, Shape, check_on, operands, simulator};

fn silu() -> Variant {
    Variant::new(Activation::Silu.program())
}

#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    let (gpu, config) = (simulator(Card::H100), Config::Sm90a(Sm90a::new(1, 8, 4, 3, 4)));
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
        let out = Out::Nvfp4 { scale_layout: ScaleLayout::Sf128x4 };
        check(config, &Variant { out, ..silu() }, (130, 1040, 464), 1);
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
                check(config, &Variant { scheduler, ..silu() }, shape, 5);
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
    let launch = |spec| gpu.launch(&spec).unwrap();
    launch(large.spec(&there.args).unwrap());
    let whole = there.read_c().unwrap();
    gpu.memset(there.args.output.c, 0xEE, whole.len()).unwrap();
    launch(large.spec_of(&there.args, 0..128).unwrap());
    launch(small.spec_of(&there.args, 128..192).unwrap());
    assert!(there.read_c().unwrap() == whole && there.guard_is_whole().unwrap());
    let refused = |range| large.spec_of(&there.args, range).unwrap_err().to_string();
    for (range, rule) in [(16..144, "multiple of 32"), (128..192, "whole tiles"), (128..256, "within N")] {
        assert!(refused(range.clone()).contains(rule), "{}", refused(range));
    }
}
