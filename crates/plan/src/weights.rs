//! Weights on a device, in the orders that strategies read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dualgemm_device::{Device, DevicePtr, Stream};
use dualgemm_formats::{QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::GateUp;
use dualgemm_kernels::generic::expand::Codes;
use dualgemm_kernels::generic::pack::GpuPack;
use dualgemm_kernels::sm90a::decode::WEIGHT_FACTOR;
use dualgemm_kernels::sm90a::pack::{CHUNK_FEATURES, Pack};

use crate::{Buffer, DeviceExperts, Error, Gpu};

/// In which order a strategy reads weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightForm {
    /// The fragment order of the fused kernels, 4.5 bits per weight.
    Packed,
    /// As producers write them: rows of codes, linear scales.
    Plain,
}

/// A pair of weight matrices in device memory, as producers write them. Biases come from the host.
#[derive(Debug, Clone, Copy)]
pub struct DeviceGateUp<'a> {
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
    n: usize,
    k: usize,
    /// What sums of gate and up are multiplied by: their tensor scales, and what the pack asks for.
    alpha: [f32; 2],
    form: Form,
    bias: Option<Buffer>,
    /// What they are a part of, and which.
    expert: Option<(Arc<DeviceExperts>, usize)>,
}

#[derive(Debug)]
enum Form {
    Packed(Buffer),
    Plain { codes: [Buffer; 2], scales: [Buffer; 2] },
}

/// A number that no other weights have had or will have in this process: an address may be used again, this is not.
pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl DeviceWeights {
    /// Copies weights to a device, in the order asked for.
    ///
    /// # Errors
    /// If the halves do not belong together, or do not fit.
    pub fn upload(gpu: &'static Gpu, weights: &GateUp<'_>, form: WeightForm) -> Result<Self, Error> {
        Self::upload_runs(gpu, weights.n(), std::iter::once(Ok::<_, Error>(weights.clone())), form)
    }

    /// As [`upload`](Self::upload), for weights that come as runs of features, in order, of which never more than one
    /// has to be in memory. All runs but the last have a multiple of 32 features.
    ///
    /// # Errors
    /// Hands on the errors of the runs, otherwise as [`upload`](Self::upload).
    pub fn upload_runs<'w, E: From<Error>>(
        gpu: &'static Gpu,
        n: usize,
        runs: impl IntoIterator<Item = Result<GateUp<'w>, E>>,
        form: WeightForm,
    ) -> Result<Self, E> {
        let mut uploads: Option<Uploads> = None;
        let mut done = 0;
        for run in runs {
            let run = run?;
            run.check().map_err(Error::from)?;
            let uploads = match &mut uploads {
                Some(uploads) => uploads,
                none => none.insert(Uploads::new(gpu, n, run.k(), form)?),
            };
            uploads.add(gpu, done, &run)?;
            done += run.n();
        }
        let Some((Uploads { n, k, form, bias, .. }, alpha)) =
            uploads.filter(|_| done == n).and_then(|uploads| uploads.alpha.map(|alpha| (uploads, alpha)))
        else {
            let (found, expected) = (format!("{done} features"), format!("{n}"));
            return Err(Error::Operand { tensor: "weights", found, expected }.into());
        };
        Ok(Self::new(gpu, (n, k), alpha, form, bias)?)
    }

    /// Packs weights that are on the device already, on the device, after what `stream` was given before. Waits for it.
    ///
    /// # Errors
    /// If an address is misaligned, a bias has another length, or the pack does not fit.
    pub fn pack_on_device(
        gpu: &'static Gpu,
        weights: &DeviceGateUp<'_>,
        stream: Stream,
    ) -> Result<Self, Error> {
        let &DeviceGateUp { n, k, bias, .. } = weights;
        let biases = both_biases(n, bias)?;
        let pack = Buffer::new(gpu, GpuPack::bytes(n, k))?;
        let alpha = pack_to(gpu, weights, pack.ptr(), stream)?;
        gpu.synchronize()?;
        Self::new(gpu, (n, k), alpha, Form::Packed(pack), biases)
    }

    /// One of several experts: its pack lies among theirs.
    pub(crate) fn of_expert(
        of: Arc<DeviceExperts>,
        index: usize,
        (alpha, pack, bias): ([f32; 2], Buffer, Option<Buffer>),
    ) -> Self {
        let (n, k, form) = (of.n(), of.k(), Form::Packed(pack));
        Self { id: next_id(), n, k, alpha, form, bias, expert: Some((of, index)) }
    }

    /// The experts that these weights are one of, and which.
    pub fn expert(&self) -> Option<(&Arc<DeviceExperts>, usize)> {
        self.expert.as_ref().map(|(of, index)| (of, *index))
    }

    fn new(
        gpu: &'static Gpu,
        (n, k): (usize, usize),
        alpha: [f32; 2],
        form: Form,
        bias: Option<Vec<f32>>,
    ) -> Result<Self, Error> {
        let bias = bias.map(|values| Buffer::of(gpu, &float_bytes(values))).transpose()?;
        Ok(Self { id: next_id(), n, k, alpha, form, bias, expert: None })
    }

    /// The same weights once more, in memory of their own.
    ///
    /// # Errors
    /// If they do not fit.
    pub fn duplicate(&self, gpu: &'static Gpu) -> Result<Self, Error> {
        let copy = |buffer: &Buffer| -> Result<Buffer, Error> {
            let mut bytes = vec![0; buffer.bytes()];
            buffer.read(&mut bytes)?;
            Ok(Buffer::of(gpu, &bytes)?)
        };
        let form = match &self.form {
            Form::Packed(pack) => Form::Packed(copy(pack)?),
            Form::Plain { codes: [a, b], scales: [c, d] } => {
                Form::Plain { codes: [copy(a)?, copy(b)?], scales: [copy(c)?, copy(d)?] }
            }
        };
        let bias = self.bias.as_ref().map(copy).transpose()?;
        Ok(Self { id: next_id(), n: self.n, k: self.k, alpha: self.alpha, form, bias, expert: None })
    }

    /// Features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Elements per row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// A number of their own: no other weights of this process have it, even at the same address later.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The order that they are in.
    pub fn form(&self) -> WeightForm {
        match self.form {
            Form::Packed(_) => WeightForm::Packed,
            Form::Plain { .. } => WeightForm::Plain,
        }
    }

    /// Bytes on the device, biases left out.
    pub fn bytes(&self) -> usize {
        match &self.form {
            Form::Packed(pack) => pack.bytes(),
            Form::Plain { codes, scales } => codes.iter().chain(scales).map(Buffer::bytes).sum(),
        }
    }

    /// What sums of gate and up are to be multiplied by.
    pub(crate) fn alpha(&self) -> [f32; 2] {
        self.alpha
    }

    /// Biases of gate and up, or null.
    pub(crate) fn bias(&self) -> [DevicePtr; 2] {
        match &self.bias {
            Some(both) => [both.ptr(), both.ptr().offset(4 * self.n as u64)],
            None => [DevicePtr::NULL; 2],
        }
    }

    /// The pack.
    pub(crate) fn packed(&self) -> Result<DevicePtr, Error> {
        match &self.form {
            Form::Packed(pack) => Ok(pack.ptr()),
            Form::Plain { .. } => Err(self.wrong_form("packed")),
        }
    }

    /// Gate and up as rows of codes.
    pub(crate) fn plain(&self) -> Result<[Codes; 2], Error> {
        match &self.form {
            Form::Plain { codes, scales } => Ok([0, 1].map(|i| Codes {
                m: self.n,
                k: self.k,
                codes: codes[i].ptr(),
                pitch: self.k / 2,
                scales: scales[i].ptr(),
            })),
            Form::Packed(_) => Err(self.wrong_form("plain")),
        }
    }

    fn wrong_form(&self, wanted: &str) -> Error {
        let expected = format!("{wanted}; prepack with the plan that runs them");
        Error::Operand { tensor: "weights", found: format!("{:?}", self.form()).to_lowercase(), expected }
    }
}

/// Device memory that runs of features are copied to one after the other.
struct Uploads {
    n: usize,
    k: usize,
    form: Form,
    /// Of the first run, which the others must share.
    alpha: Option<[f32; 2]>,
    /// Biases of gate and up, if any run had one.
    bias: Option<Vec<f32>>,
}

impl Uploads {
    fn new(gpu: &'static Gpu, n: usize, k: usize, form: WeightForm) -> Result<Self, Error> {
        let form = match form {
            WeightForm::Packed => Form::Packed(Buffer::new(gpu, GpuPack::bytes(n, k))?),
            WeightForm::Plain => {
                let buffer = |bytes| Buffer::new(gpu, bytes);
                let (codes, scales) = (n * k / 2, n * k / 16);
                Form::Plain {
                    codes: [buffer(codes)?, buffer(codes)?],
                    scales: [buffer(scales)?, buffer(scales)?],
                }
            }
        };
        Ok(Self { n, k, form, alpha: None, bias: None })
    }

    fn add(&mut self, gpu: &'static Gpu, first: usize, run: &GateUp<'_>) -> Result<(), Error> {
        let wrong =
            |found: String, expected: String| Err(Error::Operand { tensor: "weights", found, expected });
        if first + run.n() > self.n || run.k() != self.k {
            return wrong(format!("[{}, {}]", first + run.n(), run.k()), format!("[{}, {}]", self.n, self.k));
        }
        let alpha = match &self.form {
            Form::Packed(pack) => {
                if !first.is_multiple_of(CHUNK_FEATURES) {
                    let expected = format!("runs of a multiple of {CHUNK_FEATURES} features");
                    return wrong(format!("a run from feature {first} on"), expected);
                }
                let run = Pack::new(run)?;
                let at = GpuPack::bytes(first, self.k) as u64;
                gpu.copy_to(pack.ptr().offset(at), run.bytes())?;
                run.alpha()
            }
            Form::Plain { codes, scales } => {
                for (half, (codes, scales)) in [&run.gate, &run.up].into_iter().zip(codes.iter().zip(scales))
                {
                    let (rows, bytes) = plain_rows(half);
                    gpu.copy_to(codes.ptr().offset((first * self.k / 2) as u64), &rows)?;
                    gpu.copy_to(scales.ptr().offset((first * self.k / 16) as u64), &bytes)?;
                }
                [&run.gate, &run.up].map(|half| half.global_scale().value())
            }
        };
        let expected = *self.alpha.get_or_insert(alpha);
        if alpha != expected {
            let found = format!("a run whose sums are scaled by {alpha:?} behind one with {expected:?}");
            return wrong(found, "runs of one scale; pack these weights whole".into());
        }
        for (at, bias) in [(0, &run.gate_bias), (self.n, &run.up_bias)] {
            if let Some(values) = bias {
                let both = self.bias.get_or_insert_with(|| vec![0.0; 2 * self.n]);
                both[at + first..at + first + run.n()].copy_from_slice(values);
            }
        }
        Ok(())
    }
}

/// Codes and linear scales, both dense.
pub(crate) fn plain_rows(m: &QuantizedMatrix<'_>) -> (Vec<u8>, Vec<u8>) {
    let codes = (0..m.rows()).flat_map(|row| m.row_codes(row)).copied().collect();
    let scales = (0..m.rows()).flat_map(|row| (0..m.blocks()).map(move |b| m.scale_byte(row, b))).collect();
    (codes, scales)
}

/// Biases of gate and up one after the other, if either has one.
pub(crate) fn both_biases(n: usize, bias: [Option<&[f32]>; 2]) -> Result<Option<Vec<f32>>, Error> {
    let mut biases = bias.iter().any(Option::is_some).then(|| vec![0.0; 2 * n]);
    for (half, values) in bias.into_iter().enumerate() {
        let Some((values, both)) = values.zip(biases.as_mut()) else { continue };
        if values.len() != n {
            let tensor = ["gate", "up"][half].into();
            return Err(dualgemm_gemm::Error::BiasLen { tensor, found: values.len(), n }.into());
        }
        both[half * n..][..n].copy_from_slice(values);
    }
    Ok(biases)
}

/// Launches the packing of weights that are on the device to an address there. Gives what sums are multiplied by then.
pub(crate) fn pack_to(
    gpu: &'static Gpu,
    weights: &DeviceGateUp<'_>,
    to: DevicePtr,
    stream: Stream,
) -> Result<[f32; 2], Error> {
    let &DeviceGateUp { n, k, codes, scales, layout, global_scales, .. } = weights;
    let half = |i: usize| Codes { m: n, k, codes: codes[i], pitch: k / 2, scales: scales[i] };
    let spec = GpuPack::new(gpu, layout)?.spec(&half(0), &half(1), to)?;
    gpu.launch_on(stream, &spec)?;
    Ok(global_scales.map(|scale| scale * WEIGHT_FACTOR))
}

/// f32 values as a device holds them.
pub(crate) fn float_bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}
