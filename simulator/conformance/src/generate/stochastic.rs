//! cvt.rs to formats of 8 and 4 bits, with what is expected computed from the definition: random bits are added to the
//! discarded ones and the carry rounds away from zero.
//!
//! Published text leaves open which byte of the random bits of `.e2m1x4` weighs more, and how random bits meet the
//! discarded ones of a subnormal result: both bytes are alike here, and results are normal numbers.

use super::kernel::renamed;
use super::raw::Raw;
use super::tensor::bytes;
use super::{Draft, bytes_of, samples_of};

const THREADS: usize = 512;

/// A destination: bits of mantissa, bias, largest code, first exponent and exponents of the numbers that are converted.
struct Format {
    mantissa: i32,
    bias: i32,
    largest: u32,
    exponents: (i32, u32),
}

/// The files.
pub fn drafts() -> Vec<Draft> {
    ["cvt_rs_f8x4_f32", "cvt_rs_e2m1x4_f32"].map(draft).into()
}

const LOADS: &str = ".reg .f32 %f<4>;
     ld.param.u64 %rd1, [given];
     ld.param.u64 %rd2, [noise];
     mad.wide.u32 %rd3, %gid, 16, %rd1;
     mad.wide.u32 %rd4, %gid, 16, %rd2;
     ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd3];
     ld.global.v4.b32 {%r24, %r25, %r26, %r27}, [%rd4];\n";

fn draft(name: &'static str) -> Draft {
    let narrow = name.contains("e2m1");
    let format = |ty: &str| match ty {
        "e4m3x4" => Format { mantissa: 3, bias: 7, largest: 0x7e, exponents: (-5, 16) },
        "e5m2x4" => Format { mantissa: 2, bias: 15, largest: 0x7b, exponents: (-13, 32) },
        _ => Format { mantissa: 1, bias: 1, largest: 7, exponents: (0, 4) },
    };
    let keep = kept(narrow);
    let words = |seed| -> Vec<u32> {
        let data = bytes("u32", "bits", seed, 4 * THREADS);
        data.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    let (given, noise) = (words(21), words(22));
    let mut body = String::from(LOADS);
    if narrow {
        body += "and.b32 %r2, %r24, 65535;\nmad.lo.u32 %r2, %r2, 65536, %r2;\n";
    } else {
        body += "mov.u32 %r2, %r24;\n";
    }
    let mut outputs: Vec<u32> = Vec::new();
    for (number, instruction) in samples_of(name).iter().enumerate() {
        let ty =
            instruction.modifiers.iter().map(|m| m.as_str()).find(|m| m.ends_with("x4")).unwrap_or_default();
        let format = format(ty);
        let exponents = format.exponents;
        let relu = instruction.has("relu");
        // Sign and mantissa as given, an exponent from the bits that are cut off.
        for i in 0..4 {
            body += &format!(
                "shr.u32 %r3, %r{source}, 23;
                 and.b32 %r3, %r3, {};
                 add.u32 %r3, %r3, {};
                 shl.b32 %r3, %r3, 23;
                 and.b32 %r4, %r{source}, {};
                 or.b32 %r3, %r3, %r4;
                 mov.b32 %f{i}, %r3;\n",
                exponents.1 - 1,
                127 + exponents.0,
                0x8000_0000 | keep,
                source = 20 + i,
            );
        }
        let result = if narrow { "%rs1" } else { "%r5" };
        let mut next = 0;
        let changed = renamed(instruction, &mut |at, _| match at {
            0 => result.into(),
            1 => {
                next += 1;
                format!("%f{}", next - 1)
            }
            _ => "%r2".into(),
        });
        body += &format!("{changed};\n");
        if narrow {
            body += "cvt.u32.u16 %r5, %rs1;\n";
        }
        body += &format!("st.global.u32 [%out+{}], %r5;\n", number * 4 * THREADS);
        for thread in 0..THREADS {
            let random = if narrow { noise[4 * thread] & 0xffff } else { noise[4 * thread] };
            let one =
                |operand| converted(&format, (narrow, relu), given[4 * thread + operand], random, operand);
            let width = if narrow { 4 } else { 8 };
            outputs.push((0..4).fold(0, |word, operand| word << width | one(operand)));
        }
    }
    let output = format!("u32 {}", outputs.len());
    Raw::new(&format!("cvt/{name}"), name, "block 512", &output)
        .target("sm_100a", "8.7")
        .arguments(
            &["in u32 bits 21 2048", "in u32 bits 22 2048"],
            ".param .u64 out, .param .u64 given, .param .u64 noise",
        )
        .body(&body)
        .expects(vec![bytes_of(outputs)])
        .draft()
}

/// The bits of mantissa that numbers have. Of e2m1, eight random bits meet the upper eight of the discarded ones: the others
/// are zeros.
fn kept(narrow: bool) -> u32 {
    if narrow { 0x007f_c000 } else { 0x007f_ffff }
}

/// The code of the number of an operand, with the random bits of its result.
fn converted(format: &Format, (narrow, relu): (bool, bool), bits: u32, random: u32, operand: usize) -> u32 {
    let Format { mantissa, bias, largest, exponents } = *format;
    let exponent = (bits >> 23 & (exponents.1 - 1)) as i32 + exponents.0;
    let significand = 1 << 23 | u64::from(bits & kept(narrow));
    // The first two operands take the upper half of the random bits, or the upper byte of each half.
    let random = match (narrow, operand < 2) {
        (false, true) => random >> 16,
        (false, false) => random & 0xffff,
        (true, true) => (random >> 8) * 0x101,
        (true, false) => (random & 0xff) * 0x101,
    };
    let discarded = 23 - mantissa;
    let sum = significand + (u64::from(random) << (discarded - 16));
    let code = ((exponent + bias - 1) << mantissa) + (sum >> discarded) as i32;
    let sign = bits >> 31;
    if relu && sign == 1 { 0 } else { (code as u32).min(largest) | sign << if narrow { 3 } else { 7 } }
}
