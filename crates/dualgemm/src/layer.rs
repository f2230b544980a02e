//! A layer of a model in kernel order, which knows what it computes: what the bindings of every language keep.
//!
//! Weights are packed for any number of rows and every format of A and C that their target takes; a call says which
//! ([`LayerCall`]), and [`LayerShape::describe`] makes the description that a plan is made of.

use std::ops::Range;

use dualgemm_checkpoint::GateUpSource;
#[cfg(feature = "cuda")]
use dualgemm_device::Stream;
use dualgemm_gemm::{
    AFormat, DualGemmDesc, Epilogue, GatedMlp, Linear, MlpDesc, Operation, OutFormat, QuantizeA,
    RouterWeights, WeightRef,
};

#[cfg(feature = "cuda")]
use crate::DeviceGateUp;
use crate::{
    AnyDesc, AnyWeights, DualGemm, Error, MixtureDesc, MixturePlan, PackedMlp, PackedWeights, Plan, Target,
};

/// What a layer computes, as far as its weights say.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerShape {
    /// The first product.
    pub op: Operation,
    /// Its features.
    pub n: usize,
    /// Elements of a row of A.
    pub k: usize,
    /// Format of its weights.
    pub format: AFormat,
    /// Features and format of the down projection of an MLP, or of a mixture's.
    pub down: Option<(usize, AFormat)>,
    /// How many experts a mixture has, and where the weights of its router go.
    pub experts: Option<(usize, RouterWeights)>,
}

/// What a call says of a layer's problem.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerCall {
    /// Rows of A.
    pub m: usize,
    /// Format of A.
    pub a: AFormat,
    /// Whether A is quantized on the way in.
    pub quantize_a: QuantizeA,
    /// The function of gate and up. A linear layer has none.
    pub epilogue: Epilogue,
    /// Format between the products of an MLP.
    pub between: OutFormat,
    /// Format of C.
    pub out: OutFormat,
    /// Experts of each token of a mixture.
    pub top_k: usize,
}

impl LayerCall {
    /// A call without quantization, with SiLU, bf16 between the products and one expert a token.
    pub fn new(m: usize, a: AFormat, out: OutFormat) -> Self {
        let (quantize_a, between, epilogue) = (QuantizeA::No, OutFormat::Bf16, Epilogue::default());
        Self { m, a, quantize_a, epilogue, between, out, top_k: 1 }
    }
}

impl LayerShape {
    /// That of one product.
    pub fn product<'w>(weights: impl Into<WeightRef<'w>>) -> Self {
        let weights = weights.into();
        let (format, n, k) = weights.shape();
        Self { op: weights.op(), ..Self::gate_up(n, k, format) }
    }

    /// That of gate and up.
    pub fn gate_up(n: usize, k: usize, format: impl Into<AFormat>) -> Self {
        Self { op: Operation::GateUp, n, k, format: format.into(), down: None, experts: None }
    }

    /// That of a whole MLP.
    pub fn mlp(mlp: &GatedMlp<'_>) -> Self {
        Self { down: Some((mlp.down.n(), mlp.down.weight.format())), ..Self::product(&mlp.gate_up) }
    }

    /// A plan by which to pack weights of the first product that plans of any M, format of A and C are to share: one that
    /// multiplies A in the format of the weights, if the target can do that, else in f16. On Blackwell that makes a
    /// difference: its tensor cores read codes as they are, and what a kernel for other activations reads is made of them
    /// when such weights first meet it, beside them.
    ///
    /// # Errors
    /// As [`DualGemm::plan`].
    pub fn plan_for_packing(&self, target: &Target) -> Result<Plan, Error> {
        let desc =
            DualGemmDesc { op: self.op, ..DualGemmDesc::new(1, self.n, self.k, AFormat::F16, self.format) };
        let by = |a| DualGemm::plan(&DualGemmDesc { a, out: OutFormat::F16, ..desc }, target);
        by(self.format).or_else(|_| by(AFormat::F16))
    }

    /// Features of C, and elements of a row of A.
    pub fn ends(&self) -> (usize, usize) {
        (self.down.map_or(self.n, |(features, _)| features), self.k)
    }

    /// The problem of a call.
    pub fn describe(&self, call: &LayerCall) -> AnyDesc {
        let &LayerCall { m, a, quantize_a, epilogue, between, out, top_k } = call;
        let &Self { op, n, k, format, down, experts } = self;
        let product = match op {
            Operation::GateUp => DualGemmDesc { epilogue, ..DualGemmDesc::new(m, n, k, a, format) },
            Operation::Linear => DualGemmDesc::linear(m, n, k, a, format),
        };
        let product = DualGemmDesc { quantize_a, out, ..product };
        let Some((features, format)) = down else { return AnyDesc::Product(product) };
        let mlp = MlpDesc::new(DualGemmDesc { out: between, ..product }, features, format, out);
        match experts {
            None => AnyDesc::Mlp(mlp),
            Some((experts, router)) => {
                AnyDesc::Mixture(MixtureDesc { mlp, experts, top_k, router, shared: None })
            }
        }
    }
}

/// A layer in the order of a target's kernels.
#[derive(Debug, Clone)]
pub struct PackedLayer {
    /// The weights.
    pub weights: AnyWeights,
    /// Where they are.
    pub target: Target,
    /// What they are.
    pub shape: LayerShape,
}

impl PackedLayer {
    /// Packs one product: gate and up, or a linear layer.
    ///
    /// # Errors
    /// If the weights do not belong together, a block scale is NaN or negative, or the target is not there.
    pub fn product<'w>(weights: impl Into<WeightRef<'w>>, target: Target) -> Result<Self, Error> {
        let weights = weights.into();
        let packed = pack(weights, &target)?;
        Ok(Self { weights: AnyWeights::Product(packed), target, shape: LayerShape::product(weights) })
    }

    /// Packs some features of gate and up of a checkpoint, read a run of them at a time.
    ///
    /// # Errors
    /// As [`Plan::prepack_source`], and if the target is not there.
    pub fn gate_up(source: &GateUpSource<'_>, features: Range<usize>, target: Target) -> Result<Self, Error> {
        let shape = LayerShape::gate_up(features.len(), source.k(), source.format());
        let packed = shape.plan_for_packing(&target)?.prepack_source(source, features, |_| ())?;
        Ok(Self { weights: AnyWeights::Product(packed), target, shape })
    }

    /// Packs gate and up that are in the memory of the target's GPU already.
    ///
    /// # Safety
    /// As [`Plan::prepack_device`].
    ///
    /// # Errors
    /// As there, and if the target is not there.
    #[cfg(feature = "cuda")]
    pub unsafe fn gate_up_on_device(
        pair: &DeviceGateUp<'_>,
        target: Target,
        stream: Stream,
    ) -> Result<Self, Error> {
        let shape = LayerShape::gate_up(pair.n, pair.k, pair.format);
        // SAFETY: the caller's promise.
        let packed = unsafe { shape.plan_for_packing(&target)?.prepack_device(pair, stream) }?;
        Ok(Self { weights: AnyWeights::Product(packed), target, shape })
    }

    /// Packs a whole MLP.
    ///
    /// # Errors
    /// As [`product`](Self::product), and if the down projection's K is not the features of gate and up.
    pub fn mlp(mlp: &GatedMlp<'_>, target: Target) -> Result<Self, Error> {
        check_chained(mlp.gate_up.n(), mlp.gate_up.gate.name(), &mlp.down)?;
        let packed = PackedMlp {
            gate_up: pack((&mlp.gate_up).into(), &target)?,
            down: pack((&mlp.down).into(), &target)?,
        };
        Ok(Self { weights: AnyWeights::Mlp(packed), target, shape: LayerShape::mlp(mlp) })
    }

    /// Packs the experts of a mixture one after the other as they come, each of this shape.
    ///
    /// # Errors
    /// Hands on the errors of `experts`; otherwise as [`mlp`](Self::mlp), and if an expert has another shape.
    pub fn mixture<'w, E: From<Error>>(
        mlp: LayerShape,
        router: RouterWeights,
        experts: impl ExactSizeIterator<Item = Result<GatedMlp<'w>, E>>,
        target: Target,
    ) -> Result<Self, E> {
        let shape = LayerShape { experts: Some((experts.len(), router)), ..mlp };
        let call = LayerCall::new(1, AFormat::Bf16, OutFormat::Bf16);
        let AnyDesc::Mixture(desc) = shape.describe(&call) else {
            return Err(Error::operand("experts", "one product", "whole MLPs").into());
        };
        let packed = MixturePlan::new(&desc, &target)?.prepack(experts.map(|mlp| mlp.map(Some)), None)?;
        Ok(Self { weights: AnyWeights::Mixture(packed), target, shape })
    }
}

/// Packs one product for every format of A; see [`LayerShape::plan_for_packing`].
///
/// # Errors
/// As [`PackedLayer::product`].
pub fn pack(weights: WeightRef<'_>, target: &Target) -> Result<PackedWeights, Error> {
    weights.check()?;
    LayerShape::product(weights).plan_for_packing(target)?.prepack(weights)
}

/// Checks that the K of a down projection is the number of features of gate and up; `gate` names one of these in the error.
///
/// # Errors
/// If it does not.
pub fn check_chained(features: usize, gate: &str, down: &Linear<'_>) -> Result<(), Error> {
    if features == down.k() {
        return Ok(());
    }
    Err(Error::operand(
        down.weight.name(),
        format!("[{}, {}]", down.n(), down.k()),
        format!("K = {features}, the features of {gate}"),
    ))
}

#[cfg(test)]
mod tests {
    use dualgemm_formats::{BlockFormat, FloatMatrix, Matrix, Producer, QuantizedMatrix, Search, quantize};
    use dualgemm_gemm::GateUp;

    use super::*;

    fn matrix(name: &str, n: usize, k: usize) -> QuantizedMatrix<'static> {
        let x = FloatMatrix::F32(Matrix::new(name, n, k, vec![1.0; n * k]).unwrap());
        quantize(name, &x, Producer::ModelOpt, Search::Plain).unwrap()
    }

    fn mlp(n: usize, down_k: usize) -> GatedMlp<'static> {
        let gate_up = GateUp::new(matrix("gate", n, 32), matrix("up", n, 32));
        GatedMlp { gate_up, down: Linear::new(matrix("down", 64, down_k)) }
    }

    #[test]
    fn calls_are_described_by_what_was_packed() {
        let call = LayerCall { top_k: 2, ..LayerCall::new(3, AFormat::F32, OutFormat::F16) };
        let of = |packed: PackedLayer| (packed.shape.ends(), packed.shape.describe(&call));
        let target = Target::default;
        let (ends, desc) = of(PackedLayer::product(&Linear::new(matrix("w", 48, 32)), target()).unwrap());
        let product = DualGemmDesc::linear(3, 48, 32, AFormat::F32, BlockFormat::Nvfp4);
        assert_eq!(
            (ends, desc),
            ((48, 32), AnyDesc::Product(DualGemmDesc { out: OutFormat::F16, ..product }))
        );
        let (ends, desc) = of(PackedLayer::mlp(&mlp(48, 48), target()).unwrap());
        let gate_up = DualGemmDesc::new(3, 48, 32, AFormat::F32, BlockFormat::Nvfp4);
        let gate_up = DualGemmDesc { out: OutFormat::Bf16, ..gate_up };
        let whole = MlpDesc::new(gate_up, 64, BlockFormat::Nvfp4, OutFormat::F16);
        assert_eq!((ends, desc), ((64, 32), AnyDesc::Mlp(whole)));
        let experts = vec![Ok::<_, Error>(mlp(48, 48)), Ok(mlp(48, 48)), Ok(mlp(48, 48))];
        let shape = LayerShape::mlp(&mlp(48, 48));
        let packed =
            PackedLayer::mixture(shape, RouterWeights::Input, experts.into_iter(), target()).unwrap();
        let (router, shared) = (RouterWeights::Input, None);
        let mixture = MixtureDesc { mlp: whole, experts: 3, top_k: 2, router, shared };
        assert_eq!(of(packed), ((64, 32), AnyDesc::Mixture(mixture)));
    }

    #[test]
    fn what_does_not_belong_together_is_refused() {
        let message = PackedLayer::mlp(&mlp(48, 32), Target::default()).unwrap_err().to_string();
        assert_eq!(message, "down is [64, 32]; the problem asks for K = 48, the features of gate");
        let (shape, experts) = (LayerShape::mlp(&mlp(48, 48)), vec![Ok::<_, Error>(mlp(32, 32))]);
        let mixed =
            PackedLayer::mixture(shape, RouterWeights::Output, experts.into_iter(), Target::default());
        assert!(mixed.unwrap_err().to_string().starts_with("gate is nvfp4 [32, 32]"));
    }
}
