//! The syntax tree of a PTX module: what the parser and the builder produce, the printer writes and the
//! simulator decodes.
//!
//! The tree follows the text: nothing is resolved or reordered. An identifier operand may be a register, a
//! variable, a label or a function; the innermost enclosing `{ }` that declares it decides
//! (PTX scopes registers, labels and variables by block).
//! Not represented, because they carry no meaning for execution: `.loc`, `.file`, `.section`, and comments
//! inside a statement. Lists such as `.shared .b32 a, b;` become one entry per name.
//! Specification: PTX ISA "Syntax", "Directives".

use crate::name::Name;
use crate::target::Target;
use crate::types::{Space, Type};

/// The line of the text a piece of the tree came from, counted from 1; 0 if it came from no text.
///
/// All lines compare equal: where a statement stood is not part of what it says, so that a tree and its
/// printed and re-read copy are equal.
#[derive(Debug, Clone, Copy, Default, Eq)]
pub struct Line(pub u32);

impl PartialEq for Line {
    fn eq(&self, _: &Line) -> bool {
        true
    }
}

/// A PTX ISA version, as in `.version 8.7`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    /// The part before the dot.
    pub major: u16,
    /// The part after the dot.
    pub minor: u16,
}

/// A whole PTX file.
#[derive(Debug, Clone, PartialEq)]
pub struct Module {
    /// Comment lines above and between the three header directives.
    pub header: Vec<String>,
    /// `.version`
    pub version: Version,
    /// `.target`: the architecture first (`sm_90a`), then options (`debug`, `texmode_independent`).
    pub target: Vec<Name>,
    /// `.address_size`: 32 or 64 if written.
    pub address_size: Option<u32>,
    /// Everything after the header, in order.
    pub items: Vec<Item>,
}

impl Module {
    /// A module of 64-bit addresses for `target`.
    pub(crate) fn new(target: Target, version: Version, items: Vec<Item>) -> Self {
        let target = vec![target.as_str().into()];
        Self { header: Vec::new(), version, target, address_size: Some(64), items }
    }

    /// The functions of the module, in order, declarations included.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.items.iter().filter_map(|item| match item {
            Item::Function(function) => Some(function),
            _ => None,
        })
    }

    /// The kernel called `name`, if the module defines it.
    pub fn entry(&self, name: &str) -> Option<&Function> {
        self.functions().find(|f| f.kind == FunctionKind::Entry && f.body.is_some() && f.name == name)
    }

    /// The variables declared at module scope, in order.
    pub fn variables(&self) -> impl Iterator<Item = &Variable> {
        self.items.iter().filter_map(|item| match item {
            Item::Variable(variable) => Some(variable),
            _ => None,
        })
    }
}

/// Something at module scope.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    /// One comment line, without the slashes.
    Comment(String),
    /// A `.global`, `.const`, `.shared` or `.extern .shared` variable.
    Variable(Variable),
    /// A kernel, a device function, or the declaration of one.
    Function(Function),
    /// `.pragma` with its strings.
    Pragma(Vec<String>),
    /// `.alias name, target;`
    Alias(Name, Name),
}

/// `.visible`, `.extern`, `.weak` or `.common`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Linkage {
    /// Private to the module.
    Internal,
    /// `.visible`
    Visible,
    /// `.extern`
    Extern,
    /// `.weak`
    Weak,
    /// `.common`
    Common,
}

/// Kernel or device function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FunctionKind {
    /// `.entry`
    Entry,
    /// `.func`
    Device,
}

/// A function or its declaration.
#[derive(Debug, Clone, PartialEq)]
pub struct Function {
    /// Where it starts.
    pub line: Line,
    /// Its visibility.
    pub linkage: Linkage,
    /// `.entry` or `.func`.
    pub kind: FunctionKind,
    /// `.attribute(...)`: the text between the parentheses, without blanks.
    pub attribute: Option<Name>,
    /// Return parameters of a `.func`.
    pub returns: Vec<Variable>,
    /// Its name.
    pub name: Name,
    /// Parameters in order.
    pub params: Vec<Variable>,
    /// Performance and cluster directives, in order.
    pub directives: Vec<Directive>,
    /// The statements; `None` for a declaration.
    pub body: Option<Vec<Statement>>,
}

impl Function {
    /// A function that others may call, without parameters and directives.
    pub(crate) fn new(kind: FunctionKind, name: &str, body: Vec<Statement>) -> Self {
        Self {
            line: Line::default(),
            linkage: Linkage::Visible,
            kind,
            attribute: None,
            returns: Vec::new(),
            name: name.into(),
            params: Vec::new(),
            directives: Vec::new(),
            body: Some(body),
        }
    }

    /// The numbers of the directive `name` (without the dot), e.g. `[128, 1, 1]` for `maxntid`; an empty
    /// slice for a directive without numbers; `None` if it is absent.
    pub fn directive(&self, name: &str) -> Option<&[u64]> {
        self.directives.iter().find_map(|directive| match directive {
            Directive::Numeric(n, values) if n == name => Some(values.as_slice()),
            _ => None,
        })
    }

    /// Every instruction of the body in text order, nested blocks included.
    pub fn instructions(&self) -> Instructions<'_> {
        Instructions { stack: vec![self.body.as_deref().unwrap_or_default().iter()] }
    }
}

/// Iterator over the instructions of a function; see [`Function::instructions`].
#[derive(Debug, Clone)]
pub struct Instructions<'a> {
    stack: Vec<std::slice::Iter<'a, Statement>>,
}

impl<'a> Iterator for Instructions<'a> {
    type Item = &'a Instruction;

    fn next(&mut self) -> Option<&'a Instruction> {
        while let Some(top) = self.stack.last_mut() {
            match top.next() {
                Some(Statement::Instruction(instruction)) => return Some(instruction),
                Some(Statement::Block(inner)) => self.stack.push(inner.iter()),
                Some(_) => {}
                None => {
                    self.stack.pop();
                }
            }
        }
        None
    }
}

/// A directive between the parameters and the body.
#[derive(Debug, Clone, PartialEq)]
pub enum Directive {
    /// `.maxntid 128, 1, 1`, `.maxnreg 168`, `.explicitcluster`: name without the dot, and its numbers.
    Numeric(Name, Vec<u64>),
    /// `.pragma` with its strings.
    Pragma(Vec<String>),
}

/// A declared variable, kernel parameter or function parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct Variable {
    /// Where it is declared.
    pub line: Line,
    /// Its visibility.
    pub linkage: Linkage,
    /// Its state space.
    pub space: Space,
    /// `.attribute(...)`: the text between the parentheses, without blanks.
    pub attribute: Option<Name>,
    /// `.align`, in bytes.
    pub align: Option<u32>,
    /// Elements of `.v2`, `.v4` or `.v8`.
    pub vector: Option<u8>,
    /// Element type.
    pub ty: Type,
    /// `.ptr` of a kernel parameter.
    pub pointer: Option<Pointer>,
    /// Its name; `_` in a call prototype.
    pub name: Name,
    /// Array dimensions; `None` stands for `[]`.
    pub dims: Vec<Option<u64>>,
    /// Initial value.
    pub init: Option<Init>,
}

impl Variable {
    /// One element of a type without further attributes.
    pub(crate) fn new(space: Space, ty: Type, name: &str) -> Self {
        Self {
            line: Line::default(),
            linkage: Linkage::Internal,
            space,
            attribute: None,
            align: None,
            vector: None,
            ty,
            pointer: None,
            name: name.into(),
            dims: Vec::new(),
            init: None,
        }
    }

    /// Size in bytes, if every dimension is written (or the initializer gives the only missing one) and the
    /// product fits.
    pub fn bytes(&self) -> Option<u64> {
        let mut bytes = u64::from(self.ty.bytes()) * u64::from(self.vector.unwrap_or(1));
        for (i, dim) in self.dims.iter().enumerate() {
            let extent = match (dim, &self.init) {
                (Some(n), _) => *n,
                (None, Some(Init::List(list))) if i == 0 => list.len() as u64,
                (None, _) => return None,
            };
            bytes = bytes.checked_mul(extent)?;
        }
        Some(bytes)
    }

    /// Alignment in bytes: the written one, or that of one element (a whole vector).
    pub fn alignment(&self) -> u32 {
        self.align.unwrap_or(self.ty.bytes() * u32::from(self.vector.unwrap_or(1)))
    }
}

/// `.ptr .space .align n`: what a pointer parameter points to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pointer {
    /// State space of the target; `None` is generic.
    pub space: Option<Space>,
    /// Alignment of the target in bytes.
    pub align: Option<u32>,
}

/// An initial value.
#[derive(Debug, Clone, PartialEq)]
pub enum Init {
    /// A number.
    Value(Immediate),
    /// The address of a symbol plus bytes.
    Symbol(Name, i64),
    /// `generic(symbol)` plus bytes: its generic address.
    Generic(Name, i64),
    /// `{ ... }`
    List(Vec<Init>),
}

/// Something inside a function body.
#[derive(Debug, Clone, PartialEq)]
pub enum Statement {
    /// One comment line, without the slashes.
    Comment(String),
    /// `.reg` declaration.
    Reg(RegDecl),
    /// `.shared`, `.local`, `.param`, `.global` or `.const` declaration.
    Variable(Variable),
    /// `name:`
    Label(Line, Name),
    /// An instruction.
    Instruction(Instruction),
    /// `{ ... }`: a scope of its own for registers, variables and labels.
    Block(Vec<Statement>),
    /// `.pragma` with its strings.
    Pragma(Vec<String>),
    /// `name: .branchtargets a, b;` for `brx.idx`.
    BranchTargets(Name, Vec<Name>),
    /// `name: .calltargets f, g;` for indirect calls.
    CallTargets(Name, Vec<Name>),
    /// `name: .callprototype (returns) _ (params);` for indirect calls.
    CallPrototype(Prototype),
}

/// The signature an indirect call uses.
#[derive(Debug, Clone, PartialEq)]
pub struct Prototype {
    /// Its label.
    pub name: Name,
    /// Return parameters.
    pub returns: Vec<Variable>,
    /// Parameters.
    pub params: Vec<Variable>,
    /// Whether `.noreturn` follows.
    pub noreturn: bool,
}

/// `.reg .b32 a, r<10>;`
#[derive(Debug, Clone, PartialEq)]
pub struct RegDecl {
    /// Where it stands.
    pub line: Line,
    /// Elements of `.v2` or `.v4`.
    pub vector: Option<u8>,
    /// Type of every name.
    pub ty: Type,
    /// Each name, and for `r<10>` the count: it declares `r0` to `r9`.
    pub names: Vec<(Name, Option<u32>)>,
}

/// `@p` or `@!p`.
#[derive(Debug, Clone, PartialEq)]
pub struct Guard {
    /// True for `@!p`.
    pub negated: bool,
    /// The predicate register.
    pub register: Name,
}

/// One instruction.
#[derive(Debug, Clone, PartialEq)]
pub struct Instruction {
    /// Where it starts.
    pub line: Line,
    /// The guard predicate.
    pub guard: Option<Guard>,
    /// The opcode up to its first dot: `ld`, `cp`, `tcgen05`.
    pub root: Name,
    /// The rest of the opcode, in order, without dots: `["async", "bulk", "shared::cluster", ...]`.
    pub modifiers: Vec<Name>,
    /// Operands in order, destination first.
    pub operands: Vec<Operand>,
}

impl Instruction {
    pub(crate) fn new(root: &str, modifiers: impl Iterator<Item = Name>, operands: Vec<Operand>) -> Self {
        Self {
            line: Line::default(),
            guard: None,
            root: root.into(),
            modifiers: modifiers.collect(),
            operands,
        }
    }

    /// Whether the modifier `name` is present.
    pub fn has(&self, name: &str) -> bool {
        self.modifiers.iter().any(|m| m == name)
    }

    /// Whether the opcode starts with these parts, e.g. `["cp", "async", "bulk"]`.
    pub fn starts_with(&self, parts: &[&str]) -> bool {
        match parts.split_first() {
            None => true,
            Some((root, rest)) => {
                self.root == *root
                    && rest.len() <= self.modifiers.len()
                    && rest.iter().zip(&self.modifiers).all(|(part, modifier)| modifier == part)
            }
        }
    }

    /// The modifiers that are fundamental types, in order: `[F32, F16]` of `cvt.f32.f16`.
    pub fn types(&self) -> impl DoubleEndedIterator<Item = Type> {
        self.modifiers.iter().filter_map(|m| Type::from_name(m))
    }

    /// The whole opcode with its dots.
    pub fn opcode(&self) -> String {
        let mut text = self.root.to_string();
        for modifier in &self.modifiers {
            text.push('.');
            text.push_str(modifier);
        }
        text
    }
}

/// An operand.
#[derive(Debug, Clone, PartialEq)]
pub enum Operand {
    /// A register, special register (`%tid.x`), variable, label or function, by name. A component of a vector
    /// register is part of the name (`v.x`).
    Ident(Name),
    /// `!p`
    Not(Name),
    /// A number.
    Imm(Immediate),
    /// `symbol+8`: the address of a variable plus bytes, as `mov` takes it.
    Offset(Name, i64),
    /// `_`: a discarded result.
    Sink,
    /// `{a, b}`
    Vector(Vec<Operand>),
    /// `d|p`
    Pair(Box<Operand>, Box<Operand>),
    /// `[a+8]`
    Address(Address),
    /// `[tensor, {c0, c1}]`: two or more operands in one bracket.
    List(Vec<Operand>),
    /// `(a, b)`: returns or arguments of a call.
    Group(Vec<Operand>),
}

/// `[base+offset]`
#[derive(Debug, Clone, PartialEq)]
pub struct Address {
    /// The register, variable or absolute address.
    pub base: AddressBase,
    /// Bytes added to it.
    pub offset: i64,
    /// Whether `.unified` follows the bracket.
    pub unified: bool,
}

/// What an address starts from.
#[derive(Debug, Clone, PartialEq)]
pub enum AddressBase {
    /// A register or a variable.
    Ident(Name),
    /// A number.
    Absolute(u64),
}

/// A number as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Immediate {
    /// Decimal, octal or binary integer, or a negative one.
    Int(i64),
    /// Hexadecimal integer (and decimal ones above `i64::MAX`).
    Hex(u64),
    /// `0fXXXXXXXX`: the bits of a binary32.
    F32(u32),
    /// `0dXXXXXXXXXXXXXXXX` or a decimal fraction: the bits of a binary64. PTX narrows it where an `f32` is
    /// wanted.
    F64(u64),
}

impl Immediate {
    /// The 64 bits of an integer (sign-extended); the raw bits of a floating-point number.
    pub fn bits(self) -> u64 {
        match self {
            Immediate::Int(value) => value as u64,
            Immediate::Hex(value) => value,
            Immediate::F32(bits) => u64::from(bits),
            Immediate::F64(bits) => bits,
        }
    }
}
