//! Tensor memory and the matrix instructions of sm_100a, sm_100f, sm_103a. Descriptors come from
//! [`crate::layout`].

use super::addr::{Addr, Shared, Tmem};
use super::reg::*;
use super::{Kernel, vector};
use crate::ast::Operand;
use crate::layout::OperandFormat;

/// Whether one CTA or a pair executes the instruction. A kernel uses one value throughout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CtaGroup {
    /// One CTA.
    One,
    /// The two CTAs whose ranks differ in bit 0.
    Two,
}

impl CtaGroup {
    pub(super) fn modifier(self) -> &'static str {
        match self {
            CtaGroup::One => ".cta_group::1",
            CtaGroup::Two => ".cta_group::2",
        }
    }
}

/// What happens to the buffer that holds A between matrix instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Collector {
    /// Nothing is kept.
    #[default]
    Discard,
    /// A is read and kept.
    Fill,
    /// The kept A is used and kept.
    Use,
    /// The kept A is used for the last time.
    LastUse,
}

impl Collector {
    fn modifier(self) -> &'static str {
        match self {
            Collector::Discard => "",
            Collector::Fill => ".collector::a::fill",
            Collector::Use => ".collector::a::use",
            Collector::LastUse => ".collector::a::lastuse",
        }
    }
}

/// How many elements of K share a scale, as the instruction spells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleVector {
    /// NVFP4, spelling of sm_100a and sm_103a alone (PTX 8.7).
    Nvf4Vec4,
    /// NVFP4, the spelling that sm_100f takes too (PTX 8.8).
    Nvf4Block16,
    /// MXFP4: one scale per 32 elements (PTX 8.8).
    Mxf4Block32,
}

impl ScaleVector {
    fn modifier(self) -> &'static str {
        match self {
            ScaleVector::Nvf4Vec4 => ".kind::mxf4nvf4.block_scale.scale_vec::4X",
            ScaleVector::Nvf4Block16 => ".kind::mxf4nvf4.block_scale.block16",
            ScaleVector::Mxf4Block32 => ".kind::mxf4.block_scale.block32",
        }
    }
}

/// How `ld` and `st` spread tensor memory over a warp: lanes by bits per repetition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TmemShape {
    /// Thread `t` gets lane `t`, one column per register.
    Lanes32Bits32,
    /// 16 lanes, 64 bits.
    Lanes16Bits64,
    /// 16 lanes, 128 bits: two registers per repetition.
    Lanes16Bits128,
    /// 16 lanes, 256 bits: four registers per repetition.
    Lanes16Bits256,
}

impl TmemShape {
    fn as_str(self) -> &'static str {
        match self {
            TmemShape::Lanes32Bits32 => "32x32b",
            TmemShape::Lanes16Bits64 => "16x64b",
            TmemShape::Lanes16Bits128 => "16x128b",
            TmemShape::Lanes16Bits256 => "16x256b",
        }
    }

    fn registers(self) -> usize {
        match self {
            TmemShape::Lanes32Bits32 | TmemShape::Lanes16Bits64 => 1,
            TmemShape::Lanes16Bits128 => 2,
            TmemShape::Lanes16Bits256 => 4,
        }
    }
}

/// Where A comes from.
#[derive(Debug, Clone, Copy)]
pub enum MmaA {
    /// Shared memory, by descriptor.
    Desc(Reg<B64>),
    /// Tensor memory.
    Tmem(Addr<Tmem>),
}

impl From<Reg<B64>> for MmaA {
    fn from(desc: Reg<B64>) -> MmaA {
        MmaA::Desc(desc)
    }
}

impl From<Addr<Tmem>> for MmaA {
    fn from(tmem: Addr<Tmem>) -> MmaA {
        MmaA::Tmem(tmem)
    }
}

/// What every `tcgen05.mma` needs.
#[derive(Debug, Clone, Copy)]
pub struct Mma {
    /// One CTA or a pair.
    pub group: CtaGroup,
    /// Reuse of A.
    pub collector: Collector,
    /// The accumulator.
    pub d: Addr<Tmem>,
    /// A.
    pub a: MmaA,
    /// Shared-memory descriptor of B.
    pub b: Reg<B64>,
    /// Instruction descriptor.
    pub desc: Reg<B32>,
}

impl Mma {
    fn operands(&self) -> Vec<Operand> {
        let a = match self.a {
            MmaA::Desc(desc) => desc.operand(),
            MmaA::Tmem(tmem) => tmem.operand(),
        };
        vec![self.d.operand(), a, self.b.operand(), self.desc.operand()]
    }
}

impl Kernel {
    /// Allocates `columns` (a power of two from 32 to 512) of tensor memory and writes their address to shared
    /// memory. A whole warp executes it.
    pub fn tmem_alloc(&mut self, group: CtaGroup, address: Addr<Shared>, columns: impl Src<U32>) {
        let opcode = format!("tcgen05.alloc{}.sync.aligned.shared::cta.b32", group.modifier());
        self.push(&opcode, vec![address.operand(), columns.operand()]);
    }

    /// Returns tensor memory, before the kernel ends.
    pub fn tmem_dealloc(&mut self, group: CtaGroup, tmem: Addr<Tmem>, columns: impl Src<U32>) {
        let opcode = format!("tcgen05.dealloc{}.sync.aligned.b32", group.modifier());
        self.push(&opcode, vec![tmem.base().operand(), columns.operand()]);
    }

    /// Promises not to allocate again, which lets the next CTA allocate.
    pub fn tmem_relinquish(&mut self, group: CtaGroup) {
        let opcode = format!("tcgen05.relinquish_alloc_permit{}.sync.aligned", group.modifier());
        self.push(&opcode, Vec::new());
    }

    /// Loads `repetitions` (a power of two up to 128) of `shape` from tensor memory. The registers may be read
    /// after [`tmem_wait_ld`](Self::tmem_wait_ld).
    pub fn tmem_ld(&mut self, shape: TmemShape, repetitions: usize, from: Addr<Tmem>) -> Vec<Reg<B32>> {
        let registers = self.registers(repetitions * shape.registers());
        let opcode = format!("tcgen05.ld.sync.aligned.{}.x{repetitions}.b32", shape.as_str());
        self.push(&opcode, vec![vector(&registers), from.operand()]);
        registers
    }

    /// Stores registers to tensor memory; done after [`tmem_wait_st`](Self::tmem_wait_st).
    pub fn tmem_st(&mut self, shape: TmemShape, to: Addr<Tmem>, registers: &[Reg<B32>]) {
        let repetitions = registers.len() / shape.registers();
        let opcode = format!("tcgen05.st.sync.aligned.{}.x{repetitions}.b32", shape.as_str());
        self.push(&opcode, vec![to.operand(), vector(registers)]);
    }

    /// Waits for the loads of this thread.
    pub fn tmem_wait_ld(&mut self) {
        self.push("tcgen05.wait::ld.sync.aligned", Vec::new());
    }

    /// Waits for the stores of this thread.
    pub fn tmem_wait_st(&mut self) {
        self.push("tcgen05.wait::st.sync.aligned", Vec::new());
    }

    /// Copies 512 bytes of scale factors (32 rows of 16 bytes) to four columns, repeated in all four quarters of
    /// the lanes.
    pub fn tmem_cp_scales(&mut self, group: CtaGroup, to: Addr<Tmem>, from: Reg<B64>) {
        let opcode = format!("tcgen05.cp{}.32x128b.warpx4", group.modifier());
        self.push(&opcode, vec![to.operand(), from.operand()]);
    }

    /// Copies 128 rows of 32 bytes to eight columns.
    pub fn tmem_cp_rows(&mut self, group: CtaGroup, to: Addr<Tmem>, from: Reg<B64>) {
        let opcode = format!("tcgen05.cp{}.128x256b", group.modifier());
        self.push(&opcode, vec![to.operand(), from.operand()]);
    }

    /// Moves rows of tensor memory down by one.
    pub fn tmem_shift_down(&mut self, group: CtaGroup, tmem: Addr<Tmem>) {
        self.push(&format!("tcgen05.shift{}.down", group.modifier()), vec![tmem.operand()]);
    }

    /// `D = A B + D`, or `D = A B` where `accumulate` is false. `mma.desc` is an
    /// [`InstrDesc`](crate::layout::InstrDesc) with A of this format. One thread executes it.
    pub fn tcgen05_mma(&mut self, mma: Mma, format: OperandFormat, accumulate: Reg<Pred>) {
        let (group, collector) = (mma.group.modifier(), mma.collector.modifier());
        let opcode = format!("tcgen05.mma{group}.kind::{}{collector}", format.kind());
        let mut operands = mma.operands();
        operands.push(accumulate.operand());
        self.push(&opcode, operands);
    }

    /// `D = (A sfa) (B sfb) + D`, or without `D` where `accumulate` is false: block-scaled 4-bit operands.
    /// `mma.desc` is a [`BlockScaledDesc`](crate::layout::BlockScaledDesc). One thread executes it.
    pub fn tcgen05_mma_scaled(
        &mut self,
        mma: Mma,
        scale_vector: ScaleVector,
        sfa: Addr<Tmem>,
        sfb: Addr<Tmem>,
        accumulate: Reg<Pred>,
    ) {
        let (group, collector) = (mma.group.modifier(), mma.collector.modifier());
        let opcode = format!("tcgen05.mma{group}{}{collector}", scale_vector.modifier());
        let mut operands = mma.operands();
        operands.extend([sfa.operand(), sfb.operand(), accumulate.operand()]);
        self.push(&opcode, operands);
    }

    /// Arrives once at `mbarrier` when all matrix instructions and copies this thread issued are done.
    pub fn tcgen05_commit(&mut self, group: CtaGroup, mbarrier: Addr<Shared>) {
        let opcode = format!("tcgen05.commit{}.mbarrier::arrive::one.shared::cluster.b64", group.modifier());
        self.push(&opcode, vec![mbarrier.operand()]);
    }

    /// As [`tcgen05_commit`](Self::tcgen05_commit), at the mbarrier at this offset in every CTA of `mask` (a
    /// register: ptxas takes no constant here).
    pub fn tcgen05_commit_multicast(&mut self, group: CtaGroup, mbarrier: Addr<Shared>, mask: Reg<B16>) {
        let opcode = format!(
            "tcgen05.commit{}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64",
            group.modifier()
        );
        self.push(&opcode, vec![mbarrier.operand(), mask.operand()]);
    }

    /// Orders earlier tcgen05 instructions before a following barrier.
    pub fn tcgen05_fence_before(&mut self) {
        self.push("tcgen05.fence::before_thread_sync", Vec::new());
    }

    /// Orders later tcgen05 instructions behind a preceding barrier.
    pub fn tcgen05_fence_after(&mut self) {
        self.push("tcgen05.fence::after_thread_sync", Vec::new());
    }
}
