//! A grid: clusters run on several threads, with results that depend on the seed only.
//!
//! Clusters run in rounds. Within a round each runs by itself, in parallel; plain accesses to global memory take
//! effect at once, which a kernel without data races cannot notice. Accesses whose order can be noticed
//! (atomics, reductions, volatile, relaxed, acquire and release accesses) wait for the end of the round, where
//! clusters take turns in order of their index. So no result depends on how fast a host thread was.

use super::cluster::{Cluster, IDLE_ROUND, Status};
use crate::check::cross::Finished;
use crate::check::launches::Launches;
use crate::config::Config;
use crate::exec::sync::Release;
use crate::memory::SHARED_RESERVED;
use crate::memory::global::Global;
use crate::program::Kernel;
use crate::progress::Progress;
use crate::report::Counters;
use crate::trap::{Check, Fault, Spot, Trap};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Everything that is fixed during a launch.
pub struct Launch<'a> {
    pub kernel: &'a Kernel,
    /// Bytes of its parameters.
    pub params: &'a [u8],
    /// CTAs.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub block: [u32; 3],
    /// CTAs of a cluster.
    pub cluster: [u32; 3],
    /// Whether the launch asked for clusters.
    pub clustered: bool,
    /// Dynamic shared memory, bytes.
    pub dynamic_shared: u32,
    /// Global memory.
    pub global: &'a Global,
    /// Constant memory.
    pub constant: &'a [u8],
    /// Settings.
    pub config: &'a Config,
    /// The grid is a single cluster: nothing else can notice the order of its accesses.
    pub solo: bool,
    /// It may have started before launches of these ended, if there are any.
    pub overlaps: &'a Launches,
    /// Who waits for it looks here.
    pub progress: &'a Progress,
    /// What strong writes to global memory have published, by address. Used only by the cluster whose turn it
    /// is, so the lock is never contended.
    pub releases: Mutex<BTreeMap<u64, Vec<Release>>>,
}

/// Instructions a cluster may execute in one round.
const ROUND: u64 = 20_000;
/// Rounds without any progress after which the grid is taken to be stuck, if registers are what they were so many rounds before.
const PATIENCE: u32 = 64;
/// How often registers may differ then.
const MOST_CHANGES: u32 = 1 << 6;

/// Runs a grid to its end. Returns what was counted and printed, and what it did to global memory.
pub fn run(launch: &Launch<'_>) -> Result<(Counters, String, Finished), Box<Trap>> {
    let size: u32 = launch.cluster.iter().product();
    let total = launch.grid.iter().product::<u32>() / size;
    let capacity = (launch.resident_limit() / size).max(1);
    let mut limit = (launch.config.resident_ctas / size).clamp(1, capacity);
    launch.progress.begin(total * size);
    let mut next = 0;
    let mut resident: Vec<Cluster<'_>> = Vec::new();
    let mut counters = Counters::default();
    let mut output = String::new();
    let mut finished = Finished::default();
    let mut idle = 0;
    let mut last_progress = 0;
    let mut changes = (0, 0);
    while next < total || !resident.is_empty() {
        while next < total && (resident.len() as u32) < limit {
            resident.push(Cluster::new(launch, next));
            next += 1;
        }
        let statuses: Vec<_> = resident.par_iter_mut().map(|c| c.run(ROUND)).collect();
        let mut polling = true;
        let mut keep = Vec::with_capacity(resident.len());
        for (mut cluster, status) in resident.drain(..).zip(statuses) {
            match status? {
                Status::Done => {
                    counters.add(&cluster.counters);
                    output.push_str(&cluster.output);
                    if launch.config.checks.race {
                        finished.add(cluster);
                    }
                    polling = false;
                    continue;
                }
                // Whatever this cluster waits for is its own business: nobody else can help.
                Status::Stuck => return Err(cluster.deadlock()),
                Status::Running => polling = false,
                Status::NeedsTurn => {}
            }
            cluster.take_turn()?;
            keep.push(cluster);
        }
        resident = keep;
        if launch.progress.is_stopped() {
            // Races of what has finished are races whatever the rest would have done.
            finished.check(launch)?;
            let (finished, all) = launch.progress.ctas();
            let message = format!("the host stopped the launch when {finished} of {all} CTAs had finished");
            return Err(Fault::new(Check::Stopped, message).trap(launch.kernel, Spot::default()));
        }
        let progress = resident.iter().map(|c| c.progress).sum::<u64>();
        idle = if polling && progress == last_progress { idle + 1 } else { 0 };
        changes = if progress == last_progress { changes } else { (0, 0) };
        last_progress = progress;
        if idle > PATIENCE {
            // They poll global memory, perhaps for clusters that have not started: the card would hold more.
            if next == total || limit == capacity {
                let registers = resident.iter().fold(0u64, |sum, c| sum.rotate_left(1) ^ c.registers());
                if registers == changes.1 || changes.0 == MOST_CHANGES {
                    return Err(resident[0].deadlock());
                }
                (changes, idle) = ((changes.0 + 1, registers), 0);
                resident.iter_mut().for_each(|c| c.time += IDLE_ROUND);
                continue;
            }
            limit = (limit * 2).min(capacity);
            idle = 0;
        }
    }
    counters.unique_bytes = finished.unique_bytes();
    finished.check(launch)?;
    launch.overlaps.check(launch, &finished)?;
    Ok((counters, output, finished))
}

/// How many a shape holds.
pub fn volume(shape: [u32; 3]) -> u64 {
    shape.iter().fold(1, |n, side| u64::saturating_mul(n, (*side).into()))
}

impl<'a> Launch<'a> {
    /// CTAs the card holds at once.
    fn resident_limit(&self) -> u32 {
        let card = self.config.card.data();
        let shared = self.kernel.dynamic_offset + self.dynamic_shared + crate::memory::SHARED_RESERVED;
        let threads = self.block.iter().product::<u32>().max(1);
        let per_sm = (card.shared_per_sm / shared).min(2048 / threads).clamp(1, 32);
        per_sm * card.sm_count
    }

    /// Registers of a thread at entry, if ptxas knows them: from `.maxnreg`, or from `.minnctapersm` with the
    /// number of threads (then it takes what the file holds, in steps of 8, for threads rounded up to warpgroups).
    pub fn entry_registers(&self) -> Option<u32> {
        let kernel = self.kernel;
        match (kernel.maxnreg, kernel.reqntid.or(kernel.maxntid), kernel.minnctapersm) {
            (Some(n), ..) => Some(n),
            (None, Some(threads), Some(ctas @ 1..)) => {
                let threads = volume(threads).clamp(1, 1024).next_multiple_of(128);
                Some((65536 / threads / u64::from(ctas) / 8 * 8).min(256) as u32)
            }
            _ => None,
        }
    }

    /// A shared address as the kernel's author knows it.
    pub fn describe_shared(&self, rank: u32, offset: u32) -> String {
        let mut text = if self.clustered {
            format!("shared {offset:#x} of cluster rank {rank}")
        } else {
            format!("shared {offset:#x}")
        };
        let at = offset.wrapping_sub(SHARED_RESERVED);
        let variable =
            self.kernel.shared_variables.iter().find(|(_, start, n)| (*start..start + n).contains(&at));
        let dynamic = self.kernel.dynamic_offset;
        if let Some((name, start, _)) = variable {
            text += &format!(" (`{name}` + {})", at - start);
        } else if at >= dynamic && at < dynamic + self.dynamic_shared {
            text += &format!(" (dynamic shared memory + {})", at - dynamic);
        }
        text
    }
}
