//! `wgmma`. PTX ISA 9.7.15.

use super::mma::{shape_of, sums, types};
use super::*;
use crate::semantics::element::Element;
use crate::semantics::instr_desc::Accumulator;
use crate::semantics::smem_desc::Major;

/// Where A comes from.
#[derive(Debug, Clone)]
pub enum A {
    Descriptor(Src, Major),
    /// Four registers.
    Registers(Vec<Reg>),
}

/// A decoded `wgmma.mma_async`.
#[derive(Debug, Clone)]
pub struct Multiply {
    /// Columns of D.
    pub n: u32,
    /// Depth.
    pub k: u32,
    /// The type of D.
    pub sums: Accumulator,
    pub elements: [Element; 2],
    /// `.satfinite` of integers.
    pub saturate: bool,
    /// Accumulator registers.
    pub d: Vec<Reg>,
    pub a: A,
    pub b: Src,
    /// Which dimension of B is contiguous.
    pub b_major: Major,
    /// Whether D is added.
    pub scale_d: Src,
    /// Signs of A and B.
    pub negate: [bool; 2],
}

#[derive(Debug, Clone)]
pub enum Wgmma {
    Fence,
    Commit,
    /// `wait_group n`
    Wait(u32),
    Multiply(Box<Multiply>),
}

pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    i.ignore(&["sync", "aligned"]);
    let op = if i.has("fence") {
        Wgmma::Fence
    } else if i.has("commit_group") {
        Wgmma::Commit
    } else if i.has("wait_group") {
        Wgmma::Wait(super::copy::constant(i, 0)?)
    } else if i.has("sp") {
        return i.error("sparse matrices are not executed");
    } else {
        i.need("an operation", &[("mma_async", ())])?;
        Wgmma::Multiply(Box::new(multiply(i)?))
    };
    i.finish()?;
    Ok(Op::Wgmma(op))
}

fn sign(i: &Ins<'_>, at: usize) -> Result<bool> {
    match i.src(at, Type::S32)? {
        Src::Imm(1) => Ok(false),
        Src::Imm(n) if n == u64::from(u32::MAX) => Ok(true),
        _ => i.error("the sign of a matrix is 1 or -1"),
    }
}

fn major(i: &Ins<'_>, at: usize) -> Result<Major> {
    match i.src(at, Type::S32)? {
        Src::Imm(0) => Ok(Major::K),
        Src::Imm(1) => Ok(Major::Mn),
        _ => i.error("transposition is 0 or 1"),
    }
}

fn multiply(i: &mut Ins<'_>) -> Result<Multiply> {
    let saturate = i.has("satfinite");
    let [m, n, k] = shape_of(i)?;
    let [d, a, b] = types(i)[..] else { return i.error("needs the types of D, A and B") };
    let (sums, elements) = sums(i, [d, a, b])?;
    if m != 64 || k * elements[0].bits() != 256 || n % 8 != 0 || !(8..=256).contains(&n) {
        return i.error(format!("shape m{m}n{n}k{k}: M is 64, N a multiple of 8 up to 256, K 256 bits"));
    }
    let regs = i.regs(0)?;
    let want = (n * sums.bits() / 64) as usize;
    if regs.len() != want {
        return i.error(format!("has {} accumulator registers, needs {want}", regs.len()));
    }
    let integer = sums == Accumulator::S32;
    let in_registers = matches!(i.operand(1)?, Operand::Vector(_));
    let half = elements[0].bits() == 16;
    let negate = if integer { [false; 2] } else { [sign(i, 4)?, sign(i, 5)?] };
    let transposed = half && i.count() > 6;
    let (a, b_major) = if in_registers {
        let a = i.regs(1)?;
        if a.len() != 4 {
            return i.error("A in registers takes four");
        }
        (A::Registers(a), if transposed { major(i, 6)? } else { Major::K })
    } else {
        let (ta, tb) = if transposed { (major(i, 6)?, major(i, 7)?) } else { (Major::K, Major::K) };
        (A::Descriptor(i.src(1, Type::B64)?, ta), tb)
    };
    let registers = match &a {
        A::Registers(a) => a.as_slice(),
        A::Descriptor(..) => &[],
    };
    if regs.iter().chain(registers).any(|r| r.bits() != 32) {
        return i.error("matrix registers have 32 bits");
    }
    Ok(Multiply {
        n,
        k,
        sums,
        elements,
        saturate,
        d: regs,
        a,
        b: i.src(2, Type::B64)?,
        b_major,
        scale_d: i.src(3, Type::Pred)?,
        negate,
    })
}
