//! Operands of an instruction.

use super::cursor::Cursor;
use super::lexer::Kind;
use crate::ast::{Address, AddressBase, Operand};
use crate::error::Error;
use crate::name::Name;

/// Operands separated by commas up to (excluding) the punctuation `end`.
pub(super) fn list(cursor: &mut Cursor<'_>, end: char) -> Result<Vec<Operand>, Error> {
    let mut operands = Vec::new();
    if cursor.is(end) {
        return Ok(operands);
    }
    loop {
        operands.push(operand(cursor)?);
        if cursor.is(end) {
            return Ok(operands);
        }
        cursor.expect(',', &format!("or `{end}` after an operand"))?;
    }
}

fn operand(cursor: &mut Cursor<'_>) -> Result<Operand, Error> {
    let first = simple(cursor)?;
    if !cursor.accept('|') {
        return Ok(first);
    }
    let second = simple(cursor)?;
    Ok(Operand::Pair(Box::new(first), Box::new(second)))
}

/// An identifier with its vector component, if one follows: `%tid.x`.
fn ident(cursor: &mut Cursor<'_>) -> Result<Name, Error> {
    let name = cursor.word("an identifier")?;
    match cursor.touching(Kind::Dot) {
        Some(component) => Ok(cursor.name(&format!("{name}.{component}"))),
        None => Ok(name),
    }
}

fn simple(cursor: &mut Cursor<'_>) -> Result<Operand, Error> {
    let token = cursor.peek();
    match token.kind {
        Kind::Word if token.text == "_" => {
            cursor.bump();
            Ok(Operand::Sink)
        }
        Kind::Word => {
            let name = ident(cursor)?;
            if cursor.is('+') || cursor.is('-') {
                return Ok(Operand::Offset(name, cursor.offset()?));
            }
            Ok(Operand::Ident(name))
        }
        Kind::Number | Kind::Punct('-' | '+') => Ok(Operand::Imm(cursor.immediate()?)),
        Kind::Punct('!') => {
            cursor.bump();
            Ok(Operand::Not(ident(cursor)?))
        }
        Kind::Punct('{') => {
            cursor.bump();
            let elements = cursor.nested(|c| list(c, '}'))?;
            cursor.bump();
            Ok(Operand::Vector(elements))
        }
        Kind::Punct('(') => {
            cursor.bump();
            let elements = cursor.nested(|c| list(c, ')'))?;
            cursor.bump();
            Ok(Operand::Group(elements))
        }
        Kind::Punct('[') => {
            cursor.bump();
            cursor.nested(bracket)
        }
        _ => cursor.error("an operand"),
    }
}

/// The inside of `[ ]` and the closing bracket.
fn bracket(cursor: &mut Cursor<'_>) -> Result<Operand, Error> {
    let token = cursor.peek();
    let base = match token.kind {
        Kind::Word => AddressBase::Ident(ident(cursor)?),
        Kind::Number => AddressBase::Absolute(cursor.unsigned("an address")?),
        _ => return cursor.error("an address: a register, a variable or a number"),
    };
    let offset = cursor.offset()?;
    if cursor.accept(']') {
        let unified = cursor.touching(Kind::Dot);
        if unified.is_some_and(|text| text != "unified") {
            return cursor.error("`,`, `;` or `.unified` after an address");
        }
        return Ok(Operand::Address(Address { base, offset, unified: unified.is_some() }));
    }
    cursor.expect(',', "or `]` after an address")?;
    let mut elements = vec![match (base, offset) {
        (AddressBase::Ident(name), 0) => Operand::Ident(name),
        (AddressBase::Ident(name), offset) => Operand::Offset(name, offset),
        (AddressBase::Absolute(_), _) => {
            return Err(cursor.error_at(token, "a register or a variable before `,`"));
        }
    }];
    elements.extend(list(cursor, ']')?);
    cursor.bump();
    if elements.len() < 2 {
        return Err(cursor.error_at(token, "an operand between `,` and `]`"));
    }
    Ok(Operand::List(elements))
}
