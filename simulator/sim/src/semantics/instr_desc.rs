//! The 32-bit instruction descriptor of `tcgen05.mma`, every kind.
//!
//! Flow: `exec/tcgen05` decodes it together with the kind and CTA group from the opcode; the result has the
//! shape and types that `semantics::{tcgen05, dot}` need. PTX ISA 9.7.16.4.2 (tables 42 to 44) and 9.7.16.2.1
//! (table 39, valid shapes).

use super::element::{Element, Scale};
use super::misuse::{invalid, not_modelled, require};
use super::smem_desc::Major;
use crate::names::modifiers;
use crate::trap::Fault;

modifiers! {
    /// `.kind::*` of `tcgen05.mma`.
    Kind {
        F16 "kind::f16", Tf32 "kind::tf32", F8f6f4 "kind::f8f6f4", I8 "kind::i8", Mxf8f6f4 "kind::mxf8f6f4",
        Mxf4 "kind::mxf4", Mxf4nvf4 "kind::mxf4nvf4",
    }
}

impl Kind {
    /// Whether A and B carry block scales.
    pub const fn block_scaled(self) -> bool {
        matches!(self, Kind::Mxf8f6f4 | Kind::Mxf4 | Kind::Mxf4nvf4)
    }
}

/// The type of D.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Accumulator {
    /// `.f16`, one to a 32-bit TMEM word.
    F16,
    F32,
    S32,
}

/// A decoded instruction descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstrDesc {
    /// Rows of D over all CTAs of the group.
    pub m: u32,
    /// Columns of D.
    pub n: u32,
    /// Elements of K of one instruction.
    pub k: u32,
    /// Type of A.
    pub a: Element,
    /// Type of B.
    pub b: Element,
    /// Type of D.
    pub d: Accumulator,
    pub negate_a: bool,
    pub negate_b: bool,
    /// Layout of A in shared memory (bit 15).
    pub a_major: Major,
    /// Layout of B in shared memory (bit 16).
    pub b_major: Major,
    /// Integer results saturate instead of wrapping.
    pub saturate: bool,
    /// Type of the block scales.
    pub scale: Option<Scale>,
    /// Byte within the TMEM word where the scales of A begin.
    pub sfa_id: u32,
    /// Byte within the TMEM word where the scales of B begin.
    pub sfb_id: u32,
}

const WHAT: &str = "tcgen05 instruction descriptor";

impl InstrDesc {
    /// Decodes and validates a descriptor for `tcgen05.mma` without `.sp` and `.ws`, for `cta_group` 1 or 2.
    ///
    /// # Errors
    /// Nonzero reserved bits; a type, shape or scale-factor id that the kind lacks; sparsity, K = 96 and `.ws`
    /// shifts (not modelled).
    pub fn decode(bits: u32, kind: Kind, cta_group: u32) -> Result<InstrDesc, Fault> {
        let field = |at: u32, width: u32| bits >> at & ((1 << width) - 1);
        let zero = |name, mask: u32, rule| require(bits & mask == 0, WHAT, name, (bits & mask) as u64, rule);
        if field(2, 1) != 0 {
            return Err(not_modelled(WHAT, "sparsity", 1, "dense matrices, bit 2 = 0"));
        }
        let (a_code, b_code) = match kind {
            Kind::Mxf4 | Kind::Mxf4nvf4 => (field(7, 3), field(10, 2)),
            _ => (field(7, 3), field(10, 3)),
        };
        let (d, scale, m, sf_step) = InstrDesc::sums(bits, kind)?;
        if kind != Kind::I8 {
            zero("saturate", 1 << 3, "only kind::i8 saturates")?;
        } else {
            zero("negate A and B", 3 << 13, "kind::i8 cannot negate")?;
        }
        let scale_id = |name, at: u32| {
            let id = field(at, 2);
            let valid = sf_step == 1 || id % 2 == 0;
            require(valid, WHAT, name, id as u64, "kind::mxf4 and mxf4nvf4 take 0 or 2").map(|()| id)
        };
        let (sfa_id, sfb_id) = match scale {
            Some(_) => (scale_id("scale factor A id", 29)?, scale_id("scale factor B id", 4)?),
            None => (0, 0),
        };
        let major = |at: u32| if field(at, 1) == 0 { Major::K } else { Major::Mn };
        let desc = InstrDesc {
            m,
            n: field(17, 6) * 8,
            k: match kind {
                Kind::Tf32 => 8,
                Kind::F16 => 16,
                Kind::F8f6f4 | Kind::I8 | Kind::Mxf8f6f4 => 32,
                Kind::Mxf4 | Kind::Mxf4nvf4 => 64,
            },
            a: element(kind, "A type", a_code)?,
            b: element(kind, "B type", b_code)?,
            d,
            negate_a: field(13, 1) != 0,
            negate_b: field(14, 1) != 0,
            a_major: major(15),
            b_major: major(16),
            saturate: field(3, 1) != 0,
            scale,
            sfa_id,
            sfb_id,
        };
        desc.check_types(kind)?;
        desc.check_shape(kind, cta_group)?;
        Ok(desc)
    }

    /// The type of D, that of the scales, M, and what ids of scales are multiples of.
    fn sums(bits: u32, kind: Kind) -> Result<(Accumulator, Option<Scale>, u32, u32), Fault> {
        let field = |at: u32, width: u32| bits >> at & ((1 << width) - 1);
        let zero = |name, mask: u32, rule| require(bits & mask == 0, WHAT, name, (bits & mask) as u64, rule);
        if kind.block_scaled() {
            zero("reserved bits 0-1, 3 and 6", 0b1001011, "they are 0")?;
            zero("reserved bits 24-26", 7 << 24, "they are 0")?;
            match kind {
                Kind::Mxf8f6f4 => zero("reserved bit 31", 1 << 31, "it is 0")?,
                _ => {
                    zero("reserved bit 12", 1 << 12, "it is 0")?;
                    zero("transpose A and B", 3 << 15, "4-bit matrices are K-major")?;
                    if field(31, 1) != 0 {
                        return Err(not_modelled(WHAT, "K dimension", 1, "K = 64, bit 31 = 0"));
                    }
                }
            }
            let scale = if field(23, 1) == 0 { Scale::Ue4m3 } else { Scale::Ue8m0 };
            let allowed = scale == Scale::Ue8m0 || kind == Kind::Mxf4nvf4;
            require(
                allowed,
                WHAT,
                "scale type",
                field(23, 1) as u64,
                "this kind takes ue8m0 scales, bit 23 = 1",
            )?;
            let step = if kind == Kind::Mxf8f6f4 { 1 } else { 2 };
            Ok((Accumulator::F32, Some(scale), field(27, 2) * 128, step))
        } else {
            zero("reserved bits 6, 23 and 29", 1 << 6 | 1 << 23 | 1 << 29, "they are 0")?;
            zero("sparsity selector", 3, "it is 0 for dense matrices")?;
            if field(30, 2) != 0 {
                return Err(not_modelled(
                    WHAT,
                    "maximum shift",
                    field(30, 2) as u64,
                    "no .ws shift, bits 30-31 = 0",
                ));
            }
            Ok((accumulator(kind, field(4, 2))?, None, field(24, 5) * 16, 0))
        }
    }

    fn check_types(&self, kind: Kind) -> Result<(), Fault> {
        let bf16 = self.a == Element::Bf16 || self.b == Element::Bf16;
        let valid = !(kind == Kind::F16 && self.d == Accumulator::F16 && bf16);
        require(valid, WHAT, "D type", 0, "bf16 operands accumulate in f32, D type = 1")
    }

    fn check_shape(&self, kind: Kind, cta_group: u32) -> Result<(), Fault> {
        let (m, n) = (self.m, self.n);
        let (m_valid, rule) = match (cta_group, kind.block_scaled()) {
            (1, false) => (m == 64 || m == 128, "cta_group::1 takes M = 64 or 128"),
            (1, true) => (m == 128, "block-scaled kinds with cta_group::1 take M = 128"),
            _ => (m == 128 || m == 256, "cta_group::2 takes M = 128 or 256"),
        };
        require(m_valid, WHAT, "M", m as u64, rule)?;
        let range = (8..=256).contains(&n);
        let (n_valid, rule) = match (cta_group, kind) {
            (1, Kind::I8) => {
                (range && (n <= 32 || n.is_multiple_of(16)) && n != 40, "N is 8, 16, 24, 32, 48, … 256")
            }
            (1, _) => (range, "N is 8, 16, … 256"),
            (_, Kind::I8) => (range && n.is_multiple_of(32), "N is 32, 64, … 256"),
            _ => (range && n.is_multiple_of(16), "N is 16, 32, … 256"),
        };
        require(n_valid, WHAT, "N", n as u64, rule)
    }
}

fn accumulator(kind: Kind, code: u32) -> Result<Accumulator, Fault> {
    match (kind, code) {
        (Kind::I8, 2) => Ok(Accumulator::S32),
        (Kind::F16 | Kind::F8f6f4, 0) => Ok(Accumulator::F16),
        (Kind::F16 | Kind::F8f6f4 | Kind::Tf32, 1) => Ok(Accumulator::F32),
        _ => {
            let rule = "F16 = 0 (f16, f8f6f4), F32 = 1 (tf32, f16, f8f6f4), S32 = 2 (i8)";
            Err(invalid(WHAT, "D type", code as u64, rule))
        }
    }
}

fn element(kind: Kind, field: &'static str, code: u32) -> Result<Element, Fault> {
    Ok(match (kind, code) {
        (Kind::F16, 0) => Element::F16,
        (Kind::F16, 1) => Element::Bf16,
        (Kind::Tf32, 2) => Element::Tf32,
        (Kind::F8f6f4 | Kind::Mxf8f6f4, 0) => Element::E4m3,
        (Kind::F8f6f4 | Kind::Mxf8f6f4, 1) => Element::E5m2,
        (Kind::F8f6f4 | Kind::Mxf8f6f4, 3) => Element::E2m3,
        (Kind::F8f6f4 | Kind::Mxf8f6f4, 4) => Element::E3m2,
        (Kind::F8f6f4 | Kind::Mxf8f6f4, 5) | (Kind::Mxf4 | Kind::Mxf4nvf4, 1) => Element::E2m1,
        (Kind::I8, 0) => Element::U8,
        (Kind::I8, 1) => Element::S8,
        _ => {
            let rule = match kind {
                Kind::F16 => "kind::f16 takes F16 = 0 or BF16 = 1",
                Kind::Tf32 => "kind::tf32 takes TF32 = 2",
                Kind::I8 => "kind::i8 takes U8 = 0 or S8 = 1",
                Kind::Mxf4 | Kind::Mxf4nvf4 => "kind::mxf4 and mxf4nvf4 take E2M1 = 1",
                _ => "the kind takes E4M3 = 0, E5M2 = 1, E2M3 = 3, E3M2 = 4 or E2M1 = 5",
            };
            return Err(invalid(WHAT, field, code as u64, rule));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_nvidias_compilers_decode_exact() {
        let nvfp4 = InstrDesc::decode(0x0820_0480, Kind::Mxf4nvf4, 1).unwrap();
        let expected = InstrDesc {
            m: 128,
            n: 128,
            k: 64,
            a: Element::E2m1,
            b: Element::E2m1,
            d: Accumulator::F32,
            negate_a: false,
            negate_b: false,
            a_major: Major::K,
            b_major: Major::K,
            saturate: false,
            scale: Some(Scale::Ue4m3),
            sfa_id: 0,
            sfb_id: 0,
        };
        assert_eq!(nvfp4, expected);
        let wide = InstrDesc::decode(0x0840_0480, Kind::Mxf4nvf4, 1).unwrap();
        assert_eq!((wide.m, wide.n), (128, 256));
        let pair = InstrDesc::decode(0x1040_0480, Kind::Mxf4nvf4, 2).unwrap();
        assert_eq!((pair.m, pair.n), (256, 256));
        let f16 = InstrDesc::decode(0x0820_0010, Kind::F16, 1).unwrap();
        let expected = InstrDesc { k: 16, a: Element::F16, b: Element::F16, scale: None, ..expected };
        assert_eq!(f16, expected);
    }

    #[test]
    fn descriptors_of_the_builder_decode_to_their_shape() {
        use dualgemm_ptx::layout::BlockScaledDesc;
        for (m, cta_group) in [(128, 1), (128, 2), (256, 2)] {
            for n in (16..=256).step_by(16) {
                let bits = BlockScaledDesc::nvfp4(m, n).encode().unwrap();
                let desc = InstrDesc::decode(bits, Kind::Mxf4nvf4, cta_group).unwrap();
                assert_eq!((desc.m, desc.n, desc.scale), (m, n, Some(Scale::Ue4m3)));
            }
        }
    }

    #[test]
    fn each_rule_has_a_message() {
        let shape = 8 << 24 | 16 << 17;
        let nvfp4 = 0x0820_0480;
        for (bits, kind, group, text) in [
            (nvfp4 | 1, Kind::Mxf4nvf4, 1, "reserved bits 0-1, 3 and 6 is 0x1, but they are 0"),
            (
                nvfp4 | 1 << 2,
                Kind::Mxf4nvf4,
                1,
                "sparsity 0x1 is legal PTX that the simulator does not model",
            ),
            (nvfp4 | 1 << 31, Kind::Mxf4nvf4, 1, "K dimension 0x1 is legal"),
            (nvfp4 | 1 << 15, Kind::Mxf4nvf4, 1, "4-bit matrices are K-major"),
            (
                nvfp4 | 1 << 29,
                Kind::Mxf4nvf4,
                1,
                "scale factor A id is 0x1, but kind::mxf4 and mxf4nvf4 take 0 or 2",
            ),
            (nvfp4 | 1 << 24, Kind::Mxf4nvf4, 1, "reserved bits 24-26"),
            (nvfp4, Kind::Mxf4, 1, "scale type is 0x0, but this kind takes ue8m0"),
            (nvfp4 ^ 3 << 7, Kind::Mxf4nvf4, 1, "A type is 0x2, but kind::mxf4 and mxf4nvf4 take E2M1 = 1"),
            (
                0x1040_0480,
                Kind::Mxf4nvf4,
                1,
                "M is 0x100, but block-scaled kinds with cta_group::1 take M = 128",
            ),
            (8 << 24 | 1 << 17 | 0x480, Kind::Mxf4nvf4, 2, "N is 0x8, but N is 16, 32, … 256"),
            (shape | 2 << 4, Kind::F16, 1, "D type is 0x2"),
            (shape | 1 << 7, Kind::F16, 1, "bf16 operands accumulate in f32"),
            (shape | 1 << 4 | 2 << 7, Kind::F16, 1, "A type is 0x2, but kind::f16 takes F16 = 0 or BF16 = 1"),
            (shape | 1 << 4 | 1 << 3, Kind::F16, 1, "only kind::i8 saturates"),
            (shape | 1 << 4 | 1 << 30, Kind::F16, 1, "maximum shift 0x1 is legal"),
            (4 << 24 | 16 << 17 | 1 << 4, Kind::F16, 2, "M is 0x40, but cta_group::2 takes M = 128 or 256"),
            (8 << 24 | 5 << 17 | 2 << 4, Kind::I8, 1, "N is 0x28"),
            (shape | 2 << 4 | 1 << 13, Kind::I8, 1, "kind::i8 cannot negate"),
        ] {
            let message = InstrDesc::decode(bits, kind, group).unwrap_err().message;
            assert!(message.contains(text), "{message:?} lacks {text:?}");
        }
    }
}
