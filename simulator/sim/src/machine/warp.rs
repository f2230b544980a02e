//! A warp: 32 lanes, their registers, and the groups they run in.
//!
//! Lanes that execute together form a [`Group`] with one program counter. A branch that lanes take differently
//! splits the group; the parts meet again at the branch's immediate post-dominator, where the early ones wait in
//! a [`Scope`] (what ptxas does with BSSY and BSYNC). The wait is soft: when nothing else in the cluster can go
//! on, the waiting lanes are let through, so a lane may wait in a loop for another lane of its warp (the
//! independent thread scheduling of sm_70 and later).

mod group;
mod known;
mod order;

pub use group::{Carried, Group, GroupKind, Wait};
pub use known::Known;
pub use order::Acted;

use super::groups::{AsyncGroups, OpId};
use super::regs::{Lock, Regs};
use crate::check::order::{Actor, GROUPS_PER_WARP, View};
use crate::memory::local::Local;
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ScopeKind {
    /// The whole kernel.
    #[default]
    Root,
    /// Lanes that a branch parted.
    Branch,
    /// Lanes inside a device function.
    Call {
        /// Index of the function.
        callee: u32,
    },
}

/// A point where lanes meet.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    pub kind: ScopeKind,
    /// The branch that parted them, if one did.
    branch: u32,
    /// The instruction where they meet.
    pub pc: u32,
    /// Lanes that will come.
    pub expected: u32,
    /// Lanes that are there.
    pub arrived: u32,
    known: Known,
    /// What their fences deal with.
    pub carried: Carried,
    /// The scope around it.
    pub parent: usize,
    live: bool,
}

/// So many waits of a lane at each place answer "not yet": a retry is a loop without a bound.
const FIRST_TRIES: u32 = 3;

#[derive(Debug, Default)]
pub struct Warp {
    /// Position in the CTA.
    pub index: u32,
    /// Lanes that have not exited.
    pub live: u32,
    /// Its registers.
    pub regs: Regs,
    /// Groups that run or wait.
    pub groups: Vec<Group>,
    /// All scopes; the first is the root.
    pub scopes: Vec<Scope>,
    /// `.local` memory.
    pub local: Local,
    /// Parameters of device functions.
    pub func_params: Local,
    /// The carry flag of each lane (`add.cc`).
    pub carry: u32,
    /// Asynchronous operations its lanes have started, by kind.
    pub async_groups: AsyncGroups,
    /// Register count set by `setmaxnreg`.
    pub maxnreg: Option<u32>,
    /// Operations it has issued to the tensor core of sm_100: later ones are ordered after them.
    pub tensor_issued: View,
    /// Lanes that have arrived at the cluster barrier and not waited yet, and the round they arrived in.
    pub cluster_arrived: (u32, u64),
    /// Its matrix operations in flight.
    pub wgmma: super::groups::WgmmaState,
    /// Lanes that have waited for an mbarrier, by instruction, and how often others have tried.
    waited: HashMap<u32, (u32, u32)>,
    /// Instructions executed.
    pub executed: u64,
    pub first_actor: Actor,
    /// Clock of the present actions of its actors.
    pub clock: u32,
    /// Whether its lanes are ordered only by what orders threads.
    pub apart: bool,
    pub acted: Acted,
    slot_used: [u32; GROUPS_PER_WARP],
}

impl Warp {
    /// A warp about to execute instruction 0 with these lanes.
    pub fn new(
        index: u32,
        lanes: u32,
        regs: Regs,
        local: Local,
        func_params: Local,
        (first_actor, apart): (Actor, bool),
    ) -> Warp {
        let root = Scope { pc: u32::MAX, expected: lanes, live: true, ..Scope::default() };
        let mut warp = Warp {
            index,
            live: lanes,
            regs,
            scopes: vec![root],
            local,
            func_params,
            clock: 1,
            first_actor,
            apart,
            ..Warp::default()
        };
        let group = warp.new_group(0, lanes, 0, Known::new(apart, lanes, Arc::default()));
        warp.groups.push(group);
        warp
    }

    /// A group with an actor of its own (the last slot is shared when all are taken).
    pub fn new_group(&mut self, pc: u32, mask: u32, scope: usize, mut known: Known) -> Group {
        // Where others have not acted as, if there is such a one.
        let free = |slot: &usize| self.slot_used[*slot] == 0;
        let clean = (0..GROUPS_PER_WARP).find(|slot| free(slot) && !self.acted.others(*slot, mask));
        let slot = clean.or((0..GROUPS_PER_WARP).find(free)).unwrap_or(GROUPS_PER_WARP - 1);
        self.slot_used[slot] += 1;
        self.clock += 1;
        known.keep(mask);
        let actor = self.first_actor + slot as Actor;
        Group { pc, mask, scope, slot, actor, known, ..Group::default() }
    }

    /// Ends a group; returns what it knew, and did unless its lanes are told apart.
    pub fn retire(&mut self, group: Group) -> Known {
        self.slot_used[group.slot] -= 1;
        self.handed_on(group.known, group.actor)
    }

    /// What those know who go on from a group, given what it knew.
    pub fn handed_on(&mut self, mut known: Known, actor: Actor) -> Known {
        if !self.apart {
            known.change(u32::MAX, |view| view.learn(actor, self.clock));
        }
        self.clock += 1;
        known
    }

    pub fn open_scope(&mut self, kind: ScopeKind, pc: u32, expected: u32, parent: usize) -> usize {
        let scope = Scope { kind, pc, expected, parent, live: true, ..Scope::default() };
        match self.scopes.iter().position(|s| !s.live) {
            Some(i) => {
                self.scopes[i] = scope;
                i
            }
            None => {
                self.scopes.push(scope);
                self.scopes.len() - 1
            }
        }
    }

    /// Parts a group at a branch: `taken` lanes go to `target`, the others to `next`. Returns the group to go on
    /// with, if any lane did not reach the meeting point at once.
    pub fn split(
        &mut self,
        group: Group,
        taken: u32,
        target: u32,
        next: u32,
        reconverge: u32,
    ) -> Option<Group> {
        let scope = &self.scopes[group.scope];
        let scope = if reconverge == u32::MAX || scope.kind == ScopeKind::Branch && scope.pc == reconverge {
            group.scope
        } else {
            let scope = self.open_scope(ScopeKind::Branch, reconverge, group.mask, group.scope);
            self.scopes[scope].branch = group.pc;
            scope
        };
        let (mask, met, carried) = (group.mask, group.met, group.carried.clone());
        let known = self.retire(group);
        let mut first = None;
        for (pc, lanes) in [(next, mask & !taken), (target, taken)] {
            let part = self.new_group(pc, lanes, scope, known.clone());
            let part = Group { carried: carried.clone(), met, ..part };
            match self.settle(part) {
                Some(part) if first.is_none() => first = Some(part),
                Some(part) => self.groups.push(part),
                None => {}
            }
        }
        first
    }

    /// Lets a group that stands at its meeting point wait there, or go on if it is the last. Returns it if it
    /// goes on.
    pub fn settle(&mut self, mut group: Group) -> Option<Group> {
        while self.scopes[group.scope].kind != ScopeKind::Root && self.scopes[group.scope].pc == group.pc {
            let id = group.scope;
            let mask = group.mask;
            if self.scopes[id].expected == mask {
                // All that is expected is this group: it goes on, keeping its actor.
                group.scope = self.scopes[id].parent;
                self.scopes[id].live = false;
                continue;
            }
            let carried = group.carried.clone();
            let known = self.retire(group);
            let scope = &mut self.scopes[id];
            scope.arrived |= mask;
            match scope.arrived == mask {
                true => scope.known = known,
                false => scope.known.merge(&known),
            }
            scope.carried.merge(&carried);
            if scope.arrived != scope.expected {
                return None;
            }
            group = self.met(id);
        }
        Some(group)
    }

    /// The lanes that are at a meeting point, as one group in the scope around it.
    fn met(&mut self, id: usize) -> Group {
        let scope = &mut self.scopes[id];
        let lanes = std::mem::take(&mut scope.arrived);
        scope.expected &= !lanes;
        scope.live = scope.expected != 0;
        let all = !scope.live && scope.kind == ScopeKind::Branch;
        let (pc, parent, met) = (scope.pc, scope.parent, all.then_some(scope.branch));
        let (known, carried) = (std::mem::take(&mut scope.known), std::mem::take(&mut scope.carried));
        Group { carried, met, ..self.new_group(pc, lanes, parent, known) }
    }

    /// Lets the lanes at a meeting point go on.
    fn let_through(&mut self, id: usize) {
        let group = self.met(id);
        let group = self.settle(group);
        self.groups.extend(group);
    }

    /// Takes lanes out of every scope from `from` up to and without `to`; groups that this completes are made
    /// runnable.
    pub fn leave_scopes(&mut self, lanes: u32, from: usize, to: Option<usize>) {
        let mut id = from;
        while Some(id) != to {
            let scope = &mut self.scopes[id];
            scope.expected &= !lanes;
            let (parent, kind) = (scope.parent, scope.kind);
            if kind == ScopeKind::Root {
                break;
            }
            if scope.expected == 0 {
                scope.live = false;
            } else if scope.expected == scope.arrived {
                self.let_through(id);
            }
            id = parent;
        }
    }

    /// Lets lanes that wait at a meeting point go on without the others. Returns whether there were any.
    pub fn release_waiting(&mut self) -> bool {
        let waiting = (1..self.scopes.len()).find(|&i| {
            let s = &self.scopes[i];
            s.live && s.arrived != 0 && s.kind == ScopeKind::Branch
        });
        let Some(id) = waiting else { return false };
        self.let_through(id);
        true
    }

    /// Ends lanes of a group. Returns what is left of it.
    pub fn exit(&mut self, mut group: Group, lanes: u32) -> Option<Group> {
        self.live &= !lanes;
        let (scope, rest) = (group.scope, group.mask & !lanes);
        group.mask = rest;
        group.known.keep(rest);
        if rest == 0 {
            self.retire(group);
            self.leave_scopes(lanes, scope, None);
            return None;
        }
        self.leave_scopes(lanes, scope, None);
        Some(group)
    }

    /// The innermost call around a scope.
    pub fn enclosing_call(&self, mut scope: usize) -> Option<usize> {
        loop {
            match self.scopes[scope].kind {
                ScopeKind::Root => return None,
                ScopeKind::Call { .. } => return Some(scope),
                ScopeKind::Branch => scope = self.scopes[scope].parent,
            }
        }
    }

    /// Whether a scope lies inside a call of this function.
    pub fn is_inside(&self, scope: usize, function: u32) -> bool {
        let call = |s: usize| matches!(self.scopes[s].kind, ScopeKind::Call { callee } if callee == function);
        self.ancestors(scope).into_iter().any(call)
    }

    fn ancestors(&self, mut scope: usize) -> Vec<usize> {
        let mut list = vec![scope];
        while self.scopes[scope].kind != ScopeKind::Root {
            scope = self.scopes[scope].parent;
            list.push(scope);
        }
        list
    }

    /// Tries to bring the live lanes of `members` together at `group`'s instruction, from groups that wait
    /// there for the same lanes. True once the group is complete; false, and nothing changed, while lanes are missing.
    pub fn gather(&mut self, group: &mut Group, members: u32) -> bool {
        let wanted = members & self.live;
        if wanted & !group.mask == 0 {
            return true;
        }
        let at_hand = |g: &Group| g.pc == group.pc && g.wait == Wait::Lanes(members);
        let present = self.groups.iter().filter(|g| at_hand(g)).fold(group.mask, |m, g| m | g.mask);
        if wanted & !present != 0 {
            return false;
        }
        let mut i = 0;
        while i < self.groups.len() {
            if self.groups[i].pc != group.pc || self.groups[i].wait != Wait::Lanes(members) {
                i += 1;
                continue;
            }
            let other = self.groups.swap_remove(i);
            let mine = self.ancestors(group.scope);
            let theirs = self.ancestors(other.scope);
            let common = *mine.iter().find(|s| theirs.contains(s)).unwrap_or(&0);
            let (from_mine, from_theirs, lanes) = (group.scope, other.scope, other.mask);
            self.leave_scopes(group.mask, from_mine, Some(common));
            self.leave_scopes(lanes, from_theirs, Some(common));
            group.carried.merge(&other.carried);
            let known = self.retire(other);
            group.known.merge(&known);
            group.met = Some(group.pc);
            group.mask |= lanes;
            group.scope = common;
            i = 0;
        }
        true
    }

    /// Gives registers of finished operations back to the program.
    pub fn release_registers(&mut self, finished: &[OpId]) {
        let held = std::mem::take(&mut self.wgmma.held);
        let (gone, stay): (Vec<_>, Vec<_>) = held.into_iter().partition(|h| finished.contains(&h.0));
        self.regs.free_moved(gone.iter().map(|h| h.1).collect());
        for (_, reg, ..) in gone {
            let mut lock = Lock::Free;
            for h in stay.iter().filter(|h| h.1 == reg) {
                lock = if h.2 || lock == Lock::Target { Lock::Target } else { Lock::Source };
            }
            self.regs.lock(reg, lock);
        }
        self.wgmma.held = stay;
    }

    /// Whether some of these lanes wait for an mbarrier at this instruction for the first time, or try again so soon that it
    /// counts as the first.
    pub fn first_wait(&mut self, pc: u32, lanes: u32) -> bool {
        let (before, tries) = self.waited.entry(pc).or_default();
        let first = lanes & !*before != 0;
        if first {
            *tries += 1;
        }
        if *tries == FIRST_TRIES {
            (*before, *tries) = (*before | lanes, 0);
        }
        first
    }

    /// Whether every lane has exited.
    pub fn done(&self) -> bool {
        self.live == 0
    }
}

#[cfg(test)]
mod tests;
