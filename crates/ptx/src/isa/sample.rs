//! Sample instructions of every row, for the tests that assemble or execute the table.

use super::Row;
use super::grammar::{Allowed, Part, Piece, Presence, Slot, parse};
use super::matching::Letters;
use crate::ast::{
    Address, AddressBase, Directive, Function, FunctionKind, Immediate, Instruction, Item, Line, Linkage,
    Module, Operand, Prototype, RegDecl, Statement, Variable, Version,
};
use crate::name::Name;
use crate::target::Target;
use crate::types::{Space, Type};

/// Up to this many combinations of modifiers a row is enumerated in full; beyond, one modifier at a time.
const FULL: usize = 256;

/// One instruction of a row, with registers of [`Row::sample_module`].
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The row it is of.
    pub row: &'static Row,
    /// The instruction.
    pub instruction: Instruction,
}

impl Row {
    /// Instructions that together use every modifier of the row, and every combination if these are few.
    pub fn samples(&'static self) -> Vec<Sample> {
        let Ok(pattern) = parse(self.form) else { return Vec::new() };
        let full = expand(&pattern.parts, FULL);
        let spelled = if full.len() <= FULL { full } else { one_at_a_time(&pattern.parts) };
        let optional = pattern.slots.iter().filter(|(p, _)| *p == Presence::May).count();
        let mut samples = Vec::new();
        for (modifiers, letters) in &spelled {
            for extra in 0..=optional {
                let mut left = extra;
                let mut wanted = |presence: &Presence| match presence {
                    Presence::Always => true,
                    Presence::If(flag) => letters.present.contains(flag),
                    Presence::May => left.checked_sub(1).map(|less| left = less).is_some(),
                };
                let mut numbers = Numbering::default();
                let slots = pattern.slots.iter().filter(|(presence, _)| wanted(presence));
                let operands = slots.map(|(_, slot)| numbers.operand(slot, letters)).collect();
                let modifiers = modifiers.iter().map(|m| Name::from(m.as_str()));
                let instruction = Instruction::new(&pattern.root, modifiers, operands);
                samples.push(Sample { row: self, instruction });
            }
        }
        samples
    }

    /// A module for `target` that contains `samples`, with all they refer to declared: it assembles if and
    /// only if the target has the instructions.
    pub fn sample_module(samples: &[Sample], target: Target, version: Version) -> Module {
        let mut items = vec![Item::Variable(Variable {
            linkage: Linkage::Extern,
            align: Some(1024),
            dims: vec![None],
            ..Variable::new(Space::Shared, Type::B8, "smem")
        })];
        for (name, returns, params) in CALLEES {
            items.push(Item::Function(Function {
                linkage: Linkage::Internal,
                returns: parameter(returns, "result"),
                params: parameter(params, "argument"),
                ..Function::new(FunctionKind::Device, name, vec![ret()])
            }));
        }
        // A kernel per row keeps register pressure low; ptxas wants one cta_group per kernel.
        let mut groups: Vec<(String, Vec<Statement>)> = Vec::new();
        for sample in samples {
            let pair = if sample.instruction.has("cta_group::2") { "_pair" } else { "" };
            let name = format!("{}{pair}", sample.row.name);
            let statement = Statement::Instruction(sample.instruction.clone());
            match groups.iter_mut().find(|(n, _)| *n == name) {
                Some((_, body)) => body.push(statement),
                None => groups.push((name, vec![statement])),
            }
        }
        items.extend(groups.into_iter().map(|(name, body)| {
            // `ret`, `trap` and the like are names of instructions.
            Item::Function(kernel(&format!("kernel_{name}"), body))
        }));
        Module::new(target, version, items)
    }
}

/// What the call rows call: name, whether it returns, whether it takes something.
const CALLEES: [(&str, bool, bool); 4] = [
    ("procedure", false, false),
    ("consumer", false, true),
    ("source", true, false),
    ("function", true, true),
];

/// The types of functions that the rows of calls through pointers name.
const PROTOTYPES: [(&str, bool, bool); 4] = [
    ("procedure_type", false, false),
    ("consumer_type", false, true),
    ("source_type", true, false),
    ("prototype", true, true),
];

const RESULT: &str = "result_0";
const ARGUMENT: &str = "argument_0";

/// One 32-bit parameter, or none.
fn parameter(present: bool, name: &str) -> Vec<Variable> {
    present.then(|| Variable::new(Space::Param, Type::B32, name)).into_iter().collect()
}

fn ret() -> Statement {
    Statement::Instruction(Instruction::new("ret", [].into_iter(), Vec::new()))
}

/// Every register a sample may name, by type.
const POOLS: [(Type, &str, u32); 8] = [
    (Type::Pred, "%p", 8),
    (Type::B8, "%rc", 16),
    (Type::B16, "%rs", 32),
    (Type::B32, "%r", 400),
    (Type::B64, "%rd", 32),
    (Type::B128, "%rq", 4),
    (Type::F32, "%f", 300),
    (Type::F64, "%fd", 16),
];

fn kernel(name: &str, samples: Vec<Statement>) -> Function {
    // 128-bit registers are younger than most instructions: declared only where used.
    let wide = |s: &Statement| matches!(s, Statement::Instruction(i) if i.to_string().contains("%rq"));
    let wide = samples.iter().any(wide);
    let mut body: Vec<Statement> = POOLS
        .iter()
        .filter(|(ty, ..)| *ty != Type::B128 || wide)
        .map(|(ty, prefix, count)| {
            let names = vec![((*prefix).into(), Some(*count))];
            Statement::Reg(RegDecl { line: Line::default(), vector: None, ty: *ty, names })
        })
        .collect();
    body.push(Statement::Variable(Variable::new(Space::Param, Type::B32, ARGUMENT)));
    body.push(Statement::Variable(Variable::new(Space::Param, Type::B32, RESULT)));
    body.push(Statement::Variable(Variable {
        dims: vec![Some(64)],
        align: Some(16),
        ..Variable::new(Space::Local, Type::B8, "scratch")
    }));
    body.push(Statement::Label(Line::default(), "start".into()));
    let uses = |root: &str| samples.iter().any(|s| matches!(s, Statement::Instruction(i) if i.root == root));
    if uses("brx") {
        body.push(Statement::BranchTargets("targets".into(), vec!["start".into(), "end".into()]));
    }
    if uses("call") {
        for (name, returns, params) in PROTOTYPES {
            body.push(Statement::CallPrototype(Prototype {
                name: name.into(),
                returns: parameter(returns, "_"),
                params: parameter(params, "_"),
                noreturn: false,
            }));
        }
    }
    body.extend(samples);
    body.push(Statement::Label(Line::default(), "end".into()));
    body.push(ret());
    Function {
        params: vec![Variable {
            dims: vec![Some(128)],
            align: Some(64),
            ..Variable::new(Space::Param, Type::B8, "parameter")
        }],
        directives: vec![
            Directive::Numeric("reqntid".into(), vec![128, 1, 1]),
            Directive::Numeric("minnctapersm".into(), vec![1]),
        ],
        ..Function::new(FunctionKind::Entry, name, body)
    }
}

/// Modifiers, and what they bind.
type Spelled = (Vec<String>, Letters);

/// Every combination, or more than `limit` of them if there are more.
fn expand(parts: &[Part], limit: usize) -> Vec<Spelled> {
    let mut list = vec![Spelled::default()];
    for part in parts {
        list = list.iter().flat_map(|before| options(part, before, limit)).collect();
        if list.len() > limit {
            break;
        }
    }
    list
}

/// What becomes of what is spelled before a part; of an optional one nothing first.
fn options(part: &Part, before: &Spelled, limit: usize) -> Vec<Spelled> {
    let (modifiers, letters) = before;
    let with = |more: &[String], letters| ([modifiers, more].concat(), letters);
    match part {
        Part::Modifier(pieces) => {
            spellings(pieces, letters).into_iter().map(|(text, letters)| with(&[text], letters)).collect()
        }
        Part::Optional(flag, inner) => {
            let more = expand(inner, limit).into_iter().map(|(more, inner)| {
                let mut letters = letters.clone();
                letters.bound.extend(inner.bound);
                letters.present.extend(inner.present);
                letters.present.extend(flag);
                with(&more, letters)
            });
            std::iter::once(before.clone()).chain(more).collect()
        }
    }
}

fn spellings(pieces: &[Piece], letters: &Letters) -> Vec<(String, Letters)> {
    let mut list = vec![(String::new(), letters.clone())];
    for piece in pieces {
        let spelled = |(text, letters): &(String, Letters)| match piece {
            Piece::Text(more) => vec![(format!("{text}{more}"), letters.clone())],
            Piece::Again(letter) => {
                let again = letters.get(*letter).unwrap_or_default();
                vec![(format!("{text}{again}"), letters.clone())]
            }
            Piece::Choice(letter, options) => {
                let choose = |option: &String| {
                    let mut letters = letters.clone();
                    letters.bound.extend(letter.map(|letter| (letter, option.clone())));
                    (format!("{text}{option}"), letters)
                };
                options.iter().map(choose).collect()
            }
        };
        list = list.iter().flat_map(spelled).collect();
    }
    list
}

/// The first spelling with every option absent, and each single departure from it.
fn one_at_a_time(parts: &[Part]) -> Vec<Spelled> {
    let mut out = Vec::new();
    for varied in 0..parts.len() {
        let mut list = vec![Spelled::default()];
        for (i, part) in parts.iter().enumerate() {
            let most = if i == varied { usize::MAX } else { 1 };
            let spelled = |before| options(part, before, usize::MAX).into_iter().take(most);
            list = list.iter().flat_map(spelled).collect();
        }
        for spelled in list {
            if !out.contains(&spelled) {
                out.push(spelled);
            }
        }
    }
    out
}

/// Hands out distinct registers within one instruction.
#[derive(Default)]
struct Numbering {
    used: [u32; POOLS.len()],
}

impl Numbering {
    fn register(&mut self, ty: Type) -> Name {
        let float = |ty| matches!(ty, Type::F32 | Type::F64);
        let like = |pool: Type| pool == ty || pool.bits() == ty.bits() && !float(pool) && !float(ty);
        let pool = POOLS.iter().position(|(pool, ..)| like(*pool)).unwrap_or(0);
        let (_, prefix, count) = POOLS[pool];
        let n = self.used[pool] % count;
        self.used[pool] += 1;
        format!("{prefix}{n}").into()
    }

    fn operand(&mut self, slot: &Slot, letters: &Letters) -> Operand {
        match slot {
            Slot::Value(value) => {
                let ty = letters.ty(&value.ty).or(letters.ty("T")).unwrap_or(Type::B32);
                // Narrow integers live in wider registers.
                let ty = if value.wider && ty.bits() == 8 { Type::B16 } else { ty };
                Operand::Ident(self.register(ty))
            }
            Slot::Number { allowed, .. } => Operand::Imm(Immediate::Int(match allowed {
                Allowed::Any => 0,
                Allowed::Range(from, _) => *from,
                Allowed::OneOf(list) => list[0],
            })),
            Slot::Address { space, .. } => {
                let base = match letters.space(space) {
                    "param" => "parameter".into(),
                    "param_out" => ARGUMENT.into(),
                    "map" => return Operand::Ident(self.register(Type::B64)),
                    "shared" | "shared::cta" | "shared::cluster" | "tmem" => self.register(Type::B32),
                    "local" => "scratch".into(),
                    _ => self.register(Type::B64),
                };
                Operand::Address(Address { base: AddressBase::Ident(base), offset: 0, unified: false })
            }
            Slot::List(slots) => Operand::List(
                slots
                    .iter()
                    .map(|slot| match self.operand(slot, letters) {
                        Operand::Address(Address { base: AddressBase::Ident(name), .. }) => {
                            Operand::Ident(name)
                        }
                        other => other,
                    })
                    .collect(),
            ),
            Slot::Vector(slots) => Operand::Vector(slots.iter().map(|s| self.operand(s, letters)).collect()),
            Slot::Repeat(slot, count) => {
                Operand::Vector((0..letters.count(count)).map(|_| self.operand(slot, letters)).collect())
            }
            Slot::Pair { first, second, .. } => {
                Operand::Pair(Box::new(self.operand(first, letters)), Box::new(self.operand(second, letters)))
            }
            Slot::Label(name) => Operand::Ident(if name == "targets" { "targets" } else { "end" }.into()),
            Slot::Symbol(name) => Operand::Ident(name.as_str().into()),
            Slot::Group(name) => {
                Operand::Group(vec![Operand::Ident(if name == "returns" { RESULT } else { ARGUMENT }.into())])
            }
            Slot::Sink => Operand::Sink,
        }
    }
}
