//! Matrix operands in shared memory, as `wgmma` and `tcgen05` read them.

use super::mma::Decoder;
use super::*;
use crate::semantics::element::Element;
use crate::semantics::smem_desc::{Major, SmemDesc};

/// A matrix in shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    /// CTA that holds it.
    pub rank: u32,
    pub desc: SmemDesc,
    /// Which dimension is contiguous.
    pub major: Major,
    pub element: Element,
    /// 4- and 6-bit elements lie in groups of 16 padded to 16 bytes (`kind::f8f6f4`).
    pub padded: bool,
}

impl Matrix {
    /// Elements in 16 bytes.
    fn per_chunk(&self) -> u32 {
        if self.padded { 16 } else { 128 / self.element.bits() }
    }

    /// Rows `first..first + rows` (of M or N) over `k` elements, as `[row * k + kk]`, read by `agent`.
    pub fn read(
        &self,
        cl: &mut Cluster<'_>,
        first: u32,
        rows: u32,
        k: u32,
        agent: &Agent,
    ) -> Result<Vec<f32>> {
        let decoder = Decoder::new(self.element);
        let bits = self.element.bits();
        let mask = if bits == 32 { u32::MAX } else { (1 << bits) - 1 };
        let per = self.per_chunk();
        let mut out = vec![0.0; (rows * k) as usize];
        let mut chunk = [0u8; 16];
        // Padding is not looked at.
        let used = (per * bits / 8) as usize;
        // The contiguous dimension is walked in chunks of 16 bytes, the other one by one.
        let (lines, along) = match self.major {
            Major::K => (rows, k),
            Major::Mn => (k, rows),
        };
        for line in 0..lines {
            for c in 0..along.div_ceil(per) {
                let address = match self.major {
                    Major::K => self.desc.k_major(first + line, c),
                    Major::Mn => self.desc.mn_major(first / per + c, line),
                };
                let from = Place::Shared { rank: self.rank, offset: address };
                cl.async_read(from, &mut chunk[..used], agent)?;
                let word = u128::from_le_bytes(chunk);
                for e in 0..per.min(along - c * per) {
                    let value = decoder.get((word >> (e * bits)) as u32 & mask);
                    let at = c * per + e;
                    let (row, kk) = if self.major == Major::K { (line, at) } else { (at, line) };
                    out[(row * k + kk) as usize] = value;
                }
            }
        }
        Ok(out)
    }
}
