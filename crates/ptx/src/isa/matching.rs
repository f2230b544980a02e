//! Does an instruction have the form of a row?

use super::grammar::{Allowed, Count, Part, Pattern, Piece, Presence, Slot, Value, storage};
use crate::ast::{AddressBase, Operand};
use crate::name::Name;
use crate::types::Type;

/// What the letters of a form stand for in one instruction: types, counts, and which options are present.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Letters {
    pub(super) bound: Vec<(char, String)>,
    pub(super) present: Vec<char>,
}

impl Letters {
    pub(super) fn get(&self, letter: char) -> Option<&str> {
        self.bound.iter().find(|(l, _)| *l == letter).map(|(_, text)| text.as_str())
    }

    /// The register type behind a type name of a form; `None` for `any`.
    pub(super) fn ty(&self, name: &str) -> Option<Type> {
        match name.as_bytes() {
            [c] if c.is_ascii_uppercase() => self.get(*c as char).and_then(storage),
            _ => storage(name),
        }
    }

    pub(super) fn count(&self, count: &Count) -> usize {
        let base = count.letter.map_or(1, |l| self.get(l).and_then(|t| t.parse().ok()).unwrap_or(0));
        base * count.times as usize / count.over as usize
    }

    /// The state space behind a space name of a form; an unbound letter is the generic space.
    pub(super) fn space<'a>(&'a self, name: &'a str) -> &'a str {
        match name.as_bytes() {
            [c] if c.is_ascii_uppercase() => self.get(*c as char).unwrap_or("generic"),
            _ => name,
        }
    }
}

/// Every way in which `modifiers` spell the opcode of `pattern`.
pub(crate) fn opcode(pattern: &Pattern, modifiers: &[Name]) -> Vec<Letters> {
    ways(pattern, modifiers, |used| used.trailing_ones() as usize..used.trailing_ones() as usize + 1)
}

/// As [`opcode`], with the modifiers in any order but that of types, which tells operands apart.
pub(crate) fn opcode_in_any_order(pattern: &Pattern, modifiers: &[Name]) -> Vec<Letters> {
    ways(pattern, modifiers, |used| {
        let left = move |at: &usize| used >> at & 1 == 0;
        let first_type = (0..modifiers.len()).filter(left).find(|&at| storage(&modifiers[at]).is_some());
        let next = move |&at: &usize| storage(&modifiers[at]).is_none() || first_type == Some(at);
        (0..modifiers.len()).filter(next)
    })
}

/// Every way to spell the opcode, taking the modifiers in an order that `next` allows: it is given those used as bits.
fn ways<I: Iterator<Item = usize>>(
    pattern: &Pattern,
    modifiers: &[Name],
    next: impl Fn(u64) -> I,
) -> Vec<Letters> {
    let mut states = vec![(0, Letters::default())];
    // No instruction has 64 modifiers.
    if modifiers.len() < 64 {
        parts(&pattern.parts, modifiers, &next, &mut states);
        states.retain(|(used, _)| *used == (1 << modifiers.len()) - 1);
    }
    states.into_iter().map(|(_, letters)| letters).collect()
}

/// Advances each state (modifiers used, letters bound) over `list`; a state that cannot is dropped.
fn parts<I: Iterator<Item = usize>>(
    list: &[Part],
    modifiers: &[Name],
    allowed: &impl Fn(u64) -> I,
    states: &mut Vec<(u64, Letters)>,
) {
    for part in list {
        match part {
            Part::Modifier(spelling) => {
                let mut next = Vec::new();
                for (used, letters) in states.drain(..) {
                    for at in allowed(used).filter(|&at| at < modifiers.len() && used >> at & 1 == 0) {
                        let used = used | 1 << at;
                        spell(spelling, &modifiers[at], letters.clone(), &mut |letters| {
                            next.push((used, letters));
                        });
                    }
                }
                *states = next;
            }
            Part::Optional(flag, inner) => {
                let mut with = states.clone();
                parts(inner, modifiers, allowed, &mut with);
                for (_, letters) in &mut with {
                    letters.present.extend(flag);
                }
                states.extend(with);
            }
        }
    }
}

/// Calls `done` with the letters of every way to spell `text`.
fn spell(pieces: &[Piece], text: &str, letters: Letters, done: &mut impl FnMut(Letters)) {
    let Some((piece, rest)) = pieces.split_first() else {
        if text.is_empty() {
            done(letters);
        }
        return;
    };
    match piece {
        Piece::Text(wanted) => {
            if let Some(tail) = text.strip_prefix(wanted.as_str()) {
                spell(rest, tail, letters, done);
            }
        }
        Piece::Again(letter) => {
            let tail = letters.get(*letter).and_then(|wanted| text.strip_prefix(wanted));
            if let Some(tail) = tail {
                spell(rest, tail, letters, done);
            }
        }
        Piece::Choice(letter, options) => {
            for option in options {
                if let Some(tail) = text.strip_prefix(option.as_str()) {
                    let mut letters = letters.clone();
                    if let Some(letter) = letter {
                        letters.bound.push((*letter, option.clone()));
                    }
                    spell(rest, tail, letters, done);
                }
            }
        }
    }
}

/// What names mean where an instruction stands.
pub(crate) trait Scope {
    /// The type of the register `name`; `None` if no register has this name.
    fn register(&self, name: &str) -> Option<Type>;
}

/// How well an instruction's operands fit a form whose opcode it has.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Fit {
    Yes,
    /// The operand of this index (or the one missing there) does not: what belongs there instead.
    No(usize, String),
}

/// Checks operands against a form whose opcode is spelled in the `ways` that [`opcode`] found.
pub(crate) fn fit(pattern: &Pattern, ways: &[Letters], list: &[Operand], scope: &impl Scope) -> Fit {
    let mut worst = Fit::No(0, "another opcode".into());
    for letters in ways {
        match operands(pattern, letters, list, scope) {
            Fit::Yes => return Fit::Yes,
            no => worst = no,
        }
    }
    worst
}

fn operands(pattern: &Pattern, letters: &Letters, list: &[Operand], scope: &impl Scope) -> Fit {
    let wanted: Vec<_> = pattern
        .slots
        .iter()
        .filter(|(presence, _)| match presence {
            Presence::If(flag) => letters.present.contains(flag),
            Presence::Always | Presence::May => true,
        })
        .collect();
    for (i, (presence, slot)) in wanted.iter().enumerate() {
        match list.get(i) {
            Some(operand) => {
                if let Err(expected) = check(slot, letters, operand, scope) {
                    return Fit::No(i, expected);
                }
            }
            None if *presence == Presence::May => break,
            None => return Fit::No(i, describe(slot, letters)),
        }
    }
    if list.len() > wanted.len() { Fit::No(wanted.len(), "no further operand".into()) } else { Fit::Yes }
}

/// Whether a register of type `found` may stand where the instruction works on `wanted`.
fn compatible(wanted: Type, found: Type, wider: bool) -> bool {
    if (wanted == Type::Pred) != (found == Type::Pred) {
        return false;
    }
    // A number of a float type fills its register.
    let size = if wider && !wanted.is_float() {
        found.bits() >= wanted.bits() && found.bits() <= 64
    } else {
        found.bits() == wanted.bits()
    };
    // Untyped registers hold anything; integers and floats do not mix.
    let untyped =
        |t: Type| matches!(t, Type::B8 | Type::B16 | Type::B32 | Type::B64 | Type::B128 | Type::Pred);
    // Two halves are no float of the whole width.
    let packed = |t: Type| matches!(t, Type::F16x2 | Type::Bf16x2 | Type::F32x2);
    let alike = wanted.is_float() == found.is_float() && packed(wanted) == packed(found);
    size && (untyped(wanted) || untyped(found) || alike)
}

fn check(slot: &Slot, letters: &Letters, operand: &Operand, scope: &impl Scope) -> Result<(), String> {
    let ok = match (slot, operand) {
        // Compilers write one register in braces.
        (Slot::Value(_), Operand::Vector(elements)) if elements.len() == 1 => {
            return check(slot, letters, &elements[0], scope);
        }
        (Slot::Value(value), _) => check_value(value, letters, operand, scope),
        (Slot::Number { allowed, .. }, Operand::Imm(number)) => {
            let n = number.bits() as i64;
            match allowed {
                Allowed::Any => true,
                Allowed::Range(from, to) => (*from..=*to).contains(&n),
                Allowed::OneOf(list) => list.contains(&n),
            }
        }
        (Slot::Address { space, .. }, Operand::Address(address)) => match &address.base {
            AddressBase::Ident(name) => address_base(letters.space(space), name, scope),
            AddressBase::Absolute(_) => true,
        },
        (Slot::Address { .. }, Operand::Ident(name) | Operand::Offset(name, _)) => {
            // The first element of a list: a tensor map's address.
            scope.register(name).is_none_or(|ty| compatible(Type::B64, ty, false))
        }
        (Slot::List(slots), Operand::List(elements)) | (Slot::Vector(slots), Operand::Vector(elements)) => {
            slots.len() == elements.len()
                && slots.iter().zip(elements).all(|(s, e)| check(s, letters, e, scope).is_ok())
        }
        (Slot::Repeat(element, count), Operand::Vector(elements)) => {
            elements.len() == letters.count(count)
                && elements.iter().all(|e| check(element, letters, e, scope).is_ok())
        }
        // A vector of one may be written without braces.
        (Slot::Repeat(element, count), other) => {
            letters.count(count) == 1 && check(element, letters, other, scope).is_ok()
        }
        (Slot::Pair { first, second, .. }, Operand::Pair(a, b)) => {
            check(first, letters, a, scope).is_ok() && check(second, letters, b, scope).is_ok()
        }
        (Slot::Pair { first, optional, .. }, other) => {
            *optional && check(first, letters, other, scope).is_ok()
        }
        (Slot::Label(_) | Slot::Symbol(_), Operand::Ident(name)) => scope.register(name).is_none(),
        (Slot::Group(_), Operand::Group(_)) | (Slot::Sink, Operand::Sink) => true,
        _ => false,
    };
    if ok { Ok(()) } else { Err(describe(slot, letters)) }
}

fn check_value(value: &Value, letters: &Letters, operand: &Operand, scope: &impl Scope) -> bool {
    let any = value.ty == "any";
    match operand {
        Operand::Ident(name) => match (scope.register(name), letters.ty(&value.ty)) {
            (Some(found), Some(wanted)) => compatible(wanted, found, value.wider),
            (Some(found), None) => {
                // `mov`: the register is of the type the opcode names.
                letters.ty("T").is_none_or(|wanted| compatible(wanted, found, false))
            }
            // A special register, or the address of a variable.
            (None, _) => value.number,
        },
        Operand::Not(name) => value.not && scope.register(name) == Some(Type::Pred),
        Operand::Imm(_) => value.number,
        Operand::Offset(..) => any || value.number && letters.ty(&value.ty).is_some_and(|t| t.bits() >= 32),
        Operand::Sink => value.sink,
        _ => false,
    }
}

fn address_base(space: &str, name: &str, scope: &impl Scope) -> bool {
    match (scope.register(name), space) {
        // A variable's name.
        (None, _) => space != "tmem",
        // What a call passes has a name, never an address in a register.
        (Some(_), "param_out") => false,
        (Some(ty), "shared" | "shared::cta" | "shared::cluster" | "local" | "const" | "param") => {
            matches!(ty.bits(), 32 | 64) && !ty.is_float()
        }
        (Some(ty), "tmem") => compatible(Type::B32, ty, false),
        (Some(ty), _) => compatible(Type::B64, ty, false),
    }
}

/// What belongs at a slot, in words.
fn describe(slot: &Slot, letters: &Letters) -> String {
    match slot {
        Slot::Value(value) => {
            let ty = match letters.ty(&value.ty).or(letters.ty("T")) {
                Some(ty) => format!("{}.{ty} register", if value.wider { "at least a " } else { "a " }),
                None => "a register".to_string(),
            };
            format!("`{}`: {ty}{}", value.name, if value.number { " or a number" } else { "" })
        }
        Slot::Number { name, allowed } => match allowed {
            Allowed::Any => format!("`{name}`: a number"),
            Allowed::Range(from, to) => format!("`{name}`: a number from {from} to {to}"),
            Allowed::OneOf(list) => {
                let list: Vec<String> = list.iter().map(i64::to_string).collect();
                format!("`{name}`: the number {}", list.join(" or "))
            }
        },
        Slot::Address { name, space } => match letters.space(space) {
            "tmem" => format!("`[{name}]`: a tensor memory address in a .b32 register"),
            space => format!("`[{name}]`: an address in the {space} space"),
        },
        Slot::List(slots) => {
            let parts: Vec<String> = slots.iter().map(|s| describe(s, letters)).collect();
            format!("`[ , ]` of {}", parts.join(" and "))
        }
        Slot::Vector(slots) => {
            let parts: Vec<String> = slots.iter().map(|s| describe(s, letters)).collect();
            format!("`{{ }}` of {}", parts.join(" and "))
        }
        Slot::Repeat(element, count) => {
            format!("`{{ }}` of {} times {}", letters.count(count), describe(element, letters))
        }
        Slot::Pair { first, second, optional } => format!(
            "{} and after `|` {}{}",
            describe(first, letters),
            if *optional { "optionally " } else { "" },
            describe(second, letters)
        ),
        Slot::Label(_) => "a label".into(),
        Slot::Symbol(_) => "a function or prototype name".into(),
        Slot::Group(_) => "`( )` with arguments".into(),
        Slot::Sink => "`_`".into(),
    }
}
