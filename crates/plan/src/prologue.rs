//! From A as it is given to the 16-bit floats that kernels multiply.
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

use dualgemm_device::{DeviceInfo, DevicePtr, LaunchSpec};
use dualgemm_formats::{FloatType, GlobalScale};
use dualgemm_gemm::{AFormat, DualGemmDesc, QuantizeA};
use dualgemm_kernels::generic::amax::{Amax, MAX_PARTS};
use dualgemm_kernels::generic::expand::{Codes, Expand};
use dualgemm_kernels::generic::quantize::{E4M3_FACTOR, Floats, Out, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::parts::groups::Groups;
use dualgemm_kernels::plain::order::SPAN;
use dualgemm_ptx::builder::HalfFormat;

use crate::strategy::one_group;
use crate::{Buffer, DeviceA, Error, Gpu, GpuPlan};

/// The float type that A is multiplied in: its own if that has 16 bits, otherwise f16, which holds nvfp4 exactly.
///
/// # Errors
/// If A is f32 and not quantized: tensor cores have no f32, and rounding it is the caller's decision.
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

/// The order of K, and what is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// As it is.
    Rows,
    /// That of [`dualgemm_kernels::plain`], rows padded by zeros.
    Permuted,
    /// As it is, in e4m3.
    E4m3,
}

/// A as kernels multiply it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PreparedA {
    /// The first element.
    pub values: DevicePtr,
    /// Bytes from row to row.
    pub pitch: usize,
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
    k: usize,
    /// Bytes from row to row of what is written.
    pitch: usize,
    /// What multiplies the products besides the tensor scale.
    factor: f32,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Direct,
    Permute { kernel: Quantize, image: Buffer },
    Expand { kernel: Expand, image: Buffer },
    Quantize { kernel: Quantize, image: Buffer, scale: TensorScale },
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
            single: Some(Amax::new(gpu, ty)?),
            grouped: grouped.then(|| Amax::grouped(gpu, ty)).transpose()?,
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
        let (desc, layout) = (&plan.desc, plan.a_scale_layout);
        let pitch = match order {
            Order::Rows => 2 * desc.k,
            Order::Permuted => 2 * desc.k.next_multiple_of(SPAN),
            Order::E4m3 => desc.k,
        };
        let factor = if order == Order::E4m3 { E4M3_FACTOR } else { 1.0 };
        let sink = if order == Order::E4m3 { Sink::E4m3 } else { Sink::Image(FloatType::F16) };
        let image = || Buffer::new(gpu, desc.m * pitch);
        let quantize = |float: AFormat, dynamic| {
            let ty = match float {
                AFormat::F32 => FloatType::F32,
                AFormat::Bf16 => FloatType::Bf16,
                _ => FloatType::F16,
            };
            Ok::<_, Error>((ty, Quantize::new(gpu, ty, sink, dynamic)?))
        };
        let kind = match (desc.quantize_a, desc.a) {
            (QuantizeA::No, AFormat::Nvfp4) => {
                let kernel = match order {
                    Order::Rows => Expand::new(gpu, layout, FloatType::F16)?,
                    Order::Permuted => Expand::permuted(gpu, layout)?,
                    Order::E4m3 => Expand::e4m3(gpu, layout, factor)?,
                };
                Kind::Expand { kernel, image: image()? }
            }
            (QuantizeA::No, _) if order == Order::Permuted => {
                let sink = Sink::Permuted(FloatType::F16);
                Kind::Permute { kernel: Quantize::new(gpu, FloatType::F16, sink, false)?, image: image()? }
            }
            (QuantizeA::No, _) if order == Order::Rows => Kind::Direct,
            (QuantizeA::Static(scale), float) => {
                let scale = TensorScale::Static(GlobalScale::multiplier(scale));
                Kind::Quantize { kernel: quantize(float, false)?.1, image: image()?, scale }
            }
            // e4m3 of a float has a scale of its own on each call, too.
            (QuantizeA::Dynamic | QuantizeA::No, float) => {
                let (ty, kernel) = quantize(float, true)?;
                let scale = TensorScale::dynamic(gpu, ty, plan.groups > 1)?;
                Kind::Quantize { kernel, image: image()?, scale }
            }
        };
        Ok(Self { k: desc.k, pitch, factor, kind })
    }

    /// Whether the products are multiplied by an f32 in device memory.
    pub(crate) fn has_device_scale(&self) -> bool {
        matches!(&self.kind, Kind::Quantize { scale: TensorScale::Dynamic { .. }, .. })
    }

    /// Lists their launches and says where A is then.
    pub(crate) fn specs(
        &self,
        m: usize,
        a: &DeviceA,
        groups: Option<&Groups>,
        specs: &mut Vec<LaunchSpec>,
    ) -> Result<PreparedA, Error> {
        let (k, pitch_out, null) = (self.k, self.pitch, DevicePtr::NULL);
        let whole = |image: &Buffer, scale, device_scale| {
            let scale = scale * self.factor;
            Ok(PreparedA { values: image.ptr(), pitch: pitch_out, scale, device_scale })
        };
        match (&self.kind, *a) {
            (Kind::Direct, DeviceA::Float { values, pitch }) => {
                Ok(PreparedA { values, pitch, scale: 1.0, device_scale: null })
            }
            (Kind::Permute { kernel, image }, DeviceA::Float { values, pitch }) => {
                let out = Out::Image { values: image.ptr(), pitch: pitch_out };
                let scale = Scale::Static(GlobalScale::ONE);
                specs.push(kernel.spec(&Floats { m, k, values, pitch }, &out, &scale)?);
                whole(image, 1.0, null)
            }
            (Kind::Expand { kernel, image }, DeviceA::Nvfp4 { codes, scales, global_scale }) => {
                let codes = Codes { m, k, codes, pitch: k / 2, scales };
                specs.push(kernel.spec(&codes, image.ptr(), pitch_out)?);
                whole(image, global_scale, null)
            }
            (Kind::Quantize { kernel, image, scale }, DeviceA::Float { values, pitch }) => {
                let a = Floats { m, k, values, pitch };
                let out = Out::Image { values: image.ptr(), pitch: pitch_out };
                let (how, scale, device_scale) = scale.specs(&a, groups, specs)?;
                specs.push(kernel.spec(&a, &out, &how)?);
                whole(image, scale, device_scale)
            }
            (_, found) => Err(Error::Operand {
                tensor: "A",
                found: found.kind().into(),
                expected: match self.kind {
                    Kind::Expand { .. } => "nvfp4".into(),
                    Kind::Direct | Kind::Permute { .. } | Kind::Quantize { .. } => "floats".into(),
                },
            }),
        }
    }
}
