//! The fused kernel by `mma.sync`, for every NVIDIA GPU from sm_80 on: slower than what is written for one architecture,
//! but nobody is turned away. It reads the same pack.

use dualgemm_device::{DeviceInfo, LaunchSpec};
use dualgemm_gemm::{DualGemmDesc, Operation};
use dualgemm_kernels::parts::rows::{self, Output};
use dualgemm_kernels::sm80::config::Config;
use dualgemm_kernels::sm80::fused::Variant;
use dualgemm_kernels::sm80::host::{Fused as Kernel, FusedArgs};
use dualgemm_ptx::builder::HalfFormat;

use super::launched::{Weights, rows_of};
use super::one_product::{OneProduct, Product};
use super::requantize::Requantize;
use super::{Prepared, Strategy, kernels_for_c};
use crate::prologue::{Order, PreparedA, compute_type, half_format};
use crate::{DeviceWeights, Error, Gpu, GpuPlan, WeightForm, model};

/// See the [module](self).
#[derive(Debug)]
pub struct Portable;

impl Strategy for Portable {
    fn name(&self) -> &'static str {
        "portable"
    }

    fn doc(&self) -> &'static str {
        "fused by mma.sync, for every NVIDIA GPU from sm_80 on"
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::Packed
    }

    fn automatic(&self) -> bool {
        true
    }

    fn takes(&self, _: Operation) -> bool {
        true
    }

    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        let unsupported = |reason: String| Err(Error::Unsupported { strategy: self.name(), reason });
        if info.arch.major < 8 {
            return unsupported(format!("its kernel needs sm_80; this is {}, {}", info.name, info.arch));
        }
        if let Err(reason) = compute_type(desc) {
            return unsupported(reason);
        }
        let linear = desc.op == Operation::Linear;
        kernels_for_c(self.name(), desc, Config::MENU, |config, out| {
            let rows = rows::Variant { out, grouped: true, ..rows_of(desc) };
            let variant = Variant { compute: HalfFormat::F16, linear, rows };
            config.layout(&variant).is_ok().then(|| config.name())
        })
    }

    fn grouped_kernels(
        &self,
        desc: &DualGemmDesc,
        _: usize,
        info: &DeviceInfo,
    ) -> Result<Vec<String>, Error> {
        Requantize::check_grouped(self.name(), desc)?;
        self.kernels(desc, info)
    }

    fn estimate_us(
        &self,
        desc: &DualGemmDesc,
        groups: usize,
        info: &DeviceInfo,
        kernel: &str,
    ) -> Option<f64> {
        Some(model::portable_us(desc, groups, info, &Config::named(kernel).ok()?))
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let compute = half_format(&plan.desc).unwrap_or(HalfFormat::F16);
        let product = PortableProduct { config: Config::named(&plan.kernel)?, compute, op: plan.desc.op };
        OneProduct::prepared(gpu, plan, Order::Rows, product)
    }
}

#[derive(Debug)]
struct PortableProduct {
    config: Config,
    compute: HalfFormat,
    op: Operation,
}

impl Product for PortableProduct {
    type Kernel = Kernel<'static>;

    fn load(&self, gpu: &'static Gpu, rows: &rows::Variant) -> Result<Self::Kernel, Error> {
        let (compute, linear) = (self.compute, self.op == Operation::Linear);
        Ok(Kernel::new(gpu, self.config, &Variant { compute, linear, rows: rows.clone() })?)
    }

    fn weights<'w>(&self, gpu: &'static Gpu, weights: &'w DeviceWeights) -> Result<&'w DeviceWeights, Error> {
        weights.packed_too(gpu)
    }

    fn spec(
        &self,
        kernel: &Self::Kernel,
        size: (usize, usize, usize),
        a: &PreparedA,
        weights: Weights<'_>,
        output: Output,
    ) -> Result<LaunchSpec, Error> {
        let (weights, groups) = (weights.packed(self.op)?, weights.group_args());
        Ok(kernel.spec(&FusedArgs { size, a: a.values, a_pitch: a.pitch, weights, groups, output })?)
    }
}
