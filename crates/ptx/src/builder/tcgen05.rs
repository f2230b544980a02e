//! Tensor memory and the matrix instructions of sm_100a, sm_100f, sm_103a. Descriptors come from
//! [`crate::layout`].

use super::addr::{Addr, Shared, Tmem};
use super::reg::*;
use super::{Kernel, vector};
use crate::ast::Operand;
use crate::layout::OperandFormat;

words! {
    /// Whether one CTA or a pair executes the instruction. A kernel uses one value throughout.
    CtaGroup {
        One ".cta_group::1" "One CTA.",
        Two ".cta_group::2" "The two CTAs whose ranks differ in bit 0.",
    }

    /// What happens to the buffer that holds A between matrix instructions.
    #[derive(Default)]
    Collector {
        #[default]
        Discard "" "Nothing is kept.",
        Fill ".collector::a::fill" "A is read and kept.",
        Use ".collector::a::use" "The kept A is used and kept.",
        LastUse ".collector::a::lastuse" "The kept A is used for the last time.",
    }

    /// How many elements of K share a scale, as the instruction spells it.
    ScaleVector {
        Nvf4Vec4 ".kind::mxf4nvf4.block_scale.scale_vec::4X" "NVFP4, spelling of sm_100a and sm_103a alone (PTX 8.7).",
        Nvf4Block16 ".kind::mxf4nvf4.block_scale.block16" "NVFP4, the spelling that sm_100f takes too (PTX 8.8).",
        Mxf4Block32 ".kind::mxf4.block_scale.block32" "MXFP4: one scale per 32 elements (PTX 8.8).",
    }

    /// How `ld` and `st` spread tensor memory over a warp: lanes by bits per repetition.
    TmemShape {
        Lanes32Bits32 "32x32b" "Thread `t` gets lane `t`, one column per register.",
        Lanes16Bits64 "16x64b" "16 lanes, 64 bits.",
        Lanes16Bits128 "16x128b" "16 lanes, 128 bits: two registers per repetition.",
        Lanes16Bits256 "16x256b" "16 lanes, 256 bits: four registers per repetition.",
    }
}

impl TmemShape {
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

instructions! {
    /// Allocates `columns` (a power of two from 32 to 512) of tensor memory and writes their address to shared
    /// memory. A whole warp executes it.
    tmem_alloc(group: CtaGroup, address: Addr<Shared>, columns: impl Src<U32>)
        = format!("tcgen05.alloc{}.sync.aligned.shared::cta.b32", group.as_str()),
        [address.operand(), columns.operand()];
    /// Returns tensor memory, before the kernel ends.
    tmem_dealloc(group: CtaGroup, tmem: Addr<Tmem>, columns: impl Src<U32>)
        = format!("tcgen05.dealloc{}.sync.aligned.b32", group.as_str()),
        [tmem.base().operand(), columns.operand()];
    /// Promises not to allocate again, which lets the next CTA allocate.
    tmem_relinquish(group: CtaGroup)
        = format!("tcgen05.relinquish_alloc_permit{}.sync.aligned", group.as_str()), [];
    /// Stores registers to tensor memory; done after [`tmem_wait_st`](Self::tmem_wait_st).
    tmem_st(shape: TmemShape, to: Addr<Tmem>, registers: &[Reg<B32>])
        = format!("tcgen05.st.sync.aligned.{}.x{}.b32", shape.as_str(), registers.len() / shape.registers()),
        [to.operand(), vector(registers)];
    /// Waits for the loads of this thread.
    tmem_wait_ld() = "tcgen05.wait::ld.sync.aligned";
    /// Waits for the stores of this thread.
    tmem_wait_st() = "tcgen05.wait::st.sync.aligned";
    /// Copies 512 bytes of scale factors (32 rows of 16 bytes) to four columns, repeated in all four quarters of
    /// the lanes.
    tmem_cp_scales(group: CtaGroup, to: Addr<Tmem>, from: Reg<B64>)
        = format!("tcgen05.cp{}.32x128b.warpx4", group.as_str()), [to.operand(), from.operand()];

    /// Arrives once at `mbarrier` when all matrix instructions and copies this thread issued are done.
    tcgen05_commit(group: CtaGroup, mbarrier: Addr<Shared>)
        = format!("tcgen05.commit{}.mbarrier::arrive::one.shared::cluster.b64", group.as_str()),
        [mbarrier.operand()];
    /// As [`tcgen05_commit`](Self::tcgen05_commit), at the mbarrier at this offset in every CTA of `mask` (a
    /// register: ptxas takes no constant here).
    tcgen05_commit_multicast(group: CtaGroup, mbarrier: Addr<Shared>, mask: Reg<B16>)
        = format!(
            "tcgen05.commit{}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64",
            group.as_str()
        ),
        [mbarrier.operand(), mask.operand()];
}

impl Kernel {
    /// Loads `repetitions` (a power of two up to 128) of `shape` from tensor memory. The registers may be read
    /// after [`tmem_wait_ld`](Self::tmem_wait_ld).
    pub fn tmem_ld(&mut self, shape: TmemShape, repetitions: usize, from: Addr<Tmem>) -> Vec<Reg<B32>> {
        let registers = self.registers(repetitions * shape.registers());
        let opcode = format!("tcgen05.ld.sync.aligned.{}.x{repetitions}.b32", shape.as_str());
        self.push(&opcode, vec![vector(&registers), from.operand()]);
        registers
    }

    /// `D = A B + D`, or `D = A B` where `accumulate` is false. `mma.desc` is an
    /// [`InstrDesc`](crate::layout::InstrDesc) with A of this format. One thread executes it.
    pub fn tcgen05_mma(&mut self, mma: Mma, format: OperandFormat, accumulate: Reg<Pred>) {
        let (group, collector) = (mma.group.as_str(), mma.collector.as_str());
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
        let (group, collector) = (mma.group.as_str(), mma.collector.as_str());
        let opcode = format!("tcgen05.mma{group}{}{collector}", scale_vector.as_str());
        let mut operands = mma.operands();
        operands.extend([sfa.operand(), sfb.operand(), accumulate.operand()]);
        self.push(&opcode, operands);
    }
}
