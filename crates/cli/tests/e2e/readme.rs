//! The commands of the README and of docs/command.md work as printed, in order, from the root of the repository.

use crate::common::dualgemm;

const README: &str = include_str!("../../../../README.md");
const COMMAND: &str = include_str!("../../../../docs/command.md");
const THIS_COMMAND: &str = "cargo run --release -p dualgemm-cli --";

/// Lines of the shell blocks of both.
fn commands() -> Vec<&'static str> {
    let blocks = [README, COMMAND].into_iter().flat_map(|page| page.split("```sh\n").skip(1));
    blocks.filter_map(|block| block.split("```").next()).flat_map(str::lines).collect()
}

#[test]
fn every_command_succeeds() {
    // A directory that looks like the root of the repository, for outputs to land in.
    let dir = tempfile::tempdir().unwrap();
    let testdata = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    std::os::unix::fs::symlink(testdata, dir.path().join("testdata")).unwrap();
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

#[test]
fn every_subcommand_is_in_its_document() {
    let help = dualgemm().arg("--help").output().unwrap();
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    let names =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // Descriptions that wrap are indented further than names.
    let names = names.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    for name in names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help") {
        assert!(COMMAND.contains(&format!("| `{name}")), "docs/command.md does not list {name}");
    }
}
