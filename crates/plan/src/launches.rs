//! Launches made once per set of operands and kept: what is left of a call on the host is looking them up and handing
//! them to the driver. Checking operands, encoding tensor maps and listing arguments cost more than the launch itself.
//!
//! The driver takes 2.5 to 3 µs for each launch on an H100. Calls of several launches that come again are therefore made a
//! graph, whose replay costs the host little more than one launch; but where the stream is being recorded, launches keep
//! their places and their early starts.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};

use dualgemm_cuda::{Cuda, Graph, ReadyLaunch};
use dualgemm_device::{Device, Error as DeviceError, LaunchSpec, Stream};

use crate::prologue::overlapping;
use crate::{Error, Gpu};

/// Sets of operands that are kept; one more, and all are dropped. About 3 KB each.
const MOST: usize = 4096;

/// Calls that are made launch by launch before a graph is, which takes as long as some dozens of them.
const SINGLE_CALLS: u32 = 4;

/// Graphs that are kept at most. About 50 KB each, of the host's memory.
const MOST_GRAPHS: u32 = 512;

/// Identity of the weights and everything that tells calls apart.
pub(crate) type Key = (u64, [u64; 9]);

/// The launches of a prepared plan, by operands.
#[derive(Debug, Default)]
pub(crate) struct Launches {
    kept: RwLock<HashMap<Key, Kept, BuildHasherDefault<Mixer>>>,
    graphs: AtomicU32,
}

/// The launches of one set of operands.
#[derive(Debug)]
enum Kept {
    /// Laid out for the driver.
    Ready(Box<[ReadyLaunch]>, Replay),
    /// For a simulated GPU.
    Specs(Box<[LaunchSpec]>),
}

/// The launches of one call as a graph, made when they have come a few times.
#[derive(Debug, Default)]
struct Replay {
    calls: AtomicU32,
    /// None if it cannot be made. The driver wants one thread at a time.
    graph: OnceLock<Option<Mutex<Graph>>>,
}

impl Replay {
    fn graph(&self, card: &Cuda, launches: &[ReadyLaunch], graphs: &AtomicU32) -> Option<&Mutex<Graph>> {
        if let Some(known) = self.graph.get() {
            return known.as_ref();
        }
        if self.calls.fetch_add(1, Ordering::Relaxed) < SINGLE_CALLS {
            return None;
        }
        let make = || {
            let room = graphs.fetch_add(1, Ordering::Relaxed) < MOST_GRAPHS;
            room.then(|| card.record_ready(launches).ok().map(Mutex::new)).flatten()
        };
        self.graph.get_or_init(make).as_ref()
    }
}

impl Kept {
    fn new(gpu: &Gpu, specs: Vec<LaunchSpec>) -> Result<Self, DeviceError> {
        let specs = specs.into_iter().map(|spec| overlapping(gpu.info(), spec));
        Ok(match gpu.card() {
            Some(card) => {
                let launches = specs.map(|spec| card.ready(spec)).collect::<Result<_, _>>()?;
                Self::Ready(launches, Replay::default())
            }
            None => Self::Specs(specs.collect()),
        })
    }

    /// # Safety
    /// As [`Device::launch_on`], of each launch.
    unsafe fn start(&self, gpu: &Gpu, stream: Stream, graphs: &AtomicU32) -> Result<(), DeviceError> {
        match (self, gpu.card()) {
            (Self::Ready(launches, replay), Some(card)) => {
                // Where that cannot be told, the launch itself says why.
                let several = launches.len() > 1 && !card.is_recording(stream).unwrap_or(true);
                let graph = several.then(|| replay.graph(card, launches, graphs)).flatten();
                let graph = graph.map(|graph| graph.lock().unwrap_or_else(PoisonError::into_inner));
                // SAFETY: the graph is of these launches, for which the caller vouches.
                unsafe {
                    match graph {
                        Some(graph) => graph.replay_on(stream),
                        None => card.start(stream, launches),
                    }
                }
            }
            (Self::Specs(specs), _) => {
                // SAFETY: the caller's promise.
                specs.iter().try_for_each(|spec| unsafe { gpu.launch_on(stream, spec) })
            }
            (Self::Ready(..), None) => Err(DeviceError::BadHandle { what: "launch" }),
        }
    }
}

impl Launches {
    /// Launches what `build` lists for these operands, which it is asked for the first time only.
    ///
    /// # Safety
    /// As [`Device::launch_on`], of each launch; `key` tells operands apart.
    pub(crate) unsafe fn run(
        &self,
        gpu: &'static Gpu,
        key: Key,
        stream: Stream,
        build: impl FnOnce() -> Result<Vec<LaunchSpec>, Error>,
    ) -> Result<(), Error> {
        if let Some(kept) = self.kept.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            // SAFETY: these are the launches of the same operands, for which the caller vouches.
            return Ok(unsafe { kept.start(gpu, stream, &self.graphs) }?);
        }
        let kept = Kept::new(gpu, build()?)?;
        // SAFETY: the caller's promise.
        unsafe { kept.start(gpu, stream, &self.graphs) }?;
        let mut all = self.kept.write().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MOST {
            all.clear();
            self.graphs.store(0, Ordering::Relaxed);
        }
        all.insert(key, kept);
        Ok(())
    }
}

/// A hash of whole words. Keys are addresses and sizes of this process's own, which nobody chooses to collide: the
/// standard library's guard against that would take as long as everything else on this way.
#[derive(Debug, Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_ne_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        // Both halves of the product: addresses differ in their middle bits only.
        let product = u128::from(self.0 ^ word) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::hash::Hash;

    fn hash(key: &Key) -> u64 {
        let mut mixer = Mixer::default();
        key.hash(&mut mixer);
        mixer.finish()
    }

    /// Addresses far apart in few bits, as allocators give them out.
    #[test]
    fn neighbouring_keys_spread_over_all_places() {
        let keys: Vec<Key> = (0..64u64)
            .flat_map(|weights| (0..64u64).map(move |i| (weights, [1, i << 21, 128, 0, i << 9, 0, 0, 0, 0])))
            .collect();
        assert_eq!(keys.iter().map(hash).collect::<HashSet<_>>().len(), keys.len());
        // The table looks at low bits for the place and at the highest seven for the first comparison.
        let low = keys.iter().map(|key| hash(key) % 4096).collect::<HashSet<_>>().len();
        assert!(low > 2300, "{low} of 4096 places; chance gives 2589");
        assert_eq!(keys.iter().map(|key| hash(key) >> 57).collect::<HashSet<_>>().len(), 128);
    }
}
