//! The edits: what of a synchronizing instruction can be dropped, weakened and moved.

use std::fmt;
use std::ops::Range;

use dualgemm_ptx::ast::{Immediate, Instruction, Item, Line, Module, Operand, RegDecl, Statement};
use dualgemm_ptx::{Name, Type};

use crate::units::{Path, commute, each, has_effect, is_wait_loop, share_registers, units};

/// What a mutant does to its instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The instruction is gone; of a wait in a loop, the loop.
    Drop,
    /// A wait that its loop repeated is made once.
    NoRetry,
    /// Release or acquire becomes relaxed.
    Relaxed,
    /// A wider scope becomes `.cta`.
    Cta,
    /// One more group may be under way after a wait for groups.
    OneGroupMore,
    /// 16 bytes more are expected.
    MoreBytes,
    /// 16 bytes fewer are expected.
    FewerBytes,
    /// A wait asks for the other parity.
    Parity,
    /// A proxy fence names other memory.
    Space,
    /// It stands after what followed it.
    Later,
    /// It stands before what preceded it.
    Earlier,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Drop => "drop",
            Kind::NoRetry => "no retry",
            Kind::Relaxed => "relaxed",
            Kind::Cta => "cta scope",
            Kind::OneGroupMore => "one group more",
            Kind::MoreBytes => "more bytes",
            Kind::FewerBytes => "fewer bytes",
            Kind::Parity => "parity",
            Kind::Space => "space",
            Kind::Later => "later",
            Kind::Earlier => "earlier",
        })
    }
}

/// One edit of a module.
#[derive(Debug, Clone)]
pub struct Mutant {
    /// What is done.
    pub kind: Kind,
    /// The line of the instruction in the text.
    pub line: u32,
    /// The instruction, ` > ` and what follows it; for a move to the front what precedes it, ` > ` and the instruction.
    pub text: String,
    item: usize,
    path: Path,
    edit: Edit,
}

#[derive(Debug, Clone)]
enum Edit {
    Replace(Range<usize>, Vec<Statement>),
    /// The first range changes places with the second, which follows it.
    Swap(Range<usize>, Range<usize>),
}

impl Mutant {
    /// The text of the module with this edit.
    pub(crate) fn apply(&self, module: &Module) -> String {
        self.edited(module, |list| match &self.edit {
            Edit::Replace(range, with) => drop(list.splice(range.clone(), with.iter().cloned())),
            Edit::Swap(first, second) => {
                list[first.start..second.end].rotate_left(second.start - first.start)
            }
        })
    }

    /// The text of the module with a trap where the edit would be: whoever comes there stops.
    pub(crate) fn trapped(&self, module: &Module) -> String {
        let place = match &self.edit {
            Edit::Swap(_, second) if self.kind == Kind::Earlier => second.start,
            Edit::Swap(range, _) | Edit::Replace(range, _) => range.start,
        };
        self.edited(module, |list| {
            let guard = match &list[place] {
                Statement::Instruction(instruction) => instruction.guard.clone(),
                _ => None,
            };
            let trap = Instruction { guard, ..plain("trap", &[], Vec::new()) };
            list.insert(place, Statement::Instruction(trap));
        })
    }

    fn edited(&self, module: &Module, edit: impl FnOnce(&mut Vec<Statement>)) -> String {
        let mut module = module.clone();
        // The path was made of blocks of this module.
        if let Item::Function(function) = &mut module.items[self.item]
            && let Some(list) = inner(function.body.get_or_insert_default(), &self.path)
        {
            edit(list);
        }
        module.to_string()
    }
}

fn plain(root: &str, modifiers: &[&str], operands: Vec<Operand>) -> Instruction {
    let modifiers = modifiers.iter().map(|&modifier| modifier.into()).collect();
    Instruction { line: Line::default(), guard: None, root: root.into(), modifiers, operands }
}

fn inner<'l>(list: &'l mut Vec<Statement>, path: &[usize]) -> Option<&'l mut Vec<Statement>> {
    let Some((&first, rest)) = path.split_first() else { return Some(list) };
    match list.get_mut(first) {
        Some(Statement::Block(list)) => inner(list, rest),
        _ => None,
    }
}

/// Every mutant of the kernels of a module, in the order of its text.
pub fn mutants(module: &Module) -> Vec<Mutant> {
    let mut found = Vec::new();
    for (item, function) in module.items.iter().enumerate() {
        if let Item::Function(function) = function {
            let list = function.body.as_deref().unwrap_or_default();
            let mut finder = Finder { item, path: Vec::new(), found: &mut found };
            finder.list(list, 0..list.len());
        }
    }
    found.sort_by_key(|mutant| mutant.line);
    found
}

struct Finder<'f> {
    item: usize,
    path: Path,
    found: &'f mut Vec<Mutant>,
}

impl Finder<'_> {
    fn list(&mut self, list: &[Statement], range: Range<usize>) {
        let units = units(list, range);
        for (at, unit) in units.iter().enumerate() {
            match &list[unit.clone()] {
                [Statement::Instruction(instruction)] => {
                    if synchronizes(instruction) {
                        self.drop_or_move(list, &units, at, instruction);
                    }
                    self.weaken(instruction, unit.clone());
                }
                [Statement::Block(inner)] => {
                    self.path.push(unit.start);
                    self.list(inner, 0..inner.len());
                    self.path.pop();
                }
                whole if is_wait_loop(whole) => {
                    let waits = |s: &&Statement| matches!(s, Statement::Instruction(i) if has_effect(i));
                    if let Some(Statement::Instruction(wait)) = whole.iter().find(waits) {
                        self.drop_or_move(list, &units, at, wait);
                        self.add(
                            Kind::NoRetry,
                            wait,
                            None,
                            Edit::Replace(unit.end - 1..unit.end, Vec::new()),
                        );
                    }
                    for place in unit.clone() {
                        if let Statement::Instruction(instruction) = &list[place] {
                            self.weaken(instruction, place..place + 1);
                        }
                    }
                }
                whole if whole.len() > 1 => self.list_inside(list, unit.clone()),
                _ => {}
            }
        }
    }

    /// Between the ends of a loop or conditional, and a block that one of the ends is.
    fn list_inside(&mut self, list: &[Statement], unit: Range<usize>) {
        self.list(list, unit.start..unit.start + 1);
        self.list(list, unit.start + 1..unit.end - 1);
        self.list(list, unit.end - 1..unit.end);
    }

    fn add(&mut self, kind: Kind, instruction: &Instruction, passed: Option<&Instruction>, edit: Edit) {
        let (line, path) = (instruction.line.0, self.path.clone());
        let text = match (kind, passed) {
            (Kind::Earlier, Some(passed)) => format!("{passed} > {instruction}"),
            (_, Some(passed)) => format!("{instruction} > {passed}"),
            (_, None) => instruction.to_string(),
        };
        self.found.push(Mutant { kind, line, text, item: self.item, path, edit });
    }

    /// Away, and past the next unit on either side that memory or other threads notice: arithmetic between commutes
    /// with it. The text of what is dropped says what followed, too, which tells equal barriers apart.
    fn drop_or_move(&mut self, list: &[Statement], units: &[Range<usize>], at: usize, moved: &Instruction) {
        let own = units[at].clone();
        let next = neighbour(list, own.clone(), units[at + 1..].iter());
        let passed = next.as_ref().map(|(_, passed)| *passed);
        self.add(Kind::Drop, moved, passed, Edit::Replace(own.clone(), Vec::new()));
        if let Some((to, passed)) = next {
            self.add(Kind::Later, moved, Some(passed), Edit::Swap(own.clone(), own.end..to.end));
        }
        if let Some((to, passed)) = neighbour(list, own.clone(), units[..at].iter().rev()) {
            self.add(Kind::Earlier, moved, Some(passed), Edit::Swap(to.start..own.start, own));
        }
    }

    fn weaken(&mut self, instruction: &Instruction, place: Range<usize>) {
        let mut replace = |kind, with: Statement| {
            self.add(kind, instruction, None, Edit::Replace(place.clone(), vec![with]));
        };
        let mut modifiers = |kind, modifiers: Vec<Name>| {
            replace(kind, Statement::Instruction(Instruction { modifiers, ..instruction.clone() }));
        };
        for (kind, spelled) in weaker(instruction) {
            modifiers(kind, spelled);
        }
        let at = |from_end: usize| instruction.operands.len().checked_sub(from_end);
        if instruction.has("wait_group") {
            replace(Kind::OneGroupMore, shifted(instruction, at(1), "add", 1));
        }
        if instruction.has("expect_tx") {
            replace(Kind::MoreBytes, shifted(instruction, at(1), "add", 16));
            replace(Kind::FewerBytes, shifted(instruction, at(1), "sub", 16));
        }
        if instruction.has("parity") {
            replace(Kind::Parity, shifted(instruction, Some(2), "xor", 1));
        }
    }
}

/// The first unit that has an effect, and the first instruction of it that has; none if control or registers are between.
fn neighbour<'a, 'u>(
    list: &'a [Statement],
    own: Range<usize>,
    others: impl Iterator<Item = &'u Range<usize>>,
) -> Option<(Range<usize>, &'a Instruction)> {
    for other in others {
        let (mut effect, mut tied) = (None, false);
        for statement in &list[other.clone()] {
            each(statement, &mut |passed| {
                let mut commutes = false;
                let leaves = matches!(&*passed.root, "ret" | "exit" | "call" | "trap" | "brx");
                let jumps = passed.root == "bra" && other.len() == 1;
                each_of(&list[own.clone()], &mut |moved| {
                    tied |= share_registers(moved, passed);
                    commutes |= commute(moved, passed);
                });
                tied |= leaves || jumps;
                if has_effect(passed) && !commutes {
                    effect.get_or_insert(passed);
                }
            });
        }
        // A label alone is where control comes from elsewhere.
        if tied || matches!(&list[other.clone()], [Statement::Label(..)]) {
            return None;
        }
        if let Some(effect) = effect {
            return Some((other.clone(), effect));
        }
    }
    None
}

fn each_of<'a>(statements: &'a [Statement], visit: &mut impl FnMut(&'a Instruction)) {
    statements.iter().for_each(|statement| each(statement, visit));
}

/// Whether an instruction is there to order others. Loads and stores that also do are weakened, not dropped.
fn synchronizes(instruction: &Instruction) -> bool {
    let has = |names: &[&str]| names.iter().any(|name| instruction.has(name));
    match &*instruction.root {
        "bar" | "barrier" | "fence" | "membar" | "griddepcontrol" => true,
        "mbarrier" => !has(&["pending_count"]),
        "wgmma" => has(&["fence", "commit_group", "wait_group"]),
        "tcgen05" => instruction.modifiers.first().is_some_and(|first| {
            first.starts_with("fence") || first.starts_with("wait") || first == "commit"
        }),
        "cp" => {
            instruction.has("async")
                && (has(&["commit_group", "wait_group", "wait_all"])
                    || instruction.starts_with(&["cp", "async", "mbarrier"]))
        }
        _ => false,
    }
}

/// Weaker spellings of the opcode.
fn weaker(instruction: &Instruction) -> Vec<(Kind, Vec<Name>)> {
    let mut found = Vec::new();
    let spelled = |from: &str, to: &str| -> Option<Vec<Name>> {
        let at = instruction.modifiers.iter().position(|m| m == from)?;
        let mut modifiers = instruction.modifiers.clone();
        modifiers[at] = to.into();
        Some(modifiers)
    };
    let root = &*instruction.root;
    let orders = matches!(root, "ld" | "st" | "atom" | "red" | "mbarrier" | "barrier");
    for order in ["release", "acquire", "acq_rel"].into_iter().filter(|_| orders) {
        // `barrier.cluster.wait` has no other order than its own.
        let weaker = spelled(order, "relaxed").filter(|_| !instruction.has("wait"));
        found.extend(weaker.map(|weaker| (Kind::Relaxed, weaker)));
    }
    let says = ["release", "acquire", "relaxed"].iter().any(|order| instruction.has(order));
    // Without a word an arrival releases and a wait acquires.
    let after = |name: &str, words: &[&str]| {
        let at = instruction.modifiers.iter().position(|m| m == name)? + 1;
        let mut modifiers = instruction.modifiers.clone();
        modifiers.splice(at..at, words.iter().map(|&word| word.into()));
        Some(modifiers)
    };
    let silent = match root {
        _ if says => None,
        "barrier" if instruction.has("cluster") => after("arrive", &["relaxed"]),
        "mbarrier" if instruction.has("expect_tx") => after("expect_tx", &["relaxed", "cta"]),
        "mbarrier" if instruction.has("arrive") => after("arrive", &["relaxed", "cta"]),
        "mbarrier" if instruction.has("parity") => after("parity", &["relaxed", "cta"]),
        _ => None,
    };
    found.extend(silent.map(|weaker| (Kind::Relaxed, weaker)));
    let scoped = orders && root != "barrier" || root == "fence" && !instruction.has("mbarrier_init");
    for scope in ["gpu", "sys", "cluster"].into_iter().filter(|_| scoped) {
        found.extend(spelled(scope, "cta").map(|weaker| (Kind::Cta, weaker)));
    }
    if instruction.starts_with(&["fence", "proxy", "async"]) {
        found.extend(spelled("shared::cta", "global").map(|other| (Kind::Space, other)));
        found.extend(spelled("shared::cluster", "shared::cta").map(|other| (Kind::Space, other)));
        found.extend(spelled("global", "shared::cta").map(|other| (Kind::Space, other)));
        if instruction.modifiers.len() == 2 {
            found.extend(
                ["global", "shared::cta"]
                    .map(|space| (Kind::Space, after("async", &[space]).unwrap_or_default())),
            );
        }
    }
    found
}

/// The instruction with `operation by` done to one of its operands before.
fn shifted(instruction: &Instruction, operand: Option<usize>, operation: &str, by: i64) -> Statement {
    let mut with = instruction.clone();
    let Some(place) = operand.and_then(|at| with.operands.get_mut(at)) else {
        return Statement::Instruction(with);
    };
    if let Operand::Imm(number) = *place {
        let number = number.bits() as i64;
        *place = Operand::Imm(Immediate::Int(match operation {
            "add" => number + by,
            "sub" => number - by,
            _ => number ^ by,
        }));
        return Statement::Instruction(with);
    }
    // Registers are declared for blocks, so the name can be taken elsewhere.
    let name: Name = "mutated".into();
    let ty = if operation == "xor" { "b32" } else { "u32" };
    let register = std::mem::replace(place, Operand::Ident(name.clone()));
    let operands = vec![Operand::Ident(name.clone()), register, Operand::Imm(Immediate::Int(by))];
    let arithmetic = plain(operation, &[ty], operands);
    let declared = RegDecl { line: Line::default(), vector: None, ty: Type::B32, names: vec![(name, None)] };
    Statement::Block(vec![
        Statement::Reg(declared),
        Statement::Instruction(arithmetic),
        Statement::Instruction(with),
    ])
}
