//! Races between clusters on global memory, found when the grid has ended.
//!
//! Two accesses of different clusters, one of them a write, are a race unless one cluster ever learned of the
//! other's access (through an acquire of what was released after it). "Ever" rather than "before": a cluster
//! that synchronizes later than it should is not noticed here, one that does not synchronize at all is.

use super::order::{Places, View};
use super::pages::PAGE;
use super::shadow::{Access, StateId, States, WRITTEN};
use crate::machine::cluster::Cluster;
use crate::machine::grid::Launch;
use crate::trap::{Check, Trap, TrapParty};
use std::collections::BTreeMap;

struct Used {
    index: u32,
    pages: BTreeMap<u64, Vec<StateId>>,
    states: States,
    view: View,
    places: Places,
}

/// What the clusters that have ended did to global memory.
#[derive(Default)]
pub struct Finished(Vec<Used>);

impl Finished {
    /// Takes over a cluster's record.
    pub fn add(&mut self, cluster: Cluster<'_>) {
        let mut pages = cluster.pages;
        let mut states = cluster.states;
        states.compact(pages.words());
        let places = cluster.places;
        self.0.push(Used {
            index: cluster.index,
            pages: pages.into_compressed(),
            states,
            view: cluster.last_view,
            places,
        });
    }

    /// Bytes of global memory that any of the clusters touched, in words of 4.
    pub fn unique_bytes(&self) -> u64 {
        let mut pages: BTreeMap<u64, Vec<bool>> = BTreeMap::new();
        for used in &self.0 {
            for (page, words) in &used.pages {
                let touched = pages.entry(*page).or_insert_with(|| vec![false; PAGE as usize / 4]);
                for (i, t) in touched.iter_mut().enumerate() {
                    *t |= words[i.min(words.len() - 1)] != WRITTEN;
                }
            }
        }
        pages.values().flatten().filter(|t| **t).count() as u64 * 4
    }

    /// Reports the race at the lowest address, if there is one.
    ///
    /// # Errors
    /// The trap.
    pub fn check(mut self, launch: &Launch<'_>) -> Result<(), Box<Trap>> {
        self.0.sort_by_key(|u| u.index);
        let mut users: BTreeMap<u64, Vec<(usize, bool)>> = BTreeMap::new();
        for (i, used) in self.0.iter().enumerate() {
            let writes = used.states.writers();
            for (&page, words) in &used.pages {
                let writer = words.iter().any(|w| writes[*w as usize]);
                users.entry(page).or_default().push((i, writer));
            }
        }
        for (page, users) in users {
            for (n, &(a, a_writes)) in users.iter().enumerate() {
                for &(b, b_writes) in &users[n + 1..] {
                    if (a_writes || b_writes)
                        && let Some((address, x, y)) = conflict(page, &self.0[a], &self.0[b])
                    {
                        return Err(Box::new(report(launch, address, (&self.0[a], x), (&self.0[b], y))));
                    }
                }
            }
        }
        Ok(())
    }
}

fn conflict(page: u64, a: &Used, b: &Used) -> Option<(u64, Access, Access)> {
    let (pa, pb) = (&a.pages[&page], &b.pages[&page]);
    let mut clear = Vec::new();
    for i in 0..pa.len().max(pb.len()) {
        let (x, y) = (pa[i.min(pa.len() - 1)], pb[i.min(pb.len() - 1)]);
        if x == WRITTEN || y == WRITTEN || clear.contains(&(x, y)) {
            continue;
        }
        for (mx, ax) in a.states.remembered(x) {
            for (my, ay) in b.states.remembered(y) {
                let conflicting = (ax.kind.write || ay.kind.write) && !(ax.kind.strong && ay.kind.strong);
                let ordered = a.view.knows_foreign(b.index, ay.actor, ay.clock)
                    || b.view.knows_foreign(a.index, ax.actor, ax.clock);
                if mx & my != 0 && conflicting && !ordered {
                    let byte = (mx & my).trailing_zeros() as u64;
                    return Some((page * PAGE + i as u64 * 4 + byte, ax, ay));
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

fn report(launch: &Launch<'_>, address: u64, a: (&Used, Access), b: (&Used, Access)) -> Trap {
    let site = |pc: u32| launch.kernel.sites.get(pc as usize).cloned();
    let (cta, warp) = b.0.places.of(b.1.actor);
    let (other_cta, other_warp) = a.0.places.of(a.1.actor);
    let message = format!(
        "{} of global memory is not ordered with a {} by another cluster",
        b.1.kind.noun(),
        a.1.kind.noun()
    );
    Trap {
        site: site(b.1.pc),
        cta: Some(cta),
        warp,
        address: Some(format!("global {address:#x}")),
        others: vec![TrapParty {
            role: a.1.kind.noun().to_string(),
            site: site(a.1.pc),
            cta: Some(other_cta),
            warp: other_warp,
        }],
        help: Some("order them with a release after the one and an acquire before the other, at .gpu scope"),
        ..launch.trap(Check::Race, message)
    }
}
