//! Kernels that Triton compiled (`../triton/kernels.py`), against results computed here.

use super::{Host, e4m3_code, small};
use dualgemm_device::{Args, Device, DevicePtr};
use dualgemm_ptx::Target;
use dualgemm_sim::{Card, Config};
use half::{bf16, f16};
use std::ops::Deref;

/// A loaded kernel and what the first line of its file says of a launch.
struct Kernel {
    host: Host,
    ptx: String,
}

impl Deref for Kernel {
    type Target = Host;
    fn deref(&self) -> &Host {
        &self.host
    }
}

impl Kernel {
    fn load(name: &str) -> Kernel {
        let path = format!("{}/tests/triton/{name}.ptx", env!("CARGO_MANIFEST_DIR"));
        let ptx = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let target = ptx.lines().find_map(|l| l.strip_prefix(".target ")).unwrap();
        let card = Card::of(Target::from_name(target).unwrap());
        Kernel { host: Host::new(&ptx, Config::default().card(card)), ptx }
    }

    /// A value of the first line, or 0.
    fn meta(&self, key: &str) -> &str {
        let line = self.ptx.lines().next().unwrap();
        line.split(' ').find_map(|w| w.strip_prefix(key)?.strip_prefix('=')).unwrap()
    }

    fn number(&self, key: &str) -> u32 {
        self.meta(key).parse().unwrap()
    }

    fn zeros(&self, bytes: usize) -> DevicePtr {
        self.upload(vec![[0u8]; bytes])
    }

    /// Launches with the kernel's own `args`; Triton's two pointers are added.
    fn run(&self, grid: [u32; 2], args: Args) {
        let scratch = self.number("scratch") * grid[0] * grid[1];
        let scratch = if scratch == 0 { DevicePtr(0) } else { self.gpu.alloc(scratch as usize).unwrap() };
        let (threads, args) = (32 * self.number("warps"), args.ptr(scratch).ptr(DevicePtr(0)));
        self.host.run(self.meta("entry"), grid, threads, self.number("shared"), args);
    }
}

/// C of `a` (m x k, by rows) and `b`; `at(k, n)` says where an element of `b` is.
fn product(a: &[i32], b: &[i32], [m, n, k]: [usize; 3], at: impl Fn(usize, usize) -> usize) -> Vec<i32> {
    (0..m * n).map(|i| (0..k).map(|kk| a[i / n * k + kk] * b[at(kk, i % n)]).sum()).collect()
}

/// A matrix product with B by rows (`by_columns` false) or by columns.
fn matmul<const A: usize, const C: usize>(
    name: &str,
    shape: [usize; 3],
    grid: [u32; 2],
    by_columns: bool,
    encode: impl Fn(i32) -> [u8; A],
    decode: fn([u8; C]) -> f32,
) {
    let [m, n, k] = shape;
    let kernel = Kernel::load(name);
    let (a, b) = (small(m * k, 1), small(n * k, 2));
    let da = kernel.upload(a.iter().map(|v| encode(*v)));
    let db = kernel.upload(b.iter().map(|v| encode(*v)));
    let dc = kernel.zeros(m * n * C);
    kernel.run(grid, Args::new().ptr(da).ptr(db).ptr(dc).i32(m as i32).i32(n as i32).i32(k as i32));
    let want = product(&a, &b, shape, |kk, nn| if by_columns { nn * k + kk } else { kk * n + nn });
    let got = kernel.download(dc, m * n, decode);
    for (i, (got, want)) in got.into_iter().zip(want).enumerate() {
        assert_eq!(got, want as f32, "{name}: C[{}][{}]", i / n, i % n);
    }
}

fn half_bytes(v: i32) -> [u8; 2] {
    f16::from_f32(v as f32).to_le_bytes()
}

fn half_value(b: [u8; 2]) -> f32 {
    f16::from_le_bytes(b).to_f32()
}

#[test]
fn matrix_products_on_the_tensor_cores_of_four_generations_exact() {
    let brain = |v: i32| bf16::from_f32(v as f32).to_le_bytes();
    let byte = |v: i32| (v as i8).to_le_bytes();
    let int = |b| i32::from_le_bytes(b) as f32;
    matmul("matmul_f16", [200, 136, 96], [2, 3], false, half_bytes, half_value);
    matmul("matmul_fp8_sm89", [64, 64, 192], [1, 1], false, e4m3_code, f32::from_le_bytes);
    matmul("matmul_bf16_sm80", [100, 72, 96], [2, 2], false, brain, f32::from_le_bytes);
    matmul("matmul_int8", [64, 128, 192], [1, 2], true, byte, int);
}

#[test]
fn descriptors_made_on_the_device_exact() {
    matmul("matmul_tma", [200, 136, 96], [2, 2], true, half_bytes, half_value);
    matmul("tma_sm100", [200, 136, 160], [2, 3], true, half_bytes, half_value);
    matmul("tma_sm120", [100, 136, 160], [2, 3], true, half_bytes, half_value);
}

#[test]
fn warps_with_roles_and_persistent_tiles_exact() {
    matmul("warp_specialized", [200, 136, 160], [2, 1], true, half_bytes, half_value);
    matmul("warp_specialized_sm100", [200, 136, 160], [2, 1], true, half_bytes, half_value);
}

#[test]
fn layer_normalization_close() {
    let n = 500;
    let kernel = Kernel::load("layernorm");
    let x = small(3 * n, 4);
    let (w, b) = (small(n, 5), small(n, 6));
    let bytes = |v: &[i32]| v.iter().map(|v| bf16::from_f32(*v as f32).to_le_bytes()).collect::<Vec<_>>();
    let [dx, dw, db] = [&x, &w, &b].map(|v| kernel.upload(bytes(v)));
    let out = kernel.zeros(6 * n);
    kernel.run([3, 1], Args::new().ptr(dx).ptr(dw).ptr(db).ptr(out).i32(n as i32).f32(1e-5));
    let got = kernel.download(out, 3 * n, bf16::from_le_bytes);
    for (i, got) in got.into_iter().enumerate() {
        let row = &x[i / n * n..][..n];
        let mean = row.iter().sum::<i32>() as f32 / n as f32;
        let variance = row.iter().map(|v| (*v as f32 - mean).powi(2)).sum::<f32>() / n as f32;
        let want = (x[i] as f32 - mean) / (variance + 1e-5).sqrt() * w[i % n] as f32 + b[i % n] as f32;
        assert!((got.to_f32() - want).abs() <= 0.01 * want.abs().max(1.0), "{i}: {got} for {want}");
    }
}

#[test]
fn causal_attention_close() {
    attention("attention");
    attention("attention_sm100");
}

fn attention(name: &str) {
    let (heads, n, d) = (2, 128, 64);
    let kernel = Kernel::load(name);
    let [q, k, v] = [7, 8, 9].map(|s| small(heads * n * d, s));
    let [dq, dk, dv] = [&q, &k, &v].map(|x| kernel.upload(x.iter().map(|v| half_bytes(*v))));
    let out = kernel.zeros(heads * n * d * 2);
    let args = Args::new().ptr(dq).ptr(dk).ptr(dv).ptr(out).i32(n as i32).f32(0.05);
    kernel.run([n as u32 / 64, heads as u32], args);
    let got = kernel.download(out, heads * n * d, half_value);
    for h in 0..heads {
        let at = |r: usize, c: usize| (h * n + r) * d + c;
        for r in (0..n).step_by(5) {
            let score = |j: usize| (0..d).map(|c| q[at(r, c)] * k[at(j, c)]).sum::<i32>() as f32 * 0.05;
            let scores: Vec<f32> = (0..=r).map(score).collect();
            let top = scores.iter().copied().fold(f32::MIN, f32::max);
            let p: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f32 = p.iter().sum();
            for c in 0..d {
                let want = (0..=r).map(|j| p[j] * v[at(j, c)] as f32).sum::<f32>() / total;
                let got = got[at(r, c)];
                assert!((got - want).abs() < 0.01, "{name} head {h} row {r} column {c}: {got} for {want}");
            }
        }
    }
}

#[test]
fn scans_and_sorts_exact() {
    let kernel = Kernel::load("scan");
    let x = small(512, 10);
    let dx = kernel.upload(x.iter().map(|v| v.to_le_bytes()));
    let (sums, order) = (kernel.zeros(2048), kernel.zeros(2048));
    kernel.run([2, 1], Args::new().ptr(dx).ptr(sums).ptr(order));
    let (sums, order) =
        (kernel.download(sums, 512, i32::from_le_bytes), kernel.download(order, 512, i32::from_le_bytes));
    for r in 0..2 {
        let row = &x[256 * r..][..256];
        let mut sum = 0;
        let want: Vec<i32> = row
            .iter()
            .map(|v| {
                sum += v;
                sum
            })
            .collect();
        assert_eq!(sums[256 * r..][..256], want);
        let mut want = row.to_vec();
        want.sort_unstable();
        assert_eq!(order[256 * r..][..256], want);
    }
}

#[test]
fn gathers_and_atomics_exact() {
    let kernel = Kernel::load("gather_scatter");
    let n = 300;
    let x = small(n, 11);
    let index: Vec<i32> = (0..n as i32).map(|i| i * 7 % 10).collect();
    let upload = |v: &[i32]| kernel.upload(v.iter().map(|v| v.to_le_bytes()));
    let (dx, di) = (upload(&x), upload(&index));
    let (hist, out) = (kernel.zeros(40), upload(&[-100, 0, 0, 0]));
    kernel.run([3, 1], Args::new().ptr(dx).ptr(di).ptr(hist).ptr(out).i32(n as i32));
    let mut want = vec![0; 10];
    for i in 0..n {
        let from = i / 128 * 128 + ((i % 128) ^ 5);
        want[index[i] as usize] += x.get(from).copied().unwrap_or(0);
    }
    assert_eq!(kernel.download(hist, 10, i32::from_le_bytes), want);
    let top = x.iter().copied().max().unwrap();
    assert_eq!(kernel.download(out, 1, i32::from_le_bytes), [top]);
}
