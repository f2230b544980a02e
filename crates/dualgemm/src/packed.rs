//! Weights in the order that kernels read them: made once by [`Plan::prepack`](crate::Plan::prepack) and its kin, for a
//! processor or in the memory of a GPU.

#[cfg(feature = "cuda")]
use std::sync::Arc;

use dualgemm_cpu::PackedGateUp;
use dualgemm_formats::FloatMatrix;
use dualgemm_gemm::{Linear, Weight};
#[cfg(feature = "cuda")]
use dualgemm_plan::{DeviceExperts, DeviceWeights, Gpu};

use crate::Error;

/// Weights in the order that a target's kernels read them. Plans of any M and output share them; those of any activation
/// format do, too, if they were packed by [`LayerShape::plan_for_packing`](crate::LayerShape::plan_for_packing).
#[non_exhaustive]
#[derive(Debug, Clone)]
pub enum PackedWeights {
    /// For the processor, every instruction set alike.
    Cpu(PackedGateUp),
    /// A linear layer in floats, for the processor, in the order that they come in.
    Floats(Linear<'static>),
    /// In the memory of a GPU. Copies share them.
    #[cfg(feature = "cuda")]
    Gpu(Arc<DeviceWeights>),
}

impl PartialEq for PackedWeights {
    /// Weights on a GPU are equal if they are the same.
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Cpu(a), Self::Cpu(b)) => a == b,
            (Self::Floats(a), Self::Floats(b)) => a == b,
            #[cfg(feature = "cuda")]
            (Self::Gpu(a), Self::Gpu(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl PackedWeights {
    /// Bytes that the weights take; on a GPU, biases left out.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Cpu(weights) => weights.bytes(),
            Self::Floats(Linear { weight, bias }) => {
                let bits = weight.format().bits_per_element() as usize;
                weight.rows() * weight.k() * bits / 8 + 4 * bias.as_ref().map_or(0, |bias| bias.len())
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(weights) => weights.bytes(),
        }
    }

    /// The same weights once more, in memory of a GPU of their own.
    #[cfg(feature = "cuda")]
    pub(crate) fn duplicate(&self) -> Result<Self, Error> {
        let weights = self.on_gpu()?;
        Ok(Self::Gpu(Arc::new(weights.duplicate(weights.gpu())?)))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpu(&self) -> Result<&Arc<DeviceWeights>, Error> {
        match self {
            Self::Gpu(weights) => Ok(weights),
            Self::Cpu(_) | Self::Floats(_) => {
                Err(Error::OtherTarget { weights: "the processor", plan: "a GPU" })
            }
        }
    }

    pub(crate) fn on_cpu(&self) -> Result<&PackedGateUp, Error> {
        match self {
            Self::Cpu(weights) => Ok(weights),
            Self::Floats(layer) => {
                let weight = &layer.weight;
                Err(Error::operand(weight.name(), weight.format().to_string(), "nvfp4 or mxfp4"))
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(_) => Err(Error::OtherTarget { weights: "a GPU", plan: "the processor" }),
        }
    }

    /// Weights and bias of a linear layer in floats.
    pub(crate) fn in_floats(&self) -> Result<(&FloatMatrix<'static>, Option<&[f32]>), Error> {
        match self {
            Self::Floats(Linear { weight: Weight::Floats(_, w), bias }) => Ok((w, bias.as_deref())),
            _ => Err(Error::operand("the weights", "in 4 bits", "a linear layer in floats")),
        }
    }
}

/// Weights of the experts of a mixture: a slice of [`PackedWeights`]. On a GPU they lie one after the other, so that one
/// launch can take the rows of all.
#[derive(Debug, Clone)]
pub struct PackedExperts {
    experts: Vec<PackedWeights>,
    #[cfg(feature = "cuda")]
    on_gpu: Option<Arc<DeviceExperts>>,
}

impl std::ops::Deref for PackedExperts {
    type Target = [PackedWeights];

    fn deref(&self) -> &[PackedWeights] {
        &self.experts
    }
}

impl PackedExperts {
    /// For a processor, which takes them one by one.
    pub(crate) fn apart(experts: Vec<PackedWeights>) -> Self {
        Self {
            experts,
            #[cfg(feature = "cuda")]
            on_gpu: None,
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn of(gpu: &'static Gpu, experts: DeviceExperts) -> Result<Self, Error> {
        let on_gpu = Arc::new(experts);
        let each = on_gpu.each(gpu)?.into_iter();
        let experts = each.map(|weights| PackedWeights::Gpu(Arc::new(weights))).collect();
        Ok(Self { experts, on_gpu: Some(on_gpu) })
    }

    /// The same weights once more, in memory of a GPU of their own.
    #[cfg(feature = "cuda")]
    pub(crate) fn duplicate(&self) -> Result<Self, Error> {
        let experts = self.on_gpu()?;
        Self::of(experts.gpu(), experts.duplicate()?)
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpu(&self) -> Result<&Arc<DeviceExperts>, Error> {
        let plan = "a GPU";
        self.on_gpu.as_ref().ok_or(Error::OtherTarget { weights: "one call for each expert", plan })
    }
}
