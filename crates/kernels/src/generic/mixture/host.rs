//! Launches of the kernels around a mixture's products.

use dualgemm_device::{Args, Device, DevicePtr, FunctionId, LaunchSpec};
use dualgemm_formats::FloatType;

use super::{FEW_CHOICES, MAX_EXPERTS, ROUTE_THREADS, Step, THREADS, generate};
use crate::Error;
use crate::error::refused;
use crate::generic::rowwise::WIDTH;
use crate::generic::{load, target_for};
use crate::limits::fits;

/// Where the lists of a call are, in device memory: all written by the launches of [`Mixture::by_expert`].
#[derive(Debug, Clone, Copy)]
pub struct Lists {
    /// First row of each expert, and how many there are: `[experts + 1]` u32.
    pub rows: DevicePtr,
    /// `[tokens · top_k]` u32: the row of each choice, `u32::MAX` if it has none.
    pub row_of: DevicePtr,
    /// `[tokens · top_k]` u32: the choice of each row.
    pub choice_of: DevicePtr,
}

/// Which row of the results a choice has.
#[derive(Debug, Clone, Copy)]
pub enum RowOf {
    /// That of [`Lists::row_of`].
    Listed(DevicePtr),
    /// Its own number, if there is an expert of the number in `[tokens, top_k]` i32.
    Itself(DevicePtr),
}

/// How many there are of everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of A and of C.
    pub tokens: usize,
    /// Experts of each.
    pub top_k: usize,
    /// Experts that there are.
    pub experts: usize,
}

/// The kernels, loaded on a device.
#[derive(Debug, Clone, Copy)]
pub struct Mixture {
    route: FunctionId,
    gather: FunctionId,
    sort: FunctionId,
    /// Whether the last two multiply.
    weighs: bool,
    /// Writes C, and adds to it.
    combine: [FunctionId; 2],
}

impl Mixture {
    /// Loads the kernels for a C of this type, and for an A as it is or one of a type of 16 bits that the router's weights
    /// multiply.
    pub fn new(device: &dyn Device, out: FloatType, weighs: Option<FloatType>) -> Result<Self, Error> {
        let target = target_for(device.info().arch);
        let of = |step: Step| load(device, &generate(step, target)?, &step.name());
        let combine = |add| of(Step::Combine(out, add));
        Ok(Self {
            route: of(Step::Route)?,
            gather: of(Step::Gather(weighs))?,
            sort: of(Step::Sort(weighs))?,
            weighs: weighs.is_some(),
            combine: [combine(false)?, combine(true)?],
        })
    }

    /// The launches that sort the choices in `ids`, `[tokens, top_k]` i32, and copy rows of A, `k` elements of 16 bits whose
    /// rows lie `pitch` bytes apart, to `out`, dense: one of few choices, otherwise two. `weights`, `[tokens, top_k]` f32, are
    /// looked at if they multiply A.
    ///
    /// # Errors
    /// If there are more experts than [`MAX_EXPERTS`], or more choices than a grid has; K or the pitch is not a multiple of 8
    /// elements, or an address of 16 bytes.
    pub fn by_expert(
        &self,
        sizes: &Sizes,
        (ids, weights): (DevicePtr, DevicePtr),
        (a, pitch, k): (DevicePtr, usize, usize),
        lists: &Lists,
        out: DevicePtr,
    ) -> Result<Vec<LaunchSpec>, Error> {
        let choices = sizes.choices()?;
        fits("A", "bytes of a row", k * 2, 16, 16)?;
        fits("A", "row stride in bytes", pitch, k * 2, 16)?;
        fits("A", "address", a.0 as usize, 1, 16)?;
        fits("A by expert", "address", out.0 as usize, 1, 16)?;
        let (pitch, pieces, experts) = (pitch as u32, (k / 8) as u32, sizes.experts as u32);
        let weighed = |args: Args| if self.weighs { args.ptr(weights) } else { args };
        let args = Args::new().ptr(ids).u32(choices).u32(experts);
        let args = args.ptr(lists.rows).ptr(lists.row_of).ptr(lists.choice_of);
        if choices <= FEW_CHOICES {
            let args = args.ptr(a).u32(pitch).u32(pieces).u32(sizes.top_k as u32).ptr(out);
            let sort = LaunchSpec::new(self.sort, [choices, 1, 1], [THREADS, 1, 1]).args(weighed(args));
            return Ok(vec![sort.dynamic_shared(FEW_CHOICES * 4 + 4)]);
        }
        let route = LaunchSpec::new(self.route, [1, 1, 1], [ROUTE_THREADS, 1, 1]).args(args);
        let args = Args::new().ptr(a).u32(pitch).u32(pieces).u32(sizes.top_k as u32);
        let args = args.u32(experts).ptr(lists.rows).ptr(lists.choice_of).ptr(out);
        let gather = LaunchSpec::new(self.gather, [choices, 1, 1], [THREADS, 1, 1]).args(weighed(args));
        Ok(vec![route.dynamic_shared(MAX_EXPERTS as u32 * 4), gather])
    }

    /// The launch that sums `results`, `[rows, n]` f32, with `weights`, `[tokens, top_k]` f32, to C, `[tokens, n]`; with `add`,
    /// what is there is added to.
    ///
    /// # Errors
    /// If N is not a multiple of 8, or an address of 16 bytes.
    pub fn combine(
        &self,
        sizes: &Sizes,
        (results, n): (DevicePtr, usize),
        (rows, weights): (RowOf, DevicePtr),
        (c, add): (DevicePtr, bool),
    ) -> Result<LaunchSpec, Error> {
        fits("C", "features", n, WIDTH as usize, WIDTH as usize)?;
        fits("C", "address", c.0 as usize, 1, 16)?;
        fits("results of experts", "address", results.0 as usize, 1, 16)?;
        sizes.choices()?;
        let (list, unsorted) = match rows {
            RowOf::Listed(rows) => (rows, 0),
            RowOf::Itself(ids) => (ids, sizes.experts as u32),
        };
        let args = Args::new().ptr(results).ptr(list).ptr(weights);
        let args = args.u32(n as u32).u32(sizes.top_k as u32).u32(unsorted).ptr(c);
        let grid = [(n as u32 / WIDTH).div_ceil(THREADS), sizes.tokens as u32, 1];
        Ok(LaunchSpec::new(self.combine[usize::from(add)], grid, [THREADS, 1, 1]).args(args))
    }
}

impl Sizes {
    /// Choices of all tokens.
    ///
    /// # Errors
    /// If the kernels cannot count something.
    pub fn choices(&self) -> Result<u32, Error> {
        let refuse = |found: String, expected: &str| refused("the mixture", found, expected);
        let Self { tokens, top_k, experts } = *self;
        if experts == 0 || experts > MAX_EXPERTS {
            return refuse(format!("of {experts} experts"), "1 to 4096 experts");
        }
        match tokens.checked_mul(top_k).and_then(|choices| i32::try_from(choices).ok()) {
            Some(choices) if choices > 0 && tokens <= 65535 => Ok(choices as u32),
            _ => refuse(
                format!("of {tokens} tokens with {top_k} experts each"),
                "1 to 65535 tokens, 2^31 choices",
            ),
        }
    }
}
