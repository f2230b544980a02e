//! Read-modify-write operations on one element of memory: `red`, `atom`, and the reductions of bulk copies.
//!
//! Flow: `exec/{ld_st,tma}` reads the old bits, calls [`Reduction::apply`], writes the new ones. PTX ISA
//! 9.7.13.3 (`atom`), 9.7.13.4 (`red`), 9.7.9.25.6.2 (`cp.reduce.async.bulk`), 9.7.9.27.1.3
//! (`cp.reduce.async.bulk.tensor`).

use super::float::arith::{self, MinMax, Mode};
use super::float::int::IntType;
use super::float::{BF16, F16, F32, F64};
use super::misuse::invalid;
use crate::names::modifiers;
use crate::trap::Fault;
use dualgemm_ptx::Type;

modifiers! {
    /// A reduction operator. `exch` and `cas` are not reductions.
    Reduction {
        /// Integers wrap, floats round to nearest.
        Add "add",
        Min "min", Max "max",
        /// Up to the operand, then zero.
        Inc "inc",
        /// Down to zero, then, as from beyond the operand, the operand.
        Dec "dec",
        And "and", Or "or", Xor "xor",
    }
}

impl Reduction {
    /// The new bits of an element that held `old`. With `flush`, f32 subnormals are flushed, as
    /// `atom.add.f32` does in global memory but not in shared memory (PTX ISA 9.7.13.3).
    ///
    /// # Errors
    /// An operator that the type does not have.
    pub fn apply(self, ty: Type, old: u64, operand: u64, flush: bool) -> Result<u64, Fault> {
        use Reduction::*;
        let minmax = MinMax { max: self == Max, ..MinMax::default() };
        let value = match (ty, self) {
            (Type::B32 | Type::B64, And) => old & operand,
            (Type::B32 | Type::B64, Or) => old | operand,
            (Type::B32 | Type::B64, Xor) => old ^ operand,
            (Type::U32, Inc) if old >= operand => 0,
            (Type::U32, Inc) => old + 1,
            (Type::U32, Dec) if old == 0 || old > operand => operand,
            (Type::U32, Dec) => old - 1,
            (Type::F16, Min | Max) => arith::min_max(F16, old, operand, minmax),
            (Type::Bf16, Min | Max) => arith::min_max(BF16, old, operand, minmax),
            (Type::F16, Add) => arith::add(F16, old, operand, Mode::default()),
            (Type::Bf16, Add) => arith::add(BF16, old, operand, Mode::default()),
            (Type::F32, Add) => arith::add(F32, old, operand, Mode { ftz: flush, ..Mode::default() }),
            (Type::F64, Add) => arith::add(F64, old, operand, Mode::default()),
            (Type::U32 | Type::S32 | Type::U64 | Type::S64, _) => {
                let ty = IntType { bits: ty.bits(), signed: ty.is_signed() };
                return int(ty, self, old, operand);
            }
            _ => return Err(unsupported(self)),
        };
        Ok(value)
    }
}

fn int(ty: IntType, op: Reduction, old: u64, operand: u64) -> Result<u64, Fault> {
    let (x, y) = (ty.value(old), ty.value(operand));
    match op {
        Reduction::Add => Ok(ty.bits_of(x + y)),
        Reduction::Min => Ok(ty.bits_of(x.min(y))),
        Reduction::Max => Ok(ty.bits_of(x.max(y))),
        _ => Err(unsupported(op)),
    }
}

fn unsupported(op: Reduction) -> Fault {
    let rule = "integers take add, min and max, u32 also inc and dec; f16 and bf16 add, min and max; f32 and f64 \
                add; b32 and b64 and, or and xor";
    invalid("reduction", "operator", op as u64, rule)
}

#[cfg(test)]
mod tests {
    use super::{Reduction, Type};
    use Reduction::*;
    use Type::*;

    /// What conformance cases have no data for.
    #[test]
    fn edges_exact() {
        for (op, ty, old, operand, new) in [
            (Max, F16, 0x7e00, 0xbc00, 0xbc00),
            (Min, Bf16, 0, 0x8000, 0x8000),
            (Inc, U32, 3, 3, 0),
            (Inc, U32, 2, 3, 3),
            (Dec, U32, 0, 9, 9),
            (Dec, U32, 10, 9, 9),
            (Dec, U32, 5, 9, 4),
            (Add, F32, 1, 1, 2),
        ] {
            assert_eq!(op.apply(ty, old, operand, false), Ok(new), "{op:?} {ty:?}");
        }
        assert_eq!(Add.apply(F32, 1, 1, true), Ok(0));
    }

    #[test]
    fn operators_a_type_lacks_are_refused() {
        for (op, ty) in [(Inc, S32), (And, U32), (Add, B32), (Min, F32), (Xor, F16), (Max, F64)] {
            assert!(op.apply(ty, 0, 0, false).is_err(), "{op:?} {ty:?}");
        }
    }
}
