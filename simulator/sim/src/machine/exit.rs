//! What must be true when threads, warps and CTAs exit.

use super::cluster::Cluster;
use super::warp::{GroupKind, Warp};
use crate::check::shadow::FRESH;
use crate::trap::{Check, Fault, Party, fault};

impl Cluster<'_> {
    /// Threads of a CTA have exited: barriers that waited for them go on.
    pub(super) fn threads_exit(&mut self, cta: usize, count: u32) {
        let c = &mut self.ctas[cta];
        c.live_threads -= count;
        for b in &mut c.barriers {
            if b.expected.is_none() && b.arrived != 0 && b.arrived >= c.live_threads {
                b.complete();
            }
        }
        let live = self.live_threads();
        if self.barrier.arrived != 0 && self.barrier.arrived >= live {
            self.barrier.complete();
        }
    }

    /// Checks a warp whose last lane has exited.
    pub(super) fn warp_exits(&mut self, w: &mut Warp) -> Result<(), Fault> {
        if !self.launch.config.checks.exit {
            return Ok(());
        }
        let kinds = [
            (GroupKind::Bulk, "cp.async.bulk reads shared memory"),
            (GroupKind::CpAsync, "cp.async writes shared memory"),
            (GroupKind::Wgmma, "wgmma.mma_async computes"),
            (GroupKind::TmemLoad, "tcgen05.ld reads tensor memory"),
            (GroupKind::TmemStore, "tcgen05.st writes tensor memory"),
        ];
        let strict = self.launch.config.checks.strict;
        for (kind, what) in kinds {
            // Shared memory stays until the CTA's bulk stores have read it.
            if kind == GroupKind::Bulk && !strict {
                continue;
            }
            for op in w.async_groups.all(kind, u32::MAX) {
                let done = self.ops.get(&op).is_none_or(|s| s.done || kind == GroupKind::Bulk && s.read);
                if !done {
                    let pc = self.ops.get(&op).map(|s| s.pc);
                    return Err(fault!(Check::Pending, "the warp exits while its {what}")
                        .party(Party::new("in flight", pc))
                        .help("wait for the group before the end of the kernel"));
                }
                self.ops.remove(&op);
            }
        }
        Ok(())
    }

    /// What other CTAs of the cluster did to the shared memory of one that exits must be over.
    fn others_are_done(&self, cta: usize) -> Result<(), Fault> {
        let c = &self.ctas[cta];
        let fault = |noun: &str, actor, pc| {
            let text = format!("the CTA exits, not ordered with an earlier {noun} of its shared memory");
            Fault::new(Check::Race, text)
                .party(Party::new(format!("earlier {noun}"), pc).of(self.places.of(actor)))
                .help("let it wait for the others at the end: barrier.cluster.arrive.release and barrier.cluster.wait")
        };
        if let Some((&actor, (_, pc))) =
            c.visits.iter().find(|(actor, (clock, _))| !c.gone.knows_some(**actor, *clock))
        {
            return Err(fault("arrival at an mbarrier", actor, *pc));
        }
        let mut last = FRESH;
        for (word, &state) in c.shared.shadow.iter().enumerate() {
            if state == last {
                continue;
            }
            last = state;
            let by_others = self.states.remembered(state).into_iter().map(|(_, access)| access);
            let mut open = by_others.filter(|a| self.places.actors.rank(a.actor) != cta);
            if let Some(a) = open.find(|a| !c.gone.knows_some(a.actor, a.clock)) {
                let at = self.launch.describe_shared(c.rank, word as u32 * 4);
                return Err(fault(a.kind.noun(), a.actor, a.pc).at(at));
            }
        }
        Ok(())
    }

    /// Checks a CTA whose last thread has exited.
    pub(super) fn cta_exits(&mut self, cta: usize) -> Result<(), Fault> {
        let checks = self.launch.config.checks;
        self.launch.progress.cta_finishes();
        let c = &self.ctas[cta];
        if c.tmem.in_use() {
            return Err(fault!(
                Check::Tmem,
                "the CTA exits with tensor memory allocated: {}",
                c.tmem.describe()
            )
            .help("tcgen05.dealloc every allocation before the end of the kernel"));
        }
        if checks.race && self.ctas.len() > 1 {
            self.others_are_done(cta)?;
        }
        if !checks.exit {
            return Ok(());
        }
        if let Some(agent) = self.engine.pending_of(cta as u32) {
            return Err(Fault::new(
                Check::Pending,
                "the CTA exits while an asynchronous operation is in flight",
            )
            .party(Party::new("in flight", agent.pc).of((c.id, Some(agent.warp))))
            .help("wait for it on its mbarrier, or for its group, before the end of the kernel"));
        }
        let counts: Vec<_> = self.warps[cta].iter().flatten().map(|w| w.maxnreg).collect();
        for (group, counts) in counts.chunks(4).enumerate() {
            if counts.iter().any(|c| *c != counts[0]) {
                let list: Vec<_> =
                    counts.iter().map(|c| c.map_or("unchanged".into(), |n| n.to_string())).collect();
                return Err(fault!(
                    Check::Registers,
                    "setmaxnreg left the warps of warpgroup {group} with {} registers",
                    list.join(", ")
                )
                .help("all four warps of a warpgroup execute the same setmaxnreg"));
            }
        }
        Ok(())
    }
}
