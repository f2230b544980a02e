//! What a launch did, and how fast a card could do it at best.

mod card;
mod floor;

pub use card::{Card, CardData};
pub use floor::{Assembled, Floor, Report, Role};

/// Inputs of a matrix operation, by the rate they run at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Width {
    /// f16, bf16 (tf32 counts double).
    Bits16,
    /// e4m3, e5m2, 6-bit types, s8.
    Bits8,
    /// e2m1, s4.
    Bits4,
}

/// What was counted while simulating.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// Warp instructions by warp of the CTA and opcode, summed over CTAs.
    pub instructions: Vec<Vec<u64>>,
    /// Tensor-core operations (a multiply-add is two) by [`Width`].
    pub tensor_ops: [u64; 3],
    /// Bytes read from global memory.
    pub global_read: u64,
    /// Bytes written to global memory.
    pub global_written: u64,
    /// Different bytes of global memory touched (in words of 4), if races were looked for: what the memory of a
    /// card with a large cache moves.
    pub unique_bytes: u64,
    /// Most columns of tensor memory allocated at once in one CTA.
    pub tmem_columns: u32,
    /// Bytes read from shared memory, matrix operands included.
    pub shared_read: u64,
    /// Bytes written to shared memory, copies included.
    pub shared_written: u64,
    /// Bytes read from tensor memory by threads.
    pub tmem_read: u64,
    /// Bytes written to tensor memory by threads and copies.
    pub tmem_written: u64,
}

impl Counters {
    /// Nothing counted yet.
    pub fn new(opcodes: usize, warps: usize) -> Counters {
        Counters { instructions: vec![vec![0; opcodes]; warps], ..Counters::default() }
    }

    /// Counts a warp instruction.
    #[inline]
    pub fn count(&mut self, warp: u32, opcode: u16) {
        self.instructions[warp as usize][opcode as usize] += 1;
    }

    /// Counts a matrix operation.
    pub fn tensor(&mut self, width: Width, ops: u64) {
        self.tensor_ops[width as usize] += ops;
    }

    /// Adds another count.
    pub fn add(&mut self, other: &Counters) {
        let opcodes = other.instructions.first().map_or(0, Vec::len);
        if self.instructions.len() < other.instructions.len() {
            self.instructions.resize(other.instructions.len(), vec![0; opcodes]);
        }
        for (mine, theirs) in self.instructions.iter_mut().zip(&other.instructions) {
            for (a, b) in mine.iter_mut().zip(theirs) {
                *a += b;
            }
        }
        for (a, b) in self.tensor_ops.iter_mut().zip(other.tensor_ops) {
            *a += b;
        }
        self.global_read += other.global_read;
        self.global_written += other.global_written;
        self.shared_read += other.shared_read;
        self.shared_written += other.shared_written;
        self.tmem_read += other.tmem_read;
        self.tmem_written += other.tmem_written;
        self.unique_bytes += other.unique_bytes;
        self.tmem_columns = self.tmem_columns.max(other.tmem_columns);
    }

    /// Warp instructions in all.
    pub fn total(&self) -> u64 {
        self.instructions.iter().flatten().sum()
    }
}
