//! PTX text to [`Module`]: everything NVIDIA's compilers emit for sm_80 to sm_121a.
//!
//! `lexer` cuts tokens, `cursor` walks them, `module` reads what stands at file scope, `statement` what
//! stands in a body, `operand` the operands. The parser checks form only; which instructions exist, and on
//! which target, is the table's business. It never panics, and every error says line, column, what was found
//! and what would be valid. Specification: PTX ISA "Syntax".

mod cursor;
mod lexer;
mod module;
mod operand;
mod statement;

use crate::ast::{Module, Statement};
use crate::error::Error;
use cursor::Cursor;

/// Reads a PTX file.
///
/// # Errors
/// [`Error::Syntax`] at the first thing that is not PTX.
pub fn module(text: &str) -> Result<Module, Error> {
    module::module(&mut Cursor::new(text)?)
}

/// Reads the statements of a function body, without the braces around it.
///
/// # Errors
/// [`Error::Syntax`] at the first thing that is not a statement.
pub fn statements(text: &str) -> Result<Vec<Statement>, Error> {
    let mut cursor = Cursor::new(text)?;
    let mut body = Vec::new();
    statement::list(&mut cursor, &mut body)?;
    match cursor.peek().kind {
        lexer::Kind::End => Ok(body),
        _ => cursor.error("a statement"),
    }
}
