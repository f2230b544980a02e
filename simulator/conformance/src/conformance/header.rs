//! The reader of the `//!` lines of a conformance case.

use super::data::{Data, GENERATORS, size};
use super::{Argument, Buffer, Case, Error, Launch, Tolerance, tensor_map};
use dualgemm_ptx::layout::{Im2col, OutOfBounds, Swizzle, TensorDataType, TensorMap};
use std::str::{FromStr, SplitWhitespace};

pub(super) fn parse(name: &str, ptx: &str) -> Result<Case, Error> {
    let (rows, launches) = (Vec::new(), Vec::new());
    let mut case = Case { name: name.into(), ptx: ptx.into(), rows, certified: None, launches };
    for (i, line) in ptx.lines().enumerate() {
        let Some(text) = line.strip_prefix("//!") else { break };
        if let Err(reason) = read(&mut case, text) {
            return Err(Error::Header { case: name.into(), line: i + 1, reason });
        }
    }
    if case.launches.is_empty() {
        let reason = "no `launch` line before the module".into();
        return Err(Error::Header { case: name.into(), line: 1, reason });
    }
    Ok(case)
}

fn read(case: &mut Case, text: &str) -> Result<(), String> {
    let mut words = text.split_whitespace();
    let Some(kind) = words.next() else { return Ok(()) };
    let argument = match kind {
        "row" => {
            case.rows.extend(words.map(str::to_string));
            return Ok(());
        }
        // Prose.
        "--" => return Ok(()),
        "launch" => {
            let kernel = words.next().ok_or("`launch` needs a kernel")?.to_string();
            let mut launch =
                Launch { kernel, grid: 1, block: 1, cluster: 1, shared: 0, arguments: Vec::new() };
            while let Some(key) = words.next() {
                let value = number(&mut words)?;
                match key {
                    "grid" => launch.grid = value,
                    "block" => launch.block = value,
                    "cluster" => launch.cluster = value,
                    "shared" => launch.shared = value,
                    _ => return Err(format!("`{key}` where grid, block, cluster or shared belongs")),
                }
            }
            case.launches.push(launch);
            return Ok(());
        }
        "in" => Argument::Buffer(Buffer { data: data(&mut words)?, expected: None, tolerance: None }),
        "inout" => {
            let data = data(&mut words)?;
            compared(data, &mut words)?
        }
        "out" => {
            let ty = typename(&mut words)?;
            let count = count(&ty, &mut words)?;
            compared(Data { ty, generator: "zero".into(), seed: 0, count }, &mut words)?
        }
        "bytes" => Argument::Bytes(data(&mut words)?),
        "u32" => Argument::U32(number(&mut words)?),
        "map" => map(&mut words)?,
        _ => return Err(format!("`{kind}` is no kind of line")),
    };
    let arguments = &mut case.launches.last_mut().ok_or("an argument before any `launch`")?.arguments;
    if let Argument::Map { buffer, .. } = argument
        && !matches!(arguments.get(buffer), Some(Argument::Buffer(_)))
    {
        return Err(format!("a map of argument {buffer}, which is no buffer before it"));
    }
    arguments.push(argument);
    Ok(())
}

fn number<T: FromStr>(words: &mut SplitWhitespace<'_>) -> Result<T, String> {
    let word = words.next().ok_or("a number is missing")?;
    word.parse().map_err(|_| format!("`{word}` where a number belongs"))
}

fn typename(words: &mut SplitWhitespace<'_>) -> Result<String, String> {
    let ty = words.next().ok_or("a type is missing")?;
    size(ty).map(|_| ty.to_string()).ok_or(format!("`{ty}` is no element type"))
}

fn data(words: &mut SplitWhitespace<'_>) -> Result<Data, String> {
    let ty = typename(words)?;
    let generator = words.next().ok_or("a generator is missing")?.to_string();
    if !GENERATORS.iter().any(|(name, _)| *name == generator) {
        return Err(format!("`{generator}` is no generator"));
    }
    Ok(Data { seed: number(words)?, count: count(&ty, words)?, ty, generator })
}

/// Bytes of a buffer.
const MOST: usize = 1 << 30;

fn count(ty: &str, words: &mut SplitWhitespace<'_>) -> Result<usize, String> {
    let count: usize = number(words)?;
    match count.checked_mul(size(ty).unwrap_or(1)) {
        Some(bytes) if bytes <= MOST => Ok(count),
        _ => Err(format!("{count} elements of {ty}: a buffer has at most {MOST} bytes")),
    }
}

/// `= #hash`, then `within ulp absolute` or nothing.
fn compared(data: Data, words: &mut SplitWhitespace<'_>) -> Result<Argument, String> {
    if words.next() != Some("=") {
        return Err("`=` and what is expected are missing".into());
    }
    let word = words.next().ok_or("a hash is missing")?;
    let hash = word.strip_prefix('#').and_then(|digits| u64::from_str_radix(digits, 16).ok());
    let expected = Some(hash.ok_or(format!("`{word}` where `#` and a hash in hexadecimal belong"))?);
    let tolerance = match words.next() {
        None => None,
        Some("within") => Some(Tolerance { ulp: number(words)?, absolute: number(words)? }),
        Some(word) => return Err(format!("`{word}` where `within` or nothing belongs")),
    };
    Ok(Argument::Buffer(Buffer { data, expected, tolerance }))
}

fn map(words: &mut SplitWhitespace<'_>) -> Result<Argument, String> {
    let buffer = number(words)?;
    let ty = words.next().unwrap_or_default();
    let data_type = named(TensorDataType::ALL, ty)?;
    let mut map = tensor_map(data_type, Swizzle::None, OutOfBounds::Zero);
    let mut key = "";
    let mut corners = Im2col { lower: Vec::new(), upper: Vec::new() };
    for word in words {
        if let (true, Ok(at)) = (matches!(key, "lower" | "upper"), word.parse::<i32>()) {
            if key == "lower" {
                corners.lower.push(at)
            } else {
                corners.upper.push(at)
            }
            continue;
        }
        match (key, word.parse::<u64>()) {
            ("dims", Ok(n)) => map.dims.push(n),
            ("strides", Ok(n)) => map.strides.push(n),
            ("box", Ok(n)) => map.box_dims.push(n as u32),
            ("steps", Ok(n)) => map.element_strides.push(n as u32),
            ("address", Ok(n)) => map.address = n,
            ("swizzle", Err(_)) => map.swizzle = named(Swizzle::ALL, word)?,
            ("fill", Err(_)) => map.out_of_bounds = named(OutOfBounds::ALL, word)?,
            (_, Err(_)) => {
                key = word;
                continue;
            }
            (_, Ok(_)) => return Err(format!("`{word}` after `{key}`")),
        }
        // Names take one value, lists of numbers go on.
        if matches!(key, "swizzle" | "fill") {
            key = "";
        }
    }
    if map.element_strides.is_empty() {
        map.element_strides = vec![1; map.dims.len()];
    }
    if !corners.lower.is_empty() {
        map.im2col = Some(corners);
    }
    let map: TensorMap = map;
    Ok(Argument::Map { buffer, map })
}

/// The value of an enumeration whose name, in any case, is `word`.
fn named<T: Copy + std::fmt::Debug>(all: &[T], word: &str) -> Result<T, String> {
    let found = all.iter().find(|v| format!("{v:?}").eq_ignore_ascii_case(word));
    found.copied().ok_or(format!("`{word}` is none of {all:?}"))
}
