//! What hardware limits, and rules of configurations and operands: what a rule refuses and what its message says are one
//! value.

use std::fmt;

use dualgemm_device::DevicePtr;

use crate::Error;
use crate::error::refused;
use crate::parts::variant::{Scheduler, Variant};

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
/// CTAs along the second and the third dimension of a grid.
pub(crate) const GRID_YZ: Valid = Valid::range(1, 65535);

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

    /// Refuses what does not go together, by the rule that it breaks.
    pub(crate) fn refuse<T>(self, rule: &'static str) -> Result<T, Error> {
        Err(Error::Combination { kernel: self.0, rule })
    }

    /// Refuses what Hopper's kernel for many tokens alone does, and what that for few tokens alone does: expand codes of A, find the
    /// groups of choices.
    pub(crate) fn common(self, variant: &Variant) -> Result<(), Error> {
        let Variant { products, scheduler, round_gate_up_to_bf16, codes, choices, .. } = variant;
        if *choices {
            return self.refuse("it does not find the groups of choices itself");
        }
        match (products.apart(), scheduler, round_gate_up_to_bf16, codes) {
            (true, ..) => self.refuse("gate and up are products of one launch"),
            (_, Scheduler::Persistent | Scheduler::StreamK, ..) => {
                self.refuse("it has one scheduler, the grid")
            }
            (_, _, true, _) => self.refuse("it does not round gate and up to bf16"),
            (.., Some(_)) => self.refuse("it does not expand codes of A"),
            _ => Ok(()),
        }
    }

    /// Refuses groups and linear layers too.
    pub(crate) fn one_problem(self, variant: &Variant) -> Result<(), Error> {
        match variant.grouped || variant.is_linear() {
            true => self.refuse("it takes one problem, gate and up"),
            false => self.common(variant),
        }
    }

    /// Refuses more bytes of shared memory than there are.
    pub(crate) fn shared(self, bytes: u32, most: u32) -> Result<(), Error> {
        self.check("bytes of shared memory", bytes, Valid::range(0, most))
    }
}

/// M fits the grid, and K is whole blocks.
pub(crate) fn block_rule(tensor: &str, m: usize, k: usize) -> Result<(), Error> {
    if m == 0 || m > i32::MAX as usize || k == 0 || !k.is_multiple_of(16) || k > i32::MAX as usize {
        let expected = "at least one row of a multiple of 16 elements, less than 2^31";
        return refused(tensor, format!("[{m}, {k}]"), expected);
    }
    Ok(())
}

/// `what` of a tensor is at least `least` and a multiple of `step`. Addresses are checked with a `least` of 1.
pub(crate) fn fits(tensor: &str, what: &str, value: usize, least: usize, step: usize) -> Result<(), Error> {
    if value < least || !value.is_multiple_of(step) || (least > 1 && value > u32::MAX as usize) {
        let expected = format!("a multiple of {step}, at least {least}");
        return refused(&format!("{tensor}: {what}"), value.to_string(), expected);
    }
    Ok(())
}

/// Refuses null, and addresses that are no multiple of `align` bytes.
pub(crate) fn check_address(tensor: &str, ptr: DevicePtr, align: u64) -> Result<(), Error> {
    if ptr == DevicePtr::NULL || !ptr.0.is_multiple_of(align) {
        return refused(tensor, format!("at {ptr}"), format!("device memory on a multiple of {align} bytes"));
    }
    Ok(())
}
