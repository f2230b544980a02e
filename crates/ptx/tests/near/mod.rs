//! NVIDIA's assembler about forms that are nearly those of the table: what the table and the list of others' forms have of
//! them, it takes. `lacking.tsv` keeps what it takes and they lack, which the simulator refuses to load.

use std::collections::{BTreeMap, BTreeSet};

use dualgemm_ptx::ast::{Address, AddressBase, Instruction, Module, Operand};
use dualgemm_ptx::isa::{self, Row, Sample};
use dualgemm_ptx::{Name, Target, legal, parse};
use rayon::prelude::*;

use crate::{NEWEST, assemble};

/// Forms of a row that are asked about.
const FORMS: usize = 60;

/// What ptxas takes and the table lacks: row, target, instruction. `UPDATE_NEAR=1` writes it anew.
const LACKING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/near/lacking.tsv");

/// Words that stand beside each other in some sample, by the first word of the opcode.
type Neighbours = BTreeMap<String, BTreeSet<(String, String)>>;

/// `^` before the first word, `$` after the last.
fn words(sample: &Sample) -> Vec<String> {
    let inner = sample.instruction.modifiers.iter().map(|m| m.to_string());
    std::iter::once("^".to_string()).chain(inner).chain(["$".to_string()]).collect()
}

fn neighbours() -> Neighbours {
    let mut found = Neighbours::new();
    for sample in isa::rows().flat_map(Row::samples) {
        let pairs = words(&sample).windows(2).map(|w| (w[0].clone(), w[1].clone())).collect::<Vec<_>>();
        found.entry(sample.instruction.root.to_string()).or_default().extend(pairs);
    }
    found
}

/// The sample with one modifier dropped, replaced, added or moved: words that the table has beside one of the new neighbours.
fn perturbed(sample: &Sample, neighbours: &Neighbours) -> Vec<Sample> {
    let words = words(sample);
    let known = &neighbours[&*sample.instruction.root];
    let between = |before: &str, after: &str| -> BTreeSet<String> {
        let next = known.iter().filter(|(first, _)| first == before).map(|(_, second)| second.clone());
        let previous = known.iter().filter(|(_, second)| second == after).map(|(first, _)| first.clone());
        next.chain(previous).filter(|word| word != "^" && word != "$").collect()
    };
    let mut spelled = BTreeSet::new();
    for at in 1..words.len() {
        let with = |range: std::ops::Range<usize>, new: &[String]| {
            let mut words = words.clone();
            words.splice(range, new.iter().cloned());
            words[1..words.len() - 1].to_vec()
        };
        for word in between(&words[at - 1], &words[at]) {
            spelled.insert(with(at..at, &[word]));
        }
        if at + 2 < words.len() {
            spelled.insert(with(at..at + 2, &[words[at + 1].clone(), words[at].clone()]));
        }
        if at + 1 < words.len() {
            spelled.insert(with(at..at + 1, &[]));
            for word in between(&words[at - 1], &words[at + 1]) {
                spelled.insert(with(at..at + 1, &[word]));
            }
        }
    }
    let instruction = &sample.instruction;
    let changed = |words: Vec<String>| {
        let modifiers = words.iter().map(|word| Name::from(word.as_str())).collect();
        Sample { row: sample.row, instruction: Instruction { modifiers, ..instruction.clone() } }
    };
    spelled.into_iter().map(changed).collect()
}

/// Which of the samples ptxas takes. A message may hide others, so what is refused is taken out until nothing is.
/// Where no message names a line, each half is asked about by itself.
fn taken(samples: &[Sample], target: Target) -> Vec<bool> {
    let mut taken = vec![true; samples.len()];
    loop {
        let left: Vec<usize> = (0..samples.len()).filter(|&at| taken[at]).collect();
        if left.is_empty() {
            return taken;
        }
        let module = Row::sample_module(
            &left.iter().map(|&at| samples[at].clone()).collect::<Vec<_>>(),
            target,
            NEWEST,
        );
        let verdict = assemble(&module, target, &["-O0"]);
        if verdict.success {
            return taken;
        }
        let mut refused = false;
        for at in named(&module.to_string(), &verdict.messages, left.len()) {
            taken[left[at]] = false;
            refused = true;
        }
        if !refused && left.len() == 1 {
            taken[left[0]] = false;
        } else if !refused {
            for half in left.chunks(left.len().div_ceil(2)) {
                let verdicts =
                    self::taken(&half.iter().map(|&at| samples[at].clone()).collect::<Vec<_>>(), target);
                half.iter().zip(verdicts).for_each(|(&at, verdict)| taken[at] = verdict);
            }
            return taken;
        }
    }
}

/// The numbers, among the samples of a module, of the instructions that the messages name.
fn named(text: &str, messages: &str, count: usize) -> BTreeSet<usize> {
    let module: Module = parse::module(text).unwrap();
    let kernels = module.functions().filter(|f| f.name.starts_with("kernel_"));
    let lines: Vec<u32> = kernels
        .flat_map(|f| {
            let all: Vec<u32> = f.instructions().map(|i| i.line.0).collect();
            all[..all.len() - 1].to_vec()
        })
        .collect();
    assert_eq!(lines.len(), count);
    let places = messages.match_indices("line ");
    places
        .filter_map(|(at, _)| {
            messages[at + 5..]
                .trim_start_matches('\'')
                .split(|c: char| !c.is_ascii_digit())
                .next()?
                .parse::<u32>()
                .ok()
        })
        .filter_map(|line| lines.partition_point(|&start| start <= line).checked_sub(1))
        .collect()
}

/// Forms of one row that are nearly legal, a few hundred at most.
fn near(row: &'static Row, neighbours: &Neighbours) -> Vec<Sample> {
    let samples = row.samples();
    let mut near: BTreeMap<String, Sample> = BTreeMap::new();
    for sample in [samples.first(), samples.last()].into_iter().flatten() {
        near.extend(perturbed(sample, neighbours).into_iter().map(|s| (s.instruction.to_string(), s)));
    }
    let every = near.len().div_ceil(FORMS);
    near.into_values().step_by(every.max(1)).collect()
}

/// What nearly legal forms are: how many, how many ptxas takes, those that it refuses and we have, and those that it takes
/// and we lack.
#[derive(Default)]
struct Judged {
    forms: usize,
    taken: usize,
    lenient: Vec<String>,
    lacking: Vec<String>,
}

/// Whether the address is a variable's name: the table does not look up in which state space it was declared.
fn names_a_variable(instruction: &Instruction) -> bool {
    instruction.operands.iter().any(|operand| match operand {
        Operand::Address(Address { base: AddressBase::Ident(name), .. }) => !name.starts_with('%'),
        _ => false,
    })
}

fn judge(row: &'static Row, neighbours: &Neighbours) -> Judged {
    let target = row.targets.iter().next().unwrap();
    let near = near(row, neighbours);
    let mut judged = Judged { forms: near.len(), ..Judged::default() };
    for (sample, mut ptxas) in near.iter().zip(taken(&near, target)) {
        let alone = std::slice::from_ref(sample);
        let module = Row::sample_module(alone, target, NEWEST);
        let ours = legal::check_foreign(&module).is_empty() || legal::check(&module).is_empty();
        // What others of the module make ptxas refuse, it may take alone.
        ptxas |= ours && taken(alone, target)[0];
        judged.taken += usize::from(ptxas);
        // Those that only a newer assembler has: `.volatile` of local memory.
        let newer = ["local", "volatile"].iter().all(|word| sample.instruction.has(word));
        if ours && !ptxas && !newer && !names_a_variable(&sample.instruction) {
            judged.lenient.push(format!("{} on {target}: {}", row.name, sample.instruction));
        }
        if ptxas && !ours {
            let text = sample.instruction.to_string().replace("\n   ", "");
            judged.lacking.push(format!("{}\t{target}\t{text}", row.name));
        }
    }
    judged
}

#[test]
#[ignore = "needs ptxas"]
fn nearly_legal_forms_of_the_table_are_taken() {
    let neighbours = neighbours();
    let rows: Vec<&'static Row> = isa::rows().collect();
    let judged: Vec<Judged> = rows.into_par_iter().map(|row| judge(row, &neighbours)).collect();
    let sum = |of: fn(&Judged) -> usize| judged.iter().map(of).sum::<usize>();
    let lenient: Vec<&String> = judged.iter().flat_map(|judged| &judged.lenient).collect();
    let lacking: BTreeSet<String> = judged.iter().flat_map(|judged| judged.lacking.clone()).collect();
    println!(
        "{} forms: ptxas takes {}, we lack {} of these and have {} that ptxas refuses",
        sum(|j| j.forms),
        sum(|j| j.taken),
        lacking.len(),
        lenient.len()
    );
    assert!(lenient.is_empty(), "{lenient:#?}");
    if std::env::var_os("UPDATE_NEAR").is_some() {
        let known = std::fs::read_to_string(LACKING).unwrap();
        let all: BTreeSet<&str> = known.lines().chain(lacking.iter().map(String::as_str)).collect();
        std::fs::write(LACKING, all.into_iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    }
    // The list has what 13.0 takes, and beside it what 13.5 alone does.
    let known = std::fs::read_to_string(LACKING).unwrap();
    let known: BTreeSet<&str> = known.lines().collect();
    let new: Vec<&String> = lacking.iter().filter(|line| !known.contains(line.as_str())).collect();
    assert!(new.is_empty(), "{new:#?}");
}
