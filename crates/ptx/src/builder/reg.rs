//! Typed registers, and the values an instruction takes in place of one.

use super::Expr;
use crate::ast::{Immediate, Operand};
use crate::name::Name;
use crate::types::Type;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Not;

/// What a register is declared as. Types of one class share registers: `u32`, `s32`, `b32` and `f16x2` are all
/// declared `.b32`.
pub trait RegClass: Copy + 'static {
    /// The declared type.
    const TYPE: Type;
    /// First part of the names of its registers.
    const PREFIX: &'static str;
    /// Its place among the classes.
    const INDEX: usize;
}

pub(super) const CLASSES: usize = 8;

macro_rules! classes {
    ($($index:literal $class:ident $ty:ident $prefix:literal)*) => {$(
        /// Registers of one declared type.
        #[derive(Debug, Clone, Copy)]
        pub struct $class;

        impl RegClass for $class {
            const TYPE: Type = Type::$ty;
            const PREFIX: &'static str = $prefix;
            const INDEX: usize = $index;
        }
    )*

        /// Declared type and name prefix of every class, in order of declaration.
        pub(super) const DECLARED: [(Type, &str); CLASSES] = [$((Type::$ty, $prefix),)*];
    };
}

classes! {
    0 ClassPred Pred "%p"
    1 ClassB8 B8 "%rc"
    2 ClassB16 B16 "%rs"
    3 ClassB32 B32 "%r"
    4 ClassB64 B64 "%rd"
    5 ClassB128 B128 "%rq"
    6 ClassF32 F32 "%f"
    7 ClassF64 F64 "%fd"
}

/// A type of a register, as instructions see it.
pub trait RegType: Copy + 'static {
    /// The register file part it lives in.
    type Class: RegClass;
    /// The type an opcode names.
    const TYPE: Type;
}

macro_rules! reg_types {
    ($($name:ident $ty:ident $class:ident $doc:literal)*) => {$(
        #[doc = $doc]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name;

        impl RegType for $name {
            type Class = $class;
            const TYPE: Type = Type::$ty;
        }
    )*};
}

reg_types! {
    Pred Pred ClassPred "A predicate."
    B8 B8 ClassB8 "8 bits: a pair of e2m1."
    B16 B16 ClassB16 "16 bits."
    U16 U16 ClassB16 "Unsigned 16-bit integer."
    S16 S16 ClassB16 "Signed 16-bit integer."
    F16 F16 ClassB16 "Binary16."
    Bf16 Bf16 ClassB16 "bfloat16."
    B32 B32 ClassB32 "32 bits."
    U32 U32 ClassB32 "Unsigned 32-bit integer."
    S32 S32 ClassB32 "Signed 32-bit integer."
    F16x2 F16x2 ClassB32 "Two binary16."
    Bf16x2 Bf16x2 ClassB32 "Two bfloat16."
    B64 B64 ClassB64 "64 bits."
    U64 U64 ClassB64 "Unsigned 64-bit integer."
    S64 S64 ClassB64 "Signed 64-bit integer."
    F32x2 F32x2 ClassB64 "Two binary32."
    B128 B128 ClassB128 "128 bits."
    F32 F32 ClassF32 "Binary32."
    F64 F64 ClassF64 "Binary64."
}

/// A register of one kernel.
pub struct Reg<T> {
    index: u32,
    ty: PhantomData<T>,
}

impl<T> Clone for Reg<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Reg<T> {}

impl<T: RegType> fmt::Debug for Reg<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name())
    }
}

impl<T: RegType> Reg<T> {
    pub(super) fn new(index: u32) -> Reg<T> {
        Reg { index, ty: PhantomData }
    }

    pub(super) fn index(self) -> u32 {
        self.index
    }

    /// The same register seen as another type of its class; no instruction.
    pub fn cast<U: RegType<Class = T::Class>>(self) -> Reg<U> {
        Reg::new(self.index)
    }

    /// Its name in the text.
    pub fn name(self) -> Name {
        format!("{}{}", T::Class::PREFIX, self.index).into()
    }

    pub(super) fn operand(self) -> Operand {
        Operand::Ident(self.name())
    }
}

/// A predicate or its negation.
#[derive(Debug, Clone, Copy)]
pub struct Cond {
    pub(super) register: Reg<Pred>,
    pub(super) negated: bool,
}

impl From<Reg<Pred>> for Cond {
    fn from(register: Reg<Pred>) -> Cond {
        Cond { register, negated: false }
    }
}

impl Not for Reg<Pred> {
    type Output = Cond;
    fn not(self) -> Cond {
        Cond { register: self, negated: true }
    }
}

impl Not for Cond {
    type Output = Cond;
    fn not(self) -> Cond {
        Cond { negated: !self.negated, ..self }
    }
}

impl Cond {
    pub(super) fn operand(self) -> Operand {
        match self.negated {
            true => Operand::Not(self.register.name()),
            false => self.register.operand(),
        }
    }
}

/// A register or a number where an instruction takes either.
#[derive(Debug, Clone)]
pub struct Value<T> {
    operand: Operand,
    ty: PhantomData<T>,
}

impl<T> Value<T> {
    pub(super) fn new(operand: Operand) -> Value<T> {
        Value { operand, ty: PhantomData }
    }
}

impl<T: RegType> From<Reg<T>> for Value<T> {
    fn from(register: Reg<T>) -> Value<T> {
        Value::new(register.operand())
    }
}

/// What can be read as a `T`: a register of that type or a Rust number.
pub trait Src<T> {
    /// It as a value.
    fn value(self) -> Value<T>;

    /// It as an operand.
    fn operand(self) -> Operand
    where
        Self: Sized,
    {
        self.value().operand
    }
}

impl<T> Src<T> for Value<T> {
    fn value(self) -> Value<T> {
        self
    }
}

impl<T: RegType> Src<T> for Reg<T> {
    fn value(self) -> Value<T> {
        self.into()
    }
}

macro_rules! numbers {
    ($($ty:ident $number:ty, $value:ident => $immediate:expr;)*) => {$(
        impl From<$number> for Value<$ty> {
            fn from($value: $number) -> Value<$ty> {
                Value::new(Operand::Imm($immediate))
            }
        }

        impl Src<$ty> for $number {
            fn value(self) -> Value<$ty> {
                self.into()
            }
        }

        impl From<$number> for Expr<$ty> {
            fn from($value: $number) -> Expr<$ty> {
                Value::from($value).into()
            }
        }
    )*};
}

numbers! {
    B16 u16, v => Immediate::Hex(v.into());
    U16 u16, v => Immediate::Int(v.into());
    S16 i16, v => Immediate::Int(v.into());
    B32 u32, v => Immediate::Hex(v.into());
    U32 u32, v => Immediate::Int(v.into());
    S32 i32, v => Immediate::Int(v.into());
    B64 u64, v => Immediate::Hex(v);
    U64 u64, v => i64::try_from(v).map_or(Immediate::Hex(v), Immediate::Int);
    S64 i64, v => Immediate::Int(v);
    F32 f32, v => Immediate::F32(v.to_bits());
    F64 f64, v => Immediate::F64(v.to_bits());
}
