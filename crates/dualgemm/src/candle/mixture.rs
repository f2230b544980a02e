//! The operator for mixtures of experts, which takes the router's choices besides x.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Error, Layout, Result, Shape, Tensor};

use super::{Options, Packed, of_layer, open, span};
use crate::checkpoint::{MlpKind, Which};
use crate::gemm::{GatedMlp, RouterWeights, Routing};
use crate::{LayerShape, PackedLayer};

/// `C[t] = Σ_j weights[t, j] · MLP of expert ids[t, j] (x[t])`, in the order of j and in the type of x, on the processor.
#[derive(Debug, Clone)]
pub struct Mixture(Arc<Packed>);

impl Mixture {
    /// Packs experts of one shape. `router` says where the router's weights go.
    ///
    /// # Errors
    /// If there are none, they do not belong together, or the device is not the processor.
    pub fn new(experts: Vec<GatedMlp<'_>>, router: RouterWeights, options: &Options) -> Result<Self> {
        if !options.device.is_cpu() {
            candle_core::bail!("mixtures are for the processor, not for {:?}", options.device.location());
        }
        let Some(first) = experts.first() else { candle_core::bail!("a mixture has at least one expert") };
        let (shape, target) = (LayerShape::mlp(first), options.target()?);
        let experts = experts.into_iter().map(Ok::<_, crate::Error>);
        let layer = PackedLayer::mixture(shape, router, experts, target).map_err(Error::wrap)?;
        Ok(Self(Packed::new(layer, options)))
    }

    /// The routed experts of a layer. Its shared expert, if there is one, is an MLP beside them.
    ///
    /// # Errors
    /// As [`new`](Self::new), and if there is no such layer, an expert is missing, a tensor is missing or breaks a rule, or nothing
    /// states the activation and the options ask for none.
    pub fn from_checkpoint(path: &Path, layer: usize, options: &Options) -> Result<Self> {
        let checkpoint = open(path)?;
        let options = of_layer(&checkpoint, layer, MlpKind::Experts, options)?;
        let ids = checkpoint.experts(layer).map_err(Error::wrap)?;
        if let Some(missing) = (0..ids.len()).find(|&id| ids[id] != id) {
            candle_core::bail!("layer {layer} has no expert {missing}; a mixture has all from 0 on");
        }
        let read = |expert| checkpoint.gated_mlp(layer, Which::Expert(expert)).map_err(Error::wrap);
        let experts = ids.into_iter().map(read).collect::<Result<_>>()?;
        Self::new(experts, checkpoint.router_weights(), &options)
    }

    /// Features of C.
    pub fn n(&self) -> usize {
        self.0.layer.shape.ends().0
    }

    /// Elements of a row of x.
    pub fn k(&self) -> usize {
        self.0.layer.shape.k
    }

    /// C of tokens x, `[..., k]`. `ids` and `weights` are `[..., experts of a token]`: numbers of experts in U32, I32 or I64, -1 for one
    /// that is computed elsewhere; and floats.
    ///
    /// # Errors
    /// If a tensor has another shape or type, a number is not that of an expert, or a weight is not finite.
    pub fn forward(&self, x: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Tensor> {
        if !weights.dtype().is_float() {
            candle_core::bail!("topk_weights is {:?}; floats are needed", weights.dtype());
        }
        let (ids, weights) = (ids.contiguous()?, weights.to_dtype(DType::F32)?.contiguous()?);
        x.contiguous()?.apply_op3_no_bwd(&ids, &weights, self)
    }
}

impl CustomOp3 for Mixture {
    fn name(&self) -> &'static str {
        "dualgemm-mixture"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        ids: &CpuStorage,
        ids_layout: &Layout,
        weights: &CpuStorage,
        weights_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let of_x = layout.dims();
        let tokens = &of_x[..of_x.len().saturating_sub(1)];
        let found = ids_layout.dims();
        if !found.split_last().is_some_and(|(&top_k, lead)| lead == tokens && top_k > 0) {
            candle_core::bail!("topk_ids has shape {found:?}; {tokens:?} and experts of a token are needed");
        }
        if weights_layout.dims() != ids_layout.dims() {
            let (found, valid) = (weights_layout.dims(), ids_layout.dims());
            candle_core::bail!("topk_weights has shape {found:?}; {valid:?} is needed");
        }
        let (start, end) = span(ids_layout)?;
        let ids: Vec<i32> = match ids {
            CpuStorage::U32(ids) => numbers(&ids[start..end])?,
            CpuStorage::I32(ids) => ids[start..end].to_vec(),
            CpuStorage::I64(ids) => numbers(&ids[start..end])?,
            other => candle_core::bail!("topk_ids is {:?}; U32, I32 or I64 is needed", other.dtype()),
        };
        let (start, end) = span(weights_layout)?;
        let weights = &weights.as_slice::<f32>()?[start..end];
        self.0.forward(x, layout, Some(Routing { ids: &ids, weights }))
    }
}

fn numbers<T: Copy + Display + TryInto<i32>>(ids: &[T]) -> Result<Vec<i32>> {
    let number = |&id: &T| {
        let no_number = || format!("topk_ids: {id} is no number of an expert, nor -1 for none");
        id.try_into().map_err(|_| Error::msg(no_number()))
    };
    ids.iter().map(number).collect()
}
