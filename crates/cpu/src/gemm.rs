//! The whole operation: operands in, C out.

use dualgemm_formats::GlobalScale;
use dualgemm_gemm::OutputMut;

use crate::aligned::Aligned;
use crate::output::{Destination, OutputSink, quantize_deferred, quantizer};
use crate::{CpuPlan, Error, Group, Input, TileEpilogue, Workspace};

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
        let Self { workspace, epilogue, deferred } = self;
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
}
