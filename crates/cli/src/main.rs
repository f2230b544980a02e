//! The `dualgemm` command; everything is in the library of this crate.

fn main() -> std::process::ExitCode {
    dualgemm_cli::main()
}
