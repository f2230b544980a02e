//! Weights of the experts of a mixture on a device, pack after pack, so that one launch takes the rows of all.

use std::sync::Arc;

use dualgemm_device::{Device, DevicePtr, Stream};
use dualgemm_gemm::GateUp;
use dualgemm_kernels::generic::pack::GpuPack;
use dualgemm_kernels::sm90a::pack::Pack;

use crate::weights::{both_biases, float_bytes, next_id, pack_to};
use crate::{Buffer, DeviceGateUp, DeviceWeights, Error, Gpu};

/// Pairs of weight matrices of one shape in device memory, each with tensor scales and biases of its own. Shared between
/// runners and threads at will.
#[derive(Debug)]
pub struct DeviceExperts {
    id: u64,
    n: usize,
    k: usize,
    /// Of each expert, what sums of gate and up are multiplied by; the same in device memory, `[experts][2]` f32.
    alpha: Vec<[f32; 2]>,
    alphas: Buffer,
    /// Pack after pack.
    pack: Arc<Buffer>,
    /// `[2][experts][n]` f32: gate, then up.
    bias: Option<Buffer>,
}

impl DeviceExperts {
    /// Packs experts one by one and copies them to a device.
    ///
    /// # Errors
    /// If there is none, halves do not belong together, shapes differ, or they do not fit.
    pub fn upload(gpu: &'static Gpu, experts: &[GateUp<'_>]) -> Result<Self, Error> {
        let shape = |weights: &GateUp<'_>| (weights.n(), weights.k());
        Self::new(gpu, experts, shape, |weights, to| {
            let pack = Pack::new(weights)?;
            gpu.copy_to(to, pack.bytes())?;
            Ok((pack.alpha(), pack.bias().map(|[gate, up]| [gate, up].concat())))
        })
    }

    /// Packs experts that are on the device already, on the device, after what `stream` was given before. Waits for it.
    ///
    /// # Errors
    /// If there is none, shapes differ, an address is misaligned, a bias has another length, or they do not fit.
    pub fn pack_on_device(
        gpu: &'static Gpu,
        experts: &[DeviceGateUp<'_>],
        stream: Stream,
    ) -> Result<Self, Error> {
        let shape = |weights: &DeviceGateUp<'_>| (weights.n, weights.k);
        let packed = Self::new(gpu, experts, shape, |weights, to| {
            Ok((pack_to(gpu, weights, to, stream)?, both_biases(weights.n, weights.bias)?))
        })?;
        gpu.synchronize()?;
        Ok(packed)
    }

    /// `put` brings one expert's pack to an address and gives what belongs to it: alpha, and biases of gate and up.
    fn new<W>(
        gpu: &'static Gpu,
        experts: &[W],
        shape: impl Fn(&W) -> (usize, usize),
        mut put: impl FnMut(&W, DevicePtr) -> Result<([f32; 2], Option<Vec<f32>>), Error>,
    ) -> Result<Self, Error> {
        let refuse = |found: String, expected: String| Error::Operand { tensor: "experts", found, expected };
        let (n, k) = experts
            .first()
            .map(&shape)
            .ok_or_else(|| refuse("no weights".into(), "those of at least one expert".into()))?;
        if let Some((n_of, k_of)) = experts.iter().map(&shape).find(|&found| found != (n, k)) {
            let found = format!("[{n_of}, {k_of}] beside [{n}, {k}]");
            return Err(refuse(found, "weights of one shape".into()));
        }
        let (stride, mut alpha, mut biases) = (GpuPack::bytes(n, k), Vec::new(), Vec::new());
        let pack = Arc::new(Buffer::new(gpu, stride * experts.len())?);
        for (expert, weights) in experts.iter().enumerate() {
            let (own, bias) = put(weights, pack.ptr().offset((expert * stride) as u64))?;
            alpha.push(own);
            biases.push(bias);
        }
        let mut bias = None;
        if biases.iter().any(Option::is_some) {
            let half = |first: usize| {
                biases.iter().flat_map(move |both| match both {
                    Some(both) => both[first..first + n].to_vec(),
                    None => vec![0.0; n],
                })
            };
            bias = Some(Buffer::of(gpu, &float_bytes(half(0).chain(half(n))))?);
        }
        let alphas = Buffer::of(gpu, &float_bytes(alpha.iter().flatten().copied()))?;
        Ok(Self { id: next_id(), n, k, alpha, alphas, pack, bias })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.alpha.len()
    }

    /// Features of each.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Elements per row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// A number of their own, which no other weights of this process have.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Bytes on the device, biases left out.
    pub fn bytes(&self) -> usize {
        self.pack.bytes()
    }

    /// Each expert's weights for itself: the same packs, biases once more.
    ///
    /// # Errors
    /// If the biases do not fit.
    pub fn each(self: &Arc<Self>, gpu: &'static Gpu) -> Result<Vec<DeviceWeights>, Error> {
        let row = 4 * self.n;
        let one = |index: usize| {
            let pack = Buffer::part(&self.pack, index * self.stride(), self.stride())?;
            let bias = match &self.bias {
                None => None,
                Some(bias) => {
                    let mut both = vec![0; 2 * row];
                    for (half, values) in both.chunks_exact_mut(row).enumerate() {
                        let first = (half * self.count() + index) * row;
                        gpu.copy_from(values, bias.ptr().offset(first as u64))?;
                    }
                    Some(Buffer::of(gpu, &both)?)
                }
            };
            Ok(DeviceWeights::of_expert(self.clone(), index, (self.alpha[index], pack, bias)))
        };
        (0..self.count()).map(one).collect()
    }

    /// Bytes from one pack to the next.
    pub(crate) fn stride(&self) -> usize {
        self.pack.bytes() / self.count()
    }

    /// The packs.
    pub(crate) fn packs(&self) -> DevicePtr {
        self.pack.ptr()
    }

    /// What sums of gate and up of each are multiplied by, `[experts][2]` f32.
    pub(crate) fn alphas(&self) -> DevicePtr {
        self.alphas.ptr()
    }

    /// Biases of gate and up, `[experts][n]` f32 each, or null.
    pub(crate) fn bias(&self) -> [DevicePtr; 2] {
        match &self.bias {
            None => [DevicePtr::NULL; 2],
            Some(both) => [both.ptr(), both.ptr().offset((both.bytes() / 2) as u64)],
        }
    }
}
