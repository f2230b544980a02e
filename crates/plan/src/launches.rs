//! Launches made once per set of operands and kept: what is left of a call on the host is looking them up and handing
//! them to the driver. Checking operands, encoding tensor maps and listing arguments cost more than the launch itself.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use dualgemm_device::{Device, LaunchSpec, Stream};

use crate::prologue::overlapping;
use crate::{DeviceCall, DeviceWeights, Error, Gpu};

/// Sets of operands that are kept; one more, and all are dropped. About 2 KB each.
const MOST: usize = 4096;

/// Identity of the weights and everything that tells calls apart.
type Key = (u64, [u64; 8]);

/// The launches of a prepared plan, by operands.
#[derive(Debug, Default)]
pub(crate) struct Launches(RwLock<HashMap<Key, Arc<[LaunchSpec]>>>);

impl Launches {
    /// Launches what `build` lists for these operands, which it is asked for the first time only.
    pub(crate) fn run(
        &self,
        gpu: &'static Gpu,
        call: &DeviceCall,
        weights: &DeviceWeights,
        stream: Stream,
        build: impl FnOnce() -> Result<Vec<LaunchSpec>, Error>,
    ) -> Result<(), Error> {
        let key = (weights.id(), call.key());
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        let launches = match known {
            Some(launches) => launches,
            None => {
                let specs = build()?.into_iter().map(|spec| overlapping(gpu.info(), spec));
                let launches: Arc<[LaunchSpec]> = specs.collect();
                let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
                if all.len() >= MOST {
                    all.clear();
                }
                all.insert(key, launches.clone());
                launches
            }
        };
        Ok(launches.iter().try_for_each(|spec| gpu.launch_on(stream, spec))?)
    }
}
