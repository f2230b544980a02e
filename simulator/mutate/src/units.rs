//! What of a list of statements can be moved and moved past as one: a statement, or a loop or conditional whole.

use std::ops::Range;

use dualgemm_ptx::ast::{Instruction, Operand, Statement};

/// Where a list of statements is: the number of each enclosing block in its own list, from the function's body on.
pub(crate) type Path = Vec<usize>;

/// Every instruction of a statement, those of nested blocks included.
pub(crate) fn each<'a>(statement: &'a Statement, visit: &mut impl FnMut(&'a Instruction)) {
    match statement {
        Statement::Instruction(instruction) => visit(instruction),
        Statement::Block(list) => list.iter().for_each(|statement| each(statement, visit)),
        _ => {}
    }
}

/// The label that a branch goes to.
pub(crate) fn target(instruction: &Instruction) -> Option<&str> {
    match instruction.operands.first() {
        Some(Operand::Ident(label)) if instruction.root == "bra" => Some(label),
        _ => None,
    }
}

/// The statements of `range`, cut where control neither enters nor leaves between.
pub(crate) fn units(list: &[Statement], range: Range<usize>) -> Vec<Range<usize>> {
    let label =
        |name: &str| list.iter().position(|s| matches!(s, Statement::Label(_, label) if *label == *name));
    // From the first to the last of each branch and its label.
    let mut spans = Vec::new();
    for at in range.clone() {
        each(&list[at], &mut |instruction| {
            let to = target(instruction).and_then(label).filter(|to| range.contains(to));
            spans.extend(to.map(|to| at.min(to)..at.max(to) + 1));
        });
    }
    spans.sort_by_key(|span: &Range<usize>| span.start);
    let mut units: Vec<Range<usize>> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let mut end = at + 1;
        for span in &spans {
            if span.start >= at && span.start < end {
                end = end.max(span.end);
            }
        }
        units.push(at..end);
        at = end;
    }
    units
}

/// Whether memory or other threads notice when the instruction is executed.
pub(crate) fn has_effect(instruction: &Instruction) -> bool {
    match &*instruction.root {
        "ld" => !instruction.has("param") && !instruction.has("const"),
        "st" | "atom" | "red" | "cp" | "mbarrier" | "bar" | "barrier" | "fence" | "membar" | "wgmma"
        | "tcgen05" | "ldmatrix" | "stmatrix" | "griddepcontrol" => true,
        _ => false,
    }
}

/// Whether two instructions do the same in either order: initializations of two mbarriers.
pub(crate) fn commute(one: &Instruction, other: &Instruction) -> bool {
    [one, other].iter().all(|instruction| instruction.starts_with(&["mbarrier", "init"]))
}

/// Whether the statements are a loop around a wait: for an mbarrier, or for what another thread stores.
pub(crate) fn is_wait_loop(statements: &[Statement]) -> bool {
    let [Statement::Label(_, label), inner @ .., Statement::Instruction(last)] = statements else {
        return false;
    };
    let polls = |s: &Statement| match s {
        Statement::Instruction(i) => {
            i.has("try_wait")
                || i.has("test_wait")
                || i.root == "ld" && (i.has("acquire") || i.has("relaxed"))
        }
        _ => false,
    };
    let plain = inner.iter().all(|s| matches!(s, Statement::Instruction(_) | Statement::Comment(_)));
    target(last) == Some(label) && last.guard.is_some() && plain && inner.len() < 6 && inner.iter().any(polls)
}

fn registers<'a>(operand: &'a Operand, visit: &mut impl FnMut(&'a str)) {
    use dualgemm_ptx::ast::AddressBase;
    match operand {
        Operand::Ident(name) | Operand::Not(name) | Operand::Offset(name, _) => visit(name),
        Operand::Vector(list) | Operand::List(list) | Operand::Group(list) => {
            list.iter().for_each(|operand| registers(operand, visit));
        }
        Operand::Pair(first, second) => {
            registers(first, visit);
            registers(second, visit);
        }
        Operand::Address(address) => {
            if let AddressBase::Ident(name) = &address.base {
                visit(name);
            }
        }
        Operand::Imm(_) | Operand::Sink => {}
    }
}

/// The registers that an instruction writes, or all that it names. What is written comes first.
fn names(instruction: &Instruction, written: bool) -> Vec<&str> {
    let mut names = Vec::new();
    match (written, instruction.operands.first()) {
        (true, None | Some(Operand::Address(_) | Operand::List(_))) => {}
        (true, Some(first)) => registers(first, &mut |name| names.push(name)),
        (false, _) => {
            instruction.operands.iter().for_each(|operand| registers(operand, &mut |name| names.push(name)));
            names.extend(instruction.guard.iter().map(|guard| &*guard.register));
        }
    }
    names
}

/// Whether one of the instructions may write a register that the other names.
pub(crate) fn share_registers(one: &Instruction, other: &Instruction) -> bool {
    let meet = |a: &Instruction, b: &Instruction| {
        let all = names(b, false);
        names(a, true).iter().any(|name| all.contains(name))
    };
    meet(one, other) || meet(other, one)
}
