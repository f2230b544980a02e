//! Seeded operands. The same seed gives the same bytes on every machine and in every release.

use dualgemm_formats::{
    BlockFormat, FloatMatrix, FloatType, GlobalScale, QuantizedMatrix, ScaleLayout, scalar::e4m3,
};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Which e2m1 codes occur.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CodeSet {
    /// All sixteen.
    Full,
    /// Only ±{0, ½, 1, 1½}: what the GPU MODE generator leaves after masking bytes with `0b1011_1011`.
    Masked,
}

/// Which block scales occur.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleSet {
    /// Uniform in [0, 1), rounded to e4m3, as the GPU MODE generator makes them; zeros and subnormals occur.
    Unit,
    /// Every non-negative finite byte alike: all exponents, subnormals and zero.
    Full,
}

/// A seeded source of operands.
#[derive(Debug, Clone)]
pub struct Inputs {
    rng: ChaCha8Rng,
}

impl Inputs {
    /// A source that always makes the same operands in the same order.
    pub fn seeded(seed: u64) -> Self {
        Self { rng: ChaCha8Rng::seed_from_u64(seed) }
    }

    /// Uniform in [0, 1), 24 bits.
    fn unit(&mut self) -> f32 {
        (self.rng.next_u32() >> 8) as f32 / (1 << 24) as f32
    }

    /// A dense matrix with linear scales. mxfp4 scales are powers of two from 2⁻⁸ to 2⁷ whatever the scale set. Fails
    /// if K is not a whole number of blocks or there is no row.
    pub fn quantized(
        &mut self,
        name: &str,
        format: BlockFormat,
        (rows, k): (usize, usize),
        (codes, scales): (CodeSet, ScaleSet),
        global_scale: GlobalScale,
    ) -> Result<QuantizedMatrix<'static>, dualgemm_formats::Error> {
        let mut code_bytes = vec![0; rows * (k / 2)];
        self.rng.fill_bytes(&mut code_bytes);
        if codes == CodeSet::Masked {
            code_bytes.iter_mut().for_each(|byte| *byte &= 0b1011_1011);
        }
        let scale_bytes: Vec<u8> = (0..rows * (k / format.block_len()))
            .map(|_| match (format, scales) {
                (BlockFormat::Nvfp4, ScaleSet::Unit) => e4m3::encode(self.unit()),
                (BlockFormat::Nvfp4, ScaleSet::Full) => (self.rng.next_u32() % 0x7F) as u8,
                (BlockFormat::Mxfp4, _) => 119 + (self.rng.next_u32() & 15) as u8,
            })
            .collect();
        QuantizedMatrix::new(
            name.to_owned(),
            format,
            rows,
            k,
            code_bytes,
            scale_bytes,
            ScaleLayout::Linear,
            global_scale,
        )
    }

    /// Experts of each token, drawn from `experts`, and their weights, positive and of sum 1: `[tokens, top_k]` of both. No token
    /// has an expert twice.
    ///
    /// # Panics
    /// If there are fewer experts than each token has.
    pub fn routing(&mut self, tokens: usize, experts: &[i32], top_k: usize) -> (Vec<i32>, Vec<f32>) {
        assert!(top_k <= experts.len(), "{top_k} of {} experts", experts.len());
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        let mut order = experts.to_vec();
        for _ in 0..tokens {
            for at in 0..top_k {
                let left = order.len() - at;
                order.swap(at, at + self.rng.next_u32() as usize % left);
            }
            ids.extend_from_slice(&order[..top_k]);
            let drawn: Vec<f32> = (0..top_k).map(|_| 0.05 + self.unit()).collect();
            let sum: f32 = drawn.iter().sum();
            weights.extend(drawn.iter().map(|weight| weight / sum));
        }
        (ids, weights)
    }

    /// A dense float matrix whose values look like activations: the sum of four uniforms, scaled to unit variance.
    /// Fails if there is no row.
    pub fn floats(
        &mut self,
        name: &str,
        dtype: FloatType,
        rows: usize,
        cols: usize,
    ) -> Result<FloatMatrix<'static>, dualgemm_formats::Error> {
        let values = (0..rows * cols)
            .map(|_| (self.unit() + self.unit() + self.unit() + self.unit() - 2.0) * 3f32.sqrt());
        FloatMatrix::rounded(name, dtype, rows, cols, values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(seed: u64, set: CodeSet) -> Vec<u8> {
        let scale = GlobalScale::ONE;
        let m =
            Inputs::seeded(seed).quantized("a", BlockFormat::Nvfp4, (64, 256), (set, ScaleSet::Unit), scale);
        let m = m.unwrap();
        (0..64).flat_map(|r| (0..256).map(move |k| (r, k))).map(|(r, k)| m.code(r, k)).collect()
    }

    #[test]
    fn a_seed_is_a_promise() {
        assert_eq!(codes(7, CodeSet::Full)[..8], codes(7, CodeSet::Full)[..8]);
        assert_ne!(codes(7, CodeSet::Full), codes(8, CodeSet::Full));
        // The very bytes: another generator, or another order of drawing, breaks recorded results.
        assert_eq!(codes(1, CodeSet::Full)[..12], FIRST_CODES_OF_SEED_1);
    }

    const FIRST_CODES_OF_SEED_1: [u8; 12] = [1, 11, 13, 0, 4, 10, 12, 8, 10, 14, 12, 4];

    #[test]
    fn the_full_set_has_all_codes_and_the_masked_one_eight() {
        let distinct = |set| codes(3, set).into_iter().collect::<std::collections::BTreeSet<_>>();
        assert_eq!(distinct(CodeSet::Full).len(), 16);
        assert_eq!(distinct(CodeSet::Masked).into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 8, 9, 10, 11]);
    }

    #[test]
    fn scales_are_never_nan_or_negative() {
        for (format, scales) in [
            (BlockFormat::Nvfp4, ScaleSet::Unit),
            (BlockFormat::Nvfp4, ScaleSet::Full),
            (BlockFormat::Mxfp4, ScaleSet::Full),
        ] {
            let m = Inputs::seeded(5).quantized(
                "b",
                format,
                (128, 512),
                (CodeSet::Full, scales),
                GlobalScale::ONE,
            );
            m.unwrap().check_scales().unwrap();
        }
    }

    #[test]
    fn routings_name_each_expert_once_and_weights_sum_to_one() {
        let (ids, weights) = Inputs::seeded(4).routing(50, &[0, 2, 3, 5, 7], 3);
        for (ids, weights) in ids.chunks(3).zip(weights.chunks(3)) {
            let distinct: std::collections::HashSet<_> = ids.iter().collect();
            assert!(distinct.len() == 3 && ids.iter().all(|id| [0, 2, 3, 5, 7].contains(id)), "{ids:?}");
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{weights:?}");
        }
        assert_eq!(ids.iter().collect::<std::collections::HashSet<_>>().len(), 5);
        assert_eq!(Inputs::seeded(4).routing(50, &[0, 2, 3, 5, 7], 3), (ids, weights));
    }

    #[test]
    fn floats_have_unit_variance() {
        let FloatMatrix::F32(m) = Inputs::seeded(2).floats("a", FloatType::F32, 100, 1000).unwrap() else {
            panic!("asked for f32")
        };
        let variance = (0..100).flat_map(|r| m.row(r)).map(|x| f64::from(x * x)).sum::<f64>() / 1e5;
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
    }
}
