//! Weights on a device, in the orders that strategies read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dualgemm_device::{Device, DevicePtr, Stream};
use dualgemm_formats::scalar::{e2m1, e4m3};
use dualgemm_formats::{QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::GateUp;
use dualgemm_kernels::generic::atoms::ScaleAtoms;
use dualgemm_kernels::generic::expand::{Codes, Expand};
use dualgemm_kernels::generic::pack::GpuPack;
use dualgemm_kernels::sm90a::decode::WEIGHT_FACTOR;
use dualgemm_kernels::sm90a::pack::{CHUNK_BYTES, CHUNK_FEATURES, CHUNK_K, CHUNK_ROWS, Pack};

use crate::{Buffer, DeviceExperts, Error, Gpu};

/// In which order a strategy reads weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightForm {
    /// The fragment order of the fused kernels, 4.5 bits per weight.
    Packed,
    /// The same order, each matrix packed by itself.
    PackedApart,
    /// As producers write them: rows of codes, linear scales.
    Plain,
    /// Rows of codes, scales in 128x4 atoms: what Blackwell's tensor cores read.
    Atoms,
    /// Rounded to e4m3, 8 bits per weight, under one scale for each matrix that makes the largest value which its block
    /// scales allow 448: six times the largest of them.
    E4m3,
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
    PackedApart([Buffer; 2]),
    Plain { codes: [Buffer; 2], scales: [Buffer; 2] },
    Atoms { codes: [Buffer; 2], scales: [Buffer; 2] },
    E4m3([Buffer; 2]),
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
        match uploads.filter(|_| done == n).and_then(|uploads| uploads.alpha.map(|alpha| (uploads, alpha))) {
            Some((uploads, alpha)) => Ok(uploads.finish(gpu, alpha)?),
            None => {
                let (found, expected) = (format!("{done} features"), format!("{n}"));
                Err(Error::Operand { tensor: "weights", found, expected }.into())
            }
        }
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

    /// Copies weights that are on the device already, scales brought into 128x4 atoms, after what `stream` was given
    /// before. They pass through the host once; nothing is packed.
    ///
    /// # Errors
    /// If an address is not the device's, a bias has another length, or they do not fit.
    pub fn atoms_on_device(
        gpu: &'static Gpu,
        weights: &DeviceGateUp<'_>,
        stream: Stream,
    ) -> Result<Self, Error> {
        let &DeviceGateUp { n, k, codes, scales, layout, global_scales, bias } = weights;
        let biases = both_biases(n, bias)?;
        // What the stream was given is done when all launches are.
        let _ = stream;
        gpu.synchronize()?;
        let read = |from: DevicePtr, bytes: usize| -> Result<Vec<u8>, Error> {
            let mut host = vec![0; bytes];
            gpu.copy_from(&mut host, from)?;
            Ok(host)
        };
        let codes = |half: usize| Ok::<_, Error>(Buffer::of(gpu, &read(codes[half], n * k / 2)?)?);
        let atoms = |half: usize| {
            let linear = read(scales[half], layout.len(n, k / 16))?;
            Ok::<_, Error>(Buffer::of(gpu, &layout.convert(&linear, ScaleLayout::Sf128x4, n, k / 16))?)
        };
        let form = Form::Atoms { codes: [codes(0)?, codes(1)?], scales: [atoms(0)?, atoms(1)?] };
        Self::new(gpu, (n, k), global_scales, form, biases)
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
            Form::PackedApart([a, b]) => Form::PackedApart([copy(a)?, copy(b)?]),
            Form::E4m3([a, b]) => Form::E4m3([copy(a)?, copy(b)?]),
            Form::Plain { codes: [a, b], scales: [c, d] } => {
                Form::Plain { codes: [copy(a)?, copy(b)?], scales: [copy(c)?, copy(d)?] }
            }
            Form::Atoms { codes: [a, b], scales: [c, d] } => {
                Form::Atoms { codes: [copy(a)?, copy(b)?], scales: [copy(c)?, copy(d)?] }
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
            Form::PackedApart(_) => WeightForm::PackedApart,
            Form::Plain { .. } => WeightForm::Plain,
            Form::Atoms { .. } => WeightForm::Atoms,
            Form::E4m3(_) => WeightForm::E4m3,
        }
    }

    /// Bytes on the device, biases left out.
    pub fn bytes(&self) -> usize {
        match &self.form {
            Form::Packed(pack) => pack.bytes(),
            Form::PackedApart(halves) | Form::E4m3(halves) => halves.iter().map(Buffer::bytes).sum(),
            Form::Plain { codes, scales } | Form::Atoms { codes, scales } => {
                codes.iter().chain(scales).map(Buffer::bytes).sum()
            }
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
            _ => Err(self.wrong_form(WeightForm::Packed)),
        }
    }

    /// The packs of gate and up by themselves.
    pub(crate) fn packed_apart(&self) -> Result<[DevicePtr; 2], Error> {
        match &self.form {
            Form::PackedApart([gate, up]) => Ok([gate.ptr(), up.ptr()]),
            _ => Err(self.wrong_form(WeightForm::PackedApart)),
        }
    }

    /// Gate and up in e4m3, dense rows.
    pub(crate) fn e4m3(&self) -> Result<[DevicePtr; 2], Error> {
        match &self.form {
            Form::E4m3([gate, up]) => Ok([gate.ptr(), up.ptr()]),
            _ => Err(self.wrong_form(WeightForm::E4m3)),
        }
    }

    /// Gate and up as rows of codes.
    pub(crate) fn plain(&self) -> Result<[Codes; 2], Error> {
        match &self.form {
            Form::Plain { codes, scales } => Ok(rows_of_codes((self.n, self.k), codes, scales)),
            _ => Err(self.wrong_form(WeightForm::Plain)),
        }
    }

    /// Gate and up as rows of codes with scales in 128x4 atoms.
    pub(crate) fn atoms(&self) -> Result<[Codes; 2], Error> {
        match &self.form {
            Form::Atoms { codes, scales } => Ok(rows_of_codes((self.n, self.k), codes, scales)),
            _ => Err(self.wrong_form(WeightForm::Atoms)),
        }
    }

    fn wrong_form(&self, wanted: WeightForm) -> Error {
        let expected = format!("{wanted}; prepack with the plan that runs them");
        Error::Operand { tensor: "weights", found: self.form().to_string(), expected }
    }
}

impl std::fmt::Display for WeightForm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Packed => "packed",
            Self::PackedApart => "packed apart",
            Self::Plain => "plain",
            Self::Atoms => "rows of codes with 128x4 scales",
            Self::E4m3 => "e4m3",
        })
    }
}

/// Gate and up as matrices of codes.
fn rows_of_codes((n, k): (usize, usize), codes: &[Buffer; 2], scales: &[Buffer; 2]) -> [Codes; 2] {
    [0, 1].map(|i| Codes { m: n, k, codes: codes[i].ptr(), pitch: k / 2, scales: scales[i].ptr() })
}

/// Device memory that runs of features are copied to one after the other.
struct Uploads {
    n: usize,
    k: usize,
    room: Room,
    wanted: WeightForm,
    /// The largest scale byte of gate and up so far, of plain ones.
    largest: [u8; 2],
    /// Of the first run, which the others must share.
    alpha: Option<[f32; 2]>,
    /// Biases of gate and up, if any run had one.
    bias: Option<Vec<f32>>,
}

/// Memory that runs are copied to.
enum Room {
    Packed(Buffer),
    PackedApart([Buffer; 2]),
    /// Rows of codes, for e4m3 too, whose scales need the largest of all runs.
    Rows {
        codes: [Buffer; 2],
        scales: [Buffer; 2],
    },
}

/// Bytes of the pack of a matrix by itself.
fn apart_bytes(n: usize, k: usize) -> usize {
    n.div_ceil(CHUNK_ROWS) * k.div_ceil(CHUNK_K) * CHUNK_BYTES
}

impl Uploads {
    fn new(gpu: &'static Gpu, n: usize, k: usize, form: WeightForm) -> Result<Self, Error> {
        let (wanted, buffer) = (form, |bytes| Buffer::new(gpu, bytes));
        let room = match wanted {
            WeightForm::Packed => Room::Packed(buffer(GpuPack::bytes(n, k))?),
            WeightForm::PackedApart => {
                let bytes = apart_bytes(n, k);
                Room::PackedApart([buffer(bytes)?, buffer(bytes)?])
            }
            WeightForm::Plain | WeightForm::E4m3 | WeightForm::Atoms => {
                let (codes, scales) = (n * k / 2, n * k / 16);
                Room::Rows {
                    codes: [buffer(codes)?, buffer(codes)?],
                    scales: [buffer(scales)?, buffer(scales)?],
                }
            }
        };
        Ok(Self { n, k, room, wanted, largest: [0; 2], alpha: None, bias: None })
    }

    fn add(&mut self, gpu: &'static Gpu, first: usize, run: &GateUp<'_>) -> Result<(), Error> {
        let wrong =
            |found: String, expected: String| Err(Error::Operand { tensor: "weights", found, expected });
        if first + run.n() > self.n || run.k() != self.k {
            return wrong(format!("[{}, {}]", first + run.n(), run.k()), format!("[{}, {}]", self.n, self.k));
        }
        let step = match self.wanted {
            WeightForm::Packed => CHUNK_FEATURES,
            WeightForm::PackedApart => CHUNK_ROWS,
            WeightForm::Plain | WeightForm::E4m3 | WeightForm::Atoms => 1,
        };
        if !first.is_multiple_of(step) {
            let expected = format!("runs of a multiple of {step} features");
            return wrong(format!("a run from feature {first} on"), expected);
        }
        let halves = [&run.gate, &run.up];
        let alpha = match &self.room {
            Room::Packed(pack) => {
                let run = Pack::new(run)?;
                let at = GpuPack::bytes(first, self.k) as u64;
                gpu.copy_to(pack.ptr().offset(at), run.bytes())?;
                run.alpha()
            }
            Room::PackedApart(packs) => {
                let at = apart_bytes(first, self.k) as u64;
                let mut alpha = [0.0; 2];
                for (i, (half, to)) in halves.into_iter().zip(packs).enumerate() {
                    let pack = Pack::of_matrix(half)?;
                    gpu.copy_to(to.ptr().offset(at), pack.bytes())?;
                    alpha[i] = pack.alpha()[i];
                }
                alpha
            }
            Room::Rows { codes, scales } => {
                for (i, (half, (codes, scales))) in
                    halves.into_iter().zip(codes.iter().zip(scales)).enumerate()
                {
                    let (rows, bytes) = plain_rows(half);
                    self.largest[i] = bytes.iter().copied().fold(self.largest[i], u8::max);
                    gpu.copy_to(codes.ptr().offset((first * self.k / 2) as u64), &rows)?;
                    gpu.copy_to(scales.ptr().offset((first * self.k / 16) as u64), &bytes)?;
                }
                halves.map(|half| half.global_scale().value())
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

    /// The weights, when all runs have come.
    fn finish(self, gpu: &'static Gpu, mut alpha: [f32; 2]) -> Result<DeviceWeights, Error> {
        let Self { n, k, room, wanted, largest, bias, .. } = self;
        let form = match (room, wanted) {
            (Room::Packed(pack), _) => Form::Packed(pack),
            (Room::PackedApart(packs), _) => Form::PackedApart(packs),
            (Room::Rows { codes, scales }, WeightForm::E4m3) => {
                let rounded = [Buffer::new(gpu, n * k)?, Buffer::new(gpu, n * k)?];
                for (i, half) in rows_of_codes((n, k), &codes, &scales).iter().enumerate() {
                    // What a matrix of zeros is divided by does not matter.
                    let most = e4m3::decode(largest[i].max(1)) * e2m1::MAX;
                    let over = most / e4m3::MAX;
                    let kernel = Expand::e4m3(gpu, ScaleLayout::Linear, over)?;
                    gpu.launch(&kernel.spec(half, rounded[i].ptr(), k)?)?;
                    alpha[i] *= over;
                }
                // The rows are freed now.
                gpu.synchronize()?;
                Form::E4m3(rounded)
            }
            (Room::Rows { codes, scales }, WeightForm::Atoms) => {
                let bytes = ScaleLayout::Sf128x4.len(n, k / 16);
                let atoms = [Buffer::new(gpu, bytes)?, Buffer::new(gpu, bytes)?];
                let kernel = ScaleAtoms::new(gpu)?;
                for (from, to) in scales.iter().zip(&atoms) {
                    gpu.launch(&kernel.spec((n, k / 16), from.ptr(), to.ptr())?)?;
                }
                // The linear scales are freed now.
                gpu.synchronize()?;
                Form::Atoms { codes, scales: atoms }
            }
            (Room::Rows { codes, scales }, _) => Form::Plain { codes, scales },
        };
        DeviceWeights::new(gpu, (n, k), alpha, form, bias)
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
