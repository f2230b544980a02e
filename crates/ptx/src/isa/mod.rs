//! The instruction table: one [`Row`] per instruction form, from which everything else is derived.
//!
//! A row says how the form is written (see `grammar`), since which PTX version and on which targets it
//! exists, and where the specification describes it. From the table come the legality check
//! ([`crate::legal`]), the sample instructions that assembler and conformance tests run
//! ([`Row::samples`]), and the list in the documentation. One file per family; `family` in the simulator's
//! `decode/mod.rs` says which file of `exec/` has it.
//!
//! Targets are those that ptxas 13.0 and 13.5 accept and refuse. Versions are the specification's, or later where
//! ptxas wants later: it lets some instructions pass in versions older than they are.

pub(crate) mod grammar;
mod matching;
mod sample;

use crate::ast::{Instruction, Version};
use crate::target::Targets;
use grammar::Pattern;
use std::collections::HashMap;
use std::sync::LazyLock;

pub(crate) use matching::{Fit, Letters, Scope, fit, opcode, opcode_in_any_order};
pub use sample::Sample;

macro_rules! rows {
    ($family:ident; $($name:ident $since:literal $targets:ident $section:literal $form:literal;)*) => {
        pub(super) const ROWS: &[super::Row] = &[$(super::Row {
            name: stringify!($name),
            family: super::Family::$family,
            form: $form,
            since: crate::ast::Version::of(stringify!($since)),
            targets: crate::target::Targets::$targets,
            section: $section,
        },)*];
    };
}

mod foreign;

macro_rules! families {
    ($($family:ident $file:ident $doc:literal,)*) => {
        $(mod $file;)*

        /// Instructions that belong together; also the name of a file here and in the simulator.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Family { $(#[doc = $doc] $family,)* }

        impl Family {
            /// Every family, in the order of the table.
            pub const ALL: &'static [Family] = &[$(Family::$family,)*];

            /// The stem of its file.
            pub const fn as_str(self) -> &'static str {
                match self { $(Family::$family => stringify!($file),)* }
            }

            /// Its rows.
            pub const fn rows(self) -> &'static [Row] {
                match self { $(Family::$family => $file::ROWS,)* }
            }
        }
    };
}

families! {
    Arith arith "Integer and floating-point arithmetic, comparison, logic.",
    Cvt cvt "Conversions.",
    LdSt ld_st "Moves, loads, stores, atomics.",
    Mbarrier mbarrier "Barriers in shared memory and fences.",
    Tma tma "Bulk copies.",
    Mma mma "Warp-level matrix instructions.",
    Wgmma wgmma "Warpgroup matrix instructions of sm_90a.",
    Tcgen05 tcgen05 "Tensor memory and its matrix instructions.",
    Control control "Branches, barriers, lane communication.",
}

/// One instruction form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Its name, unique in the table: `ld_v4`, `wgmma_f16_rs`.
    pub name: &'static str,
    /// The family it belongs to.
    pub family: Family,
    /// How it is written, in the notation `isa/grammar.rs` explains.
    pub form: &'static str,
    /// The first PTX ISA version that has it. A target has a first version of its own.
    pub since: Version,
    /// The targets that have it.
    pub targets: Targets,
    /// Anchor of its description in the PTX ISA.
    pub section: &'static str,
}

impl Row {
    /// Where the PTX ISA describes it.
    pub fn url(&self) -> String {
        format!("https://docs.nvidia.com/cuda/parallel-thread-execution/#{}", self.section)
    }
}

/// Every row of the table, family by family.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    Family::ALL.iter().flat_map(|family| family.rows())
}

/// The row called `name`.
pub fn row(name: &str) -> Option<&'static Row> {
    rows().find(|row| row.name == name)
}

/// The rows that `instruction` has the opcode of, whatever its operands. More than one if forms differ only
/// in their operands.
pub fn find(instruction: &Instruction) -> Vec<&'static Row> {
    let forms = OPCODES.get(&*instruction.root).map(Vec::as_slice).unwrap_or_default();
    forms
        .iter()
        .filter(|(_, pattern)| !opcode(pattern, &instruction.modifiers).is_empty())
        .map(|(row, _)| *row)
        .collect()
}

/// Forms that others write and ptxas takes: what a row has, with words that change no value. The builder does not make them;
/// [`legal::check_foreign`](crate::legal::check_foreign) knows them.
pub fn foreign() -> impl Iterator<Item = &'static Row> {
    foreign::ROWS.iter()
}

/// The table as Markdown: one section per family, one line per row.
pub fn markdown() -> String {
    let mut text = String::new();
    for family in Family::ALL {
        text += &format!("## {}\n\n| row | form | PTX | targets |\n|---|---|---|---|\n", family.as_str());
        for row in family.rows() {
            // A bar inside a table cell must be escaped.
            let form = row.form.replace('|', "\\|");
            let targets = if row.targets == Targets::ALL { "all".into() } else { row.targets.to_string() };
            text += &format!("| [{}]({}) | `{form}` | {} | {targets} |\n", row.name, row.url(), row.since);
        }
        text.push('\n');
    }
    text
}

/// The table by opcode root, with forms read.
pub(crate) static OPCODES: LazyLock<Opcodes> = LazyLock::new(|| by_root(rows()));

/// The forms of others by opcode root.
pub(crate) static FOREIGN: LazyLock<Opcodes> = LazyLock::new(|| by_root(foreign()));

pub(crate) type Opcodes = HashMap<String, Vec<(&'static Row, Pattern)>>;

fn by_root(rows: impl Iterator<Item = &'static Row>) -> Opcodes {
    let mut map = Opcodes::new();
    for row in rows {
        // `every_form_is_well_written` reads them all, so none is skipped here.
        if let Ok(pattern) = grammar::parse(row.form) {
            map.entry(pattern.root.clone()).or_default().push((row, pattern));
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_form_is_well_written() {
        for row in rows().chain(foreign()) {
            if let Err(mistake) = grammar::parse(row.form) {
                panic!("{}: {mistake} in {}", row.name, row.form);
            }
        }
    }

    #[test]
    fn markdown_lists_every_row_once() {
        let text = markdown();
        assert_eq!(text.matches("](https://docs.nvidia.com/").count(), rows().count());
        let line = "| [wgmma_fence](https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-\
                    level-matrix-instructions-wgmma-fence) | `wgmma.fence.sync.aligned` | 8.0 | sm_90a |";
        assert!(text.lines().any(|l| l == line), "{text}");
    }

    #[test]
    fn names_are_unique() {
        let names: HashSet<&str> = rows().chain(foreign()).map(|row| row.name).collect();
        assert_eq!(names.len(), rows().count() + foreign().count());
    }
}
