//! Every rule of a configuration: values on both sides of its bounds, and what is said of those that it refuses. `limits.txt` has
//! them.

use dualgemm_cases::{expanded, fits, paragraphs, parse};
use dualgemm_kernels::Error;
use dualgemm_kernels::fused::Config;
use dualgemm_kernels::limits::Valid;

use crate::words::{configs, variant};

/// The kernel's name in messages, and what is said of a configuration.
fn layout(words: &str) -> (&'static str, Option<String>) {
    let (words, of) = words.split_once(", ").unwrap_or((words, "f16"));
    let (variant, _) = variant(&of.split(' ').collect::<Vec<_>>());
    let said = |error: Option<Error>| error.map(|error| error.to_string());
    match configs(&words.split(' ').collect::<Vec<_>>())[0] {
        Config::Fp8(config) => ("sm90a fp8", said(config.layout(variant.out).err())),
        Config::Plain(config) => ("sm90a plain", said(config.layout(variant.out).err())),
        Config::Sm80(config) => ("sm80 fused", said(config.layout(&variant).err())),
        Config::Sm90a(config) => ("sm90a fused", said(config.layout(&variant).err())),
        Config::Sm100a(config) => ("sm100a fused", said(config.layout().err())),
        Config::Sm120a(config) => ("sm120a fused", said(config.layout().err())),
        Config::Warpwise(config) => ("sm90a warpwise", said(config.layout(&variant).err())),
    }
}

/// Tries every value to 300, and the largest. Shared memory alone may refuse a right one.
fn walk(at: &str, [config, what, right, valid]: [&str; 4]) {
    let right = |value: u32| {
        right.split(' ').any(|range| {
            let (first, rest) = range.split_once("..").unwrap_or((range, range));
            let (last, step) = rest.split_once('/').unwrap_or((rest, "1"));
            (parse(first)..=parse(last)).contains(&value) && value.is_multiple_of(parse(step))
        })
    };
    for value in (0..=300).chain([1 << 16, 1 << 31, u32::MAX]) {
        let (kernel, message) = layout(&config.replace('V', &value.to_string()));
        if right(value) {
            let memory = format!("{kernel}: bytes of shared memory: ");
            assert!(
                message.as_ref().is_none_or(|text| text.starts_with(&memory)),
                "{at} {value}: {message:?}"
            );
        } else {
            let expected = format!("{kernel}: {what}: {value} asked for; valid: {valid}");
            assert_eq!(message, Some(expected), "{at}");
        }
    }
}

#[test]
fn rules_are_what_is_said_of_them() {
    let file = ("limits.txt", include_str!("limits.txt"));
    let cases = paragraphs(file, &mut Vec::new(), &mut |lines| {
        for (at, line) in lines.iter().flat_map(|(at, line)| expanded(line).into_iter().map(move |l| (at, l)))
        {
            if let Some((config, says)) = line.split_once(" = ") {
                let found = layout(config).1.unwrap_or("ok".into());
                assert!(fits(&found, says), "{at}: {found}");
            } else {
                walk(at, line.split(" | ").collect::<Vec<_>>().try_into().unwrap());
            }
        }
    });
    assert!(cases >= 6, "{cases} paragraphs");
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
