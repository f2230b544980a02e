//! The whole operation: operands in, C out.

use dualgemm_formats::GlobalScale;
use dualgemm_gemm::{AOperand, OutFormat, OutputMut};

use crate::aligned::Aligned;
use crate::output::{Destination, OutputSink, quantize_deferred, quantizer};
use crate::schedule::Job;
use crate::{CpuPlan, Error, Group, Input, PackedGateUp, TileEpilogue, Workspace};

/// A planned problem with everything that its runs need. Runs allocate nothing, except that rayon's queue takes a new block
/// every few dozen calls from outside its pool.
///
/// With activations that stay floats, gate and up are each within the rounding of K additions in f32, however large or small the
/// factors are, if the magnitudes of their products, without tensor scales, add up to less than 2¹²⁷. Beyond that, sums may be
/// infinite or NaN, as sums in f32 are.
#[derive(Debug)]
pub struct CpuGemm {
    workspace: Workspace,
    epilogue: TileEpilogue,
    /// C in f32, if its tensor scale comes from its values and it is computed once.
    deferred: Aligned<f32>,
    /// Room for the list of a run.
    groups: Vec<Group<'static>>,
}

impl CpuGemm {
    /// Allocates the buffers for runs with up to `max_groups` groups. A dynamic tensor scale of C takes `4 · m · n · batch` bytes
    /// more, or [twice the time](crate::CpuOptions::dynamic_c_twice).
    ///
    /// # Errors
    /// If this machine lacks the plan's instruction set (a plan may come from another machine) or the memory.
    pub fn new(plan: &CpuPlan, max_groups: usize) -> Result<Self, Error> {
        let desc = &plan.desc;
        let values = if desc.out.is_dynamic() && !plan.twice { plan.rows() * desc.n } else { 0 };
        Ok(Self {
            workspace: Workspace::new(plan, max_groups)?,
            epilogue: TileEpilogue::new(&desc.epilogue, plan.isa)?,
            deferred: Aligned::try_zeroed(values).ok_or(Error::NoMemory { rows: plan.rows(), k: desc.k })?,
            groups: Vec::with_capacity(max_groups.min(plan.rows())),
        })
    }

    /// The plan.
    pub fn plan(&self) -> &CpuPlan {
        self.workspace.plan()
    }

    /// Computes the rows of every group into C, `[rows of the input, n]`. Rows of no group stay unchanged, except that a re-quantized C
    /// gets zeros for their scales and for padding.
    ///
    /// Returns the tensor scale of a re-quantized C.
    ///
    /// A caller inside the rayon pool takes part in the work. Any other sleeps until the pool is done, which costs 20 to 60 µs;
    /// with one row that is noticeable. Threads of a [`Team`](crate::Team) are awake, and the caller is one of them.
    ///
    /// # Errors
    /// If A, its list of rows, a group or `c` does not fit the plan, or a block scale of A is NaN or negative. Then C is unchanged,
    /// or its scales are zero.
    pub fn run<'a>(
        &mut self,
        input: impl Into<Input<'a>>,
        groups: &[Group<'_>],
        c: OutputMut<'_>,
    ) -> Result<Option<GlobalScale>, Error> {
        let input = input.into();
        let Self { workspace, epilogue, deferred, .. } = self;
        let (out, n, threads) =
            (workspace.plan().desc.out, workspace.plan().desc.n, workspace.plan().threads);
        if input.rows() > workspace.plan().rows() {
            return Err(workspace.plan().not_a(&input));
        }
        let deferred = (!workspace.plan().twice).then_some(&mut deferred[..]);
        let (c, buffers) = Destination::new(out, c, input.rows(), n, deferred)?;
        let mut compute = |c| {
            let sink =
                |a_scale: GlobalScale| Ok(OutputSink { epilogue, groups, a_scale: a_scale.exact(), n, c });
            Ok::<_, Error>(workspace.multiply(input, groups, sink)?.c)
        };
        Ok(match (compute(c)?, buffers) {
            (Destination::Deferred(values, amax), Some(buffers)) => {
                let quantizer = quantizer(amax.global_scale());
                quantize_deferred(threads, &values, &quantizer, n, groups, &buffers);
                Some(quantizer.global_scale())
            }
            (Destination::Amax(amax), Some(buffers)) => {
                let quantizer = quantizer(amax.global_scale());
                let scale = quantizer.global_scale();
                compute(Destination::Nvfp4(buffers, quantizer))?;
                Some(scale)
            }
            (Destination::Nvfp4(_, quantizer), _) => Some(quantizer.global_scale()),
            _ => None,
        })
    }

    /// As [`run`](Self::run), of groups that come one by one.
    ///
    /// # Errors
    /// Those of the groups, and as there.
    pub fn run_each<'a, 'g, E: From<Error>>(
        &mut self,
        input: impl Into<Input<'a>>,
        groups: impl IntoIterator<Item = Result<Group<'g>, E>>,
        c: OutputMut<'_>,
    ) -> Result<Option<GlobalScale>, E> {
        let mut list: Vec<Group<'g>> = std::mem::take(&mut self.groups);
        let listed = groups.into_iter().try_for_each(|group| group.map(|group| list.push(group)));
        let ran = listed.and_then(|()| Ok(self.run(input, &list, c)?));
        list.clear();
        // `Vec` keeps the memory where it has nothing else to do, and the groups of the next run live elsewhere.
        self.groups = list.into_iter().map(|_| unreachable!("the list is empty")).collect();
        ran
    }

    /// Computes what `next` multiplies, all rows with one pair of weights, and leaves it in the order in which `next` reads it, so that
    /// [`run_ahead`](Self::run_ahead) can follow. Returns false if that is not possible: `next` has to multiply bf16 by tiles, cut in
    /// the same way as the rows here, and no value is infinite, NaN or near 2⁻¹²⁶.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_before(
        &mut self,
        a: &AOperand<'_>,
        weights: &PackedGateUp,
        next: &mut Self,
    ) -> Result<bool, Error> {
        let (plan, of_next, rows) = (self.plan(), next.plan(), a.rows());
        let fits = (plan.desc.out, plan.desc.n, plan.tile_rows)
            == (OutFormat::Bf16, of_next.desc.k, of_next.tile_rows);
        let Some(ahead) = fits.then(|| next.workspace.ahead(rows)).flatten() else { return Ok(false) };
        let (n, c, groups) =
            (plan.desc.n, Destination::Ahead(ahead), [Group { first_row: 0, rows, weights }]);
        let Self { workspace, epilogue, .. } = self;
        let sink = |a_scale: GlobalScale| {
            Ok(OutputSink { epilogue, groups: &groups, a_scale: a_scale.exact(), n, c })
        };
        let sink = workspace.multiply(a, &groups, sink)?;
        Ok(matches!(&sink.c, Destination::Ahead(ahead) if ahead.fits()))
    }

    /// Computes the rows that another plan has [left](Self::run_before) here, all there were.
    ///
    /// # Errors
    /// If `weights` or `c` does not fit the plan.
    pub fn run_ahead(&mut self, rows: usize, weights: &PackedGateUp, c: OutputMut<'_>) -> Result<(), Error> {
        let (desc, groups) = (self.plan().desc, [Group { first_row: 0, rows, weights }]);
        self.workspace.check_groups(rows, &groups)?;
        let (c, _) = Destination::new(desc.out, c, rows, desc.n, None)?;
        let sink = OutputSink { epilogue: &self.epilogue, groups: &groups, a_scale: 1.0, n: desc.n, c };
        self.workspace.run_ahead(Job { groups: &groups, sink });
        Ok(())
    }

    /// Computes several products of all rows of A, each as [`run`](Self::run). Where A and C are floats and plans differ in features
    /// alone, A is prepared once and threads share all of it together: for small products, which threads wait for most of the time.
    ///
    /// # Errors
    /// As there.
    pub fn run_all(a: &AOperand<'_>, products: &mut [Product<'_>]) -> Result<(), Error> {
        let (input, rows) = (Input::from(a), a.rows());
        let shared = match products {
            [first, rest @ ..] => {
                let floats = |product: &Product<'_>| !matches!(product.c, OutputMut::Nvfp4 { .. });
                let shares = |other: &Product<'_>| first.gemm.workspace.shares_with(&other.gemm.workspace);
                floats(first) && rest.iter().all(|other| floats(other) && shares(other))
            }
            [] => return Ok(()),
        };
        fn whole<'p>(product: &Product<'p>, rows: usize) -> [Group<'p>; 1] {
            [Group { first_row: 0, rows, weights: product.weights }]
        }
        if !shared {
            return products.iter_mut().try_for_each(|product| {
                let (groups, c) =
                    (whole(product, rows), std::mem::replace(&mut product.c, OutputMut::F32(&mut [])));
                product.gemm.run(a, &groups, c).map(drop)
            });
        }
        let groups: Vec<_> = products.iter().map(|product| whole(product, rows)).collect();
        let (mut jobs, mut workspace) = (Vec::new(), None);
        for (Product { gemm, c, .. }, groups) in products.iter_mut().zip(&groups) {
            let Self { workspace: of_this, epilogue, .. } = &mut **gemm;
            let (desc, c) = (of_this.plan().desc, std::mem::replace(c, OutputMut::F32(&mut [])));
            of_this.check(&input, groups)?;
            let (c, _) = Destination::new(desc.out, c, rows, desc.n, None)?;
            jobs.push(Job { groups, sink: OutputSink { epilogue, groups, a_scale: 1.0, n: desc.n, c } });
            workspace.get_or_insert(of_this);
        }
        if let Some(workspace) = workspace {
            workspace.run(&input, GlobalScale::ONE, &jobs);
        }
        Ok(())
    }
}

/// One of several products of an A.
#[derive(Debug)]
pub struct Product<'a> {
    /// What computes it.
    pub gemm: &'a mut CpuGemm,
    /// The weights.
    pub weights: &'a PackedGateUp,
    /// The result. Afterwards nothing is here.
    pub c: OutputMut<'a>,
}
