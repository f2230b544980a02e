//! What a fused kernel computes, as a plain value: formats, activation, bias, where its problem sizes come from. What
//! it computes it *with* is a [`Config`](crate::fused::Config).

use dualgemm_formats::{FloatType, ScaleLayout};
use dualgemm_gemm::Program;
use dualgemm_ptx::builder::*;

use super::rows::PIECE;
use crate::Error;
use crate::error::refused;

/// Element format of C.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Out {
    /// Binary16, `[m, n]`.
    F16,
    /// bfloat16, `[m, n]`.
    Bf16,
    /// Binary32, `[m, n]`.
    F32,
    /// Codes `[m, n / 2]` and e4m3 block scales, with a static tensor scale, by Transformer Engine's rule.
    Nvfp4 {
        /// Order of the scale bytes. Padding is not written: zero it once.
        scale_layout: ScaleLayout,
    },
}

impl Out {
    /// C of floats.
    pub const fn float(ty: FloatType) -> Self {
        match ty {
            FloatType::F16 => Self::F16,
            FloatType::Bf16 => Self::Bf16,
            FloatType::F32 => Self::F32,
        }
    }

    /// Features of C in 16 bytes, or in one block of nvfp4: what one thread copies at once.
    pub(crate) const fn piece(self) -> u32 {
        match self {
            Self::F16 | Self::Bf16 => 8,
            Self::F32 => 4,
            Self::Nvfp4 { .. } => PIECE,
        }
    }

    /// Bytes of an element in a staged tile.
    pub(crate) const fn staged_bytes(self) -> u32 {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::Nvfp4 { .. } => 4,
        }
    }

    /// Bytes that `features` take in a row of C.
    pub const fn row_bytes(self, features: usize) -> usize {
        match self {
            Out::F16 | Out::Bf16 => features * 2,
            Out::F32 => features * 4,
            Out::Nvfp4 { .. } => features / 2,
        }
    }

    /// What the address of C is a multiple of: what the widest store takes, where rows are aligned or not.
    pub(super) const fn step(self, aligned: bool) -> u64 {
        match self {
            Out::Nvfp4 { .. } => 8,
            _ if aligned => 16,
            Out::F16 | Out::Bf16 => 2,
            Out::F32 => 4,
        }
    }

    /// Stores one element, rounded to nearest, where `inside` holds, if it is given. What becomes nvfp4, in whole blocks, is staged
    /// as f32.
    pub(crate) fn store<S: AddrSpace>(
        self,
        k: &mut Kernel,
        inside: Option<Reg<Pred>>,
        to: Addr<S>,
        value: Reg<F32>,
    ) {
        let half: Option<Reg<B16>> = match self {
            Out::F32 | Out::Nvfp4 { .. } => None,
            Out::F16 => Some(k.f32_to_f16(value).cast()),
            Out::Bf16 => Some(k.f32_to_bf16(value).cast()),
        };
        if let Some(inside) = inside {
            k.when(inside);
        }
        match half {
            Some(half) => k.st(to, half),
            None => k.st(to, value),
        }
    }
}

/// How tiles are handed to CTAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheduler {
    /// One tile for each CTA.
    Grid,
    /// As many CTAs as the card holds; each takes every so-many-th tile and loads the next one's operands while it
    /// stores.
    Persistent,
    /// As many CTAs as the card holds; each takes an equal share of all K blocks. A tile that two or more share is
    /// finished by the one that has its first block, which adds the others' sums in order: the same bits every time.
    StreamK,
}

/// Which products a launch computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Products {
    /// Gate and up in one pass over A, from a pack of both.
    Both,
    /// Gate alone, from a pack of that matrix: its sums go to memory as they are, f32 in the order of registers.
    Gate,
    /// Up alone, from a pack of that matrix: its epilogue reads the sums that a launch of [`Gate`](Self::Gate) with the
    /// same configuration left, and makes C of both.
    Up,
    /// A linear layer, from a pack of its matrix: C is the sums times the first factor, plus the first bias.
    Linear,
}

impl Products {
    /// Features whose sums a thread has for the same tokens: rows g and g + 8 of a slab are gate and up of one feature,
    /// or two features of one matrix.
    pub(crate) fn features_per_thread(self) -> u32 {
        match self {
            Self::Both => 1,
            Self::Gate | Self::Up | Self::Linear => 2,
        }
    }

    /// Whether another launch leaves or reads sums.
    pub(crate) fn apart(self) -> bool {
        matches!(self, Self::Gate | Self::Up)
    }
}

/// What a kernel computes. Which of these a kernel has, [`Fused::new`](crate::fused::Fused::new) says.
#[derive(Debug, Clone, PartialEq)]
pub struct Variant {
    /// The products of this launch.
    pub products: Products,
    /// Type of A and of the multiplication where weights are widened to it, exactly.
    pub compute: HalfFormat,
    /// A is nvfp4 with block scales in this order, which the kernel for few tokens expands to f16 itself.
    pub codes: Option<ScaleLayout>,
    /// Format of C.
    pub out: Out,
    /// The activation.
    pub program: Program,
    /// Adds a bias to both products.
    pub bias: bool,
    /// Multiplies both products by an f32 in device memory: a tensor scale of A that was found there.
    pub a_scale: bool,
    /// Rounds both products to bf16 before the activation.
    pub round_gate_up_to_bf16: bool,
    /// How tiles are handed out.
    pub scheduler: Scheduler,
    /// Several problems of one N and K behind each other along M, each with its own weights: their first rows are in
    /// device memory.
    pub grouped: bool,
    /// Rows of groups are [choices](crate::fused::FusedArgs::choices).
    pub choices: bool,
    /// Promises that rows of C start at multiples of 16 bytes.
    pub aligned: bool,
    /// Promises that K is a multiple of 64: one instruction then loads the tokens of a whole stage.
    pub whole_blocks: bool,
}

impl Variant {
    /// f16 in and out, one problem, nothing added, one tile for each CTA.
    pub fn new(program: Program) -> Self {
        Self {
            products: Products::Both,
            compute: HalfFormat::F16,
            codes: None,
            out: Out::F16,
            program,
            bias: false,
            a_scale: false,
            round_gate_up_to_bf16: false,
            scheduler: Scheduler::Grid,
            grouped: false,
            choices: false,
            aligned: false,
            whole_blocks: false,
        }
    }

    /// The same for `n` features of `k` elements: sets [`aligned`](Self::aligned) and
    /// [`whole_blocks`](Self::whole_blocks).
    #[must_use]
    pub fn for_weights(self, n: usize, k: usize) -> Self {
        let aligned = n.is_multiple_of(self.out.piece() as usize);
        Self { aligned, whole_blocks: k.is_multiple_of(64), ..self }
    }

    /// The launch before one of [`Products::Up`]: its sums are stored as they are, whatever becomes of them.
    #[must_use]
    pub fn gate_before(&self) -> Self {
        let products = Products::Gate;
        Self { products, bias: false, a_scale: false, round_gate_up_to_bf16: false, ..self.clone() }
    }

    /// Whether it is a linear layer.
    pub(crate) fn is_linear(&self) -> bool {
        self.products == Products::Linear
    }

    /// Features of a chunk of the pack.
    pub(crate) fn chunk_features(&self) -> u32 {
        crate::sm90a::pack::chunk_features(self.products != Products::Both)
    }

    /// Refuses nvfp4 output of features that are not whole blocks, and rows that are not aligned as promised.
    pub fn check(&self, n: usize) -> Result<(), Error> {
        let piece = self.out.piece();
        let (tensor, expected) = match self.out {
            Out::Nvfp4 { .. } => ("an nvfp4 C", "a multiple of 16, whole blocks".into()),
            _ if self.aligned => ("C", format!("a multiple of {piece}, which the kernel was made for")),
            _ => return Ok(()),
        };
        if !n.is_multiple_of(piece as usize) {
            return refused(tensor, format!("N = {n}"), expected);
        }
        Ok(())
    }

    /// A name that tells variants of one configuration apart, the activation left out.
    pub fn name(&self) -> String {
        let compute = self.compute.as_str();
        let out = match self.out {
            Out::F16 => "f16".into(),
            Out::Bf16 => "bf16".into(),
            Out::F32 => "f32".into(),
            Out::Nvfp4 { scale_layout } => format!("nvfp4({scale_layout})"),
        };
        let scheduler = match self.scheduler {
            Scheduler::Grid => "",
            Scheduler::Persistent => " persistent",
            Scheduler::StreamK => " stream-k",
        };
        let products = match self.products {
            Products::Both => "",
            Products::Gate => " gate alone",
            Products::Up => " up after gate",
            Products::Linear => " linear",
        };
        let flag = |on: bool, name: &'static str| if on { name } else { "" };
        format!(
            "{compute} to {out}{products}{scheduler}{}{}{}{}{}{}{}",
            flag(self.bias, " bias"),
            flag(self.a_scale, " a_scale"),
            flag(self.round_gate_up_to_bf16, " rounded"),
            flag(self.grouped, " grouped"),
            flag(self.choices, " choices"),
            flag(!self.aligned, " unaligned"),
            flag(!self.whole_blocks, " ragged k"),
        )
    }
}
