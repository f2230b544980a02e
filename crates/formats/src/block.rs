//! Block formats: how many elements share a scale, and what kind of scale.
//!
//! Sources: nvfp4, PTX ISA "Block Scaling", `.scale_vec::4X` with `.ue4m3`
//! <https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-block-scaling>; mxfp4, OCP Microscaling Formats
//! (MX) v1.0, section 5 <https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>.

use crate::Error;
use crate::scalar::{e4m3, ue8m0};

crate::named! {
    /// A 4-bit block format. Both hold e2m1 codes; they differ in block length and scale type.
    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum BlockFormat {
        /// 16 elements, one e4m3 scale, one f32 scale per tensor (NVIDIA).
        Nvfp4 = "nvfp4",
        /// 32 elements, one ue8m0 scale (OCP MX).
        Mxfp4 = "mxfp4",
    }
}

impl BlockFormat {
    /// Elements of K that share a scale.
    pub const fn block_len(self) -> usize {
        match self {
            Self::Nvfp4 => 16,
            Self::Mxfp4 => 32,
        }
    }

    /// Value of a scale byte; NaN for the format's NaN bytes.
    pub const fn decode_scale(self, byte: u8) -> f32 {
        match self {
            Self::Nvfp4 => e4m3::decode(byte),
            Self::Mxfp4 => ue8m0::decode(byte),
        }
    }

    /// Says why a scale byte is no scale, if it is none: NaN, or a sign bit where there can be none.
    pub const fn scale_fault(self, byte: u8) -> Option<&'static str> {
        match (self, byte) {
            (Self::Nvfp4, 0x7F | 0xFF) | (Self::Mxfp4, 0xFF) => Some("NaN"),
            (Self::Nvfp4, 0x80..) => Some("negative"),
            _ => None,
        }
    }

    /// The least byte that [`scale_fault`](Self::scale_fault) finds fault with, and with all above it.
    pub(crate) const fn first_faulty_scale(self) -> u8 {
        match self {
            Self::Nvfp4 => 0x7F,
            Self::Mxfp4 => 0xFF,
        }
    }

    /// Checks the scale byte of one block of a tensor.
    ///
    /// # Errors
    /// If it is NaN or negative.
    #[inline]
    pub fn check_scale(self, tensor: &str, (row, block): (usize, usize), byte: u8) -> Result<(), Error> {
        self.scale_fault(byte).map_or(Ok(()), |what| {
            let valid = self.valid_scales();
            Err(Error::ScaleByte { tensor: tensor.into(), row, block, byte, what, valid })
        })
    }

    /// The scale bytes that [`scale_fault`](Self::scale_fault) lets pass, for messages.
    pub const fn valid_scales(self) -> &'static str {
        match self {
            Self::Nvfp4 => "0x00..=0x7e",
            Self::Mxfp4 => "0x00..=0xfe",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_faults_are_exactly_nan_and_negative() {
        for byte in 0..=255u8 {
            let value = BlockFormat::Nvfp4.decode_scale(byte);
            let fault = value.is_nan() || value.is_sign_negative();
            assert_eq!(BlockFormat::Nvfp4.scale_fault(byte).is_some(), fault, "{byte:#04x}");
            let value = BlockFormat::Mxfp4.decode_scale(byte);
            assert_eq!(BlockFormat::Mxfp4.scale_fault(byte).is_some(), value.is_nan(), "{byte:#04x}");
            for format in [BlockFormat::Nvfp4, BlockFormat::Mxfp4] {
                assert_eq!(format.scale_fault(byte).is_some(), byte >= format.first_faulty_scale());
            }
        }
    }
}
