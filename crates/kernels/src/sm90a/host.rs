//! The host side of the fused Hopper kernel, the same on a simulated and on a real device.
//!
//! Flow: A and a [`Pack`] → [`Operands`] on the device; [`Config`] → [`Fused`] → launch → C.

use dualgemm_device::{Args, Device, DevicePtr, FunctionId, LaunchSpec};
use dualgemm_formats::Matrix;
use dualgemm_gemm::{Error as OperandError, Program};
use dualgemm_ptx::layout::{TensorDataType, TensorMap, TensorSwizzle};
use half::f16;

use super::config::Config;
use super::fused;
use super::pack::{CHUNK_K, Pack};
use crate::Error;

/// A, packed weights and room for C in device memory.
#[derive(Debug)]
pub struct Operands {
    m: usize,
    n: usize,
    k: usize,
    alpha: [f32; 2],
    a: DevicePtr,
    pack: DevicePtr,
    c: DevicePtr,
}

fn upload(device: &dyn Device, bytes: &[u8]) -> Result<DevicePtr, Error> {
    let ptr = device.alloc(bytes.len())?;
    device.copy_to(ptr, bytes)?;
    Ok(ptr)
}

impl Operands {
    /// Copies A, `[m, k]`, and the weights to the device.
    ///
    /// # Errors
    /// If A and the weights differ in K, or the device has no room.
    pub fn upload(device: &dyn Device, a: &Matrix<'_, f16>, pack: &Pack) -> Result<Self, Error> {
        let (m, n, k) = (a.rows(), pack.n(), pack.k());
        if a.cols() != k {
            let (found, expected) = (format!("[{m}, {}]", a.cols()), format!("[M, {k}], as the weights are"));
            return Err(OperandError::Operand { tensor: "A".into(), found, expected }.into());
        }
        let rows: Vec<u8> = (0..m).flat_map(|r| a.row(r)).flat_map(|x| x.to_le_bytes()).collect();
        Ok(Self {
            m,
            n,
            k,
            alpha: pack.alpha(),
            a: upload(device, &rows)?,
            pack: upload(device, pack.bytes())?,
            c: device.alloc(m * n * size_of::<f16>())?,
        })
    }

    /// C, `[m, n]` row-major, after the launches before.
    ///
    /// # Errors
    /// The failure of an earlier launch.
    pub fn read_c(&self, device: &dyn Device) -> Result<Vec<f16>, Error> {
        let mut c = vec![0; self.m * self.n * size_of::<f16>()];
        device.copy_from(&mut c, self.c)?;
        Ok(c.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect())
    }

    /// Gives the memory back.
    ///
    /// # Errors
    /// If the operands belong to another device.
    pub fn free(self, device: &dyn Device) -> Result<(), Error> {
        for ptr in [self.a, self.pack, self.c] {
            device.free(ptr)?;
        }
        Ok(())
    }
}

/// The fused kernel, loaded on a device for one N and one activation.
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
    pub fn new(device: &'d dyn Device, config: Config, program: &Program, n: usize) -> Result<Self, Error> {
        // Rows of C start at multiples of 16 bytes if N is a multiple of 8.
        let ptx = fused::generate(&config, program, n.is_multiple_of(8))?.to_string();
        let function = device.function(device.load(&ptx)?, fused::ENTRY)?;
        Ok(Self { device, config, function, n, shared: config.layout()?.smem.bytes() })
    }

    /// The launch on these operands; it can be repeated and recorded.
    ///
    /// # Errors
    /// If the operands have another N, or A cannot be described to the TMA unit.
    pub fn spec(&self, operands: &Operands) -> Result<LaunchSpec, Error> {
        let &Operands { m, n, k, alpha, a, pack, c } = operands;
        if n != self.n {
            let (found, expected) =
                (format!("[{n}, {k}]"), format!("[{}, K]: the kernel is for that N", self.n));
            return Err(OperandError::Operand { tensor: "gate".into(), found, expected }.into());
        }
        let map = TensorMap::matrix(
            TensorDataType::F16,
            a.0,
            (m as u64, k as u64),
            k as u64 * 2,
            (self.config.tokens, CHUNK_K as u32),
            TensorSwizzle::B128,
        );
        let args = Args::new()
            .tensor_map(self.device.tensor_map(&map)?)
            .ptr(pack)
            .ptr(c)
            .u32(m as u32)
            .u32(n as u32)
            .u32(k.div_ceil(CHUNK_K) as u32)
            .f32(alpha[0])
            .f32(alpha[1]);
        let (grid, block) = ([self.config.grid(m, n), 1, 1], [self.config.threads(), 1, 1]);
        Ok(LaunchSpec::new(self.function, grid, block).dynamic_shared(self.shared).args(args))
    }

    /// Starts the kernel.
    ///
    /// # Errors
    /// As [`spec`](Self::spec), and what the device says of the launch.
    pub fn launch(&self, operands: &Operands) -> Result<(), Error> {
        Ok(self.device.launch(&self.spec(operands)?)?)
    }
}
