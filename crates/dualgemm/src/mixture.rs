//! Mixtures of experts: rows gathered by expert, their MLPs, and the weighted sum of what comes out.
//!
//! ```text
//! A [tokens, k], ids and weights [tokens, top_k]
//!   ─► rows sorted by expert ─► MLP of each expert on its rows ─► Y[t] = Σ_j w[t,j] · row of (t, j), in the order of j
//! ```
//!
//! Sorting is stable and the sum is in f32 in the order of j, so results do not depend on the number of threads. How many rows
//! an expert gets is known only here; no buffer depends on it.

#[cfg(feature = "cuda")]
mod on_device;

use dualgemm_formats::{FloatMatrix, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{
    AFormat, AOperand, Error as GemmError, MlpDesc, OutFormat, OutputMut, RouterWeights, Routing,
};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use crate::mlp::try_vec;
use crate::{Error, MlpPlan, MlpRunner, PackedMlp, Rows, Target};
#[cfg(feature = "cuda")]
pub use on_device::{DeviceMixture, PackedMixture};

/// Shapes and formats of a mixture.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MixtureDesc {
    /// An expert's MLP on the rows of all tokens; the sum over the experts has its output format, of floats.
    pub mlp: MlpDesc,
    /// Experts that the router knows.
    pub experts: usize,
    /// Experts of each token.
    pub top_k: usize,
    /// Where the router's weights go.
    pub router: RouterWeights,
}

impl MixtureDesc {
    fn check_count(&self, found: usize) -> Result<(), Error> {
        if found == self.experts {
            return Ok(());
        }
        let (found, expected) = (format!("{found} MLPs"), format!("{} MLPs", self.experts));
        Err(Error::Gemm(GemmError::Operand { tensor: "experts".into(), found, expected }))
    }
}

/// How a mixture is computed.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MixturePlan {
    /// The problem.
    pub desc: MixtureDesc,
    /// The experts' MLPs, on `tokens · top_k` rows, with results in f32.
    pub mlp: MlpPlan,
}

impl MixturePlan {
    /// Chooses how to compute a mixture.
    ///
    /// # Errors
    /// If the description breaks a rule, or the target is not there or lacks what is asked of it.
    pub fn new(desc: &MixtureDesc, target: &Target) -> Result<Self, Error> {
        let MixtureDesc { mut mlp, experts, top_k, router } = *desc;
        let wrong = |tensor: &str, found: String, expected: &str| {
            let (tensor, expected) = (tensor.into(), expected.into());
            Err(Error::Gemm(GemmError::Operand { tensor, found, expected }))
        };
        if experts == 0 || top_k == 0 || experts > i32::MAX as usize {
            return wrong(
                "the mixture",
                format!("of {experts} experts, {top_k} a token"),
                "at least 1 of each",
            );
        }
        if let OutFormat::Nvfp4 { .. } = mlp.down.out {
            return wrong("C of the mixture", mlp.down.out.to_string(), "f32, f16 or bf16");
        }
        if router == RouterWeights::Input && mlp.gate_up.a.block_format().is_some() {
            return wrong("A", mlp.gate_up.a.to_string(), "floats, where the router's weights multiply it");
        }
        mlp.check()?;
        let too_large =
            GemmError::TooLarge { tensor: "A", batch: top_k, rows: mlp.gate_up.m, cols: mlp.gate_up.k };
        let rows = mlp.gate_up.m.checked_mul(top_k).ok_or(too_large)?;
        (mlp.gate_up.m, mlp.down.m, mlp.down.out) = (rows, rows, OutFormat::F32);
        #[cfg(feature = "cuda")]
        let target = &on_device::target(desc, target)?;
        Ok(Self { desc: *desc, mlp: MlpPlan::new(&mlp, target)? })
    }

    /// The plan with buffers.
    ///
    /// # Errors
    /// If this machine lacks what the plan asks for, or the memory.
    pub fn runner(&self) -> Result<MixtureRunner, Error> {
        let MlpDesc { gate_up, down } = self.mlp.desc();
        let (rows, k) = (gate_up.m, gate_up.k);
        let values = rows.checked_mul(k);
        let gathered = match gate_up.a {
            AFormat::F32 => try_vec(values, 0.0).map(Gathered::F32),
            AFormat::F16 => try_vec(values, f16::ZERO).map(Gathered::F16),
            AFormat::Bf16 => try_vec(values, bf16::ZERO).map(Gathered::Bf16),
            AFormat::Nvfp4 | AFormat::Mxfp4 => {
                let scales = try_vec(values.map(|values| values / 16), 0);
                try_vec(values.map(|values| values / 2), 0)
                    .zip(scales)
                    .map(|(codes, scales)| Gathered::Quantized { codes, scales })
            }
        };
        let too_large = || GemmError::TooLarge { tensor: "A by expert", batch: 1, rows, cols: k };
        let results = try_vec(rows.checked_mul(down.n), 0.0).ok_or_else(too_large)?;
        Ok(MixtureRunner {
            desc: self.desc,
            mlp: self.mlp.runner(self.desc.experts)?,
            gathered: gathered.ok_or_else(too_large)?,
            order: Order::default(),
            results,
        })
    }
}

/// A [`MixturePlan`] with the buffers of its runs.
#[derive(Debug)]
pub struct MixtureRunner {
    desc: MixtureDesc,
    mlp: MlpRunner,
    gathered: Gathered,
    order: Order,
    results: Vec<f32>,
}

/// Rows of A by expert.
#[derive(Debug)]
enum Gathered {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    Quantized { codes: Vec<u8>, scales: Vec<u8> },
}

/// Which row of the sorted ones each choice of a token is, and the choice of each row.
#[derive(Debug, Default)]
struct Order {
    /// `[tokens, top_k]`: the row, or `NONE`.
    row_of: Vec<u32>,
    /// `[rows]`: the choice, `token · top_k + j`.
    choice_of: Vec<u32>,
    /// Where the rows of each expert begin, and one more.
    first_row: Vec<usize>,
}

const NONE: u32 = u32::MAX;

impl Order {
    /// Sorts choices by expert, stably; those of experts that are elsewhere have no row.
    fn sort(&mut self, ids: &[i32], experts: usize, here: impl Fn(usize) -> bool) {
        let expert = |id: i32| usize::try_from(id).ok().filter(|&id| here(id));
        self.first_row.clear();
        self.first_row.resize(experts + 1, 0);
        for id in ids.iter().copied().filter_map(expert) {
            self.first_row[id + 1] += 1;
        }
        for id in 0..experts {
            self.first_row[id + 1] += self.first_row[id];
        }
        self.row_of.clear();
        self.choice_of.clear();
        self.choice_of.resize(self.first_row[experts], 0);
        let mut next = self.first_row.clone();
        for (choice, &id) in ids.iter().enumerate() {
            let row = expert(id).map_or(NONE, |id| {
                next[id] += 1;
                (next[id] - 1) as u32
            });
            if row != NONE {
                self.choice_of[row as usize] = choice as u32;
            }
            self.row_of.push(row);
        }
    }
}

impl MixtureRunner {
    /// Computes the mixture for all tokens of A. An expert that is `None` is computed elsewhere: its part is missing from C,
    /// which other ranks or a GPU add to. With `add`, the results are added to what C holds, as to a shared expert's.
    ///
    /// # Errors
    /// If an operand does not fit the plan, a number is beyond the experts, or a weight of the router is not finite. Then C is
    /// unchanged.
    pub fn run(
        &mut self,
        a: &AOperand<'_>,
        routing: Routing<'_>,
        experts: &[Option<PackedMlp>],
        c: OutputMut<'_>,
        add: bool,
    ) -> Result<(), Error> {
        rayon::scope(|_| self.run_inside(a, routing, experts, c, add))
    }

    fn run_inside(
        &mut self,
        a: &AOperand<'_>,
        routing: Routing<'_>,
        experts: &[Option<PackedMlp>],
        c: OutputMut<'_>,
        add: bool,
    ) -> Result<(), Error> {
        let MixtureDesc { mlp, top_k, router, .. } = self.desc;
        self.check(a, experts, &c)?;
        routing.check(a.rows(), top_k, self.desc.experts)?;
        self.order.sort(routing.ids, experts.len(), |id| experts[id].is_some());
        let (rows, n) = (self.order.choice_of.len(), mlp.down.n);
        if rows > 0 {
            let factor = (router == RouterWeights::Input).then_some(routing.weights);
            let gathered = self.gathered.gather(a, &self.order.choice_of, top_k, factor)?;
            let first = &self.order.first_row;
            let groups: Vec<Rows<'_, PackedMlp>> = experts
                .iter()
                .enumerate()
                .filter_map(|(e, mlp)| Some((e, mlp.as_ref()?)))
                .map(|(e, weights)| Rows { first: first[e], count: first[e + 1] - first[e], weights })
                .filter(|group| group.count > 0)
                .collect();
            self.mlp.run_grouped(&gathered, &groups, OutputMut::F32(&mut self.results[..rows * n]))?;
        }
        let weights = (router == RouterWeights::Output).then_some(routing.weights);
        let sum = Sum { row_of: &self.order.row_of, results: &self.results, weights, top_k, n };
        match c {
            OutputMut::F32(c) => {
                sum.write(c, add, |row, c| c.copy_from_slice(row), |c, row| row.copy_from_slice(c))
            }
            OutputMut::F16(c) => {
                sum.write(
                    c,
                    add,
                    |row, c| c.convert_from_f32_slice(row),
                    |c, row| c.convert_to_f32_slice(row),
                );
            }
            OutputMut::Bf16(c) => {
                sum.write(
                    c,
                    add,
                    |row, c| c.convert_from_f32_slice(row),
                    |c, row| c.convert_to_f32_slice(row),
                );
            }
            OutputMut::Nvfp4 { .. } => {} // `check` refused it.
        }
        Ok(())
    }

    fn check(&self, a: &AOperand<'_>, experts: &[Option<PackedMlp>], c: &OutputMut<'_>) -> Result<(), Error> {
        let MixtureDesc { mlp: MlpDesc { gate_up, down }, .. } = self.desc;
        let wrong = |tensor: &str, found: String, expected: String| {
            Err(Error::Gemm(GemmError::Operand { tensor: tensor.into(), found, expected }))
        };
        let format = AFormat::of(a);
        if (format, a.k()) != (gate_up.a, gate_up.k) || a.rows() > gate_up.m {
            let found = format!("{format} [{}, {}]", a.rows(), a.k());
            return wrong("A", found, format!("{} [up to {}, {}]", gate_up.a, gate_up.m, gate_up.k));
        }
        self.desc.check_count(experts.len())?;
        let (found, len) = match c {
            OutputMut::F32(c) => (OutFormat::F32, c.len()),
            OutputMut::F16(c) => (OutFormat::F16, c.len()),
            OutputMut::Bf16(c) => (OutFormat::Bf16, c.len()),
            OutputMut::Nvfp4 { .. } => return wrong("C", "nvfp4".into(), down.out.to_string()),
        };
        if (found, len) != (down.out, a.rows() * down.n) {
            let found = format!("{found} of {len} values");
            return wrong("C", found, format!("{} of {} × {} values", down.out, a.rows(), down.n));
        }
        Ok(())
    }
}

impl Gathered {
    /// The rows of A that choices name, in their order, multiplied by the choices' factors if there are any.
    fn gather<'s>(
        &'s mut self,
        a: &AOperand<'_>,
        choices: &[u32],
        top_k: usize,
        factors: Option<&[f32]>,
    ) -> Result<AOperand<'s>, Error> {
        let (rows, k, name) = (choices.len(), a.k(), "A by expert");
        let factor = |choice: u32| factors.map(|factors| factors[choice as usize]);
        macro_rules! floats {
            ($to:expr, $from:expr, $kind:ident, $scaled:expr) => {{
                let to = &mut $to[..rows * k];
                to.par_chunks_mut(k).zip(choices).for_each(|(to, &choice)| {
                    let from = $from.row(choice as usize / top_k);
                    match factor(choice) {
                        None => to.copy_from_slice(from),
                        Some(w) => to.iter_mut().zip(from).for_each(|(to, &from)| *to = $scaled(from, w)),
                    }
                });
                AOperand::Float(FloatMatrix::$kind(Matrix::new(name, rows, k, &*to)?))
            }};
        }
        Ok(match (self, a) {
            (Self::F32(to), AOperand::Float(FloatMatrix::F32(a))) => floats!(to, a, F32, |x: f32, w| x * w),
            (Self::F16(to), AOperand::Float(FloatMatrix::F16(a))) => {
                floats!(to, a, F16, |x: f16, w| f16::from_f32(x.to_f32() * w))
            }
            (Self::Bf16(to), AOperand::Float(FloatMatrix::Bf16(a))) => {
                floats!(to, a, Bf16, |x: bf16, w| bf16::from_f32(x.to_f32() * w))
            }
            (Self::Quantized { codes, scales }, AOperand::Quantized(a)) => {
                let (codes, scales) = (&mut codes[..rows * (k / 2)], &mut scales[..rows * a.blocks()]);
                let to = codes.par_chunks_mut(k / 2).zip(scales.par_chunks_mut(a.blocks()));
                to.zip(choices).for_each(|((codes, scales), &choice)| {
                    let row = choice as usize / top_k;
                    codes.copy_from_slice(a.row_codes(row));
                    scales.iter_mut().enumerate().for_each(|(block, to)| *to = a.scale_byte(row, block));
                });
                let (layout, global) = (ScaleLayout::Linear, a.global_scale());
                let (codes, scales) = (&*codes, &*scales);
                AOperand::Quantized(QuantizedMatrix::new(
                    name,
                    a.format(),
                    rows,
                    k,
                    codes,
                    scales,
                    layout,
                    global,
                )?)
            }
            // `check` compared the formats.
            (_, a) => return Err(GemmError::AlreadyQuantized { a: AFormat::of(a) }.into()),
        })
    }
}

/// The weighted sum over the choices of each token.
struct Sum<'a> {
    row_of: &'a [u32],
    results: &'a [f32],
    weights: Option<&'a [f32]>,
    top_k: usize,
    n: usize,
}

/// Columns that are summed together, in f32 on the stack.
const COLUMNS: usize = 256;

impl Sum<'_> {
    /// Writes the sums to C, or adds them to it.
    fn write<T: Send>(
        &self,
        c: &mut [T],
        add: bool,
        store: impl Fn(&[f32], &mut [T]) + Sync,
        load: impl Fn(&[T], &mut [f32]) + Sync,
    ) {
        c.par_chunks_mut(self.n).enumerate().for_each(|(token, c)| {
            for (block, c) in c.chunks_mut(COLUMNS).enumerate() {
                let mut sums = [0.0; COLUMNS];
                let sums = &mut sums[..c.len()];
                for choice in token * self.top_k..(token + 1) * self.top_k {
                    let row = self.row_of[choice];
                    if row == NONE {
                        continue;
                    }
                    let weight = self.weights.map_or(1.0, |weights| weights[choice]);
                    let results = &self.results[row as usize * self.n + block * COLUMNS..][..sums.len()];
                    sums.iter_mut().zip(results).for_each(|(sum, result)| *sum += weight * result);
                }
                if add {
                    let mut before = [0.0; COLUMNS];
                    load(c, &mut before[..sums.len()]);
                    sums.iter_mut().zip(&before).for_each(|(sum, before)| *sum += before);
                }
                store(sums, c);
            }
        });
    }
}
