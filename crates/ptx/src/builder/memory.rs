//! Loads, stores, atomics, cache control, 16-byte asynchronous copies, addresses across a cluster.

use super::addr::{Addr, AddrSpace, Cluster, Global, Shared};
use super::arith::Integer;
use super::reg::*;
use super::{Expr, Kernel, number, vector};
use crate::ast::Operand;
use crate::types::Type;

/// How long a cache line should stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// Like any other.
    Normal,
    /// Leaves first: read once.
    First,
    /// Leaves last: read again soon.
    Last,
}

impl Eviction {
    fn as_str(self) -> &'static str {
        match self {
            Eviction::Normal => "evict_normal",
            Eviction::First => "evict_first",
            Eviction::Last => "evict_last",
        }
    }

    /// The L2 policy word that `createpolicy.fractional` gives for the whole access, as CUTLASS uses it.
    pub const fn policy(self) -> u64 {
        match self {
            Eviction::Normal => 0x1000_0000_0000_0000,
            Eviction::First => 0x12F0_0000_0000_0000,
            Eviction::Last => 0x14F0_0000_0000_0000,
        }
    }
}

/// Cache hints of a load or store in global memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hint {
    /// Loads only: the data does not change while the kernel runs (`.nc`).
    pub read_only: bool,
    /// Do not keep the line in L1.
    pub no_l1: bool,
    /// How long L2 should keep it.
    pub l2: Option<Eviction>,
}

impl Hint {
    fn modifiers(self) -> String {
        let read_only = if self.read_only { ".nc" } else { "" };
        let l1 = if self.no_l1 { ".L1::no_allocate" } else { "" };
        let l2 = if self.l2.is_some() { ".L2::cache_hint" } else { "" };
        format!(".global{read_only}{l1}{l2}")
    }

    fn policy(self) -> Option<Operand> {
        self.l2.map(|eviction| Src::<B64>::operand(eviction.policy()))
    }
}

/// The threads a memory operation is ordered for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The own CTA.
    Cta,
    /// The own cluster.
    Cluster,
    /// The whole GPU.
    Gpu,
    /// The whole machine.
    Sys,
}

impl Scope {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Scope::Cta => "cta",
            Scope::Cluster => "cluster",
            Scope::Gpu => "gpu",
            Scope::Sys => "sys",
        }
    }
}

/// How an atomic operation orders others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Semantics {
    /// Not at all.
    Relaxed,
    /// What follows stays behind it.
    Acquire,
    /// What precedes stays before it.
    Release,
    /// Both.
    AcquireRelease,
}

impl Semantics {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Semantics::Relaxed => "relaxed",
            Semantics::Acquire => "acquire",
            Semantics::Release => "release",
            Semantics::AcquireRelease => "acq_rel",
        }
    }
}

/// What an atomic operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomOp {
    /// Sum.
    Add,
    /// Minimum.
    Min,
    /// Maximum.
    Max,
    /// The new value (`atom` only).
    Exchange,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
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
        let bits = if ty.bits() == 64 { "b64" } else { "b32" };
        match self {
            AtomOp::Add if ty == Type::F16x2 => "add.noftz.f16x2".into(),
            AtomOp::Add => format!("add.{ty}"),
            AtomOp::Min => format!("min.{ty}"),
            AtomOp::Max => format!("max.{ty}"),
            AtomOp::Exchange => format!("exch.{bits}"),
            AtomOp::And => format!("and.{bits}"),
            AtomOp::Or => format!("or.{bits}"),
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

impl Kernel {
    /// This address plus a number of bytes in a register, or a formula's.
    pub fn offset<S: AddrSpace>(&mut self, address: Addr<S>, bytes: impl Into<Expr<S::Pointer>>) -> Addr<S>
    where
        S::Pointer: Integer,
    {
        Addr::new(self.eval(address.base() + bytes)).at(address.offset())
    }

    /// Loads one value.
    pub fn ld<T: RegType, S: AddrSpace>(&mut self, address: Addr<S>) -> Reg<T> {
        self.give(&format!("ld{}.{}", S::MODIFIER, access(T::TYPE)), vec![address.operand()])
    }

    /// Loads `N` consecutive values (2, 4 or 8) at once; the address is a multiple of all their bytes.
    pub fn ld_vector<T: RegType, S: AddrSpace, const N: usize>(&mut self, address: Addr<S>) -> [Reg<T>; N] {
        let values = std::array::from_fn(|_| self.register());
        let opcode = format!("ld{}.v{N}.{}", S::MODIFIER, access(T::TYPE));
        self.push(&opcode, vec![vector(&values), address.operand()]);
        values
    }

    /// Loads `N` consecutive values (2, 4 or 8) from global memory, with cache hints.
    pub fn ld_global<T: RegType, const N: usize>(
        &mut self,
        address: Addr<Global>,
        hint: Hint,
    ) -> [Reg<T>; N] {
        let values = std::array::from_fn(|_| self.register());
        let opcode = format!("ld{}.v{N}.{}", hint.modifiers(), access(T::TYPE));
        let mut operands = vec![vector(&values), address.operand()];
        operands.extend(hint.policy());
        self.push(&opcode, operands);
        values
    }

    /// Loads a byte, zero-extended.
    pub fn ld_byte<S: AddrSpace>(&mut self, address: Addr<S>) -> Reg<U32> {
        self.give(&format!("ld{}.u8", S::MODIFIER), vec![address.operand()])
    }

    /// Loads one value that other threads write, with acquire semantics.
    pub fn ld_acquire<T: RegType, S: AddrSpace>(&mut self, scope: Scope, address: Addr<S>) -> Reg<T> {
        let opcode = format!("ld.acquire.{}{}.{}", scope.as_str(), S::MODIFIER, access(T::TYPE));
        self.give(&opcode, vec![address.operand()])
    }

    /// Stores one value.
    pub fn st<T: RegType, S: AddrSpace>(&mut self, address: Addr<S>, value: Reg<T>) {
        self.push(
            &format!("st{}.{}", S::MODIFIER, access(T::TYPE)),
            vec![address.operand(), value.operand()],
        );
    }

    /// Stores consecutive values (2, 4 or 8) at once; the address is a multiple of all their bytes.
    pub fn st_vector<T: RegType, S: AddrSpace>(&mut self, address: Addr<S>, values: &[Reg<T>]) {
        let opcode = format!("st{}.v{}.{}", S::MODIFIER, values.len(), access(T::TYPE));
        self.push(&opcode, vec![address.operand(), vector(values)]);
    }

    /// Stores consecutive values (2, 4 or 8) to global memory, with cache hints.
    pub fn st_global<T: RegType>(&mut self, address: Addr<Global>, values: &[Reg<T>], hint: Hint) {
        let opcode = format!("st{}.v{}.{}", hint.modifiers(), values.len(), access(T::TYPE));
        let mut operands = vec![address.operand(), vector(values)];
        operands.extend(hint.policy());
        self.push(&opcode, operands);
    }

    /// Stores the low byte.
    pub fn st_byte<S: AddrSpace>(&mut self, address: Addr<S>, value: Reg<U32>) {
        self.push(&format!("st{}.u8", S::MODIFIER), vec![address.operand(), value.operand()]);
    }

    /// Stores one value that other threads read, with release semantics.
    pub fn st_release<T: RegType, S: AddrSpace>(&mut self, scope: Scope, address: Addr<S>, value: Reg<T>) {
        let opcode = format!("st.release.{}{}.{}", scope.as_str(), S::MODIFIER, access(T::TYPE));
        self.push(&opcode, vec![address.operand(), value.operand()]);
    }

    /// `st.async`: stores to another CTA's shared memory and completes the bytes on its mbarrier.
    pub fn st_async<T: RegType>(&mut self, address: Addr<Cluster>, value: Reg<T>, mbarrier: Addr<Cluster>) {
        let opcode = format!("st.async.shared::cluster.mbarrier::complete_tx::bytes.{}", access(T::TYPE));
        self.push(&opcode, vec![address.operand(), value.operand(), mbarrier.operand()]);
    }

    /// Atomic read-modify-write; gives the old value.
    pub fn atom<T: Atomic, S: AddrSpace>(
        &mut self,
        op: AtomOp,
        semantics: Semantics,
        scope: Scope,
        address: Addr<S>,
        value: impl Src<T>,
    ) -> Reg<T> {
        let (order, op) = (semantics.as_str(), op.modifiers(T::TYPE));
        let opcode = format!("atom.{order}.{}{}.{op}", scope.as_str(), S::MODIFIER);
        self.give(&opcode, vec![address.operand(), value.operand()])
    }

    /// Atomic compare and exchange: writes `new` if `old` is there; gives what was there.
    pub fn compare_exchange<S: AddrSpace>(
        &mut self,
        semantics: Semantics,
        scope: Scope,
        address: Addr<S>,
        old: impl Src<B32>,
        new: impl Src<B32>,
    ) -> Reg<B32> {
        let opcode = format!("atom.{}.{}{}.cas.b32", semantics.as_str(), scope.as_str(), S::MODIFIER);
        self.give(&opcode, vec![address.operand(), old.operand(), new.operand()])
    }

    /// Atomic update without result; `semantics` is relaxed or release.
    pub fn red<T: Atomic, S: AddrSpace>(
        &mut self,
        op: AtomOp,
        semantics: Semantics,
        scope: Scope,
        address: Addr<S>,
        value: impl Src<T>,
    ) {
        let (order, op) = (semantics.as_str(), op.modifiers(T::TYPE));
        let opcode = format!("red.{order}.{}{}.{op}", scope.as_str(), S::MODIFIER);
        self.push(&opcode, vec![address.operand(), value.operand()]);
    }

    /// The address in CTA `rank` of the cluster that corresponds to `address` in the own CTA. The constant part
    /// of `address` stays a constant.
    pub fn map_to_rank(&mut self, address: Addr<Shared>, rank: impl Src<U32>) -> Addr<Cluster> {
        let base = self.give("mapa.shared::cluster.u32", vec![address.base().operand(), rank.operand()]);
        Addr::new(base).at(address.offset())
    }

    /// An L2 policy for whole accesses, in a register.
    pub fn create_policy(&mut self, eviction: Eviction) -> Reg<B64> {
        let opcode = format!("createpolicy.fractional.L2::{}.b64", eviction.as_str());
        self.give(&opcode, vec![Src::<F32>::operand(1.0f32)])
    }

    /// Brings a line of global memory into L2.
    pub fn prefetch_l2(&mut self, address: Addr<Global>) {
        self.push("prefetch.global.L2", vec![address.operand()]);
    }

    /// `cp.async.cg`: copies 16 bytes of global memory to shared memory in the background.
    pub fn cp_async_16(&mut self, to: Addr<Shared>, from: Addr<Global>) {
        self.push("cp.async.cg.shared.global", vec![to.operand(), from.operand(), number(16)]);
    }

    /// As [`cp_async_16`](Self::cp_async_16), but reads only `bytes` bytes (0 to 16) and fills with zeros.
    pub fn cp_async_16_partial(&mut self, to: Addr<Shared>, from: Addr<Global>, bytes: impl Src<U32>) {
        let operands = vec![to.operand(), from.operand(), number(16), bytes.operand()];
        self.push("cp.async.cg.shared.global", operands);
    }

    /// Closes a group of `cp.async` of this thread.
    pub fn cp_async_commit(&mut self) {
        self.push("cp.async.commit_group", Vec::new());
    }

    /// Waits until at most `pending` groups of this thread are unfinished.
    pub fn cp_async_wait(&mut self, pending: u32) {
        self.push("cp.async.wait_group", vec![number(pending.into())]);
    }
}
