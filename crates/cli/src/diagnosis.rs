//! Why a result is wrong: the reference is computed again with each of the mistakes that are known from the field,
//! on a few rows, and those that explain the result are named.

use dualgemm::check::{Reference, RowSample};
use dualgemm::formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm::gemm::{AOperand, Activation, Epilogue, GateUp};

use crate::result::ResultMatrix;

/// Rows that each suspicion is tried on; as many as tell mistakes apart.
const ROWS: usize = 4;

/// The problem that a result claims to solve.
#[derive(Debug, Clone)]
pub struct Problem<'a> {
    pub a: AOperand<'a>,
    pub weights: GateUp<'a>,
    /// What follows the products.
    pub epilogue: Epilogue,
}

/// A mistake: what it is, and the problem as somebody who makes it would understand it; `None` where it would
/// change nothing or cannot be made.
struct Mistake {
    name: &'static str,
    make: for<'a> fn(&Problem<'a>) -> Option<Problem<'a>>,
}

const MISTAKES: &[Mistake] = &[
    Mistake {
        name: "gate and up are exchanged",
        make: |p| {
            let GateUp { gate, up, gate_bias, up_bias } = p.weights.clone();
            let weights = GateUp { gate: up, up: gate, gate_bias: up_bias, up_bias: gate_bias };
            Some(Problem { weights, ..p.clone() })
        },
    },
    Mistake { name: "the tensor scale of gate is used for up too", make: |p| shared_scale(p, true) },
    Mistake { name: "the tensor scale of up is used for gate too", make: |p| shared_scale(p, false) },
    Mistake {
        name: "block scales are read in the wrong layout (linear for 128x4 or the other way round)",
        make: |p| both(p, other_layout),
    },
    Mistake {
        name: "block scales are converted to the other layout (linear or 128x4), and read as if they were not",
        make: |p| both(p, converted_layout),
    },
    // Exchanging them in A exchanges the same factors: the sums do not tell which of both was read wrongly.
    Mistake {
        name: "the nibbles of the weights, or of A, are exchanged",
        make: |p| both(p, swapped_nibbles),
    },
    Mistake {
        name: "the tensor scales of the weights are left out",
        make: |p| both(p, |m| with_scale(m, |_| 1.0)),
    },
    Mistake {
        name: "the tensor scales of the weights are inverted",
        make: |p| both(p, |m| with_scale(m, |s| 1.0 / s)),
    },
    Mistake { name: "the tensor scale of A is left out", make: |p| on_a(p, |m| with_scale(m, |_| 1.0)) },
    Mistake { name: "the tensor scale of A is inverted", make: |p| on_a(p, |m| with_scale(m, |s| 1.0 / s)) },
    Mistake { name: "block scales of A are read in the wrong layout", make: |p| on_a(p, other_layout) },
    Mistake {
        name: "block scales of A are converted to the other layout, and read as if they were not",
        make: |p| on_a(p, converted_layout),
    },
    Mistake {
        name: "the biases are left out",
        make: |p| {
            let GateUp { gate, up, gate_bias, up_bias } = p.weights.clone();
            let some = gate_bias.is_some() || up_bias.is_some();
            some.then(|| Problem { weights: GateUp::new(gate, up), ..p.clone() })
        },
    },
    Mistake { name: "the activation is silu", make: |p| activated(p, Activation::Silu) },
    Mistake { name: "the activation is gelu-tanh", make: |p| activated(p, Activation::GeluTanh) },
    Mistake { name: "the activation is relu", make: |p| activated(p, Activation::Relu) },
    Mistake { name: "the activation is relu2", make: |p| activated(p, Activation::Relu2) },
    Mistake { name: "the activation is swigluoai", make: |p| activated(p, Activation::SWIGLU_OAI) },
    Mistake {
        name: "the activation is silu clamped to 7",
        make: |p| activated(p, Activation::ClampedSilu { limit: 7.0 }),
    },
    Mistake { name: "no activation is applied", make: |p| activated(p, Activation::Identity) },
    Mistake {
        name: "gate and up are rounded to bf16 before the activation",
        make: |p| {
            let epilogue = Epilogue { round_gate_up_to_bf16: true, ..p.epilogue };
            (!p.epilogue.round_gate_up_to_bf16).then(|| Problem { epilogue, ..p.clone() })
        },
    },
];

/// Names the mistakes under which the result is within `limit` (relative L2) of the reference.
pub fn diagnose(problem: &Problem<'_>, result: &ResultMatrix<'_>, limit: f64) -> Vec<&'static str> {
    let sample = RowSample::spread(problem.a.rows(), ROWS);
    let fits = |p: &Problem<'_>| {
        let want = Reference::new(&p.a, &sample).values(&p.epilogue, &p.weights);
        let found = want.ok().and_then(|want| result.compare(&want, &sample).ok());
        found.is_some_and(|found| found.rel_l2 <= limit)
    };
    // Where these rows are right the fault lies in others, and every mistake without effect on them would fit.
    if fits(problem) {
        return Vec::new();
    }
    let explains = |mistake: &&Mistake| (mistake.make)(problem).is_some_and(|p| fits(&p));
    MISTAKES.iter().filter(explains).map(|mistake| mistake.name).collect()
}

fn activated<'a>(p: &Problem<'a>, activation: Activation) -> Option<Problem<'a>> {
    let epilogue = Epilogue { activation, ..p.epilogue };
    (activation != p.epilogue.activation).then(|| Problem { epilogue, ..p.clone() })
}

fn both<'a>(
    p: &Problem<'a>,
    change: fn(&QuantizedMatrix<'a>) -> Option<QuantizedMatrix<'a>>,
) -> Option<Problem<'a>> {
    let (gate, up) = (change(&p.weights.gate)?, change(&p.weights.up)?);
    Some(Problem { weights: GateUp { gate, up, ..p.weights.clone() }, ..p.clone() })
}

fn on_a<'a>(
    p: &Problem<'a>,
    change: fn(&QuantizedMatrix<'a>) -> Option<QuantizedMatrix<'a>>,
) -> Option<Problem<'a>> {
    match &p.a {
        AOperand::Quantized(a) => Some(Problem { a: AOperand::Quantized(change(a)?), ..p.clone() }),
        AOperand::Float(_) => None,
    }
}

fn shared_scale<'a>(p: &Problem<'a>, of_gate: bool) -> Option<Problem<'a>> {
    let (gate, up) = (&p.weights.gate, &p.weights.up);
    if gate.global_scale().value() == up.global_scale().value() {
        return None;
    }
    let mut weights = p.weights.clone();
    match of_gate {
        true => weights.up = rebuilt(up, None, None, gate.global_scale())?,
        false => weights.gate = rebuilt(gate, None, None, up.global_scale())?,
    }
    Some(Problem { weights, ..p.clone() })
}

fn with_scale<'a>(m: &QuantizedMatrix<'a>, scale: fn(f32) -> f32) -> Option<QuantizedMatrix<'a>> {
    let held = m.global_scale().value();
    (m.format() == BlockFormat::Nvfp4 && scale(held) != held)
        .then(|| rebuilt(m, None, None, GlobalScale::multiplier(scale(held))))?
}

fn swapped_nibbles<'a>(m: &QuantizedMatrix<'a>) -> Option<QuantizedMatrix<'a>> {
    let codes = (0..m.rows()).flat_map(|row| m.row_codes(row)).map(|byte| byte.rotate_left(4)).collect();
    rebuilt(m, Some(codes), None, m.global_scale())
}

fn other_than(layout: ScaleLayout) -> ScaleLayout {
    match layout {
        ScaleLayout::Linear => ScaleLayout::Sf128x4,
        ScaleLayout::Sf128x4 | ScaleLayout::Sf8x4 => ScaleLayout::Linear,
    }
}

fn other_layout<'a>(m: &QuantizedMatrix<'a>) -> Option<QuantizedMatrix<'a>> {
    let wrong = other_than(m.scale_layout());
    // Whoever reads linear bytes as tiles reads past them where the tiles are padded; zeros are as good as any.
    let mut bytes = m.scales().to_vec();
    bytes.resize(wrong.checked_len(m.rows(), m.blocks())?, 0);
    rebuilt(m, None, Some((bytes, wrong)), m.global_scale())
}

fn converted_layout<'a>(m: &QuantizedMatrix<'a>) -> Option<QuantizedMatrix<'a>> {
    let layout = m.scale_layout();
    let mut bytes = layout.convert(m.scales(), other_than(layout), m.rows(), m.blocks());
    bytes.resize(layout.checked_len(m.rows(), m.blocks())?, 0);
    rebuilt(m, None, Some((bytes, layout)), m.global_scale())
}

/// The matrix with some of its parts replaced, rows packed densely.
fn rebuilt<'a>(
    m: &QuantizedMatrix<'a>,
    codes: Option<Vec<u8>>,
    scales: Option<(Vec<u8>, ScaleLayout)>,
    global: GlobalScale,
) -> Option<QuantizedMatrix<'a>> {
    let codes =
        codes.unwrap_or_else(|| (0..m.rows()).flat_map(|row| m.row_codes(row)).copied().collect::<Vec<u8>>());
    let (scales, layout) = scales.unwrap_or_else(|| (m.scales().to_vec(), m.scale_layout()));
    QuantizedMatrix::new(m.name().to_owned(), m.format(), m.rows(), m.k(), codes, scales, layout, global).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::matrix_of;
    use dualgemm::OwnedMatrix;
    use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};

    fn problem() -> Problem<'static> {
        let mut inputs = Inputs::seeded(5);
        let mut matrix = |name, rows, scale| {
            let sets = (CodeSet::Full, ScaleSet::Unit);
            inputs
                .quantized(name, BlockFormat::Nvfp4, (rows, 64), sets, GlobalScale::multiplier(scale))
                .unwrap()
        };
        let a = AOperand::Quantized(matrix("a", 6, 0.5));
        let mut weights = GateUp::new(matrix("gate", 128, 0.75), matrix("up", 128, 0.5));
        weights.gate_bias = Some(vec![0.25; 128].into());
        Problem { a, weights, epilogue: Epilogue::default() }
    }

    fn result_of(p: &Problem<'_>) -> OwnedMatrix {
        let c = Reference::new(&p.a, &RowSample::all(p.a.rows())).values(&p.epilogue, &p.weights).unwrap();
        OwnedMatrix::F32(c.into_iter().map(|x| x as f32).collect())
    }

    #[test]
    fn every_mistake_explains_the_result_it_makes_and_no_right_one() {
        let right = problem();
        let silu_is_right = ["the activation is silu"];
        for mistake in MISTAKES {
            let Some(wrong) = (mistake.make)(&right) else {
                assert!(silu_is_right.contains(&mistake.name), "{} cannot be made", mistake.name);
                continue;
            };
            let result = result_of(&wrong);
            let found = diagnose(&right, &matrix_of(&result, (6, 128)).unwrap(), 1e-6);
            assert!(found.contains(&mistake.name), "{}: found {found:?}", mistake.name);
            assert!(found.len() <= 2, "{}: found {found:?}", mistake.name);
        }
        let result = result_of(&right);
        assert_eq!(diagnose(&right, &matrix_of(&result, (6, 128)).unwrap(), 1e-6), [""; 0]);
    }
}
