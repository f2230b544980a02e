//! Kernels of CUTLASS 4 (`../cutlass/gemm.cu` instantiates its collectives), compiled by nvcc, with the launches that
//! CUTLASS's host code made, against results computed here. Parameters hold device addresses and tensor maps as the
//! simulator gives them, so buffers are allocated here in the order of the recording.

use super::{e2m1, e4m3, e4m3_code, small, upload};
use dualgemm_device::{Args, Device, DevicePtr, Error, LaunchSpec};
use dualgemm_sim::{Card, Config, Gpu};
use half::{bf16, f16};

/// Element types of A and B. All values of the tests are small integers, exact in each.
#[derive(Clone, Copy, PartialEq)]
enum Element {
    F16,
    E4m3,
    I8,
    /// With a scale in e4m3 for 16 elements along K.
    Nvfp4,
}

impl Element {
    fn encode(self, values: &[i32]) -> Vec<u8> {
        match self {
            Element::F16 => values.iter().flat_map(|v| f16::from_f32(*v as f32).to_le_bytes()).collect(),
            Element::I8 => values.iter().map(|v| *v as u8).collect(),
            Element::E4m3 => values.iter().flat_map(|v| e4m3_code(*v)).collect(),
            Element::Nvfp4 => {
                let code = |v: i32| [0, 2, 4, 5, 6][v.unsigned_abs() as usize] | if v < 0 { 8 } else { 0 };
                values.chunks_exact(2).map(|v| code(v[0]) | code(v[1]) << 4).collect()
            }
        }
    }
}

/// Scales of `rows` by `blocks` as powers of two, and their e4m3 codes in the 128x4 layout.
fn scales(rows: usize, blocks: usize, seed: u32) -> (Vec<f64>, Vec<u8>) {
    let exponents = small(rows * blocks, seed).into_iter().map(|v| v.rem_euclid(3) - 1).collect::<Vec<_>>();
    let mut codes = vec![0; rows.next_multiple_of(128) * blocks.next_multiple_of(4)];
    for (i, e) in exponents.iter().enumerate() {
        let (r, b) = (i / blocks, i % blocks);
        let tile = r / 128 * blocks.div_ceil(4) + b / 4;
        codes[tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + b % 4] = (0x38 + 8 * e) as u8;
    }
    (exponents.into_iter().map(|e| 2f64.powi(e)).collect(), codes)
}

/// A kernel and the launch that CUTLASS made of it.
struct Recording {
    ptx: String,
    launch: String,
}

impl Recording {
    fn read(name: &str) -> Recording {
        let path = |ext: &str| format!("{}/tests/cutlass/{name}.{ext}", env!("CARGO_MANIFEST_DIR"));
        let [ptx, launch] = ["ptx", "launch"].map(|ext| std::fs::read_to_string(path(ext)).unwrap());
        Recording { ptx, launch }
    }

    fn line(&self, key: &str) -> &str {
        self.launch.lines().find_map(|l| l.strip_prefix(key)).unwrap().trim()
    }

    fn numbers<const N: usize>(&self, key: &str) -> [u32; N] {
        let line = self.line(key).trim_matches(['[', ']']);
        let all: Vec<u32> = line.split(", ").map(|n| n.parse().unwrap()).collect();
        all.try_into().unwrap()
    }

    /// The bytes of the argument.
    fn argument(&self) -> Vec<u8> {
        let hex = self.line("arg ");
        (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..][..2], 16).unwrap()).collect()
    }

    /// Launches it with this argument.
    fn run(&self, gpu: &Gpu, argument: &[u8]) -> Result<(), Error> {
        let kernel = gpu.function(gpu.load(&self.ptx)?, self.line("entry "))?;
        let spec = LaunchSpec::new(kernel, self.numbers("grid"), self.numbers("block"))
            .cluster(self.numbers("cluster"))
            .dynamic_shared(self.numbers::<1>("shared ")[0])
            .args(Args::new().bytes(argument, 64));
        gpu.launch(&spec)
    }
}

/// Runs a recorded launch on data of ours. `out` gives what D should hold for a sum.
fn gemm<const D: usize>(
    name: &str,
    card: Card,
    [m, n, k]: [usize; 3],
    [ta, tb]: [Element; 2],
    out: impl Fn(f64) -> [u8; D],
) {
    let recording = Recording::read(name);
    for seed in 0..2 {
        let gpu = Gpu::new(Config::default().card(card).seed(seed));
        let upload = |bytes: &[u8]| upload(&gpu, bytes);
        let (a, b) = (small(m * k, 1), small(n * k, 2));
        upload(&ta.encode(&a));
        upload(&tb.encode(&b));
        let d: DevicePtr = upload(&vec![0xff; m * n * D]);
        let blocks = k / 16;
        let scaled = ta == Element::Nvfp4;
        let [(sa, ca), (sb, cb)] = [scales(m, blocks, 3), scales(n, blocks, 4)];
        if scaled {
            upload(&ca);
            upload(&cb);
        }
        gpu.alloc(recording.numbers::<1>("workspace ")[0] as usize).unwrap();
        recording.run(&gpu, &recording.argument()).unwrap_or_else(|e| panic!("{name}, seed {seed}: {e}"));
        let mut got = vec![0; m * n * D];
        gpu.copy_from(&mut got, d).unwrap();
        for (i, got) in got.chunks_exact(D).enumerate() {
            let (row, col) = (i / n, i % n);
            let scale = |kk: usize| match scaled {
                true => sa[row * blocks + kk / 16] * sb[col * blocks + kk / 16],
                false => 1.0,
            };
            let term = |kk: usize| f64::from(a[row * k + kk] * b[col * k + kk]) * scale(kk);
            assert_eq!(got, out((0..k).map(term).sum()), "{name}, seed {seed}: D[{row}][{col}]");
        }
    }
}

fn single(v: f64) -> [u8; 4] {
    (v as f32).to_le_bytes()
}

fn brain(v: f64) -> [u8; 2] {
    bf16::from_f64(v).to_le_bytes()
}

#[test]
fn hopper_with_roles_and_two_consumers_exact() {
    gemm("hopper_cooperative_f16", Card::H100, [256, 128, 256], [Element::F16; 2], single);
}

#[test]
fn hopper_with_consumers_in_turn_exact() {
    gemm("hopper_pingpong_e4m3", Card::H100, [128, 256, 256], [Element::E4m3; 2], brain);
}

#[test]
fn hopper_with_operands_converted_in_registers_exact() {
    gemm("hopper_mixed_int8", Card::H100, [128, 128, 256], [Element::I8, Element::F16], single);
}

#[test]
fn blackwell_with_one_cta_exact() {
    gemm("blackwell_one_cta_f16", Card::B200, [256, 128, 256], [Element::F16; 2], single);
}

#[test]
fn blackwell_pairs_of_ctas_with_block_scales_exact() {
    gemm("blackwell_pairs_nvfp4", Card::B200, [256, 256, 512], [Element::Nvfp4; 2], brain);
}

/// The number of the value nearest to `x` among ascending ones, the even number of two that are as near.
fn nearest(values: &[f64], x: f64) -> usize {
    let above = values.partition_point(|v| *v < x).min(values.len() - 1);
    let below = above.saturating_sub(1);
    let [down, up] = [below, above].map(|i| (values[i] - x).abs());
    if down < up || down == up && below % 2 == 0 { below } else { above }
}

/// CUTLASS's example 91 (`91_fp4_gemv.cu` of the Python package nvidia-cutlass 4.2) for 64 rows and K = 1024: nvfp4 times
/// nvfp4 to nvfp4. Its epilogue puts a byte that was written and three that were not into a register, and stores the first.
#[test]
fn blackwell_matrix_times_vector_of_nvfp4_exact() {
    let (e2m1, e4m3) = ([0, 1, 2, 3, 4, 5, 6, 7].map(e2m1), (0..127).map(e4m3).collect::<Vec<f64>>());
    let recording = Recording::read("blackwell_gemv_nvfp4");
    let (m, k) = (64, 1024);
    let blocks = k / 16;
    for seed in 0..2 {
        let gpu = Gpu::new(Config::default().card(Card::B200).seed(seed));
        let upload = |bytes: &[u8]| upload(&gpu, bytes).0;
        let (a, b) = (small(m * k, 1), small(k, 2));
        let [(sa, ca), (sb, cb)] = [scales(m, blocks, 3), scales(1, blocks, 4)];
        let encode = |values: &[i32]| upload(&Element::Nvfp4.encode(values));
        let (d, sfd) = (upload(&[0xff; 32]), upload(&[0xff; 512]));
        let addresses = [
            (16, d),
            (32, sfd),
            (72, encode(&a)),
            (88, encode(&b)),
            (96, upload(&[0; 32])),
            (104, d),
            (112, upload(&ca)),
            (120, upload(&cb)),
        ];
        let mut bytes = recording.argument();
        addresses.iter().for_each(|(at, address)| bytes[*at..at + 8].copy_from_slice(&address.to_le_bytes()));
        // The tensor scale of the result.
        bytes[48..52].copy_from_slice(&0.25f32.to_le_bytes());
        recording.run(&gpu, &bytes).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let (mut codes, mut found) = (vec![0; 32], vec![0; 4]);
        gpu.copy_from(&mut codes, DevicePtr(d)).unwrap();
        gpu.copy_from(&mut found, DevicePtr(sfd)).unwrap();
        for (block, &found) in found.iter().enumerate() {
            let rows = 16 * block..16 * block + 16;
            let sum = |row: usize| -> f64 {
                let term =
                    |i: usize| f64::from(a[row * k + i] * b[i]) * sa[row * blocks + i / 16] * sb[i / 16];
                (0..k).map(term).sum()
            };
            let sums: Vec<f64> = rows.clone().map(sum).collect();
            let most = sums.iter().fold(0f64, |most, s| most.max(s.abs()));
            let scale = nearest(&e4m3, most * 0.25 / 6.0);
            assert_eq!(usize::from(found), scale, "seed {seed}: scale {block}");
            for (row, sum) in rows.zip(sums) {
                let code = nearest(&e2m1, sum.abs() * 0.25 / e4m3[scale]);
                let got = usize::from(codes[row / 2] >> (row % 2 * 4)) & 15;
                assert_eq!(got, code + if sum < 0.0 { 8 } else { 0 }, "seed {seed}: D[{row}]");
            }
        }
    }
}
