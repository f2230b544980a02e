//! The GGUF header reader. Nothing in the file is believed before it is checked; no count allocates more than
//! the bytes that are left could hold.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, GgufValue, MAGIC};
use crate::{Dtype, Error, TensorInfo};

/// ggml's limit.
const MAX_DIMS: u32 = 4;
/// Arrays of arrays deeper than this are refused; no producer nests them more than twice.
const MAX_DEPTH: usize = 4;
/// Fewest bytes of a tensor info: name length, dims, type, offset.
const MIN_INFO: usize = 8 + 4 + 4 + 8;
/// Fewest bytes of a metadata entry: key length, type, one byte.
const MIN_ENTRY: usize = 8 + 4 + 1;

/// A checked GGUF header.
#[derive(Debug, Clone, PartialEq)]
pub struct Gguf {
    /// 2 or 3.
    pub version: u32,
    /// Metadata, in the order of the file.
    pub metadata: Vec<(String, GgufValue)>,
    /// Tensors, in the order of the file.
    pub tensors: Vec<TensorInfo>,
}

impl Gguf {
    /// Reads and checks the header of a whole file. `file` is what messages call it.
    ///
    /// # Errors
    /// [`Error::Header`], naming the rule: `magic`, `version`, `truncated`, `count`, `utf-8`, `value-type`,
    /// `nesting`, `duplicate`, `alignment`, `dims`, `shape`, `type`, `offsets`, `exact-length`; [`Error::CutShort`] if a tensor ends after the file.
    pub fn parse(bytes: &[u8], file: &Path) -> Result<Self, Error> {
        let mut r = Reader { bytes, at: 0, file };
        let magic = r.array::<4>("the magic")?;
        if magic != MAGIC {
            return Err(r.fault("magic", format!("{magic:02x?}"), "\"GGUF\""));
        }
        let version = r.u32("the version")?;
        if !(2..=3).contains(&version) {
            let found = if version.swap_bytes() == 3 || version.swap_bytes() == 2 {
                "a big-endian file".into()
            } else {
                version.to_string()
            };
            return Err(r.fault("version", found, "2 or 3, little-endian"));
        }
        let tensor_count = r.u64("the tensor count")?;
        let entry_count = r.u64("the metadata count")?;
        r.check_count(tensor_count, MIN_INFO, "tensors")?;
        r.check_count(entry_count, MIN_ENTRY, "metadata entries")?;

        let mut metadata = Vec::new();
        let mut seen = HashSet::new();
        for _ in 0..entry_count {
            let key = r.string("a metadata key")?;
            let kind = r.u32("a value type")?;
            let value = r.value(kind)?;
            if !seen.insert(key.clone()) {
                return Err(r.fault("duplicate", format!("metadata key `{key}` twice"), "distinct keys"));
            }
            metadata.push((key, value));
        }
        let alignment = match metadata.iter().find(|(k, _)| k == ALIGNMENT_KEY).map(|(_, v)| v.as_u64()) {
            None => DEFAULT_ALIGNMENT,
            Some(Some(n)) if n.is_power_of_two() && (8..=1 << 20).contains(&n) => n as usize,
            Some(n) => {
                let found = n.map_or("not an integer".into(), |n| n.to_string());
                return Err(r.fault("alignment", found, "a power of two from 8 to 1048576"));
            }
        };

        let mut infos = Vec::new();
        let mut seen = HashSet::new();
        for _ in 0..tensor_count {
            let info = r.tensor_info()?;
            if !seen.insert(info.0.name.clone()) {
                let found = format!("tensor `{}` twice", info.0.name);
                return Err(r.fault("duplicate", found, "distinct names"));
            }
            infos.push(info);
        }
        if infos.is_empty() {
            return Ok(Self { version, metadata, tensors: Vec::new() });
        }
        let data_start = r.at.next_multiple_of(alignment);
        let mut next = 0;
        let mut tensors = Vec::with_capacity(infos.len());
        for (mut info, offset) in infos {
            if offset != next as u64 {
                let found = format!("data offset {offset} for tensor `{}`", info.name);
                return Err(r.fault("offsets", found, format!("{next}, where the tensor before it ends")));
            }
            let len = info.range.len();
            let end = data_start.checked_add(next).and_then(|start| start.checked_add(len));
            let Some(end) = end.filter(|&end| end <= bytes.len()) else {
                let found = bytes.len().saturating_sub(data_start) as u64;
                let end = (next as u64).saturating_add(len as u64);
                return Err(Error::CutShort { file: file.into(), tensor: info.name, end, found });
            };
            info.range = data_start + next..end;
            next = (next + len).next_multiple_of(alignment);
            tensors.push(info);
        }
        let last = tensors.last().map_or(data_start, |t| t.range.end);
        if bytes.len() > data_start + next {
            let found = format!("{} bytes", bytes.len());
            return Err(r.fault("exact-length", found, format!("{last} bytes, or padded to the alignment")));
        }
        Ok(Self { version, metadata, tensors })
    }

    /// A metadata value.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    file: &'a Path,
}

impl Reader<'_> {
    fn fault(&self, rule: &'static str, found: impl Into<String>, valid: impl Into<String>) -> Error {
        Error::header(self.file, rule, found, valid)
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, len: usize, what: &str) -> Result<&[u8], Error> {
        if len > self.left() {
            let found = format!("{what} of {len} bytes at byte {}", self.at);
            let valid = format!("at most {} bytes, up to the end of the file", self.left());
            return Err(self.fault("truncated", found, valid));
        }
        let start = self.at;
        self.at += len;
        Ok(&self.bytes[start..self.at])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Error> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, Error> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, Error> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Refuses a count that the bytes left cannot hold, before anything is allocated for it.
    fn check_count(&self, count: u64, min_len: usize, what: &str) -> Result<(), Error> {
        let most = (self.left() / min_len) as u64;
        if count > most {
            return Err(self.fault(
                "count",
                format!("{count} {what}"),
                format!("at most {most} in this file"),
            ));
        }
        Ok(())
    }

    fn string(&mut self, what: &str) -> Result<String, Error> {
        self.str(what).map(str::to_owned)
    }

    fn str(&mut self, what: &str) -> Result<&str, Error> {
        let len = self.u64(what)?;
        self.check_count(len, 1, "bytes of text")?;
        let (at, file) = (self.at, self.file);
        std::str::from_utf8(self.take(len as usize, what)?)
            .map_err(|_| Error::header(file, "utf-8", format!("{what} at byte {at}"), "UTF-8 text"))
    }

    fn value(&mut self, kind: u32) -> Result<GgufValue, Error> {
        const WHAT: &str = "a metadata value";
        match kind {
            7 => self.bool_byte().map(GgufValue::Bool),
            8 => self.string(WHAT).map(GgufValue::String),
            GgufValue::ARRAY => {
                let (element, len, range) = self.skip_array(0)?;
                Ok(GgufValue::Array { element, len, bytes: self.bytes[range].to_vec() })
            }
            _ => {
                let len = GgufValue::min_len(kind).ok_or_else(|| self.value_type(kind))?;
                let number = GgufValue::number(kind, self.take(len, WHAT)?);
                number.ok_or_else(|| self.value_type(kind))
            }
        }
    }

    fn bool_byte(&mut self) -> Result<bool, Error> {
        match self.array::<1>("a bool")?[0] {
            b @ 0..=1 => Ok(b == 1),
            b => Err(self.fault("value-type", format!("bool byte {b}"), "0 or 1")),
        }
    }

    /// Checks an array and steps over it: its element type, length and the bytes of its elements.
    fn skip_array(&mut self, depth: usize) -> Result<(u32, u64, Range<usize>), Error> {
        if depth >= MAX_DEPTH {
            let found = format!("arrays {} deep", depth + 1);
            return Err(self.fault("nesting", found, format!("at most {MAX_DEPTH}")));
        }
        let element = self.u32("an element type")?;
        let len = self.u64("an array length")?;
        let min_len = GgufValue::min_len(element).ok_or_else(|| self.value_type(element))?;
        self.check_count(len, min_len, "array elements")?;
        let start = self.at;
        for _ in 0..len {
            match element {
                7 => {
                    self.bool_byte()?;
                }
                8 => {
                    self.str("a string of an array")?;
                }
                GgufValue::ARRAY => {
                    self.skip_array(depth + 1)?;
                }
                // Numbers need no check: their bytes are there.
                _ => {
                    self.at += min_len * len as usize;
                    break;
                }
            }
        }
        Ok((element, len, start..self.at))
    }

    fn value_type(&self, kind: u32) -> Error {
        self.fault("value-type", kind.to_string(), "0 to 12")
    }

    /// A tensor info with its size as a range from 0, and the data offset the file gives.
    fn tensor_info(&mut self) -> Result<(TensorInfo, u64), Error> {
        let name = self.string("a tensor name")?;
        let dims = self.u32("a dimension count")?;
        if dims > MAX_DIMS {
            return Err(self.fault("dims", format!("{dims} for tensor `{name}`"), "at most 4"));
        }
        let dims: Result<Vec<u64>, Error> = (0..dims).map(|_| self.u64("a dimension")).collect();
        let dims = dims?;
        let id = self.u32("a tensor type")?;
        let offset = self.u64("a tensor offset")?;
        let dtype = Dtype::from_ggml(id).ok_or_else(|| {
            self.fault(
                "type",
                format!("{id} for tensor `{name}`"),
                "a ggml type up to 40 that is not removed",
            )
        })?;
        let shape: Option<Vec<usize>> = dims.iter().rev().map(|&d| d.try_into().ok()).collect();
        let len = shape.as_ref().and_then(|shape| {
            // Blocks run along the innermost dimension and never cross rows.
            let row = shape.last().copied().unwrap_or(1);
            let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
            let len = dtype.byte_len(elements)?;
            (row % dtype.block_elements() == 0 && len <= isize::MAX as usize).then_some(len)
        });
        match (shape, len) {
            (Some(shape), Some(len)) => Ok((TensorInfo { name, dtype, shape, range: 0..len }, offset)),
            _ => Err(self.fault(
                "shape",
                format!("{dtype} dims {dims:?} for tensor `{name}`"),
                format!("rows of whole {}-element blocks that fit memory", dtype.block_elements()),
            )),
        }
    }
}
