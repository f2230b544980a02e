//! The host side of the fused sm_120 kernel, the same on a simulated and on a real device.
//!
//! Flow: nvfp4 matrices → [`Operand`](crate::parts::operand::Operand)s on the device; [`Config`] → [`Fused`] → launch → C.

use dualgemm_device::{Device, FunctionId, LaunchSpec};
use dualgemm_ptx::Target;

use super::config::Config;
use super::fused;
use crate::Error;
use crate::parts::operand::FusedArgs;
use crate::parts::rows::Variant;

/// The fused kernel, loaded on a device for one N.
#[derive(Clone)]
pub struct Fused<'d> {
    device: &'d dyn Device,
    config: Config,
    variant: Variant,
    function: FunctionId,
    n: usize,
    shared: u32,
}

impl<'d> Fused<'d> {
    /// Generates and loads the kernel for `n` features.
    ///
    /// # Errors
    /// If the configuration does not fit, or the device refuses the text.
    pub fn new(device: &'d dyn Device, config: Config, variant: &Variant, n: usize) -> Result<Self, Error> {
        let variant = variant.clone().for_features(n);
        variant.check(n)?;
        let target = match device.info().arch.minor {
            1 => Target::Sm121a,
            _ => Target::Sm120a,
        };
        let ptx = fused::generate(&config, &variant, target)?.to_string();
        let function = device.function(device.load(&ptx)?, fused::ENTRY)?;
        Ok(Self { device, config, variant, function, n, shared: config.layout()?.smem.bytes() })
    }

    /// The launch on these operands; it can be repeated and recorded.
    ///
    /// # Errors
    /// If the operands do not belong together, or cannot be described to the TMA unit.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        args.check(self.n, &self.variant)?;
        let (m, _) = args.shape();
        // Each group's last tile may be a part of one.
        let token_tiles = m / self.config.tokens as usize + args.group_count();
        let tiles = token_tiles * self.n.div_ceil(self.config.features as usize);
        let Ok(grid) = u32::try_from(tiles) else {
            let (rule, limit) = ("tokens", i32::MAX as u32);
            return Err(Error::Unsupported { kernel: "sm120a fused", rule, value: m as u32, limit });
        };
        Ok(LaunchSpec::new(self.function, [grid, 1, 1], [self.config.threads(), 1, 1])
            .dynamic_shared(self.shared)
            .args(args.args(self.device, self.config.parts(), self.n, &self.variant)?))
    }

    /// Starts the kernel.
    ///
    /// # Errors
    /// As [`spec`](Self::spec), and what the device says of the launch.
    pub fn launch(&self, args: &FusedArgs) -> Result<(), Error> {
        Ok(self.device.launch(&self.spec(args)?)?)
    }
}
