//! The texts of the conformance cases, from the instruction table.
//!
//! A module per family of instructions drafts a kernel per row: `kernel::Kernel` around the samples of a row,
//! `raw::Raw` around text written out by hand, which `ptx/` has where it is long. What a draft gives is recorded in `cases.tsv`, as the simulator gave it
//! and a card certified it. Drafts for chips that are not at hand compute what is expected themselves, without the
//! simulator.

/// The text `ptx/<name>.ptx` with its holes, each a name in braces, filled.
macro_rules! ptx {
    ($name:literal $(, $hole:ident $(= $value:expr)?)* $(,)?) => {{
        let text = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/generate/ptx/", $name, ".ptx")).to_string();
        $(let text = text.replace(concat!("{", stringify!($hole), "}"), &ptx!(@ $hole $(, $value)?).to_string());)*
        text
    }};
    (@ $hole:ident) => { $hole };
    (@ $hole:ident, $value:expr) => { $value };
}

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

use dualgemm_ptx::ast::{AddressBase, Instruction, Operand};
use dualgemm_ptx::isa::{self, Row};

/// What the outputs hold, in order, computed when it is asked for.
pub type Known = Box<dyn FnOnce() -> Vec<Vec<u8>> + Send>;

/// A case whose outputs are not known yet.
pub struct Draft {
    /// `family/row`.
    pub name: String,
    /// Head and module; the head has [`BLANK`] where what is expected belongs.
    pub text: String,
    /// What the outputs hold, where that is computed without the simulator; else nothing.
    pub expected: Known,
}

/// Stands in a draft for what an output must hold.
pub const BLANK: &str = "= ?";

fn samples(row: &'static Row) -> Vec<Instruction> {
    row.samples().into_iter().map(|s| s.instruction).collect()
}

fn samples_of(row: &str) -> Vec<Instruction> {
    isa::row(row).map(samples).unwrap_or_default()
}

/// Gives addresses another base: that of the operand at this position, from 0.
fn set_bases<'a>(instruction: &mut Instruction, base: impl Fn(usize) -> Option<&'a str>) {
    for (at, operand) in instruction.operands.iter_mut().enumerate() {
        if let (Operand::Address(address), Some(base)) = (operand, base(at)) {
            address.base = AddressBase::Ident(base.into());
        }
    }
}

/// Whether addresses are generic.
fn is_generic(instruction: &Instruction) -> bool {
    !instruction.modifiers.iter().any(|m| m.as_str().starts_with("shared"))
}

/// The lines of a body, instructions a tab in.
fn indented(body: &str) -> String {
    let mut text = String::new();
    for line in body.lines().map(str::trim).filter(|l| !l.is_empty()) {
        let outer = line.ends_with(':') || line.starts_with(['{', '}']);
        text += &format!("{}{line}\n", if outer { "" } else { "\t" });
    }
    text
}

fn bytes_of(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Every draft, in the order of names.
pub fn drafts() -> Vec<Draft> {
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
    list.sort_by(|a, b| a.name.cmp(&b.name));
    list
}
