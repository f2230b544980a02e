//! The frame of strategies of one fused kernel: A brought into the kernel's form before it, and behind
//! it a C whose dynamic scale needs all of it first.

use std::fmt::Debug;

use dualgemm_device::LaunchSpec;
use dualgemm_gemm::DualGemmDesc;
use dualgemm_kernels::parts::rows::{Output, Variant};

use super::Prepared;
use super::launched::{Destination, Kernels, Launched, Variants, Weights, rows_of};
use super::requantize::Requantize;
use crate::prologue::{Order, PreparedA, Prologue};
use crate::{DeviceCall, DeviceWeights, Error, Gpu, GpuPlan};

/// What one of these strategies does its own way.
pub(super) trait Product: Debug + Send + Sync + 'static {
    type Kernel: Debug + Send + Sync;

    /// Loads the kernel.
    fn load(&self, gpu: &'static Gpu, rows: &Variant) -> Result<Self::Kernel, Error>;

    /// The launch for M, N and K.
    fn spec(
        &self,
        kernel: &Self::Kernel,
        size: (usize, usize, usize),
        a: &PreparedA,
        weights: Weights<'_>,
        output: Output,
    ) -> Result<LaunchSpec, Error>;

    /// The weights in the form that the kernel reads.
    fn weights<'w>(&self, _: &'static Gpu, weights: &'w DeviceWeights) -> Result<&'w DeviceWeights, Error> {
        Ok(weights)
    }

    /// What multiplies the kernel's sums beside the tensor scales.
    fn factor(&self) -> f32 {
        1.0
    }
}

/// A product with everything around it.
#[derive(Debug)]
pub(super) struct OneProduct<P: Product> {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    prologue: Prologue,
    rows: Variant,
    kernels: Variants<P::Kernel>,
    requantize: Option<Requantize>,
    product: P,
}

impl<P: Product> OneProduct<P> {
    /// Prepares a plan whose kernel takes A in `order`.
    pub(super) fn prepared(
        gpu: &'static Gpu,
        plan: &GpuPlan,
        order: Order,
        product: P,
    ) -> Result<Box<dyn Prepared>, Error> {
        let desc = plan.desc;
        let prologue = Prologue::new(gpu, plan, order)?;
        let rows = Variant { a_scale: prologue.has_device_scale(), ..rows_of(&desc) };
        let (kernels, requantize) = (Variants::new(plan.groups > 1), Requantize::of(gpu, &desc)?);
        let ready = Self { gpu, desc, prologue, rows, kernels, requantize, product };
        ready.kernels.first(|grouped, bias| ready.load(grouped, bias))?;
        Ok(Launched::prepared(gpu, ready))
    }

    fn load(&self, grouped: bool, bias: bool) -> Result<P::Kernel, Error> {
        self.product.load(self.gpu, &Variant { grouped, bias, ..self.rows.clone() })
    }

    /// The weights in the form that the kernel reads.
    fn weights<'w>(&self, weights: Weights<'w>) -> Result<Weights<'w>, Error> {
        match weights {
            Weights::One(one) => Ok(Weights::One(self.product.weights(self.gpu, one)?)),
            groups @ Weights::Groups(..) => Ok(groups),
        }
    }

    fn kernel(&self, weights: Weights<'_>) -> Result<&P::Kernel, Error> {
        self.kernels.get(weights, |grouped, bias| self.load(grouped, bias))
    }
}

impl<P: Product> Kernels for OneProduct<P> {
    fn warm(&self, weights: Weights<'_>) -> Result<(), Error> {
        self.weights(weights)?;
        self.kernel(weights).map(drop)
    }

    fn specs(&self, call: &DeviceCall, weights: Weights<'_>) -> Result<Vec<LaunchSpec>, Error> {
        let &DualGemmDesc { n, k, epilogue, .. } = &self.desc;
        let (weights, mut specs) = (self.weights(weights)?, Vec::new());
        let a = self.prologue.specs(call.m, &call.a, weights.groups().as_ref(), &mut specs)?;
        let c = Destination::of(call, &self.desc)?;
        let to = self.requantize.as_ref().map_or(c, Requantize::product);
        let output = weights.output(&to, &epilogue, a.scale * self.product.factor(), a.device_scale)?;
        specs.push(self.product.spec(self.kernel(weights)?, (call.m, n, k), &a, weights, output)?);
        if let Some(requantize) = &self.requantize {
            requantize.specs(call.m, &c, &mut specs)?;
        }
        Ok(specs)
    }
}
