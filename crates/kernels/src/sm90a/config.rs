//! What the tuner may vary of the fused Hopper kernel, and everything that follows from it: shared memory,
//! registers, grid. The only place that computes offsets.

use dualgemm_ptx::layout::{SmemLayout, SmemRegion, SmemTile, Swizzle};

use super::pack::{CHUNK_BYTES, CHUNK_FEATURES};
use crate::Error;

/// Opt-in shared memory of one CTA on sm_90: 227 KiB.
const SHARED_LIMIT: u32 = 227 << 10;
/// Registers of one multiprocessor.
const REGISTERS: u32 = 64 << 10;

/// Tile and pipeline of the fused kernel.
///
/// A CTA computes `32 · row_groups` features for `tokens` tokens. `row_groups · k_groups` warpgroups multiply, one
/// more loads. With several K groups each takes every `k_groups`-th K block, and their sums are added at the end:
/// for few tokens, where one warpgroup's decode cannot hide behind its own multiplication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// Warpgroups side by side along the features, each 64 weight rows.
    pub row_groups: u32,
    /// Tokens of the tile: the N of `wgmma`.
    pub tokens: u32,
    /// K blocks of 64 that one pipeline stage holds; with K groups, one for each.
    pub blocks_per_stage: u32,
    /// Stages of the ring.
    pub stages: u32,
    /// Warpgroups that share a row tile and split K.
    pub k_groups: u32,
}

/// Shared memory of a configuration.
#[derive(Debug, Clone)]
pub struct Layout {
    /// All of it.
    pub smem: SmemLayout,
    /// Token tiles, `[stages][blocks_per_stage][tokens][64]` f16, rows of 128 bytes, swizzled.
    pub tokens: SmemRegion,
    /// Weight chunks, `[stages][row_groups][blocks_per_stage]`.
    pub weights: SmemRegion,
    /// "Stage is full" barriers.
    pub full: SmemRegion,
    /// "Stage is empty" barriers.
    pub empty: SmemRegion,
    /// One block of tokens.
    pub token_tile: SmemTile,
}

impl Config {
    /// The configurations worth having: measured best somewhere, each for a range of tokens (see
    /// `benchmarks/record/`).
    pub const MENU: [Config; 9] = [
        Config { row_groups: 1, tokens: 8, blocks_per_stage: 4, stages: 10, k_groups: 4 },
        Config { row_groups: 1, tokens: 16, blocks_per_stage: 4, stages: 10, k_groups: 4 },
        Config { row_groups: 1, tokens: 64, blocks_per_stage: 4, stages: 5, k_groups: 4 },
        Config { row_groups: 4, tokens: 8, blocks_per_stage: 2, stages: 6, k_groups: 1 },
        Config { row_groups: 4, tokens: 16, blocks_per_stage: 2, stages: 6, k_groups: 1 },
        Config { row_groups: 4, tokens: 64, blocks_per_stage: 2, stages: 4, k_groups: 1 },
        Config { row_groups: 2, tokens: 128, blocks_per_stage: 2, stages: 4, k_groups: 1 },
        Config { row_groups: 3, tokens: 128, blocks_per_stage: 2, stages: 4, k_groups: 1 },
        Config { row_groups: 2, tokens: 256, blocks_per_stage: 2, stages: 3, k_groups: 1 },
    ];

    /// The configuration of the menu that [`name`](Self::name) calls so.
    ///
    /// # Errors
    /// If there is none; the error lists the names.
    pub fn named(name: &str) -> Result<Config, Error> {
        Self::MENU.into_iter().find(|config| config.name() == name).ok_or_else(|| Error::NoConfig {
            found: name.into(),
            valid: Self::MENU.map(|config| config.name()).join(", "),
        })
    }

    /// The first configuration of the menu whose tile holds `m` tokens, or the one with the largest tile.
    pub fn for_tokens(m: usize) -> Config {
        let [.., largest] = Self::MENU;
        Self::MENU.into_iter().find(|config| config.tokens as usize >= m).unwrap_or(largest)
    }

    /// Threads that multiply.
    pub fn consumer_threads(&self) -> u32 {
        self.row_groups * self.k_groups * 128
    }

    /// Threads of a CTA: consumers and one warpgroup of producers.
    pub fn threads(&self) -> u32 {
        self.consumer_threads() + 128
    }

    /// Features of the tile.
    pub fn features(&self) -> u32 {
        self.row_groups * CHUNK_FEATURES as u32
    }

    /// Registers of a producer thread and of a consumer thread after `setmaxnreg`.
    ///
    /// Measured limits: a 24-register producer spills, and the sum over all warps must fit what the CTA got at
    /// entry (registers at entry × threads), or the kernel hangs.
    pub fn registers(&self) -> (u32, u32) {
        match self.row_groups * self.k_groups {
            1 | 2 => (40, 232),
            3 => (40, 152),
            _ if self.k_groups > 1 => (32, 112),
            _ => (40, 104),
        }
    }

    /// Bytes of tokens in a stage.
    pub fn token_bytes(&self) -> u32 {
        self.blocks_per_stage * self.tokens * 128
    }

    /// Bytes of weights in a stage.
    pub fn weight_bytes(&self) -> u32 {
        self.blocks_per_stage * self.row_groups * CHUNK_BYTES as u32
    }

    /// Bytes from one token's staged output row to the next: 16 more than its features take, which spreads the
    /// rows over the banks.
    pub fn pitch(&self) -> u32 {
        self.features() * 2 + 16
    }

    /// Bytes that the epilogue needs where the ring was: sums of the K groups, or the staged output tile.
    fn epilogue_bytes(&self) -> u32 {
        match self.k_groups {
            1 => self.tokens * self.pitch(),
            _ => self.consumer_threads() * self.tokens * 2,
        }
    }

    /// Shared memory, or what does not fit.
    ///
    /// # Errors
    /// Names the rule and the value.
    pub fn layout(&self) -> Result<Layout, Error> {
        let rule = |rule: &'static str, value: u32, limit: u32| {
            Err(Error::Unsupported { kernel: "sm90a fused", rule, value, limit })
        };
        if !(1..=4).contains(&(self.row_groups * self.k_groups)) {
            return rule("warpgroups that multiply, from 1", self.row_groups * self.k_groups, 4);
        }
        if self.k_groups > 1 && self.blocks_per_stage != self.k_groups {
            return rule("K blocks per stage equal K groups", self.blocks_per_stage, self.k_groups);
        }
        let largest = if self.row_groups * self.k_groups <= 2 { 256 } else { 128 };
        if self.tokens == 0 || !self.tokens.is_multiple_of(8) || self.tokens > largest {
            return rule(
                "tokens of the tile, a multiple of 8 whose sums fit the registers",
                self.tokens,
                largest,
            );
        }
        if self.stages < 2 || self.blocks_per_stage == 0 {
            return rule("stages, at least 2 of at least one block", self.stages, 16);
        }
        let token_tile = SmemTile::new(self.tokens, 128, Swizzle::B128)?;
        let mut smem = SmemLayout::new();
        let tokens = smem.alloc_parts("tokens", self.token_bytes(), self.stages, 1024);
        let weights = smem.alloc_parts("weights", self.weight_bytes(), self.stages, 128);
        let ring = smem.bytes();
        if self.epilogue_bytes() > ring {
            smem.alloc("epilogue", self.epilogue_bytes() - ring, 16);
        }
        let (full, empty) = (smem.mbarriers("full", self.stages), smem.mbarriers("empty", self.stages));
        if smem.bytes() > SHARED_LIMIT {
            return rule("bytes of shared memory", smem.bytes(), SHARED_LIMIT);
        }
        let (producer, consumer) = self.registers();
        let registers = producer * 128 + consumer * self.consumer_threads();
        if registers > REGISTERS {
            return rule("registers of a CTA", registers, REGISTERS);
        }
        Ok(Layout { smem, tokens, weights, full, empty, token_tile })
    }

    /// CTAs for `m` tokens and `n` features: token tiles run fastest, so that CTAs that run together read the same
    /// weights.
    pub fn grid(&self, m: usize, n: usize) -> u32 {
        (m.div_ceil(self.tokens as usize) * n.div_ceil(self.features() as usize)) as u32
    }

    /// A name that tells configurations apart.
    pub fn name(&self) -> String {
        let Self { row_groups, tokens, blocks_per_stage, stages, k_groups } = self;
        format!("sm90a_fused_{}x{tokens}_b{blocks_per_stage}_s{stages}_kg{k_groups}", row_groups * 64)
    }
}
