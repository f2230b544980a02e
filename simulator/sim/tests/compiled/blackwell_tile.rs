//! One NVFP4 tile on sm_100a: TMA, scales to tensor memory by `tcgen05.cp`, four block-scaled `tcgen05.mma`,
//! commit, load back.

use super::{Host, e2m1, e4m3};
use dualgemm_device::{Args, Device};
use dualgemm_ptx::layout::{Swizzle, TensorDataType, TensorMap};
use dualgemm_sim::{Card, Config};

const PTX: &str = include_str!("../ptx/sm100a_nvfp4_tile.ptx");

fn bytes(n: usize, seed: u32, limit: u8) -> Vec<u8> {
    let mut x = seed;
    (0..n)
        .map(|_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((x >> 16) as u8) % limit
        })
        .collect()
}

/// Place of the scale of row `r`, k-block `j` in the 128x4 layout of 4 blocks.
fn scale_at(r: usize, j: usize) -> usize {
    (j / 4) * 512 + (r % 32) * 16 + (r / 32) * 4 + j % 4
}

fn run(seed: u64, ptx: &str) -> Result<Vec<f32>, String> {
    let host = Host::new(ptx, Config::default().card(Card::B200).seed(seed));
    let map = |data: Vec<u8>, ty, (rows, columns): (u32, u32), pitch, swizzle| {
        let at = host.upload(data.into_iter().map(|byte| [byte])).0;
        let whole = (rows.into(), columns.into());
        host.gpu.tensor_map(&TensorMap::matrix(ty, at, whole, pitch, (rows, columns), swizzle)).unwrap()
    };
    let codes = |seed| map(bytes(128 * 128, seed, 255), TensorDataType::U8, (128, 128), 128, Swizzle::B128);
    let scales = |seed| map(bytes(2048, seed, 0x50), TensorDataType::U64, (1, 256), 2048, Swizzle::None);
    let maps = [codes(1), codes(2), scales(3), scales(4)];
    let d = host.gpu.alloc(128 * 32).unwrap();
    let args = maps.into_iter().fold(Args::new(), Args::tensor_map).ptr(d);
    host.try_run("nvfp4_tile", [1, 1], 128, 40 << 10, args).map_err(|e| e.to_string())?;
    Ok(host.download(d, 128 * 8, f32::from_le_bytes))
}

#[test]
fn a_block_scaled_tile_close() {
    let (a, b) = (bytes(128 * 128, 1, 255), bytes(128 * 128, 2, 255));
    let (sa, sb) = (bytes(2048, 3, 0x50), bytes(2048, 4, 0x50));
    let value = |codes: &[u8], scales: &[u8], r: usize, k: usize| {
        e2m1(codes[r * 128 + k / 2] >> (4 * (k & 1)) & 15) * e4m3(scales[scale_at(r, k / 16)])
    };
    let got = run(0, PTX).unwrap();
    for m in 0..128 {
        for n in 0..8 {
            let terms = (0..256).map(|k| value(&a, &sa, m, k) * value(&b, &sb, n, k));
            let (sum, size) = terms.fold((0.0, 0.0), |(s, t), x| (s + x, t + f64::abs(x)));
            let d = f64::from(got[m * 8 + n]);
            assert!((d - sum).abs() <= 1e-6 * size, "D[{m}][{n}] is {d}, not {sum}");
        }
    }
}

#[test]
fn every_interleaving_gives_the_same_tile_exact() {
    let first = run(0, PTX).unwrap();
    for seed in 1..8 {
        assert_eq!(run(seed, PTX).unwrap(), first);
    }
}

#[test]
fn a_missing_commit_is_a_deadlock() {
    let broken = PTX.replace("tcgen05.commit", "// tcgen05.commit");
    assert!(run(0, &broken).unwrap_err().starts_with("deadlock: "));
}

#[test]
fn only_a_relaxed_wait_needs_the_tensor_fence() {
    let at = PTX.rfind("tcgen05.fence::after_thread_sync").unwrap();
    let acquired = format!("{}//{}", &PTX[..at], &PTX[at..]);
    let relax = |ptx: &str| ptx.replace("try_wait.parity.shared", "try_wait.parity.relaxed.cluster.shared");
    let (first, last) = PTX.split_at(PTX.rfind("mbarrier.try_wait").unwrap());
    let same = run(0, PTX).unwrap();
    assert_eq!(run(0, &acquired).unwrap(), same);
    assert_eq!(run(0, &format!("{first}{}", relax(last))).unwrap(), same);
    let text = run(0, &format!("{first}{}", relax(&acquired[first.len()..]))).unwrap_err();
    assert!(text.contains("tcgen05.fence::after_thread_sync"), "{text}");
}

#[test]
fn a_missing_dealloc_is_a_leak() {
    let broken = PTX.replace("tcgen05.dealloc", "// tcgen05.dealloc");
    assert!(run(0, &broken).unwrap_err().contains("exits with tensor memory allocated"));
}
