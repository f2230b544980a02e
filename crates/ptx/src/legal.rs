//! Is a module legal on the target it names? Every instruction must be a row of the table that the target and
//! the PTX version have, with operands the form allows.
//!
//! The builder runs [`check`] on what it built; [`check_foreign`] judges modules that others wrote. Both know only
//! what the table knows: an instruction missing there is reported as unknown, not as wrong.

use crate::ast::{Function, Instruction, Module, RegDecl, Statement, Version};
use crate::isa::grammar::{Pattern, storage};
use crate::isa::{self, Fit, Letters, Row, Scope};
use crate::name::Name;
use crate::target::{Target, Targets};
use crate::types::Type;
use std::collections::HashMap;
use thiserror::Error;

/// One thing that is not legal. `line` is 0 in a module that was built, not read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Illegal {
    /// `.target` is not one this crate knows.
    #[error("target {found} is not known; known are {known}", known = Targets::ALL)]
    UnknownTarget { found: String },
    /// The module's PTX version does not have its target yet.
    #[error("target {target} needs PTX {needs}, the module is written for PTX {found}")]
    TargetVersion { target: Target, needs: Version, found: Version },
    /// An instruction that is not legal.
    #[error("{function}, line {line}: `{instruction}`{problem}")]
    Instruction { function: String, line: u32, instruction: String, problem: Problem },
}

/// Why an instruction is not legal. Its text is the end of a sentence that starts with the instruction.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Problem {
    /// No row of the table has this opcode.
    #[error(": no such instruction is known{forms}")]
    Unknown { forms: String },
    /// The target lacks the instruction.
    #[error(" does not exist on {target}; {row} needs {needs}")]
    Target { target: Target, row: &'static str, needs: Targets },
    /// The PTX version lacks the instruction.
    #[error(" does not exist in PTX {found}; {row} needs PTX {needs}")]
    Version { found: Version, row: &'static str, needs: Version },
    /// An operand is not what the form takes.
    #[error(": operand {index} must be {expected} ({row})")]
    Operand { index: usize, expected: String, row: &'static str },
    /// The guard is no predicate register.
    #[error(": the guard {0} is not a predicate register")]
    Guard(String),
}

/// Opcodes whose modifiers ptxas takes in any order.
#[rustfmt::skip]
const ANY_ORDER: &[&str] = &[
    "abs", "add", "applypriority", "atom", "bfind", "bmsk", "cvt", "discard", "div", "ex2", "fma", "getctarank",
    "ldmatrix", "lg2", "lop3", "mapa", "match", "max", "min", "movmatrix", "mul", "neg", "prefetch", "prmt", "rcp",
    "red", "redux", "rsqrt", "set", "setp", "shfl", "sin", "cos", "sqrt", "stmatrix", "sub", "szext", "tanh",
    "testp", "vote",
];

/// Everything in `module` that its target or version does not have, in text order. Empty: legal.
pub fn check(module: &Module) -> Vec<Illegal> {
    let name = module.target.first().map_or("", |t| t.as_str());
    let Some(target) = Target::from_name(name) else {
        return vec![Illegal::UnknownTarget { found: name.into() }];
    };
    let mut out = Vec::new();
    if module.version < target.since() {
        out.push(Illegal::TargetVersion { target, needs: target.since(), found: module.version });
    }
    all(module, (Some(target), false), &mut out);
    out
}

/// The instructions of a module that others wrote that no form of the table and of [`isa::foreign`] has on its target, if
/// that is known, and repeated modifiers. Nothing else is said of instructions whose first word the table lacks, and nothing of
/// versions.
pub fn check_foreign(module: &Module) -> Vec<Illegal> {
    let target = module.target.first().and_then(|name| Target::from_name(name));
    let mut out = Vec::new();
    all(module, (target, true), &mut out);
    out
}

fn all(module: &Module, (target, foreign): (Option<Target>, bool), out: &mut Vec<Illegal>) {
    let mut opcodes = HashMap::new();
    for function in module.functions() {
        let mut registers = Registers::default();
        for param in function.params.iter().chain(&function.returns) {
            // Device functions may take registers.
            if param.space == crate::types::Space::Reg {
                registers.declare(&param.name, None, param.ty);
            }
        }
        let version = module.version;
        let mut context = Context { function, target, foreign, version, opcodes: &mut opcodes };
        context.body(function.body.as_deref().unwrap_or_default(), &mut registers, out);
    }
}

/// The registers visible at a statement.
#[derive(Default, Clone)]
struct Registers {
    single: HashMap<String, Type>,
    /// `r<10>`: prefix to type and count.
    ranges: HashMap<String, (Type, u32)>,
}

impl Registers {
    fn declare(&mut self, name: &str, count: Option<u32>, ty: Type) {
        match count {
            None => self.single.insert(name.to_string(), ty).map(drop),
            Some(n) => self.ranges.insert(name.to_string(), (ty, n)).map(drop),
        };
    }

    fn declare_all(&mut self, reg: &RegDecl) {
        for (name, count) in &reg.names {
            self.declare(name, *count, reg.ty);
            // Components of a vector register.
            if reg.vector.is_some() {
                for component in ["x", "y", "z", "w"] {
                    self.declare(&format!("{name}.{component}"), None, reg.ty);
                }
            }
        }
    }
}

impl Scope for Registers {
    fn register(&self, name: &str) -> Option<Type> {
        if let Some(ty) = self.single.get(name) {
            return Some(*ty);
        }
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        // `r1<10>` declares r10 to r19: the prefix may itself end in digits.
        (prefix.len()..name.len()).find_map(|cut| {
            let (ty, count) = self.ranges.get(&name[..cut])?;
            let digits = &name[cut..];
            let number: u32 = digits.parse().ok()?;
            (number < *count && (digits.len() == 1 || !digits.starts_with('0'))).then_some(*ty)
        })
    }
}

/// The forms an opcode belongs to, and how it spells each.
type Forms = Vec<(&'static Row, &'static Pattern, Vec<Letters>)>;

struct Context<'a> {
    function: &'a Function,
    target: Option<Target>,
    /// Whether others wrote the module.
    foreign: bool,
    version: Version,
    /// Forms of the opcodes met so far: a module has few opcodes and many instructions.
    opcodes: &'a mut HashMap<String, Forms>,
}

impl Context<'_> {
    fn body(&mut self, list: &[Statement], registers: &mut Registers, out: &mut Vec<Illegal>) {
        for statement in list {
            match statement {
                Statement::Reg(reg) => registers.declare_all(reg),
                Statement::Block(inner) => self.body(inner, &mut registers.clone(), out),
                Statement::Instruction(instruction) => {
                    out.extend(self.problem(instruction, registers).map(|problem| Illegal::Instruction {
                        function: self.function.name.to_string(),
                        line: instruction.line.0,
                        instruction: instruction.to_string(),
                        problem,
                    }));
                }
                _ => {}
            }
        }
    }

    fn problem(&mut self, instruction: &Instruction, registers: &Registers) -> Option<Problem> {
        if let Some(guard) = &instruction.guard
            && registers.register(&guard.register) != Some(Type::Pred)
        {
            return Some(Problem::Guard(guard.register.to_string()));
        }
        let of_root = |table: &'static isa::Opcodes| {
            table.get(&*instruction.root).map(Vec::as_slice).unwrap_or_default()
        };
        let candidates = of_root(&isa::OPCODES);
        if self.foreign && candidates.is_empty() && !repeats(instruction) {
            return None;
        }
        let others = if self.foreign { of_root(&isa::FOREIGN) } else { &[] };
        let any_order = self.foreign && is_in_any_order(instruction);
        let forms = self.opcodes.entry(instruction.opcode()).or_insert_with(|| {
            let spelled = |pattern: &Pattern| match any_order {
                true => isa::opcode_in_any_order(pattern, &instruction.modifiers),
                false => isa::opcode(pattern, &instruction.modifiers),
            };
            let all = candidates.iter().chain(others).map(|(row, pattern)| (*row, pattern, spelled(pattern)));
            all.filter(|(.., ways)| !ways.is_empty()).collect()
        });
        let fits: Vec<(&'static Row, Fit)> = forms
            .iter()
            .map(|(row, pattern, ways)| (*row, isa::fit(pattern, ways, &instruction.operands, registers)))
            .collect();
        let right: Vec<&Row> = fits.iter().filter(|(_, fit)| *fit == Fit::Yes).map(|(row, _)| *row).collect();
        let has = |row: &Row| self.target.is_none_or(|target| row.targets.contains(target));
        if right.iter().any(|row| has(row) && (self.foreign || row.since <= self.version)) {
            return None;
        }
        // The closest miss: too old a version, the wrong target, a wrong operand, in this order.
        if let Some(row) = right.iter().filter(|row| has(row)).min_by_key(|row| row.since) {
            return Some(Problem::Version { found: self.version, row: row.name, needs: row.since });
        }
        if let (Some(row), Some(target)) = (right.first(), self.target) {
            let needs = right.iter().fold(row.targets, |all, row| all.with(row.targets));
            return Some(Problem::Target { target, row: row.name, needs });
        }
        Some(unfit(instruction, &fits, candidates))
    }
}

/// Whether ptxas does not look at the order of the modifiers: of loads and stores those before the vector and the type.
fn is_in_any_order(instruction: &Instruction) -> bool {
    let is_vector = |name: &Name| matches!(&**name, "v2" | "v4" | "v8");
    match (&*instruction.root, &instruction.modifiers[..]) {
        ("ld" | "st", [front @ .., vector, ty]) => {
            let plain = !front.iter().any(|name| is_vector(name) || storage(name).is_some());
            plain && storage(ty).is_some() && storage(vector).is_none() && !instruction.has("async")
        }
        // The format that is widened stands behind `.b8x16`.
        ("ldmatrix", _) if instruction.has("b8x16") => false,
        (root, _) => ANY_ORDER.contains(&root),
    }
}

/// Whether a modifier that is no type and no order of a matrix comes twice.
fn repeats(instruction: &Instruction) -> bool {
    let list = &instruction.modifiers;
    let once = |name: &str| storage(name).is_none() && !matches!(name, "row" | "col");
    (0..list.len()).any(|at| once(&list[at]) && list[..at].contains(&list[at]))
}

/// Why no form has the instruction: the operand that the nearest form with its opcode does not take, or the forms with the
/// same first word.
fn unfit(
    instruction: &Instruction,
    fits: &[(&'static Row, Fit)],
    candidates: &[(&'static Row, Pattern)],
) -> Problem {
    // Among equals the first row of the table: `max_by_key` takes the last.
    let furthest = fits.iter().rev().filter_map(|(row, fit)| match fit {
        Fit::No(index, expected) => Some((*index, row.name, expected)),
        Fit::Yes => None,
    });
    if let Some((index, row, expected)) = furthest.max_by_key(|(index, ..)| *index) {
        return Problem::Operand { index: index + 1, expected: expected.clone(), row };
    }
    // The forms that share most of the modifiers.
    let mut near: Vec<&Row> = candidates.iter().map(|(row, _)| *row).collect();
    let shared = |row: &Row| instruction.modifiers.iter().filter(|m| row.form.contains(m.as_str())).count();
    near.sort_by_key(|row| std::cmp::Reverse(shared(row)));
    let forms: Vec<&str> = near.iter().take(2).map(|row| row.form).collect();
    let forms = match forms.len() {
        0 => String::new(),
        _ => format!("; the nearest forms are: {}", forms.join("; ")),
    };
    Problem::Unknown { forms }
}
