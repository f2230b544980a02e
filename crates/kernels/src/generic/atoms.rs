//! Block scales from rows to the 128x4 atoms that Blackwell's kernels read, padding zeroed: a NaN there would multiply a
//! zero code.
//!
//! ```text
//! CTA (128 rows, four blocks), 128 threads: thread r takes four scales of row r, one word of the atom
//! ```

use dualgemm_device::{Args, Device, DevicePtr, FunctionId, LaunchSpec};
use dualgemm_formats::ScaleLayout;
use dualgemm_gemm::Error as OperandError;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;

use super::quantize::fits;
use super::rowwise::scale_offset;
use super::{load, module, take_turn, target_for};
use crate::Error;

/// Name of the kernel in its module.
pub const ENTRY: &str = "scale_atoms";
/// Rows of an atom, each of them a thread.
const ROWS: u32 = 128;
/// Blocks of an atom.
const BLOCKS: u32 = 4;

/// Generates the kernel.
///
/// # Errors
/// If the target lacks an instruction.
pub fn generate(target: Target) -> Result<Module, Error> {
    module(target, "block scales from linear order to 128x4 atoms", ENTRY, |k| emit(k, target))
}

fn emit(k: &mut Kernel, target: Target) {
    k.required_threads(ROWS);
    let from = k.pointer("scales");
    let sizes = [k.param::<U32>("rows"), k.param::<U32>("blocks")];
    let to = k.pointer("out");
    take_turn(k, target);
    let [rows, blocks] = sizes.map(|size| k.ld_param(&size));
    let (group, atom) = (k.special(Special::CtaidX), k.special(Special::CtaidY));
    let thread = k.special(Special::TidX);
    let row = k.mad(group, ROWS, thread);
    let first = k.mul(atom, BLOCKS);
    let in_rows = k.compare(Cmp::Lt, row, rows);
    let byte = k.convert::<U64, U32>(first);
    let byte = k.mad_wide(row, blocks, byte);
    let start = k.ld_pointer(&from);
    let from = k.offset(start, byte);
    let mut word = k.mov::<U32>(0u32);
    for i in 0..BLOCKS {
        let block = k.add(first, i);
        let inside = k.compare_and(Cmp::Lt, block, blocks, in_rows);
        let scale = k.mov::<U32>(0u32);
        k.when(inside).to(scale).ld_byte(from.at(i));
        let placed = k.shl(scale, 8 * i);
        word = k.or(word, placed);
    }
    let offset = scale_offset(k, ScaleLayout::Sf128x4, row, first, blocks);
    let start = k.ld_pointer(&to);
    let to = k.offset(start, offset);
    k.st(to, word);
}

/// The kernel, loaded on a device.
#[derive(Debug, Clone, Copy)]
pub struct ScaleAtoms {
    function: FunctionId,
}

impl ScaleAtoms {
    /// Loads the kernel.
    ///
    /// # Errors
    /// If the device refuses the text.
    pub fn new(device: &dyn Device) -> Result<Self, Error> {
        Ok(Self { function: load(device, &generate(target_for(device.info().arch))?, ENTRY)? })
    }

    /// The launch that writes the scales of `rows` rows of `blocks` blocks to `to`,
    /// `ScaleLayout::Sf128x4.len(rows, blocks)` bytes.
    ///
    /// # Errors
    /// If there are none, too many for a grid, or `to` is misaligned.
    pub fn spec(
        &self,
        (rows, blocks): (usize, usize),
        from: DevicePtr,
        to: DevicePtr,
    ) -> Result<LaunchSpec, Error> {
        let [groups, atoms] = [rows.div_ceil(ROWS as usize), blocks.div_ceil(BLOCKS as usize)];
        if rows == 0 || blocks == 0 || rows > i32::MAX as usize || atoms > u16::MAX as usize {
            let (found, expected) = (
                format!("{rows} rows of {blocks}"),
                "at least one, in at most 2^31 rows of 262140".to_string(),
            );
            return Err(OperandError::Operand { tensor: "scales".into(), found, expected }.into());
        }
        fits("scales", "address of their atoms", to.0 as usize, 1, 16)?;
        let args = Args::new().ptr(from).u32(rows as u32).u32(blocks as u32).ptr(to);
        Ok(LaunchSpec::new(self.function, [groups as u32, atoms as u32, 1], [ROWS, 1, 1]).args(args))
    }
}
