//! Writes the conformance files of `crates/testkit/ptx` from the instruction table:
//! `cargo run -p dualgemm-testkit --example generate [row…]`.
//!
//! Order: a family's module drafts a kernel per row ([`kernel::Kernel`]), the simulator runs it, what it gives
//! goes into the file as expected. A card certifies that afterwards (`dualgemm conformance`). Drafts for chips that
//! are not at hand bring what is expected along, computed without the simulator: it must agree. Nothing is written for
//! a draft that fails; all failures are listed at the end.

mod asynchronous;
mod barrier;
mod control;
mod kernel;
mod matrix;
mod memory;
mod raw;
mod registers;
mod stochastic;
mod tcgen05;
mod tensor;
mod tensor_map;
mod tma;
mod tma_modes;
mod wgmma;

use dualgemm_ptx::{Target, isa};
use dualgemm_sim::report::Card;
use dualgemm_sim::{Config, Gpu};
use dualgemm_testkit::conformance::{self, Argument};
use rayon::prelude::*;
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

/// A file that lacks what is expected (`= ?`).
pub struct Draft {
    family: &'static str,
    name: String,
    text: String,
    /// What the outputs hold in order, where that is known without the simulator.
    expected: Vec<Vec<u8>>,
}

fn drafts() -> Vec<Draft> {
    let mut list: Vec<Draft> = isa::rows().filter_map(registers::draft).collect();
    list.extend(isa::rows().filter_map(memory::draft));
    list.extend(matrix::drafts());
    list.extend(wgmma::drafts());
    list.extend(tma::drafts());
    list.extend(barrier::drafts());
    list.extend(asynchronous::drafts());
    list.extend(control::drafts());
    list.extend(tcgen05::drafts());
    list.extend(tma_modes::drafts());
    list.extend(tensor_map::drafts());
    list.extend(stochastic::drafts());
    list
}

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("ptx");
    let list: Vec<Draft> =
        drafts().into_iter().filter(|d| wanted.is_empty() || wanted.contains(&d.name)).collect();
    let failures: Vec<String> = list.par_iter().filter_map(|draft| write(&root, draft).err()).collect();
    for failure in &failures {
        println!("{failure}\n");
    }
    println!("{} files, {} failures", list.len() - failures.len(), failures.len());
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn write(root: &Path, draft: &Draft) -> Result<(), String> {
    let file = format!("{}/{}.ptx", draft.family, draft.name);
    let explain = |e: &dyn std::fmt::Display| format!("{file}: {e}");
    let case = conformance::load(&file, &draft.text.replace("= ?", "= #0")).map_err(|e| explain(&e))?;
    let target = Target::from_name(case.target()).ok_or_else(|| explain(&"its target is unknown"))?;
    let gpu = Gpu::new(Config::default().card(Card::of(target)));
    let run = std::panic::AssertUnwindSafe(|| conformance::run(&gpu, &case));
    let outcome = std::panic::catch_unwind(run)
        .map_err(|_| explain(&"the simulator panicked"))?
        .map_err(|e| explain(&e))?;
    for (number, want) in draft.expected.iter().enumerate() {
        let (launch, _, found) = outcome.0.get(number).ok_or_else(|| explain(&"an output is missing"))?;
        if let Some(difference) = difference(found, want) {
            return Err(explain(&format!("launch {launch}: {difference}")));
        }
    }
    let mut text = String::new();
    let mut pieces = draft.text.split("= ?");
    text += pieces.next().unwrap_or_default();
    for ((launch, argument, bytes), piece) in outcome.0.iter().zip(pieces) {
        let Argument::Buffer(buffer) = &case.launches[*launch].arguments[*argument] else { continue };
        let width = bytes.len() / buffer.data.count.max(1);
        text.push('=');
        if buffer.data.count <= 16 {
            for element in bytes.chunks_exact(width) {
                let value = element.iter().rev().fold(0u64, |v, &b| v << 8 | u64::from(b));
                let _ = write!(text, " {value:0w$x}", w = 2 * width);
            }
        } else {
            let _ = write!(text, " #{:016x}", conformance::hash(bytes));
        }
        text += piece;
    }
    let path = root.join(&file);
    std::fs::create_dir_all(root.join(draft.family)).map_err(|e| explain(&e))?;
    std::fs::write(path, text).map_err(|e| explain(&e))
}

/// Where the simulator and what is known differ, in words.
fn difference(found: &[u8], want: &[u8]) -> Option<String> {
    let words = |bytes: &[u8]| -> Vec<u32> {
        bytes.chunks(4).map(|w| w.iter().rev().fold(0, |v, &b| v << 8 | u32::from(b))).collect()
    };
    let (found, want) = (words(found), words(want));
    if found.len() != want.len() {
        return Some(format!("{} words where {} are expected", found.len(), want.len()));
    }
    let wrong: Vec<usize> = (0..found.len()).filter(|&i| found[i] != want[i]).collect();
    let first = *wrong.first()?;
    let (count, of) = (wrong.len(), found.len());
    Some(format!(
        "{count} of {of} words differ, first [{first}]: {:#x}, {:#x} expected",
        found[first], want[first]
    ))
}
