//! Special registers of a warp: who its lanes are, in which CTA and grid.

use crate::program::Special;

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

impl Ids {
    /// Its value in each lane.
    pub fn get(&self, s: Special) -> [u64; 32] {
        let lane = |f: fn(u32) -> u32| std::array::from_fn(|i| f(i as u32) as u64);
        let c = |a: [u32; 3], i: u8| [a[i as usize] as u64; 32];
        let zip = |f: fn(u32, u32) -> u32| std::array::from_fn(|i| f(self.ctaid[i], self.cluster[i].max(1)));
        match s {
            Special::Tid(i) => self.tid[i as usize].map(u64::from),
            Special::Ntid(i) => c(self.ntid, i),
            Special::Ctaid(i) => c(self.ctaid, i),
            Special::Nctaid(i) => c(self.nctaid, i),
            Special::Clusterid(i) => c(zip(|a, b| a / b), i),
            Special::Nclusterid(i) => c(std::array::from_fn(|i| self.nctaid[i] / self.cluster[i].max(1)), i),
            Special::ClusterCtaid(i) => c(zip(|a, b| a % b), i),
            Special::ClusterNctaid(i) => c(self.cluster, i),
            Special::ClusterCtarank => [self.rank.into(); 32],
            Special::ClusterNctarank => [self.cluster.iter().product::<u32>().into(); 32],
            Special::IsExplicitCluster => [self.clustered.into(); 32],
            Special::Laneid => lane(|i| i),
            Special::Warpid => [self.warp.into(); 32],
            Special::Nwarpid => [self.ntid.iter().product::<u32>().div_ceil(32).into(); 32],
            Special::Smid => [(self.linear_cta % self.sm_count.max(1)).into(); 32],
            Special::Nsmid => [self.sm_count.into(); 32],
            Special::Gridid | Special::Zero => [0; 32],
            Special::LanemaskEq => lane(|i| 1 << i),
            Special::LanemaskLe => lane(|i| u32::MAX >> (31 - i)),
            Special::LanemaskLt => lane(|i| (1 << i) - 1),
            Special::LanemaskGe => lane(|i| u32::MAX << i),
            Special::LanemaskGt => lane(|i| (u32::MAX << i) & !(1 << i)),
            Special::Clock | Special::GlobaltimerLo => [self.clock & u32::MAX as u64; 32],
            Special::ClockHi | Special::GlobaltimerHi => [self.clock >> 32; 32],
            Special::Clock64 | Special::Globaltimer => [self.clock; 32],
            Special::DynamicSmemSize => [self.dynamic_shared.into(); 32],
            Special::TotalSmemSize => [self.total_shared.into(); 32],
        }
    }
}
