//! What stands at file scope: header, variables, functions; and declarations, which bodies share.

use super::cursor::Cursor;
use super::lexer::Kind;
use super::statement;
use crate::ast::{
    Directive, Function, FunctionKind, Init, Item, Line, Linkage, Module, Pointer, Variable, Version,
};
use crate::error::Error;
use crate::name::Name;
use crate::types::Space;

pub(super) fn module(cursor: &mut Cursor<'_>) -> Result<Module, Error> {
    let mut header = cursor.comments();
    if !cursor.accept_dot("version") {
        return cursor.error("`.version`, which starts a PTX file");
    }
    let version = version(cursor)?;
    header.extend(cursor.comments());
    if !cursor.accept_dot("target") {
        return cursor.error("`.target` after `.version`");
    }
    let mut target = vec![cursor.word("a target such as sm_90a")?];
    while cursor.accept(',') {
        target.push(cursor.word("a target option")?);
    }
    let mut items = Vec::new();
    let between = cursor.comments();
    let address_size = if cursor.accept_dot("address_size") {
        header.extend(between);
        let token = cursor.peek();
        let size = cursor.unsigned_u32("32 or 64")?;
        if !matches!(size, 32 | 64) {
            return Err(cursor.error_at(token, "32 or 64"));
        }
        Some(size)
    } else {
        items.extend(between.into_iter().map(Item::Comment));
        None
    };
    loop {
        items.extend(cursor.comments().into_iter().map(Item::Comment));
        if cursor.peek().kind == Kind::End {
            return Ok(Module { header, version, target, address_size, items });
        }
        item(cursor, &mut items)?;
    }
}

fn version(cursor: &mut Cursor<'_>) -> Result<Version, Error> {
    let token = cursor.peek();
    let parts = token.text.split_once('.');
    let parsed = parts.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    match (token.kind, parsed) {
        (Kind::Number, Some((major, minor))) => {
            cursor.bump();
            Ok(Version { major, minor })
        }
        _ => cursor.error("a version such as 8.7"),
    }
}

fn item(cursor: &mut Cursor<'_>, items: &mut Vec<Item>) -> Result<(), Error> {
    let token = cursor.peek();
    if token.kind == Kind::Punct(';') {
        cursor.bump();
        return Ok(());
    }
    if token.kind != Kind::Dot {
        return cursor.error("a directive such as `.visible .entry` or `.global`");
    }
    match token.text {
        "pragma" => {
            cursor.bump();
            items.push(Item::Pragma(cursor.strings()?));
            cursor.expect(';', "after `.pragma`")?;
        }
        "file" => {
            cursor.bump();
            cursor.skip_file()?;
        }
        "loc" => {
            cursor.bump();
            cursor.skip_location()?;
        }
        "section" => {
            cursor.bump();
            match cursor.peek().kind {
                Kind::Dot | Kind::Word => cursor.bump(),
                _ => return cursor.error("a section name"),
            };
            cursor.skip_braces()?;
        }
        "alias" => {
            cursor.bump();
            let name = cursor.word("a function name")?;
            cursor.expect(',', "between the two names of `.alias`")?;
            let target = cursor.word("a function name")?;
            cursor.expect(';', "after `.alias`")?;
            items.push(Item::Alias(name, target));
        }
        _ => {
            let linkage = linkage(cursor);
            let kind = cursor.peek();
            match (kind.kind, kind.text) {
                (Kind::Dot, "entry" | "func") => items.push(Item::Function(function(cursor, linkage)?)),
                _ => {
                    let spaces = [Space::Global, Space::Const, Space::Shared, Space::Local, Space::Tex];
                    let declared = variables_linked(cursor, linkage, &spaces)?;
                    items.extend(declared.into_iter().map(Item::Variable));
                }
            }
        }
    }
    Ok(())
}

fn linkage(cursor: &mut Cursor<'_>) -> Linkage {
    [
        ("visible", Linkage::Visible),
        ("extern", Linkage::Extern),
        ("weak", Linkage::Weak),
        ("common", Linkage::Common),
    ]
    .into_iter()
    .find_map(|(text, linkage)| cursor.accept_dot(text).then_some(linkage))
    .unwrap_or(Linkage::Internal)
}

fn function(cursor: &mut Cursor<'_>, linkage: Linkage) -> Result<Function, Error> {
    let line = cursor.line();
    let kind = match cursor.bump().text {
        "entry" => FunctionKind::Entry,
        _ => FunctionKind::Device,
    };
    let attribute = attribute(cursor)?;
    let returns = match kind {
        FunctionKind::Device if cursor.is('(') => params(cursor)?,
        _ => Vec::new(),
    };
    let name = cursor.word("a function name")?;
    let params = if cursor.is('(') { params(cursor)? } else { Vec::new() };
    let mut directives = Vec::new();
    let body = loop {
        let token = cursor.peek();
        match token.kind {
            Kind::Dot => {
                cursor.bump();
                directives.push(directive(cursor, token.text)?);
                // Compilers end `.pragma` with a semicolon even here; other directives have none.
                if token.text == "pragma" {
                    cursor.accept(';');
                }
            }
            Kind::Punct(';') => {
                cursor.bump();
                break None;
            }
            Kind::Punct('{') => {
                cursor.bump();
                let mut body = Vec::new();
                cursor.nested(|c| statement::list(c, &mut body))?;
                cursor.expect('}', "or a statement")?;
                break Some(body);
            }
            _ => return cursor.error("a directive such as `.maxntid`, `{` or `;`"),
        }
    };
    Ok(Function { line, linkage, kind, attribute, returns, name, params, directives, body })
}

fn directive(cursor: &mut Cursor<'_>, name: &str) -> Result<Directive, Error> {
    if name == "pragma" {
        return Ok(Directive::Pragma(cursor.strings()?));
    }
    let name = cursor.name(name);
    let mut values = Vec::new();
    if cursor.peek().kind == Kind::Number {
        loop {
            values.push(cursor.unsigned("a number")?);
            if !cursor.accept(',') {
                break;
            }
        }
    }
    Ok(Directive::Numeric(name, values))
}

/// `( ... )`: parameters of a function, or its returns.
pub(super) fn params(cursor: &mut Cursor<'_>) -> Result<Vec<Variable>, Error> {
    cursor.expect('(', "before parameters")?;
    let mut params = Vec::new();
    while !cursor.accept(')') {
        if !params.is_empty() {
            cursor.expect(',', "or `)` after a parameter")?;
        }
        let line = cursor.line();
        let space = space(cursor, &[Space::Param, Space::Reg])?;
        let shape = Shape::read(cursor)?;
        params.push(declarator(cursor, line, Linkage::Internal, space, &shape)?);
    }
    Ok(params)
}

/// Variables declared by one statement, in one of `spaces`.
pub(super) fn variables(cursor: &mut Cursor<'_>, spaces: &[Space]) -> Result<Vec<Variable>, Error> {
    variables_linked(cursor, Linkage::Internal, spaces)
}

fn variables_linked(
    cursor: &mut Cursor<'_>,
    linkage: Linkage,
    spaces: &[Space],
) -> Result<Vec<Variable>, Error> {
    let line = cursor.line();
    let space = space(cursor, spaces)?;
    let shape = Shape::read(cursor)?;
    let mut list = Vec::new();
    loop {
        let mut variable = declarator(cursor, line, linkage, space, &shape)?;
        if cursor.accept('=') {
            variable.init = Some(init(cursor)?);
        }
        list.push(variable);
        if !cursor.accept(',') {
            cursor.expect(';', "after a variable")?;
            return Ok(list);
        }
    }
}

fn space(cursor: &mut Cursor<'_>, allowed: &[Space]) -> Result<Space, Error> {
    let token = cursor.peek();
    match (token.kind, Space::from_name(token.text)) {
        (Kind::Dot, Some(space)) if allowed.contains(&space) => {
            cursor.bump();
            Ok(space)
        }
        _ => {
            let names: Vec<String> = allowed.iter().map(|s| format!("`.{s}`")).collect();
            cursor.error(format!("a declaration starting with {}", names.join(" or ")))
        }
    }
}

fn attribute(cursor: &mut Cursor<'_>) -> Result<Option<Name>, Error> {
    if cursor.accept_dot("attribute") { cursor.parenthesised().map(Some) } else { Ok(None) }
}

/// What stands between the state space and the name.
struct Shape {
    attribute: Option<Name>,
    align: Option<u32>,
    vector: Option<u8>,
    ty: crate::types::Type,
    pointer: Option<Pointer>,
}

impl Shape {
    fn read(cursor: &mut Cursor<'_>) -> Result<Shape, Error> {
        let attribute = attribute(cursor)?;
        let align = align(cursor)?;
        let vector = cursor.vector();
        let ty = cursor.ty()?;
        let pointer = if cursor.accept_dot("ptr") {
            let space = [Space::Const, Space::Global, Space::Local, Space::Shared]
                .into_iter()
                .find(|space| cursor.accept_dot(space.as_str()));
            Some(Pointer { space, align: self::align(cursor)? })
        } else {
            None
        };
        Ok(Shape { attribute, align, vector, ty, pointer })
    }
}

fn align(cursor: &mut Cursor<'_>) -> Result<Option<u32>, Error> {
    if !cursor.accept_dot("align") {
        return Ok(None);
    }
    let token = cursor.peek();
    let align = cursor.unsigned_u32("an alignment in bytes")?;
    if !align.is_power_of_two() {
        return Err(cursor.error_at(token, "a power of two"));
    }
    Ok(Some(align))
}

/// A name and its array dimensions.
fn declarator(
    cursor: &mut Cursor<'_>,
    line: Line,
    linkage: Linkage,
    space: Space,
    shape: &Shape,
) -> Result<Variable, Error> {
    let name = cursor.word("a name")?;
    let mut dims = Vec::new();
    while cursor.accept('[') {
        dims.push(if cursor.is(']') { None } else { Some(cursor.unsigned("an array size")?) });
        cursor.expect(']', "after an array size")?;
    }
    Ok(Variable {
        line,
        linkage,
        space,
        attribute: shape.attribute.clone(),
        align: shape.align,
        vector: shape.vector,
        ty: shape.ty,
        pointer: shape.pointer,
        name,
        dims,
        init: None,
    })
}

fn init(cursor: &mut Cursor<'_>) -> Result<Init, Error> {
    if cursor.accept('{') {
        let mut list = Vec::new();
        while !cursor.accept('}') {
            if !list.is_empty() {
                cursor.expect(',', "or `}` after a value")?;
            }
            list.push(cursor.nested(init)?);
        }
        return Ok(Init::List(list));
    }
    if cursor.peek().kind != Kind::Word {
        return Ok(Init::Value(cursor.immediate()?));
    }
    let name = cursor.word("a value")?;
    if name == "generic" && cursor.accept('(') {
        let symbol = cursor.word("a symbol")?;
        cursor.expect(')', "after the symbol")?;
        return Ok(Init::Generic(symbol, cursor.offset()?));
    }
    Ok(Init::Symbol(name, cursor.offset()?))
}
