//! Small checkpoints, what is changed in them, and what reading them gives: the cases of `cases.txt`, which says how they are
//! written.

use std::str::FromStr;

use crate::common::*;
use dualgemm_checkpoint::write::Output;
use dualgemm_checkpoint::{Checkpoint, Dtype, Error, Which};
use serde_json::Value;

fn parse<T: FromStr>(word: &str) -> T {
    word.parse().ok().unwrap_or_else(|| panic!("`{word}`"))
}

fn optional(word: Option<&str>) -> Option<f32> {
    word.filter(|word| *word != "none").map(parse)
}

fn json(text: &str) -> Option<Value> {
    (text != "none").then(|| serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}")))
}

/// Whether a text is this, with anything in place of each `…`.
fn fits(text: &str, pattern: &str) -> bool {
    let parts: Vec<&str> = pattern.split('…').collect();
    let [first, middle @ .., last] = &parts[..] else { return text == pattern };
    let Some(rest) = text.strip_prefix(first) else { return false };
    let after = |rest: &str, part: &str| Some(rest[rest.find(part)? + part.len()..].to_owned());
    middle
        .iter()
        .try_fold(rest.to_owned(), |rest, part| after(&rest, part))
        .is_some_and(|r| r.ends_with(last))
}

fn base(words: &[&str]) -> Fixture {
    let input = |at: usize| optional(words.get(at).copied());
    match words[0] {
        "modelopt" => modelopt(modelopt_config(words[1]), input(2)),
        "compressed" => {
            let activations = input(1).map_or(Value::Null, |_| local_activations());
            compressed(compressed_config(&[(&["Linear"], 16, activations)]), input(1))
        }
        "alike" => {
            let mut f = base(&words[1..]);
            f.tensors.clear();
            let put = if words[1] == "modelopt" { Fixture::modelopt } else { Fixture::compressed };
            for (seed, module) in (0..).zip([GATE, UP, DOWN]) {
                let (scale, input) = if words[1] == "modelopt" { (1e-3, 0.5) } else { (1000.0, 8.0) };
                put(&mut f, module, &Weight::new(seed, 64, 64), scale, Some(input));
            }
            f
        }
        "empty" => Fixture::default(),
        other => panic!("no base `{other}`"),
    }
}

/// Puts a value at a path of keys, through objects that are made on the way; none removes what is there.
fn put(at: &mut Option<Value>, path: &[&str], value: Option<Value>) {
    let [key, rest @ ..] = path else { return *at = value };
    let entries = at.get_or_insert_default();
    if !entries.is_object() {
        *entries = Value::Object(Default::default());
    }
    let entries = entries.as_object_mut().unwrap();
    let mut inner = entries.remove(*key);
    put(&mut inner, rest, value);
    entries.extend(inner.map(|inner| ((*key).into(), inner)));
}

fn edit(f: &mut Fixture, line: &str) {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[0] {
        "-" => {
            // This tensor, or all whose names begin so.
            let (before, exact) = (f.tensors.len(), f.tensors.iter().any(|t| t.name == words[1]));
            let gone = |name: &str| if exact { name == words[1] } else { name.starts_with(words[1]) };
            f.tensors.retain(|t| !gone(&t.name));
            assert!(f.tensors.len() < before, "{} was there", words[1]);
        }
        "+" => {
            let (name, dtype) = (words[1], Dtype::from_safetensors(words[2]).unwrap());
            let shape: Vec<usize> = words[3].split('x').filter(|n| *n != "scalar").map(parse).collect();
            let count: usize = shape.iter().product();
            let bytes = match words.get(4) {
                Some(value) if dtype == Dtype::F32 => parse::<f32>(value).to_le_bytes().repeat(count),
                value => vec![value.map_or(0, |value| parse(value)); dtype.byte_len(count).unwrap()],
            };
            f.add(name, dtype, &shape, bytes);
        }
        "module" => {
            let [name, kind, seed] = [words[1], words[2], words[3]];
            let (seed, [rows, k]) = (parse(seed), [words[4], words[5]].map(parse::<usize>));
            let (scale, input) = (optional(words.get(6).copied()), optional(words.get(7).copied()));
            match kind {
                "modelopt" => f.modelopt(name, &Weight::new(seed, rows, k), scale.unwrap(), input),
                "compressed" => f.compressed(name, &Weight::new(seed, rows, k), scale.unwrap(), input),
                "compressed-mx" => f.compressed(name, &Weight::with_block(seed, rows, k, 32), 0.0, input),
                _ => {
                    // mxfp4, its scales under this ending.
                    let w = Weight::with_block(seed, rows, k, 32);
                    mxfp4(f, name, &w, (kind, Dtype::U8));
                    f
                }
            };
        }
        "experts" => {
            for expert in words[1..].iter().copied() {
                for projection in PROJECTIONS {
                    let module = format!("model.layers.0.mlp.experts.{expert}.{projection}");
                    f.modelopt(&module, &Weight::new(parse(expert), 64, 64), 1e-3, Some(0.5));
                }
            }
        }
        "set" => f.tensor(words[1]).data = parse::<f32>(words[2]).to_le_bytes().to_vec().into(),
        "byte" => f.bytes(words[1])[parse::<usize>(words[2])] = parse(words[3]),
        "rename" => f.tensors.iter_mut().for_each(|t| t.name = t.name.replace(words[1], words[2])),
        "dtype" => f.tensor(words[1]).dtype = Dtype::from_safetensors(words[2]).unwrap(),
        "metadata" => {
            let (key, text) = line["metadata ".len()..].split_once(" = ").unwrap();
            f.metadata.insert(key.into(), text.into());
        }
        _ => {
            let (path, value) = line.split_once(" = ").unwrap_or_else(|| panic!("no edit: {line}"));
            let mut path: Vec<&str> = path.split('/').collect();
            let (of, first) = match path.remove(0) {
                "config" => (&mut f.config, None),
                "quantization" => (&mut f.config, Some("quantization_config")),
                "hf" => (&mut f.hf_quant_config, Some("quantization")),
                other => panic!("no file `{other}`"),
            };
            let path: Vec<&str> = first.into_iter().chain(path).collect();
            put(of, &path, json(value));
        }
    }
}

fn said<T>(found: Result<T, Error>) -> String {
    found.map_or_else(|e| message(&e), |_| "ok".into())
}

fn check(f: &Fixture, line: &str) {
    let (what, rest) = line.split_once(' ').unwrap_or((line, ""));
    let open = || f.open(&defaults());
    let refused =
        |found: String, pattern: &str| assert!(fits(&found, pattern), "says\n{found}\nnot\n{pattern}");
    let linear = |c: &Checkpoint, name: &str| said(c.linear(name));
    match what {
        "mlp" => {
            let words: Vec<&str> = rest.split(' ').collect();
            assert_mlp(&open().unwrap(), [parse(words[0]), parse(words[1])], optional(Some(words[2])));
        }
        "is" => {
            let words: Vec<&str> = rest.split(' ').collect();
            let [seed, rows, k, block] = [1, 2, 3, 4].map(|at| parse::<usize>(words[at]));
            let c = open().unwrap();
            let m = match words[0] {
                "gate" => c.gate_up(0).unwrap().gate,
                "up" => c.gate_up(0).unwrap().up,
                _ => c.down(0).unwrap().weight,
            };
            assert_eq!(m.format().block_len(), block);
            Weight::with_block(seed as u64, rows, k, block).assert_is(&m);
        }
        "open" => refused(said(open()), rest),
        "down-input" => {
            refused(said(open().unwrap().down_source(0, Which::Dense).unwrap().input_scale()), rest)
        }
        "gate-up" => refused(said(open().and_then(|c| c.gate_up(0).map(drop))), rest),
        "down" => refused(said(open().unwrap().down(0)), rest),
        "input" => refused(said(input_scales(&open().unwrap())), rest),
        "linear" => {
            let (name, pattern) = rest.split_once(' ').unwrap();
            refused(linear(&open().unwrap(), name), pattern);
        }
        // A fault of the gate projection: nothing reads or writes it, and all else is read.
        "gate-alone" => {
            let c = open().unwrap();
            refused(linear(&c, GATE), rest);
            refused(said(c.gate_up(0)), rest);
            assert_eq!(linear(&c, UP), "ok");
            assert!(
                c.validate()
                    .iter()
                    .any(|f| f.rule.id == "config" && f.message.contains(rest.trim_matches('…')))
            );
            assert!(c.export(Output::Modelopt).is_err());
        }
        "convention" => assert_eq!(open().unwrap().convention().name, rest),
        "finds" => {
            let found = findings(f);
            let found = found.iter().map(|f| format!("{} {} {}", f.rule.id, f.tensor, f.value));
            assert_eq!(found.collect::<Vec<_>>().join(" | "), rest.strip_prefix("nothing").unwrap_or(rest));
        }
        "says" => refused(findings(f).remove(0).message, &rest.replace("DIR", "…")),
        "some" => assert!(findings(f).iter().any(|f| fits(&f.message, rest)), "{:#?}", findings(f)),
        "rules" => {
            let found = findings(f);
            assert_eq!(found.iter().map(|f| f.rule.id).collect::<Vec<_>>().join(" "), rest, "{found:#?}");
        }
        other => panic!("no check `{other}`"),
    }
}

/// A paragraph, once for each value of its `for` lines.
fn run(lines: &[(usize, String)]) -> usize {
    let [(number, first), rest @ ..] = lines else { return 0 };
    if let Some((name, values)) = first.strip_prefix("for ").and_then(|line| line.split_once(" in ")) {
        let with = |value| rest.iter().map(|(n, line)| (*n, line.replace(name, value))).collect::<Vec<_>>();
        return values.split(" | ").map(|value| run(&with(value))).sum();
    }
    // What a failure shows.
    println!("cases.txt:{number}: {first}");
    let mut f = base(&first.split_whitespace().collect::<Vec<_>>());
    for (number, line) in rest {
        println!("cases.txt:{number}: {line}");
        match line.strip_prefix("> ") {
            Some(line) => check(&f, line),
            None => edit(&mut f, line),
        }
    }
    1
}

#[test]
fn every_case_gives_what_it_says() {
    let names = [("$gate", GATE), ("$up", UP), ("$down", DOWN), ("$mlp", "model.layers.0.mlp")];
    let mut names: Vec<(String, String)> = names.map(|(name, text)| (name.into(), text.into())).into();
    let (mut paragraph, mut count) = (Vec::new(), 0);
    for (number, line) in (1..).zip(include_str!("cases.txt").lines().chain([""])) {
        if let Some((name, text)) = line.split_once(" := ") {
            names.push((name.into(), text.into()));
        } else if line.is_empty() {
            count += run(&std::mem::take(&mut paragraph));
        } else if !line.trim_start().starts_with('#') {
            let filled =
                names.iter().rev().fold(line.to_owned(), |line, (name, text)| line.replace(name, text));
            paragraph.push((number, filled.trim().to_owned()));
        }
    }
    assert!(count > 100, "{count} cases");
}
