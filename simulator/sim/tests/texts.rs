//! Kernels as text. Bad ones must trap with exactly the text beside them, and their mended twins must not; what is no
//! PTX, or no launch, is refused in words.
//!
//! `fail/<check>/<case>.ptx` holds both twins: lines ending in `//BAD` are only in the bad kernel, lines starting with
//! `//FIX` only in the mended one. The first line says how to launch it, and those after it what to launch next. `<case>.stderr` is the message.
//! `UPDATE_GOLDEN=1 cargo test --test texts` writes the messages anew, to be read before they are committed.
//!
//! `cases/` has texts of a few lines, and what comes of each; `declared.txt` says how they are written.

use dualgemm_cases::{expanded, fits, paragraphs};
use dualgemm_device::{Args, Device, Error, LaunchSpec};
use dualgemm_ptx::Target;
use dualgemm_sim::{Card, Checks, Config, Gpu};
use std::path::{Path, PathBuf};

fn dims(text: &str) -> [u32; 3] {
    let mut out = [1; 3];
    for (o, n) in out.iter_mut().zip(text.split(',')) {
        *o = n.parse().unwrap();
    }
    out
}

/// Launches what the first lines of `text` say, or one thread, one after another; a launch without `args` has those of the
/// first. What the last one printed, and what the first buffer holds.
fn run(text: &str, config: Config) -> Result<(String, Vec<u8>), Error> {
    let mut launches: Vec<&str> = text.lines().map_while(|l| l.strip_prefix("// launch ")).collect();
    if launches.is_empty() {
        launches.push("");
    }
    let value = |line: &str, key: &str| {
        line.split(' ').find_map(|f| f.strip_prefix(key)?.strip_prefix('=')).map(str::to_owned)
    };
    let target = text.split(".target ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let card = target.and_then(Target::from_name).map_or(Card::H100, Card::of);
    let gpu = Gpu::new(config.card(card).checks(Checks::ALL));
    let module = gpu.load(text)?;
    let (mut args, mut buffers) = (Args::new(), Vec::new());
    for arg in value(launches[0], "args").iter().flat_map(|a| a.split(',')) {
        let (kind, n) = arg.split_once(':').unwrap();
        let bytes = n.parse().unwrap();
        let buffer = gpu.alloc(bytes)?;
        match kind {
            "freed" => gpu.free(buffer)?,
            _ => buffers.push((buffer, bytes)),
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
        gpu.launch(&spec)?;
    }
    let mut left = Vec::new();
    if let Some(&(buffer, bytes)) = buffers.first() {
        left.resize(bytes, 0);
        gpu.copy_from(&mut left, buffer)?;
    }
    Ok((gpu.take_outcome().map(|outcome| outcome.output).unwrap_or_default(), left))
}

/// The text without fixes, and with them. Both keep their line numbers.
fn twins(text: &str) -> [String; 2] {
    let good = text
        .lines()
        .map(|l| if l.trim_end().ends_with("//BAD") { String::new() } else { l.replacen("//FIX ", "", 1) })
        .collect::<Vec<_>>()
        .join("\n");
    [text.into(), good]
}

/// Collects what `wrong` says of each case.
fn check(wrong: impl Fn(&Path, [String; 2]) -> Option<String>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fail");
    let files = |dir: PathBuf| std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut cases: Vec<_> = files(root).flat_map(files).collect();
    cases.retain(|path| path.extension().is_some_and(|e| e == "ptx"));
    assert!(cases.len() >= 50, "only {} cases found", cases.len());
    cases.sort();
    let of = |path: &PathBuf| {
        let said = wrong(path, twins(&std::fs::read_to_string(path).unwrap()))?;
        Some(format!("{}: {said}", path.display()))
    };
    let wrong: Vec<String> = cases.iter().filter_map(of).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn seeds() -> impl Iterator<Item = Config> {
    (0..8).map(|seed| Config::default().seed(seed))
}

#[test]
fn bad_kernels_trap_with_their_message_exact() {
    check(|path, [bad, _]| {
        let message = |e| format!("{e}\n");
        let got = run(&bad, Config::default()).map_or_else(message, |_| "nothing was noticed\n".into());
        let golden = path.with_extension("stderr");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&golden, &got).unwrap();
        }
        let want = std::fs::read_to_string(&golden).unwrap_or_default();
        (got != want).then(|| format!("\n--- found\n{got}--- expected\n{want}"))
    });
}

#[test]
fn mended_kernels_pass_under_every_seed() {
    check(|_, [_, mended]| {
        let fails = |config: Config| run(&mended, config.clone()).err().map(|e| format!("{config:?}:\n{e}"));
        seeds().find_map(fails)
    });
}

#[test]
fn bad_kernels_trap_under_every_seed() {
    check(|_, [bad, _]| {
        let passes = |config: &Config| run(&bad, config.clone()).is_ok();
        seeds().find(passes).map(|config| format!("{config:?}: nothing was noticed"))
    });
}

/// What comes of a text. Nothing in `cases/` takes long.
fn outcome(text: &str) -> Result<(String, Vec<u8>), String> {
    let head = if text.contains(".version") { "" } else { ".version 8.7 .target sm_90a .address_size 64\n" };
    let (launch, rest) = text.split_at(if text.starts_with("//") { text.find('\n').unwrap() + 1 } else { 0 });
    let config = Config { max_instructions: 10_000, ..Config::default() };
    run(&format!("{launch}{head}{rest}"), config).map_err(|e| e.to_string())
}

/// Whether a text comes to what a line of `cases/` says, and what it came to.
fn comes_to(text: &str, says: &str) -> (bool, String) {
    let found = outcome(text);
    let right = match (says.split_once(' ').unwrap_or((says, "")), &found) {
        (("ok", ""), Ok(_)) => true,
        (("prints", pattern), Ok((output, _))) => fits(output, pattern),
        (("bytes", number), Ok((output, _))) => output.len().to_string() == number,
        (("words", words), Ok((_, buffer))) => {
            let words = words.split(' ').flat_map(|word| word.parse::<u32>().unwrap().to_le_bytes());
            words.eq(buffer.iter().copied())
        }
        (("error", pattern), Err(message)) => fits(message, pattern),
        _ => false,
    };
    (right, format!("{found:?}"))
}

/// `NAME "TEXT"` as a variable of module scope.
fn text_variable(line: &str) -> String {
    let (name, text) = line.split_once(' ').unwrap();
    let bytes: Vec<String> = text.trim_matches('"').bytes().chain([0]).map(|byte| byte.to_string()).collect();
    format!(".global .b8 {name}[{}] = {{{}}};", bytes.len(), bytes.join(", "))
}

#[test]
fn texts_come_to_what_is_said_of_them_exact() {
    let files = [
        ("declared.txt", include_str!("cases/declared.txt")),
        ("instructions.txt", include_str!("cases/instructions.txt")),
    ];
    let (mut names, mut wrong) = (Vec::new(), Vec::new());
    for file in files {
        paragraphs(file, &mut names, &mut |lines| {
            let (mut texts, mut ended) = (vec![String::new()], false);
            for (at, line) in lines {
                if let Some(says) = line.strip_prefix("> ") {
                    for text in &texts {
                        let (right, found) = comes_to(text, says);
                        if !right {
                            wrong.push(format!("{at}:\n{text}came to {found}\nnot {says}"));
                        }
                    }
                    ended = true;
                    continue;
                }
                if std::mem::take(&mut ended) {
                    texts = vec![String::new()];
                }
                let more = match line.split_once(' ') {
                    Some(("text", variable)) => vec![text_variable(variable)],
                    Some(("each", list)) => expanded(list),
                    _ => vec![line.clone()],
                };
                let all =
                    texts.iter().flat_map(|text| more.iter().map(move |line| format!("{text}{line}\n")));
                texts = all.collect();
            }
        });
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn calls_take_no_longer_than_their_number() {
    // Two functions on each of 40 floors, each of which calls both of the next.
    let pair = |i: usize| {
        let calls = if i < 39 { format!("call a{0}; call b{0};", i + 1) } else { String::new() };
        format!(".func a{i}() {{ {calls} ret; }}\n.func b{i}() {{ {calls} ret; }}\n")
    };
    let floors: String = (0..40).rev().map(pair).collect();
    outcome(&format!(
        "{floors}.visible .entry k() {{ .reg .pred p; setp.ne.u32 p, 0, 0; @p call a0; ret; }}"
    ))
    .unwrap();
    // A chain that is deeper than a stack.
    let link = |i| format!(".func f{}() {{ call f{i}; ret; }}\n", i + 1);
    let chain: String = (0..4000).map(link).collect();
    outcome(&format!(".func f0() {{ ret; }}\n{chain}.visible .entry k() {{ call f4000; ret; }}")).unwrap();
}
