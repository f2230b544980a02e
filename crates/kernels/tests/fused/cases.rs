//! The cases of `cases/`, whose first file says how they are written.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dualgemm_cases::{expanded, fits, paragraphs, parse};
use dualgemm_kernels::fused::{Config, Fused};
use dualgemm_kernels::parts::variant::Scheduler;
use dualgemm_sim::Card;
use rayon::prelude::*;

use crate::problem::{check_halves, check_on, gpu, simulator};
use crate::words::{configs, variant};

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
