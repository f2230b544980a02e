//! Walks of a box against its definition, byte by byte.

use super::*;
use proptest::prelude::*;

fn matrix(
    ty: TensorDataType,
    dims: [u64; 2],
    pitch: u64,
    box_dims: [u32; 2],
    swizzle: Swizzle,
) -> TiledTensor {
    TiledTensor {
        ty,
        rank: 2,
        base: 0x1_0000,
        dims: [dims[0], dims[1], 0, 0, 0],
        strides: [0, pitch, 0, 0, 0],
        box_dims: [box_dims[0], box_dims[1], 0, 0, 0],
        element_strides: [1, 1, 0, 0, 0],
        swizzle,
        bounds: None,
    }
}

/// Loads by the definition, one byte at a time: shared byte address to global byte address.
fn by_definition(t: &TiledTensor, start: &[i64], smem: u32) -> Vec<(u32, Option<u64>)> {
    let element = (u64::from(t.ty.bits()) / 8).max(1);
    let per_byte = if u64::from(t.ty.bits()) == 4 { 2 } else { 1 };
    let counts = t.counts();
    let mut out = Vec::new();
    let mut linear = smem;
    for i4 in 0..counts[4] as i64 {
        for i3 in 0..counts[3] as i64 {
            for i2 in 0..counts[2] as i64 {
                for i1 in 0..counts[1] as i64 {
                    for i0 in 0..(counts[0] / per_byte) as i64 {
                        let index = [i0 * per_byte as i64, i1, i2, i3, i4];
                        let at: Vec<i64> = (0..t.rank)
                            .map(|d| {
                                start[d] + index[d] * if d == 0 { 1 } else { t.element_strides[d] as i64 }
                            })
                            .collect();
                        let inside = (0..t.rank).all(|d| at[d] >= 0 && at[d] < t.dims[d] as i64);
                        let offset: i64 = at[0] / per_byte as i64 * element as i64
                            + (1..t.rank).map(|d| at[d] * t.strides[d] as i64).sum::<i64>();
                        for byte in 0..element {
                            let global = inside.then(|| (t.base as i64 + offset) as u64 + byte);
                            out.push((t.swizzle.apply(linear), global));
                            linear += 1;
                        }
                    }
                    linear += t.row_pitch() - t.row_bytes();
                }
            }
        }
    }
    out
}

fn walked(t: &TiledTensor, start: &[i32], smem: u32) -> Vec<(u32, Option<u64>)> {
    t.pieces(start, smem, Direction::Load)
        .unwrap()
        .into_iter()
        .flat_map(|p| (0..p.bytes).map(move |b| (p.smem + b, p.global.map(|g| g + b as u64))))
        .collect()
}

/// As an H200 put an 8-row box of 32 bytes: the n-th row's chunks `n0 n1`, in lines of eight 16-byte places.
#[test]
fn narrow_boxes_lie_as_the_hardware_puts_them_exact() {
    let place = |swizzle| {
        let t = matrix(TensorDataType::U8, [256, 64], 256, [32, 8], swizzle);
        assert_eq!(t.box_bytes(), 256);
        let mut lines = vec!["..".to_string(); 64];
        for p in t.pieces(&[0, 0], 0, Direction::Load).unwrap() {
            let from = p.global.unwrap() - 0x1_0000;
            lines[p.smem as usize / 16] = format!("{}{}", from / 256, from % 256 / 16);
        }
        lines.chunks(8).map(|line| line.join(" ")).collect::<Vec<_>>()
    };
    let lines = place(Swizzle::B64);
    assert_eq!(lines[..2], ["00 01 .. .. 10 11 .. ..", "21 20 .. .. 31 30 .. .."]);
    assert_eq!(lines[2..4], [".. .. 40 41 .. .. 50 51", ".. .. 61 60 .. .. 71 70"]);
    let lines = place(Swizzle::B128);
    assert_eq!(lines[1..3], ["11 10 .. .. .. .. .. ..", ".. .. 20 21 .. .. .. .."]);
    assert_eq!(lines[7], ".. .. .. .. .. .. 71 70");
}

#[test]
fn both_four_bit_types_name_the_same_bytes() {
    let nibbles = matrix(TensorDataType::U4Align8, [256, 40], 128, [256, 16], Swizzle::B128);
    let bytes = matrix(TensorDataType::U8, [128, 40], 128, [128, 16], Swizzle::B128);
    assert_eq!(walked(&nibbles, &[-64, 32], 0), walked(&bytes, &[-32, 32], 0));
    assert!(nibbles.pieces(&[1, 0], 0, Direction::Load).is_err());
}

#[test]
fn malformed_operands_name_the_field() {
    let good = matrix(TensorDataType::F16, [64, 64], 128, [64, 8], Swizzle::B128);
    let operand = |r: Result<Vec<Piece>, Fault>, text: &str| {
        let message = r.unwrap_err().message;
        assert!(message.contains(text), "{message}");
    };
    operand(good.pieces(&[0], 0, Direction::Load), "coordinates is 0x1");
    operand(good.pieces(&[0, 0], 64, Direction::Load), "shared memory address is 0x40");
    operand(good.pieces(&[0, -1], 0, Direction::Store), "coordinate is 0xffffffff");
    assert!(good.pieces(&[-8, -1], 0, Direction::Load).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn walks_are_the_definition_exact(
        rank in 1usize..=5,
        dims in prop::array::uniform5(1u64..9),
        sides in prop::array::uniform5(1u32..6),
        steps in prop::array::uniform5(1u32..4),
        start in prop::array::uniform5(-6i32..9),
        kind in 0usize..4,
        width in 0usize..4,
        narrower in 1u32..3,
    ) {
        // Dimension 0 spans the swizzle, or a few chunks without one.
        let swizzles = [Swizzle::None, Swizzle::B32, Swizzle::B128, Swizzle::B128Atom32Flip8];
        let types = [TensorDataType::U8, TensorDataType::F16, TensorDataType::F32, TensorDataType::U64];
        let (swizzle, ty) = (swizzles[kind], types[width]);
        let bytes = ty.bits() / 8;
        let row = if swizzle == Swizzle::None { 48 } else { swizzle.span() / narrower };
        let mut t = TiledTensor {
            ty, rank, base: 1 << 20, dims, strides: [0, 256, 1024, 4096, 16384],
            box_dims: sides, element_strides: steps, swizzle,
            bounds: None,
        };
        t.box_dims[0] = row / bytes;
        t.dims[0] = dims[0] * 5;
        // Along dimension 0 a box starts on 16 bytes.
        let mut start = start;
        start[0] *= (16 / bytes) as i32;
        let wide: Vec<i64> = start.iter().map(|&c| c as i64).collect();
        let expected = by_definition(&t, &wide, 0x400);
        prop_assert_eq!(t.box_bytes() as usize, expected.len());
        prop_assert_eq!(walked(&t, &start[..rank], 0x400), expected);
    }
}

/// Sixteen elements of 4 or 6 bits are 8 or 12 bytes of global memory and 16 of shared memory.
#[test]
fn padded_elements_take_a_byte_each_exact() {
    for (ty, packed) in [(TensorDataType::U4Align16, 8), (TensorDataType::U6Align16, 12)] {
        let pitch = 256 / 16 * packed;
        let t = matrix(ty, [256, 3], pitch, [128, 2], Swizzle::B128);
        assert_eq!(t.box_bytes(), 256);
        let pieces = t.pieces(&[128, 2], 1024, Direction::Load).unwrap();
        // The second row lies past the end.
        let want = (0..16u32).map(|i| Piece {
            smem: Swizzle::B128.apply(1024 + 16 * i),
            global: (i < 8).then(|| 0x1_0000 + 2 * pitch + 8 * packed + u64::from(i) * packed),
            bytes: packed as u32,
        });
        assert!(pieces.iter().copied().eq(want), "{pieces:?}");
        let refused = |at: i32, direction| t.pieces(&[at, 0], 0, direction).unwrap_err().message;
        assert!(refused(64, Direction::Load).contains("a multiple of 128 elements"));
        assert!(refused(0, Direction::Store).contains("types without padding"));
    }
}
