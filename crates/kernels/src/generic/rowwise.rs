//! The one shape of all elementwise kernels: eight neighbouring elements of a row per thread, from a [`Source`] to a
//! [`Sink`].
//!
//! ```text
//! CTA (row, chunk of 2048 columns), 256 threads
//!   source   nvfp4 codes and scales · floats · gate and up with an activation       → eight values
//!   sink     floats · nvfp4 codes and scales · floats that nvfp4 can represent      ← eight values
//! ```
//!
//! A block of 16 is two neighbouring lanes, which exchange their largest magnitude by one shuffle. Reads and writes of
//! 16-bit floats are 16 bytes per lane and contiguous over the warp.
//!
//! Flow: [`expand`](super::expand), [`quantize`](super::quantize), [`silu_mul`](super::silu_mul) → here → PTX.

use dualgemm_device::{Args, Device, FunctionId, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatType, ScaleLayout};
use dualgemm_gemm::{Activation, Program};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;

use super::sink::SinkParams;
use super::{has_dependent_launch, module, target_for, values};
use crate::Error;
use crate::parts::epilogue;
use crate::plain::order::SPAN;

/// Name of the kernel in its module.
pub const ENTRY: &str = "rowwise";
/// Threads of a CTA.
pub const THREADS: u32 = 256;
/// Elements that a thread takes.
pub const WIDTH: u32 = 8;

/// Where values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// nvfp4 with scales in this layout: `code · scale`.
    Codes(ScaleLayout),
    /// Floats.
    Float(FloatType),
    /// `act(alpha · gate + bias, alpha · up + bias)` of two float matrices.
    Gated {
        /// Type of both.
        ty: FloatType,
        /// Whether both are rounded to bf16 before the activation.
        round: bool,
    },
}

/// Where values go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sink {
    /// Floats, rounded to nearest.
    Float(FloatType),
    /// f16 in blocks of 64 columns, `[columns / 64][rows][64]`; the pitch is that from block to block.
    Blocks,
    /// nvfp4 with scales in this layout, padding zeroed, by Transformer Engine's rule.
    Codes(ScaleLayout),
    /// As [`Sink::Codes`] in 128x4 order, for rows in groups: the scales of each group start with an atom of their own.
    /// Blocks behind the last of a row are zeroed; rows that no group has get no scales.
    Grouped,
    /// What [`Sink::Codes`] would write, expanded: `code · scale` as f16, exactly.
    Image,
    /// f16 in the order of [`plain::order`](crate::plain::order), rows padded by zeros to whole spans of it.
    Permuted,
    /// e4m3 of the value over the tensor scale, rounded to nearest; beyond 448, and NaN, saturated. With a dynamic one
    /// the largest magnitude becomes 448.
    E4m3,
}

/// One kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// Where values come from.
    pub source: Source,
    /// Where values go.
    pub sink: Sink,
    /// Whether the tensor scale of a quantizing sink comes from the largest magnitude, found by [`amax`](super::amax).
    pub dynamic: bool,
}

impl Config {
    /// A name that tells configurations apart.
    pub fn name(&self) -> String {
        let source = match self.source {
            Source::Codes(layout) => format!("nvfp4_{layout}"),
            Source::Float(ty) => ty.name().into(),
            Source::Gated { ty, round } => format!("{}{}", ty.name(), if round { "_bf16_sums" } else { "" }),
        };
        let sink = match self.sink {
            Sink::Float(ty) => ty.name().into(),
            Sink::Blocks => "blocks_f16".into(),
            Sink::Codes(layout) => format!("nvfp4_{layout}"),
            Sink::Grouped => "nvfp4_grouped".into(),
            Sink::Image => "image_f16".into(),
            Sink::Permuted => "permuted_f16".into(),
            Sink::E4m3 => "e4m3".into(),
        };
        format!("{source}_to_{sink}{}", if self.dynamic { "_dynamic" } else { "" })
    }

    /// Rows and columns of CTAs for an `[m, n]` matrix: whole atoms of scales, whose padding is written too.
    fn grid(&self, (m, n): (usize, usize)) -> [u32; 3] {
        let (rows, columns) = match self.sink {
            Sink::Codes(ScaleLayout::Sf128x4) => (m.next_multiple_of(128), n.next_multiple_of(64)),
            Sink::Codes(ScaleLayout::Sf8x4) => (m.next_multiple_of(8), n.next_multiple_of(64)),
            Sink::Grouped => (m, n.next_multiple_of(64)),
            Sink::Permuted => (m, n.next_multiple_of(SPAN)),
            _ => (m, n),
        };
        [rows as u32, columns.div_ceil((THREADS * WIDTH) as usize) as u32, 1]
    }
}

/// A kernel, loaded on a device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loaded {
    function: FunctionId,
    pub(super) config: Config,
}

impl Loaded {
    /// Loads it; only [`Source::Gated`] has an activation.
    pub(super) fn new(device: &dyn Device, config: Config, program: Option<&Program>) -> Result<Self, Error> {
        let identity = Activation::Identity.program();
        let module = generate(&config, program.unwrap_or(&identity), target_for(device.info().arch))?;
        Ok(Self { function: super::load(device, &module, ENTRY)?, config })
    }

    /// Its launch for an `[m, n]` matrix.
    pub(super) fn launch(&self, size: (usize, usize), args: Args) -> LaunchSpec {
        LaunchSpec::new(self.function, self.config.grid(size), [THREADS, 1, 1]).args(args)
    }
}

/// Generates the kernel; `program` is the activation of [`Source::Gated`].
///
/// Parameters, in order: rows, columns (u32); of the source; of the sink.
///
/// ```text
/// Codes   codes, bytes per row of codes, scales
/// Float   values, bytes per row
/// Gated   gate, up, bytes per row, alpha of gate, alpha of up, bias of gate or null, of up or null
/// Float   values, bytes per row
/// Blocks  values, bytes per block
/// Codes   codes, bytes per row, scales, and as Image
/// Grouped codes, bytes per row, scales, first rows of groups, their number, and as Image
/// Image   values, bytes per row, and: static divisor / 6 and 1 / divisor (f32) or dynamic amax parts, their number, scale
/// Permuted  values, bytes per row
/// E4m3    values, bytes per row, and: static 1 / tensor scale, or dynamic as Image
/// ```
pub fn generate(config: &Config, program: &Program, target: Target) -> Result<Module, Error> {
    module(target, &format!("elementwise: {}", config.name()), ENTRY, |k| emit(k, config, program, target))
}

/// The eight elements of a thread.
pub(super) struct Place {
    pub(super) row: Reg<U32>,
    /// Number of the eight in the row.
    pub(super) unit: Reg<U32>,
    pub(super) columns: Reg<U32>,
    /// In a row of the matrix, whatever the column.
    pub(super) in_rows: Reg<Pred>,
    pub(super) inside: Reg<Pred>,
}

impl Place {
    /// Address of the thread's first element in a matrix with rows `pitch` bytes apart, `bytes` for eight.
    pub(super) fn address(
        &self,
        k: &mut Kernel,
        start: Addr<Global>,
        pitch: Reg<U32>,
        bytes: u32,
    ) -> Addr<Global> {
        k.offset(start, self.unit.mul_wide(bytes) + self.row.mul_wide(pitch))
    }

    /// Blocks of a row, and the same rounded up to whole atoms of scales.
    pub(super) fn blocks(&self, k: &mut Kernel) -> [Reg<U32>; 2] {
        let blocks = k.eval(self.columns >> BlockFormat::Nvfp4.block_len().ilog2());
        [blocks, k.eval((blocks + 3) & !3)]
    }

    /// Number of the thread's block in the row.
    pub(super) fn block(&self, k: &mut Kernel) -> Reg<U32> {
        k.eval(self.unit >> (BlockFormat::Nvfp4.block_len() as u32 / WIDTH).ilog2())
    }

    /// Offset of the scale of the thread's block.
    pub(super) fn scale_offset(&self, k: &mut Kernel, layout: ScaleLayout) -> Reg<U64> {
        let block = self.block(k);
        let [blocks, _] = self.blocks(k);
        scale_offset(k, layout, self.row, block, blocks)
    }
}

/// [`ScaleLayout::offset`] as instructions.
pub(crate) fn scale_offset(
    k: &mut Kernel,
    layout: ScaleLayout,
    row: Reg<U32>,
    block: Reg<U32>,
    blocks: Reg<U32>,
) -> Reg<U64> {
    let (rows_log2, atom_bytes, line) = match layout {
        ScaleLayout::Linear => return k.eval(row.mul_wide(blocks) + block.widen()),
        ScaleLayout::Sf128x4 => (7u32, 512u64, ((row & 31) << 4) + (row.bit_field(5, 2) << 2)),
        ScaleLayout::Sf8x4 => (3, 32, (row & 7) << 2),
    };
    let line = k.eval(line);
    let atoms = k.eval((blocks + 3) >> 2);
    let atom_row = row >> rows_log2;
    let atom = atom_row.mul_wide(atoms) + (block >> 2).widen();
    k.eval(atom * atom_bytes + (line + (block & 3)).widen())
}

fn emit(k: &mut Kernel, config: &Config, program: &Program, target: Target) {
    k.required_threads(THREADS);
    let sizes = [k.param::<U32>("rows"), k.param::<U32>("columns")];
    let source = SourceParams::declare(k, config.source);
    let sink = SinkParams::declare(k, config);
    let dependent = has_dependent_launch(target);
    if dependent {
        k.launch_dependents();
    }
    let [rows, columns] = sizes.map(|size| k.ld_param(&size));
    let row = k.special(Special::CtaidX);
    let chunk = k.special(Special::CtaidY);
    let thread = k.special(Special::TidX);
    let first = k.eval(chunk * THREADS);
    let unit = k.eval(first + thread);
    let column = k.eval(unit * WIDTH);
    let in_rows = k.compare(Cmp::Lt, row, rows);
    let inside = k.compare_and(Cmp::Lt, column, columns, in_rows);
    let place = Place { row, unit, columns, in_rows, inside };
    if dependent {
        source.prefetch(k, &place);
        k.grid_dependency_wait();
    }
    let taken = source.take(k, &place, program);
    sink.give(k, &place, taken);
}

/// Eight values of a thread.
#[derive(Clone, Copy)]
pub(super) enum EightValues {
    /// As f16, exact.
    Pairs([Reg<F16x2>; 4]),
    Floats([Reg<F32>; 8]),
}

impl EightValues {
    pub(super) fn floats(self, k: &mut Kernel) -> [Reg<F32>; 8] {
        match self {
            EightValues::Pairs(pairs) => values::widen_pairs(k, pairs),
            EightValues::Floats(floats) => floats,
        }
    }
}

enum SourceParams {
    Codes(CodesParams),
    Float { values: PointerParam, pitch: Param<U32>, ty: FloatType },
    Gated(GatedParams),
}

struct CodesParams {
    codes: PointerParam,
    pitch: Param<U32>,
    scales: PointerParam,
    layout: ScaleLayout,
}

struct GatedParams {
    gate: PointerParam,
    up: PointerParam,
    pitch: Param<U32>,
    alpha: [Param<F32>; 2],
    bias: [PointerParam; 2],
    ty: FloatType,
    round: bool,
}

impl SourceParams {
    fn declare(k: &mut Kernel, source: Source) -> Self {
        match source {
            Source::Codes(layout) => Self::Codes(CodesParams {
                codes: k.pointer("codes"),
                pitch: k.param("code_pitch"),
                scales: k.pointer("scales"),
                layout,
            }),
            Source::Float(ty) => {
                Self::Float { values: k.pointer("values"), pitch: k.param("value_pitch"), ty }
            }
            Source::Gated { ty, round } => Self::Gated(GatedParams {
                gate: k.pointer("gate"),
                up: k.pointer("up"),
                pitch: k.param("gate_up_pitch"),
                alpha: [k.param("alpha_gate"), k.param("alpha_up")],
                bias: [k.pointer("bias_gate"), k.pointer("bias_up")],
                ty,
                round,
            }),
        }
    }

    /// Brings codes into L2 while the kernel before still runs; if that one writes them, it does so there.
    fn prefetch(&self, k: &mut Kernel, place: &Place) {
        if let Self::Codes(params) = self {
            for from in params.addresses(k, place) {
                k.when(place.inside).prefetch_l2(from);
            }
        }
    }

    fn take(&self, k: &mut Kernel, place: &Place, program: &Program) -> EightValues {
        match self {
            Self::Codes(params) => params.take(k, place),
            Self::Float { values, pitch, ty } => {
                let (start, pitch) = (k.ld_pointer(values), k.ld_param(pitch));
                let from = place.address(k, start, pitch, WIDTH * values::bytes(*ty));
                EightValues::Floats(load(k, place, *ty, from))
            }
            Self::Gated(params) => EightValues::Floats(params.take(k, place, program)),
        }
    }
}

impl CodesParams {
    /// Addresses of a thread's eight codes and of their scale.
    fn addresses(&self, k: &mut Kernel, place: &Place) -> [Addr<Global>; 2] {
        let (codes, pitch) = (k.ld_pointer(&self.codes), k.ld_param(&self.pitch));
        let codes = place.address(k, codes, pitch, WIDTH / 2);
        let scales = k.ld_pointer(&self.scales);
        let offset = place.scale_offset(k, self.layout);
        [codes, k.offset(scales, offset)]
    }

    fn take(&self, k: &mut Kernel, place: &Place) -> EightValues {
        let word = k.mov::<B32>(0u32);
        let byte = k.mov::<U32>(0u32);
        let [codes, scale] = self.addresses(k, place);
        k.when(place.inside).to(word).ld::<B32, _>(codes);
        k.when(place.inside).to(byte).ld_byte(scale);
        EightValues::Pairs(values::decode(k, word, byte))
    }
}

/// Eight values at `from`, 0 outside the matrix.
fn load(k: &mut Kernel, place: &Place, ty: FloatType, from: Addr<Global>) -> [Reg<F32>; 8] {
    let taken = std::array::from_fn(|_| k.mov(0.0f32));
    k.if_(place.inside, "load", |k| {
        let loaded = values::load(k, ty, from);
        for (to, from) in taken.iter().zip(loaded) {
            k.assign(*to, from);
        }
    });
    taken
}

impl GatedParams {
    fn take(&self, k: &mut Kernel, place: &Place, program: &Program) -> [Reg<F32>; 8] {
        let starts = [k.ld_pointer(&self.gate), k.ld_pointer(&self.up)];
        let pitch = k.ld_param(&self.pitch);
        let eight = WIDTH * values::bytes(self.ty);
        let [gate, up] = starts
            .map(|start| place.address(k, start, pitch, eight))
            .map(|from| load(k, place, self.ty, from));
        let column = k.eval(place.unit.mul_wide(WIDTH * 4));
        let halves = [(gate, 0), (up, 1)].map(|(values, half)| {
            let alpha = k.ld_param(&self.alpha[half]);
            let values = values.map(|value| k.mul(value, alpha));
            let bias = k.ld_pointer(&self.bias[half]);
            let given = k.compare(Cmp::Ne, bias.base(), 0u64);
            k.if_(given, "bias", |k| {
                let from = k.offset(bias, column);
                let bias = load(k, place, FloatType::F32, from);
                for (value, bias) in values.iter().zip(bias) {
                    k.to(*value).add(*value, bias);
                }
            });
            match self.round {
                false => values,
                true => values.map(|value| {
                    let zero = k.mov(0.0f32);
                    let pair = k.f32_to_bf16x2(zero, value);
                    k.from_bits(pair)
                }),
            }
        });
        std::array::from_fn(|i| epilogue::evaluate(k, program, halves[0][i], halves[1][i]))
    }
}
