//! A cluster of CTAs: the unit that runs on one host thread at a time.
//!
//! The cluster picks a warp at random (seeded), lets it run a short slice, completes what the asynchronous
//! engines have due, and so on. When nothing can run, polls are answered "not yet", then early lanes are let
//! through; if that changes nothing, the cluster is stuck.

use super::cta::Cta;
use super::engine::{Agent, Engine, Job};
use super::grid::Launch;
use super::groups::{OpId, OpState};
use super::ids::Ids;
use super::regs::Regs;
use super::rng::Rng;
use super::warp::{Group, GroupKind, Wait, Warp};
use crate::check::order::{Actor, Actors, GROUPS_PER_WARP, Places, View};
use crate::check::outside::Eras;
use crate::check::pages::Pages;
use crate::check::shadow::States;
use crate::exec::sync::Release;
use crate::memory::local::Local;
use crate::memory::shared::Shared;
use crate::report::Counters;
use crate::trap::{Check, Fault, Party, Spot, Trap};
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hasher as _};
use std::sync::Arc;

/// Why [`Cluster::run`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Every thread has exited.
    Done,
    /// The round's share is used up.
    Running,
    /// Nothing can go on before the cluster's turn at global memory.
    NeedsTurn,
    /// Nothing can go on.
    Stuck,
}

/// The cluster barrier (PTX ISA `barrier.cluster`).
#[derive(Debug, Default)]
pub struct ClusterBarrier {
    /// Completed rounds.
    pub generation: u64,
    /// Threads that have arrived.
    pub arrived: u32,
    /// What they knew.
    pub current: View,
    /// What waiters learn.
    pub done: Arc<View>,
}

impl ClusterBarrier {
    pub fn complete(&mut self) {
        self.generation += 1;
        self.arrived = 0;
        let current = std::mem::take(&mut self.current);
        Arc::make_mut(&mut self.done).join(&current);
    }
}

/// A cluster in progress.
pub struct Cluster<'a> {
    pub launch: &'a Launch<'a>,
    /// Position in the grid.
    pub index: u32,
    /// CTAs by rank.
    pub ctas: Vec<Cta>,
    /// Where actors belong.
    pub places: Places,
    /// Warps by CTA; one is absent while it executes.
    pub warps: Vec<Vec<Option<Box<Warp>>>>,
    /// Operations in flight.
    pub engine: Engine,
    /// States of group-waited operations.
    pub ops: HashMap<OpId, OpState>,
    /// Next operation number.
    pub next_op: OpId,
    pub barrier: ClusterBarrier,
    /// Interned shadow states.
    pub states: States,
    /// Shadow of global memory as this cluster has used it.
    pub pages: Pages,
    /// What strong writes to shared memory have published, by `(rank, offset)`.
    pub shared_releases: BTreeMap<(u32, u32), Vec<Release>>,
    /// What its parties have known of the rest of the grid.
    pub eras: Eras,
    /// Instructions executed by the cluster: its clock.
    pub time: u64,
    /// Grows whenever something happens that a waiting thread could notice.
    pub progress: u64,
    /// Operations in flight that change global memory in an order others can notice; done in turn.
    pub ordered: Vec<(Agent, Job)>,
    pub rng: Rng,
    /// Whether the cluster may touch global memory in order now.
    pub turn: bool,
    /// What has been counted.
    pub counters: Counters,
    /// Operations of tensor cores that [`Progress`](crate::Progress) knows of.
    told: u64,
    /// Text printed by the kernel.
    pub output: String,
    /// `(progress, how often, registers)`: polls were answered "not yet" without effect.
    forced: (u64, u32, u64),
}

/// Operations take 1 to this many instructions of the cluster to complete.
const MAX_DELAY: u64 = 400;
/// A slice is 1 to this many instructions.
const MAX_SLICE: u64 = 48;
/// Rounds of unanswered polls after which a cluster counts as stuck, if its registers are what they were a round before: who
/// counts its polls, or looks at a clock, may give up.
const PATIENCE: u32 = 3;
/// Rounds after which it is stuck in any case.
const MOST_POLLS: u32 = 1 << 12;
/// How far clocks go on in a round in which nothing else happens.
pub const IDLE_ROUND: u64 = 1 << 14;
/// Interned shadow states after which unused ones are dropped.
const MAX_STATES: usize = 1 << 18;

impl<'a> Cluster<'a> {
    /// Cluster number `index` of the grid, about to start.
    pub fn new(launch: &'a Launch<'a>, index: u32) -> Cluster<'a> {
        let [cx, cy, cz] = launch.cluster;
        let [gx, gy, _] = launch.grid;
        let (nx, ny) = (gx / cx, gy / cy);
        let origin = [index % nx * cx, index / nx % ny * cy, index / (nx * ny) * cz];
        let size = cx * cy * cz;
        let threads: u32 = launch.block.iter().product();
        let warps = threads.div_ceil(32);
        let mut ctas = Vec::new();
        let mut all_warps = Vec::new();
        for rank in 0..size {
            let within = [rank % cx, rank / cx % cy, rank / (cx * cy)];
            let id: [u32; 3] = std::array::from_fn(|i| origin[i] + within[i]);
            ctas.push(Cta {
                id,
                rank,
                shared: Shared::new(launch.kernel.dynamic_offset + launch.dynamic_shared),
                live_threads: threads,
                warpgroups: (0..warps.div_ceil(4)).map(|_| Default::default()).collect(),
                ..Cta::default()
            });
            let apart = launch.config.checks.race && launch.config.checks.strict;
            let make = |w: u32| {
                let ids = launch.ids(id, rank, w);
                let lanes = if threads - w * 32 >= 32 { u32::MAX } else { (1 << (threads - w * 32)) - 1 };
                let regs = Regs::new(launch.kernel.rows, ids, launch.config.checks.uninit);
                let first = (rank * warps + w) * GROUPS_PER_WARP as u32;
                let own = |bytes: u32| Local::new(bytes as usize, launch.config.checks.uninit);
                let (local, params) = (own(launch.kernel.local_bytes), own(launch.kernel.func_param_bytes));
                Some(Box::new(Warp::new(w, lanes, regs, local, params, (first as Actor, apart))))
            };
            all_warps.push((0..warps).map(make).collect());
        }
        let actors = Actors { ctas: ctas.len(), warps: warps as usize };
        let places = Places { ctas: ctas.iter().map(|c: &Cta| c.id).collect(), actors };
        Cluster {
            launch,
            index,
            engine: Engine::new(ctas.len(), actors.groups()),
            places,
            ctas,
            warps: all_warps,
            ops: HashMap::new(),
            next_op: 0,
            barrier: ClusterBarrier::default(),
            states: States::default(),
            pages: Pages::default(),
            shared_releases: BTreeMap::new(),
            eras: Eras::default(),
            time: 0,
            progress: 0,
            ordered: Vec::new(),
            rng: Rng::new(launch.config.seed, index as u64 + 1),
            turn: false,
            counters: Counters::new(launch.kernel.opcodes.len(), warps as usize),
            told: 0,
            output: String::new(),
            forced: (0, 0, 0),
        }
    }

    /// Threads of the cluster that have not exited.
    pub fn live_threads(&self) -> u32 {
        self.ctas.iter().map(|c| c.live_threads).sum()
    }

    pub fn warps_per_cta(&self) -> usize {
        self.warps[0].len()
    }

    /// When an operation issued now completes.
    pub fn due(&mut self) -> u64 {
        self.time + 1 + self.rng.below(MAX_DELAY)
    }

    /// Whether global accesses whose order matters may happen now.
    pub fn may_touch_global(&self) -> bool {
        self.turn || self.launch.solo
    }

    fn ready(&self, cta: usize, warp: &Warp, group: &Group) -> bool {
        match &group.wait {
            Wait::No => true,
            Wait::Poll(progress) => group.forced || self.progress != *progress,
            Wait::Named { id, generation } => self.ctas[cta].barriers[*id as usize].generation > *generation,
            Wait::Cluster(generation) => self.barrier.generation > *generation,
            Wait::Mbarrier { rank, offset, parity } => {
                group.forced
                    || self.ctas[*rank as usize]
                        .mbarriers
                        .get(offset)
                        .is_none_or(|b| b.state.test_parity(*parity))
            }
            Wait::Lanes(members) => {
                let same = |g: &&Group| g.pc == group.pc && g.wait == group.wait;
                let present = warp.groups.iter().filter(same).fold(0, |m, g| m | g.mask);
                members & warp.live & !present == 0
            }
            Wait::Groups { kind, n } => {
                let read = *kind == GroupKind::BulkRead;
                let done = |op: OpId| self.ops.get(&op).is_none_or(|s| s.done || read && s.read);
                warp.async_groups.must_finish(*kind, group.mask, *n).into_iter().all(done)
            }
            Wait::Tmem(progress) | Wait::Registers(progress) => self.progress != *progress,
            Wait::Grid => self.may_touch_global(),
        }
    }

    /// A random group that can run.
    fn pick(&mut self) -> Option<(usize, usize, usize)> {
        let per_cta = self.warps_per_cta();
        let total = self.ctas.len() * per_cta;
        let start = self.rng.below(total as u64) as usize;
        for i in 0..total {
            let (c, w) = ((start + i) % total / per_cta, (start + i) % total % per_cta);
            let Some(warp) = &self.warps[c][w] else { continue };
            let n = warp.groups.len();
            if n == 0 {
                continue;
            }
            let first = if n > 1 { (start + self.time as usize) % n } else { 0 };
            for k in 0..n {
                let g = (first + k) % n;
                if self.ready(c, warp, &warp.groups[g]) {
                    return Some((c, w, g));
                }
            }
        }
        None
    }

    /// Runs until done, stuck, or about `budget` instructions later.
    pub fn run(&mut self, budget: u64) -> Result<Status, Box<Trap>> {
        let end = self.time + budget;
        loop {
            while let Some((agent, job)) = self.engine.pop(self.time) {
                self.progress += 1;
                self.states.forget();
                job(self, &agent).map_err(|fault| self.trap_async(fault, &agent))?;
            }
            let issued = self.counters.tensor_ops.iter().sum();
            if issued != self.told {
                self.launch.progress.add_tensor_operations(issued - self.told);
                self.told = issued;
            }
            if self.time >= end || self.launch.progress.is_stopped() {
                return Ok(Status::Running);
            }
            if let Some((c, w, g)) = self.pick() {
                let slice = 1 + self.rng.below(MAX_SLICE);
                self.slice(c, w, g, slice)?;
                if self.states.len() > MAX_STATES {
                    self.compact();
                }
            } else if let Some(due) = self.engine.next_due() {
                self.time = self.time.max(due);
            } else if self.live_threads() == 0 {
                return Ok(Status::Done);
            } else if self.waits_for_turn() {
                return Ok(Status::NeedsTurn);
            } else if !self.push_on() {
                return Ok(Status::Stuck);
            }
        }
    }

    fn compact(&mut self) {
        let shadows = self.ctas.iter_mut().flat_map(|c| [&mut c.shared.shadow, &mut c.tmem.shadow]);
        self.states.compact(shadows.chain(self.pages.words()));
    }

    fn groups(&self) -> impl Iterator<Item = (usize, &Warp, &Group)> {
        self.warps.iter().enumerate().flat_map(|(c, warps)| {
            warps.iter().flatten().flat_map(move |w| w.groups.iter().map(move |g| (c, &**w, g)))
        })
    }

    fn waits_for_turn(&self) -> bool {
        !self.ordered.is_empty() || self.groups().any(|(_, _, g)| g.wait == Wait::Grid)
    }

    /// Nothing can run: lets early lanes through, then answers polls. False if that has been tried in vain.
    fn push_on(&mut self) -> bool {
        for warp in self.warps.iter_mut().flatten().flatten() {
            if warp.release_waiting() {
                return true;
            }
        }
        if self.forced.0 != self.progress {
            self.forced = (self.progress, 0, 0);
        }
        self.forced.1 += 1;
        if self.forced.1 > PATIENCE {
            let registers = self.registers();
            if registers == self.forced.2 || self.forced.1 > MOST_POLLS {
                return false;
            }
            self.forced.2 = registers;
            self.time += IDLE_ROUND;
        }
        let mut any = false;
        for group in self.warps.iter_mut().flatten().flatten().flat_map(|w| &mut w.groups) {
            if matches!(group.wait, Wait::Poll(_) | Wait::Mbarrier { .. }) {
                group.forced = true;
                any = true;
            }
        }
        any
    }

    /// A hash of all registers.
    pub fn registers(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.warps.iter().flatten().flatten().for_each(|warp| warp.regs.hash(&mut hasher));
        hasher.finish()
    }

    /// Executes what waits for the cluster's turn at global memory: one instruction of every group that does.
    pub fn take_turn(&mut self) -> Result<(), Box<Trap>> {
        self.turn = true;
        let mut result = self.engine_turn();
        for c in 0..self.ctas.len() {
            for w in 0..self.warps[c].len() {
                let waiting = |warp: &Option<Box<Warp>>| {
                    warp.iter().flat_map(|w| &w.groups).filter(|g| g.wait == Wait::Grid).count()
                };
                for _ in 0..waiting(&self.warps[c][w]) {
                    let groups = self.warps[c][w].as_ref().map(|w| &w.groups);
                    let next = groups.and_then(|g| g.iter().position(|g| g.wait == Wait::Grid));
                    if let (Ok(()), Some(g)) = (&result, next) {
                        result = self.slice(c, w, g, 1);
                    }
                }
            }
        }
        self.turn = false;
        result
    }

    /// Carries out operations in flight that waited for the turn.
    fn engine_turn(&mut self) -> Result<(), Box<Trap>> {
        for (agent, job) in std::mem::take(&mut self.ordered) {
            self.progress += 1;
            self.states.forget();
            job(self, &agent).map_err(|fault| self.trap_async(fault, &agent))?;
        }
        Ok(())
    }

    /// The trap that says who waits for what.
    pub fn deadlock(&self) -> Box<Trap> {
        let mut groups: Vec<_> = self.groups().collect();
        groups.sort_by_key(|(c, w, g)| (*c, w.index, g.pc));
        let shown = 8;
        let more = groups.len().saturating_sub(shown);
        let mut message = "no thread of the cluster can go on".to_string();
        if more != 0 {
            message += &format!(" ({more} more groups of lanes wait as well)");
        }
        let party = |(c, w, g): (usize, &Warp, &Group)| {
            Party::new(self.describe_wait(c, w, g), g.pc).of((self.ctas[c].id, Some(w.index)))
        };
        let fault = groups
            .into_iter()
            .take(shown)
            .map(party)
            .fold(Fault::new(Check::Deadlock, message), Fault::party);
        fault.trap(self.launch.kernel, Spot::default())
    }

    fn describe_wait(&self, cta: usize, warp: &Warp, group: &Group) -> String {
        match &group.wait {
            Wait::No => "spins without effect".into(),
            Wait::Poll(_) => "polls memory".into(),
            Wait::Named { id, .. } => {
                let b = &self.ctas[cta].barriers[*id as usize];
                let need = b.expected.unwrap_or(self.ctas[cta].live_threads);
                format!("waits at barrier {id}, where {} of {need} threads have arrived", b.arrived)
            }
            Wait::Cluster(_) => format!(
                "waits at the cluster barrier, where {} of {} threads have arrived",
                self.barrier.arrived,
                self.live_threads()
            ),
            Wait::Mbarrier { rank, offset, parity } => {
                match self.ctas[*rank as usize].mbarriers.get(offset) {
                    None => format!("waits for an mbarrier at {offset:#x} that is gone"),
                    Some(b) => format!(
                        "waits for parity {parity} of the mbarrier at {offset:#x} of rank {rank}: phase {}, {} of {} arrivals pending, tx-count {}",
                        b.state.phase, b.state.pending, b.state.expected, b.state.tx_count
                    ),
                }
            }
            Wait::Lanes(members) => format!(
                "lanes {:#010x} wait for lanes {:#010x} at this warp-synchronous instruction",
                group.mask,
                members & warp.live & !group.mask
            ),
            Wait::Groups { kind: GroupKind::Wgmma, .. } => {
                match self.ctas[cta].warpgroups[warp.index as usize / 4].open.front() {
                    Some((_, shares)) => format!(
                        "waits for a wgmma.mma_async that {} of the 4 warps of the warpgroup have executed",
                        shares.len()
                    ),
                    None => "waits for matrix operations".into(),
                }
            }
            Wait::Groups { .. } => "waits for asynchronous operations".into(),
            Wait::Tmem(_) => {
                format!("waits for free tensor memory; allocated: {}", self.ctas[cta].tmem.describe())
            }
            Wait::Registers(_) => format!(
                "waits for registers: setmaxnreg has left {} of the CTA unused",
                self.ctas[cta].spare_registers
            ),
            Wait::Grid => "waits for its turn at global memory".into(),
        }
    }
}

impl Launch<'_> {
    /// What the special registers of a warp read.
    fn ids(&self, cta: [u32; 3], rank: u32, warp: u32) -> Ids {
        let [bx, by, _] = self.block;
        let thread = |i: usize| warp * 32 + i as u32;
        Ids {
            tid: [
                std::array::from_fn(|i| thread(i) % bx),
                std::array::from_fn(|i| thread(i) / bx % by),
                std::array::from_fn(|i| thread(i) / (bx * by)),
            ],
            ntid: self.block,
            ctaid: cta,
            nctaid: self.grid,
            cluster: self.cluster,
            rank,
            warp,
            linear_cta: cta[0] + self.grid[0] * (cta[1] + self.grid[1] * cta[2]),
            sm_count: self.config.card.data().sm_count,
            dynamic_shared: self.dynamic_shared,
            total_shared: self.kernel.dynamic_offset + self.dynamic_shared,
            clustered: self.clustered,
            clock: 0,
        }
    }
}
