//! Races between launches of a stream that overlap (programmatic dependent launch).
//!
//! A launch with the programmatic attribute may start when every CTA of the one before has triggered
//! (`griddepcontrol.launch_dependents`) or ended. What that one did to memory is ordered only by `griddepcontrol.wait`
//! (PTX ISA 9.7.13.13): it returns when the launches before are complete and their writes are visible. If the launch before
//! triggers without having waited itself, those before it may be in progress as well.

use super::cross::Finished;
use crate::decode::operand::Scope;
use crate::machine::grid::Launch;
use crate::memory::Place;
use crate::program::Kernel;
use crate::trap::{Check, Fault, Party, Spot, Trap};
use std::sync::Arc;

/// A launch that has not been waited for by the host, or by a launch without the attribute.
#[derive(Debug)]
struct Past {
    kernel: Arc<Kernel>,
    did: Finished,
    /// A `griddepcontrol.wait` of the next launch waits for it.
    awaited: bool,
}

/// The launches of a stream that the next one may overlap with, oldest first.
#[derive(Debug, Default)]
pub struct Launches(Vec<Past>);

/// How many launches are remembered: what a long chain of them did must not fill the host's memory.
const KEPT: usize = 4;

impl Launches {
    /// Whether the next launch, if it has the attribute, may overlap with another.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks a launch that has ended, which may have overlapped with these.
    pub fn check(&self, launch: &Launch<'_>, did: &Finished) -> Result<(), Box<Trap>> {
        for past in self.0.iter().rev() {
            let triggered = past.did.dependency.triggered;
            let found = did.against(&past.did, |own, x, y| {
                let waited = past.awaited && own.eras.get(x.era).is_some_and(|o| o.has_waited());
                // What has not triggered has ended, so its reads are done; its writes need not be visible.
                (y.kind.write || triggered) && !waited && !x.both_strong(y, Scope::Gpu)
            });
            let Some((address, (x, at), (y, other))) = found else { continue };
            let (noun, earlier) = (x.kind.noun(), y.kind.noun());
            let mut message = format!(
                "{noun} of global memory is not ordered with a {earlier} by an earlier launch of `{}`",
                past.kernel.name
            );
            if !past.awaited {
                message += ", for which the launch in between does not wait";
            }
            let mut trap = Fault::new(Check::Race, message)
                .at(Place::Global(address))
                .party(Party::new(format!("{earlier} in the earlier launch"), None).of(other))
                .help("execute griddepcontrol.wait before it: the launch has the programmatic attribute")
                .trap(launch.kernel, Spot::of(x.pc, at));
            // The other instruction is one of the other kernel.
            trap.others[0].site = past.kernel.sites.get(y.pc as usize).cloned();
            return Err(trap);
        }
        Ok(())
    }

    /// Adds a launch that has ended.
    pub fn add(&mut self, kernel: Arc<Kernel>, did: Finished) {
        let own = did.dependency;
        self.0.retain(|past| !(past.awaited && own.late));
        self.0.iter_mut().for_each(|past| past.awaited &= own.waited);
        self.0.push(Past { kernel, did, awaited: true });
        if self.0.len() > KEPT {
            self.0.remove(0);
        }
    }
}
