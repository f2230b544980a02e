//! A pack as bytes: a header of 64, the panels, the biases, all little-endian.
//!
//! ```text
//! byte 0   "dgemmcpu"                 byte 16  N, u64
//!      8   version, u32                    24  K, u64
//!      12  format: 0 nvfp4, 1 mxfp4        32  tensor scales of gate and up as held, f32
//!      13  source of the tensor scale      40  0
//!          of gate, of up: 0 multiplier,   48  digest of everything but itself, u64
//!          1 divisor, 2 absent             56  0
//!      15  has a bias: 1 gate, 2 up        64  panels, then the bias of gate, then that of up
//! ```

use dualgemm_formats::{BlockFormat, GlobalScale, GlobalScaleSource};

use super::{CHUNK, CHUNK_K, PANEL, PackedGateUp};
use crate::Error;
use crate::aligned::Aligned;

impl PackedGateUp {
    /// The pack as bytes to keep in a cache file: header, panels, biases, all little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Header::LEN + self.panels.len() + 8 * self.n);
        let header = Header {
            format: self.format,
            n: self.n,
            k: self.k,
            global_scales: self.global_scales,
            has_bias: [self.biases[0].is_some(), self.biases[1].is_some()],
        };
        header.write(&mut out);
        out.extend_from_slice(&self.panels);
        for value in self.biases.iter().flatten().flatten() {
            out.extend_from_slice(&value.to_le_bytes());
        }
        let digest = digest(&out);
        out[Header::DIGEST..][..8].copy_from_slice(&digest.to_le_bytes());
        out
    }

    /// A pack from the bytes that [`to_bytes`](Self::to_bytes) returned.
    ///
    /// # Errors
    /// If the bytes are not a pack, of another version, truncated, too long or altered.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let header = Header::read(bytes)?;
        let fault = |what, found: String, expected: String| Error::PackedBytes { what, found, expected };
        let panels_len = header.n.div_ceil(PANEL).checked_mul(header.k / CHUNK_K * CHUNK);
        let biases = header.has_bias.iter().filter(|&&has| has).count();
        let len = panels_len
            .and_then(|len| len.checked_add(biases.checked_mul(header.n)?.checked_mul(4)?))
            .and_then(|len| len.checked_add(Header::LEN))
            .ok_or_else(|| {
                fault("size", format!("[{}, {}]", header.n, header.k), "an addressable size".into())
            })?;
        if bytes.len() != len {
            return Err(fault("length", format!("{} bytes", bytes.len()), format!("{len} bytes")));
        }
        let (held, computed) = (u64_at(bytes, Header::DIGEST), digest(bytes));
        if held != computed {
            return Err(fault("digest", format!("{held:#018x}"), format!("{computed:#018x}")));
        }
        let mut panels = Aligned::zeroed(panels_len.unwrap_or(0));
        let (body, mut tail) = bytes[Header::LEN..].split_at(panels.len());
        panels.copy_from_slice(body);
        let mut take_bias = |has: bool| {
            has.then(|| {
                let (bias, rest) = tail.split_at(4 * header.n);
                tail = rest;
                bias.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            })
        };
        let biases = [take_bias(header.has_bias[0]), take_bias(header.has_bias[1])];
        let Header { format, n, k, global_scales, .. } = header;
        Ok(Self { format, n, k, global_scales, biases, panels })
    }
}

/// The fixed part of a serialized pack, in file order.
struct Header {
    format: BlockFormat,
    n: usize,
    k: usize,
    global_scales: [GlobalScale; 2],
    has_bias: [bool; 2],
}

impl Header {
    const MAGIC: [u8; 8] = *b"dgemmcpu";
    /// Increases with each change of the layout of chunks or of this header.
    const VERSION: u32 = 2;
    const DIGEST: usize = 48;
    const LEN: usize = 64;

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&Self::MAGIC);
        out.extend_from_slice(&Self::VERSION.to_le_bytes());
        let source = |scale: GlobalScale| match scale.source() {
            GlobalScaleSource::Multiplier => 0,
            GlobalScaleSource::Divisor(_) => 1,
            GlobalScaleSource::Absent => 2,
        };
        let format = match self.format {
            BlockFormat::Nvfp4 => 0,
            BlockFormat::Mxfp4 => 1,
        };
        let has_bias = u8::from(self.has_bias[0]) | u8::from(self.has_bias[1]) << 1;
        out.extend_from_slice(&[
            format,
            source(self.global_scales[0]),
            source(self.global_scales[1]),
            has_bias,
        ]);
        out.extend_from_slice(&(self.n as u64).to_le_bytes());
        out.extend_from_slice(&(self.k as u64).to_le_bytes());
        for scale in self.global_scales {
            out.extend_from_slice(&scale.held().to_le_bytes());
        }
        out.resize(Self::LEN, 0);
    }

    fn read(bytes: &[u8]) -> Result<Self, Error> {
        let fault = |what, found: String, expected: String| Error::PackedBytes { what, found, expected };
        if bytes.len() < Self::LEN {
            return Err(fault("length", format!("{} bytes", bytes.len()), format!("at least {}", Self::LEN)));
        }
        if bytes[..8] != Self::MAGIC {
            let found = format!("{:?}", bytes[..8].escape_ascii().to_string());
            return Err(fault("magic", found, format!("{:?}", Self::MAGIC.escape_ascii().to_string())));
        }
        let version = u32_at(bytes, 8);
        if version != Self::VERSION {
            return Err(fault("version", version.to_string(), Self::VERSION.to_string()));
        }
        let format = match bytes[12] {
            0 => BlockFormat::Nvfp4,
            1 => BlockFormat::Mxfp4,
            other => return Err(fault("format", other.to_string(), "0 (nvfp4) or 1 (mxfp4)".into())),
        };
        let scale = |half: usize| {
            let held = f32::from_bits(u32_at(bytes, 32 + 4 * half));
            let scale = match bytes[13 + half] {
                0 => GlobalScale::multiplier(held),
                1 => GlobalScale::divisor(held),
                2 => GlobalScale::ONE,
                other => return Err(fault("scale source", other.to_string(), "0, 1 or 2".into())),
            };
            let usable = scale.held().to_bits() == held.to_bits()
                && [held, scale.value()].iter().all(|x| x.is_finite() && *x > 0.0);
            if usable {
                Ok(scale)
            } else {
                Err(fault("tensor scale", held.to_string(), "positive, finite".into()))
            }
        };
        let size = |what, at| {
            let value = u64_at(bytes, at);
            usize::try_from(value).map_err(|_| fault(what, value.to_string(), "an addressable size".into()))
        };
        let header = Self {
            format,
            n: size("N", 16)?,
            k: size("K", 24)?,
            global_scales: [scale(0)?, scale(1)?],
            has_bias: [bytes[15] & 1 != 0, bytes[15] & 2 != 0],
        };
        if header.n == 0 || header.k == 0 || !header.k.is_multiple_of(format.block_len()) {
            let expected = format!("at least 1, by a multiple of {}", format.block_len());
            return Err(fault("shape", format!("[{}, {}]", header.n, header.k), expected));
        }
        if bytes[15] > 3 || bytes[40..Self::DIGEST].iter().chain(&bytes[56..Self::LEN]).any(|&b| b != 0) {
            return Err(fault("a reserved byte", "set".into(), "0".into()));
        }
        Ok(header)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

/// FNV-1a over 64-bit words, rotated so that high bits matter, without the digest's own bytes. Guards against damage, not
/// against malice.
fn digest(bytes: &[u8]) -> u64 {
    let mut hash = 0xCBF2_9CE4_8422_2325u64;
    let mut feed = |word: u64| hash = (hash ^ word).wrapping_mul(0x0100_0000_01B3).rotate_left(29);
    for part in [&bytes[..Header::DIGEST], &bytes[Header::LEN..]] {
        let words = part.chunks_exact(8);
        let rest = words.remainder();
        words.for_each(|word| feed(u64_at(word, 0)));
        rest.iter().for_each(|&byte| feed(byte.into()));
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack::tests::weights;
    use proptest::prelude::*;

    #[test]
    fn bytes_come_back() {
        for seed in 0..4 {
            for format in BlockFormat::ALL {
                let packed = PackedGateUp::pack(&weights(format, 19, 64, seed)).unwrap();
                assert_eq!(PackedGateUp::from_bytes(&packed.to_bytes()).unwrap(), packed);
            }
        }
    }

    #[test]
    fn foreign_truncated_and_altered_bytes_are_refused_by_part() {
        let good = PackedGateUp::pack(&weights(BlockFormat::Nvfp4, 5, 32, 1)).unwrap().to_bytes();
        let fault = |bytes: &[u8]| match PackedGateUp::from_bytes(bytes) {
            Err(Error::PackedBytes { what, .. }) => what,
            other => panic!("accepted: {other:?}"),
        };
        let with = |at: usize, value: &[u8]| {
            let mut bytes = good.clone();
            bytes[at..at + value.len()].copy_from_slice(value);
            fault(&bytes)
        };
        assert_eq!(
            [fault(&[]), fault(&good[..good.len() - 1]), fault(&[&good[..], &[0]].concat())],
            ["length"; 3]
        );
        assert_eq!(with(0, b"safetens"), "magic");
        assert_eq!(with(8, &[1]), "version");
        assert_eq!(with(12, &[9]), "format");
        assert_eq!(with(13, &[3]), "scale source");
        assert_eq!(with(16, &u64::MAX.to_le_bytes()), "size");
        assert_eq!(with(16, &0u64.to_le_bytes()), "shape");
        assert_eq!(with(24, &24u64.to_le_bytes()), "shape");
        assert_eq!(with(24, &16u64.to_le_bytes()), "length");
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-45] {
            assert_eq!(with(32, &scale.to_le_bytes()), "tensor scale", "divisor {scale}");
        }
        assert_eq!(with(40, &[1]), "a reserved byte");
        for at in [Header::DIGEST, Header::LEN, Header::LEN + 300, good.len() - 1] {
            assert_eq!(with(at, &[good[at] ^ 0x10]), "digest", "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), keep in 0usize..64) {
            let mut bytes = bytes;
            let good = PackedGateUp::pack(&weights(BlockFormat::Nvfp4, 1, 16, 0)).unwrap().to_bytes();
            let keep = keep.min(bytes.len());
            bytes[..keep].copy_from_slice(&good[..keep]);
            prop_assert!(PackedGateUp::from_bytes(&bytes).is_err());
        }
    }
}
