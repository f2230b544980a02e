//! Conversions. Where two values are packed, `low` is the element with the lower index.

use super::arith::Integer;
use super::reg::*;
use super::{Float, Kernel, vector};

impl Kernel {
    /// An integer as another integer type: truncated, or extended as its own signedness says.
    pub fn convert<T: Integer, S: Integer>(&mut self, a: Reg<S>) -> Reg<T> {
        self.give(&format!("cvt.{}.{}", T::TYPE, S::TYPE), vec![a.operand()])
    }

    /// An integer as a floating-point number, rounded to nearest even.
    pub fn int_to_float<T: Float, S: Integer>(&mut self, a: Reg<S>) -> Reg<T> {
        self.give(&format!("cvt.rn.{}.{}", T::TYPE, S::TYPE), vec![a.operand()])
    }

    /// A binary32 as an integer, truncated; values out of range saturate.
    pub fn f32_to_int<T: Integer>(&mut self, a: Reg<F32>) -> Reg<T> {
        self.give(&format!("cvt.rzi.{}.f32", T::TYPE), vec![a.operand()])
    }

    /// A binary16 as binary32, exactly.
    pub fn f16_to_f32(&mut self, a: Reg<F16>) -> Reg<F32> {
        self.give("cvt.f32.f16", vec![a.operand()])
    }

    /// A bfloat16 as binary32, exactly.
    pub fn bf16_to_f32(&mut self, a: Reg<Bf16>) -> Reg<F32> {
        self.give("cvt.f32.bf16", vec![a.operand()])
    }

    /// A binary32 as binary16, rounded to nearest even.
    pub fn f32_to_f16(&mut self, a: Reg<F32>) -> Reg<F16> {
        self.give("cvt.rn.f16.f32", vec![a.operand()])
    }

    /// A binary32 as bfloat16, rounded to nearest even.
    pub fn f32_to_bf16(&mut self, a: Reg<F32>) -> Reg<Bf16> {
        self.give("cvt.rn.bf16.f32", vec![a.operand()])
    }

    /// Two binary32 as a pair of binary16, rounded to nearest even.
    pub fn f32_to_f16x2(&mut self, low: Reg<F32>, high: Reg<F32>) -> Reg<F16x2> {
        self.give("cvt.rn.f16x2.f32", vec![high.operand(), low.operand()])
    }

    /// Two binary32 as a pair of bfloat16, rounded to nearest even.
    pub fn f32_to_bf16x2(&mut self, low: Reg<F32>, high: Reg<F32>) -> Reg<Bf16x2> {
        self.give("cvt.rn.bf16x2.f32", vec![high.operand(), low.operand()])
    }

    /// Two binary32 as a pair of e4m3, rounded to nearest even, saturated.
    pub fn f32_to_e4m3x2(&mut self, low: Reg<F32>, high: Reg<F32>) -> Reg<B16> {
        self.give("cvt.rn.satfinite.e4m3x2.f32", vec![high.operand(), low.operand()])
    }

    /// A pair of binary16 as a pair of e4m3, rounded to nearest even, saturated.
    pub fn f16x2_to_e4m3x2(&mut self, a: Reg<F16x2>) -> Reg<B16> {
        self.give("cvt.rn.satfinite.e4m3x2.f16x2", vec![a.operand()])
    }

    /// A pair of e4m3 as a pair of binary16, exactly.
    pub fn e4m3x2_to_f16x2(&mut self, a: Reg<B16>) -> Reg<F16x2> {
        self.give("cvt.rn.f16x2.e4m3x2", vec![a.operand()])
    }

    /// Two binary32 as a pair of e2m1 in a byte, rounded to nearest even, saturated.
    pub fn f32_to_e2m1x2(&mut self, low: Reg<F32>, high: Reg<F32>) -> Reg<B8> {
        self.give("cvt.rn.satfinite.e2m1x2.f32", vec![high.operand(), low.operand()])
    }

    /// A byte with a pair of e2m1 as a pair of binary16, exactly.
    pub fn e2m1x2_to_f16x2(&mut self, a: Reg<B8>) -> Reg<F16x2> {
        self.give("cvt.rn.f16x2.e2m1x2", vec![a.operand()])
    }

    /// Two binary32 as a pair of ue8m0, rounded up.
    pub fn f32_to_ue8m0x2(&mut self, low: Reg<F32>, high: Reg<F32>) -> Reg<B16> {
        self.give("cvt.rp.satfinite.ue8m0x2.f32", vec![high.operand(), low.operand()])
    }

    /// Four binary32 as e2m1, lowest first, stochastically rounded with `random` bits.
    pub fn f32_to_e2m1x4_stochastic(&mut self, values: [Reg<F32>; 4], random: Reg<B32>) -> Reg<B16> {
        let [a, b, c, d] = values;
        self.give("cvt.rs.satfinite.e2m1x4.f32", vec![vector(&[d, c, b, a]), random.operand()])
    }
}
