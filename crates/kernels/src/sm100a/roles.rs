//! The issuing roles of the fused sm_100 kernel: two that load, one that multiplies.

use dualgemm_formats::BlockFormat;
use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::{BlockScaledDesc, Swizzle, tcgen05_smem_desc};

use super::config::{ATOM_COLUMNS, Side};
use super::fused::Fused;
use crate::parts::format::{ATOM_BYTES, ATOM_LINES, ATOM_ROWS, LINES_BYTES};
use crate::parts::operand::OperandIndex;
use crate::parts::ring::Position;

impl Fused<'_> {
    /// A barrier in the CTA that multiplies.
    pub(super) fn leaders_barrier(&self, k: &mut Kernel, barrier: Addr<Shared>) -> Addr<Shared> {
        if self.config.cta_group == 1 {
            return barrier;
        }
        let even = k.eval(self.rank & !1);
        let mapped = k.map_to_rank(barrier, even);
        Addr::new(mapped.base()).at(mapped.offset())
    }

    /// The lane for which `lane` holds arrives at a barrier in the CTA that multiplies.
    pub(super) fn arrive_at_leader(&self, k: &mut Kernel, barrier: Addr<Shared>, lane: Reg<Pred>) {
        if self.config.cta_group == 1 {
            return k.when(lane).mbarrier_arrive(barrier);
        }
        let even = k.eval(self.rank & !1);
        let barrier = k.map_to_rank(barrier, even);
        k.when(lane).mbarrier_arrive_remote_release(barrier);
    }

    /// Whether this CTA of a pair multiplies.
    fn is_leader(&self, k: &mut Kernel) -> Reg<Pred> {
        k.compare(Cmp::Eq, self.half, 0u32)
    }

    /// Runs `load(k, stage number, offset of the ring's stage, full barrier)` for every stage of every tile.
    fn fill_ring(
        &self,
        k: &mut Kernel,
        name: &str,
        at: Position,
        load: impl FnOnce(&mut Kernel, Reg<U32>, Addr<Shared>, Addr<Shared>),
    ) {
        k.for_range(name, self.first_stage, self.end_stage, 1, |k, stage, _| {
            let full = self.ring.wait_empty(k, at);
            let start = self.base.at(self.layout.ring.offset);
            let slot = k.offset(start, at.index * self.layout.ring.stride);
            load(k, stage, slot, full);
            at.advance(k);
        });
    }

    /// How TMA loads: a pair's may complete on the barriers of either CTA.
    pub(super) fn options(&self) -> TmaOptions {
        TmaOptions {
            cta_group: (self.config.cta_group == 2).then_some(CtaGroup::Two),
            ..TmaOptions::default()
        }
    }

    /// Loads one operand of a stage: its codes from row `row` on, its scales from atom `atom` on. They complete on the
    /// first and on the second of `full`.
    fn load_operand(
        &self,
        k: &mut Kernel,
        which: OperandIndex,
        stage: Reg<U32>,
        slot: Addr<Shared>,
        full: [Addr<Shared>; 2],
        from: (Reg<U32>, Reg<U32>),
    ) {
        let options = self.options();
        let to = [self.layout.codes, self.layout.scales].map(|offsets| slot.at(offsets[which as usize]));
        let part = self.config.parts()[which as usize];
        self.maps.load(k, (which, part), stage, to, from, (full, &options));
    }

    pub(super) fn load_weights(&self, k: &mut Kernel) {
        [OperandIndex::Gate, OperandIndex::Up].into_iter().for_each(|half| self.maps.prefetch(k, half));
        let at = self.ring.start(k, true);
        self.tiles.for_each(k, "weight_tiles", |k, tile| {
            let atom = tile.weight_atom(k, self.n, tile.feature);
            let row = match (self.config.side, self.config.cta_group) {
                (Side::HalfAtoms, _) => self.half_atoms_rows(k, tile.feature),
                (_, 1) => tile.feature,
                _ => k.eval(self.half * (self.config.n / 2) + tile.feature),
            };
            let row = tile.weight_row(k, self.n, row);
            self.fill_ring(k, "weight_stages", at, |k, stage, slot, full| {
                if self.config.cta_group == 2 {
                    let leader = self.is_leader(k);
                    k.when(leader);
                }
                let [a, gate, up] = self.config.parts();
                let scales = gate.scale_bytes() + up.scale_bytes();
                // Beside widened weights A has barriers of its own, and so have scales that are moved.
                let others = match (&self.layout.wide, &self.layout.moved) {
                    (Some(_), _) => a.code_bytes(),
                    (None, Some(_)) => scales * self.config.cta_group,
                    (None, None) => 0,
                };
                k.mbarrier_arrive_expect_tx(full, self.config.stage_bytes() - others);
                let mut full = [self.leaders_barrier(k, full); 2];
                if let Some(moved) = &self.layout.moved {
                    full[1] = at.barrier(k, self.base.at(moved.arrived.offset));
                    k.mbarrier_arrive_expect_tx(full[1], scales);
                }
                if self.config.side == Side::HalfAtoms {
                    self.load_half_atoms(k, stage, slot, full[0], (row, atom, tile.feature));
                    return;
                }
                for half in [OperandIndex::Gate, OperandIndex::Up] {
                    self.load_operand(k, half, stage, slot, full, (row, atom));
                }
            });
        });
    }

    pub(super) fn load_a(&self, k: &mut Kernel) {
        self.maps.prefetch(k, OperandIndex::A);
        if !self.grouped {
            k.grid_dependency_wait();
        }
        let at = self.ring.start(k, true);
        self.tiles.for_each(k, "a_tiles", |k, tile| {
            let tile = self.own(k, tile);
            let atom = k.eval(tile.atom + (tile.row >> ATOM_ROWS.ilog2()));
            self.fill_ring(k, "a_stages", at, |k, stage, slot, full| {
                let full = match &self.layout.wide {
                    None => self.leaders_barrier(k, full),
                    Some(wide) => {
                        let [a, ..] = self.config.parts();
                        let tokens = at.barrier(k, self.base.at(wide.tokens.offset));
                        k.mbarrier_arrive_expect_tx(tokens, a.code_bytes());
                        tokens
                    }
                };
                self.load_operand(k, OperandIndex::A, stage, slot, [full; 2], (tile.token, atom));
            });
        });
    }

    /// A descriptor: the constant `desc` with the shared address put in.
    pub(super) fn desc(&self, k: &mut Kernel, slot: Addr<Shared>, desc: u64) -> Reg<U64> {
        let address = slot.base() + slot.offset() as u32;
        let field = k.eval((address >> 4).widen());
        k.eval(field.cast::<B64>() | desc).cast()
    }

    /// Issues every matrix instruction of the pair or CTA.
    pub(super) fn multiply(&self, k: &mut Kernel, tmem: Addr<Tmem>) {
        if self.config.cta_group == 1 {
            self.multiply_tiles(k, tmem);
        } else {
            let leader = self.is_leader(k);
            k.if_(leader, "leader", |k| self.multiply_tiles(k, tmem));
        }
    }

    fn multiply_tiles(&self, k: &mut Kernel, tmem: Addr<Tmem>) {
        let config = self.config;
        let stage_at = self.ring.start(k, false);
        let sums_at = Position::start(k, 1, config.accumulators);
        let wide = self.layout.wide.as_ref().map(|wide| (wide, Position::start(k, 0, wide.buffers)));
        let ready = wide.map_or(&self.layout.full, |(wide, _)| &wide.tokens);
        let always = k.compare(Cmp::Eq, self.lane, self.lane);
        self.tiles.for_each(k, "tiles", |k, tile| {
            if !config.exchanges() {
                let stored = sums_at.barrier(k, self.base.at(self.layout.stored.offset));
                match config.cta_group {
                    1 => k.mbarrier_wait(stored, sums_at.phase, "stored"),
                    _ => k.mbarrier_wait_cluster(stored, sums_at.phase, "stored"),
                }
            }
            let sums = k.offset(tmem, sums_at.index * (2 * config.n));
            k.comment("A tile that starts inside an atom finds its scales some columns further.");
            let columns_start = match config.side {
                Side::Tokens => tile.feature,
                Side::HalfAtoms => k.mov::<U32>(0u32),
                Side::Features => tile.row,
            };
            let columns_tmem = k.offset(tmem, (columns_start % ATOM_ROWS) >> 5);
            let before = k.mov::<U32>(0u32);
            k.for_range("stages", self.first_stage, self.end_stage, 1, |k, stage, _| {
                let full = stage_at.barrier(k, self.base.at(ready.offset));
                k.mbarrier_wait(full, stage_at.phase, "full");
                if let Some(scales) = &self.layout.moved {
                    let moved = stage_at.barrier(k, self.base.at(scales.moved.offset));
                    k.mbarrier_wait_cluster(moved, stage_at.phase, "moved");
                }
                let start = self.base.at(self.layout.ring.offset);
                let slot = k.offset(start, stage_at.index * self.layout.ring.stride);
                let first_step = k.eval(stage * config.steps());
                for step in 0..config.steps() {
                    let here = k.compare(Cmp::Lt, first_step + step, self.steps);
                    k.if_(here, "step", |k| {
                        let first = k.compare(Cmp::Ne, before, 0u32);
                        let accumulate = if step == 0 { first } else { always };
                        match wide {
                            None => {
                                self.multiply_step(k, step, slot, (tmem, columns_tmem), sums, accumulate);
                            }
                            Some(wide) => {
                                let accumulate = [accumulate, always];
                                self.multiply_wide(k, wide, (step, slot), (tmem, sums), accumulate);
                            }
                        }
                    });
                }
                k.assign(before, 1u32);
                let empty = stage_at.barrier(k, self.ring.empty);
                self.commit(k, empty);
                stage_at.advance(k);
            });
            let done = sums_at.barrier(k, self.base.at(self.layout.done.offset));
            self.commit(k, done);
            sums_at.advance(k);
        });
    }

    /// Arrives at `barrier`, in both CTAs of a pair, when what was issued is done.
    pub(super) fn commit(&self, k: &mut Kernel, barrier: Addr<Shared>) {
        match self.config.cta_group {
            1 => k.tcgen05_commit(CtaGroup::One, barrier),
            _ => {
                let (even, both) = (k.eval(self.rank & !1), k.mov::<U32>(3u32));
                let pair = k.eval(both << even);
                let pair = k.convert::<U16, U32>(pair);
                k.tcgen05_commit_multicast(CtaGroup::Two, barrier, pair.cast());
            }
        }
    }

    /// Scales of one step to tensor memory, then gate and up.
    fn multiply_step(
        &self,
        k: &mut Kernel,
        step: u32,
        slot: Addr<Shared>,
        (rows_tmem, columns_tmem): (Addr<Tmem>, Addr<Tmem>),
        sums: Addr<Tmem>,
        accumulate: Reg<Pred>,
    ) {
        let (config, layout, parts) = (self.config, self.layout, self.config.parts());
        let half_atoms = config.side == Side::HalfAtoms;
        // An atom of mxfp4 has the scales of two steps: it is copied for the first, and each takes its bytes.
        let (of_atom, atom) = (step % config.atom_steps(), step / config.atom_steps());
        let column = |which: OperandIndex| {
            layout.scale_columns[which as usize] + atom * parts[which as usize].atoms * ATOM_COLUMNS
        };
        let copied = match (of_atom, half_atoms) {
            (0, false) => &[OperandIndex::A, OperandIndex::Gate, OperandIndex::Up][..],
            (0, true) => &[OperandIndex::A, OperandIndex::Gate],
            _ => &[],
        };
        for &which in copied {
            let part = parts[which as usize];
            // Bytes from atom to atom along K, and from eight lines to the next: those of half atoms come by eight.
            let (pitch, apart) = match part.lines {
                ATOM_LINES => (ATOM_BYTES, LINES_BYTES),
                _ => (LINES_BYTES, part.along_k() * LINES_BYTES),
            };
            let desc = tcgen05_smem_desc(0, 16, apart, Swizzle::None);
            for rows in 0..part.atoms {
                let from = layout.scales[which as usize] + rows * part.atom_bytes() + atom * pitch;
                let from = self.desc(k, slot.at(from), desc);
                let to = rows_tmem.at(column(which) + rows * ATOM_COLUMNS);
                k.tmem_cp_scales(self.group(), to, from.cast());
            }
        }
        let operand = |k: &mut Kernel, which: OperandIndex| {
            let tile = &layout.tiles[which as usize];
            let start = self.desc(k, slot.at(layout.codes[which as usize]), tile.tcgen05_desc());
            k.eval(start + tile.advance_k(step * 32)).cast::<B64>()
        };
        let x = operand(k, OperandIndex::A);
        let rows = ATOM_ROWS * config.cta_group;
        let (columns, products) = match half_atoms {
            false => (config.n, &[OperandIndex::Gate, OperandIndex::Up][..]),
            true => (2 * config.n, &[OperandIndex::Gate][..]),
        };
        let (desc, scale_vector) = match config.formats.weights() {
            BlockFormat::Nvfp4 => (BlockScaledDesc::nvfp4(rows, columns), ScaleVector::Nvf4Block16),
            BlockFormat::Mxfp4 => {
                (BlockScaledDesc::mxfp4(rows, columns, 2 * of_atom), ScaleVector::Mxf4Block32)
            }
        };
        let desc = desc.encode().expect("`Config::layout` checked the shape");
        let desc = k.mov::<B32>(desc);
        for (half, &which) in products.iter().enumerate() {
            let weights = operand(k, which);
            let d = sums.at(half as u32 * config.n);
            let group = self.group();
            let (scales_x, scales_w) = (column(OperandIndex::A), column(which));
            let (mma, sfa, sfb) = if self.rows_are_tokens() {
                let collector = match (products.len(), half) {
                    (1, _) => Collector::Discard,
                    (_, 0) => Collector::Fill,
                    _ => Collector::LastUse,
                };
                let mma = Mma { group, collector, d, a: x.into(), b: weights, desc };
                (mma, rows_tmem.at(scales_x), columns_tmem.at(scales_w))
            } else {
                let mma = Mma { group, collector: Collector::Discard, d, a: weights.into(), b: x, desc };
                (mma, rows_tmem.at(scales_w), columns_tmem.at(scales_x))
            };
            k.tcgen05_mma_scaled(mma, scale_vector, sfa, sfb, accumulate);
        }
    }
}
