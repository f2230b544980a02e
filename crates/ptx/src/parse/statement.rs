//! What stands inside a function body.

use super::cursor::Cursor;
use super::lexer::Kind;
use super::{module, operand};
use crate::ast::{Guard, Instruction, Prototype, RegDecl, Statement};
use crate::error::Error;
use crate::name::Name;
use crate::types::Space;

/// Statements up to (excluding) `}` or the end of the file.
pub(super) fn list(cursor: &mut Cursor<'_>, out: &mut Vec<Statement>) -> Result<(), Error> {
    loop {
        out.extend(cursor.comments().into_iter().map(Statement::Comment));
        let token = cursor.peek();
        match token.kind {
            Kind::Punct('}') | Kind::End => return Ok(()),
            // A lone `;` is an empty statement: inline assembly leaves them behind.
            Kind::Punct(';') => {
                cursor.bump();
            }
            Kind::Punct('{') => {
                cursor.bump();
                let mut inner = Vec::new();
                cursor.nested(|c| list(c, &mut inner))?;
                cursor.expect('}', "or a statement")?;
                out.push(Statement::Block(inner));
            }
            Kind::Word if cursor.peek_second().kind == Kind::Punct(':') => label(cursor, out)?,
            Kind::Word | Kind::Punct('@') => out.push(Statement::Instruction(instruction(cursor)?)),
            Kind::Dot => directive(cursor, out)?,
            _ => return cursor.error("a statement"),
        }
    }
}

fn directive(cursor: &mut Cursor<'_>, out: &mut Vec<Statement>) -> Result<(), Error> {
    let token = cursor.peek();
    match token.text {
        "reg" => {
            cursor.bump();
            out.push(Statement::Reg(reg(cursor, token.line)?));
        }
        "pragma" => {
            cursor.bump();
            out.push(Statement::Pragma(cursor.strings()?));
            cursor.expect(';', "after `.pragma`")?;
        }
        "loc" => {
            cursor.bump();
            cursor.skip_location()?;
        }
        _ => {
            let declared = module::variables(cursor, &[Space::Shared, Space::Local, Space::Param])?;
            out.extend(declared.into_iter().map(Statement::Variable));
        }
    }
    Ok(())
}

/// `.reg` declaration after the keyword.
fn reg(cursor: &mut Cursor<'_>, line: u32) -> Result<RegDecl, Error> {
    // Old compilers put `.align` before the type of a register; it has no meaning there.
    let vector = cursor.vector();
    let ty = cursor.ty()?;
    let mut names = Vec::new();
    loop {
        let name = cursor.word("a register name")?;
        let count = if cursor.accept('<') {
            let n = cursor.unsigned_u32("the number of registers")?;
            cursor.expect('>', "after the number of registers")?;
            Some(n)
        } else {
            None
        };
        names.push((name, count));
        if !cursor.accept(',') {
            break;
        }
    }
    cursor.expect(';', "or `,` after a register name")?;
    Ok(RegDecl { line: crate::ast::Line(line), vector, ty, names })
}

/// `name:` and the directives that can only follow a label.
fn label(cursor: &mut Cursor<'_>, out: &mut Vec<Statement>) -> Result<(), Error> {
    let line = cursor.line();
    let name = cursor.word("a label")?;
    cursor.expect(':', "after a label")?;
    if cursor.accept_dot("branchtargets") {
        out.push(Statement::BranchTargets(name, targets(cursor)?));
    } else if cursor.accept_dot("calltargets") {
        out.push(Statement::CallTargets(name, targets(cursor)?));
    } else if cursor.accept_dot("callprototype") {
        let returns = if cursor.is('(') { module::params(cursor)? } else { Vec::new() };
        cursor.word("`_` in a call prototype")?;
        let params = if cursor.is('(') { module::params(cursor)? } else { Vec::new() };
        let noreturn = cursor.accept_dot("noreturn");
        cursor.expect(';', "after a call prototype")?;
        out.push(Statement::CallPrototype(Prototype { name, returns, params, noreturn }));
    } else {
        out.push(Statement::Label(line, name));
    }
    Ok(())
}

fn targets(cursor: &mut Cursor<'_>) -> Result<Vec<Name>, Error> {
    let mut names = Vec::new();
    loop {
        names.push(cursor.word("a label or function name")?);
        if !cursor.accept(',') {
            cursor.expect(';', "or `,` after a target")?;
            return Ok(names);
        }
    }
}

fn instruction(cursor: &mut Cursor<'_>) -> Result<Instruction, Error> {
    let line = cursor.line();
    let guard = if cursor.accept('@') {
        let negated = cursor.accept('!');
        Some(Guard { negated, register: cursor.word("a predicate register")? })
    } else {
        None
    };
    let root = cursor.word("an opcode")?;
    let mut modifiers = Vec::new();
    while cursor.peek().kind == Kind::Dot {
        let token = cursor.bump();
        modifiers.push(cursor.name(token.text));
    }
    let operands = operand::list(cursor, ';')?;
    cursor.expect(';', "after an instruction")?;
    Ok(Instruction { line, guard, root, modifiers, operands })
}
