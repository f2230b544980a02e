//! Loads, stores, atomics, cache control, 16-byte asynchronous copies, addresses across a cluster.

use super::addr::{Addr, AddrSpace, Cluster, Global, Shared};
use super::arith::Integer;
use super::reg::*;
use super::{Expr, Kernel, number, vector};
use crate::types::Type;

words! {
    /// How long a cache line should stay.
    Eviction {
        Normal "evict_normal" "Like any other.",
        First "evict_first" "Leaves first: read once.",
        Last "evict_last" "Leaves last: read again soon.",
    }

    /// The threads a memory operation is ordered for.
    Scope {
        Cta "cta" "The own CTA.",
        Cluster "cluster" "The own cluster.",
        Gpu "gpu" "The whole GPU.",
        Sys "sys" "The whole machine.",
    }

    /// How an atomic operation orders others.
    Semantics {
        Relaxed "relaxed" "Not at all.",
        Acquire "acquire" "What follows stays behind it.",
        Release "release" "What precedes stays before it.",
        AcquireRelease "acq_rel" "Both.",
    }

    /// What an atomic operation does.
    AtomOp {
        Add "add" "Sum.",
        Min "min" "Minimum.",
        Max "max" "Maximum.",
        Exchange "exch" "The new value (`atom` only).",
        And "and" "Bitwise and.",
        Or "or" "Bitwise or.",
    }
}

impl Eviction {
    /// The L2 policy word that `createpolicy.fractional` gives for the whole access, as CUTLASS uses it.
    pub const fn policy(self) -> u64 {
        match self {
            Eviction::Normal => 0x1000_0000_0000_0000,
            Eviction::First => 0x12F0_0000_0000_0000,
            Eviction::Last => 0x14F0_0000_0000_0000,
        }
    }
}

/// What atomics work on.
pub trait Atomic: RegType {}

impl Atomic for U32 {}
impl Atomic for S32 {}
impl Atomic for U64 {}
impl Atomic for F32 {}
impl Atomic for F16x2 {}
impl Atomic for B32 {}

impl AtomOp {
    fn modifiers(self, ty: Type) -> String {
        let op = self.as_str();
        match self {
            AtomOp::Add if ty == Type::F16x2 => format!("{op}.noftz.{ty}"),
            AtomOp::Add | AtomOp::Min | AtomOp::Max => format!("{op}.{ty}"),
            AtomOp::Exchange | AtomOp::And | AtomOp::Or => format!("{op}.b{}", ty.bits()),
        }
    }
}

/// The type `ld` and `st` name: they have no packed and no 16-bit floating-point types.
fn access(ty: Type) -> Type {
    match ty {
        Type::F16 | Type::Bf16 => Type::B16,
        Type::F16x2 | Type::Bf16x2 => Type::B32,
        Type::F32x2 => Type::B64,
        other => other,
    }
}

instructions! {
    /// Loads one value.
    ld<T: RegType, S: AddrSpace>(address: Addr<S>) -> T = format!("ld{}.{}", S::MODIFIER, access(T::TYPE));
    /// Loads a byte, zero-extended.
    ld_byte<S: AddrSpace>(address: Addr<S>) -> U32 = format!("ld{}.u8", S::MODIFIER);
    /// Loads one value that other threads write, with acquire semantics.
    ld_acquire<T: RegType, S: AddrSpace>(scope: Scope, address: Addr<S>) -> T
        = format!("ld.acquire.{}{}.{}", scope.as_str(), S::MODIFIER, access(T::TYPE)), [address.operand()];
    /// Stores one value.
    st<T: RegType, S: AddrSpace>(address: Addr<S>, value: Reg<T>)
        = format!("st{}.{}", S::MODIFIER, access(T::TYPE));
    /// Stores consecutive values (2, 4 or 8) at once; the address is a multiple of all their bytes.
    st_vector<T: RegType, S: AddrSpace>(address: Addr<S>, values: &[Reg<T>])
        = format!("st{}.v{}.{}", S::MODIFIER, values.len(), access(T::TYPE)), [address.operand(), vector(values)];
    /// Stores the low byte.
    st_byte<S: AddrSpace>(address: Addr<S>, value: Reg<U32>) = format!("st{}.u8", S::MODIFIER);
    /// Stores one value that other threads read, with release semantics.
    st_release<T: RegType, S: AddrSpace>(scope: Scope, address: Addr<S>, value: Reg<T>)
        = format!("st.release.{}{}.{}", scope.as_str(), S::MODIFIER, access(T::TYPE)),
        [address.operand(), value.operand()];
    /// `st.async`: stores consecutive values (2 or 4) to another CTA's shared memory and completes the bytes on its mbarrier.
    st_async_vector<T: RegType>(address: Addr<Cluster>, values: &[Reg<T>], mbarrier: Addr<Cluster>)
        = format!("st.async.shared::cluster.mbarrier::complete_tx::bytes.v{}.{}", values.len(), access(T::TYPE)),
        [address.operand(), vector(values), mbarrier.operand()];

    /// Atomic read-modify-write; gives the old value.
    atom<T: Atomic, S: AddrSpace>(
        op: AtomOp, semantics: Semantics, scope: Scope, address: Addr<S>, value: impl Src<T>
    ) -> T = atomic::<S>("atom", semantics, scope, &op.modifiers(T::TYPE)), [address.operand(), value.operand()];
    /// Atomic update without result; `semantics` is relaxed or release.
    red<T: Atomic, S: AddrSpace>(
        op: AtomOp, semantics: Semantics, scope: Scope, address: Addr<S>, value: impl Src<T>
    ) = atomic::<S>("red", semantics, scope, &op.modifiers(T::TYPE)), [address.operand(), value.operand()];

    /// Brings a line of global memory into L2.
    prefetch_l2(address: Addr<Global>) = "prefetch.global.L2";
    /// `cp.async.cg`: copies 16 bytes of global memory to shared memory in the background.
    cp_async_16(to: Addr<Shared>, from: Addr<Global>)
        = "cp.async.cg.shared.global", [to.operand(), from.operand(), number(16)];
    /// As [`cp_async_16`](Self::cp_async_16), but reads only `bytes` bytes (0 to 16) and fills with zeros.
    cp_async_16_partial(to: Addr<Shared>, from: Addr<Global>, bytes: impl Src<U32>)
        = "cp.async.cg.shared.global", [to.operand(), from.operand(), number(16), bytes.operand()];
    /// Closes a group of `cp.async` of this thread.
    cp_async_commit() = "cp.async.commit_group";
    /// Waits until at most `pending` groups of this thread are unfinished.
    cp_async_wait(pending: u32) = "cp.async.wait_group", [number(pending.into())];
}

fn atomic<S: AddrSpace>(root: &str, semantics: Semantics, scope: Scope, op: &str) -> String {
    format!("{root}.{}.{}{}.{op}", semantics.as_str(), scope.as_str(), S::MODIFIER)
}

impl Kernel {
    /// This address plus a number of bytes in a register, or a formula's.
    pub fn offset<S: AddrSpace>(&mut self, address: Addr<S>, bytes: impl Into<Expr<S::Pointer>>) -> Addr<S>
    where
        S::Pointer: Integer,
    {
        Addr::new(self.eval(address.base() + bytes)).at(address.offset())
    }

    /// Loads `N` consecutive values (2, 4 or 8) at once; the address is a multiple of all their bytes.
    pub fn ld_vector<T: RegType, S: AddrSpace, const N: usize>(&mut self, address: Addr<S>) -> [Reg<T>; N] {
        let values = std::array::from_fn(|_| self.register());
        let opcode = format!("ld{}.v{N}.{}", S::MODIFIER, access(T::TYPE));
        self.push(&opcode, vec![vector(&values), address.operand()]);
        values
    }

    /// The address in CTA `rank` of the cluster that corresponds to `address` in the own CTA. The constant part
    /// of `address` stays a constant.
    pub fn map_to_rank(&mut self, address: Addr<Shared>, rank: impl Src<U32>) -> Addr<Cluster> {
        let base = self.give("mapa.shared::cluster.u32", vec![address.base().operand(), rank.operand()]);
        Addr::new(base).at(address.offset())
    }
}
