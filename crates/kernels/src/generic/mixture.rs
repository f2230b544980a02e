//! Around the products of a mixture of experts: rows sorted by expert before them, the weighted sum over experts after.
//!
//! ```text
//! route     ids [tokens, top_k]      ─► first row of each expert, row of each choice, choice of each row      1 CTA
//! gather    A [tokens, k], 16 bits   ─► rows by expert, as they are or times the router's weights              a CTA for each row
//! sort      both of these, of few choices                                                                     a CTA for each choice
//! combine   results [rows, n], f32   ─► C[t] = Σ_j weight[t, j] · result of (t, j), in the order of j         256 · 8 columns
//! ```
//!
//! The kernel for few tokens finds experts of up to 32 choices by itself: nothing comes before it then, and a choice is a row.
//!
//! A choice is `token · top_k + j`. Negative experts, and those from the number of experts on, are skipped: they are computed
//! elsewhere. Which of an expert's rows a choice becomes depends on timing, unless they are few; what is computed of it does not,
//! so neither does C.

mod host;

use dualgemm_formats::FloatType;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::SmemLayout;

pub use self::host::{Lists, Mixture, RowOf, Sizes};
use super::rowwise::WIDTH;
use super::{has_dependent_launch, module, take_turn, values};
use crate::Error;

/// Threads of the CTA that sorts.
const ROUTE_THREADS: u32 = 1024;
/// Threads of the other CTAs.
const THREADS: u32 = 256;
/// Most choices that each CTA of one launch counts for itself.
const FEW_CHOICES: u32 = 512;
/// Pieces of a row of A that a thread reads at once.
const FIRST_PIECES: u32 = 4;
/// Choices whose results a thread reads at once.
const RESULTS: u32 = 4;
/// Most experts: their counters in shared memory take 16 KiB.
pub const MAX_EXPERTS: usize = 4096;
/// The row of a choice that has none.
const NONE: u32 = u32::MAX;

/// One of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Sorts choices by expert.
    Route,
    /// Copies rows of A into that order; of A of this type, multiplies each by the weight of its choice.
    Gather(Option<FloatType>),
    /// Does both for few choices.
    Sort(Option<FloatType>),
    /// Sums results, to C of this type; adds them to what is there, or not.
    Combine(FloatType, bool),
}

impl Step {
    /// Every kernel.
    pub fn all() -> Vec<Self> {
        let combine =
            FloatType::ALL.into_iter().flat_map(|ty| [false, true].map(|add| Self::Combine(ty, add)));
        let weighs = [None, Some(FloatType::F16), Some(FloatType::Bf16)];
        let rows = weighs.into_iter().flat_map(|ty| [Self::Gather(ty), Self::Sort(ty)]);
        std::iter::once(Self::Route).chain(rows).chain(combine).collect()
    }

    /// Its name, which is that of the entry in its module.
    pub fn name(self) -> String {
        let of = |ty: Option<FloatType>| ty.map_or(String::new(), |ty| format!("_{}", ty.name()));
        match self {
            Self::Route => "route".into(),
            Self::Gather(weighs) => format!("gather{}", of(weighs)),
            Self::Sort(weighs) => format!("sort{}", of(weighs)),
            Self::Combine(ty, add) => {
                format!("combine_{}{}", ty.name(), if add { "_add" } else { "" })
            }
        }
    }
}

/// Generates a kernel.
pub fn generate(step: Step, target: Target) -> Result<Module, Error> {
    module(target, "mixtures of experts", &step.name(), |k| match step {
        Step::Route => route(k, target),
        Step::Gather(weighs) => gather(k, target, weighs),
        Step::Sort(weighs) => sort(k, target, weighs),
        Step::Combine(ty, add) => combine(k, target, ty, add),
    })
}

fn route(k: &mut Kernel, target: Target) {
    k.required_threads(ROUTE_THREADS);
    let (ids, choices, experts) = (k.pointer("ids"), k.param::<U32>("choices"), k.param::<U32>("experts"));
    let [rows, row_of, choice_of] = ["rows", "row_of", "choice_of"].map(|name| k.pointer(name));
    let mut smem = SmemLayout::new();
    let counters = smem.alloc("rows_of_expert", MAX_EXPERTS as u32 * 4, 4);
    let counters = k.shared(&smem).at(counters.offset);
    take_turn(k, target);
    let (choices, experts) = (k.ld_param(&choices), k.ld_param(&experts));
    let [ids, rows, row_of, choice_of] = [ids, rows, row_of, choice_of].map(|p| k.ld_pointer(&p));
    let thread = k.special(Special::TidX);
    k.for_range("clear", thread, experts, ROUTE_THREADS, |k, expert, _| {
        let zero = k.mov::<U32>(0u32);
        let counter = k.offset(counters, expert << 2);
        k.st(counter, zero);
    });
    k.cta_sync();
    each_choice(k, "count", (ids, choices, experts), |k, _, expert, here| {
        let counter = k.offset(counters, expert << 2);
        k.when(here).red::<U32, Shared>(AtomOp::Add, Semantics::Relaxed, Scope::Cta, counter, 1u32);
    });
    k.cta_sync();
    let first_warp = k.compare(Cmp::Lt, thread, 32u32);
    k.if_(first_warp, "sum", |k| first_rows(k, (counters, rows), thread, experts));
    k.cta_sync();
    each_choice(k, "place", (ids, choices, experts), |k, choice, expert, here| {
        let row = k.mov::<U32>(NONE);
        k.if_(here, "row", |k| {
            let counter = k.offset(counters, expert << 2);
            let own: Reg<U32> = k.atom(AtomOp::Add, Semantics::Relaxed, Scope::Cta, counter, 1u32);
            k.assign(row, own);
            let to = k.offset(choice_of, own.mul_wide(4));
            k.st(to, choice);
        });
        let to = k.offset(row_of, choice.mul_wide(4));
        k.st(to, row);
    });
}

/// Runs `body` for the choices of a thread: with the choice, its expert, and whether that is here.
fn each_choice(
    k: &mut Kernel,
    name: &str,
    (ids, choices, experts): (Addr<Global>, Reg<U32>, Reg<U32>),
    body: impl FnOnce(&mut Kernel, Reg<U32>, Reg<U32>, Reg<Pred>),
) {
    let thread = k.special(Special::TidX);
    k.for_range(name, thread, choices, ROUTE_THREADS, |k, choice, _| {
        let from = k.offset(ids, choice.mul_wide(4));
        let expert: Reg<U32> = k.ld(from);
        let here = k.compare(Cmp::Lt, expert, experts);
        body(k, choice, expert, here);
    });
}

/// One warp replaces the number of rows of each expert by its first row, in shared and in global memory.
fn first_rows(
    k: &mut Kernel,
    (counters, rows): (Addr<Shared>, Addr<Global>),
    lane: Reg<U32>,
    experts: Reg<U32>,
) {
    let before = k.mov::<U32>(0u32);
    k.for_range("experts", 0u32, experts, 32, |k, first, _| {
        let expert = k.eval(first + lane);
        let here = k.compare(Cmp::Lt, expert, experts);
        let counter = k.offset(counters, expert << 2);
        let count = k.mov::<U32>(0u32);
        k.when(here).to(count).ld::<U32, _>(counter);
        let sum = k.mov(count);
        for distance in [1u32, 2, 4, 8, 16] {
            let other = k.shuffle(Shuffle::Up, sum, distance);
            let from_below = k.compare(Cmp::Ge, lane, distance);
            k.when(from_below).to(sum).eval(sum + other);
        }
        let row = k.eval(before + sum - count);
        k.when(here).st(counter, row);
        let to = k.offset(rows, expert.mul_wide(4));
        k.when(here).st(to, row);
        let all = k.shuffle(Shuffle::Index, sum, 31u32);
        k.to(before).eval(before + all);
    });
    let last = k.compare(Cmp::Eq, lane, 0u32);
    let to = k.offset(rows, experts.mul_wide(4));
    k.when(last).st(to, before);
}

fn gather(k: &mut Kernel, target: Target, weighs: Option<FloatType>) {
    k.required_threads(THREADS);
    let (a, pitch, pieces) = (k.pointer("a"), k.param::<U32>("a_pitch"), k.param::<U32>("pieces"));
    let (top_k, experts) = (k.param::<U32>("top_k"), k.param::<U32>("experts"));
    let [rows, choice_of, out] = ["rows", "choice_of", "out"].map(|name| k.pointer(name));
    let weights = weighs.map(|ty| (ty, k.pointer("weights")));
    take_turn(k, target);
    let [pitch, pieces, top_k, experts] = [pitch, pieces, top_k, experts].map(|p| k.ld_param(&p));
    let [a, rows, choice_of, out] = [a, rows, choice_of, out].map(|p| k.ld_pointer(&p));
    let row = k.special(Special::CtaidX);
    let end = k.offset(rows, experts.mul_wide(4));
    let end: Reg<U32> = k.ld(end);
    let beyond = k.compare(Cmp::Ge, row, end);
    k.when(beyond).exit();
    let choice = k.offset(choice_of, row.mul_wide(4));
    let choice: Reg<U32> = k.ld(choice);
    Row::read(k, (a, pitch, pieces), (choice, top_k), weights).write(k, out, row);
}

/// A choice's row of A on its way to where it belongs, so many pieces of 16 bytes: each thread has the first ones in
/// registers, so that their way from memory and that of what says where to do not add up.
struct Row {
    from: Addr<Global>,
    pieces: Reg<U32>,
    first: Vec<Piece>,
    /// What it is multiplied by, and its type.
    weight: Option<(FloatType, Reg<F32>)>,
}

type Piece = (Reg<U32>, Reg<Pred>, [Reg<B32>; 4]);

impl Row {
    fn read(
        k: &mut Kernel,
        (a, pitch, pieces): (Addr<Global>, Reg<U32>, Reg<U32>),
        (choice, top_k): (Reg<U32>, Reg<U32>),
        weights: Option<(FloatType, PointerParam)>,
    ) -> Self {
        let thread = k.special(Special::TidX);
        let token = k.eval(choice / top_k);
        let from = k.offset(a, token.mul_wide(pitch));
        let first = (0..FIRST_PIECES).map(|i| {
            let piece = k.eval(thread + i * THREADS);
            let there = k.compare(Cmp::Lt, piece, pieces);
            let at = k.offset(from, piece.mul_wide(16));
            (piece, there, k.when(there).ld_vector(at))
        });
        let first = first.collect();
        let weight = weights.map(|(ty, weights)| {
            let weights = k.ld_pointer(&weights);
            let at = k.offset(weights, choice.mul_wide(4));
            (ty, k.ld(at))
        });
        Self { from, pieces, first, weight }
    }

    fn weighed(&self, k: &mut Kernel, words: [Reg<B32>; 4]) -> [Reg<B32>; 4] {
        let Some((ty, weight)) = self.weight else { return words };
        words.map(|word| {
            let [low, high] = values::widen(k, ty, word).map(|value| k.mul(value, weight));
            values::narrow(k, ty, low, high)
        })
    }

    fn write(self, k: &mut Kernel, out: Addr<Global>, row: Reg<U32>) {
        let thread = k.special(Special::TidX);
        let bytes = k.eval(self.pieces << 4);
        let to = k.offset(out, row.mul_wide(bytes));
        for &(piece, there, words) in &self.first {
            let at = k.offset(to, piece.mul_wide(16));
            let words = self.weighed(k, words);
            k.when(there).st_vector(at, &words);
        }
        let next = k.eval(thread + FIRST_PIECES * THREADS);
        k.for_range("piece", next, self.pieces, THREADS, |k, piece, _| {
            let byte = k.eval(piece.mul_wide(16));
            let [from, to] = [self.from, to].map(|start| k.offset(start, byte));
            let words = k.ld_vector(from);
            let words = self.weighed(k, words);
            k.st_vector(to, &words);
        });
    }
}

/// A CTA for each choice counts those before it, by expert and then by number: that is its row.
fn sort(k: &mut Kernel, target: Target, weighs: Option<FloatType>) {
    k.required_threads(THREADS);
    let (ids, choices, experts) = (k.pointer("ids"), k.param::<U32>("choices"), k.param::<U32>("experts"));
    let [rows, row_of, choice_of] = ["rows", "row_of", "choice_of"].map(|name| k.pointer(name));
    let (a, pitch, pieces) = (k.pointer("a"), k.param::<U32>("a_pitch"), k.param::<U32>("pieces"));
    let (top_k, out) = (k.param::<U32>("top_k"), k.pointer("out"));
    let weights = weighs.map(|ty| (ty, k.pointer("weights")));
    let mut smem = SmemLayout::new();
    let (all, before) = (smem.alloc("ids", FEW_CHOICES * 4, 16), smem.alloc("before", 4, 4));
    let base = k.shared(&smem);
    let (all, before) = (base.at(all.offset), base.at(before.offset));
    take_turn(k, target);
    let [choices, experts, pitch, pieces, top_k] =
        [choices, experts, pitch, pieces, top_k].map(|p| k.ld_param(&p));
    let [ids, rows, row_of, choice_of, a, out] =
        [ids, rows, row_of, choice_of, a, out].map(|p| k.ld_pointer(&p));
    let (choice, thread, lane) =
        (k.special(Special::CtaidX), k.special(Special::TidX), k.special(Special::LaneId));
    let own = k.offset(ids, choice.mul_wide(4));
    let own: Reg<U32> = k.ld(own);
    let row_of_a = Row::read(k, (a, pitch, pieces), (choice, top_k), weights);
    let first = k.compare(Cmp::Eq, thread, 0u32);
    let none = k.mov::<U32>(0u32);
    k.when(first).st(before, none);
    k.cta_sync();
    let count = k.mov::<U32>(0u32);
    k.comment("Behind the last choice are none: whole vectors of four are read below.");
    let padded = k.eval((choices + 3) & !3u32);
    k.for_range("count", thread, padded, THREADS, |k, other, _| {
        let expert = k.mov::<U32>(NONE);
        let there = k.compare(Cmp::Lt, other, choices);
        let from = k.offset(ids, other.mul_wide(4));
        k.when(there).to(expert).ld::<U32, _>(from);
        let to = k.offset(all, other << 2);
        k.st(to, expert);
        let same = k.compare(Cmp::Eq, expert, own);
        let earlier = k.compare_and(Cmp::Lt, other, choice, same);
        k.when(earlier).to(count).eval(count + 1);
        let lower = k.compare(Cmp::Lt, expert, own);
        k.when(lower).to(count).eval(count + 1);
    });
    let count = k.redux(Redux::Add, count);
    let elected = k.compare(Cmp::Eq, lane, 0u32);
    k.when(elected).red::<U32, Shared>(AtomOp::Add, Semantics::Relaxed, Scope::Cta, before, count);
    k.cta_sync();
    let row: Reg<U32> = k.ld(before);
    let here = k.compare(Cmp::Lt, own, experts);
    k.comment("The table of first rows, an entry for each thread of the grid.");
    let index = k.eval(choice * THREADS + thread);
    let (entries, all_threads) = (k.eval(experts + 1), k.eval(choices * THREADS));
    let entry = k.mov(index);
    k.loop_("first_rows", |k, this| {
        let done = k.compare(Cmp::Ge, entry, entries);
        k.break_if(this, done);
        let count = k.mov::<U32>(0u32);
        k.for_range("lower", 0u32, choices, 4, |k, other, _| {
            let from = k.offset(all, other << 2);
            let four: [Reg<U32>; 4] = k.ld_vector(from);
            for expert in four {
                let lower = k.compare(Cmp::Lt, expert, entry);
                k.when(lower).to(count).eval(count + 1);
            }
        });
        let to = k.offset(rows, entry.mul_wide(4));
        k.st(to, count);
        k.to(entry).eval(entry + all_threads);
    });
    let (to, placed) = (k.offset(row_of, choice.mul_wide(4)), k.select::<U32>(here, row, NONE));
    k.when(first).st(to, placed);
    k.unless(here).exit();
    let to = k.offset(choice_of, row.mul_wide(4));
    k.when(first).st(to, choice);
    row_of_a.write(k, out, row);
}

fn combine(k: &mut Kernel, target: Target, ty: FloatType, add: bool) {
    k.required_threads(THREADS);
    let [results, row_of, weights] = ["results", "row_of", "weights"].map(|name| k.pointer(name));
    let [n, top_k, unsorted] = ["n", "top_k", "unsorted"].map(|name| k.param::<U32>(name));
    let out = k.pointer("out");
    let [n, top_k, unsorted] = [n, top_k, unsorted].map(|p| k.ld_param(&p));
    let sorted = k.compare(Cmp::Eq, unsorted, 0u32);
    let waits = has_dependent_launch(target);
    if waits {
        k.launch_dependents();
        k.if_(sorted, "sorted", |k| k.grid_dependency_wait());
        k.comment("The router's own lists were there when the first product let the second start, which let this one.");
    }
    let [results, row_of, weights, out] = [results, row_of, weights, out].map(|p| k.ld_pointer(&p));
    let (cta, token, thread) =
        (k.special(Special::CtaidX), k.special(Special::CtaidY), k.special(Special::TidX));
    let column = k.eval((cta * THREADS + thread) * WIDTH);
    let beyond = k.compare(Cmp::Ge, column, n);
    k.when(beyond).exit();
    let sums: [Reg<F32>; WIDTH as usize] = std::array::from_fn(|_| k.mov(0.0f32));
    let first = k.eval(token * top_k);
    k.for_range("choices", 0u32, top_k, RESULTS, |k, j, _| {
        let rows: [[Reg<U32>; 2]; RESULTS as usize] = std::array::from_fn(|i| {
            let there = k.compare(Cmp::Lt, j + i as u32, top_k);
            let byte = k.eval((first + j + i as u32).mul_wide(4));
            [(row_of, NONE), (weights, 0)].map(|(start, none)| {
                let (at, value) = (k.offset(start, byte), k.mov::<U32>(none));
                k.when(there).to(value).ld::<U32, _>(at);
                value
            })
        });
        if waits {
            k.grid_dependency_wait();
        }
        let mut choice = 0;
        let found = rows.map(|[row, weight]| {
            k.comment("Of unsorted choices `row` is the expert, and the row is the choice's own.");
            let own = k.eval(first + j + choice);
            choice += 1;
            let known = k.compare(Cmp::Lt, row, unsorted);
            let own = k.select::<U32>(known, own, NONE);
            let row = k.select::<U32>(sorted, row, own);
            let here = k.compare(Cmp::Ne, row, NONE);
            let from = k.offset(results, (row.mul_wide(n) + column.widen()) << 2);
            let halves: [[Reg<F32>; 4]; 2] = [0u32, 16].map(|byte| k.when(here).ld_vector(from.at(byte)));
            (here, k.from_bits(weight.cast::<B32>()), halves)
        });
        for (here, weight, halves) in found {
            k.if_(here, "add", |k| {
                for (sum, value) in sums.iter().zip(halves.into_iter().flatten()) {
                    let product = k.mul(weight, value);
                    k.to(*sum).add(*sum, product);
                }
            });
        }
    });
    let to = k.offset(out, (token.mul_wide(n) + column.widen()) << values::bytes(ty).ilog2());
    if add {
        let before = values::load(k, ty, to);
        for (sum, before) in sums.iter().zip(before) {
            k.to(*sum).add(*sum, before);
        }
    }
    values::store(k, ty, to, &sums);
}
