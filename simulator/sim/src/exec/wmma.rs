//! `wmma`: fragments are those of `mma`, several in a row (`semantics::fragment::wmma_*`).

use super::mma::{gather, width};
use super::{Cx, Result, lanes};
use crate::check::lanes::Lanes;
use crate::check::shadow::Kind;
use crate::decode::wmma::{Matrix, Number, Role, Wmma};
use crate::machine::regs::FULL;
use crate::machine::step::Flow;
use crate::program::{Dst, Src};
use crate::semantics::dot::{Family, Model, Shape, multiply, multiply_f64, multiply_i32};
use crate::semantics::element::Element;
use crate::semantics::float::F16;
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
            for (i, to) in at.iter().enumerate() {
                for l in lanes(FULL) {
                    let value = element(&rows, matrix.number, l, i).to_le_bytes();
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

/// Element `i` of lane `l` in `rows`, the registers of a fragment.
fn element(rows: &[[u64; 32]], number: Number, l: usize, i: usize) -> u64 {
    let per = per_register(number);
    rows[i / per][l] >> (number.bits() as usize * (i % per))
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
    let [a, b, addend] = [0, 1, 2]
        .map(|x: usize| -> Vec<[u64; 32]> { s[x].iter().map(|s| cx.w.regs.r64(*s, FULL)).collect() });
    let bits = ab.bits();
    let at_a = |l: u32, i: u32| {
        let (row, kk) = wmma_a(bits, (m, k), l, i);
        (row * k + kk) as usize
    };
    let at_b = |l: u32, i: u32| {
        let (kk, col) = wmma_b(bits, k, l, i);
        (col * k + kk) as usize
    };
    let each = elements_per_lane(m, n) as usize;
    let at = |l: usize, i: usize| {
        let (row, col) = wmma_c((m, n), l as u32, i as u32);
        (row * n + col) as usize
    };
    let places = || (0..32).flat_map(move |l| (0..each).map(move |i| (l, i)));
    let mut out = vec![[0u64; 32]; each / per_register(d)];
    let mut put = |l: usize, i: usize, bits: u64| {
        let per = per_register(d);
        out[i / per][l] |= bits << (d.bits() as usize * (i % per));
    };
    let Number::Element(element_type) = ab else {
        let spread = |rows: &[[u64; 32]], len: usize, place: &dyn Fn(u32, u32) -> usize| {
            let mut out = vec![0.0; len];
            for (i, row) in rows.iter().enumerate() {
                for (l, v) in row.iter().enumerate() {
                    out[place(l as u32, i as u32)] = f64::from_bits(*v);
                }
            }
            out
        };
        let a = spread(&a, shape.m * shape.k, &at_a);
        let b = spread(&b, shape.n * shape.k, &at_b);
        let mut sum = vec![0.0; shape.m * shape.n];
        places().for_each(|(l, i)| sum[at(l, i)] = f64::from_bits(addend[i][l]));
        multiply_f64(shape, &a, &b, &mut sum);
        places().for_each(|(l, i)| put(l, i, sum[at(l, i)].to_bits()));
        return out;
    };
    cx.cl.counters.tensor(width(element_type), 2 * (shape.m * shape.n * shape.k) as u64);
    // What is over of A and B repeats the first registers.
    let used = |rows: Vec<[u64; 32]>, elements: u32| -> Vec<[u32; 32]> {
        rows.iter().take((elements * bits / 1024) as usize).map(|r| r.map(|v| v as u32)).collect()
    };
    let a = gather(&used(a, m * k), bits, element_type, shape.m * shape.k, at_a);
    let b = gather(&used(b, n * k), bits, element_type, shape.n * shape.k, at_b);
    if d == Number::S32 {
        let mut sum = vec![0i32; shape.m * shape.n];
        places().for_each(|(l, i)| sum[at(l, i)] = element(&addend, c, l, i) as i32);
        multiply_i32(shape, &a, &b, &mut sum, saturate);
        places().for_each(|(l, i)| put(l, i, u64::from(sum[at(l, i)] as u32)));
        return out;
    }
    let half = Number::Element(Element::F16);
    let mut sum = vec![0f32; shape.m * shape.n];
    for (l, i) in places() {
        let bits = element(&addend, c, l, i);
        sum[at(l, i)] =
            if c == half { F16.decode(bits & 0xffff) as f32 } else { f32::from_bits(bits as u32) };
    }
    let accumulator = if d == half { Accumulator::F16 } else { Accumulator::F32 };
    let model = Model::new(cx.cl.launch.kernel.generation, Family::Mma, element_type, accumulator, shape.k);
    multiply(&model, shape, &a, &b, &mut sum);
    for (l, i) in places() {
        let x = sum[at(l, i)];
        let bits = if d == half {
            F16.encode(x.into(), Default::default(), Default::default())
        } else {
            x.to_bits().into()
        };
        put(l, i, bits);
    }
    out
}
