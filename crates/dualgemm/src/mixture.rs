//! Mixtures of experts: rows by expert, their MLPs, and the weighted sum of what comes out.
//!
//! ```text
//! A [tokens, k], ids and weights [tokens, top_k]
//!   ─► list of rows by expert ─► MLP of each expert on its rows ─► Y[t] = Σ_j w[t,j] · row of (t, j), in the order of j
//! ```
//!
//! Sorting is stable and the sum is in f32 in the order of j, so results do not depend on the number of threads. How many rows
//! an expert gets is known only here; no buffer depends on it.

#[cfg(feature = "cuda")]
mod on_device;

use dualgemm_cpu::Aligned;
use dualgemm_cpu::team::{self, for_each_part};
use dualgemm_formats::{Float, FloatMatrix, Matrix, ScaleLayout, match_floats};
use dualgemm_gemm::{
    AFormat, AOperand, Error as GemmError, GatedMlp, MlpDesc, OutFormat, OutputMut, RouterWeights, Routing,
};

use crate::{Error, MlpPlan, MlpRunner, OwnedMatrix, PackedMlp, Rows, Target};

/// What messages call the rows that experts read, where the router's weights multiply them.
const WEIGHTED: &str = "A by expert";

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
    /// The MLP that every token goes through besides, if there is one: a term of the sum, of weight 1. Its own output format
    /// does not matter: sums are in f32.
    pub shared: Option<MlpDesc>,
}

impl MixtureDesc {
    fn check_count(&self, found: usize) -> Result<(), Error> {
        if found == self.experts {
            return Ok(());
        }
        Err(Error::operand("experts", format!("{found} MLPs"), format!("{} MLPs", self.experts)))
    }

    /// Checks the rules of shapes and formats.
    ///
    /// # Errors
    /// Names what breaks one.
    pub fn check(&self) -> Result<(), GemmError> {
        let Self { mlp, experts, top_k, router, shared } = self;
        let wrong =
            |tensor: &str, found: String, expected: &str| Err(GemmError::operand(tensor, found, expected));
        if *experts == 0 || *top_k == 0 || *experts > i32::MAX as usize {
            let found = format!("of {experts} experts, {top_k} a token");
            return wrong("the mixture", found, "at least 1 of each");
        }
        if let OutFormat::Nvfp4 { .. } = mlp.down.out {
            return wrong("C of the mixture", mlp.down.out.to_string(), "f32, f16 or bf16");
        }
        if *router == RouterWeights::Input && mlp.gate_up.a.block_format().is_some() {
            return wrong("A", mlp.gate_up.a.to_string(), "floats, where the router's weights multiply it");
        }
        mlp.check()?;
        let Some(shared) = shared else { return Ok(()) };
        shared.check()?;
        let ends = |mlp: &MlpDesc| (mlp.gate_up.m, mlp.gate_up.k, mlp.gate_up.a, mlp.down.n);
        if ends(shared) != ends(mlp) {
            return wrong("the shared expert", shared.to_string(), &format!("the ends of {mlp}"));
        }
        Ok(())
    }
}

/// How a mixture is computed.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MixturePlan {
    /// The problem.
    pub desc: MixtureDesc,
    /// The experts' MLPs, on `tokens · top_k` rows, with results in f32.
    pub mlp: MlpPlan,
    /// The shared expert's, with results in f32.
    pub shared: Option<MlpPlan>,
}

impl MixturePlan {
    /// Chooses how to compute a mixture.
    ///
    /// # Errors
    /// If the description breaks a rule, or the target is not there or lacks what is asked of it.
    pub fn new(desc: &MixtureDesc, target: &Target) -> Result<Self, Error> {
        desc.check()?;
        let MixtureDesc { mut mlp, top_k, .. } = *desc;
        let too_large =
            GemmError::TooLarge { tensor: "A", batch: top_k, rows: mlp.gate_up.m, cols: mlp.gate_up.k };
        let rows = mlp.gate_up.m.checked_mul(top_k).ok_or(too_large)?;
        (mlp.gate_up.m, mlp.down.m, mlp.down.out) = (rows, rows, OutFormat::F32);
        let shared = desc.shared.map(|mut mlp| {
            mlp.down.out = OutFormat::F32;
            MlpPlan::new(&mlp, target)
        });
        #[cfg(feature = "cuda")]
        let target = &on_device::target(desc, target)?;
        Ok(Self { desc: *desc, mlp: MlpPlan::new(&mlp, target)?, shared: shared.transpose()? })
    }

    /// Brings the weights of experts into the order of the kernels, one after the other as they come; one that is `None` is
    /// computed elsewhere. On a GPU all have to be there, and are read before the first is packed: a mixture of those that are
    /// there is planned for them alone, with numbers from 0.
    ///
    /// # Errors
    /// Hands on the errors of `experts`. If there are more or fewer than the plan says, weights do not fit it, a block scale is
    /// NaN or negative, or memory is lacking.
    pub fn prepack<'w, E: From<Error>>(
        &self,
        experts: impl IntoIterator<Item = Result<Option<GatedMlp<'w>>, E>>,
        shared: Option<&GatedMlp<'_>>,
    ) -> Result<PackedMixture, E> {
        let shared = match (&self.shared, shared) {
            (Some(plan), Some(mlp)) => Some(plan.prepack(mlp)?),
            (None, None) => None,
            (_, found) => {
                let found = if found.is_some() { "there" } else { "missing" };
                return Err(Error::operand("the shared expert", found, "what it was planned with").into());
            }
        };
        #[cfg(feature = "cuda")]
        if let crate::Plan::Gpu { .. } = &self.mlp.down {
            let experts = experts.into_iter().collect::<Result<Vec<_>, E>>()?;
            return Ok(PackedMixture { experts: self.upload(experts)?, shared });
        }
        let pack = |mlp: Result<Option<GatedMlp<'w>>, E>| {
            Ok::<_, E>(mlp?.map(|mlp| self.mlp.prepack(&mlp)).transpose()?)
        };
        let experts = experts.into_iter().map(pack).collect::<Result<Vec<_>, E>>()?;
        self.desc.check_count(experts.len())?;
        Ok(PackedMixture { experts: Experts::Apart(experts), shared })
    }

    /// The plan with buffers.
    ///
    /// # Errors
    /// If this machine lacks what the plan asks for, or the memory.
    pub fn runner(&self) -> Result<MixtureRunner, Error> {
        let MlpDesc { gate_up, down } = self.mlp.desc();
        let (rows, cols) = (gate_up.m, gate_up.k);
        let shared = self.shared.as_ref().map(|plan| plan.runner(1)).transpose()?;
        let mlp = self.mlp.runner(self.desc.experts)?;
        #[cfg(feature = "cuda")]
        if let crate::Plan::Gpu { gpu, .. } = &self.mlp.down {
            let on_gpu = on_device::OnGpu::new(gpu.open()?, self.desc, mlp, shared)?;
            return Ok(MixtureRunner { desc: self.desc, place: Place::Gpu(Box::new(on_gpu)) });
        }
        let results = |rows: usize| {
            let too_large = GemmError::TooLarge { tensor: WEIGHTED, batch: 1, rows, cols: down.n };
            rows.checked_mul(down.n).and_then(Aligned::try_zeroed).ok_or(too_large)
        };
        let shared = shared.map(|runner| Ok::<_, Error>((runner, results(self.desc.mlp.down.m)?)));
        let on_cpu = OnCpu {
            mlp,
            weighted: match self.desc.router {
                RouterWeights::Input => {
                    Some(OwnedMatrix::new(WEIGHTED, [rows, cols], gate_up.a, ScaleLayout::Linear)?)
                }
                RouterWeights::Output => None,
            },
            order: Order::new(rows, self.desc.experts),
            results: results(rows)?,
            shared: shared.transpose()?,
        };
        Ok(MixtureRunner { desc: self.desc, place: Place::Cpu(Box::new(on_cpu)) })
    }
}

impl std::fmt::Display for MixturePlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} experts a token, each\n{}", self.desc.top_k, self.desc.experts, self.mlp)?;
        self.shared.as_ref().map_or(Ok(()), |mlp| write!(f, "\nand the shared expert\n{mlp}"))
    }
}

/// The experts of a mixture in the order that a target's kernels read them. Copies share what is on a GPU.
#[derive(Debug, Clone)]
pub struct PackedMixture {
    experts: Experts,
    shared: Option<PackedMlp>,
}

#[derive(Debug, Clone)]
enum Experts {
    /// For a processor, by number; none where one is computed elsewhere.
    Apart(Vec<Option<PackedMlp>>),
    /// In the memory of a GPU.
    #[cfg(feature = "cuda")]
    Together(on_device::Together),
}

impl PackedMixture {
    /// Bytes that the weights take; on a GPU, biases left out.
    pub fn bytes(&self) -> usize {
        let routed: usize = match &self.experts {
            Experts::Apart(experts) => experts.iter().flatten().map(PackedMlp::bytes).sum(),
            #[cfg(feature = "cuda")]
            Experts::Together(experts) => experts.bytes(),
        };
        routed + self.shared.as_ref().map_or(0, PackedMlp::bytes)
    }

    fn apart(&self) -> Result<&[Option<PackedMlp>], Error> {
        match &self.experts {
            Experts::Apart(experts) => Ok(experts),
            #[cfg(feature = "cuda")]
            Experts::Together(_) => Err(Error::OtherTarget { weights: "a GPU", plan: "the processor" }),
        }
    }
}

/// A [`MixturePlan`] with the buffers of its runs.
#[derive(Debug)]
pub struct MixtureRunner {
    desc: MixtureDesc,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Cpu(Box<OnCpu>),
    #[cfg(feature = "cuda")]
    Gpu(Box<on_device::OnGpu>),
}

#[derive(Debug)]
struct OnCpu {
    mlp: MlpRunner,
    /// Rows of A by expert, multiplied by the router's weights, where these go there.
    weighted: Option<OwnedMatrix>,
    order: Order,
    results: Aligned<f32>,
    /// The shared expert, and its results.
    shared: Option<(MlpRunner, Aligned<f32>)>,
}

/// Which row of the sorted ones each choice of a token is, and the choice of each row.
#[derive(Debug)]
struct Order {
    /// `[tokens, top_k]`: the row, or `NONE`.
    row_of: Vec<u32>,
    /// `[rows]`: the choice, `token · top_k + j`.
    choice_of: Vec<u32>,
    /// `[rows]`: the token.
    token_of: Vec<u32>,
    /// Where the rows of each expert begin, and where those of the last one end.
    first_row: Vec<usize>,
}

const NONE: u32 = u32::MAX;

impl Order {
    /// Room for so many choices.
    fn new(choices: usize, experts: usize) -> Self {
        let [row_of, choice_of, token_of] = [(); 3].map(|()| Vec::with_capacity(choices));
        Self { row_of, choice_of, token_of, first_row: Vec::with_capacity(experts + 2) }
    }

    /// Sorts choices by expert, stably; those of experts that are elsewhere have no row.
    fn sort(&mut self, ids: &[i32], top_k: usize, experts: usize, here: impl Fn(usize) -> bool) {
        let expert = |id: i32| usize::try_from(id).ok().filter(|&id| here(id));
        self.first_row.clear();
        self.first_row.resize(experts + 2, 0);
        for id in ids.iter().copied().filter_map(expert) {
            self.first_row[id + 2] += 1;
        }
        for id in 0..experts {
            self.first_row[id + 2] += self.first_row[id + 1];
        }
        self.row_of.clear();
        self.choice_of.clear();
        self.choice_of.resize(self.first_row[experts + 1], 0);
        // The entry behind an expert's is its next row, and in the end the first one of the expert behind it.
        for (choice, &id) in ids.iter().enumerate() {
            let row = expert(id).map_or(NONE, |id| {
                self.first_row[id + 1] += 1;
                (self.first_row[id + 1] - 1) as u32
            });
            if row != NONE {
                self.choice_of[row as usize] = choice as u32;
            }
            self.row_of.push(row);
        }
        self.token_of.clear();
        self.token_of.extend(self.choice_of.iter().map(|choice| choice / top_k as u32));
    }
}

impl MixtureRunner {
    /// Computes the mixture for all tokens of A. An expert that is elsewhere is missing from C, which other ranks or a GPU add
    /// to. With `add`, the results are added to what C holds. On a GPU it copies A and the lists there, waits, and copies C
    /// back.
    ///
    /// # Errors
    /// If an operand does not fit the plan, a number is beyond the experts, or a weight of the router is not finite; on a GPU,
    /// with `add`. Then C is unchanged.
    pub fn run(
        &mut self,
        a: &AOperand<'_>,
        routing: Routing<'_>,
        experts: &PackedMixture,
        c: OutputMut<'_>,
        add: bool,
    ) -> Result<(), Error> {
        self.check(a, &c)?;
        routing.check(a.rows(), self.desc.top_k, self.desc.experts)?;
        let desc = &self.desc;
        match &mut self.place {
            Place::Cpu(on_cpu) => team::enter(|| on_cpu.run(desc, a, routing, experts, (c, add))),
            #[cfg(feature = "cuda")]
            Place::Gpu(on_gpu) => on_gpu.run_with_copies(a, routing, experts, (c, add)),
        }
    }

    fn check(&self, a: &AOperand<'_>, c: &OutputMut<'_>) -> Result<(), Error> {
        let MixtureDesc { mlp: MlpDesc { gate_up, down }, .. } = self.desc;
        let wrong =
            |tensor: &str, found: String, expected: String| Err(Error::operand(tensor, found, expected));
        let format = AFormat::of(a);
        if (format, a.k()) != (gate_up.a, gate_up.k) || a.rows() > gate_up.m {
            let found = format!("{format} [{}, {}]", a.rows(), a.k());
            return wrong("A", found, format!("{} [up to {}, {}]", gate_up.a, gate_up.m, gate_up.k));
        }
        let Some((found, len)) = c.floats() else {
            return wrong("C", "nvfp4".into(), down.out.to_string());
        };
        if (OutFormat::from(found), len) != (down.out, a.rows() * down.n) {
            let found = format!("{found} of {len} values");
            return wrong("C", found, format!("{} of {} × {} values", down.out, a.rows(), down.n));
        }
        Ok(())
    }
}

impl OnCpu {
    fn run(
        &mut self,
        desc: &MixtureDesc,
        a: &AOperand<'_>,
        routing: Routing<'_>,
        experts: &PackedMixture,
        (c, add): (OutputMut<'_>, bool),
    ) -> Result<(), Error> {
        let &MixtureDesc { mlp, top_k, router, .. } = desc;
        let (all, n) = (experts.apart()?, mlp.down.n);
        desc.check_count(all.len())?;
        let shared = match (&mut self.shared, &experts.shared) {
            (Some((runner, results)), Some(mlp)) => {
                let results = &mut results[..a.rows() * n];
                runner.run(a, mlp, OutputMut::F32(results))?;
                Some(&*results)
            }
            _ => None,
        };
        self.order.sort(routing.ids, top_k, all.len(), |id| all[id].is_some());
        let rows = self.order.choice_of.len();
        if rows > 0 {
            let weighted = match &mut self.weighted {
                Some(weighted) => {
                    weigh(weighted, a, &self.order.choice_of, top_k, routing.weights)?;
                    Some(weighted.operand(WEIGHTED, rows, a.k())?)
                }
                None => None,
            };
            let (a, list) = match &weighted {
                Some(weighted) => (weighted, None),
                None => (a, Some(&self.order.token_of[..])),
            };
            let first = &self.order.first_row;
            let groups = all
                .iter()
                .enumerate()
                .filter_map(|(e, mlp)| Some((e, mlp.as_ref()?)))
                .map(|(e, weights)| Rows { first: first[e], count: first[e + 1] - first[e], weights })
                .filter(|group| group.count > 0);
            let results = OutputMut::F32(&mut self.results[..rows * n]);
            self.mlp.run_listed(a, list, groups, results)?;
        }
        let weights = (router == RouterWeights::Output).then_some(routing.weights);
        let sum = Sum { row_of: &self.order.row_of, results: &self.results, shared, weights, top_k, n };
        // `check` refused the other.
        match_floats!(c, OutputMut(c) => sum.write(c, add), OutputMut::Nvfp4 { .. } => {});
        Ok(())
    }
}

/// The rows of A that choices name, in their order, multiplied by the choices' weights.
fn weigh(
    to: &mut OwnedMatrix,
    a: &AOperand<'_>,
    choices: &[u32],
    top_k: usize,
    weights: &[f32],
) -> Result<(), Error> {
    fn of<T: Float>(to: &mut [T], a: &Matrix<'_, T>, choices: (&[u32], usize), weights: &[f32]) {
        for_each_part(&mut to[..choices.0.len() * a.cols()], a.cols(), |row, to| {
            let choice = choices.0[row] as usize;
            let from = to.iter_mut().zip(a.row(choice / choices.1));
            from.for_each(|(to, &x)| *to = T::nearest(x.into() * weights[choice]));
        });
    }
    let choices = (choices, top_k);
    match (to, a) {
        (OwnedMatrix::F32(to), AOperand::Float(FloatMatrix::F32(a))) => of(to, a, choices, weights),
        (OwnedMatrix::F16(to), AOperand::Float(FloatMatrix::F16(a))) => of(to, a, choices, weights),
        (OwnedMatrix::Bf16(to), AOperand::Float(FloatMatrix::Bf16(a))) => of(to, a, choices, weights),
        // `check` compared the formats, and these weights multiply no others.
        (_, a) => return Err(GemmError::AlreadyQuantized { a: AFormat::of(a) }.into()),
    }
    Ok(())
}

/// The weighted sum over the choices of each token.
struct Sum<'a> {
    row_of: &'a [u32],
    results: &'a [f32],
    /// What a shared expert adds.
    shared: Option<&'a [f32]>,
    weights: Option<&'a [f32]>,
    top_k: usize,
    n: usize,
}

/// Columns that are summed together, in f32 on the stack.
const COLUMNS: usize = 256;

impl Sum<'_> {
    /// Writes the sums to C, or adds them to it.
    fn write<T: Float>(&self, c: &mut [T], add: bool) {
        for_each_part(c, self.n, |token, c| {
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
                if let Some(shared) = self.shared {
                    let row = &shared[token * self.n + block * COLUMNS..][..sums.len()];
                    sums.iter_mut().zip(row).for_each(|(sum, shared)| *sum += shared);
                }
                if add {
                    let mut before = [0.0; COLUMNS];
                    T::widen(c, &mut before[..sums.len()]);
                    sums.iter_mut().zip(&before).for_each(|(sum, before)| *sum += before);
                }
                T::narrow(sums, c);
            }
        });
    }
}
