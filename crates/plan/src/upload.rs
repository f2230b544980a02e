//! How weights come to their memory on a device: from the host, whole or as runs of features, and from where they are on
//! the device already.

use dualgemm_device::{Device, DevicePtr, LaunchSpec, Stream};
use dualgemm_formats::scalar::{e2m1, e4m3};
use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_gemm::{GateUp, Linear};
use dualgemm_kernels::generic::atoms::ScaleAtoms;
use dualgemm_kernels::generic::copy::Copy;
use dualgemm_kernels::generic::expand::{Codes, Expand};
use dualgemm_kernels::generic::pack::GpuPack;
use dualgemm_kernels::sm90a::decode::WEIGHT_FACTOR;
use dualgemm_kernels::sm90a::pack::{CHUNK_FEATURES, CHUNK_ROWS, Pack};

use crate::form::{Layout, apart_bytes};
use crate::{Buffer, DeviceGateUp, Error, Gpu, WeightForm};

/// What belongs to a pair of weights besides its parts.
#[derive(Debug)]
pub(crate) struct Extras {
    /// What sums of gate and up are multiplied by: their tensor scales, and what the order asks for.
    pub alpha: [f32; 2],
    /// Biases of gate and up one after the other, if either has one; or that of a linear layer.
    pub bias: Option<Vec<f32>>,
}

/// Device memory that runs of features are copied to one after the other.
pub(crate) struct Uploads {
    gpu: &'static Gpu,
    layout: Layout,
    to: Vec<DevicePtr>,
    /// Rows of codes and linear scales that the parts are made of in the end, where they are not the parts.
    staged: Vec<Buffer>,
    /// Features that have come.
    done: usize,
    /// The largest scale byte of gate and up so far.
    largest: [u8; 2],
    /// Of the first run, which the others must share.
    alpha: Option<[f32; 2]>,
    bias: Option<Vec<f32>>,
}

fn wrong<T>(found: String, expected: String) -> Result<T, Error> {
    Err(Error::Operand { tensor: "weights", found, expected })
}

impl Uploads {
    /// Weights to bring to these addresses. Fails if memory for what they are made of does not fit.
    pub(crate) fn new(gpu: &'static Gpu, layout: Layout, to: Vec<DevicePtr>) -> Result<Self, Error> {
        let (codes, scales) = (layout.n * layout.k / 2, layout.n * layout.blocks());
        let staged: &[usize] = match layout.form {
            WeightForm::Packed
            | WeightForm::PackedApart
            | WeightForm::PackedLinear
            | WeightForm::AtomsLinear
            | WeightForm::Plain => &[],
            WeightForm::Atoms => &[scales, scales],
            // Its scale is that of the largest block scale of all runs.
            WeightForm::E4m3 => &[codes, codes, scales, scales],
        };
        let staged = staged.iter().map(|&bytes| Buffer::new(gpu, bytes)).collect::<Result<_, _>>()?;
        Ok(Self { gpu, layout, to, staged, done: 0, largest: [0; 2], alpha: None, bias: None })
    }

    /// Where rows of codes and linear scales of gate and up go.
    fn rows(&self) -> Option<[DevicePtr; 4]> {
        let staged = self.staged.iter().map(Buffer::ptr);
        let all: Vec<DevicePtr> = match self.layout.form {
            WeightForm::Packed
            | WeightForm::PackedApart
            | WeightForm::PackedLinear
            | WeightForm::AtomsLinear => return None,
            WeightForm::Plain => self.to.clone(),
            WeightForm::Atoms => self.to[..2].iter().copied().chain(staged).collect(),
            WeightForm::E4m3 => staged.collect(),
        };
        all.try_into().ok()
    }

    /// Takes the next features. Fails if they are not of these weights, or begin where no pack can be cut.
    pub(crate) fn add(&mut self, run: &GateUp<'_>) -> Result<(), Error> {
        run.check()?;
        let (Layout { n, k, format, form }, first) = (self.layout, self.done);
        let found = (run.gate.format(), first + run.n(), run.k());
        if found.0 != format || found.1 > n || found.2 != k {
            return wrong(format!("{} [{}, {}]", found.0, found.1, found.2), format!("{format} [{n}, {k}]"));
        }
        let step = match form {
            WeightForm::Packed => CHUNK_FEATURES,
            WeightForm::PackedApart | WeightForm::PackedLinear => CHUNK_ROWS,
            WeightForm::Plain | WeightForm::E4m3 | WeightForm::Atoms | WeightForm::AtomsLinear => 1,
        };
        if !first.is_multiple_of(step) {
            let expected = format!("runs of a multiple of {step} features");
            return wrong(format!("a run from feature {first} on"), expected);
        }
        let halves = [&run.gate, &run.up];
        let alpha = match (self.rows(), form) {
            (Some(rows), _) => {
                for (i, half) in halves.into_iter().enumerate() {
                    let (codes, scales) = half.dense_rows(0..half.rows());
                    self.largest[i] = scales.iter().copied().fold(self.largest[i], u8::max);
                    self.gpu.copy_to(rows[i].offset((first * k / 2) as u64), &codes)?;
                    self.gpu.copy_to(rows[2 + i].offset((first * self.layout.blocks()) as u64), &scales)?;
                }
                halves.map(|half| half.global_scale().value())
            }
            (None, WeightForm::PackedApart) => {
                let at = apart_bytes(first, k) as u64;
                let mut alpha = [0.0; 2];
                for (i, (half, to)) in halves.into_iter().zip(&self.to).enumerate() {
                    let pack = Pack::of_matrix(half)?;
                    self.gpu.copy_to(to.offset(at), pack.bytes())?;
                    alpha[i] = pack.alpha()[i];
                }
                alpha
            }
            (None, form) => {
                if form != WeightForm::Packed {
                    return wrong("gate and up".into(), form.to_string());
                }
                let pack = Pack::new(run)?;
                self.gpu.copy_to(self.to[0].offset(GpuPack::bytes(first, k) as u64), pack.bytes())?;
                pack.alpha()
            }
        };
        let expected = *self.alpha.get_or_insert(alpha);
        if alpha != expected {
            let found = format!("a run whose sums are scaled by {alpha:?} behind one with {expected:?}");
            return wrong(found, "runs of one scale; pack these weights whole".into());
        }
        for (at, bias) in [(0, &run.gate_bias), (n, &run.up_bias)] {
            if let Some(values) = bias {
                let both = self.bias.get_or_insert_with(|| vec![0.0; 2 * n]);
                both[at + first..at + first + run.n()].copy_from_slice(values);
            }
        }
        self.done += run.n();
        Ok(())
    }

    /// Makes the parts, when all runs have come. Waits for the device where a kernel does it. Fails if features are
    /// missing.
    pub(crate) fn finish(self) -> Result<Extras, Error> {
        let (rows, Self { gpu, layout, to, largest, bias, .. }) = (self.rows(), &self);
        let &Layout { n, k, .. } = layout;
        let Some(mut alpha) = self.alpha.filter(|_| self.done == n) else {
            return wrong(format!("{} features", self.done), n.to_string());
        };
        match (rows, layout.form) {
            (Some([gate, up, gate_scales, up_scales]), WeightForm::E4m3) => {
                for (i, (codes, scales)) in [(gate, gate_scales), (up, up_scales)].into_iter().enumerate() {
                    // What a matrix of zeros is divided by does not matter.
                    let most = e4m3::decode(largest[i].max(1)) * e2m1::MAX;
                    let over = most / e4m3::MAX;
                    let kernel = Expand::e4m3(*gpu, ScaleLayout::Linear, over)?;
                    let half = Codes { m: n, k, codes, pitch: k / 2, scales };
                    // SAFETY: rows and scales are here until they have been expanded to as many bytes of the pack.
                    unsafe { gpu.launch(&kernel.spec(&half, to[i], k)?) }?;
                    alpha[i] *= over;
                }
                // The rows are freed now.
                gpu.synchronize()?;
            }
            (Some([.., gate, up]), WeightForm::Atoms) => {
                for spec in to_atoms(gpu, layout, (ScaleLayout::Linear, [gate, up]), &to[2..])? {
                    // SAFETY: as above, of the scales.
                    unsafe { gpu.launch(&spec) }?;
                }
                gpu.synchronize()?;
            }
            _ => {}
        }
        Ok(Extras { alpha, bias: bias.clone() })
    }
}

/// The layout of a linear layer in an order. Fails if the order is one of pairs.
pub(crate) fn linear_layout(layer: &Linear<'_>, form: WeightForm) -> Result<Layout, Error> {
    match form.is_linear() {
        true => Layout::new((layer.n(), layer.k()), layer.weight.blocks()?.format(), form),
        false => wrong("a linear layer".into(), form.to_string()),
    }
}

/// Brings a linear layer into an order and copies it to its parts. Fails if the bias has another length, a scale is NaN
/// or negative, or scales of mxfp4 are too far apart for the pack.
pub(crate) fn put_linear(
    gpu: &'static Gpu,
    layer: &Linear<'_>,
    layout: &Layout,
    to: &[DevicePtr],
) -> Result<Extras, Error> {
    layer.check()?;
    let weight = layer.weight.blocks()?;
    let alpha = if layout.form == WeightForm::AtomsLinear {
        let (codes, scales) = weight.dense_rows(0..weight.rows());
        let scales = ScaleLayout::Linear.convert(&scales, ScaleLayout::Sf128x4, layout.n, layout.blocks());
        gpu.copy_to(to[0], &codes)?;
        gpu.copy_to(to[1], &scales)?;
        [weight.global_scale().value(); 2]
    } else {
        let pack = Pack::of_matrix(weight)?;
        gpu.copy_to(to[0], pack.bytes())?;
        pack.alpha()
    };
    Ok(Extras { alpha, bias: layer.bias.as_ref().map(|bias| bias.to_vec()) })
}

/// Lists what brings scales of gate and up to their atoms.
fn to_atoms(
    gpu: &'static Gpu,
    layout: &Layout,
    (from, scales): (ScaleLayout, [DevicePtr; 2]),
    to: &[DevicePtr],
) -> Result<Vec<LaunchSpec>, Error> {
    let kernel = gpu.kernel(from, || ScaleAtoms::new(gpu, from, false))?;
    let spec = |(scales, &to)| Ok(kernel.spec((layout.n, layout.blocks()), scales, to, None)?);
    scales.into_iter().zip(to).map(spec).collect()
}

/// Launches what brings weights that are on the device to the parts of an order there, after what `stream` was given
/// before.
///
/// # Safety
/// As [`DeviceWeights::on_device`](crate::DeviceWeights::on_device); `to` are the parts of `layout`.
///
/// # Errors
/// If the order is made on the host, an address is misaligned, or a bias has another length.
pub(crate) unsafe fn put_on_device(
    gpu: &'static Gpu,
    weights: &DeviceGateUp<'_>,
    layout: &Layout,
    to: &[DevicePtr],
    stream: Stream,
) -> Result<Extras, Error> {
    let &DeviceGateUp { format, n, k, codes, scales, layout: from, global_scales, bias } = weights;
    let bias = both_biases(n, bias)?;
    let specs = match (layout.form, format) {
        (WeightForm::Packed, BlockFormat::Nvfp4) => {
            let half = |i: usize| Codes { m: n, k, codes: codes[i], pitch: k / 2, scales: scales[i] };
            vec![gpu.kernel(from, || GpuPack::new(gpu, from))?.spec(&half(0), &half(1), to[0])?]
        }
        (WeightForm::Atoms, _) => {
            let copy = gpu.kernel(from, || Copy::new(gpu))?;
            let mut specs = to_atoms(gpu, layout, (from, scales), &to[2..])?;
            for (i, name) in ["codes of gate", "codes of up"].into_iter().enumerate() {
                specs.push(copy.spec(name, (codes[i], to[i]), n * k / 2)?);
            }
            specs
        }
        (form, format) => return Err(Error::MadeOnHost { format, form }),
    };
    // SAFETY: the caller's promise.
    specs.iter().try_for_each(|spec| unsafe { gpu.launch_on(stream, spec) })?;
    Ok(Extras { alpha: alpha_on_device(layout.form, global_scales), bias })
}

/// What sums are multiplied by, of weights that [`put_on_device`] has brought to an order.
pub(crate) fn alpha_on_device(form: WeightForm, global_scales: [f32; 2]) -> [f32; 2] {
    let factor = if form == WeightForm::Packed { WEIGHT_FACTOR } else { 1.0 };
    global_scales.map(|scale| scale * factor)
}

/// The layout of weights that are on the device, in an order.
pub(crate) fn on_device_layout(weights: &DeviceGateUp<'_>, form: WeightForm) -> Result<Layout, Error> {
    Layout::new((weights.n, weights.k), weights.format, form)
}

/// Biases of gate and up one after the other, if either has one.
fn both_biases(n: usize, bias: [Option<&[f32]>; 2]) -> Result<Option<Vec<f32>>, Error> {
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

/// f32 values as a device holds them.
pub(crate) fn float_bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}
