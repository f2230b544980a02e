//! The memories of a GPU and the addresses they have.
//!
//! Every state space has a window in the 64-bit generic address space, so that a generic access finds its space
//! from the address alone (PTX ISA "Generic Addressing"). Shared addresses are 32 bits: the CTA's rank in its
//! cluster from bit 24 up, below it the offset in its shared memory. That is what hardware does, and kernels
//! rely on it (they mask rank bits to name the leader of a CTA pair). Offsets start at 0x400: the first KiB is
//! reserved by the system on sm_90 and later.

pub mod global;
pub mod local;
pub mod shared;
pub mod tmem;

use crate::trap::{Check, Fault, fault};
use std::fmt;

/// Generic address of shared address 0 of cluster rank 0.
pub const SHARED_WINDOW: u64 = 0x0200_0000_0000;
/// Generic address of local byte 0 (of the executing thread).
pub const LOCAL_WINDOW: u64 = 0x0300_0000_0000;
/// Generic address of the first kernel parameter byte.
pub const PARAM_WINDOW: u64 = 0x0400_0000_0000;
/// Generic address of constant byte 0.
pub const CONST_WINDOW: u64 = 0x0500_0000_0000;
/// Where global allocations start.
pub const GLOBAL_BASE: u64 = 0x7000_0000_0000;
/// What pointers to device functions count from: function `i` of a module has this plus `16 * i`. No memory is there.
pub const FUNCTION_BASE: u64 = 0x6000_0000_0000;
/// Bytes of each window.
pub const WINDOW: u64 = 1 << 32;
/// Log2 of the distance between the shared memories of a cluster.
pub const RANK_SHIFT: u32 = 24;
/// First usable offset in shared memory.
pub const SHARED_RESERVED: u32 = 0x400;

/// A state space at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    /// Decided by the address.
    Generic,
    Global,
    /// `.shared` or `.shared::cta`: the executing CTA's.
    SharedCta,
    /// `.shared::cluster`: any CTA's of the cluster.
    SharedCluster,
    Local,
    Const,
    /// Parameters of the kernel.
    Param,
    /// Parameters and results of device functions: private to a thread.
    FuncParam,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Generic => "generic",
            Space::Global => "global",
            Space::SharedCta => "shared::cta",
            Space::SharedCluster => "shared::cluster",
            Space::Local => "local",
            Space::Const => "const",
            Space::Param => "param",
            Space::FuncParam => "param (function)",
        })
    }
}

/// A place in one memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A global address.
    Global(u64),
    /// A byte of the shared memory of the CTA with this rank.
    Shared {
        /// Rank in the cluster.
        rank: u32,
        /// Byte in its shared memory.
        offset: u32,
    },
    /// A byte of the thread's local memory.
    Local(u64),
    /// A byte of constant memory.
    Const(u64),
    /// A byte of the kernel parameters.
    Param(u64),
    /// A byte of the thread's function parameters.
    FuncParam(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Global(a) => write!(f, "global {a:#x}"),
            Place::Shared { rank, offset } => write!(f, "shared {offset:#x} of cluster rank {rank}"),
            Place::Local(o) => write!(f, "local {o:#x}"),
            Place::Const(o) => write!(f, "const {o:#x}"),
            Place::Param(o) => write!(f, "param {o:#x}"),
            Place::FuncParam(o) => write!(f, "function param {o:#x}"),
        }
    }
}

/// The place an address of a space names, before any bounds check.
#[inline]
pub fn place(space: Space, address: u64) -> Place {
    match space {
        Space::Global => Place::Global(address),
        Space::SharedCta | Space::SharedCluster => {
            let a = address as u32;
            Place::Shared { rank: a >> RANK_SHIFT, offset: a & ((1 << RANK_SHIFT) - 1) }
        }
        Space::Local => Place::Local(address),
        Space::Const => Place::Const(address),
        Space::Param => Place::Param(address),
        Space::FuncParam => Place::FuncParam(address),
        Space::Generic => match address & !(WINDOW - 1) {
            SHARED_WINDOW => place(Space::SharedCluster, address - SHARED_WINDOW),
            LOCAL_WINDOW => Place::Local(address - LOCAL_WINDOW),
            PARAM_WINDOW => Place::Param(address - PARAM_WINDOW),
            CONST_WINDOW => Place::Const(address - CONST_WINDOW),
            _ => Place::Global(address),
        },
    }
}

#[inline]
pub fn to_generic(space: Space, address: u64) -> u64 {
    match space {
        Space::SharedCta | Space::SharedCluster => SHARED_WINDOW + (address as u32) as u64,
        Space::Local => LOCAL_WINDOW + address,
        Space::Const => CONST_WINDOW + address,
        Space::Param => PARAM_WINDOW + address,
        Space::Generic | Space::Global | Space::FuncParam => address,
    }
}

/// Address in `space` of a generic address (the inverse of [`to_generic`] inside the window).
#[inline]
pub fn from_generic(space: Space, address: u64) -> u64 {
    address.wrapping_sub(to_generic(space, 0))
}

/// Whether a generic address lies in the window of `space` (`isspacep`).
pub fn in_space(space: Space, address: u64, own_rank: u32) -> bool {
    match (space, place(Space::Generic, address)) {
        (Space::Global, Place::Global(_))
        | (Space::SharedCluster, Place::Shared { .. })
        | (Space::Local, Place::Local(_))
        | (Space::Const, Place::Const(_))
        | (Space::Param, Place::Param(_)) => true,
        (Space::SharedCta, Place::Shared { rank, .. }) => rank == own_rank,
        _ => false,
    }
}

/// The fault for an access that its size does not divide.
pub fn misaligned(place: Place, bytes: u64) -> Fault {
    let value = match place {
        Place::Global(a) | Place::Local(a) | Place::Const(a) | Place::Param(a) | Place::FuncParam(a) => a,
        Place::Shared { offset, .. } => offset.into(),
    };
    fault!(
        Check::Align,
        "an access of {bytes} bytes needs an address that is a multiple of {bytes}; {} past one",
        value % bytes
    )
    .at(place)
}

/// The fault for an access outside a memory of `size` bytes that is one block.
pub fn outside(place: Place, bytes: u64, what: &str, size: u64) -> Fault {
    fault!(Check::Bounds, "{bytes} bytes do not lie inside {what} of {size} bytes").at(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generic_addresses_return_to_their_space_exact() {
        for space in [Space::SharedCta, Space::SharedCluster, Space::Local, Space::Const, Space::Param] {
            for address in [0u64, 0x400, 0x0100_0400, 0x0f00_1234] {
                let g = to_generic(space, address);
                assert_eq!(from_generic(space, g), address);
                let expected = if space == Space::SharedCta { Space::SharedCluster } else { space };
                assert!(in_space(expected, g, 0), "{space} {address:#x}");
                assert!(!in_space(Space::Global, g, 0));
                assert_eq!(place(Space::Generic, g), place(space, address));
            }
        }
        assert!(in_space(Space::Global, GLOBAL_BASE, 0));
        assert!(!in_space(Space::SharedCta, SHARED_WINDOW + (1 << RANK_SHIFT), 0));
        assert!(in_space(Space::SharedCta, SHARED_WINDOW + (1 << RANK_SHIFT), 1));
    }
}
