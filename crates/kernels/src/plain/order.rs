//! The order of K. Within 128 elements, lane quarter q of a row of weights holds elements `32q .. 32q + 32` in four words
//! of eight codes; word i, nibble `p + 4b` is half b of pair p, and pair `p = 2s + h` of word i is the fragment register
//! of k16 step `2i + s`, columns `8h + 2q` and the next.
//!
//! ```text
//! element   32q + 8i + 2s + h + 4b      of 128
//! column    16 (2i + s) + 8h + 2q + b   of the operand
//! ```

/// Elements that are reordered among themselves: a stage of the kernel.
pub const SPAN: usize = 128;

/// The column at which an element of K stands.
pub const fn column(k: usize) -> usize {
    let (q, i, b, s, h) = (k / 32 % 4, k / 8 % 4, k / 4 % 2, k / 2 % 2, k % 2);
    k / SPAN * SPAN + 16 * (2 * i + s) + 8 * h + 2 * q + b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_a_permutation_of_every_span() {
        let mut seen = [false; 2 * SPAN];
        for k in 0..2 * SPAN {
            assert_eq!(column(k) / SPAN, k / SPAN);
            assert!(!std::mem::replace(&mut seen[column(k)], true));
        }
    }
}
