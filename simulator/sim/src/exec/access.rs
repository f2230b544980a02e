//! Memory accesses: from an address to bytes, through every check.
//!
//! Threads and asynchronous operations come in through the same two functions, [`Cluster::touch_shared`] and
//! [`Cluster::touch_global`], which check bounds and ask the shadow memory; nothing reads or writes these
//! memories around them.

use super::*;
use crate::check::lanes::Who;
use crate::check::order::View;
use crate::check::pages::PAGE;
use crate::check::proxy::Memory;
use crate::check::shadow::{Access, Conflict, Look};
use crate::check::undefined::Hole;
use crate::memory::local::Local;
use crate::memory::{self, outside};

impl Agent {
    /// The agent as the one who accesses.
    pub fn who(&self) -> Who<'_> {
        let Agent { actor, clock, pc, view, .. } = self;
        Who { actor: *actor, clock: *clock, pc: *pc, view, warp: None, lanes: Lanes::Any }
    }
}

impl<'a> Cluster<'a> {
    /// What to look for in an access to this memory.
    pub(super) fn look(&self, memory: Memory) -> Look {
        let checks = self.launch.config.checks;
        Look {
            race: checks.race,
            uninit: checks.uninit && memory != Memory::Global,
            memory,
            actors: self.places.actors,
        }
    }

    /// Checks an access to the shared memory of a CTA of the cluster and remembers it.
    pub fn touch_shared(&mut self, rank: u32, offset: u32, len: u32, kind: Kind, who: Who<'_>) -> Result<()> {
        let size = self.ctas.len() as u32;
        let at = Place::Shared { rank, offset };
        let Some(cta) = self.ctas.get_mut(rank as usize) else {
            return Err(outside(at, len.into(), &format!("a cluster of {size} CTAs, each with memory"), 0));
        };
        cta.shared
            .slice(rank, offset, len as usize)
            .map_err(|f| f.at(self.launch.describe_shared(rank, offset)))?;
        let leaving = kind.proxy && !kind.write && self.places.of(who.actor).0 == cta.id;
        if cta.live_threads == 0 && (self.launch.config.checks.strict || !leaving) {
            return Err(fault!(
                Check::Pending,
                "{} of the shared memory of a CTA that has exited",
                kind.noun()
            )
            .at(self.launch.describe_shared(rank, offset))
            .help("keep the CTA alive, for example with a cluster barrier at the end"));
        }
        if let Some(b) = cta.mbarrier_in(offset, len) {
            let (pc, noun) = (cta.mbarriers[&b].init_pc, kind.noun());
            return Err(fault!(Check::Mbarrier, "{noun} of {len} bytes over the live mbarrier at {b:#x}")
                .at(self.launch.describe_shared(rank, offset))
                .party(Party::new("mbarrier.init", pc).of((cta.id, None)))
                .help("invalidate it with mbarrier.inval before its memory is used again"));
        }
        if kind.write {
            self.counters.shared_written += u64::from(len);
            self.progress += 1;
        } else {
            self.counters.shared_read += u64::from(len);
        }
        let look = self.look(Memory::Shared(rank));
        let access = Access { actor: who.actor, clock: who.clock, pc: who.pc, kind, era: 0 };
        let cta = &mut self.ctas[rank as usize];
        let words = (&mut cta.shared.shadow[..], Some(&mut cta.shared.tags));
        let result = self.states.access(words, offset as usize, len as usize, access, &who, look);
        let holes = &mut cta.shared.holes;
        let hole = match kind.write {
            true => {
                holes.fill(offset.into(), len.into());
                None
            }
            false => holes.of(offset.into(), len.into()).filter(|_| look.uninit),
        };
        match (result, hole) {
            (Err((byte, c)), _) => {
                Err(self.conflict(c, (kind, &who), len, "shared", |l| l.describe_shared(rank, byte as u32)))
            }
            (Ok(()), Some(hole)) => Err(self.launch.undefined(hole.origin, None, who.pc)),
            (Ok(()), None) => Ok(()),
        }
    }

    /// Checks an access to global memory and remembers it.
    pub fn touch_global(&mut self, address: u64, len: u64, kind: Kind, who: Who<'_>) -> Result<()> {
        if let Err(why) = self.launch.global.find(address, len) {
            let verb = if kind.write { "write" } else { "read" };
            return Err(fault!(Check::Bounds, "{verb} of {len} bytes of global memory: {why}")
                .at(Place::Global(address)));
        }
        if kind.write {
            self.counters.global_written += len;
            self.progress += 1;
        } else {
            self.counters.global_read += len;
        }
        let look = self.look(Memory::Global);
        if !look.race {
            return Ok(());
        }
        let era = self.eras.number(who.view.outside());
        let access = Access { actor: who.actor, clock: who.clock, pc: who.pc, kind, era };
        let mut at = address;
        let end = address + len;
        while at < end {
            let (page, start) = (at / PAGE, at % PAGE);
            let n = (end - at).min(PAGE - start);
            let (words, tags) = self.pages.page(page);
            // Of one run of lanes, those from this page on.
            let who = Who { lanes: who.lanes.from((at - address) as usize), ..who };
            if let Err((byte, c)) =
                self.states.access((words, Some(tags)), start as usize, n as usize, access, &who, look)
            {
                let at = page * PAGE + byte as u64;
                return Err(
                    self.conflict(c, (kind, &who), len as u32, "global", |_| Place::Global(at).to_string())
                );
            }
            at += n;
        }
        Ok(())
    }

    pub(super) fn earlier(&self, a: Access) -> Party<u32> {
        Party::new(format!("earlier {}", a.kind.noun()), a.pc).of(self.places.of(a.actor))
    }

    pub(super) fn conflict(
        &self,
        conflict: Conflict,
        (kind, who): (Kind, &Who<'_>),
        len: u32,
        space: &str,
        at: impl Fn(&crate::machine::grid::Launch<'_>) -> String,
    ) -> Fault {
        let noun = kind.noun();
        let fault = match conflict {
            Conflict::Race(a) => fault!(Check::Race, "{noun} of {len} bytes of {space} memory is not ordered with an earlier {}", a.kind.noun())
            .party(self.earlier(a))
            .help(match (kind.proxy, a.kind.proxy) {
                (_, true) => "wait for the asynchronous operation: on its mbarrier, or for its group",
                (true, false) => "start the asynchronous operation after synchronizing with that access, or wait for its completion first",
                _ if who.is_of_warp(a.actor) => {
                    "execute bar.warp.sync between the two: that lanes run together, or exchange registers, orders nothing"
                }
                _ => "order them with a barrier, an mbarrier, or a release and an acquire",
            }),
            Conflict::Unfenced(a) => fault!(Check::Proxy, "{noun} of {len} bytes of {space} memory may not see an earlier {} through the generic proxy",
                    a.kind.noun())
            .party(self.earlier(a))
            .help("put fence.proxy.async of that memory after the write, before the synchronization that orders the two"),
            Conflict::NotConstant(a) => {
                fault!(Check::Race, "{noun} of {len} bytes of {space} memory, and an earlier {} in the same kernel", a.kind.noun())
                    .party(self.earlier(a))
                    .help("read what the kernel writes without .nc, and not by ldu")
            }
            Conflict::Uninit => {
                fault!(Check::Uninit, "{noun} of {len} bytes of {space} memory that nothing wrote")
            }
        };
        fault.at(at(self.launch))
    }

    /// Checks an access of threads or asynchronous operations to memory that others see.
    #[inline]
    pub fn touch(&mut self, at: Place, len: usize, kind: Kind, who: Who<'_>) -> Result<()> {
        match at {
            Place::Global(address) => self.touch_global(address, len as u64, kind, who),
            Place::Shared { rank, offset } => self.touch_shared(rank, offset, len as u32, kind, who),
            other => {
                Err(Fault::new(Check::Illegal, "a bulk copy is between global and shared memory").at(other))
            }
        }
    }

    /// The bytes of memory that [`touch`](Cluster::touch) has found allowed.
    #[inline]
    pub fn read_at(&self, at: Place, out: &mut [u8]) -> Result<()> {
        match at {
            Place::Global(address) => self.launch.global.read(address, out),
            Place::Shared { rank, offset } => {
                let nowhere = || outside(at, out.len() as u64, "a cluster of fewer CTAs", 0);
                let cta = self.ctas.get(rank as usize).ok_or_else(nowhere)?;
                out.copy_from_slice(cta.shared.slice(rank, offset, out.len())?);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Changes memory that [`touch`](Cluster::touch) has found allowed.
    #[inline]
    pub fn write_at(&mut self, at: Place, src: &[u8]) -> Result<()> {
        match at {
            Place::Global(address) => self.launch.global.write(address, src),
            Place::Shared { rank, offset } => {
                self.ctas[rank as usize].shared.slice_mut(rank, offset, src.len())?.copy_from_slice(src);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Reads for an asynchronous operation.
    pub fn async_read(&mut self, at: Place, out: &mut [u8], agent: &Agent) -> Result<()> {
        self.touch(at, out.len(), Kind::PROXY_READ, agent.who())?;
        self.read_at(at, out)
    }

    /// As many bytes as an asynchronous operation reads, once they are known to be there.
    pub fn async_bytes(&mut self, at: Place, len: u32, agent: &Agent) -> Result<Vec<u8>> {
        self.touch(at, len as usize, Kind::PROXY_READ, agent.who())?;
        let mut bytes = vec![0; len as usize];
        self.read_at(at, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes for an asynchronous operation.
    pub fn async_write(&mut self, at: Place, src: &[u8], agent: &Agent) -> Result<()> {
        self.touch(at, src.len(), Kind::PROXY_WRITE, agent.who())?;
        self.write_at(at, src)
    }
}

impl Cx<'_, '_> {
    /// The group as the one who accesses, with what it knows.
    pub(super) fn who<'v>(&self, view: &'v View, lanes: Lanes) -> Who<'v> {
        let (warp, lanes) = match self.w.apart {
            true => (Some(self.w.first_actor), lanes),
            false => (None, Lanes::Any),
        };
        Who { actor: self.g.actor, clock: self.w.clock, pc: self.pc, view, warp, lanes }
    }

    fn lanes(&self, lane: usize) -> Lanes {
        self.together.unwrap_or(Lanes::One(lane))
    }

    /// Address of every lane.
    pub fn addresses(&mut self, a: &Addr) -> [u64; 32] {
        let base = self.w.regs.r64(a.base, self.m);
        let narrow = matches!(a.space, Space::SharedCta | Space::SharedCluster);
        let mask = if narrow { u32::MAX.into() } else { u64::MAX };
        each(&base, |b| b.wrapping_add(a.offset as u64) & mask)
    }

    /// A place that `space` may name from this CTA.
    pub(super) fn allowed(&self, space: Space, address: u64, lane: usize) -> Result<Place> {
        let p = place(space, address);
        if let Place::Shared { rank, .. } = p
            && space == Space::SharedCta
            && rank as usize != self.cta
        {
            return Err(fault!(
                Check::Bounds,
                "a .shared::cta access with an address of cluster rank {rank}, from rank {}",
                self.cta
            )
            .at(p)
            .lane(lane as u32)
            .help("use .shared::cluster for the memory of another CTA"));
        }
        Ok(p)
    }

    /// The memory of the thread alone that a place is in.
    fn own_memory(&mut self, at: Place) -> &mut Local {
        if matches!(at, Place::Local(_)) { &mut self.w.local } else { &mut self.w.func_params }
    }

    pub fn read_lane(
        &mut self,
        space: Space,
        address: u64,
        lane: usize,
        kind: Kind,
        out: &mut [u8],
    ) -> Result<()> {
        match self.load_lane(space, address, lane, kind, out)? {
            Some(hole) => Err(self.cl.launch.undefined(hole.origin, Some(lane), self.pc)),
            None => Ok(()),
        }
    }

    /// Reads bytes for one lane that may be undefined: returns which are.
    pub fn load_lane(
        &mut self,
        space: Space,
        address: u64,
        lane: usize,
        kind: Kind,
        out: &mut [u8],
    ) -> Result<Option<Hole>> {
        self.read(space, address, lane, kind, out).map_err(|f| f.lane(lane as u32))
    }

    fn read(
        &mut self,
        space: Space,
        address: u64,
        lane: usize,
        kind: Kind,
        out: &mut [u8],
    ) -> Result<Option<Hole>> {
        let at = self.allowed(space, address, lane)?;
        let n = out.len();
        let inside = |memory: &[u8], offset: u64, what: &str, out: &mut [u8]| {
            let end = offset.checked_add(n as u64).filter(|e| *e <= memory.len() as u64);
            match end {
                Some(end) => {
                    out.copy_from_slice(&memory[offset as usize..end as usize]);
                    Ok(())
                }
                None => Err(outside(at, n as u64, what, memory.len() as u64)),
            }
        };
        let launch = self.cl.launch;
        match at {
            Place::Global(_) | Place::Shared { .. } => {
                self.w.note(self.g, 1 << lane, false);
                let view = self.g.known.of(lane);
                let who = self.who(&view, self.lanes(lane));
                let hole = match (self.cl.touch(at, n, kind, who), at) {
                    (Err(fault), Place::Shared { rank, offset }) if fault.check == Check::Uninit => {
                        self.cl.hole_in_shared(rank, offset, n as u32, kind, who)?
                    }
                    (result, _) => result.map(|()| None)?,
                };
                self.cl.read_at(at, out)?;
                return Ok(hole);
            }
            Place::Local(o) | Place::FuncParam(o) => {
                let pc = self.pc;
                let memory = self.own_memory(at);
                out.copy_from_slice(memory.slice(lane, o, n, at)?);
                return Ok(memory.hole(lane, o, n, (at, pc)));
            }
            Place::Const(o) => inside(launch.constant, o, "constant memory", out)?,
            Place::Param(o) => inside(launch.params, o, "the kernel's parameters", out)?,
        }
        Ok(None)
    }

    pub fn write_lane(
        &mut self,
        space: Space,
        address: u64,
        lane: usize,
        kind: Kind,
        src: &[u8],
    ) -> Result<()> {
        self.store_lane(space, address, lane, kind, src, None)
    }

    /// Writes bytes for one lane; some may be undefined. The memory of the thread or CTA keeps them.
    pub fn store_lane(
        &mut self,
        space: Space,
        address: u64,
        lane: usize,
        kind: Kind,
        src: &[u8],
        hole: Option<Hole>,
    ) -> Result<()> {
        let at = self.allowed(space, address, lane).map_err(|f| f.lane(lane as u32))?;
        if let Some(hole) = hole {
            match at {
                Place::Shared { rank, .. } if rank as usize == self.cta => {}
                Place::Local(_) | Place::FuncParam(_) => {}
                _ => return Err(self.cl.launch.undefined(hole.origin, Some(lane), self.pc)),
            }
        }
        self.write(at, lane, kind, src).map_err(|f| f.lane(lane as u32))?;
        match (at, hole) {
            (Place::Local(o) | Place::FuncParam(o), _) => {
                self.own_memory(at).set_hole(lane, o, src.len(), hole);
            }
            (Place::Shared { rank, offset }, Some(hole)) => {
                self.cl.ctas[rank as usize].shared.holes.dig(offset.into(), hole);
            }
            _ => {}
        }
        Ok(())
    }

    fn write(&mut self, at: Place, lane: usize, kind: Kind, src: &[u8]) -> Result<()> {
        let n = src.len();
        match at {
            Place::Global(_) | Place::Shared { .. } => {
                self.w.note(self.g, 1 << lane, true);
                let view = self.g.known.of(lane);
                let who = self.who(&view, self.lanes(lane));
                // Threads that store one value to one place are common: only differing values are a race.
                if let Err(fault) = self.cl.touch(at, n, kind, who) {
                    let mut old = vec![0; n];
                    if self.cl.read_at(at, &mut old).is_err() || old != src {
                        return Err(fault);
                    }
                    self.cl.touch(at, n, kind.same(), who)?;
                }
                self.cl.write_at(at, src)
            }
            Place::Local(o) | Place::FuncParam(o) => {
                self.own_memory(at).slice(lane, o, n, at)?.copy_from_slice(src);
                Ok(())
            }
            Place::Const(_) | Place::Param(_) => {
                Err(Fault::new(Check::Bounds, "a write to read-only memory").at(at))
            }
        }
    }

    /// Checks that an address is a multiple of the access size.
    pub fn aligned_to(&self, space: Space, address: u64, bytes: u64, lane: usize) -> Result<()> {
        if address.is_multiple_of(bytes) {
            return Ok(());
        }
        Err(memory::misaligned(place(space, address), bytes).lane(lane as u32))
    }

    /// Whether any active lane's address is in global memory.
    pub fn any_global(&self, space: Space, addresses: &[u64; 32]) -> bool {
        match space {
            Space::Global => true,
            Space::Generic => {
                super::lanes(self.m).any(|l| matches!(place(space, addresses[l]), Place::Global(_)))
            }
            _ => false,
        }
    }
}
