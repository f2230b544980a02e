//! `wmma`: the warp matrix instructions of `nvcuda::wmma`. PTX ISA 9.7.14.4. Fragments are those of `mma`, several in a row
//! (`semantics::fragment`).

use super::mma::{Mma, accumulator, element, shape_of, types};
use super::*;
use crate::semantics::element::Element;
use crate::semantics::fragment::{elements_per_lane, fragment_a, fragment_b, fragment_c};

/// Bits of an element of this type, in memory and in registers.
fn bits(ty: &str) -> u32 {
    match ty {
        "f64" => 64,
        _ => element(ty).map_or(32, Element::bits),
    }
}

/// Which matrix a fragment is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A, m x k.
    A,
    /// B, k x n.
    B,
    /// C or D, m x n.
    C,
}

impl Role {
    /// Rows and columns in an instruction of `shape` (M, N, K).
    pub const fn extent(self, [m, n, k]: [u32; 3]) -> (u32, u32) {
        match self {
            Role::A => (m, k),
            Role::B => (k, n),
            Role::C => (m, n),
        }
    }
}

/// A matrix in memory.
struct Matrix {
    pub role: Role,
    /// M, N, K.
    pub shape: [u32; 3],
    /// Bits of its elements.
    pub bits: u32,
    /// Rows are contiguous, rather than columns.
    pub by_rows: bool,
    /// Address of element (0, 0).
    pub address: Addr,
    /// Elements from one row (column) to the next; the length of one if absent.
    pub stride: Option<Src>,
}

/// Registers of a fragment. A and B of f16 always take eight: what is over repeats the first ones.
fn registers(role: Role, shape: [u32; 3], ty: &str) -> usize {
    let (rows, cols) = role.extent(shape);
    match (role, ty) {
        (Role::A | Role::B, "f16") => 8,
        _ => (rows * cols / 32 * bits(ty) / bits(ty).max(32)) as usize,
    }
}

/// The type by which registers are read.
fn register_type(ty: &str) -> Type {
    match ty {
        "f64" => Type::F64,
        "f32" => Type::F32,
        _ => Type::B32,
    }
}

/// Decodes `wmma.load`, `wmma.store` and `wmma.mma`.
pub fn decode(i: &mut Ins<'_>) -> Decoded {
    i.ignore(&["sync", "aligned", "rn", "mma"]);
    let (load, store, saturate) = (i.has("load"), i.has("store"), i.has("satfinite"));
    let shape = shape_of(i)?;
    if ![[16, 16, 16], [32, 8, 16], [8, 32, 16], [16, 16, 8], [8, 8, 4]].contains(&shape) {
        return i.error("only the shapes m16n16k16, m32n8k16, m8n32k16, m16n16k8 and m8n8k4 are executed");
    }
    let types = types(i);
    let expect = |i: &Ins<'_>, role: Role, ty: &str, found: usize| -> Decoded<()> {
        let want = registers(role, shape, ty);
        if want == found { Ok(()) } else { i.error(format!("{role:?} has {found} registers, needs {want}")) }
    };
    if !load && !store {
        i.ignore(&["row", "col"]);
        let [of_d, ab, of_c] = match types[..] {
            [d, c] => [d, "f16", c],
            [d, a, b, c] if a == b => [d, a, c],
            _ => return i.error("needs the types of D and C, or of D, A, B and C, with A like B"),
        };
        let [d, mut a, mut b] = [i.regs(0)?, i.regs(1)?, i.regs(2)?];
        let c = i.srcs(3, register_type(of_c))?;
        let found = [(Role::C, of_d, d.len()), (Role::A, ab, a.len()), (Role::B, ab, b.len())];
        for (role, ty, found) in found.into_iter().chain([(Role::C, of_c, c.len())]) {
            expect(i, role, ty, found)?;
        }
        let (elements, sums) = match (element(ab), accumulator(of_c), accumulator(of_d)) {
            (Some(e), Some(c), Some(d)) => ([e; 2], Some([c, d])),
            (None, None, None) => ([Element::F16; 2], None),
            _ => return i.error("these types do not go together"),
        };
        // What is over of A and B repeats the first registers.
        let container = bits(ab);
        let used = |elements: u32| (elements * container / 32).div_ceil(container.max(32)) as usize;
        let [m, n, k] = shape;
        a.truncate(used(m * k));
        b.truncate(used(n * k));
        return Ok(Mma { shape, sums, saturate, elements, container, d, a, b, c, scale: None }.op());
    }
    let role = i.need("a matrix", &[("a", Role::A), ("b", Role::B), ("c", Role::C), ("d", Role::C)])?;
    let by_rows = i.need("a layout", &[("row", true), ("col", false)])?;
    let space = i.space();
    let [ty] = types[..] else { return i.error("needs one type of elements") };
    let (fragment, memory) = if load { (0, 1) } else { (1, 0) };
    let stride = i.optional(2, Type::U32)?;
    let matrix = Matrix { role, shape, bits: bits(ty), by_rows, address: i.addr(memory, space)?, stride };
    Ok(if load {
        let d = i.regs(fragment)?;
        expect(i, role, ty, d.len())?;
        Op::aligned(move |cx| matrix.load(cx, &d))
    } else {
        let s = i.srcs(fragment, register_type(ty))?;
        expect(i, role, ty, s.len())?;
        Op::aligned(move |cx| matrix.store(cx, &s))
    })
}

impl Matrix {
    /// Elements in one register.
    fn per_register(&self) -> usize {
        (32 / self.bits).max(1) as usize
    }

    /// `(row, column)` of element `i` of a lane's fragment.
    fn place(&self, lane: u32, i: u32) -> (u32, u32) {
        let [m, n, k] = self.shape;
        match self.role {
            Role::A => fragment_a(self.bits, (m, k), lane, i),
            Role::B => fragment_b(self.bits, k, lane, i),
            Role::C => fragment_c((m, n), lane, i),
        }
    }

    fn load(&self, cx: &mut Cx<'_, '_>, d: &[Reg]) -> Result<()> {
        cx.together = Some(Lanes::Several);
        let at = addresses(self, cx)?;
        let bytes = (self.bits / 8) as usize;
        let per = self.per_register();
        let mut rows = vec![[0u64; 32]; at.len() / per];
        for (i, from) in at.iter().enumerate() {
            for l in lanes(FULL) {
                let mut element = [0; 8];
                cx.read_lane(self.address.space, from[l], l, Kind::READ, &mut element[..bytes])?;
                rows[i / per][l] |= u64::from_le_bytes(element) << (8 * bytes * (i % per));
            }
        }
        for (r, d) in d.iter().enumerate() {
            cx.w.regs.w64(Dst::Reg(*d), FULL, &rows[r % rows.len()]);
        }
        Ok(())
    }

    fn store(&self, cx: &mut Cx<'_, '_>, s: &[Src]) -> Result<()> {
        cx.together = Some(Lanes::Several);
        let at = addresses(self, cx)?;
        let rows: Vec<[u64; 32]> = s.iter().map(|s| cx.w.regs.r64(*s, FULL)).collect();
        cx.defined()?;
        let (bits, per) = (self.bits as usize, self.per_register());
        for (i, to) in at.iter().enumerate() {
            for l in lanes(FULL) {
                let value = (rows[i / per][l] >> (bits * (i % per))).to_le_bytes();
                cx.write_lane(self.address.space, to[l], l, Kind::WRITE, &value[..bits / 8])?;
            }
        }
        Ok(())
    }
}

/// The address of every lane's element `i`, for each `i`.
fn addresses(x: &Matrix, cx: &mut Cx<'_, '_>) -> Result<Vec<[u64; 32]>> {
    let (rows, cols) = x.role.extent(x.shape);
    cx.uniform(x.address.base, "the address of a wmma matrix")?;
    let base = cx.addresses(&x.address);
    let stride = match x.stride {
        Some(s) => cx.uniform(s, "the stride of a wmma matrix")?,
        None => u64::from(if x.by_rows { cols } else { rows }),
    };
    cx.defined()?;
    let bytes = u64::from(x.bits / 8);
    let address = |lane: usize, i: u32| {
        let (row, col) = x.place(lane as u32, i);
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
