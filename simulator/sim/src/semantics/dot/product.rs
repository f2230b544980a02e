//! D = A·B + C on the bits of C and D, as every family of matrix instructions computes it.

use super::{BlockScales, Family, Generation, Model, Shape, multiply, multiply_i32, multiply_scaled};
use crate::semantics::element::Element;
use crate::semantics::float::F16;
use crate::semantics::instr_desc::Accumulator;

impl Accumulator {
    /// Bits of a sum.
    pub const fn bits(self) -> u32 {
        if matches!(self, Accumulator::F16) { 16 } else { 32 }
    }

    fn decode(self, bits: u32) -> f32 {
        if self == Accumulator::F16 { F16.decode(bits.into()) as f32 } else { f32::from_bits(bits) }
    }

    fn encode(self, x: f32) -> u32 {
        match self {
            Accumulator::F16 => F16.encode(x.into(), Default::default(), Default::default()) as u32,
            _ => x.to_bits(),
        }
    }
}

/// A product of matrices whose sums have at most 32 bits.
pub struct Product<'s> {
    pub generation: Generation,
    pub family: Family,
    pub shape: Shape,
    /// The type of A, and of B as far as sums depend on it.
    pub element: Element,
    /// Types of C and D; if D is s32, so is C.
    pub c: Accumulator,
    pub d: Accumulator,
    /// `.satfinite` of integers.
    pub saturate: bool,
    /// C is halved so often first.
    pub halved: u32,
    pub scales: Option<BlockScales<'s>>,
}

impl Product<'_> {
    /// The bits of D for the values of A and B and the bits of C.
    pub fn of(&self, a: &[f32], b: &[f32], c: &[u32]) -> Vec<u32> {
        if self.d == Accumulator::S32 {
            let mut sums: Vec<i32> = c.iter().map(|&x| x as i32).collect();
            multiply_i32(self.shape, a, b, &mut sums, self.saturate);
            return sums.into_iter().map(|x| x as u32).collect();
        }
        let factor = 2f32.powi(-(self.halved as i32));
        let mut sums: Vec<f32> = c.iter().map(|&x| self.c.decode(x) * factor).collect();
        let model = Model::new(self.generation, self.family, self.element, self.d, self.shape.k);
        match self.scales {
            None => multiply(&model, self.shape, a, b, &mut sums),
            Some(scales) => multiply_scaled(&model, self.shape, a, b, scales, &mut sums),
        }
        sums.into_iter().map(|x| self.d.encode(x)).collect()
    }
}
