//! The end of the fused GEMMs beside the Hopper kernel: scaling, bias, activation, and a staged tile to rows of C.

use dualgemm_device::{Args, Device, DevicePtr, FunctionId, LaunchSpec};
use dualgemm_formats::FloatType;
use dualgemm_gemm::Program;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::SmemLayout;

use super::quantize::fits;
use super::{load, values};
use crate::Error;
use crate::parts::epilogue::Factors;

/// C and what makes it from the sums; what the host gives to every fused GEMM.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Output {
    /// `[m, n]`, dense, in the kernel's type; at a multiple of 16 bytes if its rows are such, of an
    /// element otherwise.
    pub c: DevicePtr,
    /// Multiply the sums of gate and of up.
    pub alpha: [f32; 2],
    /// One f32 that multiplies both as well (a dynamic scale of A), or null.
    pub a_scale: DevicePtr,
    /// n f32 that are added to gate and to up after alpha, or null.
    pub bias: [DevicePtr; 2],
}

impl Output {
    /// Without a scale in device memory and without bias.
    pub fn new(c: DevicePtr, alpha: [f32; 2]) -> Self {
        Self { c, alpha, a_scale: DevicePtr::NULL, bias: [DevicePtr::NULL; 2] }
    }

    /// The arguments that [`Finish::declare`] declares; C is at a multiple of `step`.
    fn args(&self, args: Args, step: usize) -> Result<Args, Error> {
        fits("C", "address", self.c.0 as usize, 1, step)?;
        for ptr in [self.a_scale, self.bias[0], self.bias[1]] {
            fits("epilogue", "address of floats", ptr.0 as usize, 0, 4)?;
        }
        let args = args.ptr(self.c).f32(self.alpha[0]).f32(self.alpha[1]);
        Ok(args.ptr(self.a_scale).ptr(self.bias[0]).ptr(self.bias[1]))
    }
}

/// A kernel that ends in a [`Finish`], loaded on a device: what its host needs beside the operands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loaded {
    function: FunctionId,
    /// Bytes of shared memory of a CTA.
    shared: u32,
    /// What the address of C is a multiple of: 16 bytes if its rows start at such, otherwise an element.
    c_step: usize,
}

impl Loaded {
    /// Loads the kernel called `entry`, whose CTAs take `shared` bytes. C is of type `ty`; `aligned`: its rows start at
    /// multiples of 16 bytes.
    pub(crate) fn new(
        device: &dyn Device,
        module: &Module,
        (entry, shared): (&str, u32),
        (ty, aligned): (FloatType, bool),
    ) -> Result<Self, Error> {
        let c_step = if aligned { 16 } else { values::bytes(ty) as usize };
        Ok(Self { function: load(device, module, entry)?, shared, c_step })
    }

    /// A launch of CTAs of `threads`; `args` are the kernel's own, which come before those of `output`.
    pub(crate) fn spec(
        &self,
        (grid, threads): ([u32; 3], u32),
        args: Args,
        output: &Output,
    ) -> Result<LaunchSpec, Error> {
        let args = output.args(args, self.c_step)?;
        Ok(LaunchSpec::new(self.function, grid, [threads, 1, 1]).dynamic_shared(self.shared).args(args))
    }
}

pub(crate) struct Finish<'a> {
    ty: FloatType,
    /// Rows of C start at multiples of 16 bytes.
    aligned: bool,
    program: &'a Program,
    out: PointerParam,
    alpha: [Param<F32>; 2],
    a_scale: PointerParam,
    bias: [PointerParam; 2],
}

/// A tile of C in shared memory and its place in C.
pub(crate) struct Staged {
    /// First element; rows are [`pitch`] bytes apart.
    pub(crate) start: Addr<Shared>,
    /// Tokens and features of the tile, and threads that copy it.
    pub(crate) tokens: u32,
    pub(crate) features: u32,
    pub(crate) threads: u32,
    pub(crate) token: Reg<U32>,
    pub(crate) feature: Reg<U32>,
    pub(crate) m: Reg<U32>,
    pub(crate) n: Reg<U32>,
}

/// Bytes from row to row of a staged tile: 16 more than its features take, which spreads the rows over the banks.
pub(crate) fn pitch(ty: FloatType, features: u32) -> u32 {
    features * values::bytes(ty) + 16
}

/// Makes room for a staged tile over the stages, which are read by then, and behind them if they are smaller.
pub(crate) fn stage_over(smem: &mut SmemLayout, ty: FloatType, tokens: u32, features: u32) {
    let staged = tokens * pitch(ty, features);
    if staged > smem.bytes() {
        smem.alloc("staged", staged - smem.bytes(), 16);
    }
}

impl<'a> Finish<'a> {
    pub(crate) fn declare(k: &mut Kernel, ty: FloatType, aligned: bool, program: &'a Program) -> Self {
        Self {
            ty,
            aligned,
            program,
            out: k.pointer("out"),
            alpha: [k.param("alpha_gate"), k.param("alpha_up")],
            a_scale: k.pointer("a_scale"),
            bias: [k.pointer("bias_gate"), k.pointer("bias_up")],
        }
    }

    /// Factors of a feature; `n` is their number.
    pub(crate) fn factors(&self, k: &mut Kernel, feature: Reg<U32>, n: Reg<U32>) -> Factors {
        let scale = k.mov(1.0f32);
        let from = k.ld_pointer(&self.a_scale);
        let given = k.compare(Cmp::Ne, from.base(), 0u64);
        k.when(given).to(scale).ld::<F32, _>(from);
        let alpha = [0, 1].map(|half| {
            let alpha = k.ld_param(&self.alpha[half]);
            k.mul(alpha, scale)
        });
        let inside = k.compare(Cmp::Lt, feature, n);
        let byte = k.eval(feature.mul_wide(4));
        let bias = [0, 1].map(|half| {
            let bias = k.mov(0.0f32);
            let table = k.ld_pointer(&self.bias[half]);
            let given = k.compare_and(Cmp::Ne, table.base(), 0u64, inside);
            let from = k.offset(table, byte);
            k.when(given).to(bias).ld::<F32, _>(from);
            bias
        });
        Factors { alpha, bias: Some(bias) }
    }

    /// The element of C.
    pub(crate) fn activate(&self, k: &mut Kernel, factors: &Factors, sums: [Reg<F32>; 2]) -> Reg<F32> {
        factors.activate(k, self.program, sums)
    }

    /// Rounds an element and stores it in the staged tile.
    pub(crate) fn stage(&self, k: &mut Kernel, to: Addr<Shared>, value: Reg<F32>) {
        values::store_one(k, self.ty, to, value);
    }

    /// Address of an element of the staged tile.
    pub(crate) fn place(
        &self,
        k: &mut Kernel,
        staged: &Staged,
        token: Reg<U32>,
        feature: Reg<U32>,
    ) -> Addr<Shared> {
        let row = token * pitch(self.ty, staged.features);
        k.offset(staged.start, feature * values::bytes(self.ty) + row)
    }

    /// The staged tile to C, 16 bytes at a time. A barrier comes before.
    pub(crate) fn copy_out(&self, k: &mut Kernel, staged: &Staged) {
        let size = values::bytes(self.ty);
        let per_piece = 16 / size;
        let pieces = staged.features / per_piece;
        let out = k.ld_pointer(&self.out);
        let thread = k.special(Special::TidX);
        k.for_range("store", thread, staged.tokens * pieces, staged.threads, |k, i, _| {
            let (token, piece) = (k.eval(i / pieces), k.eval(i % pieces));
            let in_tile = k.eval(piece * per_piece);
            let from = self.place(k, staged, token, in_tile);
            let row = k.eval(staged.token + token);
            let feature = k.eval(staged.feature + in_tile);
            let inside = k.compare(Cmp::Lt, row, staged.m);
            let start = k.eval(row.mul_wide(staged.n));
            let to = k.offset(out, (start + feature.widen()) * u64::from(size));
            if self.aligned {
                let inside = k.compare_and(Cmp::Lt, feature, staged.n, inside);
                k.if_(inside, "piece", |k| {
                    let words: [Reg<B32>; 4] = k.ld_vector(from);
                    k.st_vector(to, &words);
                });
                return;
            }
            for element in 0..per_piece {
                let feature = k.eval(feature + element);
                let inside = k.compare_and(Cmp::Lt, feature, staged.n, inside);
                k.if_(inside, "element", |k| {
                    let (from, to) = (from.at(element * size), to.at(element * size));
                    if size == 2 {
                        let half: Reg<B16> = k.ld(from);
                        k.st(to, half);
                    } else {
                        let word: Reg<B32> = k.ld(from);
                        k.st(to, word);
                    }
                });
            }
        });
    }
}
