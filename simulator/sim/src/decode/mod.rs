//! Syntax tree to [`Kernel`](crate::program::Kernel): every name resolved, every modifier parsed, once.
//!
//! `link` lays out variables and walks the statements; one file per family of instructions turns an instruction
//! into an [`Op`]. The families are those of `exec`, where the same file stem executes the operation. A modifier
//! that a family does not ask for is an error: nothing is ignored in silence.

pub mod arith;
pub mod atomic;
pub mod control;
pub mod convert;
pub mod copy;
pub mod fence;
pub mod float;
pub mod ld_st;
pub mod link;
pub mod mbarrier;
pub mod mma;
pub mod operand;
pub mod tcgen05;
pub mod tensor_map;
pub mod tma;
pub mod vote;
pub mod wgmma;
pub mod wmma;

// What most families work with; they import it from here.
use crate::error::Error;
use crate::memory::Space;
use crate::names::modifiers;
use crate::program::{Dst, Reg, Src};
use dualgemm_ptx::Type;
use dualgemm_ptx::ast::{Instruction, Operand};
use operand::{Addr, Names, Ordering, Scope, untyped};

#[derive(Debug, Clone)]
pub enum Op {
    /// Nothing to simulate: hints, prefetches, `nanosleep`.
    Nop,
    Branch(u32),
    Control(control::Control),
    Arith(arith::Arith),
    Float(float::Float),
    Convert(convert::Convert),
    Memory(ld_st::Memory),
    Matrix(ld_st::Matrix),
    Atomic(atomic::Atomic),
    Fence(fence::Fence),
    Barrier(fence::Barrier),
    Vote(vote::Vote),
    Mbarrier(mbarrier::Mbar),
    CpAsync(copy::CpAsync),
    /// `cp.async.bulk` without tensor, `st.async`, `red.async`
    Bulk(copy::Bulk),
    Tensor(tma::Tensor),
    TensorMap(tensor_map::TensorMapOp),
    Mma(mma::Mma),
    Wmma(wmma::Wmma),
    Wgmma(wgmma::Wgmma),
    Tcgen05(tcgen05::Tcgen05),
}

impl Op {
    /// Whether the operation reads and writes registers of its own lane and does nothing else.
    pub const fn only_computes(&self) -> bool {
        matches!(self, Op::Arith(_) | Op::Float(_) | Op::Convert(_))
    }
}

/// An instruction being decoded: hands out modifiers and operands, and knows which are left.
pub struct Ins<'a> {
    pub ast: &'a Instruction,
    pub names: &'a Names,
    mods: Vec<(&'a str, bool)>,
}

pub type Result<T> = std::result::Result<T, Error>;

impl<'a> Ins<'a> {
    pub fn new(ast: &'a Instruction, names: &'a Names) -> Ins<'a> {
        Ins { ast, names, mods: ast.modifiers.iter().map(|m| (m.as_str(), false)).collect() }
    }

    pub fn error<T>(&self, reason: impl Into<String>) -> Result<T> {
        Err(Error::refused(self.ast.line.0, self.ast.opcode(), reason))
    }

    /// Whether modifier `name` is present; it counts as understood then.
    pub fn has(&mut self, name: &str) -> bool {
        let mut found = false;
        for (m, used) in &mut self.mods {
            if *m == name {
                *used = true;
                found = true;
            }
        }
        found
    }

    /// The first of `choices` that is present.
    pub fn one_of<T: Copy>(&mut self, choices: &[(&str, T)]) -> Option<T> {
        choices.iter().find(|(name, _)| self.has(name)).map(|(_, value)| *value)
    }

    /// As [`one_of`](Ins::one_of); an error that lists the choices if none is present.
    pub fn need<T: Copy>(&mut self, what: &str, choices: &[(&str, T)]) -> Result<T> {
        match self.one_of(choices) {
            Some(value) => Ok(value),
            None => {
                let list: Vec<_> = choices.iter().map(|(n, _)| format!(".{n}")).collect();
                self.error(format!("needs {what}: one of {}", list.join(" ")))
            }
        }
    }

    /// Marks modifiers that change nothing here.
    pub fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.has(name);
        }
    }

    /// Marks modifiers for which `known` holds.
    pub fn ignore_if(&mut self, known: impl Fn(&str) -> bool) {
        for (m, used) in &mut self.mods {
            *used |= known(m);
        }
    }

    /// Modifiers not understood yet that `parse` accepts, in order; they count as understood then.
    pub fn parse_all<T>(&mut self, parse: impl Fn(&str) -> Option<T>) -> Vec<T> {
        let mut out = Vec::new();
        for (m, used) in &mut self.mods {
            if !*used && let Some(value) = parse(m) {
                *used = true;
                out.push(value);
            }
        }
        out
    }

    /// The types among the modifiers, in order.
    pub fn types(&mut self) -> Vec<Type> {
        self.parse_all(Type::from_name)
    }

    /// The one type among the modifiers.
    pub fn ty(&mut self) -> Result<Type> {
        match self.types()[..] {
            [ty] => Ok(ty),
            _ => self.error("needs one type"),
        }
    }

    /// Fails if a modifier has not been understood.
    pub fn finish(&self) -> Result<()> {
        let left: Vec<_> = self.mods.iter().filter(|(_, used)| !used).map(|(m, _)| format!(".{m}")).collect();
        if left.is_empty() {
            return Ok(());
        }
        self.error(format!("the simulator does not know {} of this instruction", left.join(" ")))
    }

    pub fn count(&self) -> usize {
        self.ast.operands.len()
    }
}

pub fn instruction(ast: &Instruction, names: &Names) -> Result<Op> {
    let mut ins = Ins::new(ast, names);
    let i = &mut ins;
    let sub = ast.modifiers.first().map_or("", |m| m.as_str());
    let second = ast.modifiers.get(1).map_or("", |m| m.as_str());
    let op = match (ast.root.as_str(), sub) {
        ("bra", _) => control::branch(i)?,
        ("brx" | "call" | "ret" | "exit" | "trap" | "brkpt", _) => control::decode(i)?,
        ("add" | "sub" | "mul" | "mad" | "fma" | "div" | "min" | "max" | "abs" | "neg", _)
            if ast.types().any(|t| t.is_float()) =>
        {
            float::decode(i)?
        }
        ("rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" | "copysign" | "testp", _) => {
            float::decode(i)?
        }
        (
            "add" | "sub" | "mul" | "mad" | "div" | "min" | "max" | "abs" | "neg" | "rem" | "mul24" | "mad24"
            | "addc" | "subc" | "madc" | "sad" | "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr"
            | "shf" | "lop3" | "prmt" | "bfe" | "bfi" | "bfind" | "brev" | "popc" | "clz" | "fns" | "bmsk"
            | "szext" | "vabsdiff4" | "dp4a" | "dp2a" | "setp" | "set" | "selp" | "slct",
            _,
        ) => arith::decode(i)?,
        ("cvt" | "cvta" | "mov" | "isspacep" | "mapa" | "getctarank", _) => convert::decode(i)?,
        ("ld" | "ldu", _) => ld_st::load(i)?,
        ("st", "async") => copy::st_async(i)?,
        ("st", "bulk") => copy::st_bulk(i)?,
        ("st", _) => ld_st::store(i)?,
        ("ldmatrix" | "stmatrix" | "movmatrix", _) => ld_st::matrix(i)?,
        ("red", "async") => copy::red_async(i)?,
        ("atom" | "red", _) => atomic::decode(i)?,
        ("fence" | "membar", _) => fence::fence(i)?,
        ("bar" | "barrier", _) => fence::barrier(i)?,
        ("shfl" | "vote" | "match" | "redux" | "elect" | "activemask", _) => vote::decode(i)?,
        ("mbarrier", _) => mbarrier::decode(i)?,
        ("cp", "async") if second == "bulk" && ast.has("tensor") => tma::decode(i)?,
        ("cp", "async") if second == "bulk" => copy::bulk(i)?,
        ("cp", "async") => copy::cp_async(i)?,
        ("cp", "reduce") if ast.has("tensor") => tma::decode(i)?,
        ("cp", "reduce") => copy::bulk(i)?,
        ("tensormap", _) => tensor_map::decode(i)?,
        ("mma", _) => mma::decode(i)?,
        ("wmma", _) => wmma::decode(i)?,
        ("wgmma", _) => wgmma::decode(i)?,
        ("tcgen05", _) => tcgen05::decode(i)?,
        ("setmaxnreg" | "griddepcontrol" | "nanosleep" | "pmevent" | "clusterlaunchcontrol", _) => {
            control::decode(i)?
        }
        // Hints about caches and tensor maps: they change no value.
        ("prefetch" | "prefetchu" | "applypriority" | "discard" | "createpolicy", _) => control::hint(i)?,
        _ => return i.error("the simulator does not know this instruction"),
    };
    Ok(op)
}
