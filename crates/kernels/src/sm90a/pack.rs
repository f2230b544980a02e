//! The weight pack: gate and up interleaved into the register fragments of `wgmma.m64nNk16`.
//!
//! A *chunk* is 64 weight rows × 64 K in 2304 contiguous bytes, loaded by one bulk copy. Its rows are 32 features:
//! each warp owns a slab of 16 rows, the first eight the gate rows and the last eight the up rows of the same eight
//! features. In the accumulator of `wgmma` a thread holds rows `g` and `g + 8`: gate and up of one feature, for the
//! same tokens, so the activation needs no exchange between threads.
//!
//! ```text
//! chunk (tile t, kb): features 32t .. 32t+32, k 64kb .. 64kb+64, at byte (t · ⌈K/64⌉ + kb) · 2304
//!   0 .. 2048    codes: 16 B per (warp w, lane l) at (32w + l) · 16; word j is k16 step j; g = l/4, q = l%4:
//!                  field 0: gate row 8w+g, k = 16j + 2q (+1 in the high half)     field 2: the same, k + 8
//!                  field 1: up   row 8w+g, k = 16j + 2q (+1 in the high half)     field 3: the same, k + 8
//!   2048 .. 2304 scales: 8 B per (w, g) at 2048 + (8w + g) · 8; word p holds k16 blocks 2p and 2p+1, gate and up
//! ```
//!
//! Field and scale encodings: [`decode`](super::decode). Features and K beyond the matrix are zero codes with zero
//! scales, which add exact zeros; so are blocks whose scale is zero, which bf16 decoding asks for. 2304 bytes for 4096
//! weights: 4.5 bits each, as in an nvfp4 checkpoint.
//!
//! mxfp4 has the same codes, a scale for 32 elements, and powers of two as scales. They are stored twice, relative to the
//! largest one of the matrix; 25 octaves have an exact product.
//!
//! A matrix packed by itself has its rows in order: of each 16 the first eight are where gate's are, the others where
//! up's are, and a chunk is 64 features.
//!
//! Fragment layout: PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16".

use dualgemm_formats::{BlockFormat, QuantizedMatrix};
use dualgemm_gemm::GateUp;
use rayon::prelude::*;

use super::decode::{WEIGHT_FACTOR, encode_lane, encode_scale, encode_scales};
use crate::Error;

/// Features of a chunk: 64 weight rows, half of them gate, half up.
pub const CHUNK_FEATURES: usize = 32;
/// K elements of a chunk.
pub const CHUNK_K: usize = 64;
/// Bytes of a chunk.
pub const CHUNK_BYTES: usize = CODE_BYTES + SCALE_BYTES;
/// Bytes of a chunk's codes.
pub const CODE_BYTES: usize = 2048;
/// Bytes of a chunk's scales.
pub const SCALE_BYTES: usize = 256;

/// Features of a chunk of one matrix.
pub const CHUNK_ROWS: usize = 2 * CHUNK_FEATURES;

/// Features of a chunk: each with a row of gate and one of up, or, of one matrix, a row each.
pub(crate) const fn chunk_features(one_matrix: bool) -> u32 {
    (if one_matrix { CHUNK_ROWS } else { CHUNK_FEATURES }) as u32
}

/// Packed weights, ready to be copied to a device.
#[derive(Debug, Clone, PartialEq)]
pub struct Pack {
    n: usize,
    k: usize,
    alpha: [f32; 2],
    bias: Option<[Vec<f32>; 2]>,
    bytes: Vec<u8>,
}

impl Pack {
    /// Packs a pair of matrices in nvfp4 or mxfp4.
    ///
    /// # Errors
    /// If the halves do not belong together, hold a NaN or negative scale, or mxfp4 scales too far apart.
    pub fn new(weights: &GateUp<'_>) -> Result<Self, Error> {
        weights.check()?;
        let (n, k) = (weights.n(), weights.k());
        let halves = [Half::new(&weights.gate)?, Half::new(&weights.up)?];
        let biases = [&weights.gate_bias, &weights.up_bias];
        let bias = biases
            .iter()
            .any(|bias| bias.is_some())
            .then(|| biases.map(|bias| bias.as_ref().map_or_else(|| vec![0.0; n], |bias| bias.to_vec())));
        Ok(Self { bias, ..Self::of_halves(&halves, n.div_ceil(CHUNK_FEATURES), (n, k)) })
    }

    /// Packs one matrix by itself, for launches of one product. [`alpha`](Self::alpha) has its factor twice, and the pack has no
    /// bias.
    ///
    /// # Errors
    /// If it holds a NaN or negative scale, or mxfp4 scales too far apart.
    pub fn of_matrix(matrix: &QuantizedMatrix<'_>) -> Result<Self, Error> {
        matrix.check_scales().map_err(dualgemm_gemm::Error::from)?;
        let low = Half::new(matrix)?;
        let low = Half { row: |feature| feature / 8 * 16 + feature % 8, ..low };
        let high = Half { row: |feature| feature / 8 * 16 + 8 + feature % 8, ..low };
        let n = matrix.rows();
        Ok(Self::of_halves(&[low, high], n.div_ceil(CHUNK_ROWS), (n, matrix.k())))
    }

    /// Packs pairs of rows, `tiles` chunks along the features.
    fn of_halves(halves: &[Half<'_>; 2], tiles: usize, (n, k): (usize, usize)) -> Self {
        let k_chunks = k.div_ceil(CHUNK_K);
        let mut bytes = vec![0; tiles * k_chunks * CHUNK_BYTES];
        bytes.par_chunks_exact_mut(CHUNK_BYTES).enumerate().for_each(|(index, chunk)| {
            let (codes, scales) = chunk.split_at_mut(CODE_BYTES);
            let origin = Origin { feature: index / k_chunks * CHUNK_FEATURES, k: index % k_chunks * CHUNK_K };
            pack_codes(halves, origin, codes);
            pack_scales(halves, origin, scales);
        });
        let alpha = [0, 1].map(|half| halves[half].factor);
        Self { n, k, alpha, bias: None, bytes }
    }

    /// Features (N) before padding.
    pub fn n(&self) -> usize {
        self.n
    }

    /// K before padding.
    pub fn k(&self) -> usize {
        self.k
    }

    /// What the sums of decoded gate and up weights must be multiplied by: tensor scale and, for nvfp4,
    /// [`WEIGHT_FACTOR`].
    pub fn alpha(&self) -> [f32; 2] {
        self.alpha
    }

    /// Biases of gate and up, `[n]` each, if either has one.
    pub fn bias(&self) -> Option<[&[f32]; 2]> {
        self.bias.as_ref().map(|[gate, up]| [gate.as_slice(), up.as_slice()])
    }

    /// The chunks, those of one feature tile along K first.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// First feature and first K of a chunk.
#[derive(Clone, Copy)]
struct Origin {
    feature: usize,
    k: usize,
}

/// One of the two rows of a pair: its matrix, and how its scales become bytes.
#[derive(Clone, Copy)]
struct Half<'a> {
    /// The matrix' row of a pair, beyond the last for some.
    row: fn(usize) -> usize,
    matrix: &'a QuantizedMatrix<'a>,
    /// mxfp4: exponent byte of the largest scale.
    largest: u8,
    factor: f32,
}

/// Halves of two from the largest mxfp4 scale down whose product with every code is an exact half: the largest scale is
/// 2¹⁵, and 1.5 · 2⁻⁹ · 2⁻¹⁴ is the smallest product.
const OCTAVES: u8 = 24;

impl<'a> Half<'a> {
    fn new(matrix: &'a QuantizedMatrix<'a>) -> Result<Self, Error> {
        let global = matrix.global_scale().value();
        if matrix.format() == BlockFormat::Nvfp4 {
            return Ok(Self { row: |feature| feature, matrix, largest: 0, factor: global * WEIGHT_FACTOR });
        }
        let len = matrix.format().block_len();
        let zero = |row, block| (0..len).all(|i| matrix.code(row, block * len + i) & 7 == 0);
        let range = (0..matrix.rows())
            .into_par_iter()
            .flat_map_iter(|row| (0..matrix.blocks()).map(move |block| (row, block)))
            .filter(|&(row, block)| !zero(row, block))
            .map(|(row, block)| matrix.scale_byte(row, block))
            .fold(|| (u8::MAX, 0), |(low, high), byte| (byte.min(low), byte.max(high)))
            .reduce(|| (u8::MAX, 0), |a, b| (a.0.min(b.0), a.1.max(b.1)));
        let (smallest, largest) = if range.0 > range.1 { (127, 127) } else { range };
        if largest - smallest > OCTAVES {
            let (tensor, found, most) = (matrix.name().into(), largest - smallest, OCTAVES);
            return Err(Error::PackRange { tensor, found, most });
        }
        // The largest scale is stored as 2¹⁵, and codes are decoded as code · 2⁻¹⁴.
        let factor = global * 2f32.powi(i32::from(largest) - 127 - 15 + 14);
        Ok(Self { row: |feature| feature, matrix, largest, factor })
    }

    /// The scale of k16 block `block` of a pair's row as the pack has it; 0 beyond the matrix.
    fn scale(&self, feature: usize, block: usize) -> u8 {
        let row = (self.row)(feature);
        let block = block * 16 / self.matrix.format().block_len();
        if row >= self.matrix.rows() || block >= self.matrix.blocks() {
            return 0;
        }
        let byte = self.matrix.scale_byte(row, block);
        match self.matrix.format() {
            BlockFormat::Nvfp4 => {
                encode_scale(byte).expect("`GateUp::check` refused scales without encoding")
            }
            // Blocks below the range have zero codes only.
            BlockFormat::Mxfp4 => ((u16::from(byte) + 30).saturating_sub(self.largest.into()) << 3) as u8,
        }
    }

    /// A code; 0 beyond the matrix and in blocks whose scale is zero.
    fn code(&self, feature: usize, k: usize) -> u8 {
        let row = (self.row)(feature);
        if row < self.matrix.rows() && k < self.matrix.k() && self.scale(feature, k / 16) != 0 {
            self.matrix.code(row, k)
        } else {
            0
        }
    }
}

fn pack_codes(halves: &[Half<'_>; 2], origin: Origin, out: &mut [u8]) {
    let [gate, up] = halves;
    for (index, word) in out.chunks_exact_mut(4).enumerate() {
        let (lane, step) = (index / 4 % 32, index % 4);
        let feature = origin.feature + index / 128 * 8 + lane / 4;
        let lane_of = |k: usize| {
            encode_lane([
                gate.code(feature, k),
                up.code(feature, k),
                gate.code(feature, k + 8),
                up.code(feature, k + 8),
            ])
        };
        let k = origin.k + 16 * step + 2 * (lane % 4);
        let packed = u32::from(lane_of(k)) | u32::from(lane_of(k + 1)) << 16;
        word.copy_from_slice(&packed.to_le_bytes());
    }
}

fn pack_scales(halves: &[Half<'_>; 2], origin: Origin, out: &mut [u8]) {
    for (index, word) in out.chunks_exact_mut(4).enumerate() {
        let feature = origin.feature + index / 2;
        let block = origin.k / 16 + index % 2 * 2;
        let pair = |block| [halves[0].scale(feature, block), halves[1].scale(feature, block)];
        word.copy_from_slice(&encode_scales(pair(block), pair(block + 1)).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::super::decode::{decode_scales, decode_word};
    use super::*;
    use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
    use dualgemm_formats::{GlobalScale, ScaleLayout};
    use half::f16;

    fn weights(n: usize, k: usize) -> GateUp<'static> {
        let mut inputs = Inputs::seeded(42);
        let mut half = |name| {
            let sets = (CodeSet::Full, ScaleSet::Full);
            inputs.quantized(name, BlockFormat::Nvfp4, (n, k), sets, GlobalScale::ONE).unwrap()
        };
        GateUp::new(half("gate"), half("up"))
    }

    /// Decodes a pack the way the kernel does and puts every fragment element where `wgmma` defines it to be:
    /// A row `16w + g + 8(r & 1)`, column `16j + 2q + e + 8(r >> 1)` for register r, half e.
    fn unpack(pack: &Pack) -> (Vec<f64>, Vec<f64>) {
        let mut halves = [vec![f64::NAN; pack.n() * pack.k()], vec![f64::NAN; pack.n() * pack.k()]];
        let word = |at: usize| u32::from_le_bytes(pack.bytes()[at..at + 4].try_into().unwrap());
        let half = |register: u32, e: usize| f16::from_bits((register >> (16 * e)) as u16);
        let k_chunks = pack.k().div_ceil(64);
        for index in 0..pack.bytes().len() / CHUNK_BYTES {
            let base = index * CHUNK_BYTES;
            for (w, lane, j) in (0..4).flat_map(|w| (0..32).flat_map(move |l| (0..4).map(move |j| (w, l, j))))
            {
                let (g, q) = (lane / 4, lane % 4);
                let registers = decode_word(word(base + (w * 32 + lane) * 16 + j * 4));
                let scales = decode_scales(word(base + CODE_BYTES + (w * 8 + g) * 8 + j / 2 * 4))[j % 2];
                for (r, e) in (0..4).flat_map(|r| (0..2).map(move |e| (r, e))) {
                    let (row, column) = (16 * w + g + 8 * (r & 1), 16 * j + 2 * q + e + 8 * (r >> 1));
                    let value = f16::from_f64(half(registers[r], e).to_f64() * half(scales, r & 1).to_f64());
                    let feature = index / k_chunks * 32 + row / 16 * 8 + row % 8;
                    let k = index % k_chunks * 64 + column;
                    let value = value.to_f64() * f64::from(WEIGHT_FACTOR);
                    if feature < pack.n() && k < pack.k() {
                        halves[row % 16 / 8][feature * pack.k() + k] = value;
                    } else {
                        assert_eq!(value, 0.0, "padding must add nothing");
                    }
                }
            }
        }
        let [gate, up] = halves;
        (gate, up)
    }

    #[test]
    fn the_kernels_view_of_a_pack_is_the_checkpoints_view_of_the_weights() {
        for (n, k) in [(32, 64), (1, 16), (33, 80), (96, 464)] {
            let weights = weights(n, k);
            let (gate, up) = unpack(&Pack::new(&weights).unwrap());
            for (index, (gate, up)) in gate.into_iter().zip(up).enumerate() {
                let (row, k) = (index / k, index % k);
                assert_eq!(gate, weights.gate.value(row, k), "gate {row} {k}");
                assert_eq!(up, weights.up.value(row, k), "up {row} {k}");
            }
        }
    }

    #[test]
    fn a_matrix_packed_by_itself_has_its_rows_where_gates_and_ups_would_be() {
        for (n, k) in [(64, 64), (1, 16), (27, 80), (136, 464)] {
            let matrix = weights(n, k).up;
            let pack = Pack::of_matrix(&matrix).unwrap();
            assert_eq!(
                (pack.n(), pack.k(), pack.bytes().len()),
                (n, k, n.div_ceil(64) * k.div_ceil(64) * 2304)
            );
            // The decoded pairs: all rows of all chunks.
            let pairs = Pack { n: n.div_ceil(64) * 32, ..pack };
            let (low, high) = unpack(&pairs);
            for (index, value) in [low, high].into_iter().enumerate().flat_map(|(half, values)| {
                values.into_iter().enumerate().map(move |(at, value)| ((half, at / k, at % k), value))
            }) {
                let (half, pair, k) = index;
                let row = pair / 8 * 16 + 8 * half + pair % 8;
                assert_eq!(value, if row < n { matrix.value(row, k) } else { 0.0 }, "{row} {k}");
            }
        }
    }

    #[test]
    fn a_pack_takes_four_and_a_half_bits_per_weight() {
        let pack = Pack::new(&weights(64, 128)).unwrap();
        assert_eq!(pack.bytes().len() * 16, 2 * 64 * 128 * 9);
    }

    fn mxfp4(name: &'static str, scales: [u8; 2]) -> QuantizedMatrix<'static> {
        let codes: Vec<u8> = (0..32u8).map(|i| i.wrapping_mul(0x1D) ^ 0x50).collect();
        let scales = scales.to_vec();
        let (format, layout) = (BlockFormat::Mxfp4, ScaleLayout::Linear);
        QuantizedMatrix::new(name, format, 1, 64, codes, scales, layout, GlobalScale::ONE).unwrap()
    }

    #[test]
    fn mxfp4_is_exact_over_25_octaves_and_refused_beyond() {
        let weights = GateUp::new(mxfp4("gate", [127, 103]), mxfp4("up", [90, 114]));
        let pack = Pack::new(&weights).unwrap();
        let (gate, up) = unpack(&pack);
        for (k, (gate, up)) in gate.into_iter().zip(up).enumerate() {
            let factor = |half: usize| f64::from(pack.alpha()[half] / WEIGHT_FACTOR);
            assert_eq!(gate * factor(0), weights.gate.value(0, k), "gate {k}");
            assert_eq!(up * factor(1), weights.up.value(0, k), "up {k}");
        }
        let far = GateUp::new(mxfp4("gate", [127, 102]), mxfp4("up", [127, 127]));
        let message = Pack::new(&far).unwrap_err().to_string();
        assert_eq!(message, "gate: its mxfp4 scales span 25 octaves; the sm_90a pack holds at most 24");
    }

    #[test]
    fn one_bias_makes_two() {
        let biased = GateUp { up_bias: Some(vec![1.0, 2.0].into()), ..weights(2, 16) };
        let pack = Pack::new(&biased).unwrap();
        assert_eq!(pack.bias(), Some([&[0.0, 0.0][..], &[1.0, 2.0]]));
        assert_eq!(Pack::new(&weights(2, 16)).unwrap().bias(), None);
    }
}
