//! Races between clusters, and between launches, on global memory: found when the grid has ended.
//!
//! Two accesses of different clusters, one of them a write, are a race unless one of them knew the other when it was made
//! (through an acquire of what was released after it). Whatever the interleaving was, it is found.

use super::order::Places;
use super::outside::Eras;
use super::pages::{PAGE, Run};
use super::shadow::{Access, StateId, States};
use crate::decode::operand::Scope;
use crate::machine::cluster::Cluster;
use crate::machine::grid::Launch;
use crate::memory::Place;
use crate::trap::{Check, Fault, Party, Spot, Trap};
use std::collections::BTreeMap;

/// What a cluster did to global memory.
#[derive(Debug)]
pub struct Used {
    index: u32,
    /// Sorted.
    runs: Vec<Run>,
    states: States,
    /// What it knew of the rest of the grid.
    pub eras: Eras,
    places: Places,
}

impl Used {
    fn on_page(&self, page: u64) -> &[Run] {
        let from = &self.runs[self.runs.partition_point(|run| run.page < page)..];
        &from[..from.partition_point(|run| run.page == page)]
    }
}

/// What the clusters that have ended did to global memory.
#[derive(Debug, Default)]
pub struct Finished {
    clusters: Vec<Used>,
    /// How they met with the launches around theirs.
    pub dependency: Dependency,
}

/// How a grid met with the launches around it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Dependency {
    /// A thread executed `griddepcontrol.launch_dependents`.
    pub triggered: bool,
    /// A thread executed `griddepcontrol.wait`.
    pub waited: bool,
    /// Before the next launch may start, a `griddepcontrol.wait` of this one has passed.
    pub late: bool,
}

/// Users of a page, and whether they write.
type Users = BTreeMap<u64, Vec<(usize, bool)>>;

impl Finished {
    /// Takes over a cluster's record.
    pub fn add(&mut self, cluster: Cluster<'_>) {
        for cta in &cluster.ctas {
            let own = cta.dependency;
            self.dependency.triggered |= own.triggered;
            self.dependency.waited |= own.waited;
            self.dependency.late |= if own.triggered { own.late } else { own.waited };
        }
        let mut pages = cluster.pages;
        let mut states = cluster.states;
        states.compact(pages.words());
        let (index, eras, places) = (cluster.index, cluster.eras, cluster.places);
        self.clusters.push(Used { index, runs: pages.into_runs(), states, eras, places });
    }

    /// Bytes of global memory that any of the clusters touched, in words of 4.
    pub fn unique_bytes(&self) -> u64 {
        let mut spans: Vec<(u64, u64)> = Vec::new();
        for run in self.clusters.iter().flat_map(|used| &used.runs) {
            let first = run.page * PAGE / 4;
            spans.push((first + u64::from(run.start), first + u64::from(run.end)));
        }
        spans.sort_unstable();
        let (mut words, mut reached) = (0, 0);
        for (start, end) in spans {
            words += end.saturating_sub(start.max(reached));
            reached = reached.max(end);
        }
        words * 4
    }

    fn users(&self) -> Users {
        let mut users = Users::new();
        for (i, used) in self.clusters.iter().enumerate() {
            let writes = used.states.writers();
            for runs in used.runs.chunk_by(|a, b| a.page == b.page) {
                let writer = runs.iter().any(|run| writes[run.state as usize]);
                users.entry(runs[0].page).or_default().push((i, writer));
            }
        }
        users
    }

    /// Reports the race at the lowest address, if there is one.
    pub fn check(&mut self, launch: &Launch<'_>) -> Result<(), Box<Trap>> {
        self.clusters.sort_by_key(|u| u.index);
        for (page, users) in self.users() {
            for (n, &(i, writes)) in users.iter().enumerate() {
                for &(k, also) in &users[n + 1..] {
                    let (a, b) = (&self.clusters[i], &self.clusters[k]);
                    let wrong = |x: &Access, y: &Access| wrong((a, x), (b, y));
                    if (writes || also)
                        && let Some((address, x, y)) = conflict(page, a, b, |x, y| wrong(x, y).is_some())
                        && let Some(check) = wrong(&x, &y)
                    {
                        return Err(report(launch, check, address, [(a, x), (b, y)]));
                    }
                }
            }
        }
        Ok(())
    }

    /// A conflict of this grid with an earlier one: address, own access, earlier access. `race` says whether two accesses are
    /// one, given the cluster of this grid, its access, and the earlier one.
    pub fn against(
        &self,
        earlier: &Finished,
        race: impl Fn(&Used, &Access, &Access) -> bool,
    ) -> Option<(u64, Placed, Placed)> {
        let theirs = earlier.users();
        for (page, users) in self.users() {
            for &(i, writes) in &users {
                for &(k, also) in theirs.get(&page).map_or(&[][..], |v| v) {
                    let (a, b) = (&self.clusters[i], &earlier.clusters[k]);
                    if (writes || also)
                        && let Some((address, x, y)) = conflict(page, a, b, |x, y| race(a, x, y))
                    {
                        return Some((address, (x, a.places.of(x.actor)), (y, b.places.of(y.actor))));
                    }
                }
            }
        }
        None
    }
}

/// An access, with the CTA and warp that made it.
pub type Placed = (Access, ([u32; 3], Option<u32>));

/// Where runs of two clusters overlap: first word, both states.
fn overlaps<'a>(a: &'a [Run], b: &'a [Run]) -> impl Iterator<Item = (u16, StateId, StateId)> + 'a {
    let (mut i, mut k) = (0, 0);
    std::iter::from_fn(move || {
        loop {
            let (x, y) = (a.get(i)?, b.get(k)?);
            if x.end <= y.end {
                i += 1;
            } else {
                k += 1;
            }
            let start = x.start.max(y.start);
            if start < x.end.min(y.end) {
                return Some((start, x.state, y.state));
            }
        }
    })
}

/// The first byte of a page that both access, one of them with a write, so that `race` holds.
fn conflict(
    page: u64,
    a: &Used,
    b: &Used,
    race: impl Fn(&Access, &Access) -> bool,
) -> Option<(u64, Access, Access)> {
    let mut clear = Vec::new();
    for (i, x, y) in overlaps(a.on_page(page), b.on_page(page)) {
        if clear.contains(&(x, y)) {
            continue;
        }
        for (mx, ax) in a.states.remembered(x) {
            for (my, ay) in b.states.remembered(y) {
                if mx & my != 0 && (ax.kind.write || ay.kind.write) && race(&ax, &ay) {
                    let byte = (mx & my).trailing_zeros() as u64;
                    return Some((page * PAGE + u64::from(i) * 4 + byte, ax, ay));
                }
            }
        }
        clear.push((x, y));
        if clear.len() > 64 {
            clear.clear();
        }
    }
    None
}

/// What is wrong between conflicting accesses of two clusters.
fn wrong(a: (&Used, &Access), b: (&Used, &Access)) -> Option<Check> {
    if a.1.kind.constant || b.1.kind.constant {
        return Some(Check::Race);
    }
    for ((first, x), (second, y)) in [(a, b), (b, a)] {
        if let Some(known) = second.eras.get(y.era)
            && known.knows(first.index, x.actor, x.clock)
        {
            let owes = x.kind.write && !x.kind.proxy && y.kind.proxy;
            let fenced = known.knows_fenced(first.index, x.actor, x.clock);
            return (owes && !fenced).then_some(Check::Proxy);
        }
    }
    (!a.1.both_strong(b.1, Scope::Gpu)).then_some(Check::Race)
}

fn report(launch: &Launch<'_>, check: Check, address: u64, mut parties: [(&Used, Access); 2]) -> Box<Trap> {
    let (message, help) = match check {
        Check::Proxy => {
            parties.sort_by_key(|(_, access)| access.kind.proxy);
            (
                "may not see a",
                "put fence.proxy.async of global memory after the write, before the synchronization that orders the two",
            )
        }
        _ => (
            "is not ordered with a",
            "order them with a release after the one and an acquire before the other, at .gpu scope",
        ),
    };
    let [(a, x), (b, y)] = parties;
    let (noun, other) = (y.kind.noun(), x.kind.noun());
    Fault::new(check, format!("{noun} of global memory {message} {other} by another cluster"))
        .at(Place::Global(address))
        .party(Party::new(other, x.pc).of(a.places.of(x.actor)))
        .help(help)
        .trap(launch.kernel, Spot::of(y.pc, b.places.of(y.actor)))
}
