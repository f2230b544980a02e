//! The runs of a plan, and their memory, which is allocated once.

use std::ops::Range;

use dualgemm_formats::{FloatMatrix, GlobalScale, Producer};
use dualgemm_gemm::{AFormat, AOperand, QuantizeA};

use crate::aligned::Aligned;
use crate::pack::{CHUNK_K, PackedGateUp};
use crate::plan::CpuPlan;
use crate::schedule::{self, Job, TileSums};
use crate::threads;
use crate::tile::{MAX_TILE_ROWS, RowTile, TileSink, Written};
use crate::w4a16::ahead::Ahead;
use crate::{Error, Isa, w4a4, w4a16};

/// Rows of A that are prepared and multiplied before the next ones. This bounds the memory for prepared activations. All threads
/// wait for each other twice in each wave.
const WAVE_ROWS: usize = 2048;
const _: () = assert!(MAX_TILE_ROWS <= WAVE_ROWS);

/// The same on tiles of AMX, where threads wait for a larger part of the time: 4096 rows take 7 % less time in two waves than in four on
/// 16 threads of an Emerald Rapids, and a mixture with so many 4 to 6 % less in one.
fn wave_rows(isa: Isa) -> usize {
    if isa == Isa::AmxBf16 { 2 * WAVE_ROWS } else { WAVE_ROWS }
}

/// Rows of A that share a pair of weights: an expert of a mixture, or an entry of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Group<'a> {
    /// First row of A, at or after the end of the group before.
    pub first_row: usize,
    /// Number of rows, which may be 0.
    pub rows: usize,
    /// The weights.
    pub weights: &'a PackedGateUp,
}

impl Group<'_> {
    fn range(&self) -> Range<usize> {
        self.first_row..self.first_row + self.rows
    }
}

/// The rows of A that a run multiplies: all, one after the other, or those that a list names.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    pub(crate) a: &'a AOperand<'a>,
    list: Option<&'a [u32]>,
}

impl<'a> From<&'a AOperand<'_>> for Input<'a> {
    fn from(a: &'a AOperand<'_>) -> Self {
        Self { a, list: None }
    }
}

impl<'a> Input<'a> {
    /// Row `list[i]` of A as row i: a mixture's tokens, by expert, without a copy of each. Groups count rows of the list, and C has a row
    /// for each.
    pub fn listed(a: &'a AOperand<'_>, list: &'a [u32]) -> Self {
        Self { a, list: Some(list) }
    }

    pub(crate) fn rows(&self) -> usize {
        self.list.map_or(self.a.rows(), <[u32]>::len)
    }

    fn row(&self, index: usize) -> usize {
        self.list.map_or(index, |list| list[index] as usize)
    }
}

/// Buffers for the runs of one [`CpuPlan`]. Runs allocate nothing.
#[derive(Debug)]
pub struct Workspace {
    plan: CpuPlan,
    activations: Activations,
    sums: Vec<TileSums>,
    tiles: Vec<RowTile>,
    max_groups: usize,
    amax: Vec<f32>,
}

/// A kernel and the buffer for its activations.
#[derive(Debug)]
enum Activations {
    W4a4(w4a4::Kernel, Aligned<w4a4::Block>),
    W4a16(w4a16::Kernel, w4a16::Buffer),
}

impl Workspace {
    /// Allocates the buffers for calls with up to `max_groups` groups.
    ///
    /// # Errors
    /// If the machine lacks the plan's instruction set (a plan may come from another machine) or the memory.
    pub fn new(plan: &CpuPlan, max_groups: usize) -> Result<Self, Error> {
        plan.check()?;
        let isa = plan.isa.checked()?;
        let (rows, k) = (plan.rows(), plan.desc.k);
        let wave = rows.min(wave_rows(plan.isa));
        let no_memory = || Error::NoMemory { rows, k };
        let Some(format) = plan.desc.b.block_format() else {
            let (found, expected) = (plan.desc.b.to_string(), "nvfp4 or mxfp4".into());
            return Err(Error::NotPlanned { what: "the format of weights that are packed", found, expected });
        };
        let a = plan.desc.a_compute();
        let activations = match a.block_format() {
            Some(_) => {
                let kernel = w4a4::Kernel::new(isa).with_tiles(a, plan.desc.b, k);
                let blocks = Aligned::try_zeroed(wave * kernel.row_blocks(k / CHUNK_K));
                Activations::W4a4(kernel, blocks.ok_or_else(no_memory)?)
            }
            None => {
                let terms = w4a16::tile_terms(isa.tiles, plan.desc.a, plan.desc.b, plan.tile_rows, k);
                let buffer = w4a16::Buffer::try_new(wave, rows, k, terms.unwrap_or(0));
                Activations::W4a16(w4a16::Kernel::new(isa, format), buffer.ok_or_else(no_memory)?)
            }
        };
        let (mut tiles, mut amax) = (Vec::new(), Vec::new());
        // The last tile of each group that has rows may not be full.
        let room = tiles.try_reserve_exact(rows.div_ceil(plan.tile_rows) + max_groups.min(rows));
        let maxima = if plan.desc.quantize_a == QuantizeA::Dynamic { rows } else { 0 };
        room.and(amax.try_reserve_exact(maxima)).map_err(|_| no_memory())?;
        amax.resize(maxima, 0.0);
        Ok(Self {
            activations,
            sums: schedule::tile_sums(plan.isa, plan.threads),
            tiles,
            max_groups,
            amax,
            plan: plan.clone(),
        })
    }

    /// The plan.
    pub fn plan(&self) -> &CpuPlan {
        &self.plan
    }

    /// Multiplies A with each group's weights and hands the sums to the sink that `sink` makes from the tensor
    /// scale of A, which is 1 where A is not quantized.
    ///
    /// # Errors
    /// If A, its list of rows or a group does not fit the plan, or a block scale of a group's rows of A is NaN or negative.
    pub fn multiply<'a, S: TileSink>(
        &mut self,
        input: impl Into<Input<'a>>,
        groups: &[Group<'_>],
        sink: impl FnOnce(GlobalScale) -> Result<S, Error>,
    ) -> Result<S, Error> {
        let input = input.into();
        self.check(&input, groups)?;
        let scale = match input.a {
            AOperand::Float(a) => {
                let (how, amax) = (self.plan.desc.quantize_a, &mut self.amax[..]);
                global_scale(how, a, &input, groups, self.plan.threads, amax)
            }
            AOperand::Quantized(a) => {
                // Once for all rows: a list names each several times. Rows of no group may hold anything.
                if a.check_scales().is_err() {
                    let mut rows = groups.iter().flat_map(Group::range).map(|row| input.row(row));
                    rows.try_for_each(|row| a.check_scales_of(row..row + 1))?;
                }
                a.global_scale()
            }
        };
        let jobs = [Job { groups, sink: sink(scale)? }];
        self.run(&input, scale, &jobs);
        let [Job { sink, .. }] = jobs;
        Ok(sink)
    }

    /// Multiplies A, which has been [checked](Self::check), with the weights of several jobs, whose groups have the same rows, and whose
    /// plans [share](Self::shares_with) this one's A if they are several. Floats that become blocks do so under `scale`.
    pub(crate) fn run<S: TileSink>(&mut self, input: &Input<'_>, scale: GlobalScale, jobs: &[Job<'_, S>]) {
        let (threads, list, sums) = (self.plan.threads, input.list, &self.sums);
        schedule::cut(jobs[0].groups.iter().map(Group::range), self.plan.tile_rows, &mut self.tiles);
        for tiles in schedule::waves(&self.tiles, wave_rows(self.plan.isa)) {
            match (&mut self.activations, input.a) {
                (Activations::W4a4(kernel, blocks), a) => {
                    let source = match a {
                        AOperand::Quantized(a) => w4a4::Source::Quantized(a),
                        AOperand::Float(a) => w4a4::Source::Float(a, scale),
                    };
                    schedule::run(sums, tiles, jobs, kernel.prepare(&source, list, tiles, blocks));
                }
                (Activations::W4a16(kernel, buffer), AOperand::Float(a)) => {
                    schedule::run(sums, tiles, jobs, kernel.prepare(threads, a, list, tiles, buffer));
                }
                (Activations::W4a16(..), AOperand::Quantized(_)) => {
                    unreachable!("`check` takes floats alone")
                }
            }
        }
    }

    /// A of the next run, for so many rows, if that may be bf16 that tiles multiply in one wave: [`run_ahead`](Self::run_ahead).
    pub(crate) fn ahead(&mut self, rows: usize) -> Option<Ahead<'_>> {
        let (Activations::W4a16(kernel, buffer), desc) = (&mut self.activations, &self.plan.desc) else {
            return None;
        };
        schedule::cut(std::iter::once(0..rows), self.plan.tile_rows, &mut self.tiles);
        let fewest = self.tiles.iter().map(|tile| tile.rows).min()?;
        let terms = w4a16::tile_terms(self.plan.isa.tiles(), desc.a, desc.b, fewest, desc.k);
        let fits = rows <= self.plan.rows().min(wave_rows(self.plan.isa));
        (fits && desc.a == AFormat::Bf16 && terms == Some(1))
            .then(|| Ahead::new(*kernel, &self.tiles, desc.k, buffer))
    }

    /// Multiplies A that was written [ahead](Self::ahead).
    pub(crate) fn run_ahead<S: TileSink>(&self, job: Job<'_, S>) {
        if let Activations::W4a16(kernel, buffer) = &self.activations {
            let rows = Written(kernel.bind(0, self.plan.desc.k, buffer));
            schedule::run(&self.sums, &self.tiles, &[job], rows);
        }
    }

    /// Whether both prepare A in the same way, floats that stay floats.
    pub(crate) fn shares_with(&self, other: &Self) -> bool {
        let of = |Self { plan, .. }: &Self| {
            (plan.isa, plan.threads, plan.tile_rows, plan.desc.m, plan.desc.k, plan.desc.a, plan.desc.b)
        };
        [self, other].iter().all(|this| matches!(this.activations, Activations::W4a16(..)))
            && of(self) == of(other)
    }

    pub(crate) fn check(&self, input: &Input<'_>, groups: &[Group<'_>]) -> Result<(), Error> {
        self.check_input(input)?;
        self.check_groups(input.rows(), groups)
    }

    fn check_input(&self, input: &Input<'_>) -> Result<(), Error> {
        let (Input { a, list }, desc) = (input, &self.plan.desc);
        if AFormat::of(a) != desc.a || a.k() != desc.k || input.rows() > self.plan.rows() {
            return Err(self.plan.not_a(input));
        }
        match list.and_then(|list| list.iter().position(|&row| row as usize >= a.rows())) {
            Some(at) => Err(Error::NotPlanned {
                what: "the list of rows",
                found: format!("row {} at place {at}", input.row(at)),
                expected: format!("rows below {}, those of A", a.rows()),
            }),
            None => Ok(()),
        }
    }

    pub(crate) fn check_groups(&self, rows: usize, groups: &[Group<'_>]) -> Result<(), Error> {
        let desc = &self.plan.desc;
        if groups.len() > self.max_groups {
            return Err(Error::NotPlanned {
                what: "the number of groups",
                found: groups.len().to_string(),
                expected: format!("up to {}", self.max_groups),
            });
        }
        let mut previous_end = 0;
        for (index, group) in groups.iter().enumerate() {
            let (weights, start) = (group.weights, group.first_row);
            let end = start.saturating_add(group.rows);
            if start < previous_end || end > rows {
                return Err(Error::GroupRows { group: index, start, end, previous_end, rows });
            }
            previous_end = end;
            let found = (weights.op(), weights.format().into(), weights.n(), weights.k());
            let expected = (desc.op, desc.b, desc.n, desc.k);
            if found != expected {
                let text = |(op, format, n, k)| format!("{format} [{n}, {k}] for {op}");
                let (found, expected) = (text(found), text(expected));
                return Err(Error::NotPlanned { what: "a pack of weights", found, expected });
            }
        }
        Ok(())
    }
}

/// The tensor scale by which A is quantized while it is prepared, by Transformer Engine's rule, as in GPU kernels. Rows of no
/// group may hold anything and do not count.
fn global_scale(
    how: QuantizeA,
    a: &FloatMatrix<'_>,
    input: &Input<'_>,
    groups: &[Group<'_>],
    threads: usize,
    amax: &mut [f32],
) -> GlobalScale {
    match how {
        QuantizeA::No => GlobalScale::ONE,
        QuantizeA::Static(scale) => GlobalScale::multiplier(scale),
        QuantizeA::Dynamic => {
            let amax = &mut amax[..input.rows()];
            let of_row = |row: usize, amax: &mut [f32]| {
                let group = groups.partition_point(|group| group.range().end <= row);
                let counts = groups.get(group).is_some_and(|group| group.first_row <= row);
                let at = input.row(row);
                amax.fill(if counts { Producer::Te.amax(a, at..at + 1) } else { 0.0 });
            };
            threads::for_each_part(if amax.len() == 1 { 1 } else { threads }, amax, 1, of_row);
            let amax = amax.iter().fold(0.0, |largest: f32, &of_row| largest.max(of_row));
            Producer::Te.global_scale(amax, a.float_type())
        }
    }
}
