//! What may vary of the fused sm_100 kernel, and everything that follows from it: shared memory, tensor memory,
//! grid. The only place that computes offsets.

use dualgemm_device::LaunchSpec;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_ptx::layout::{SmemLayout, SmemRegion, SmemTile};

use super::fused;
use crate::Error;
use crate::error::one_of;
use crate::fused::{Fused, FusedArgs, Tile};
use crate::limits::{Rules, SHARED_DATACENTER, STAGES, Valid};
use crate::parts::format::{ATOM_LINES, ATOM_ROWS, Format, Formats, STEP_K, StagedOperand, atom_k};
use crate::parts::operand::gate_features;
use crate::parts::variant::Variant;

/// What the columns of an accumulator are.
const FEATURES: &str = "features of a tile";
const TOKENS: &str = "tokens of a tile";
const TMEM_COLUMNS: u32 = 512;
/// Columns of tensor memory that the scales of one atom take.
pub const ATOM_COLUMNS: u32 = 4;
/// Rows whose scales one column of tensor memory has.
pub const COLUMN_ROWS: u32 = 32;
/// Lines of half an atom.
pub const HALF_LINES: u32 = ATOM_LINES / 2;
/// Warps that widen weights: four of gate, four of up, each with the lanes that it may write.
pub const WIDENERS: u32 = 8;
/// Columns of tensor memory that one step of widened gate, or of up, takes: two elements to a column.
pub const WIDE_COLUMNS: u32 = STEP_K / 2;
/// Steps that may be widened ahead of the multiplication.
const BUFFERS: u32 = 4;

/// Which operand has the 128 rows of the matrix instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Tokens: 128 rows of A by `n` features. For many tokens.
    Tokens,
    /// Tokens, by the 64 features whose scales are in the same half of the lines of an atom: of 128 features every second
    /// 16. Gate and up are one operand; half of what they would bring of scales beside 64 features in a row.
    HalfAtoms,
    /// Features: 128 rows of gate and of up by `n` tokens. For few tokens, where 128 rows of A would be padding.
    Features,
}

/// Tile and pipeline of the fused kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// What A and the weights are.
    pub formats: Formats,
    /// What the 128 rows are.
    pub side: Side,
    /// Columns of each accumulator: features or tokens.
    pub n: u32,
    /// CTAs that execute one matrix instruction: 2 share the columns' operand, which halves its traffic.
    pub cta_group: u32,
    /// CTAs, or pairs of them, of a cluster that split K and add their sums in rank order.
    pub split_k: u32,
    /// Stages of the ring.
    pub stages: u32,
    /// Pairs of accumulators: with 2, storing one tile overlaps multiplying the next.
    pub accumulators: u32,
}

/// Memory of a configuration.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Shared memory.
    pub smem: SmemLayout,
    /// Stages: `[x][gate][up][scales of x][of gate][of up]` each.
    pub ring: SmemRegion,
    /// Offsets in a stage of the codes of x, gate and up.
    pub codes: [u32; 3],
    /// Offsets in a stage of the scales of x, gate and up.
    pub scales: [u32; 3],
    /// Tiles of codes in shared memory of x, gate and up.
    pub tiles: [SmemTile; 3],
    /// "Stage is full" barriers.
    pub full: SmemRegion,
    /// "Stage is empty" barriers.
    pub empty: SmemRegion,
    /// "Accumulators are complete" barriers.
    pub done: SmemRegion,
    /// "Accumulators are stored" barriers.
    pub stored: SmemRegion,
    /// "Every CTA's sums are in shared memory" barrier.
    pub put: SmemRegion,
    /// Where `tcgen05.alloc` puts its address.
    pub tmem_address: SmemRegion,
    /// Columns of the scales of x, gate and up.
    pub scale_columns: [u32; 3],
    /// What weights' scales need that have to be moved.
    pub moved: Option<Moved>,
    /// What widened weights need.
    pub wide: Option<WidenedWeights>,
    /// Columns to allocate.
    pub tmem_columns: u32,
}

/// Barriers of weights' scales that are moved by 16 rows on their way to tensor memory.
#[derive(Debug, Clone)]
pub struct Moved {
    /// "The weights' scales of the stage are there" barriers; "full" is of everything else.
    pub arrived: SmemRegion,
    /// "They are where tensor memory takes them from" barriers.
    pub moved: SmemRegion,
}

/// Memory of weights that were made 16 bits wide: buffers of one step, `[gate][up]` columns each.
#[derive(Debug, Clone)]
pub struct WidenedWeights {
    /// What they become: A's format.
    pub format: HalfFormat,
    /// "A of the stage is there" barriers; "full" is of the weights.
    pub tokens: SmemRegion,
    /// "The buffer is filled" barriers.
    pub widened: SmemRegion,
    /// "The buffer is multiplied" barriers.
    pub taken: SmemRegion,
    /// Buffers.
    pub buffers: u32,
    /// First column.
    pub column: u32,
}

impl Config {
    /// The configurations worth having, by their estimates (see `docs/kernels/blackwell.md`).
    pub const MENU: [Config; 13] = [
        Self::features(8, 4, 5),
        Self::features(16, 4, 5),
        Self::features(32, 4, 5),
        Self::features(64, 4, 4),
        Self::tokens(64, 1, 5),
        Self::tokens(128, 1, 4),
        Self::tokens(64, 2, 7),
        Config { side: Side::HalfAtoms, ..Self::tokens(64, 2, 8) },
        Self::tokens(96, 2, 5),
        Self::tokens(112, 2, 5),
        Self::tokens(128, 2, 5),
        Self::halves(96, 5),
        Self::halves(128, 5),
    ];

    const fn features(n: u32, split_k: u32, stages: u32) -> Self {
        let formats = Formats::NVFP4;
        Self { formats, side: Side::Features, n, cta_group: 1, split_k, stages, accumulators: 1 }
    }

    const fn tokens(n: u32, cta_group: u32, stages: u32) -> Self {
        let accumulators = if n <= 96 { 2 } else { 1 };
        Self { side: Side::Tokens, cta_group, accumulators, ..Self::features(n, 1, stages) }
    }

    /// Two pairs that split K.
    const fn halves(n: u32, stages: u32) -> Self {
        Self { split_k: 2, accumulators: 1, ..Self::tokens(n, 2, stages) }
    }

    const fn wide(format: HalfFormat, n: u32, split_k: u32, stages: u32) -> Self {
        Self { formats: Formats::Wide(format), ..Self::features(n, split_k, stages) }
    }

    /// The configurations worth having for operands of these formats; those of nvfp4 are [`MENU`](Self::MENU).
    pub fn menu(formats: Formats) -> Vec<Config> {
        match formats {
            Formats::Scaled(_) => Self::MENU.map(|config| Config { formats, ..config }).into(),
            Formats::Wide(half) => [
                (16, 4, 9),
                (32, 4, 7),
                (64, 4, 6),
                (128, 4, 4),
                (128, 2, 4),
                (128, 1, 4),
                (192, 2, 3),
                (192, 1, 3),
            ]
            .map(|(n, split_k, stages)| Self::wide(half, n, split_k, stages))
            .into(),
        }
    }

    /// The configuration of any menu that [`name`](Self::name) calls so.
    pub fn named(name: &str) -> Result<Config, Error> {
        one_of(name, Formats::ALL.into_iter().flat_map(Self::menu), Self::name)
    }

    /// Whether it takes `m` tokens of one problem and this K. Scales let tiles of less than 32 tokens only hold all of
    /// them; CTAs that split K have at least a stage each.
    pub fn takes(&self, m: usize, k: usize) -> bool {
        let (tokens, scaled) = (self.tile_tokens(), matches!(self.formats, Formats::Scaled(_)));
        let whole = !scaled || tokens.is_multiple_of(32) || m <= tokens as usize;
        whole && self.split_k as usize <= k.div_ceil(self.stage_k() as usize)
    }

    /// K elements of a stage: 128 bytes of codes, the span of the swizzle; half of it beside 16-bit A, so that the ring
    /// has enough stages.
    pub const fn stage_k(&self) -> u32 {
        match self.formats {
            Formats::Scaled(_) => 256,
            Formats::Wide(_) => 128,
        }
    }

    /// Steps of 64 K in a stage: matrix instructions of one product, or buffers of widened weights.
    pub const fn steps(&self) -> u32 {
        self.stage_k() / STEP_K
    }

    /// Steps whose scales one atom holds.
    pub const fn atom_steps(&self) -> u32 {
        atom_k(self.formats.weights()) / STEP_K
    }

    /// Threads: four warps of producers and issuers, four warps that store, eight that widen.
    pub const fn threads(&self) -> u32 {
        match self.formats {
            Formats::Scaled(_) => 256,
            Formats::Wide(_) => 256 + WIDENERS * 32,
        }
    }

    /// CTAs of a cluster.
    pub const fn cluster(&self) -> u32 {
        self.cta_group * self.split_k
    }

    /// Whether sums pass through shared memory, where the ring was: to be added to other CTAs', or because the threads
    /// that hold them hold single features of many tokens. A cluster then takes one tile.
    pub const fn exchanges(&self) -> bool {
        self.split_k > 1 || matches!(self.side, Side::Features)
    }

    /// Bytes of sums that a CTA puts into shared memory: all of its tile to be read by features, or what the other
    /// half of K's CTA stores.
    pub const fn put_bytes(&self) -> u32 {
        let columns = match self.side {
            Side::Tokens if self.split_k > 1 => self.n,
            Side::Tokens | Side::HalfAtoms => 0,
            Side::Features => 2 * self.n,
        };
        columns * ATOM_ROWS * 4
    }

    /// Bytes of sums that a CTA reads from other CTAs: their parts of the columns that it stores.
    pub const fn exchanged_bytes(&self) -> u32 {
        2 * self.n * ATOM_ROWS * 4 / self.split_k * (self.split_k - 1)
    }

    /// Whether tiles may start in the middle of the 32 rows that a column of tensor memory has the scales of.
    pub const fn moves_scales(&self) -> bool {
        matches!(self.side, Side::Tokens) && !self.n.is_multiple_of(COLUMN_ROWS)
    }

    /// Tokens of a tile, all CTAs of the pair together.
    pub const fn tile_tokens(&self) -> u32 {
        match self.side {
            Side::Tokens | Side::HalfAtoms => ATOM_ROWS * self.cta_group,
            Side::Features => self.n,
        }
    }

    /// Features of a tile.
    pub const fn tile_features(&self) -> u32 {
        match self.side {
            Side::Tokens | Side::HalfAtoms => self.n,
            Side::Features => ATOM_ROWS,
        }
    }

    /// Tiles along `n` features: whole atoms where a tile has a half of one.
    pub fn feature_tiles(&self, n: usize) -> usize {
        match self.side {
            Side::HalfAtoms => 2 * n.div_ceil(ATOM_ROWS as usize),
            Side::Tokens | Side::Features => n.div_ceil(self.tile_features() as usize),
        }
    }

    /// What one CTA keeps of A, gate and up in a stage. A tile of 96 or 112 features may touch two atoms of scales.
    pub fn parts(&self) -> [StagedOperand; 3] {
        let k = self.stage_k();
        let (lines, format) = (ATOM_LINES, Format::Block(self.formats.weights()));
        let weights = |rows, atoms| StagedOperand { rows, atoms, lines, k, format };
        let of_a = self.formats.a();
        let atoms = u32::from(matches!(of_a, Format::Block(_)));
        let a = |rows| StagedOperand { rows, atoms, lines, k, format: of_a };
        match self.side {
            Side::Tokens => {
                let atoms = if ATOM_ROWS.is_multiple_of(self.n) { 1 } else { 2 };
                let weights = weights(self.n / self.cta_group, atoms);
                [a(ATOM_ROWS), weights, weights]
            }
            Side::HalfAtoms => {
                let weights = StagedOperand { lines: HALF_LINES, ..weights(self.n / self.cta_group, 1) };
                [a(ATOM_ROWS), weights, weights]
            }
            Side::Features => [a(self.n), weights(ATOM_ROWS, 1), weights(ATOM_ROWS, 1)],
        }
    }

    /// Bytes that arrive per stage, over all CTAs of the pair.
    pub fn stage_bytes(&self) -> u32 {
        self.parts().iter().map(|part| part.code_bytes() + part.scale_bytes()).sum::<u32>() * self.cta_group
    }

    /// The rules of every quantity by itself.
    fn check(&self, rules: Rules) -> Result<(), Error> {
        // Scales beside split K, and both accumulators beside two buffers of widened weights.
        let (columns, step, most) = match (self.side, self.formats) {
            (Side::Tokens, Formats::Scaled(_)) if self.split_k > 1 => (FEATURES, COLUMN_ROWS, ATOM_ROWS),
            (Side::Tokens, Formats::Scaled(_)) => (FEATURES, 16, ATOM_ROWS),
            (Side::HalfAtoms, Formats::Scaled(_)) => (FEATURES, ATOM_ROWS / 2, ATOM_ROWS / 2),
            (Side::Features, Formats::Scaled(_)) => (TOKENS, 8, 64),
            (Side::Features, Formats::Wide(_)) => (TOKENS, 16, TMEM_COLUMNS / 2 - 2 * WIDE_COLUMNS),
            (Side::Tokens | Side::HalfAtoms, Formats::Wide(_)) => {
                return rules.refuse("A in 16 bits multiplies rows of features");
            }
        };
        rules.check(columns, self.n, Valid::multiple(step, most))?;
        let (group, split): (&[u32], &[u32]) = match self.side {
            Side::Tokens => (&[1, 2], &[1, 2]),
            Side::HalfAtoms => (&[1, 2], &[1]),
            Side::Features => (&[1], &[1, 2, 4]),
        };
        rules.check("CTAs of a matrix instruction", self.cta_group, Valid::OneOf(group))?;
        rules.check("CTAs or pairs that split K", self.split_k, Valid::OneOf(split))?;
        match self.split_k {
            1 => rules.check("pairs of accumulators", self.accumulators, Valid::range(1, 2)),
            _ => rules.check("pairs of accumulators beside split K", self.accumulators, Valid::range(1, 1)),
        }?;
        rules.check("stages", self.stages, STAGES)
    }

    /// Shared and tensor memory, or what does not fit.
    pub fn layout(&self) -> Result<Layout, Error> {
        let rules = self.rules();
        self.check(rules)?;
        let (parts, mut stage) = (self.parts(), 0);
        let tile = |part: StagedOperand| SmemTile::new(part.rows, part.row_bytes(), part.swizzle());
        let tiles = [tile(parts[0])?, tile(parts[1])?, tile(parts[2])?];
        let mut take = |bytes: u32| {
            stage += bytes;
            stage - bytes
        };
        let codes = parts.map(|part| take(part.code_bytes()));
        let scales = parts.map(|part| take(part.scale_bytes()));
        let mut smem = SmemLayout::new();
        let ring = smem.alloc_parts("stages", stage, self.stages, 1024);
        if self.put_bytes() > smem.bytes() {
            smem.alloc("sums to exchange", self.put_bytes() - smem.bytes(), 16);
        }
        let (full, empty) = (smem.mbarriers("full", self.stages), smem.mbarriers("empty", self.stages));
        let done = smem.mbarriers("done", self.accumulators);
        let stored = smem.mbarriers("stored", self.accumulators);
        let put = smem.mbarriers("put", 1);
        let moved = self.moves_scales().then(|| Moved {
            arrived: smem.mbarriers("scales", self.stages),
            moved: smem.mbarriers("moved", self.stages),
        });
        let tmem_address = smem.alloc("tensor memory", 4, 4);
        let mut column = 2 * self.n * self.accumulators;
        let (scale_columns, wide) = match self.formats {
            Formats::Scaled(_) => {
                let columns = |part: StagedOperand| {
                    part.atoms * ATOM_COLUMNS * part.along_k() * part.lines / ATOM_LINES
                };
                let scale_columns = parts.map(|part| {
                    column += columns(part);
                    column - columns(part)
                });
                (scale_columns, None)
            }
            Formats::Wide(format) => {
                let first = column;
                let buffers = ((TMEM_COLUMNS - column) / (2 * WIDE_COLUMNS)).min(BUFFERS);
                column += buffers * 2 * WIDE_COLUMNS;
                let tokens = smem.mbarriers("tokens", self.stages);
                let (widened, taken) = (smem.mbarriers("widened", buffers), smem.mbarriers("taken", buffers));
                ([0; 3], Some(WidenedWeights { format, tokens, widened, taken, buffers, column: first }))
            }
        };
        rules.shared(smem.bytes(), SHARED_DATACENTER)?;
        rules.check("columns of tensor memory", column, Valid::range(0, TMEM_COLUMNS))?;
        let tmem_columns = column.next_power_of_two().max(32);
        Ok(Layout {
            smem,
            ring,
            codes,
            scales,
            tiles,
            full,
            empty,
            done,
            stored,
            put,
            tmem_address,
            scale_columns,
            moved,
            wide,
            tmem_columns,
        })
    }

    /// A name that tells configurations apart.
    pub fn name(&self) -> String {
        let Self { n, cta_group, split_k, stages, accumulators, .. } = self;
        let side = match self.side {
            Side::Tokens => "tokens",
            Side::HalfAtoms => "halfatoms",
            Side::Features => "features",
        };
        let formats = self.formats.suffix();
        format!("sm100a_fused_{side}_n{n}_g{cta_group}_k{split_k}_s{stages}_a{accumulators}{formats}")
    }
}

/// Tiles of a product of `m` tokens and `n` features.
pub fn tiles(config: &Config, m: usize, n: usize) -> u32 {
    (m.div_ceil(config.tile_tokens() as usize) * config.feature_tiles(n)) as u32
}

impl Tile for Config {
    fn rules(&self) -> Rules {
        Rules("sm100a fused")
    }

    fn generate(&self, variant: &Variant, target: Target) -> Result<Module, Error> {
        fused::generate(self, variant, target)
    }

    fn shared(&self, _: &Variant) -> Result<u32, Error> {
        Ok(self.layout()?.smem.bytes())
    }

    fn formats(&self, _: &Variant) -> (Format, Option<Format>) {
        (self.formats.a(), Some(Format::Block(self.formats.weights())))
    }

    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let ((m, n, k), rules) = (args.size, self.rules());
        let stages = (k as u32).div_ceil(self.stage_k());
        let (splitters, scaled) = match self.formats {
            Formats::Scaled(_) => ("CTAs that split K, each at least 256 of it", true),
            Formats::Wide(_) => ("CTAs that split K, each at least 128 of it", false),
        };
        rules.check(splitters, self.split_k, Valid::range(1, stages))?;
        // The scales of a tile start on a multiple of 32 rows of an atom.
        let tokens = self.tile_tokens();
        if scaled && !tokens.is_multiple_of(32) {
            if args.groups.is_some() {
                return rules.refuse("groups take tiles of 32 or 64 tokens");
            }
            rules.check("tokens of a problem of one tile", m as u64, Valid::range(1, tokens))?;
        }
        let cluster = self.cluster();
        let tiles = args.tiles(tokens, self.feature_tiles(gate_features(&kernel.variant, n)));
        let resident = (kernel.device.info().sm_count / cluster).max(1) as usize;
        let clusters = if self.exchanges() { tiles } else { tiles.min(resident) };
        args.launch_clusters(kernel, self.parts(), (clusters, cluster, self.threads()), rules)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_has_room_for_what_arrives() {
        for config in Formats::ALL.into_iter().flat_map(Config::menu) {
            let stride = config.layout().unwrap().ring.stride;
            assert_eq!(stride * config.cta_group, config.stage_bytes(), "{}", config.name());
        }
    }
}
