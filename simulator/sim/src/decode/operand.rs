//! Operands: names to registers, symbols to addresses, numbers to bits.

use super::*;
use crate::machine::ids::{SPECIALS, VECTORS};
use crate::names::modifiers;
use dualgemm_ptx::Name;
use dualgemm_ptx::ast::{AddressBase, Immediate};
use std::collections::HashMap;

#[derive(Debug, Clone, PartialEq)]
pub enum Symbol {
    Reg(Reg),
    Label(u32),
    /// A shared variable: its offset in the address space.
    Shared(u32),
    /// A variable of another space: its address there.
    Memory(Space, u64),
    /// A parameter or result of a device function, in the thread's memory for them.
    FuncParam {
        at: u32,
        bytes: u32,
    },
    /// A device function: its index among the kernel's callees.
    Function {
        /// Its index among the functions that the kernel reaches.
        callee: u32,
        /// What a pointer to it holds.
        address: u64,
    },
    /// A function outside the module.
    Extern(Name),
    /// The labels of `.branchtargets`.
    Targets(Vec<Name>),
}

/// The scopes around an instruction, innermost last.
#[derive(Debug, Default)]
pub struct Names(Vec<HashMap<Name, Symbol>>);

impl Names {
    /// Opens a scope.
    pub fn push(&mut self) {
        self.0.push(HashMap::new());
    }

    /// Closes the innermost scope.
    pub fn pop(&mut self) {
        self.0.pop();
    }

    /// Declares a name in the innermost scope.
    pub fn declare(&mut self, name: Name, symbol: Symbol) {
        if let Some(scope) = self.0.last_mut() {
            scope.insert(name, symbol);
        }
    }

    pub fn get(&self, name: &str) -> Option<&Symbol> {
        self.0.iter().rev().find_map(|scope| scope.get(name))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addr {
    pub base: Src,
    /// Bytes added.
    pub offset: i64,
    pub space: Space,
}

/// A special register. The first rows have components, and every `.w` is zero. `%envreg` and `%pm` have numbers.
fn special(name: &str) -> Option<Src> {
    let (base, component) = match name.rsplit_once('.') {
        Some((base, letter)) => (base, ["x", "y", "z", "w"].iter().position(|c| *c == letter)?),
        None => (name, 0),
    };
    let is_numbered = |prefix: &str, count: u32| {
        let number = base.strip_prefix(prefix)?;
        let number = if prefix == "%pm" { number.trim_end_matches("_64") } else { number };
        Some((0..count).any(|n| n.to_string() == number))
    };
    let family = match (is_numbered("%envreg", 32), is_numbered("%pm", 8)) {
        (Some(true), _) => "%envreg",
        (_, Some(true)) => "%pm",
        (None, None) => base,
        _ => return None,
    };
    let row = SPECIALS.iter().position(|(name, _)| *name == family)?;
    match component {
        _ if row >= VECTORS && base != name => None,
        3 => Some(Src::Imm(0)),
        _ => Some(Src::Special(row as u8, component as u8)),
    }
}

/// The untyped type of a width.
pub fn untyped(bits: u32) -> Type {
    match bits {
        8 => Type::B8,
        16 => Type::B16,
        32 => Type::B32,
        _ => Type::B64,
    }
}

/// The bits of a number as a value of `ty`.
pub fn immediate(imm: Immediate, ty: Type) -> u64 {
    let bits = match (imm, ty) {
        (Immediate::F64(bits), Type::F32 | Type::B32) => (f64::from_bits(bits) as f32).to_bits().into(),
        (Immediate::F32(bits), Type::F64) => f64::from(f32::from_bits(bits)).to_bits(),
        (other, _) => other.bits(),
    };
    match ty.bits() {
        1 => u64::from(bits != 0),
        n if n < 64 => bits & ((1 << n) - 1),
        _ => bits,
    }
}

impl Ins<'_> {
    fn undeclared<T>(&self, name: &str) -> Decoded<T> {
        Err(Error::Undeclared { line: self.ast.line.0, name: name.into() })
    }

    pub fn operand(&self, i: usize) -> Decoded<&Operand> {
        match self.ast.operands.get(i) {
            Some(operand) => Ok(operand),
            None => self.error(format!("has {} operands; number {} is missing", self.count(), i + 1)),
        }
    }

    fn named(&self, name: &Name, offset: i64, ty: Type) -> Decoded<Src> {
        let symbol = self.names.get(name);
        match symbol {
            Some(Symbol::Shared(at)) => return Ok(Src::Shared(at.wrapping_add(offset as u32))),
            Some(Symbol::Memory(_, at)) => return Ok(Src::Imm(at.wrapping_add(offset as u64))),
            Some(Symbol::FuncParam { at, .. }) => {
                return Ok(Src::Imm(u64::from(*at).wrapping_add(offset as u64)));
            }
            None if &**name == "WARP_SZ" => return Ok(Src::Imm(immediate(Immediate::Int(32 + offset), ty))),
            _ if offset != 0 => {
                return self.error(format!("`{name}` and a number are added in addresses alone"));
            }
            _ => {}
        }
        match symbol {
            Some(Symbol::Reg(reg)) => Ok(Src::Reg(*reg)),
            Some(Symbol::Function { address, .. }) => Ok(Src::Imm(*address)),
            Some(_) => self.error(format!("`{name}` is not a value that a register can hold here")),
            None => special(name).map_or_else(|| self.undeclared(name), Ok),
        }
    }

    pub fn value(&self, operand: &Operand, ty: Type) -> Decoded<Src> {
        match operand {
            Operand::Ident(name) => self.named(name, 0, ty),
            Operand::Offset(name, offset) => self.named(name, *offset, ty),
            Operand::Imm(imm) => Ok(Src::Imm(immediate(*imm, ty))),
            Operand::Not(name) => match self.names.get(name) {
                Some(Symbol::Reg(Reg::Pred(i))) => Ok(Src::NotPred(*i)),
                Some(_) => self.error(format!("`!{name}` needs a predicate")),
                None => self.undeclared(name),
            },
            // A vector of one, as nvcc writes the scales of `mma`.
            Operand::Vector(list) if list.len() == 1 => self.value(&list[0], ty),
            _ => self.error(format!("operand {operand:?} is not a value")),
        }
    }

    /// Operand `i` as a value of `ty`.
    pub fn src(&self, i: usize, ty: Type) -> Decoded<Src> {
        self.value(self.operand(i)?, ty)
    }

    /// An operand as a place for a result.
    pub fn result(&self, operand: &Operand) -> Decoded<Dst> {
        match operand {
            Operand::Sink => Ok(Dst::Sink),
            Operand::Ident(name) => match self.names.get(name) {
                Some(Symbol::Reg(reg)) => Ok(Dst::Reg(*reg)),
                Some(_) => self.error(format!("`{name}` is not a register")),
                None => self.undeclared(name),
            },
            _ => self.error(format!("operand {operand:?} cannot take a result")),
        }
    }

    /// Operand `i` as a place for a result.
    pub fn dst(&self, i: usize) -> Decoded<Dst> {
        self.result(self.operand(i)?)
    }

    /// Operand `i` as a register.
    pub fn reg(&self, operand: &Operand) -> Decoded<Reg> {
        match self.result(operand)? {
            Dst::Reg(reg) => Ok(reg),
            Dst::Sink => self.error("`_` is not allowed here"),
        }
    }

    /// The elements of a vector operand; a single operand counts as a vector of one.
    pub fn elements(operand: &Operand) -> &[Operand] {
        match operand {
            Operand::Vector(list) | Operand::Group(list) => list,
            other => std::slice::from_ref(other),
        }
    }

    /// Operand `i` as a vector of values.
    pub fn srcs(&self, i: usize, ty: Type) -> Decoded<Vec<Src>> {
        Ins::elements(self.operand(i)?).iter().map(|o| self.value(o, ty)).collect()
    }

    /// Operand `i` as a vector of results.
    pub fn dsts(&self, i: usize) -> Decoded<Vec<Dst>> {
        Ins::elements(self.operand(i)?).iter().map(|o| self.result(o)).collect()
    }

    /// Operand `i` as a vector of registers.
    pub fn regs(&self, i: usize) -> Decoded<Vec<Reg>> {
        Ins::elements(self.operand(i)?).iter().map(|o| self.reg(o)).collect()
    }

    /// Operand `i` as a value of `ty`, if there is one.
    pub fn optional(&self, i: usize, ty: Type) -> Decoded<Option<Src>> {
        (i < self.count()).then(|| self.src(i, ty)).transpose()
    }

    /// Operand `i` as a constant.
    pub fn constant(&self, i: usize) -> Decoded<u32> {
        match self.src(i, Type::U64)? {
            Src::Imm(n) if n <= u32::MAX.into() => Ok(n as u32),
            _ => self.error(format!("operand {} must be a constant of 32 bits", i + 1)),
        }
    }

    /// Operand `i` as one result, or as two with `|` between.
    pub fn pair(&self, i: usize) -> Decoded<[Dst; 2]> {
        match self.operand(i)? {
            Operand::Pair(d, p) => Ok([self.result(d)?, self.result(p)?]),
            d => Ok([self.result(d)?, Dst::Sink]),
        }
    }

    /// Operand `i` as a predicate source.
    pub fn predicate(&self, i: usize) -> Decoded<Src> {
        self.src(i, Type::Pred)
    }

    /// An address operand that points into `space`.
    pub fn address(&self, operand: &Operand, space: Space) -> Decoded<Addr> {
        let (base, offset) = match operand {
            Operand::Address(a) => (&a.base, a.offset),
            Operand::List(list) if !list.is_empty() => return self.address(&list[0], space),
            Operand::Ident(name) => (&AddressBase::Ident(name.clone()), 0),
            Operand::Offset(name, offset) => (&AddressBase::Ident(name.clone()), *offset),
            Operand::Imm(imm) => (&AddressBase::Absolute(imm.bits()), 0),
            _ => return self.error(format!("operand {operand:?} is not an address")),
        };
        let name = match base {
            AddressBase::Absolute(at) => return Ok(Addr { base: Src::Imm(*at), offset, space }),
            AddressBase::Ident(name) => name,
        };
        Ok(match self.names.get(name) {
            Some(Symbol::Reg(reg)) => Addr { base: Src::Reg(*reg), offset, space },
            Some(Symbol::Shared(at)) if space == Space::Generic => {
                return self.error(format!(
                    "`{name}` (at {at:#x}) is a shared variable, but the access is generic: use .shared or cvta"
                ));
            }
            Some(Symbol::Shared(at)) => Addr { base: Src::Shared(*at), offset, space },
            Some(Symbol::Memory(own, at)) => {
                let compatible = space == *own || space == Space::Generic && *own == Space::Global;
                if !compatible {
                    return self.error(format!("`{name}` is a {own} variable, but the access is {space}"));
                }
                Addr { base: Src::Imm(*at), offset, space: *own }
            }
            Some(Symbol::FuncParam { at, .. }) if space == Space::Param => {
                Addr { base: Src::Imm((*at).into()), offset, space: Space::FuncParam }
            }
            Some(_) => return self.error(format!("`{name}` is not an address in {space} memory")),
            None => return self.undeclared(name),
        })
    }

    /// Operand `i` as an address in `space`.
    pub fn addr(&self, i: usize, space: Space) -> Decoded<Addr> {
        self.address(self.operand(i)?, space)
    }

    /// The label an operand names.
    pub fn label(&self, name: &Name) -> Decoded<u32> {
        match self.names.get(name) {
            Some(Symbol::Label(pc)) => Ok(*pc),
            Some(_) => self.error(format!("`{name}` is not a label")),
            None => self.undeclared(name),
        }
    }

    /// The space among the modifiers; generic if there is none.
    pub fn space(&mut self) -> Space {
        self.one_of(&[
            ("global", Space::Global),
            ("shared::cluster", Space::SharedCluster),
            ("shared::cta", Space::SharedCta),
            ("shared", Space::SharedCta),
            ("local", Space::Local),
            ("const", Space::Const),
            ("param::entry", Space::Param),
            ("param::func", Space::Param),
            ("param", Space::Param),
        ])
        .unwrap_or(Space::Generic)
    }

    /// The spaces of a copy, in order: the destination's, then the source's.
    pub fn spaces(&mut self) -> Vec<Space> {
        self.parse_all(|m| match m {
            "global" => Some(Space::Global),
            "shared::cluster" => Some(Space::SharedCluster),
            "shared::cta" => Some(Space::SharedCta),
            _ => None,
        })
    }

    /// Marks cache and eviction hints as understood.
    pub fn cache_hints(&mut self) {
        self.ignore(&["ca", "cg", "cs", "cv", "wb", "wt", "lu", "nc"]);
        self.ignore_if(|m| m.starts_with("L1::") || m.starts_with("L2::") || m.starts_with("level::"));
    }

    /// Ordering modifiers: whether the access is strong, acquires, releases, and how far it is visible.
    pub fn ordering(&mut self) -> Ordering {
        let volatile = self.has("volatile");
        let relaxed = self.has("relaxed");
        let acq_rel = self.has("acq_rel");
        let acquire = self.has("acquire") | acq_rel;
        let release = self.has("release") | acq_rel;
        let weak = self.has("weak");
        let scope = self.one_of(Scope::NAMES);
        let strong = !weak && (volatile || relaxed || acquire || release);
        let constant = self.has("nc") || self.ast.root == "ldu";
        Ordering { strong, acquire, release, scope: scope.unwrap_or(Scope::Gpu), constant }
    }
}

modifiers! {
    /// How far synchronization reaches. System scope is as GPU scope here: there is one device.
    Scope { Cta "cta", Cluster "cluster", Gpu "gpu" | "sys" }
}

/// Ordering of a memory access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ordering {
    /// Takes part in synchronization.
    pub strong: bool,
    pub acquire: bool,
    pub release: bool,
    pub scope: Scope,
    /// Reads what nothing writes while the kernel runs.
    pub constant: bool,
}

impl Ordering {
    /// How far a strong access reaches.
    pub fn reach(self) -> Option<Scope> {
        self.strong.then_some(self.scope)
    }
}
