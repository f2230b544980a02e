//! `wmma`: the warp matrix instructions of `nvcuda::wmma`. PTX ISA 9.7.14.4.

use super::mma::{element, shape_of};
use super::*;
use crate::semantics::element::Element;

/// The type of a matrix's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Number {
    /// A type of A and B, or f16 of C and D.
    Element(Element),
    /// `.f32`, of C and D.
    F32,
    /// `.s32`, of C and D.
    S32,
    F64,
}

impl Number {
    /// Bits of an element, in memory and in registers.
    pub const fn bits(self) -> u32 {
        match self {
            Number::Element(e) => e.bits(),
            Number::F32 | Number::S32 => 32,
            Number::F64 => 64,
        }
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
#[derive(Debug, Clone)]
pub struct Matrix {
    pub role: Role,
    /// M, N, K.
    pub shape: [u32; 3],
    /// Its elements.
    pub number: Number,
    /// Rows are contiguous, rather than columns.
    pub by_rows: bool,
    /// Address of element (0, 0).
    pub address: Addr,
    /// Elements from one row (column) to the next; the length of one if absent.
    pub stride: Option<Src>,
}

#[derive(Debug, Clone)]
pub enum Wmma {
    Load(Matrix, Vec<Reg>),
    Store(Matrix, Vec<Src>),
    Multiply {
        /// M, N, K.
        shape: [u32; 3],
        /// Types of D, A and B, C.
        numbers: [Number; 3],
        /// `.satfinite`
        saturate: bool,
        d: Vec<Reg>,
        /// Operands A, B, C.
        s: [Vec<Src>; 3],
    },
}

fn number(name: &str) -> Option<Number> {
    match name {
        "f32" => Some(Number::F32),
        "s32" => Some(Number::S32),
        "f64" => Some(Number::F64),
        _ => element(name).filter(|e| e.bits() >= 8).map(Number::Element),
    }
}

/// Registers of a fragment. A and B of f16 always take eight: what is over repeats the first ones.
fn registers(role: Role, shape: [u32; 3], number: Number) -> usize {
    let (rows, cols) = role.extent(shape);
    match (role, number) {
        (Role::A | Role::B, Number::Element(Element::F16)) => 8,
        (_, Number::F64) => (rows * cols / 32) as usize,
        _ => (rows * cols * number.bits() / 32 / 32) as usize,
    }
}

/// The type by which registers are read.
fn register_type(number: Number) -> Type {
    match number {
        Number::F64 => Type::F64,
        Number::F32 => Type::F32,
        _ => Type::B32,
    }
}

/// Decodes `wmma.load`, `wmma.store` and `wmma.mma`.
pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    i.ignore(&["sync", "aligned", "rn"]);
    let load = i.has("load");
    let store = i.has("store");
    i.ignore(&["mma"]);
    let saturate = i.has("satfinite");
    let shape = shape_of(i)?;
    if ![[16, 16, 16], [32, 8, 16], [8, 32, 16], [16, 16, 8], [8, 8, 4]].contains(&shape) {
        return i.error("only the shapes m16n16k16, m32n8k16, m8n32k16, m16n16k8 and m8n8k4 are executed");
    }
    let expect = |i: &Ins<'_>, role: Role, n: Number, found: usize| -> Result<()> {
        let want = registers(role, shape, n);
        if want == found { Ok(()) } else { i.error(format!("{role:?} has {found} registers, needs {want}")) }
    };
    if !load && !store {
        i.ignore(&["row", "col"]);
        // An occurrence counts as understood once; types repeat, so they are read from the tree.
        let all: Vec<Number> = i.ast.modifiers.iter().filter_map(|m| number(m)).collect();
        i.ignore_if(|m| number(m).is_some());
        i.finish()?;
        let half = Number::Element(Element::F16);
        let numbers = match all[..] {
            [d, c] => [d, half, c],
            [d, a, b, c] if a.bits() == b.bits() && a == b => [d, a, c],
            _ => return i.error("needs the types of D and C, or of D, A, B and C, with A like B"),
        };
        let d = i.regs(0)?;
        expect(i, Role::C, numbers[0], d.len())?;
        let mut s = [Vec::new(), Vec::new(), Vec::new()];
        for (at, role) in [Role::A, Role::B, Role::C].into_iter().enumerate() {
            let n = numbers[if role == Role::C { 2 } else { 1 }];
            s[at] = i.srcs(at + 1, register_type(n))?;
            expect(i, role, n, s[at].len())?;
        }
        return Ok(Op::Wmma(Wmma::Multiply { shape, numbers, saturate, d, s }));
    }
    let role = i.need("a matrix", &[("a", Role::A), ("b", Role::B), ("c", Role::C), ("d", Role::C)])?;
    let by_rows = i.need("a layout", &[("row", true), ("col", false)])?;
    let space = i.space();
    let [number] = i.parse_all(number)[..] else { return i.error("needs one type of elements") };
    i.finish()?;
    let (fragment, memory) = if load { (0, 1) } else { (1, 0) };
    let stride = if i.count() > 2 { Some(i.src(2, Type::U32)?) } else { None };
    let matrix = Matrix { role, shape, number, by_rows, address: i.addr(memory, space)?, stride };
    Ok(Op::Wmma(if load {
        let d = i.regs(fragment)?;
        expect(i, role, number, d.len())?;
        Wmma::Load(matrix, d)
    } else {
        let s = i.srcs(fragment, register_type(number))?;
        expect(i, role, number, s.len())?;
        Wmma::Store(matrix, s)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_take_the_registers_the_isa_lists_exact() {
        let count = |role, shape, name| registers(role, shape, number(name).unwrap());
        assert_eq!(count(Role::A, [8, 32, 16], "f16"), 8);
        assert_eq!(count(Role::C, [16, 16, 16], "f16"), 4);
        assert_eq!(count(Role::A, [8, 32, 16], "bf16"), 2);
        assert_eq!(count(Role::B, [8, 32, 16], "bf16"), 8);
        assert_eq!(count(Role::B, [16, 16, 8], "tf32"), 4);
        assert_eq!(count(Role::A, [32, 8, 16], "u8"), 4);
        assert_eq!(count(Role::B, [32, 8, 16], "s8"), 1);
        assert_eq!(count(Role::C, [32, 8, 16], "s32"), 8);
        assert_eq!(count(Role::A, [8, 8, 4], "f64"), 1);
        assert_eq!(count(Role::C, [8, 8, 4], "f64"), 2);
    }
}
