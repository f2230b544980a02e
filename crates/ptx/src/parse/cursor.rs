//! Walks over the tokens: looking, expecting, and saying what was wrong.

use super::lexer::{Kind, Token, position, tokens};
use crate::ast::{Immediate, Line};
use crate::error::Error;
use crate::name::{Interner, Name};
use crate::types::Type;

/// How deep `{ }` may nest. PTX that compilers emit stays below ten; the limit keeps a hostile file from
/// exhausting the stack.
pub(super) const MAX_DEPTH: u32 = 128;

pub(super) struct Cursor<'a> {
    source: &'a str,
    tokens: Vec<Token<'a>>,
    at: usize,
    names: Interner,
    depth: u32,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(source: &'a str) -> Result<Cursor<'a>, Error> {
        Ok(Cursor { source, tokens: tokens(source)?, at: 0, names: Interner::default(), depth: 0 })
    }

    /// Index of the next token that is not a comment.
    fn next(&self) -> usize {
        // The last token is `End`.
        self.at + self.tokens[self.at..].iter().take_while(|t| t.kind == Kind::Comment).count()
    }

    /// The next token that is not a comment.
    pub(super) fn peek(&self) -> Token<'a> {
        self.tokens[self.next()]
    }

    pub(super) fn peek_second(&self) -> Token<'a> {
        let rest = &self.tokens[self.next()..];
        rest.iter().skip(1).find(|t| t.kind != Kind::Comment).copied().unwrap_or(rest[0])
    }

    /// Takes the next token and drops the comments before it. The end of the file is never passed.
    pub(super) fn bump(&mut self) -> Token<'a> {
        let at = self.next();
        let token = self.tokens[at];
        if token.kind != Kind::End {
            self.at = at + 1;
        }
        token
    }

    /// Takes the comments that stand here, one string per line.
    pub(super) fn comments(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        while self.tokens[self.at].kind == Kind::Comment {
            for line in self.tokens[self.at].text.split('\n') {
                let line = line.trim_end();
                lines.push(line.strip_prefix(' ').unwrap_or(line).to_string());
            }
            self.at += 1;
        }
        lines
    }

    pub(super) fn line(&self) -> Line {
        Line(self.peek().line)
    }

    /// An error at the next token.
    pub(super) fn error<T>(&self, expected: impl Into<String>) -> Result<T, Error> {
        let token = self.peek();
        Err(self.error_at(token, expected))
    }

    pub(super) fn error_at(&self, token: Token<'_>, expected: impl Into<String>) -> Error {
        let (line, column) = position(self.source, token.start);
        let found = match token.kind {
            Kind::End => "end of file".to_string(),
            Kind::Dot => format!("`.{}`", token.text),
            Kind::Text => format!("the string \"{}\"", token.text),
            _ => format!("`{}`", token.text),
        };
        Error::Syntax { line, column, found, expected: expected.into() }
    }

    pub(super) fn is(&self, c: char) -> bool {
        self.peek().kind == Kind::Punct(c)
    }

    /// Takes the punctuation `c` if it is next.
    pub(super) fn accept(&mut self, c: char) -> bool {
        let found = self.is(c);
        if found {
            self.bump();
        }
        found
    }

    pub(super) fn expect(&mut self, c: char, context: &str) -> Result<(), Error> {
        if self.accept(c) { Ok(()) } else { self.error(format!("`{c}` {context}")) }
    }

    /// Takes the dotted word `text` if it is next.
    pub(super) fn accept_dot(&mut self, text: &str) -> bool {
        let token = self.peek();
        let found = token.kind == Kind::Dot && token.text == text;
        if found {
            self.bump();
        }
        found
    }

    pub(super) fn name(&mut self, text: &str) -> Name {
        self.names.get(text)
    }

    pub(super) fn word(&mut self, what: &str) -> Result<Name, Error> {
        let token = self.peek();
        if token.kind != Kind::Word {
            return self.error(what);
        }
        self.bump();
        Ok(self.name(token.text))
    }

    /// The text of a token that touches the one before it and is of `kind`: `.x` in `%tid.x`.
    pub(super) fn touching(&mut self, kind: Kind) -> Option<&'a str> {
        let token = self.tokens[self.at];
        let before = self.tokens.get(self.at.checked_sub(1)?)?;
        let touches = before.start + before.text.len() == token.start;
        (touches && token.kind == kind).then(|| {
            self.at += 1;
            token.text
        })
    }

    /// One or more strings separated by commas.
    pub(super) fn strings(&mut self) -> Result<Vec<String>, Error> {
        let mut list = Vec::new();
        loop {
            let token = self.peek();
            if token.kind != Kind::Text {
                return self.error("a string");
            }
            self.bump();
            list.push(token.text.to_string());
            if !self.accept(',') {
                return Ok(list);
            }
        }
    }

    pub(super) fn ty(&mut self) -> Result<Type, Error> {
        let token = self.peek();
        match (token.kind, Type::from_name(token.text)) {
            (Kind::Dot, Some(ty)) => {
                self.bump();
                Ok(ty)
            }
            _ => self.error("a type such as `.b32`"),
        }
    }

    /// `.v2`, `.v4` or `.v8`, if next.
    pub(super) fn vector(&mut self) -> Option<u8> {
        [("v2", 2), ("v4", 4), ("v8", 8)].into_iter().find_map(|(text, n)| self.accept_dot(text).then_some(n))
    }

    /// A number without sign that fits `u64` and is an integer.
    pub(super) fn unsigned(&mut self, what: &str) -> Result<u64, Error> {
        let token = self.peek();
        match (token.kind, parse_number(token.text, false)) {
            (Kind::Number, Some(Immediate::Int(value))) if value >= 0 => {
                self.bump();
                Ok(value as u64)
            }
            (Kind::Number, Some(Immediate::Hex(value))) => {
                self.bump();
                Ok(value)
            }
            _ => self.error(what),
        }
    }

    pub(super) fn unsigned_u32(&mut self, what: &str) -> Result<u32, Error> {
        let token = self.peek();
        let value = self.unsigned(what)?;
        u32::try_from(value).map_err(|_| self.error_at(token, format!("{what} below 4294967296")))
    }

    /// A number with optional sign.
    pub(super) fn immediate(&mut self) -> Result<Immediate, Error> {
        let negative = self.accept('-');
        if !negative {
            self.accept('+');
        }
        let token = self.peek();
        if token.kind != Kind::Number {
            return self.error("a number");
        }
        match parse_number(token.text, negative) {
            Some(value) => {
                self.bump();
                Ok(value)
            }
            None => self.error("a number of at most 64 bits, such as 12, 0x1F, 0f3F800000 or 1.5"),
        }
    }

    /// `+n` and `-n`, any number of them, added up.
    pub(super) fn offset(&mut self) -> Result<i64, Error> {
        let mut sum = 0i64;
        while self.is('+') || self.is('-') {
            let token = self.peek();
            let negative = !self.accept('+') && self.accept('-');
            // `[a+-8]`: nvcc writes negative offsets this way.
            let negative = negative ^ self.accept('-');
            let magnitude = self.unsigned("an offset in bytes")?;
            let value = i64::try_from(magnitude).ok().map(|v| if negative { -v } else { v });
            match value.and_then(|v| sum.checked_add(v)) {
                Some(value) => sum = value,
                None => return Err(self.error_at(token, "an offset of at most 63 bits")),
            }
        }
        Ok(sum)
    }

    /// Runs `inside` one level deeper.
    pub(super) fn nested<T>(
        &mut self,
        inside: impl FnOnce(&mut Cursor<'a>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if self.depth == MAX_DEPTH {
            return self.error(format!("at most {MAX_DEPTH} nested brackets"));
        }
        self.depth += 1;
        let result = inside(self);
        self.depth -= 1;
        result
    }

    /// `( ... )` as text without blanks, parentheses balanced and excluded.
    pub(super) fn parenthesised(&mut self) -> Result<Name, Error> {
        self.expect('(', "before an attribute")?;
        let (mut text, mut depth) = (String::new(), 1);
        loop {
            let token = self.bump();
            match token.kind {
                Kind::End => return self.error("`)`"),
                Kind::Punct('(') => depth += 1,
                Kind::Punct(')') => {
                    depth -= 1;
                    if depth == 0 {
                        return Ok(self.name(&text));
                    }
                }
                Kind::Text => return Err(self.error_at(token, "an attribute without strings")),
                Kind::Dot => text.push('.'),
                _ => {}
            }
            // Two words must not run into one another.
            if matches!(token.kind, Kind::Word | Kind::Number)
                && text.ends_with(|c: char| c.is_ascii_alphanumeric())
            {
                text.push(' ');
            }
            text.push_str(token.text);
        }
    }

    /// Skips what follows `.loc`: a file, a line and a column, and where code is inlined, the same of its caller.
    pub(super) fn skip_location(&mut self) -> Result<(), Error> {
        self.skip_place("a file, a line and a column after `.loc`")?;
        if self.accept(',') {
            self.keyword("function_name")?;
            self.word("the label of a function's name")?;
            if self.accept('+') {
                self.unsigned("the distance from the label")?;
            }
            self.expect(',', "before `inlined_at`")?;
            self.keyword("inlined_at")?;
            self.skip_place("a file, a line and a column after `inlined_at`")?;
        }
        Ok(())
    }

    fn skip_place(&mut self, what: &str) -> Result<(), Error> {
        (0..3).try_for_each(|_| self.unsigned(what).map(drop))
    }

    /// Skips what follows `.file`: a number and a name, and then maybe a time and a size.
    pub(super) fn skip_file(&mut self) -> Result<(), Error> {
        self.unsigned("the number of a file")?;
        if self.peek().kind != Kind::Text {
            return self.error("the name of a file");
        }
        self.bump();
        if self.accept(',') {
            self.unsigned("the time of a file")?;
            self.expect(',', "before the size of a file")?;
            self.unsigned("the size of a file")?;
        }
        Ok(())
    }

    fn keyword(&mut self, word: &str) -> Result<(), Error> {
        let token = self.peek();
        if token.kind != Kind::Word || token.text != word {
            return self.error(format!("`{word}`"));
        }
        self.bump();
        Ok(())
    }

    /// Skips `{ ... }`, braces balanced.
    pub(super) fn skip_braces(&mut self) -> Result<(), Error> {
        self.expect('{', "before the contents of the section")?;
        let mut depth = 1u32;
        while depth > 0 {
            match self.bump().kind {
                Kind::End => return self.error("`}`"),
                Kind::Punct('{') => depth += 1,
                Kind::Punct('}') => depth -= 1,
                _ => {}
            }
        }
        Ok(())
    }
}

/// Reads a number; `None` if it is malformed or too large.
fn parse_number(text: &str, negative: bool) -> Option<Immediate> {
    let bytes = text.as_bytes();
    let digits = text.get(2..).unwrap_or("");
    match (bytes.first(), bytes.get(1)) {
        (Some(b'0'), Some(b'f' | b'F')) => {
            let bits = (digits.len() == 8).then(|| u32::from_str_radix(digits, 16).ok())??;
            return Some(Immediate::F32(bits ^ (u32::from(negative) << 31)));
        }
        (Some(b'0'), Some(b'd' | b'D')) => {
            let bits = (digits.len() == 16).then(|| u64::from_str_radix(digits, 16).ok())??;
            return Some(Immediate::F64(bits ^ (u64::from(negative) << 63)));
        }
        _ => {}
    }
    if text.contains('.') {
        let value: f64 = text.parse().ok()?;
        return Some(Immediate::F64(if negative { -value } else { value }.to_bits()));
    }
    let text = text.strip_suffix('U').unwrap_or(text);
    let (hex, value) = match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (true, u64::from_str_radix(&text[2..], 16).ok()?),
        [b'0', b'b' | b'B', ..] => (false, u64::from_str_radix(&text[2..], 2).ok()?),
        [b'0', _, ..] => (false, u64::from_str_radix(&text[1..], 8).ok()?),
        _ => (false, text.parse().ok()?),
    };
    if negative {
        // -2^63 is the most negative integer.
        return (value <= 1 << 63).then(|| Immediate::Int((value as i64).wrapping_neg()));
    }
    match i64::try_from(value) {
        Ok(small) if !hex => Some(Immediate::Int(small)),
        _ => Some(Immediate::Hex(value)),
    }
}
