//! Launches made once per set of operands and kept: what is left of a call on the host is looking them up and handing
//! them to the driver. Checking operands, encoding tensor maps and listing arguments cost more than the launch itself.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{PoisonError, RwLock};

use dualgemm_cuda::ReadyLaunch;
use dualgemm_device::{Device, Error as DeviceError, LaunchSpec, Stream};

use crate::prologue::overlapping;
use crate::{Error, Gpu};

/// Sets of operands that are kept; one more, and all are dropped. About 3 KB each.
const MOST: usize = 4096;

/// Identity of the weights and everything that tells calls apart.
pub(crate) type Key = (u64, [u64; 9]);

/// The launches of a prepared plan, by operands.
#[derive(Debug, Default)]
pub(crate) struct Launches(RwLock<HashMap<Key, Kept, BuildHasherDefault<Mixer>>>);

/// The launches of one set of operands.
#[derive(Debug)]
enum Kept {
    /// Laid out for the driver.
    Ready(Box<[ReadyLaunch]>),
    /// For a simulated GPU.
    Specs(Box<[LaunchSpec]>),
}

impl Kept {
    fn new(gpu: &Gpu, specs: Vec<LaunchSpec>) -> Result<Self, DeviceError> {
        let specs = specs.into_iter().map(|spec| overlapping(gpu.info(), spec));
        Ok(match gpu.card() {
            Some(card) => Self::Ready(specs.map(|spec| card.ready(spec)).collect::<Result<_, _>>()?),
            None => Self::Specs(specs.collect()),
        })
    }

    fn start(&self, gpu: &Gpu, stream: Stream) -> Result<(), DeviceError> {
        match (self, gpu.card()) {
            (Self::Ready(launches), Some(card)) => card.start(stream, launches),
            (Self::Specs(specs), _) => specs.iter().try_for_each(|spec| gpu.launch_on(stream, spec)),
            (Self::Ready(_), None) => Err(DeviceError::BadHandle { what: "launch" }),
        }
    }
}

impl Launches {
    /// Launches what `build` lists for these operands, which it is asked for the first time only.
    pub(crate) fn run(
        &self,
        gpu: &'static Gpu,
        key: Key,
        stream: Stream,
        build: impl FnOnce() -> Result<Vec<LaunchSpec>, Error>,
    ) -> Result<(), Error> {
        if let Some(kept) = self.0.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(kept.start(gpu, stream)?);
        }
        let kept = Kept::new(gpu, build()?)?;
        kept.start(gpu, stream)?;
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MOST {
            all.clear();
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
