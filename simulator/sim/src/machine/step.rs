//! Executing instructions: the dispatch loop. It applies guards, moves program counters, keeps lanes together,
//! and turns faults into traps. What an instruction does is in `exec`.

use super::cluster::Cluster;
use super::cta::Cta;
use super::engine::Agent;
use super::regs::BadReg;
use super::warp::{Group, ScopeKind, Wait, Warp};
use crate::check::undefined::{Origin, Source};
use crate::exec::{self, Cx, Op, OpKind};
use crate::program::{Reg, Src};
use crate::trap::{Check, Fault, Party, Spot, Trap, fault};

/// What the group does after an instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flow {
    /// Goes on with the next instruction.
    Next,
    /// Goes on with the next instruction, but lets others run first.
    Yield,
    /// The active lanes go to this instruction, the others on.
    Branch(u32),
    /// These active lanes go to this instruction; the other active lanes execute the instruction again.
    Some(u32, u32),
    /// These active lanes execute the instruction again, apart from the others, which do so as well.
    Part(u32),
    /// The active lanes call a function.
    Call(u32),
    /// The active lanes return from the function, or exit.
    Return,
    /// The active lanes exit.
    Exit,
    /// Executes this instruction again later.
    Wait(Wait),
}

/// What becomes of an instruction that has failed, has read undefined bits, or is one too many.
#[cold]
fn judge(op: &Op, result: exec::Result, cx: &mut Cx<'_, '_>, unsure: u32) -> exec::Result {
    let flow = match (result, cx.w.regs.bad.take()) {
        // Compilers compute with undefined values where the result does not matter.
        (Ok(flow), Some(BadReg::Unwritten(..))) if matches!(op.kind, OpKind::Computes(_)) => {
            exec::undefined::settle(op, cx, unsure)?;
            flow
        }
        // An undefined operand is the cause of whatever else went wrong.
        (_, Some(bad)) => return Err(cx.cl.bad_register(bad, cx.w, cx.pc)),
        (result, None) => result?,
    };
    let limit = cx.cl.launch.config.max_instructions;
    if cx.w.executed > limit {
        return Err(fault!(Check::Limit, "the warp has executed {limit} instructions"));
    }
    Ok(flow)
}

impl<'a> Cluster<'a> {
    /// Runs up to `count` instructions of a group.
    pub(super) fn slice(
        &mut self,
        cta: usize,
        warp: usize,
        group: usize,
        count: u64,
    ) -> Result<(), Box<Trap>> {
        let Some(mut w) = self.warps[cta][warp].take() else { return Ok(()) };
        let mut g = w.groups.swap_remove(group);
        g.wait = Wait::No;
        let was_live = w.live;
        let result = self.slice_group(cta, &mut w, &mut Some(g), count);
        let gone_lanes = was_live & !w.live;
        let gone = gone_lanes.count_ones();
        // Lanes that arrived at the cluster barrier and exit without waiting are no longer expected there.
        if w.cluster_arrived.1 == self.barrier.generation {
            self.barrier.arrived -= (gone_lanes & w.cluster_arrived.0).count_ones();
        }
        w.cluster_arrived.0 &= w.live;
        let exited = w.done();
        let result = result.and_then(|()| {
            if exited {
                let spot = Spot { warp: Some(w.index), ..self.spot(cta) };
                self.warp_exits(&mut w).map_err(|f| f.trap(self.launch.kernel, spot))
            } else {
                Ok(())
            }
        });
        self.warps[cta][warp] = Some(w);
        if gone != 0 {
            self.threads_exit(cta, gone);
            if self.ctas[cta].live_threads == 0 {
                result?;
                return self.cta_exits(cta).map_err(|f| f.trap(self.launch.kernel, self.spot(cta)));
            }
        }
        result
    }

    fn slice_group(
        &mut self,
        cta: usize,
        w: &mut Warp,
        slot: &mut Option<Group>,
        count: u64,
    ) -> Result<(), Box<Trap>> {
        let code = &self.launch.kernel.code;
        let limit = self.launch.config.max_instructions;
        for _ in 0..count {
            // Other lanes of the warp may have become runnable; the scheduler finds them.
            let Some(g) = slot else { return Ok(()) };
            let pc = g.pc;
            let inst = &code[pc as usize];
            self.time += 1;
            w.executed += 1;
            w.regs.ids.clock = self.time;
            self.counters.count(w.index, inst.opcode);
            self.states.forget();
            let mut m = g.mask;
            let mut unsure = 0;
            if let Some((p, negated)) = inst.guard {
                let p = w.regs.pred(Src::Reg(Reg::Pred(p)), m);
                m &= if negated { !p } else { p };
                unsure = w.regs.undefined_lanes();
                if unsure != 0 && matches!(inst.op.kind, OpKind::Computes(_)) {
                    m |= unsure;
                }
            }
            let result = match m {
                0 => Ok(Flow::Next),
                _ => inst.op.run(&mut Cx { cl: self, w, g, cta, m, pc, together: None }),
            };
            let flow = match result {
                Ok(flow) if w.regs.bad.is_none() && w.executed <= limit => flow,
                result => {
                    let cx = &mut Cx { cl: self, w, g, cta, m, pc, together: None };
                    judge(&inst.op, result, cx, unsure).map_err(|fault| {
                        let spot = Spot { pc: Some(pc), warp: Some(w.index), ..self.spot(cta) };
                        fault.trap(self.launch.kernel, spot)
                    })?
                }
            };
            let stop = matches!(flow, Flow::Yield | Flow::Wait(_));
            // In place where no lanes part: a group is too large to move for every instruction.
            match flow {
                Flow::Wait(wait) => {
                    g.wait = wait;
                    break;
                }
                Flow::Next | Flow::Yield => g.pc = pc + 1,
                Flow::Branch(target) if m == g.mask => g.pc = target,
                flow => *slot = slot.take().and_then(|g| self.depart(cta, w, g, m, flow)),
            }
            if let Some(g) = slot {
                g.forced = false;
                if w.scopes[g.scope].pc == g.pc {
                    *slot = slot.take().and_then(|g| w.settle(g));
                }
            }
            if stop {
                break;
            }
        }
        w.groups.extend(slot.take());
        Ok(())
    }

    /// Lets lanes of a group go different ways, call, return or exit. Returns the group to go on with.
    fn depart(&mut self, cta: usize, w: &mut Warp, mut g: Group, m: u32, flow: Flow) -> Option<Group> {
        g.forced = false;
        let pc = g.pc;
        let kernel = self.launch.kernel;
        let reconverge = kernel.code[pc as usize].reconverge;
        match flow {
            Flow::Branch(target) => w.split(g, m, target, pc + 1, reconverge),
            Flow::Some(lanes, target) if lanes == g.mask => Some(Group { pc: target, ..g }),
            // Lanes outside the guard have nothing left to do here; they re-execute and skip.
            Flow::Some(lanes, target) => w.split(g, lanes, target, pc, reconverge),
            Flow::Part(lanes) => w.split(g, lanes, pc, pc, pc + 1),
            Flow::Call(_) if m != g.mask => w.split(g, m, pc, pc + 1, pc + 1),
            Flow::Call(callee) => {
                g.scope = w.open_scope(ScopeKind::Call { callee }, pc + 1, g.mask, g.scope);
                let callee = &kernel.callees[callee as usize];
                w.regs.forget(&callee.registers, g.mask);
                g.pc = callee.entry;
                Some(g)
            }
            Flow::Return => match w.enclosing_call(g.scope) {
                Some(call) => {
                    exec::control::return_values(&kernel.code, &kernel.callees, w, call, m);
                    self.return_lanes(w, g, m, call)
                }
                None => self.exit_lanes(cta, w, g, m),
            },
            Flow::Exit => self.exit_lanes(cta, w, g, m),
            Flow::Next | Flow::Yield | Flow::Wait(_) => Some(g),
        }
    }

    fn return_lanes(&mut self, w: &mut Warp, g: Group, m: u32, call: usize) -> Option<Group> {
        let pc = w.scopes[call].pc;
        let rest = g.mask & !m;
        if rest != 0 {
            let known = w.handed_on(g.known.clone(), g.actor);
            let stay = w.new_group(g.pc + 1, rest, g.scope, known);
            let stay = Group { carried: g.carried.clone(), ..stay };
            let stay = w.settle(stay);
            w.groups.extend(stay);
        }
        let from = g.scope;
        let mut back = Group { pc, mask: m, scope: call, ..g };
        back.known.keep(m);
        w.leave_scopes(m, from, Some(call));
        w.settle(back)
    }

    fn exit_lanes(&mut self, cta: usize, w: &mut Warp, g: Group, m: u32) -> Option<Group> {
        self.progress += 1;
        if self.ctas.len() > 1 {
            self.ctas[cta].gone.join(&g.known.joined(m));
        }
        let next = g.pc + 1;
        w.exit(g, m).map(|g| Group { pc: next, ..g })
    }

    fn bad_register(&self, bad: BadReg, w: &Warp, pc: u32) -> Fault {
        match bad {
            BadReg::Unwritten(r, lanes) => {
                let lane = lanes.trailing_zeros() as usize & 31;
                let source = Source::Register(r);
                let origin = w.regs.shadow(Src::Reg(r), pc).origins[lane].unwrap_or(Origin { source, pc });
                self.launch.undefined(origin, Some(lane), pc)
            }
            BadReg::InFlight(r, write) => {
                let held = w.wgmma.held.iter().find(|h| h.1 == r);
                let register = self.launch.kernel.register(r);
                let what = if write { "written" } else { "read" };
                let text =
                    format!("register {register} is {what} while an earlier instruction in flight uses it");
                let fault = Fault::new(Check::InFlight, text)
                    .help("wait for it first: wgmma.wait_group, or tcgen05.wait::ld");
                held.into_iter().fold(fault, |fault, held| fault.party(Party::new("in flight", held.3)))
            }
        }
    }

    /// A place in a CTA.
    pub(super) fn spot(&self, cta: usize) -> Spot {
        let Cta { id, rank, .. } = &self.ctas[cta];
        Spot { cta: Some(*id), cluster_rank: self.launch.clustered.then_some(*rank), ..Spot::default() }
    }

    /// Adds the place to a fault of an operation in flight.
    pub(super) fn trap_async(&self, fault: Fault, agent: &Agent) -> Box<Trap> {
        let Agent { pc, warp, cta, .. } = *agent;
        let spot = Spot { pc: Some(pc), warp: Some(warp), asynchronous: true, ..self.spot(cta as usize) };
        fault.trap(self.launch.kernel, spot)
    }

    /// An agent that acts for these lanes of the group from now on.
    pub fn agent(&mut self, cta: usize, w: &mut Warp, g: &Group, lanes: u32) -> Agent {
        let (actor, clock) = self.engine.actor(cta as u32);
        let view = w.publish(g, lanes);
        Agent { cta: cta as u32, warp: w.index, pc: g.pc, actor, clock, view }
    }
}
