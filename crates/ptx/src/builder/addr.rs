//! Addresses that know their state space.

use super::reg::{Reg, RegType, U32, U64};
use crate::ast::{self, AddressBase, Operand};
use std::fmt;
use std::marker::PhantomData;

/// A state space an address can lie in.
pub trait AddrSpace: Copy + 'static {
    /// Type of the register that holds an address.
    type Pointer: RegType;
    /// The modifier of `ld` and `st`, with its dot; empty for generic addresses.
    const MODIFIER: &'static str;
}

macro_rules! spaces {
    ($($name:ident $pointer:ident $modifier:literal $doc:literal)*) => {$(
        #[doc = $doc]
        #[derive(Debug, Clone, Copy)]
        pub struct $name;

        impl AddrSpace for $name {
            type Pointer = $pointer;
            const MODIFIER: &'static str = $modifier;
        }
    )*};
}

spaces! {
    Global U64 ".global" "Global memory."
    Generic U64 "" "Any memory, by generic address."
    Shared U32 ".shared" "Shared memory of the own CTA."
    Cluster U32 ".shared::cluster" "Shared memory of any CTA of the cluster."
    Tmem U32 ".tmem" "Tensor memory: lane in bits 16 to 31, column in bits 0 to 15. Only tcgen05 reads it."
}

/// A register and a number of bytes (columns, in tensor memory) to add to it.
pub struct Addr<S: AddrSpace> {
    base: Reg<S::Pointer>,
    offset: i64,
    space: PhantomData<S>,
}

impl<S: AddrSpace> Clone for Addr<S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: AddrSpace> Copy for Addr<S> {}

impl<S: AddrSpace> fmt::Debug for Addr<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:?}{:+}]", self.base, self.offset)
    }
}

impl<S: AddrSpace> Addr<S> {
    /// The address in `base`.
    pub fn new(base: Reg<S::Pointer>) -> Addr<S> {
        Addr { base, offset: 0, space: PhantomData }
    }

    /// This address plus a constant; no instruction.
    pub fn at(self, bytes: impl Into<i64>) -> Addr<S> {
        Addr { offset: self.offset + bytes.into(), ..self }
    }

    /// The register it starts from.
    pub fn base(self) -> Reg<S::Pointer> {
        self.base
    }

    /// The constant added to it.
    pub fn offset(self) -> i64 {
        self.offset
    }

    pub(super) fn operand(self) -> Operand {
        let base = AddressBase::Ident(self.base.name());
        Operand::Address(ast::Address { base, offset: self.offset, unified: false })
    }
}

impl Addr<Shared> {
    /// The same bytes as an address of the cluster window: the own CTA's.
    pub fn cluster(self) -> Addr<Cluster> {
        Addr { base: self.base, offset: self.offset, space: PhantomData }
    }
}
