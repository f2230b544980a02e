//! Warp-level matrix instructions. Fragment layouts: PTX ISA "Matrix Fragments for mma".

use super::addr::{Addr, Shared};
use super::reg::*;
use super::{Kernel, number, vector};
use crate::ast::Operand;

words! {
    /// Format of 16-bit operands.
    HalfFormat {
        F16 "f16" "Binary16.",
        Bf16 "bf16" "bfloat16.",
    }
}

/// Where the block scales of one operand come from.
#[derive(Debug, Clone, Copy)]
pub struct ScaleSelect {
    /// The register with four scales per lane.
    pub register: Reg<B32>,
    /// Which byte the scales start at; 0 when a row has four, 0 or 2 when it has two.
    pub byte: u16,
    /// Which lanes of each quad supply them: 0 or 1 for A, 0 to 3 for B.
    pub thread: u16,
}

impl ScaleSelect {
    fn operands(self) -> [Operand; 2] {
        let selectors = vec![number(self.byte.into()), number(self.thread.into())];
        [self.register.operand(), Operand::Vector(selectors)]
    }
}

impl Kernel {
    /// `ldmatrix`: loads `N` (1, 2 or 4) 8 x 8 matrices of 16 bits; lane `8 m + i` gives the address of row `i` of
    /// matrix `m`. Lane `t` gets elements `2 (t % 4)` and the next of row `t / 4`, or of that column if
    /// `transposed`.
    pub fn ldmatrix<const N: usize>(&mut self, transposed: bool, row: Addr<Shared>) -> [Reg<B32>; N] {
        let fragments = std::array::from_fn(|_| self.register());
        let trans = if transposed { ".trans" } else { "" };
        let opcode = format!("ldmatrix.sync.aligned.m8n8.x{N}{trans}.shared.b16");
        self.push(&opcode, vec![vector(&fragments), row.operand()]);
        fragments
    }

    /// `stmatrix`: the inverse of [`ldmatrix`](Self::ldmatrix), for 1, 2 or 4 matrices.
    pub fn stmatrix<T: RegType<Class = ClassB32>>(
        &mut self,
        transposed: bool,
        row: Addr<Shared>,
        fragments: &[Reg<T>],
    ) {
        let trans = if transposed { ".trans" } else { "" };
        let opcode = format!("stmatrix.sync.aligned.m8n8.x{}{trans}.shared.b16", fragments.len());
        self.push(&opcode, vec![row.operand(), vector(fragments)]);
    }

    /// `acc += A B` of 16 x 8 x 16, 16-bit operands.
    pub fn mma_half(
        &mut self,
        format: HalfFormat,
        acc: &[Reg<F32>; 4],
        a: &[Reg<B32>; 4],
        b: &[Reg<B32>; 2],
    ) {
        let f = format.as_str();
        let opcode = format!("mma.sync.aligned.m16n8k16.row.col.f32.{f}.{f}.f32");
        self.push(&opcode, vec![vector(acc), vector(a), vector(b), vector(acc)]);
    }

    /// `acc += (A sfa) (B sfb)` of 16 x 8 x 64, NVFP4 operands: e2m1 with a ue4m3 scale per 16 elements.
    pub fn mma_nvfp4(
        &mut self,
        acc: &[Reg<F32>; 4],
        a: &[Reg<B32>; 4],
        b: &[Reg<B32>; 2],
        sfa: ScaleSelect,
        sfb: ScaleSelect,
    ) {
        let kind = "kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3";
        self.mma_scaled(kind, acc, (a, sfa), (b, sfb));
    }

    /// As [`mma_nvfp4`](Self::mma_nvfp4), MXFP4 operands: a ue8m0 scale per 32 elements, two bytes of a scale word.
    pub fn mma_mxfp4(
        &mut self,
        acc: &[Reg<F32>; 4],
        a: &[Reg<B32>; 4],
        b: &[Reg<B32>; 2],
        sfa: ScaleSelect,
        sfb: ScaleSelect,
    ) {
        let kind = "kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0";
        self.mma_scaled(kind, acc, (a, sfa), (b, sfb));
    }

    fn mma_scaled(
        &mut self,
        kind: &str,
        acc: &[Reg<F32>; 4],
        (a, sfa): (&[Reg<B32>; 4], ScaleSelect),
        (b, sfb): (&[Reg<B32>; 2], ScaleSelect),
    ) {
        let mut operands = vec![vector(acc), vector(a), vector(b), vector(acc)];
        operands.extend(sfa.operands());
        operands.extend(sfb.operands());
        self.push(&format!("mma.sync.aligned.m16n8k64.row.col.{kind}"), operands);
    }
}
