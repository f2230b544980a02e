//! One computation of any operation: shapes and formats, how it is computed, packed weights, and its runs. `run` makes it of
//! a checkpoint, `bench` of generated operands.
//!
//! ```text
//! Desc ─► Planned ─┬─► Running ─► run(A, Packed, Routing) ─► C
//! weights ─────────┴─► Packed
//! ```

use dualgemm::gemm::{AOperand, DualGemmDesc, MlpDesc, OutFormat, Routing};
use dualgemm::{
    DualGemm, MixtureDesc, MixturePlan, MixtureRunner, MlpPlan, MlpRunner, PackedMlp, PackedWeights, Plan,
    Runner, Target,
};
use dualgemm_bench::{Timing, Work};
use serde::Serialize;

use crate::limits::Limits;
use crate::result::OwnedResult;

/// Shapes and formats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Desc {
    /// Gate and up, or a linear layer.
    Product(DualGemmDesc),
    /// A whole MLP.
    Mlp(MlpDesc),
    /// A mixture of experts.
    Mixture {
        /// Those that the router chooses from.
        routed: MixtureDesc,
        /// The one that every token goes through.
        shared: Option<MlpDesc>,
    },
}

/// How many rows experts compute, and how many of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Routed {
    /// Rows of all experts together.
    pub rows: usize,
    /// Experts that have a row.
    pub experts: usize,
}

impl Routed {
    /// What a routing comes to.
    pub fn of(routing: Routing<'_>) -> Self {
        let mut chosen: Vec<i32> = routing.ids.iter().copied().filter(|&id| id >= 0).collect();
        let rows = chosen.len();
        chosen.sort_unstable();
        chosen.dedup();
        Self { rows, experts: chosen.len() }
    }
}

impl Desc {
    /// Checks the rules of shapes and formats.
    pub fn check(&self) -> Result<(), dualgemm::gemm::Error> {
        match self {
            Self::Product(desc) => desc.check(),
            Self::Mlp(desc) => desc.check(),
            Self::Mixture { routed, shared } => {
                routed.mlp.check()?;
                shared.iter().try_for_each(MlpDesc::check)
            }
        }
    }

    /// The product that reads A.
    pub fn first(&self) -> &DualGemmDesc {
        match self {
            Self::Product(desc) => desc,
            Self::Mlp(desc) => &desc.gate_up,
            Self::Mixture { routed, .. } => &routed.mlp.gate_up,
        }
    }

    /// The product that writes C.
    pub fn last(&self) -> &DualGemmDesc {
        match self {
            Self::Product(desc) => desc,
            Self::Mlp(desc) => &desc.down,
            Self::Mixture { routed, .. } => &routed.mlp.down,
        }
    }

    /// The format between the products, where there are two.
    pub fn between(&self) -> Option<OutFormat> {
        (!matches!(self, Self::Product(_))).then_some(self.first().out)
    }

    /// Every product, with the rows that it computes in `m`, and how many sets of weights it reads.
    pub fn products(&self, routed: Routed) -> Vec<(DualGemmDesc, usize)> {
        let both = |mlp: &MlpDesc, m, sets| {
            [mlp.gate_up, mlp.down].map(|product| (DualGemmDesc { m, ..product }, sets))
        };
        match self {
            Self::Product(desc) => vec![(*desc, 1)],
            Self::Mlp(desc) => both(desc, desc.gate_up.m, 1).to_vec(),
            Self::Mixture { routed: desc, shared } => {
                let experts = both(&desc.mlp, routed.rows, routed.experts);
                let shared = shared.iter().flat_map(|mlp| both(mlp, mlp.gate_up.m, 1));
                experts.into_iter().chain(shared).collect()
            }
        }
    }

    /// What has to be done at least: weights that have a row, A and C move once; what is between stays in the cache.
    pub fn work(&self, routed: Routed) -> Work {
        let (first, last) = (self.first(), self.last());
        let ends = first.m as f64 * first.k as f64 * first.a.bits_per_element() / 8.0
            + last.m as f64 * last.n as f64 * last.out.bits_per_element() / 8.0;
        let products = self.products(routed);
        Work {
            flops: products.iter().map(|(desc, _)| desc.flops()).sum(),
            bytes: ends + products.iter().map(|(desc, sets)| desc.weight_bytes() * *sets as f64).sum::<f64>(),
        }
    }

    /// The operations per second of all products together, where each has a rate of its own.
    pub fn rate(&self, routed: Routed, rate: impl Fn(&DualGemmDesc) -> f64) -> f64 {
        let products = self.products(routed);
        let seconds = products.iter().map(|(desc, _)| desc.flops() / rate(desc)).sum::<f64>();
        products.iter().map(|(desc, _)| desc.flops()).sum::<f64>() / seconds
    }

    /// Bytes of the packed weights.
    pub fn packed_bytes(&self, routed: Routed) -> f64 {
        // Every format takes 4.5 bits there.
        let bytes = |(desc, sets): &(DualGemmDesc, usize)| {
            (desc.op.matrices() * sets) as f64 * 0.5625 * desc.n as f64 * desc.k as f64
        };
        self.products(routed).iter().map(bytes).sum()
    }

    /// Bytes of memory that a run takes at least beside its operands: C, A as the kernels take it, what is between, the packed
    /// weights.
    pub fn memory(&self, routed: Routed) -> f64 {
        let c = |desc: &DualGemmDesc| desc.m as f64 * desc.n as f64 * desc.out.bits_per_element() / 8.0;
        let products = self.products(routed);
        let stored: f64 = products.iter().map(|(desc, _)| c(desc)).sum();
        let (first, last) = (self.first(), self.last());
        let sums = if matches!(self, Self::Mixture { .. }) { c(last) } else { 0.0 };
        stored + sums + first.m as f64 * first.k as f64 + self.packed_bytes(routed)
    }

    /// Multiplications of the reference for one row of A.
    pub fn multiplications_per_row(&self) -> f64 {
        let top_k = match self {
            Self::Mixture { routed, .. } => routed.top_k,
            _ => 1,
        };
        let one = self.products(Routed { rows: top_k * self.first().m, experts: 1 });
        one.iter().map(|(desc, _)| desc.flops() / 2.0).sum::<f64>() / self.first().m as f64
    }
}

/// How it is computed.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum Planned {
    /// One product.
    Product(Plan),
    /// A whole MLP.
    Mlp(MlpPlan),
    /// A mixture of experts.
    Mixture {
        /// The routed experts.
        routed: Box<MixturePlan>,
        /// The shared one.
        shared: Option<Box<MlpPlan>>,
    },
}

impl Planned {
    /// Chooses.
    pub fn new(desc: &Desc, target: &Target) -> Result<Self, dualgemm::Error> {
        Ok(match desc {
            Desc::Product(desc) => Self::Product(DualGemm::plan(desc, target)?),
            Desc::Mlp(desc) => Self::Mlp(MlpPlan::new(desc, target)?),
            Desc::Mixture { routed, shared } => Self::Mixture {
                routed: Box::new(MixturePlan::new(routed, target)?),
                shared: shared.as_ref().map(|desc| MlpPlan::new(desc, target).map(Box::new)).transpose()?,
            },
        })
    }

    /// The plans of the first and, where there are two, of the second product.
    fn plans(&self) -> (&Plan, Option<&Plan>) {
        match self {
            Self::Product(plan) => (plan, None),
            Self::Mlp(mlp) => (&mlp.gate_up, Some(&mlp.down)),
            Self::Mixture { routed, .. } => (&routed.mlp.gate_up, Some(&routed.mlp.down)),
        }
    }

    /// The plan of the product that writes C.
    pub fn last(&self) -> &Plan {
        let (first, second) = self.plans();
        second.unwrap_or(first)
    }

    /// Names of the kernels.
    pub fn kernel(&self) -> String {
        match self.plans() {
            (first, Some(second)) if second.kernel() != first.kernel() => {
                format!("{}, {}", first.kernel(), second.kernel())
            }
            (first, _) => first.kernel().into(),
        }
    }

    /// Threads of the processor that share the work.
    pub fn threads(&self) -> usize {
        self.plans().0.threads()
    }

    /// With buffers.
    pub fn runner(&self) -> Result<Running, dualgemm::Error> {
        Ok(match self {
            Self::Product(plan) => Running::Product(Box::new(plan.runner(1)?)),
            Self::Mlp(plan) => Running::Mlp(Box::new(plan.runner(1)?)),
            Self::Mixture { routed, shared } => Running::Mixture {
                routed: Box::new(routed.runner()?),
                shared: shared.as_ref().map(|plan| plan.runner(1).map(Box::new)).transpose()?,
            },
        })
    }

    /// Measures what this machine can do at most: where products have rates of their own, the one that all have together.
    pub fn measure_limits(&self, desc: &Desc, work: Work, routed: Routed) -> Result<Limits, dualgemm::Error> {
        let measure = |plan: &Plan| {
            let mut plan = plan.clone();
            if let Plan::Cpu(plan) = &mut plan {
                // Where operands live depends on how much they are together.
                plan.bytes = work.bytes;
            }
            plan.measure_limits()
        };
        let (first, second) = self.plans();
        let (first_rate, bytes_per_s) = measure(first)?;
        let Some(second) = second.filter(|s| s.desc().a_compute() != first.desc().a_compute()) else {
            return Ok(Limits { flops_per_s: first_rate, bytes_per_s });
        };
        let second_rate = measure(second)?.0;
        let rate =
            |product: &DualGemmDesc| if product.op == second.desc().op { second_rate } else { first_rate };
        Ok(Limits { flops_per_s: desc.rate(routed, rate), bytes_per_s })
    }
}

impl std::fmt::Display for Planned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Product(plan) => plan.fmt(f),
            Self::Mlp(plan) => plan.fmt(f),
            Self::Mixture { routed, shared } => {
                let MixturePlan { desc, mlp } = &**routed;
                write!(f, "{} of {} experts a token, each\n{mlp}", desc.top_k, desc.experts)?;
                shared.as_ref().map_or(Ok(()), |mlp| write!(f, "\nand the shared expert\n{mlp}"))
            }
        }
    }
}

/// Weights in the order of the kernels.
#[derive(Debug, Clone)]
pub enum Packed {
    /// Of one product.
    Product(PackedWeights),
    /// Of an MLP.
    Mlp(PackedMlp),
    /// Of a mixture.
    Mixture {
        /// Experts by number; none where no token goes to one.
        routed: Vec<Option<PackedMlp>>,
        /// The shared one.
        shared: Option<PackedMlp>,
    },
}

/// A [`Planned`] with the buffers of its runs.
#[derive(Debug)]
pub enum Running {
    /// One product.
    Product(Box<Runner>),
    /// A whole MLP.
    Mlp(Box<MlpRunner>),
    /// A mixture.
    Mixture {
        /// The routed experts.
        routed: Box<MixtureRunner>,
        /// The shared one.
        shared: Option<Box<MlpRunner>>,
    },
}

impl Running {
    /// Computes C. Only a mixture has a routing.
    ///
    /// # Panics
    /// If the weights are those of another operation.
    pub fn run(
        &mut self,
        a: &AOperand<'_>,
        packed: &Packed,
        routing: Option<Routing<'_>>,
        c: &mut OwnedResult,
    ) -> Result<(), dualgemm::Error> {
        let scale = match (self, packed, routing) {
            (Self::Product(runner), Packed::Product(weights), _) => runner.run(a, weights, c.as_output())?,
            (Self::Mlp(runner), Packed::Mlp(mlp), _) => runner.run(a, mlp, c.as_output())?,
            (
                Self::Mixture { routed, shared },
                Packed::Mixture { routed: experts, shared: mlp },
                Some(routing),
            ) => {
                let first = shared.as_mut().zip(mlp.as_ref());
                let add = first.is_some();
                if let Some((runner, mlp)) = first {
                    runner.run(a, mlp, c.as_output())?;
                }
                routed.run(a, routing, experts, c.as_output(), add)?;
                None
            }
            _ => unreachable!("plan, weights and routing are made of one description"),
        };
        c.set_global_scale(scale);
        Ok(())
    }

    /// The time of a GPU's own clock, where it has one.
    pub fn time(&self, a: &AOperand<'_>, packed: &Packed) -> Result<Option<Timing>, dualgemm::Error> {
        match (self, packed) {
            (Self::Product(runner), Packed::Product(weights)) => runner.time(a, weights),
            _ => Ok(None),
        }
    }
}
