//! Faults that other software had with scale layouts, padding and offsets, each as a test of its kind. Those of
//! quantizers are in `quantize.rs`.

use dualgemm_formats::gpumode::GpuModeScales;
use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout, gguf};

const ROWS: [usize; 8] = [1, 31, 33, 127, 129, 130, 464, 576];
const BLOCKS: [usize; 7] = [1, 3, 5, 8, 29, 36, 58];

fn shapes() -> impl Iterator<Item = (usize, usize)> {
    ROWS.into_iter().flat_map(|rows| BLOCKS.into_iter().map(move |blocks| (rows, blocks)))
}

fn scales(rows: usize, blocks: usize) -> Vec<u8> {
    (0..rows * blocks).map(|i| (i % 125) as u8 + 1).collect()
}

fn matrix(rows: usize, blocks: usize, scales: Vec<u8>, layout: ScaleLayout) -> QuantizedMatrix<'static> {
    let codes: Vec<u8> = (0..rows * blocks * 8).map(|i| (i * 29) as u8).collect();
    let (format, one) = (BlockFormat::Nvfp4, GlobalScale::ONE);
    QuantizedMatrix::new("w", format, rows, blocks * 16, codes, scales, layout, one).unwrap()
}

/// vllm#23140, #22450, Model-Optimizer#2038: shapes that a reshape cannot express; swizzling twice.
#[test]
fn every_pair_of_layouts_converts_there_and_back() {
    for (rows, blocks) in shapes() {
        let linear = scales(rows, blocks);
        for from in ScaleLayout::ALL {
            let held = ScaleLayout::Linear.convert(&linear, from, rows, blocks);
            for to in ScaleLayout::ALL {
                let there = from.convert(&held, to, rows, blocks);
                assert_eq!(to.convert(&there, from, rows, blocks), held, "{rows} {blocks} {from} {to}");
                assert_eq!(there, ScaleLayout::Linear.convert(&linear, to, rows, blocks));
                assert_eq!(there.iter().filter(|&&b| b != 0).count(), rows * blocks, "padding is zero");
            }
        }
        let m = matrix(rows, blocks, linear, ScaleLayout::Linear);
        let once = m.clone().with_scale_layout(ScaleLayout::Sf128x4);
        assert_eq!(once.clone().with_scale_layout(ScaleLayout::Sf128x4), once);
    }
}

/// vllm#55643, #55456, flashinfer#3722: a buffer sized for one layout, written in another.
#[test]
fn buffer_sizes_are_those_of_whole_atoms() {
    for m in [1usize, 5, 32, 127, 128, 129, 8191, 8193] {
        for blocks in [1usize, 896, 897] {
            let padded_blocks = blocks.div_ceil(4) * 4;
            assert_eq!(ScaleLayout::Sf128x4.len(m, blocks), m.div_ceil(128) * 128 * padded_blocks);
            assert_eq!(ScaleLayout::Sf8x4.len(m, blocks), m.div_ceil(8) * 8 * padded_blocks);
            assert_eq!(ScaleLayout::Linear.len(m, blocks), m * blocks);
        }
    }
    let short = vec![0; 896];
    let (format, one) = (BlockFormat::Nvfp4, GlobalScale::ONE);
    let error = QuantizedMatrix::new("w", format, 1, 14336, vec![0; 7168], short, ScaleLayout::Sf128x4, one)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "w: scales hold 896 bytes; 1 rows of 896 blocks in 128x4 layout need 114688"
    );
}

/// vllm#45741, #31099, flashinfer#2861, #3057: whatever lies in the padding, no real row changes and no check trips.
#[test]
fn padding_is_never_read() {
    for (rows, blocks) in shapes() {
        for layout in [ScaleLayout::Sf128x4, ScaleLayout::Sf8x4] {
            let clean =
                matrix(rows, blocks, scales(rows, blocks), ScaleLayout::Linear).with_scale_layout(layout);
            for poison in [0x7E, 0x7F, 0xFF] {
                // Real scales are never 0 here, so every 0 is padding.
                let poisoned = clean.scales().iter().map(|&b| if b == 0 { poison } else { b }).collect();
                let dirty = matrix(rows, blocks, poisoned, layout);
                dirty.check_scales().unwrap();
                let linear = |m: &QuantizedMatrix<'static>| m.clone().with_scale_layout(ScaleLayout::Linear);
                assert_eq!(linear(&dirty), linear(&clean));
                let other = dirty.shard_rows(0, rows).unwrap();
                assert_eq!(
                    other.scales().iter().filter(|&&b| b != 0).count(),
                    blocks,
                    "padding of a part is zero"
                );
            }
        }
    }
}

/// vllm#44667: offsets past 2³¹ and 2³².
#[test]
fn large_offsets_exact() {
    let (row, block, blocks) = (5_000_000usize, 1021usize, 1024usize);
    let (r, c, b) = (row as u64, block as u64, blocks as u64);
    let exact = [
        r * b + c,
        (r / 128 * (b / 4) + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4,
        (r / 8 * (b / 4) + c / 4) * 32 + r % 8 * 4 + c % 4,
    ];
    for (layout, exact) in ScaleLayout::ALL.into_iter().zip(exact) {
        assert!(exact > 1 << 32);
        assert_eq!(layout.offset(row, block, blocks) as u64, exact, "{layout}");
    }
    let view = GpuModeScales::new("sf", row + 1, blocks, 3).unwrap();
    let entry = ScaleLayout::Sf128x4.len(row + 1, blocks) as u64;
    assert_eq!(view.offset(row, block, 2) as u64, 2 * entry + exact[1]);
    assert_eq!(gguf::len("w", row, blocks * 16).unwrap() as u64, r * b / 4 * 36);
}
