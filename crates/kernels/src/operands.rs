//! A, weights and room for C in device memory, in the forms that a fused kernel reads: what tests, mutants and benchmarks
//! launch it on.

use dualgemm_device::{Device, DevicePtr};
use dualgemm_formats::scalar::{e2m1, e4m3};
use dualgemm_formats::{FloatType, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{AFormat, AOperand, GateUp};
use dualgemm_ptx::builder::HalfFormat;

use crate::Error;
use crate::error::refused;
use crate::fused::{Config, Fused, FusedArgs, Weights};
use crate::parts::format::{ATOM_ROWS, Format};
use crate::parts::groups::{GroupArgs, Groups};
use crate::parts::operand::Operand;
use crate::parts::rows::Output;
use crate::parts::variant::{Out, Products};
use crate::plain::order::{SPAN, column};
use crate::sm90a::decode::WEIGHT_FACTOR;
use crate::sm90a::pack::Pack;

/// Bytes behind C that no kernel may write.
const GUARD: usize = 256;
/// What they and C hold before.
const POISON: u8 = 0xEE;

/// One problem on a device.
pub struct Operands<'d> {
    device: &'d dyn Device,
    /// The operands as the kernel takes them.
    pub args: FusedArgs,
    out: Out,
    allocations: Vec<DevicePtr>,
}

impl<'d> Operands<'d> {
    /// Copies A and the weights to the kernel's device, with everything else that it asks for. Of groups, g has rows
    /// `rows[g] .. rows[g + 1]` of A and the weights `weights[g]`; without groups `rows` is empty. Of a linear layer gate alone
    /// counts.
    ///
    /// # Errors
    /// If A is not in the kernel's format, there are no weights or the pack does not hold them, or the device has no room.
    pub fn upload(
        kernel: &Fused<'d>,
        a: &AOperand<'_>,
        weights: &[GateUp<'_>],
        rows: &[u32],
    ) -> Result<Self, Error> {
        let [first, ..] = weights else { return refused("gate and up", "no matrix", "one of each at least") };
        let (size, variant) = ((a.rows(), first.n(), first.k()), kernel.variant());
        let (null, format) = (DevicePtr::NULL, kernel.config().a_format(variant));
        let args = FusedArgs::new(
            size,
            Operand::new(format, (a.rows(), a.k()), null, null),
            Weights::Pack(null),
            Output::new(null, [1.0; 2]),
        );
        let mut this = Self { device: kernel.device, args, out: variant.out, allocations: Vec::new() };
        let a_scale = this.upload_a(kernel, a, rows)?;
        let alphas = this.upload_weights(kernel, weights)?;
        let alphas: Vec<[f32; 2]> = alphas.into_iter().map(|own| own.map(|alpha| alpha * a_scale)).collect();
        match rows {
            [] => this.args.output.alpha = alphas[0],
            _ => {
                let table = rows.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<u8>>();
                let of = Groups { count: weights.len(), rows: this.alloc(&table)? };
                let alphas = this.floats(alphas.into_iter().flatten())?;
                this.args.groups = Some(GroupArgs { of, alphas });
            }
        }
        this.args.output.c = this.alloc(&vec![POISON; this.c_bytes() + GUARD])?;
        if variant.bias {
            let zeros = || vec![0.0; first.n()].into();
            let gate = weights.iter().map(|pair| pair.gate_bias.clone().unwrap_or_else(zeros));
            let up = weights.iter().map(|pair| pair.up_bias.clone().unwrap_or_else(zeros));
            let gate = this.floats(gate.flat_map(|bias| bias.to_vec()))?;
            let up = this.floats(up.flat_map(|bias| bias.to_vec()))?;
            this.args.output.bias = [gate, up];
        }
        if let Out::Nvfp4 { scale_layout } = this.out {
            this.args.output.scales = this.alloc(&vec![0; scale_layout.len(size.0, size.1 / 16)])?;
        }
        // NaN, where nothing is written.
        let sums = vec![0xFF; kernel.gate_sums_bytes(size.0, size.1)];
        this.args.gate_sums = this.alloc(&sums)?;
        this.args.workspace = this.alloc(&vec![0; kernel.workspace_bytes()])?;
        Ok(this)
    }

    /// A new allocation with these bytes, null of none.
    fn alloc(&mut self, bytes: &[u8]) -> Result<DevicePtr, Error> {
        if bytes.is_empty() {
            return Ok(DevicePtr::NULL);
        }
        let ptr = self.device.alloc(bytes.len())?;
        self.allocations.push(ptr);
        self.device.copy_to(ptr, bytes)?;
        Ok(ptr)
    }

    fn floats(&mut self, values: impl Iterator<Item = f32>) -> Result<DevicePtr, Error> {
        self.alloc(&values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
    }

    /// A; gives its tensor scale.
    fn upload_a(&mut self, kernel: &Fused<'_>, a: &AOperand<'_>, rows: &[u32]) -> Result<f32, Error> {
        let (format, (m, k)) = (self.args.a.format, (a.rows(), a.k()));
        match (a, format) {
            (AOperand::Quantized(a), Format::Block(block)) if a.format() == block => {
                match kernel.variant().codes {
                    Some(layout) => {
                        let scales = a.clone().with_scale_layout(layout);
                        self.args.a.codes = self.alloc(a.codes())?;
                        self.args.a.scales = self.alloc(scales.scales())?;
                    }
                    None => {
                        let groups: Vec<_> = match rows {
                            [] => vec![a.dense_rows(0..m)],
                            _ => {
                                rows.windows(2).map(|r| a.dense_rows(r[0] as usize..r[1] as usize)).collect()
                            }
                        };
                        self.args.a = self.atoms(a, &groups)?;
                    }
                }
                Ok(a.global_scale().value())
            }
            (AOperand::Float(a), Format::Half(_) | Format::E4m3) => {
                let elements = match (a.float_type(), format) {
                    (_, Format::E4m3) => a.values().map(e4m3::encode).collect(),
                    (FloatType::F16, Format::Half(HalfFormat::F16))
                    | (FloatType::Bf16, Format::Half(HalfFormat::Bf16)) => a.to_le_bytes(),
                    (ty, _) => return refused("A", AFormat::from(ty).to_string(), format.to_string()),
                };
                // The kernel on weights as they are wants another order of K, rows padded by zeros.
                let permuted = matches!(kernel.config(), Config::Plain(_));
                let padded = if permuted { k.next_multiple_of(SPAN) } else { k };
                let pitch = format.row_bytes(padded).next_multiple_of(16);
                let size = format.row_bytes(1);
                let mut bytes = vec![0; m * pitch];
                for (r, c) in (0..m).flat_map(|r| (0..k).map(move |c| (r, c))) {
                    let at = r * pitch + size * if permuted { column(c) } else { c };
                    bytes[at..at + size].copy_from_slice(&elements[(r * k + c) * size..][..size]);
                }
                (self.args.a.codes, self.args.a.pitch) = (self.alloc(&bytes)?, pitch);
                Ok(1.0)
            }
            (a, _) => refused("A", AFormat::of(a).to_string(), format.to_string()),
        }
    }

    /// Rows of matrices like `like`, codes and linear scales of each, behind each other: their scales in atoms of their own.
    fn atoms(&mut self, like: &QuantizedMatrix<'_>, parts: &[(Vec<u8>, Vec<u8>)]) -> Result<Operand, Error> {
        let (k, blocks) = (like.k(), like.blocks());
        let pitch = (k / 2).next_multiple_of(16);
        let (mut codes, mut scales, mut rows, mut atoms) = (Vec::new(), Vec::new(), 0, 0);
        for (of_codes, of_scales) in parts {
            let own = of_codes.len() / (k / 2);
            for row in of_codes.chunks_exact(k / 2) {
                codes.extend_from_slice(row);
                codes.resize(codes.len().next_multiple_of(pitch), 0);
            }
            scales.extend(ScaleLayout::Linear.convert(of_scales, ScaleLayout::Sf128x4, own, blocks));
            (rows, atoms) = (rows + own, atoms + own.div_ceil(ATOM_ROWS as usize));
        }
        let (codes, scales) = (self.alloc(&codes)?, self.alloc(&scales)?);
        Ok(Operand {
            format: Format::Block(like.format()),
            rows,
            k,
            codes,
            pitch,
            blocked: false,
            scales,
            atoms,
        })
    }

    /// Weights; gives what sums of gate and up of each group are multiplied by.
    fn upload_weights(&mut self, kernel: &Fused<'_>, weights: &[GateUp<'_>]) -> Result<Vec<[f32; 2]>, Error> {
        let (variant, config) = (kernel.variant(), kernel.config());
        let (rows, k) = (weights.len() * weights[0].n(), weights[0].k());
        let scales = |factor: f32| {
            let of =
                |pair: &GateUp<'_>| [&pair.gate, &pair.up].map(|half| half.global_scale().value() * factor);
            weights.iter().map(of).collect::<Vec<_>>()
        };
        let halves = [0, 1].map(|half| {
            let first = half == 0 || variant.products == Products::Linear;
            weights.iter().map(|pair| if first { &pair.gate } else { &pair.up }).collect::<Vec<_>>()
        });
        let Some(format) = config.weight_format(variant) else {
            let pack = |pair: &GateUp<'_>| match variant.products {
                Products::Both => Pack::new(pair),
                Products::Gate | Products::Linear => Pack::of_matrix(&pair.gate),
                Products::Up => Pack::of_matrix(&pair.up),
            };
            let packs = weights.iter().map(pack).collect::<Result<Vec<_>, _>>()?;
            let bytes: Vec<u8> = packs.iter().flat_map(|pack| pack.bytes().to_vec()).collect();
            self.args.weights = Weights::Pack(self.alloc(&bytes)?);
            let apart = variant.products.apart();
            return Ok(if apart { scales(WEIGHT_FACTOR) } else { packs.iter().map(Pack::alpha).collect() });
        };
        let mut operands = Vec::new();
        for half in &halves {
            operands.push(match (config, format) {
                (Config::Plain(config), _) => {
                    let half = half[0].clone().with_scale_layout(config.scale_layout);
                    let (codes, scales) = (self.alloc(half.codes())?, self.alloc(half.scales())?);
                    Operand::new(format, (rows, k), codes, scales)
                }
                (_, Format::Block(_)) => {
                    let dense = |half: &&QuantizedMatrix<'_>| half.dense_rows(0..half.rows());
                    self.atoms(half[0], &half.iter().map(dense).collect::<Vec<_>>())?
                }
                (_, Format::Half(_) | Format::E4m3) => {
                    let value = |r: usize, c: usize| {
                        let scale = e4m3::decode(half[0].scale_byte(r, c / 16));
                        e4m3::encode(e2m1::decode(half[0].code(r, c)) * scale)
                    };
                    let place = (0..rows).flat_map(|r| (0..k).map(move |c| (r, c)));
                    let bytes: Vec<u8> = place.map(|(r, c)| value(r, c)).collect();
                    Operand::new(format, (rows, k), self.alloc(&bytes)?, DevicePtr::NULL)
                }
            });
        }
        self.args.weights = Weights::Rows([operands[0], operands[1]]);
        Ok(scales(if matches!(config, Config::Plain(_)) { WEIGHT_FACTOR } else { 1.0 }))
    }

    fn c_bytes(&self) -> usize {
        self.args.size.0 * self.out.row_bytes(self.args.size.1)
    }

    fn read(&self, from: DevicePtr, bytes: usize) -> Result<Vec<u8>, Error> {
        let mut read = vec![0; bytes];
        self.device.copy_from(&mut read, from)?;
        Ok(read)
    }

    /// C's bytes, row-major, after the launches before.
    pub fn read_c(&self) -> Result<Vec<u8>, Error> {
        self.read(self.args.output.c, self.c_bytes())
    }

    /// C's elements, row-major, after the launches before. An nvfp4 C has none: see [`read_c`](Self::read_c).
    pub fn read_values(&self) -> Result<Vec<f32>, Error> {
        let bytes = self.read_c()?;
        Ok(match self.out {
            Out::F16 => FloatType::F16.values(&bytes),
            Out::Bf16 => FloatType::Bf16.values(&bytes),
            Out::F32 => FloatType::F32.values(&bytes),
            Out::Nvfp4 { .. } => Vec::new(),
        })
    }

    /// The scale bytes of an nvfp4 C, padding included; empty for other formats.
    pub fn read_scales(&self) -> Result<Vec<u8>, Error> {
        let Out::Nvfp4 { scale_layout } = self.out else { return Ok(Vec::new()) };
        self.read(self.args.output.scales, scale_layout.len(self.args.size.0, self.args.size.1 / 16))
    }

    /// Whether the bytes behind C are what they were.
    pub fn guard_is_whole(&self) -> Result<bool, Error> {
        let guard = self.read(self.args.output.c.offset(self.c_bytes() as u64), GUARD)?;
        Ok(guard.iter().all(|&byte| byte == POISON))
    }

    /// What was allocated, to be freed by the caller.
    pub fn into_allocations(self) -> Vec<DevicePtr> {
        self.allocations
    }

    /// Gives the memory back.
    ///
    /// # Errors
    /// If the device fails.
    pub fn free(self) -> Result<(), Error> {
        let device = self.device;
        self.into_allocations().into_iter().try_for_each(|ptr| Ok(device.free(ptr)?))
    }
}
