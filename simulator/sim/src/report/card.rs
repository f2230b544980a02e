//! The cards a kernel can be judged for: limits and peak rates.
//!
//! Sources. H100 SXM5: NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.04, table 3 (dense rates at 1830
//! MHz boost). H200 SXM: H200 datasheet (same chip, 4.8 TB/s). B200: Blackwell datasheet of HGX B200 divided by
//! eight (dense rates), 8 TB/s; B300: the same of HGX B300, clock as nvidia-smi gives it. RTX PRO 6000 Blackwell
//! Workstation: RTX Blackwell PRO architecture whitepaper v1.0, appendix. GB10: DGX Spark's datasheet (1 PFLOP/s of
//! sparse FP4, 273 GB/s). Limits per CTA and SM: CUDA C++ Programming Guide, "Compute Capabilities". L2 rates are
//! what streaming reads reach on an H100 (about 7 TB/s for the chip) and are scaled by SM count and clock elsewhere;
//! they are estimates.

use dualgemm_device::Arch;
use dualgemm_ptx::Target;

/// A known card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Card {
    /// H100 SXM5 80 GB, sm_90.
    H100,
    /// H200 SXM 141 GB, sm_90.
    H200,
    /// B200 SXM 180 GB, sm_100.
    B200,
    /// B300 SXM 288 GB, sm_103.
    B300,
    /// RTX PRO 6000 Blackwell Workstation Edition 96 GB, sm_120.
    RtxPro6000,
    /// GB10 of a DGX Spark, 128 GB, sm_121.
    Gb10,
}

/// Limits and peak rates of a card.
#[derive(Debug, Clone, PartialEq)]
pub struct CardData {
    /// Product name.
    pub name: &'static str,
    /// Compute capability.
    pub arch: Arch,
    /// Multiprocessors.
    pub sm_count: u32,
    /// Boost clock the rates are stated at, GHz.
    pub clock_ghz: f64,
    /// Shared memory one CTA can have, bytes.
    pub shared_per_cta: u32,
    /// Shared memory of a multiprocessor, bytes.
    pub shared_per_sm: u32,
    /// L2 cache, bytes.
    pub l2_bytes: u64,
    /// Global memory, bytes.
    pub memory_bytes: u64,
    /// Global memory rate, bytes/s.
    pub memory_rate: f64,
    /// L2 to multiprocessor rate of the chip, bytes/s.
    pub l2_rate: f64,
    /// Shared memory rate of one multiprocessor, bytes per clock.
    pub shared_per_clock: f64,
    /// Dense tensor rates, operations/s (a multiply-add is two): 16-bit, 8-bit and 4-bit inputs.
    pub tensor_rate: [f64; 3],
    /// 32-lane instructions one multiprocessor issues per clock.
    pub issue_per_clock: f64,
}

impl Card {
    /// Every card.
    pub const ALL: [Card; 6] = [Card::H100, Card::H200, Card::B200, Card::B300, Card::RtxPro6000, Card::Gb10];

    /// A card that runs kernels for `target`: an H100 those for earlier ones as well.
    pub const fn of(target: Target) -> Card {
        match target {
            Target::Sm100a | Target::Sm100f => Card::B200,
            Target::Sm103a => Card::B300,
            Target::Sm120a | Target::Sm120f => Card::RtxPro6000,
            Target::Sm121a => Card::Gb10,
            _ => Card::H100,
        }
    }

    /// Its data.
    pub fn data(self) -> CardData {
        let h100 = CardData {
            name: "NVIDIA H100 SXM5 80GB",
            arch: Arch { major: 9, minor: 0 },
            sm_count: 132,
            clock_ghz: 1.83,
            shared_per_cta: 227 << 10,
            shared_per_sm: 228 << 10,
            l2_bytes: 50 << 20,
            memory_bytes: 80 << 30,
            memory_rate: 3.35e12,
            l2_rate: 7.0e12,
            shared_per_clock: 128.0,
            // Hopper has no 4-bit matrix unit: such data are widened to 8 or 16 bits.
            tensor_rate: [989.4e12, 1978.9e12, 1978.9e12],
            issue_per_clock: 4.0,
        };
        match self {
            Card::H100 => h100,
            Card::H200 => CardData {
                name: "NVIDIA H200 SXM 141GB",
                memory_bytes: 141 << 30,
                memory_rate: 4.8e12,
                ..h100
            },
            Card::B200 => CardData {
                name: "NVIDIA B200 SXM 180GB",
                arch: Arch { major: 10, minor: 0 },
                sm_count: 148,
                clock_ghz: 1.85,
                l2_bytes: 126 << 20,
                memory_bytes: 180 << 30,
                memory_rate: 8.0e12,
                l2_rate: 7.9e12,
                tensor_rate: [2250e12, 4500e12, 9000e12],
                ..h100
            },
            Card::B300 => CardData {
                name: "NVIDIA B300 SXM 288GB",
                arch: Arch { major: 10, minor: 3 },
                clock_ghz: 2.032,
                memory_bytes: 288 << 30,
                l2_rate: 8.7e12,
                tensor_rate: [2250e12, 4500e12, 13500e12],
                ..Card::B200.data()
            },
            Card::RtxPro6000 => CardData {
                name: "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
                arch: Arch { major: 12, minor: 0 },
                sm_count: 188,
                clock_ghz: 2.617,
                shared_per_cta: 99 << 10,
                shared_per_sm: 100 << 10,
                l2_bytes: 128 << 20,
                memory_bytes: 96 << 30,
                memory_rate: 1.792e12,
                l2_rate: 1.4e13,
                tensor_rate: [503.8e12, 1007.6e12, 2015.2e12],
                ..h100
            },
            Card::Gb10 => CardData {
                name: "NVIDIA GB10",
                arch: Arch { major: 12, minor: 1 },
                sm_count: 48,
                clock_ghz: 2.418,
                l2_bytes: 24 << 20,
                memory_bytes: 128 << 30,
                memory_rate: 0.273e12,
                l2_rate: 3.4e12,
                tensor_rate: [125e12, 250e12, 500e12],
                ..Card::RtxPro6000.data()
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use dualgemm_device::Device;

    use super::*;
    use crate::{Config, Gpu};

    #[test]
    fn every_target_has_a_card_of_its_generation_that_loads_it() {
        for &target in Target::ALL {
            let card = Card::of(target);
            let digits = target.as_str().trim_start_matches("sm_").trim_end_matches(['a', 'f']);
            let major = digits.parse::<u32>().unwrap() / 10;
            assert_eq!(card.data().arch.major, major.max(9), "{target}");
            let gpu = Gpu::new(Config::default().card(card));
            let text =
                format!(".version 9.0 .target {target} .address_size 64 .visible .entry k() {{ ret; }}");
            gpu.load(&text).unwrap_or_else(|error| panic!("{target}: {error}"));
        }
    }
}
