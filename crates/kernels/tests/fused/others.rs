//! Operands that the kernel by `mma.sync` and the one on a checkpoint's own layout refuse.

use dualgemm_gemm::Activation;
use dualgemm_kernels::fused::{Config, Fused, Weights};
use dualgemm_kernels::operands::Operands;
use dualgemm_kernels::parts::variant::Variant;
use dualgemm_kernels::plain::config::Config as Plain;
use dualgemm_kernels::sm80::config::Config as Sm80;
use dualgemm_sim::Card;

use crate::problem::{operands, simulator};

fn silu() -> Variant {
    Variant::new(Activation::Silu.program())
}

#[test]
fn what_a_kernel_does_not_have_is_refused_by_name() {
    let gpu = simulator(Card::H100);
    let plain = Config::Plain(Plain::MENU[0]);
    let kernel = Fused::new(&gpu, plain, &silu()).unwrap();
    let (a, weights) = operands(&plain, &silu(), 1, (1, 32, 80));
    let mut args = Operands::upload(&kernel, &a, &weights, &[]).unwrap().args;
    let message = kernel.spec(&args).unwrap_err().to_string();
    assert_eq!(
        message,
        "gate: row stride in bytes is 40; the problem asks for a multiple of 16, at least 40"
    );
    let Weights::Rows(halves) = &mut args.weights else { panic!("rows") };
    halves.iter_mut().for_each(|half| half.pitch = 48);
    let message = kernel.spec(&args).unwrap_err().to_string();
    assert!(message.contains("K a multiple of 32"), "{message}");
    let message = kernel.spec_of(&args, 0..32).unwrap_err().to_string();
    assert_eq!(message, "sm90a plain: ranges of features are for Hopper's kernel");
    let on_pack = Fused::new(&gpu, Config::Sm80(Sm80::MENU[0]), &silu()).unwrap();
    let message = on_pack.spec(&args).unwrap_err().to_string();
    assert_eq!(message, "gate and up is rows; the problem asks for the pack, which the kernel reads");
}
