//! `mma.sync`: gathers the fragments, multiplies as `semantics::dot` says, scatters the result.

use super::{Cx, Result, undefined};
use crate::decode::mma::{Kind, Mma};
use crate::machine::regs::FULL;
use crate::machine::step::Flow;
use crate::program::{Dst, Reg, Src};
use crate::report::Width;
use crate::semantics::dot::{
    BlockScales, Family, Model, Shape, multiply, multiply_f64, multiply_i32, multiply_scaled,
};
use crate::semantics::element::{Element, Scale};
use crate::semantics::float::F16;
use crate::semantics::fragment::{
    check_thread_ids, mma_a, mma_b, mma_c, scale_a_lane, scale_b_lane, scale_byte,
};
use crate::semantics::instr_desc::Accumulator;

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

/// Values of a fragment: element `i` of lane `l` goes where `place` says.
pub(super) fn gather(
    rows: &[[u32; 32]],
    container: u32,
    element: Element,
    len: usize,
    place: impl Fn(u32, u32) -> usize,
) -> Vec<f32> {
    let decoder = Decoder::new(element);
    let mut out = vec![0.0; len];
    let per = 32 / container;
    // 4-bit elements of a byte container lie in bits 2 to 5 of it, 6-bit ones at the bottom.
    let shift = if container == 8 && element.bits() == 4 { 2 } else { 0 };
    for (r, row) in rows.iter().enumerate() {
        for (l, word) in row.iter().enumerate() {
            for e in 0..per {
                let code = word >> (e * container + shift);
                out[place(l as u32, r as u32 * per + e)] = decoder.get(code);
            }
        }
    }
    out
}

/// Executes an `mma.sync`.
pub fn execute(op: &Mma, cx: &mut Cx<'_, '_>) -> Result {
    if let Some(flow) = cx.aligned()? {
        return Ok(flow);
    }
    let [m, n, k] = op.shape.map(|v| v as usize);
    let shape = Shape { m, n, k };
    if op.kind != Kind::Double {
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
    if op.kind == Kind::Double {
        return double(op, cx, shape);
    }
    let read = |cx: &mut Cx<'_, '_>, regs: &[Reg]| -> Vec<[u32; 32]> {
        regs.iter().map(|r| cx.w.regs.r32(Src::Reg(*r), FULL)).collect()
    };
    let (a, b) = (read(cx, &op.a), read(cx, &op.b));
    let bits = op.container;
    let a = gather(&a, bits, op.elements[0], m * k, |l, i| {
        let (row, kk) = mma_a(bits, m as u32, l, i);
        row as usize * k + kk as usize
    });
    let b = gather(&b, bits, op.elements[1], n * k, |l, i| {
        let (kk, col) = mma_b(bits, l, i);
        col as usize * k + kk as usize
    });
    let c: Vec<[u32; 32]> = op.c.iter().map(|c| cx.w.regs.r32(*c, FULL)).collect();
    let per_lane = (m * n / 32) as u32;
    let at = |l: usize, i: u32| {
        let (row, col) = mma_c(l as u32, i);
        row as usize * n + col as usize
    };
    let mut d = vec![[0u32; 32]; op.d.len()];
    match op.kind {
        Kind::Int(saturate) => {
            let mut sum = vec![0i32; m * n];
            for l in 0..32 {
                (0..per_lane).for_each(|i| sum[at(l, i)] = c[i as usize][l] as i32);
            }
            multiply_i32(shape, &a, &b, &mut sum, saturate);
            for l in 0..32 {
                (0..per_lane).for_each(|i| d[i as usize][l] = sum[at(l, i)] as u32);
            }
        }
        _ => {
            let half = op.kind == Kind::Float(Accumulator::F16);
            let mut sum = vec![0f32; m * n];
            for l in 0..32 {
                for i in 0..per_lane {
                    sum[at(l, i)] = if half {
                        F16.decode(u64::from(c[i as usize / 2][l] >> (16 * (i % 2)) & 0xffff)) as f32
                    } else {
                        f32::from_bits(c[i as usize][l])
                    };
                }
            }
            let accumulator = if half { Accumulator::F16 } else { Accumulator::F32 };
            let model =
                Model::new(cx.cl.launch.kernel.generation, Family::Mma, op.elements[0], accumulator, k);
            match &op.scale {
                None => multiply(&model, shape, &a, &b, &mut sum),
                Some(_) => scaled(op, cx, &model, shape, (&a, &b), &mut sum)?,
            }
            for l in 0..32 {
                for i in 0..per_lane {
                    let x = sum[at(l, i)];
                    if half {
                        let bits = F16.encode(x.into(), Default::default(), Default::default()) as u32;
                        d[i as usize / 2][l] |= bits << (16 * (i % 2));
                    } else {
                        d[i as usize][l] = x.to_bits();
                    }
                }
            }
        }
    }
    for (r, v) in op.d.iter().zip(&d) {
        cx.w.regs.w32(Dst::Reg(*r), FULL, v);
    }
    Ok(Flow::Next)
}

fn scaled(
    op: &Mma,
    cx: &mut Cx<'_, '_>,
    model: &Model,
    shape: Shape,
    (a, b): (&[f32], &[f32]),
    sum: &mut [f32],
) -> Result<()> {
    let Some((ty, vec, operands)) = &op.scale else { return Ok(()) };
    let mut ids = [(0, 0); 2];
    for (id, o) in ids.iter_mut().zip(operands) {
        *id = (
            cx.uniform(o.byte, "the byte selector")? as u32,
            cx.uniform(o.thread, "the thread selector")? as u32,
        );
    }
    check_thread_ids(ids[0].1, ids[1].1)?;
    let [sa, sb] = [0, 1].map(|i| cx.w.regs.peek32(operands[i].data));
    let blocks = *vec as usize;
    let pick = |word: u32, byte_id: u32, block: usize| -> Result<f32> {
        let byte = scale_byte(*vec, byte_id, block as u32)?;
        Ok(ty.decode((word >> (8 * byte)) as u8))
    };
    let mut scale_a = Vec::with_capacity(shape.m * blocks);
    for row in 0..shape.m as u32 {
        let word = sa[scale_a_lane(row, ids[0].1) as usize];
        for block in 0..blocks {
            scale_a.push(pick(word, ids[0].0, block)?);
        }
    }
    let mut scale_b = Vec::with_capacity(shape.n * blocks);
    for col in 0..shape.n as u32 {
        let word = sb[scale_b_lane(col, ids[1].1) as usize];
        for block in 0..blocks {
            scale_b.push(pick(word, ids[1].0, block)?);
        }
    }
    let scales = BlockScales { a: &scale_a, b: &scale_b, blocks, min_exponent: min_exponent(*ty) };
    multiply_scaled(model, shape, a, b, scales, sum);
    Ok(())
}

/// The smallest exponent of a scale type.
pub fn min_exponent(scale: Scale) -> i32 {
    match scale {
        Scale::Ue4m3 => -6,
        Scale::Ue8m0 => -127,
    }
}

fn double(op: &Mma, cx: &mut Cx<'_, '_>, shape: Shape) -> Result {
    let Shape { m, n, k } = shape;
    let read = |cx: &mut Cx<'_, '_>, s: Src| cx.w.regs.r64(s, FULL).map(f64::from_bits);
    let mut a = vec![0.0; m * k];
    for (i, r) in op.a.iter().enumerate() {
        let v = read(cx, Src::Reg(*r));
        for (l, v) in v.into_iter().enumerate() {
            let (row, kk) = mma_a(64, m as u32, l as u32, i as u32);
            a[row as usize * k + kk as usize] = v;
        }
    }
    let mut b = vec![0.0; n * k];
    for (i, r) in op.b.iter().enumerate() {
        let v = read(cx, Src::Reg(*r));
        for (l, v) in v.into_iter().enumerate() {
            let (kk, col) = mma_b(64, l as u32, i as u32);
            b[col as usize * k + kk as usize] = v;
        }
    }
    let at = |l: usize, i: usize| {
        let (row, col) = mma_c(l as u32, i as u32);
        row as usize * n + col as usize
    };
    let mut c = vec![0.0; m * n];
    for (i, s) in op.c.iter().enumerate() {
        let v = read(cx, *s);
        for (l, v) in v.into_iter().enumerate() {
            c[at(l, i)] = v;
        }
    }
    multiply_f64(shape, &a, &b, &mut c);
    for (i, r) in op.d.iter().enumerate() {
        let v = std::array::from_fn(|l| c[at(l, i)].to_bits());
        cx.w.regs.w64(Dst::Reg(*r), FULL, &v);
    }
    Ok(Flow::Next)
}
