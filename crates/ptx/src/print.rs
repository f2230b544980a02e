//! [`Module`] to PTX text. The same tree always gives the same text, and reading it back gives the same tree.

use std::fmt::{self, Display, Formatter, Write};

use crate::ast::{
    Address, AddressBase, Directive, Function, FunctionKind, Immediate, Init, Instruction, Item, Linkage,
    Module, Operand, Prototype, RegDecl, Statement, Variable,
};

const INDENT: &str = "    ";

/// Vector operands longer than this are broken over lines of this many elements.
const VECTOR_LINE: usize = 16;

/// The text of `module`.
pub fn module(module: &Module) -> String {
    module.to_string()
}

fn comment(f: &mut Formatter<'_>, indent: &str, text: &str) -> fmt::Result {
    for line in text.split('\n') {
        let line = line.trim_end();
        writeln!(f, "{indent}//{}{line}", if line.is_empty() { "" } else { " " })?;
    }
    Ok(())
}

fn joined<T>(
    f: &mut Formatter<'_>,
    items: &[T],
    separator: &str,
    mut write: impl FnMut(&mut Formatter<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            f.write_str(separator)?;
        }
        write(f, item)?;
    }
    Ok(())
}

fn strings(f: &mut Formatter<'_>, list: &[String]) -> fmt::Result {
    joined(f, list, ", ", |f, text| write!(f, "\"{text}\""))
}

impl Display for Module {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for line in &self.header {
            comment(f, "", line)?;
        }
        writeln!(f, ".version {}.{}", self.version.major, self.version.minor)?;
        f.write_str(".target ")?;
        joined(f, &self.target, ", ", |f, name| f.write_str(name))?;
        f.write_char('\n')?;
        if let Some(size) = self.address_size {
            writeln!(f, ".address_size {size}")?;
        }
        let mut after_comment = false;
        for item in &self.items {
            let is_comment = matches!(item, Item::Comment(_));
            let function = matches!(item, Item::Function(_));
            // A blank line before each function and the comment above it.
            if (function || is_comment) && !after_comment {
                f.write_char('\n')?;
            }
            after_comment = is_comment;
            match item {
                Item::Comment(text) => comment(f, "", text)?,
                Item::Variable(variable) => writeln!(f, "{variable};")?,
                Item::Function(function) => write!(f, "{function}")?,
                Item::Pragma(list) => {
                    f.write_str(".pragma ")?;
                    strings(f, list)?;
                    f.write_str(";\n")?;
                }
                Item::Alias(name, target) => writeln!(f, ".alias {name}, {target};")?,
            }
        }
        Ok(())
    }
}

impl Display for Linkage {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Linkage::Internal => "",
            Linkage::Visible => ".visible ",
            Linkage::Extern => ".extern ",
            Linkage::Weak => ".weak ",
            Linkage::Common => ".common ",
        })
    }
}

fn params(f: &mut Formatter<'_>, list: &[Variable]) -> fmt::Result {
    f.write_char('(')?;
    joined(f, list, ", ", |f, param| write!(f, "{param}"))?;
    f.write_char(')')
}

impl Display for Function {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            FunctionKind::Entry => ".entry",
            FunctionKind::Device => ".func",
        };
        write!(f, "{}{kind} ", self.linkage)?;
        if let Some(attribute) = &self.attribute {
            write!(f, ".attribute({attribute}) ")?;
        }
        if !self.returns.is_empty() {
            params(f, &self.returns)?;
            f.write_char(' ')?;
        }
        write!(f, "{}(", self.name)?;
        if !self.params.is_empty() {
            f.write_char('\n')?;
            joined(f, &self.params, ",\n", |f, param| write!(f, "{INDENT}{param}"))?;
            f.write_char('\n')?;
        }
        f.write_char(')')?;
        for directive in &self.directives {
            f.write_char('\n')?;
            match directive {
                Directive::Numeric(name, values) => {
                    write!(f, ".{name}")?;
                    if !values.is_empty() {
                        f.write_char(' ')?;
                        joined(f, values, ", ", |f, value| write!(f, "{value}"))?;
                    }
                }
                Directive::Pragma(list) => {
                    f.write_str(".pragma ")?;
                    strings(f, list)?;
                    f.write_char(';')?;
                }
            }
        }
        match &self.body {
            None => f.write_str(";\n"),
            Some(body) => {
                f.write_str("\n{\n")?;
                statements(f, body, 1)?;
                f.write_str("}\n")
            }
        }
    }
}

impl Display for Variable {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} ", self.linkage, self.space)?;
        if let Some(attribute) = &self.attribute {
            write!(f, ".attribute({attribute}) ")?;
        }
        if let Some(align) = self.align {
            write!(f, ".align {align} ")?;
        }
        if let Some(n) = self.vector {
            write!(f, ".v{n} ")?;
        }
        write!(f, ".{} ", self.ty)?;
        if let Some(pointer) = self.pointer {
            f.write_str(".ptr ")?;
            if let Some(space) = pointer.space {
                write!(f, ".{space} ")?;
            }
            if let Some(align) = pointer.align {
                write!(f, ".align {align} ")?;
            }
        }
        f.write_str(&self.name)?;
        for dim in &self.dims {
            match dim {
                Some(n) => write!(f, "[{n}]")?,
                None => f.write_str("[]")?,
            }
        }
        match &self.init {
            Some(init) => write!(f, " = {init}"),
            None => Ok(()),
        }
    }
}

impl Display for Init {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Init::Value(value) => write!(f, "{value}"),
            Init::Symbol(name, offset) => write!(f, "{name}{}", Offset(*offset)),
            Init::Generic(name, offset) => write!(f, "generic({name}){}", Offset(*offset)),
            Init::List(list) => {
                f.write_char('{')?;
                joined(f, list, ", ", |f, item| write!(f, "{item}"))?;
                f.write_char('}')
            }
        }
    }
}

/// `+8`, `-8` or nothing.
struct Offset(i64);

impl Display for Offset {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            n => write!(f, "{n:+}"),
        }
    }
}

fn statements(f: &mut Formatter<'_>, list: &[Statement], depth: usize) -> fmt::Result {
    let indent = INDENT.repeat(depth);
    let mut blank = false;
    for statement in list {
        // A blank line sets a comment off from the statements before it.
        let is_comment = matches!(statement, Statement::Comment(_));
        if is_comment && blank {
            f.write_char('\n')?;
        }
        blank = !is_comment;
        match statement {
            Statement::Comment(text) => comment(f, &indent, text)?,
            Statement::Block(inner) => {
                writeln!(f, "{indent}{{")?;
                statements(f, inner, depth + 1)?;
                writeln!(f, "{indent}}}")?;
            }
            // Labels stand out by one level less.
            Statement::Label(_, name) => writeln!(f, "{}{name}:", INDENT.repeat(depth - 1))?,
            Statement::Reg(reg) => writeln!(f, "{indent}{reg};")?,
            Statement::Variable(variable) => writeln!(f, "{indent}{variable};")?,
            Statement::Instruction(instruction) => {
                write!(f, "{indent}")?;
                write_instruction(f, instruction, &indent)?;
                f.write_str(";\n")?;
            }
            Statement::Pragma(list) => {
                write!(f, "{indent}.pragma ")?;
                strings(f, list)?;
                f.write_str(";\n")?;
            }
            Statement::BranchTargets(name, targets) => {
                write!(f, "{name}: .branchtargets ")?;
                joined(f, targets, ", ", |f, target| f.write_str(target))?;
                f.write_str(";\n")?;
            }
            Statement::CallTargets(name, targets) => {
                write!(f, "{name}: .calltargets ")?;
                joined(f, targets, ", ", |f, target| f.write_str(target))?;
                f.write_str(";\n")?;
            }
            Statement::CallPrototype(prototype) => writeln!(f, "{prototype};")?,
        }
    }
    Ok(())
}

impl Display for Prototype {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}: .callprototype ", self.name)?;
        params(f, &self.returns)?;
        f.write_str(" _ ")?;
        params(f, &self.params)?;
        f.write_str(if self.noreturn { " .noreturn" } else { "" })
    }
}

impl Display for RegDecl {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(".reg ")?;
        if let Some(n) = self.vector {
            write!(f, ".v{n} ")?;
        }
        write!(f, ".{} ", self.ty)?;
        joined(f, &self.names, ", ", |f, (name, count)| match count {
            Some(n) => write!(f, "{name}<{n}>"),
            None => f.write_str(name),
        })
    }
}

fn write_instruction(f: &mut Formatter<'_>, instruction: &Instruction, indent: &str) -> fmt::Result {
    if let Some(guard) = &instruction.guard {
        write!(f, "@{}{} ", if guard.negated { "!" } else { "" }, guard.register)?;
    }
    f.write_str(&instruction.root)?;
    for modifier in &instruction.modifiers {
        write!(f, ".{modifier}")?;
    }
    for (i, operand) in instruction.operands.iter().enumerate() {
        f.write_str(if i == 0 { " " } else { ", " })?;
        match operand {
            Operand::Vector(elements) if elements.len() > VECTOR_LINE => {
                f.write_char('{')?;
                for (i, chunk) in elements.chunks(VECTOR_LINE).enumerate() {
                    write!(f, "{}\n{indent}{INDENT}", if i == 0 { "" } else { "," })?;
                    joined(f, chunk, ", ", |f, element| write!(f, "{element}"))?;
                }
                f.write_char('}')?;
            }
            _ => write!(f, "{operand}")?,
        }
    }
    Ok(())
}

impl Display for Instruction {
    /// The instruction without its semicolon; long vectors are broken over lines.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write_instruction(f, self, "")
    }
}

impl Display for Operand {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let list = |f: &mut Formatter<'_>, open: char, elements: &[Operand], close: char| {
            f.write_char(open)?;
            joined(f, elements, ", ", |f, element| write!(f, "{element}"))?;
            f.write_char(close)
        };
        match self {
            Operand::Ident(name) => f.write_str(name),
            Operand::Not(name) => write!(f, "!{name}"),
            Operand::Imm(value) => write!(f, "{value}"),
            Operand::Offset(name, offset) => write!(f, "{name}{offset:+}"),
            Operand::Sink => f.write_char('_'),
            Operand::Vector(elements) => list(f, '{', elements, '}'),
            Operand::Pair(first, second) => write!(f, "{first}|{second}"),
            Operand::Address(address) => write!(f, "{address}"),
            Operand::List(elements) => list(f, '[', elements, ']'),
            Operand::Group(elements) => list(f, '(', elements, ')'),
        }
    }
}

impl Display for Address {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match &self.base {
            AddressBase::Ident(name) => write!(f, "[{name}{}]", Offset(self.offset))?,
            AddressBase::Absolute(address) => write!(f, "[{address}{}]", Offset(self.offset))?,
        }
        f.write_str(if self.unified { ".unified" } else { "" })
    }
}

impl Display for Immediate {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Immediate::Int(value) => write!(f, "{value}"),
            Immediate::Hex(value) => write!(f, "0x{value:X}"),
            Immediate::F32(bits) => write!(f, "0f{bits:08X}"),
            Immediate::F64(bits) => write!(f, "0d{bits:016X}"),
        }
    }
}
