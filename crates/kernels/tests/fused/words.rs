//! Configurations and variants as words, which `cases/hopper.txt` explains.

use dualgemm_cases::{named, parse};
use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_gemm::Activation;
use dualgemm_kernels::fp8::config::Config as Fp8;
use dualgemm_kernels::fused::Config;
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::variant::{Out, Products, Scheduler, Variant};
use dualgemm_kernels::plain::config::Config as Plain;
use dualgemm_kernels::sm80::config::Config as Sm80;
use dualgemm_kernels::sm90a::config::Config as Sm90a;
use dualgemm_kernels::sm100a::config::{Config as Sm100, Side};
use dualgemm_kernels::sm120a::config::Config as Sm120;
use dualgemm_kernels::warpwise::config::Config as Warpwise;
use dualgemm_ptx::builder::HalfFormat;

fn formats(words: &[&str]) -> Formats {
    let wide = |half| Formats::Wide(half);
    let named = [("mxfp4", Formats::MXFP4), ("f16", wide(HalfFormat::F16)), ("bf16", wide(HalfFormat::Bf16))];
    named.into_iter().find(|(name, _)| words.contains(name)).map_or(Formats::NVFP4, |(_, formats)| formats)
}

/// The configurations that the words name.
pub fn configs(words: &[&str]) -> Vec<Config> {
    let has = |word| words.contains(&word);
    let known = [
        "",
        "ctas",
        "split",
        "acc",
        "stages",
        "per-sm",
        "common",
        "tokens",
        "features",
        "half-atoms",
        "rows",
        "nvfp",
        "mxfp",
        "f",
        "bf",
        "linear",
        "128x",
        "8x",
        "sm",
        "fp",
        "plain",
    ];
    let strange = words[1..].iter().find(|word| !known.contains(&word.trim_end_matches(char::is_numeric)));
    assert_eq!(strange, None, "{words:?}");
    let numbers: Vec<u32> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let number = |name: &str| words.iter().find_map(|word| word.strip_prefix(name)?.parse::<u32>().ok());
    let block = if has("mxfp4") { BlockFormat::Mxfp4 } else { BlockFormat::Nvfp4 };
    let menu = |kernel: &str| -> Vec<Config> {
        match kernel {
            "sm80" => Sm80::MENU.map(Config::Sm80).into(),
            "plain" => Plain::MENU.map(Config::Plain).into(),
            "fp8" => Fp8::MENU.map(Config::Fp8).into(),
            "sm120" => Sm120::menu(block).map(Config::Sm120a).into(),
            "sm100" => {
                let of_side = |config: &Sm100| (config.side == Side::Features) == has("features");
                Sm100::menu(formats(words)).into_iter().filter(of_side).map(Config::Sm100a).collect()
            }
            other => panic!("`{other}`"),
        }
    };
    vec![match (words[0], &numbers[..]) {
        ("every", []) => return menu(words[1]),
        ("sm80" | "fp8" | "sm120", &[number]) => menu(words[0])[number as usize],
        ("sm80", &[chunks, row_warps, token_warps, tokens, stages]) => {
            Config::Sm80(Sm80 { chunks, row_warps, token_warps, tokens, stages })
        }
        ("sm120", &[features, tokens, feature_warps, token_warps, k_groups, stage_k, stages]) => {
            let format = block;
            Config::Sm120a(Sm120 {
                format,
                features,
                tokens,
                feature_warps,
                token_warps,
                k_groups,
                stage_k,
                stages,
            })
        }
        ("fp8", &[row_groups, tokens, stages]) => Config::Fp8(Fp8 { row_groups, tokens, stages }),
        ("plain", &[row_groups, tokens, stages]) => Config::Plain(Plain {
            row_groups,
            tokens,
            stages,
            scale_layout: named(ScaleLayout::ALL, words[4]),
        }),
        ("warpwise", &[halves, tokens, k_groups, chunks]) => {
            Config::Warpwise(Warpwise { halves, tokens, k_groups, chunks })
        }
        ("sm90a", &[row_groups, tokens, blocks, stages, k_groups]) => {
            let config = Sm90a::new(row_groups, tokens, blocks, stages, k_groups);
            let (k_split, ctas_per_sm) = (number("split").unwrap_or(1), number("per-sm").unwrap_or(1));
            Config::Sm90a(Sm90a { k_split, ctas_per_sm, common: has("common"), ..config })
        }
        ("sm100", &[n]) => {
            let side = match words[1] {
                "tokens" => Side::Tokens,
                "half-atoms" => Side::HalfAtoms,
                "features" => Side::Features,
                other => panic!("`{other}`"),
            };
            let formats = formats(words);
            let of = |name, otherwise| number(name).unwrap_or(otherwise);
            let (cta_group, split_k, stages, accumulators) =
                (of("ctas", 1), of("split", 1), of("stages", 2), of("acc", 1));
            Config::Sm100a(Sm100 { formats, side, n, cta_group, split_k, stages, accumulators })
        }
        _ => panic!("{words:?}"),
    }]
}

/// The variant, and which words say of the check.
pub fn variant<'w>(words: &[&'w str]) -> (Variant, Vec<&'w str>) {
    let mut variant = Variant::new(Activation::Silu.program());
    let mut check = Vec::new();
    for word in words {
        match *word {
            "f16" => variant.out = Out::F16,
            "bf16" => variant.out = Out::Bf16,
            "f32" => variant.out = Out::F32,
            "a-bf16" => variant.compute = HalfFormat::Bf16,
            "bias" => variant.bias = true,
            "a-scale" => variant.a_scale = true,
            "rounded" => variant.round_gate_up_to_bf16 = true,
            "linear" => variant.products = Products::Linear,
            "up" => variant.products = Products::Up,
            "grouped" => variant.grouped = true,
            "choices" => variant.choices = true,
            "persistent" => variant.scheduler = Scheduler::Persistent,
            "stream-k" => variant.scheduler = Scheduler::StreamK,
            "twice" | "halves" => check.push(*word),
            other => match other.split_once(':') {
                Some(("nvfp4", name)) => {
                    variant.out = Out::Nvfp4 { scale_layout: named(ScaleLayout::ALL, name) }
                }
                Some(("codes", name)) => variant.codes = Some(named(ScaleLayout::ALL, name)),
                _ => variant.program = parse::<Activation>(other).program(),
            },
        }
    }
    (variant, check)
}
