//! Text to tokens. Comments are tokens too: the parser keeps those that stand where a statement could.

use crate::error::Error;

/// What a token is. Its text is [`Token::text`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Identifier: `ld`, `%r1`, `$L__BB0_1`, `_`.
    Word,
    /// Dot and what follows it: `.shared::cta`, `.32x128b`. The text excludes the dot.
    Dot,
    /// A number as written, without sign.
    Number,
    /// A string; the text excludes the quotes.
    Text,
    Punct(char),
    /// A comment; the text excludes the comment signs.
    Comment,
    /// End of the file.
    End,
}

/// A token and where it starts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Token<'a> {
    pub(super) kind: Kind,
    pub(super) text: &'a str,
    /// Byte offset of its first character.
    pub(super) start: usize,
    pub(super) line: u32,
}

/// Line and column (characters, from 1) of a byte offset.
pub(super) fn position(source: &str, offset: usize) -> (u32, u32) {
    let before = &source[..offset];
    let line = before.bytes().filter(|&b| b == b'\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
    (line as u32, column as u32)
}

fn is_word_start(c: u8) -> bool {
    c.is_ascii_alphabetic() || matches!(c, b'_' | b'$' | b'%')
}

fn is_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$')
}

/// How long the number is that this text begins with.
fn number(text: &str) -> usize {
    let bytes = text.as_bytes();
    let word = |from: usize| from + bytes[from..].iter().take_while(|&&b| is_word(b)).count();
    let mut end = word(0);
    // A fraction: `1.5`, `2.`; `.version 8.4` comes this way too.
    if bytes.get(end) == Some(&b'.') {
        end = word(end + 1);
    }
    // An exponent's sign: `1.0e-5`.
    let decimal = !text.starts_with("0x") && !text.starts_with("0X") && text[..end].contains('.');
    if decimal && matches!(bytes[end - 1], b'e' | b'E') && matches!(bytes.get(end), Some(b'+' | b'-')) {
        end = word(end + 1);
    }
    end
}

/// Cuts `source` into tokens; the last one is [`Kind::End`].
pub(super) fn tokens(source: &str) -> Result<Vec<Token<'_>>, Error> {
    let bytes = source.as_bytes();
    let mut out = Vec::with_capacity(source.len() / 4);
    let (mut at, mut line) = (0, 1);
    let error = |at: usize, found: String, expected: &str| {
        let (line, column) = position(source, at);
        Error::Syntax { line, column, found, expected: expected.into() }
    };
    while let Some(&c) = bytes.get(at) {
        let start = at;
        let here = line;
        let run = |from: usize, accept: fn(u8) -> bool| {
            from + bytes[from..].iter().take_while(|&&b| accept(b)).count()
        };
        let (kind, text) = match c {
            b'\n' | b' ' | b'\t' | b'\r' | 0x0b | 0x0c => {
                line += u32::from(c == b'\n');
                at += 1;
                continue;
            }
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                at = run(at, |b| b != b'\n');
                (Kind::Comment, &source[start + 2..at])
            }
            b'/' if bytes.get(at + 1) == Some(&b'*') => {
                let Some(length) = source[at + 2..].find("*/") else {
                    return Err(error(start, "a comment without end".into(), "`*/`"));
                };
                let text = &source[at + 2..at + 2 + length];
                line += text.bytes().filter(|&b| b == b'\n').count() as u32;
                at += length + 4;
                (Kind::Comment, text)
            }
            b'"' => {
                let length = source[at + 1..].find(['"', '\n']);
                match length.filter(|n| bytes[at + 1 + n] == b'"') {
                    Some(n) => {
                        at += n + 2;
                        (Kind::Text, &source[start + 1..at - 1])
                    }
                    None => return Err(error(start, "a string without end".into(), "`\"`")),
                }
            }
            b'.' => {
                at = run(at + 1, is_word);
                while bytes[at..].starts_with(b"::") && bytes.get(at + 2).is_some_and(|&b| is_word(b)) {
                    at = run(at + 2, is_word);
                }
                if at == start + 1 {
                    return Err(error(start, "`.`".into(), "a name after the dot"));
                }
                (Kind::Dot, &source[start + 1..at])
            }
            b'0'..=b'9' => {
                at += number(&source[at..]);
                (Kind::Number, &source[start..at])
            }
            _ if is_word_start(c) => {
                at = run(at + 1, is_word);
                (Kind::Word, &source[start..at])
            }
            b'{' | b'}' | b'[' | b']' | b'(' | b')' | b'<' | b'>' | b',' | b';' | b':' | b'@' | b'!'
            | b'|' | b'+' | b'-' | b'=' | b'*' | b'~' => {
                at += 1;
                (Kind::Punct(c as char), &source[start..at])
            }
            _ => {
                let c = source[start..].chars().next().unwrap_or_default();
                return Err(error(start, format!("`{}`", c.escape_default()), "PTX text"));
            }
        };
        out.push(Token { kind, text, start, line: here });
    }
    out.push(Token { kind: Kind::End, text: "", start: source.len(), line });
    Ok(out)
}
