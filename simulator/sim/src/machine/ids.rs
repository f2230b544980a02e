//! Special registers of a warp: who its lanes are, in which CTA and grid.

/// What special registers read.
#[derive(Debug, Default, Clone)]
pub struct Ids {
    pub tid: [[u32; 32]; 3],
    pub ntid: [u32; 3],
    pub ctaid: [u32; 3],
    pub nctaid: [u32; 3],
    /// CTAs of a cluster.
    pub cluster: [u32; 3],
    /// Rank in the cluster.
    pub rank: u32,
    /// Warp in the CTA.
    pub warp: u32,
    /// Position of the CTA in the grid, which stands for the multiprocessor.
    pub linear_cta: u32,
    /// Multiprocessors.
    pub sm_count: u32,
    /// Dynamic shared memory, bytes.
    pub dynamic_shared: u32,
    /// All shared memory, bytes.
    pub total_shared: u32,
    /// Whether the launch has clusters.
    pub clustered: bool,
    /// Simulated clock.
    pub clock: u64,
}

/// A special register: its name, and from who the warp is and a component (0 to 2) its value in each lane.
pub type SpecialRegister = (&'static str, fn(&Ids, usize) -> [u64; 32]);

/// How many of the first special registers have components.
pub const VECTORS: usize = 8;

pub const SPECIALS: &[SpecialRegister] = &[
    ("%tid", |ids, i| ids.tid[i].map(u64::from)),
    ("%ntid", |ids, i| all(ids.ntid[i])),
    ("%ctaid", |ids, i| all(ids.ctaid[i])),
    ("%nctaid", |ids, i| all(ids.nctaid[i])),
    ("%clusterid", |ids, i| all(ids.ctaid[i] / ids.cluster[i].max(1))),
    ("%nclusterid", |ids, i| all(ids.nctaid[i] / ids.cluster[i].max(1))),
    ("%cluster_ctaid", |ids, i| all(ids.ctaid[i] % ids.cluster[i].max(1))),
    ("%cluster_nctaid", |ids, i| all(ids.cluster[i])),
    ("%cluster_ctarank", |ids, _| all(ids.rank)),
    ("%cluster_nctarank", |ids, _| all(ids.cluster.iter().product::<u32>())),
    ("%is_explicit_cluster", |ids, _| all(ids.clustered)),
    ("%laneid", |_, _| each(|lane| lane)),
    ("%warpid", |ids, _| all(ids.warp)),
    ("%nwarpid", |ids, _| all(ids.ntid.iter().product::<u32>().div_ceil(32))),
    ("%smid", |ids, _| all(ids.linear_cta % ids.sm_count.max(1))),
    ("%nsmid", |ids, _| all(ids.sm_count)),
    ("%lanemask_eq", |_, _| each(|lane| 1 << lane)),
    ("%lanemask_le", |_, _| each(|lane| u32::MAX >> (31 - lane))),
    ("%lanemask_lt", |_, _| each(|lane| (1 << lane) - 1)),
    ("%lanemask_ge", |_, _| each(|lane| u32::MAX << lane)),
    ("%lanemask_gt", |_, _| each(|lane| (u32::MAX << lane) & !(1 << lane))),
    ("%clock", |ids, _| all(ids.clock as u32)),
    ("%clock_hi", |ids, _| all(ids.clock >> 32)),
    ("%clock64", |ids, _| all(ids.clock)),
    ("%globaltimer", |ids, _| all(ids.clock)),
    ("%globaltimer_lo", |ids, _| all(ids.clock as u32)),
    ("%globaltimer_hi", |ids, _| all(ids.clock >> 32)),
    ("%dynamic_smem_size", |ids, _| all(ids.dynamic_shared)),
    ("%total_smem_size", |ids, _| all(ids.total_shared)),
    ("%aggr_smem_size", |ids, _| all(ids.total_shared)),
    ("%gridid", zero),
    ("%current_graph_exec", zero),
    ("%envreg", zero),
    ("%pm", zero),
];

fn all(value: impl Into<u64>) -> [u64; 32] {
    [value.into(); 32]
}

fn each(of: impl Fn(u32) -> u32) -> [u64; 32] {
    std::array::from_fn(|lane| of(lane as u32).into())
}

fn zero(_: &Ids, _: usize) -> [u64; 32] {
    [0; 32]
}
