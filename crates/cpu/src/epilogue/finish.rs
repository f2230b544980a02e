//! From sums of bf16 to values of C in one pass, while they are in registers: linear layers, and gate and up under SiLU.
//!
//! Such sums differ from one instruction set to the other in their last bits. So unlike in [`epilogue`](super), what is made of
//! them may, too: multiplications and additions are fused, and the exponential is [`vmath::silu`]'s.

use dualgemm_gemm::Operation;

use super::TileEpilogue;
use crate::isa::{InstructionSet, Work};
use crate::lanes;
use crate::output::{Destination, Place};
use crate::pack::{PANEL, PackedGateUp};
use crate::tile::{TILE_COLS, Tile};
use crate::vmath::{self, canonical};

/// What the sums of a tile are for, what both halves are multiplied by, and what is added then.
pub(super) struct Factors {
    pub(super) op: Operation,
    pub(super) alpha: [f64; 2],
    pub(super) bias: [Option<[f32; PANEL]>; 2],
}

/// Rows of a tile.
pub(crate) struct Finish<'a> {
    /// Sums.
    rows: &'a mut [[f32; TILE_COLS]],
    /// Whether they are gate and up, or else 32 features of a linear layer.
    is_gated: bool,
    /// What both halves are multiplied by.
    alpha: [f32; 2],
    /// What is added to both halves then.
    bias: [[f32; PANEL]; 2],
    /// Columns of C that there are.
    cols: usize,
    /// A C of floats that values go to, and the place of the first of them. Otherwise they replace the sums.
    c: Option<(&'a Destination<'a>, Place)>,
}

impl TileEpilogue {
    pub(super) fn factors(&self, tile: &Tile<'_>, weights: &PackedGateUp, a_scale: f64) -> Factors {
        let op = weights.op();
        let bias = [0, 1].map(|half| {
            weights.biases()[half].map(|bias| {
                let skip = if op == Operation::Linear { half * PANEL } else { 0 };
                let of_tile = &bias[tile.first_col..][..tile.cols];
                let mut padded = [0.0; PANEL];
                padded.iter_mut().zip(of_tile.iter().skip(skip)).for_each(|(to, from)| *to = *from);
                padded
            })
        });
        let scales = weights.global_scales();
        let sum_scale = a_scale * f64::from(tile.unit);
        let alpha =
            [0, op.matrices() - 1].map(|matrix| self.alpha[matrix] * scales[matrix].exact() * sum_scale);
        Factors { op, alpha, bias }
    }

    /// What turns the sums into values of C in one pass, if that can be. It writes them to C if that is of floats.
    pub(crate) fn finish<'a>(
        &self,
        tile: &'a mut Tile<'_>,
        weights: &PackedGateUp,
        a_scale: f64,
        (c, n): (&'a Destination<'a>, usize),
    ) -> Option<Finish<'a>> {
        let Factors { op, alpha, bias } = self.factors(tile, weights, a_scale);
        let (is_gated, alpha) = (op == Operation::GateUp, alpha.map(|alpha| alpha as f32));
        let is_known = !is_gated || self.is_silu && !self.round_to_bf16;
        let fits = alpha.iter().all(|alpha| alpha.is_normal());
        let place = || (c, c.place(tile.rows.first_row, tile.first_col, n));
        let c = c.is_of_floats().then(place);
        (tile.of_bf16 && is_known && fits).then(|| Finish {
            rows: &mut tile.sums.as_chunks_mut().0[..tile.rows.rows],
            is_gated,
            alpha,
            bias: bias.map(Option::unwrap_or_default),
            cols: tile.cols,
            c,
        })
    }
}

impl Work for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        let Self { alpha: [left_alpha, right_alpha], bias: [left_bias, right_bias], .. } = self;
        for (row, sums) in self.rows.iter_mut().enumerate() {
            let [left, right]: [[f32; PANEL]; 2] = bytemuck::cast(*sums);
            let left = lanes::zip(&left, &left_bias, |sum, bias| sum.mul_add(left_alpha, bias));
            let right = lanes::zip(&right, &right_bias, |sum, bias| sum.mul_add(right_alpha, bias));
            let first = if self.is_gated {
                lanes::zip(&left, &right, |gate, up| canonical(vmath::silu(gate) * up))
            } else {
                lanes::map(&left, canonical)
            };
            let second = || lanes::map(&right, canonical);
            match &self.c {
                Some((c, place)) => {
                    let at = place.at(row);
                    write(c, at, &first, self.cols.min(PANEL));
                    if self.cols > PANEL {
                        write(c, at + PANEL, &second(), self.cols - PANEL);
                    }
                }
                None if self.is_gated => sums[..PANEL].copy_from_slice(&first),
                None => *sums = bytemuck::cast([first, second()]),
            }
        }
    }
}

/// Writes some of 16 values.
#[inline(always)]
fn write(c: &Destination<'_>, at: usize, values: &[f32; PANEL], cols: usize) {
    // SAFETY: the schedule makes each element of C part of one tile and stores each tile once.
    unsafe {
        // A whole panel has a length that the compiler knows.
        if cols == PANEL { c.write(at, values) } else { c.write(at, &values[..cols]) }
    }
}

#[cfg(test)]
mod tests {
    use dualgemm_formats::GlobalScale;
    use dualgemm_gemm::{Activation, Epilogue};

    use super::super::tests::{apply, sums, weights};
    use super::*;
    use crate::Isa;
    use crate::output::Amax;
    use crate::threads::SharedSlice;
    use crate::tile::RowTile;

    /// Values of 16 features of rows, if one pass makes them.
    fn finished(epilogue: &Epilogue, weights: &PackedGateUp, cols: usize, of_bf16: bool) -> Option<Vec<f32>> {
        let (mut sums, mut c) = (sums(7), vec![f32::NAN; 7 * 16]);
        let rows = RowTile { group: 0, first_row: 0, rows: 7 };
        let compiled = TileEpilogue::new(epilogue, Isa::best()).unwrap();
        for to in [Destination::F32(SharedSlice::new(&mut c)), Destination::Amax(Amax::default())] {
            let mut tile = Tile { rows, first_col: 0, cols, unit: 0.25, of_bf16, sums: &mut sums };
            compiled.isa().dispatch(compiled.finish(&mut tile, weights, 1.0, (&to, 16))?);
        }
        let in_place = sums.chunks(TILE_COLS).flat_map(|row| &row[..cols]);
        assert!(
            c.chunks(16).flat_map(|row| &row[..cols]).eq(in_place),
            "values of a C that is not of floats"
        );
        Some(c)
    }

    #[test]
    fn one_pass_is_close_to_the_steps() {
        let bias: [Vec<f32>; 2] = [(0..16).map(|i| i as f32 * 8.0 - 90.0).collect(), vec![-0.5; 16]];
        for bias in [None, Some(bias)] {
            let weights = weights(16, [GlobalScale::multiplier(3.0), GlobalScale::ONE], bias);
            let epilogue = Epilogue { alpha_up: -2.0, ..Epilogue::default() };
            let got = finished(&epilogue, &weights, 16, true).unwrap();
            let want = apply(Isa::best(), &epilogue, &weights, &sums(7), 16);
            for (got, want) in got.iter().zip(want.as_flattened()) {
                assert!((got - want).abs() <= want.abs() * 1e-5 + 1e-30, "{got} {want}");
            }
        }
    }

    #[test]
    fn what_it_does_not_know_takes_the_steps() {
        let (silu, weights) = (Epilogue::default(), weights(16, [GlobalScale::ONE; 2], None));
        let whole = finished(&silu, &weights, 16, true).unwrap();
        let cut = finished(&silu, &weights, 15, true).unwrap();
        for (i, (cut, whole)) in cut.iter().zip(whole).enumerate() {
            assert!(if i % 16 < 15 { *cut == whole } else { cut.is_nan() }, "{i}: {cut} {whole}");
        }
        assert!(finished(&silu, &weights, 16, false).is_none());
        for other in [
            Epilogue { activation: Activation::Relu, ..silu },
            Epilogue { round_gate_up_to_bf16: true, ..silu },
            Epilogue { alpha_gate: 0.0, ..silu },
        ] {
            assert!(finished(&other, &weights, 16, true).is_none(), "{other:?}");
        }
    }
}
