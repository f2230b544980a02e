//! Loops over registers that show the most an instruction set can do; see [`limits`](crate::limits).

use std::hint::black_box;

use super::kernel::STREAMS;
use super::vector::Vector;
use crate::isa::{InstructionSet, Work};
use crate::pack::CHUNK;

/// Turns per call.
const TURNS: usize = 1024;

/// Dot products of activation quads with four vectors of weights, all in registers. Returns the number of products.
pub(super) struct IntegerDots;

impl Work for IntegerDots {
    type Output = usize;

    #[inline(always)]
    fn run<S: InstructionSet>(self, token: S) -> usize {
        // Chains of sums hide the latency of `vpdpbusd`; 256-bit registers hold eight, 512-bit ones sixteen.
        const { assert!(<S as Vector>::LANES == 8 || <S as Vector>::LANES == 16) };
        if <S as Vector>::LANES == 16 { dots::<S, 4>(token) } else { dots::<S, 2>(token) }
    }
}

#[inline(always)]
fn dots<V: Vector, const ROWS: usize>(_: V) -> usize {
    let (chunk, codes, zero) = (black_box([0x5Au8; CHUNK]), black_box([[1i8; 4]; 8]), black_box(0));
    // SAFETY: the token shows that the machine has the instructions; they read one chunk, a word, and quads of four codes.
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

/// f32 multiply-adds in ten chains. Returns the number of products.
pub(super) struct MultiplyAdds;

impl Work for MultiplyAdds {
    type Output = usize;

    #[inline(always)]
    fn run<S: InstructionSet>(self, token: S) -> usize {
        multiply_adds(token)
    }
}

#[inline(always)]
fn multiply_adds<V: Vector>(_: V) -> usize {
    const CHAINS: usize = 10;
    let (values, ones) = (black_box([0.5f32; 8]), black_box([1.0f32; 16]));
    // SAFETY: the token shows that the machine has the instructions; they read one of eight values, and up to 16 ones.
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

/// Reads all whole lines of 64 bytes, in as many streams as the kernel for one row. The hardware prefetches, which is faster
/// than instructions where so little is done with each line (by 5 % on Zen 3). Returns the number of bytes.
pub(super) struct Read<'a>(pub(super) &'a [f32]);

impl Work for Read<'_> {
    type Output = usize;

    #[inline(always)]
    fn run<S: InstructionSet>(self, token: S) -> usize {
        read(self.0, token)
    }
}

#[inline(always)]
fn read<V: Vector>(memory: &[f32], _: V) -> usize {
    const LINE: usize = 16;
    let (from, stream) = (memory.as_ptr(), memory.len() / LINE / STREAMS);
    // SAFETY: the token shows that the machine has the instructions; each load is inside one of `STREAMS · stream` whole lines.
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
