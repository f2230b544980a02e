//! What the lanes of a group know: one [`View`] for all, or, where strict checks tell lanes apart, one for those that know
//! the same.

use crate::check::order::View;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Lanes and what they know. Every lane of the group is in one entry.
#[derive(Debug, Clone, Default)]
pub struct Known {
    apart: bool,
    list: SmallVec<[(u32, Arc<View>); 1]>,
}

impl Known {
    /// The same for all of `lanes`.
    pub fn new(apart: bool, lanes: u32, view: Arc<View>) -> Known {
        Known { apart, list: smallvec![(lanes, view)] }
    }

    pub fn of(&self, lane: usize) -> Arc<View> {
        let entry = self.list.iter().find(|(lanes, _)| lanes >> lane & 1 != 0).or(self.list.first());
        entry.map(|(_, view)| view.clone()).unwrap_or_default()
    }

    /// What all of these lanes know alike.
    pub fn alike(&self, lanes: u32) -> Option<Arc<View>> {
        let of = |(_, view): &(u32, Arc<View>)| view.clone();
        match self.list.len() {
            1 => self.list.first().map(of),
            _ => self.list.iter().find(|(some, _)| lanes & !some == 0).map(of),
        }
    }

    /// What any of these lanes knows.
    pub fn joined(&self, lanes: u32) -> Arc<View> {
        if let Some(view) = self.alike(lanes) {
            return view;
        }
        let mut all = View::default();
        self.list.iter().filter(|(some, _)| some & lanes != 0).for_each(|(_, view)| all.join(view));
        Arc::new(all)
    }

    pub fn change(&mut self, lanes: u32, f: impl Fn(&mut View)) {
        for i in 0..self.list.len() {
            let (some, view) = &mut self.list[i];
            let other = if self.apart { *some & !lanes } else { 0 };
            if other != 0 && *some & lanes != 0 {
                *some &= lanes;
                let rest = (other, view.clone());
                f(Arc::make_mut(&mut self.list[i].1));
                self.list.push(rest);
            } else if other == 0 {
                f(Arc::make_mut(view));
            }
        }
    }

    /// Lets these lanes learn what another party published.
    pub fn join(&mut self, lanes: u32, other: &View) {
        self.change(lanes, |view| view.join(other));
    }

    /// Lets these lanes know one thing, whatever each knew.
    pub fn unite(&mut self, lanes: u32, view: Arc<View>) {
        self.keep(!lanes);
        self.list.push((lanes, view));
    }

    /// Forgets all other lanes.
    pub fn keep(&mut self, lanes: u32) {
        if self.apart {
            self.list.iter_mut().for_each(|(some, _)| *some &= lanes);
            self.list.retain(|(some, _)| *some != 0);
        }
    }

    /// Adds other lanes.
    pub fn merge(&mut self, other: &Known) {
        for (lanes, theirs) in &other.list {
            let alike = |view: &Arc<View>| !self.apart || Arc::ptr_eq(view, theirs) || view == theirs;
            match self.list.iter_mut().find(|(_, view)| alike(view)) {
                Some((some, view)) => {
                    *some |= lanes;
                    if !self.apart {
                        Arc::make_mut(view).join(theirs);
                    }
                }
                None => self.list.push((*lanes, theirs.clone())),
            }
        }
    }
}
