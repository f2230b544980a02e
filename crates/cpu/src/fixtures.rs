//! What the tests of several modules multiply, and on which instruction sets.

use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::GateUp;

use crate::Isa;

/// A generator of pseudo-random numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// Between -1 and 1.
    pub(crate) fn float(&mut self) -> f32 {
        self.bits() as f32 / (1u32 << 30) as f32 - 1.0
    }
}

/// Random codes; every e4m3 scale, zero and subnormals included; ue8m0 scales around 1.
pub(crate) fn quantized(
    name: &'static str,
    format: BlockFormat,
    rows: usize,
    k: usize,
    random: &mut Random,
) -> QuantizedMatrix<'static> {
    let codes: Vec<u8> = (0..rows * k / 2).map(|_| random.bits() as u8).collect();
    let scale = |bits: u32| match format {
        BlockFormat::Nvfp4 => (bits % 0x7F) as u8,
        BlockFormat::Mxfp4 => (107 + bits % 40) as u8,
    };
    let scales: Vec<u8> = (0..rows * k / format.block_len()).map(|_| scale(random.bits())).collect();
    QuantizedMatrix::new(name, format, rows, k, codes, scales, ScaleLayout::Linear, GlobalScale::ONE).unwrap()
}

pub(crate) fn weights(format: BlockFormat, n: usize, k: usize, seed: u64) -> GateUp<'static> {
    let mut random = Random(seed);
    GateUp::new(quantized("gate", format, n, k, &mut random), quantized("up", format, n, k, &mut random))
}

/// The instruction sets of this machine.
pub(crate) fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}
