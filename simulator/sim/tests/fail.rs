//! Bad kernels must trap with exactly the text beside them, and their mended twins must not.
//!
//! `fail/<check>/<case>.ptx` holds both: lines ending in `//BAD` are only in the bad kernel, lines starting with
//! `//FIX` only in the mended one. The first line says how to launch it, and those after it what to launch next. `<case>.stderr` is the message.
//! `UPDATE_GOLDEN=1 cargo test --test fail` writes the messages anew, to be read before they are committed.

use dualgemm_device::{Args, Device, Error, LaunchSpec};
use dualgemm_sim::{Card, Checks, Config, Gpu};
use std::path::{Path, PathBuf};

fn dims(text: &str) -> [u32; 3] {
    let mut out = [1; 3];
    for (o, n) in out.iter_mut().zip(text.split(',')) {
        *o = n.parse().unwrap();
    }
    out
}

/// Launches what the first lines of `text` say, one after another; a launch without `args` has those of the first.
fn run(text: &str, seed: u64) -> Result<(), Error> {
    let launches: Vec<&str> = text.lines().map_while(|l| l.strip_prefix("// launch ")).collect();
    let value = |line: &str, key: &str| {
        line.split(' ').find_map(|f| f.strip_prefix(key)?.strip_prefix('=')).map(str::to_owned)
    };
    let first = launches.first().expect("a launch line");
    let card = match value(first, "card").as_deref() {
        Some("B200") => Card::B200,
        _ => Card::H100,
    };
    let gpu = Gpu::new(Config::default().card(card).seed(seed).checks(Checks::ALL));
    let module = gpu.load(text)?;
    let mut args = Args::new();
    for arg in value(first, "args").iter().flat_map(|a| a.split(',')) {
        let (kind, n) = arg.split_once(':').unwrap();
        let buffer = gpu.alloc(n.parse().unwrap())?;
        if kind == "freed" {
            gpu.free(buffer)?;
        }
        args = args.ptr(buffer);
    }
    for line in launches {
        let f = gpu.function(module, value(line, "kernel").as_deref().unwrap_or("k"))?;
        let shape = |key: &str| value(line, key).map_or([1; 3], |text| dims(&text));
        let spec = LaunchSpec::new(f, shape("grid"), shape("block"))
            .cluster(shape("cluster"))
            .dynamic_shared(value(line, "shared").map_or(0, |n| n.parse().unwrap()))
            .programmatic(line.contains("programmatic"))
            .args(args.clone());
        // SAFETY: the device is simulated and fails a launch that leaves its memory.
        unsafe { gpu.launch(&spec) }?;
    }
    Ok(())
}

/// The text without fixes, and with them. Both keep their line numbers.
fn twins(text: &str) -> (String, String) {
    let bad = text.to_string();
    let good = text
        .lines()
        .map(|l| if l.trim_end().ends_with("//BAD") { String::new() } else { l.replacen("//FIX ", "", 1) })
        .collect::<Vec<_>>()
        .join("\n");
    (bad, good)
}

fn cases() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fail");
    let mut out = Vec::new();
    for dir in std::fs::read_dir(root).unwrap() {
        for file in std::fs::read_dir(dir.unwrap().path()).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|e| e == "ptx") {
                out.push(path);
            }
        }
    }
    out.sort();
    assert!(out.len() >= 50, "only {} cases found", out.len());
    out
}

#[test]
fn bad_kernels_trap_with_their_message_exact() {
    let mut wrong = Vec::new();
    for path in cases() {
        let text = std::fs::read_to_string(&path).unwrap();
        let got = match run(&twins(&text).0, 0) {
            Ok(()) => "nothing was noticed\n".to_string(),
            Err(e) => format!("{e}\n"),
        };
        let golden = path.with_extension("stderr");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&golden, &got).unwrap();
        }
        let want = std::fs::read_to_string(&golden).unwrap_or_default();
        if got != want {
            wrong.push(format!("{}:\n--- found\n{got}--- expected\n{want}", path.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn mended_kernels_pass_under_every_seed() {
    let mut wrong = Vec::new();
    for path in cases() {
        let text = std::fs::read_to_string(&path).unwrap();
        for seed in 0..8 {
            if let Err(e) = run(&twins(&text).1, seed) {
                wrong.push(format!("{}, seed {seed}:\n{e}", path.display()));
                break;
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn bad_kernels_trap_under_every_seed() {
    let mut wrong = Vec::new();
    for path in cases() {
        let text = std::fs::read_to_string(&path).unwrap();
        for seed in 0..8 {
            if run(&twins(&text).0, seed).is_ok() {
                wrong.push(format!("{}, seed {seed}: nothing was noticed", path.display()));
                break;
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
