//! `mma.sync`, and `wmma.mma`: gathers the fragments, multiplies as `semantics::dot` says, scatters the result. PTX ISA
//! 9.7.14.

use super::*;
use crate::report::Width;
use crate::semantics::dot::{BlockScales, Family, Product, Shape, multiply_f64};
use crate::semantics::element::{Element, Scale};
use crate::semantics::fragment::{
    check_thread_ids, fragment_a, fragment_b, fragment_c, scale_a_lane, scale_b_lane, scale_byte,
};
use crate::semantics::instr_desc::Accumulator;
use std::ops::{BitOr, Shl};

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

/// A decoded product of a warp.
#[derive(Debug, Clone)]
pub struct Mma {
    /// M, N, K.
    pub shape: [u32; 3],
    /// The types of C and D; `None`: f64.
    pub sums: Option<[Accumulator; 2]>,
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

/// What sums of this type are; `None`: f64.
pub(super) fn accumulator(ty: &str) -> Option<Accumulator> {
    match ty {
        "f32" => Some(Accumulator::F32),
        "f16" => Some(Accumulator::F16),
        "s32" => Some(Accumulator::S32),
        _ => None,
    }
}

/// How products of these types of D, A and B are summed.
pub(super) fn sums(i: &Ins<'_>, [d, a, b]: [&str; 3]) -> Decoded<(Accumulator, [Element; 2])> {
    match (accumulator(d), element(a), element(b)) {
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
pub fn shape_of(i: &mut Ins<'_>) -> Decoded<[u32; 3]> {
    match i.parse_all(shape)[..] {
        [s] => Ok(s),
        _ => i.error("needs a shape such as .m16n8k16"),
    }
}

/// Decodes an `mma.sync`.
pub fn decode(i: &mut Ins<'_>) -> Decoded {
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
    let [d, a, b, c] = types[..] else { return i.error("needs the types of D, A, B and C") };
    if d != c {
        return i.error("D and C have the same type");
    }
    let (sums, elements) = match d {
        "f64" => (None, [Element::F16; 2]),
        _ => sums(i, [d, a, b]).map(|(sums, elements)| (Some([sums; 2]), elements))?,
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
    let d_bits = sums.map_or(64, |[sum, _]| sum.bits());
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
            let operand = |i: &Ins<'_>, at: usize| -> Decoded<ScaleOperand> {
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
    let op = Mma { shape, sums, saturate, elements, container, d: rd, a: ra, b: rb, c: rc, scale };
    Ok(op.op())
}

/// The rate an element type runs at.
pub fn width(element: Element) -> Width {
    match element.bits() {
        16 | 32 => Width::Bits16,
        4 => Width::Bits4,
        _ => Width::Bits8,
    }
}

/// A decoder of elements: a table for the narrow types, which is exact and quick.
pub struct Decoder {
    element: Element,
    table: Vec<f32>,
}

impl Decoder {
    pub fn new(element: Element) -> Decoder {
        let n = if element.bits() <= 8 { 1 << element.bits() } else { 0 };
        Decoder { element, table: (0..n).map(|c| element.decode(c)).collect() }
    }

    #[inline]
    pub fn get(&self, code: u32) -> f32 {
        if self.table.is_empty() {
            self.element.decode(code)
        } else {
            self.table[code as usize & (self.table.len() - 1)]
        }
    }
}

/// The elements of `bits` bits of a fragment's registers, of 32 bits if an element fits: element `i` of lane `l` goes
/// where `place` says.
#[inline]
pub(super) fn spread<W: Copy + Into<u64>, T: Copy + Default>(
    rows: &[[W; 32]],
    bits: u32,
    len: usize,
    place: impl Fn(u32, u32) -> usize,
    value: impl Fn(u64) -> T,
) -> Vec<T> {
    let (per, mask) = ((32 / bits).max(1), u64::MAX >> (64 - bits));
    let mut out = vec![T::default(); len];
    let mut put = |r: usize, l: usize, e: u32, word: W| {
        out[place(l as u32, r as u32 * per + e)] = value(word.into() >> (e * bits) & mask);
    };
    for (r, row) in rows.iter().enumerate() {
        // Mostly a register is an element: a loop of its own, without shifts.
        match per {
            1 => row.iter().enumerate().for_each(|(l, word)| put(r, l, 0, *word)),
            _ => row.iter().enumerate().for_each(|(l, word)| (0..per).for_each(|e| put(r, l, e, *word))),
        }
    }
    out
}

/// The registers of a fragment, made of words of at least 32 bits: the reverse of [`spread`].
#[inline]
pub(super) fn collect<T: Copy, W: Copy + Default + BitOr<Output = W> + Shl<u32, Output = W>>(
    values: &[T],
    bits: u32,
    registers: usize,
    place: impl Fn(u32, u32) -> usize,
    code: impl Fn(T) -> W,
) -> Vec<[W; 32]> {
    let per = (32 / bits).max(1);
    let mut out = vec![[W::default(); 32]; registers];
    let get = |r: usize, l: usize, e: u32| code(values[place(l as u32, r as u32 * per + e)]);
    for (r, row) in out.iter_mut().enumerate() {
        match per {
            1 => row.iter_mut().enumerate().for_each(|(l, word)| *word = get(r, l, 0)),
            _ => row.iter_mut().enumerate().for_each(|(l, word)| {
                (0..per).for_each(|e| *word = *word | get(r, l, e) << (e * bits));
            }),
        }
    }
    out
}

/// As [`spread`], for operands of floating-point or narrow integer elements in containers of so many bits.
pub(super) fn gather<W: Copy + Into<u64>>(
    rows: &[[W; 32]],
    container: u32,
    element: Element,
    len: usize,
    place: impl Fn(u32, u32) -> usize,
) -> Vec<f32> {
    let decoder = Decoder::new(element);
    // 4-bit elements of a byte container lie in bits 2 to 5 of it, 6-bit ones at the bottom.
    let shift = if container == 8 && element.bits() == 4 { 2 } else { 0 };
    spread(rows, container, len, place, |code| decoder.get(code as u32 >> shift))
}

impl Mma {
    pub fn op(self) -> Op {
        Op::aligned(move |cx| self.execute(cx))
    }

    fn execute(&self, cx: &mut Cx<'_, '_>) -> Result<()> {
        let [m, n, k] = self.shape.map(|v| v as usize);
        let shape = Shape { m, n, k };
        if self.sums.is_some() {
            cx.cl.counters.tensor(width(self.elements[0]), 2 * (m * n * k) as u64);
        }
        if !undefined::any_operand(self, cx) {
            return product(self, cx, shape);
        }
        // Rows and columns that nobody looks at may be undefined.
        let shadows = undefined::product(self, cx)?;
        let check = cx.w.regs.check_reads(false);
        let result = product(self, cx, shape);
        cx.w.regs.check_reads(check);
        for (d, shadow) in self.d.iter().zip(&shadows) {
            cx.w.regs.set_shadow(Dst::Reg(*d), FULL, shadow);
        }
        result
    }
}

fn product(op: &Mma, cx: &mut Cx<'_, '_>, shape: Shape) -> Result<()> {
    let ([m, n, k], bits) = (op.shape, op.container);
    let at_a = |l, i| {
        let (row, kk) = fragment_a(bits, (m, k), l, i);
        (row * k + kk) as usize
    };
    let at_b = |l, i| {
        let (kk, col) = fragment_b(bits, k, l, i);
        (col * k + kk) as usize
    };
    let at_c = |l, i| {
        let (row, col) = fragment_c((m, n), l, i);
        (row * n + col) as usize
    };
    let Shape { m, n, k } = shape;
    let operands = |regs: &[_]| regs.iter().map(|r| Src::Reg(*r)).collect::<Vec<_>>();
    let [a, b, c] = [operands(&op.a), operands(&op.b), op.c.clone()]
        .map(|s| s.iter().map(|s| cx.w.regs.r64(*s, FULL)).collect::<Vec<_>>());
    let d = match op.sums {
        None => {
            let a = spread(&a, 64, m * k, at_a, f64::from_bits);
            let b = spread(&b, 64, n * k, at_b, f64::from_bits);
            let mut sums = spread(&c, 64, m * n, at_c, f64::from_bits);
            multiply_f64(shape, &a, &b, &mut sums);
            collect(&sums, 64, op.d.len(), at_c, f64::to_bits)
        }
        Some([of_c, of_d]) => {
            let a = gather(&a, bits, op.elements[0], m * k, at_a);
            let b = gather(&b, bits, op.elements[1], n * k, at_b);
            let c = spread(&c, of_c.bits(), m * n, at_c, |bits| bits as u32);
            let scales = match &op.scale {
                Some((ty, blocks, operands)) => Some(scales(cx, shape, *ty, *blocks, operands)?),
                None => None,
            };
            let scales = match (&op.scale, &scales) {
                (Some((ty, blocks, _)), Some([a, b])) => {
                    let (blocks, min_exponent) = (*blocks as usize, ty.min_exponent());
                    Some(BlockScales { a, b, blocks, min_exponent })
                }
                _ => None,
            };
            let product = Product {
                generation: cx.cl.launch.kernel.generation,
                family: Family::Mma,
                shape,
                element: op.elements[0],
                c: of_c,
                d: of_d,
                saturate: op.saturate,
                halved: 0,
                scales,
            };
            collect(&product.of(&a, &b, &c), of_d.bits(), op.d.len(), at_c, u64::from)
        }
    };
    for (r, v) in op.d.iter().zip(&d) {
        cx.w.regs.w64(Dst::Reg(*r), FULL, v);
    }
    Ok(())
}

/// The scales of the rows of A and of the columns of B.
fn scales(
    cx: &mut Cx<'_, '_>,
    shape: Shape,
    ty: Scale,
    blocks: u32,
    [a, b]: &[ScaleOperand; 2],
) -> Result<[Vec<f32>; 2]> {
    let mut selectors = |o: &ScaleOperand| -> Result<(u32, u32)> {
        let byte = cx.uniform(o.byte, "the byte selector")?;
        Ok((byte as u32, cx.uniform(o.thread, "the thread selector")? as u32))
    };
    let ((byte_a, thread_a), (byte_b, thread_b)) = (selectors(a)?, selectors(b)?);
    check_thread_ids(thread_a, thread_b)?;
    let mut of = |o: &ScaleOperand, count: usize, byte: u32, lane: &dyn Fn(u32) -> u32| -> Result<Vec<f32>> {
        let words = cx.w.regs.peek32(o.data);
        let mut out = Vec::with_capacity(count * blocks as usize);
        for row in 0..count as u32 {
            for block in 0..blocks {
                let shift = 8 * scale_byte(blocks, byte, block)?;
                out.push(ty.decode((words[lane(row) as usize] >> shift) as u8));
            }
        }
        Ok(out)
    };
    let a = of(a, shape.m, byte_a, &|row| scale_a_lane(row, thread_a))?;
    Ok([a, of(b, shape.n, byte_b, &|column| scale_b_lane(column, thread_b))?])
}
