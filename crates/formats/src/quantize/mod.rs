//! Floats to nvfp4, bit for bit as each producer does it, or with better block scales.
//!
//! All producers share one shape: a global scale from the tensor's largest magnitude (*amax*), a scale byte per
//! block of 16 from the block's amax, a code per element. They differ in every rounding on the way; `rules.rs`
//! has these beside each other, and their sources. Flow of [`quantize`]:
//!
//! ```text
//! Producer::amax ─► Producer::global_scale ─► Quantizer::new ─► Quantizer::rows ─► QuantizedMatrix
//! ```
//!
//! The steps are public: rows are independent of each other, so callers may spread both passes over threads.
//! Dynamic activation quantization (a global scale from the activation itself) is [`quantize`]; with a
//! checkpoint's static `input_scale` it is [`quantize_with`].
//!
//! What is not a number: an element that is NaN gets +6 (0 in ggml) and does not count in its block's amax;
//! infinity saturates. No scale byte is ever NaN or negative, no global scale zero, infinite or NaN.

mod ggml;
pub mod mxfp4;
mod report;
mod rules;
mod search;

use std::ops::Range;

pub use report::relative_l2;
use rules::{Block, Rule, amax_bits, block_amax, pack};

use crate::scalar::e4m3;
use crate::{
    BlockFormat, Error, Float, FloatMatrix, FloatType, GlobalScale, QuantizedMatrix, ScaleLayout,
    match_floats,
};

crate::named! {
    /// Whose arithmetic to follow.
    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Producer {
        /// NVIDIA ModelOpt 0.47.
        #[serde(rename = "modelopt")]
        ModelOpt = "modelopt",
        /// compressed-tensors 0.20 and llm-compressor 0.14, CPU path.
        CompressedTensors = "compressed-tensors",
        /// torchao 0.18.
        Torchao = "torchao",
        /// Transformer Engine 2.20, which is FlashInfer with fast math off.
        Te = "te",
        /// ggml's CPU reference, without a global scale.
        Ggml = "ggml",
    }
}

impl Producer {
    /// Largest magnitude of some rows, as this producer finds it: NaN if an element is NaN, except that
    /// Transformer Engine and ggml do not count NaN.
    ///
    /// # Panics
    /// If `rows` reaches past the matrix.
    pub fn amax(self, x: &FloatMatrix<'_>, rows: Range<usize>) -> f32 {
        let mut bits = 0;
        for_each_block(x, rows.clone(), |_, _, block| bits = amax_bits(block).max(bits));
        let mut amax = f32::from_bits(bits);
        if amax.is_nan() && matches!(self, Self::Te | Self::Ggml) {
            amax = 0.0;
            for_each_block(x, rows, |_, _, block| amax = block_amax(block).max(amax));
        }
        amax
    }

    /// The global scale this producer gives tensors of type `ty` whose largest magnitude is `amax`: a divisor
    /// for compressed-tensors and Transformer Engine, 1 for ggml, else a multiplier. For the members of a fused
    /// group (gate and up, q, k and v) pass the largest amax of the group.
    pub fn global_scale(self, amax: f32, ty: FloatType) -> GlobalScale {
        Rule::global_scale(self, amax, e4m3::MAX, ty)
    }
}

crate::named! {
    /// How a block's scale is chosen.
    #[derive(Default, serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Search {
        /// As the producer does: the block's largest magnitude becomes 6.
        #[default]
        Plain = "plain",
        /// The scale of least squared error among all that e4m3 has. [`quantize`] also tries a global scale that
        /// leaves headroom, so that the block of the largest element has a choice too, and takes it where the whole gains
        /// and no block has a larger error than [`Plain`](Self::Plain) gives it: no block is ever worse.
        Mse = "mse",
    }
}

/// Largest plain block scale of the second global scale that [`Search::Mse`] tries. 256 instead of the producers' 448
/// leaves the block of the largest element room for 6/4 of its plain scale ("four over six").
const MSE_SCALE_MAX: f32 = 256.0;

/// A producer's rule with its global scale fixed: what quantizes blocks and rows.
#[derive(Debug, Clone, Copy)]
pub struct Quantizer {
    rule: Rule,
    search: Search,
    global_scale: GlobalScale,
}

impl Quantizer {
    /// For tensors of type `ty` with this global scale, which must be positive and finite. Producers that use a
    /// divisor take the held one, or the reciprocal of a multiplier.
    pub fn new(producer: Producer, global_scale: GlobalScale, ty: FloatType, search: Search) -> Self {
        Self { rule: Rule::new(producer, global_scale, ty), search, global_scale }
    }

    /// The global scale in use.
    pub fn global_scale(&self) -> GlobalScale {
        self.global_scale
    }

    /// One block: its code bytes (even element in the low nibble, for ggml too) and its scale byte.
    #[inline]
    pub fn block(&self, x: &[f32; 16]) -> ([u8; 8], u8) {
        let plain = self.rule.scale(block_amax(x));
        let by = |scale| (self.rule.codes(x, scale), scale);
        let (codes, scale) = match self.search {
            Search::Plain => by(plain),
            Search::Mse => {
                let best = search::best_scale(x, self.global_scale.value(), plain);
                search::better(x, self.global_scale, by(plain), by(best))
            }
        };
        (pack(codes), scale)
    }

    /// Some rows: fills `codes` with `rows.len() · k / 2` bytes and `scales`, in linear layout, with
    /// `rows.len() · k / 16`.
    ///
    /// # Panics
    /// If a buffer has another size, K is not a multiple of 16, or `rows` reaches past the matrix.
    pub fn rows(&self, x: &FloatMatrix<'_>, rows: Range<usize>, codes: &mut [u8], scales: &mut [u8]) {
        let (first, blocks) = (rows.start, x.cols() / 16);
        assert_eq!(x.cols() % 16, 0, "K is not a multiple of 16");
        assert_eq!(codes.len(), rows.len() * blocks * 8, "code buffer does not fit the rows");
        assert_eq!(scales.len(), rows.len() * blocks, "scale buffer does not fit the rows");
        let codes = codes.as_chunks_mut::<8>().0;
        for_each_block(x, rows, |row, block, x| {
            let at = (row - first) * blocks + block;
            (codes[at], scales[at]) = self.block(x);
        });
    }

    /// A whole matrix, on this thread.
    ///
    /// # Errors
    /// If K is not a multiple of 16; the message calls the tensor `name`.
    pub fn matrix(&self, name: &str, x: &FloatMatrix<'_>) -> Result<QuantizedMatrix<'static>, Error> {
        let (rows, k, format) = (x.rows(), x.cols(), BlockFormat::Nvfp4);
        if k % 16 != 0 {
            return Err(Error::KNotWholeBlocks { tensor: name.into(), format, k });
        }
        let (mut codes, mut scales) = (vec![0; rows * (k / 2)], vec![0; rows * (k / 16)]);
        self.rows(x, 0..rows, &mut codes, &mut scales);
        let (name, linear) = (name.to_owned(), ScaleLayout::Linear);
        QuantizedMatrix::new(name, format, rows, k, codes, scales, linear, self.global_scale)
    }
}

/// Quantizes a matrix with a global scale of its own. Scales come in linear layout.
///
/// ```
/// use dualgemm_formats::{FloatMatrix, Matrix, Producer, Search, quantize};
///
/// let weights: Vec<f32> = (0..32).map(|i| i as f32 / 31.0 - 0.5).collect();
/// let x = FloatMatrix::F32(Matrix::new("w", 2, 16, weights)?);
/// let q = quantize("w", &x, Producer::ModelOpt, Search::Plain)?;
/// assert_eq!(q.global_scale().value(), 0.5 / 2688.0);
/// assert!((q.value(1, 15) - 0.5).abs() < 1e-6);
/// # Ok::<(), dualgemm_formats::Error>(())
/// ```
///
/// # Errors
/// If K is not a multiple of 16.
pub fn quantize(
    name: &str,
    x: &FloatMatrix<'_>,
    producer: Producer,
    search: Search,
) -> Result<QuantizedMatrix<'static>, Error> {
    let mut group = quantize_group(&[(name, x)], producer, search)?;
    Ok(group.remove(0))
}

/// Quantizes named matrices with one global scale for all, that of the largest amax among them: gate and up, or
/// q, k and v, which kernels read as one matrix.
///
/// # Errors
/// If a K is not a multiple of 16.
pub fn quantize_group(
    group: &[(&str, &FloatMatrix<'_>)],
    producer: Producer,
    search: Search,
) -> Result<Vec<QuantizedMatrix<'static>>, Error> {
    let amax = |x: &FloatMatrix<'_>| producer.amax(x, 0..x.rows());
    // As bits, in which NaN is the largest magnitude.
    let largest = group.iter().map(|(_, x)| (amax(x), x.float_type())).max_by_key(|(amax, _)| amax.to_bits());
    let Some((amax, ty)) = largest else { return Ok(vec![]) };
    let with = |search, scale_max| -> Result<Vec<_>, Error> {
        let global_scale = Rule::global_scale(producer, amax, scale_max, ty);
        group.iter().map(|(name, x)| quantize_with(name, x, producer, search, global_scale)).collect()
    };
    let plain = with(Search::Plain, e4m3::MAX)?;
    if search == Search::Plain {
        return Ok(plain);
    }
    let [found, roomy] = [with(search, e4m3::MAX)?, with(search, MSE_SCALE_MAX)?];
    let errors = |quantized: &[QuantizedMatrix<'_>]| -> Vec<f64> {
        group.iter().zip(quantized).flat_map(|((_, x), q)| report::block_errors(q, x)).collect()
    };
    let [of_plain, of_found, of_roomy] = [&plain, &found, &roomy].map(|group| errors(group));
    let less = of_roomy.iter().sum::<f64>() < of_found.iter().sum();
    let everywhere = of_roomy.iter().zip(&of_plain).all(|(roomy, plain)| roomy <= plain);
    Ok(if less && everywhere { roomy } else { found })
}

/// Quantizes a matrix with a given global scale, such as the static `input_scale` of an activation. Elements too
/// large for it saturate.
///
/// # Errors
/// If K is not a multiple of 16 or the global scale is not a positive finite number.
pub fn quantize_with(
    name: &str,
    x: &FloatMatrix<'_>,
    producer: Producer,
    search: Search,
    global_scale: GlobalScale,
) -> Result<QuantizedMatrix<'static>, Error> {
    Quantizer::new(producer, global_scale, x.float_type(), search).matrix(name, x)
}

/// One block by the rule of Transformer Engine: eight code bytes and the scale byte. This is what kernels that write
/// nvfp4 outputs do.
#[inline(always)]
pub fn te_block(x: &[f32; 16], global_scale: GlobalScale) -> ([u8; 8], u8) {
    let (codes, scale) = te_codes(x, global_scale);
    (pack(codes), scale)
}

/// As [`te_block`], with one code per byte.
///
/// Always inlined, down to the last operation, so that callers compile it for instruction sets of their choice.
#[inline(always)]
pub fn te_codes(x: &[f32; 16], global_scale: GlobalScale) -> ([u8; 16], u8) {
    let rule = Rule::new(Producer::Te, global_scale, FloatType::F32);
    let scale = rule.scale(block_amax(x));
    (rule.codes(x, scale), scale)
}

/// Calls `f(row, block, elements)` for every whole block of 16 of some rows, widened to f32.
fn for_each_block(x: &FloatMatrix<'_>, rows: Range<usize>, mut f: impl FnMut(usize, usize, &Block)) {
    fn of<T: Float>(row: &[T], mut f: impl FnMut(usize, &Block)) {
        let mut wide = [0.0; 16];
        for (i, block) in row.as_chunks::<16>().0.iter().enumerate() {
            T::widen(block, &mut wide);
            f(i, &wide);
        }
    }
    for row in rows {
        match_floats!(x, FloatMatrix(m) => of(m.row(row), |i, block| f(row, i, block)));
    }
}
