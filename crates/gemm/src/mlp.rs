//! The whole gated MLP, and mixtures of them: two products chained, and their f64 references.
//!
//! ```text
//! H[m,n] = act(A·gateᵀ, A·upᵀ)      stored in the format between the products
//! Y[m,h] = H·downᵀ
//! mixture   Y[t] = Σ_j w[t,j] · MLP of expert id[t,j] (A[t]), in the order of j
//! ```

use std::ops::Range;

use dualgemm_formats::quantize::quantize_with;
use dualgemm_formats::{FloatMatrix, GlobalScale, Matrix, Producer, Search, match_floats, quantize};

use crate::bound::Bounded;
use crate::compare::Element;
use crate::{
    AFormat, AOperand, DualGemmDesc, Error, GateUp, Linear, Operation, OutFormat, OutScale, reference_of,
};

/// Shapes and formats of a whole gated MLP: two descriptions. The second reads what the first writes.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MlpDesc {
    /// Gate and up. Its `out` is the format between the products.
    pub gate_up: DualGemmDesc,
    /// The down projection, which has the first's `n` as K.
    pub down: DualGemmDesc,
}

impl MlpDesc {
    /// The MLP that goes on from `gate_up` with a down projection to `n` features in `out`, its weights in `b`.
    pub fn new(gate_up: DualGemmDesc, n: usize, b: impl Into<AFormat>, out: OutFormat) -> Self {
        let down = DualGemmDesc::linear(gate_up.m, n, gate_up.n, gate_up.out.into(), b);
        Self { gate_up, down: DualGemmDesc { out, ..down } }
    }

    /// Checks both descriptions.
    ///
    /// # Errors
    /// Names the dimension or number, the rule and the value.
    pub fn check(&self) -> Result<(), Error> {
        self.gate_up.check()?;
        self.down.check()?;
        let Self { gate_up, down } = self;
        let expected = Self::new(*gate_up, down.n, down.b, down.out).down;
        let chained = (down.op, down.m, down.k, down.a, down.batch);
        if chained == (Operation::Linear, expected.m, expected.k, expected.a, gate_up.batch) {
            return Ok(());
        }
        Err(Error::operand("the down projection", down.to_string(), expected.to_string()))
    }
}

impl std::fmt::Display for MlpDesc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, then {}", self.gate_up, self.down)
    }
}

/// The weights of a whole gated MLP.
#[derive(Debug, Clone, PartialEq)]
pub struct GatedMlp<'a> {
    /// Gate and up, `[n, k]`.
    pub gate_up: GateUp<'a>,
    /// The down projection, `[h, n]`.
    pub down: Linear<'a>,
}

dualgemm_formats::named! {
    /// Where the weights of a router go.
    #[derive(Default, serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum RouterWeights {
        /// Each expert's result is multiplied by its weight: most families.
        #[default]
        Output = "output",
        /// What goes into the expert is, rounded to the type of A: Llama 4.
        Input = "input",
    }
}

/// Which experts each token goes to: `[tokens, top_k]` of both, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Routing<'a> {
    /// Experts of each token. -1 stands for an expert that is computed elsewhere, and is skipped.
    pub ids: &'a [i32],
    /// Their weights.
    pub weights: &'a [f32],
}

impl Routing<'_> {
    /// Experts per token, if both lists are of `tokens` tokens.
    ///
    /// # Errors
    /// If a list has another length, a number is neither an expert nor -1, or the weight of an expert that counts is not finite.
    pub fn check(&self, tokens: usize, top_k: usize, experts: usize) -> Result<(), Error> {
        for (tensor, len) in [("topk_ids", self.ids.len()), ("topk_weights", self.weights.len())] {
            if Some(len) != tokens.checked_mul(top_k) {
                return Err(Error::operand(
                    tensor,
                    format!("of {len} numbers"),
                    format!("[{tokens}, {top_k}]"),
                ));
            }
        }
        for (at, (&id, &weight)) in self.ids.iter().zip(self.weights).enumerate() {
            let of = |tensor| format!("{tensor}[{}, {}]", at / top_k, at % top_k);
            if id < -1 || usize::try_from(id).is_ok_and(|id| id >= experts) {
                return Err(Error::operand(
                    of("topk_ids"),
                    id.to_string(),
                    format!("numbers below {experts}, or -1 for none"),
                ));
            }
            if id >= 0 && !weight.is_finite() {
                return Err(Error::operand(of("topk_weights"), weight.to_string(), "finite numbers"));
            }
        }
        Ok(())
    }
}

/// Y of a whole MLP for `rows` of A, each value with what a right result may be off by.
///
/// # Panics
/// As [`reference`](crate::reference()).
pub fn mlp_reference(
    desc: &MlpDesc,
    a: &AOperand<'_>,
    rows: Range<usize>,
    mlp: &GatedMlp<'_>,
) -> Vec<Bounded> {
    let exact = |m| (0..a.k()).map(|k| Bounded::exact(a.value(m, k))).collect();
    mlp_of(desc, &rows.map(exact).collect::<Vec<_>>(), mlp)
}

fn mlp_of(desc: &MlpDesc, a: &[Vec<Bounded>], mlp: &GatedMlp<'_>) -> Vec<Bounded> {
    let hidden = reference_of(&desc.gate_up.epilogue, a, (&mlp.gate_up).into());
    let hidden = stored(hidden, desc.gate_up.out, mlp.gate_up.n());
    let rows: Vec<Vec<Bounded>> = hidden.chunks(mlp.gate_up.n()).map(<[_]>::to_vec).collect();
    reference_of(&desc.down.epilogue, &rows, (&mlp.down).into())
}

/// Y of a mixture: the weighted sum over the experts of each row of A. Experts that are `None` are computed elsewhere.
///
/// A dynamic scale between the products is that of all rows of a call, so results with one depend on who shares the call:
/// there the reference takes each token's own, and its bounds say nothing.
///
/// # Panics
/// As [`reference`](crate::reference()), and if the routing has a number beyond the experts.
pub fn mixture_reference(
    desc: &MlpDesc,
    router: RouterWeights,
    a: &AOperand<'_>,
    routing: Routing<'_>,
    experts: &[Option<GatedMlp<'_>>],
) -> Vec<Bounded> {
    let top_k = routing.ids.len() / a.rows();
    let mut y = Vec::with_capacity(a.rows() * desc.down.n);
    for token in 0..a.rows() {
        let mut sum = vec![Bounded::exact(0.0); desc.down.n];
        for j in token * top_k..(token + 1) * top_k {
            let weight = routing.weights[j];
            let Some(mlp) = usize::try_from(routing.ids[j]).ok().and_then(|id| experts[id].as_ref()) else {
                continue;
            };
            let row = (0..a.k()).map(|k| {
                Bounded::exact(match (router, a) {
                    (RouterWeights::Input, AOperand::Float(a)) => {
                        a.float_type().round(a.value(token, k) * weight).into()
                    }
                    _ => a.value(token, k),
                })
            });
            let factor = if router == RouterWeights::Output { weight } else { 1.0 };
            for (sum, y) in sum.iter_mut().zip(mlp_of(desc, &[row.collect()], mlp)) {
                *sum = sum.plus(y.times(factor.into()));
            }
        }
        y.extend(sum);
    }
    y
}

/// Rows of `cols` values as they are stored between the products, with the neighbours that they may be rounded to instead.
///
/// # Panics
/// If a tensor scale or `cols` is one that [`MlpDesc::check`] refuses.
pub fn stored(values: Vec<Bounded>, format: OutFormat, cols: usize) -> Vec<Bounded> {
    fn through<T: Element>(x: f64) -> f64 {
        T::from_f64(x).to_f64()
    }
    let round = match_floats!(format, OutFormat[T] => through::<T>,
        OutFormat::Nvfp4 { global_scale, .. } => return stored_nvfp4(&values, global_scale, cols));
    values.into_iter().map(|x| x.rounded_by(round)).collect()
}

/// The same in nvfp4. An error moves a value over a border, and through the largest value of a block or of all the scales, too;
/// so all is quantized with the magnitudes at either end of their errors, and what comes out farthest counts.
fn stored_nvfp4(values: &[Bounded], scale: OutScale, cols: usize) -> Vec<Bounded> {
    let [exact, low, high] = [0.0, -1.0, 1.0].map(|side| {
        let moved = |x: &Bounded| (x.value.abs() + side * x.error).max(0.0).copysign(x.value) as f32;
        let moved: Vec<f32> = values.iter().map(moved).collect();
        let quantized = Matrix::new("C", values.len() / cols, cols, moved).map(FloatMatrix::F32).and_then(
            |c| match scale {
                OutScale::Static(scale) => {
                    quantize_with("C", &c, Producer::Te, Search::Plain, GlobalScale::multiplier(scale))
                }
                OutScale::Dynamic => quantize("C", &c, Producer::Te, Search::Plain),
            },
        );
        // A size or scale that `MlpDesc::check` refuses.
        let quantized = quantized.unwrap_or_else(|error| panic!("{error}"));
        (0..values.len()).map(|at| quantized.value(at / cols, at % cols)).collect::<Vec<f64>>()
    });
    let off = |at: usize| (low[at] - exact[at]).abs().max((high[at] - exact[at]).abs());
    (0..values.len()).map(|at| Bounded { value: exact[at], error: off(at) }).collect()
}

#[cfg(test)]
mod tests {
    use dualgemm_formats::{BlockFormat, QuantizedMatrix, ScaleLayout};

    use super::*;
    use crate::{Activation, Epilogue};

    /// A matrix whose row n is `value(n)` everywhere: code 2 is 1, and e4m3 0x38 is 1.
    fn constant(name: &'static str, rows: usize, k: usize, codes: u8) -> QuantizedMatrix<'static> {
        let (codes, scales) = (vec![codes; rows * k / 2], vec![0x38; rows * k / 16]);
        QuantizedMatrix::new(
            name,
            BlockFormat::Nvfp4,
            rows,
            k,
            codes,
            scales,
            ScaleLayout::Linear,
            GlobalScale::ONE,
        )
        .unwrap()
    }

    fn mlp(gate: u8, up: u8, down: u8) -> GatedMlp<'static> {
        let mut down = Linear::new(constant("down", 2, 16, down));
        down.bias = Some(vec![0.0, 5.0].into());
        GatedMlp { gate_up: GateUp::new(constant("gate", 16, 16, gate), constant("up", 16, 16, up)), down }
    }

    fn desc(out: OutFormat) -> MlpDesc {
        let mut gate_up = DualGemmDesc::new(1, 16, 16, AFormat::F32, BlockFormat::Nvfp4);
        gate_up.epilogue = Epilogue { activation: Activation::Relu, ..Epilogue::default() };
        gate_up.out = out;
        MlpDesc::new(gate_up, 2, BlockFormat::Nvfp4, OutFormat::F32)
    }

    fn a(rows: usize) -> AOperand<'static> {
        let data = (0..rows * 16).map(|at| 1.0 + (at / 16) as f32).collect::<Vec<_>>();
        AOperand::Float(FloatMatrix::F32(Matrix::new("a", rows, 16, data).unwrap()))
    }

    /// gate = 16·1, up = 16·0.5, so H = 16·8 = 128 and Y = 16·128·1.5 = 3072, and 5 more where there is a bias.
    #[test]
    fn an_mlp_is_what_one_computes_by_hand() {
        let nvfp4 =
            OutFormat::Nvfp4 { scale_layout: ScaleLayout::Linear, global_scale: OutScale::Static(0.25) };
        // In nvfp4 the block's scale is 128 / 6 / 0.25 = 85.3, which is 88 in e4m3, and 6 · 88 · 0.25 = 132.
        let formats =
            [(OutFormat::F32, 128.0), (OutFormat::F16, 128.0), (OutFormat::Bf16, 128.0), (nvfp4, 132.0)];
        for (out, hidden) in formats {
            let desc = desc(out);
            desc.check().unwrap();
            let y = mlp_reference(&desc, &a(1), 0..1, &mlp(0x22, 0x11, 0x33));
            let want = 16.0 * hidden * 1.5;
            assert_eq!(y.iter().map(|y| y.value).collect::<Vec<_>>(), [want, want + 5.0], "{out}");
            assert!(y.iter().all(|y| y.error < 20.0), "{out}: {y:?}");
        }
    }

    /// Token 0 goes to experts 1 and 0, token 1 to expert 1 alone and to one that is elsewhere.
    #[test]
    fn a_mixture_is_the_weighted_sum_of_its_experts() {
        let experts = [Some(mlp(0x22, 0x22, 0x22)), Some(mlp(0x22, 0x11, 0x33)), None];
        let routing = Routing { ids: &[1, 0, 1, 2], weights: &[0.5, 2.0, 0.25, 9.0] };
        routing.check(2, 2, 3).unwrap();
        let of = |router| {
            let y = mixture_reference(&desc(OutFormat::F32), router, &a(2), routing, &experts);
            y.iter().map(|y| y.value).collect::<Vec<f64>>()
        };
        // Expert 0: 16·16·16 = 4096. Token 1 is twice token 0, and relu(gate)·up squares that.
        let output =
            [0.5 * 3072.0 + 2.0 * 4096.0, 0.5 * 3077.0 + 2.0 * 4101.0, 3072.0, 0.25 * (12288.0 + 5.0)];
        assert_eq!(of(RouterWeights::Output), output);
        let input = [0.25 * 3072.0 + 4.0 * 4096.0, 768.0 + 5.0 + 16384.0 + 5.0, 768.0, 773.0];
        assert_eq!(of(RouterWeights::Input), input);
    }

    #[test]
    fn routings_that_name_nothing_are_refused() {
        let refused =
            |ids: &[i32], weights: &[f32]| Routing { ids, weights }.check(2, 2, 4).unwrap_err().to_string();
        let ones = [1.0; 4];
        assert_eq!(refused(&[0; 3], &ones), "topk_ids is of 3 numbers; the problem asks for [2, 2]");
        assert_eq!(
            refused(&[0, 1, 4, 0], &ones),
            "topk_ids[1, 0] is 4; the problem asks for numbers below 4, or -1 for none"
        );
        assert!(refused(&[0, 1, -2, 0], &ones).starts_with("topk_ids[1, 0] is -2;"));
        assert_eq!(
            refused(&[0, 1, 2, 3], &[1.0, f32::NAN, 1.0, 1.0]),
            "topk_weights[0, 1] is NaN; the problem asks for finite numbers"
        );
        let skipped = Routing { ids: &[0, -1, 2, 3], weights: &[1.0, f32::NAN, 1.0, 1.0] };
        assert_eq!(skipped.check(2, 2, 4), Ok(()));
    }

    #[test]
    fn a_down_projection_of_another_mlp_is_refused() {
        let mut desc = desc(OutFormat::Bf16);
        desc.down.k = 32;
        let message = desc.check().unwrap_err().to_string();
        assert!(message.starts_with("the down projection is C[1,2] f32 = linear(A[1,32] bf16"), "{message}");
    }
}
