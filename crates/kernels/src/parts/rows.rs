//! C in global memory, and what makes its elements from the sums: tensor scales, bias, activation. Threads that hold
//! consecutive features of a token store them from here; others by way of a tile in shared memory.

use dualgemm_device::{Args, DevicePtr};
use dualgemm_formats::{GlobalScale, ScaleLayout};
use dualgemm_ptx::builder::*;

use super::epilogue::Factors;
use super::groups::GroupArgs;
use super::nvfp4;
use super::variant::{Out, Variant};
use crate::Error;
use crate::error::refused;
use crate::generic::rowwise::scale_offset;
use crate::limits::check_address;

/// Features that a thread stores at once: a block of nvfp4.
pub(crate) const PIECE: u32 = 16;

/// C and what belongs to it, of one launch. What the variant does not use is not looked at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Output {
    /// C, `[m, n]`; for nvfp4 its codes, `[m, n / 2]` bytes, at a multiple of 8. The address is a multiple of 16 if rows are
    /// [aligned](Variant::aligned), of an element otherwise.
    pub c: DevicePtr,
    /// Scale bytes of an nvfp4 C.
    pub scales: DevicePtr,
    /// Tensor scale of an nvfp4 C, a multiplier.
    pub scale: f32,
    /// What the sums of gate and up are multiplied by: the product of their tensor scales with A's. Of groups what they
    /// have in common: the rest is each one's own, in [`GroupArgs`].
    pub alpha: [f32; 2],
    /// Biases of gate and up, `[n]` f32; grouped `[groups, n]`.
    pub bias: [DevicePtr; 2],
    /// One f32 that both products are multiplied by.
    pub a_scale: DevicePtr,
}

impl Output {
    /// Without bias and scales in device memory.
    pub fn new(c: DevicePtr, alpha: [f32; 2]) -> Self {
        let none = DevicePtr::NULL;
        Self { c, scales: none, scale: 1.0, alpha, bias: [none; 2], a_scale: none }
    }

    /// Appends what [`Rows::declare`] declares.
    pub(crate) fn args(
        &self,
        args: Args,
        variant: &Variant,
        groups: Option<&GroupArgs>,
    ) -> Result<Args, Error> {
        check_address("C", self.c, variant.out.step(variant.aligned))?;
        let mut args = args.ptr(self.c).f32(self.alpha[0]).f32(self.alpha[1]);
        if let Some(groups) = groups {
            check_address("the groups' alphas", groups.alphas, 8)?;
            args = args.ptr(groups.alphas);
        }
        if variant.bias {
            check_address("the bias of gate", self.bias[0], 4)?;
            check_address("the bias of up", self.bias[1], 4)?;
            args = args.ptr(self.bias[0]).ptr(self.bias[1]);
        }
        if variant.a_scale {
            check_address("A's tensor scale", self.a_scale, 4)?;
            args = args.ptr(self.a_scale);
        }
        if let Out::Nvfp4 { .. } = variant.out {
            check_address("C's scales", self.scales, 1)?;
            if !(self.scale.is_finite() && self.scale > 0.0 && (1.0 / self.scale).is_finite()) {
                let found = self.scale.to_string();
                return refused("C's tensor scale", found, "positive with a finite reciprocal");
            }
            let divisor = 1.0 / GlobalScale::multiplier(self.scale).value();
            args = args.ptr(self.scales).f32(divisor * (1.0 / 6.0)).f32(1.0 / divisor);
        }
        Ok(args)
    }
}

/// Parameters of a kernel that say where C is and what makes it.
pub(crate) struct Rows {
    pub variant: Variant,
    start: PointerParam,
    alpha: [Param<F32>; 2],
    /// One pair more per group.
    alphas: Option<PointerParam>,
    bias: Option<[PointerParam; 2]>,
    a_scale: Option<PointerParam>,
    pub(super) quantize: Option<Quantize>,
    /// Features of C.
    pub n: Reg<U32>,
    /// Of a linear layer those of gate.
    gate: Option<Reg<U32>>,
}

/// Parameters of an nvfp4 C.
pub(super) struct Quantize {
    layout: ScaleLayout,
    scales: PointerParam,
    /// `divisor / 6` and `1 / divisor` of the tensor scale's divisor.
    factors: [Param<F32>; 2],
}

impl Rows {
    /// Declares the parameters; `n` are the features.
    pub fn declare(k: &mut Kernel, variant: &Variant, n: Reg<U32>) -> Self {
        Self::of_gate(k, variant, (n, None))
    }

    /// The same for kernels that take operands as they are: of a linear layer the first features are gate, `gate` of them, and
    /// the others are up.
    pub fn declare_halves(k: &mut Kernel, variant: &Variant, gate: Reg<U32>) -> Self {
        if !variant.is_linear() {
            return Self::declare(k, variant, gate);
        }
        let all = k.param::<U32>("features");
        let all = k.ld_param(&all);
        Self::of_gate(k, variant, (all, Some(gate)))
    }

    fn of_gate(k: &mut Kernel, variant: &Variant, (n, gate): (Reg<U32>, Option<Reg<U32>>)) -> Self {
        let start = k.pointer("out");
        let alpha = [k.param("alpha_gate"), k.param("alpha_up")];
        let alphas = variant.grouped.then(|| k.pointer("alphas"));
        let bias = variant.bias.then(|| [k.pointer("bias_gate"), k.pointer("bias_up")]);
        let a_scale = variant.a_scale.then(|| k.pointer("a_scale"));
        let quantize = match variant.out {
            Out::Nvfp4 { scale_layout } => Some(Quantize {
                layout: scale_layout,
                scales: k.pointer("out_scales"),
                factors: [k.param("divisor_sixth"), k.param("divisor_inverse")],
            }),
            Out::F16 | Out::Bf16 | Out::F32 => None,
        };
        Self { variant: variant.clone(), start, alpha, alphas, bias, a_scale, quantize, n, gate }
    }

    /// What both sums of a group's tile are multiplied by.
    pub fn alpha(&self, k: &mut Kernel, group: Option<Reg<U32>>) -> [Reg<F32>; 2] {
        let mut alpha = [&self.alpha[0], &self.alpha[1]].map(|alpha| k.ld_param(alpha));
        if let Some((table, group)) = self.alphas.as_ref().zip(group) {
            let table = k.ld_pointer(table);
            let at = k.offset(table, group.mul_wide(8));
            let own: [Reg<F32>; 2] = k.ld_vector(at);
            alpha = [k.mul(alpha[0], own[0]), k.mul(alpha[1], own[1])];
        }
        if let Some(scale) = &self.a_scale {
            let scale = k.ld_pointer(scale);
            let scale: Reg<F32> = k.ld(scale);
            alpha = alpha.map(|alpha| k.mul(alpha, scale));
        }
        alpha
    }

    /// Biases of a feature of a group; features beyond the last have none.
    fn bias(&self, k: &mut Kernel, group: Option<Reg<U32>>, feature: Reg<U32>) -> Option<[Reg<F32>; 2]> {
        let halves = self.bias.as_ref()?;
        let inside = k.compare(Cmp::Lt, feature, self.n);
        let byte = self.bias_offset(k, group, feature);
        Some([&halves[0], &halves[1]].map(|half| {
            let bias = k.mov(0.0f32);
            let table = k.ld_pointer(half);
            let at = k.offset(table, byte);
            k.when(inside).to(bias).ld::<F32, _>(at);
            bias
        }))
    }

    /// Brings into L2 what the epilogue of `count` features of a group from `first` on will read, which is in memory as a rule:
    /// each thread a line.
    pub fn prefetch(&self, k: &mut Kernel, group: Option<Reg<U32>>, first: Reg<U32>, count: u32) {
        /// Features whose biases are a line of the cache.
        const LINE: u32 = 32;
        let thread = k.special(Special::TidX);
        if let Some(halves) = &self.bias {
            let feature = k.eval(first + thread * LINE);
            let needed = k.compare(Cmp::Lt, thread, count.div_ceil(LINE));
            let inside = k.compare_and(Cmp::Lt, feature, self.n, needed);
            let byte = self.bias_offset(k, group, feature);
            for half in halves {
                let table = k.ld_pointer(half);
                let at = k.offset(table, byte);
                k.when(inside).prefetch_l2(at);
            }
        }
        if let Some((table, group)) = self.alphas.as_ref().zip(group) {
            let table = k.ld_pointer(table);
            let at = k.offset(table, group.mul_wide(8));
            let first = k.compare(Cmp::Eq, thread, 0u32);
            k.when(first).prefetch_l2(at);
        }
    }

    /// Where a feature's bias is, of a group's or of all.
    fn bias_offset(&self, k: &mut Kernel, group: Option<Reg<U32>>, feature: Reg<U32>) -> Reg<U64> {
        let element = match group {
            None => feature.widen(),
            Some(group) => group.mul_wide(self.n) + feature.widen(),
        };
        k.eval(element << 2)
    }

    /// What the sums of a feature of a group become products by.
    pub fn factors(&self, k: &mut Kernel, group: Option<Reg<U32>>, feature: Reg<U32>) -> Factors {
        Factors { alpha: self.alpha(k, group), bias: self.bias(k, group, feature) }
    }

    /// The element of C from the sums of gate and up.
    pub fn activate(
        &self,
        k: &mut Kernel,
        alpha: [Reg<F32>; 2],
        (group, feature): (Option<Reg<U32>>, Reg<U32>),
        sums: [Reg<F32>; 2],
    ) -> Reg<F32> {
        let factors = Factors { alpha, bias: self.bias(k, group, feature) };
        factors.activate(k, &self.variant.program, sums)
    }

    /// The element of C from the sum of a linear layer: of the first factor and the first bias.
    pub fn product(
        &self,
        k: &mut Kernel,
        alpha: [Reg<F32>; 2],
        (group, feature): (Option<Reg<U32>>, Reg<U32>),
        sum: Reg<F32>,
    ) -> Reg<F32> {
        Factors { alpha, bias: self.bias(k, group, feature) }.product(k, 0, sum)
    }

    /// Makes elements of C of the 16 sums of gate and of up from `feature` on, a multiple of 16, and stores them if the token
    /// lies below `end`. Of a linear layer these are the sums of two times 16 features.
    pub fn store_sums(
        &self,
        k: &mut Kernel,
        token: (Reg<U32>, Reg<U32>),
        (group, feature): (Option<Reg<U32>>, Reg<U32>),
        alpha: [Reg<F32>; 2],
        [gate, up]: [&[Reg<F32>]; 2],
    ) {
        let Some(of_gate) = self.gate else {
            let values = std::array::from_fn(|i| {
                let feature = k.eval(feature + i as u32);
                self.activate(k, alpha, (group, feature), [gate[i], up[i]])
            });
            return self.store(k, token, feature, &values);
        };
        let second = k.eval(of_gate + feature);
        let first_end = k.eval(of_gate.min(self.n));
        for (first, end, sums) in [(feature, first_end, gate), (second, self.n, up)] {
            let values = std::array::from_fn(|i| {
                let feature = k.eval(first + i as u32);
                self.product(k, alpha, (group, feature), sums[i])
            });
            self.store_below(k, token, (first, end), &values);
        }
    }

    /// Stores the 16 features of one token from `feature` on, a multiple of 16, those below N, if the token lies below
    /// `end`.
    pub fn store(
        &self,
        k: &mut Kernel,
        token: (Reg<U32>, Reg<U32>),
        feature: Reg<U32>,
        values: &[Reg<F32>; PIECE as usize],
    ) {
        self.store_below(k, token, (feature, self.n), values);
    }

    /// As [`store`](Self::store), of features below `last`.
    fn store_below(
        &self,
        k: &mut Kernel,
        (token, end): (Reg<U32>, Reg<U32>),
        (feature, last): (Reg<U32>, Reg<U32>),
        values: &[Reg<F32>; PIECE as usize],
    ) {
        let inside = k.compare(Cmp::Lt, token, end);
        if let Some(quantize) = &self.quantize {
            let inside = k.compare_and(Cmp::Lt, feature, last, inside);
            k.if_(inside, "block", |k| self.store_block(k, quantize, (token, feature), values));
            // The next tile's `.aligned` instructions want whole warps.
            k.warp_sync();
            return;
        }
        let to = self.place(k, token, feature);
        if !self.variant.aligned {
            let bytes = self.variant.out.row_bytes(1) as u32;
            for (i, &value) in (0u32..).zip(values) {
                let feature = k.eval(feature + i);
                let inside = k.compare_and(Cmp::Lt, feature, last, inside);
                self.variant.out.store(k, Some(inside), to.at(i * bytes), value);
            }
            return;
        }
        let words: Vec<Reg<B32>> = match self.variant.out {
            Out::F16 => values.chunks_exact(2).map(|v| k.f32_to_f16x2(v[0], v[1]).cast()).collect(),
            Out::Bf16 => values.chunks_exact(2).map(|v| k.f32_to_bf16x2(v[0], v[1]).cast()).collect(),
            Out::F32 | Out::Nvfp4 { .. } => values.iter().map(|&v| k.to_bits(v)).collect(),
        };
        let per_piece = PIECE * 4 / words.len() as u32;
        for (i, piece) in (0u32..).zip(words.chunks_exact(4)) {
            let feature = k.eval(feature + i * per_piece);
            let inside = k.compare_and(Cmp::Lt, feature, last, inside);
            k.when(inside).st_vector(to.at(i * 16), piece);
        }
    }

    /// Address of an element of C.
    pub fn place(&self, k: &mut Kernel, token: Reg<U32>, feature: Reg<U32>) -> Addr<Global> {
        let start = k.ld_pointer(&self.start);
        let element = token.mul_wide(self.n) + feature.widen();
        let byte = match self.variant.out {
            Out::F16 | Out::Bf16 => element << 1,
            Out::F32 => element << 2,
            Out::Nvfp4 { .. } => element >> 1,
        };
        k.offset(start, byte)
    }

    /// One block as codes and a scale byte, by the rule of the CPU path.
    pub(super) fn store_block(
        &self,
        k: &mut Kernel,
        quantize: &Quantize,
        (token, feature): (Reg<U32>, Reg<U32>),
        values: &[Reg<F32>; PIECE as usize],
    ) {
        let factors = [k.ld_param(&quantize.factors[0]), k.ld_param(&quantize.factors[1])];
        let halves: [[Reg<F32>; 8]; 2] = [0, 8].map(|first| std::array::from_fn(|i| values[first + i]));
        let (words, byte) = nvfp4::encode_block(k, halves, factors);
        let to = self.place(k, token, feature);
        k.st_vector(to, &words);
        let (block, blocks) = (k.eval(feature >> 4), k.eval(self.n >> 4));
        let offset = scale_offset(k, quantize.layout, token, block, blocks);
        let scales = k.ld_pointer(&quantize.scales);
        let to = k.offset(scales, offset);
        k.st_byte(to, byte);
    }
}
