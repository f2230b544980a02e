//! Conversions. Where two values are packed, `low` is the element with the lower index.

use super::Float;
use super::arith::Integer;
use super::reg::*;

instructions! {
    /// An integer as another integer type: truncated, or extended as its own signedness says.
    convert<T: Integer, S: Integer>(a: Reg<S>) -> T = format!("cvt.{}.{}", T::TYPE, S::TYPE);
    /// An integer as a floating-point number, rounded to nearest even.
    int_to_float<T: Float, S: Integer>(a: Reg<S>) -> T = format!("cvt.rn.{}.{}", T::TYPE, S::TYPE);
    /// A binary16 as binary32, exactly.
    f16_to_f32(a: Reg<F16>) -> F32 = "cvt.f32.f16";
    /// A bfloat16 as binary32, exactly.
    bf16_to_f32(a: Reg<Bf16>) -> F32 = "cvt.f32.bf16";
    /// A binary32 as binary16, rounded to nearest even.
    f32_to_f16(a: Reg<F32>) -> F16 = "cvt.rn.f16.f32";
    /// A binary32 as bfloat16, rounded to nearest even.
    f32_to_bf16(a: Reg<F32>) -> Bf16 = "cvt.rn.bf16.f32";
    /// A pair of e4m3 as a pair of binary16, exactly.
    e4m3x2_to_f16x2(a: Reg<B16>) -> F16x2 = "cvt.rn.f16x2.e4m3x2";
    /// A byte with a pair of e2m1 as a pair of binary16, exactly.
    e2m1x2_to_f16x2(a: Reg<B8>) -> F16x2 = "cvt.rn.f16x2.e2m1x2";

    /// Two binary32 as a pair of binary16, rounded to nearest even.
    f32_to_f16x2(low: Reg<F32>, high: Reg<F32>) -> F16x2 = "cvt.rn.f16x2.f32", [high.operand(), low.operand()];
    /// Two binary32 as a pair of bfloat16, rounded to nearest even.
    f32_to_bf16x2(low: Reg<F32>, high: Reg<F32>) -> Bf16x2
        = "cvt.rn.bf16x2.f32", [high.operand(), low.operand()];
}
