//! `tcgen05`. PTX ISA 9.7.16.

use super::*;
use crate::semantics::instr_desc::Kind;
use crate::semantics::narrow::Narrow;
use crate::semantics::tcgen05::{AccessShape, CopyShape};

/// Where A of a product comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum A {
    Descriptor(Src),
    Tmem(Addr),
}

/// A decoded `tcgen05.mma`.
#[derive(Debug, Clone)]
pub struct Multiply {
    /// `.cta_group::N`
    pub group: u32,
    pub kind: Kind,
    /// Accumulator address.
    pub d: Addr,
    pub a: A,
    pub b: Src,
    pub idesc: Src,
    /// Addresses of the scales of A and B, and scales in a row of 32 bits (`scale_vec::NX`).
    pub scales: Option<(Addr, Addr, u32)>,
    /// Whether D is added.
    pub accumulate: Src,
    /// Lanes whose results are dropped.
    pub disabled: Vec<Src>,
    /// D is scaled by 2^-this first.
    pub scale_d: u32,
}

/// A decoded load from or store to tensor memory.
#[derive(Debug, Clone)]
pub struct Access {
    pub shape: AccessShape,
    pub regs: Vec<Reg>,
    pub address: Addr,
    /// Two 16-bit values to a register.
    pub packed: bool,
}

#[derive(Debug, Clone)]
pub enum Tcgen05 {
    /// `alloc`: where the address goes, how many columns.
    Alloc(u32, Addr, Src),
    Dealloc(u32, Src, Src),
    Relinquish(u32),
    Load(Access),
    Store(Access),
    WaitLoad,
    WaitStore,
    /// `cp`: shared memory to tensor memory, with the source format of elements that are widened to bytes.
    Copy(u32, CopyShape, Option<Narrow>, Addr, Src),
    /// `shift`: rows of tensor memory move down by one.
    Shift(u32, Addr),
    Multiply(Box<Multiply>),
    /// `commit`: barrier, CTAs.
    Commit(u32, Addr, Option<Src>),
    FenceBefore,
    FenceAfter,
}

fn tmem(i: &Ins<'_>, at: usize) -> Result<Addr> {
    // Tensor-memory addresses are plain 32-bit numbers; no space of the machine holds them.
    i.addr(at, Space::Param)
}

fn group(i: &mut Ins<'_>) -> Result<u32> {
    i.need("a CTA group", &[("cta_group::1", 1), ("cta_group::2", 2)])
}

pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    i.ignore(&["sync", "aligned"]);
    let op = match i.ast.modifiers.first().map_or("", |m| m.as_str()) {
        "alloc" => {
            i.ignore(&["alloc", "b32", "shared::cta"]);
            let space = if i.ast.has("shared::cta") { Space::SharedCta } else { Space::Generic };
            Tcgen05::Alloc(group(i)?, i.addr(0, space)?, i.src(1, Type::U32)?)
        }
        "dealloc" => {
            i.ignore(&["dealloc", "b32"]);
            Tcgen05::Dealloc(group(i)?, i.src(0, Type::U32)?, i.src(1, Type::U32)?)
        }
        "relinquish_alloc_permit" => {
            i.ignore(&["relinquish_alloc_permit"]);
            Tcgen05::Relinquish(group(i)?)
        }
        "ld" => {
            i.ignore(&["ld"]);
            Tcgen05::Load(access(i, 0, 1, "pack::16b")?)
        }
        "st" => {
            i.ignore(&["st"]);
            let regs = i.count() - 1;
            Tcgen05::Store(access(i, regs, 0, "unpack::16b")?)
        }
        "wait::ld" => {
            i.ignore(&["wait::ld"]);
            Tcgen05::WaitLoad
        }
        "wait::st" => {
            i.ignore(&["wait::st"]);
            Tcgen05::WaitStore
        }
        "cp" => copy(i)?,
        "shift" => {
            i.ignore(&["shift", "down"]);
            Tcgen05::Shift(group(i)?, tmem(i, 0)?)
        }
        "mma" => Tcgen05::Multiply(Box::new(multiply(i)?)),
        "commit" => {
            i.ignore(&["commit", "mbarrier::arrive::one", "b64"]);
            let multicast = i.has("multicast::cluster");
            let space = match i.space() {
                Space::Generic => Space::Generic,
                _ => Space::SharedCluster,
            };
            let mask = if multicast { Some(i.src(1, Type::B16)?) } else { None };
            Tcgen05::Commit(group(i)?, i.addr(0, space)?, mask)
        }
        "fence::before_thread_sync" => {
            i.ignore(&["fence::before_thread_sync"]);
            Tcgen05::FenceBefore
        }
        "fence::after_thread_sync" => {
            i.ignore(&["fence::after_thread_sync"]);
            Tcgen05::FenceAfter
        }
        _ => return i.error("this tcgen05 operation is not executed"),
    };
    i.finish()?;
    Ok(Op::Tcgen05(op))
}

fn copy(i: &mut Ins<'_>) -> Result<Tcgen05> {
    i.ignore(&["cp"]);
    let warps = i.one_of(&[("warpx2::02_13", 0), ("warpx2::01_23", 1), ("warpx4", 2)]);
    let shape = i.need(
        "a shape",
        &[("128x256b", 0), ("4x256b", 1), ("128x128b", 2), ("64x128b", 3), ("32x128b", 4)],
    )?;
    let shape = match (shape, warps) {
        (0, None) => CopyShape::S128x256b,
        (1, None) => CopyShape::S4x256b,
        (2, None) => CopyShape::S128x128b,
        (3, Some(0)) => CopyShape::S64x128bWarps02And13,
        (3, Some(1)) => CopyShape::S64x128bWarps01And23,
        (4, Some(2)) => CopyShape::S32x128bWarpx4,
        _ => return i.error("this shape and warp multicast do not go together"),
    };
    let narrow = i.one_of(&[("b4x16_p64", Narrow::B4), ("b6x16_p32", Narrow::B6)]);
    if narrow.is_some() != i.has("b8x16") {
        return i.error("a source format and .b8x16 go together");
    }
    Ok(Tcgen05::Copy(group(i)?, shape, narrow, tmem(i, 0)?, i.src(1, Type::B64)?))
}

fn access(i: &mut Ins<'_>, regs: usize, address: usize, pack: &str) -> Result<Access> {
    i.ignore(&["b32"]);
    let packed = i.has(pack);
    let counts = i.parse_all(|m| m.strip_prefix('x').and_then(|n| n.parse::<u32>().ok()));
    let [n] = counts[..] else { return i.error("needs a repetition such as .x8") };
    let shape = i.need(
        "a shape",
        &[
            ("32x32b", AccessShape::S32x32b),
            ("16x64b", AccessShape::S16x64b),
            ("16x128b", AccessShape::S16x128b),
            ("16x256b", AccessShape::S16x256b),
            ("16x32bx2", AccessShape::S16x32bx2 { split: 0 }),
        ],
    )?;
    let shape = match shape {
        AccessShape::S16x32bx2 { .. } => {
            // The distance of the second half stands after the address.
            AccessShape::S16x32bx2 { split: super::copy::constant(i, address + 1)? }
        }
        other => other,
    };
    let list = i.regs(regs)?;
    let want = shape.registers(n) as usize;
    if list.len() != want || list.iter().any(|r| r.bits() != 32) {
        return i.error(format!("has {} registers, needs {want} of 32 bits", list.len()));
    }
    Ok(Access { shape, regs: list, address: tmem(i, address)?, packed })
}

fn multiply(i: &mut Ins<'_>) -> Result<Multiply> {
    i.ignore(&["mma"]);
    let group = group(i)?;
    let kind = i.need("a kind", Kind::NAMES)?;
    let scaled = i.has("block_scale");
    // Whether a buffer keeps A changes no value.
    i.ignore_if(|m| m.starts_with("collector::"));
    let vec = i.one_of(&[
        ("scale_vec::1X", 1),
        ("scale_vec::2X", 2),
        ("scale_vec::4X", 4),
        ("block32", if kind == Kind::Mxf8f6f4 { 1 } else { 2 }),
        ("block16", 4),
    ]);
    if scaled != kind.block_scaled() {
        return i.error("the kind and .block_scale do not go together");
    }
    let a = match i.operand(1)? {
        Operand::Address(_) => A::Tmem(tmem(i, 1)?),
        _ => A::Descriptor(i.src(1, Type::B64)?),
    };
    let mut op = Multiply {
        group,
        kind,
        d: tmem(i, 0)?,
        a,
        b: i.src(2, Type::B64)?,
        idesc: i.src(3, Type::B32)?,
        scales: None,
        accumulate: Src::Imm(1),
        disabled: Vec::new(),
        scale_d: 0,
    };
    let mut at = 4;
    if scaled {
        let default = if kind == Kind::Mxf8f6f4 { 1 } else { 2 };
        op.scales = Some((tmem(i, 4)?, tmem(i, 5)?, vec.unwrap_or(default)));
        at = 6;
    } else if matches!(i.operand(4)?, Operand::Vector(_)) {
        op.disabled = i.srcs(4, Type::B32)?;
        at = 5;
    }
    op.accumulate = i.src(at, Type::Pred)?;
    if i.count() > at + 1 {
        op.scale_d = super::copy::constant(i, at + 1)?;
    }
    Ok(op)
}
