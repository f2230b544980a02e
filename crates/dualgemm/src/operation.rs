//! An operation that is chosen when the program runs: gate and up, a linear layer, a whole MLP or a mixture, as one type each
//! for description, plan, weights and runner.

#[cfg(feature = "cuda")]
mod on_device;

use dualgemm_cpu::{CpuGemm, Product};
use dualgemm_gemm::{AOperand, DualGemmDesc, Error as GemmError, MlpDesc, OutFormat, OutputMut, Routing};

use crate::{
    DualGemm, Error, MixtureDesc, MixturePlan, MixtureRunner, MlpPlan, MlpRunner, PackedMixture, PackedMlp,
    PackedWeights, Plan, Runner, Target,
};
#[cfg(feature = "cuda")]
pub use on_device::{DeviceRouting, Launchers};

/// Shapes and formats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AnyDesc {
    /// Gate and up, or a linear layer.
    Product(DualGemmDesc),
    /// A whole MLP.
    Mlp(MlpDesc),
    /// A mixture of experts.
    Mixture(MixtureDesc),
}

impl AnyDesc {
    /// Checks the rules of shapes and formats.
    ///
    /// # Errors
    /// Names what breaks one.
    pub fn check(&self) -> Result<(), GemmError> {
        match self {
            Self::Product(desc) => desc.check(),
            Self::Mlp(desc) => desc.check(),
            Self::Mixture(desc) => desc.check(),
        }
    }

    /// The product that reads A.
    pub fn first(&self) -> &DualGemmDesc {
        match self {
            Self::Product(desc) => desc,
            Self::Mlp(desc) => &desc.gate_up,
            Self::Mixture(desc) => &desc.mlp.gate_up,
        }
    }

    /// The product that writes C.
    pub fn last(&self) -> &DualGemmDesc {
        match self {
            Self::Product(desc) => desc,
            Self::Mlp(desc) => &desc.down,
            Self::Mixture(desc) => &desc.mlp.down,
        }
    }

    /// The format between the products, where there are two.
    pub fn between(&self) -> Option<OutFormat> {
        (!matches!(self, Self::Product(_))).then_some(self.first().out)
    }
}

/// How it is computed.
#[derive(Debug, Clone, serde::Serialize)]
#[serde(untagged)]
pub enum AnyPlan {
    /// One product.
    Product(Plan),
    /// A whole MLP.
    Mlp(MlpPlan),
    /// A mixture of experts.
    Mixture(Box<MixturePlan>),
}

impl AnyPlan {
    /// Chooses.
    ///
    /// # Errors
    /// If the description breaks a rule, or the target is not there or lacks what is asked of it.
    pub fn new(desc: &AnyDesc, target: &Target) -> Result<Self, Error> {
        Ok(match desc {
            AnyDesc::Product(desc) => Self::Product(DualGemm::plan(desc, target)?),
            AnyDesc::Mlp(desc) => Self::Mlp(MlpPlan::new(desc, target)?),
            AnyDesc::Mixture(desc) => Self::Mixture(Box::new(MixturePlan::new(desc, target)?)),
        })
    }

    /// The plans of the first and, where there are two, of the second product.
    pub fn products(&self) -> (&Plan, Option<&Plan>) {
        match self {
            Self::Product(plan) => (plan, None),
            Self::Mlp(mlp) => (&mlp.gate_up, Some(&mlp.down)),
            Self::Mixture(mixture) => (&mixture.mlp.gate_up, Some(&mixture.mlp.down)),
        }
    }

    /// The plan of the product that writes C.
    pub fn last(&self) -> &Plan {
        let (first, second) = self.products();
        second.unwrap_or(first)
    }

    /// With buffers.
    ///
    /// # Errors
    /// If this machine lacks what the plan asks for, or the memory.
    pub fn runner(&self) -> Result<AnyRunner, Error> {
        Ok(match self {
            Self::Product(plan) => AnyRunner::Product(Box::new(plan.runner(1)?)),
            Self::Mlp(plan) => AnyRunner::Mlp(Box::new(plan.runner(1)?)),
            Self::Mixture(plan) => AnyRunner::Mixture(Box::new(plan.runner()?)),
        })
    }
}

impl std::fmt::Display for AnyPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Product(plan) => plan.fmt(f),
            Self::Mlp(plan) => plan.fmt(f),
            Self::Mixture(plan) => plan.fmt(f),
        }
    }
}

/// Weights in the order of the kernels.
#[derive(Debug, Clone)]
pub enum AnyWeights {
    /// Of one product.
    Product(PackedWeights),
    /// Of an MLP.
    Mlp(PackedMlp),
    /// Of a mixture.
    Mixture(PackedMixture),
}

impl AnyWeights {
    /// Bytes that the weights take; on a GPU, biases left out.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Product(weights) => weights.bytes(),
            Self::Mlp(mlp) => mlp.bytes(),
            Self::Mixture(experts) => experts.bytes(),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Product(_) => "those of one product",
            Self::Mlp(_) => "those of an MLP",
            Self::Mixture(_) => "those of a mixture",
        }
    }
}

/// A plan with the buffers of its runs.
#[derive(Debug)]
pub enum AnyRunner {
    /// One product.
    Product(Box<Runner>),
    /// A whole MLP.
    Mlp(Box<MlpRunner>),
    /// A mixture.
    Mixture(Box<MixtureRunner>),
}

impl AnyRunner {
    fn name(&self) -> &'static str {
        match self {
            Self::Product(_) => "those of one product",
            Self::Mlp(_) => "those of an MLP",
            Self::Mixture(_) => "those of a mixture, with the router's choices",
        }
    }

    fn mismatch<T>(&self, weights: &AnyWeights) -> Result<T, Error> {
        Err(Error::operand("the weights", weights.name(), self.name()))
    }

    /// Computes C of operands in the host's memory. A mixture has a routing, and may add to C.
    ///
    /// Returns the tensor scale of a re-quantized C.
    ///
    /// # Errors
    /// If an operand does not fit the plan, or the weights are those of another operation.
    pub fn run(
        &mut self,
        a: &AOperand<'_>,
        weights: &AnyWeights,
        routing: Option<Routing<'_>>,
        (c, add): (OutputMut<'_>, bool),
    ) -> Result<Option<f32>, Error> {
        match (&mut *self, weights, routing) {
            (Self::Product(runner), AnyWeights::Product(weights), None) => runner.run(a, weights, c),
            (Self::Mlp(runner), AnyWeights::Mlp(mlp), None) => runner.run(a, mlp, c),
            (Self::Mixture(runner), AnyWeights::Mixture(experts), Some(routing)) => {
                runner.run(a, routing, experts, c, add).map(|()| None)
            }
            _ => self.mismatch(weights),
        }
    }

    /// Computes several products of one A. On a processor they share the work on it: [`CpuGemm::run_all`].
    ///
    /// # Errors
    /// As [`run`](Self::run), and if one is no product.
    pub fn run_all(
        a: &AOperand<'_>,
        products: &mut [(&mut Self, &AnyWeights, OutputMut<'_>)],
    ) -> Result<(), Error> {
        let mut on_cpu = Vec::new();
        for (runner, weights, c) in products {
            let c = std::mem::replace(c, OutputMut::F32(&mut []));
            match (&mut **runner, weights) {
                (Self::Product(runner), AnyWeights::Product(weights)) => match &mut **runner {
                    Runner::Cpu(gemm) => on_cpu.push(Product { gemm, weights: weights.on_cpu()?, c }),
                    apart => drop(apart.run(a, weights, c)?),
                },
                (runner, weights) => return runner.mismatch(weights),
            }
        }
        Ok(CpuGemm::run_all(a, &mut on_cpu)?)
    }
}
