//! Tiles of bf16: emulated ones against the order of sums that [`tiles`](super::super::tiles) states, in scalar code, and against
//! f64; real ones against emulated ones.

use proptest::prelude::*;

use super::super::ahead::Ahead;
use super::super::tiles;
use super::*;
use crate::amx::Tiles;

/// The kernel of an instruction set with emulated tiles.
fn emulated(isa: Isa) -> Kernel {
    Kernel::new(isa.checked().unwrap().emulating_tiles(), BlockFormat::Nvfp4)
}

fn as_f16(m: usize, k: usize, data: &[f32]) -> FloatMatrix<'static> {
    FloatMatrix::F16(
        Matrix::new("a", m, k, data.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>()).unwrap(),
    )
}

fn each_type(m: usize, k: usize, data: &[f32]) -> [FloatMatrix<'_>; 3] {
    [as_bf16(m, k, data), as_f16(m, k, data), f32_matrix(m, k, data)]
}

/// The order of sums that the head of `tiles` states.
fn scalar_tiles(a: &[f32], b: &QuantizedMatrix<'_>, n: usize, terms: usize) -> f32 {
    let (mut sum, mut rest) = (0f32, a.to_vec());
    for first in (0..a.len()).step_by(tiles::BLOCK_K) {
        let block = first..a.len().min(first + tiles::BLOCK_K);
        for _ in 0..terms {
            for step in block.clone().step_by(32) {
                let mut chains = [0f32; 2];
                for k in step..step + 32 {
                    let high = f32::from_bits(rest[k].to_bits() & 0xFFFF_0000);
                    chains[k % 2] = high.mul_add(b.value(n, k) as f32, chains[k % 2]);
                    rest[k] -= high;
                }
                sum += chains[0] + chains[1];
            }
        }
    }
    assert!(rest.iter().all(|&rest| rest == 0.0), "terms lose bits");
    sum
}

/// The instruction set that has vectors of bf16, on the processors that this is compiled for.
const VECTORS: Isa = if cfg!(target_arch = "aarch64") { Isa::NeonBf16 } else { Isa::Avx512Bf16 };

/// A sum rounded to odd: towards zero, and then to the neighbour whose last bit is 1 if anything is lost. First f64 is rounded so,
/// whose 29 more bits tell whether anything is.
fn sum_to_odd(a: f64, b: f64) -> f32 {
    let sum = a + b;
    let of_b = sum - a;
    let lost = (a - (sum - of_b)) + (b - of_b);
    let wide = match (lost == 0.0 || sum.to_bits() % 2 == 1, (lost > 0.0) == (sum > 0.0)) {
        (true, _) => sum,
        (false, true) => f64::from_bits(sum.to_bits() + 1),
        (false, false) => f64::from_bits(sum.to_bits() - 1),
    };
    let near = wide as f32;
    let cut = if f64::from(near).abs() > wide.abs() { f32::from_bits(near.to_bits() - 1) } else { near };
    if f64::from(cut) == wide { cut } else { f32::from_bits(cut.to_bits() | 1) }
}

/// The order of sums that the head of `dots` states.
fn scalar_dots(a: &[f32], b: &QuantizedMatrix<'_>, n: usize) -> f32 {
    (0..a.len()).step_by(tiles::BLOCK_K).fold(0f32, |sum, first| {
        let pairs = (first..a.len().min(first + tiles::BLOCK_K)).step_by(2);
        let product = |k: usize| f64::from(a[k]) * b.value(n, k);
        let add = |chain: f32, k: usize| match VECTORS {
            Isa::NeonBf16 => sum_to_odd(chain.into(), sum_to_odd(product(k), product(k + 1)).into()),
            _ => [k + 1, k].into_iter().fold(chain, |chain, k| a[k].mul_add(b.value(n, k) as f32, chain)),
        };
        sum + pairs.fold(0f32, add)
    })
}

#[test]
fn sums_to_odd_keep_what_is_lost_in_the_last_bit_exact() {
    let (one, ulp) = (1.0f32, f64::from(f32::EPSILON));
    let next = |steps: u32| f32::from_bits(one.to_bits() + steps);
    for (a, b, want) in [
        (1.0, 0.0, one),
        (1.0, ulp, next(1)),
        (1.0, 1e-30, next(1)),
        (1.0, 1.5 * ulp, next(1)),
        (1.0, 2.5 * ulp, next(3)),
        (1.0 + 2.0 * ulp, -1e-30, next(1)),
        (1.0 + ulp, -1e-30, next(1)),
        (-1.0, -1e-30, -next(1)),
        (3.0, -3.0, 0.0),
    ] {
        assert_eq!(sum_to_odd(a, b), want, "{a} {b}");
    }
}

/// Where there are vectors of bf16; elsewhere there is nothing to test.
#[test]
fn the_order_of_sums_of_vectors_is_the_documented_one_exact() {
    if !VECTORS.available() {
        eprintln!("this machine has no {VECTORS}: not tested");
        return;
    }
    let (n, k, kernel) = (37, tiles::BLOCK_K + 64, kernel(VECTORS, BlockFormat::Nvfp4));
    let pair = weights(BlockFormat::Nvfp4, n, k, 1);
    let packed = PackedGateUp::pack(&pair).unwrap();
    for m in [8, 9, 16, 23, 47] {
        let a = bf16s(m, k);
        assert_eq!(layout(kernel, &a), Layout::Tiles { terms: 1 });
        let rows = (0..m).map(|row| (0..k).map(|k| a.value(row, k)).collect::<Vec<_>>());
        let of_row = |row: Vec<f32>| {
            let of_half = |half| (0..n).map(|n| scalar_dots(&row, half, n)).collect::<Vec<_>>();
            [of_half(&pair.gate), of_half(&pair.up)].concat()
        };
        let want: Vec<f32> = rows.flat_map(of_row).collect();
        assert_bits(&sums(kernel, &a, &one_tile(m), &packed), &want, &format!("M={m}"));
    }
    assert!(!matches!(layout(kernel, &f32_matrix(32, k, &activations(32, k))), Layout::Tiles { .. }));
}

#[test]
fn the_order_of_sums_of_tiles_is_the_documented_one_exact() {
    let (n, k) = (5, tiles::BLOCK_K + 64);
    let pair = weights(BlockFormat::Nvfp4, n, k, 1);
    let packed = PackedGateUp::pack(&pair).unwrap();
    // One group, a full one, two, two and a rest, more than a thread prepares at once.
    for m in [8, 16, 32, 51, 100] {
        let data = activations(m, k);
        for (a, terms) in each_type(m, k, &data)
            .iter()
            .zip(1..)
            .filter(|(_, terms)| Some(m) >= tiles::min_rows(Tiles::Emulated, *terms))
        {
            assert_eq!(layout(emulated(Isa::Portable), a), Layout::Tiles { terms });
            let mut want = vec![];
            for row in 0..m {
                let row: Vec<f32> = (0..k).map(|k| a.value(row, k)).collect();
                for half in [&pair.gate, &pair.up] {
                    want.extend((0..n).map(|n| scalar_tiles(&row, half, n, terms)));
                }
            }
            for isa in isas() {
                let got = sums(emulated(isa), a, &one_tile(m), &packed);
                assert_bits(&got, &want, &format!("{isa} M={m}, {terms} terms"));
            }
        }
    }
}

#[test]
fn every_code_times_every_scale_is_widened_exact() {
    let (n, k) = (0x7F, 32);
    let codes: Vec<u8> = (0..n * k / 2).map(|i| e2m1::pack(i as u8 % 8 * 2, i as u8 % 8 * 2 + 1)).collect();
    let scales: Vec<u8> = (0..n as u8).flat_map(|scale| [scale, (scale + 64) % n as u8]).collect();
    let format = BlockFormat::Nvfp4;
    let weight =
        QuantizedMatrix::new("w", format, n, k, codes, scales, ScaleLayout::Linear, GlobalScale::ONE)
            .unwrap();
    let packed = PackedGateUp::pack(&GateUp::new(weight.clone(), weight.clone())).unwrap();
    // Row r picks element r.
    let data: Vec<f32> = (0..k * k).map(|i| if i / k == i % k { 1.0 } else { 0.0 }).collect();
    for isa in isas() {
        let got = sums(emulated(isa), &as_bf16(k, k, &data), &one_tile(k), &packed);
        for (i, got) in got.into_iter().enumerate() {
            let (row, feature) = (i / n / 2, i % n);
            assert_eq!(got, weight.value(feature, row) as f32, "{isa} scale {feature:#04x} code {row}");
        }
    }
}

/// On a machine with AMX, its tiles are compared; elsewhere there is nothing to compare.
#[test]
fn real_tiles_give_the_bits_of_emulated_ones_exact() {
    if !Isa::AmxBf16.available() {
        eprintln!("this machine has no tiles: not compared");
        return;
    }
    for k in [32, 64, 3 * tiles::BLOCK_K + 96] {
        let packed = PackedGateUp::pack(&weights(BlockFormat::Nvfp4, 37, k, 2)).unwrap();
        for m in [8, 15, 16, 17, 33, 64, 100, MAX_TILE_ROWS] {
            let mut data = activations(m, k);
            let mut random = Random(m as u64);
            data.iter_mut().for_each(|x| *x *= 2f32.powi(random.bits() as i32 % 60 - 30));
            for a in &each_type(m, k, &data) {
                let want = sums(emulated(Isa::AmxBf16), a, &one_tile(m), &packed);
                let got = sums(kernel(Isa::AmxBf16, BlockFormat::Nvfp4), a, &one_tile(m), &packed);
                assert_bits(&got, &want, &format!("M={m} K={k}"));
            }
        }
    }
}

#[test]
fn rows_are_shared_among_threads_or_written_ahead_exact() {
    for k in [32, 320, tiles::WHOLE_K + 32] {
        let (m, kernel) = (100, emulated(Isa::best()));
        let packed = PackedGateUp::pack(&weights(BlockFormat::Nvfp4, 21, k, 5)).unwrap();
        let (a, mut buffer) = (bf16s(m, k), poisoned(m, k));
        let want = sums(kernel, &a, &one_tile(m), &packed);
        let tiles = one_tile(m);
        let bound = kernel.prepare(1, &a, None, &tiles, &mut buffer).all(1);
        assert_bits(&sums_of(&bound, m, &one_tile(m), &packed, 48), &want, "shared");

        let halves = [0, 50].map(|first_row| RowTile { group: 0, first_row, rows: 50 });
        let mut write = |small: f32| {
            let ahead = Ahead::new(kernel, &halves, k, &mut buffer);
            for (row, first) in (0..m).flat_map(|row| (0..k).step_by(16).map(move |first| (row, first))) {
                let mut values: [f32; 16] = std::array::from_fn(|i| a.value(row, first + i));
                if (row, first) == (99, k - 16) {
                    values[15] *= small;
                }
                // From the third row before it on in the same tile.
                let before = (row % 50).min(3);
                // SAFETY: there is one thread.
                unsafe { ahead.write(ahead.place(row - before, first).at(before), &values) };
            }
            ahead.fits()
        };
        assert!(!write(1e-36) && !write(f32::INFINITY) && write(1.0));
        assert_bits(&sums_of(&kernel.bind(0, k, &buffer), m, &halves, &packed, 32), &want, "ahead");
    }
}

#[test]
fn what_tiles_would_flush_goes_another_way() {
    let k = 64;
    let packed = PackedGateUp::pack(&weights(BlockFormat::Nvfp4, 16, k, 3)).unwrap();
    let (kernel, others) = (emulated(Isa::best()), kernel(Isa::best(), BlockFormat::Nvfp4));
    let smallest = [2f32.powi(-109), 2f32.powi(-93)];
    let numbers = [(1.0, true), (0.5, false), (f32::INFINITY, false), (f32::NAN, false), (0.0, true)];
    // Among 100 rows, it is in those that are prepared last.
    for (m, (small, fits)) in [16, 100].into_iter().flat_map(|m| numbers.map(|number| (m, number))) {
        let mut data = activations(m, k);
        data.iter_mut().for_each(|x| *x = x.abs().max(0.25));
        let mut with = |smallest: f32| {
            data[(m - 1) * k + 5] = smallest * small;
            data.clone()
        };
        let (bf16s, f32s) = (with(smallest[0]), with(smallest[1]));
        for a in [as_bf16(m, k, &bf16s), f32_matrix(m, k, &f32s)] {
            assert_eq!(matches!(layout(kernel, &a), Layout::Tiles { .. }), fits, "{small}");
            if !fits {
                let want = sums(others, &a, &one_tile(m), &packed);
                assert_bits(&sums(kernel, &a, &one_tile(m), &packed), &want, "another way");
            }
        }
    }
    // Rows too few, K too odd, another format.
    assert!(!matches!(layout(kernel, &bf16s(7, k)), Layout::Tiles { .. }));
    assert!(!matches!(layout(kernel, &bf16s(16, 48)), Layout::Tiles { .. }));
    let mxfp4 = Kernel::new(Isa::best().checked().unwrap().emulating_tiles(), BlockFormat::Mxfp4);
    assert!(!matches!(layout(mxfp4, &bf16s(16, k)), Layout::Tiles { .. }));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    /// Whatever the size of the numbers, sums are within the bound of the verifier without its probability: a rounding for each of
    /// K/32 + 17 sums and each term.
    #[test]
    fn tiles_are_close_to_f64(
        seed in any::<u64>(),
        m in 8usize..40,
        steps in 1usize..12,
        spread in 0i32..30,
        at in -60i32..60,
    ) {
        let (n, k, mut random) = (3, 32 * steps, Random(seed));
        let pair = weights(BlockFormat::Nvfp4, n, k, seed);
        let packed = PackedGateUp::pack(&pair).unwrap();
        let data: Vec<f32> = (0..m * k)
            .map(|_| random.float() * 2f32.powi(at - random.bits() as i32 % (spread + 1)))
            .collect();
        let f16s: Vec<f32> = data.iter().map(|x| x * 2f32.powi(-at)).collect();
        for a in [as_bf16(m, k, &data), as_f16(m, k, &f16s), f32_matrix(m, k, &data)] {
            let got = sums(emulated(Isa::best()), &a, &one_tile(m), &packed);
            for (i, &got) in got.iter().enumerate() {
                let (row, b, n) = (i / n / 2, [&pair.gate, &pair.up][i / n % 2], i % n);
                let terms = (0..k).map(|k| f64::from(a.value(row, k)) * b.value(n, k));
                let (want, size) = terms.fold((0.0, 0.0), |(s, t), x| (s + x, t + x.abs()));
                let bound = size * (steps + 17) as f64 * 1.01 * 2f64.powi(-24);
                prop_assert!((f64::from(got) - want).abs() <= bound, "{got:e} {want:e} ± {bound:e}");
            }
        }
    }
}
