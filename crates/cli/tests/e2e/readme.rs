//! The commands of the README and of docs/command.md work as printed, in order, from the root of the repository.

use crate::common::{dualgemm, text};

const README: &str = include_str!("../../../../README.md");
const COMMAND: &str = include_str!("../../../../docs/command.md");
const THIS_COMMAND: &str = "cargo run --release -p dualgemm-cli --";

/// Lines of the shell blocks of both.
fn commands() -> Vec<&'static str> {
    let blocks = [README, COMMAND].into_iter().flat_map(|page| page.split("```sh\n").skip(1));
    blocks.filter_map(|block| block.split("```").next()).flat_map(str::lines).collect()
}

/// A directory that looks like the root of the repository, for outputs to land in.
fn root() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let testdata = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    std::os::unix::fs::symlink(testdata, dir.path().join("testdata")).unwrap();
    dir
}

#[test]
fn every_command_succeeds() {
    let dir = root();
    let mut run = 0;
    for command in commands() {
        let args = match (command.strip_prefix(THIS_COMMAND), command.strip_prefix("dualgemm ")) {
            (Some(args), _) | (None, Some(args)) => args,
            // The other command is what runs this test.
            (None, None) => {
                assert_eq!(command, "cargo test --workspace");
                continue;
            }
        };
        dualgemm().current_dir(&dir).args(args.split_whitespace()).assert().success();
        run += 1;
    }
    assert!(run >= 8, "only {run} commands found");
    assert!(dir.path().join("c.safetensors").exists());
}

/// The lines of a text without what depends on the machine: the kernel, times, rates and the last places of sums.
fn stable(text: &str) -> Vec<String> {
    let line = |line: &str| {
        let label = line.split_whitespace().next().unwrap_or_default();
        match label {
            "time" | "roofline" | "memory" => label.to_owned(),
            kernel if kernel.contains("-w4a16-") => line.split_once(": ").unwrap().1.to_owned(),
            "check" | "worst" => line.replace(|c: char| c.is_ascii_digit(), ""),
            _ => line.to_owned(),
        }
    };
    text.lines().map(line).collect()
}

#[test]
fn the_output_that_is_shown_is_what_the_first_command_prints() {
    let dir = root();
    let command = README.lines().find_map(|line| line.strip_prefix(THIS_COMMAND)).unwrap();
    let output = dualgemm().current_dir(&dir).args(command.split_whitespace()).output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    let shown = COMMAND.split("```text\n").nth(1).and_then(|block| block.split("```").next()).unwrap();
    assert_eq!(stable(&printed), stable(shown), "{printed}");
    assert!(printed.lines().all(|line| line.chars().count() <= 140), "{printed}");
    assert!(
        printed.contains(" GFLOP/s, ") && output.stderr.is_empty(),
        "no progress where stderr is no terminal"
    );
}

#[test]
fn every_subcommand_is_in_its_document() {
    let help = text(&["--help"], 0);
    let names =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // Descriptions that wrap are indented further than names.
    let names = names.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    for name in names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help") {
        assert!(COMMAND.contains(&format!("| `{name}")), "docs/command.md does not list {name}");
    }
}
