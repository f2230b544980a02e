//! Every rule of a configuration: values on both sides of its bounds, and what is said of those that it refuses.

use dualgemm_formats::ScaleLayout;
use dualgemm_gemm::Activation;
use dualgemm_kernels::limits::Valid;
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::variant::{Out, Scheduler, Variant};
use dualgemm_kernels::{Error, fp8, plain, sm80, sm90a, sm100a, sm120a};
use dualgemm_ptx::builder::HalfFormat;

/// A rule of one quantity: what it is called, the values that are right, and how the rule is told.
struct Rule<'a> {
    kernel: &'a str,
    what: &'a str,
    right: Vec<u32>,
    valid: &'a str,
}

impl Rule<'_> {
    /// Tries every value to 300, and the largest. Shared memory alone may refuse a right one.
    fn walk<T>(&self, layout: impl Fn(u32) -> Result<T, Error>) {
        let Self { kernel, what, right, valid } = self;
        for value in (0..=300).chain([1 << 16, 1 << 31, u32::MAX]) {
            let message = layout(value).err().map(|error| error.to_string());
            if right.contains(&value) {
                let memory = format!("{kernel}: bytes of shared memory: ");
                let memory = |text: &String| text.starts_with(&memory);
                assert!(message.as_ref().is_none_or(memory), "{what} {value}: {message:?}");
            } else {
                let expected = format!("{kernel}: {what}: {value} asked for; valid: {valid}");
                assert_eq!(message, Some(expected));
            }
        }
    }
}

fn rule<'a>(
    kernel: &'a str,
    what: &'a str,
    right: impl IntoIterator<Item = u32>,
    valid: &'a str,
) -> Rule<'a> {
    Rule { kernel, what, right: right.into_iter().collect(), valid }
}

fn eights(to: u32) -> impl Iterator<Item = u32> {
    (8..=to).step_by(8)
}

#[test]
fn of_the_e4m3_kernel() {
    let base = fp8::config::Config { row_groups: 1, tokens: 8, stages: 2 };
    type Config = fp8::config::Config;
    let of = |config: Config| config.layout(Out::F16);
    let rule = |what, right: Vec<u32>, valid| rule("sm90a fp8", what, right, valid);
    rule("warpgroups that multiply", vec![1, 2], "from 1 to 2")
        .walk(|row_groups| of(Config { row_groups, ..base }));
    rule("tokens of the tile", eights(128).collect(), "a multiple of 8 from 8 to 128")
        .walk(|tokens| of(Config { tokens, ..base }));
    rule("stages", (2..=16).collect(), "from 2 to 16").walk(|stages| of(Config { stages, ..base }));
}

#[test]
fn of_the_kernel_without_prepack() {
    type Config = plain::config::Config;
    let base = Config { row_groups: 1, tokens: 8, stages: 2, scale_layout: ScaleLayout::Linear };
    let of = |config: Config| config.layout(Out::F16);
    let rule = |what, right: Vec<u32>, valid| rule("sm90a plain", what, right, valid);
    rule("warpgroups that multiply", vec![1, 2], "from 1 to 2")
        .walk(|row_groups| of(Config { row_groups, ..base }));
    rule("tokens of the tile", eights(256).collect(), "a multiple of 8 from 8 to 256")
        .walk(|tokens| of(Config { tokens, ..base }));
    rule("stages", (2..=16).collect(), "from 2 to 16").walk(|stages| of(Config { stages, ..base }));
    let layout = Config { scale_layout: ScaleLayout::Sf8x4, ..base };
    assert_eq!(of(layout).unwrap_err().to_string(), "sm90a plain: scales are linear or 128x4");
}

#[test]
fn of_the_portable_kernel() {
    type Config = sm80::config::Config;
    let base = Config { chunks: 1, row_warps: 1, token_warps: 1, tokens: 8, stages: 2 };
    let variant = Variant::new(Activation::Silu.program());
    let of = |config: Config| config.layout(&variant);
    let rule = |what, right: Vec<u32>, valid| rule("sm80 fused", what, right, valid);
    // Four chunks are 16 slabs; 16 tokens are shared by two warps.
    let wide = Config { chunks: 4, tokens: 16, token_warps: 2, ..base };
    for (warps, valid) in [(3, "a multiple of 3 from 3 to 48"), (6, "a multiple of 6 from 6 to 96")] {
        let message = of(Config { chunks: 4, row_warps: warps, ..base }).unwrap_err().to_string();
        let expected = format!("sm80 fused: slabs of 16 weight rows of a tile: 16 asked for; valid: {valid}");
        assert_eq!(message, expected);
    }
    for row_warps in [0, 5, 8, u32::MAX] {
        let message = of(Config { row_warps, ..wide }).unwrap_err().to_string();
        let warps = row_warps.saturating_mul(2);
        assert_eq!(message, format!("sm80 fused: warps: {warps} asked for; valid: from 1 to 8"));
    }
    for (chunks, slabs) in [(0, 0), (5, 20), (u32::MAX, u32::MAX)] {
        let message = of(Config { chunks, ..base }).unwrap_err().to_string();
        let valid = "from 1 to 16";
        let what = "slabs of 16 weight rows of a tile";
        assert_eq!(message, format!("sm80 fused: {what}: {slabs} asked for; valid: {valid}"));
    }
    for chunks in 1..=4 {
        assert!(of(Config { chunks, ..base }).is_ok(), "{chunks}");
    }
    rule("tokens of the tile", eights(32).collect(), "a multiple of 8 from 8 to 32")
        .walk(|tokens| of(Config { tokens, ..base }));
    rule("tokens of the tile", (16..=64).step_by(16).collect(), "a multiple of 16 from 16 to 64")
        .walk(|tokens| of(Config { tokens, token_warps: 2, ..base }));
    rule("tokens of the tile", vec![16], "16").walk(|tokens| of(Config { tokens, ..wide }));
    rule("stages", (2..=16).collect(), "from 2 to 16").walk(|stages| of(Config { stages, ..base }));
}

#[test]
fn of_hoppers_kernel() {
    type Config = sm90a::config::Config;
    let base = Config::new(2, 16, 2, 3, 1);
    let variant = Variant::new(Activation::Silu.program());
    let of = |config: Config| config.layout(&variant);
    let rule = |what, right: Vec<u32>, valid| rule("sm90a fused", what, right, valid);
    // Of one warpgroup it takes two CTAs.
    rule("warpgroups that multiply", (1..=4).collect(), "from 1 to 4").walk(|row_groups| {
        let ctas_per_sm = if row_groups == 1 { 2 } else { 1 };
        of(Config { row_groups, ctas_per_sm, ..base })
    });
    rule("CTAs on a multiprocessor", vec![1, 2], "from 1 to 2")
        .walk(|ctas_per_sm| of(Config { ctas_per_sm, ..base }));
    rule("CTAs of one such warpgroup on a multiprocessor", vec![2], "2")
        .walk(|ctas_per_sm| of(Config { row_groups: 1, ctas_per_sm, ..base }));
    rule("CTAs that split K", vec![1, 2], "from 1 to 2").walk(|k_split| of(Config { k_split, ..base }));
    rule("K blocks of a stage", (1..=8).collect(), "from 1 to 8")
        .walk(|blocks_per_stage| of(Config { blocks_per_stage, ..base }));
    rule("K blocks of a stage, one for each K group", vec![4], "4")
        .walk(|blocks_per_stage| of(Config { blocks_per_stage, ..Config::new(1, 8, 4, 3, 4) }));
    let tokens = "tokens of the tile, their sums in registers";
    rule(tokens, eights(256).collect(), "a multiple of 8 from 8 to 256")
        .walk(|tokens| of(Config { tokens, ..base }));
    let halves = (16..=256).step_by(16).collect();
    rule(tokens, halves, "a multiple of 16 from 16 to 256")
        .walk(|tokens| of(Config { tokens, ..base.split_k() }));
    let stream_k = Variant { scheduler: Scheduler::StreamK, ..variant.clone() };
    let four = Config::new(4, 8, 2, 3, 1);
    for (variant, most, valid) in
        [(&variant, 64, "a multiple of 8 from 8 to 64"), (&stream_k, 48, "a multiple of 8 from 8 to 48")]
    {
        rule(tokens, eights(most).collect(), valid).walk(|tokens| Config { tokens, ..four }.layout(variant));
    }
    rule("stages", (2..=16).collect(), "from 2 to 16").walk(|stages| of(Config { stages, ..base }));
    rule("stages", (3..=16).collect(), "from 3 to 16")
        .walk(|stages| of(Config { stages, blocks_per_stage: 1, ..base }));
}

#[test]
fn of_the_data_center_kernel() {
    use sm100a::config::Side;
    type Config = sm100a::config::Config;
    let base = Config {
        formats: Formats::NVFP4,
        side: Side::Tokens,
        n: 64,
        cta_group: 1,
        split_k: 1,
        stages: 2,
        accumulators: 1,
    };
    let rule = |what, right: Vec<u32>, valid| rule("sm100a fused", what, right, valid);
    let features = Config { side: Side::Features, ..base };
    let half_atoms = Config { side: Side::HalfAtoms, ..base };
    let wide = Config { formats: Formats::Wide(HalfFormat::F16), ..features };
    rule("features of a tile", (16..=128).step_by(16).collect(), "a multiple of 16 from 16 to 128")
        .walk(|n| Config { n, ..base }.layout());
    rule("features of a tile", vec![32, 64, 96, 128], "a multiple of 32 from 32 to 128")
        .walk(|n| Config { n, split_k: 2, ..base }.layout());
    rule("features of a tile", vec![64], "64").walk(|n| Config { n, ..half_atoms }.layout());
    rule("tokens of a tile", eights(64).collect(), "a multiple of 8 from 8 to 64")
        .walk(|n| Config { n, ..features }.layout());
    rule("tokens of a tile", (16..=192).step_by(16).collect(), "a multiple of 16 from 16 to 192")
        .walk(|n| Config { n, ..wide }.layout());
    for (config, groups, group, splits, split) in [
        (base, vec![1, 2], "1, 2", vec![1, 2], "1, 2"),
        (half_atoms, vec![1, 2], "1, 2", vec![1], "1"),
        (features, vec![1], "1", vec![1, 2, 4], "1, 2, 4"),
    ] {
        rule("CTAs of a matrix instruction", groups, group)
            .walk(|cta_group| Config { cta_group, ..config }.layout());
        rule("CTAs or pairs that split K", splits, split)
            .walk(|split_k| Config { split_k, ..config }.layout());
    }
    rule("pairs of accumulators", vec![1, 2], "from 1 to 2")
        .walk(|accumulators| Config { accumulators, ..base }.layout());
    rule("pairs of accumulators beside split K", vec![1], "1")
        .walk(|accumulators| Config { accumulators, split_k: 2, ..base }.layout());
    rule("stages", (2..=16).collect(), "from 2 to 16").walk(|stages| Config { stages, ..base }.layout());
    let message = |config: Config| config.layout().unwrap_err().to_string();
    assert_eq!(
        message(Config { n: 128, accumulators: 2, ..base }),
        "sm100a fused: columns of tensor memory: 560 asked for; valid: at most 512"
    );
    assert_eq!(
        message(Config { side: Side::Tokens, ..wide }),
        "sm100a fused: A in 16 bits multiplies rows of features"
    );
}

#[test]
fn of_the_workstation_kernel() {
    type Config = sm120a::config::Config;
    let [.., largest] = Config::MENU;
    let base = Config {
        features: 128,
        tokens: 128,
        feature_warps: 1,
        token_warps: 1,
        k_groups: 1,
        stage_k: 256,
        stages: 2,
        ..largest
    };
    let rule = |what, right: Vec<u32>, valid| rule("sm120a fused", what, right, valid);
    let side = || vec![16, 32, 64, 128];
    rule("features of the tile", side(), "16, 32, 64, 128")
        .walk(|features| Config { features, ..base }.layout());
    rule("tokens of the tile", side(), "16, 32, 64, 128").walk(|tokens| Config { tokens, ..base }.layout());
    rule("K of a stage", vec![128, 256], "128, 256").walk(|stage_k| Config { stage_k, ..base }.layout());
    rule("warps along the features", vec![1, 2, 4, 8], "a divisor of 8")
        .walk(|feature_warps| Config { feature_warps, ..base }.layout());
    rule("warps along the tokens", vec![1, 2, 4, 8], "a divisor of 8")
        .walk(|token_warps| Config { token_warps, ..base }.layout());
    rule("K groups", vec![1, 2, 4], "a divisor of 4").walk(|k_groups| Config { k_groups, ..base }.layout());
    let message = |config: Config| config.layout().unwrap_err().to_string();
    assert_eq!(
        message(Config { feature_warps: 4, token_warps: 4, ..base }),
        "sm120a fused: warps that multiply: 16 asked for; valid: from 1 to 14"
    );
    rule("stages", (2..=16).collect(), "from 2 to 16")
        .walk(|stages| Config { stages, features: 16, tokens: 16, ..base }.layout());
    assert_eq!(
        message(Config { stages: 9, ..largest }),
        "sm120a fused: bytes of shared memory: 175248 asked for; valid: at most 101376"
    );
}

#[test]
fn what_is_said_is_what_is_allowed() {
    let multiple = Valid::Multiple { step: 8, from: 16, to: 32 };
    let rules = [multiple, Valid::OneOf(&[3, 5]), Valid::DivisorOf(6)];
    let allowed = |valid: &Valid| (0..100).filter(|&value| valid.allows(value)).collect::<Vec<u64>>();
    assert_eq!(rules.each_ref().map(allowed), [vec![16, 24, 32], vec![3, 5], vec![1, 2, 3, 6]]);
    let texts = ["a multiple of 8 from 16 to 32", "3, 5", "a divisor of 6"];
    assert_eq!(rules.map(|valid| valid.to_string()), texts);
}
