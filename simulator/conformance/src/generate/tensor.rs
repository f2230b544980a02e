//! Tensors of one to five dimensions and boxes in, before and past them, and what a box looks like in shared memory.

use crate::conformance::data::Data;

/// A tensor and a box of it.
#[derive(Clone)]
pub struct Map {
    /// Element type, as a head spells it.
    pub ty: &'static str,
    /// Bytes of an element.
    pub size: usize,
    /// Elements of each dimension.
    pub dims: Vec<usize>,
    /// Elements the box spans.
    pub extents: Vec<usize>,
    /// Element strides.
    pub steps: Vec<usize>,
    pub swizzle: &'static str,
    /// What lies outside.
    pub fill: &'static str,
}

impl Map {
    /// Of 16-bit floats, with zeros outside.
    pub fn f16(dims: Vec<usize>, extents: Vec<usize>, swizzle: &'static str) -> Map {
        Map { ty: "f16", size: 2, steps: vec![1; dims.len()], dims, extents, swizzle, fill: "Zero" }
    }

    /// Strides in bytes, multiples of 16, and the size of the tensor.
    pub fn strides(&self) -> (Vec<usize>, usize) {
        let mut strides = Vec::new();
        let mut bytes = self.dims[0] * self.size;
        for dim in &self.dims[1..] {
            bytes = bytes.next_multiple_of(16);
            strides.push(bytes);
            bytes *= dim;
        }
        (strides, bytes.next_multiple_of(16))
    }

    /// The `map` line over argument `argument`.
    pub fn head(&self, argument: usize) -> String {
        let list = |v: &[usize]| v.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let (strides, _) = self.strides();
        format!(
            "map {argument} {} dims {} strides {} box {} steps {} swizzle {} fill {}",
            self.ty,
            list(&self.dims),
            list(&strides),
            list(&self.extents),
            list(&self.steps),
            self.swizzle,
            self.fill
        )
    }

    pub fn box_bytes(&self) -> usize {
        self.extents.iter().zip(&self.steps).map(|(e, s)| e.div_ceil(*s)).product::<usize>() * self.size
    }
}

/// Maps of `d` dimensions with the coordinates of a box inside, before and past the ends.
pub fn maps(d: usize) -> Vec<(Map, Vec<i64>)> {
    let dims =
        [[70, 0, 0, 0, 0], [70, 50, 0, 0, 0], [72, 9, 7, 0, 0], [40, 6, 5, 4, 0], [24, 5, 4, 3, 3]][d - 1];
    let extents =
        [[64, 0, 0, 0, 0], [64, 16, 0, 0, 0], [64, 4, 3, 0, 0], [32, 3, 2, 2, 0], [16, 2, 2, 2, 2]][d - 1];
    let (dims, extents) = (dims[..d].to_vec(), extents[..d].to_vec());
    let mut list = Vec::new();
    let mut push = |ty, size, row: usize, swizzle, fill, steps: Vec<usize>, at: i64| {
        let mut extents: Vec<usize> = extents.clone();
        extents[0] = row / size * steps[0];
        // A box starts on a whole 16 bytes of the innermost dimension, or the card stops with an illegal instruction.
        let unit = 16 / size as i64;
        let coordinates = (0..d)
            .map(|i| match at {
                0 => 0,
                1 => [unit, 1, 1, 1, 1][i],
                2 => [-unit, -2, -1, 1, -1][i],
                _ if i == 0 => dims[0] as i64 / unit * unit - unit,
                _ => dims[i] as i64 - [5, 3, 1, 1, 1][i],
            })
            .collect();
        list.push((Map { ty, size, dims: dims.clone(), extents, steps, swizzle, fill }, coordinates));
    };
    let ones = vec![1; d];
    for (swizzle, row) in [("None", 128), ("None", 32), ("B32", 32), ("B64", 64), ("B128", 128), ("B128", 32)]
    {
        for at in 0..4 {
            push("f16", 2, row.min(extents[0] * 2), swizzle, "Zero", ones.clone(), at);
        }
    }
    for ty in ["u8", "u16", "u32", "s32", "u64", "s64", "f64", "bf16", "f32"] {
        let (_, _, size) = contents(ty);
        push(ty, size, 64.min(extents[0] * size), "B64", "Zero", ones.clone(), 2);
    }
    if d > 1 {
        let mut steps = ones;
        steps[1] = 2;
        push("f16", 2, 64, "B64", "Zero", steps, 1);
    }
    list
}

/// Type and generator of a buffer for tensor elements.
pub fn contents(ty: &str) -> (&'static str, &'static str, usize) {
    match ty {
        "u8" => ("u8", "bits", 1),
        "u16" | "f16" | "bf16" => ("u16", "bits", 2),
        "u64" | "s64" | "f64" => ("u64", "bits", 8),
        _ => ("u32", "bits", 4),
    }
}

/// Where byte `address` of a tile on a 1024-byte boundary really lies.
pub fn swizzled(swizzle: &str, address: usize) -> usize {
    let rows = match swizzle {
        "B32" => 1,
        "B64" => 3,
        "B128" => 7,
        _ => 0,
    };
    address ^ (address >> 7 & rows) << 4
}

/// Bytes from one row of a tile to the next.
pub fn pitch(swizzle: &str, row: usize) -> usize {
    match swizzle {
        "B32" => 32,
        "B64" => 64,
        "B128" => 128,
        _ => row,
    }
}

/// The bytes of a buffer of `count` elements.
pub fn bytes(ty: &str, generator: &str, seed: u64, count: usize) -> Vec<u8> {
    Data { ty: ty.into(), generator: generator.into(), seed, count }.bytes()
}

/// A box in shared memory: `size` bytes, zero where nothing arrives.
pub fn boxed(map: &Map, tensor: &[u8], at: &[i64], size: usize) -> Vec<u8> {
    let d = map.dims.len();
    let (strides, _) = map.strides();
    let counts: Vec<usize> =
        (0..d).map(|i| map.extents[i].div_ceil(if i == 0 { 1 } else { map.steps[i] })).collect();
    let row = counts[0] * map.size;
    let mut tile = vec![0; size];
    let rows: usize = counts[1..].iter().product();
    for number in 0..rows {
        let (mut rest, mut from, mut inside) = (number, 0i64, true);
        for i in 1..d {
            let position = at[i] + (rest % counts[i] * map.steps[i]) as i64;
            rest /= counts[i];
            inside &= (0..map.dims[i] as i64).contains(&position);
            from += position * strides[i - 1] as i64;
        }
        for element in 0..counts[0] {
            let position = at[0] + element as i64;
            if !inside || !(0..map.dims[0] as i64).contains(&position) {
                continue;
            }
            let from = (from + position * map.size as i64) as usize;
            for b in 0..map.size {
                let to = number * pitch(map.swizzle, row) + element * map.size + b;
                tile[swizzled(map.swizzle, to)] = tensor[from + b];
            }
        }
    }
    tile
}
