//! Synchronization through memory: what strong writes publish and strong reads learn.
//!
//! A release (or a fence before a relaxed write) leaves the writer's knowledge at the address; a read that
//! returns the value learns it, at once for an acquire and at the next fence for a relaxed read (PTX ISA "Release
//! and Acquire Patterns"). Scopes narrower than the distance between the two threads do not synchronize.

use super::Cx;
use crate::check::order::View;
use crate::check::outside::Outside;
use crate::decode::operand::{Ordering, Scope};
use crate::memory::Place;
use std::sync::Arc;

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
    /// What a strong write passes on: everything for a release, what the last fence covered otherwise. Who observes the
    /// write comes after it, whatever it carries; that is said where nothing else was done since what it carries.
    fn publishes(&mut self, order: Ordering) -> Option<(Scope, Arc<View>)> {
        let alone = self.g.carried.quiet || order.release;
        let mut passed = match order.release {
            true => Some((order.scope, self.g.publish(self.m))),
            false => self.g.carried.fenced.clone(),
        };
        if let Some((_, view)) = passed.as_mut().filter(|_| alone && self.g.is_whole(self.m)) {
            Arc::make_mut(view).learn(self.g.actor, self.g.clock);
        }
        passed
    }

    /// After a strong write: later actions are not part of what it passed on.
    pub fn released(&mut self) {
        self.g.clock += 1;
    }

    /// Publishes what a strong write at these places carries. A plain store starts a new release sequence, a
    /// read-modify-write goes on with the old one.
    pub fn release_at(&mut self, places: &[Place], order: Ordering, modify: bool) {
        if !self.cl.launch.config.checks.race {
            return;
        }
        let cluster = self.cl.index;
        let global = !self.cl.launch.solo && places.iter().any(|p| matches!(p, Place::Global(_)));
        let release = self.publishes(order).map(|(scope, view)| Release {
            cluster,
            cta: self.cta as u32,
            scope: scope.min(order.scope),
            told: global.then(|| view.told(cluster)),
            view,
        });
        for p in places {
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
        let mut learned: Vec<Arc<View>> = Vec::new();
        let known = self.g.view.outside().cloned();
        let mut take = |list: &[Release]| {
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
                                learned.push(Arc::new(View::heard(told, cluster)));
                            }
                        }
                        _ => learned.push(r.view.clone()),
                    }
                }
            }
        };
        for p in places {
            match *p {
                Place::Shared { rank, offset } => {
                    if let Some(list) = self.cl.shared_releases.get(&(rank, offset)) {
                        take(list);
                    }
                }
                Place::Global(a) => {
                    if let Ok(map) = self.cl.launch.releases.lock()
                        && let Some(list) = map.get(&a)
                    {
                        take(list);
                    }
                }
                _ => {}
            }
        }
        for view in learned {
            self.g.learn(&view, order.acquire);
        }
    }
}
