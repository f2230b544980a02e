//! Descriptors and layouts against what CUTLASS's own headers say of the same shapes: `testdata/cutlass/README.md`.

use dualgemm_formats::ScaleLayout;
use dualgemm_ptx::layout::{
    BlockScaledDesc, InstrDesc, OperandFormat, ScaleFormat, SmemTile, Swizzle, tcgen05_smem_desc,
};
use dualgemm_sim::tcgen05::{Cell, DataPath, scale};

const GOLDEN: &str = include_str!("../../testdata/cutlass/golden.txt");

/// The numbers of every line that starts with `word`, some of them hexadecimal from position `hex` on.
fn lines(word: &str, hex: usize) -> Vec<Vec<u64>> {
    let number = |(i, text): (usize, &str)| u64::from_str_radix(text, if i < hex { 10 } else { 16 }).unwrap();
    let lines = GOLDEN.lines().filter_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
    let lines: Vec<Vec<u64>> = lines.map(|line| line.split(' ').enumerate().map(number).collect()).collect();
    assert!(!lines.is_empty(), "{word}");
    lines
}

#[test]
fn instruction_descriptors_are_those_of_cutlass_exact() {
    for line in lines("instruction", 2) {
        let (m, n) = (line[0] as u32, line[1] as u32);
        let ours = [
            BlockScaledDesc::nvfp4(m, n).encode(),
            BlockScaledDesc { scale: ScaleFormat::Ue8m0, ..BlockScaledDesc::nvfp4(m, n) }.encode(),
            InstrDesc::new(m, n, OperandFormat::F16).encode(),
            InstrDesc::new(m, n, OperandFormat::Bf16).encode(),
        ];
        assert_eq!(ours.map(|desc| u64::from(desc.unwrap())), line[2..], "{m}x{n}");
    }
}

#[test]
fn descriptors_of_tiles_in_shared_memory_are_those_of_cutlass_exact() {
    for line in lines("operand", 4) {
        let [span, rows, row_bytes, step] = [0, 1, 2, 3].map(|i| line[i] as u32);
        let swizzle = match span {
            0 => Swizzle::None,
            32 => Swizzle::B32,
            64 => Swizzle::B64,
            _ => Swizzle::B128,
        };
        let tile = SmemTile::new(rows, row_bytes, swizzle).unwrap();
        // A single group of eight rows has no distance to the next.
        let stride = if rows == 8 { 0x3FFF << 32 } else { 0 };
        let ours = (tile.tcgen05_desc() + tile.advance_k(32 * step)) & !stride;
        assert_eq!(ours, line[4] & !stride, "{swizzle:?} {rows}x{row_bytes}, step {step}");
    }
    for line in lines("atom", 1) {
        let ours = tcgen05_smem_desc(0, 16, line[0] as u32, Swizzle::None);
        assert_eq!(ours, line[1], "eight rows {} bytes from the next", line[0]);
    }
}

#[test]
fn scales_lie_in_global_memory_where_cutlass_has_them_exact() {
    for line in lines("scales", usize::MAX) {
        let [vec, rows, k, row] = [0, 1, 2, 3].map(|i| line[i] as usize);
        let blocks = k.div_ceil(vec);
        let ours = (0..blocks).map(|block| ScaleLayout::Sf128x4.offset(row, block, blocks) as u64);
        assert_eq!(ours.collect::<Vec<_>>(), line[4..], "row {row} of {rows}x{k}");
    }
}

/// What the simulator's tensor cores read and write, on which the kernels' tests rest.
#[test]
fn tensor_memory_is_laid_out_as_cutlass_has_it_exact() {
    for line in lines("sums", 3) {
        let [n, row, column] = [0, 1, 2].map(|i| line[i] as u32);
        let (_, one) = DataPath::new(128, 1).accumulator(n, row, column);
        let (cta, two) = DataPath::new(256, 2).accumulator(n, row, column);
        assert_eq!([one, two].map(|cell| u64::from(cell.address())), line[3..], "{row}, {column} of {n}");
        assert_eq!(cta, 0);
    }
    for line in lines("scale_columns", usize::MAX) {
        let [_, _, row, copy, block, lane, byte] = std::array::from_fn(|i| line[i] as u32);
        let (cell, byte_of_word) = scale(row, block, 0);
        let there = (Cell { lane: cell.lane + 32 * copy, ..cell }, byte_of_word);
        assert_eq!(there, (Cell { lane, column: byte / 4 }, byte % 4), "row {row}, block {block}");
    }
    for line in lines("multiplicand", usize::MAX) {
        let [row, k, lane, half] = std::array::from_fn(|i| line[i] as u32);
        let there = (0, Cell { lane, column: half / 2 }, half % 2 * 16);
        assert_eq!(DataPath::new(128, 1).multiplicand(16, row, k), there, "row {row}, K {k}");
    }
}
