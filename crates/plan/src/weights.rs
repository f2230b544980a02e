//! A pair of weight matrices, or a linear layer's, on a device, in the order that a strategy reads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use dualgemm_device::{Device, DevicePtr, Stream};
use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{GateUp, Linear, Operation};

use crate::form::{Layout, Parts};
use crate::upload::{
    Extras, Uploads, alpha_on_device, float_bytes, linear_layout, on_device_layout, put_linear, put_on_device,
};
use crate::{Buffer, DeviceExperts, Error, Gpu, WeightForm};

/// A pair of quantized weight matrices in device memory, as producers write them. Biases come from the host.
#[derive(Debug, Clone, Copy)]
pub struct DeviceGateUp<'a> {
    /// What they are quantized to.
    pub format: BlockFormat,
    /// Rows of each half (N).
    pub n: usize,
    /// Elements per row.
    pub k: usize,
    /// Codes of gate and up, dense rows of `k / 2` bytes.
    pub codes: [DevicePtr; 2],
    /// Block scales of gate and up.
    pub scales: [DevicePtr; 2],
    /// Their order.
    pub layout: ScaleLayout,
    /// Tensor scales, multipliers.
    pub global_scales: [f32; 2],
    /// Biases of gate and up, n values each.
    pub bias: [Option<&'a [f32]>; 2],
}

/// Weights in device memory, owned. Shared between runners and threads at will.
#[derive(Debug)]
pub struct DeviceWeights {
    id: u64,
    parts: Parts,
    /// What sums of gate and up are multiplied by: their tensor scales, and what the order asks for.
    alpha: [f32; 2],
    bias: Option<Arc<Buffer>>,
    /// What they are a part of, and which.
    expert: Option<(Arc<DeviceExperts>, usize)>,
    /// The same weights packed, once a strategy that reads the pack has run on rows of codes.
    packed_too: OnceLock<Box<DeviceWeights>>,
}

/// What weights and experts on a device tell alike, of their `parts` and `id`.
macro_rules! impl_parts {
    ($weights:ty) => {
        impl $weights {
            /// The GPU in whose memory they are.
            pub fn gpu(&self) -> &'static Gpu {
                self.parts.gpu()
            }

            /// What they are quantized to.
            pub fn format(&self) -> BlockFormat {
                self.parts.layout().format
            }

            /// Features, of experts those of each.
            pub fn n(&self) -> usize {
                self.parts.layout().n
            }

            /// Elements per row.
            pub fn k(&self) -> usize {
                self.parts.layout().k
            }

            /// A number of their own: no other weights of this process have it, even at the same address later.
            pub fn id(&self) -> u64 {
                self.id
            }

            /// Bytes on the device, biases left out.
            pub fn bytes(&self) -> usize {
                self.parts.bytes()
            }

            pub(crate) fn parts(&self) -> &Parts {
                &self.parts
            }
        }
    };
}
impl_parts!(DeviceWeights);
impl_parts!(DeviceExperts);

/// A number that no other weights have had or will have in this process: an address may be used again, this is not.
pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl DeviceWeights {
    /// Copies weights to a device, in the order asked for.
    ///
    /// # Errors
    /// If the halves do not belong together, are not in a format for the order, or do not fit.
    pub fn upload(gpu: &'static Gpu, weights: &GateUp<'_>, form: WeightForm) -> Result<Self, Error> {
        Self::upload_runs(gpu, weights.n(), std::iter::once(Ok::<_, Error>(weights.clone())), form)
    }

    /// Copies the weights of a linear layer to a device, in the order asked for.
    ///
    /// # Errors
    /// If the bias has another length, a scale is NaN or negative, mxfp4 scales are too far apart, or they do not fit.
    pub fn upload_linear(gpu: &'static Gpu, layer: &Linear<'_>, form: WeightForm) -> Result<Self, Error> {
        let layout = linear_layout(layer, form)?;
        let parts = Parts::new(gpu, layout, 1)?;
        let extras = put_linear(gpu, layer, &layout, &parts.place(0))?;
        Self::new(gpu, parts, extras)
    }

    /// As [`upload`](Self::upload), for weights that come as runs of features, in order; never more than one
    /// has to be in memory. All runs but the last have a multiple of 64 features.
    ///
    /// # Errors
    /// Hands on the errors of the runs, otherwise as [`upload`](Self::upload).
    pub fn upload_runs<'w, E: From<Error>>(
        gpu: &'static Gpu,
        n: usize,
        runs: impl IntoIterator<Item = Result<GateUp<'w>, E>>,
        form: WeightForm,
    ) -> Result<Self, E> {
        let mut begun: Option<(Parts, Uploads)> = None;
        for run in runs {
            let run = run?;
            if begun.is_none() {
                let layout = Layout::new((n, run.k()), run.gate.format(), form)?;
                let parts = Parts::new(gpu, layout, 1)?;
                let uploads = Uploads::new(gpu, layout, parts.place(0))?;
                begun = Some((parts, uploads));
            }
            if let Some((_, uploads)) = &mut begun {
                uploads.add(&run)?;
            }
        }
        let Some((parts, uploads)) = begun else {
            let (found, expected) = ("0 features".into(), n.to_string());
            return Err(Error::Operand { tensor: "weights", found, expected }.into());
        };
        Ok(Self::new(gpu, parts, uploads.finish()?)?)
    }

    /// Brings weights that are on the device already into the order asked for, on the device, after what `stream` was given
    /// before. Waits for it.
    ///
    /// # Safety
    /// Codes and scales are live memory of that GPU, as large as shape and layout make them; nobody writes them meanwhile.
    ///
    /// # Errors
    /// If the order is made on the host ([`WeightForm::Atoms`] is not, nor of nvfp4 [`WeightForm::Packed`]), an address is
    /// misaligned, a bias has another length, or they do not fit.
    pub unsafe fn on_device(
        gpu: &'static Gpu,
        weights: &DeviceGateUp<'_>,
        form: WeightForm,
        stream: Stream,
    ) -> Result<Self, Error> {
        let layout = on_device_layout(weights, form)?;
        let parts = Parts::new(gpu, layout, 1)?;
        // SAFETY: the caller vouches for the weights; the parts were made for the layout.
        let extras = unsafe { put_on_device(gpu, weights, &layout, &parts.place(0), stream) }?;
        gpu.synchronize()?;
        Self::new(gpu, parts, extras)
    }

    /// Overwrites them with others that are on the device, after what `stream` was given before. Waits for nothing.
    ///
    /// # Safety
    /// As [`on_device`](Self::on_device), until `stream` has done it; calls that use these weights are ordered with it.
    ///
    /// # Errors
    /// If shape, format or tensor scales differ, either has biases, or the same weights have been packed a second time, as
    /// Blackwell does for some A; otherwise as [`on_device`](Self::on_device).
    pub unsafe fn refill(&self, weights: &DeviceGateUp<'_>, stream: Stream) -> Result<(), Error> {
        let layout = on_device_layout(weights, self.form())?;
        let alpha = alpha_on_device(layout.form, weights.global_scales);
        let biased = self.bias.is_some() || weights.bias != [None; 2];
        if layout != *self.parts.layout() || alpha != self.alpha || biased || self.packed_too.get().is_some()
        {
            let of = |layout: &Layout, alpha: [f32; 2]| {
                format!("{} [{}, {}] whose sums are scaled by {alpha:?}", layout.format, layout.n, layout.k)
            };
            let expected = of(self.parts.layout(), self.alpha) + ", without biases, and packed once";
            return Err(Error::Operand { tensor: "weights", found: of(&layout, alpha), expected });
        }
        // SAFETY: the caller vouches for the weights; the parts have this layout.
        unsafe { put_on_device(self.gpu(), weights, &layout, &self.parts.place(0), stream) }.map(drop)
    }

    /// One of several experts: its parts lie among theirs.
    pub(crate) fn of_expert(
        of: Arc<DeviceExperts>,
        index: usize,
        (alpha, parts, bias): ([f32; 2], Parts, Option<Buffer>),
    ) -> Self {
        let expert = Some((of, index));
        Self { expert, ..Self::of_parts(parts, alpha, bias.map(Arc::new)) }
    }

    /// The experts that these weights are one of, and which.
    pub fn expert(&self) -> Option<(&Arc<DeviceExperts>, usize)> {
        self.expert.as_ref().map(|(of, index)| (of, *index))
    }

    fn new(gpu: &'static Gpu, parts: Parts, Extras { alpha, bias }: Extras) -> Result<Self, Error> {
        let bias = bias.map(|values| Buffer::of(gpu, &float_bytes(values))).transpose()?;
        Ok(Self::of_parts(parts, alpha, bias.map(Arc::new)))
    }

    fn of_parts(parts: Parts, alpha: [f32; 2], bias: Option<Arc<Buffer>>) -> Self {
        Self { id: next_id(), parts, alpha, bias, expert: None, packed_too: OnceLock::new() }
    }

    /// The same weights once more, in memory of their own.
    pub fn duplicate(&self, gpu: &'static Gpu) -> Result<Self, Error> {
        let bias = self.bias.as_ref().map(|bias| bias.duplicate().map(Arc::new)).transpose()?;
        Ok(Self::of_parts(self.parts.duplicate(gpu)?, self.alpha, bias))
    }

    /// The same weights in packed order. Rows of codes are packed when that is first asked for, and both are kept: on
    /// Blackwell not every A is multiplied by kernels that read rows. Fails if the pack does not fit, or mxfp4 scales
    /// are too far apart for it.
    pub(crate) fn packed_too(&self, gpu: &'static Gpu) -> Result<&Self, Error> {
        if !matches!(self.form(), WeightForm::Atoms | WeightForm::AtomsLinear) {
            return Ok(self);
        }
        if let Some(packed) = self.packed_too.get() {
            return Ok(packed);
        }
        let packed = Box::new(Self { bias: self.bias.clone(), ..self.pack(gpu)? });
        Ok(self.packed_too.get_or_init(|| packed))
    }

    /// Packs rows of codes, biases left out.
    fn pack(&self, gpu: &'static Gpu) -> Result<Self, Error> {
        let (&Layout { n, k, format, .. }, layout) = (self.parts.layout(), ScaleLayout::Sf128x4);
        let op = if self.form().is_linear() { Operation::Linear } else { Operation::GateUp };
        let halves = self.parts.rows(WeightForm::Atoms, op)?;
        let half = |name, half: usize| -> Result<QuantizedMatrix<'static>, Error> {
            let mut codes = vec![0; n * k / 2];
            let mut scales = vec![0; layout.len(n, k / format.block_len())];
            gpu.copy_from(&mut codes, halves[half].codes)?;
            gpu.copy_from(&mut scales, halves[half].scales)?;
            let scale = GlobalScale::multiplier(self.alpha[half]);
            Ok(QuantizedMatrix::new(name, format, n, k, codes, scales, layout, scale)?)
        };
        match (format, op) {
            (_, Operation::Linear) => {
                Self::upload_linear(gpu, &Linear::new(half("weight", 0)?), WeightForm::PackedLinear)
            }
            (BlockFormat::Nvfp4, _) => {
                let (codes, scales) = (halves.map(|half| half.codes), halves.map(|half| half.scales));
                let global_scales = self.alpha;
                let bias = [None; 2];
                let rows = DeviceGateUp { format, n, k, codes, scales, layout, global_scales, bias };
                // SAFETY: the rows are parts of `self`.
                unsafe { Self::on_device(gpu, &rows, WeightForm::Packed, Stream::Own) }
            }
            // Their scales are packed relative to the largest one, which takes a look at all of them first.
            (BlockFormat::Mxfp4, _) => {
                Self::upload(gpu, &GateUp::new(half("gate", 0)?, half("up", 1)?), WeightForm::Packed)
            }
        }
    }

    /// The order that they are in.
    pub fn form(&self) -> WeightForm {
        self.parts.layout().form
    }

    /// What multiplies the sums of gate and up.
    pub(crate) fn alpha(&self) -> [f32; 2] {
        self.alpha
    }

    /// Biases of gate and up, or that of a linear layer for both halves of its features, or null.
    pub(crate) fn bias(&self) -> [DevicePtr; 2] {
        match &self.bias {
            Some(both) => [both.ptr(), both.ptr().offset((both.bytes() - 4 * self.n()) as u64)],
            None => [DevicePtr::NULL; 2],
        }
    }
}
