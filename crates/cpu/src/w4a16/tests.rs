//! The W4A16 kernels against the documented order of sums in scalar code, and against f64.

mod extremes;
mod tiles;

use dualgemm_formats::scalar::e2m1;
use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::GateUp;
use half::{bf16, f16};

use super::few_rows::FEW_ROWS;
use super::kernel::{BLOCK_K, Layout};
use super::{Bound, Buffer, Kernel};
use crate::Isa;
use crate::fixtures::{Random, isas, weights};
use crate::isa::Available;
use crate::pack::{PANEL, PackedGateUp};
use crate::tile::{MAX_TILE_ROWS, Prepare, RowTile, TILE_COLS, TileKernel};

fn activations(m: usize, k: usize) -> Vec<f32> {
    let mut random = Random(3);
    (0..m * k).map(|_| random.float()).collect()
}

fn f32_matrix(m: usize, k: usize, data: &[f32]) -> FloatMatrix<'_> {
    FloatMatrix::F32(Matrix::new("a", m, k, data).unwrap())
}

/// Room for `m` rows that holds NaN.
fn poisoned(m: usize, k: usize) -> Buffer {
    let mut buffer = Buffer::try_new(m, m, k, 3).unwrap();
    buffer.words.fill(f32::NAN);
    buffer
}

/// All sums of a kernel, `[m][2][n]`, tile by tile.
fn sums(kernel: Kernel, a: &FloatMatrix<'_>, tiles: &[RowTile], packed: &PackedGateUp) -> Vec<f32> {
    let mut buffer = poisoned(a.rows(), a.cols());
    sums_of(&kernel.prepare(2, a, None, tiles, &mut buffer).all(2), a.rows(), tiles, packed, MAX_TILE_ROWS)
}

/// The same of bound kernels, for so many rows of a tile at a time.
fn sums_of(
    bound: &Bound<'_>,
    m: usize,
    tiles: &[RowTile],
    packed: &PackedGateUp,
    at_once: usize,
) -> Vec<f32> {
    let n = packed.n();
    let mut out = vec![0.0; m * 2 * n];
    for tile in tiles {
        for panel in 0..packed.panels() {
            let mut sums = vec![];
            for start in (0..tile.rows).step_by(at_once) {
                let rows = start..tile.rows.min(start + at_once);
                let mut room = vec![f32::NAN; rows.len() * TILE_COLS];
                bound.multiply(tile, rows, packed, panel..panel + 1, &mut room, |_, rows, part| {
                    let after = sums.len() + part.len();
                    assert_eq!(rows, sums.len() / TILE_COLS..after / TILE_COLS, "in order");
                    sums.extend_from_slice(part);
                });
            }
            assert_eq!(sums.len(), tile.rows * TILE_COLS);
            for (row, sums) in sums.chunks_exact(TILE_COLS).enumerate() {
                for (half, sums) in sums.chunks_exact(PANEL).enumerate() {
                    let cols = PANEL.min(n - panel * PANEL);
                    let to = ((tile.first_row + row) * 2 + half) * n + panel * PANEL;
                    let unit = bound.sum_unit(packed);
                    out[to..to + cols].iter_mut().zip(sums).for_each(|(out, sum)| *out = unit * sum);
                    assert!(
                        sums[cols..].iter().all(|&x| x == 0.0 || x.is_nan()),
                        "features that do not exist"
                    );
                }
            }
        }
    }
    out
}

fn one_tile(m: usize) -> [RowTile; 1] {
    [RowTile { group: 0, first_row: 0, rows: m }]
}

/// The order of sums that the heads of `digits` and `kernel` state, in scalar code. Integers may be `short` unless floats are
/// f32.
fn scalar_sum(a: &[f32], b: &QuantizedMatrix<'_>, n: usize, rows: usize, short: bool) -> f32 {
    let scale = |k: usize| b.format().decode_scale(b.scale_byte(n, k / b.format().block_len()));
    let code = |k: usize| e2m1::decode(b.code(n, k));
    if rows == 1 {
        let (mut sum, share) = (0f32, (a.len() as f64 / 2f64.powi(25)).min(2f64.powi(-12)));
        for (first, a) in (0..a.len()).step_by(16).zip(a.as_chunks::<16>().0) {
            let a = a.map(f64::from);
            let mut rest = a;
            let matters =
                |rest: &[f64; 16]| rest.iter().zip(&a).any(|(rest, a)| rest.abs() > share * a.abs());
            while matters(&rest) {
                let largest = rest.iter().fold(0f64, |most, x| most.max(x.abs()));
                let part = |bits: i32| {
                    // The smallest power of two for which the largest multiple, and a little more, has so many bits.
                    let exponent = (-100..40).find(|&e| 1.005 * largest < 2f64.powi(e + bits)).unwrap();
                    let integers = rest.map(|x| (x * 2f64.powi(-exponent)).round_ties_even());
                    let rest = std::array::from_fn(|i| rest[i] - integers[i] * 2f64.powi(exponent));
                    (exponent, integers, rest)
                };
                let two_digits = Some(part(15)).filter(|part| short && !matters(&part.2));
                let (exponent, integers);
                (exponent, integers, rest) = two_digits.unwrap_or_else(|| part(22));
                let dot: f64 = (0..16).map(|i| integers[i] * f64::from(code(first + i))).sum();
                sum = (dot as f32).mul_add(2f32.powi(exponent) * scale(first), sum);
            }
        }
        return sum;
    }
    if short {
        return scalar_pairs(a, scale, code);
    }
    if rows <= FEW_ROWS {
        let mut totals = [0f32; 2];
        for first in (0..a.len()).step_by(16) {
            for (x, total) in totals.iter_mut().enumerate() {
                let of_chain = (first..first + 16).filter(|k| k % 4 / 2 == x);
                let chain = of_chain.fold(0f32, |s, k| code(k).mul_add(a[k], s));
                *total = chain.mul_add(scale(first), *total);
            }
        }
        return totals[0] + totals[1];
    }
    let blocks = (0..a.len()).step_by(BLOCK_K).map(|first| {
        let end = a.len().min(first + BLOCK_K);
        (first..end).fold(0f32, |s, k| a[k].mul_add(code(k) * scale(k), s))
    });
    blocks.reduce(|total, chain| total + chain).unwrap()
}

/// The order of sums that the head of `pairs` states.
fn scalar_pairs(a: &[f32], scale: impl Fn(usize) -> f32, code: impl Fn(usize) -> f32) -> f32 {
    let mut sum = 0f32;
    for first in (0..a.len()).step_by(BLOCK_K) {
        let ks = first..a.len().min(first + BLOCK_K);
        let mut rests = vec![];
        for first in ks.step_by(16) {
            let largest = a[first..first + 16].iter().fold(0f32, |most, x| most.max(x.abs()));
            let exponent = (-100..40).find(|&e| 1.005 * largest < 2f32.powi(e + 15)).unwrap();
            let mut dot = 0f32;
            for (k, x) in (first..).zip(&a[first..first + 16]) {
                let integer = (x * 2f32.powi(-exponent)).round_ties_even();
                dot += integer * code(k);
                rests.push((k, x - integer * 2f32.powi(exponent)));
            }
            sum = dot.mul_add(2f32.powi(exponent) * scale(first), sum);
        }
        for (k, rest) in rests {
            sum = rest.mul_add(code(k) * scale(k), sum);
        }
    }
    sum
}

/// How a kernel writes the first block of these rows.
fn layout(kernel: Kernel, a: &FloatMatrix<'_>) -> Layout {
    let mut buffer = poisoned(a.rows(), a.cols());
    kernel.prepare(1, a, None, &one_tile(a.rows()), &mut buffer).all(1);
    buffer.layouts[0]
}

/// Whether a kernel writes these rows as digits.
fn are_digits(kernel: Kernel, a: &FloatMatrix<'_>) -> bool {
    matches!(layout(kernel, a), Layout::Digits { .. })
}

/// How many rests a kernel leaves of the first block of these rows, if it writes them as integers.
fn rests(kernel: Kernel, a: &FloatMatrix<'_>) -> Option<usize> {
    if let Layout::Pairs { rests } = layout(kernel, a) { Some(rests) } else { None }
}

/// The kernel of an instruction set.
fn kernel(isa: Isa, format: BlockFormat) -> Kernel {
    Kernel::new(isa.checked().unwrap(), format)
}

/// The kernel of an instruction set, with fused multiply-adds.
fn fused(isa: Isa, format: BlockFormat) -> Kernel {
    match isa {
        Isa::Portable => Kernel::new(Available::fused_portable(), format),
        _ => kernel(isa, format),
    }
}

fn assert_bits(got: &[f32], want: &[f32], what: &str) {
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan()), "{what}, element {i}: {g:e} {w:e}");
    }
}

fn as_bf16(m: usize, k: usize, data: &[f32]) -> FloatMatrix<'static> {
    let data: Vec<bf16> = data.iter().map(|&x| bf16::from_f32(x)).collect();
    FloatMatrix::Bf16(Matrix::new("a", m, k, data).unwrap())
}

fn bf16s(m: usize, k: usize) -> FloatMatrix<'static> {
    as_bf16(m, k, &activations(m, k))
}

#[test]
fn the_order_of_sums_is_the_documented_one_exact() {
    let (n, k) = (5, 2 * BLOCK_K + 32);
    for format in BlockFormat::ALL {
        let pair = weights(format, n, k, 1);
        let packed = PackedGateUp::pack(&pair).unwrap();
        for m in [1, 2, FEW_ROWS, FEW_ROWS + 1] {
            let (kernel, data) = (fused(Isa::Portable, format), activations(m, k));
            for (a, short) in [(bf16s(m, k), true), (f32_matrix(m, k, &data), false)] {
                assert_eq!(are_digits(kernel, &a), m == 1);
                // Some leave a rest, not many.
                assert!(m == 1 || !short || rests(kernel, &a).is_some_and(|rests| rests > 0));
                let mut want = vec![];
                for row in 0..m {
                    let row: Vec<f32> = (0..k).map(|k| a.value(row, k)).collect();
                    for half in [&pair.gate, &pair.up] {
                        want.extend((0..n).map(|n| scalar_sum(&row, half, n, m, short)));
                    }
                }
                assert_bits(&sums(kernel, &a, &one_tile(m), &packed), &want, &format!("{format} M={m}"));
            }
        }
    }
}

#[test]
fn every_isa_gives_the_same_bits_as_portable_exact() {
    for format in BlockFormat::ALL {
        // CI runs ARM64's tests in an emulator, where all lengths would take minutes.
        let ks = [32, BLOCK_K + 64, 96, BLOCK_K];
        for &k in &ks[..if cfg!(target_arch = "aarch64") { 2 } else { 4 }] {
            let packed = PackedGateUp::pack(&weights(format, 19, k, 2)).unwrap();
            for m in (1..=FEW_ROWS + 1).chain([13, 14, 15, 29, MAX_TILE_ROWS - 1, MAX_TILE_ROWS]) {
                let data = activations(m, k);
                for a in [f32_matrix(m, k, &data), bf16s(m, k)] {
                    let want = sums(fused(Isa::Portable, format), &a, &one_tile(m), &packed);
                    for isa in isas() {
                        let kernel = fused(isa, format);
                        if matches!(layout(kernel, &a), Layout::Tiles { .. }) {
                            // Another order of sums, which `tiles` tests.
                            assert!(isa >= Isa::Avx512Bf16 && m >= 8);
                            continue;
                        }
                        let got = sums(kernel, &a, &one_tile(m), &packed);
                        assert_bits(&got, &want, &format!("{isa} {format} M={m} K={k}"));
                    }
                }
            }
        }
    }
}

#[test]
fn what_takes_too_many_digits_is_multiplied_as_floats() {
    let kernel = kernel(Isa::best(), BlockFormat::Nvfp4);
    let similar = activations(1, 64);
    for a in [bf16s(1, 64), f32_matrix(1, 64, &similar)] {
        assert!(are_digits(kernel, &a), "one row");
    }
    assert!(!are_digits(kernel, &bf16s(2, 64)), "two rows");
    // Sixteen numbers that span 15 and 45 bits.
    let spread = |bits: i32| -> Vec<f32> { (0..64).map(|k| 1.25 * 2f32.powi(-(k % 16) * bits)).collect() };
    assert!(are_digits(kernel, &f32_matrix(1, 64, &spread(1))));
    assert!(!are_digits(kernel, &f32_matrix(1, 64, &spread(3))));
    for bad in [f32::NAN, f32::INFINITY, 1e30, 1e-35] {
        let mut data = similar.clone();
        data[20] = bad;
        assert!(!are_digits(kernel, &f32_matrix(1, 64, &data)), "{bad}");
    }
}

/// f16 and bf16 lose nothing, whatever integers they become: their sums have few roundings against those of f64.
#[test]
fn f16_and_bf16_activations_are_used_exactly() {
    let (m, n, k) = (11, 7, BLOCK_K + 48);
    let pair = weights(BlockFormat::Nvfp4, n, k, 5);
    let packed = PackedGateUp::pack(&pair).unwrap();
    let mut random = Random(6);
    let (usual, small, large) = (0..m * k, 1e-3, 1e9);
    // Usual numbers; one that is large in each chunk; exponents all over the place; few that are not 0.
    let of_kind = |kind: usize, i: usize, random: &mut Random| {
        let x = random.float();
        match kind {
            0 => x,
            1 => x * if i % 16 == i / 16 % 16 { 500.0 } else { 1.0 },
            2 => x * 2f32.powi(-((random.bits() % 24) as i32)),
            _ => x * f32::from(u8::from(random.bits().is_multiple_of(37))),
        }
    };
    for (kind, integers) in [(0, true), (1, false), (2, false), (3, true)] {
        let data: Vec<f32> = usual.clone().map(|i| of_kind(kind, i, &mut random)).collect();
        for rows in [1, 3, m] {
            let f16s: Vec<f16> = data[..rows * k].iter().map(|&x| f16::from_f32(x * small)).collect();
            let bf16s: Vec<bf16> = data[..rows * k].iter().map(|&x| bf16::from_f32(x * large)).collect();
            for a in [
                FloatMatrix::F16(Matrix::new("a", rows, k, f16s).unwrap()),
                FloatMatrix::Bf16(Matrix::new("a", rows, k, bf16s).unwrap()),
            ] {
                for isa in isas() {
                    let kernel = fused(isa, BlockFormat::Nvfp4);
                    if rows == m && matches!(a, FloatMatrix::Bf16(_)) {
                        assert_eq!(rests(kernel, &a).is_some(), integers, "kind {kind}");
                    }
                    assert_close(
                        &sums(kernel, &a, &one_tile(rows), &packed),
                        &a,
                        &pair,
                        &format!("{isa} {kind}"),
                    );
                }
            }
        }
    }
}

/// Asserts that sums are a little closer to those of f64 than sums in f32 with one rounding per term.
fn assert_close(got: &[f32], a: &FloatMatrix<'_>, pair: &GateUp<'_>, what: &str) {
    for row in 0..a.rows() {
        for (half, b) in [&pair.gate, &pair.up].into_iter().enumerate() {
            for n in 0..pair.n() {
                let terms = (0..a.cols()).map(|k| f64::from(a.value(row, k)) * b.value(n, k));
                let (want, size) = terms.fold((0.0, 0.0), |(s, t), x| (s + x, t + x.abs()));
                let got = f64::from(got[(row * 2 + half) * pair.n() + n]);
                let bound = size * a.cols() as f64 * 2f64.powi(-25);
                assert!((got - want).abs() <= bound, "{what}, row {row} of {}: {got} {want}", a.rows());
            }
        }
    }
}

#[test]
fn views_and_several_tiles_give_the_same_bits_exact() {
    // Tiles of AMX do not take this K: they would take all rows together, but not a part of them.
    let (m, k, stride) = (31, 80, 80 + 5);
    let packed = PackedGateUp::pack(&weights(BlockFormat::Nvfp4, 33, k, 6)).unwrap();
    let data = activations(m, k);
    let mut padded = vec![f32::NAN; m * stride];
    for (row, out) in data.chunks_exact(k).zip(padded.chunks_exact_mut(stride)) {
        out[..k].copy_from_slice(row);
    }
    let view = FloatMatrix::F32(Matrix::strided("a", m, k, stride, &padded[..]).unwrap());
    let kernel = kernel(Isa::best(), BlockFormat::Nvfp4);
    let want = sums(kernel, &f32_matrix(m, k, &data), &one_tile(m), &packed);
    let tile = |first_row, rows| RowTile { group: 0, first_row, rows };
    let got = sums(kernel, &view, &[tile(0, 10), tile(10, 9), tile(19, 12)], &packed);
    assert_bits(&got, &want, "view");
}

#[test]
fn rows_do_not_touch_each_other() {
    let k = 48;
    let packed = PackedGateUp::pack(&weights(BlockFormat::Nvfp4, 16, k, 7)).unwrap();
    let kernel = kernel(Isa::best(), BlockFormat::Nvfp4);
    for (m, special, short) in [(3, f32::NAN, false), (20, f32::INFINITY, false), (20, f32::INFINITY, true)] {
        let of = |data: &[f32]| match short {
            true => sums(kernel, &as_bf16(m, k, data), &one_tile(m), &packed),
            false => sums(kernel, &f32_matrix(m, k, data), &one_tile(m), &packed),
        };
        let mut data = activations(m, k);
        let clean = of(&data);
        data[k + 5] = special;
        let got = of(&data);
        for (row, (got, clean)) in got.chunks_exact(32).zip(clean.chunks_exact(32)).enumerate() {
            match row {
                // Infinity times a code of zero is NaN.
                1 => assert!(got.iter().all(|x| !x.is_finite())),
                _ => assert_bits(got, clean, "another row"),
            }
        }
    }
}

#[test]
fn every_code_times_every_scale_is_exact() {
    let one = |format: BlockFormat, scale: u8| {
        let k = format.block_len();
        let codes: Vec<u8> = (0..k as u8 / 2).map(|i| e2m1::pack(2 * i % 16, 2 * i % 16 + 1)).collect();
        QuantizedMatrix::new("w", format, 1, k, codes, vec![scale], ScaleLayout::Linear, GlobalScale::ONE)
            .unwrap()
    };
    for isa in isas() {
        let nvfp4 = (0..0x7F).map(|scale| one(BlockFormat::Nvfp4, scale));
        for weight in nvfp4.chain((0..0xFF).map(|scale| one(BlockFormat::Mxfp4, scale))) {
            let (format, k, scale) = (weight.format(), weight.k(), weight.scale_byte(0, 0));
            let packed = PackedGateUp::pack(&GateUp::new(weight.clone(), weight.clone())).unwrap();
            // Row r picks element r.
            let mut data = vec![0.0; 16 * k];
            (0..16).for_each(|i| data[i * k + i] = 1.0);
            for (rows, short) in [(FEW_ROWS, false), (FEW_ROWS, true), (16, false), (16, true)] {
                let data = &data[..rows * k];
                let a = if short { as_bf16(rows, k, data) } else { f32_matrix(rows, k, data) };
                let got = sums(kernel(isa, format), &a, &one_tile(rows), &packed);
                for row in 0..rows {
                    let want = weight.value(0, row) as f32;
                    assert_eq!(
                        got[row * 2..row * 2 + 2],
                        [want; 2],
                        "{isa} {format} scale {scale:#04x} code {row}"
                    );
                }
            }
        }
    }
}
