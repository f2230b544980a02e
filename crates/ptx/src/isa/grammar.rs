//! The little language in which a row of the table writes an instruction form, and its reader.
//!
//! ```text
//! add{.<rn|rz|rm|rp>}{.ftz}{.sat}.f32  d:f32, a:f32, b:f32
//! ld.<S=global|shared>.v<N=2|4>.<T=b32|f32>  {d:T*N}, [a:S]
//! cp.async.bulk.tensor.<D=1..5>d. ... {M:.multicast::cluster}  [d:shared], [t:map, {c:b32*D}], ..., M?mask:b16
//! ```
//!
//! Opcode: `{...}` may be absent, `{M:...}` also names whether it is present; `<a|b>` is one of these,
//! `<T=a|b>` also names which; `<1..5>` and `<8..256/8>` count (in steps); `<T>` repeats what `T` was.
//! Names are single capital letters.
//!
//! Operands, separated by commas:
//! - `name:type` a register or a number. The type is one of [`Type`], a type name bound by the opcode, or `any`
//!   (register, number, special register, or address of a variable). After the type: `!` no number, `_` may
//!   be the sink, `~` the register may be wider, `^` a predicate that may be negated. Names starting with `d`
//!   are written, never numbers.
//! - `name:#` a number; `#a..b` within bounds; `#a|b` one of these.
//! - `[name:space]` an address; `[name:map, {...}]` a list, the first being an address in a register.
//! - `{x*N}` a vector of N (`N/2`, `N*2`, a number); `{x, y}` a vector of these. `x|y` a pair, `x|?y` also
//!   without the second.
//! - `name:label`, `name:symbol`, `name:group` (call arguments), `_` (the sink itself).
//! - `M?x` present exactly if `M` is; `?x` may be absent, all after it too.

use crate::types::Type;
use std::iter::Peekable;
use std::str::Chars;

/// An instruction form, ready to be matched and enumerated.
#[derive(Debug)]
pub(crate) struct Pattern {
    pub(crate) root: String,
    pub(crate) parts: Vec<Part>,
    pub(crate) slots: Vec<(Presence, Slot)>,
}

/// A piece of the opcode after its root.
#[derive(Debug)]
pub(crate) enum Part {
    /// One modifier, spelled by its pieces one after another.
    Modifier(Vec<Piece>),
    /// These, or nothing; the letter names which.
    Optional(Option<char>, Vec<Part>),
}

#[derive(Debug)]
pub(crate) enum Piece {
    Text(String),
    Choice(Option<char>, Vec<String>),
    Again(char),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    Always,
    May,
    If(char),
}

#[derive(Debug)]
pub(crate) enum Slot {
    Value(Value),
    Number {
        name: String,
        allowed: Allowed,
    },
    Address {
        name: String,
        space: String,
    },
    List(Vec<Slot>),
    Vector(Vec<Slot>),
    Repeat(Box<Slot>, Count),
    Pair {
        first: Box<Slot>,
        second: Box<Slot>,
        optional: bool,
    },
    /// `targets` is the list of a `brx.idx`, any other name a label.
    Label(String),
    Symbol(String),
    Group(String),
    Sink,
}

/// A register or a number.
#[derive(Debug)]
pub(crate) struct Value {
    pub(crate) name: String,
    /// A type, `any`, or a name the opcode binds.
    pub(crate) ty: String,
    pub(crate) number: bool,
    pub(crate) sink: bool,
    pub(crate) wider: bool,
    pub(crate) not: bool,
}

/// Which numbers an operand may be.
#[derive(Debug)]
pub(crate) enum Allowed {
    Any,
    Range(i64, i64),
    OneOf(Vec<i64>),
}

/// How many elements a vector has: `(letter or 1) * times / over`.
#[derive(Debug)]
pub(crate) struct Count {
    pub(crate) letter: Option<char>,
    pub(crate) times: u32,
    pub(crate) over: u32,
}

/// The register type an opcode's type name stands for: narrow formats live in wider registers.
pub(crate) fn storage(name: &str) -> Option<Type> {
    Type::from_name(name).or(match name {
        "e2m1x2" => Some(Type::B8),
        "e4m3x2" | "e5m2x2" | "e2m3x2" | "e3m2x2" | "ue8m0x2" | "e2m1x4" => Some(Type::B16),
        "tf32" | "e4m3x4" | "e5m2x4" => Some(Type::B32),
        _ => None,
    })
}

/// Reads a form. A malformed one is a mistake in the table, which a test reads as a whole.
pub(crate) fn parse(form: &str) -> Result<Pattern, String> {
    let (opcode, operands) = form.split_once("  ").unwrap_or((form, ""));
    let mut chars = opcode.chars().peekable();
    let root = take_while(&mut chars, |c| c.is_ascii_alphanumeric() || c == '_');
    let parts = parts(&mut chars, false)?;
    let mut slots = Vec::new();
    for text in split(operands) {
        slots.push(presence(&text)?);
    }
    Ok(Pattern { root, parts, slots })
}

fn take_while(chars: &mut Peekable<Chars<'_>>, accept: impl Fn(char) -> bool) -> String {
    let mut text = String::new();
    while let Some(&c) = chars.peek().filter(|&&c| accept(c)) {
        text.push(c);
        chars.next();
    }
    text
}

fn parts(chars: &mut Peekable<Chars<'_>>, inside: bool) -> Result<Vec<Part>, String> {
    let mut list = Vec::new();
    while let Some(&c) = chars.peek() {
        match c {
            '.' => {
                chars.next();
                list.push(Part::Modifier(pieces(chars)?));
            }
            '{' => {
                chars.next();
                let flag = chars.peek().copied().filter(char::is_ascii_uppercase);
                if flag.is_some() {
                    chars.next();
                    expect(chars, ':')?;
                }
                let inner = parts(chars, true)?;
                expect(chars, '}')?;
                list.push(Part::Optional(flag, inner));
            }
            '}' if inside => break,
            _ => return Err(format!("`{c}` in an opcode")),
        }
    }
    Ok(list)
}

fn expect(chars: &mut Peekable<Chars<'_>>, wanted: char) -> Result<(), String> {
    match chars.next() {
        Some(c) if c == wanted => Ok(()),
        found => Err(format!("{found:?} where `{wanted}` belongs")),
    }
}

fn pieces(chars: &mut Peekable<Chars<'_>>) -> Result<Vec<Piece>, String> {
    let mut list = Vec::new();
    loop {
        let text = take_while(chars, |c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':'));
        if !text.is_empty() {
            list.push(Piece::Text(text));
        }
        if chars.peek() != Some(&'<') {
            return if list.is_empty() { Err("an empty modifier".into()) } else { Ok(list) };
        }
        chars.next();
        let inner = take_while(chars, |c| c != '>');
        expect(chars, '>')?;
        list.push(match inner.split_once('=') {
            Some((name, options)) => Piece::Choice(Some(letter(name)?), choices(options)?),
            None if inner.len() == 1 && inner.starts_with(|c: char| c.is_ascii_uppercase()) => {
                Piece::Again(letter(&inner)?)
            }
            None => Piece::Choice(None, choices(&inner)?),
        });
    }
}

fn letter(text: &str) -> Result<char, String> {
    match text.as_bytes() {
        [c] if c.is_ascii_uppercase() => Ok(*c as char),
        _ => Err(format!("`{text}` where a capital letter belongs")),
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.trim().parse().map_err(|_| format!("`{text}` where a number belongs"))
}

fn choices(text: &str) -> Result<Vec<String>, String> {
    let Some((from, rest)) = text.split_once("..") else {
        return Ok(text.split('|').map(str::to_string).collect());
    };
    let (to, step) = rest.split_once('/').unwrap_or((rest, "1"));
    let (from, to, step): (usize, usize, usize) = (number(from)?, number(to)?, number(step)?);
    Ok((from..=to).step_by(step).map(|n| n.to_string()).collect())
}

/// Splits at commas outside brackets.
fn split(text: &str) -> Vec<String> {
    let (mut list, mut depth, mut current) = (Vec::new(), 0, String::new());
    for c in text.chars() {
        match c {
            '[' | '{' => depth += 1,
            ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                list.push(current.trim().to_string());
                current.clear();
                continue;
            }
            _ => {}
        }
        current.push(c);
    }
    if !current.trim().is_empty() {
        list.push(current.trim().to_string());
    }
    list
}

fn presence(text: &str) -> Result<(Presence, Slot), String> {
    if let Some(rest) = text.strip_prefix('?') {
        return Ok((Presence::May, slot(rest)?));
    }
    match text.as_bytes() {
        [c, b'?', ..] if c.is_ascii_uppercase() => Ok((Presence::If(*c as char), slot(&text[2..])?)),
        _ => Ok((Presence::Always, slot(text)?)),
    }
}

fn inside(text: &str, open: char, close: char) -> Option<&str> {
    text.strip_prefix(open)?.strip_suffix(close)
}

fn slot(text: &str) -> Result<Slot, String> {
    let text = text.trim();
    if text == "_" {
        return Ok(Slot::Sink);
    }
    if let Some(inner) = inside(text, '[', ']') {
        let elements = split(inner);
        let (name, space) = elements[0].split_once(':').ok_or("an address without space")?;
        let first = Slot::Address { name: name.into(), space: space.into() };
        if elements.len() == 1 {
            return Ok(first);
        }
        let rest = elements[1..].iter().map(|e| slot(e));
        return Ok(Slot::List(std::iter::once(Ok(first)).chain(rest).collect::<Result<_, String>>()?));
    }
    if let Some(inner) = inside(text, '{', '}') {
        if let Some((element, count)) = inner.split_once('*') {
            return Ok(Slot::Repeat(Box::new(slot(element)?), self::count(count)?));
        }
        return Ok(Slot::Vector(split(inner).iter().map(|e| slot(e)).collect::<Result<_, String>>()?));
    }
    if !text.contains('#')
        && let Some((first, second)) = text.split_once('|')
    {
        let (optional, second) = match second.strip_prefix('?') {
            Some(rest) => (true, rest),
            None => (false, second),
        };
        let (first, second) = (Box::new(slot(first)?), Box::new(slot(second)?));
        return Ok(Slot::Pair { first, second, optional });
    }
    let (name, ty) = text.split_once(':').ok_or_else(|| format!("`{text}` without a type"))?;
    if let Some(numbers) = ty.strip_prefix('#') {
        let allowed = match numbers.split_once("..") {
            Some((from, to)) => Allowed::Range(number(from)?, number(to)?),
            None if numbers.is_empty() => Allowed::Any,
            None => Allowed::OneOf(numbers.split('|').map(number).collect::<Result<_, _>>()?),
        };
        return Ok(Slot::Number { name: name.into(), allowed });
    }
    let bare = ty.trim_end_matches(['!', '_', '~', '^']);
    Ok(match bare {
        "label" => Slot::Label(name.into()),
        "symbol" => Slot::Symbol(name.into()),
        "group" => Slot::Group(name.into()),
        _ => {
            let flags = &ty[bare.len()..];
            let known = bare == "any" || storage(bare).is_some() || letter(bare).is_ok();
            if !known {
                return Err(format!("the type `{bare}`"));
            }
            Slot::Value(Value {
                name: name.into(),
                ty: bare.into(),
                number: !name.starts_with('d') && !flags.contains('!'),
                sink: flags.contains('_'),
                wider: flags.contains('~'),
                not: flags.contains('^'),
            })
        }
    })
}

fn count(text: &str) -> Result<Count, String> {
    let (base, times, over) = match (text.split_once('*'), text.split_once('/')) {
        (Some((base, n)), _) => (base, number(n)?, 1),
        (_, Some((base, n))) => (base, 1, number(n)?),
        _ => (text, 1, 1),
    };
    match letter(base) {
        Ok(c) => Ok(Count { letter: Some(c), times, over }),
        Err(_) => Ok(Count { letter: None, times: times * number::<u32>(base)?, over }),
    }
}
