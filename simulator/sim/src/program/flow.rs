//! Where lanes that part at a branch meet again: the immediate post-dominator of the branch.
//!
//! Post-dominators are found on basic blocks, with the algorithm of Cooper, Harvey and Kennedy ("A Simple, Fast
//! Dominance Algorithm") on the reversed graph.

use super::Inst;
use crate::exec::OpKind;

const NONE: usize = usize::MAX;

fn targets(inst: &Inst) -> &[u32] {
    match &inst.op.kind {
        OpKind::Jumps(targets) => targets,
        _ => &[],
    }
}

/// Whether control may go on to the next instruction.
fn falls_through(inst: &Inst) -> bool {
    !matches!(inst.op.kind, OpKind::Jumps(_) | OpKind::Leaves) || inst.guard.is_some()
}

/// Fills in `reconverge` for the branches of the function that starts at `start` and ends with the code.
pub fn reconverge(code: &mut [Inst], start: usize) {
    let n = code.len() - start;
    let mut leader = vec![false; n + 1];
    leader[0] = true;
    for i in 0..n {
        let out = targets(&code[start + i]);
        for t in out {
            leader[*t as usize - start] = true;
        }
        if !out.is_empty() || !falls_through(&code[start + i]) {
            leader[i + 1] = true;
        }
    }
    let mut block_of = vec![0; n + 1];
    let mut first = Vec::new();
    for i in 0..n {
        if leader[i] {
            first.push(i);
        }
        block_of[i] = first.len() - 1;
    }
    let blocks = first.len();
    let exit = blocks;
    let last = |b: usize| if b + 1 < blocks { first[b + 1] - 1 } else { n - 1 };
    let mut successors: Vec<Vec<usize>> = Vec::with_capacity(blocks);
    for b in 0..blocks {
        let inst = &code[start + last(b)];
        let mut out: Vec<_> = targets(inst).iter().map(|t| block_of[*t as usize - start]).collect();
        let through = falls_through(inst);
        if through {
            out.push(if last(b) + 1 < n { block_of[last(b) + 1] } else { exit });
        }
        let leaves = matches!(inst.op.kind, OpKind::Leaves);
        if leaves || out.is_empty() {
            out.push(exit);
        }
        successors.push(out);
    }
    let dominator = post_dominators(&successors, exit);
    for b in 0..blocks {
        let inst = &mut code[start + last(b)];
        if matches!(inst.op.kind, OpKind::Jumps(_)) {
            let d = dominator[b];
            inst.reconverge = if d == NONE || d == exit { u32::MAX } else { (start + first[d]) as u32 };
        }
    }
}

/// Immediate post-dominator of every block; `NONE` for blocks that never reach the exit.
fn post_dominators(successors: &[Vec<usize>], exit: usize) -> Vec<usize> {
    let n = exit + 1;
    let mut predecessors = vec![Vec::new(); n];
    for (b, out) in successors.iter().enumerate() {
        for &s in out {
            predecessors[s].push(b);
        }
    }
    // Postorder of the reversed graph, iteratively.
    let mut order = vec![NONE; n];
    let mut sequence = Vec::new();
    let mut seen = vec![false; n];
    let mut stack = vec![(exit, 0)];
    seen[exit] = true;
    while let Some((b, i)) = stack.pop() {
        if let Some(&p) = predecessors[b].get(i) {
            stack.push((b, i + 1));
            if !seen[p] {
                seen[p] = true;
                stack.push((p, 0));
            }
        } else {
            order[b] = sequence.len();
            sequence.push(b);
        }
    }
    let mut idom = vec![NONE; n];
    idom[exit] = exit;
    let mut changed = true;
    while changed {
        changed = false;
        for &b in sequence.iter().rev().filter(|b| **b != exit) {
            let mut new = NONE;
            for &s in successors[b].iter().filter(|s| idom[**s] != NONE) {
                new = if new == NONE { s } else { meet(&idom, &order, new, s) };
            }
            if new != idom[b] {
                idom[b] = new;
                changed = true;
            }
        }
    }
    idom
}

fn meet(idom: &[usize], order: &[usize], mut a: usize, mut b: usize) -> usize {
    while a != b {
        while order[a] < order[b] {
            a = idom[a];
        }
        while order[b] < order[a] {
            b = idom[b];
        }
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Op;
    use OpKind::{Acts, Leaves};

    /// Instructions by what they are, and whether they have a guard.
    fn code(kinds: &[(OpKind, bool)]) -> Vec<Inst> {
        let inst = |(kind, guarded): &(OpKind, bool)| Inst {
            op: Op::of(kind.clone(), |_| ()),
            guard: guarded.then_some((0, false)),
            reconverge: u32::MAX,
            opcode: 0,
        };
        kinds.iter().map(inst).collect()
    }

    fn bra(to: u32) -> OpKind {
        OpKind::Jumps(vec![to])
    }

    #[test]
    fn if_else_meets_after_both_exact() {
        // 0: @p bra 3; 1: nop; 2: bra 4; 3: nop; 4: ret
        let mut c = code(&[(bra(3), true), (Acts, false), (bra(4), false), (Acts, false), (Leaves, false)]);
        reconverge(&mut c, 0);
        assert_eq!((c[0].reconverge, c[2].reconverge), (4, 4));
    }

    #[test]
    fn a_loop_meets_at_its_exit_exact() {
        // 0: nop; 1: @p bra 3; 2: bra 0; 3: ret
        let mut c = code(&[(Acts, false), (bra(3), true), (bra(0), false), (Leaves, false)]);
        reconverge(&mut c, 0);
        assert_eq!(c[1].reconverge, 3);
    }

    #[test]
    fn an_early_return_leaves_no_meeting_point_exact() {
        // 0: @p bra 2; 1: ret; 2: nop; 3: ret
        let mut c = code(&[(bra(2), true), (Leaves, false), (Acts, false), (Leaves, false)]);
        reconverge(&mut c, 0);
        assert_eq!(c[0].reconverge, u32::MAX);
    }

    #[test]
    fn an_endless_loop_is_no_problem_exact() {
        let mut c = code(&[(bra(0), true), (bra(0), false)]);
        reconverge(&mut c, 0);
        assert_eq!(c[0].reconverge, u32::MAX);
    }
}
