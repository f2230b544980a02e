//! The list of mutants that are proven harmless: tab-separated lines of a key and a reason, and of kernel, mutation, line of
//! the text, and the key of the reason.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::kinds::Mutant;

/// One line: what survives, and why that is right. `*` stands for any text, `%` for any register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Kernels, as the program names them.
    pub kernel: String,
    /// The kind of the mutant.
    pub mutation: String,
    /// The text of the mutant, [`Mutant::text`].
    pub text: String,
    /// Why it is harmless, in the list's words; or `open: `, and what is not known; or `never: `, and why nothing executes it.
    pub why: String,
}

impl Row {
    /// Whether the mutant is known to survive and not known to be harmless.
    pub fn is_open(&self) -> bool {
        self.why.starts_with("open: ")
    }

    /// Whether this is about mutants that nothing executes, and not about survivors.
    fn is_never_reached(&self) -> bool {
        self.why.starts_with("never: ")
    }
}

/// The list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survivors {
    rows: Vec<Row>,
}

/// A line of the list that is not one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadLine {
    /// It has another number of columns.
    #[error(
        "line {line} of the survivors has {found} columns; it needs 2, a key and a reason, or 4: kernel, mutation, text, \
         key, separated by tabs"
    )]
    Columns { line: usize, found: usize },
    /// No reason before it has its key.
    #[error("line {line} of the survivors has the key `{key}`; the reasons above it are {known}")]
    Key { line: usize, key: String, known: String },
    /// No line has the key of a reason.
    #[error("no line of the survivors has the reason `{0}`")]
    Unused(String),
}

impl Survivors {
    /// Reads the list. Lines that start with `#` are comments. Fails if a line has another number of columns, or an
    /// empty one, or a key that no reason has; if a reason is not used.
    pub fn parse(text: &str) -> Result<Survivors, BadLine> {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let (mut reasons, mut rows) = (BTreeMap::new(), Vec::new());
        for (at, line) in lines {
            let columns: Vec<&str> = line.split('\t').filter(|column| !column.is_empty()).collect();
            match columns[..] {
                [key, why] => drop(reasons.insert(key, (why, 0))),
                [kernel, mutation, text, key] => {
                    let Some((why, used)) = reasons.get_mut(key) else {
                        let known = reasons.keys().copied().collect::<Vec<_>>().join(", ");
                        return Err(BadLine::Key { line: at + 1, key: key.into(), known });
                    };
                    *used += 1;
                    let [kernel, mutation, text, why] = [kernel, mutation, text, *why].map(str::to_string);
                    rows.push(Row { kernel, mutation, text, why });
                }
                _ => return Err(BadLine::Columns { line: at + 1, found: columns.len() }),
            }
        }
        match reasons.into_iter().find(|(_, (_, used))| *used == 0) {
            Some((key, _)) => Err(BadLine::Unused(key.into())),
            None => Ok(Survivors { rows }),
        }
    }

    /// Every line.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The number of the first line, of [`rows`](Self::rows), that explains why a mutant of this kernel survives, or why nothing
    /// executes it.
    pub fn explains(&self, kernel: &str, mutant: &Mutant, is_reached: bool) -> Option<usize> {
        let (kind, text) = (mutant.kind.to_string(), without_numbers(&mutant.text));
        self.rows.iter().position(|row| {
            row.is_never_reached() != is_reached
                && is_like(kernel, &row.kernel)
                && is_like(&kind, &row.mutation)
                && is_like(&text, &row.text)
        })
    }
}

/// The text with `%` for each register `%r12`: numbers change with every edit of a kernel.
fn without_numbers(text: &str) -> String {
    let mut parts = text.split('%');
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        out.push('%');
        let name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        out.push_str(part.trim_start_matches(name));
    }
    out
}

/// Whether `pattern`, in which `*` stands for any text, describes the whole of `text`.
fn is_like(text: &str, pattern: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else { return text == pattern };
    let Some(rest) = text.strip_prefix(head) else { return false };
    (0..=rest.len()).filter(|&at| rest.is_char_boundary(at)).any(|at| is_like(&rest[at..], tail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_describe_whole_texts() {
        for (text, pattern, like) in [
            ("drop", "drop", true),
            ("drop", "dro", false),
            ("fused: f16", "fused*", true),
            ("bar.sync 0 > ld.shared.u32 %, [%+4]", "bar.sync * > ld.shared*", true),
            ("bar.sync 0 > st.shared.u32 [%], %", "bar.sync * > ld.shared*", false),
            ("abab", "*ab", true),
        ] {
            assert_eq!(is_like(text, pattern), like, "{text} {pattern}");
        }
        assert_eq!(without_numbers("ld.u32 %rd12, [%r3+16], 5"), "ld.u32 %, [%+16], 5");
    }

    #[test]
    fn a_row_has_the_reason_of_its_key_and_no_other_exact() {
        let list = Survivors::parse("twice\tanother follows\nfused\tdrop\tbar.sync 0\ttwice\n").unwrap();
        assert_eq!(list.rows()[0].why, "another follows");
        let message = |text: &str| Survivors::parse(text).unwrap_err().to_string();
        assert_eq!(
            message("# list\nfused\tdrop\tbar.sync 0\t\n"),
            "line 2 of the survivors has 3 columns; it needs 2, a key and a reason, or 4: kernel, mutation, text, key, \
             separated by tabs"
        );
        assert_eq!(
            message("a\tb\nc\td\nfused\tdrop\tbar.sync 0\te\n"),
            "line 3 of the survivors has the key `e`; the reasons above it are a, c"
        );
        assert_eq!(message("a\tb\n"), "no line of the survivors has the reason `a`");
    }
}
