//! The host side of the fused sm_120 kernel, the same on a simulated and on a real device.
//!
//! Flow: nvfp4 matrices → [`Operand`](crate::parts::operand::Operand)s on the device; [`Config`] → [`Fused`] → launch → C.

use dualgemm_device::{Device, FunctionId, LaunchSpec};
use dualgemm_gemm::Program;
use dualgemm_ptx::Target;

use super::config::Config;
use super::fused;
use crate::Error;
use crate::parts::operand::FusedArgs;
use crate::parts::rows::Out;

/// The fused kernel, loaded on a device for one N.
#[derive(Clone, Copy)]
pub struct Fused<'d> {
    device: &'d dyn Device,
    config: Config,
    function: FunctionId,
    n: usize,
    shared: u32,
}

impl<'d> Fused<'d> {
    /// Generates and loads the kernel for `n` features.
    ///
    /// # Errors
    /// If the configuration does not fit, or the device refuses the text.
    pub fn new(
        device: &'d dyn Device,
        config: Config,
        program: &Program,
        out: Out,
        n: usize,
    ) -> Result<Self, Error> {
        let target = match device.info().arch.minor {
            1 => Target::Sm121a,
            _ => Target::Sm120a,
        };
        let ptx = fused::generate(&config, program, out, out.rows_are_aligned(n), target)?.to_string();
        let function = device.function(device.load(&ptx)?, fused::ENTRY)?;
        Ok(Self { device, config, function, n, shared: config.layout()?.smem.bytes() })
    }

    /// The launch on these operands; it can be repeated and recorded.
    ///
    /// # Errors
    /// If the operands do not belong together, or cannot be described to the TMA unit.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        args.check(self.n)?;
        let (m, n, k) = (args.a.rows, self.n, args.a.k);
        let maps = args.maps(self.device, self.config.parts())?;
        let [gate, up] = args.alpha;
        let args = maps.ptr(args.c).u32(m as u32).u32(n as u32).u32(k as u32).f32(gate).f32(up);
        let (grid, block) = ([self.config.grid(m, n), 1, 1], [self.config.threads(), 1, 1]);
        Ok(LaunchSpec::new(self.function, grid, block).dynamic_shared(self.shared).args(args))
    }

    /// Starts the kernel.
    ///
    /// # Errors
    /// As [`spec`](Self::spec), and what the device says of the launch.
    pub fn launch(&self, args: &FusedArgs) -> Result<(), Error> {
        Ok(self.device.launch(&self.spec(args)?)?)
    }
}
