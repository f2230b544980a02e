//! Arithmetic, logic, comparison, selection, packing of registers.
//!
//! Floating-point additions and multiplications are written with `.rn`, so that ptxas does not fuse them: the
//! simulator and the chip give the same bits.

use super::reg::*;
use super::{Expr, Kernel, vector};
use crate::ast::{Immediate, Operand};
use crate::types::Type;

/// What `add`, `sub` and `mul` work on.
pub trait Number: RegType {
    /// `.rn` where rounding happens.
    const ROUNDING: &'static str;
    /// `.lo` where a product is twice as long.
    const LOW: &'static str;
}

/// Integers.
pub trait Integer: Number {}

/// Floating-point types, packed ones included.
pub trait Float: Number {}

/// What `min`, `max` and comparisons work on.
pub trait Ordered: RegType {}

/// What logic works on: the untyped view of integers.
pub trait Bits: RegType {
    /// The opcode's type.
    const BITS: Type;
}

/// An integer with one of twice its width, which a full product gives.
pub trait DoubleWidth: Integer {
    /// The product's type.
    type Product: Integer;
}

macro_rules! kinds {
    (integers: $($int:ident $bits:ident)*; floats: $($float:ident)*; unordered: $($packed:ident)*; bits: $($raw:ident $raw_bits:ident)*) => {
        $(
            impl Number for $int { const ROUNDING: &'static str = ""; const LOW: &'static str = ".lo"; }
            impl Integer for $int {}
            impl Ordered for $int {}
            impl Bits for $int { const BITS: Type = Type::$bits; }
        )*
        $(
            impl Number for $float { const ROUNDING: &'static str = ".rn"; const LOW: &'static str = ".rn"; }
            impl Float for $float {}
            impl Ordered for $float {}
        )*
        $(
            impl Number for $packed { const ROUNDING: &'static str = ".rn"; const LOW: &'static str = ".rn"; }
            impl Float for $packed {}
        )*
        $(impl Bits for $raw { const BITS: Type = Type::$raw_bits; })*
    };
}

kinds! {
    integers: U16 B16 S16 B16 U32 B32 S32 B32 U64 B64 S64 B64;
    floats: F32 F64 F16 Bf16;
    unordered: F16x2 Bf16x2 F32x2;
    bits: Pred Pred B16 B16 B32 B32 B64 B64
}

impl DoubleWidth for U16 {
    type Product = U32;
}
impl DoubleWidth for S16 {
    type Product = S32;
}
impl DoubleWidth for U32 {
    type Product = U64;
}
impl DoubleWidth for S32 {
    type Product = S64;
}

words! {
    /// A comparison. Floating-point comparisons with NaN are false, except `Ne`, which is then false too: PTX
    /// `.ne` is the ordered one.
    Cmp {
        Eq "eq" "Equal.",
        Ne "ne" "Different.",
        Lt "lt" "Less.",
        Le "le" "Less or equal.",
        Gt "gt" "Greater.",
        Ge "ge" "Greater or equal.",
    }
}

instructions! {
    /// Sum; integers wrap.
    add<T: Number>(a: Reg<T>, b: impl Src<T>) -> T = format!("add{}.{}", T::ROUNDING, T::TYPE);
    /// Difference; integers wrap.
    sub<T: Number>(a: Reg<T>, b: impl Src<T>) -> T = format!("sub{}.{}", T::ROUNDING, T::TYPE);
    /// Product; integers keep the low half.
    mul<T: Number>(a: Reg<T>, b: impl Src<T>) -> T = format!("mul{}.{}", T::LOW, T::TYPE);
    /// `a * b + c`, rounded once.
    fma<T: Float>(a: Reg<T>, b: impl Src<T>, c: impl Src<T>) -> T = format!("fma.rn.{}", T::TYPE);
    /// Quotient towards zero.
    div<T: Integer>(a: Reg<T>, b: impl Src<T>) -> T = format!("div.{}", T::TYPE);
    /// The smaller one; a NaN loses.
    min<T: Ordered>(a: Reg<T>, b: impl Src<T>) -> T = format!("min.{}", T::TYPE);
    /// The larger one; a NaN loses.
    max<T: Ordered>(a: Reg<T>, b: impl Src<T>) -> T = format!("max.{}", T::TYPE);
    /// The smaller one; NaN if either is.
    min_nan<T: Float>(a: Reg<T>, b: impl Src<T>) -> T = format!("min.NaN.{}", T::TYPE);
    /// The larger one; NaN if either is.
    max_nan<T: Float>(a: Reg<T>, b: impl Src<T>) -> T = format!("max.NaN.{}", T::TYPE);
    /// The opposite.
    neg<T: Float>(a: Reg<T>) -> T = format!("neg.{}", T::TYPE);
    /// The magnitude.
    abs<T: Float>(a: Reg<T>) -> T = format!("abs.{}", T::TYPE);
    /// Bitwise and.
    and<T: Bits>(a: Reg<T>, b: impl Src<T>) -> T = format!("and.{}", T::BITS);
    /// Bitwise or.
    or<T: Bits>(a: Reg<T>, b: impl Src<T>) -> T = format!("or.{}", T::BITS);
    /// Bitwise exclusive or.
    xor<T: Bits>(a: Reg<T>, b: impl Src<T>) -> T = format!("xor.{}", T::BITS);
    /// Bitwise complement.
    not<T: Bits>(a: Reg<T>) -> T = format!("not.{}", T::BITS);
    /// Shift right by `n` bits; signed types replicate the sign.
    shr<T: Bits>(a: Reg<T>, n: impl Src<U32>) -> T = format!("shr.{}", T::TYPE);
    /// `bfe`: `len` bits from bit `pos` on; signed types replicate the sign.
    bit_field<T: Integer>(a: Reg<T>, pos: impl Src<U32>, len: impl Src<U32>) -> T
        = format!("bfe.{}", T::TYPE);

    /// The full product.
    mul_wide<T: DoubleWidth>(a: Reg<T>, b: impl Src<T>) -> T::Product = format!("mul.wide.{}", T::TYPE);
    /// `lop3`: for each bit, `lut` bit `4a + 2b + c`; e.g. 0xE8 is the majority, 0xEA is `(a & b) | c`.
    lop3<T: RegType<Class = ClassB32>>(a: Reg<T>, b: impl Src<T>, c: impl Src<T>, lut: u8) -> T
        = "lop3.b32", [a.operand(), b.operand(), c.operand(), Operand::Imm(Immediate::Hex(lut.into()))];
    /// `prmt`: four bytes picked from the eight of `a` (0 to 3) and `b` (4 to 7) by the nibbles of `selector`.
    permute<T: RegType<Class = ClassB32>>(a: Reg<T>, b: impl Src<T>, selector: impl Src<B32>) -> T = "prmt.b32";
    /// The high word of `hi:lo` shifted left by `n` modulo 32; with `lo == hi` a rotation.
    funnel_left<T: RegType<Class = ClassB32>>(lo: Reg<T>, hi: Reg<T>, n: impl Src<U32>) -> T
        = "shf.l.wrap.b32";
    /// The low word of `hi:lo` shifted right by `n` modulo 32.
    funnel_right<T: RegType<Class = ClassB32>>(lo: Reg<T>, hi: Reg<T>, n: impl Src<U32>) -> T
        = "shf.r.wrap.b32";
    /// How many bits are set.
    popcount<T: Bits>(a: Reg<T>) -> U32 = format!("popc.{}", T::BITS);
    /// How many leading bits are clear.
    leading_zeros<T: Bits>(a: Reg<T>) -> U32 = format!("clz.{}", T::BITS);

    /// `1 / a`, correctly rounded.
    rcp(a: Reg<F32>) -> F32 = "rcp.rn.f32";
    /// `1 / a`, off by at most 1 ulp; subnormals are flushed.
    rcp_approx(a: Reg<F32>) -> F32 = "rcp.approx.ftz.f32";
    /// `2^a`, off by at most 2 ulp; subnormals are flushed.
    ex2_approx(a: Reg<F32>) -> F32 = "ex2.approx.ftz.f32";
    /// `a / b`, correctly rounded.
    div_exact(a: impl Src<F32>, b: impl Src<F32>) -> F32 = "div.rn.f32";

    // Packing; the first source is the low part.

    /// Two 32-bit registers as one of 64 bits.
    pack_64<T: RegType<Class = ClassB32>>(low: Reg<T>, high: Reg<T>) -> B64 = "mov.b64", [vector(&[low, high])];
    /// Two 16-bit registers as one of 32 bits.
    pack_32<T: RegType<Class = ClassB16>>(low: Reg<T>, high: Reg<T>) -> B32 = "mov.b32", [vector(&[low, high])];
    /// The bits of a binary32.
    to_bits(a: Reg<F32>) -> B32 = "mov.b32";
    /// The binary32 with these bits.
    from_bits<T: RegType<Class = ClassB32>>(a: Reg<T>) -> F32 = "mov.b32";
}

impl Kernel {
    /// `mov`: a new register with this value.
    pub fn mov<T: RegType>(&mut self, value: impl Src<T>) -> Reg<T> {
        // `mov` has no packed and no 16-bit floating-point types.
        let ty = match T::TYPE {
            Type::F32 | Type::F64 | Type::Pred => T::TYPE,
            Type::U32 | Type::S32 | Type::U64 | Type::S64 | Type::U16 | Type::S16 => T::TYPE,
            other => bits_of(other),
        };
        self.give(&format!("mov.{ty}"), vec![value.operand()])
    }

    /// `mov` into a register that exists.
    pub fn assign<T: RegType>(&mut self, register: Reg<T>, value: impl Src<T>) {
        self.to(register).mov(value);
    }

    /// `n` new registers holding 0.
    pub fn zeros(&mut self, n: usize) -> Vec<Reg<F32>> {
        (0..n).map(|_| self.mov(0.0f32)).collect()
    }

    /// `a`, a register or a formula, compared with `b`.
    pub fn compare<T: Ordered>(&mut self, cmp: Cmp, a: impl Into<Expr<T>>, b: impl Src<T>) -> Reg<Pred> {
        let a = a.into().operand(self);
        self.give(&format!("setp.{}.{}", cmp.as_str(), T::TYPE), vec![a, b.operand()])
    }

    /// `a` compared with `b`, and `c`.
    pub fn compare_and<T: Ordered>(
        &mut self,
        cmp: Cmp,
        a: impl Into<Expr<T>>,
        b: impl Src<T>,
        c: impl Into<Cond>,
    ) -> Reg<Pred> {
        let sources = vec![a.into().operand(self), b.operand(), c.into().operand()];
        self.give(&format!("setp.{}.and.{}", cmp.as_str(), T::TYPE), sources)
    }

    /// `a` where `p` holds, `b` elsewhere.
    pub fn select<T: RegType>(&mut self, p: Reg<Pred>, a: impl Src<T>, b: impl Src<T>) -> Reg<T> {
        let ty = match T::TYPE {
            Type::F32 | Type::F64 => T::TYPE,
            other => bits_of(other),
        };
        self.give(&format!("selp.{ty}"), vec![a.operand(), b.operand(), p.operand()])
    }

    /// The low and the high half.
    pub fn unpack_32<T: RegType<Class = ClassB32>>(&mut self, a: Reg<T>) -> (Reg<B16>, Reg<B16>) {
        let [low, high] = self.parts("mov.b32", a);
        (low, high)
    }

    /// The four bytes, lowest first.
    pub fn unpack_bytes<T: RegType<Class = ClassB32>>(&mut self, a: Reg<T>) -> [Reg<B8>; 4] {
        self.parts("mov.b32", a)
    }

    fn parts<T: RegType, P: RegType, const N: usize>(&mut self, opcode: &str, whole: Reg<T>) -> [Reg<P>; N] {
        let parts = std::array::from_fn(|_| self.register());
        self.push(opcode, vec![vector(&parts), whole.operand()]);
        parts
    }
}

/// The untyped type of the same width.
fn bits_of(ty: Type) -> Type {
    match ty.bits() {
        1 => Type::Pred,
        8 => Type::B8,
        16 => Type::B16,
        32 => Type::B32,
        128 => Type::B128,
        _ => Type::B64,
    }
}
