//! How a simulation is run: which card, which checks, which interleaving.

/// The checks that are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checks {
    /// Data races and missing proxy fences, found by happens-before over every barrier, mbarrier, fence and
    /// atomic.
    pub race: bool,
    /// Reads of shared or tensor memory and registers that nothing wrote.
    pub uninit: bool,
    /// Leaks and pending work at exit: tensor memory, bulk groups, `setmaxnreg` balance.
    pub exit: bool,
    /// What PTX demands and chips forgive. Off by default, for code that others wrote relies on the chip, CUTLASS's
    /// kernels included: `tcgen05.wait::ld` between `tcgen05.ld` and uses of its registers, for which the chip waits
    /// by itself; `cp.async.bulk.wait_group.read` before the exit, as a CTA's shared memory stays until its bulk
    /// stores have read it; `fence.mbarrier_init` between an initialization and a relaxed `barrier.cluster` or the async proxy; and
    /// `bar.warp.sync` between an access of one lane and one of another lane of its warp, or its arrival that passes the first
    /// on, and between branches that lanes took differently and an `.aligned` instruction.
    pub strict: bool,
}

impl Checks {
    /// Every check, also of what chips forgive.
    pub const ALL: Checks = Checks { race: true, uninit: true, exit: true, strict: true };
    /// Every check of what goes wrong on chips.
    pub const DEFAULT: Checks = Checks { strict: false, ..Checks::ALL };
    /// Only what no execution could continue from (bounds, alignment, deadlock, illegal operands, traps).
    pub const NONE: Checks = Checks { race: false, uninit: false, exit: false, strict: false };
}

/// Settings of a [`Gpu`](crate::Gpu).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Decides every scheduling choice and every delay. Equal seeds give equal runs on any machine.
    pub seed: u64,
    /// The checks that are on; [`Checks::DEFAULT`] if nothing is said.
    pub checks: Checks,
    /// The card whose limits hold and which `info` describes.
    pub card: crate::report::Card,
    /// A warp that executes more instructions than this is taken to hang.
    pub max_instructions: u64,
    /// CTAs that are in progress at once at most (a multiple of the cluster size is used). More are admitted
    /// only when these cannot go on without them, up to what the card holds.
    pub resident_ctas: u32,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            seed: 0,
            checks: Checks::DEFAULT,
            card: crate::report::Card::H100,
            max_instructions: 1 << 32,
            resident_ctas: 16,
        }
    }
}

impl Config {
    /// The same settings with another interleaving.
    #[must_use]
    pub fn seed(self, seed: u64) -> Config {
        Config { seed, ..self }
    }

    /// The same settings on another card.
    #[must_use]
    pub fn card(self, card: crate::report::Card) -> Config {
        Config { card, ..self }
    }

    /// The same settings with other checks.
    #[must_use]
    pub fn checks(self, checks: Checks) -> Config {
        Config { checks, ..self }
    }
}
