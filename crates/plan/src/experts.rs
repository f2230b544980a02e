//! Weights of the experts of a mixture on a device, those of one behind those of another, so that one launch takes the
//! rows of all.

use std::sync::Arc;

use dualgemm_device::{Device, DevicePtr, Stream};
use dualgemm_gemm::{GateUp, Linear};

use crate::form::{Layout, Parts};
use crate::upload::{
    Extras, Uploads, float_bytes, linear_layout, on_device_layout, put_linear, put_on_device,
};
use crate::weights::next_id;
use crate::{Buffer, DeviceGateUp, DeviceWeights, Error, Gpu, WeightForm};

/// Pairs of weight matrices of one shape in device memory, each with tensor scales and biases of its own. Shared between
/// runners and threads at will.
#[derive(Debug)]
pub struct DeviceExperts {
    pub(crate) id: u64,
    pub(crate) parts: Parts,
    /// Of each expert, what sums of gate and up are multiplied by; the same in device memory, `[experts][2]` f32.
    alpha: Vec<[f32; 2]>,
    alphas: Buffer,
    /// `[2][experts][n]` f32: gate, then up; of linear layers `[experts][n]`.
    bias: Option<Buffer>,
}

impl DeviceExperts {
    /// Copies experts one by one to a device, in the order asked for.
    ///
    /// # Errors
    /// If the list is empty, halves do not belong together, shapes or formats differ, or they do not fit.
    pub fn upload(gpu: &'static Gpu, experts: &[GateUp<'_>], form: WeightForm) -> Result<Self, Error> {
        let layout =
            |weights: &GateUp<'_>| Layout::new((weights.n(), weights.k()), weights.gate.format(), form);
        Self::new(gpu, experts, layout, |weights, layout, to| {
            let mut uploads = Uploads::new(gpu, *layout, to)?;
            uploads.add(weights)?;
            uploads.finish()
        })
    }

    /// Copies the linear layers of experts, their down projections, to a device, in the order asked for.
    ///
    /// # Errors
    /// As [`DeviceWeights::upload_linear`], and if the list is empty or shapes differ.
    pub fn upload_linear(gpu: &'static Gpu, experts: &[Linear<'_>], form: WeightForm) -> Result<Self, Error> {
        let layout = |layer: &Linear<'_>| linear_layout(layer, form);
        Self::new(gpu, experts, layout, |layer, layout, to| put_linear(gpu, layer, layout, &to))
    }

    /// As [`upload`](Self::upload), for experts that are on the device already; see [`DeviceWeights::on_device`].
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there, and if the list is empty or shapes differ.
    pub unsafe fn on_device(
        gpu: &'static Gpu,
        experts: &[DeviceGateUp<'_>],
        form: WeightForm,
        stream: Stream,
    ) -> Result<Self, Error> {
        let layout = |weights: &DeviceGateUp<'_>| on_device_layout(weights, form);
        let placed = Self::new(gpu, experts, layout, |weights, layout, to| {
            // SAFETY: the caller vouches for the weights; the parts were made for the layout.
            unsafe { put_on_device(gpu, weights, layout, &to, stream) }
        })?;
        gpu.synchronize()?;
        Ok(placed)
    }

    /// `put` brings one expert's weights to their place and gives what belongs to them.
    fn new<W>(
        gpu: &'static Gpu,
        experts: &[W],
        layout: impl Fn(&W) -> Result<Layout, Error>,
        mut put: impl FnMut(&W, &Layout, Vec<DevicePtr>) -> Result<Extras, Error>,
    ) -> Result<Self, Error> {
        let refuse = |found: String, expected: &str| {
            Err(Error::Operand { tensor: "experts", found, expected: expected.into() })
        };
        let layouts = experts.iter().map(layout).collect::<Result<Vec<_>, _>>()?;
        let Some(&first) = layouts.first() else {
            return refuse("no weights".into(), "those of at least one expert");
        };
        if let Some(other) = layouts.iter().find(|&other| *other != first) {
            let text = |of: &Layout| format!("{} [{}, {}]", of.format, of.n, of.k);
            return refuse(format!("{} beside {}", text(other), text(&first)), "weights of one shape");
        }
        let (n, parts) = (first.n, Parts::new(gpu, first, experts.len())?);
        let (mut alpha, mut biases) = (Vec::new(), Vec::new());
        for (expert, weights) in experts.iter().enumerate() {
            let own = put(weights, &first, parts.place(expert))?;
            alpha.push(own.alpha);
            biases.push(own.bias);
        }
        let mut bias = None;
        if biases.iter().any(Option::is_some) {
            let half = |first: usize| {
                biases.iter().flat_map(move |both| match both {
                    Some(both) => both[first..first + n].to_vec(),
                    None => vec![0.0; n],
                })
            };
            let second = (!first.form.is_linear()).then(|| half(n)).into_iter().flatten();
            bias = Some(Buffer::of(gpu, &float_bytes(half(0).chain(second)))?);
        }
        let alphas = Buffer::of(gpu, &float_bytes(alpha.iter().flatten().copied()))?;
        Ok(Self { id: next_id(), parts, alpha, alphas, bias })
    }

    /// The same weights once more, in memory of their own.
    ///
    /// # Errors
    /// If they do not fit.
    pub fn duplicate(&self) -> Result<Self, Error> {
        let bias = self.bias.as_ref().map(Buffer::duplicate).transpose()?;
        let (id, parts) = (next_id(), self.parts.duplicate(self.gpu())?);
        Ok(Self { id, parts, alpha: self.alpha.clone(), alphas: self.alphas.duplicate()?, bias })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.parts.count()
    }

    /// Each expert's weights for itself: in the same memory, biases once more.
    ///
    /// # Errors
    /// If the biases do not fit.
    pub fn each(self: &Arc<Self>, gpu: &'static Gpu) -> Result<Vec<DeviceWeights>, Error> {
        let row = 4 * self.n();
        let one = |index: usize| {
            let parts = self.parts.one(index)?;
            let bias = match &self.bias {
                None => None,
                Some(bias) => {
                    let mut both = vec![0; bias.bytes() / self.count()];
                    for (half, values) in both.chunks_exact_mut(row).enumerate() {
                        let first = (half * self.count() + index) * row;
                        gpu.copy_from(values, bias.ptr().offset(first as u64))?;
                    }
                    Some(Buffer::of(gpu, &both)?)
                }
            };
            Ok(DeviceWeights::of_expert(self.clone(), index, (self.alpha[index], parts, bias)))
        };
        (0..self.count()).map(one).collect()
    }

    /// What sums of gate and up of each expert are multiplied by.
    pub(crate) fn each_alpha(&self) -> impl Iterator<Item = [f32; 2]> {
        self.alpha.iter().copied()
    }

    /// The same in device memory, `[experts][2]` f32.
    pub(crate) fn alphas(&self) -> DevicePtr {
        self.alphas.ptr()
    }

    /// Biases of gate and up, `[experts][n]` f32 each, or those of linear layers for both, or null.
    pub(crate) fn bias(&self) -> [DevicePtr; 2] {
        match &self.bias {
            None => [DevicePtr::NULL; 2],
            Some(both) => {
                [both.ptr(), both.ptr().offset((both.bytes() - 4 * self.count() * self.n()) as u64)]
            }
        }
    }
}
