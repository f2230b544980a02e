//! The host side of the fused sm_100 kernel, the same on a simulated and on a real device.
//!
//! Flow: nvfp4 matrices → [`Operand`](crate::parts::operand::Operand)s on the device; [`Config`] → [`Fused`] → launch → C.

use dualgemm_device::{Device, FunctionId, LaunchSpec};
use dualgemm_gemm::Program;
use dualgemm_ptx::Target;

use super::config::{self, Config, STAGE_K, THREADS};
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
        let aligned = out.rows_are_aligned(n);
        let target = match device.info().arch.minor {
            3 => Target::Sm103a,
            _ => Target::Sm100a,
        };
        let ptx = fused::generate(&config, program, out, aligned, target)?.to_string();
        let function = device.function(device.load(&ptx)?, fused::ENTRY)?;
        Ok(Self { device, config, function, n, shared: config.layout()?.smem.bytes() })
    }

    /// The launch on these operands; it can be repeated and recorded.
    ///
    /// # Errors
    /// If the operands do not belong together, or do not fit the configuration.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        args.check(self.n)?;
        let (m, n, k) = (args.a.rows, self.n, args.a.k);
        let unsupported =
            |rule, value, limit| Err(Error::Unsupported { kernel: "sm100a fused", rule, value, limit });
        let stages = (k as u32).div_ceil(STAGE_K);
        if stages < self.config.split_k {
            return unsupported("CTAs that split K, each at least 256 of it", self.config.split_k, stages);
        }
        if !self.config.tile_tokens().is_multiple_of(32) && m > self.config.tile_tokens() as usize {
            return unsupported("tokens with tiles of less than 32", m as u32, self.config.tile_tokens());
        }
        let maps = args.maps(self.device, self.config.parts())?;
        let [gate, up] = args.alpha;
        let args = maps.ptr(args.c).u32(m as u32).u32(n as u32).u32(k as u32).f32(gate).f32(up);
        let cluster = self.config.cluster();
        let tiles = config::tiles(&self.config, m, n);
        // A ring is reused for the exchange of sums, so a cluster that splits K takes one tile.
        let resident = self.device.info().sm_count / cluster;
        let clusters = if self.config.split_k > 1 { tiles } else { tiles.min(resident.max(1)) };
        Ok(LaunchSpec::new(self.function, [clusters * cluster, 1, 1], [THREADS, 1, 1])
            .cluster([cluster, 1, 1])
            .dynamic_shared(self.shared)
            .args(args))
    }

    /// Starts the kernel.
    ///
    /// # Errors
    /// As [`spec`](Self::spec), and what the device says of the launch.
    pub fn launch(&self, args: &FusedArgs) -> Result<(), Error> {
        Ok(self.device.launch(&self.spec(args)?)?)
    }
}
