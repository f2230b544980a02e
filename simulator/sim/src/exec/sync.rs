//! Synchronization through memory: what strong writes publish and strong reads learn.
//!
//! A release (or a fence before a relaxed write) leaves the writer's knowledge at the address; a read that
//! returns the value learns it, at once for an acquire and at the next fence for a relaxed read (PTX ISA "Release
//! and Acquire Patterns"). Scopes narrower than the distance between the two threads do not synchronize.

use super::Cx;
use crate::check::order::View;
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
    /// What a reader learns.
    pub view: Arc<View>,
}

impl Cx<'_, '_> {
    /// What a strong write passes on: everything for a release, what the last fence covered otherwise.
    fn publishes(&mut self, order: Ordering) -> Option<(Scope, Arc<View>)> {
        if order.release {
            Some((order.scope, self.g.publish(self.m)))
        } else {
            self.g.carried.fenced.clone()
        }
    }

    /// Publishes what a strong write at these places carries. A plain store starts a new release sequence, a
    /// read-modify-write goes on with the old one.
    pub fn release_at(&mut self, places: &[Place], order: Ordering, modify: bool) {
        if !self.cl.launch.config.checks.race {
            return;
        }
        let view = self.publishes(order);
        let release = view.map(|(scope, view)| Release {
            cluster: self.cl.index,
            cta: self.cta as u32,
            scope: scope.min(order.scope),
            view,
        });
        for p in places {
            let update = |list: &mut Vec<Release>| {
                if !modify {
                    list.clear();
                }
                if let Some(release) = &release {
                    match list.iter_mut().find(|r| {
                        (r.cluster, r.cta, r.scope) == (release.cluster, release.cta, release.scope)
                    }) {
                        Some(old) => Arc::make_mut(&mut old.view).join(&release.view),
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
        let mut learned: Vec<View> = Vec::new();
        let mut take = |list: &[Release]| {
            for r in list {
                let needed = match (r.cluster == cluster, r.cta == cta) {
                    (true, true) => Scope::Cta,
                    (true, false) => Scope::Cluster,
                    _ => Scope::Gpu,
                };
                if r.scope >= needed && order.scope >= needed {
                    learned.push(r.view.exported(r.cluster, cluster));
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
