//! Which writes through the generic proxy the async proxy sees: those before a `fence.proxy.async` of their memory.

use super::order::join;

/// A memory that the async proxy accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    Global,
    /// The shared memory of the CTA with this rank.
    Shared(u32),
    Mbarrier(u32),
}

/// The memories that a `fence.proxy.async` names, or `fence.mbarrier_init`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fence {
    Global,
    /// `.shared::cluster`
    Cluster,
    /// `.shared::cta`: the shared memory of the CTA of this rank.
    Cta(u32),
    /// Initializations of mbarriers by the warp itself.
    Init,
}

impl Fence {
    fn covers(self, memory: Memory) -> bool {
        match (self, memory) {
            (Fence::Global, Memory::Global) | (Fence::Cluster, Memory::Shared(_) | Memory::Mbarrier(_)) => {
                true
            }
            (Fence::Init, Memory::Mbarrier(_)) => true,
            (Fence::Cta(own), Memory::Shared(rank) | Memory::Mbarrier(rank)) => own == rank,
            _ => false,
        }
    }
}

/// For every kind of fence, up to which clock of each actor it has been executed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fenced(Vec<(Fence, Vec<u32>)>);

impl Fenced {
    /// Whether a write of this actor to this memory has been fenced.
    #[inline]
    pub fn knows(&self, memory: Memory, actor: u16, clock: u32) -> bool {
        let reaches = |seen: &Vec<u32>| seen.get(actor as usize).is_some_and(|&c| clock <= c);
        self.0.iter().any(|(fence, seen)| fence.covers(memory) && reaches(seen))
    }

    /// Up to which clock of each actor writes to global memory have been fenced.
    pub fn global(&self) -> &[u32] {
        self.0.iter().find(|(fence, _)| *fence == Fence::Global).map_or(&[], |(_, seen)| seen)
    }

    /// Executes a fence when `seen` is known.
    pub fn fence(&mut self, fence: Fence, seen: &[u32]) {
        match self.0.iter_mut().find(|(f, _)| *f == fence) {
            Some((_, old)) => join(old, seen),
            None => self.0.push((fence, seen.to_vec())),
        }
    }

    /// `fence.mbarrier_init` alone, when `seen` is known.
    pub fn initialized(seen: Vec<u32>) -> Fenced {
        Fenced(vec![(Fence::Init, seen)])
    }

    /// Learns of another party's fences.
    pub fn join(&mut self, other: &Fenced) {
        other.0.iter().for_each(|(fence, seen)| self.fence(*fence, seen));
    }

    /// Keeps what another party knows as well.
    pub fn meet(&mut self, other: &Fenced) {
        self.0.retain_mut(|(fence, mine)| {
            let Some((_, theirs)) = other.0.iter().find(|(f, _)| f == fence) else { return false };
            mine.truncate(theirs.len());
            mine.iter_mut().zip(theirs).for_each(|(a, &b)| *a = (*a).min(b));
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_covers_the_memories_it_names_exact() {
        let after = |fence| {
            let mut fenced = Fenced::default();
            fenced.fence(fence, &[0, 4]);
            let memories = [Memory::Global, Memory::Shared(0), Memory::Shared(1), Memory::Mbarrier(1)];
            memories.map(|m| fenced.knows(m, 1, 4))
        };
        assert_eq!(after(Fence::Global), [true, false, false, false]);
        assert_eq!(after(Fence::Cluster), [false, true, true, true]);
        assert_eq!(after(Fence::Cta(1)), [false, false, true, true]);
        assert_eq!(after(Fence::Init), [false, false, false, true]);
        let mut fenced = Fenced::initialized(vec![0, 4]);
        assert!(fenced.knows(Memory::Mbarrier(0), 1, 4) && !fenced.knows(Memory::Mbarrier(0), 0, 1));
        fenced.fence(Fence::Global, &[0, 4]);
        assert!(!fenced.knows(Memory::Global, 1, 5) && !fenced.knows(Memory::Global, 2, 1));
    }
}
