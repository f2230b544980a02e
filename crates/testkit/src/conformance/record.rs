//! What is kept of each case beside the code that generates it: `cases.tsv`.
//!
//! The text of a case is not stored, its hash is: a text that a card agreed with cannot change unnoticed. A line per
//! case, columns separated by tabs:
//!
//! ```text
//! arith/add_int   0123456789abcdef   equal H100 2026-11-28   0123456789abcdef 0123456789abcdef
//! name            hash of the draft  what a card said, or -  hash of each output in order
//! ```
//!
//! `--example record` writes the hashes, with the simulator's results, and drops what a card said about what has
//! changed. `--example conformance_gpu` runs the cases on a card and writes what that says.

use super::{Case, Error, hash, load};
use crate::generate::{BLANK, Draft};
use std::collections::BTreeMap;
use std::fmt;

/// `cases.tsv` as it was when this was compiled.
pub const RECORDED: &str = include_str!("../../cases.tsv");

const HEAD: &str = "\
# Conformance cases, a line each: name, FNV-1a of the generated text, the card that agreed (equal: bit for bit, close: within
# the tolerance) and when, FNV-1a of what each output holds. Written by the examples record and conformance_gpu.
";

/// A line of `cases.tsv`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// [`hash`] of the draft's text.
    pub text: u64,
    /// How a card agreed, which, and when: `equal H100 2026-11-28`.
    pub certified: Option<String>,
    /// [`hash`] of each output, in order.
    pub expected: Vec<u64>,
}

/// Records by the names of cases; displayed as `cases.tsv`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Records(pub BTreeMap<String, Record>);

impl fmt::Display for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HEAD)?;
        self.0.iter().try_for_each(|(name, Record { text, certified, expected })| {
            let expected: Vec<String> = expected.iter().map(|h| format!("{h:016x}")).collect();
            let certified = certified.as_deref().unwrap_or("-");
            writeln!(f, "{name}\t{text:016x}\t{certified}\t{}", expected.join(" "))
        })
    }
}

impl Records {
    /// The records of a `cases.tsv`.
    ///
    /// # Errors
    /// [`Error::Record`] for a line that is not four columns with hashes where they belong.
    pub fn parse(tsv: &str) -> Result<Records, Error> {
        let one = |line: &str| {
            let columns: Vec<&str> = line.split('\t').collect();
            let [name, text, certified, expected] = columns[..] else { return None };
            let hash = |word: &str| u64::from_str_radix(word, 16).ok();
            let record = Record {
                text: hash(text)?,
                certified: (certified != "-").then(|| certified.to_string()),
                expected: expected.split_whitespace().map(hash).collect::<Option<_>>()?,
            };
            Some((name.to_string(), record))
        };
        let lines = tsv.lines().filter(|line| !line.starts_with('#'));
        let records = lines.map(|line| {
            one(line).ok_or_else(|| Error::Record {
                case: line.split('\t').next().unwrap_or_default().into(),
                reason: "its line in cases.tsv is not name, hash, card and hashes, separated by tabs".into(),
            })
        });
        Ok(Records(records.collect::<Result<_, _>>()?))
    }

    /// The cases of `drafts`, each with what is recorded of it.
    ///
    /// # Errors
    /// [`Error::Record`] for a draft whose text is not the one recorded, and for a line or a draft without the other;
    /// [`Error::Header`].
    pub fn complete(mut self, drafts: Vec<Draft>) -> Result<Vec<Case>, Error> {
        const RECORD: &str = "`cargo run --release -p dualgemm-testkit --example record`";
        let refuse = |case: &str, reason: String| Error::Record { case: case.into(), reason };
        let mut cases = Vec::with_capacity(drafts.len());
        for Draft { name, text, .. } in drafts {
            let record = self
                .0
                .remove(&name)
                .ok_or_else(|| refuse(&name, format!("cases.tsv has no line for it; {RECORD} writes one")))?;
            let (found, recorded) = (hash(text.as_bytes()), record.text);
            if found != recorded {
                let agreed = match &record.certified {
                    Some(certified) => format!(", which a card agreed with ({certified})"),
                    None => String::new(),
                };
                return Err(refuse(
                    &name,
                    format!(
                        "the generated text has the hash {found:016x}, not that of the text recorded in \
                         cases.tsv, {recorded:016x}{agreed}. If the change is meant, {RECORD} records it, and a card \
                         has to agree again; if not, what generates it (src/generate, the row's samples) has to \
                         change back"
                    ),
                ));
            }
            let mut pieces = text.split(BLANK);
            let mut full = pieces.next().unwrap_or_default().to_string();
            let (outputs, recorded) = (pieces.clone().count(), record.expected.len());
            if outputs != recorded {
                return Err(refuse(
                    &name,
                    format!(
                        "cases.tsv has {recorded} outputs of it where {outputs} belong; {RECORD} writes them"
                    ),
                ));
            }
            for (value, piece) in record.expected.iter().zip(pieces) {
                full += &format!("= #{value:016x}{piece}");
            }
            cases.push(Case { certified: record.certified, ..load(&name, &full)? });
        }
        match self.0.into_keys().next() {
            Some(name) => Err(refuse(
                &name,
                format!("cases.tsv has a line for it, but nothing generates it; {RECORD} removes the line"),
            )),
            None => Ok(cases),
        }
    }
}
