//! Operands that Blackwell's kernels refuse.

use dualgemm_device::DevicePtr;
use dualgemm_formats::ScaleLayout;
use dualgemm_gemm::Activation;
use dualgemm_kernels::fused::{Config, Fused, FusedArgs, Weights};
use dualgemm_kernels::operands::Operands;
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::rows::Output;
use dualgemm_kernels::parts::variant::{Out, Variant};
use dualgemm_kernels::sm100a::config::{Config as Sm100, Side};
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::Card;

use crate::problem::{float, operands, simulator};

const HALVES: [HalfFormat; 2] = [HalfFormat::F16, HalfFormat::Bf16];

pub const TOKENS: Sm100 = Sm100 {
    formats: Formats::NVFP4,
    side: Side::Tokens,
    n: 64,
    cta_group: 1,
    split_k: 1,
    stages: 2,
    accumulators: 2,
};
pub const FEATURES: Sm100 = Sm100 { side: Side::Features, n: 8, accumulators: 1, ..TOKENS };
pub const WIDE: Sm100 = Sm100 { formats: Formats::Wide(HalfFormat::F16), n: 16, ..FEATURES };

#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    let (gpu, variant) = (simulator(Card::B200), float(Activation::Silu).for_weights(40, 96));
    let config = |of| Config::Sm100a(of);
    let wide = |half| config(Sm100 { formats: Formats::Wide(half), ..WIDE });
    let args = |config: Config| {
        let (a, weights) = operands(&config, &variant, 1, (3, 40, 96));
        let kernel = Fused::new(&gpu, config, &variant).unwrap();
        Operands::upload(&kernel, &a, &weights, &[]).unwrap().args
    };
    let message = |config: Config, args: &FusedArgs| {
        Fused::new(&gpu, config, &variant).unwrap().spec(args).unwrap_err().to_string()
    };
    let nvfp4 = args(config(TOKENS));
    let mxfp4 = args(config(Sm100 { formats: Formats::MXFP4, ..TOKENS }));
    let [f16, bf16] = HALVES.map(|half| args(wide(half)));
    let expected = |what: &str| format!("{what}, for which the kernel is");
    assert_eq!(message(wide(HalfFormat::F16), &nvfp4), expected("A is nvfp4; the problem asks for f16"));
    assert_eq!(message(wide(HalfFormat::F16), &bf16), expected("A is bf16; the problem asks for f16"));
    let mixed = FusedArgs { weights: mxfp4.weights, ..f16 };
    assert_eq!(message(wide(HalfFormat::F16), &mixed), expected("gate is mxfp4; the problem asks for nvfp4"));
    assert_eq!(message(config(TOKENS), &mxfp4), expected("A is mxfp4; the problem asks for nvfp4"));
    let packed = FusedArgs { weights: Weights::Pack(DevicePtr(256)), ..nvfp4 };
    let found = message(config(TOKENS), &packed);
    assert_eq!(found, "gate and up is a pack; the problem asks for rows of nvfp4, which the kernel reads");
    let more = FusedArgs { size: (3, 48, 96), ..nvfp4 };
    assert_eq!(message(config(TOKENS), &more), "gate is [40, 96]; the problem asks for [48, 96]");
    let odd = Output { c: DevicePtr(nvfp4.output.c.0 + 4), ..nvfp4.output };
    let text = message(config(TOKENS), &FusedArgs { output: odd, ..nvfp4 });
    assert!(text.starts_with("C is at 0x") && text.ends_with("on a multiple of 16 bytes"), "{text}");
    for (config, args, each) in
        [(Sm100 { split_k: 2, ..FEATURES }, nvfp4, 256), (Sm100 { split_k: 2, ..WIDE }, f16, 128)]
    {
        let rule =
            format!("sm100a fused: CTAs that split K, each at least {each} of it: 2 asked for; valid: 1");
        assert_eq!(message(Config::Sm100a(config), &args), rule);
    }
    let nvfp4_c = Variant { out: Out::Nvfp4 { scale_layout: ScaleLayout::Linear }, ..variant.clone() };
    let text = Fused::new(&gpu, config(TOKENS), &nvfp4_c).unwrap().spec(&nvfp4).unwrap_err().to_string();
    assert_eq!(text, "an nvfp4 C is N = 40; the problem asks for a multiple of 16, whole blocks");
    // A whose format is not the kernel's is not uploaded.
    let kernel = Fused::new(&gpu, wide(HalfFormat::F16), &variant).unwrap();
    let (a, weights) = operands(&wide(HalfFormat::Bf16), &variant, 1, (3, 40, 96));
    let message = Operands::upload(&kernel, &a, &weights, &[]).err().map(|e| e.to_string());
    assert_eq!(message.as_deref(), Some("A is bf16; the problem asks for f16"));
}
