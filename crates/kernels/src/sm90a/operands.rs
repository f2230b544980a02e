//! A, packed weights and room for C in device memory: what tests and benchmarks launch the kernel on.

use dualgemm_device::{Device, DevicePtr};
use dualgemm_formats::{FloatMatrix, ScaleLayout};
use dualgemm_gemm::Error as OperandError;
use half::{bf16, f16};

use super::host::{Fused, FusedArgs};
use super::pack::Pack;
use super::variant::Out;
use crate::Error;

/// Bytes behind C that no kernel may write.
const GUARD: usize = 256;
/// What they and C hold before.
const POISON: u8 = 0xEE;

/// One problem on a device.
#[derive(Debug)]
pub struct Operands {
    args: FusedArgs,
    out: Out,
    allocations: Vec<DevicePtr>,
}

impl Operands {
    /// Copies A, `[m, k]` in f16 or bf16, and the weights to the device, with everything else that `fused` asks for.
    ///
    /// # Errors
    /// If A and the weights differ in K, or the device has no room.
    pub fn upload(
        device: &dyn Device,
        fused: &Fused<'_>,
        a: &FloatMatrix<'_>,
        pack: &Pack,
    ) -> Result<Self, Error> {
        let (m, n, k) = (a.rows(), pack.n(), pack.k());
        if a.cols() != k {
            let (found, expected) = (format!("[{m}, {}]", a.cols()), format!("[M, {k}], as the weights are"));
            return Err(OperandError::Operand { tensor: "A".into(), found, expected }.into());
        }
        let rows: Vec<u8> = match a {
            FloatMatrix::F32(_) => {
                let (found, expected) = ("f32".into(), "f16 or bf16".into());
                return Err(OperandError::Operand { tensor: "A".into(), found, expected }.into());
            }
            FloatMatrix::F16(a) => (0..m).flat_map(|r| a.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
            FloatMatrix::Bf16(a) => (0..m).flat_map(|r| a.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
        };
        let mut allocations = Vec::new();
        let mut alloc = |bytes: &[u8]| -> Result<DevicePtr, Error> {
            let ptr = device.alloc(bytes.len())?;
            allocations.push(ptr);
            device.copy_to(ptr, bytes)?;
            Ok(ptr)
        };
        let out = fused.variant().out;
        let (a, packed) = (alloc(&rows)?, alloc(pack.bytes())?);
        let c = alloc(&vec![POISON; c_bytes(out, m, n) + GUARD])?;
        let mut args = FusedArgs::new(a, packed, c, (m, n, k), pack.alpha());
        if let Some(bias) = pack.bias().filter(|_| fused.variant().bias) {
            for (to, from) in args.bias.iter_mut().zip(bias) {
                *to = alloc(&from.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())?;
            }
        }
        if let Out::Nvfp4 { scale_layout } = out {
            args.c_scales = alloc(&vec![0; scale_layout.len(m, n / 16) + GUARD])?;
        }
        if fused.workspace_bytes() > 0 {
            args.workspace = alloc(&vec![0; fused.workspace_bytes()])?;
        }
        Ok(Self { args, out, allocations })
    }

    /// The operands as the kernel takes them.
    pub fn args(&self) -> &FusedArgs {
        &self.args
    }

    /// The operands, to be changed.
    pub fn args_mut(&mut self) -> &mut FusedArgs {
        &mut self.args
    }

    /// C's bytes, row-major, after the launches before.
    ///
    /// # Errors
    /// The failure of an earlier launch.
    pub fn read_c(&self, device: &dyn Device) -> Result<Vec<u8>, Error> {
        let mut c = vec![0; c_bytes(self.out, self.args.m, self.args.n)];
        device.copy_from(&mut c, self.args.c)?;
        Ok(c)
    }

    /// C's elements, row-major, after the launches before. An nvfp4 C has none: see [`read_c`](Self::read_c).
    ///
    /// # Errors
    /// The failure of an earlier launch.
    pub fn read_values(&self, device: &dyn Device) -> Result<Vec<f32>, Error> {
        let bytes = self.read_c(device)?;
        let halves = || bytes.as_chunks().0.iter().copied();
        Ok(match self.out {
            Out::F16 => halves().map(f16::from_le_bytes).map(f32::from).collect(),
            Out::Bf16 => halves().map(bf16::from_le_bytes).map(f32::from).collect(),
            Out::F32 => bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect(),
            Out::Nvfp4 { .. } => Vec::new(),
        })
    }

    /// The scale bytes of an nvfp4 C, padding included; empty for other formats.
    ///
    /// # Errors
    /// The failure of an earlier launch.
    pub fn read_scales(&self, device: &dyn Device) -> Result<Vec<u8>, Error> {
        let Out::Nvfp4 { scale_layout } = self.out else { return Ok(Vec::new()) };
        let mut scales = vec![0; scale_layout_len(scale_layout, &self.args)];
        device.copy_from(&mut scales, self.args.c_scales)?;
        Ok(scales)
    }

    /// Whether the bytes behind C are what they were.
    ///
    /// # Errors
    /// The failure of an earlier launch.
    pub fn guard_is_whole(&self, device: &dyn Device) -> Result<bool, Error> {
        let mut guard = vec![0; GUARD];
        device
            .copy_from(&mut guard, self.args.c.offset(c_bytes(self.out, self.args.m, self.args.n) as u64))?;
        Ok(guard.iter().all(|&byte| byte == POISON))
    }

    /// Gives the memory back.
    ///
    /// # Errors
    /// If the operands belong to another device.
    pub fn free(self, device: &dyn Device) -> Result<(), Error> {
        self.allocations.into_iter().try_for_each(|ptr| Ok(device.free(ptr)?))
    }
}

fn scale_layout_len(layout: ScaleLayout, args: &FusedArgs) -> usize {
    layout.len(args.m, args.n / 16)
}

fn c_bytes(out: Out, m: usize, n: usize) -> usize {
    match out {
        Out::F16 | Out::Bf16 => m * n * 2,
        Out::F32 => m * n * 4,
        Out::Nvfp4 { .. } => m * n / 2,
    }
}
