//! Where the eight values of a thread go: floats, nvfp4, or the floats that nvfp4 stands for.

use dualgemm_formats::{FloatType, ScaleLayout};
use dualgemm_ptx::builder::*;

use super::amax::MAX_PARTS;
use super::rowwise::{Config, EightValues, Place, Sink, THREADS, WIDTH, scale_offset};
use super::values;
use crate::parts::groups::GroupRows;
use crate::plain::order::{SPAN, column as column_of};

pub(super) struct SinkParams {
    out: PointerParam,
    pitch: Param<U32>,
    kind: Kind,
}

enum Kind {
    Float(FloatType),
    Blocks,
    Codes { layout: ScaleLayout, scales: PointerParam, groups: Option<GroupRows>, scale: ScaleParams },
    Image(ScaleParams),
    Permuted,
    E4m3(Inverse),
}

/// What values are multiplied by before they are rounded to e4m3.
enum Inverse {
    /// One over the tensor scale.
    Static(Param<F32>),
    /// 448 over the largest magnitude, `divisor / 6`.
    Dynamic(ScaleParams),
}

/// The tensor scale of a quantizing sink.
enum ScaleParams {
    /// `divisor / 6` and `1 / divisor`.
    Static([Param<F32>; 2]),
    /// Largest magnitudes, how many there are, and where the scale goes.
    Dynamic { parts: PointerParam, count: Param<U32>, scale: PointerParam },
}

impl SinkParams {
    pub(super) fn declare(k: &mut Kernel, config: &Config) -> Self {
        let (out, pitch) = (k.pointer("out"), k.param("out_pitch"));
        let kind = match config.sink {
            Sink::Float(ty) => Kind::Float(ty),
            Sink::Blocks => Kind::Blocks,
            Sink::Codes(layout) => Kind::Codes {
                layout,
                scales: k.pointer("out_scales"),
                groups: None,
                scale: ScaleParams::declare(k, config.dynamic),
            },
            Sink::Grouped => Kind::Codes {
                layout: ScaleLayout::Sf128x4,
                scales: k.pointer("out_scales"),
                groups: Some(GroupRows::declare(k)),
                scale: ScaleParams::declare(k, config.dynamic),
            },
            Sink::Image => Kind::Image(ScaleParams::declare(k, config.dynamic)),
            Sink::Permuted => Kind::Permuted,
            Sink::E4m3 if config.dynamic => Kind::E4m3(Inverse::Dynamic(ScaleParams::declare(k, true))),
            Sink::E4m3 => Kind::E4m3(Inverse::Static(k.param("scale_inverse"))),
        };
        Self { out, pitch, kind }
    }

    pub(super) fn give(&self, k: &mut Kernel, place: &Place, taken: EightValues) {
        let (start, pitch) = (k.ld_pointer(&self.out), k.ld_param(&self.pitch));
        match &self.kind {
            Kind::Float(ty) => {
                let to = place.address(k, start, pitch, WIDTH * values::bytes(*ty));
                store(k, place, *ty, to, taken);
            }
            Kind::Blocks => {
                let within = k.eval(((place.row << 3) + (place.unit & 7)) * (WIDTH * 2));
                let to = k.offset(start, (place.unit >> 3).mul_wide(pitch) + within.widen());
                store(k, place, FloatType::F16, to, taken);
            }
            Kind::Codes { layout, scales, groups, scale } => {
                let floats = taken.floats(k);
                let (codes, byte) = scale.quantize(k, place, &floats);
                let to = place.address(k, start, pitch, WIDTH / 2);
                k.when(place.inside).st(to, codes);
                let groups = groups.as_ref();
                store_scale(k, place, (*layout, groups), scales, byte);
            }
            Kind::Image(scale) => {
                let floats = taken.floats(k);
                let (codes, byte) = scale.quantize(k, place, &floats);
                let pairs = EightValues::Pairs(values::decode(k, codes, byte));
                let to = place.address(k, start, pitch, WIDTH * 2);
                store(k, place, FloatType::F16, to, pairs);
            }
            Kind::Permuted => {
                let floats = taken.floats(k);
                store_permuted(k, place, (start, pitch), &floats);
            }
            Kind::E4m3(inverse) => {
                let inverse = match inverse {
                    Inverse::Static(inverse) => k.ld_param(inverse),
                    Inverse::Dynamic(scale) => scale.factors(k, place)[0],
                };
                let floats = taken.floats(k).map(|value| k.mul(value, inverse));
                let words = [0, 4].map(|first| values::encode_e4m3_word(k, &floats[first..first + 4]));
                let to = place.address(k, start, pitch, WIDTH);
                k.if_(place.inside, "store", |k| k.st_vector(to, &words));
            }
        }
    }
}

/// Stores the eight elements of word `unit % 16` of a span as four pairs, 16 bytes apart from each other or more.
fn store_permuted(
    k: &mut Kernel,
    place: &Place,
    (start, pitch): (Addr<Global>, Reg<U32>),
    floats: &[Reg<F32>; 8],
) {
    let spans = (place.columns + (SPAN as u32 - 1)) >> SPAN.ilog2();
    let end = k.eval(spans * (SPAN as u32 / WIDTH));
    let inside = k.compare_and(Cmp::Lt, place.unit, end, place.in_rows);
    k.comment("Lane quarter q and word i of the span: two k16 steps from 2i on, columns from 2q on.");
    let span = k.eval(place.unit >> 4);
    let q = k.eval(place.unit.bit_field(2, 2));
    let i = k.eval(place.unit & 3);
    let column = q * 2 + (i * 32 + (span << SPAN.ilog2()));
    let to = k.offset(start, column.mul_wide(2) + place.row.mul_wide(pitch));
    k.if_(inside, "store", |k| {
        for p in 0..4usize {
            let word = values::narrow(k, FloatType::F16, floats[p], floats[p + 4]);
            k.st(to.at(column_of(p) as u32 * 2), word);
        }
    });
}

fn store(k: &mut Kernel, place: &Place, ty: FloatType, to: Addr<Global>, taken: EightValues) {
    k.if_(place.inside, "store", |k| match (taken, ty) {
        (EightValues::Pairs(pairs), FloatType::F16) => k.st_vector(to, &pairs),
        (taken, _) => {
            let floats = taken.floats(k);
            values::store(k, ty, to, &floats);
        }
    });
}

/// The even lane of a block stores its scale; outside the matrix, where the layout has padding, zero.
fn store_scale(
    k: &mut Kernel,
    place: &Place,
    (layout, groups): (ScaleLayout, Option<&GroupRows>),
    scales: &PointerParam,
    byte: Reg<U32>,
) {
    let [blocks, padded] = place.blocks(k);
    let end = if layout == ScaleLayout::Linear { blocks } else { padded };
    let byte = k.select::<U32>(place.inside, byte, 0u32);
    let block = place.block(k);
    let odd = k.eval(place.unit & 1);
    let (row, even) = match groups {
        None => (place.row, k.compare(Cmp::Eq, odd, 0u32)),
        Some(groups) => {
            let (row, of_group) = groups.scale_row(k, place.row);
            (row, k.compare_and(Cmp::Eq, odd, 0u32, of_group))
        }
    };
    let here = k.compare_and(Cmp::Lt, block, end, even);
    let offset = scale_offset(k, layout, row, block, blocks);
    let start = k.ld_pointer(scales);
    let to = k.offset(start, offset);
    k.when(here).st_byte(to, byte);
}

impl ScaleParams {
    fn declare(k: &mut Kernel, dynamic: bool) -> Self {
        match dynamic {
            false => Self::Static([k.param("divisor_sixth"), k.param("divisor_inverse")]),
            true => Self::Dynamic {
                parts: k.pointer("amax_parts"),
                count: k.param("amax_count"),
                scale: k.pointer("scale"),
            },
        }
    }

    /// `divisor / 6` and `1 / divisor`.
    fn factors(&self, k: &mut Kernel, place: &Place) -> [Reg<F32>; 2] {
        match self {
            Self::Static(params) => [k.ld_param(&params[0]), k.ld_param(&params[1])],
            Self::Dynamic { parts, count, scale } => from_amax(k, place, parts, count, scale),
        }
    }

    /// Codes and scale byte of the thread's half of a block, by Transformer Engine's rule
    /// (`dualgemm_formats::Producer::Te`), bit for bit.
    fn quantize(&self, k: &mut Kernel, place: &Place, values: &[Reg<F32>; 8]) -> (Reg<B32>, Reg<U32>) {
        let factors = self.factors(k, place);
        let own = values::amax(k, values);
        let other = k.shuffle(Shuffle::Xor, own, 1u32);
        let amax = k.max(own, other);
        let (byte, factor) = values::scale(k, amax, factors);
        let scaled = values.map(|value| k.mul(value, factor));
        (values::encode_e2m1(k, &scaled), byte)
    }
}

/// `divisor / 6` and `1 / divisor` from the parts of the tensor's largest magnitude. The first thread writes the tensor
/// scale, a multiplier.
fn from_amax(
    k: &mut Kernel,
    place: &Place,
    parts: &PointerParam,
    count: &Param<U32>,
    scale: &PointerParam,
) -> [Reg<F32>; 2] {
    let (parts, count) = (k.ld_pointer(parts), k.ld_param(count));
    k.comment("Every warp reads all parts, so that no barrier is needed.");
    let lane = k.special(Special::LaneId);
    let from = k.offset(parts, lane.mul_wide(4));
    let mut amax = k.mov(0.0f32);
    let loaded: Vec<Reg<F32>> = (0..MAX_PARTS / 32)
        .map(|i| {
            let part = k.mov(0.0f32);
            let here = k.compare(Cmp::Lt, lane + 32 * i, count);
            k.when(here).to(part).ld::<F32, _>(from.at(128 * i));
            part
        })
        .collect();
    for part in loaded {
        amax = k.max(amax, part);
    }
    for step in [16u32, 8, 4, 2, 1] {
        let other = k.shuffle(Shuffle::Xor, amax, step);
        amax = k.max(amax, other);
    }
    let divisor = k.div_exact(2688.0f32, amax);
    let divisor = k.min(divisor, f32::MAX);
    let least = k.min(amax, divisor);
    let none = k.compare(Cmp::Eq, least, 0.0f32);
    let divisor = k.select::<F32>(none, 1.0f32, divisor);
    let inverse = k.rcp(divisor);
    let first = k.compare(Cmp::Eq, place.row | place.unit, 0u32);
    let to = k.ld_pointer(scale);
    k.when(first).st(to, inverse);
    [k.mul(divisor, 1.0f32 / 6.0), inverse]
}

const _: () = assert!(THREADS.is_multiple_of(32) && MAX_PARTS.is_multiple_of(32));
