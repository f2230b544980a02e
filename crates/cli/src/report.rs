//! The only place that writes to stdout: a report as text for people or as one JSON document.
//!
//! A report is a value that is both `Serialize` and `Display`, or a document and a text that are made of the same.

use std::borrow::Cow;
use std::fmt::{self, Display};
use std::io::{self, IsTerminal as _, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::Value;

pub fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// A name whose numbers are `*` but for so many first ones: with 1, layers are told apart and experts are not.
pub fn starred(name: &str, keep: usize) -> String {
    let mut numbers = 0;
    let star = |part| {
        numbers += usize::from(str::parse::<usize>(part).is_ok());
        if numbers > keep && str::parse::<usize>(part).is_ok() { "*" } else { part }
    };
    name.split('.').map(star).collect::<Vec<_>>().join(".")
}

/// A name, and how many it stands for if it is of several.
pub fn times(name: &str, count: usize) -> String {
    if count > 1 { format!("{name} ({count})") } else { name.into() }
}

/// What has the same key, together, in the order of the first of each.
pub fn grouped<T, K: PartialEq>(all: impl IntoIterator<Item = T>, key: impl Fn(&T) -> K) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for one in all {
        let key = key(&one);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, group)) => group.push(one),
            None => groups.push((key, vec![one])),
        }
    }
    groups
}

/// The least and the largest of some numbers, or the one that all are.
pub fn span(values: impl Iterator<Item = f32>) -> String {
    let ends = |(least, most): (f32, f32), x| (least.min(x), most.max(x));
    match values.fold((f32::INFINITY, f32::NEG_INFINITY), ends) {
        (least, most) if least == most => format!("{most:e}"),
        (least, most) => format!("{least:e} to {most:e}"),
    }
}

/// Where reports, failures and progress go.
#[derive(Debug)]
pub struct Output {
    json: bool,
    /// Takes the report instead of stdout.
    document: Option<Mutex<String>>,
}

impl Output {
    /// JSON or text on stdout.
    pub fn new(json: bool) -> Self {
        Self { json, document: None }
    }

    /// JSON, kept for [`into_document`](Self::into_document).
    pub fn document() -> Self {
        Self { json: true, document: Some(Mutex::default()) }
    }

    /// The report, if it was kept.
    pub fn into_document(self) -> String {
        self.document.map_or_else(String::new, |d| d.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Writes the report, the one thing a command puts on stdout.
    pub fn emit<R: Serialize + Display>(&self, report: &R) -> anyhow::Result<()> {
        self.say(report, &report.to_string())
    }

    pub fn say<D: Serialize>(&self, document: &D, text: &str) -> anyhow::Result<()> {
        let text = if self.json { serde_json::to_string_pretty(document)? } else { visible(text) };
        if let Some(document) = &self.document {
            *document.lock().unwrap_or_else(PoisonError::into_inner) = text;
            return Ok(());
        }
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{}", text.trim_end()).and_then(|()| stdout.flush()).context("stdout")
    }

    /// Says on one line of stderr what went wrong and returns the exit code; with `--json`, stdout gets it as a document too.
    pub fn fail(&self, message: &str, code: u8) -> u8 {
        // Nothing is left to be done about a closed stderr or stdout.
        let _ = writeln!(io::stderr(), "error: {}", visible(message));
        if self.json {
            let document = serde_json::json!({ "error": message, "exit_code": code });
            let _ = writeln!(io::stdout(), "{document:#}");
        }
        code
    }

    /// What stands on stderr while the simulator runs one launch after the other; invisible where stderr is no terminal.
    pub fn simulation(&self) -> ProgressBar {
        let bar = self.bar("{spinner} simulate, {elapsed} so far", ProgressBar::new_spinner);
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        bar
    }

    /// A bar over so many steps on stderr, with a message; invisible where stderr is no terminal.
    pub fn fraction(&self, len: u64) -> ProgressBar {
        self.bar("{bar:20} {percent}% {msg}", || ProgressBar::new(len))
    }

    /// A progress bar over `len` steps on stderr; invisible where stderr is no terminal.
    pub fn progress(&self, what: &'static str, len: usize) -> ProgressBar {
        let bar = || ProgressBar::new(len as u64).with_message(what);
        self.bar("{msg:>12} {bar:40} {pos}/{len} {eta}", bar)
    }

    /// What `make` makes, in the style of `template`; invisible where stderr is no terminal.
    fn bar(&self, template: &str, make: impl FnOnce() -> ProgressBar) -> ProgressBar {
        if self.document.is_some() || !io::stderr().is_terminal() {
            return ProgressBar::hidden();
        }
        let bar = make();
        match ProgressStyle::with_template(template) {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        }
    }
}

/// Whether an error only says that nobody reads our stdout any more.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Rows of text in aligned columns, the first line a heading.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<Cow<'static, str>>>,
}

impl Table {
    pub fn new(headings: &[&'static str]) -> Self {
        Self { rows: vec![headings.iter().map(|&h| Cow::Borrowed(h)).collect()] }
    }

    /// Adds a line.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(Cow::Owned).collect());
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line += &format!("  {cell:<width$}");
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A list as a table for people and as objects for programs.
#[derive(Debug)]
pub struct Listing {
    /// The lines.
    pub table: Table,
    /// The objects, one for each line.
    pub rows: Vec<Value>,
}

impl Listing {
    /// An empty one under these headings.
    pub fn new(headings: &[&'static str]) -> Self {
        Self { table: Table::new(headings), rows: Vec::new() }
    }

    /// Adds what is one line and one object.
    pub fn row(&mut self, object: Value, cells: impl IntoIterator<Item = String>) {
        self.rows.push(object);
        self.table.row(cells);
    }
}

/// A time in the unit that reads best.
pub struct Time(pub Duration);

impl Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0.as_secs_f64() * 1e6;
        match us {
            _ if us < 1e3 => write!(f, "{us:.1} µs"),
            _ if us < 1e6 => write!(f, "{:.3} ms", us / 1e3),
            _ => write!(f, "{:.3} s", us / 1e6),
        }
    }
}

/// A size in the binary unit that reads best.
pub struct Bytes(pub u64);

impl Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        match unit {
            0 => write!(f, "{} B", self.0),
            _ => write!(f, "{value:.1} {}", UNITS[unit]),
        }
    }
}

/// A text whose control characters, but for those of lines and columns, are spelled out. Names of tensors come from files,
/// and a terminal would obey them.
fn visible(text: &str) -> String {
    let mut visible = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            _ if c.is_control() && c != '\n' && c != '\t' => visible.extend(c.escape_default()),
            _ => visible.push(c),
        }
    }
    visible
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_and_lines_do_not_trail_blanks() {
        let mut table = Table::new(&["tensor", "shape"]);
        table.row(["a".into(), "[1, 2]".into()]);
        table.row(["longer name".into(), String::new()]);
        assert_eq!(table.to_string(), "  tensor       shape\n  a            [1, 2]\n  longer name\n");
    }

    #[test]
    fn control_characters_of_names_do_not_reach_the_terminal() {
        assert_eq!(visible("w\u{1b}[2J\u{b}\r\u{9b}\u{7f}\n\tµ"), "w\\u{1b}[2J\\u{b}\\r\\u{9b}\\u{7f}\n\tµ");
    }

    #[test]
    fn experts_of_a_layer_have_one_name() {
        let name = "model.layers.3.mlp.experts.12.w2";
        assert_eq!(starred(name, 1), "model.layers.3.mlp.experts.*.w2");
        assert_eq!([starred(name, 0), starred(name, 2)], ["model.layers.*.mlp.experts.*.w2", name]);
        assert_eq!(grouped([1, 12, 3], |x| x % 10 == 2), [(false, vec![1, 3]), (true, vec![12])]);
        assert_eq!([span([2.0, 1.0, 3.0].into_iter()), span([0.5; 2].into_iter())], ["1e0 to 3e0", "5e-1"]);
    }

    #[test]
    fn times_and_sizes_pick_their_unit() {
        assert_eq!(Time(Duration::from_nanos(1500)).to_string(), "1.5 µs");
        assert_eq!(Time(Duration::from_micros(1500)).to_string(), "1.500 ms");
        assert_eq!(Time(Duration::from_millis(1500)).to_string(), "1.500 s");
        assert_eq!([Bytes(1023).to_string(), Bytes(1536).to_string()], ["1023 B", "1.5 KiB"]);
        assert_eq!(Bytes(3 << 30).to_string(), "3.0 GiB");
    }
}
