//! Tests of `exec::arith`.

use super::*;

const S32: IntType = IntType { bits: 32, signed: true };
const U32: IntType = IntType { bits: 32, signed: false };

#[test]
fn bit_fields_follow_the_isa_exact() {
    assert_eq!(extract(U32, 0xabcd_1234, 8, 8), 0x12);
    assert_eq!(extract(S32, 0x0000_8000, 8, 8), 0xffff_ff80);
    assert_eq!(extract(S32, 0x8000_0000, 28, 8), 0xffff_fff8);
    assert_eq!(extract(S32, 0x8000_0000, 40, 4), 0xffff_ffff);
    assert_eq!(extract(U32, 0xffff_ffff, 0, 0), 0);
    assert_eq!(insert(U32, 0xff, 0x1111_1111, 4, 8), 0x1111_1ff1);
    assert_eq!(insert(U32, 0xff, 0x1111_1111, 28, 8), 0xf111_1111);
    assert_eq!(insert(U32, 0xff, 0x1111_1111, 32, 8), 0x1111_1111);
}

#[test]
fn lop3_reads_its_table_exact() {
    let (a, b, c) = (0x1234_5678, 0x9abc_def0, 0x0f0f_0f0f);
    let lop3 = |table| lop3_row(table, &[[a; 32], [b; 32], [c; 32]]);
    assert_eq!(lop3(0x80), [a & b & c; 32]);
    assert_eq!(lop3(0x96), [a ^ b ^ c; 32]);
    assert_eq!(lop3(0xca), [(a & b) | (!a & c); 32]);
    assert_eq!(lop3(0x1e), [a ^ (b | c); 32]);
}

#[test]
fn permutations_follow_the_isa_exact() {
    let (a, b) = (0x3322_1100, 0x7766_5584);
    assert_eq!(permute(None, a, b, 0x7531), 0x7755_3311);
    assert_eq!(permute(None, a, b, 0x000c), 0x0000_00ff);
    assert_eq!(permute(Some(Permute::F4e), a, b, 1), 0x8433_2211);
    assert_eq!(permute(Some(Permute::B4e), a, b, 1), 0x6677_0011);
    assert_eq!(permute(Some(Permute::Rc8), a, b, 2), 0x2222_2222);
    assert_eq!(permute(Some(Permute::Ecl), a, b, 2), 0x3322_2222);
    assert_eq!(permute(Some(Permute::Ecr), a, b, 2), 0x2222_1100);
    assert_eq!(permute(Some(Permute::Rc16), a, b, 1), 0x3322_3322);
}

/// An instruction without modifiers.
fn int2(root: &str, ty: IntType, a: u64, b: u64) -> u64 {
    binary(root, None, (false, false, false))(ty, a, b)
}

#[test]
fn shifts_and_funnels_clamp_or_wrap_exact() {
    assert_eq!(int2("shl", U32, 1, 32), 0);
    assert_eq!(int2("shr", S32, 0x8000_0000, 40), 0xffff_ffff);
    let (lo, hi) = (0x89ab_cdef, 0x0123_4567);
    assert_eq!(funnel(true, true, lo, hi, 8), 0x2345_6789);
    assert_eq!(funnel(false, true, lo, hi, 8), 0x6789_abcd);
    assert_eq!(funnel(true, false, lo, hi, 99), lo);
    assert_eq!(funnel(false, false, lo, hi, 99), hi);
    assert_eq!(funnel(false, true, lo, hi, 32), lo);
}

#[test]
fn integer_edges_exact() {
    assert_eq!(binary("add", None, (true, false, false))(S32, 0x7fff_ffff, 1), 0x7fff_ffff);
    assert_eq!(product(Part::Hi, S32, 0xffff_ffff, 2), 0xffff_ffff);
    assert_eq!(product(Part::Wide, S32, 0xffff_ffff, 2), 0xffff_ffff_ffff_fffe);
    assert_eq!(int2("div", S32, 0x8000_0000, 0xffff_ffff), 0x8000_0000);
    assert_eq!(int2("rem", S32, 0xffff_fff9, 4), 0xffff_fffd);
    assert_eq!(unary("bfind", false)(S32, 0xffff_ff00), 7);
    assert_eq!(unary("bfind", true)(U32, 0x10), 27);
    assert_eq!(unary("bfind", false)(U32, 0), 0xffff_ffff);
    assert_eq!(unary("brev", false)(IntType { bits: 64, signed: false }, 1), 1 << 63);
    assert_eq!(find_nth(0b1011_0000, 4, 2), 5);
    assert_eq!(find_nth(0b1011_0000, 7, -2), 5);
    assert_eq!(find_nth(0b1011_0000, 6, 0), u32::MAX);
    assert_eq!(dot([true, true], None, 0xff01_ff01, 0x0101_0202, 10), 10 + 2 - 2 + 1 - 1);
    assert_eq!(dot([false, true], Some(true), 0x0002_0003, 0xff02_0000, 0), 6u32.wrapping_sub(2));
}

#[test]
fn byte_differences_follow_the_isa_exact() {
    assert_eq!(abs_diff4(false, false, 0x01ff_0080, 0x0300_007f, 9), 0x02ff_0001);
    assert_eq!(abs_diff4(true, false, 0x01ff_0080, 0x0300_007f, 9), 0x0201_00ff);
    assert_eq!(abs_diff4(false, true, 0x01ff_0080, 0x0300_007f, 9), 2 + 255 + 1 + 9);
}
