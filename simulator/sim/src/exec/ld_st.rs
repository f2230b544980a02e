//! Loads and stores. PTX ISA 9.7.9.8 (`ld`) to 9.7.9.12 (`st`), 9.7.14.5.15 (`ldmatrix`) and its kin.

use super::warp::Bytes;
use super::*;
use crate::check::undefined::Hole;
use crate::machine::regs::Shadow;
use crate::semantics::fragment::{MatrixShape, movmatrix_source};
use crate::semantics::narrow::Narrow;

fn common(i: &mut Ins<'_>) -> Decoded<(Space, Type, usize, Ordering)> {
    let mut ordering = i.ordering();
    i.cache_hints();
    i.ignore(&["mmio"]);
    let space = i.space();
    // No other thread sees local memory.
    ordering.strong &= space != Space::Local;
    let n = i.one_of(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1);
    let ty = i.ty()?;
    if ty.bytes() as usize * n > 32 {
        return i.error("an access has at most 32 bytes");
    }
    Ok((space, ty, n, ordering))
}

/// `ld`: one element per result, extended to the register as its type says.
pub fn load(i: &mut Ins<'_>) -> Decoded {
    let (space, ty, n, order) = common(i)?;
    let d = i.dsts(0)?;
    if d.len() != n {
        return i.error(format!("has {} results, needs {n}", d.len()));
    }
    let a = i.addr(1, space)?;
    Ok(Op::new(move |cx| execute_load(cx, &a, ty, &d, order)))
}

/// `st`
pub fn store(i: &mut Ins<'_>) -> Decoded {
    let (space, ty, n, order) = common(i)?;
    let s = i.srcs(1, ty)?;
    if s.len() != n {
        return i.error(format!("has {} values, needs {n}", s.len()));
    }
    let a = i.addr(0, space)?;
    Ok(Op::new(move |cx| execute_store(cx, &a, ty, &s, order)))
}

/// `ldmatrix`, `stmatrix`, `movmatrix`
pub fn matrix(i: &mut Ins<'_>) -> Decoded {
    i.ignore(&["sync", "aligned", "b16", "b8", "b8x16"]);
    let trans = i.has("trans");
    let load = i.ast.root == "ldmatrix";
    let shape = i.need("a shape", &[("m8n8", 0), ("m16n16", 1), ("m16n8", 2), ("m8n16", 3)])?;
    let shape = match (shape, trans, i.one_of(Narrow::NAMES)) {
        (0, _, None) => MatrixShape::M8n8(trans),
        (1, true, None) if load => MatrixShape::M16n16,
        (2, true, None) if !load => MatrixShape::M16n8,
        (3, false, Some(narrow)) if load => MatrixShape::M8n16(narrow),
        _ => return i.error("this shape, transposition and format do not go together here"),
    };
    let n = i.one_of(&[("x1", 1), ("x2", 2), ("x4", 4)]).unwrap_or(1);
    let space = i.space();
    if i.ast.root == "movmatrix" {
        let (d, s) = (i.dst(0)?, i.src(1, Type::B32)?);
        return Ok(Op::aligned(move |cx| transpose(cx, d, s)));
    }
    let want = n * shape.registers();
    let narrow = |d: &Dst| matches!(d, Dst::Reg(Reg::R32(_)) | Dst::Sink);
    let (a, d, s) = match load {
        true => (i.addr(1, space)?, i.dsts(0)?, Vec::new()),
        false => (i.addr(0, space)?, Vec::new(), i.srcs(1, Type::B32)?),
    };
    if d.len() + s.len() != want || !d.iter().all(narrow) {
        return i.error(format!("needs {want} registers of 32 bits"));
    }
    Ok(Op::aligned(move |cx| {
        cx.together = Some(Lanes::Several);
        if load { load_matrix(cx, &a, &d, shape) } else { store_matrix(cx, &a, &s, shape) }
    }))
}

impl Cx<'_, '_> {
    /// For a strong access: whether it must wait, for its turn at global memory, or because it polls in vain.
    pub(super) fn hold(&mut self, a: &Addr, addresses: &[u64; 32], polls: bool) -> Option<Flow> {
        let global = self.any_global(a.space, addresses);
        if global && !self.cl.may_touch_global() {
            return Some(Flow::Wait(Wait::Grid));
        }
        let here = (self.pc, self.cl.progress);
        if polls && (!global || self.cl.launch.solo) {
            if self.g.polled == Some(here) && !self.g.forced {
                return Some(Flow::Wait(Wait::Poll(here.1)));
            }
            self.g.polled = Some(here);
        }
        None
    }

    pub(super) fn places(&self, a: &Addr, addresses: &[u64; 32]) -> Vec<Place> {
        lanes(self.m).map(|l| place(a.space, addresses[l])).collect()
    }
}

#[inline(never)]
fn execute_load(cx: &mut Cx<'_, '_>, a: &Addr, ty: Type, d: &[Dst], order: Ordering) -> Result {
    let addresses = cx.addresses(a);
    cx.defined()?;
    if order.strong
        && let Some(flow) = cx.hold(a, &addresses, true)
    {
        return Ok(flow);
    }
    let width = ty.bytes() as usize;
    let total = width * d.len();
    let kind = Kind::READ.strong(order.reach()).constant(order.constant);
    let mut bytes = [0; 1024];
    let holes = cx.load_warp(a.space, &addresses, total, kind, &mut bytes)?;
    for (k, d) in d.iter().enumerate() {
        let at = k * width;
        match (d, width) {
            (Dst::Reg(Reg::R32(_)), 4) => {
                let v = row(&bytes, total, at, u32::from_le_bytes);
                cx.w.regs.w32(*d, cx.m, &v);
            }
            (_, 16) => cx.w.regs.w128(*d, cx.m, &row(&bytes, total, at, u128::from_le_bytes)),
            _ => {
                let v = match width {
                    1 => row(&bytes, total, at, |b: [u8; 1]| b[0].into()),
                    2 => row(&bytes, total, at, |b| u16::from_le_bytes(b).into()),
                    4 => row(&bytes, total, at, |b| u32::from_le_bytes(b).into()),
                    _ => row(&bytes, total, at, u64::from_le_bytes),
                };
                let unused = 64 - 8 * width as u32;
                let extend = |v: u64| ((v << unused) as i64 >> unused) as u64;
                cx.w.regs.w64(*d, cx.m, &if ty.is_signed() { each(&v, extend) } else { v });
            }
        }
        if !holes.is_empty() {
            cx.w.regs.set_shadow(*d, cx.m, &loaded(&holes, at, width, ty.is_signed()));
        }
    }
    if order.strong {
        let places = cx.places(a, &addresses);
        cx.acquire_at(&places, order);
        return Ok(Flow::Yield);
    }
    Ok(Flow::Next)
}

/// The values of `N` bytes of every lane, at byte `at` of its `total`.
#[inline]
fn row<const N: usize, T: Copy + Default>(
    bytes: &Bytes,
    total: usize,
    at: usize,
    value: impl Fn([u8; N]) -> T,
) -> [T; 32] {
    let mut out = [T::default(); 32];
    for (out, lane) in out.iter_mut().zip(bytes.chunks_exact(total)) {
        *out = lane[at..].first_chunk().map_or(*out, |bytes| value(*bytes));
    }
    out
}

/// Sets what [`row`] reads.
#[inline]
fn set_row<const N: usize, T: Copy>(
    bytes: &mut Bytes,
    total: usize,
    at: usize,
    row: &[T; 32],
    bytes_of: impl Fn(T) -> [u8; N],
) {
    let lanes = bytes.chunks_exact_mut(total).zip(row);
    lanes.for_each(|(lane, v)| lane[at..at + N].copy_from_slice(&bytes_of(*v)));
}

/// The undefined bits of a register loaded from `width` bytes at `at` of what each lane has read.
fn loaded(holes: &[(usize, Hole)], at: usize, width: usize, signed: bool) -> Shadow {
    let mut out = Shadow::default();
    for (l, hole) in holes {
        let bytes = (0..width).filter(|b| hole.bytes >> (at + b) & 1 != 0);
        let mut bits = bytes.fold(0, |m, b| m | 0xffu128 << (8 * b));
        if signed && bits >> (8 * width - 1) & 1 != 0 {
            bits |= u128::MAX << (8 * width - 1);
        }
        out.add(*l, bits, (bits != 0).then_some(hole.origin));
    }
    out
}

#[inline(never)]
fn execute_store(cx: &mut Cx<'_, '_>, a: &Addr, ty: Type, s: &[Src], order: Ordering) -> Result {
    let addresses = cx.addresses(a);
    if order.strong
        && let Some(flow) = cx.hold(a, &addresses, false)
    {
        return Ok(flow);
    }
    let width = ty.bytes() as usize;
    let total = width * s.len();
    let mut bytes = [0; 1024];
    let mut holes = [None; 32];
    let mut undefined = false;
    for (k, s) in s.iter().enumerate() {
        let at = k * width;
        // Only what is undefined of the bytes stored matters, so the registers do not check this read.
        if cx.w.regs.unwritten(*s) & cx.m != 0 {
            undefined = true;
            let shadow = cx.w.regs.shadow(*s, cx.pc);
            for l in lanes(cx.m) {
                holes[l] = join(holes[l], shadow.hole(l, width), at);
            }
        }
        let check = cx.w.regs.check_reads(false);
        if width == 16 {
            let v = cx.w.regs.r128(*s, cx.m);
            set_row(&mut bytes, total, at, &v, u128::to_le_bytes);
        } else {
            let v = cx.w.regs.r64(*s, cx.m);
            match width {
                1 => set_row(&mut bytes, total, at, &v, |v| [v as u8]),
                2 => set_row(&mut bytes, total, at, &v, |v| (v as u16).to_le_bytes()),
                4 => set_row(&mut bytes, total, at, &v, |v| (v as u32).to_le_bytes()),
                _ => set_row(&mut bytes, total, at, &v, u64::to_le_bytes),
            }
        }
        cx.w.regs.check_reads(check);
    }
    cx.defined()?;
    if order.strong {
        let places = cx.places(a, &addresses);
        cx.release_at(&places, order, false);
    }
    let kind = Kind::WRITE.strong(order.reach());
    let stored = cx.store_warp(a.space, &addresses, total, kind, &bytes, undefined.then_some(&holes));
    // Lanes that share an address outside memory do not race: the address is what is wrong.
    if !order.strong && stored.as_ref().err().is_none_or(|fault| fault.check == Check::Race) {
        same_address(cx, a, &addresses, &bytes, total)?;
    }
    stored?;
    if order.strong {
        cx.released();
        return Ok(Flow::Yield);
    }
    Ok(Flow::Next)
}

/// A lane's undefined bytes and those of its next register, which goes to byte `at`.
fn join(before: Option<Hole>, next: Option<Hole>, at: usize) -> Option<Hole> {
    let next = next.map(|h| Hole { bytes: h.bytes << at, ..h });
    match (before, next) {
        (Some(a), Some(b)) => Some(Hole { bytes: a.bytes | b.bytes, ..a }),
        (a, b) => a.or(b),
    }
}

/// Lanes of one instruction that store different values to one address: which one stays is undefined.
fn same_address(cx: &Cx<'_, '_>, a: &Addr, addresses: &[u64; 32], bytes: &Bytes, total: usize) -> Result<()> {
    let private = matches!(a.space, crate::memory::Space::Local | crate::memory::Space::FuncParam);
    if private || !cx.cl.launch.config.checks.race {
        return Ok(());
    }
    let ascending = |l: usize| cx.m >> l & 3 != 3 || addresses[l] < addresses[l + 1];
    if cx.m.count_ones() == 32 - cx.m.leading_zeros() - cx.m.trailing_zeros() && (0..31).all(ascending) {
        return Ok(());
    }
    let of = |l: usize| &bytes[l * total..][..total];
    let mut order: Vec<usize> = lanes(cx.m).collect();
    order.sort_by_key(|&l| (addresses[l], l));
    for p in order.windows(2) {
        let (x, y) = (p[0], p[1]);
        let local = matches!(place(a.space, addresses[x]), Place::Local(_));
        if addresses[x] == addresses[y] && of(x) != of(y) && !local {
            return Err(fault!(
                Check::Race,
                "lanes {x} and {y} store different values to one address in one instruction"
            )
            .lane(y as u32)
            .at(place(a.space, addresses[x])));
        }
    }
    Ok(())
}

fn load_matrix(cx: &mut Cx<'_, '_>, a: &Addr, d: &[Dst], shape: MatrixShape) -> Result<()> {
    let m = cx.m;
    let count = d.len() / shape.registers() * shape.rows();
    let mut holes: Vec<Option<Hole>> = Vec::new();
    let rows = rows(cx, a, count, |cx, address, l| {
        let mut row = [0u8; 16];
        match shape {
            MatrixShape::M8n16(narrow) => {
                let packed = &mut row[..narrow.packed_bytes()];
                cx.read_lane(a.space, address, l, Kind::READ, packed)?;
                holes.push(None);
                Ok(narrow.widen(row, 0))
            }
            _ => {
                holes.push(cx.load_lane(a.space, address, l, Kind::READ, &mut row)?);
                Ok(row)
            }
        }
    })?;
    for (k, d) in d.iter().enumerate() {
        let (matrix, register) = (k / shape.registers(), (k % shape.registers()) as u32);
        let rows = &rows[matrix * shape.rows()..];
        let v = std::array::from_fn(|l| {
            u32::from_le_bytes(std::array::from_fn(|e| {
                let (row, column) = shape.place(l as u32, register, e as u32);
                rows[row][column]
            }))
        });
        cx.w.regs.w32(*d, m, &v);
        if holes.iter().any(Option::is_some) {
            let holes = &holes[matrix * shape.rows()..];
            let mut shadow = Shadow::default();
            for (l, e) in (0..32).flat_map(|l| (0..4).map(move |e| (l, e))) {
                let (row, column) = shape.place(l, register, e);
                if let Some(hole) = holes[row].filter(|h| h.bytes >> column & 1 != 0) {
                    shadow.add(l as usize, 0xff << (8 * e), Some(hole.origin));
                }
            }
            cx.w.regs.set_shadow(*d, m, &shadow);
        }
    }
    Ok(())
}

fn store_matrix(cx: &mut Cx<'_, '_>, a: &Addr, s: &[Src], shape: MatrixShape) -> Result<()> {
    let m = cx.m;
    let mut out = vec![[0u8; 16]; shape.rows() * s.len()];
    let mut holes = vec![None; out.len()];
    for (k, s) in s.iter().enumerate() {
        let defined = cx.w.regs.unwritten(*s) & m == 0;
        if !defined {
            let shadow = cx.w.regs.shadow(*s, cx.pc);
            for (l, e) in (0..32).flat_map(|l| (0..4).map(move |e| (l, e))) {
                let (row, column) = shape.place(l, 0, e);
                let row = &mut holes[shape.rows() * k + row];
                let byte = shadow.hole(l as usize, 4).filter(|h| h.bytes >> e & 1 != 0);
                *row = join(*row, byte.map(|h| Hole { bytes: 1, ..h }), column);
            }
        }
        let v = if defined { cx.w.regs.r32(*s, m) } else { cx.w.regs.peek32(*s) };
        for (l, v) in v.into_iter().enumerate() {
            for (e, byte) in v.to_le_bytes().into_iter().enumerate() {
                let (row, column) = shape.place(l as u32, 0, e as u32);
                out[shape.rows() * k + row][column] = byte;
            }
        }
    }
    cx.defined()?;
    rows(cx, a, out.len(), |cx, address, l| {
        cx.store_lane(a.space, address, l, Kind::WRITE, &out[l], holes[l])?;
        Ok([0; 16])
    })?;
    Ok(())
}

fn transpose(cx: &mut Cx<'_, '_>, d: Dst, s: Src) {
    let m = cx.m;
    let shadow = cx.w.regs.shadow(s, cx.pc);
    let v = cx.w.regs.peek32(s);
    let element = |l: u32, half: u32| {
        let (lane, from) = movmatrix_source(l, half);
        v[lane as usize] >> (16 * from) & 0xffff
    };
    let r = std::array::from_fn(|l| element(l as u32, 0) | element(l as u32, 1) << 16);
    cx.w.regs.w32(d, m, &r);
    let mut moved = Shadow::default();
    for (l, half) in (0..32).flat_map(|l| [(l, 0), (l, 1)]) {
        let (lane, from) = movmatrix_source(l, half);
        let bits = shadow.bits[lane as usize] >> (16 * from) & 0xffff;
        let origin = shadow.origins[lane as usize].filter(|_| bits != 0);
        moved.add(l as usize, bits << (16 * half), origin);
    }
    cx.w.regs.set_shadow(d, m, &moved);
}

/// Visits `n` rows of 16 bytes, whose addresses the lanes of these numbers give.
fn rows(
    cx: &mut Cx<'_, '_>,
    a: &Addr,
    n: usize,
    mut visit: impl FnMut(&mut Cx<'_, '_>, u64, usize) -> Result<[u8; 16]>,
) -> Result<Vec<[u8; 16]>> {
    let all = cx.m;
    // Only the lanes that give addresses need to have one.
    cx.m = if n == 32 { all } else { all & ((1 << n) - 1) };
    let addresses = cx.addresses(a);
    cx.m = all;
    let mut out = Vec::with_capacity(n);
    cx.defined()?;
    for (l, &address) in addresses.iter().enumerate().take(n) {
        cx.aligned_to(a.space, address, 16, l)?;
        out.push(visit(cx, address, l)?);
    }
    Ok(out)
}
