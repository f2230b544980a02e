//! The epilogue expression as instructions: the same [`Program`] that the CPU kernels evaluate.

use dualgemm_gemm::{Op, Program};
use dualgemm_ptx::builder::{F32, Kernel, Reg};

const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// What the sums of one feature are multiplied by, gate's and up's, and what is then added if anything is.
pub(crate) struct Factors {
    pub alpha: [Reg<F32>; 2],
    pub bias: Option<[Reg<F32>; 2]>,
}

impl Factors {
    /// The product of gate (0) or up (1) from its sum.
    pub fn product(&self, k: &mut Kernel, half: usize, sum: Reg<F32>) -> Reg<F32> {
        match &self.bias {
            None => k.mul(sum, self.alpha[half]),
            Some(bias) => k.fma(sum, self.alpha[half], bias[half]),
        }
    }

    /// The element of C from the sums of gate and up.
    pub fn activate(&self, k: &mut Kernel, program: &Program, sums: [Reg<F32>; 2]) -> Reg<F32> {
        let [gate, up] = [0, 1].map(|half| self.product(k, half, sums[half]));
        evaluate(k, program, gate, up)
    }
}

/// Appends the program for one element and gives its result.
///
/// `sigmoid` and `tanh` are one `ex2.approx` and one `rcp.approx` each, good to about 2⁻²²; both saturate to their
/// limits without a special case, since `rcp(∞) = 0`.
pub fn evaluate(k: &mut Kernel, program: &Program, gate: Reg<F32>, up: Reg<F32>) -> Reg<F32> {
    let mut values: Vec<Reg<F32>> = Vec::with_capacity(program.ops().len());
    for op in program.ops() {
        let at = |slot: dualgemm_gemm::Slot| values[usize::from(slot.0)];
        let value = match *op {
            Op::Gate => gate,
            Op::Up => up,
            Op::Const(c) => k.mov::<F32>(c),
            Op::Add(l, r) => k.add(at(l), at(r)),
            Op::Sub(l, r) => k.sub(at(l), at(r)),
            Op::Mul(l, r) => k.mul(at(l), at(r)),
            Op::Min(l, r) => k.min_nan(at(l), at(r)),
            Op::Max(l, r) => k.max_nan(at(l), at(r)),
            Op::Sigmoid(x) => sigmoid(k, at(x)),
            Op::Tanh(x) => {
                // tanh(x) = 2·sigmoid(2x) − 1.
                let twice = k.add(at(x), at(x));
                let half = sigmoid(k, twice);
                k.fma(half, 2.0f32, -1.0f32)
            }
        };
        values.push(value);
    }
    values[values.len() - 1]
}

/// `1 / (1 + 2^(−x · log₂e))`
fn sigmoid(k: &mut Kernel, x: Reg<F32>) -> Reg<F32> {
    let exponent = k.mul(x, -LOG2_E);
    let power = k.ex2_approx(exponent);
    let sum = k.add(power, 1.0f32);
    k.rcp_approx(sum)
}
