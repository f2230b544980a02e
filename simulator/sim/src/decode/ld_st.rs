//! Loads and stores. PTX ISA 9.7.9.8 (`ld`) to 9.7.9.12 (`st`), 9.7.14.5.15 (`ldmatrix`) and its kin.

use super::*;
use crate::semantics::fragment::MatrixShape;
use crate::semantics::narrow::Narrow;

/// A decoded load or store.
#[derive(Debug, Clone)]
pub enum Memory {
    /// `ld`: one element per result, extended to the register as its type says.
    Load(Addr, Type, Vec<Dst>, Ordering),
    Store(Addr, Type, Vec<Src>, Ordering),
}

/// A decoded warp-wide matrix move.
#[derive(Debug, Clone)]
pub enum Matrix {
    Load(Addr, Vec<Dst>, MatrixShape),
    Store(Addr, Vec<Src>, MatrixShape),
    /// `movmatrix.trans`, of 8 x 8 16-bit elements.
    Transpose(Dst, Src),
}

fn vector(i: &mut Ins<'_>) -> usize {
    i.one_of(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1)
}

fn common(i: &mut Ins<'_>) -> Result<(Space, Type, usize, Ordering)> {
    let ordering = i.ordering();
    i.cache_hints();
    let space = i.space();
    let n = vector(i);
    let ty = i.ty()?;
    i.finish()?;
    if u64::from(ty.bytes()) * n as u64 > 32 {
        return i.error("an access has at most 32 bytes");
    }
    Ok((space, ty, n, ordering))
}

/// `ld`
pub fn load(i: &mut Ins<'_>) -> Result<Op> {
    let (space, ty, n, ordering) = common(i)?;
    let d = i.dsts(0)?;
    if d.len() != n {
        return i.error(format!("has {} results, needs {n}", d.len()));
    }
    Ok(Op::Memory(Memory::Load(i.addr(1, space)?, ty, d, ordering)))
}

/// `st`
pub fn store(i: &mut Ins<'_>) -> Result<Op> {
    let (space, ty, n, ordering) = common(i)?;
    let s = i.srcs(1, ty)?;
    if s.len() != n {
        return i.error(format!("has {} values, needs {n}", s.len()));
    }
    Ok(Op::Memory(Memory::Store(i.addr(0, space)?, ty, s, ordering)))
}

/// `ldmatrix`, `stmatrix`, `movmatrix`
pub fn matrix(i: &mut Ins<'_>) -> Result<Op> {
    i.ignore(&["sync", "aligned", "b16", "b8", "b8x16"]);
    let trans = i.has("trans");
    let load = i.ast.root == "ldmatrix";
    let shape = i.need("a shape", &[("m8n8", 0), ("m16n16", 1), ("m16n8", 2), ("m8n16", 3)])?;
    let narrow = i.one_of(&[("b4x16_p64", Narrow::B4), ("b6x16_p32", Narrow::B6)]);
    let shape = match (shape, trans, narrow) {
        (0, _, None) => MatrixShape::M8n8(trans),
        (1, true, None) if load => MatrixShape::M16n16,
        (2, true, None) if !load => MatrixShape::M16n8,
        (3, false, Some(narrow)) if load => MatrixShape::M8n16(narrow),
        _ => return i.error("this shape, transposition and format do not go together here"),
    };
    let n = i.one_of(&[("x1", 1), ("x2", 2), ("x4", 4)]).unwrap_or(1);
    let space = match i.space() {
        Space::Generic => Space::Generic,
        _ => Space::SharedCta,
    };
    i.finish()?;
    let op = match i.ast.root.as_str() {
        "movmatrix" => Matrix::Transpose(i.dst(0)?, i.src(1, Type::B32)?),
        "ldmatrix" => Matrix::Load(i.addr(1, space)?, i.dsts(0)?, shape),
        _ => Matrix::Store(i.addr(0, space)?, i.srcs(1, Type::B32)?, shape),
    };
    let (found, narrow) = match &op {
        Matrix::Load(_, d, _) => (d.len(), d.iter().all(|d| matches!(d, Dst::Reg(Reg::R32(_)) | Dst::Sink))),
        Matrix::Store(_, s, _) => (s.len(), true),
        Matrix::Transpose(..) => (n * shape.registers(), true),
    };
    let want = n * shape.registers();
    if found != want || !narrow {
        return i.error(format!("needs {want} registers of 32 bits"));
    }
    Ok(Op::Matrix(op))
}
