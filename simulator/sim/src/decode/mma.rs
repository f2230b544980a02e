//! `mma.sync`. PTX ISA 9.7.14.

use super::*;
use crate::semantics::element::{Element, Scale};
use crate::semantics::instr_desc::Accumulator;

/// Block scales of A or of B.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaleOperand {
    /// Register of scales.
    pub data: Src,
    /// Byte selector.
    pub byte: Src,
    /// Lane selector.
    pub thread: Src,
}

/// A decoded `mma.sync`.
#[derive(Debug, Clone)]
pub struct Mma {
    /// M, N, K.
    pub shape: [u32; 3],
    /// The type of C and D; `None`: f64.
    pub sums: Option<Accumulator>,
    /// `.satfinite` of integers.
    pub saturate: bool,
    pub elements: [Element; 2],
    /// Bits an element takes in a register.
    pub container: u32,
    pub d: Vec<Reg>,
    pub a: Vec<Reg>,
    pub b: Vec<Reg>,
    pub c: Vec<Src>,
    /// Scales: type, `scale_vec::NX`, of A and of B.
    pub scale: Option<(Scale, u32, [ScaleOperand; 2])>,
}

/// A tensor-core element type by its PTX name.
pub fn element(name: &str) -> Option<Element> {
    Element::NAMES.iter().find(|(text, _)| *text == name).map(|(_, element)| *element)
}

/// The types among the modifiers of a product, in order; they count as understood.
pub(super) fn types<'a>(i: &mut Ins<'a>) -> Vec<&'a str> {
    let known = |m: &str| element(m).is_some() || matches!(m, "f32" | "f64" | "s32");
    i.ignore_if(known);
    i.ast.modifiers.iter().map(|m| m.as_str()).filter(|m| known(m)).collect()
}

/// How products of these types of D, A and B are summed.
pub(super) fn sums(i: &Ins<'_>, [d, a, b]: [&str; 3]) -> Result<(Accumulator, [Element; 2])> {
    let sums = match d {
        "f32" => Some(Accumulator::F32),
        "f16" => Some(Accumulator::F16),
        "s32" => Some(Accumulator::S32),
        _ => None,
    };
    match (sums, element(a), element(b)) {
        (Some(sums), Some(a), Some(b)) => Ok((sums, [a, b])),
        _ => i.error(format!("no product of .{a} and .{b} into .{d}")),
    }
}

fn shape(name: &str) -> Option<[u32; 3]> {
    let (m, rest) = name.strip_prefix('m')?.split_once('n')?;
    let (n, k) = rest.split_once('k')?;
    Some([m.parse().ok()?, n.parse().ok()?, k.parse().ok()?])
}

/// The shape among the modifiers, e.g. `m16n8k16`.
pub fn shape_of(i: &mut Ins<'_>) -> Result<[u32; 3]> {
    match i.parse_all(shape)[..] {
        [s] => Ok(s),
        _ => i.error("needs a shape such as .m16n8k16"),
    }
}

/// Decodes an `mma.sync`.
pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    i.ignore(&["sync", "aligned", "row", "col"]);
    if i.ast.modifiers.iter().filter(|m| *m == "row" || *m == "col").map(|m| m.as_str()).collect::<Vec<_>>()
        != ["row", "col"]
    {
        return i.error("only A by rows and B by columns (.row.col) is executed");
    }
    let saturate = i.has("satfinite");
    let shape = shape_of(i)?;
    let block = i.has("block_scale");
    let vec = i.one_of(&[("scale_vec::1X", 1), ("scale_vec::2X", 2), ("scale_vec::4X", 4)]);
    let kind =
        i.one_of(&[("kind::f8f6f4", 1), ("kind::mxf8f6f4", 1), ("kind::mxf4", 2), ("kind::mxf4nvf4", 2)]);
    let scale = i.one_of(Scale::NAMES);
    let types = types(i);
    i.finish()?;
    let [d, a, b, c] = types[..] else { return i.error("needs the types of D, A, B and C") };
    if d != c {
        return i.error("D and C have the same type");
    }
    let (sums, elements) = match d {
        "f64" => (None, [Element::F16; 2]),
        _ => sums(i, [d, a, b]).map(|(sums, elements)| (Some(sums), elements))?,
    };
    // kind::f8f6f4 holds every element in a byte.
    let container = match (kind, sums) {
        (Some(1), _) => 8,
        (_, None) => 64,
        _ => elements[0].bits(),
    };
    let (rd, ra, rb) = (i.regs(0)?, i.regs(1)?, i.regs(2)?);
    let rc = i.srcs(3, if sums.is_none() { Type::F64 } else { Type::F32 })?;
    let [m, n, k] = shape;
    let wide = if sums.is_none() { 64 } else { 32 };
    let per = |count: u32, bits: u32| (count / 32 * bits / wide).max(1) as usize;
    let d_bits = sums.map_or(64, Accumulator::bits);
    let want = [per(m * n, d_bits), per(m * k, container), per(n * k, container), per(m * n, d_bits)];
    let found = [rd.len(), ra.len(), rb.len(), rc.len()];
    if n != 8 || !matches!(m, 8 | 16) || want != found {
        return i.error(format!("registers of D, A, B, C are {found:?}, the shape needs {want:?}"));
    }
    let wrong = |r: &Reg| r.bits() != wide;
    if rd.iter().chain(&ra).chain(&rb).any(wrong) {
        return i.error(format!("operands are registers of {wide} bits"));
    }
    let scale = match (block, scale) {
        (true, Some(ty)) => {
            let operand = |i: &Ins<'_>, at: usize| -> Result<ScaleOperand> {
                let Operand::Vector(ids) = i.operand(at + 1)? else { return i.error("needs {byte, thread}") };
                let [byte, thread] = &ids[..] else { return i.error("needs {byte, thread}") };
                Ok(ScaleOperand {
                    data: i.src(at, Type::B32)?,
                    byte: i.value(byte, Type::U16)?,
                    thread: i.value(thread, Type::U16)?,
                })
            };
            Some((ty, vec.unwrap_or(1), [operand(i, 4)?, operand(i, 6)?]))
        }
        (false, None) => None,
        _ => return i.error("block_scale and a scale type go together"),
    };
    Ok(Op::Mma(Mma { shape, sums, saturate, elements, container, d: rd, a: ra, b: rb, c: rc, scale }))
}
