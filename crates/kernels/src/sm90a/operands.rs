//! A, packed weights and room for C in device memory: what tests and benchmarks launch the kernel on.

use dualgemm_device::{Device, DevicePtr};
use dualgemm_formats::FloatMatrix;
use dualgemm_gemm::Error as OperandError;
use half::{bf16, f16};

use super::host::{Fused, FusedArgs};
use super::pack::Pack;
use super::variant::Out;
use crate::Error;
use crate::parts::rows::Output;
use crate::parts::tiles::GroupArgs;

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
        Self::upload_parts(device, fused, a, std::slice::from_ref(pack))
    }

    /// As [`upload`](Self::upload), for groups: group g has rows `rows[g] .. rows[g + 1]` of A and the weights
    /// `packs[g]`.
    pub fn upload_groups(
        device: &dyn Device,
        fused: &Fused<'_>,
        a: &FloatMatrix<'_>,
        packs: &[Pack],
        rows: &[u32],
    ) -> Result<Self, Error> {
        let mut this = Self::upload_parts(device, fused, a, packs)?;
        let bytes: Vec<u8> = rows.iter().flat_map(|row| row.to_le_bytes()).collect();
        let rows = this.alloc(device, &bytes)?;
        let alphas: Vec<u8> = packs.iter().flat_map(Pack::alpha).flat_map(f32::to_le_bytes).collect();
        let alphas = this.alloc(device, &alphas)?;
        this.args.output.alpha = [1.0; 2];
        this.args.groups = Some(GroupArgs { count: packs.len(), rows, alphas });
        Ok(this)
    }

    fn alloc(&mut self, device: &dyn Device, bytes: &[u8]) -> Result<DevicePtr, Error> {
        let ptr = device.alloc(bytes.len())?;
        self.allocations.push(ptr);
        device.copy_to(ptr, bytes)?;
        Ok(ptr)
    }

    fn upload_parts(
        device: &dyn Device,
        fused: &Fused<'_>,
        a: &FloatMatrix<'_>,
        packs: &[Pack],
    ) -> Result<Self, Error> {
        let refuse = |found: String, expected: String| {
            Err(OperandError::Operand { tensor: "A".into(), found, expected }.into())
        };
        let [pack, ..] = packs else { return refuse("without weights".into(), "one pack at least".into()) };
        let (m, n, k) = (a.rows(), pack.n(), pack.k());
        if a.cols() != k {
            return refuse(format!("[{m}, {}]", a.cols()), format!("[M, {k}], as the weights are"));
        }
        let rows: Vec<u8> = match a {
            FloatMatrix::F32(_) => return refuse("f32".into(), "f16 or bf16".into()),
            FloatMatrix::F16(a) => (0..m).flat_map(|r| a.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
            FloatMatrix::Bf16(a) => (0..m).flat_map(|r| a.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
        };
        let (out, null) = (fused.variant().out, DevicePtr::NULL);
        let args = FusedArgs::new(null, null, Output::new(null, pack.alpha()), (m, n, k));
        let mut this = Self { args, out, allocations: Vec::new() };
        this.args.a = this.alloc(device, &rows)?;
        this.args.pack = match packs {
            [pack] => this.alloc(device, pack.bytes())?,
            _ => this.alloc(device, &packs.iter().flat_map(Pack::bytes).copied().collect::<Vec<u8>>())?,
        };
        this.args.output.c = this.alloc(device, &vec![POISON; this.c_bytes() + GUARD])?;
        if fused.variant().bias {
            for half in 0..2 {
                let of_pack = |pack: &Pack| pack.bias().map_or_else(|| vec![0.0; n], |b| b[half].to_vec());
                let bias: Vec<u8> = packs.iter().flat_map(of_pack).flat_map(f32::to_le_bytes).collect();
                this.args.output.bias[half] = this.alloc(device, &bias)?;
            }
        }
        if let Out::Nvfp4 { scale_layout } = out {
            this.args.output.scales = this.alloc(device, &vec![0; scale_layout.len(m, n / 16)])?;
        }
        if fused.gate_sums_bytes(m, n) > 0 {
            // NaN, where nothing is written.
            this.args.gate_sums = this.alloc(device, &vec![0xFF; fused.gate_sums_bytes(m, n)])?;
        }
        if fused.workspace_bytes() > 0 {
            this.args.workspace = this.alloc(device, &vec![0; fused.workspace_bytes()])?;
        }
        Ok(this)
    }

    fn c_bytes(&self) -> usize {
        self.args.m * self.out.row_bytes(self.args.n)
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
    pub fn read_c(&self, device: &dyn Device) -> Result<Vec<u8>, Error> {
        let mut c = vec![0; self.c_bytes()];
        device.copy_from(&mut c, self.args.output.c)?;
        Ok(c)
    }

    /// C's elements, row-major, after the launches before. An nvfp4 C has none: see [`read_c`](Self::read_c).
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
    pub fn read_scales(&self, device: &dyn Device) -> Result<Vec<u8>, Error> {
        let Out::Nvfp4 { scale_layout } = self.out else { return Ok(Vec::new()) };
        let mut scales = vec![0; scale_layout.len(self.args.m, self.args.n / 16)];
        device.copy_from(&mut scales, self.args.output.scales)?;
        Ok(scales)
    }

    /// Whether the bytes behind C are what they were.
    pub fn guard_is_whole(&self, device: &dyn Device) -> Result<bool, Error> {
        let mut guard = vec![0; GUARD];
        device.copy_from(&mut guard, self.args.output.c.offset(self.c_bytes() as u64))?;
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
