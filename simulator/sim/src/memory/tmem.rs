//! Tensor memory of one CTA: 128 lanes x 512 columns of 32 bits, with its allocator and shadow.
//!
//! PTX ISA "Tensor Memory", "Tensor Memory Allocation". Columns are allocated in powers of two from 32 to 512.

use crate::check::shadow::{FRESH, StateId};
use crate::trap::{Check, Fault};

/// Lanes (rows).
pub const LANES: u32 = 128;
/// Columns of 32 bits.
pub const COLUMNS: u32 = 512;

/// Data, shadow and allocations.
#[derive(Debug)]
pub struct Tmem {
    words: Vec<u32>,
    /// One state for every cell, lane-major.
    pub shadow: Vec<StateId>,
    /// `(first column, columns)`, sorted.
    allocated: Vec<(u32, u32)>,
    relinquished: bool,
    /// `cta_group` of the first tensor-memory instruction, which all others must share.
    group: Option<u32>,
}

impl Default for Tmem {
    fn default() -> Tmem {
        let cells = (LANES * COLUMNS) as usize;
        Tmem {
            words: vec![0; cells],
            shadow: vec![FRESH; cells],
            allocated: Vec::new(),
            relinquished: false,
            group: None,
        }
    }
}

fn fault(message: String) -> Fault {
    Fault::new(Check::Tmem, message)
}

impl Tmem {
    /// Notes the `cta_group` of an instruction.
    pub fn use_group(&mut self, group: u32) -> Result<(), Fault> {
        match self.group.replace(group) {
            Some(other) if other != group => Err(fault(format!(
                "this instruction says cta_group::{group}, an earlier one said cta_group::{other}; a kernel uses one"
            ))),
            _ => Ok(()),
        }
    }

    /// Allocates `columns`; `None` while they do not fit (the instruction blocks).
    pub fn alloc(&mut self, columns: u32) -> Result<Option<u32>, Fault> {
        if !columns.is_power_of_two() || !(32..=COLUMNS).contains(&columns) {
            return Err(fault(format!(
                "tcgen05.alloc of {columns} columns: the count is a power of two from 32 to 512"
            )));
        }
        if self.relinquished {
            return Err(fault("tcgen05.alloc after tcgen05.relinquish_alloc_permit in the same CTA".into()));
        }
        let mut at = 0;
        while at + columns <= COLUMNS {
            match self.allocated.iter().find(|(s, n)| at < s + n && *s < at + columns) {
                Some((s, n)) => at = (s + n).next_multiple_of(columns.min(32)),
                None => {
                    self.allocated.push((at, columns));
                    self.allocated.sort_unstable();
                    return Ok(Some(at));
                }
            }
        }
        Ok(None)
    }

    /// Frees an allocation.
    pub fn dealloc(&mut self, address: u32, columns: u32) -> Result<(), Fault> {
        match self.allocated.iter().position(|a| *a == (address, columns)) {
            Some(i) => {
                self.allocated.remove(i);
                for lane in 0..LANES {
                    let start = (lane * COLUMNS + address) as usize;
                    self.shadow[start..start + columns as usize].fill(FRESH);
                }
                Ok(())
            }
            None => Err(fault(format!(
                "tcgen05.dealloc of {columns} columns at {address:#x}: the live allocations are {}",
                self.describe()
            ))),
        }
    }

    /// `tcgen05.relinquish_alloc_permit`.
    pub fn relinquish(&mut self) {
        self.relinquished = true;
    }

    /// Whether something is still allocated.
    pub fn in_use(&self) -> bool {
        !self.allocated.is_empty()
    }

    /// Columns allocated now.
    pub fn columns_in_use(&self) -> u32 {
        self.allocated.iter().map(|a| a.1).sum()
    }

    /// The live allocations, for messages.
    pub fn describe(&self) -> String {
        if self.allocated.is_empty() {
            return "none".into();
        }
        let parts: Vec<_> = self.allocated.iter().map(|(s, n)| format!("columns {s}..{}", s + n)).collect();
        parts.join(", ")
    }

    /// Checks that `columns` columns at `column` are allocated and that the lanes exist.
    pub fn check(&self, lane: u32, lanes: u32, column: u32, columns: u32) -> Result<(), Fault> {
        if lane + lanes > LANES {
            return Err(fault(format!("lanes {lane}..{} of tensor memory: there are 128", lane + lanes)));
        }
        let inside = self.allocated.iter().any(|(s, n)| *s <= column && column + columns <= s + n);
        if !inside {
            return Err(fault(format!(
                "columns {column}..{} of tensor memory are not inside one allocation; the live ones are {}",
                column + columns,
                self.describe()
            )));
        }
        Ok(())
    }

    /// Index of a cell.
    #[inline]
    pub fn index(lane: u32, column: u32) -> usize {
        (lane * COLUMNS + column) as usize
    }

    /// A cell.
    #[inline]
    pub fn get(&self, lane: u32, column: u32) -> u32 {
        self.words.get(Tmem::index(lane, column)).copied().unwrap_or(0)
    }

    /// Sets a cell.
    #[inline]
    pub fn set(&mut self, lane: u32, column: u32, value: u32) {
        self.words[Tmem::index(lane, column)] = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_follows_the_rules_exact() {
        let mut t = Tmem::default();
        assert_eq!(t.alloc(256).unwrap(), Some(0));
        assert_eq!(t.alloc(128).unwrap(), Some(256));
        assert_eq!(t.alloc(256).unwrap(), None);
        assert!(t.alloc(48).is_err() && t.alloc(16).is_err() && t.alloc(1024).is_err());
        assert!(t.dealloc(0, 128).is_err());
        assert!(t.check(0, 128, 300, 64).is_ok() && t.check(0, 128, 250, 64).is_err());
        t.dealloc(0, 256).unwrap();
        assert_eq!(t.alloc(256).unwrap(), Some(0));
        t.relinquish();
        assert!(t.alloc(32).is_err());
        assert!(t.in_use());
    }
}
