//! From A as it is given to what kernels multiply: 16-bit floats,
//!
//! | A | plan | kernels before the product |
//! |---|---|---|
//! | f16, bf16 | as it is | none |
//! | nvfp4 | exact | expand: `code · scale` as f16; the tensor scale joins the epilogue |
//! | f32, f16, bf16 | quantized with a static scale | quantize, to the same f16 |
//! | f32, f16, bf16 | quantized with a dynamic scale | amax, then quantize; the scale stays on the device |
//!
//! The kernel without prepack wants A in another order of K, which f16 and nvfp4 A are brought into. The e4m3 kernel wants
//! A rounded to e4m3: nvfp4 by one kernel, its range becoming e4m3's, and floats by amax and another, under the scale that
//! makes the largest magnitude 448.
//!
//! Blackwell's tensor cores multiply codes, row by row, with block scales in 128x4 atoms:
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

use dualgemm_device::{Device, DeviceInfo, DevicePtr, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatType, GlobalScale, ScaleLayout};
use dualgemm_gemm::{AFormat, DualGemmDesc, QuantizeA};
use dualgemm_kernels::generic::amax::{Amax, MAX_PARTS};
use dualgemm_kernels::generic::atoms::ScaleAtoms;
use dualgemm_kernels::generic::expand::{Codes, Expand};
use dualgemm_kernels::generic::quantize::{E4M3_FACTOR, Floats, Out, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::parts::groups::Groups;
use dualgemm_kernels::parts::operand::{ATOM_ROWS, Format, Operand};
use dualgemm_kernels::plain::order::SPAN;
use dualgemm_ptx::builder::HalfFormat;

use crate::strategy::one_group;
use crate::{Buffer, DeviceA, Error, Gpu, GpuPlan};

/// Blocks of a row that have their scales in one atom.
const ATOM_BLOCKS: usize = 4;

/// The float type that A is multiplied in: its own if that has 16 bits, otherwise f16, which holds nvfp4 exactly. Fails
/// if A is f32 and not quantized: tensor cores have no f32, and rounding it is the caller's decision.
pub(crate) fn compute_type(desc: &DualGemmDesc) -> Result<FloatType, String> {
    match (desc.a_compute(), desc.a) {
        (AFormat::F16 | AFormat::Nvfp4, _) => Ok(FloatType::F16),
        (AFormat::Bf16, _) => Ok(FloatType::Bf16),
        (AFormat::F32, _) => {
            Err("A is f32, which tensor cores do not multiply; round it to f16 or bf16, or quantize \
                                  it to nvfp4 (on the command line: --a-format)"
                .into())
        }
        (AFormat::Mxfp4, _) => {
            Err("A is mxfp4; GPU kernels take nvfp4, f16 and bf16, and mxfp4 with mxfp4 weights on Blackwell"
                .into())
        }
    }
}

/// The same as matrix instructions call it.
///
/// # Errors
/// As [`compute_type`].
pub(crate) fn half_format(desc: &DualGemmDesc) -> Result<HalfFormat, String> {
    Ok(match compute_type(desc)? {
        FloatType::Bf16 => HalfFormat::Bf16,
        FloatType::F16 | FloatType::F32 => HalfFormat::F16,
    })
}

/// How a kernel takes A.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// 16-bit floats, as they are.
    Rows,
    /// The same; those that codes are expanded to in blocks of 64 columns.
    Blocks,
    /// Those in the order of [`dualgemm_kernels::plain`], rows padded by zeros.
    Permuted,
    /// e4m3.
    E4m3,
    /// 16-bit floats, or nvfp4 as it is.
    Codes,
    /// 16-bit floats, or codes with block scales in 128x4 atoms.
    Atoms,
}

/// A as a kernel takes it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PreparedA {
    pub operand: Operand,
    /// What multiplies the products.
    pub scale: f32,
    /// One f32 that multiplies them as well, or null.
    pub device_scale: DevicePtr,
}

/// Lets a launch overlap the end of the one before, where the card can: every kernel here waits for it itself.
pub(crate) fn overlapping(info: &DeviceInfo, spec: LaunchSpec) -> LaunchSpec {
    spec.programmatic(info.arch.major >= 9)
}

/// The kernels before the product, with their memory.
#[derive(Debug)]
pub(crate) struct Prologue {
    m: usize,
    k: usize,
    /// What is written.
    made: Format,
    /// Bytes from row to row of it.
    pitch: usize,
    /// What multiplies the products besides the tensor scale.
    factor: f32,
    kind: Kind,
    /// Scales in atoms.
    scales: Scratch,
}

#[derive(Debug)]
enum Kind {
    /// Floats as they are.
    Floats(HalfFormat),
    /// nvfp4 as it is.
    Codes,
    /// Codes, whose scales may have to be moved.
    Atoms { format: BlockFormat, to_atoms: Pair<ScaleAtoms> },
    /// Codes to floats.
    Expand { kernel: Expand, image: Buffer, blocked: bool },
    /// Floats to others, or to codes with scales in atoms.
    Quantize { kernel: Pair<Quantize>, image: Buffer, scale: TensorScale },
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

/// A kernel for one group, where one is needed, and for several, where the plan is for such.
#[derive(Debug)]
pub(crate) struct Pair<K> {
    pub single: Option<K>,
    pub grouped: Option<K>,
}

impl<K> Pair<K> {
    pub(crate) fn of(&self, groups: Option<&Groups>) -> Option<&K> {
        match groups {
            None => self.single.as_ref(),
            Some(_) => self.grouped.as_ref(),
        }
    }
}

/// The tensor scale of an A that is quantized on the way in.
#[derive(Debug)]
pub(crate) enum TensorScale {
    Static(GlobalScale),
    /// Parts of the largest magnitude, and the scale.
    Dynamic {
        amax: Pair<Amax>,
        parts: Buffer,
        scale: Buffer,
    },
}

impl TensorScale {
    /// One of its own on each call.
    pub(crate) fn dynamic(gpu: &'static Gpu, ty: FloatType, grouped: bool) -> Result<Self, Error> {
        let amax = Pair {
            single: Some(Amax::new(gpu, ty, false)?),
            grouped: grouped.then(|| Amax::new(gpu, ty, true)).transpose()?,
        };
        let (parts, scale) = (Buffer::new(gpu, 4 * MAX_PARTS as usize)?, Buffer::new(gpu, 4)?);
        Ok(Self::Dynamic { amax, parts, scale })
    }

    /// Lists the launch that it takes, if any. Gives what the quantizer is told, what multiplies the products, and
    /// one f32 that multiplies them as well, or null.
    pub(crate) fn specs(
        &self,
        a: &Floats,
        groups: Option<&Groups>,
        specs: &mut Vec<LaunchSpec>,
    ) -> Result<(Scale, f32, DevicePtr), Error> {
        match self {
            Self::Static(scale) => Ok((Scale::Static(*scale), scale.value(), DevicePtr::NULL)),
            Self::Dynamic { amax, parts, scale } => {
                let amax = amax.of(groups).ok_or_else(one_group)?;
                specs.push(amax.spec(a, parts.ptr(), groups)?);
                let (parts, scale) = (parts.ptr(), scale.ptr());
                Ok((Scale::Dynamic { parts, scale }, 1.0, scale))
            }
        }
    }
}

impl Prologue {
    pub(crate) fn new(gpu: &'static Gpu, plan: &GpuPlan, order: Order) -> Result<Self, Error> {
        let (&DualGemmDesc { m, k, a, quantize_a, .. }, layout) = (&plan.desc, plan.a_scale_layout);
        let (grouped, f16) = (plan.groups > 1, Format::Half(HalfFormat::F16));
        let ty = a.float_type().unwrap_or(FloatType::F16);
        let (made, pitch, factor) = match order {
            Order::Rows | Order::Blocks | Order::Codes => (f16, 2 * k, 1.0),
            Order::Permuted => (f16, 2 * k.next_multiple_of(SPAN), 1.0),
            Order::E4m3 => (Format::E4m3, k, E4M3_FACTOR),
            Order::Atoms => (Format::Block(BlockFormat::Nvfp4), k / 2, 1.0),
        };
        let image = || Buffer::new(gpu, m * pitch);
        let kind = match (quantize_a, a.block_format(), order) {
            (QuantizeA::No, None, Order::Rows | Order::Blocks | Order::Codes | Order::Atoms) => {
                Kind::Floats(if a == AFormat::Bf16 { HalfFormat::Bf16 } else { HalfFormat::F16 })
            }
            (QuantizeA::No, Some(_), Order::Codes) => Kind::Codes,
            (QuantizeA::No, Some(format), Order::Atoms) => {
                // Padding along K is multiplied: by codes of zero, and NaN times zero is NaN. The caller's may be anything.
                let padded = !(k / format.block_len()).is_multiple_of(ATOM_BLOCKS);
                let moved = layout != ScaleLayout::Sf128x4 || padded;
                let to_atoms = Pair {
                    single: moved.then(|| ScaleAtoms::new(gpu, layout, false)).transpose()?,
                    grouped: grouped.then(|| ScaleAtoms::new(gpu, layout, true)).transpose()?,
                };
                Kind::Atoms { format, to_atoms }
            }
            (QuantizeA::No, Some(_), _) => {
                let kernel = match order {
                    Order::Blocks => Expand::blocks(gpu, layout)?,
                    Order::Permuted => Expand::permuted(gpu, layout)?,
                    Order::E4m3 => Expand::e4m3(gpu, layout, factor)?,
                    _ => Expand::new(gpu, layout, FloatType::F16)?,
                };
                Kind::Expand { kernel, image: image()?, blocked: order == Order::Blocks }
            }
            (how, ..) => {
                let scale = match (how, order) {
                    (QuantizeA::Static(scale), _) => TensorScale::Static(GlobalScale::multiplier(scale)),
                    (QuantizeA::No, Order::Permuted) => TensorScale::Static(GlobalScale::ONE),
                    // e4m3 of a float has a scale of its own on each call, too.
                    _ => TensorScale::dynamic(gpu, ty, grouped)?,
                };
                let dynamic = matches!(scale, TensorScale::Dynamic { .. });
                let load = |sink| Quantize::new(gpu, ty, sink, dynamic);
                let single = Some(load(match order {
                    Order::Permuted => Sink::Permuted,
                    Order::E4m3 => Sink::E4m3,
                    Order::Atoms => Sink::Codes(ScaleLayout::Sf128x4),
                    Order::Rows | Order::Blocks | Order::Codes => Sink::Image,
                })?);
                let of_groups = match order {
                    Order::Atoms => grouped.then(|| load(Sink::Grouped)).transpose()?,
                    _ => single,
                };
                Kind::Quantize { kernel: Pair { single, grouped: of_groups }, image: image()?, scale }
            }
        };
        let scales = Scratch { gpu, buffers: Mutex::default() };
        let this = Self { m, k, made, pitch, factor, kind, scales };
        this.reserve(None)?;
        Ok(this)
    }

    /// Whether the products are multiplied by an f32 in device memory.
    pub(crate) fn has_device_scale(&self) -> bool {
        matches!(&self.kind, Kind::Quantize { scale: TensorScale::Dynamic { .. }, .. })
    }

    /// Takes the memory for scales in atoms that calls in so many groups need, or without groups.
    pub(crate) fn reserve(&self, groups: Option<usize>) -> Result<DevicePtr, Error> {
        let format = match (&self.kind, self.made) {
            (Kind::Atoms { format, to_atoms }, _) if groups.is_some() || to_atoms.single.is_some() => *format,
            (Kind::Quantize { .. }, Format::Block(format)) => format,
            _ => return Ok(DevicePtr::NULL),
        };
        let (m, blocks) = (self.m, self.k / format.block_len());
        self.scales.take(match groups {
            None => ScaleLayout::Sf128x4.len(m, blocks),
            Some(count) => ScaleAtoms::grouped_bytes((m, blocks), count),
        })
    }

    /// Lists their launches and says where A of `m` rows is then. Fails if A is not what the plan is for, or
    /// misaligned.
    pub(crate) fn specs(
        &self,
        m: usize,
        a: &DeviceA,
        groups: Option<&Groups>,
        specs: &mut Vec<LaunchSpec>,
    ) -> Result<PreparedA, Error> {
        let (k, null) = (self.k, DevicePtr::NULL);
        let count = groups.map(|groups| groups.count);
        let atoms = count.map_or(m.div_ceil(ATOM_ROWS as usize), |count| Groups::atoms(m, count));
        let rows = |format, codes, scales| Operand { atoms, ..Operand::new(format, (m, k), codes, scales) };
        let made =
            |image: &Buffer, scales| Operand { pitch: self.pitch, ..rows(self.made, image.ptr(), scales) };
        let (operand, scale, device_scale) = match (&self.kind, *a) {
            (&Kind::Floats(half), DeviceA::Float { values, pitch }) => {
                (Operand { pitch, ..rows(Format::Half(half), values, null) }, 1.0, null)
            }
            (
                Kind::Codes,
                DeviceA::Blocks { format: format @ BlockFormat::Nvfp4, codes, scales, global_scale },
            ) => (rows(Format::Block(format), codes, scales), global_scale, null),
            (
                Kind::Atoms { format: own, to_atoms },
                DeviceA::Blocks { format, codes, mut scales, global_scale },
            ) if *own == format => {
                match to_atoms.of(groups) {
                    Some(kernel) => {
                        let to = self.reserve(count)?;
                        specs.push(kernel.spec((m, k / format.block_len()), scales, to, groups)?);
                        scales = to;
                    }
                    None if groups.is_some() => return Err(one_group()),
                    None => {}
                }
                (rows(Format::Block(format), codes, scales), global_scale, null)
            }
            (
                Kind::Expand { kernel, image, blocked },
                DeviceA::Blocks { format: BlockFormat::Nvfp4, codes, scales, global_scale },
            ) => {
                let codes = Codes { m, k, codes, pitch: k / 2, scales };
                let row = 128;
                let pitch = if *blocked { m * row } else { self.pitch };
                specs.push(kernel.spec(&codes, image.ptr(), pitch)?);
                let operand = match blocked {
                    true => Operand { pitch: row, blocked: true, ..made(image, null) },
                    false => made(image, null),
                };
                (operand, global_scale, null)
            }
            (Kind::Quantize { kernel, image, scale }, DeviceA::Float { values, pitch }) => {
                let (a, scales) = (Floats { m, k, values, pitch }, self.reserve(count)?);
                let out = match (self.made, groups) {
                    (Format::Block(_), None) => Out::Codes { codes: image.ptr(), scales },
                    (Format::Block(_), Some(&groups)) => Out::Grouped { codes: image.ptr(), scales, groups },
                    _ => Out::Image { values: image.ptr(), pitch: self.pitch },
                };
                let (how, scale, device_scale) = scale.specs(&a, groups, specs)?;
                specs.push(kernel.of(groups).ok_or_else(one_group)?.spec(&a, &out, &how)?);
                (made(image, scales), scale, device_scale)
            }
            (kind, found) => {
                let expected = match kind {
                    Kind::Floats(_) | Kind::Quantize { .. } => "floats".into(),
                    Kind::Atoms { format, .. } => format.to_string(),
                    Kind::Expand { .. } | Kind::Codes => "nvfp4".into(),
                };
                return Err(Error::Operand { tensor: "A", found: found.kind().into(), expected });
            }
        };
        Ok(PreparedA { operand, scale: scale * self.factor, device_scale })
    }
}
