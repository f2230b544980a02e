//! Row groups whose sizes are known only on the device, and where the scales of A's rows then are: those of
//! each group start with an atom of their own.

use dualgemm_device::{Args, DevicePtr};
use dualgemm_ptx::builder::*;

use super::format::ATOM_ROWS;
use crate::Error;
use crate::error::refused;

/// The rows of groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// How many groups.
    pub count: usize,
    /// `count + 1` ascending u32: group g has rows `rows[g] .. rows[g + 1]`. Read by the kernel, so that the kernel before
    /// may write it.
    pub rows: DevicePtr,
}

impl Groups {
    /// Most atoms along the rows that the scales of `rows` rows in `count` groups take.
    pub fn atoms(rows: usize, count: usize) -> usize {
        rows / ATOM_ROWS as usize + rows.min(count)
    }

    /// Appends what kernels declare: the table, and how many.
    pub(crate) fn args(&self, args: Args) -> Result<Args, Error> {
        if self.count == 0 || self.count > i32::MAX as usize {
            return refused("groups", self.count.to_string(), "at least one");
        }
        if self.rows.0 == 0 || !self.rows.0.is_multiple_of(4) {
            let found = format!("address {:#x}", self.rows.0);
            return refused("the groups' rows", found, "a multiple of 4 bytes");
        }
        Ok(args.ptr(self.rows).u32(self.count as u32))
    }

    /// As [`args`](Self::args) where there are groups, which have to be there for kernels that declare them and for no other.
    pub(crate) fn args_if(
        groups: Option<&Self>,
        declared: bool,
        tensor: &str,
        args: Args,
    ) -> Result<Args, Error> {
        match groups {
            Some(groups) if declared => groups.args(args),
            None if !declared => Ok(args),
            _ => refused(tensor, "of groups or not", "what the kernel was made for"),
        }
    }
}

/// The groups of a fused kernel's rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupArgs {
    /// Rows of A and C.
    pub of: Groups,
    /// `[count][2]` f32: what each group's sums of gate and up are multiplied by beside
    /// [`Output::alpha`](super::rows::Output::alpha).
    pub alphas: DevicePtr,
}

/// Most choices that a kernel finds groups of by itself: a lane of a warp looks at each.
pub const MOST_CHOICES: usize = 32;

/// Tiles of `tokens` rows for `m` rows, in so many groups at most: every group's last one may have one row.
pub(crate) fn most_tiles(m: usize, tokens: u32, groups: Option<usize>) -> usize {
    let tokens = tokens as usize;
    groups.map_or(m.div_ceil(tokens), |groups| m.min(m / tokens + groups))
}

/// Groups that a lane looks at, all of them asked for at once: 256 in a warp, so that hundreds of experts cost one way to
/// memory.
const EACH: u32 = 8;
/// The group of a CTA that has none.
const NONE: u32 = u32::MAX;

/// The table as a kernel's parameters.
pub(crate) struct GroupRows {
    rows: PointerParam,
    count: Param<U32>,
}

impl GroupRows {
    pub fn declare(k: &mut Kernel) -> Self {
        Self { rows: k.pointer("group_rows"), count: k.param("groups") }
    }

    /// The first row of the first group, and the row behind the last one's.
    pub fn ends(&self, k: &mut Kernel) -> (Reg<U32>, Reg<U32>) {
        let (rows, count) = (k.ld_pointer(&self.rows), k.ld_param(&self.count));
        let last = k.offset(rows, count.mul_wide(4));
        (k.ld(rows), k.ld(last))
    }

    /// Which row of the atoms is that of `row`, and whether it belongs to a group at all. One row for a whole warp,
    /// whose lanes must all be here: each looks at a group.
    pub fn scale_row(&self, k: &mut Kernel, row: Reg<U32>) -> (Reg<U32>, Reg<Pred>) {
        let (rows, count) = (k.ld_pointer(&self.rows), k.ld_param(&self.count));
        let row_at = |k: &mut Kernel, index: Reg<U32>| k.offset(rows, index.mul_wide(4));
        let (first, last) = (k.ld::<U32, _>(rows), row_at(k, count));
        let last: Reg<U32> = k.ld(last);
        let begun = k.compare(Cmp::Ge, row, first);
        let inside = k.compare_and(Cmp::Lt, row, last, begun);
        k.comment("All atoms of groups that end before the row, and of its own group the rows before it.");
        let before = k.mov::<U32>(0u32);
        let lane = k.special(Special::LaneId);
        let group = k.mov::<U32>(lane);
        k.loop_("groups", |k, this| {
            let done = k.compare(Cmp::Ge, group, count);
            k.break_if(this, done);
            let at = row_at(k, group);
            let (start, end) = (k.ld::<U32, _>(at), k.ld::<U32, _>(at.at(4)));
            let whole = k.eval((end - start + (ATOM_ROWS - 1)) & !(ATOM_ROWS - 1));
            let begun = k.compare(Cmp::Le, start, row);
            let part = k.eval(row - start);
            let part = k.select::<U32>(begun, part, 0u32);
            let ended = k.compare(Cmp::Le, end, row);
            let counted = k.select::<U32>(ended, whole, part);
            k.to(before).eval(before + counted);
            k.to(group).eval(group + 32);
        });
        (k.redux(Redux::Add, before), inside)
    }

    /// Leaves at `to`, in shared memory, the group of tile `tile`, the CTA's along the tokens, of `tokens` rows, the tile's first row, and the end of
    /// the group's. CTAs beyond the last tile end here.
    pub fn find_tile(&self, k: &mut Kernel, tile: Special, tokens: u32, to: Addr<Shared>) {
        let warp = k.warp_index();
        let first_warp = k.compare(Cmp::Eq, warp, 0u32);
        k.if_(first_warp, "find_group", |k| self.search(k, tile, tokens, to));
        self.end_without(k, to);
    }

    /// Ends CTAs without a group, once the first warp has said which have one.
    fn end_without(&self, k: &mut Kernel, to: Addr<Shared>) {
        k.cta_sync();
        let group: Reg<U32> = k.ld(to);
        let none = k.compare(Cmp::Eq, group, NONE);
        k.when(none).exit();
    }

    /// The same of few choices: leaves at `to` the group of choice `tile`, the CTA's along the tokens, and the choices of the tile
    /// at `list`, in order, [`NONE`] behind the last one. A group's first choice has a tile, and each that lies whole tiles behind
    /// it; CTAs of others end here.
    pub fn find_choices(
        &self,
        k: &mut Kernel,
        (tile, choices): (Special, Reg<U32>),
        tokens: u32,
        (to, list): (Addr<Shared>, Addr<Shared>),
    ) {
        let warp = k.warp_index();
        let first_warp = k.compare(Cmp::Eq, warp, 0u32);
        k.if_(first_warp, "find_choices", |k| {
            let (ids, count) = (k.ld_pointer(&self.rows), k.ld_param(&self.count));
            let (lane, tile) = (k.special(Special::LaneId), k.special(tile));
            let (there, id) = (k.compare(Cmp::Lt, lane, choices), k.mov::<U32>(NONE));
            let at = k.offset(ids, lane.mul_wide(4));
            k.when(there).to(id).ld::<U32, _>(at);
            let listed = k.compare(Cmp::Lt, lane, tokens);
            let (none, at) = (k.mov::<U32>(NONE), k.offset(list, lane << 2));
            k.when(listed).st(at, none);
            k.warp_sync();
            let own = k.shuffle(Shuffle::Index, id, tile);
            let same = k.compare(Cmp::Eq, id, own);
            let alike: Reg<U32> = k.ballot(same).cast();
            let one = k.mov::<U32>(1u32);
            let before = k.eval(alike & ((one << lane) - 1));
            let rank = k.popcount(before.cast::<B32>());
            let first = k.shuffle(Shuffle::Index, rank, tile);
            let within = k.eval(rank - first);
            let listed = k.compare_and(Cmp::Lt, within, tokens, same);
            let at = k.offset(list, within << 2);
            k.when(listed).st(at, lane);
            let begins = k.eval(first & (tokens - 1));
            let begins = k.compare(Cmp::Eq, begins, 0u32);
            let here = k.compare_and(Cmp::Lt, own, count, begins);
            let group = k.select::<U32>(here, own, NONE);
            let leader = k.compare(Cmp::Eq, lane, 0u32);
            k.when(leader).st(to, group);
        });
        self.end_without(k, to);
    }

    fn search(&self, k: &mut Kernel, tile: Special, tokens: u32, to: Addr<Shared>) {
        let (rows, count) = (k.ld_pointer(&self.rows), k.ld_param(&self.count));
        let (lane, tile) = (k.special(Special::LaneId), k.special(tile));
        let none = k.mov::<U32>(NONE);
        let last = k.compare(Cmp::Eq, lane, 31u32);
        k.when(last).st(to, none);
        k.warp_sync();
        let left = k.mov::<U32>(tile);
        k.for_range("groups", 0u32, count, 32 * EACH, |k, base, _| {
            let first = k.eval(base + lane * EACH);
            let starts: [Reg<U32>; EACH as usize + 1] = std::array::from_fn(|i| {
                let group = k.eval((first + i as u32).min(count));
                let at = k.offset(rows, group.mul_wide(4));
                k.ld(at)
            });
            let tiles: Vec<Reg<U32>> =
                starts.windows(2).map(|ends| k.eval((ends[1] - ends[0]).div_ceil(tokens))).collect();
            let own = k.mov::<U32>(0u32);
            tiles.iter().for_each(|&tiles| { k.to(own).eval(own + tiles); });
            let sum = k.mov(own);
            for distance in [1u32, 2, 4, 8, 16] {
                let lower = k.shuffle(Shuffle::Up, sum, distance);
                let add = k.compare(Cmp::Ge, lane, distance);
                k.when(add).to(sum).eval(sum + lower);
            }
            k.comment("`within` counts from the group's first tile; of groups behind the tile's it is negative: large.");
            let within = k.eval(left - (sum - own));
            for (i, tiles) in (0u32..).zip(tiles) {
                let here = k.compare(Cmp::Lt, within, tiles);
                k.if_(here, "found", |k| {
                    let group = k.eval(first + i);
                    let row = k.eval(starts[i as usize] + within * tokens);
                    k.st_vector(to, &[group, row, starts[i as usize + 1], none]);
                });
                k.to(within).eval(within - tiles);
            }
            let all = k.shuffle(Shuffle::Index, sum, 31u32);
            k.to(left).eval(left - all);
        });
    }
}
