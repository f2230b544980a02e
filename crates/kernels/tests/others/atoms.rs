//! Block scales from every order to 128x4 atoms, of one matrix and of rows in groups; codes, which are copied beside them.

use dualgemm_bench::inputs::Inputs;
use dualgemm_device::DevicePtr;
use dualgemm_formats::{FloatType, GlobalScale, Producer, ScaleLayout, Search};
use dualgemm_kernels::generic::amax::{Amax, MAX_PARTS};
use dualgemm_kernels::generic::atoms::ScaleAtoms;
use dualgemm_kernels::generic::copy::Copy;
use dualgemm_kernels::generic::quantize::{Out, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::parts::groups::Groups;

use crate::common::*;

#[test]
fn scales_move_to_their_atoms_and_padding_is_zeroed_exact() {
    let gpu = gpu();
    for layout in ScaleLayout::ALL {
        let kernel = ScaleAtoms::new(gpu, layout, false).unwrap();
        for (rows, blocks) in [(1, 1), (32, 4), (129, 5), (200, 13), (3, 516)] {
            let linear: Vec<u8> = (0..rows * blocks).map(|i| (i % 126) as u8 + 1).collect();
            let mut scales = ScaleLayout::Linear.convert(&linear, layout, rows, blocks);
            let want = ScaleLayout::Linear.convert(&linear, ScaleLayout::Sf128x4, rows, blocks);
            // What an order has between its scales is not read.
            let own: Vec<usize> =
                (0..rows).flat_map(|r| (0..blocks).map(move |b| layout.offset(r, b, blocks))).collect();
            (0..scales.len()).filter(|at| !own.contains(at)).for_each(|at| scales[at] = 0xFF);
            let from = upload(gpu, &scales);
            let got = made(gpu, want.len(), |to| kernel.spec((rows, blocks), from, to, None));
            assert!(got == want[..], "{layout} {rows}x{blocks}");
        }
    }
}

/// Where rows of groups begin: empty ones, tails and more rows than an atom, rows of nobody on both sides; more groups than
/// a warp has lanes.
fn tables() -> [(usize, Vec<u32>); 3] {
    let many = (0..71).map(|g| if g < 35 { g } else { 35 + (g - 35) / 2 }).collect();
    [(140, vec![2, 2, 132, 133, 133, 139]), (129, vec![0, 129]), (54, many)]
}

/// The bytes of [`ScaleAtoms::grouped_bytes`] over poison for scales in rows.
fn placed(linear: &[u8], (rows, blocks): (usize, usize), first_rows: &[u32]) -> Vec<u8> {
    let padded = blocks.next_multiple_of(4);
    let mut placed = vec![0xA5; ScaleAtoms::grouped_bytes((rows, blocks), first_rows.len() - 1)];
    let mut first = 0;
    for group in first_rows.windows(2) {
        for row in group[0] as usize..group[1] as usize {
            for block in 0..padded {
                let at = ScaleLayout::Sf128x4.offset(first + row - group[0] as usize, block, padded);
                placed[at] = if block < blocks { linear[row * blocks + block] } else { 0 };
            }
        }
        first += (group[1] - group[0]).next_multiple_of(128) as usize;
    }
    placed
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn scales_of_groups_start_with_atoms_of_their_own_exact() {
    let gpu = gpu();
    for layout in ScaleLayout::ALL {
        let kernel = ScaleAtoms::new(gpu, layout, true).unwrap();
        for (rows, first_rows) in tables() {
            let blocks = 6;
            let linear: Vec<u8> = (0..rows * blocks).map(|i| (i % 126) as u8 + 1).collect();
            let scales = ScaleLayout::Linear.convert(&linear, layout, rows, blocks);
            let groups = Groups { count: first_rows.len() - 1, rows: upload(gpu, &words(&first_rows)) };
            let want = placed(&linear, (rows, blocks), &first_rows);
            let from = upload(gpu, &scales);
            let got = made(gpu, want.len(), |to| kernel.spec((rows, blocks), from, to, Some(&groups)));
            assert!(got == want, "{layout} {first_rows:?}");
        }
    }
}

/// Codes are those of the whole matrix, a dynamic scale too; block scales lie where groups want them.
#[test]
fn floats_of_groups_are_quantized_to_atoms_of_their_own_exact() {
    let gpu = gpu();
    let k = 80;
    for (ty, (rows, first_rows)) in FloatType::ALL.into_iter().zip(tables()) {
        let a = Inputs::seeded(9).floats("a", ty, rows, k).unwrap();
        let on_device = upload_floats(gpu, &a);
        let groups = Groups { count: first_rows.len() - 1, rows: upload(gpu, &words(&first_rows)) };
        for dynamic in [false, true] {
            let (parts, written) = (poisoned(gpu, MAX_PARTS as usize * 4), poisoned(gpu, 4));
            let by_rule = GlobalScale::multiplier(0.011);
            let (scale, want) = match dynamic {
                false => (
                    Scale::Static(by_rule),
                    dualgemm_formats::quantize::quantize_with("a", &a, Producer::Te, Search::Plain, by_rule),
                ),
                true => {
                    run(gpu, &Amax::new(gpu, ty, false).unwrap().spec(&on_device, parts, None).unwrap());
                    let want = dualgemm_formats::quantize("a", &a, Producer::Te, Search::Plain);
                    (Scale::Dynamic { parts, scale: written }, want)
                }
            };
            let want = want.unwrap();
            let of_groups = placed(want.scales(), (rows, k / 16), &first_rows);
            let (codes, scales) = (poisoned(gpu, rows * k / 2), poisoned(gpu, of_groups.len()));
            let kernel = Quantize::new(gpu, ty, Sink::Grouped, dynamic).unwrap();
            let out = Out::Grouped { codes, scales, groups };
            run(gpu, &kernel.spec(&on_device, &out, &scale).unwrap());
            assert!(read(gpu, codes, rows * k / 2) == want.codes(), "{ty:?} {first_rows:?}");
            assert!(read(gpu, scales, of_groups.len()) == of_groups, "{ty:?} {first_rows:?}");
        }
    }
}

/// Rows of nobody hold what is larger than any number of the others, or none.
#[test]
fn the_largest_magnitude_is_that_of_rows_of_groups_exact() {
    let gpu = gpu();
    let k = 80;
    for (ty, (rows, first_rows)) in FloatType::ALL.into_iter().zip(tables()) {
        let of_groups = first_rows[0]..first_rows[first_rows.len() - 1];
        let a = Inputs::seeded(9).floats("a", ty, rows, k).unwrap();
        let on_device = upload_floats(gpu, &a);
        for row in (0..rows as u32).filter(|row| !of_groups.contains(row)) {
            let byte = if row % 2 == 0 { 0x7B } else { 0xFF };
            let at = on_device.values.offset(u64::from(row) * on_device.pitch as u64);
            gpu.memset(at, byte, on_device.pitch).unwrap();
        }
        let groups = Groups { count: first_rows.len() - 1, rows: upload(gpu, &words(&first_rows)) };
        let (single, kernel) = (Amax::new(gpu, ty, false).unwrap(), Amax::new(gpu, ty, true).unwrap());
        let parts = made(gpu, Amax::parts(rows, k) as usize * 4, |parts| {
            assert!(kernel.spec(&on_device, parts, None).is_err());
            assert!(single.spec(&on_device, parts, Some(&groups)).is_err());
            kernel.spec(&on_device, parts, Some(&groups))
        });
        let found = FloatType::F32.values(&parts).into_iter().fold(0.0, f32::max);
        assert_eq!(found, Producer::Te.amax(&a, of_groups.start as usize..of_groups.end as usize), "{ty:?}");
    }
}

#[test]
fn bytes_are_copied_as_they_are_and_none_beyond_exact() {
    let gpu = gpu();
    let kernel = Copy::new(gpu).unwrap();
    for bytes in [16, 4096, 4112] {
        let from: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
        let there = upload(gpu, &from);
        let copied = made(gpu, bytes + 16, |to| kernel.spec("codes", (there, to), bytes));
        assert!(copied[..bytes] == from && copied[bytes..].iter().all(|&byte| byte == 0xA5), "{bytes}");
    }
    for (from, to, bytes) in
        [(256, 256, 0), (256, 256, 20), (264, 256, 16), (256, 264, 16), (256, 256, 1 << 36)]
    {
        assert!(
            kernel.spec("codes", (DevicePtr(from), DevicePtr(to)), bytes).is_err(),
            "{from} {to} {bytes}"
        );
    }
}

#[test]
fn scales_that_no_grid_takes_and_misaligned_atoms_are_refused() {
    let gpu = gpu();
    let kernel = ScaleAtoms::new(gpu, ScaleLayout::Linear, false).unwrap();
    for (shape, to) in [((0, 4), 256), ((4, 0), 256), ((4, 4), 8), ((1, 1 << 26), 256)] {
        assert!(kernel.spec(shape, DevicePtr(256), DevicePtr(to), None).is_err(), "{shape:?}");
    }
    let groups = |count, rows| Groups { count, rows: DevicePtr(rows) };
    let message = |kernel: &ScaleAtoms, groups: Option<&Groups>| {
        kernel.spec((4, 4), DevicePtr(256), DevicePtr(256), groups).unwrap_err().to_string()
    };
    let grouped = ScaleAtoms::new(gpu, ScaleLayout::Linear, true).unwrap();
    assert!(message(&grouped, None).ends_with("what the kernel was made for"));
    assert!(message(&kernel, Some(&groups(1, 256))).ends_with("what the kernel was made for"));
    assert!(message(&grouped, Some(&groups(0, 256))).starts_with("groups is 0"));
    assert!(message(&grouped, Some(&groups(1, 258))).starts_with("the groups' rows is address 0x102"));
    let floats = Quantize::new(gpu, FloatType::F16, Sink::Grouped, false).unwrap();
    let a = upload_floats(gpu, &Inputs::seeded(9).floats("a", FloatType::F16, 1, 16).unwrap());
    let out = Out::Codes { codes: DevicePtr(256), scales: DevicePtr(256) };
    assert!(floats.spec(&a, &out, &Scale::Static(GlobalScale::ONE)).is_err());
}
