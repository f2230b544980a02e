//! A quick hash for keys that the simulator makes itself: nobody chooses them to collide.

use std::hash::{BuildHasherDefault, Hasher};

pub type QuickMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<Quick>>;

/// Rotates, adds and multiplies, one word at a time.
#[derive(Debug, Default)]
pub struct Quick(u64);

impl Hasher for Quick {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u64((*b).into()));
    }

    fn write_u8(&mut self, n: u8) {
        self.write_u64(n.into());
    }

    fn write_u16(&mut self, n: u16) {
        self.write_u64(n.into());
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(n.into());
    }

    fn write_u64(&mut self, n: u64) {
        // An odd constant near 2^64 / pi, as in Firefox.
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }

    fn finish(&self) -> u64 {
        // Products are good in their upper bits; tables take the lower ones as well.
        self.0.rotate_left(26)
    }
}
