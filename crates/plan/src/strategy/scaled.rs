//! From A as it is given to what Blackwell's tensor cores multiply: codes, row by row, with block scales in 128x4 atoms.
//!
//! | A | kernels before the product |
//! |---|---|
//! | nvfp4, mxfp4 with 128x4 scales, K whole atoms | none |
//! | nvfp4, mxfp4 with scales in another order, or padding along K | scales to atoms, padding zeroed |
//! | f32, f16, bf16, quantized with a static scale | quantize, scales straight to atoms |
//! | the same with a dynamic scale | amax, then quantize; the scale stays on the device |
//! | f16, bf16 as it is | none: the kernel widens the weights |
//!
//! Scales of rows in groups start with an atom of their own for each group, which kernels find by the table of first rows
//! in device memory; so scales that are given in atoms of the whole A are moved, too.

use std::sync::{Mutex, PoisonError};

use dualgemm_device::{Device, DevicePtr, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatType, GlobalScale, ScaleLayout};
use dualgemm_gemm::{AFormat, DualGemmDesc, QuantizeA};
use dualgemm_kernels::generic::atoms::ScaleAtoms;
use dualgemm_kernels::generic::quantize::{Floats, Out, Quantize};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::parts::groups::Groups;
use dualgemm_kernels::parts::operand::{ATOM_ROWS, Format, Operand};
use dualgemm_ptx::builder::HalfFormat;

use crate::prologue::{Pair, TensorScale};
use crate::{Buffer, DeviceA, Error, Gpu, GpuPlan};

/// Blocks of a row that have their scales in one atom.
const ATOM_BLOCKS: usize = 4;

/// A as a kernel takes it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scaled {
    pub(super) operand: Operand,
    pub(super) scale: f32,
    /// One f32 that multiplies them as well, or null.
    pub(super) device_scale: DevicePtr,
}

/// The kernels before the product, with their memory.
#[derive(Debug)]
pub(super) struct Prologue {
    m: usize,
    k: usize,
    kind: Kind,
    scales: Scratch,
}

#[derive(Debug)]
enum Kind {
    /// 16-bit floats, which the kernel multiplies.
    Halves(HalfFormat),
    /// Codes, whose scales may have to be moved.
    Codes { format: BlockFormat, to_atoms: Pair<ScaleAtoms> },
    /// Floats to be quantized to nvfp4.
    Floats { quantize: Pair<Quantize>, codes: Buffer, scale: TensorScale },
}

/// Memory that grows with the number of groups. What was given out stays, since recorded launches may refer to it.
#[derive(Debug)]
struct Scratch {
    gpu: &'static Gpu,
    buffers: Mutex<Vec<Buffer>>,
}

impl Scratch {
    /// At least so many bytes, zero at first.
    fn take(&self, bytes: usize) -> Result<DevicePtr, Error> {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = buffers.last().filter(|buffer| buffer.bytes() >= bytes) {
            return Ok(buffer.ptr());
        }
        let buffer = Buffer::zeroed(self.gpu, bytes)?;
        // Other streams do not wait for the zeros.
        self.gpu.synchronize()?;
        let ptr = buffer.ptr();
        buffers.push(buffer);
        Ok(ptr)
    }
}

impl Prologue {
    pub(super) fn new(gpu: &'static Gpu, plan: &GpuPlan) -> Result<Self, Error> {
        let &DualGemmDesc { m, k, a, quantize_a, .. } = &plan.desc;
        let (layout, grouped) = (plan.a_scale_layout, plan.groups > 1);
        let floats = match a {
            AFormat::F32 => FloatType::F32,
            AFormat::Bf16 => FloatType::Bf16,
            _ => FloatType::F16,
        };
        let kind = match (quantize_a, a.block_format()) {
            (QuantizeA::No, None) if a == AFormat::Bf16 => Kind::Halves(HalfFormat::Bf16),
            (QuantizeA::No, None) => Kind::Halves(HalfFormat::F16),
            (QuantizeA::No, Some(format)) => {
                // Padding along K is multiplied: by codes of zero, and NaN times zero is NaN. The caller's may be anything.
                let padded = !(k / format.block_len()).is_multiple_of(ATOM_BLOCKS);
                let moved = layout != ScaleLayout::Sf128x4 || padded;
                let to_atoms = Pair {
                    single: moved.then(|| ScaleAtoms::new(gpu, layout)).transpose()?,
                    grouped: grouped.then(|| ScaleAtoms::grouped(gpu, layout)).transpose()?,
                };
                Kind::Codes { format, to_atoms }
            }
            (how, _) => {
                let dynamic = how == QuantizeA::Dynamic;
                let kernel = |sink| Quantize::new(gpu, floats, sink, dynamic);
                let quantize = Pair {
                    single: Some(kernel(Sink::Codes(ScaleLayout::Sf128x4))?),
                    grouped: grouped.then(|| kernel(Sink::Grouped)).transpose()?,
                };
                let scale = match how {
                    QuantizeA::Static(scale) => TensorScale::Static(GlobalScale::multiplier(scale)),
                    _ => TensorScale::dynamic(gpu, floats, grouped)?,
                };
                Kind::Floats { quantize, codes: Buffer::new(gpu, m * k / 2)?, scale }
            }
        };
        let this = Self { m, k, kind, scales: Scratch { gpu, buffers: Mutex::default() } };
        this.reserve(None)?;
        Ok(this)
    }

    /// Takes the memory that calls in so many groups need, or without groups.
    pub(super) fn reserve(&self, groups: Option<usize>) -> Result<DevicePtr, Error> {
        let format = match &self.kind {
            Kind::Codes { format, to_atoms } if groups.is_some() || to_atoms.single.is_some() => *format,
            Kind::Floats { .. } => BlockFormat::Nvfp4,
            Kind::Halves(_) | Kind::Codes { .. } => return Ok(DevicePtr::NULL),
        };
        let (m, blocks) = (self.m, self.k / format.block_len());
        self.scales.take(match groups {
            None => ScaleLayout::Sf128x4.len(m, blocks),
            Some(count) => ScaleAtoms::grouped_bytes((m, blocks), count),
        })
    }

    /// Lists their launches and says where A of `m` rows is then.
    ///
    /// # Errors
    /// If A is not what the plan is for, or misaligned.
    pub(super) fn specs(
        &self,
        m: usize,
        a: &DeviceA,
        groups: Option<&Groups>,
        specs: &mut Vec<LaunchSpec>,
    ) -> Result<Scaled, Error> {
        let (k, null, pitch) = (self.k, DevicePtr::NULL, self.k / 2);
        let atoms = groups.map_or(m.div_ceil(ATOM_ROWS as usize), |groups| Groups::atoms(m, groups.count));
        let rows = |format, codes, scales| Operand {
            format: Format::Block(format),
            rows: m,
            k,
            codes,
            pitch,
            scales,
            atoms,
        };
        match (&self.kind, *a) {
            (&Kind::Halves(half), DeviceA::Float { values, pitch }) => {
                let format = Format::Half(half);
                let operand = Operand { format, rows: m, k, codes: values, pitch, scales: null, atoms: 0 };
                Ok(Scaled { operand, scale: 1.0, device_scale: null })
            }
            (Kind::Codes { format, to_atoms }, _) => {
                let (codes, mut scales, scale) = match (*format, *a) {
                    (BlockFormat::Nvfp4, DeviceA::Nvfp4 { codes, scales, global_scale })
                    | (BlockFormat::Mxfp4, DeviceA::Mxfp4 { codes, scales, global_scale }) => {
                        (codes, scales, global_scale)
                    }
                    _ => return Err(self.refuse(a)),
                };
                match (to_atoms.of(groups), groups) {
                    (Some(kernel), _) => {
                        let to = self.reserve(groups.map(|groups| groups.count))?;
                        specs.push(kernel.spec((m, k / format.block_len()), scales, to, groups)?);
                        scales = to;
                    }
                    (None, Some(_)) => return Err(super::one_group()),
                    (None, None) => {}
                }
                Ok(Scaled { operand: rows(*format, codes, scales), scale, device_scale: null })
            }
            (Kind::Floats { quantize, codes, scale }, DeviceA::Float { values, pitch }) => {
                let Some(kernel) = quantize.of(groups) else { return Err(super::one_group()) };
                let (a, codes) = (Floats { m, k, values, pitch }, codes.ptr());
                let scales = self.reserve(groups.map(|groups| groups.count))?;
                let out = match groups {
                    None => Out::Codes { codes, scales },
                    Some(&groups) => Out::Grouped { codes, scales, groups },
                };
                let (how, scale, device_scale) = scale.specs(&a, groups, specs)?;
                specs.push(kernel.spec(&a, &out, &how)?);
                Ok(Scaled { operand: rows(BlockFormat::Nvfp4, codes, scales), scale, device_scale })
            }
            _ => Err(self.refuse(a)),
        }
    }

    fn refuse(&self, found: &DeviceA) -> Error {
        let expected = match self.kind {
            Kind::Halves(_) | Kind::Floats { .. } => "floats".into(),
            Kind::Codes { format, .. } => format.to_string(),
        };
        Error::Operand { tensor: "A", found: found.kind().into(), expected }
    }
}
