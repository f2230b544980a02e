//! What formulas become: the exact instructions, in order.

use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Version;
use dualgemm_ptx::builder::*;

/// The instructions that `build` appends to a kernel which has read `%r0`, `%r1` and `%r2`.
fn text(build: impl FnOnce(&mut Kernel, [Reg<U32>; 3])) -> Vec<String> {
    let mut builder = Builder::new(Target::Sm90a, Version::new(8, 0));
    builder.kernel("formulas", |k| {
        let registers = ["a", "b", "c"].map(|name| k.param(name)).map(|param| k.ld_param(&param));
        build(k, registers);
    });
    let text = builder.finish().unwrap().to_string();
    let lines = text.lines().map(str::trim).filter(|line| line.ends_with(';') && !line.starts_with('.'));
    lines.skip(3).filter(|line| *line != "ret;").map(str::to_string).collect()
}

/// The instructions of one formula.
fn of<T: RegType>(formula: impl FnOnce([Reg<U32>; 3]) -> Expr<T>) -> Vec<String> {
    text(|k, registers| {
        k.eval(formula(registers));
    })
}

#[test]
fn operators_are_one_instruction_each() {
    assert_eq!(of(|[a, b, _]| a + b), ["add.u32 %r3, %r0, %r1;"]);
    assert_eq!(of(|[a, ..]| a - 7), ["sub.u32 %r3, %r0, 7;"]);
    assert_eq!(of(|[a, ..]| a * 8), ["mul.lo.u32 %r3, %r0, 8;"]);
    assert_eq!(of(|[a, b, _]| a / b), ["div.u32 %r3, %r0, %r1;"]);
    assert_eq!(of(|[a, ..]| a % 3), ["rem.u32 %r3, %r0, 3;"]);
    assert_eq!(of(|[a, ..]| a & 31), ["and.b32 %r3, %r0, 31;"]);
    assert_eq!(of(|[a, b, _]| a | b), ["or.b32 %r3, %r0, %r1;"]);
    assert_eq!(of(|[a, b, _]| a ^ b), ["xor.b32 %r3, %r0, %r1;"]);
    assert_eq!(of(|[a, b, _]| a << b), ["shl.b32 %r3, %r0, %r1;"]);
    assert_eq!(of(|[a, ..]| a >> 2), ["shr.u32 %r3, %r0, 2;"]);
    assert_eq!(of(|[a, ..]| a.cast::<S32>() >> 2), ["shr.s32 %r3, %r0, 2;"]);
    assert_eq!(of(|[a, ..]| a.cast::<B32>() & 31), ["and.b32 %r3, %r0, 0x1F;"]);
}

#[test]
fn methods_stand_beside_operators() {
    assert_eq!(of(|[a, b, _]| a.min(b)), ["min.u32 %r3, %r0, %r1;"]);
    assert_eq!(of(|[a, ..]| a.bit_field(5, 2)), ["bfe.u32 %r3, %r0, 5, 2;"]);
    assert_eq!(of(|[a, ..]| a.div_ceil(48)), ["add.u32 %r3, %r0, 47;", "div.u32 %r4, %r3, 48;"]);
    assert_eq!(of(|[a, ..]| a.widen() << 1), ["cvt.u64.u32 %rd0, %r0;", "shl.b64 %rd1, %rd0, 1;"]);
    assert_eq!(of(|[a, b, _]| a.mul_wide(b)), ["mul.wide.u32 %rd0, %r0, %r1;"]);
}

#[test]
fn operands_come_left_to_right_before_their_operation() {
    assert_eq!(
        of(|[a, b, c]| ((a >> 3) - (b & 7)) ^ (c.min(a + 1) % 5)),
        [
            "shr.u32 %r3, %r0, 3;",
            "and.b32 %r4, %r1, 7;",
            "sub.u32 %r5, %r3, %r4;",
            "add.u32 %r6, %r0, 1;",
            "min.u32 %r7, %r2, %r6;",
            "rem.u32 %r8, %r7, 5;",
            "xor.b32 %r9, %r5, %r8;",
        ]
    );
}

#[test]
fn a_sum_that_begins_with_a_product_is_one_instruction() {
    assert_eq!(of(|[a, b, c]| a * b + c), ["mad.lo.u32 %r3, %r0, %r1, %r2;"]);
    assert_eq!(
        of(|[a, b, c]| (a + 1) * 96 + (b << 1) + c),
        [
            "add.u32 %r3, %r0, 1;",
            "shl.b32 %r4, %r1, 1;",
            "mad.lo.u32 %r5, %r3, 96, %r4;",
            "add.u32 %r6, %r5, %r2;"
        ]
    );
    assert_eq!(
        of(|[a, b, c]| a.mul_wide(b) + c.widen()),
        ["cvt.u64.u32 %rd0, %r2;", "mad.wide.u32 %rd1, %r0, %r1, %rd0;"]
    );
    assert_eq!(of(|[a, b, c]| c + a * b), ["mul.lo.u32 %r3, %r0, %r1;", "add.u32 %r4, %r2, %r3;"]);
    assert_eq!(of(|[a, b, c]| a * b - c), ["mul.lo.u32 %r3, %r0, %r1;", "sub.u32 %r4, %r3, %r2;"]);
}

#[test]
fn nothing_is_rewritten() {
    assert_eq!(of(|[a, ..]| a * 1 + 0), ["mad.lo.u32 %r3, %r0, 1, 0;"]);
    assert_eq!(of(|[a, ..]| a + 1 + 2), ["add.u32 %r3, %r0, 1;", "add.u32 %r4, %r3, 2;"]);
    assert_eq!(of(|[a, ..]| a.into()), ["mov.u32 %r3, %r0;"]);
    assert_eq!(of(|_| Expr::<U32>::from(9)), ["mov.u32 %r3, 9;"]);
}

#[test]
fn destination_and_guard_are_those_of_the_last_instruction() {
    let lines = text(|k, [a, b, c]| {
        let last = k.compare(Cmp::Eq, a + 1, b);
        k.when(last).to(c).eval((a << 1) + 3);
        k.unless(last).to(c).eval(a.into());
    });
    assert_eq!(
        lines,
        [
            "add.u32 %r3, %r0, 1;",
            "setp.eq.u32 %p0, %r3, %r1;",
            "shl.b32 %r4, %r0, 1;",
            "@%p0 add.u32 %r2, %r4, 3;",
            "@!%p0 mov.u32 %r2, %r0;",
        ]
    );
}

#[test]
fn comparisons_and_addresses_take_formulas() {
    let lines = text(|k, [a, b, c]| {
        let inside = k.compare(Cmp::Lt, a, b);
        let odd = k.when(inside).compare_and(Cmp::Ne, a & 1, 0u32, inside);
        let place = k.offset(Addr::<Shared>::new(c).at(16), a * 64 + b);
        k.when(odd).st(place, a);
    });
    assert_eq!(
        lines,
        [
            "setp.lt.u32 %p0, %r0, %r1;",
            "and.b32 %r3, %r0, 1;",
            "@%p0 setp.ne.and.u32 %p1, %r3, 0, %p0;",
            "mad.lo.u32 %r4, %r0, 64, %r1;",
            "add.u32 %r5, %r2, %r4;",
            "@%p1 st.shared.u32 [%r5+16], %r0;",
        ]
    );
}
