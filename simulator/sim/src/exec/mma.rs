//! `mma.sync`: gathers the fragments, multiplies as `semantics::dot` says, scatters the result.

use super::undefined;
use super::*;
use crate::decode::mma::{Mma, ScaleOperand};
use crate::report::Width;
use crate::semantics::dot::{BlockScales, Family, Product, Shape, multiply_f64};
use crate::semantics::element::{Element, Scale};
use crate::semantics::fragment::{
    check_thread_ids, mma_a, mma_b, mma_c, scale_a_lane, scale_b_lane, scale_byte,
};
use std::ops::{BitOr, Shl};

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

pub fn execute(op: &Mma, cx: &mut Cx<'_, '_>) -> Result {
    if let Some(flow) = cx.aligned()? {
        return Ok(flow);
    }
    let [m, n, k] = op.shape.map(|v| v as usize);
    let shape = Shape { m, n, k };
    if op.sums.is_some() {
        cx.cl.counters.tensor(width(op.elements[0]), 2 * (m * n * k) as u64);
    }
    if !undefined::any_operand(op, cx) {
        return product(op, cx, shape);
    }
    // Rows and columns that nobody looks at may be undefined.
    let shadows = undefined::product(op, cx)?;
    let check = cx.w.regs.check_reads(false);
    let result = product(op, cx, shape);
    cx.w.regs.check_reads(check);
    for (d, shadow) in op.d.iter().zip(&shadows) {
        cx.w.regs.set_shadow(Dst::Reg(*d), FULL, shadow);
    }
    result
}

fn product(op: &Mma, cx: &mut Cx<'_, '_>, shape: Shape) -> Result {
    let Shape { m, n, k } = shape;
    let bits = op.container;
    let at_a = |l, i| {
        let (row, kk) = mma_a(bits, m as u32, l, i);
        row as usize * k + kk as usize
    };
    let at_b = |l, i| {
        let (kk, col) = mma_b(bits, l, i);
        col as usize * k + kk as usize
    };
    let at_c = |l, i| {
        let (row, col) = mma_c(l, i);
        row as usize * n + col as usize
    };
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
        Some(sums) => {
            let a = gather(&a, bits, op.elements[0], m * k, at_a);
            let b = gather(&b, bits, op.elements[1], n * k, at_b);
            let c = spread(&c, sums.bits(), m * n, at_c, |bits| bits as u32);
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
                c: sums,
                d: sums,
                saturate: op.saturate,
                halved: 0,
                scales,
            };
            collect(&product.of(&a, &b, &c), sums.bits(), op.d.len(), at_c, u64::from)
        }
    };
    for (r, v) in op.d.iter().zip(&d) {
        cx.w.regs.w64(Dst::Reg(*r), FULL, v);
    }
    Ok(Flow::Next)
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
