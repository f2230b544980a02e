//! The issuing roles of the fused sm_100 kernel: two that load, one that multiplies.

use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::{BlockScaledDesc, Swizzle, tcgen05_smem_desc};

use super::config::{ATOM_COLUMNS, ATOM_ROWS, ATOM_STAGE_BYTES, STAGE_K, STEPS};
use super::fused::Fused;

/// x, gate, up.
const X: usize = 0;
const GATE: usize = 1;
const UP: usize = 2;

/// Where a role stands in a ring of stages or of accumulators.
#[derive(Clone, Copy)]
pub(super) struct Position {
    pub index: Reg<U32>,
    pub phase: Reg<U32>,
    count: u32,
}

impl Position {
    /// At the start. Who waits for something to become free begins with phase 1, which a fresh barrier lets pass.
    pub fn start(k: &mut Kernel, phase: u32, count: u32) -> Self {
        Self { index: k.mov::<U32>(0u32), phase: k.mov::<U32>(phase), count }
    }

    pub fn advance(self, k: &mut Kernel) {
        k.to(self.index).add(self.index, 1u32);
        let wrapped = k.compare(Cmp::Eq, self.index, self.count);
        k.when(wrapped).to(self.index).mov::<U32>(0u32);
        k.when(wrapped).to(self.phase).xor(self.phase, 1u32);
    }
}

impl Fused<'_> {
    /// The barrier of a ring that a role stands at.
    pub(super) fn barrier(&self, k: &mut Kernel, region: u32, at: Position) -> Addr<Shared> {
        let offset = k.shl(at.index, 3u32);
        k.offset(self.base.at(region), offset.cast())
    }

    /// That barrier in the CTA that multiplies.
    fn leaders_barrier(&self, k: &mut Kernel, barrier: Addr<Shared>) -> Addr<Shared> {
        if self.config.cta_group == 1 {
            return barrier;
        }
        let even = k.and(self.rank, !1u32);
        let mapped = k.map_to_rank(barrier, even);
        Addr::new(mapped.base()).at(mapped.offset())
    }

    /// Whether this CTA of a pair multiplies.
    fn is_leader(&self, k: &mut Kernel) -> Reg<Pred> {
        let odd = k.and(self.rank, 1u32);
        k.compare(Cmp::Eq, odd, 0u32)
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
            let empty = self.barrier(k, self.layout.empty.offset, at);
            k.mbarrier_wait(empty, at.phase, "empty");
            let full = self.barrier(k, self.layout.full.offset, at);
            let offset = k.mul(at.index, self.layout.ring.stride);
            let slot = k.offset(self.base.at(self.layout.ring.offset), offset.cast());
            load(k, stage, slot, full);
            at.advance(k);
        });
    }

    /// Loads one operand of a stage: its codes from row `row` on, its scales from atom `atom` on.
    fn load_operand(
        &self,
        k: &mut Kernel,
        which: usize,
        stage: Reg<U32>,
        slot: Addr<Shared>,
        full: Addr<Shared>,
        (row, atom): (Reg<U32>, Reg<U32>),
    ) {
        let options = TmaOptions {
            cta_group: (self.config.cta_group == 2).then_some(CtaGroup::Two),
            ..TmaOptions::default()
        };
        let byte = k.mul(stage, STAGE_K / 2);
        let codes = k.tensor_map_address(&self.codes[which]);
        let place = [byte.cast::<S32>().into(), row.cast::<S32>().into()];
        k.tensor_load(slot.at(self.layout.codes[which]), codes, &place, full, &options);
        // Scale maps count in 8 bytes.
        let word = k.mul(stage, ATOM_STAGE_BYTES / 8);
        let scales = k.tensor_map_address(&self.scales[which]);
        let place = [word.cast::<S32>().into(), atom.cast::<S32>().into()];
        k.tensor_load(slot.at(self.layout.scales[which]), scales, &place, full, &options);
    }

    pub(super) fn load_weights(&self, k: &mut Kernel) {
        for map in self.codes[GATE..].iter().chain(&self.scales[GATE..]) {
            let map = k.tensor_map_address(map);
            k.prefetch_tensor_map(map);
        }
        let at = Position::start(k, 1, self.config.stages);
        self.for_tiles(k, "weight_tiles", |k, _, feature| {
            let atom = k.div(feature, ATOM_ROWS);
            let row = match self.config.cta_group {
                1 => feature,
                _ => {
                    let own = k.mul(self.rank, self.config.n / 2);
                    k.add(feature, own)
                }
            };
            self.fill_ring(k, "weight_stages", at, |k, stage, slot, full| {
                if self.config.cta_group == 2 {
                    let leader = self.is_leader(k);
                    k.when(leader);
                }
                k.mbarrier_arrive_expect_tx(full, self.config.stage_bytes());
                let full = self.leaders_barrier(k, full);
                for half in [GATE, UP] {
                    self.load_operand(k, half, stage, slot, full, (row, atom));
                }
            });
        });
    }

    pub(super) fn load_a(&self, k: &mut Kernel) {
        for map in [&self.codes[X], &self.scales[X]] {
            let map = k.tensor_map_address(map);
            k.prefetch_tensor_map(map);
        }
        k.grid_dependency_wait();
        let at = Position::start(k, 1, self.config.stages);
        self.for_tiles(k, "a_tiles", |k, token, _| {
            let row = self.own_token(k, token);
            let atom = k.div(row, ATOM_ROWS);
            self.fill_ring(k, "a_stages", at, |k, stage, slot, full| {
                let full = self.leaders_barrier(k, full);
                self.load_operand(k, X, stage, slot, full, (row, atom));
            });
        });
    }

    /// A descriptor: the constant `desc` with the shared address put in.
    fn desc(&self, k: &mut Kernel, slot: Addr<Shared>, desc: u64) -> Reg<U64> {
        let address = k.add(slot.base().cast::<U32>(), slot.offset() as u32);
        let field = k.shr(address, 4u32);
        let field = k.convert::<U64, U32>(field);
        k.or(field.cast::<B64>(), desc).cast()
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
        let stage_at = Position::start(k, 0, config.stages);
        let sums_at = Position::start(k, 1, config.accumulators);
        let always = k.compare(Cmp::Eq, self.lane, self.lane);
        self.for_tiles(k, "tiles", |k, token, feature| {
            let stored = self.barrier(k, self.layout.stored.offset, sums_at);
            k.mbarrier_wait(stored, sums_at.phase, "stored");
            k.tcgen05_fence_after();
            let pair = k.mul(sums_at.index, 2 * config.n);
            let sums = Addr::<Tmem>::new(k.add(tmem.base(), pair));
            k.comment("A tile that starts inside an atom finds its scales some columns further.");
            let columns_start = if self.rows_are_tokens() { feature } else { token };
            let inside = k.rem(columns_start, ATOM_ROWS);
            let inside = k.shr(inside, 5u32);
            let columns_tmem = Addr::<Tmem>::new(k.add(tmem.base(), inside));
            let before = k.mov::<U32>(0u32);
            k.for_range("stages", self.first_stage, self.end_stage, 1, |k, stage, _| {
                let full = self.barrier(k, self.layout.full.offset, stage_at);
                k.mbarrier_wait(full, stage_at.phase, "full");
                k.tcgen05_fence_after();
                let offset = k.mul(stage_at.index, self.layout.ring.stride);
                let slot = k.offset(self.base.at(self.layout.ring.offset), offset.cast());
                let first_step = k.mul(stage, STEPS);
                for step in 0..STEPS {
                    let more = k.add(first_step, step);
                    let here = k.compare(Cmp::Lt, more, self.steps);
                    k.if_(here, "step", |k| {
                        let first = k.compare(Cmp::Ne, before, 0u32);
                        let accumulate = if step == 0 { first } else { always };
                        self.multiply_step(k, step, slot, (tmem, columns_tmem), sums, accumulate);
                    });
                }
                k.assign(before, 1u32);
                let empty = self.barrier(k, self.layout.empty.offset, stage_at);
                self.commit(k, empty);
                stage_at.advance(k);
            });
            let done = self.barrier(k, self.layout.done.offset, sums_at);
            self.commit(k, done);
            sums_at.advance(k);
        });
    }

    /// Arrives at `barrier`, in both CTAs of a pair, when what was issued is done.
    fn commit(&self, k: &mut Kernel, barrier: Addr<Shared>) {
        match self.config.cta_group {
            1 => k.tcgen05_commit(CtaGroup::One, barrier),
            _ => {
                let both = k.mov::<B16>(3u16);
                k.tcgen05_commit_multicast(CtaGroup::Two, barrier, both);
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
        let (config, layout) = (self.config, self.layout);
        let atom_desc = tcgen05_smem_desc(0, 16, 128, Swizzle::None);
        let column = |which: usize| layout.scale_columns[which] + step * layout.atoms[which] * ATOM_COLUMNS;
        for which in [X, GATE, UP] {
            for atom in 0..layout.atoms[which] {
                let from = slot.at(layout.scales[which] + atom * ATOM_STAGE_BYTES + step * 512);
                let from = self.desc(k, from, atom_desc);
                let to = rows_tmem.at(column(which) + atom * ATOM_COLUMNS);
                k.tmem_cp_scales(self.group(), to, from.cast());
            }
        }
        let operand = |k: &mut Kernel, which: usize| {
            let tile = &layout.tiles[which];
            let start = self.desc(k, slot.at(layout.codes[which]), tile.tcgen05_desc());
            k.add(start, tile.advance_k(step * 32)).cast::<B64>()
        };
        let x = operand(k, X);
        let rows = ATOM_ROWS * config.cta_group;
        let desc =
            BlockScaledDesc::nvfp4(rows, config.n).encode().expect("`Config::layout` checked the shape");
        let desc = k.mov::<B32>(desc);
        for (half, which) in [GATE, UP].into_iter().enumerate() {
            let weights = operand(k, which);
            let d = sums.at(half as u32 * config.n);
            let group = self.group();
            let (scales_x, scales_w) = (column(X), column(which));
            let (mma, sfa, sfb) = if self.rows_are_tokens() {
                let collector = if half == 0 { Collector::Fill } else { Collector::LastUse };
                let mma = Mma { group, collector, d, a: x.into(), b: weights, desc };
                (mma, rows_tmem.at(scales_x), columns_tmem.at(scales_w))
            } else {
                let mma = Mma { group, collector: Collector::Discard, d, a: weights.into(), b: x, desc };
                (mma, rows_tmem.at(scales_w), columns_tmem.at(scales_x))
            };
            k.tcgen05_mma_scaled(mma, ScaleVector::Nvf4Block16, sfa, sfb, accumulate);
        }
    }
}
