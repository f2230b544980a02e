//! What the tuner may vary of the fused Hopper kernel, and everything that follows from it: shared memory,
//! registers, grid. The only place that computes offsets.

use dualgemm_ptx::layout::{SmemLayout, SmemRegion, SmemTile, Swizzle};

use super::pack::{CHUNK_BYTES, CHUNK_FEATURES};
use crate::Error;
use crate::limits::{MOST_STAGES, Rules, SHARED_DATACENTER, Valid};
use crate::parts::staged::pitch;
use crate::parts::variant::{Out, Products, Scheduler, Variant};

/// Shared memory of one multiprocessor, and what the driver keeps of it for each CTA.
const SHARED_OF_SM: u32 = 228 << 10;
const SHARED_RESERVED: u32 = 1 << 10;
/// Registers of one multiprocessor.
const REGISTERS: u32 = 64 << 10;
/// Registers a thread is given at most here: `setmaxnreg` takes multiples of 8 up to 256, and no kernel has more use.
const MOST_REGISTERS: u32 = 232;
/// What refuses a configuration or operands.
pub(super) const RULES: Rules = Rules("sm90a fused");
/// Bytes of the sums of a row group for eight tokens.
pub(super) const ROW_GROUP_PLANE: u32 = 128 * 16;
/// K blocks of a stage: more make it too large for two stages beside tokens worth the tile.
const MOST_BLOCKS: u32 = 8;

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
    /// CTAs of a cluster that split K between them, 1 or 2: each finishes half of the tokens.
    pub k_split: u32,
    /// Whether the two CTAs of a cluster have one row group in common, and half of its K each: what shares an odd number of row
    /// groups evenly.
    pub common: bool,
    /// CTAs that fit on a multiprocessor. With two, the next kernel's weights stream in while this one ends.
    pub ctas_per_sm: u32,
}

/// Shared memory of a configuration.
#[derive(Debug, Clone)]
pub struct Layout {
    /// All of it.
    pub smem: SmemLayout,
    /// Where the epilogue may write: the ring, if no other tile's operands are in it.
    pub epilogue: u32,
    /// Token tiles, `[stages][blocks_per_stage][tokens][64]` f16, rows of 128 bytes, swizzled.
    pub tokens: SmemRegion,
    /// Weight chunks, `[stages][row_groups][blocks_per_stage]`.
    pub weights: SmemRegion,
    /// Sums from the other CTA of a pair, of half of the tokens or of the common row group, and the barrier that says that they are
    /// there.
    pub from_other: Option<(SmemRegion, SmemRegion)>,
    /// "Stage is full" barriers.
    pub full: SmemRegion,
    /// "Stage is empty" barriers.
    pub empty: SmemRegion,
    /// One block of tokens.
    pub token_tile: SmemTile,
}

impl Config {
    /// One CTA per multiprocessor.
    pub const fn new(
        row_groups: u32,
        tokens: u32,
        blocks_per_stage: u32,
        stages: u32,
        k_groups: u32,
    ) -> Self {
        Self {
            row_groups,
            tokens,
            blocks_per_stage,
            stages,
            k_groups,
            k_split: 1,
            common: false,
            ctas_per_sm: 1,
        }
    }

    /// Two CTAs per multiprocessor.
    pub const fn two_per_sm(self) -> Self {
        Self { ctas_per_sm: 2, ..self }
    }

    /// Two CTAs split K.
    pub const fn split_k(self) -> Self {
        Self { k_split: 2, ..self }
    }

    /// Two CTAs have a row group in common.
    pub const fn common(self) -> Self {
        Self { common: true, ..self }
    }

    /// CTAs of a cluster.
    pub fn cluster(&self) -> u32 {
        if self.common { 2 } else { self.k_split }
    }

    /// The configurations worth having: measured best somewhere, each for a range of tokens (see
    /// `benchmarks/record/`).
    pub const MENU: [Config; 29] = [
        Config::new(1, 8, 4, 10, 4),
        Config::new(1, 16, 4, 10, 4),
        // Weights read far ahead hold up a kernel that expands A meanwhile: fewer of them where A is nvfp4.
        Config::new(1, 16, 3, 8, 3),
        Config::new(1, 32, 4, 8, 4),
        Config::new(1, 32, 4, 6, 4),
        Config::new(1, 64, 3, 6, 3),
        Config::new(1, 64, 4, 5, 4),
        // Linear layers of few features: 64 of them to a tile leave multiprocessors without one.
        Config::new(1, 16, 4, 10, 4).split_k(),
        Config::new(1, 32, 4, 8, 4).split_k(),
        Config::new(1, 64, 3, 6, 3).split_k(),
        Config::new(2, 8, 2, 10, 1).two_per_sm(),
        Config::new(2, 8, 4, 5, 1).two_per_sm(),
        Config::new(2, 16, 2, 8, 1).two_per_sm(),
        Config::new(4, 8, 2, 6, 1),
        Config::new(4, 16, 2, 6, 1),
        Config::new(4, 16, 4, 4, 1),
        Config::new(4, 32, 4, 3, 1),
        Config::new(4, 64, 4, 3, 1),
        Config::new(4, 64, 2, 4, 1),
        Config::new(4, 64, 4, 3, 1).common(),
        Config::new(2, 128, 2, 4, 1).common(),
        Config::new(2, 128, 2, 4, 1).split_k(),
        Config::new(2, 128, 2, 4, 1),
        Config::new(2, 128, 2, 5, 1),
        Config::new(3, 128, 1, 7, 1).split_k(),
        Config::new(3, 128, 2, 4, 1),
        Config::new(2, 256, 1, 4, 1).split_k(),
        Config::new(2, 256, 1, 5, 1),
        Config::new(2, 256, 2, 3, 1),
    ];

    /// The first configuration of the menu for any scheduler whose tile holds `m` tokens, or the one with the largest
    /// tile.
    pub fn for_tokens(m: usize) -> Config {
        let [.., largest] = Self::MENU;
        let fits = |config: &Config| config.cluster() == 1 && config.tokens as usize >= m;
        Self::MENU.into_iter().find(fits).unwrap_or(largest)
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

    /// Warpgroups that multiply.
    fn consumers(&self) -> u32 {
        self.row_groups.saturating_mul(self.k_groups)
    }

    /// Registers of a producer thread and of a consumer thread after `setmaxnreg`.
    ///
    /// Measured limits: a 24-register producer spills, and the sum over all warps must fit what the CTA got at
    /// entry (registers at entry × threads), or the kernel hangs. Consumers of 64 tokens need 106.
    pub fn registers(&self) -> (u32, u32) {
        let at_entry = (REGISTERS / self.ctas_per_sm.max(1) / self.threads() / 8 * 8).min(MOST_REGISTERS);
        let producer =
            if self.consumers() == 4 || self.k_groups > 1 || self.ctas_per_sm > 1 { 32 } else { 40 };
        let left = at_entry * (self.consumers() + 1) - producer;
        (producer, (left / self.consumers().max(1) / 8 * 8).min(MOST_REGISTERS))
    }

    /// Bytes of tokens in a stage.
    pub fn token_bytes(&self) -> u32 {
        self.blocks_per_stage * self.tokens * 128
    }

    /// Bytes of weights in a stage.
    pub fn weight_bytes(&self) -> u32 {
        self.blocks_per_stage * self.row_groups * CHUNK_BYTES as u32
    }

    /// Bytes of the sums of K groups that the epilogue adds up: of two CTAs, of half of the tokens twice. The staged output tile
    /// lies behind them.
    pub(super) fn exchange_bytes(&self) -> u32 {
        match (self.k_groups, self.k_split) {
            (1, _) => 0,
            _ => self.consumer_threads() * self.tokens * 2,
        }
    }

    fn epilogue_bytes(&self, variant: &Variant) -> u32 {
        let direct = self.k_groups > 1 && !matches!(variant.out, Out::Nvfp4 { .. });
        let unstaged = direct || variant.products == Products::Gate;
        self.exchange_bytes()
            + if unstaged { 0 } else { self.tokens * pitch(variant.out, self.variant_features(variant)) }
    }

    /// Features of the tile of a variant.
    pub(super) fn variant_features(&self, variant: &Variant) -> u32 {
        self.features() * variant.products.features_per_thread()
    }

    /// Refuses what does not go together.
    fn check(&self, variant: &Variant) -> Result<(), Error> {
        let &Variant { grouped, products, scheduler, codes, choices, .. } = variant;
        if choices {
            return RULES.refuse("it does not find the groups of choices itself");
        }
        if codes.is_some() {
            return RULES.refuse("it does not expand codes of A");
        }
        if grouped && scheduler == Scheduler::StreamK {
            return RULES.refuse("grouped problems run on the grid or persistent scheduler");
        }
        if products.apart() && (grouped || scheduler != Scheduler::Grid) {
            return RULES.refuse("gate and up apart are products of one problem on the grid scheduler");
        }
        if (grouped || scheduler != Scheduler::Grid) && self.cluster() > 1 {
            return RULES.refuse("two CTAs split K of one problem on the grid scheduler");
        }
        let whole = self.k_split == 1 && self.k_groups == 1 && self.blocks_per_stage.is_multiple_of(2);
        if self.common && (!whole || self.row_groups == 1 || products.apart()) {
            return RULES.refuse(
                "a common row group is one of several with all of K and stages of two halves, of products of one launch",
            );
        }
        if matches!(variant.out, Out::Nvfp4 { .. }) && !variant.aligned {
            return RULES.refuse("nvfp4 output takes whole blocks: N is a multiple of 16");
        }
        Ok(())
    }

    /// Bytes of a tile's sums, all K groups added up.
    pub(super) fn tile_bytes(&self) -> usize {
        self.row_groups as usize * 64 * self.tokens as usize * 4
    }

    /// Shared memory, or what does not fit.
    pub fn layout(&self, variant: &Variant) -> Result<Layout, Error> {
        self.check(variant)?;
        RULES.check("warpgroups that multiply", self.consumers(), Valid::range(1, 4))?;
        match self.consumers() {
            1 => RULES.check(
                "CTAs of one such warpgroup on a multiprocessor",
                self.ctas_per_sm,
                Valid::range(2, 2),
            ),
            _ => RULES.check("CTAs on a multiprocessor", self.ctas_per_sm, Valid::range(1, 2)),
        }?;
        RULES.check("CTAs that split K", self.k_split, Valid::range(1, 2))?;
        match self.k_groups {
            1 => RULES.check("K blocks of a stage", self.blocks_per_stage, Valid::range(1, MOST_BLOCKS)),
            groups => {
                let each = Valid::range(groups, groups);
                RULES.check("K blocks of a stage, one for each K group", self.blocks_per_stage, each)
            }
        }?;
        // 32 registers of fragments, and about 48 of everything else; what stream-K knows of a tile takes a few more.
        let others = if variant.scheduler == Scheduler::StreamK { 88 } else { 80 };
        let largest = (self.registers().1.saturating_sub(others) * 2).clamp(16, 256);
        // CTAs that split K finish half of the tokens each.
        let tokens = Valid::multiple(8 * self.k_split, largest);
        RULES.check("tokens of the tile, their sums in registers", self.tokens, tokens)?;
        // A warpgroup loads its next block before it releases the one before this: with one block to a stage that takes
        // three stages.
        let of_a_stage = self.blocks_per_stage / if self.common { 2 } else { 1 };
        let least = if self.k_groups > 1 || of_a_stage == 1 { 3 } else { 2 };
        RULES.check("stages", self.stages, Valid::range(least, MOST_STAGES))?;
        let token_tile = SmemTile::new(self.tokens, 128, Swizzle::B128)?;
        let mut smem = SmemLayout::new();
        let tokens = smem.alloc_parts("tokens", self.token_bytes(), self.stages, 1024);
        let weights = smem.alloc_parts("weights", self.weight_bytes(), self.stages, 128);
        let (ring, epilogue_bytes) = (smem.bytes(), self.epilogue_bytes(variant));
        let epilogue = match variant.scheduler {
            Scheduler::Grid => {
                if epilogue_bytes > ring {
                    smem.alloc("epilogue", epilogue_bytes - ring, 16);
                }
                0
            }
            Scheduler::Persistent | Scheduler::StreamK => smem.alloc("epilogue", epilogue_bytes, 16).offset,
        };
        let from_other = (self.sums_from_other() > 0).then(|| {
            let sums = smem.alloc("sums_from_other", self.sums_from_other(), 16);
            (sums, smem.mbarriers("from_other", 1))
        });
        let (full, empty) = (smem.mbarriers("full", self.stages), smem.mbarriers("empty", self.stages));
        let most = SHARED_DATACENTER.min(SHARED_OF_SM / self.ctas_per_sm - SHARED_RESERVED);
        RULES.shared(smem.bytes(), most)?;
        Ok(Layout { smem, epilogue, tokens, weights, from_other, full, empty, token_tile })
    }

    /// Tiles along the tokens and along the features, two of these for each pair that has a row group in common.
    pub fn tiles(&self, m: usize, n: usize) -> [u32; 2] {
        let along_features = match self.common {
            false => n.div_ceil(self.features() as usize),
            true => 2 * n.div_ceil(self.pair_groups() as usize * CHUNK_FEATURES),
        };
        [m.div_ceil(self.tokens as usize) as u32, along_features as u32]
    }

    /// Row groups that a CTA has alone.
    pub(super) fn own_groups(&self) -> u32 {
        self.row_groups - u32::from(self.common)
    }

    /// Row groups of a pair that has one in common.
    pub(super) fn pair_groups(&self) -> u32 {
        self.own_groups() + self.row_groups
    }

    /// Groups of eight tokens.
    pub(super) fn token_groups(&self) -> u32 {
        self.tokens / 8
    }

    /// Whether one instruction loads the tokens of a whole stage, where K allows it. Measured: 12 to 15 % less time at up
    /// to 16 tokens, where the single thread that asks is the limit; 2 % more at 128.
    pub(crate) fn whole_stage_loads(&self) -> bool {
        self.tokens <= 64 && !self.exchanges()
    }

    /// Tokens that one instruction loads.
    pub(super) fn box_tokens(&self) -> u32 {
        self.tokens / if self.exchanges() { 2 } else { 1 }
    }

    /// Whether the CTAs of a pair exchange halves of their sums while they multiply: with K groups they do so at the end.
    pub(super) fn exchanges(&self) -> bool {
        self.k_split > 1 && self.k_groups == 1
    }

    /// Bytes of the sums that a CTA of a pair gets from the other.
    pub(super) fn sums_from_other(&self) -> u32 {
        match (self.exchanges(), self.common) {
            (true, _) => self.row_groups * ROW_GROUP_PLANE * self.token_groups() / 2,
            (false, true) => ROW_GROUP_PLANE * self.token_groups(),
            (false, false) => 0,
        }
    }

    /// K blocks that both CTAs of a pair multiply, each by its own half of the tokens, while the sums of the other half are on
    /// their way. Measured at 256x3072x4096: none 18.7, four 18.5, six 18.6, eight 18.75 µs.
    pub(super) fn blocks_of_both(&self) -> u32 {
        4u32.next_multiple_of(self.blocks_per_stage)
    }

    /// Token tiles that run through all features before the next ones begin: 2048 tokens, whose part of A stays in L2.
    pub(super) fn panel(&self) -> u32 {
        (2048 / self.tokens).max(1)
    }

    /// A name that tells configurations apart.
    pub fn name(&self) -> String {
        let Self { row_groups, tokens, blocks_per_stage, stages, k_groups, .. } = self;
        let split = match (self.k_split, self.common) {
            (1, false) => "",
            (1, true) => "_common",
            _ => "_split2",
        };
        let ctas = if self.ctas_per_sm > 1 { "_2perSM" } else { "" };
        format!(
            "sm90a_fused_{}x{tokens}_b{blocks_per_stage}_s{stages}_kg{k_groups}{split}{ctas}",
            row_groups * 64
        )
    }
}
