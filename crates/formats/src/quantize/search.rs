//! The block scale of least squared error.
//!
//! Producers map a block's largest magnitude to 6. Mapping it to 4 ("four over six") or to anything between is
//! often better, because between 4 and 6 the grid is coarse. Here all 126 positive e4m3 scales compete. Two sums
//! that no code choice can avoid, and that only grow on the way out, end the search early on either side
//! without missing the optimum:
//!
//! - below: elements over `6 · scale` saturate, there and at every smaller scale;
//! - above: elements under `scale / 2`, the smallest code, lose their distance to it or to 0, and at every larger
//!   scale at least as much.

use super::rules::Block;
use crate::GlobalScale;
use crate::scalar::{e2m1, e4m3};

/// Codes and scale byte of a block.
type Quantized = ([u8; 16], u8);

/// The scale byte under which `x / (scale · global)` rounded to e2m1 has the least squared error, in f32.
/// `plain` wins ties, and blocks that hold only zeros, or something that is not finite.
pub(super) fn best_scale(x: &Block, global: f32, plain: u8) -> u8 {
    let y = x.map(|x| x.abs() / global);
    let all_zero = energy(y);
    if all_zero == 0.0 || !all_zero.is_finite() {
        return plain;
    }
    let mut best = if plain == 0 { (all_zero, 0) } else { (error(&y, e4m3::decode(plain)), plain) };
    let mut visit = |byte: u8, unavoidable: fn(f32, f32) -> f32| {
        let scale = e4m3::decode(byte);
        let error = error(&y, scale);
        if error < best.0 {
            best = (error, byte);
        }
        energy(y.map(|y| unavoidable(y, scale))) < best.0
    };
    let _ = (1..plain).rev().all(|byte| visit(byte, |y, scale| (y - 6.0 * scale).max(0.0)));
    let _ = (plain + 1..=0x7E).all(|byte| visit(byte, |y, scale| (0.5 * scale - y).max(0.0).min(y)));
    best.1
}

/// Which of two quantizations of a block errs less, in f64 and with the codes that the producer's rule really gives: its
/// products may overflow where the search's quotient does not. `plain` wins ties.
pub(super) fn better(x: &Block, global: GlobalScale, plain: Quantized, found: Quantized) -> Quantized {
    let error = |(codes, scale): &Quantized| -> f64 {
        let scale = f64::from(e4m3::decode(*scale)) * global.exact();
        let each = x.iter().zip(codes).filter(|(x, _)| x.is_finite());
        each.map(|(&x, &code)| (f64::from(x) - f64::from(e2m1::decode(code)) * scale).powi(2)).sum()
    };
    if found.1 != plain.1 && error(&found) < error(&plain) { found } else { plain }
}

/// Squared error of a block of magnitudes.
fn error(y: &Block, scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    energy(y.map(|y| y - round_to_grid((y * inverse).min(6.0)) * scale))
}

/// Sum of squares in four lanes, an order that vectorizes.
fn energy(x: Block) -> f32 {
    let mut lanes = [0.0; 4];
    for four in x.as_chunks::<4>().0 {
        for (lane, x) in lanes.iter_mut().zip(four) {
            *lane += x * x;
        }
    }
    (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
}

/// The e2m1 magnitude nearest to `t` in 0..=6. Adding and subtracting 1.5 · 2ᵐ rounds to the spacing of the f32
/// numbers there, which is the grid's: 1/2 below 2, 1 below 4, then 2.
fn round_to_grid(t: f32) -> f32 {
    const SPACED_HALF: f32 = 1.5 * (1 << 22) as f32;
    let shift = match t {
        _ if t < 2.0 => SPACED_HALF,
        _ if t < 4.0 => 2.0 * SPACED_HALF,
        _ => 4.0 * SPACED_HALF,
    };
    (t + shift) - shift
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rounding_to_the_grid_is_e2m1() {
        for i in 0..=6 << 12 {
            let t = i as f32 / f32::from(1u16 << 12);
            assert_eq!(round_to_grid(t), e2m1::decode(e2m1::encode(t)), "{t}");
        }
    }

    fn error_at(x: &Block, global: f32, byte: u8) -> f64 {
        let scale = f64::from(e4m3::decode(byte)) * f64::from(global);
        x.iter()
            .map(|&x| {
                let x = f64::from(x.abs());
                e2m1::VALUES[..8].iter().map(|&q| (x - f64::from(q) * scale).powi(2)).fold(f64::MAX, f64::min)
            })
            .sum()
    }

    proptest! {
        #[test]
        fn no_other_scale_is_better(
            x in prop::array::uniform16(prop_oneof![4 => -1.0f32..1.0, 1 => -30.0f32..30.0, 1 => Just(0.0f32)]),
            global in 1e-3f32..3.0,
            plain in 0u8..=0x7E,
        ) {
            let byte = best_scale(&x, global, plain);
            let least = (1..=0x7E).map(|b| error_at(&x, global, b)).fold(f64::MAX, f64::min);
            // Distances are f32, so equal to about 1e-6 of the energy is equal.
            let energy: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            prop_assert!(error_at(&x, global, byte) <= least + 1e-6 * energy, "{byte:#04x}");
        }
    }

    #[test]
    fn four_over_six_is_found() {
        // 4, 3 and 2 fit under scale 1; the plain rule maps 4 to 6 and misses 3 and 2.
        let mut x = [2.0; 16];
        x[..4].copy_from_slice(&[4.0, 3.0, -4.0, -3.0]);
        let plain = e4m3::encode(4.0 / 6.0);
        assert_eq!(e4m3::decode(best_scale(&x, 1.0, plain)), 1.0);
        assert_eq!(error_at(&x, 1.0, best_scale(&x, 1.0, plain)), 0.0);
    }

    #[test]
    fn zeros_and_numbers_that_are_not_finite_keep_the_plain_scale() {
        assert_eq!(best_scale(&[0.0; 16], 1.0, 0x38), 0x38);
        assert_eq!(best_scale(&[f32::NAN; 16], 1.0, 0x20), 0x20);
        assert_eq!(best_scale(&[f32::INFINITY; 16], 1.0, 0x7E), 0x7E);
    }
}
