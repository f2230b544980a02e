//! A Hopper kernel that nvcc compiled and an H100 has checked: dual GEMM with TMA, mbarriers, register-operand
//! wgmma, setmaxnreg, clusters with distributed shared memory and bulk copies between CTAs.
//!
//! `../nvcc/hopper_gemm.ptx` is `nvcc -ptx -arch=sm_90a -O3` (13.0.88) of
//! `C = silu(A B1^T) * (A B2^T)` with packed e2m1 weights; four instances of one template.

use super::{Host, e2m1, e4m3};
use dualgemm_device::{Args, Device, LaunchSpec};
use dualgemm_ptx::layout::{Swizzle, TensorDataType, TensorMap};
use dualgemm_sim::Config;
use half::f16;

const PTX: &str = include_str!("../nvcc/hopper_gemm.ptx");
const CHUNK: usize = 2304;

fn hash(x: u64) -> u32 {
    let mut x = x;
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^= x >> 33;
    x as u32
}

struct Problem {
    m: usize,
    n: usize,
    k: usize,
    a: Vec<f16>,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl Problem {
    fn new(m: usize, n: usize, k: usize) -> Problem {
        let code = |i: usize| (hash(i as u64 * 2 + 1) >> 7) as u8;
        let codes = (0..n * k).map(code).collect();
        let scales = (0..2 * n * k / 16).map(|i| (hash(i as u64 * 2) >> 5) as u8 % 0x7f).collect();
        let a = (0..m * k)
            .map(|i| f16::from_f64(e2m1((hash(i as u64 * 3 + 2) >> 9) as u8 & 15) * 0.25))
            .collect();
        Problem { m, n, k, a, codes, scales }
    }

    fn code(&self, row: usize, k: usize) -> u8 {
        self.codes[row * (self.k / 2) + k / 2] >> (4 * (k & 1)) & 15
    }

    /// Weights in the order in which the kernel's register fragments take them.
    fn packed(&self) -> Vec<u8> {
        let (n, k) = (self.n, self.k);
        let mut out = vec![0u8; 2 * n * k / 4096 * CHUNK];
        for tile in 0..2 * n / 64 {
            for kb in 0..k / 64 {
                let chunk = &mut out[(tile * (k / 64) + kb) * CHUNK..][..CHUNK];
                for t in 0..128 {
                    let (w, l) = (t / 32, t % 32);
                    let (g, q) = (l / 4, l % 4);
                    let f = 32 * tile + 8 * w + g;
                    for j in 0..4 {
                        let mut word = 0u32;
                        for e in 0..2 {
                            for r in 0..4 {
                                let kk = kb * 64 + 16 * j + 2 * q + e + 8 * (r >> 1);
                                let c = u32::from(self.code((r & 1) * n + f, kk));
                                let (sign, value) = ([15, 12, 14, 13][r], [9, 6, 3, 0][r]);
                                word |= ((c >> 3) << sign | (c & 7) << value) << (16 * e);
                            }
                        }
                        chunk[((w * 32 + l) * 4 + j) * 4..][..4].copy_from_slice(&word.to_le_bytes());
                    }
                    if q < 2 {
                        let scale = |up: usize, b: usize| {
                            let s = e4m3(self.scales[(up * n + f) * (k / 16) + kb * 4 + b]);
                            u32::from(f16::from_f64(s * 128.0).to_bits() >> 7)
                        };
                        let v = scale(0, 2 * q)
                            | scale(1, 2 * q + 1) << 8
                            | scale(1, 2 * q) << 16
                            | scale(0, 2 * q + 1) << 24;
                        let v = v.rotate_left(7);
                        chunk[2048 + ((w * 8 + g) * 2 + q) * 4..][..4].copy_from_slice(&v.to_le_bytes());
                    }
                }
            }
        }
        out
    }

    fn reference(&self, alpha: [f64; 2]) -> Vec<f64> {
        let (n, k) = (self.n, self.k);
        let weights: Vec<f64> = (0..2 * n * k)
            .map(|i| e2m1(self.code(i / k, i % k)) * e4m3(self.scales[i / k * (k / 16) + i % k / 16]))
            .collect();
        let mut out = Vec::new();
        for m in 0..self.m {
            for f in 0..n {
                let dot = |row: usize| -> f64 {
                    (0..k).map(|kk| self.a[m * k + kk].to_f64() * weights[row * k + kk]).sum()
                };
                let (g, u) = (alpha[0] * dot(f), alpha[1] * dot(n + f));
                out.push(g / (1.0 + (-g).exp()) * u);
            }
        }
        out
    }
}

/// Runs the instance with these template arguments.
fn run(
    config: Config,
    [groups, tokens, blocks_per_stage, stages, split, mode, k_groups]: [usize; 7],
    p: &Problem,
) -> Vec<f64> {
    let host = Host::new(PTX, config);
    let gpu = &host.gpu;
    let name = format!(
        "_Z5fusedILi{groups}ELi{tokens}ELi{blocks_per_stage}ELi{stages}ELi{split}ELi{mode}ELi1ELi{k_groups}EEv14CUtensorMap_stPKhP6__halfiiiffPxPf"
    );
    let f = gpu.function(host.module, &name).unwrap();
    let a = host.upload(p.a.iter().map(|x| x.to_le_bytes()));
    let (w, c) = (host.upload(p.packed().into_iter().map(|b| [b])), gpu.alloc(p.m * p.n * 2).unwrap());
    let ws = gpu.alloc(1 << 20).unwrap();
    let map = TensorMap::matrix(
        TensorDataType::F16,
        a.0,
        (p.m as u64, p.k as u64),
        p.k as u64 * 2,
        (tokens as u32, 64),
        Swizzle::B128,
    );
    let stage = blocks_per_stage * tokens * 128 + groups * blocks_per_stage * CHUNK;
    let pitch = groups * 64 + 16;
    let reduce = if split * k_groups > 1 {
        groups * k_groups * 128 * tokens * 2 + tokens * pitch / 2
    } else {
        tokens * pitch
    };
    let shared = (stages * stage).max(reduce) + 16 * stages + 16 + 1024;
    let scale = (p.k as f32).sqrt() * 500.0;
    let (ag, au) = (2.0 / scale, 1.0 / scale);
    let grid = 2 * p.n / 64 / groups * p.m.div_ceil(tokens) * split;
    let threads = groups * k_groups * 128 + 128;
    let args = Args::new()
        .tensor_map(gpu.tensor_map(&map).unwrap())
        .ptr(w)
        .ptr(c)
        .i32(p.m as i32)
        .i32(p.n as i32)
        .i32(p.k as i32)
        .f32(ag * 128.0)
        .f32(au * 128.0)
        .u64(0)
        .ptr(ws);
    let spec = LaunchSpec::new(f, [grid as u32, 1, 1], [threads as u32, 1, 1])
        .cluster([split as u32, 1, 1])
        .dynamic_shared(shared as u32)
        .args(args);
    if let Err(e) = gpu.launch(&spec) {
        panic!("{e}");
    }
    let got: Vec<f64> = host.download(c, p.m * p.n, |b| f16::from_le_bytes(b).to_f64());
    let want = p.reference([ag.into(), au.into()]);
    let (mut error, mut norm) = (0.0, 0.0);
    for (g, w) in got.iter().zip(&want) {
        error += (g - w) * (g - w);
        norm += w * w;
    }
    let error = (error / norm).sqrt();
    // fp16 output rounding alone gives about 2.1e-4; the H100 measured 2.06e-4 to 2.16e-4.
    assert!(error < 3e-4, "relative error {error:e}");
    got
}

/// One CTA per tile with a tail; split K in a cluster, through distributed shared memory and by bulk copy to the peer; K
/// groups inside a CTA.
#[test]
fn every_way_to_split_a_product_close() {
    for (instance, [m, n, k]) in [
        ([2, 128, 2, 4, 1, 0, 1], [200, 128, 1280]),
        ([2, 256, 2, 3, 2, 0, 1], [256, 64, 512]),
        ([2, 128, 2, 3, 2, 256, 1], [128, 64, 512]),
        ([1, 8, 4, 4, 1, 0, 4], [5, 64, 2048]),
    ] {
        run(Config::default(), instance, &Problem::new(m, n, k));
    }
}

#[test]
fn seeds_change_the_interleaving_but_not_the_result_exact() {
    let (i, p) = ([1, 8, 4, 4, 1, 0, 4], Problem::new(8, 32, 1024));
    let first = run(Config::default(), i, &p);
    for seed in 1..6 {
        assert_eq!(run(Config::default().seed(seed), i, &p), first);
    }
}
