//! A result against the f64 reference, for problems of real size.
//!
//! [`reference()`](dualgemm_gemm::reference()) decodes whole weight matrices to f64, 14 times their size. Here it is
//! called on runs of the features, in parallel, and on a sample of the rows where all would take too long.

use std::hint::black_box;
use std::ops::Range;
use std::time::Instant;

use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{
    AOperand, Bounded, Epilogue, GateUp, GatedMlp, Linear, MlpDesc, RouterWeights, Routing, WeightRef,
    reference_of, stored,
};
use rayon::prelude::*;

use crate::{Error, MixtureDesc};

/// Features that one call of the reference decodes: few enough to stay in a cache, enough to pay for decoding A.
const FEATURES_PER_RUN: usize = 64;

/// Bytes of [`Bounded`] values in one of [`row_blocks`], unless its fewest rows take more.
const BLOCK_BYTES: usize = 32 << 20;

/// Fewest rows of a block: the weights are decoded again for each, which takes as long as multiplying some rows.
const BLOCK_ROWS: usize = 16;

/// All of `m` rows of C in blocks, for comparing with a reference that never is in memory as a whole: that of one
/// block takes 32 MiB, or 256 bytes a column if that is more, and as much again while [`Reference::bounded`] puts
/// it together.
pub fn row_blocks(m: usize, n: usize) -> impl Iterator<Item = RowSample> {
    let rows = (BLOCK_BYTES / size_of::<Bounded>() / n.max(1)).max(BLOCK_ROWS);
    (0..m).step_by(rows).map(move |first| RowSample { rows: (first..m.min(first + rows)).collect(), of: m })
}

/// Which rows of C are compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowSample {
    rows: Vec<usize>,
    of: usize,
}

impl RowSample {
    /// Every one of `m` rows.
    pub fn all(m: usize) -> Self {
        Self { rows: (0..m).collect(), of: m }
    }

    /// `count` of `m` rows, evenly spread, the first and the last among them where `count` is at least 2.
    pub fn spread(m: usize, count: usize) -> Self {
        if count >= m {
            return Self::all(m);
        }
        let count = count.max(1);
        let step = |i: usize| if count == 1 { 0 } else { i * (m - 1) / (count - 1) };
        Self { rows: (0..count).map(step).collect(), of: m }
    }

    /// As many of `m` rows as take about `budget` multiplications of the reference, `per_row` each; at least `least`.
    pub fn within(m: usize, per_row: f64, budget: f64, least: usize) -> Self {
        Self::spread(m, ((budget / per_row) as usize).max(least))
    }

    /// The rows, ascending.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Whether no row is left out.
    pub fn is_all(&self) -> bool {
        self.rows.len() == self.of
    }

    /// The sampled rows of a row-major matrix of `cols` columns.
    ///
    /// # Panics
    /// If `values` is shorter than the matrix the sample was made for.
    pub fn pick<T: Copy>(&self, values: &[T], cols: usize) -> Vec<T> {
        self.rows.iter().flat_map(|row| &values[row * cols..(row + 1) * cols]).copied().collect()
    }
}

impl std::fmt::Display for RowSample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.is_all(), self.of) {
            (true, 1) => f.write_str("the one row"),
            (true, of) => write!(f, "all {of} rows"),
            (false, of) => write!(f, "{} of {of} rows", self.rows.len()),
        }
    }
}

/// Multiplications per second that the reference does here, on all threads of the current rayon pool, which takes milliseconds.
pub fn reference_rate() -> f64 {
    const ROWS: usize = 16;
    const K: usize = 256;
    let (codes, scales) = (vec![0x25; FEATURES_PER_RUN * K / 2], vec![0x38; FEATURES_PER_RUN * K / 16]);
    let (format, layout, scale) = (BlockFormat::Nvfp4, ScaleLayout::Linear, GlobalScale::ONE);
    let weight = QuantizedMatrix::new("weight", format, FEATURES_PER_RUN, K, codes, scales, layout, scale);
    let layer = Linear::new(weight.expect("as many codes and scales as the format says"));
    let a = vec![vec![Bounded::exact(1.0); K]; ROWS];
    let time = || {
        let start = Instant::now();
        black_box(reference_of(&Epilogue::default(), &a, (&layer).into()));
        start.elapsed().as_secs_f64()
    };
    let least = (0..3).map(|_| time()).fold(f64::INFINITY, f64::min);
    (ROWS * FEATURES_PER_RUN * K) as f64 * rayon::current_num_threads() as f64 / least
}

/// Computes C in f64 for some rows of A: `sample.rows().len() · n` values, row-major.
#[derive(Clone, Copy)]
pub struct Reference<'a> {
    /// A as the products see it.
    pub a: &'a AOperand<'a>,
    /// Which of its rows.
    pub sample: &'a RowSample,
    /// Is told how many features have been done since it was last called.
    pub progress: &'a (dyn Fn(usize) + Sync),
}

/// Each fails if weights cannot be read or do not belong together, or if K of A is another.
impl<'a> Reference<'a> {
    /// One that tells nobody of its progress.
    pub fn new(a: &'a AOperand<'a>, sample: &'a RowSample) -> Self {
        Self { a, sample, progress: &|_| () }
    }

    /// C of gate and up.
    pub fn values(&self, epilogue: &Epilogue, weights: &GateUp<'_>) -> Result<Vec<f64>, Error> {
        Ok(self.bounded(epilogue, weights)?.into_iter().map(|c| c.value).collect())
    }

    /// As [`values`](Self::values), with what a right result may be off by.
    pub fn bounded(&self, epilogue: &Epilogue, weights: &GateUp<'_>) -> Result<Vec<Bounded>, Error> {
        weights.check()?;
        self.runs(epilogue, weights.n(), &|run| Ok(weights.features(run)?))
    }

    /// As [`bounded`](Self::bounded), for weights of `n` features, a pair or a linear layer, that are read a run at a time:
    /// `features` is called once for each run, from several threads.
    pub fn runs<W>(
        &self,
        epilogue: &Epilogue,
        n: usize,
        features: &(dyn Fn(Range<usize>) -> Result<W, Error> + Sync),
    ) -> Result<Vec<Bounded>, Error>
    where
        W: Send,
        for<'w> &'w W: Into<WeightRef<'w>>,
    {
        product(epilogue, &rows_of(self.a, self.sample.rows()), n, features, self.progress)
    }

    /// Y of a whole MLP, as [`mlp_reference`](dualgemm_gemm::mlp_reference) has it; features of both products count. A dynamic
    /// scale between them is that of all rows of A; then gate and up of all are computed.
    pub fn mlp(&self, desc: &MlpDesc, mlp: &dyn MlpFeatures) -> Result<Vec<Bounded>, Error> {
        let Self { a, sample, progress } = *self;
        if !desc.gate_up.out.is_dynamic() {
            return mlp_of(desc, &rows_of(a, sample.rows()), sample.rows().len(), |row| row, mlp, progress);
        }
        let all: Vec<usize> = (0..a.rows()).collect();
        mlp_of(desc, &rows_of(a, &all), sample.rows().len(), |row| sample.rows()[row], mlp, progress)
    }

    /// Y of a mixture, as [`mixture_reference`](dualgemm_gemm::mixture_reference) has it, and the shared expert's besides:
    /// experts that are `None` are computed elsewhere. Each expert is read once. Fails, too, if the routing has a number beyond
    /// the experts.
    pub fn mixture<E: MlpFeatures>(
        &self,
        desc: &MixtureDesc,
        routing: Routing<'_>,
        (experts, shared): (&[Option<E>], Option<&E>),
    ) -> Result<Vec<Bounded>, Error> {
        let Self { a, sample, progress } = *self;
        let MixtureDesc { mlp, top_k, router, shared: shared_desc, .. } = desc;
        routing.check(a.rows(), *top_k, experts.len())?;
        let (tokens, n) = (rows_of(a, sample.rows()), mlp.down.n);
        // The results of each choice of the sampled tokens, and which choices each expert has.
        let mut results: Vec<Option<Vec<Bounded>>> = vec![None; tokens.len() * top_k];
        let mut chosen: Vec<Vec<usize>> = vec![Vec::new(); experts.len()];
        let at = |choice: usize| sample.rows()[choice / top_k] * top_k + choice % top_k;
        for choice in 0..results.len() {
            if let Ok(expert) = usize::try_from(routing.ids[at(choice)]) {
                chosen[expert].push(choice);
            }
        }
        for (expert, choices) in experts.iter().zip(&chosen) {
            let Some(expert) = expert.as_ref().filter(|_| !choices.is_empty()) else { continue };
            let row = |&choice: &usize| {
                let (row, weight) = (&tokens[choice / top_k], routing.weights[at(choice)]);
                match (router, a) {
                    (RouterWeights::Input, AOperand::Float(a)) => {
                        let scaled = |x: &Bounded| a.float_type().round(x.value as f32 * weight).into();
                        row.iter().map(|x| Bounded::exact(scaled(x))).collect()
                    }
                    _ => row.clone(),
                }
            };
            let rows: Vec<Vec<Bounded>> = choices.iter().map(row).collect();
            let y = mlp_of(mlp, &rows, rows.len(), |row| row, expert, progress)?;
            for (&choice, y) in choices.iter().zip(y.chunks(n)) {
                results[choice] = Some(y.to_vec());
            }
        }
        let mut sums = match shared_desc.as_ref().zip(shared) {
            Some((desc, mlp)) => self.mlp(desc, mlp)?,
            None => vec![Bounded::exact(0.0); tokens.len() * n],
        };
        for (choice, result) in results.iter().enumerate() {
            let factor = if *router == RouterWeights::Output { routing.weights[at(choice)] } else { 1.0 };
            let sums = &mut sums[choice / top_k * n..][..n];
            for (sum, y) in sums.iter_mut().zip(result.iter().flatten()) {
                *sum = sum.plus(y.times(factor.into()));
            }
        }
        Ok(sums)
    }
}

/// Where the weights of a whole MLP are, to be read a run of features at a time.
pub trait MlpFeatures: Sync {
    /// Some features of gate and up.
    ///
    /// # Errors
    /// If they cannot be read.
    fn gate_up(&self, run: Range<usize>) -> Result<GateUp<'_>, Error>;
    /// Some features of the down projection.
    ///
    /// # Errors
    /// If they cannot be read.
    fn down(&self, run: Range<usize>) -> Result<Linear<'_>, Error>;
}

impl MlpFeatures for GatedMlp<'_> {
    fn gate_up(&self, run: Range<usize>) -> Result<GateUp<'_>, Error> {
        Ok(self.gate_up.features(run)?)
    }

    fn down(&self, run: Range<usize>) -> Result<Linear<'_>, Error> {
        Ok(self.down.features(run)?)
    }
}

/// Y of an MLP for `count` of these rows, which `pick` names.
fn mlp_of(
    desc: &MlpDesc,
    a: &[Vec<Bounded>],
    count: usize,
    pick: impl Fn(usize) -> usize,
    mlp: &dyn MlpFeatures,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Vec<Bounded>, Error> {
    let MlpDesc { gate_up, down } = desc;
    let hidden = product(&gate_up.epilogue, a, gate_up.n, &|run| mlp.gate_up(run), progress)?;
    let hidden = stored(hidden, gate_up.out, gate_up.n);
    let rows: Vec<_> = (0..count).map(|row| hidden[pick(row) * gate_up.n..][..gate_up.n].to_vec()).collect();
    product(&down.epilogue, &rows, down.n, &|run| mlp.down(run), progress)
}

/// One product for rows that may be off themselves, in runs of features.
fn product<W>(
    epilogue: &Epilogue,
    a: &[Vec<Bounded>],
    n: usize,
    features: &(dyn Fn(Range<usize>) -> Result<W, Error> + Sync),
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Vec<Bounded>, Error>
where
    W: Send,
    for<'w> &'w W: Into<WeightRef<'w>>,
{
    let runs: Vec<Range<usize>> =
        (0..n).step_by(FEATURES_PER_RUN).map(|n0| n0..n.min(n0 + FEATURES_PER_RUN)).collect();
    let parts = runs
        .par_iter()
        .map(|run| {
            let weights = features(run.clone())?;
            let weights: WeightRef<'_> = (&weights).into();
            weights.check()?;
            let (_, _, k) = weights.shape();
            if let Some(row) = a.iter().find(|row| row.len() != k) {
                return Err(Error::operand(
                    "A",
                    format!("[{}, {}]", a.len(), row.len()),
                    format!("K = {k}, as {} has", weights.name()),
                ));
            }
            let part = reference_of(epilogue, a, weights);
            progress(run.len());
            Ok(part)
        })
        .collect::<Result<Vec<_>, Error>>()?;
    let mut c = Vec::with_capacity(a.len() * n);
    for row in 0..a.len() {
        for (run, part) in runs.iter().zip(&parts) {
            c.extend_from_slice(&part[row * run.len()..(row + 1) * run.len()]);
        }
    }
    Ok(c)
}

/// Some rows of A, which are exact.
fn rows_of(a: &AOperand<'_>, rows: &[usize]) -> Vec<Vec<Bounded>> {
    let row = |&row: &usize| (0..a.k()).map(|k| Bounded::exact(a.value(row, k))).collect();
    rows.iter().map(row).collect()
}

/// Some rows of A, copied.
///
/// # Errors
/// If `rows` is empty.
///
/// # Panics
/// If a row exceeds A.
pub fn select_rows(a: &AOperand<'_>, rows: &[usize]) -> Result<AOperand<'static>, Error> {
    Ok(match a {
        AOperand::Float(m) => AOperand::Float(m.pick("A", rows)?),
        AOperand::Quantized(m) => AOperand::Quantized(m.pick(m.name(), rows)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_formats::{FloatMatrix, Matrix};
    use dualgemm_gemm::reference;

    fn quantized(
        name: &'static str,
        rows: usize,
        k: usize,
        layout: ScaleLayout,
        seed: usize,
    ) -> QuantizedMatrix<'static> {
        let codes: Vec<u8> = (0..rows * k / 2).map(|i| (i * 37 + seed * 11 + i / 7) as u8).collect();
        let scales: Vec<u8> = (0..rows * k / 16).map(|i| 0x20 + ((i * 5 + seed) % 64) as u8).collect();
        QuantizedMatrix::new(
            name,
            BlockFormat::Nvfp4,
            rows,
            k,
            codes,
            scales,
            ScaleLayout::Linear,
            GlobalScale::divisor(96.0 + seed as f32),
        )
        .unwrap()
        .with_scale_layout(layout)
    }

    /// An order of magnitude only: a processor does 10⁸ to 10¹⁰ on each thread, an emulated one 10⁷.
    #[test]
    fn the_rate_of_the_reference_is_plausible() {
        let rate = reference_rate();
        assert!((1e5..1e13).contains(&rate), "{rate}");
    }

    #[test]
    fn runs_and_samples_give_the_same_values_as_the_plain_reference_exact() {
        let bias = |seed: usize| Some((0..150).map(|n| (n * seed) as f32 / 16.0).collect::<Vec<_>>().into());
        let weights = GateUp {
            gate_bias: bias(3),
            up_bias: bias(5),
            ..GateUp::new(
                quantized("gate", 150, 48, ScaleLayout::Sf128x4, 1),
                quantized("up", 150, 48, ScaleLayout::Linear, 2),
            )
        };
        let float: Vec<f32> = (0..7 * 48).map(|i| (i % 23) as f32 / 8.0 - 1.0).collect();
        let operands = [
            AOperand::Quantized(quantized("a", 7, 48, ScaleLayout::Sf8x4, 3)),
            AOperand::Float(FloatMatrix::F32(Matrix::new("a", 7, 48, float).unwrap())),
        ];
        let epilogue = Epilogue { alpha_gate: 0.5, ..Epilogue::default() };
        for a in operands {
            let whole = reference(&epilogue, &a, 0..7, &weights);
            for sample in [RowSample::all(7), RowSample::spread(7, 3), RowSample::spread(7, 1)] {
                let done = std::sync::atomic::AtomicUsize::new(0);
                let tick = |n| {
                    done.fetch_add(n, std::sync::atomic::Ordering::Relaxed);
                };
                let of = Reference { progress: &tick, ..Reference::new(&a, &sample) };
                let got = of.values(&epilogue, &weights).unwrap();
                assert_eq!(got, sample.pick(&whole, 150));
                assert_eq!(done.into_inner(), 150);
            }
        }
    }

    #[test]
    fn samples_hold_both_ends_and_say_what_they_are() {
        assert_eq!(RowSample::spread(100, 4).rows(), [0, 33, 66, 99]);
        assert_eq!(RowSample::spread(100, 4).to_string(), "4 of 100 rows");
        assert_eq!(RowSample::spread(3, 4), RowSample::all(3));
        assert_eq!(RowSample::all(3).to_string(), "all 3 rows");
        assert_eq!(RowSample::within(8192, 2.0 * 14336.0 * 4096.0, 1e9, 4).rows().len(), 8);
        assert_eq!(RowSample::within(8192, 2.0 * 14336.0 * 4096.0, 1.0, 4).rows().len(), 4);
    }

    #[test]
    fn blocks_are_all_rows_and_within_their_memory() {
        for (m, n) in [(1, 1), (15, 4096), (3000, 4096), (40, 1 << 20), (0, 5)] {
            let blocks: Vec<RowSample> = row_blocks(m, n).collect();
            let rows: Vec<usize> = blocks.iter().flat_map(RowSample::rows).copied().collect();
            assert_eq!(rows, (0..m).collect::<Vec<_>>());
            assert!(blocks.iter().all(|b| b.rows().len() * n * 16 <= BLOCK_BYTES.max(256 * n)), "{m} {n}");
        }
        assert_eq!(row_blocks(3000, 4096).count(), 6);
    }

    #[test]
    fn another_k_is_refused() {
        let weights = GateUp::new(
            quantized("gate", 2, 32, ScaleLayout::Linear, 1),
            quantized("up", 2, 32, ScaleLayout::Linear, 2),
        );
        let a = AOperand::Quantized(quantized("a", 1, 16, ScaleLayout::Linear, 3));
        let error =
            Reference::new(&a, &RowSample::all(1)).values(&Epilogue::default(), &weights).unwrap_err();
        assert_eq!(error.to_string(), "A is [1, 16]; the problem asks for K = 32, as gate has");
    }
}
