//! Syntax tree to [`Kernel`](crate::program::Kernel): every name resolved, every modifier parsed, once.
//!
//! `link` lays out variables and walks the statements; one file of [`exec`](crate::exec) per family of instructions turns an
//! instruction into an [`Op`]. A modifier that a family does not ask for is an error: nothing is ignored in silence.

pub mod link;
pub mod operand;

use crate::error::Error;
use crate::exec::*;
use crate::memory::Space;
use crate::program::{Dst, Reg, Src};
use dualgemm_ptx::Type;
use dualgemm_ptx::ast::{Instruction, Operand};
use operand::Names;

/// An instruction being decoded: hands out modifiers and operands, and knows which are left.
pub struct Ins<'a> {
    pub ast: &'a Instruction,
    pub names: &'a Names,
    mods: Vec<(&'a str, bool)>,
}

/// What is decoded, or why it cannot be.
pub type Decoded<T = Op> = std::result::Result<T, Error>;

impl<'a> Ins<'a> {
    pub fn new(ast: &'a Instruction, names: &'a Names) -> Ins<'a> {
        Ins { ast, names, mods: ast.modifiers.iter().map(|m| (m.as_str(), false)).collect() }
    }

    pub fn error<T>(&self, reason: impl Into<String>) -> Decoded<T> {
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
    pub fn need<T: Copy>(&mut self, what: &str, choices: &[(&str, T)]) -> Decoded<T> {
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

    /// An instruction that changes nothing here, whatever its modifiers.
    pub fn nothing(&mut self) -> Op {
        self.ignore_if(|_| true);
        Op::new(|_| ())
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
    pub fn ty(&mut self) -> Decoded<Type> {
        match self.types()[..] {
            [ty] => Ok(ty),
            _ => self.error("needs one type"),
        }
    }

    /// Fails if a modifier has not been understood.
    pub fn finish(&self) -> Decoded<()> {
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

/// An instruction with the names around it.
pub fn instruction(ast: &Instruction, names: &Names) -> Decoded {
    let mut ins = Ins::new(ast, names);
    let op = family(&mut ins)?;
    ins.finish()?;
    Ok(op)
}

fn family(i: &mut Ins<'_>) -> Decoded {
    let modifier = |at: usize| i.ast.modifiers.get(at).map_or("", |m| m.as_str());
    match (i.ast.root.as_str(), modifier(0)) {
        ("add" | "sub" | "mul" | "mad" | "fma" | "div" | "min" | "max" | "abs" | "neg", _)
            if i.ast.types().any(|t| t.is_float()) =>
        {
            float::decode(i)
        }
        ("rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" | "copysign" | "testp", _) => {
            float::decode(i)
        }
        (
            "add" | "sub" | "mul" | "mad" | "div" | "min" | "max" | "abs" | "neg" | "rem" | "mul24" | "mad24"
            | "addc" | "subc" | "madc" | "sad" | "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr"
            | "shf" | "lop3" | "prmt" | "bfe" | "bfi" | "bfind" | "brev" | "popc" | "clz" | "fns" | "bmsk"
            | "szext" | "vabsdiff4" | "dp4a" | "dp2a" | "setp" | "set" | "selp" | "slct",
            _,
        ) => arith::decode(i),
        ("cvt" | "cvta" | "mov" | "isspacep" | "mapa" | "getctarank", _) => convert::decode(i),
        ("ld" | "ldu", _) => ld_st::load(i),
        ("st" | "red", "async") => copy::async_store(i),
        ("st", _) => ld_st::store(i),
        ("ldmatrix" | "stmatrix" | "movmatrix", _) => ld_st::matrix(i),
        ("atom" | "red", _) => atomic::decode(i),
        ("fence" | "membar", _) => fence::fence(i),
        ("bar" | "barrier", _) => fence::barrier(i),
        ("shfl" | "vote" | "match" | "redux" | "elect" | "activemask", _) => vote::decode(i),
        ("mbarrier", _) => mbarrier::decode(i),
        ("cp", "async") if modifier(1) != "bulk" => copy::cp_async(i),
        ("cp", "async" | "reduce") if i.ast.has("tensor") => tma::decode(i),
        ("cp", "async" | "reduce") => copy::bulk(i),
        ("tensormap", _) => tensor_map::decode(i),
        ("mma", _) => mma::decode(i),
        ("wmma", _) => wmma::decode(i),
        ("wgmma", _) => wgmma::decode(i),
        ("tcgen05", _) => tcgen05::decode(i),
        (
            "bra"
            | "brx"
            | "call"
            | "ret"
            | "exit"
            | "trap"
            | "brkpt"
            | "setmaxnreg"
            | "griddepcontrol"
            | "nanosleep"
            | "pmevent"
            | "clusterlaunchcontrol"
            | "createpolicy",
            _,
        ) => control::decode(i),
        // Hints about caches and tensor maps: they change no value.
        ("prefetch" | "prefetchu" | "applypriority" | "discard", _) => Ok(i.nothing()),
        _ => i.error("the simulator does not know this instruction"),
    }
}
