//! Allocation, copies from shared memory with and without decompression, shifts, commits, fences.

use super::layout::{SWIZZLES, Tile};
use super::{Entry, MIX, commit, fill, filled, handover, known, registers, wait};
use crate::generate::Draft;
use dualgemm_ptx::layout::Swizzle;

/// The files.
pub fn drafts() -> Vec<Draft> {
    let mut list = vec![allocation(), shift(), commits(), fences()];
    list.push(copies("tcgen05_cp", &[("128x256b", ""), ("4x256b", ""), ("128x128b", "")]));
    list.push(copies("tcgen05_cp_warpx2", &[("64x128b", ".warpx2::02_13"), ("64x128b", ".warpx2::01_23")]));
    list.push(copies("tcgen05_cp_warpx4", &[("32x128b", ".warpx4")]));
    list
}

/// Words of shared memory that copies read.
const WORDS: u32 = 5120;

/// Rows of 16 bytes one after the other.
const DENSE: Tile = Tile { swizzle: Swizzle::None, transposed: false, start: 0, lbo: 128, sbo: 128 };

const SHARED: &str = ".shared .align 1024 .b8 tile[20480];";

/// Shared memory of each CTA filled with words that differ, and visible to copies.
fn fill_shared(group: u32) -> String {
    ptx!("tcgen05_fill_shared", words = WORDS, mix = MIX, handover = handover(group))
}

/// What [`fill_shared`] leaves at a byte address.
fn shared(rank: u32, address: u32) -> u8 {
    let word = (rank * WORDS + address / 4 + 7).wrapping_mul(MIX);
    word.to_le_bytes()[address as usize % 4]
}

/// Columns 0 to 15 of every lane to `%out`, from word `first` of `words` per thread.
fn read_sixteen(first: u32) -> String {
    let mut text = String::new();
    for half in 0..2 {
        text += &format!(
            "tcgen05.ld.sync.aligned.32x32b.x8.b32 {}, [%tw+{}];\n",
            registers("v", 8 * half, 8),
            8 * half
        );
    }
    text += "tcgen05.wait::ld.sync.aligned;\n";
    for at in (0..16).step_by(4) {
        text += &format!("st.global.v4.b32 [%out+{}], {};\n", 4 * (first + at), registers("v", at, 4));
    }
    text
}

fn output(words: u32) -> String {
    format!("mad.lo.u32 %r0, %rank, 128, %t;\nmad.wide.u32 %out, %r0, {}, %out;\n", words * 4)
}

/// The source row, of 16-byte units, that a lane receives; `None`: nothing. The address names lane `base`.
fn source_row(shape: &str, base: u32, lane: u32) -> Option<u32> {
    match shape {
        "4x256b" => (lane % 32 == base).then_some(lane / 32),
        ".warpx2::02_13" => Some(lane % 64),
        ".warpx2::01_23" => Some(lane / 64 * 32 + lane % 32),
        ".warpx4" => Some(lane % 32),
        _ => Some(lane),
    }
}

/// 16 elements of a unit, each in the middle of its byte (CUTLASS `cp_narrow_a_to_tmem_mma.py`).
fn decompressed(unit: &[u8; 16], bits: usize) -> [u8; 16] {
    let bit = |i: usize| unit[i / 8] >> (i % 8) & 1;
    std::array::from_fn(|e| {
        let code = (0..bits).fold(0, |code, b| code | bit(e * bits + b) << b);
        code << ((8 - bits) / 2)
    })
}

/// Shape, multicast, format with its bits, layout of the source, first lane.
type Copied = (&'static str, &'static str, &'static str, usize, Tile, u32);

/// What sample `i` leaves in its 16 columns.
fn copied(expected: &mut [u32], (group, words): (u32, u32), i: usize, sample: &Copied) {
    let &(shape, warps, _, bits, tile, base) = sample;
    let units = if shape.ends_with("256b") { 2 } else { 1 };
    for rank in 0..group {
        for lane in 0..128 {
            let at = ((rank * 128 + lane) * words) as usize + 16 * i;
            let row = &mut expected[at..at + 16];
            for (column, cell) in row.iter_mut().enumerate() {
                *cell = filled(rank, lane, column as u32);
            }
            let key = if warps.is_empty() { shape } else { warps };
            let Some(source) = source_row(key, base, lane) else { continue };
            for unit in 0..units {
                let address = tile.unit(source, unit);
                let bytes: [u8; 16] = std::array::from_fn(|b| shared(rank, address + b as u32));
                let bytes = if bits < 8 { decompressed(&bytes, bits) } else { bytes };
                for (k, word) in bytes.chunks_exact(4).enumerate() {
                    row[4 + 4 * unit as usize + k] = word.iter().rev().fold(0, |v, &b| v << 8 | u32::from(b));
                }
            }
        }
    }
}

/// Shapes times formats times layouts, by one CTA and by a pair.
fn copies(name: &str, shapes: &[(&'static str, &'static str)]) -> Draft {
    let mut samples: Vec<Copied> = Vec::new();
    for &(shape, warps) in shapes {
        for (f, (format, bits)) in
            [("", 8), (".b8x16.b6x16_p32", 6), (".b8x16.b4x16_p64", 4)].into_iter().enumerate()
        {
            for (s, swizzle) in SWIZZLES.into_iter().enumerate() {
                // One layout per format, all of them without.
                if f > 0 && s != f {
                    continue;
                }
                let (lbo, sbo) = match (swizzle, samples.len() % 2) {
                    (Swizzle::None, 0) => (2048, 128),
                    (Swizzle::None, _) => (128, 256),
                    (Swizzle::B32, _) => (16, 256),
                    (Swizzle::B64, _) => (16, 512),
                    _ => (16, 1024),
                };
                let start = [0, 1024, 2048][samples.len() % 3];
                let tile = Tile { swizzle, transposed: false, start, lbo, sbo };
                let base = if shape == "4x256b" { [28, 31, 0][samples.len() % 3] } else { 0 };
                samples.push((shape, warps, format, bits, tile, base));
            }
        }
    }
    let words = 16 * samples.len() as u32;
    let kernels = [1, 2].map(|group| {
        let mut body = format!("{}\n{}\n", fill_shared(group), output(words));
        let mut expected = vec![0; (128 * group * words) as usize];
        for (i, &(shape, warps, format, _, tile, base)) in samples.iter().enumerate() {
            let (low, high) = tile.descriptor();
            body += &ptx!(
                "tcgen05_cp",
                fill = fill(&format!("FILL{i}"), 0, 16),
                handover = handover(group),
                low,
                high,
                group,
                shape,
                warps,
                format,
                to = base << 16 | 4,
                commit = commit(group),
                wait = wait(&format!("WAIT{i}"), i),
                read = read_sixteen(16 * i as u32)
            );
            copied(&mut expected, (group, words), i, &samples[i]);
        }
        (Entry::new(group, SHARED, &body), expected)
    });
    known(name, name, kernels)
}

/// Each warp's rows move to the lane before, eight columns wide, the last stays.
fn shift() -> Draft {
    let kernels = [1, 2].map(|group| {
        let body = ptx!(
            "tcgen05_shift",
            output = output(16),
            fill = fill("FILL", 0, 16),
            handover = handover(group),
            group,
            second = 64 << 16 | 4,
            third = 64 << 16,
            commit = commit(group),
            wait = wait("WAIT", 0),
            read = read_sixteen(0)
        );
        let mut expected = Vec::new();
        for rank in 0..group {
            let mut memory: Vec<Vec<u32>> =
                (0..128).map(|lane| (0..16).map(|column| filled(rank, lane, column)).collect()).collect();
            for (lanes, columns) in [(0, 4..12), (64, 4..12), (64, 0..8)] {
                for lane in lanes..lanes + 31 {
                    for column in columns.clone() {
                        memory[lane][column] = memory[lane + 1][column];
                    }
                }
            }
            expected.extend(memory.concat());
        }
        (Entry::new(group, "", &body), expected)
    });
    known("tcgen05_shift", "tcgen05_shift", kernels)
}

/// What both CTAs store for commit `i` of so many.
fn committed(expected: &mut [u32], group: u32, (i, count): (usize, usize)) {
    for rank in 0..2 {
        for lane in 0..128 {
            let at = (((rank * 128 + lane) * count as u32 + i as u32) * 2) as usize;
            // The last phase is complete, the one in progress is not.
            expected[at] = 1;
            let copied = rank < group;
            expected[at + 1] = if copied {
                let address = DENSE.unit(lane, 0);
                (0..4).fold(0, |v, b| v | u32::from(shared(rank, address + b)) << (8 * b))
            } else {
                filled(rank, lane, 4)
            };
        }
    }
}

/// Which CTAs of a cluster a commit arrives at, and that what was issued before it is complete then.
fn commits() -> Draft {
    let (low, high) = DENSE.descriptor();
    // Space, CTAs of the mask.
    let samples: [(&str, Option<u32>); 6] = [
        (".shared::cluster", None),
        ("", None),
        (".shared::cluster", Some(3)),
        ("", Some(2)),
        (".shared::cluster", Some(1)),
        ("", Some(3)),
    ];
    let kernels = [1, 2].map(|group| {
        let mut body = ptx!("tcgen05_commit", fill = fill_shared(2), stride = 8 * samples.len(), low, high);
        let mut expected = vec![0; 2 * 128 * 2 * samples.len()];
        for (i, &(space, mask)) in samples.iter().enumerate() {
            let multicast = if mask.is_some() { ".multicast::cluster" } else { "" };
            let operand = if mask.is_some() { ", %rs0" } else { "" };
            let address = if space.is_empty() { "[%rd2]" } else { "[%done]" };
            body += &ptx!(
                "tcgen05_commit_step",
                fill = fill(&format!("FILL{i}"), 0, 8),
                handover = handover(2),
                mask = mask.unwrap_or(0),
                group,
                space,
                multicast,
                address,
                operand,
                waits = mask.unwrap_or(1),
                i,
                out = 8 * i
            );
            committed(&mut expected, group, (i, samples.len()));
        }
        (Entry { ctas: 2, ..Entry::new(group, SHARED, &body) }, expected)
    });
    known("tcgen05_commit", "tcgen05_commit", kernels)
}

/// Stores of four warps, then a copy over a part of them, then loads: each step sees the one before because of the
/// fences on both sides of the synchronization.
fn fences() -> Draft {
    let (low, high) = DENSE.descriptor();
    let body = ptx!(
        "tcgen05_fence",
        shared = fill_shared(1),
        output = output(16),
        fill = fill("FILL", 0, 16),
        low,
        high,
        commit = commit(1),
        wait = wait("WAIT", 0),
        read = read_sixteen(0)
    );
    let mut expected = Vec::new();
    for lane in 0..128 {
        for column in 0..16 {
            expected.push(match column {
                4..8 => {
                    let address = DENSE.unit(lane % 32, 0) + 4 * (column - 4);
                    (0..4).fold(0, |v, b| v | u32::from(shared(0, address + b)) << (8 * b))
                }
                _ => filled(0, lane, column),
            });
        }
    }
    known("tcgen05_fence", "tcgen05_fence", [(Entry::new(1, SHARED, &body), expected)])
}

/// Allocations of every size, live together where they fit, are disjoint; one that does not fit waits until another
/// warp frees room; nothing can be allocated any more by who gave the permit back (here the last step).
fn allocation() -> Draft {
    let kernels = [1, 2].map(|group| {
        let mut body = String::from("mad.lo.u32 %r0, %rank, 128, %t;\nmad.wide.u32 %out, %r0, 32, %out;\n");
        let sizes = [256, 128, 64, 64];
        for (i, size) in sizes.iter().enumerate() {
            let space = if i % 2 == 0 { ".shared::cta" } else { "" };
            let address = if i % 2 == 0 { "%slot".to_string() } else { "%rd2".to_string() };
            body += &format!(
                "cvt.u64.u32 %rd2, %slot;
                 cvta.shared.u64 %rd2, %rd2;
                 @%first tcgen05.alloc.cta_group::{group}.sync.aligned{space}.b32 [{address}], {size};
                 {}
                 ld.shared.u32 %r{}, [%slot];
                 {}\n",
                handover(group),
                10 + i,
                handover(group),
            );
        }
        // The first and last column of each are written, then read: an overlap would show.
        for (i, size) in sizes.iter().enumerate() {
            body += &format!(
                "shl.b32 %r1, %warp, 21;
                 add.u32 %r{at}, %r{from}, %r1;
                 mad.lo.u32 %r2, %t, 16, {};
                 mov.u32 %v0, %r2;
                 add.u32 %v1, %r2, 1;
                 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r{at}], {{%v0}};
                 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r{at}+{}], {{%v1}};
                 tcgen05.wait::st.sync.aligned;\n",
                2 * i,
                size - 1,
                at = 20 + i,
                from = 10 + i,
            );
        }
        for (i, size) in sizes.iter().enumerate() {
            body += &format!(
                "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%v0}}, [%r{at}];
                 tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%v1}}, [%r{at}+{}];
                 tcgen05.wait::ld.sync.aligned;
                 st.global.v2.b32 [%out+{}], {{%v0, %v1}};\n",
                size - 1,
                8 * i,
                at = 20 + i,
            );
        }
        // Nothing fits beside these 512: warp 1 waits until warp 0 gave the 256 back.
        body += &ptx!("tcgen05_alloc_end", handover = handover(group), group);
        let expected: Vec<u32> =
            (0..128 * group).flat_map(|t| (0..8).map(move |i| t % 128 * 16 + i)).collect();
        (Entry { bare: true, ..Entry::new(group, "", &body) }, expected)
    });
    known("tcgen05_alloc", "tcgen05_alloc tcgen05_dealloc tcgen05_relinquish", kernels)
}
