//! What an operation costs: its products, operations, bytes and memory, and what this machine can do at most for it. `run`
//! asks it of a checkpoint's layer, `bench` of generated operands.

use dualgemm::gemm::{DualGemmDesc, MlpDesc, Routing};
use dualgemm::{AnyDesc, AnyPlan, Plan};
use dualgemm_bench::Work;
use serde::Serialize;

use crate::limits::Limits;

/// How many rows experts compute, and how many of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Routed {
    /// Rows of all experts together.
    pub rows: usize,
    /// Experts that have a row.
    pub experts: usize,
}

impl Routed {
    pub fn of(routing: Routing<'_>) -> Self {
        let mut chosen: Vec<i32> = routing.ids.iter().copied().filter(|&id| id >= 0).collect();
        let rows = chosen.len();
        chosen.sort_unstable();
        chosen.dedup();
        Self { rows, experts: chosen.len() }
    }
}

/// Costs of a description.
pub trait Costs {
    /// Every product, with the rows that it computes in `m`, and how many sets of weights it reads.
    fn products(&self, routed: Routed) -> Vec<(DualGemmDesc, usize)>;

    /// The product that reads A, and the one that writes C.
    fn ends(&self) -> (&DualGemmDesc, &DualGemmDesc);

    /// Experts of each token, 1 where there are none.
    fn top_k(&self) -> usize;

    /// What has to be done at least: weights that have a row, A and C move once; what is between stays in the cache.
    fn work(&self, routed: Routed) -> Work {
        let (first, last) = self.ends();
        let ends = first.m as f64 * first.k as f64 * first.a.bits_per_element() / 8.0
            + last.m as f64 * last.n as f64 * last.out.bits_per_element() / 8.0;
        let products = self.products(routed);
        Work {
            flops: products.iter().map(|(desc, _)| desc.flops()).sum(),
            bytes: ends + products.iter().map(|(desc, sets)| desc.weight_bytes() * *sets as f64).sum::<f64>(),
        }
    }

    /// The operations per second of all products together, where each has a rate of its own.
    fn rate(&self, routed: Routed, rate: impl Fn(&DualGemmDesc) -> f64) -> f64 {
        let products = self.products(routed);
        let seconds = products.iter().map(|(desc, _)| desc.flops() / rate(desc)).sum::<f64>();
        match seconds > 0.0 {
            true => products.iter().map(|(desc, _)| desc.flops()).sum::<f64>() / seconds,
            // No expert has a row.
            false => rate(self.ends().0),
        }
    }

    /// Bytes of the packed weights.
    fn packed_bytes(&self, routed: Routed) -> f64 {
        // Every format takes 4.5 bits there.
        let bytes = |(desc, sets): &(DualGemmDesc, usize)| {
            (desc.op.matrices() * sets) as f64 * 0.5625 * desc.n as f64 * desc.k as f64
        };
        self.products(routed).iter().map(bytes).sum()
    }

    /// Bytes of memory that a run takes at least beside its operands: C, A as the kernels take it, what is between, the packed
    /// weights.
    fn memory(&self, routed: Routed) -> f64 {
        let c = |desc: &DualGemmDesc| desc.m as f64 * desc.n as f64 * desc.out.bits_per_element() / 8.0;
        let products = self.products(routed);
        let stored: f64 = products.iter().map(|(desc, _)| c(desc)).sum();
        let (first, last) = self.ends();
        let sums = if self.top_k() > 1 { c(last) } else { 0.0 };
        stored + sums + first.m as f64 * first.k as f64 + self.packed_bytes(routed)
    }

    /// Multiplications of the reference for one row of A.
    fn multiplications_per_row(&self) -> f64 {
        let m = self.ends().0.m;
        let one = self.products(Routed { rows: self.top_k() * m, experts: 1 });
        one.iter().map(|(desc, _)| desc.flops() / 2.0).sum::<f64>() / m as f64
    }
}

impl Costs for AnyDesc {
    fn products(&self, routed: Routed) -> Vec<(DualGemmDesc, usize)> {
        let both = |mlp: &MlpDesc, m, sets| {
            [mlp.gate_up, mlp.down].map(|product| (DualGemmDesc { m, ..product }, sets))
        };
        match self {
            Self::Product(desc) => vec![(*desc, 1)],
            Self::Mlp(desc) => both(desc, desc.gate_up.m, 1).to_vec(),
            Self::Mixture(desc) => {
                let experts = both(&desc.mlp, routed.rows, routed.experts);
                let shared = desc.shared.iter().flat_map(|mlp| both(mlp, mlp.gate_up.m, 1));
                experts.into_iter().chain(shared).collect()
            }
        }
    }

    fn ends(&self) -> (&DualGemmDesc, &DualGemmDesc) {
        (self.first(), self.last())
    }

    fn top_k(&self) -> usize {
        match self {
            Self::Mixture(desc) => desc.top_k,
            _ => 1,
        }
    }
}

pub fn kernels(plan: &AnyPlan) -> String {
    match plan.products() {
        (first, Some(second)) if second.kernel() != first.kernel() => {
            format!("{}, {}", first.kernel(), second.kernel())
        }
        (first, _) => first.kernel().into(),
    }
}

/// Measures what this machine can do at most: where products have rates of their own, the one that all have together.
pub fn measure_limits(
    plan: &AnyPlan,
    desc: &AnyDesc,
    work: Work,
    routed: Routed,
) -> Result<Limits, dualgemm::Error> {
    let measure = |plan: &Plan| {
        let mut plan = plan.clone();
        if let Plan::Cpu(plan) = &mut plan {
            // Where operands live depends on how much they are together.
            plan.bytes = work.bytes;
        }
        plan.measure_limits()
    };
    let (first, second) = plan.products();
    let (first_rate, bytes_per_s) = measure(first)?;
    let Some(second) = second.filter(|s| s.desc().a_compute() != first.desc().a_compute()) else {
        return Ok(Limits { flops_per_s: first_rate, bytes_per_s });
    };
    let second_rate = measure(second)?.0;
    let rate = |product: &DualGemmDesc| if product.op == second.desc().op { second_rate } else { first_rate };
    Ok(Limits { flops_per_s: desc.rate(routed, rate), bytes_per_s })
}
