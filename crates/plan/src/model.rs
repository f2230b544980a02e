//! What a kernel should take, from what it does: enough to leave out configurations that cannot be the best, and to
//! choose one where nothing was measured.
//!
//! Rates are those of Hopper per multiprocessor and clock. Constants were fitted to 3000 measurements on an H200: 161 problems,
//! gate/up and linear layers, C in 16 bits and nvfp4, 1 to 1024 tokens, alone and in groups
//! (`benchmarks/record/h200-plans-2026-11-30.md`). What the model takes there is 0.8 % slower than the best on average.

use dualgemm_device::DeviceInfo;
use dualgemm_gemm::{AFormat, DualGemmDesc, Operation, OutFormat};
use dualgemm_kernels::fp8::config::Config as Fp8;
use dualgemm_kernels::fused::Config;
use dualgemm_kernels::parts::variant::Scheduler;
use dualgemm_kernels::plain::config::Config as Plain;
use dualgemm_kernels::sm80::config::Config as Portable;
use dualgemm_kernels::sm90a::config::Config as Sm90a;
use dualgemm_kernels::sm90a::pack::CHUNK_FEATURES;
use dualgemm_kernels::warpwise::config::Config as Warpwise;

use crate::blackwell;

/// Clocks per second under a matrix load.
const CLOCK: f64 = 1.75e9;
/// Multiplications of 16-bit numbers per clock.
const MULTIPLY: f64 = 2048.0;
/// Weights of a chunk of the pack, 64 rows by 64 of K.
const CHUNK: f64 = 64.0 * 64.0;
/// Clocks of a scheduler to widen a chunk to f16: 75 instructions and the start of four `wgmma`. bf16 takes 12 instructions more.
const WIDEN: f64 = 94.0;
const WIDEN_TO_BF16: f64 = 12.0;
/// Clocks of a tile to wait for a stage of its ring, where K groups do not hide each other's.
const STAGE: f64 = 8.0;
/// Clocks of a warp for each stage of a ring whose stages are counted: CTAs of one tile have them as numbers in the text. Beside
/// multiplications by 256 tokens they do not show.
const COUNTING: f64 = 36.0;
/// What of widening shows beside multiplications that take longer, and of multiplications beside widening.
const WIDENING_SHOWS: f64 = 0.25;
const MULTIPLYING_SHOWS: f64 = 0.6;
/// Bytes per clock from L2 to shared memory that a multiprocessor gets when all ask.
const FILL: f64 = 54.0;
/// Start, first loads and last stores of a kernel, and of every further CTA on a multiprocessor, µs.
const ENDS: f64 = 2.4;
/// The same of a further tile whose loads overlap the stores before.
const NEXT_TILE: f64 = 1.6;
/// Tiles finished by their neighbours, and halves of tiles exchanged by two CTAs, µs: at the end, or while they multiply.
const SHARED_TILES: f64 = 10.0;
const EXCHANGE: f64 = 1.45;
const EXCHANGE_MEANWHILE: f64 = 0.6;
/// The same of a row group in common: 25.9 µs at 64x14336x4096, halfway between three and four row groups 24.9.
const COMMON: f64 = 0.85;

/// Bytes per second from memory: HBM3e, which cards of more than 128 GB have, or HBM3.
fn memory(info: &DeviceInfo) -> f64 {
    if info.memory_bytes > 128 << 30 { 4.3e12 } else { 3.0e12 }
}

/// Microseconds of a strategy's kernel, one configuration or two that share a problem, for rows in about so many groups; none
/// where a kernel of that name is not modelled on this card.
pub(crate) fn estimate_us(
    desc: &DualGemmDesc,
    groups: usize,
    info: &DeviceInfo,
    (scheduler, apart): (Scheduler, bool),
    configs: &[Config],
) -> Option<f64> {
    Some(match configs {
        [Config::Sm90a(config)] if apart => apart_us(desc, info, config),
        [Config::Sm90a(config)] => grouped_us(desc, groups, info, config, scheduler),
        [main @ Config::Sm90a(first), rest @ Config::Sm90a(second)] => {
            let features = full_waves((desc.m, desc.n), info.sm_count, main, rest)?;
            let part = |n, config| fused_us(&DualGemmDesc { n, ..*desc }, info, config, scheduler);
            part(features, first) + part(desc.n - features, second)
        }
        [Config::Warpwise(config)] => warpwise_us(desc, groups, info, config),
        [Config::Plain(config)] => plain_us(desc, info, config),
        [Config::Fp8(config)] => fp8_us(desc, info, config),
        [Config::Sm80(config)] => portable_us(desc, groups, info, config),
        [config @ (Config::Sm100a(_) | Config::Sm120a(_))] => native_us(desc, groups, info, config)?,
        _ => return None,
    })
}

/// How many features `main` takes in full waves, so that whole, smaller tiles of `rest` are left; none if there is no
/// full wave or nothing left.
pub(crate) fn full_waves((m, n): (usize, usize), sms: u32, main: &Config, rest: &Config) -> Option<usize> {
    let (Config::Sm90a(main), Config::Sm90a(rest)) = (main, rest) else { return None };
    let one_tile_each = |c: &Sm90a| c.ctas_per_sm == 1 && c.cluster() == 1;
    let area = |c: &Sm90a| c.features() * c.tokens;
    if !one_tile_each(main) || !one_tile_each(rest) || area(rest) >= area(main) {
        return None;
    }
    let [token_tiles, feature_tiles] = main.tiles(m, n);
    let waves = token_tiles * feature_tiles / sms.max(1);
    let tiles = waves * sms / token_tiles.max(1);
    let features = tiles as usize * main.features() as usize;
    let left = n.checked_sub(features)?;
    (features > 0 && left > 0 && left.is_multiple_of(rest.features() as usize)).then_some(features)
}

/// Microseconds of Blackwell's kernels. Groups of rows with weights of their own are to tiles and memory what so many times
/// the features would be.
fn native_us(desc: &DualGemmDesc, groups: usize, info: &DeviceInfo, config: &Config) -> Option<f64> {
    let (groups, rows) = groups_of(desc.m, groups);
    // Gate and up of a linear layer are the halves of its features.
    let n = match desc.op {
        Operation::GateUp => desc.n,
        Operation::Linear => desc.n.div_ceil(2),
    };
    // Each group ends with whole tiles.
    let size = |tiles: usize, features: u32| match groups {
        1 => (rows, n, desc.k),
        _ => (rows, groups * tiles * features as usize, desc.k),
    };
    let kernel_us = match config {
        Config::Sm100a(config) => {
            let size = size(config.feature_tiles(n), config.tile_features());
            blackwell::Estimate::new(config, size).ok()?.kernel_us()
        }
        Config::Sm120a(config) => {
            let size = size(n.div_ceil(config.features as usize), config.features);
            blackwell::workstation_us(config, size, info)
        }
        _ => return None,
    };
    Some(kernel_us + ENDS)
}

/// Microseconds of the fused kernel, prologue and all.
fn fused_us(desc: &DualGemmDesc, info: &DeviceInfo, config: &Sm90a, scheduler: Scheduler) -> f64 {
    grouped_us(desc, 1, info, config, scheduler)
}

/// How many groups have rows, and how many each, if all have as many.
fn groups_of(m: usize, groups: usize) -> (usize, usize) {
    let groups = groups.clamp(1, m.max(1));
    (groups, m.div_ceil(groups))
}

/// Tiles that hold `m` rows in groups, each with tiles of its own: on average, where rows choose groups by chance. A group then
/// has more than `r` rows as often as Poisson's distribution says.
fn token_tiles(m: usize, groups: usize, tokens: u32) -> f64 {
    let (mean, tokens) = (m as f64 / groups.max(1) as f64, tokens as usize);
    if groups <= 1 {
        return m.div_ceil(tokens) as f64;
    }
    if mean > 600.0 {
        // Far from any tile's edge, and e^-mean is beyond f64.
        return groups as f64 * (mean / tokens as f64 + 0.5);
    }
    // The chance of exactly `rows`, and of at most as many; a group has one tile more than multiples of `tokens` that its rows exceed.
    let (mut exactly, mut tiles) = ((-mean).exp(), 0.0);
    let mut at_most = exactly;
    for rows in 0.. {
        let more = 1.0 - at_most;
        if rows % tokens == 0 {
            tiles += more;
        }
        if rows as f64 > mean && more < 1e-4 {
            break;
        }
        exactly *= mean / (rows + 1) as f64;
        at_most += exactly;
    }
    groups as f64 * tiles
}

/// Pairs of weight rows: a tile holds pairs of them, also of a linear layer.
fn pairs(desc: &DualGemmDesc) -> usize {
    (desc.n * desc.op.matrices()).div_ceil(2)
}

/// Microseconds to bring weights, so many times, and A from memory and C to it.
fn memory_us(desc: &DualGemmDesc, readings: f64, info: &DeviceInfo) -> f64 {
    let (m, k) = (desc.m as f64, desc.k as f64);
    let c = m * desc.n as f64 * desc.out.bits_per_element() / 8.0;
    (readings * pairs(desc) as f64 * k * 1.125 + m * k * 2.0 + c) / memory(info) * 1e6
}

/// Microseconds of work that goes on while memory is read: the longer of both, and a tenth of the shorter, which shows at either end.
fn together(compute: f64, memory: f64) -> f64 {
    compute.max(memory) + 0.1 * compute.min(memory)
}

/// How often each of so many places gets a tile, in groups on average: what is left then by far does not fill the last turn.
fn turns(tiles: f64, places: f64, groups: usize, uneven: f64) -> f64 {
    if groups > 1 { (tiles / places + uneven).max(1.0) } else { (tiles / places).ceil() }
}

/// Microseconds of the fused kernel for rows in groups.
fn grouped_us(
    desc: &DualGemmDesc,
    groups: usize,
    info: &DeviceInfo,
    config: &Sm90a,
    scheduler: Scheduler,
) -> f64 {
    let half = if config.common { 0.5 } else { 0.0 };
    let (row_groups, tokens) = (f64::from(config.row_groups) - half, f64::from(config.tokens));
    let token_tiles = token_tiles(desc.m, groups, config.tokens);
    let tiles = token_tiles * f64::from(config.tiles(desc.m, pairs(desc))[1]);
    let (sms, blocks) = (f64::from(info.sm_count.max(1)), (desc.k as f64 / 64.0).ceil());
    let (split, ctas) = (f64::from(config.k_split), f64::from(config.ctas_per_sm));
    // Clocks of a K block of 64 in one tile.
    let multiply = CHUNK * tokens / MULTIPLY;
    let to_bf16 = if desc.a_compute() == AFormat::Bf16 { WIDEN_TO_BF16 } else { 0.0 };
    let counting = if scheduler == Scheduler::Grid || config.tokens >= 256 { 0.0 } else { COUNTING };
    let blocks_per_stage = f64::from(config.blocks_per_stage);
    let widen = WIDEN + to_bf16 + counting / blocks_per_stage;
    let chunk = (multiply + WIDENING_SHOWS * widen).max(widen + MULTIPLYING_SHOWS * multiply);
    let fill = (tokens * 128.0 + row_groups * CHUNK * 0.5625) / FILL;
    let wait = if config.k_groups > 1 { 0.0 } else { STAGE / blocks_per_stage };
    let block = (row_groups * chunk).max(fill) + wait;
    let turns = match scheduler {
        Scheduler::Grid | Scheduler::Persistent => turns(tiles * split, sms * ctas, groups, 0.55),
        Scheduler::StreamK => tiles / sms,
    };
    // CTAs that share a multiprocessor take turns.
    let compute = turns * ctas * blocks / split * block / CLOCK * 1e6;
    // Tiles of few tokens that read the same weights at once gain nothing from the cache (measured at 16x4096x14336).
    let readings = if config.k_groups > 1 || groups > 1 { token_tiles } else { 1.0 };
    let more = (turns - 1.0).max(0.0);
    let exchange = match (config.k_split > 1, config.common) {
        (true, _) if config.k_groups > 1 => EXCHANGE * turns,
        (true, _) => EXCHANGE_MEANWHILE * turns,
        (false, true) => COMMON * turns,
        (false, false) => 0.0,
    };
    let ends = match scheduler {
        Scheduler::Grid => ENDS + more * ENDS,
        Scheduler::Persistent => ENDS + more * NEXT_TILE,
        Scheduler::StreamK => ENDS + more * NEXT_TILE + SHARED_TILES,
    };
    together(compute, memory_us(desc, readings, info)) + ends + exchange
}

/// Microseconds of the kernel for a few rows. Its warps decode and multiply one after the other, four to a scheduler:
/// 415 clocks for a chunk and a warp, 70 of them for eight tokens' multiplications, and 65 more to decode to bf16.
fn warpwise_us(desc: &DualGemmDesc, groups: usize, info: &DeviceInfo, config: &Warpwise) -> f64 {
    let (tokens, halves) = (f64::from(config.tokens), f64::from(config.halves));
    let (sms, parts) = (f64::from(info.sm_count.max(1)), f64::from(config.k_groups));
    let readings = token_tiles(desc.m, groups, config.tokens);
    let chunks = ((desc.k as f64 / 64.0).ceil() / parts).ceil() * parts * (halves / 2.0).max(0.6);
    // With halves of chunks warps end apart, and those that are left hide less from each other.
    let uneven = if config.halves % 2 == 1 && config.halves > 1 { 1.06 } else { 1.0 };
    let bf16 = if desc.a_compute() == AFormat::Bf16 { 65.0 } else { 0.0 };
    let chunk = 345.0 + bf16 + 70.0 * (tokens / 8.0).ceil();
    let of_tile = pairs(desc).div_ceil(16 * config.halves as usize);
    // Groups of a row each may be as many as there are rows: where even then all CTAs run at once, nothing is left for another turn.
    let most = (desc.m * of_tile) as f64 / sms;
    let at_once = groups > 1 && most <= f64::from(config.ctas_per_sm());
    let turns = if at_once { most.ceil() } else { turns(of_tile as f64 * readings, sms, groups, 0.3) };
    // Two warps of a scheduler hide less of each other than three, and of experts three less than four: measured at 16 and 2 tokens.
    let few = if groups > 1 { 12.0 } else { 8.0 };
    let few_warps = if f64::from(config.warps()) * turns.min(2.0) <= few { 1.08 } else { 1.0 };
    let compute = turns * chunks / 4.0 * chunk * uneven * few_warps / CLOCK * 1e6;
    // Two CTAs of a multiprocessor hide each other's ends, but for groups, where each looks for its own first; if all start at
    // once, they do so while the kernel before ends.
    let next = match (groups > 1, at_once) {
        (true, true) => 0.5 * (turns - 1.0) - 2.5,
        (true, false) => 0.95 * (turns - 1.0),
        (false, _) => (1.1 * (turns / 2.0 - 1.0)).max(0.0),
    };
    together(compute, memory_us(desc, readings, info)) + ENDS - 0.1 + next
}

/// Microseconds of gate and up in launches of their own: each has half of the rows of weights, and gate's sums, f32, are
/// written and read.
fn apart_us(desc: &DualGemmDesc, info: &DeviceInfo, config: &Sm90a) -> f64 {
    let each = DualGemmDesc { n: desc.n.div_ceil(2), ..*desc };
    let sums = desc.m as f64 * desc.n as f64 * 8.0 / memory(info) * 1e6;
    2.0 * fused_us(&each, info, config, Scheduler::Grid) + sums
}

/// Microseconds of the e4m3 kernel, prologue and all: nothing is widened, products take half as long, and weights have 8
/// bits.
fn fp8_us(desc: &DualGemmDesc, info: &DeviceInfo, config: &Fp8) -> f64 {
    let (m, n, k) = (desc.m as f64, desc.n as f64, desc.k as f64);
    let (tokens, rows) = (f64::from(config.tokens), 2.0 * f64::from(config.features()));
    let tiles = (m / tokens).ceil() * (n / f64::from(config.features())).ceil();
    let waves = (tiles / f64::from(info.sm_count.max(1))).ceil();
    let each = (rows * tokens.max(16.0) / (2.0 * MULTIPLY)).max((tokens + rows) / FILL);
    let bytes = n * k * 2.0 + m * k + m * n * desc.out.bits_per_element() / 8.0;
    (waves * k * each / CLOCK * 1e6).max(bytes / memory(info) * 1e6) + 2.0 * ENDS
}

/// Microseconds of the kernel by `mma.sync`: half of what the units do at 1.4 GHz, and half of what memory gives. Each
/// tile widens its weights anew, in registers that multiply meanwhile.
fn portable_us(desc: &DualGemmDesc, groups: usize, info: &DeviceInfo, config: &Portable) -> f64 {
    let (groups, rows) = groups_of(desc.m, groups);
    // A chunk of the pack has twice as many features of a linear layer.
    let linear = desc.op == Operation::Linear;
    let (m, n, k) = (rows as f64, desc.n as f64 / if linear { 2.0 } else { 1.0 }, desc.k as f64);
    let (tokens, features) = (f64::from(config.tokens), f64::from(config.chunks * CHUNK_FEATURES as u32));
    let sms = f64::from(info.sm_count.max(1));
    let tiles = groups as f64 * (m / tokens).ceil() * (n / features).ceil();
    // Two CTAs share a multiprocessor.
    let waves = (tiles / (2.0 * sms)).ceil() * 2.0;
    let tile = 2.0 * features * k * (tokens.max(16.0) / (0.5 * 1024.0) + 2.0 * WIDEN / CHUNK);
    let memory = groups as f64 * n * k * 1.125 / (0.5 * 15e9 * sms) * 1e6;
    // C in nvfp4 is a kernel of its own.
    let kernels = if matches!(desc.out, OutFormat::Nvfp4 { .. }) { 3.0 } else { 2.0 };
    (waves * tile / 1.4e3).max(memory) + kernels * ENDS
}

/// Microseconds of the kernel without prepack, prologue and all: scales are fetched one by one, which costs as much again
/// as widening.
fn plain_us(desc: &DualGemmDesc, info: &DeviceInfo, config: &Plain) -> f64 {
    let (m, n, k) = (desc.m as f64, desc.n as f64, desc.k as f64);
    let (tokens, rows) = (f64::from(config.tokens), f64::from(config.row_groups * 64));
    let tiles = (m / tokens).ceil() * (2.0 * n / rows).ceil();
    let waves = (tiles / f64::from(info.sm_count.max(1))).ceil();
    let tile = rows * k * (tokens.max(16.0) / MULTIPLY + 2.0 * WIDEN / CHUNK);
    (waves * tile / CLOCK * 1e6).max(n * k * 1.125 / memory(info) * 1e6) + 2.0 * ENDS
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use dualgemm_device::Arch;
    use dualgemm_formats::BlockFormat;

    /// What an H100 says of itself.
    pub(crate) fn h100() -> DeviceInfo {
        DeviceInfo {
            name: "H100".into(),
            arch: Arch { major: 9, minor: 0 },
            sm_count: 132,
            shared_per_cta: 227 << 10,
            shared_per_sm: 228 << 10,
            registers_per_sm: 65536,
            l2_bytes: 50 << 20,
            memory_bytes: 80 << 30,
        }
    }

    fn best(m: usize, n: usize, k: usize) -> (f64, String) {
        let desc = DualGemmDesc {
            out: OutFormat::F16,
            ..DualGemmDesc::new(m, n, k, AFormat::F16, BlockFormat::Nvfp4)
        };
        Sm90a::MENU
            .into_iter()
            .map(|config| (fused_us(&desc, &h100(), &config, Scheduler::Grid), config.name()))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .unwrap()
    }

    /// Measured on an H100: `benchmarks/record/h100-kernel-2026-11-28.csv`.
    #[test]
    fn the_best_configuration_is_expected_to_take_what_was_measured_close() {
        for ((m, n, k), measured) in [
            ((256, 4096, 7168), 40.0),
            ((512, 4096, 7168), 70.0),
            ((256, 3072, 4096), 20.0),
            ((512, 3072, 7168), 55.5),
            ((1, 4096, 7168), 12.7),
            ((16, 4096, 7168), 13.1),
            ((64, 4096, 7168), 16.9),
            ((128, 4096, 7168), 23.3),
            ((1, 14336, 4096), 22.3),
            ((2048, 14336, 4096), 595.0),
        ] {
            let (expected, name) = best(m, n, k);
            let ratio: f64 = expected / measured;
            assert!((0.75..1.3).contains(&ratio), "{m}x{n}x{k}: {expected:.1} of {measured} by {name}");
        }
    }

    /// Measured on H200s: `benchmarks/record/h200-2026-12-01.md`.
    #[test]
    fn ctas_of_experts_run_at_once_where_that_was_faster() {
        let h200 = DeviceInfo { memory_bytes: 141 << 30, ..h100() };
        // Of gpt-oss, DeepSeek-V3 and experts of 768: rows, features, halves of gate/up's CTAs and of down's.
        for (rows, experts, (n, k), halves) in [
            (4, 128, (2880, 2880), [6, 3]),
            (8, 128, (2880, 2880), [6, 6]),
            (12, 128, (2880, 2880), [6, 5]),
            (16, 128, (2880, 2880), [12, 6]),
            (20, 128, (2880, 2880), [6, 7]),
            (24, 128, (2880, 2880), [6, 6]),
            (8, 256, (2048, 7168), [8, 7]),
            (16, 256, (2048, 7168), [8, 8]),
            (32, 256, (2048, 7168), [4, 8]),
            (8, 128, (768, 2048), [3, 4]),
            (16, 128, (768, 2048), [6, 8]),
            (32, 128, (768, 2048), [12, 8]),
            (48, 128, (768, 2048), [8, 8]),
        ] {
            let gate_up = DualGemmDesc::new(rows, n, k, AFormat::Bf16, BlockFormat::Mxfp4);
            let found =
                [gate_up, DualGemmDesc { n: k, k: n, op: Operation::Linear, ..gate_up }].map(|desc| {
                    let us = |config: &Warpwise| warpwise_us(&desc, experts, &h200, config);
                    let few = Warpwise::menu().filter(|c| c.tokens == 2);
                    few.min_by(|a, b| us(a).total_cmp(&us(b))).unwrap().halves
                });
            assert_eq!(found, halves, "{rows} rows of {experts} experts of {n}x{k}");
        }
    }

    #[test]
    fn more_work_never_takes_less_time() {
        for config in Sm90a::MENU {
            let grouped = |m, n, k, groups| {
                let desc = DualGemmDesc::new(m, n, k, AFormat::F16, BlockFormat::Nvfp4);
                [Scheduler::Grid, Scheduler::Persistent, Scheduler::StreamK]
                    .map(|scheduler| grouped_us(&desc, groups, &h100(), &config, scheduler))
            };
            let time = |m, n, k| grouped(m, n, k, 1);
            let small = time(100, 2000, 4096);
            let experts = [grouped(100, 2000, 4096, 8), grouped(100, 2000, 4096, 1000)];
            assert!(experts[0].iter().zip(experts[1]).all(|(a, b)| *a <= b), "{}", config.name());
            for bigger in [time(400, 2000, 4096), time(100, 8000, 4096), time(100, 2000, 8192), experts[0]] {
                assert!(small.iter().zip(bigger).all(|(a, b)| *a <= b), "{}", config.name());
            }
        }
    }
}
