//! What hardware limits, and rules of configurations: what a rule refuses and what its message says are one value.

use std::fmt;

use crate::Error;

/// Opt-in shared memory of one CTA on sm_90, sm_100 and sm_103: 227 KiB.
pub(crate) const SHARED_DATACENTER: u32 = 227 << 10;
/// Shared memory of one CTA on sm_89 and sm_120, the least of all targets: 99 KiB.
pub(crate) const SHARED_LEAST: u32 = 99 << 10;
/// Stages of a ring: one is filled while another is read. No menu has more than 16, and the bound keeps sums of bytes
/// within 32 bits.
pub(crate) const STAGES: Valid = Valid::range(2, MOST_STAGES);
pub(crate) const MOST_STAGES: u32 = 16;
/// CTAs along the first dimension of a grid.
pub(crate) const GRID_X: Valid = Valid::range(1, i32::MAX as u32);

/// The values that a quantity may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Valid {
    /// Multiples of `step` from `from`, itself one, to `to`.
    Multiple {
        /// The step.
        step: u32,
        /// The least.
        from: u32,
        /// The most.
        to: u32,
    },
    /// These.
    OneOf(&'static [u32]),
    /// Whatever divides this number.
    DivisorOf(u32),
}

impl Valid {
    /// All values from `from` to `to`.
    pub(crate) const fn range(from: u32, to: u32) -> Self {
        Self::Multiple { step: 1, from, to }
    }

    /// Multiples of `step` but 0, `to` at most.
    pub(crate) const fn multiple(step: u32, to: u32) -> Self {
        Self::Multiple { step, from: step, to }
    }

    /// Whether the rule allows a value.
    pub fn allows(&self, value: u64) -> bool {
        match *self {
            Self::Multiple { step, from, to } => {
                (u64::from(from)..=u64::from(to)).contains(&value) && value.is_multiple_of(step.into())
            }
            Self::OneOf(values) => values.iter().any(|&one| u64::from(one) == value),
            Self::DivisorOf(whole) => value != 0 && u64::from(whole).is_multiple_of(value),
        }
    }
}

impl fmt::Display for Valid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Multiple { from, to, .. } if from == to => write!(f, "{from}"),
            Self::Multiple { from: 0, to, .. } => write!(f, "at most {to}"),
            Self::Multiple { step: 1, from, to } => write!(f, "from {from} to {to}"),
            Self::Multiple { step, from, to } => write!(f, "a multiple of {step} from {from} to {to}"),
            Self::OneOf(values) => {
                let values: Vec<String> = values.iter().map(u32::to_string).collect();
                write!(f, "{}", values.join(", "))
            }
            Self::DivisorOf(whole) => write!(f, "a divisor of {whole}"),
        }
    }
}

/// Rules of the kernel of that name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules(pub &'static str);

impl Rules {
    /// Refuses a value of `what` that is not valid.
    pub(crate) fn check(self, what: &'static str, found: impl Into<u64>, valid: Valid) -> Result<(), Error> {
        let found = found.into();
        match valid.allows(found) {
            true => Ok(()),
            false => Err(Error::Unsupported { kernel: self.0, what, found, valid }),
        }
    }

    /// Refuses more bytes of shared memory than there are.
    pub(crate) fn shared(self, bytes: u32, most: u32) -> Result<(), Error> {
        self.check("bytes of shared memory", bytes, Valid::range(0, most))
    }
}
