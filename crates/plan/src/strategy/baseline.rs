//! What one writes first: dequantize both matrices, multiply them with the library, apply the activation. Every call
//! dequantizes anew, so memory holds 4.5 bits per weight plus one layer's worth of 16.

use std::sync::Arc;

use dualgemm_device::Stream;

use super::Prepared;
use super::library::{Library, OfLibrary, Shape};
use crate::{Buffer, DeviceCall, DeviceWeights, Error};

/// See the [module](self).
pub const BASELINE: OfLibrary = OfLibrary {
    name: "baseline",
    doc: "weights dequantized on each call, two cuBLASLt products, an activation kernel",
    prepare: |gpu, plan| {
        let library = Library::new(gpu, plan, Shape::Two)?;
        Ok(Box::new(Ready { dequantized: library.room()?, library }))
    },
};

#[derive(Debug)]
struct Ready {
    library: Library,
    dequantized: Buffer,
}

impl Prepared for Ready {
    unsafe fn run(
        &self,
        call: &DeviceCall,
        weights: &Arc<DeviceWeights>,
        stream: Stream,
    ) -> Result<(), Error> {
        let (library, dequantized) = (&self.library, self.dequantized.ptr());
        // SAFETY: the caller vouches for the call, and the rest is this plan's.
        unsafe {
            let a = library.image(call, stream)?;
            library.dequantize(weights, dequantized, stream)?;
            library.products(&a, weights, dequantized, stream)?;
            library.activate(call, weights, stream)
        }
    }
}
