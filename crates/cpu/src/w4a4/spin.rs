//! Loops over registers that show the most an instruction set can do; see [`limits`](crate::limits).

use std::hint::black_box;

use super::kernel::STREAMS;
use super::vector::Vector;
use crate::pack::CHUNK;

/// Turns per call.
const TURNS: usize = 1024;

/// Dot products of activation quads with four vectors of weights, all in registers. Returns the products done.
///
/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn integer_dots<V: Vector>() -> usize {
    // Chains of sums hide the latency of `vpdpbusd`; 256-bit registers hold eight, 512-bit ones sixteen.
    const { assert!(V::LANES == 8 || V::LANES == 16) };
    // SAFETY: the caller's promise.
    unsafe { if V::LANES == 16 { dots::<V, 4>() } else { dots::<V, 2>() } }
}

#[inline(always)]
unsafe fn dots<V: Vector, const ROWS: usize>() -> usize {
    let (chunk, codes, zero) = (black_box([0x5Au8; CHUNK]), black_box([[1i8; 4]; 8]), black_box(0));
    // SAFETY: reads one chunk, and quads 0 to 7.
    unsafe {
        let weights = V::weights(chunk.as_ptr(), 0);
        let mut sums = [[[V::start(&zero); 2]; 2]; ROWS];
        for turn in 0..TURNS {
            for (row, sums) in sums.iter_mut().enumerate() {
                let quad = V::quad(codes[(turn * ROWS + row) % 8].as_ptr());
                for (sums, &weights) in sums.iter_mut().zip(weights.as_chunks().0) {
                    *sums = V::dots(*sums, weights, quad);
                }
            }
        }
        black_box(sums);
        TURNS * ROWS * 4 * V::LANES * 4
    }
}

/// f32 multiply-adds, ten chains of them. Returns the products done.
///
/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn multiply_adds<V: Vector>() -> usize {
    const CHAINS: usize = 10;
    let (values, ones) = (black_box([0.5f32; 8]), black_box([1.0f32; 16]));
    // SAFETY: reads one of eight values, and up to 16 ones.
    unsafe {
        let one = V::load(ones.as_ptr());
        let mut sums = [one; CHAINS];
        for turn in 0..TURNS {
            let value = V::splat(&values[turn % 8]);
            for sum in &mut sums {
                *sum = V::mul_add(*sum, value, one);
            }
        }
        black_box(sums);
        TURNS * CHAINS * V::LANES
    }
}

/// Reads `lines` lines of 64 bytes as floats, in as many streams as the kernel for one row. Fetching is left to the
/// hardware, which is faster where so little is done with each line (by 5 % on Zen 3). Returns the bytes read.
///
/// # Safety
/// The machine has the instruction set of `V`; `from` points to as many lines.
#[inline(always)]
pub(super) unsafe fn read<V: Vector>(from: *const f32, lines: usize) -> usize {
    const LINE: usize = 16;
    let stream = lines / STREAMS;
    // SAFETY: every load stays inside the line.
    unsafe {
        let one = V::splat(black_box(&1.0));
        let mut sums = [one; 4];
        for line in 0..stream {
            for at in 0..STREAMS {
                let line = from.add(LINE * (at * stream + line));
                for at in (0..LINE).step_by(V::LANES) {
                    let sum = &mut sums[at / V::LANES];
                    *sum = V::mul_add(V::load(line.add(at)), one, *sum);
                }
            }
        }
        black_box(sums);
    }
    64 * STREAMS * stream
}
