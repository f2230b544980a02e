//! What a party knows of the rest of the grid, and of launches before it.
//!
//! Knowledge comes in through global memory (a release in one cluster, an acquire in another) and by `griddepcontrol.wait`.
//! It changes seldom, so parties share it, and an access to global memory remembers the number of what its party knew,
//! its [`Era`]: two accesses of different clusters are ordered iff one of them knew the other when it was made.

use super::order::{Actor, join};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Number of an [`Outside`] in its cluster; 0 is nothing.
pub type Era = u32;

/// Clocks of the actors of several clusters. What several parties know alike they share.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Clocks(BTreeMap<u32, Arc<Vec<u32>>>);

fn within(a: &Arc<Vec<u32>>, b: &Arc<Vec<u32>>) -> bool {
    let rest = b.iter().copied().chain(std::iter::repeat(0));
    Arc::ptr_eq(a, b) || a.iter().zip(rest).all(|(a, b)| *a <= b)
}

impl Clocks {
    fn of(&self, cluster: u32) -> &[u32] {
        self.0.get(&cluster).map_or(&[], |seen| seen)
    }

    fn knows(&self, cluster: u32, actor: Actor, clock: u32) -> bool {
        self.of(cluster).get(actor as usize).is_some_and(|&c| clock <= c)
    }

    fn covers(&self, other: &Clocks) -> bool {
        other.0.iter().all(|(cluster, theirs)| self.0.get(cluster).is_some_and(|mine| within(theirs, mine)))
    }

    fn join(&mut self, other: &Clocks) {
        for (cluster, seen) in &other.0 {
            match self.0.get_mut(cluster) {
                Some(old) if within(seen, old) => {}
                Some(old) if !within(old, seen) => join(Arc::make_mut(old), seen),
                _ => drop(self.0.insert(*cluster, seen.clone())),
            }
        }
    }
}

/// Knowledge of other clusters and launches.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outside {
    waited: bool,
    seen: Clocks,
    /// As far as generic writes to global memory are visible to the async proxy.
    fenced: Clocks,
}

impl Outside {
    /// The same, and what actors of `cluster` have published, and fenced for the async proxy.
    #[must_use]
    pub fn with(mut self, cluster: u32, seen: &[u32], fenced: &[u32]) -> Outside {
        self.seen.0.insert(cluster, Arc::new(seen.to_vec()));
        if !fenced.is_empty() {
            self.fenced.0.insert(cluster, Arc::new(fenced.to_vec()));
        }
        self
    }

    /// Whether the launches before this one are known to have ended.
    pub fn has_waited(&self) -> bool {
        self.waited
    }

    /// What is known of the actors of a cluster, and what of that is fenced.
    pub fn of(&self, cluster: u32) -> [&[u32]; 2] {
        [self.seen.of(cluster), self.fenced.of(cluster)]
    }

    /// Whether an action of a cluster happened before.
    pub fn knows(&self, cluster: u32, actor: Actor, clock: u32) -> bool {
        self.seen.knows(cluster, actor, clock)
    }

    /// Whether a generic write of a cluster is visible to the async proxy.
    pub fn knows_fenced(&self, cluster: u32, actor: Actor, clock: u32) -> bool {
        self.fenced.knows(cluster, actor, clock)
    }

    /// `fence.proxy.async` of global memory.
    pub fn fence_proxy(this: &mut Arc<Outside>) {
        if !this.fenced.covers(&this.seen) {
            let own = Arc::make_mut(this);
            own.fenced.join(&own.seen);
        }
    }

    /// Whether nothing of `other` is news.
    pub fn covers(&self, other: &Outside) -> bool {
        let all = |mine: &Clocks, theirs| mine.covers(theirs);
        std::ptr::eq(self, other)
            || self.waited >= other.waited && all(&self.seen, &other.seen) && all(&self.fenced, &other.fenced)
    }

    /// Adds what `theirs` knows to `mine`. One that covers the other is taken as it is, so that equal knowledge is shared.
    pub fn join(mine: &mut Option<Arc<Outside>>, theirs: &Arc<Outside>) {
        match mine {
            Some(own) if own.covers(theirs) => {}
            Some(own) if !theirs.covers(own) => {
                let own = Arc::make_mut(own);
                own.waited |= theirs.waited;
                own.seen.join(&theirs.seen);
                own.fenced.join(&theirs.fenced);
            }
            _ => *mine = Some(theirs.clone()),
        }
    }
}

/// Everything that parties of a cluster knew when they accessed global memory.
#[derive(Debug, Default)]
pub struct Eras {
    known: Vec<Arc<Outside>>,
    /// By address: what is numbered is kept, so no address comes again.
    numbers: HashMap<usize, Era>,
    last: (usize, Era),
    waited: Option<Arc<Outside>>,
}

impl Eras {
    /// The number of this knowledge.
    #[inline]
    pub fn number(&mut self, outside: Option<&Arc<Outside>>) -> Era {
        let Some(outside) = outside else { return 0 };
        let address = Arc::as_ptr(outside) as usize;
        if self.last.0 != address {
            let known = &mut self.known;
            let number = *self.numbers.entry(address).or_insert_with(|| {
                known.push(outside.clone());
                known.len() as Era
            });
            self.last = (address, number);
        }
        self.last.1
    }

    /// That `griddepcontrol.wait` has passed, and no more.
    pub fn waited(&mut self) -> Arc<Outside> {
        let waited = || Arc::new(Outside { waited: true, ..Outside::default() });
        self.waited.get_or_insert_with(waited).clone()
    }

    pub fn get(&self, era: Era) -> Option<&Outside> {
        self.known.get((era as usize).checked_sub(1)?).map(|outside| &**outside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_knowledge_is_the_later_of_both_exact() {
        let a = Arc::new(Outside::default().with(1, &[3, 0], &[]).with(2, &[5], &[4]));
        let b = Arc::new((*Eras::default().waited()).clone().with(1, &[2, 7], &[]));
        let mut both = Some(a.clone());
        Outside::join(&mut both, &b);
        let mut both = both.unwrap();
        assert!(both.has_waited() && both.of(1)[0] == [3, 7] && both.of(2) == [&[5], &[4]]);
        assert!(both.of(3)[0].is_empty());
        assert!(both.knows(1, 1, 7) && !both.knows(1, 1, 8) && !both.knows(0, 0, 1));
        assert!(both.covers(&a) && both.covers(&b) && !a.covers(&both) && !b.covers(&a));
        assert!(both.knows_fenced(2, 0, 4) && !both.knows_fenced(2, 0, 5) && !both.knows_fenced(1, 0, 1));
        Outside::fence_proxy(&mut both);
        assert!(both.knows_fenced(2, 0, 5) && both.knows_fenced(1, 1, 7) && !both.knows_fenced(1, 1, 8));
    }

    #[test]
    fn covered_knowledge_is_shared_and_numbered_once_exact() {
        let small = Arc::new(Outside::default().with(1, &[3], &[]));
        let large = Arc::new((*small).clone().with(1, &[4], &[]));
        let mut mine = Some(small.clone());
        Outside::join(&mut mine, &large);
        Outside::join(&mut mine, &small);
        assert!(Arc::ptr_eq(mine.as_ref().unwrap(), &large));
        let mut eras = Eras::default();
        assert_eq!(eras.number(None), 0);
        let numbers = [&small, &large, &small].map(|o| eras.number(Some(o)));
        assert_eq!(numbers, [1, 2, 1]);
        assert_eq!(eras.get(2).unwrap().of(1)[0], [4]);
        assert!(eras.get(0).is_none());
    }
}
