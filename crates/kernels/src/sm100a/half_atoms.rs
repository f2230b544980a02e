//! Tiles of the 64 features whose scales are in one half of the lines of an atom: 16 features in a row, 32 apart, four
//! times.
//!
//! A tile of 64 features in a row takes half of the columns of its atom's words, so that half of what TMA brings of scales
//! is for others. Half of the lines is 256 bytes in a row instead, all of them the tile's own. They fill 16 lanes of
//! tensor memory; up's fill the other 16. So gate and up are one operand of 128 rows, in the order of these lanes:
//!
//! ```text
//! row of the operand, column of the sums   32 c + i                       32 c + 16 + i
//! lane and column of its scales            i, c                           16 + i, c
//! feature of half h of atom a              gate 128 a + 32 c + 16 h + i   up, the same        c < 4, i < 16
//! ```
//!
//! Shared memory has scales as `[gate, up][eight lines][atoms along K][128 bytes]`: a box of TMA brings eight lines of all
//! atoms, and the descriptor says how far the next eight are.

use dualgemm_ptx::builder::*;

use super::config::{COLUMN_ROWS, HALF_LINES};
use super::fused::Fused;
use crate::parts::format::{ATOM_ROWS, LINES_BYTES};
use crate::parts::operand::OperandIndex;

impl Fused<'_> {
    /// The first feature of the tile that `feature`, a multiple of 64, stands for.
    pub(super) fn half_atoms_feature(&self, k: &mut Kernel, feature: Reg<U32>) -> Reg<U32> {
        let atom = k.eval(feature & !(ATOM_ROWS - 1));
        let half = self.half_of_atom(k, feature);
        k.eval(half * HALF_LINES + atom)
    }

    fn half_of_atom(&self, k: &mut Kernel, feature: Reg<U32>) -> Reg<U32> {
        k.eval((feature >> (ATOM_ROWS / 2).ilog2()) & 1)
    }

    /// The first row of gate, or of up, that this CTA keeps: the odd one of a pair has the last two of the four times 16.
    pub(super) fn half_atoms_rows(&self, k: &mut Kernel, feature: Reg<U32>) -> Reg<U32> {
        let first = self.half_atoms_feature(k, feature);
        k.eval(self.half * (ATOM_ROWS / 2) + first)
    }

    /// Loads gate, up and their scales of a stage: 16 rows at a time from `row` on, and half of the lines of `atom`.
    pub(super) fn load_half_atoms(
        &self,
        k: &mut Kernel,
        stage: Reg<U32>,
        slot: Addr<Shared>,
        full: Addr<Shared>,
        (row, atom, feature): (Reg<U32>, Reg<U32>, Reg<U32>),
    ) {
        let (layout, [_, part, _], options) = (self.layout, self.config.parts(), self.options());
        let column = k.eval(stage * part.box_columns());
        let atoms = k.eval(self.steps.div_ceil(self.config.atom_steps()));
        let line = k.eval(atom * atoms + stage * part.along_k());
        let half = self.half_of_atom(k, feature);
        let words = LINES_BYTES / 8;
        let word = k.eval(half * (HALF_LINES / 8 * words));
        for (up, which) in (0..).zip([OperandIndex::Gate, OperandIndex::Up]) {
            for group in 0..part.rows / HALF_LINES {
                let row = k.eval(row + group * COLUMN_ROWS);
                let to = (group * COLUMN_ROWS + up * HALF_LINES) * part.row_bytes();
                let to = slot.at(layout.codes[OperandIndex::Gate as usize] + to);
                self.maps.load_codes(k, which, to, (column, row), (full, &options));
            }
            for eight in 0..HALF_LINES / 8 {
                let word = k.eval(word + eight * words);
                let to = (up * HALF_LINES / 8 + eight) * part.along_k() * LINES_BYTES;
                let to = slot.at(layout.scales[OperandIndex::Gate as usize] + to);
                self.maps.load_scales(k, which, to, (word, line), (full, &options));
            }
        }
    }
}
