//! Synchronization through memory: what strong writes publish and strong reads learn.
//!
//! A release (or a fence before a relaxed write) leaves the writer's knowledge at the address; a read that
//! returns the value learns it, at once for an acquire and at the next fence for a relaxed read (PTX ISA "Release
//! and Acquire Patterns"). Scopes narrower than the distance between the two threads do not synchronize.

use super::*;
use crate::check::order::View;
use crate::check::outside::Outside;

/// What a strong write has published at an address.
#[derive(Debug, Clone)]
pub struct Release {
    /// Cluster of the writer.
    pub cluster: u32,
    /// Its CTA (rank).
    pub cta: u32,
    /// How far it reaches.
    pub scope: Scope,
    /// What a reader of the cluster learns.
    pub view: Arc<View>,
    /// What a reader of another cluster learns, where there can be one.
    pub told: Option<Arc<Outside>>,
}

impl Release {
    /// Whether a reader of another cluster learns nothing from `old` that this one does not say.
    fn replaces(&self, old: &Release) -> bool {
        let (Some(new), Some(told)) = (&self.told, &old.told) else { return false };
        old.scope <= self.scope && old.cluster != self.cluster && new.covers(told)
    }
}

impl Cx<'_, '_> {
    /// What a strong write passes on, not settled: everything for a release, what the last fence covered otherwise. Who
    /// observes the write comes after it, whatever it carries; that is said where nothing else was done since what it carries.
    fn publishes(&mut self, order: Ordering) -> Option<(Scope, Arc<View>)> {
        let alone = self.g.carried.quiet || order.release;
        let mut passed = match order.release {
            true => Some((order.scope, self.w.so_far(self.g, self.m))),
            false => self.g.carried.fenced.clone(),
        };
        if let Some((_, view)) = passed.as_mut().filter(|_| alone) {
            self.w.add_present(self.g, self.m, Arc::make_mut(view));
        }
        passed
    }

    /// After a strong write: later actions are not part of what it passed on.
    pub fn released(&mut self) {
        self.w.clock += 1;
    }

    /// Publishes what a strong write of the lanes at these places carries. A plain store starts a new release sequence, a
    /// read-modify-write goes on with the old one.
    pub fn release_at(&mut self, places: &[Place], order: Ordering, modify: bool) {
        if !self.cl.launch.config.checks.race {
            return;
        }
        let cluster = self.cl.index;
        let global = !self.cl.launch.solo && places.iter().any(|p| matches!(p, Place::Global(_)));
        let passed = self.publishes(order);
        let of = |lanes: u32| {
            let (scope, mut view) = passed.clone()?;
            Arc::make_mut(&mut view).settle(lanes);
            let told = global.then(|| view.told(cluster));
            Some(Release { cluster, cta: self.cta as u32, scope: scope.min(order.scope), told, view })
        };
        let mut release = of(self.m);
        for (p, lane) in places.iter().zip(lanes(self.m)) {
            if self.w.apart && self.m.count_ones() > 1 {
                release = of(1 << lane);
            }
            let update = |list: &mut Vec<Release>| {
                if !modify {
                    list.clear();
                }
                if let Some(release) = &release {
                    list.retain(|old| !release.replaces(old));
                    match list.iter_mut().find(|r| {
                        (r.cluster, r.cta, r.scope) == (release.cluster, release.cta, release.scope)
                    }) {
                        Some(old) => {
                            Arc::make_mut(&mut old.view).join(&release.view);
                            old.told = global.then(|| old.view.told(cluster));
                        }
                        None => list.push(release.clone()),
                    }
                }
            };
            match *p {
                Place::Shared { rank, offset } => {
                    update(self.cl.shared_releases.entry((rank, offset)).or_default());
                }
                Place::Global(a) => {
                    if let Ok(mut map) = self.cl.launch.releases.lock() {
                        update(map.entry(a).or_default());
                    }
                }
                _ => {}
            }
        }
    }

    /// Learns what the values that a strong read returned carry: now for an acquire, at the next fence otherwise.
    pub fn acquire_at(&mut self, places: &[Place], order: Ordering) {
        if !self.cl.launch.config.checks.race {
            return;
        }
        let (cluster, cta) = (self.cl.index, self.cta as u32);
        let mut learned: Vec<(u32, Arc<View>)> = Vec::new();
        let known = self.g.known.of(self.first_lane() as usize).outside().cloned();
        let mut take = |lanes: u32, list: &[Release]| {
            for r in list {
                let needed = match (r.cluster == cluster, r.cta == cta) {
                    (true, true) => Scope::Cta,
                    (true, false) => Scope::Cluster,
                    _ => Scope::Gpu,
                };
                if r.scope >= needed && order.scope >= needed {
                    match &r.told {
                        Some(told) if r.cluster != cluster => {
                            if known.as_ref().is_none_or(|known| !known.covers(told)) {
                                learned.push((lanes, Arc::new(View::heard(told, cluster))));
                            }
                        }
                        _ => learned.push((lanes, r.view.clone())),
                    }
                }
            }
        };
        let alike = places.iter().all(|p| *p == places[0]);
        for (p, lane) in places.iter().zip(lanes(self.m)).take(if alike { 1 } else { places.len() }) {
            let lanes = if alike { self.m } else { 1 << lane };
            match *p {
                Place::Shared { rank, offset } => {
                    if let Some(list) = self.cl.shared_releases.get(&(rank, offset)) {
                        take(lanes, list);
                    }
                }
                Place::Global(a) => {
                    if let Ok(map) = self.cl.launch.releases.lock()
                        && let Some(list) = map.get(&a)
                    {
                        take(lanes, list);
                    }
                }
                _ => {}
            }
        }
        for (lanes, view) in learned {
            self.learn(lanes, &view, order.acquire);
        }
    }

    /// Learns what a wait or a strong read of these lanes has seen: now if it acquires, at the next fence if it is relaxed.
    pub(super) fn learn(&mut self, lanes: u32, view: &View, acquire: bool) {
        match acquire {
            true => self.g.known.join(lanes, view),
            false => self.g.carried.observe(lanes, view),
        }
    }
}
