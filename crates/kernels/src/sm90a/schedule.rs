//! Which tile a CTA works on: one for each CTA, every so-many-th, or an equal share of all K blocks; and which group's
//! rows a tile of a grouped problem has.

use dualgemm_ptx::builder::*;

use super::fused::{Fused, Groups};

/// A tile, or the part of its K blocks that one CTA takes.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    /// First row of A and C, and the end of the rows that may be written.
    pub(super) token: Reg<U32>,
    pub(super) token_end: Reg<U32>,
    /// First chunk along the features.
    pub(super) chunk: Reg<U32>,
    /// The group whose rows these are.
    pub(super) group: Option<Reg<U32>>,
    /// First K block and the end, if not all of them.
    pub(super) blocks: Option<(Reg<U32>, Reg<U32>)>,
    /// The same of those that both CTAs of a pair multiply, each by its own half of the tokens.
    pub(super) both: Option<(Reg<U32>, Reg<U32>)>,
    /// With stream-K, whose part of the tile this is.
    pub(super) part: Option<Part<'a>>,
}

/// A CTA's part of a tile of stream-K.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    /// The part begins, or ends, where the tile does.
    pub(super) head: Reg<Pred>,
    pub(super) tail: Reg<Pred>,
    /// Unit of work at which the tile ends.
    pub(super) tile_end: Reg<U32>,
    pub(super) shares: Shares,
    /// Where the sums of parts meet.
    pub(super) workspace: &'a PointerParam,
}

impl Tile<'_> {
    /// First K block, and the end.
    pub(super) fn block_range(&self, k: &mut Kernel, blocks: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        self.blocks.unwrap_or_else(|| (k.mov::<U32>(0u32), blocks))
    }

    pub(super) fn block_count(&self, k: &mut Kernel, blocks: Reg<U32>) -> Reg<U32> {
        self.blocks.map_or(blocks, |(first, end)| k.eval(end - first))
    }
}

/// How the units of work of stream-K, a stage's K blocks of one tile each, are shared: CTA i begins at
/// `i · each + min(i, longer)`.
#[derive(Clone, Copy)]
pub(super) struct Shares {
    each: Reg<U32>,
    longer: Reg<U32>,
    stages: Reg<U32>,
}

impl Shares {
    /// First unit of CTA `cta`.
    pub(super) fn start(&self, k: &mut Kernel, cta: Reg<U32>) -> Reg<U32> {
        k.eval(cta * self.each + cta.min(self.longer))
    }
}

impl Fused<'_> {
    /// Runs `body` for the tiles of this CTA: once with `tile` if there is one.
    pub(super) fn for_each_tile(
        &self,
        k: &mut Kernel,
        tile: Option<Tile>,
        body: impl FnOnce(&mut Kernel, Tile),
    ) {
        match (tile, &self.workspace) {
            (Some(tile), _) => body(k, tile),
            (None, Some(workspace)) => self.for_each_share(k, workspace, body),
            (None, None) => self.for_each_strided(k, body),
        }
    }

    /// Tiles along the tokens and along the features, of the whole problem without groups.
    pub(super) fn tile_counts(&self, k: &mut Kernel) -> [Reg<U32>; 2] {
        [(self.m, self.config.tokens), (self.rows.n, self.features())]
            .map(|(size, tile)| k.eval(size.div_ceil(tile)))
    }

    /// The only tile of a CTA; CTAs beyond the last tile end here. Without groups the grid is (token tiles of a panel,
    /// feature tiles, panels), which needs no division; with groups it is as long as the worst case.
    pub(super) fn grid_tile(&self, k: &mut Kernel) -> Tile<'_> {
        let x = k.special(Special::CtaidX);
        if let Some(groups) = &self.groups {
            let (tile, found) = self.find_group(k, groups, x);
            k.unless(found).exit();
            return tile;
        }
        k.comment("Token tiles run fastest: CTAs that run together read the same weights.");
        let (features, panel) = (k.special(Special::CtaidY), k.special(Special::CtaidZ));
        let x = if self.config.cluster() > 1 { k.eval(x >> 1) } else { x };
        let token = k.eval((panel * self.config.panel() + x) * self.config.tokens);
        k.comment("The last panel may be narrower.");
        let beyond = k.compare(Cmp::Ge, token, self.m);
        k.when(beyond).exit();
        let [blocks, both] = match self.config.k_split {
            1 => [None, None],
            _ => self.half_of_k(k),
        };
        let chunk = match self.config.common {
            false => k.eval(features * self.config.row_groups),
            true => {
                let rank = k.special(Special::ClusterCtaRank);
                k.eval(features * self.config.pair_groups() + rank * self.config.own_groups())
            }
        };
        Tile { token, token_end: self.m, chunk, group: None, blocks, both, part: None }
    }

    /// Of the row group that the pair has in common, the first block of a stage that is this CTA's: the second CTA has the second half.
    pub(super) fn first_in_common(&self, k: &mut Kernel) -> Reg<U32> {
        let rank = k.special(Special::ClusterCtaRank);
        k.eval(rank * (self.config.blocks_per_stage / 2))
    }

    /// How many of the `count` blocks of a stage are this CTA's.
    pub(super) fn blocks_in_common(&self, k: &mut Kernel, count: Reg<U32>) -> Reg<U32> {
        let first = self.first_in_common(k);
        k.eval((count - count.min(first)).min(self.config.blocks_per_stage / 2))
    }

    /// Whether this is the warpgroup of the row group in common, the last of either CTA.
    pub(super) fn is_common(&self, k: &mut Kernel) -> Reg<Pred> {
        let [row_group, ..] = self.place(k);
        k.compare(Cmp::Eq, row_group, self.config.own_groups())
    }

    /// The K blocks of this CTA of a pair: half of the stages, the first CTA one more if they are odd. If the pair exchanges sums
    /// while it multiplies, those between the halves are both CTAs', unless there are too few in all.
    fn half_of_k(&self, k: &mut Kernel) -> [Option<(Reg<U32>, Reg<U32>)>; 2] {
        let stage = self.config.blocks_per_stage;
        let both = self.config.exchanges().then(|| {
            let both = self.config.blocks_of_both();
            let enough = k.compare(Cmp::Ge, self.blocks, 4 * both);
            k.select::<U32>(enough, both, 0u32)
        });
        let of_one = both.map_or(self.blocks, |both| k.eval(self.blocks - both));
        let half = k.eval(of_one.div_ceil(2 * stage) * stage);
        let rank = k.special(Special::ClusterCtaRank);
        let behind = both.map_or(half, |both| k.eval(half + both));
        let first = k.eval((rank * behind).min(self.blocks));
        let end = k.eval((first + half).min(self.blocks));
        [Some((first, end)), both.map(|_| (half, behind))]
    }

    /// Every so-many-th tile.
    fn for_each_strided(&self, k: &mut Kernel, body: impl FnOnce(&mut Kernel, Tile)) {
        let index = k.special(Special::CtaidX);
        let index = k.mov(index);
        let step = k.special(Special::NctaidX);
        match &self.groups {
            Some(groups) => k.loop_("tiles", |k, this| {
                let (tile, found) = self.find_group(k, groups, index);
                k.break_if(this, !found);
                body(k, tile);
                k.to(index).eval(index + step);
            }),
            None => {
                let counts = self.tile_counts(k);
                k.loop_("tiles", |k, this| {
                    let tiles = k.eval(counts[0] * counts[1]);
                    let done = k.compare(Cmp::Ge, index, tiles);
                    k.break_if(this, done);
                    let tile = self.tile_at(k, counts, index);
                    body(k, tile);
                    k.to(index).eval(index + step);
                });
            }
        }
    }

    /// Tile `index` in the order of the grid: panels of token tiles, in each all feature tiles, token tiles fastest.
    fn tile_at(
        &self,
        k: &mut Kernel,
        [token_tiles, feature_tiles]: [Reg<U32>; 2],
        index: Reg<U32>,
    ) -> Tile<'_> {
        let panel_tiles = k.eval(feature_tiles * self.config.panel());
        let panel = k.eval(index / panel_tiles);
        let inside = k.eval(index % panel_tiles);
        let first = k.eval(panel * self.config.panel());
        let width = k.eval((token_tiles - first).min(self.config.panel()));
        let features = k.eval(inside / width);
        let token = k.eval((inside % width + first) * self.config.tokens);
        let chunk = k.eval(features * self.config.row_groups);
        Tile { token, token_end: self.m, chunk, group: None, blocks: None, both: None, part: None }
    }

    /// How stream-K shares the work.
    fn shares(&self, k: &mut Kernel) -> Shares {
        let [token_tiles, feature_tiles] = self.tile_counts(k);
        let stages = k.eval(self.blocks.div_ceil(self.config.blocks_per_stage));
        let units = k.eval(token_tiles * feature_tiles * stages);
        let ctas = k.special(Special::NctaidX);
        Shares { each: k.eval(units / ctas), longer: k.eval(units % ctas), stages }
    }

    /// This CTA's share of the K blocks of all tiles: the end of one tile, whole ones, the beginning of another.
    fn for_each_share(&self, k: &mut Kernel, workspace: &PointerParam, body: impl FnOnce(&mut Kernel, Tile)) {
        let shares = self.shares(k);
        let counts = self.tile_counts(k);
        let cta = k.special(Special::CtaidX);
        let unit = shares.start(k, cta);
        let next = k.eval(cta + 1);
        let end = shares.start(k, next);
        k.loop_("shares", |k, this| {
            let done = k.compare(Cmp::Ge, unit, end);
            k.break_if(this, done);
            let index = k.eval(unit / shares.stages);
            let tile_start = k.eval(index * shares.stages);
            let tile_end = k.eval(tile_start + shares.stages);
            let part_end = k.eval(tile_end.min(end));
            let head = k.compare(Cmp::Eq, unit, tile_start);
            let tail = k.compare(Cmp::Eq, part_end, tile_end);
            let [first_block, end_block] =
                [unit, part_end].map(|at| k.eval((at - tile_start) * self.config.blocks_per_stage));
            let end_block = k.eval(end_block.min(self.blocks));
            let part = Some(Part { head, tail, tile_end, shares, workspace });
            let blocks = Some((first_block, end_block));
            let tile = Tile { blocks, part, ..self.tile_at(k, counts, index) };
            body(k, tile);
            k.to(unit).mov(part_end);
        });
    }

    /// Tile `index` of a grouped problem, and whether there is one. All lanes of the warp are here: each looks at one
    /// group, 32 at a time.
    fn find_group(&self, k: &mut Kernel, groups: &Groups, index: Reg<U32>) -> (Tile<'_>, Reg<Pred>) {
        let offsets = k.ld_pointer(&groups.offsets);
        let count = k.ld_param(&groups.count);
        let [_, feature_tiles] = self.tile_counts(k);
        let zero = |k: &mut Kernel| k.mov::<U32>(0u32);
        let [group, token, token_end, local, tiles_before] = std::array::from_fn(|_| zero(k));
        let token_tiles = k.mov::<U32>(1u32);
        let found = k.mov::<U32>(0u32);
        k.for_range("groups", 0u32, count, 32, |k, first, this| {
            let mine = k.eval(first + self.lane);
            let [start, end] = [zero(k), zero(k)];
            let exists = k.compare(Cmp::Lt, mine, count);
            k.if_(exists, "group", |k| {
                let at = k.offset(offsets, mine.mul_wide(4));
                let (low, high): (Reg<U32>, Reg<U32>) = (k.ld(at), k.ld(at.at(4)));
                k.assign(start, low);
                k.assign(end, high);
            });
            let width = k.eval((end - start).div_ceil(self.config.tokens));
            let own = k.eval(width * feature_tiles);
            k.comment("Tiles up to and with this lane's group.");
            let sum = k.mov(own);
            for distance in [1u32, 2, 4, 8, 16] {
                let lower = k.shuffle(Shuffle::Up, sum, distance);
                let add = k.compare(Cmp::Ge, self.lane, distance);
                k.when(add).to(sum).eval(sum + lower);
            }
            let sum = k.eval(sum + tiles_before);
            let beyond = k.compare(Cmp::Gt, sum, index);
            let lanes = k.ballot(beyond);
            let any = k.compare(Cmp::Ne, lanes.cast::<U32>(), 0u32);
            k.if_(any, "found", |k| {
                let complement = k.not(lanes).cast::<U32>();
                let negative = k.eval(complement + 1);
                let lowest = k.eval(lanes.cast::<U32>() & negative);
                let zeros = k.leading_zeros(lowest);
                let last = k.mov::<U32>(31u32);
                let lane = k.eval(last - zeros);
                let before = k.eval(sum - own);
                for (to, from) in
                    [(group, mine), (token, start), (token_end, end), (token_tiles, width), (local, before)]
                {
                    let value = k.shuffle(Shuffle::Index, from, lane);
                    k.assign(to, value);
                }
                k.to(local).eval(index - local);
                k.assign(found, 1u32);
            });
            k.break_if(this, any);
            let all = k.shuffle(Shuffle::Index, sum, 31u32);
            k.assign(tiles_before, all);
        });
        let chunk = k.eval(local / token_tiles * self.config.row_groups);
        let token = k.eval(local % token_tiles * self.config.tokens + token);
        let found = k.compare(Cmp::Ne, found, 0u32);
        (Tile { token, token_end, chunk, group: Some(group), blocks: None, both: None, part: None }, found)
    }
}
