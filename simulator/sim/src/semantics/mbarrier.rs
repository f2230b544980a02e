//! The mbarrier object: a 64-bit state machine in shared memory.
//!
//! Flow: `exec/mbarrier` and the asynchronous engines read the object's 64 bits, apply one operation, write it
//! back, and wake waiters when [`Outcome::completed`] says so. PTX ISA 9.7.13.15.
//!
//! The encoding of the object is opaque to programs; this one is [`Mbarrier::to_bits`]. The `state` that
//! `mbarrier.arrive` returns is opaque too: here the low bits of the phase and the counts before the arrival.

use crate::trap::{Check, Fault};

/// The largest arrival count, 2^20 - 1 (PTX ISA 9.7.13.15.2).
pub const MAX_COUNT: u32 = (1 << 20) - 1;
/// The tx-count lies in -(2^20 - 1)..=2^20 - 1 (PTX ISA 9.7.13.15.2).
pub const MAX_TX: i64 = (1 << 20) - 1;

/// The contents of an mbarrier object (PTX ISA 9.7.13.15.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mbarrier {
    /// Phases completed since initialisation; the current phase has this number. Its parity is all a program
    /// can see, and all that the object's bits keep; the simulator may keep the rest beside them.
    pub phase: u64,
    /// Arrivals the current phase still waits for.
    pub pending: u32,
    /// Arrivals the next phase will wait for.
    pub expected: u32,
    /// Bytes of asynchronous transactions announced and not complete; negative while completions precede their
    /// announcement.
    pub tx_count: i32,
}

/// What an operation did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// The barrier afterwards.
    pub barrier: Mbarrier,
    /// The current phase completed, and waiters on its parity may go.
    pub completed: bool,
}

impl Mbarrier {
    /// `mbarrier.init` (PTX ISA 9.7.13.15.9): phase 0, both counts `count`, no transactions.
    ///
    /// # Errors
    /// `count` outside 1..=2^20 - 1.
    pub fn init(count: u32) -> Result<Mbarrier, Fault> {
        check_count("init", count)?;
        Ok(Mbarrier { phase: 0, pending: count, expected: count, tx_count: 0 })
    }

    /// The object's 64 bits, which an arrival returns as the opaque `state` before it (PTX ISA 9.7.13.15.13): phase parity in
    /// bit 63, "initialised" in bit 62, then tx-count (21 bits, two's complement), expected and pending (20 each, one bit
    /// free). Never all zero, never all one.
    pub fn to_bits(self) -> u64 {
        (self.phase & 1) << 63
            | 1 << 62
            | (self.tx_count as u64 & 0x1f_ffff) << 40
            | (self.expected as u64) << 20
            | self.pending as u64
    }

    /// `mbarrier.expect_tx` (PTX ISA 9.7.13.15.5.1): announces `bytes`.
    ///
    /// # Errors
    /// The tx-count would exceed its range.
    pub fn expect_tx(self, bytes: u32) -> Result<Outcome, Fault> {
        self.add_tx("expect_tx", bytes as i64).map(Mbarrier::settle)
    }

    /// `mbarrier.complete_tx`, and the completion of a bulk copy (PTX ISA 9.7.13.15.5.2): `bytes` arrived.
    ///
    /// # Errors
    /// The tx-count would fall below its range.
    pub fn complete_tx(self, bytes: u32) -> Result<Outcome, Fault> {
        self.add_tx("complete_tx", -(bytes as i64)).map(Mbarrier::settle)
    }

    fn add_tx(self, operation: &'static str, by: i64) -> Result<Mbarrier, Fault> {
        let tx_count = self.tx_count as i64 + by;
        if !(-MAX_TX..=MAX_TX).contains(&tx_count) {
            let phase = self.phase;
            return misuse(format!(
                "mbarrier.{operation}: tx-count becomes {tx_count} in phase {phase}, outside -1048575..=1048575"
            ));
        }
        Ok(Mbarrier { tx_count: tx_count as i32, ..self })
    }

    /// `mbarrier.arrive` with `count` (PTX ISA 9.7.13.15.13).
    ///
    /// # Errors
    /// A count of zero or beyond 2^20 - 1, or more arrivals than the phase still expects.
    pub fn arrive(self, count: u32) -> Result<Outcome, Fault> {
        self.take("arrive", count).map(Mbarrier::settle)
    }

    /// `mbarrier.arrive_drop` with `count` (PTX ISA 9.7.13.15.14): arrives, and later phases expect that many
    /// less.
    ///
    /// # Errors
    /// As [`arrive`](Self::arrive).
    pub fn arrive_drop(self, count: u32) -> Result<Outcome, Fault> {
        let left = self.take("arrive_drop", count)?;
        Ok(Mbarrier { expected: left.expected.saturating_sub(count), ..left }.settle())
    }

    /// `mbarrier.arrive.expect_tx` (PTX ISA 9.7.13.15.13): announces `bytes`, then arrives once.
    ///
    /// # Errors
    /// As [`expect_tx`](Self::expect_tx) and [`arrive`](Self::arrive).
    pub fn arrive_expect_tx(self, bytes: u32) -> Result<Outcome, Fault> {
        self.add_tx("arrive.expect_tx", bytes as i64)?.arrive(1)
    }

    /// `mbarrier.arrive_drop.expect_tx` (PTX ISA 9.7.13.15.14).
    ///
    /// # Errors
    /// As [`expect_tx`](Self::expect_tx) and [`arrive_drop`](Self::arrive_drop).
    pub fn arrive_drop_expect_tx(self, bytes: u32) -> Result<Outcome, Fault> {
        self.add_tx("arrive_drop.expect_tx", bytes as i64)?.arrive_drop(1)
    }

    /// `cp.async.mbarrier.arrive` without `.noinc` adds one pending arrival when issued, which its completion
    /// takes back (PTX ISA 9.7.13.15.15).
    ///
    /// # Errors
    /// The pending count would exceed 2^20 - 1.
    pub fn increment_pending(self) -> Result<Mbarrier, Fault> {
        if self.pending >= MAX_COUNT {
            let count = self.pending + 1;
            return misuse(format!("mbarrier.cp.async arrive: count {count} is outside 0..={MAX_COUNT}"));
        }
        Ok(Mbarrier { pending: self.pending + 1, ..self })
    }

    fn take(self, operation: &'static str, count: u32) -> Result<Mbarrier, Fault> {
        check_count(operation, count)?;
        if count > self.pending {
            let Mbarrier { phase, pending, expected, .. } = self;
            return misuse(format!(
                "mbarrier.{operation}: {count} arrivals, but phase {phase} has {pending} pending of {expected} \
                 expected: an arrival too many, or the barrier was initialised with too small a count"
            ));
        }
        Ok(Mbarrier { pending: self.pending - count, ..self })
    }

    /// Completes the phase if nothing is pending (PTX ISA 9.7.13.15.6).
    fn settle(self) -> Outcome {
        let completed = self.pending == 0 && self.tx_count == 0;
        let barrier =
            if completed { Mbarrier { phase: self.phase + 1, pending: self.expected, ..self } } else { self };
        Outcome { barrier, completed }
    }

    /// `mbarrier.{test_wait,try_wait}.parity` (PTX ISA 9.7.13.15.16): whether the phase of that parity is
    /// complete, that is, is not the current one. A fresh barrier answers `true` for parity 1.
    pub fn test_parity(self, parity: u32) -> bool {
        self.phase & 1 != parity as u64 & 1
    }

    /// `mbarrier.{test_wait,try_wait}` with a `state` (PTX ISA 9.7.13.15.16): whether the phase it was taken
    /// in is complete. States of any but the current and the last phase are undefined to use.
    pub fn test_state(self, state: u64) -> bool {
        state >> 63 != self.phase & 1
    }

    /// `mbarrier.pending_count` of a state (PTX ISA 9.7.13.15.17).
    pub fn pending_count(state: u64) -> u32 {
        (state & 0xf_ffff) as u32
    }
}

fn misuse<T>(text: String) -> Result<T, Fault> {
    Err(Fault::new(Check::Mbarrier, text))
}

fn check_count(operation: &'static str, count: u32) -> Result<(), Fault> {
    if count == 0 || count > MAX_COUNT {
        return misuse(format!("mbarrier.{operation}: count {count} is outside 1..={MAX_COUNT}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(outcome: Result<Outcome, Fault>, completed: bool) -> Mbarrier {
        let outcome = outcome.unwrap();
        assert_eq!(outcome.completed, completed);
        outcome.barrier
    }

    #[test]
    fn a_full_barrier_completes_when_arrivals_and_bytes_are_in() {
        let b = Mbarrier::init(1).unwrap();
        assert!(b.test_parity(1) && !b.test_parity(0));
        // The first half of the copy lands before its announcement.
        let b = next(b.complete_tx(1024), false);
        assert_eq!(b.tx_count, -1024);
        let b = next(b.arrive_expect_tx(2048), false);
        assert_eq!((b.pending, b.tx_count), (0, 1024));
        let b = next(b.complete_tx(1024), true);
        assert_eq!(b, Mbarrier { phase: 1, ..Mbarrier::init(1).unwrap() });
        assert!(b.test_parity(0) && !b.test_parity(1));
    }

    #[test]
    fn an_empty_barrier_counts_arrivals_per_phase() {
        let mut b = Mbarrier::init(3).unwrap();
        for phase in 0..6 {
            let state = b.to_bits();
            assert_eq!(Mbarrier::pending_count(state), 3);
            assert_eq!(b.phase, phase);
            b = next(b.arrive(2), false);
            assert!(b.pending != b.expected && !b.test_state(state));
            b = next(b.arrive(1), true);
            assert!((b.pending, b.tx_count) == (b.expected, 0) && b.test_state(state));
        }
        b = next(b.arrive_drop(1), false);
        b = next(b.arrive(2), true);
        assert_eq!((b.pending, b.expected), (2, 2));
        b = next(b.arrive_drop(1), false);
        b = next(b.arrive_drop_expect_tx(64), false);
        b = next(b.complete_tx(64), true);
        assert_eq!((b.pending, b.expected), (0, 0));
    }

    #[test]
    fn cp_async_arrivals_are_net_zero() {
        let b = Mbarrier::init(1).unwrap().increment_pending().unwrap();
        let b = next(b.arrive(1), false);
        assert_eq!(next(b.arrive(1), true).phase, 1);
        assert!(Mbarrier::init(MAX_COUNT).unwrap().increment_pending().is_err());
    }

    #[test]
    fn misuse_is_named() {
        let b = Mbarrier::init(2).unwrap();
        let text = |fault: Fault| fault.message;
        assert_eq!(text(Mbarrier::init(0).unwrap_err()), "mbarrier.init: count 0 is outside 1..=1048575");
        assert!(Mbarrier::init(1 << 20).is_err());
        assert_eq!(
            text(b.arrive(3).unwrap_err()),
            "mbarrier.arrive: 3 arrivals, but phase 0 has 2 pending of 2 expected: an arrival too many, or the \
             barrier was initialised with too small a count"
        );
        assert!(text(b.arrive(0).unwrap_err()).contains("count 0 is outside"));
        assert_eq!(
            text(b.expect_tx(1 << 20).unwrap_err()),
            "mbarrier.expect_tx: tx-count becomes 1048576 in phase 0, outside -1048575..=1048575"
        );
        assert!(b.complete_tx(1 << 20).is_err());
        assert!(b.arrive_expect_tx(u32::MAX).is_err() && b.arrive_drop_expect_tx(u32::MAX).is_err());
        // One arrival is left, waiting for bytes; another cannot come.
        let waiting = next(next(b.arrive(1), false).arrive_expect_tx(16), false);
        assert!(text(waiting.arrive(1).unwrap_err()).contains("has 0 pending"));
    }
}
