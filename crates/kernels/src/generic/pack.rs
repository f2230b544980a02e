//! The weight pack of the fused Hopper kernel, written on the GPU from a checkpoint's layout: the bytes of
//! [`sm90a::pack`](crate::sm90a::pack), without a host copy of the weights.
//!
//! ```text
//! CTA (K chunk, feature tile), 128 threads
//!   thread (w, g, j)   eight code bytes of gate and of up, feature 8w + g, k16 step j  → word j of four lanes' codes
//!   thread (w, g, p)   scales of blocks 2p and 2p + 1, the first 64 threads            → one word
//! ```
//!
//! Scales must have been checked before (`GateUp::check`): NaN and negative ones have no encoding.

use dualgemm_device::{Args, Device, DevicePtr, FunctionId, LaunchSpec};
use dualgemm_formats::ScaleLayout;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;

use super::expand::Codes;
use super::rowwise::scale_offset;
use super::{load, module, take_turn, target_for};
use crate::Error;
use crate::limits::fits;
use crate::sm90a::decode::encode_lane;
use crate::sm90a::pack::{CHUNK_BYTES, CHUNK_FEATURES, CHUNK_K, CODE_BYTES};

/// Name of the kernel in its module.
pub const ENTRY: &str = "pack";
const THREADS: u32 = 128;

/// Generates the kernel for scales in this layout.
pub fn generate(layout: ScaleLayout, target: Target) -> Result<Module, Error> {
    module(target, &format!("sm_90a weight pack from {layout} scales"), ENTRY, |k| emit(k, layout, target))
}

fn emit(k: &mut Kernel, layout: ScaleLayout, target: Target) {
    k.required_threads(THREADS);
    let codes = [k.pointer("gate_codes"), k.pointer("up_codes")];
    let pitch = k.param::<U32>("code_pitch");
    let scales = [k.pointer("gate_scales"), k.pointer("up_scales")];
    let sizes = [k.param::<U32>("features"), k.param::<U32>("blocks")];
    let out = k.pointer("out");
    take_turn(k, target);
    let [features, blocks] = sizes.map(|size| k.ld_param(&size));
    let (chunk, tile, chunks) =
        (k.special(Special::CtaidX), k.special(Special::CtaidY), k.special(Special::NctaidX));
    let thread = k.special(Special::TidX);
    let out = k.ld_pointer(&out);
    let first_chunk = k.eval(tile.mul_wide(chunks));
    let out = k.offset(out, (first_chunk + chunk.widen()) * CHUNK_BYTES as u64);
    let first_feature = k.eval(tile * CHUNK_FEATURES as u32);
    let first_block = k.eval(chunk * (CHUNK_K as u32 / 16));

    k.comment("Codes.");
    let step = k.eval(thread & 3);
    let row = k.eval(thread >> 2);
    let feature = k.eval(first_feature + row);
    let block = k.eval(first_block + step);
    let inside = k.compare(Cmp::Lt, feature, features);
    let inside = k.compare_and(Cmp::Lt, block, blocks, inside);
    let pitch = k.ld_param(&pitch);
    let byte = k.eval(block.mul_wide(8) + feature.mul_wide(pitch));
    k.comment("Blocks whose scale is zero get zero codes, as the host gives them.");
    let scale_at = scale_offset(k, layout, feature, block, blocks);
    let [gate, up] = [0, 1].map(|half| {
        let start = k.ld_pointer(&scales[half]);
        let from = k.offset(start, scale_at);
        let scale = k.mov::<U32>(0u32);
        k.when(inside).to(scale).ld_byte(from);
        let counts = k.compare_and(Cmp::Ne, scale, 0u32, inside);
        let start = k.ld_pointer(&codes[half]);
        let from = k.offset(start, byte);
        let words: [Reg<B32>; 2] = std::array::from_fn(|_| k.mov(0u32));
        for (i, word) in words.into_iter().enumerate() {
            k.when(counts).to(word).ld::<B32, _>(from.at(4 * i as u32));
        }
        words
    });
    let to = k.offset(out, ((row << 6) + (step << 2)).widen());
    for q in 0..4u32 {
        let word = encode_word(k, [gate[0], up[0], gate[1], up[1]], q);
        k.st(to.at(16 * q), word);
    }

    k.comment("Scales.");
    let has_scales = k.compare(Cmp::Lt, thread, (CHUNK_BYTES - CODE_BYTES) as u32 / 4);
    k.if_(has_scales, "scales", |k| {
        let feature = k.eval(first_feature + (thread >> 1));
        let block = k.eval(first_block + ((thread & 1) << 1));
        let starts = [0, 1].map(|half| k.ld_pointer(&scales[half]));
        let encoded = [0u32, 1].map(|which| {
            let block = k.eval(block + which);
            let inside = k.compare(Cmp::Lt, feature, features);
            let inside = k.compare_and(Cmp::Lt, block, blocks, inside);
            let offset = scale_offset(k, layout, feature, block, blocks);
            let bytes = starts.map(|start| {
                let byte = k.mov::<U32>(0u32);
                let from = k.offset(start, offset);
                k.when(inside).to(byte).ld_byte(from);
                byte
            });
            encode_scale_pair(k, bytes)
        });
        // As `encode_scales`: the second block's pair is rotated by 8.
        let second = k.funnel_right(encoded[1], encoded[1], 8u32);
        let word = k.eval(encoded[0] | second);
        let to = k.offset(out, thread.mul_wide(4));
        k.st(to.at(CODE_BYTES as i64), word);
    });
}

/// The pack's code word from byte `q` of four words: gate, up, gate and up of the next eight K.
fn encode_word(k: &mut Kernel, words: [Reg<B32>; 4], q: u32) -> Reg<B32> {
    let mut packed = k.mov::<B32>(0u32);
    for (field, word) in words.into_iter().enumerate() {
        // The even element's code in bits 3..0, the odd one's in bits 19..16.
        let odd = k.eval(word >> 4);
        let both = k.permute(word, odd, q | q << 4 | (4 + q) << 8 | (4 + q) << 12);
        for part in [7u8, 8] {
            // Where the specification puts the bits of this part of a code.
            let place = |code| {
                let mut codes = [0; 4];
                codes[field] = code;
                encode_lane(codes).trailing_zeros()
            };
            let shift = place(part) - part.trailing_zeros();
            let bits = both & (u32::from(part) * 0x0001_0001);
            let bits = if shift == 0 { bits } else { bits << shift };
            packed = k.eval(packed | bits);
        }
    }
    packed
}

/// Gate and up scale of one block, as halves times 2⁷: `decode::encode_scale`, in bits 14..7 and 30..23.
fn encode_scale_pair(k: &mut Kernel, [gate, up]: [Reg<U32>; 2]) -> Reg<B32> {
    let placed = k.eval((gate << 7) | (up << 23)).cast::<B32>();
    // An e4m3 byte placed in a half is scale · 2⁻⁸; times 2¹⁵ it is what the pack holds.
    let factor = k.mov::<B32>(0x7800_7800u32).cast::<F16x2>();
    k.mul(placed.cast::<F16x2>(), factor).cast()
}

/// The kernel, loaded on a device.
#[derive(Debug, Clone, Copy)]
pub struct GpuPack {
    function: FunctionId,
}

impl GpuPack {
    /// Loads the kernel for scales in this layout.
    pub fn new(device: &dyn Device, layout: ScaleLayout) -> Result<Self, Error> {
        let module = generate(layout, target_for(device.info().arch))?;
        Ok(Self { function: load(device, &module, ENTRY)? })
    }

    /// Bytes of the pack of `[n, k]` halves.
    pub fn bytes(n: usize, k: usize) -> usize {
        n.div_ceil(CHUNK_FEATURES) * k.div_ceil(CHUNK_K) * CHUNK_BYTES
    }

    /// The launch that writes [`bytes`](Self::bytes) bytes to `out`. Gate and up have one shape and pitch.
    ///
    /// # Errors
    /// If the halves differ, or a stride or an address breaks a rule.
    pub fn spec(&self, gate: &Codes, up: &Codes, out: DevicePtr) -> Result<LaunchSpec, Error> {
        gate.check("gate")?;
        up.check("up")?;
        if (gate.m, gate.k, gate.pitch) != (up.m, up.k, up.pitch) {
            let describe = |half: &Codes| format!("[{}, {}], rows of {} bytes", half.m, half.k, half.pitch);
            return Err(dualgemm_gemm::Error::HalvesDiffer {
                gate: format!("gate is {}", describe(gate)),
                up: format!("up is {}", describe(up)),
            }
            .into());
        }
        fits("pack", "address", out.0 as usize, 1, 16)?;
        let args = Args::new()
            .ptr(gate.codes)
            .ptr(up.codes)
            .u32(gate.pitch as u32)
            .ptr(gate.scales)
            .ptr(up.scales)
            .u32(gate.m as u32)
            .u32(gate.k as u32 / 16)
            .ptr(out);
        let grid = [gate.k.div_ceil(CHUNK_K) as u32, gate.m.div_ceil(CHUNK_FEATURES) as u32, 1];
        Ok(LaunchSpec::new(self.function, grid, [THREADS, 1, 1]).args(args))
    }
}
