//! Kernels with CUDA's C++ libraries and inline PTX, compiled by nvcc (`../nvcc/library.cu`), against results
//! computed here.

use super::Host;
use dualgemm_device::{Args, Device, DevicePtr};
use dualgemm_ptx::layout::{Swizzle, TensorDataType, TensorMap};
use dualgemm_sim::Config;
use half::{bf16, f16};

const PTX: &str = include_str!("../nvcc/library.ptx");

fn host() -> Host {
    Host::new(PTX, Config::default())
}

fn values(n: usize, seed: usize) -> Vec<i32> {
    (0..n).map(|i| ((i + seed) as i32).wrapping_mul(7919).rem_euclid(1000) - 300).collect()
}

/// 2 A B + C by `wmma`, with values that are exact in every type; A and B by rows or by columns.
fn wmma<const T: usize, const A: usize>(
    name: &str,
    [m, n, k]: [usize; 3],
    tile: [usize; 2],
    [a_rows, b_rows]: [bool; 2],
    encode: impl Fn(i32) -> [u8; T],
    (write, read): (impl Fn(i32) -> [u8; A], fn([u8; A]) -> f64),
) {
    let h = host();
    let unsigned = name.contains("u8");
    let small = |n: usize, seed| -> Vec<i32> {
        values(n, seed).iter().map(|v| v.rem_euclid(7) - if unsigned { 0 } else { 3 }).collect()
    };
    let (a, b, c) = (small(m * k, 1), small(k * n, 2), small(m * n, 3));
    let da = h.upload(a.iter().map(|v| encode(*v)));
    let db = h.upload(b.iter().map(|v| encode(*v)));
    let dc = h.upload(c.iter().map(|v| write(*v)));
    let args = Args::new().ptr(da).ptr(db).ptr(dc).i32(m as i32).i32(n as i32).i32(k as i32);
    h.run(name, [(n / tile[1]) as u32, (m / tile[0]) as u32], 32, 0, args);
    for (i, got) in h.download(dc, m * n, read).into_iter().enumerate() {
        let (row, col) = (i / n, i % n);
        let at_a = |kk: usize| a[if a_rows { row * k + kk } else { kk * m + row }];
        let at_b = |kk: usize| b[if b_rows { kk * n + col } else { col * k + kk }];
        let product: i32 = (0..k).map(|kk| at_a(kk) * at_b(kk)).sum();
        let want = if name == "wmma_tf32" { product } else { 2 * product + c[i] };
        assert_eq!(got, f64::from(want), "{name}: C[{row}][{col}]");
    }
}

#[test]
fn wmma_of_every_type_and_shape_exact() {
    let half = |v: i32| f16::from_f32(v as f32).to_le_bytes();
    let brain = |v: i32| bf16::from_f32(v as f32).to_le_bytes();
    let byte = |v: i32| [v as u8];
    let float = |v: i32| (v as f32).to_le_bytes();
    let double = |v: i32| f64::from(v).to_le_bytes();
    let to_float = (float, (|b| f32::from_le_bytes(b).into()) as fn([u8; 4]) -> f64);
    let to_int = (|v: i32| v.to_le_bytes(), (|b| i32::from_le_bytes(b).into()) as fn([u8; 4]) -> f64);
    let to_half = (half, (|b| f16::from_le_bytes(b).into()) as fn([u8; 2]) -> f64);
    let to_double = (double, f64::from_le_bytes as fn([u8; 8]) -> f64);
    wmma("wmma_f16_f32", [32, 48, 48], [16, 16], [true, true], half, to_float);
    wmma("wmma_f16_f16", [32, 48, 48], [16, 16], [false, false], half, to_half);
    wmma("wmma_f16_32x8", [64, 16, 32], [32, 8], [true, false], half, to_float);
    wmma("wmma_bf16_8x32", [16, 64, 32], [8, 32], [false, true], brain, to_float);
    wmma("wmma_s8", [32, 48, 48], [16, 16], [true, false], byte, to_int);
    wmma("wmma_u8_32x8", [64, 16, 32], [32, 8], [true, true], byte, to_int);
    wmma("wmma_f64", [16, 24, 20], [8, 8], [true, false], double, to_double);
    wmma("wmma_tf32", [32, 48, 40], [16, 16], [true, false], float, to_float);
}

#[test]
fn a_pipeline_of_block_copies_exact() {
    let h = host();
    let (n, batches) = (96, 7);
    let x = values(n * batches, 0);
    let (dx, out) = (h.ints(&x), h.ints(vec![0; n]));
    h.run("pipelined", [1, 1], n as u32, 8 * n as u32, Args::new().ptr(dx).ptr(out).i32(batches as i32));
    let want: Vec<i32> =
        (0..n).map(|t| (0..batches).map(|b| x[b * n + (t * 5 + 1) % n] * (b as i32 + 1)).sum()).collect();
    assert_eq!(h.download(out, n, i32::from_le_bytes), want);
}

#[test]
fn asynchronous_copies_of_both_libraries_exact() {
    let h = host();
    let x = values(512, 0);
    let (dx, out) = (h.ints(&x), h.ints([0; 256]));
    h.run("async_copy", [1, 1], 64, 0, Args::new().ptr(dx).ptr(out));
    let want: Vec<i32> = (0..256).map(|i| x[255 - i] * 3 + x[256 + (i ^ 1)]).collect();
    assert_eq!(h.download(out, 256, i32::from_le_bytes), want);
}

#[test]
fn scans_reductions_and_groups_of_a_warp_exact() {
    let h = host();
    let x = values(64, 0);
    let (dx, out) = (h.ints(&x), h.ints([0; 512]));
    h.run("warp_level", [1, 1], 64, 0, Args::new().ptr(dx).ptr(out));
    let got = h.download(out, 512, i32::from_le_bytes);
    for (i, got) in got.chunks_exact(8).enumerate() {
        let (warp, lane) = (&x[i / 32 * 32..][..32], i % 32);
        let v = x[i];
        let inclusive: i32 = warp[..=lane].iter().sum();
        let any = i32::from(warp.iter().any(|v| *v > 690));
        let reduced = warp.iter().sum::<i32>() ^ warp.iter().fold(0, |a, b| a ^ b);
        let alike = |v: &&i32| **v & 7 == x[i] & 7;
        let labeled = warp.iter().filter(alike).count() * 100 + warp[..lane].iter().filter(alike).count();
        let odd = |v: &&i32| **v & 1 != 0;
        let last = warp.iter().rfind(odd).copied().unwrap_or(0);
        let s = if v & 1 != 0 { last + warp[..lane].iter().filter(odd).count() as i32 * 7 } else { 0 };
        let top = *warp.iter().max().unwrap();
        let want =
            [inclusive, inclusive - v, top, any * 2 + 1, reduced, labeled as i32, s, warp[(lane + 5) & 31]];
        assert_eq!(got, want, "thread {i}");
    }
}

#[test]
fn byte_and_half_word_arithmetic_exact() {
    let h = host();
    let a: Vec<i32> = values(64, 0).iter().map(|v| v.wrapping_mul(90_001_237)).collect();
    let b: Vec<i32> = values(64, 9).iter().map(|v| v.wrapping_mul(70_203_011)).collect();
    let x: Vec<f16> = (0..128).map(|i| f16::from_f32((i as f32 - 60.0) * 0.037)).collect();
    let (da, db, out) = (h.ints(&a), h.ints(&b), h.ints([0; 256]));
    let (dx, dy) = (h.upload(x.iter().map(|v| v.to_le_bytes())), h.ints([0; 64]));
    h.run("small_dots", [1, 1], 64, 0, Args::new().ptr(da).ptr(db).ptr(out).ptr(dx).ptr(dy));
    let got = h.download(out, 256, i32::from_le_bytes);
    for (i, got) in got.chunks_exact(4).enumerate() {
        let (p, q) = (a[i].to_le_bytes(), b[i].to_le_bytes());
        let (sp, sq) = (p.map(|v| v as i8 as i32), q.map(|v| v as i8 as i32));
        let (lo, hi) = (a[i] as i16 as i32, a[i] >> 16);
        let dot = |from: usize| lo * sq[from] + hi * sq[from + 1];
        let s = (0..4).map(|k| sp[k] * sq[k]).sum::<i32>() + 5 + (dot(0) + 1) * 3 + dot(2);
        let u: i32 = (0..4).map(|k| i32::from(p[k]) * i32::from(q[k])).sum();
        let bytes = |f: fn(u8, u8) -> u8| i32::from_le_bytes(std::array::from_fn(|k| f(p[k], q[k])));
        let max = |s: i32| (a[i] << s >> 16).max(b[i] << s >> 16) & 0xffff;
        let video = bytes(u8::wrapping_add) ^ ((max(0) << 16) | max(16)) ^ bytes(u8::abs_diff);
        let funnel = (b[i] << 7) | (a[i] as u32 >> 25) as i32;
        let permuted = (a[i] & 0xffff) | b[i] << 16;
        let high = ((i64::from(a[i]) * i64::from(b[i])) >> 32) as i32;
        let mixed = permuted.wrapping_add(funnel).wrapping_add(high);
        assert_eq!(got, [s, u, video, mixed], "thread {i}");
    }
    let got = h.download(dy, 128, f16::from_le_bytes);
    for pair in 0..64 {
        let [p, q] = [x[2 * pair].to_f32(), x[2 * pair + 1].to_f32()];
        for (at, own, other) in [(0, p, q), (1, q, p)] {
            let mut want = (own * own + 0.5).clamp(-1.0, 4.0);
            if p > 0.0 && q > 0.0 {
                want *= other;
            }
            want += 1.0 / (own.abs() + 1.0);
            let got = got[2 * pair + at].to_f32();
            assert!((got - want).abs() < 0.02, "pair {pair}: {got} for {want}");
        }
    }
}

#[test]
fn a_histogram_spread_over_the_shared_memory_of_a_cluster_exact() {
    let h = host();
    let x: Vec<u8> = (0..3000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let (dx, out) = (h.upload(x.iter().map(|v| [*v])), h.ints([0; 256]));
    h.run("cluster_histogram", [8, 1], 64, 0, Args::new().ptr(dx).i32(3000).ptr(out));
    let mut want = vec![0; 256];
    x.iter().for_each(|v| want[*v as usize] += 1);
    assert_eq!(h.download(out, 256, i32::from_le_bytes), want);
}

#[test]
fn fp8_fragments_converted_by_the_library_exact() {
    let h = host();
    let small =
        |n: usize, seed| -> Vec<f32> { values(n, seed).iter().map(|v| (v % 7) as f32 * 0.5).collect() };
    let (a, b) = (small(16 * 32, 0), small(8 * 32, 5));
    let upload = |v: &[f32]| h.upload(v.iter().map(|v| v.to_le_bytes()));
    let (da, db, dc) = (upload(&a), upload(&b), upload(&[0.0; 128]));
    h.run("fp8_mma", [1, 1], 32, 0, Args::new().ptr(da).ptr(db).ptr(dc));
    for (i, got) in h.download(dc, 128, f32::from_le_bytes).into_iter().enumerate() {
        let want: f32 = (0..32).map(|k| a[i / 8 * 32 + k] * b[i % 8 * 32 + k]).sum();
        assert_eq!(got, want, "D[{}][{}]", i / 8, i % 8);
    }
}

#[test]
fn tiles_by_tma_of_the_library_exact() {
    let h = host();
    let x = values(64 * 96, 0);
    let (dx, out) = (h.ints(&x), h.ints(vec![0; 64 * 96]));
    let map = |at: DevicePtr| {
        let map = TensorMap::matrix(TensorDataType::S32, at.0, (64, 96), 384, (32, 32), Swizzle::None);
        h.gpu.tensor_map(&map).unwrap()
    };
    h.run("tma_tiles", [3, 2], 64, 0, Args::new().tensor_map(map(dx)).tensor_map(map(out)));
    let want: Vec<i32> = x.iter().map(|v| v * 3 + 1).collect();
    assert_eq!(h.download(out, 64 * 96, i32::from_le_bytes), want);
}

#[test]
fn warpgroups_with_roles_multiply_from_shared_memory_exact() {
    let h = host();
    let k = 320;
    let small = |n: usize, seed| -> Vec<i32> { values(n, seed).iter().map(|v| v % 4).collect() };
    let (a, b) = (small(128 * k, 1), small(64 * k, 2));
    let upload = |v: &[i32]| h.upload(v.iter().map(|v| f16::from_f32(*v as f32).to_le_bytes()));
    let (da, db, dc) = (upload(&a), upload(&b), h.ints(vec![0; 128 * 64]));
    let map = |at: DevicePtr, rows: u32| {
        let size = (u64::from(rows), k as u64);
        let swizzle = Swizzle::B128;
        let map = TensorMap::matrix(TensorDataType::F16, at.0, size, 2 * k as u64, (rows, 64), swizzle);
        h.gpu.tensor_map(&map).unwrap()
    };
    let args = Args::new().tensor_map(map(da, 128)).tensor_map(map(db, 64)).ptr(dc).i32(k as i32);
    h.run("wgmma_ss", [1, 1], 384, 3 * (128 + 64) * 128, args);
    for (i, got) in h.download(dc, 128 * 64, f32::from_le_bytes).into_iter().enumerate() {
        let (row, col) = (i / 64, i % 64);
        let want: i32 = (0..k).map(|kk| a[row * k + kk] * b[col * k + kk]).sum();
        assert_eq!(got, want as f32, "C[{row}][{col}]");
    }
}

#[test]
fn blocks_take_turns_by_atomic_references_exact() {
    let h = host();
    let (value, turn) = (h.ints([1]), h.ints([0]));
    h.run("hand_off", [7, 1], 32, 0, Args::new().ptr(value).ptr(turn));
    let want = (0..7).fold(1, |v, b| v * 3 + b);
    assert_eq!(h.download(value, 1, i32::from_le_bytes), [want]);
}

#[test]
fn atomics_of_every_width_exact() {
    let h = host();
    let x: Vec<f32> = values(4 * 96, 0).iter().map(|v| (v % 5) as f32).collect();
    let dx = h.upload(x.iter().map(|v| v.to_le_bytes()));
    let (sum, best, pair) = (h.ints([0; 2]), h.ints([0; 2]), h.ints([0]));
    h.run("mixed", [3, 1], 32, 0, Args::new().ptr(dx).ptr(sum).ptr(best).ptr(pair));
    assert_eq!(h.download(sum, 1, f64::from_le_bytes), [x.iter().map(|v| f64::from(*v)).sum::<f64>()]);
    let keys =
        x.chunks_exact(4).enumerate().map(|(i, v)| u64::from((v[0] * v[0]).to_bits()) << 32 | i as u64);
    assert_eq!(h.download(best, 1, u64::from_le_bytes), [keys.max().unwrap()]);
    let of = |at: usize| x.iter().skip(at).step_by(4).sum::<f32>();
    let pair = h.download(pair, 2, f16::from_le_bytes).into_iter().map(f16::to_f32).collect::<Vec<_>>();
    assert_eq!(pair, [of(0), of(1)]);
}
