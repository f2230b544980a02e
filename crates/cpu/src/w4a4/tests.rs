//! Every instruction set of the machine against a scalar model with the same bits.

use std::sync::Mutex;

use dualgemm_formats::scalar::e2m1;
use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{AFormat, AOperand, DualGemmDesc, GateUp};
use half::bf16;
use proptest::prelude::*;

use super::vector::scale_unit;
use super::*;
use crate::aligned::Aligned;
use crate::fixtures::{Random, isas, quantized, weights};
use crate::tile::{TILE_COLS, TileKernel};
use crate::w4a16;
use crate::{CpuOptions, CpuPlan, Error, Group, Isa, PackedGateUp, Tile, TileSink, Workspace};

/// Collects sums, `[row][gate features, then up features]`.
struct Collect {
    n: usize,
    sums: Mutex<Vec<f32>>,
}

impl TileSink for Collect {
    fn store(&self, tile: &mut Tile<'_>) {
        let mut sums = self.sums.lock().unwrap();
        for row in 0..tile.rows.rows {
            let to = (tile.rows.first_row + row) * 2 * self.n + tile.first_col;
            let of_row = &tile.sums[32 * row..][..32];
            sums[to..to + tile.cols].copy_from_slice(&of_row[..tile.cols]);
            sums[to + self.n..][..tile.cols].copy_from_slice(&of_row[16..][..tile.cols]);
            assert!(of_row[tile.cols..16].iter().chain(&of_row[16 + tile.cols..]).all(|&sum| sum == 0.0));
        }
    }
}

/// Random codes and scales.
fn random(
    name: &'static str,
    format: BlockFormat,
    m: usize,
    k: usize,
    seed: u64,
) -> QuantizedMatrix<'static> {
    quantized(name, format, m, k, &mut Random(seed))
}

/// The definition of the bits: chunks of 16 ascending, an exact integer times both scales, one addition each.
fn model(a: &QuantizedMatrix<'_>, weights: &GateUp<'_>) -> Vec<f32> {
    let doubled = |m: &QuantizedMatrix<'_>, row, k| i32::from(e2m1::DOUBLED[usize::from(m.code(row, k))]);
    let scale = |m: &QuantizedMatrix<'_>, row, c: usize| {
        m.format().decode_scale(m.scale_byte(row, c * 16 / m.format().block_len()))
    };
    let mut sums = Vec::new();
    for row in 0..a.rows() {
        for b in [&weights.gate, &weights.up] {
            for feature in 0..b.rows() {
                let mut sum = 0f32;
                for c in 0..a.k() / 16 {
                    let dot: i32 =
                        (16 * c..16 * c + 16).map(|k| doubled(a, row, k) * doubled(b, feature, k)).sum();
                    let scale_a = scale(a, row, c) / unit_of(a.format());
                    sum += dot as f32 * scale_a * (scale(b, feature, c) * scale_unit(b.format()));
                }
                sums.push(sum);
            }
        }
    }
    sums
}

/// The value that a block scale of 1 of A stands for.
fn unit_of(format: BlockFormat) -> f32 {
    match format {
        BlockFormat::Nvfp4 => 1.0,
        BlockFormat::Mxfp4 => 4096.0,
    }
}

fn run(
    isa: Isa,
    threads: usize,
    desc: &DualGemmDesc,
    a: &AOperand<'_>,
    groups: &[Group<'_>],
) -> Result<Vec<f32>, Error> {
    let plan =
        CpuPlan::new(desc, CpuOptions { isa: Some(isa), threads: Some(threads), ..CpuOptions::default() })?;
    let mut workspace = Workspace::new(&plan, groups.len())?;
    let collect = Collect { n: desc.n, sums: Mutex::new(vec![f32::NAN; a.rows() * desc.n * 2]) };
    let collect = workspace.multiply(a, groups, |_| Ok(collect))?;
    Ok(collect.sums.into_inner().unwrap())
}

fn desc_of(a: &AOperand<'_>, weights: &GateUp<'_>) -> DualGemmDesc {
    DualGemmDesc::new(a.rows(), weights.n(), weights.k(), AFormat::of(a), weights.gate.format())
}

/// Bits of every instruction set, with one thread and several, against the model.
fn check_exact(a: QuantizedMatrix<'_>, weights: &GateUp<'_>) {
    let want = model(&a, weights);
    let packed = PackedGateUp::pack(weights).unwrap();
    let a = AOperand::Quantized(a);
    let desc = desc_of(&a, weights);
    let group = [Group { first_row: 0, rows: a.rows(), weights: &packed }];
    // Tiles have another order of sums.
    let tiles = |isa| isa == Isa::AmxBf16 && a.rows() >= MIN_TILE_ROWS;
    for isa in isas().filter(|&isa| !tiles(isa)) {
        for threads in [1, 3] {
            let got = run(isa, threads, &desc, &a, &group).unwrap();
            for (index, (got, want)) in got.iter().zip(&want).enumerate() {
                let (row, column) = (index / (2 * desc.n), index % (2 * desc.n));
                assert_eq!(
                    got.to_bits(),
                    want.to_bits(),
                    "{isa}, {threads} threads, {desc}: row {row}, column {column}: {got:e}, model {want:e}"
                );
            }
        }
    }
}

#[test]
fn all_shapes_around_the_tile_sizes_exact() {
    for (m, n, k) in [
        (1, 1, 16),
        (1, 33, 464),
        (2, 16, 32),
        (3, 17, 48),
        (5, 31, 16),
        (17, 15, 80),
        (63, 16, 112),
        (64, 48, 16),
        (65, 20, 144),
        (130, 5, 64),
    ] {
        let seed = (m * 1000 + n * 10 + k) as u64;
        check_exact(
            random("a", BlockFormat::Nvfp4, m, k, seed),
            &weights(BlockFormat::Nvfp4, n, k, seed + 1),
        );
    }
}

/// Writes sums into `to`, `[panel][m][32]`.
fn copied(m: usize, to: &mut [f32]) -> impl FnMut(usize, Range<usize>, &mut [f32]) {
    move |panel, rows, sums| to[(panel * m + rows.start) * TILE_COLS..][..sums.len()].copy_from_slice(sums)
}

/// The values of A, doubled, as bf16: tiles multiply them in W4A16 as they multiply A itself here.
#[test]
fn tiles_give_the_bits_of_w4a16_with_the_same_numbers_exact() {
    let available = Isa::best().checked().unwrap().emulating_tiles();
    for (m, k) in [(MIN_TILE_ROWS, 32), (65, 800), (100, 1632)] {
        let pair = weights(BlockFormat::Nvfp4, 21, k, 3);
        let (a, packed) = (random("a", BlockFormat::Nvfp4, m, k, 4), PackedGateUp::pack(&pair).unwrap());
        let doubled: Vec<bf16> = (0..m * k).map(|i| bf16::from_f64(2.0 * a.value(i / k, i % k))).collect();
        let doubled = FloatMatrix::Bf16(Matrix::new("a", m, k, doubled).unwrap());
        let tile = RowTile { group: 0, first_row: 0, rows: m };
        let (mut got, mut want) = (vec![f32::NAN; m * 2 * TILE_COLS], vec![f32::NAN; m * 2 * TILE_COLS]);

        let kernel = Kernel::new(available).with_tiles(AFormat::Nvfp4, AFormat::Nvfp4, k);
        let mut blocks = Aligned::zeroed(m * kernel.row_blocks(k / CHUNK_K));
        let (source, tiles) = (Source::Quantized(&a), [tile]);
        let bound = kernel.prepare(&source, None, &tiles, &mut blocks).all(2);
        let mut room = got.clone();
        bound.multiply(&tile, 0..m, &packed, 0..2, &mut room, copied(m, &mut got));
        assert_eq!(bound.sum_unit(&packed), 0.5);

        let mut buffer = w4a16::Buffer::try_new(m, m, k, 1).unwrap();
        let kernel = w4a16::Kernel::new(available, BlockFormat::Nvfp4);
        let bound = kernel.prepare(2, &doubled, None, &tiles, &mut buffer).all(2);
        bound.multiply(&tile, 0..m, &packed, 0..2, &mut room, copied(m, &mut want));
        assert!(got.iter().zip(&want).all(|(got, want)| got.to_bits() == want.to_bits()), "{m} rows of {k}");

        for (row, got) in got.as_chunks::<TILE_COLS>().0[..m].iter().enumerate() {
            let terms = (0..k).map(|k| a.value(row, k) * pair.gate.value(0, k));
            let (want, size) = terms.fold((0.0, 0.0), |(s, t), x| (s + x, t + x.abs()));
            let bound = size * (k / TILE_K + 17) as f64 * 2f64.powi(-24);
            assert!((0.5 * f64::from(got[0]) - want).abs() <= bound, "row {row}: {} {want}", got[0]);
        }
    }
}

#[test]
fn every_pair_of_block_formats_exact() {
    for a in BlockFormat::ALL {
        for b in BlockFormat::ALL {
            for m in [1, 2, 7] {
                check_exact(random("a", a, m, 96, 5), &weights(b, 19, 96, 6));
            }
        }
    }
}

#[test]
fn stretches_of_k_beyond_the_cache_exact() {
    // 64 rows keep 128 chunks of 16 in the second-level cache: 2064 elements are one chunk more.
    check_exact(random("a", BlockFormat::Nvfp4, 64, 2064, 1), &weights(BlockFormat::Nvfp4, 33, 2064, 2));
}

/// All pairs of codes at all pairs of extreme scales: K = 16 · 16 puts code `i` of A against code `j` of B.
#[test]
fn all_code_pairs_at_extreme_scales_exact() {
    // Smallest subnormal, largest subnormal, smallest normal, 1, 448, and zero.
    let scales = [0x01, 0x07, 0x08, 0x38, 0x7E, 0x00];
    let k = 256;
    let matrix = |name, code: fn(usize) -> u8| {
        let row: Vec<u8> = (0..k / 2).map(|i| e2m1::pack(code(2 * i), code(2 * i + 1))).collect();
        let codes: Vec<u8> = scales.iter().flat_map(|_| row.clone()).collect();
        let scales: Vec<u8> = scales.iter().flat_map(|&scale| [scale; 16]).collect();
        let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
        QuantizedMatrix::new(name, format, 6, k, codes, scales, layout, GlobalScale::ONE).unwrap()
    };
    let inner = matrix("inner", |i| (i % 16) as u8);
    let outer = matrix("outer", |i| (i / 16) as u8);
    check_exact(inner.clone(), &GateUp::new(outer.clone(), inner.clone()));
    check_exact(outer.clone(), &GateUp::new(inner, outer));
}

/// All pairs of the largest and smallest scales of each format, with codes that are all largest or all zero.
#[test]
fn extreme_scales_are_right_together() {
    let formats = [(BlockFormat::Nvfp4, [0x01, 0x38, 0x7E]), (BlockFormat::Mxfp4, [0, 127, 254])];
    // Rows of 32 elements with one scale each.
    let matrix = |name, format: BlockFormat, scales: &[u8], codes: u8| {
        let (rows, layout) = (scales.len(), ScaleLayout::Linear);
        let scales: Vec<u8> = scales.iter().flat_map(|&scale| vec![scale; 32 / format.block_len()]).collect();
        QuantizedMatrix::new(name, format, rows, 32, vec![codes; rows * 16], scales, layout, GlobalScale::ONE)
            .unwrap()
    };
    for ((format_a, scales_a), (format_b, scales_b)) in formats.iter().flat_map(|a| formats.map(|b| (*a, b)))
    {
        // One row and several go different ways.
        let [low, one, high] = scales_a;
        for scales_a in [vec![low], vec![one], vec![high], vec![low, one, high, high, low]] {
            for (codes_a, codes_b) in [(0x77, 0x77), (0x00, 0x77), (0x77, 0x00)] {
                let b = matrix("gate", format_b, &scales_b, codes_b);
                let packed = PackedGateUp::pack(&GateUp::new(b.clone(), b)).unwrap();
                let a = AOperand::Quantized(matrix("a", format_a, &scales_a, codes_a));
                let desc = DualGemmDesc::new(scales_a.len(), 3, 32, AFormat::of(&a), format_b);
                let group = [Group { first_row: 0, rows: scales_a.len(), weights: &packed }];
                let unit = f64::from(0.25 * unit_of(format_a) / scale_unit(format_b));
                for isa in isas() {
                    for (i, sum) in run(isa, 1, &desc, &a, &group).unwrap().into_iter().enumerate() {
                        let scale = |format: BlockFormat, byte| f64::from(format.decode_scale(byte));
                        let scales = scale(format_a, scales_a[i / 6]) * scale(format_b, scales_b[i % 3]);
                        let want = if codes_a == codes_b { 32.0 * 36.0 * scales } else { 0.0 };
                        let got = f64::from(sum) * unit;
                        // Results beyond f32 may be infinite.
                        let right = (got - want).abs() <= 2f64.powi(-137) || got.min(want) >= 2f64.powi(127);
                        assert!(right, "{isa}, {desc}, element {i}: {got:e}, not {want:e}");
                    }
                }
            }
        }
    }
}

#[test]
fn largest_dot_products_do_not_overflow() {
    for (a, b) in [(0x77, 0x77), (0xFF, 0x77), (0x77, 0xFF), (0xFF, 0xFF)] {
        let matrix = |name, byte: u8, rows| {
            let (codes, scales) = (vec![byte; rows * 16], vec![0x7E; rows * 2]);
            let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
            QuantizedMatrix::new(name, format, rows, 32, codes, scales, layout, GlobalScale::ONE).unwrap()
        };
        check_exact(matrix("a", a, 3), &GateUp::new(matrix("gate", b, 16), matrix("up", b ^ 0x88, 16)));
    }
}

/// Batch entries are consecutive groups of rows of A.
#[test]
fn batch_entries_use_their_own_weights_exact() {
    let (m, n, k) = (3, 18, 48);
    let a = random("a", BlockFormat::Nvfp4, 3 * m, k, 30);
    let entries: Vec<GateUp<'_>> = (0..3).map(|i| weights(BlockFormat::Nvfp4, n, k, 40 + i)).collect();
    let packed: Vec<PackedGateUp> = entries.iter().map(|e| PackedGateUp::pack(e).unwrap()).collect();
    let groups: Vec<Group<'_>> =
        packed.iter().enumerate().map(|(l, weights)| Group { first_row: l * m, rows: m, weights }).collect();
    let models: Vec<Vec<f32>> = entries.iter().map(|entry| model(&a, entry)).collect();
    let a = AOperand::Quantized(a);
    let desc = DualGemmDesc { m, batch: 3, ..desc_of(&a, &entries[0]) };
    let got = run(Isa::best(), 2, &desc, &a, &groups).unwrap();
    for (row, got) in got.chunks_exact(2 * n).enumerate() {
        assert_eq!(got, &models[row / m][row * 2 * n..][..2 * n], "row {row}");
    }
}

#[test]
fn no_rows_at_all_is_fine() {
    let weights = weights(BlockFormat::Nvfp4, 8, 32, 1);
    let packed = PackedGateUp::pack(&weights).unwrap();
    let a = AOperand::Quantized(random("a", BlockFormat::Nvfp4, 4, 32, 2));
    let empty = Group { first_row: 4, rows: 0, weights: &packed };
    let sums = run(Isa::best(), 2, &desc_of(&a, &weights), &a, &[empty, empty]).unwrap();
    assert!(sums.iter().all(|sum| sum.is_nan()));
}

#[test]
fn what_does_not_fit_the_plan_is_refused_by_name() {
    let (gate_up, other) = (weights(BlockFormat::Nvfp4, 8, 32, 1), weights(BlockFormat::Nvfp4, 8, 64, 1));
    let (packed, other) = (PackedGateUp::pack(&gate_up).unwrap(), PackedGateUp::pack(&other).unwrap());
    let a = AOperand::Quantized(random("a", BlockFormat::Nvfp4, 4, 32, 2));
    let desc = desc_of(&a, &gate_up);
    let message = |a: &AOperand<'_>, groups: &[(usize, usize, &PackedGateUp)]| {
        let groups: Vec<Group<'_>> =
            groups.iter().map(|&(first_row, rows, weights)| Group { first_row, rows, weights }).collect();
        run(Isa::Portable, 1, &desc, a, &groups).unwrap_err().to_string()
    };
    assert_eq!(
        message(&a, &[(0, 4, &other)]),
        "a pack of weights is nvfp4 [8, 64] for gate and up; the plan was made for nvfp4 [8, 32] for gate and up"
    );
    assert_eq!(
        message(&a, &[(0, 2, &packed), (1, 2, &packed)]),
        "group 1: rows 1..3 do not fit; they must follow row 2 and end by 4"
    );
    assert!(message(&a, &[(usize::MAX, 2, &packed)]).starts_with("group 0"));
    let wide = AOperand::Quantized(random("a", BlockFormat::Nvfp4, 4, 64, 2));
    assert_eq!(
        message(&wide, &[(0, 4, &packed)]),
        "A is nvfp4 [4, 64]; the plan was made for nvfp4 with up to 4 rows and K = 32"
    );
    let scales = vec![0x7F; 8];
    let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
    let nan =
        QuantizedMatrix::new("a", format, 4, 32, vec![0; 64], scales, layout, GlobalScale::ONE).unwrap();
    assert!(
        message(&AOperand::Quantized(nan), &[(0, 4, &packed)]).starts_with("a: block scale 0x7f at row 0")
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_shape_exact(m in 1usize..70, n in 1usize..50, chunks in 1usize..12, seed: u64, formats in 0usize..4) {
        let (a, b) = (BlockFormat::ALL[formats % 2], BlockFormat::ALL[formats / 2]);
        let k = 16 * chunks * if formats == 0 { 1 } else { 2 };
        check_exact(random("a", a, m, k, seed), &weights(b, n, k, seed ^ 5));
    }
}
