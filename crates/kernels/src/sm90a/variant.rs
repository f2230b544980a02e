//! What a fused kernel computes, as a plain value: formats, activation, bias, where its problem sizes come from. What
//! it computes it *with* is a [`Config`].

use dualgemm_gemm::Program;
use dualgemm_ptx::builder::HalfFormat;

use super::config::Config;
use super::pack::{CHUNK_K, chunk_features};
use crate::Error;
use crate::parts::rows;
pub use crate::parts::rows::Out;

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
    pub(super) fn features_per_thread(self) -> u32 {
        match self {
            Self::Both => 1,
            Self::Gate | Self::Up | Self::Linear => 2,
        }
    }

    /// Whether another launch leaves or reads sums.
    pub(super) fn apart(self) -> bool {
        matches!(self, Self::Gate | Self::Up)
    }
}

/// What the kernel computes.
#[derive(Debug, Clone, PartialEq)]
pub struct Variant {
    /// The products of this launch.
    pub products: Products,
    /// Type of A and of the multiplication: weights are widened to it, exactly.
    pub compute: HalfFormat,
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
            out: Out::F16,
            program,
            bias: false,
            a_scale: false,
            round_gate_up_to_bf16: false,
            scheduler: Scheduler::Grid,
            grouped: false,
            aligned: false,
            whole_blocks: false,
        }
    }

    /// The same for `n` features of `k` elements: sets [`aligned`](Self::aligned) and
    /// [`whole_blocks`](Self::whole_blocks).
    #[must_use]
    pub fn for_weights(self, n: usize, k: usize) -> Self {
        let aligned = n.is_multiple_of(self.out.piece() as usize);
        Self { aligned, whole_blocks: k.is_multiple_of(CHUNK_K), ..self }
    }

    /// The launch before one of [`Products::Up`]: its sums are stored as they are, whatever becomes of them.
    #[must_use]
    pub fn gate_before(&self) -> Self {
        let products = Products::Gate;
        Self { products, bias: false, a_scale: false, round_gate_up_to_bf16: false, ..self.clone() }
    }

    /// What is made of the sums.
    pub(super) fn rows(&self) -> rows::Variant {
        let Self { out, ref program, bias, a_scale, grouped, aligned, .. } = *self;
        rows::Variant { out, bias, a_scale, grouped, aligned, ..rows::Variant::new(program.clone()) }
    }

    pub(super) fn features(&self, config: &Config) -> u32 {
        config.features() * self.products.features_per_thread()
    }

    /// Features of a chunk of the pack.
    pub(super) fn chunk_features(&self) -> u32 {
        chunk_features(self.products != Products::Both)
    }

    /// Checks what does not go together.
    pub fn check(&self, config: &Config) -> Result<(), Error> {
        let rule = |rule| Err(Error::Combination { kernel: "sm90a fused", rule });
        if self.grouped && self.scheduler == Scheduler::StreamK {
            return rule("grouped problems run on the grid or persistent scheduler");
        }
        if self.products.apart() && (self.grouped || self.scheduler != Scheduler::Grid) {
            return rule("gate and up apart are products of one problem on the grid scheduler");
        }
        if (self.grouped || self.scheduler != Scheduler::Grid) && config.k_split > 1 {
            return rule("two CTAs split K of one problem on the grid scheduler");
        }
        if matches!(self.out, Out::Nvfp4 { .. }) && !self.aligned {
            return rule("nvfp4 output takes whole blocks: N is a multiple of 16");
        }
        Ok(())
    }

    /// A name that tells variants of one configuration apart, the activation left out.
    pub fn name(&self) -> String {
        let compute = match self.compute {
            HalfFormat::F16 => "f16",
            HalfFormat::Bf16 => "bf16",
        };
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
            "{compute} to {out}{products}{scheduler}{}{}{}{}{}{}",
            flag(self.bias, " bias"),
            flag(self.a_scale, " a_scale"),
            flag(self.round_gate_up_to_bf16, " rounded"),
            flag(self.grouped, " grouped"),
            flag(!self.aligned, " unaligned"),
            flag(!self.whole_blocks, " ragged k"),
        )
    }
}
