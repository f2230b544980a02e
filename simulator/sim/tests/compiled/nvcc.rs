//! Kernels that nvcc compiled from CUDA C++ (`../nvcc/kernels.cu`, `pointers.cu`), against results computed here.

use super::Host;
use dualgemm_device::{Args, Device};
use dualgemm_sim::Config;
use half::{bf16, f16};

const PTX: &str = include_str!("../nvcc/kernels.ptx");
const POINTERS: &str = include_str!("../nvcc/pointers.ptx");

fn values(n: usize) -> Vec<i32> {
    (0..n as i32).map(|i| i.wrapping_mul(7919).rem_euclid(1000) - 300).collect()
}

#[test]
fn sum_by_shuffles_and_atomics_exact() {
    let h = Host::new(PTX, Config::default());
    let x: Vec<i32> = values(5000);
    let floats = h.upload(x.iter().map(|&v| (v as f32).to_le_bytes()));
    let out = h.ints([0]);
    h.run("reduce_sum", [5, 1], 160, 0, Args::new().ptr(floats).i32(5000).ptr(out));
    let sum: i32 = x.iter().sum();
    assert_eq!(h.download(out, 1, f32::from_le_bytes), [sum as f32]);
}

#[test]
fn the_last_block_sees_what_the_others_wrote_exact() {
    for seed in 0..4 {
        let h = Host::new(PTX, Config::default().seed(seed));
        let x = values(3000);
        let (dx, part, out) = (h.ints(&x), h.ints(vec![0; 20]), h.ints([0]));
        h.run("last_block", [20, 1], 96, 0, Args::new().ptr(dx).i32(3000).ptr(part).ptr(out));
        assert_eq!(h.download(out, 1, i32::from_le_bytes), [x.iter().sum::<i32>()]);
    }
}

#[test]
fn a_barrier_of_the_whole_grid_needs_every_cta_resident_exact() {
    let h = Host::new(PTX, Config::default());
    let n = 40;
    let (counter, a, b) = (h.ints([0]), h.ints(vec![0; n]), h.ints(vec![0; n]));
    h.run("grid_barrier", [n as u32, 1], 1, 0, Args::new().ptr(counter).ptr(a).ptr(b));
    let want: Vec<i32> = (0..n as i32).map(|i| (i + 1) % n as i32 + 1).collect();
    assert_eq!(h.download(b, n, i32::from_le_bytes), want);
}

#[test]
fn lanes_of_one_warp_take_a_lock_in_turn_exact() {
    let h = Host::new(PTX, Config::default());
    let (lock, value) = (h.ints([0]), h.ints([0]));
    h.run("spin_lock", [3, 1], 40, 0, Args::new().ptr(lock).ptr(value));
    assert_eq!(h.download(value, 1, i32::from_le_bytes), [120]);
}

#[test]
fn a_pipelined_matrix_product_exact() {
    let h = Host::new(PTX, Config::default());
    let k = 160;
    let a: Vec<f16> = (0..64 * k).map(|i| f16::from_f32((i * 7 % 13) as f32 - 6.0)).collect();
    let b: Vec<f16> = (0..64 * k).map(|i| f16::from_f32((i * 5 % 11) as f32 * 0.5 - 2.0)).collect();
    let upload = |v: &[f16]| h.upload(v.iter().map(|x| x.to_le_bytes()));
    let (da, db, dc) = (upload(&a), upload(&b), h.gpu.alloc(64 * 64 * 4).unwrap());
    h.run("mma_gemm", [1, 1], 128, 0, Args::new().ptr(da).ptr(db).ptr(dc).i32(k as i32));
    let c = h.download(dc, 64 * 64, f32::from_le_bytes);
    for (i, got) in c.into_iter().enumerate() {
        let (m, n) = (i / 64, i % 64);
        let want: f32 = (0..k).map(|kk| a[m * k + kk].to_f32() * b[n * k + kk].to_f32()).sum();
        assert_eq!(got, want, "C[{m}][{n}]");
    }
}

#[test]
fn calls_switches_local_arrays_and_printf_exact() {
    let h = Host::new(PTX, Config::default());
    let n = 200;
    let x = values(n);
    let (dx, out, outd) = (h.ints(&x), h.gpu.alloc(8 * n).unwrap(), h.gpu.alloc(8 * n).unwrap());
    h.run("scalars", [2, 1], 128, 0, Args::new().ptr(dx).ptr(out).ptr(outd).i32(n as i32));
    let (got, gotd) = (h.download(out, n, i64::from_le_bytes), h.download(outd, n, f64::from_le_bytes));
    for i in 0..n {
        let v = x[i];
        let mut c = i as i64 + 1;
        let mut r = 0i64;
        while c != 1 {
            c = if c & 1 != 0 { 3 * c + 1 } else { c / 2 };
            r += 1;
        }
        match i % 7 {
            0 => r += i64::from(v / 3),
            1 => r -= i64::from(v % 5),
            2 => r ^= i64::from(v) << 20,
            3 => r *= i64::from(v),
            4 => r = i64::from((v.count_ones() + v.leading_zeros()).wrapping_add(v.reverse_bits() as u32)),
            5 => r = i64::from(v) * 123_456_789_012 / (i as i64 + 7),
            _ => r += i64::from(v * (v & 15)),
        }
        assert_eq!(got[i], r, "element {i}");
        let blended = (f64::from(v) * 0.1).mul_add(f64::from((v as f32).abs().sqrt()), i as f64);
        assert_eq!(gotd[i], blended / (f64::from(v) + 0.5), "element {i}");
    }
    let v = x[3];
    let line = format!("lane 3: v={v} f={:.3} text     7|3   |ff\n", f64::from(v) * 0.5);
    assert_eq!(h.gpu.take_outcome().unwrap().output, line);
}

#[test]
fn tiles_matches_and_ballots_exact() {
    let h = Host::new(PTX, Config::default());
    let x = values(64);
    let (dx, out) = (h.ints(&x), h.ints(vec![0; 64]));
    h.run("tiles", [1, 1], 64, 0, Args::new().ptr(dx).ptr(out));
    let got = h.download(out, 64, i32::from_le_bytes);
    for i in 0..64 {
        let warp = &x[i / 32 * 32..][..32];
        let sum: i32 = x[i / 8 * 8..][..8].iter().sum();
        let same = warp.iter().filter(|v| *v & 3 == x[i] & 3).count() as i32;
        let above = warp.iter().filter(|v| **v > 10).count() as i32;
        let odd = warp.iter().filter(|v| *v & 1 != 0).count() as i32;
        let want = sum * 1000 + same * 32 + above + if x[i] & 1 != 0 { odd << 20 } else { 0 };
        assert_eq!(got[i], want, "thread {i}");
    }
}

#[test]
fn half_precision_arithmetic_exact() {
    let h = Host::new(PTX, Config::default());
    let x: Vec<f16> = (0..128).map(|i| f16::from_f32((i as f32 - 60.0) * 0.037)).collect();
    let y: Vec<bf16> = (0..128).map(|i| bf16::from_f32((i as f32 - 50.0) * 0.21)).collect();
    let dx = h.upload(x.iter().map(|v| v.to_le_bytes()));
    let dy = h.upload(y.iter().map(|v| v.to_le_bytes()));
    let (hx, by, f) = (h.gpu.alloc(256).unwrap(), h.gpu.alloc(256).unwrap(), h.gpu.alloc(256).unwrap());
    h.run("halves", [1, 1], 64, 0, Args::new().ptr(dx).ptr(dy).ptr(hx).ptr(by).ptr(f));
    let got = h.download(by, 128, bf16::from_le_bytes);
    for i in 0..128 {
        // Multiplication and addition may be contracted to one fused operation.
        let p = y[i].to_f32() * y[(i + 6) % 128].to_f32();
        let split = bf16::from_f32(bf16::from_f32(p).to_f32() + 0.25);
        let fused = bf16::from_f32(p + 0.25);
        assert!(got[i] == split || got[i] == fused, "{i}: {} for {split} or {fused}", got[i]);
    }
    let got = h.download(f, 64, f32::from_le_bytes);
    for i in 0..64 {
        assert_eq!(got[i], x[2 * i].to_f32() + y[2 * i + 1].to_f32());
    }
    let got = h.download(hx, 128, f16::from_le_bytes);
    for i in 0..128 {
        let (a, b) = (x[i].to_f32(), x[(i + 2) % 128].to_f32());
        let square = f16::from_f32(a * a).to_f32();
        let fma = f16::from_f32(a * b + square).to_f32();
        let want = fma + a.clamp(-4.0, 1.0).exp2();
        assert!((got[i].to_f32() - want).abs() <= 4e-3 * want.abs().max(1.0), "{i}: {} for {want}", got[i]);
    }
}

#[test]
fn a_histogram_in_shared_memory_exact() {
    let h = Host::new(PTX, Config::default());
    let x: Vec<u8> = (0..4000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let (dx, out) = (h.upload(x.iter().map(|v| [*v])), h.ints(vec![0; 256]));
    h.run("histogram", [6, 1], 64, 1024, Args::new().ptr(dx).i32(4000).ptr(out));
    let mut want = vec![0; 256];
    x.iter().for_each(|b| want[*b as usize] += 1);
    assert_eq!(h.download(out, 256, i32::from_le_bytes), want);
}

#[test]
fn calls_through_pointers_and_virtual_functions_exact() {
    let n = 150;
    let x = values(n);
    for seed in 0..2 {
        let h = Host::new(POINTERS, Config::default().seed(seed));
        let (dx, out) = (h.ints(&x), h.ints(vec![0; n]));
        h.run("by_table", [2, 1], 96, 0, Args::new().ptr(dx).ptr(out).i32(n as i32));
        let want = (0..n).map(|i| match (i % 3, x[i], i as i32) {
            (0, a, b) => a + b,
            (1, a, b) => a - b,
            (_, a, b) => a * b,
        });
        assert_eq!(h.download(out, n, i32::from_le_bytes), want.collect::<Vec<_>>());
        h.run("by_virtual", [2, 1], 96, 0, Args::new().ptr(dx).ptr(out).i32(n as i32));
        let want = (0..n).map(|i| match x[i] as f32 {
            v if x[i] & 1 != 0 => 3.0 * v * v,
            v => v * i as f32 + 4000.0,
        });
        assert_eq!(h.download(out, n, f32::from_le_bytes), want.collect::<Vec<_>>());
    }
}
