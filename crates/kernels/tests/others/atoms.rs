//! Block scales from rows to 128x4 atoms.

use dualgemm_device::DevicePtr;
use dualgemm_formats::ScaleLayout;
use dualgemm_kernels::generic::atoms::ScaleAtoms;

use crate::common::*;

#[test]
fn scales_move_to_their_atoms_and_padding_is_zeroed_exact() {
    let gpu = gpu();
    let kernel = ScaleAtoms::new(gpu).unwrap();
    for (rows, blocks) in [(1, 1), (32, 4), (128, 8), (129, 5), (200, 13), (384, 3)] {
        let scales: Vec<u8> = (0..rows * blocks).map(|i| (i % 126) as u8 + 1).collect();
        let want = ScaleLayout::Linear.convert(&scales, ScaleLayout::Sf128x4, rows, blocks);
        let to = poisoned(gpu, want.len());
        run(gpu, &kernel.spec((rows, blocks), upload(gpu, &scales), to).unwrap());
        assert!(read(gpu, to, want.len()) == want[..], "{rows}x{blocks}");
    }
}

#[test]
fn scales_that_no_grid_takes_and_misaligned_atoms_are_refused() {
    let kernel = ScaleAtoms::new(gpu()).unwrap();
    for (shape, to) in [((0, 4), 256), ((4, 0), 256), ((4, 4), 8), ((1, 1 << 20), 256)] {
        assert!(kernel.spec(shape, DevicePtr(256), DevicePtr(to)).is_err(), "{shape:?}");
    }
}
