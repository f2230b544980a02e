//! Structured control flow. Bodies become `{ }` blocks, so that the text is indented as the Rust source is.

use super::reg::{Cond, Pred, Reg, Src, U32};
use super::{Cmp, Kernel};
use crate::ast::{Line, Operand, Statement};
use crate::name::Name;
use std::ops::Range;

/// The two ends of a loop.
#[derive(Debug, Clone)]
pub struct Loop {
    start: Name,
    end: Name,
}

impl Kernel {
    /// A label named by intent; a number follows if the name was used before.
    fn label(&mut self, intent: &str) -> Name {
        let mut name: String =
            intent.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let used = self.labels.entry(name.clone()).or_insert(0);
        *used += 1;
        if *used > 1 {
            name = format!("{name}__{used}");
        }
        format!("L_{name}").into()
    }

    fn place(&mut self, label: &Name) {
        self.body.push(Statement::Label(Line::default(), label.clone()));
    }

    fn branch(&mut self, label: &Name) {
        self.push("bra", vec![Operand::Ident(label.clone())]);
    }

    /// Runs `build` and puts what it appends into a block.
    fn block<R>(&mut self, build: impl FnOnce(&mut Kernel) -> R) -> R {
        let outer = std::mem::take(&mut self.body);
        let result = build(self);
        let inner = std::mem::replace(&mut self.body, outer);
        self.body.push(Statement::Block(inner));
        result
    }

    /// Threads for which `cond` holds run `then`.
    pub fn if_(&mut self, cond: impl Into<Cond>, name: &str, then: impl FnOnce(&mut Kernel)) {
        let end = self.label(&format!("{name}_end"));
        self.unless(cond).branch(&end);
        self.block(then);
        self.place(&end);
    }

    /// Threads for which `cond` holds run `then`, the others `otherwise`.
    pub fn if_else(
        &mut self,
        cond: impl Into<Cond>,
        name: &str,
        then: impl FnOnce(&mut Kernel),
        otherwise: impl FnOnce(&mut Kernel),
    ) {
        let other = self.label(&format!("{name}_else"));
        let end = self.label(&format!("{name}_end"));
        self.unless(cond).branch(&other);
        self.block(then);
        self.branch(&end);
        self.place(&other);
        self.block(otherwise);
        self.place(&end);
    }

    /// The warps (or warpgroups, or whatever `who` counts) in `range` take the role `name`: a block of their own
    /// under a heading. `who` must be the same for all lanes of a warp.
    pub fn role(&mut self, who: Reg<U32>, range: Range<u32>, name: &str, body: impl FnOnce(&mut Kernel)) {
        self.comment(&format!("---- {name} ----"));
        let count = range.end.saturating_sub(range.start);
        let member = match (range.start, count) {
            (start, 1) => self.compare(Cmp::Eq, who, start),
            (0, _) => self.compare(Cmp::Lt, who, range.end),
            (start, _) => {
                let relative = self.sub(who, start);
                self.compare(Cmp::Lt, relative, count)
            }
        };
        self.if_(member, name, body);
    }

    /// Repeats `body` until it leaves by [`break_if`](Self::break_if). ptxas is told not to unroll it.
    pub fn loop_(&mut self, name: &str, body: impl FnOnce(&mut Kernel, &Loop)) {
        let this = Loop { start: self.label(name), end: self.label(&format!("{name}_end")) };
        self.place(&this.start);
        self.no_unroll();
        self.block(|k| {
            body(k, &this);
            k.branch(&this.start);
        });
        self.place(&this.end);
    }

    /// Runs `body` for `i = start, start + step, ...` below `end`, as a loop in the text. `i` may be read in the
    /// body; it is a register of its own. To unroll, write a Rust `for` loop instead.
    pub fn for_range(
        &mut self,
        name: &str,
        start: impl Src<U32>,
        end: impl Src<U32>,
        step: u32,
        body: impl FnOnce(&mut Kernel, Reg<U32>, &Loop),
    ) {
        let end = end.value();
        let i = self.mov(start.value());
        self.loop_(name, |k, this| {
            let done = k.compare(Cmp::Ge, i, end);
            k.break_if(this, done);
            body(k, i, this);
            k.to(i).add(i, step);
        });
    }

    /// Repeats `body` while the condition it gives holds; at least once. ptxas is told not to unroll it.
    pub fn do_while<C: Into<Cond>>(&mut self, name: &str, body: impl FnOnce(&mut Kernel) -> C) {
        let start = self.label(name);
        self.place(&start);
        self.no_unroll();
        let again = self.block(body);
        self.when(again).branch(&start);
    }

    /// A loop without body: repeats the instruction that gives the condition until it holds.
    pub(super) fn spin(&mut self, name: &str, ready: impl FnOnce(&mut Kernel) -> Reg<Pred>) {
        let start = self.label(name);
        self.place(&start);
        let ready = ready(self);
        self.unless(ready).branch(&start);
    }

    /// Leaves the loop if `cond` holds.
    pub fn break_if(&mut self, this: &Loop, cond: impl Into<Cond>) {
        self.when(cond).branch(&this.end);
    }

    fn no_unroll(&mut self) {
        self.body.push(Statement::Pragma(vec!["nounroll".into()]));
    }
}

instructions! {
    /// The threads are done.
    ret() = "ret";
    /// The threads end.
    exit() = "exit";
    /// The kernel aborts.
    trap() = "trap";
}
