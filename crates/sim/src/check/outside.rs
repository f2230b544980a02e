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

/// Knowledge of other clusters and launches.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outside {
    waited: bool,
    clusters: BTreeMap<u32, Arc<Vec<u32>>>,
}

fn within(a: &Arc<Vec<u32>>, b: &Arc<Vec<u32>>) -> bool {
    let rest = b.iter().copied().chain(std::iter::repeat(0));
    Arc::ptr_eq(a, b) || a.iter().zip(rest).all(|(a, b)| *a <= b)
}

impl Outside {
    /// The same, and what actors of `cluster` have published.
    #[must_use]
    pub fn with(mut self, cluster: u32, seen: &[u32]) -> Outside {
        self.clusters.insert(cluster, Arc::new(seen.to_vec()));
        self
    }

    /// Whether the launches before this one are known to have ended.
    pub fn has_waited(&self) -> bool {
        self.waited
    }

    /// What is known of the actors of a cluster.
    pub fn of(&self, cluster: u32) -> &[u32] {
        self.clusters.get(&cluster).map_or(&[], |seen| seen)
    }

    /// Whether an action of a cluster happened before.
    pub fn knows(&self, cluster: u32, actor: Actor, clock: u32) -> bool {
        self.of(cluster).get(actor as usize).is_some_and(|&c| clock <= c)
    }

    /// Whether nothing of `other` is news.
    pub fn covers(&self, other: &Outside) -> bool {
        let known = |(cluster, theirs)| self.clusters.get(cluster).is_some_and(|mine| within(theirs, mine));
        std::ptr::eq(self, other) || self.waited >= other.waited && other.clusters.iter().all(known)
    }

    /// Adds what `theirs` knows to `mine`. One that covers the other is taken as it is, so that equal knowledge is shared.
    pub fn join(mine: &mut Option<Arc<Outside>>, theirs: &Arc<Outside>) {
        let Some(own) = mine else {
            *mine = Some(theirs.clone());
            return;
        };
        if own.covers(theirs) {
            return;
        }
        if theirs.covers(own) {
            *mine = Some(theirs.clone());
            return;
        }
        let own = Arc::make_mut(own);
        own.waited |= theirs.waited;
        for (cluster, seen) in &theirs.clusters {
            match own.clusters.get_mut(cluster) {
                Some(old) if within(seen, old) => {}
                Some(old) if !within(old, seen) => join(Arc::make_mut(old), seen),
                _ => drop(own.clusters.insert(*cluster, seen.clone())),
            }
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

    /// What has this number.
    pub fn get(&self, era: Era) -> Option<&Outside> {
        self.known.get((era as usize).checked_sub(1)?).map(|outside| &**outside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_knowledge_is_the_later_of_both_exact() {
        let a = Arc::new(Outside::default().with(1, &[3, 0]).with(2, &[5]));
        let b = Arc::new((*Eras::default().waited()).clone().with(1, &[2, 7]));
        let mut both = Some(a.clone());
        Outside::join(&mut both, &b);
        let both = both.unwrap();
        assert!(both.has_waited() && both.of(1) == [3, 7] && both.of(2) == [5] && both.of(3).is_empty());
        assert!(both.knows(1, 1, 7) && !both.knows(1, 1, 8) && !both.knows(0, 0, 1));
        assert!(both.covers(&a) && both.covers(&b) && !a.covers(&both) && !b.covers(&a));
    }

    #[test]
    fn covered_knowledge_is_shared_and_numbered_once_exact() {
        let small = Arc::new(Outside::default().with(1, &[3]));
        let large = Arc::new((*small).clone().with(1, &[4]));
        let mut mine = Some(small.clone());
        Outside::join(&mut mine, &large);
        Outside::join(&mut mine, &small);
        assert!(Arc::ptr_eq(mine.as_ref().unwrap(), &large));
        let mut eras = Eras::default();
        assert_eq!(eras.number(None), 0);
        let numbers = [&small, &large, &small].map(|o| eras.number(Some(o)));
        assert_eq!(numbers, [1, 2, 1]);
        assert_eq!(eras.get(2).unwrap().of(1), [4]);
        assert!(eras.get(0).is_none());
    }
}
