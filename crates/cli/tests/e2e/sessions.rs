//! Sessions of the command, and what its reports say: the lines of `sessions/`, whose first file says how they are written.

use std::path::Path;

use crate::common::{changed, data, filled, held, json, rel_l2, tensor, text};
use crate::operations::{mixture, routing};
use dualgemm_cases::{Lines, expanded, fits, paragraphs};
use serde_json::Value;

/// The value at `/a/0/key=value/*`: the entry that has this value for that key, and a list of all.
fn at(value: &Value, path: &[&str]) -> Value {
    let [part, rest @ ..] = path else { return value.clone() };
    let part = &part.replace('+', " ");
    let all = || value.as_array().into_iter().flatten();
    let found = match part.split_once('=') {
        _ if part == "*" => return all().map(|entry| at(entry, rest)).collect(),
        Some((key, wanted)) => {
            let wanted = serde_json::from_str(wanted).unwrap_or_else(|_| Value::from(wanted));
            all().find(|entry| entry[key] == wanted)
        }
        None => value.get(part).or_else(|| value.get(part.parse::<usize>().ok()?)),
    };
    found.map_or(Value::Null, |found| at(found, rest))
}

fn check(report: &Value, kept: &[(String, Value)], line: &str) {
    let (path, rest) = line.split_once(' ').unwrap();
    let (operator, wanted) = rest.split_once(' ').unwrap_or((rest, ""));
    let found = at(report, &path.split('/').skip(1).collect::<Vec<_>>());
    let number = || found.as_f64().unwrap_or_else(|| panic!("{found} in {report}"));
    let holds = match operator {
        "=" => match (found.as_f64(), serde_json::from_str::<Value>(wanted).unwrap()) {
            (Some(found), Value::Number(wanted)) => wanted.as_f64() == Some(found),
            (_, wanted) => found == wanted,
        },
        "~" => found.as_str().is_some_and(|found| !found.is_empty() && fits(found, wanted)),
        "below" => number() < wanted.parse().unwrap(),
        "above" => number() > wanted.parse().unwrap(),
        "count" => {
            let len = found.as_array().map_or(0, Vec::len);
            wanted.parse() == Ok(len) || kept.contains(&(wanted.into(), len.into()))
        }
        "less" => {
            let (one, other) = wanted.split_once(' ').unwrap();
            found[one].as_f64().unwrap() < found[other].as_f64().unwrap()
        }
        "unlike" => {
            let (one, other) = wanted.split_once(' ').unwrap();
            found[one].is_number() && found[one] != found[other]
        }
        "product" => {
            let [one, other, wanted] = wanted.split(' ').collect::<Vec<_>>()[..] else { panic!("{wanted}") };
            let product = found[one].as_f64().unwrap() * found[other].as_f64().unwrap();
            (product / wanted.parse::<f64>().unwrap() - 1.0).abs() < 1e-9
        }
        "absent" => found.is_null(),
        "is" => kept.contains(&(wanted.into(), found.clone())),
        other => panic!("no operator `{other}`"),
    };
    assert!(holds, "{found} in\n{report}");
}

/// The file and the name of `FILE:NAME`.
fn tensor_of(text: &str) -> (&Path, &str) {
    let (file, name) = text.rsplit_once(':').unwrap();
    (Path::new(file), name)
}

fn values(text: &str) -> Vec<f64> {
    let (file, name) = tensor_of(text);
    tensor(file, name)
}

/// Changes a tensor of the MLP as a mistake would.
fn tamper(name: &mut String, bytes: &mut Vec<u8>, how: &[&str]) {
    let number = |at: usize| how[at].parse::<usize>().unwrap();
    match how[0] {
        "rotate" => {
            let len = if how.len() > 2 { number(2) } else { bytes.len() };
            bytes[..len].rotate_right(number(1));
        }
        "swap" => bytes.chunks_exact_mut(number(1)).for_each(|row| row.swap(0, 1)),
        "nibbles" => bytes.iter_mut().for_each(|byte| *byte = byte.rotate_left(4)),
        "times" => {
            let value = f32::from_le_bytes(bytes[..].try_into().unwrap()) * how[1].parse::<f32>().unwrap();
            *bytes = value.to_le_bytes().into();
        }
        "exchange" => {
            let (from, to) = if name.contains("gate") { ("gate_", "up_") } else { ("up_", "gate_") };
            *name = name.replace(from, to);
        }
        // Scales row by row, and in tiles of 128 rows and 4 blocks.
        "tile" | "untile" => {
            let held = bytes.clone();
            for (linear, row, block) in (0..1536 * 36).map(|at| (at, at / 36, at % 36)) {
                let tiled =
                    (row / 128 * 9 + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
                let (to, from) = if how[0] == "tile" { (tiled, linear) } else { (linear, tiled) };
                bytes[to] = held[from];
            }
        }
        other => panic!("`{other}`"),
    }
}

fn run(lines: Lines<'_>) {
    let dir = tempfile::tempdir().unwrap();
    let (mut report, mut shown, mut kept) = (Value::Null, String::new(), Vec::new());
    for (place, line) in lines {
        // What a failure shows.
        println!("{place}: {line}");
        for line in expanded(line) {
            let line = filled(dir.path(), &line);
            let (what, rest) = line.split_once(' ').unwrap();
            let words: Vec<&str> = rest.split_whitespace().filter(|word| *word != ".").collect();
            match what {
                "$" | "$1" | "$2" => report = json(&words, what[1..].parse().unwrap_or(0)),
                "text" | "text1" => shown = text(&words, what[4..].parse().unwrap_or(0)),
                "~" => {
                    let rest = rest.replace("\\n", "\n");
                    assert!(fits(&shown, &format!("…{rest}…")), "{rest:?} is not in\n{shown}");
                }
                "!~" => assert!(!shown.contains(rest), "{shown}"),
                ">" => check(&report, &kept, rest),
                "keep" => kept
                    .push((words[0].into(), at(&report, &words[1].split('/').skip(1).collect::<Vec<_>>()))),
                "close" => {
                    let error = rel_l2(&values(words[0]), &values(words[1]));
                    assert!(error <= words[2].parse().unwrap(), "{error:e}");
                }
                "shows" => {
                    let (_, kept) = kept.iter().find(|(name, _)| name == rest).unwrap();
                    let number = format!("{:e}", kept.as_f64().unwrap() as f32);
                    assert!(shown.split_whitespace().any(|cell| cell == number), "no {number} in\n{shown}");
                }
                "equal" => {
                    let [one, other] = [0, 1].map(|at| tensor_of(words[at]));
                    assert!(held(one.0, one.1) == held(other.0, other.1));
                }
                "model" | "floats" => {
                    let model = dir.path().join("model");
                    let mixture = dir.path().join("floats.safetensors");
                    let floats = if what == "model" { data("mlp-bf16.safetensors") } else { mixture };
                    std::fs::create_dir_all(&model).unwrap();
                    std::fs::copy(floats, model.join("model.safetensors")).unwrap();
                    std::fs::write(model.join("config.json"), rest).unwrap();
                }
                "same" => assert!(values(words[0]) == values(words[1])),
                "differ" => assert!(values(words[0]) != values(words[1])),
                "rows" => {
                    let c = values(words[0]);
                    for (row, zero) in c.chunks(c.len() / (words.len() - 1)).zip(&words[1..]) {
                        assert!(row.iter().all(|c| (*c == 0.0) == (*zero == "0")), "{row:?}");
                    }
                }
                "mixture" => {
                    let experts: Vec<usize> = words.iter().filter_map(|word| word.parse().ok()).collect();
                    drop(mixture(dir.path(), &experts, words.contains(&"shared")));
                }
                "routing" => {
                    let numbers =
                        |word: &str| word.split(',').map(|n| n.parse().unwrap()).collect::<Vec<f32>>();
                    let ids: Vec<i64> = words[1].split(',').map(|id| id.parse().unwrap()).collect();
                    let top_k = words[3].parse().unwrap();
                    let (shape, wide) = ([ids.len() / top_k, top_k], words.get(4) == Some(&"wide"));
                    routing(Path::new(words[0]), &ids, &numbers(words[2]), shape, wide);
                }
                "wrong" => changed(&dir.path().join("wrong"), |all| {
                    for (name, _, _, bytes) in all.iter_mut().filter(|tensor| tensor.0.contains("mlp")) {
                        if words[0].split(',').any(|part| name.ends_with(part)) {
                            tamper(name, bytes, &words[1..]);
                        }
                    }
                }),
                // The ModelOpt checkpoint with those tensors alone, or without those, whose names have this in them.
                "with" | "without" => changed(Path::new(words[0]), |all| {
                    let named = |name: &str| words[1..].iter().any(|part| name.contains(part));
                    all.retain(|tensor| named(&tensor.0) == (what == "with"));
                }),
                other => panic!("no line `{other}`"),
            }
        }
    }
}

fn sessions(name: &str, text: &str) -> usize {
    paragraphs((name, text), &mut Vec::new(), &mut run)
}

#[test]
fn commands_say_what_scripts_rely_on() {
    assert!(sessions("commands", include_str!("sessions/commands.txt")) > 50);
}

#[test]
fn wrong_results_fail_and_what_is_wrong_is_said() {
    assert!(sessions("wrong", include_str!("sessions/wrong.txt")) > 17);
}

#[test]
fn operations_are_right_and_verify() {
    assert!(sessions("operations", include_str!("sessions/operations.txt")) > 30);
}

#[test]
fn what_is_quantized_is_read_back() {
    assert!(sessions("quantize", include_str!("sessions/quantize.txt")) > 11);
}
