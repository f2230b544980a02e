//! `wmma`: fragments are those of `mma`, several in a row (`semantics::fragment::wmma_*`).

use super::mma::{collect, gather, spread, width};
use super::*;
use crate::decode::wmma::{Matrix, Number, Role, Wmma};
use crate::semantics::dot::{Family, Product, Shape, multiply_f64};
use crate::semantics::element::Element;
use crate::semantics::fragment::{elements_per_lane, wmma_a, wmma_b, wmma_c};
use crate::semantics::instr_desc::Accumulator;

pub fn execute(op: &Wmma, cx: &mut Cx<'_, '_>) -> Result {
    if let Some(flow) = cx.aligned()? {
        return Ok(flow);
    }
    cx.together = Some(Lanes::Several);
    match op {
        Wmma::Load(matrix, d) => {
            let at = addresses(matrix, cx)?;
            if at.is_empty() {
                return Ok(Flow::Next);
            }
            let bytes = (matrix.number.bits() / 8) as usize;
            let per = per_register(matrix.number);
            let mut rows = vec![[0u64; 32]; at.len() / per];
            for (i, from) in at.iter().enumerate() {
                for l in lanes(FULL) {
                    let mut element = [0; 8];
                    cx.read_lane(matrix.address.space, from[l], l, Kind::READ, &mut element[..bytes])?;
                    rows[i / per][l] |= u64::from_le_bytes(element) << (8 * bytes * (i % per));
                }
            }
            for (r, d) in d.iter().enumerate() {
                cx.w.regs.w64(Dst::Reg(*d), FULL, &rows[r % rows.len()]);
            }
        }
        Wmma::Store(matrix, s) => {
            let at = addresses(matrix, cx)?;
            let bytes = (matrix.number.bits() / 8) as usize;
            let rows: Vec<[u64; 32]> = s.iter().map(|s| cx.w.regs.r64(*s, FULL)).collect();
            if cx.w.regs.bad.is_some() {
                return Ok(Flow::Next);
            }
            let (bits, per) = (matrix.number.bits() as usize, per_register(matrix.number));
            for (i, to) in at.iter().enumerate() {
                for l in lanes(FULL) {
                    let value = (rows[i / per][l] >> (bits * (i % per))).to_le_bytes();
                    cx.write_lane(matrix.address.space, to[l], l, Kind::WRITE, &value[..bytes])?;
                }
            }
        }
        Wmma::Multiply { shape, numbers, saturate, d, s } => {
            let result = product(cx, *shape, *numbers, *saturate, s);
            for (d, v) in d.iter().zip(&result) {
                cx.w.regs.w64(Dst::Reg(*d), FULL, v);
            }
        }
    }
    Ok(Flow::Next)
}

/// Elements in one register.
fn per_register(number: Number) -> usize {
    (32 / number.bits()).max(1) as usize
}

/// `(row, column)` of element `i` of a lane's fragment.
fn place(role: Role, shape: [u32; 3], number: Number, lane: u32, i: u32) -> (u32, u32) {
    let [m, n, k] = shape;
    match role {
        Role::A => wmma_a(number.bits(), (m, k), lane, i),
        Role::B => wmma_b(number.bits(), k, lane, i),
        Role::C => wmma_c((m, n), lane, i),
    }
}

/// The address of every lane's element `i`, for each `i`; empty if an operand was not written, which the
/// dispatch loop reports.
fn addresses(x: &Matrix, cx: &mut Cx<'_, '_>) -> Result<Vec<[u64; 32]>> {
    let (rows, cols) = x.role.extent(x.shape);
    let base = cx.addresses(&x.address);
    let stride = match x.stride {
        Some(s) => cx.uniform(s, "the stride of a wmma matrix")?,
        None => u64::from(if x.by_rows { cols } else { rows }),
    };
    if cx.w.regs.bad.is_some() {
        return Ok(Vec::new());
    }
    let bytes = u64::from(x.number.bits() / 8);
    let address = |lane: usize, i: u32| {
        let (row, col) = place(x.role, x.shape, x.number, lane as u32, i);
        let (major, minor) = if x.by_rows { (row, col) } else { (col, row) };
        base[lane].wrapping_add((u64::from(major) * stride + u64::from(minor)) * bytes)
    };
    (0..elements_per_lane(rows, cols))
        .map(|i| {
            for l in lanes(FULL) {
                cx.aligned_to(x.address.space, address(l, i), bytes, l)?;
            }
            Ok(std::array::from_fn(|l| address(l, i)))
        })
        .collect()
}

/// D = A B + C: the registers of D.
fn product(
    cx: &mut Cx<'_, '_>,
    [m, n, k]: [u32; 3],
    [d, ab, c]: [Number; 3],
    saturate: bool,
    s: &[Vec<Src>; 3],
) -> Vec<[u64; 32]> {
    let shape = Shape { m: m as usize, n: n as usize, k: k as usize };
    let bits = ab.bits();
    // What is over of A and B repeats the first registers.
    let used = |elements: u32| (elements * bits / 32).div_ceil(bits.max(32)) as usize;
    let [a, b, addend] = s.each_ref().map(|s| s.iter().map(|s| cx.w.regs.r64(*s, FULL)).collect::<Vec<_>>());
    let (a, b) = (&a[..used(m * k)], &b[..used(n * k)]);
    let at_a = |l, i| {
        let (row, kk) = wmma_a(bits, (m, k), l, i);
        (row * k + kk) as usize
    };
    let at_b = |l, i| {
        let (kk, col) = wmma_b(bits, k, l, i);
        (col * k + kk) as usize
    };
    let at_c = |l, i| {
        let (row, col) = wmma_c((m, n), l, i);
        (row * n + col) as usize
    };
    let registers = (m * n * d.bits() / 32).div_ceil(d.bits().max(32)) as usize;
    let Number::Element(element) = ab else {
        let a = spread(a, 64, shape.m * shape.k, at_a, f64::from_bits);
        let b = spread(b, 64, shape.n * shape.k, at_b, f64::from_bits);
        let mut sums = spread(&addend, 64, shape.m * shape.n, at_c, f64::from_bits);
        multiply_f64(shape, &a, &b, &mut sums);
        return collect(&sums, 64, registers, at_c, f64::to_bits);
    };
    cx.cl.counters.tensor(width(element), 2 * (shape.m * shape.n * shape.k) as u64);
    let a = gather(a, bits, element, shape.m * shape.k, at_a);
    let b = gather(b, bits, element, shape.n * shape.k, at_b);
    let addend = spread(&addend, c.bits(), shape.m * shape.n, at_c, |bits| bits as u32);
    let generation = cx.cl.launch.kernel.generation;
    let sums = |number| match number {
        Number::S32 => Accumulator::S32,
        Number::Element(Element::F16) => Accumulator::F16,
        _ => Accumulator::F32,
    };
    let (family, c, halved, scales) = (Family::Mma, sums(c), 0, None);
    let product = Product { generation, family, shape, element, c, d: sums(d), saturate, halved, scales };
    collect(&product.of(&a, &b, &addend), d.bits(), registers, at_c, u64::from)
}
