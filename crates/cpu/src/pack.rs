//! Weights packed for the CPU kernels. They are packed once; every instruction set, W4A4 and W4A16 read the same pack.
//!
//! A *panel* is 16 gate features and the same 16 up features over all of K, or 32 consecutive features of a linear layer, the
//! first 16 in the place of gate. It is one contiguous stream of *chunks*, one per 16 elements of K, so that a product of few rows reads memory in order:
//!
//! ```text
//! panel p = features 16p .. 16p+16           chunk c = elements 16c .. 16c+16 of K, 288 bytes
//!
//! byte 0    gate codes, line 0   64 bytes    byte 4f+j of line l: element 8l+j of feature f in the low nibble,
//!      64   gate codes, line 1   64                               element 8l+4+j in the high nibble
//!      128  up codes, lines 0, 1 128         so that one mask (one shift and mask) of a line leaves four
//!      256  gate scales          16          consecutive elements per feature in one 32-bit lane: the operand
//!      272  up scales            16          of `vpmaddubsw` and `vpdpbusd`
//! ```
//!
//! That is 4.5 bits per weight, as in nvfp4 itself. An mxfp4 block is two chunks that repeat its scale, a byte of ue8m0. A scale
//! of nvfp4 is a byte with 5 bits of exponent and 3 of significand, which hold every e4m3 value without subnormals, so that a
//! shift and an addition make it an f32. Codes under a scale of zero are zero, so that kernels may read that scale as any number.
//! The features that pad the last panel have zero codes and zero scales.

use std::ops::Range;

use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix};
use dualgemm_gemm::{GateUp, Operation, WeightRef};

use crate::Error;
use crate::aligned::Aligned;
use crate::team;

/// Gate features (and up features) of a panel.
pub const PANEL: usize = 16;

/// Columns of C that a panel makes.
pub const fn panel_columns(op: Operation) -> usize {
    PANEL * 2 / op.matrices()
}

/// Elements of K in a chunk.
pub const CHUNK_K: usize = 16;
/// Bytes of a chunk.
pub const CHUNK: usize = 288;
/// Offset of the up codes in a chunk; gate codes come first.
pub const UP_CODES: usize = 128;
/// Offset of the 16 gate scales in a chunk; the 16 up scales follow.
pub const SCALES: usize = 256;

/// A scale byte of nvfp4, placed in bits 20 to 27 of an f32, is the scale times 2 to the power of minus this.
pub(crate) const SCALE_EXPONENT: u32 = 117;

/// The byte that stands for a block scale in a pack.
const fn pack_scale(format: BlockFormat, byte: u8) -> u8 {
    match format {
        BlockFormat::Nvfp4 if byte > 0 => {
            ((format.decode_scale(byte).to_bits() >> 20) - (SCALE_EXPONENT << 3)) as u8
        }
        _ => byte,
    }
}

/// The block scale for which a byte of a pack stands.
#[inline(always)]
pub(crate) fn unpack_scale(format: BlockFormat, byte: u8) -> f32 {
    match format {
        BlockFormat::Nvfp4 if byte > 0 => f32::from_bits((u32::from(byte) << 20) + (SCALE_EXPONENT << 23)),
        BlockFormat::Nvfp4 => 0.0,
        BlockFormat::Mxfp4 => format.decode_scale(byte),
    }
}

/// A pair of weight matrices, or a single one, in kernel order, with the tensor scales and biases that the epilogue needs.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedGateUp {
    op: Operation,
    format: BlockFormat,
    n: usize,
    k: usize,
    global_scales: [GlobalScale; 2],
    /// Of a linear layer the first alone.
    biases: [Option<Vec<f32>>; 2],
    panels: Aligned<u8>,
}

impl PackedGateUp {
    /// Packs a pair of weights or a linear layer, on all threads of the current [team](crate::Team) or rayon pool.
    ///
    /// # Errors
    /// If the halves do not belong together or a block scale is NaN or negative.
    pub fn pack<'w>(weights: impl Into<WeightRef<'w>>) -> Result<Self, Error> {
        let weights = weights.into();
        weights.check()?;
        let (halves, (_, n, _)) = (halves(weights)?, weights.shape());
        let mut this = Self::like(weights.op(), halves, n);
        this.pack_run(0, halves, n);
        Ok(this)
    }

    /// Packs `n` features of weights that come in runs of consecutive features, so that only one run is held beside the pack at
    /// a time. All runs but the last have a multiple of [`PANEL`] features.
    ///
    /// # Errors
    /// Passes on the errors of the runs. If a run breaks a rule of [`pack`](Self::pack), differs from the first in
    /// format, K, tensor scales or the presence of biases, or the runs do not add up to `n` features.
    pub fn pack_runs<'w, E: From<Error>>(
        n: usize,
        runs: impl IntoIterator<Item = Result<GateUp<'w>, E>>,
    ) -> Result<Self, E> {
        let (mut this, mut done) = (None::<Self>, 0);
        for run in runs {
            let run = run?;
            run.check().map_err(Error::from)?;
            let halves = of_pair(&run);
            let this = this.get_or_insert_with(|| Self::like(Operation::GateUp, halves, n));
            this.check_run(done, &run)?;
            this.pack_run(done, halves, run.n());
            done += run.n();
        }
        match this {
            Some(this) if done == n => Ok(this),
            _ => Err(Error::NotPlanned {
                what: "a sequence of runs",
                found: format!("{done} features"),
                expected: format!("{n} features"),
            }
            .into()),
        }
    }

    /// An empty pack of `n` features that otherwise matches these weights.
    fn like(op: Operation, [first, second]: [Half<'_>; 2], n: usize) -> Self {
        let bias = |(_, bias): Half<'_>| bias.map(|_| vec![0.0; n]);
        let (format, k) = (first.0.format(), first.0.k());
        Self {
            op,
            format,
            n,
            k,
            global_scales: [first.0.global_scale(), second.0.global_scale()],
            biases: [bias(first), bias(second).filter(|_| op == Operation::GateUp)],
            panels: Aligned::untouched(n.div_ceil(panel_columns(op)) * (k / CHUNK_K) * CHUNK),
        }
    }

    fn check_run(&self, first: usize, run: &GateUp<'_>) -> Result<(), Error> {
        let scales = [run.gate.global_scale(), run.up.global_scale()];
        let biases = [run.gate_bias.is_some(), run.up_bias.is_some()];
        let same = (run.gate.format(), run.k(), scales) == (self.format, self.k, self.global_scales)
            && biases == self.biases.each_ref().map(Option::is_some);
        if same && first.is_multiple_of(PANEL) && run.n() <= self.n - first {
            return Ok(());
        }
        Err(Error::NotPlanned {
            what: "a run of weights",
            found: format!("{} [{}, {}] from feature {first}", run.gate.format(), run.n(), run.k()),
            expected: format!(
                "features of {} [{}, {}], {PANEL} at a time, with the scales and biases of the first run",
                self.format, self.n, self.k
            ),
        })
    }

    /// Packs the features of a run. They go to feature `first` and on; that one starts a panel.
    fn pack_run(&mut self, first: usize, halves: [Half<'_>; 2], n: usize) {
        for (all, (_, bias)) in self.biases.iter_mut().zip(halves) {
            if let (Some(all), Some(bias)) = (all, bias) {
                all[first..first + n].copy_from_slice(bias);
            }
        }
        let (len, columns) = (self.panel_len(), panel_columns(self.op));
        let panels = &mut self.panels[first / columns * len..][..n.div_ceil(columns) * len];
        team::for_each_part(panels, len, |panel, out| {
            for (half, (matrix, _)) in halves.into_iter().enumerate() {
                pack_half(matrix, panel * columns + half * (columns - PANEL), half, out);
            }
        });
    }

    /// What the weights are for.
    pub fn op(&self) -> Operation {
        self.op
    }

    /// Block format of the codes.
    pub fn format(&self) -> BlockFormat {
        self.format
    }

    /// Features of each half.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Elements per feature.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Number of panels, the last one padded with zeros.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(panel_columns(self.op))
    }

    /// Number of chunks of 16 elements in a panel.
    pub fn chunks(&self) -> usize {
        self.k / CHUNK_K
    }

    /// The bytes of a panel: [`chunks`](Self::chunks) times [`CHUNK`].
    ///
    /// # Panics
    /// If the pack has no panel of this number.
    pub fn panel(&self, panel: usize) -> &[u8] {
        &self.panels[panel * self.panel_len()..][..self.panel_len()]
    }

    /// The bytes of consecutive panels.
    pub(crate) fn panel_range(&self, panels: Range<usize>) -> &[u8] {
        &self.panels[panels.start * self.panel_len()..panels.end * self.panel_len()]
    }

    /// Number of bytes that a product reads: codes and scales of all panels.
    pub fn bytes(&self) -> usize {
        self.panels.len()
    }

    /// Tensor scales of gate and of up; of a linear layer twice the same.
    pub fn global_scales(&self) -> [GlobalScale; 2] {
        self.global_scales
    }

    /// Biases of gate and of up, [`n`](Self::n) values each; of a linear layer twice the same.
    pub fn biases(&self) -> [Option<&[f32]>; 2] {
        let [first, second] = self.biases.each_ref().map(Option::as_deref);
        [first, if self.op == Operation::Linear { first } else { second }]
    }

    fn panel_len(&self) -> usize {
        self.chunks() * CHUNK
    }
}

/// A matrix whose features fill one half of the panels, and its bias.
type Half<'w> = (&'w QuantizedMatrix<'w>, Option<&'w [f32]>);

fn of_pair<'w>(pair: &'w GateUp<'_>) -> [Half<'w>; 2] {
    [(&pair.gate, pair.gate_bias.as_deref()), (&pair.up, pair.up_bias.as_deref())]
}

/// Gate and up, or a linear layer twice.
fn halves(weights: WeightRef<'_>) -> Result<[Half<'_>; 2], Error> {
    Ok(match weights {
        WeightRef::GateUp(pair) => of_pair(pair),
        WeightRef::Linear(layer) => [(layer.weight.blocks()?, layer.bias.as_deref()); 2],
    })
}

/// Packs up to 16 features from `first` on into one half of a panel.
fn pack_half(matrix: &QuantizedMatrix<'_>, first: usize, half: usize, panel: &mut [u8]) {
    let blocks_per_chunk = matrix.format().block_len() / CHUNK_K;
    for feature in 0..PANEL.min(matrix.rows().saturating_sub(first)) {
        let codes = matrix.row_codes(first + feature);
        for (c, chunk) in panel.chunks_exact_mut(CHUNK).enumerate() {
            let scale = pack_scale(matrix.format(), matrix.scale_byte(first + feature, c / blocks_per_chunk));
            chunk[SCALES + PANEL * half + feature] = scale;
            if matches!((matrix.format(), scale), (BlockFormat::Nvfp4, 0)) {
                continue;
            }
            for line in 0..2 {
                let source = &codes[8 * c + 4 * line..][..4];
                let to = half * UP_CODES + 64 * line + 4 * feature;
                for (pair, byte) in chunk[to..to + 4].chunks_exact_mut(2).enumerate() {
                    // Elements 2·pair and 2·pair + 1 of both quads; a source byte holds two neighbours.
                    let (low, high) = (source[pair], source[2 + pair]);
                    byte[0] = low & 15 | high << 4;
                    byte[1] = low >> 4 | high & 0xF0;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_formats::ScaleLayout;

    fn weights(format: BlockFormat, n: usize, k: usize, seed: usize) -> GateUp<'static> {
        let matrix = |name: &'static str, seed: usize, global| {
            let codes: Vec<u8> = (0..n * k / 2).map(|i| (((i + seed) * 2_654_435_761) >> 13) as u8).collect();
            let scales: Vec<u8> =
                (0..n * k / format.block_len()).map(|i| ((i + seed) * 37 % 127) as u8).collect();
            QuantizedMatrix::new(name, format, n, k, codes, scales, ScaleLayout::Linear, global).unwrap()
        };
        let mut weights = GateUp::new(
            matrix("gate", seed, GlobalScale::divisor(3.0)),
            matrix("up", seed + 1, GlobalScale::multiplier(0.5)),
        );
        if seed % 2 == 1 {
            weights.up_bias = Some((0..n).map(|i| i as f32 - 1.5).collect::<Vec<_>>().into());
        }
        weights
    }

    /// The drawing at the head of this file, as a function.
    fn byte_of(half: usize, feature: usize, k: usize) -> (usize, u32) {
        let (line, quad, j) = (k / 8, k / 4 % 2, k % 4);
        (half * UP_CODES + line * 64 + feature * 4 + j, 4 * quad as u32)
    }

    #[test]
    fn every_code_and_scale_is_where_the_layout_says() {
        for format in BlockFormat::ALL {
            let (n, k) = (21, 96);
            let weights = weights(format, n, k, 3);
            let packed = PackedGateUp::pack(&weights).unwrap();
            assert_eq!((packed.panels(), packed.chunks(), packed.bytes()), (2, 6, 2 * 6 * 288));
            for (half, matrix) in [&weights.gate, &weights.up].into_iter().enumerate() {
                for feature in 0..32 {
                    for at in 0..k {
                        let chunk = &packed.panel(feature / 16)[at / 16 * CHUNK..][..CHUNK];
                        let (byte, shift) = byte_of(half, feature % 16, at % 16);
                        let code = chunk[byte] >> shift & 15;
                        let scale = chunk[SCALES + 16 * half + feature % 16];
                        if feature < n {
                            let byte = matrix.scale_byte(feature, at / format.block_len());
                            assert_eq!(unpack_scale(format, scale), format.decode_scale(byte));
                            let nothing = format == BlockFormat::Nvfp4 && byte == 0;
                            assert_eq!(code, if nothing { 0 } else { matrix.code(feature, at) });
                        } else {
                            assert_eq!((code, scale), (0, 0), "padding");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_linear_layer_fills_both_halves_with_consecutive_features() {
        for n in [1, 16, 17, 32, 50] {
            let pair = weights(BlockFormat::Nvfp4, n, 32, 3);
            let layer = dualgemm_gemm::Linear { weight: pair.up.clone().into(), bias: pair.up_bias.clone() };
            let packed = PackedGateUp::pack(&layer).unwrap();
            assert_eq!((packed.panels(), packed.biases()), (n.div_ceil(32), [pair.up_bias.as_deref(); 2]));
            for (feature, at) in (0..packed.panels() * 32).flat_map(|f| [0, 9, 31].map(|k| (f, k))) {
                let chunk = &packed.panel(feature / 32)[at / 16 * CHUNK..][..CHUNK];
                let (byte, shift) = byte_of(feature % 32 / 16, feature % 16, at % 16);
                let scale = unpack_scale(BlockFormat::Nvfp4, chunk[SCALES + feature % 32]);
                let code = chunk[byte] >> shift & 15;
                let expected = match feature < n {
                    true => BlockFormat::Nvfp4.decode_scale(pair.up.scale_byte(feature, at / 16)),
                    false => 0.0,
                };
                assert_eq!(scale, expected, "feature {feature} of {n}");
                assert_eq!(code, if expected == 0.0 { 0 } else { pair.up.code(feature, at) });
            }
        }
    }

    #[test]
    fn every_scale_comes_back_exact() {
        for (format, bytes) in [(BlockFormat::Nvfp4, 0..0x7F), (BlockFormat::Mxfp4, 0..0xFF)] {
            for byte in bytes {
                let packed = pack_scale(format, byte);
                assert_eq!(unpack_scale(format, packed), format.decode_scale(byte), "{format} {byte:#04x}");
                // 2⁻⁹ to 448, without subnormals.
                assert!(
                    format == BlockFormat::Mxfp4 || byte == 0 || (1 << 3..=18 << 3 | 6).contains(&packed)
                );
            }
        }
    }

    #[test]
    fn a_chunk_uses_every_nibble_once() {
        let mut seen = [0u8; SCALES];
        for (half, feature, k) in
            (0..2).flat_map(|h| (0..16).flat_map(move |f| (0..16).map(move |k| (h, f, k))))
        {
            let (byte, shift) = byte_of(half, feature, k);
            assert_eq!(seen[byte] & 15 << shift, 0);
            seen[byte] |= 15 << shift;
        }
        assert!(seen.iter().all(|&byte| byte == 0xFF));
    }

    #[test]
    fn runs_give_the_same_pack_as_the_whole_exact() {
        for (format, seed) in [(BlockFormat::Nvfp4, 0), (BlockFormat::Mxfp4, 1)] {
            let (whole, another) = (weights(format, 53, 64, seed), weights(format, 53, 64, seed + 1));
            let parts = |at: &[usize]| -> Vec<Result<GateUp<'_>, Error>> {
                at.windows(2).map(|w| Ok(whole.features(w[0]..w[1])?)).collect()
            };
            let packed = PackedGateUp::pack(&whole).unwrap();
            for at in [&[0, 53][..], &[0, 16, 53], &[0, 32, 48, 53]] {
                assert_eq!(PackedGateUp::pack_runs(53, parts(at)).unwrap(), packed);
            }
            for at in [&[0, 17, 53][..], &[0, 16], &[0], &[16, 53]] {
                assert!(PackedGateUp::pack_runs(53, parts(at)).is_err(), "{at:?}");
            }
            assert!(PackedGateUp::pack_runs(52, parts(&[0, 48, 53])).is_err());
            let mut other = parts(&[0, 32, 53]);
            other[1] = Ok(another.features(32..53).unwrap());
            assert!(PackedGateUp::pack_runs(53, other).is_err(), "another bias");
        }
    }

    #[test]
    fn weights_that_break_a_rule_are_not_packed() {
        let mut bad = weights(BlockFormat::Nvfp4, 5, 32, 0);
        bad.gate_bias = Some(vec![0.0; 4].into());
        assert_eq!(
            PackedGateUp::pack(&bad).unwrap_err().to_string(),
            "gate: its bias has 4 values; N = 5 are needed"
        );
        bad.gate_bias = Some(vec![0.0, 1.0, f32::NAN, 0.0, 0.0].into());
        assert_eq!(
            PackedGateUp::pack(&bad).unwrap_err().to_string(),
            "gate: element 2 of its bias is NaN; the problem asks for finite numbers"
        );
    }
}
