//! From the sums of a tile to values of C: scale, bias, optional rounding to bf16, activation.
//!
//! A [`Program`] is evaluated operation by operation over 64 elements at a time (4 rows of 16 features; single rows if there are
//! fewer), so that interpreting it costs little beside computing it. The order of roundings, each to f32 and the same on
//! every ISA:
//!
//! ```text
//! gate = sum · alpha_gate (+ bias)     alpha_gate = Epilogue::alpha_gate · tensor scales · unit of the sums,
//! up   = sum · alpha_up   (+ bias)                  computed in f64 and rounded once, if that is a normal f32
//! both to bf16, if the epilogue says so
//! C    = the program, one rounding per operation (sigmoid and tanh: see `vmath`)
//! ```
//!
//! A linear layer has no activation: C = sum · alpha_gate (+ bias), for all 32 features of a panel.
//!
//! An alpha that is subnormal in f32 or overflows it, as with a tensor scale of 1e-44, stays f64, and so does the product until
//! it is rounded. So no tensor scale is lost.
//!
//! [`dualgemm_gemm::epilogue`] defines results that are not finite. NaN always has the bits 0x7FC00000.

mod finish;

use dualgemm_gemm::{Activation, Epilogue, Op, Operation, Program};
use finish::Factors;

use crate::isa::{Available, InstructionSet, Work};
use crate::pack::{PANEL, PackedGateUp};
use crate::tile::{TILE_COLS, Tile};
use crate::{Error, Isa, vmath};

/// Rows that are evaluated together if a tile has so many.
const ROWS: usize = 4;
/// Most operations whose results stay on the stack. Programs with more allocate for each tile; no activation has more.
const STACK_OPS: usize = 32;

/// An [`Epilogue`] ready to be applied to tiles.
#[derive(Debug, Clone)]
pub struct TileEpilogue {
    isa: Available,
    program: Program,
    is_silu: bool,
    alpha: [f64; 2],
    round_to_bf16: bool,
}

impl TileEpilogue {
    /// Compiles an epilogue for an instruction set.
    ///
    /// # Errors
    /// If this machine lacks `isa`.
    pub fn new(epilogue: &Epilogue, isa: Isa) -> Result<Self, Error> {
        Ok(Self {
            isa: isa.checked()?,
            program: epilogue.activation.program(),
            is_silu: epilogue.activation == Activation::Silu,
            alpha: [epilogue.alpha_gate.into(), epilogue.alpha_up.into()],
            round_to_bf16: epilogue.round_gate_up_to_bf16,
        })
    }

    /// The instruction set that it was compiled for.
    pub(crate) fn isa(&self) -> Available {
        self.isa
    }

    /// Replaces the sums by values of C, given the tensor scale of A: those of gate, or of a linear layer all. Features past the
    /// tile's `cols` get arbitrary values.
    pub(crate) fn apply(&self, tile: &mut Tile<'_>, weights: &PackedGateUp, a_scale: f64) {
        let Factors { op, alpha, bias } = self.factors(tile, weights, a_scale);
        let rows = &mut tile.sums.as_chunks_mut().0[..tile.rows.rows];
        self.isa.dispatch(Apply { epilogue: self, op, alpha, bias, rows });
    }
}

/// What [`TileEpilogue::apply`] compiles per instruction set.
struct Apply<'a> {
    epilogue: &'a TileEpilogue,
    op: Operation,
    alpha: [f64; 2],
    bias: [Option<[f32; PANEL]>; 2],
    rows: &'a mut [[f32; TILE_COLS]],
}

impl Work for Apply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        let (alpha, [left, right]) = (self.alpha[0] as f32, &self.bias);
        if self.op == Operation::Linear && alpha.is_normal() && left.is_none() && right.is_none() {
            // One loop over all: by rows and halves it takes two and a half times as long.
            for sum in self.rows.as_flattened_mut() {
                *sum = vmath::canonical(*sum * alpha);
            }
            return;
        }
        match (self.op, self.rows.len() < ROWS) {
            (Operation::GateUp, true) => self.groups::<1>(),
            (Operation::GateUp, false) => self.groups::<ROWS>(),
            (Operation::Linear, true) => self.linear::<1>(),
            (Operation::Linear, false) => self.linear::<ROWS>(),
        }
    }
}

/// Elements of a few rows that are evaluated together. Aligned, since loading a vector from two cache lines waits for both.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Lanes<const ROWS: usize>([[f32; PANEL]; ROWS]);

impl<const ROWS: usize> Lanes<ROWS> {
    /// The same value everywhere.
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([[value; PANEL]; ROWS])
    }

    /// Row after row.
    #[inline(always)]
    fn flat(&self) -> &[f32] {
        self.0.as_flattened()
    }

    /// Row after row.
    #[inline(always)]
    fn flat_mut(&mut self) -> &mut [f32] {
        self.0.as_flattened_mut()
    }
}

impl Apply<'_> {
    /// All rows of a linear layer, `ROWS` at a time.
    #[inline(always)]
    fn linear<const ROWS: usize>(self) {
        let bias = self.bias.map(|bias| bias.map(|bias| Lanes([bias; ROWS])));
        for rows in self.rows.chunks_mut(ROWS) {
            for (half, bias) in bias.iter().enumerate() {
                let first = half * PANEL;
                let mut results = product(rows, first, self.alpha[half], bias, false);
                for result in results.flat_mut() {
                    *result = vmath::canonical(*result);
                }
                for (row, results) in rows.iter_mut().zip(&results.0) {
                    row[first..][..PANEL].copy_from_slice(results);
                }
            }
        }
    }

    /// All rows, `ROWS` at a time.
    #[inline(always)]
    fn groups<const ROWS: usize>(self) {
        let Self { epilogue, alpha, bias, rows, .. } = self;
        let bias = bias.map(|bias| bias.map(|bias| Lanes([bias; ROWS])));
        let ops = epilogue.program.ops();
        let (mut stack, mut heap) = ([Lanes::<ROWS>::splat(0.0); STACK_OPS], Vec::new());
        let slots = if ops.len() <= STACK_OPS {
            &mut stack[..ops.len()]
        } else {
            heap.resize(ops.len(), Lanes::splat(0.0));
            &mut heap[..]
        };
        for rows in rows.chunks_mut(ROWS) {
            let round = epilogue.round_to_bf16;
            let gate = product(rows, 0, alpha[0], &bias[0], round);
            let up = product(rows, PANEL, alpha[1], &bias[1], round);
            evaluate(ops, &gate, &up, slots);
            let results = &mut slots[ops.len() - 1];
            for result in results.flat_mut() {
                *result = vmath::canonical(*result);
            }
            for (row, results) in rows.iter_mut().zip(&results.0) {
                row[..PANEL].copy_from_slice(results);
            }
        }
    }
}

/// Gate or up of up to `ROWS` rows: the half of the sums that starts at column `first`.
///
/// Arithmetic loops run over the elements of all rows at once. With nested loops over rows and elements, LLVM unrolled the inner
/// one and gathered elements across rows, which took five times as long with AVX-512.
#[inline(always)]
fn product<const ROWS: usize>(
    sums: &[[f32; TILE_COLS]],
    first: usize,
    alpha: f64,
    bias: &Option<Lanes<ROWS>>,
    round_to_bf16: bool,
) -> Lanes<ROWS> {
    let mut products = Lanes::splat(0.0);
    for (products, sums) in products.0.iter_mut().zip(sums) {
        products.copy_from_slice(&sums[first..][..PANEL]);
    }
    let flat = products.flat_mut();
    let single = alpha as f32;
    if single.is_normal() || alpha == 0.0 {
        for product in &mut *flat {
            *product *= single;
        }
    } else {
        for product in &mut *flat {
            *product = (f64::from(*product) * alpha) as f32;
        }
    }
    if let Some(bias) = bias {
        for (product, bias) in flat.iter_mut().zip(bias.flat()) {
            *product += bias;
        }
    }
    if round_to_bf16 {
        for product in flat {
            *product = vmath::round_to_bf16(*product);
        }
    }
    products
}

/// Runs the operations; each leaves its result in the slot of its index.
#[inline(always)]
fn evaluate<const ROWS: usize>(ops: &[Op], gate: &Lanes<ROWS>, up: &Lanes<ROWS>, slots: &mut [Lanes<ROWS>]) {
    for (index, op) in ops.iter().enumerate() {
        let (earlier, rest) = slots.split_at_mut(index);
        let out = &mut rest[0];
        let at = |slot: dualgemm_gemm::Slot| &earlier[slot.0 as usize];
        match *op {
            Op::Gate => *out = *gate,
            Op::Up => *out = *up,
            Op::Const(c) => *out = Lanes::splat(c),
            Op::Add(l, r) => map2(out, at(l), at(r), |l, r| l + r),
            Op::Sub(l, r) => map2(out, at(l), at(r), |l, r| l - r),
            Op::Mul(l, r) => map2(out, at(l), at(r), |l, r| l * r),
            Op::Min(l, r) => map2(out, at(l), at(r), vmath::min),
            Op::Max(l, r) => map2(out, at(l), at(r), vmath::max),
            Op::Sigmoid(x) => map(out, at(x), vmath::sigmoid),
            Op::Tanh(x) => map(out, at(x), vmath::tanh),
        }
    }
}

#[inline(always)]
fn map<const ROWS: usize>(out: &mut Lanes<ROWS>, x: &Lanes<ROWS>, f: impl Fn(f32) -> f32) {
    for (out, x) in out.flat_mut().iter_mut().zip(x.flat()) {
        *out = f(*x);
    }
}

#[inline(always)]
fn map2<const ROWS: usize>(
    out: &mut Lanes<ROWS>,
    l: &Lanes<ROWS>,
    r: &Lanes<ROWS>,
    f: impl Fn(f32, f32) -> f32,
) {
    for (out, (l, r)) in out.flat_mut().iter_mut().zip(l.flat().iter().zip(r.flat())) {
        *out = f(*l, *r);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{Random, isas};
    use crate::tile::RowTile;
    use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout};
    use dualgemm_gemm::GateUp;
    use half::bf16;
    use std::borrow::Cow;

    /// Weights of `n` features, all zero: only their tensor scales and biases matter here.
    pub(super) fn weights(n: usize, scales: [GlobalScale; 2], bias: Option<[Vec<f32>; 2]>) -> PackedGateUp {
        let half = |name: &'static str, scale| {
            let (codes, block_scales) = (vec![0; n * 8], vec![0; n]);
            let format = BlockFormat::Nvfp4;
            QuantizedMatrix::new(name, format, n, 16, codes, block_scales, ScaleLayout::Linear, scale)
                .unwrap()
        };
        let mut pair = GateUp::new(half("gate", scales[0]), half("up", scales[1]));
        if let Some([gate, up]) = bias {
            (pair.gate_bias, pair.up_bias) = (Some(Cow::Owned(gate)), Some(Cow::Owned(up)));
        }
        PackedGateUp::pack(&pair).unwrap()
    }

    pub(super) fn apply(
        isa: Isa,
        epilogue: &Epilogue,
        weights: &PackedGateUp,
        sums: &[f32],
        cols: usize,
    ) -> Vec<[f32; 16]> {
        let rows = sums.len() / TILE_COLS;
        let mut sums = sums.to_vec();
        let rows = RowTile { group: 0, first_row: 0, rows };
        let mut tile = Tile { rows, first_col: 0, cols, unit: 0.25, of_bf16: false, sums: &mut sums };
        TileEpilogue::new(epilogue, isa).unwrap().apply(&mut tile, weights, 1.0);
        sums.as_chunks::<TILE_COLS>().0.iter().map(|row| *row.first_chunk().unwrap()).collect()
    }

    /// Pseudo-random sums from -12 to 12.
    pub(super) fn sums(rows: usize) -> Vec<f32> {
        let mut random = Random(7);
        (0..rows * TILE_COLS).map(|_| 12.0 * random.float()).collect()
    }

    #[test]
    fn every_activation_is_close_to_f64() {
        let scales = [GlobalScale::multiplier(3.0), GlobalScale::divisor(0.7)];
        let bias: [Vec<f32>; 2] = [(0..16).map(|i| i as f32 / 8.0).collect(), vec![-0.5; 16]];
        let sums = sums(7);
        for activation in Activation::EXAMPLES {
            for bias in [None, Some(bias.clone())] {
                let epilogue =
                    Epilogue { activation, alpha_gate: 0.5, alpha_up: -2.0, ..Epilogue::default() };
                let weights = weights(16, scales, bias.clone());
                let got = apply(Isa::best(), &epilogue, &weights, &sums, 16);
                for (row, sums) in got.iter().zip(sums.chunks_exact(TILE_COLS)) {
                    for (i, &value) in row.iter().enumerate() {
                        let bias = |half: usize| bias.as_ref().map_or(0.0, |b| f64::from(b[half][i]));
                        let gate = f64::from(sums[i]) * 0.25 * 0.5 * scales[0].exact() + bias(0);
                        let up = f64::from(sums[16 + i]) * 0.25 * -2.0 * scales[1].exact() + bias(1);
                        let want = activation.program().eval_f64(gate, up);
                        // A bias and gelu's cubic give absolute errors of a few 2⁻²⁴ of the factors.
                        let scale = want.abs() + (gate.abs() + 1.0) * (up.abs() + 1.0) * 0.5;
                        assert!(
                            (f64::from(value) - want).abs() <= scale * 1e-6,
                            "{activation}: {value} {want}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn silu_is_within_a_few_units_in_the_last_place() {
        let weights = weights(16, [GlobalScale::ONE; 2], None);
        let sums = sums(64);
        let got = apply(Isa::best(), &Epilogue::default(), &weights, &sums, 16);
        for (row, sums) in got.iter().zip(sums.chunks_exact(TILE_COLS)) {
            for (i, &value) in row.iter().enumerate() {
                let (gate, up) = (f64::from(sums[i]) * 0.25, f64::from(sums[16 + i]) * 0.25);
                let want = gate / (1.0 + (-gate).exp()) * up;
                assert!(
                    (f64::from(value) - want).abs() <= want.abs() * 2f64.powi(-24) * 6.0,
                    "{value} {want}"
                );
            }
        }
    }

    /// The relative error grows with the exponent, as that of e^x does for a rounded x, and not faster.
    #[test]
    fn gelu_tanh_keeps_its_digits_for_negative_gates() {
        let weights = weights(16, [GlobalScale::ONE; 2], None);
        let epilogue = Epilogue { activation: Activation::GeluTanh, ..Epilogue::default() };
        let gates: Vec<f32> = (-640..=639).map(|i| i as f32 / 64.0).collect();
        // `apply` multiplies sums by its unit of a quarter.
        let row = |gates: &[f32]| gates.iter().map(|gate| 4.0 * gate).chain([12.0; 16]).collect::<Vec<_>>();
        let sums: Vec<f32> = gates.chunks_exact(16).flat_map(row).collect();
        let got =
            sums.chunks(64 * TILE_COLS).flat_map(|sums| apply(Isa::best(), &epilogue, &weights, sums, 16));
        for (&gate, value) in gates.iter().zip(got.flatten()) {
            let gate = f64::from(gate);
            let exponent = 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
            let want = 3.0 * gate / (1.0 + (-exponent).exp());
            let bound = want.abs() * 2f64.powi(-24) * (8.0 + 6.0 * exponent.abs());
            assert!((f64::from(value) - want).abs() <= bound, "{gate}: {value:e} for {want:e}");
        }
    }

    #[test]
    fn every_isa_gives_the_same_bits_exact() {
        let mut sums = sums(11);
        let specials =
            [0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-44, -400.0, 1e38];
        for (i, special) in specials.into_iter().enumerate() {
            (sums[3 * i], sums[40 + 5 * i]) = (special, special);
        }
        let bias = [vec![0.25; 13], vec![1e-3; 13]];
        let weights = weights(13, [GlobalScale::multiplier(1.1), GlobalScale::multiplier(0.9)], Some(bias));
        for activation in Activation::EXAMPLES {
            for round_gate_up_to_bf16 in [false, true] {
                let epilogue = Epilogue { activation, round_gate_up_to_bf16, ..Epilogue::default() };
                let bits = |isa| {
                    let values = apply(isa, &epilogue, &weights, &sums, 13);
                    values.iter().flat_map(|row| row[..13].iter().map(|x| x.to_bits())).collect::<Vec<_>>()
                };
                let portable = bits(Isa::Portable);
                for isa in isas() {
                    assert_eq!(bits(isa), portable, "{isa} {activation}");
                }
            }
        }
    }

    #[test]
    fn rounding_to_bf16_happens_before_the_activation_exact() {
        let weights = weights(16, [GlobalScale::ONE; 2], None);
        let epilogue =
            Epilogue { activation: Activation::Identity, round_gate_up_to_bf16: true, ..Epilogue::default() };
        let sums = sums(1);
        let got = apply(Isa::best(), &epilogue, &weights, &sums, 16);
        for i in 0..16 {
            let round = |x: f32| bf16::from_f32(x * 0.25).to_f32();
            assert_eq!(got[0][i], round(sums[i]) * round(sums[16 + i]));
        }
    }

    /// Every pair of these values as gate and up, against the same expression in f64.
    #[test]
    fn what_is_not_finite_is_as_in_f64_on_every_isa() {
        const INF: f32 = f32::INFINITY;
        let values = [0.0, -0.0, 3.0, -3.0, -2000.0, 1e30, -1e30, f32::MAX, f32::MIN, INF, -INF, f32::NAN];
        let pairs: Vec<(f32, f32)> = values.iter().flat_map(|&g| values.map(|u| (g, u))).collect();
        // `apply` multiplies sums by its unit of a quarter, which this scale undoes.
        let weights = weights(16, [GlobalScale::multiplier(4.0); 2], None);
        let sums: Vec<f32> = pairs
            .chunks_exact(16)
            .flat_map(|row| row.iter().map(|p| p.0).chain(row.iter().map(|p| p.1)))
            .collect();
        let others = [-1.7, 0.0, 1e-40].map(|alpha| Activation::SwigluOai { alpha, beta: 1.0, limit: 7.0 });
        for activation in Activation::EXAMPLES.into_iter().chain(others) {
            let epilogue = Epilogue { activation, ..Epilogue::default() };
            for isa in isas() {
                let got = apply(isa, &epilogue, &weights, &sums, 16);
                for (&(gate, up), got) in pairs.iter().zip(got.into_iter().flatten()) {
                    let want = activation.program().eval_f64(gate.into(), up.into()) as f32;
                    let near = (got - want).abs() <= 1e-5 * want.abs();
                    let same = near || got == want || got.is_nan() && want.is_nan();
                    let sign = want.is_nan() || got.is_sign_negative() == want.is_sign_negative();
                    assert!(same && sign, "{isa} {activation} of {gate:e} and {up:e}: {got:e}, not {want:e}");
                }
            }
        }
    }

    /// Factors of every size times sums of every size: the product is that of f64, rounded once.
    #[test]
    fn no_scale_is_too_small_or_too_large_for_what_comes_out() {
        let epilogue = Epilogue { activation: Activation::Identity, ..Epilogue::default() };
        let sizes = [f32::from_bits(1), 1e-44, 1e-40, 1e-20, 1.0, 1e20, f32::MAX];
        for scale in sizes {
            for alpha_gate in sizes {
                let weights = weights(16, [GlobalScale::multiplier(scale), GlobalScale::ONE], None);
                let epilogue = Epilogue { alpha_gate, ..epilogue };
                let sums: Vec<f32> = sizes.iter().cycle().copied().take(16).chain([4.0; 16]).collect();
                for isa in isas() {
                    let got = apply(isa, &epilogue, &weights, &sums, 16);
                    for (&sum, got) in sums.iter().zip(got[0]) {
                        let want = 0.25 * f64::from(sum) * f64::from(scale) * f64::from(alpha_gate);
                        let (want, error) = (want as f32, (f64::from(got) - want).abs());
                        // The factor and the product are rounded, to steps of 2⁻¹⁴⁹ where they are small.
                        let bound = f64::from(want) * 2f64.powi(-23) + 2f64.powi(-150);
                        assert!(
                            got == want || error <= bound,
                            "{isa} {sum:e}·{scale:e}·{alpha_gate:e}: {got:e}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn no_activation_needs_the_heap() {
        for activation in Activation::EXAMPLES {
            assert!(activation.program().ops().len() <= STACK_OPS, "{activation}");
        }
    }
}
