//! What one writes first: dequantize both matrices, multiply them with the library, apply the activation. Every call
//! dequantizes anew, so memory holds 4.5 bits per weight plus one layer's worth of 16.

use std::sync::Arc;

use dualgemm_device::{DeviceInfo, Stream};
use dualgemm_gemm::DualGemmDesc;

use super::library::{Library, Shape, supports};
use super::{Launches, Prepared, Strategy};
use crate::{Buffer, DeviceCall, DeviceWeights, Error, Gpu, GpuPlan, WeightForm};

/// See the [module](self).
#[derive(Debug)]
pub struct Baseline;

#[derive(Debug)]
struct Ready {
    library: Library,
    dequantized: Buffer,
}

impl Strategy for Baseline {
    fn name(&self) -> &'static str {
        "baseline"
    }

    fn doc(&self) -> &'static str {
        "weights dequantized on each call, two cuBLASLt products, an activation kernel"
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::Plain
    }

    fn launches(&self) -> Launches {
        Launches::Eager
    }

    fn kernels(&self, desc: &DualGemmDesc, _: &DeviceInfo) -> Result<Vec<String>, Error> {
        supports(self.name(), desc)?;
        Ok(vec!["cublaslt".into()])
    }

    fn estimate_us(&self, _: &DualGemmDesc, _: &DeviceInfo, _: &str) -> Option<f64> {
        None
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let library = Library::new(gpu, plan, Shape::Two)?;
        Ok(Box::new(Ready { dequantized: library.room()?, library }))
    }
}

impl Prepared for Ready {
    fn run(&self, call: &DeviceCall, weights: &Arc<DeviceWeights>, stream: Stream) -> Result<(), Error> {
        let (library, dequantized) = (&self.library, self.dequantized.ptr());
        let a = library.image(call, stream)?;
        library.dequantize(weights, dequantized, stream)?;
        library.products(&a, weights, dequantized, stream)?;
        library.activate(call, weights, stream)
    }
}
