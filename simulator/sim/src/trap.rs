//! What the simulator reports when a kernel does something wrong.
//!
//! Flow: `exec`, `memory` and `check` return a [`Fault`] (what happened); the dispatch loop adds where it
//! happened and makes it a [`Trap`]. The text of a trap is part of the crate's contract: tests keep it as golden
//! files, so messages name things by kernel, PTX line, CTA, warp and lane, never by time or host address.

use crate::names::modifiers;
use crate::program::Kernel;
use std::fmt;

modifiers! {
    /// The rule that was broken, one per checker.
    #[non_exhaustive]
    Check {
        /// Two unordered accesses, at least one of them a write.
        Race "data race",
        /// A read of memory or a register that nothing wrote.
        Uninit "uninitialized read",
        /// An access outside every allocation.
        Bounds "out of bounds",
        /// An access that is not aligned to its size.
        Align "misaligned access",
        /// Misuse of an mbarrier.
        Mbarrier "mbarrier misuse",
        /// Misuse of a CTA, cluster or warp barrier.
        Barrier "barrier misuse",
        /// Nothing can make progress any more.
        Deadlock "deadlock",
        /// A generic-proxy write that an async-proxy access may not see.
        Proxy "missing proxy fence",
        /// Registers of an unfinished `wgmma` or `tcgen05.ld` touched, or a missing `wgmma.fence`.
        InFlight "registers in flight",
        /// Misuse of tensor memory.
        Tmem "tensor memory misuse",
        /// `setmaxnreg` values that do not fit.
        Registers "register reallocation",
        /// Exit while asynchronous work is pending.
        Pending "exit with pending work",
        /// An operand value that the instruction does not allow.
        Illegal "illegal operand",
        /// `trap`, `brkpt` or a failed device-side assertion.
        Explicit "trap",
        /// More instructions than the configured limit.
        Limit "instruction limit",
        /// The host stopped the launch ([`Progress::stop`](crate::Progress::stop)): nothing is known to be wrong.
        Stopped "stopped",
    }
}

impl Check {
    /// The name used in messages and in `tests/fail/<name>/`.
    pub fn name(self) -> &'static str {
        Check::NAMES.iter().find(|(_, check)| *check == self).map_or("", |(name, _)| name)
    }
}

/// The other side of a conflict, or one of the parties of a deadlock. Its instruction is a number in the kernel until the
/// place is known, then a [`Site`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Party<Instruction = Site> {
    /// What it did, e.g. "earlier write".
    pub role: String,
    /// Its instruction; `None` if it is no instruction (the host).
    pub site: Option<Instruction>,
    /// Which CTA of the grid.
    pub cta: Option<[u32; 3]>,
    /// Which warp of the CTA.
    pub warp: Option<u32>,
}

impl Party<u32> {
    /// Who executed that instruction.
    pub fn new(role: impl Into<String>, pc: impl Into<Option<u32>>) -> Party<u32> {
        Party { role: role.into(), site: pc.into(), cta: None, warp: None }
    }

    /// The same, of this CTA and warp.
    #[must_use]
    pub fn of(self, (cta, warp): ([u32; 3], Option<u32>)) -> Party<u32> {
        Party { cta: Some(cta), warp, ..self }
    }
}

/// Where something went wrong, as far as that is one place.
#[derive(Debug, Clone, Default)]
pub struct Spot {
    pub pc: Option<u32>,
    /// Whether the instruction had been issued earlier.
    pub asynchronous: bool,
    pub cta: Option<[u32; 3]>,
    /// In a launch with clusters.
    pub cluster_rank: Option<u32>,
    pub warp: Option<u32>,
}

impl Spot {
    /// An instruction of a CTA and warp.
    pub fn of(pc: u32, (cta, warp): ([u32; 3], Option<u32>)) -> Spot {
        Spot { pc: Some(pc), cta: Some(cta), warp, ..Spot::default() }
    }
}

/// What went wrong, without the place. Made by the code that notices it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The rule.
    pub check: Check,
    /// One sentence: the rule, the value found, what would be valid.
    pub message: String,
    /// The lane, if it is one lane's doing.
    pub lane: Option<u32>,
    /// Address and state space, e.g. `shared 0x410`.
    pub address: Option<String>,
    /// The other parties.
    pub others: Vec<Party<u32>>,
    /// How to mend it.
    pub help: Option<&'static str>,
}

/// A fault with a check and a message, as `format!` takes it.
macro_rules! fault {
    ($check:expr, $($text:tt)+) => {
        $crate::trap::Fault::new($check, format!($($text)+))
    };
}
pub(crate) use fault;

impl Fault {
    /// A fault with a message only.
    pub fn new(check: Check, message: impl Into<String>) -> Fault {
        Fault { check, message: message.into(), lane: None, address: None, others: Vec::new(), help: None }
    }

    /// Names the lane, unless one is named already.
    #[must_use]
    pub fn lane(mut self, lane: u32) -> Fault {
        self.lane.get_or_insert(lane);
        self
    }

    /// Names the address, unless one is named already.
    #[must_use]
    pub fn at(mut self, address: impl fmt::Display) -> Fault {
        self.address.get_or_insert_with(|| address.to_string());
        self
    }

    /// Adds a party.
    #[must_use]
    pub fn party(mut self, party: Party<u32>) -> Fault {
        self.others.push(party);
        self
    }

    /// Adds advice.
    #[must_use]
    pub fn help(mut self, help: &'static str) -> Fault {
        self.help = Some(help);
        self
    }

    /// The fault with its place in a kernel.
    pub fn trap(self, kernel: &Kernel, spot: Spot) -> Box<Trap> {
        let site = |pc: u32| kernel.sites.get(pc as usize).cloned();
        let Fault { check, message, lane, address, others, help } = self;
        let Spot { pc, asynchronous, cta, cluster_rank, warp } = spot;
        let other =
            |p: Party<u32>| Party { role: p.role, site: p.site.and_then(site), cta: p.cta, warp: p.warp };
        Box::new(Trap {
            kernel: kernel.name.clone(),
            site: pc.and_then(site),
            asynchronous,
            cta,
            cluster_rank,
            warp,
            lane,
            check,
            message,
            address,
            others: others.into_iter().map(other).collect(),
            help,
        })
    }
}

/// An instruction as the text has it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Site {
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// The instruction, normalized to one line.
    pub text: String,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.text)
    }
}

/// A simulated fault with everything known about it. `Display` gives the full message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trap {
    /// The kernel.
    pub kernel: String,
    /// The instruction that was executing.
    pub site: Option<Site>,
    /// Whether the instruction had been issued earlier and an async engine was carrying it out.
    pub asynchronous: bool,
    /// Its CTA.
    pub cta: Option<[u32; 3]>,
    /// Rank of the CTA in its cluster, if the launch has clusters.
    pub cluster_rank: Option<u32>,
    /// Its warp.
    pub warp: Option<u32>,
    /// Its lane.
    pub lane: Option<u32>,
    /// The rule.
    pub check: Check,
    /// What happened.
    pub message: String,
    /// The address concerned.
    pub address: Option<String>,
    /// The other parties.
    pub others: Vec<Party>,
    /// How to mend it.
    pub help: Option<&'static str>,
}

fn place(f: &mut fmt::Formatter<'_>, cta: Option<[u32; 3]>, warp: Option<u32>) -> fmt::Result {
    if let Some([x, y, z]) = cta {
        write!(f, "CTA ({x}, {y}, {z})")?;
    }
    if let Some(warp) = warp {
        write!(f, ", warp {warp}")?;
    }
    Ok(())
}

impl fmt::Display for Trap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.check.name(), self.message)?;
        write!(f, "\n  kernel: {}", self.kernel)?;
        if let Some(site) = &self.site {
            let note = if self.asynchronous { " (carried out asynchronously)" } else { "" };
            write!(f, "\n  at:     {site}{note}")?;
        }
        if self.cta.is_some() {
            write!(f, "\n  by:     ")?;
            place(f, self.cta, self.warp)?;
            if let Some(lane) = self.lane {
                write!(f, ", lane {lane}")?;
            }
            if let Some(rank) = self.cluster_rank {
                write!(f, " (cluster rank {rank})")?;
            }
        }
        if let Some(address) = &self.address {
            write!(f, "\n  where:  {address}")?;
        }
        for other in &self.others {
            write!(f, "\n  with:   ")?;
            if self.check == Check::Deadlock {
                place(f, other.cta, other.warp)?;
                write!(f, " {}", other.role)?;
            } else {
                f.write_str(&other.role)?;
                if other.cta.is_some() {
                    write!(f, " by ")?;
                    place(f, other.cta, other.warp)?;
                }
            }
            if let Some(site) = &other.site {
                write!(f, "\n          {site}")?;
            }
        }
        if let Some(help) = self.help {
            write!(f, "\n  help:   {help}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Trap {}
