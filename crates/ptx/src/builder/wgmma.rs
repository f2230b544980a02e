//! Warpgroup matrix instructions of sm_90a. Descriptors come from [`crate::layout::SmemTile`].

use super::mma::HalfFormat;
use super::reg::*;
use super::{Kernel, number, vector};
use crate::ast::Operand;

/// Format of both operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WgmmaFormat {
    /// 16-bit operands, 16 of K.
    Half(HalfFormat),
    /// e4m3 operands, 32 of K.
    E4m3,
}

/// Where A comes from.
#[derive(Debug, Clone, Copy)]
pub enum WgmmaA {
    /// Shared memory, by descriptor.
    Desc(Reg<B64>),
    /// Registers.
    Regs([Reg<B32>; 4]),
}

instructions! {
    /// Orders earlier accesses to accumulator and A registers before the following `wgmma`s.
    wgmma_fence() = "wgmma.fence.sync.aligned";
    /// Closes a group of `wgmma`s.
    wgmma_commit() = "wgmma.commit_group.sync.aligned";
    /// Waits until at most `pending` groups are unfinished.
    wgmma_wait(pending: u32) = "wgmma.wait_group.sync.aligned", [number(pending.into())];
}

impl Kernel {
    /// `acc = A B + acc` with 64 rows of A and `2 * acc.len()` rows of B, both K-major, or `acc = A B` if
    /// `accumulate` is false. Register `4 j + 2 h + e` of the accumulator holds row
    /// `16 (warp % 4) + lane / 4 + 8 h`, column `8 j + 2 (lane % 4) + e`.
    pub fn wgmma(
        &mut self,
        format: WgmmaFormat,
        acc: &[Reg<F32>],
        a: WgmmaA,
        b: Reg<B64>,
        accumulate: impl Into<WgmmaAccumulate>,
    ) {
        let n = acc.len() * 2;
        let (k, name) = match format {
            WgmmaFormat::Half(half) => (16, half.as_str()),
            WgmmaFormat::E4m3 => (32, "e4m3"),
        };
        let opcode = format!("wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{name}.{name}");
        let (a, in_shared) = match a {
            WgmmaA::Desc(desc) => (desc.operand(), 2),
            WgmmaA::Regs(regs) => (vector(&regs), 1),
        };
        // Neither operand is negated.
        let mut operands = vec![vector(acc), a, b.operand(), accumulate.into().0, number(1), number(1)];
        // 16-bit operands in shared memory may be transposed; these are not.
        if matches!(format, WgmmaFormat::Half(_)) {
            operands.extend((0..in_shared).map(|_| number(0)));
        }
        self.push(&opcode, operands);
    }
}

/// Whether a `wgmma` adds to its accumulator: a constant or a predicate.
#[derive(Debug, Clone)]
pub struct WgmmaAccumulate(Operand);

impl From<bool> for WgmmaAccumulate {
    fn from(yes: bool) -> WgmmaAccumulate {
        WgmmaAccumulate(number(yes.into()))
    }
}

impl From<Reg<Pred>> for WgmmaAccumulate {
    fn from(predicate: Reg<Pred>) -> WgmmaAccumulate {
        WgmmaAccumulate(predicate.operand())
    }
}
