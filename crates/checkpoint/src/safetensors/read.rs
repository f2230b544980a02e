//! The safetensors header reader. Nothing in the file is believed before it is checked.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::json::Distinct;
use crate::{Dtype, Error, TensorInfo};

/// Largest header that is read, the limit of the reference implementation.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes of the length in front of the header.
const PREFIX: usize = 8;
const METADATA: &str = "__metadata__";
const VALID_JSON: &str =
    "an object of distinct names to {dtype, shape, data_offsets}, and of __metadata__ to strings";

/// A checked header: sizes, offsets and names can be relied on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Header {
    /// Tensors, in the order of their data.
    pub tensors: Vec<TensorInfo>,
    /// Free-form strings.
    pub metadata: BTreeMap<String, String>,
}

impl Header {
    /// Reads and checks the header of a whole file. `file` is what messages call it.
    ///
    /// # Errors
    /// [`Error::Header`], naming the rule: `length-prefix`, `header-length`, `utf-8`, `json`, `dtype`, `shape`,
    /// `offsets`, `contiguous`, `exact-length`; [`Error::CutShort`] if a tensor ends after the file.
    pub fn parse(bytes: &[u8], file: &Path) -> Result<Self, Error> {
        let fault = |rule, found: String, valid: String| Error::header(file, rule, found, valid);
        let prefix: [u8; PREFIX] = bytes.get(..PREFIX).and_then(|b| b.try_into().ok()).ok_or_else(|| {
            fault("length-prefix", format!("a file of {} bytes", bytes.len()), "at least 8 bytes".into())
        })?;
        let len = u64::from_le_bytes(prefix);
        let room = (bytes.len() - PREFIX) as u64;
        if len < 2 || len > room.min(MAX_HEADER) {
            return Err(fault(
                "header-length",
                format!("a length of {len}"),
                match room.min(MAX_HEADER) {
                    0..2 => "at least 2, in a file that has them".into(),
                    most => format!("2 to {most} in a file of {} bytes", bytes.len()),
                },
            ));
        }
        let data_start = PREFIX + len as usize;
        // The JSON reader does not look into values that it skips.
        let text = std::str::from_utf8(&bytes[PREFIX..data_start]).map_err(|e| {
            fault("utf-8", format!("none at byte {} of the header", e.valid_up_to()), "UTF-8 text".into())
        })?;
        let raw: RawHeader =
            serde_json::from_str(text).map_err(|e| fault("json", e.to_string(), VALID_JSON.into()))?;
        let data_len = bytes.len() - data_start;

        let spans = raw.tensors.into_iter().map(|(name, raw)| raw.place(name, file, data_start..bytes.len()));
        let mut spans = spans.collect::<Result<Vec<_>, Error>>()?;
        spans.sort_by_key(|t| (t.range.start, t.range.end));
        let mut next = data_start;
        for t in &spans {
            if t.range.start != next {
                return Err(fault(
                    "contiguous",
                    format!("tensor `{}` at data offset {}", t.name, t.range.start - data_start),
                    format!("{}, where the tensor before it ends", next - data_start),
                ));
            }
            next = t.range.end;
        }
        if next != bytes.len() {
            return Err(fault(
                "exact-length",
                format!("{data_len} data bytes"),
                format!("{}, what the tensors take", next - data_start),
            ));
        }
        Ok(Self { tensors: spans, metadata: raw.metadata })
    }
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawTensor {
    /// Checks a tensor, and says where in the file it is; `data` is where the data of all are.
    fn place(self, name: String, file: &Path, data: Range<usize>) -> Result<TensorInfo, Error> {
        let fault = |rule, found: String, valid: String| {
            Error::header(file, rule, format!("{found} for tensor `{name}`"), valid)
        };
        let dtype = Dtype::from_safetensors(&self.dtype).ok_or_else(|| {
            let valid = crate::error::list(Dtype::SAFETENSORS.iter().map(|d| d.name()));
            fault("dtype", format!("`{}`", self.dtype), valid)
        })?;
        let shape: Option<Vec<usize>> = self.shape.iter().map(|&d| d.try_into().ok()).collect();
        let len = shape.as_ref().and_then(|shape| {
            let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
            dtype.byte_len(elements)
        });
        let (Some(shape), Some(len)) = (shape, len) else {
            let found = format!("{dtype} shape {:?}", self.shape);
            return Err(fault("shape", found, "a whole number of bytes that fits memory".into()));
        };
        let (begin, end) = self.data_offsets;
        if end > data.len() as u64 && end.checked_sub(begin) == Some(len as u64) {
            let (file, found) = (file.into(), data.len() as u64);
            return Err(Error::CutShort { file, tensor: name, end, found });
        }
        if begin > end || end > data.len() as u64 {
            let found = format!("data_offsets [{begin}, {end}]");
            return Err(fault("offsets", found, format!("begin <= end <= {}, the data bytes", data.len())));
        }
        if end - begin != len as u64 {
            return Err(fault(
                "offsets",
                format!("{} bytes", end - begin),
                format!("{len}, the size of {dtype} {shape:?}"),
            ));
        }
        let range = data.start + begin as usize..data.start + end as usize;
        Ok(TensorInfo { name, dtype, shape, range })
    }
}

struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut seen = HashSet::new();
                let mut out = RawHeader { tensors: Vec::new(), metadata: BTreeMap::new() };
                while let Some(name) = map.next_key::<String>()? {
                    // A map type would keep one of two equal names and drop the other's bytes.
                    if !seen.insert(name.clone()) {
                        return Err(A::Error::custom(format_args!("the name `{name}` twice")));
                    }
                    if name == METADATA {
                        let Distinct(metadata) = map.next_value()?;
                        out.metadata = serde_json::from_value(metadata).map_err(A::Error::custom)?;
                    } else {
                        out.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(out)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
