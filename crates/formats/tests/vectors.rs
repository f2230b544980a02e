//! Two vectors of four blocks that tell all five producers apart: rounding ties (V1), and zeros, negative zero, a
//! block whose scale underflows and small negatives (V2). Code bytes are in pair order, except that ggml's are as
//! GGUF stores them.

use dualgemm_formats::{
    FloatMatrix, GlobalScaleSource, Matrix, Producer, QuantizedMatrix, Search, gguf, quantize,
};
use half::bf16;

/// Global scale bits as held (`None` where a format has no such scale), scale bytes, code bytes of the four blocks.
type Expected = (Option<u32>, [u8; 4], [[u8; 8]; 4]);

fn check(x: &[bf16; 64], producer: Producer, (global, scales, codes): Expected) {
    let x = FloatMatrix::Bf16(Matrix::new("v", 1, 64, &x[..]).unwrap());
    let quantized = quantize("v", &x, producer, Search::Plain).unwrap();
    let held = quantized.global_scale();
    let expected_source = match producer {
        Producer::CompressedTensors | Producer::Te => GlobalScaleSource::Divisor(held.held()),
        Producer::ModelOpt | Producer::Torchao => GlobalScaleSource::Multiplier,
        Producer::Ggml => GlobalScaleSource::Absent,
    };
    assert_eq!(held.source(), expected_source, "{producer}");
    assert_eq!(held.held().to_bits(), global.unwrap_or(1f32.to_bits()), "{producer}: global scale");
    assert_eq!(quantized.scales(), scales, "{producer}: scales");
    assert_eq!(code_bytes(&quantized, producer), codes.concat(), "{producer}: codes");
}

fn code_bytes(quantized: &QuantizedMatrix<'_>, producer: Producer) -> Vec<u8> {
    match producer {
        Producer::Ggml => gguf::from_matrix(quantized).unwrap()[4..].to_vec(),
        _ => quantized.codes().to_vec(),
    }
}

#[test]
fn v1_ties_exact() {
    let mut x = [bf16::ZERO; 64];
    for (i, v) in [(0, 2.625), (1, -2.625), (2, 1.3125), (15, 0.4375)] {
        x[i] = bf16::from_f32(v);
    }
    for (i, v) in [6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25].into_iter().enumerate() {
        let v = bf16::from_f32(v / 128.0);
        (x[16 + i], x[24 + i], x[48 + i], x[56 + i]) = (v, -v, -v, v);
    }
    let codes = [
        [0xF7, 0x05, 0, 0, 0, 0, 0, 0x20],
        [0x67, 0x46, 0x24, 0x02, 0xEF, 0xCE, 0xAC, 0x8A],
        [0; 8],
        [0xEF, 0xCE, 0xAC, 0x8A, 0x67, 0x46, 0x24, 0x02],
    ];
    let (multiplier, divisor) = (Some(2f32.powi(-10).to_bits()), Some(1024f32.to_bits()));
    check(&x, Producer::ModelOpt, (multiplier, [0x7E, 0x50, 0x38, 0x50], codes));
    check(&x, Producer::CompressedTensors, (divisor, [0x7E, 0x50, 0x20, 0x50], codes));
    check(&x, Producer::Torchao, (multiplier, [0x7E, 0x50, 0x08, 0x50], codes));
    check(&x, Producer::Te, (divisor, [0x7E, 0x50, 0x00, 0x50], codes));
    let ggml = [
        [0x07, 0x0F, 0x05, 0, 0, 0, 0, 0x20],
        [0xF7, 0xE6, 0xD5, 0xC4, 0xB3, 0xA2, 0x91, 0x00],
        [0; 8],
        [0x7F, 0x6E, 0x5D, 0x4C, 0x3B, 0x2A, 0x19, 0x00],
    ];
    check(&x, Producer::Ggml, (None, [0x2E, 0x04, 0x00, 0x04], ggml));
}

#[test]
fn v2_edge_cases_exact() {
    let mut x = [bf16::ZERO; 64];
    let set = |block: &mut [bf16], bits: [u16; 16]| {
        block.iter_mut().zip(bits).for_each(|(x, bits)| *x = bf16::from_bits(bits));
    };
    set(
        &mut x[..16],
        [
            0x3E8F, 0xBE0F, 0x3D8F, 0xBD0F, 0x3C8F, 0x0000, 0x8000, 0x3E4D, 0xBE4D, 0x3DCD, 0x3DF6, 0xBDF6,
            0x3D4D, 0x3CF6, 0xBC24, 0x3E1A,
        ],
    );
    let mut tiny = [0x3586; 16];
    tiny[3] = 0xB586;
    set(&mut x[32..48], tiny);
    set(
        &mut x[48..],
        [
            0x3D40, 0x3D20, 0x3CE0, 0x3CA0, 0x3C60, 0x3C20, 0x3BC0, 0x3B00, 0xBD40, 0xBD20, 0xBCE0, 0xBCA0,
            0xBC60, 0xBC20, 0xBBC0, 0xBB00,
        ],
    );
    let b0 = |b1, b3| [0xD7, b1, 0x01, b3, 0x4E, 0xD5, 0x12, 0x58];
    let b2 = [0x66, 0xE6, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66];
    let b3 = [0x77, 0x56, 0x34, 0x12, 0xFF, 0xDE, 0xBC, 0x9A];
    let zero = [0; 8];

    let codes = [b0(0xA3, 0x60), zero, b2, b3];
    check(&x, Producer::ModelOpt, (Some(0x38D9_E79E), [0x7E, 0x38, 0x01, 0x69], codes));
    let codes = [b0(0x93, 0x60), zero, b2, b3];
    check(&x, Producer::CompressedTensors, (Some(0x4616_0000), [0x7E, 0x20, 0x01, 0x69], codes));
    let ones = [0x11, 0x91, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11];
    let codes = [b0(0xA3, 0x68), zero, ones, b3];
    check(&x, Producer::Torchao, (Some(0x38D9_E79E), [0x7E, 0x08, 0x08, 0x69], codes));
    let codes = [b0(0xA3, 0x68), zero, b2, b3];
    check(&x, Producer::Te, (Some(0x4616_60AC), [0x7E, 0x00, 0x01, 0x69], codes));
    let codes = [
        [0xE7, 0x4D, 0x53, 0xD9, 0x21, 0x10, 0x00, 0x56],
        zero,
        zero,
        [0xF7, 0xE6, 0xD5, 0xC4, 0xB3, 0xA2, 0x91, 0x00],
    ];
    check(&x, Producer::Ggml, (None, [0x14, 0x00, 0x00, 0x04], codes));
}
