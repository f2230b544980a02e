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

use super::{Case, Error, hash, load, report};
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

    /// Keeps what a run of the case `name` says about `card`, such as `H100 2026-11-28`: that it agreed, or that no card does
    /// if it did not. A card that could not run the case changes nothing.
    pub fn certify(&mut self, name: &str, result: &report::Result, card: &str) {
        let Some(record) = self.0.get_mut(name) else { return };
        record.certified = match result {
            report::Result::SimulatorOnly => return,
            report::Result::Equal | report::Result::Close => Some(format!("{} {card}", result.word())),
            _ => None,
        };
    }

    /// The cases of `drafts`, each with what is recorded of it.
    ///
    /// # Errors
    /// [`Error::Record`] for a draft whose text is not the one recorded, and for a line or a draft without the other;
    /// [`Error::Header`].
    pub fn complete(mut self, drafts: Vec<Draft>) -> Result<Vec<Case>, Error> {
        let mut cases = Vec::with_capacity(drafts.len());
        for Draft { name, text, .. } in drafts {
            let refuse = |reason| Error::Record { case: name.clone(), reason };
            let record = self.0.remove(&name);
            let record =
                record.ok_or_else(|| refuse(format!("cases.tsv has no line for it; {RECORD} writes one")))?;
            let text = record.fill(&text).map_err(refuse)?;
            cases.push(Case { certified: record.certified, ..load(&name, &text)? });
        }
        let reason =
            || format!("cases.tsv has a line for it, but nothing generates it; {RECORD} removes the line");
        match self.0.into_keys().next() {
            Some(case) => Err(Error::Record { case, reason: reason() }),
            None => Ok(cases),
        }
    }
}

const RECORD: &str = "`cargo run --release -p dualgemm-conformance --example record`";

impl Record {
    /// A draft's text with what is expected in its blanks, or what is wrong and what to do.
    fn fill(&self, draft: &str) -> Result<String, String> {
        let found = hash(draft.as_bytes());
        if found != self.text {
            let certified = self.certified.as_ref();
            let agreed =
                certified.map(|said| format!(", which a card agreed with ({said})")).unwrap_or_default();
            return Err(format!(
                "the generated text has the hash {found:016x}, not that of the text recorded in cases.tsv, \
                 {:016x}{agreed}. If the change is meant, {RECORD} records it, and a card has to agree again; if not, \
                 what generates it (src/generate, the row's samples) has to change back",
                self.text
            ));
        }
        let mut pieces = draft.split(BLANK);
        let mut text = pieces.next().unwrap_or_default().to_string();
        let (outputs, recorded) = (pieces.clone().count(), self.expected.len());
        if outputs != recorded {
            return Err(format!(
                "cases.tsv has {recorded} outputs of it where {outputs} belong; {RECORD} writes them"
            ));
        }
        for (value, piece) in self.expected.iter().zip(pieces) {
            text += &format!("= #{value:016x}{piece}");
        }
        Ok(text)
    }
}
