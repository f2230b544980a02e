//! Block scales to the 128x4 atoms that Blackwell's kernels read, from any order, padding zeroed: a NaN there would multiply
//! a zero code. Of rows in groups each group's start with an atom of their own.
//!
//! ```text
//! CTA (row, 128 words), 128 threads: a thread takes four scales of the row, one word of an atom
//! ```

use dualgemm_device::{Args, Device, DevicePtr, FunctionId, LaunchSpec};
use dualgemm_formats::ScaleLayout;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;

use super::rowwise::scale_offset;
use super::{load, module, take_turn, target_for};
use crate::Error;
use crate::error::refused;
use crate::limits::fits;
use crate::parts::format::{ATOM_BYTES, ATOM_ROWS};
use crate::parts::groups::{GroupRows, Groups};

/// Name of the kernel in its module.
pub const ENTRY: &str = "scale_atoms";
/// Threads of a CTA, a word each.
const THREADS: u32 = 128;
/// Blocks of an atom, whose scales are a word.
const BLOCKS: u32 = 4;

/// Every kernel: the order that scales are in, and whether they are of rows in groups.
pub fn configs() -> Vec<(ScaleLayout, bool)> {
    ScaleLayout::ALL.into_iter().flat_map(|layout| [false, true].map(|grouped| (layout, grouped))).collect()
}

/// A name that tells them apart.
pub fn name(&(from, grouped): &(ScaleLayout, bool)) -> String {
    format!("{from}{}", if grouped { "_grouped" } else { "" })
}

/// Generates the kernel for scales in this order, of rows in groups or in one.
pub fn generate(from: ScaleLayout, grouped: bool, target: Target) -> Result<Module, Error> {
    let about = format!("block scales to 128x4 atoms: {}", name(&(from, grouped)));
    module(target, &about, ENTRY, |k| emit(k, (from, grouped), target))
}

fn emit(k: &mut Kernel, (layout, grouped): (ScaleLayout, bool), target: Target) {
    k.required_threads(THREADS);
    let from = k.pointer("scales");
    let sizes = [k.param::<U32>("rows"), k.param::<U32>("blocks")];
    let to = k.pointer("out");
    let groups = grouped.then(|| GroupRows::declare(k));
    take_turn(k, target);
    let [rows, blocks] = sizes.map(|size| k.ld_param(&size));
    let (row, chunk) = (k.special(Special::CtaidX), k.special(Special::CtaidY));
    let thread = k.special(Special::TidX);
    let atom = k.eval(chunk * THREADS + thread);
    let first = k.eval(atom * BLOCKS);
    let in_rows = k.compare(Cmp::Lt, row, rows);
    let offset = scale_offset(k, layout, row, first, blocks);
    let start = k.ld_pointer(&from);
    let from = k.offset(start, offset);
    let mut word = k.mov::<U32>(0u32);
    for i in 0..BLOCKS {
        let inside = k.compare_and(Cmp::Lt, first + i, blocks, in_rows);
        let scale = k.mov::<U32>(0u32);
        k.when(inside).to(scale).ld_byte(from.at(i));
        word = k.eval(word | (scale << (8 * i)));
    }
    let (row, here) = match &groups {
        None => (row, k.compare(Cmp::Lt, first, blocks)),
        Some(groups) => {
            let (row, of_group) = groups.scale_row(k, row);
            (row, k.compare_and(Cmp::Lt, first, blocks, of_group))
        }
    };
    let offset = scale_offset(k, ScaleLayout::Sf128x4, row, first, blocks);
    let start = k.ld_pointer(&to);
    let to = k.offset(start, offset);
    k.when(here).st(to, word);
}

/// The kernel, loaded on a device.
#[derive(Debug, Clone, Copy)]
pub struct ScaleAtoms {
    function: FunctionId,
    grouped: bool,
}

impl ScaleAtoms {
    /// Loads the kernel for scales in this order, of rows in groups or in one.
    pub fn new(device: &dyn Device, from: ScaleLayout, grouped: bool) -> Result<Self, Error> {
        let module = generate(from, grouped, target_for(device.info().arch))?;
        Ok(Self { function: load(device, &module, ENTRY)?, grouped })
    }

    /// Bytes of the atoms of `rows` rows of `blocks` blocks in `count` groups, at most.
    pub fn grouped_bytes((rows, blocks): (usize, usize), count: usize) -> usize {
        Groups::atoms(rows, count) * blocks.div_ceil(BLOCKS as usize) * ATOM_BYTES as usize
    }

    /// The launch that writes the scales of `rows` rows of `blocks` blocks to `to`:
    /// `ScaleLayout::Sf128x4.len(rows, blocks)` bytes, padding zeroed. Of rows in groups it is up to
    /// [`grouped_bytes`](Self::grouped_bytes); blocks behind the last of a row are zeroed, rows that no group has are not
    /// written.
    ///
    /// # Errors
    /// If there are none, too many for a grid, `to` is misaligned, or there are groups for a kernel without, or none.
    pub fn spec(
        &self,
        (rows, blocks): (usize, usize),
        from: DevicePtr,
        to: DevicePtr,
        groups: Option<&Groups>,
    ) -> Result<LaunchSpec, Error> {
        let chunks = blocks.div_ceil((BLOCKS * THREADS) as usize);
        let padded = if self.grouped { rows } else { rows.next_multiple_of(ATOM_ROWS as usize) };
        if rows == 0 || blocks == 0 || padded > i32::MAX as usize || chunks > u16::MAX as usize {
            let found = format!("{rows} rows of {blocks}");
            return refused("scales", found, "at least one, in less than 2^31 rows of at most 2^25");
        }
        fits("scales", "address of their atoms", to.0 as usize, 1, 16)?;
        let args = Args::new().ptr(from).u32(rows as u32).u32(blocks as u32).ptr(to);
        let args = Groups::args_if(groups, self.grouped, "scales", args)?;
        Ok(LaunchSpec::new(self.function, [padded as u32, chunks as u32, 1], [THREADS, 1, 1]).args(args))
    }
}
