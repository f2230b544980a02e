//! Files of test cases, line by line: paragraphs, what stands for what in them, what their words are, and which texts fit a
//! pattern. Every product's tests read their tables with it.

use std::fmt::Display;
use std::str::FromStr;

/// What a word says.
pub fn parse<T: FromStr>(word: &str) -> T {
    word.parse().ok().unwrap_or_else(|| panic!("`{word}`"))
}

/// The one of these that prints as the word.
pub fn named<T: Display>(all: impl IntoIterator<Item = T>, word: &str) -> T {
    all.into_iter().find(|one| one.to_string() == word).unwrap_or_else(|| panic!("`{word}`"))
}

/// Whether a text is this, with anything in place of each `…`.
pub fn fits(text: &str, pattern: &str) -> bool {
    let parts: Vec<&str> = pattern.split('…').collect();
    let [first, middle @ .., last] = &parts[..] else { return text == pattern };
    let Some(rest) = text.strip_prefix(first) else { return false };
    let after = |rest: &str, part: &str| Some(rest[rest.find(part)? + part.len()..].to_owned());
    middle
        .iter()
        .try_fold(rest.to_owned(), |rest, part| after(&rest, part))
        .is_some_and(|r| r.ends_with(last))
}

/// A line for each of the values in `<a,b,c>`; several of these lists go in step.
pub fn expanded(line: &str) -> Vec<String> {
    let Some((before, (list, after))) =
        line.split_once('<').and_then(|(before, rest)| Some((before, rest.split_once('>')?)))
    else {
        return vec![line.into()];
    };
    let after = expanded(after);
    let values = list.split(',').enumerate();
    values.map(|(at, value)| format!("{before}{value}{}", after[at.min(after.len() - 1)])).collect()
}

/// Lines, each with the place where it stands.
pub type Lines<'l> = &'l [(String, String)];

/// A paragraph, once for each value of its `for` lines; says how often.
fn each(lines: Lines<'_>, case: &mut dyn FnMut(Lines<'_>)) -> usize {
    let Some(((_, first), rest)) = lines.split_first() else { return 0 };
    let Some((names, values)) = first.strip_prefix("for ").and_then(|line| line.split_once(" in ")) else {
        case(lines);
        return 1;
    };
    let separator = if names.contains(", ") { "; " } else { "\n" };
    let with = |values: &str| {
        let fill = |line: String, (name, value): (&str, &str)| line.replace(name, value);
        let pairs = || names.split(", ").zip(values.split(separator));
        rest.iter().map(|(at, line)| (at.clone(), pairs().fold(line.clone(), fill))).collect::<Vec<_>>()
    };
    values.split(" | ").map(|values| each(&with(values), case)).sum()
}

/// Calls `case` with every paragraph of a file, and says how often. `NAME := TEXT` adds to `names`, which are filled in; lines
/// that begin with `#` say nothing.
pub fn paragraphs(
    (file, text): (&str, &str),
    names: &mut Vec<(String, String)>,
    case: &mut dyn FnMut(Lines<'_>),
) -> usize {
    let (mut paragraph, mut count) = (Vec::new(), 0);
    for (number, line) in (1..).zip(text.lines().chain([""])) {
        if let Some((name, text)) = line.split_once(" := ") {
            names.push((name.into(), text.into()));
        } else if line.is_empty() {
            count += each(&std::mem::take(&mut paragraph), case);
        } else if !line.trim_start().starts_with('#') {
            let fill = |line: String, (name, text): &(String, String)| line.replace(name, text);
            let filled = names.iter().rev().fold(line.trim().to_owned(), fill);
            paragraph.push((format!("{file}:{number}"), filled));
        }
    }
    count
}
