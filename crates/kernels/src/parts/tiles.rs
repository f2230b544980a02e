//! Which tiles a CTA or cluster computes: of one problem, or of groups of rows with weights of their own (experts of a
//! mixture, entries of a batch) whose sizes only device memory knows.

use dualgemm_ptx::builder::*;

use super::format::ATOM_ROWS;

#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// First row of A and C, and the end of the rows that belong to the group.
    pub token: Reg<U32>,
    pub end: Reg<U32>,
    /// First row counted from the group's, and the atom of A's scales that holds the group's first row.
    pub row: Reg<U32>,
    pub atom: Reg<U32>,
    pub feature: Reg<U32>,
    /// The group of a grouped problem.
    pub group: Option<Reg<U32>>,
}

impl Tile {
    /// Row `row` of the weights of the tile's group, of `n` each.
    pub fn weight_row(&self, k: &mut Kernel, n: Reg<U32>, row: Reg<U32>) -> Reg<U32> {
        match self.group {
            None => row,
            Some(group) => k.eval(group * n + row),
        }
    }

    /// The atom of scales that holds row `row` of the weights of the tile's group, of `n` each.
    pub fn weight_atom(&self, k: &mut Kernel, n: Reg<U32>, row: Reg<U32>) -> Reg<U32> {
        let atom = k.eval(row >> ATOM_ROWS.ilog2());
        match self.group {
            None => atom,
            Some(group) => {
                let atoms = k.eval((n + (ATOM_ROWS - 1)) >> ATOM_ROWS.ilog2());
                k.eval(group * atoms + atom)
            }
        }
    }
}

pub(crate) struct Tiles {
    /// Tokens and features of a tile.
    tokens: u32,
    features: u32,
    m: Reg<U32>,
    feature_tiles: Reg<U32>,
    groups: Option<(PointerParam, Reg<U32>)>,
    first: Reg<U32>,
    stride: Reg<U32>,
}

impl Tiles {
    /// Declares the parameters of groups. Tiles are those of `who` of `of`: CTAs or clusters.
    pub fn declare(
        k: &mut Kernel,
        grouped: bool,
        (tokens, features): (u32, u32),
        (m, n): (Reg<U32>, Reg<U32>),
        (who, of): (Reg<U32>, Reg<U32>),
    ) -> Self {
        let groups = grouped.then(|| {
            let rows = k.pointer("group_rows");
            let count = k.param::<U32>("groups");
            (rows, k.ld_param(&count))
        });
        let feature_tiles = k.eval(n.div_ceil(features));
        Self { tokens, features, m, feature_tiles, groups, first: who, stride: of }
    }

    /// Runs `body` for every tile. Those along the tokens run fastest, so that clusters that run together read the same
    /// weights.
    pub fn for_each(&self, k: &mut Kernel, name: &str, body: impl FnOnce(&mut Kernel, Tile)) {
        let tile = k.mov::<U32>(self.first);
        match &self.groups {
            None => {
                let token_tiles = k.eval(self.m.div_ceil(self.tokens));
                let tiles = k.eval(token_tiles * self.feature_tiles);
                let zero = k.mov::<U32>(0u32);
                k.loop_(name, |k, this| {
                    let end = k.compare(Cmp::Ge, tile, tiles);
                    k.break_if(this, end);
                    let [along, beside] = [k.eval(tile / token_tiles), k.eval(tile % token_tiles)];
                    let feature = k.eval(along * self.features);
                    let token = k.eval(beside * self.tokens);
                    body(k, Tile { token, end: self.m, row: token, atom: zero, feature, group: None });
                    k.to(tile).eval(tile + self.stride);
                });
            }
            Some((rows, count)) => self.for_each_of_groups(k, name, tile, (rows, *count), body),
        }
    }

    /// Walks along the groups: tiles come in ascending order, so each group is looked at once.
    fn for_each_of_groups(
        &self,
        k: &mut Kernel,
        name: &str,
        tile: Reg<U32>,
        (rows, count): (&PointerParam, Reg<U32>),
        body: impl FnOnce(&mut Kernel, Tile),
    ) {
        let rows = k.ld_pointer(rows);
        let [group, atom] = [0, 1].map(|_| k.mov::<U32>(0u32));
        let start: Reg<U32> = k.ld(rows);
        let end: Reg<U32> = k.ld(rows.at(4));
        k.loop_(name, |k, this| {
            let done = k.compare(Cmp::Ge, group, count);
            k.break_if(this, done);
            let own_rows = k.eval(end - start);
            let token_tiles = k.eval(own_rows.div_ceil(self.tokens));
            let tiles = k.eval(token_tiles * self.feature_tiles);
            let beyond = k.compare(Cmp::Ge, tile, tiles);
            k.if_else(
                beyond,
                "next_group",
                |k| {
                    k.comment("`tile` counts from the group's first tile.");
                    k.to(tile).eval(tile - tiles);
                    let atoms = k.eval((own_rows + (ATOM_ROWS - 1)) >> ATOM_ROWS.ilog2());
                    k.to(atom).eval(atom + atoms);
                    k.assign(start, end);
                    k.to(group).eval(group + 1);
                    let more = k.compare(Cmp::Lt, group, count);
                    k.if_(more, "rows", |k| {
                        let at = k.offset(rows, (group + 1).mul_wide(4));
                        let next: Reg<U32> = k.ld(at);
                        k.assign(end, next);
                    });
                },
                |k| {
                    let [along, beside] = [k.eval(tile / token_tiles), k.eval(tile % token_tiles)];
                    let feature = k.eval(along * self.features);
                    let row = k.eval(beside * self.tokens);
                    let token = k.eval(start + row);
                    body(k, Tile { token, end, row, atom, feature, group: Some(group) });
                    k.to(tile).eval(tile + self.stride);
                },
            );
        });
    }
}
