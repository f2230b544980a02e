//! The cases of `cases/`, whose first file says how they are written.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;

use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_gemm::Activation;
use dualgemm_kernels::fp8::config::Config as Fp8;
use dualgemm_kernels::fused::{Config, Fused};
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::variant::{Out, Products, Scheduler, Variant};
use dualgemm_kernels::plain::config::Config as Plain;
use dualgemm_kernels::sm80::config::Config as Sm80;
use dualgemm_kernels::sm90a::config::Config as Sm90a;
use dualgemm_kernels::sm100a::config::{Config as Sm100, Side};
use dualgemm_kernels::sm120a::config::Config as Sm120;
use dualgemm_kernels::warpwise::config::Config as Warpwise;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::Card;
use rayon::prelude::*;

use crate::lines::{expanded, fits, paragraphs};
use crate::problem::{check_halves, check_on, gpu, simulator};

fn parse<T: FromStr>(word: &str) -> T {
    word.parse().ok().unwrap_or_else(|| panic!("`{word}`"))
}

fn layout(name: &str) -> ScaleLayout {
    let found = ScaleLayout::ALL.into_iter().find(|layout| layout.to_string() == name);
    found.unwrap_or_else(|| panic!("`{name}`"))
}

fn formats(words: &[&str]) -> Formats {
    let wide = |half| Formats::Wide(half);
    let named = [("mxfp4", Formats::MXFP4), ("f16", wide(HalfFormat::F16)), ("bf16", wide(HalfFormat::Bf16))];
    named.into_iter().find(|(name, _)| words.contains(name)).map_or(Formats::NVFP4, |(_, formats)| formats)
}

/// The configurations that the words name.
fn configs(words: &[&str]) -> Vec<Config> {
    let has = |word| words.contains(&word);
    let numbers: Vec<u32> = words.iter().filter_map(|word| word.parse().ok()).collect();
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
        ("plain", &[row_groups, tokens, stages]) => {
            Config::Plain(Plain { row_groups, tokens, stages, scale_layout: layout(words[4]) })
        }
        ("warpwise", &[halves, tokens, k_groups, chunks]) => {
            Config::Warpwise(Warpwise { halves, tokens, k_groups, chunks })
        }
        ("sm90a", &[row_groups, tokens, blocks, stages, k_groups]) => {
            let mut config = Sm90a::new(row_groups, tokens, blocks, stages, k_groups);
            for word in &words[6..] {
                config = match *word {
                    "split-k" => config.split_k(),
                    "common" => config.common(),
                    "two-per-sm" => config.two_per_sm(),
                    other => panic!("`{other}`"),
                };
            }
            Config::Sm90a(config)
        }
        ("sm100", &[n]) => {
            let side = match words[1] {
                "tokens" => Side::Tokens,
                "half-atoms" => Side::HalfAtoms,
                "features" => Side::Features,
                other => panic!("`{other}`"),
            };
            let formats = formats(words);
            let of = |word, number, otherwise| if has(word) { number } else { otherwise };
            let split_k = of("split2", 2, of("split4", 4, 1));
            let (cta_group, accumulators) = (of("pair", 2, 1), of("acc2", 2, 1));
            Config::Sm100a(Sm100 { formats, side, n, cta_group, split_k, stages: 2, accumulators })
        }
        _ => panic!("{words:?}"),
    }]
}

/// The variant, and which words say of the check.
fn variant<'w>(words: &[&'w str]) -> (Variant, Vec<&'w str>) {
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
                Some(("nvfp4", name)) => variant.out = Out::Nvfp4 { scale_layout: layout(name) },
                Some(("codes", name)) => variant.codes = Some(layout(name)),
                _ => variant.program = parse::<Activation>(other).program(),
            },
        }
    }
    (variant, check)
}

/// The values of a dimension, for a tile of so many tokens and features.
fn dimension(text: &str, tile: [u32; 2]) -> Vec<usize> {
    if let Some((step, last)) = text.split_once("..") {
        let step: usize = parse(step);
        return (step..=parse(last)).step_by(step).collect();
    }
    let terms = text.replace('-', "+-");
    let term = |term: &str| -> i64 {
        let number = term.trim_end_matches(['T', 'F']);
        let times = if number.is_empty() { 1 } else { parse(number) };
        times
            * if term.ends_with('T') {
                tile[0]
            } else if term.ends_with('F') {
                tile[1]
            } else {
                1
            } as i64
    };
    vec![terms.split('+').map(term).sum::<i64>() as usize]
}

fn sizes(text: &str, tile: [u32; 2]) -> Vec<u32> {
    let sizes = text.split('/').flat_map(|size| {
        let (size, times) = size.split_once('*').unwrap_or((size, "1"));
        std::iter::repeat_n(dimension(size, tile)[0] as u32, parse(times))
    });
    sizes.collect()
}

fn check(line: &str) {
    let [config, words, shapes] = line.split(" | ").collect::<Vec<_>>()[..] else { panic!("three parts") };
    let (config, card) = config.split_once(" on ").unwrap_or((config, ""));
    let (variant, how) = variant(&words.split(' ').collect::<Vec<_>>());
    // What a launch of stream-K leaves behind must not disturb the next one.
    let again = how.contains(&"twice") || variant.scheduler == Scheduler::StreamK;
    for config in configs(&config.split(' ').collect::<Vec<_>>()) {
        let gpu = match card {
            "" => gpu(&config),
            "b200" => Box::new(simulator(Card::B200)),
            "rtx-pro-6000" => Box::new(simulator(Card::RtxPro6000)),
            other => panic!("`{other}`"),
        };
        if let Some(rule) = shapes.strip_prefix("refused: ") {
            let message = Fused::new(&*gpu, config, &variant).unwrap_err().to_string();
            assert!(fits(&message, &format!("…: {rule}")), "{message}");
            continue;
        }
        let tile = match config {
            Config::Sm90a(_) | Config::Warpwise(_) => [0; 2],
            Config::Plain(config) => [config.tokens, 0],
            Config::Fp8(config) => [config.tokens, 0],
            Config::Sm80(config) => [config.tokens, 0],
            Config::Sm100a(config) => [config.n, 0],
            Config::Sm120a(config) => [config.tokens, config.features],
        };
        for shape in shapes.split(' ') {
            let [m, n, k] = shape.split('x').collect::<Vec<_>>()[..] else { panic!("`{shape}`") };
            let (rows, n) = (sizes(m, tile), dimension(n, tile)[0]);
            for k in dimension(k, tile) {
                match how.contains(&"halves") {
                    true => check_halves(&*gpu, config, &variant, (rows[0] as usize, n, k)),
                    false => check_on(&*gpu, config, &variant, &rows, (n, k), 1 + usize::from(again)),
                }
            }
        }
    }
}

/// Checks every case of a file, and names those that fail.
fn check_all(file: &str, text: &str) {
    let mut all = Vec::new();
    paragraphs((file, text), &mut Vec::new(), &mut |lines| {
        let cases =
            lines.iter().flat_map(|(at, line)| expanded(line).into_iter().map(move |l| (at.clone(), l)));
        all.extend(cases);
    });
    let fails = |(_, line): &&(String, String)| catch_unwind(AssertUnwindSafe(|| check(line))).is_err();
    let failed: Vec<_> = all.par_iter().filter(fails).collect();
    assert!(failed.is_empty() && !all.is_empty(), "{failed:#?}");
}

#[test]
fn hopper() {
    check_all("hopper.txt", include_str!("cases/hopper.txt"));
}

#[test]
fn blackwell() {
    check_all("blackwell.txt", include_str!("cases/blackwell.txt"));
}

#[test]
fn others() {
    check_all("others.txt", include_str!("cases/others.txt"));
}
