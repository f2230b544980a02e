//! Operands and results of the product: one float tensor `[M, K]`, or the three tensors of an nvfp4 one.
//!
//! | tensor | type | shape |
//! |---|---|---|
//! | `a_packed` | U8 | `[M, K / 2]` |
//! | `a_scale` | F8_E4M3 | `[M, K / 16]`, or flat in the order that the metadata entry `scale_layout` names |
//! | `a_scale_2` | F32 | `[1]`, multiplier |
//!
//! A result is `c`, or `c_packed`, `c_scale`, `c_scale_2`.

use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::AOperand;

use crate::error::list;
use crate::{Dtype, Error, TensorFiles};

/// What a file is read as: the option that names its tensor, and what it may hold.
struct Role {
    option: &'static str,
    valid: &'static str,
}

const OPERAND: Role = Role {
    option: "--input-tensor",
    valid: "one F32, F16 or BF16 tensor [M, K], or a_packed U8 [M, K/2], a_scale F8_E4M3 [M, K/16] and a_scale_2 F32 [1]",
};
const RESULT: Role = Role {
    option: "--tensor",
    valid: "C: one F32, F16 or BF16 tensor [M, N], or c_packed U8 [M, N/2], c_scale F8_E4M3 [M, N/16] and c_scale_2 F32 [1]",
};
/// A result can be the next product's operand.
const PREFIXES: [&str; 2] = ["a", "c"];
/// What the names of the three tensors of an nvfp4 one end in.
const PARTS: [&str; 3] = ["_packed", "_scale", "_scale_2"];
pub(crate) const LAYOUT_KEY: &str = "scale_layout";

/// Finds the operand of a file: the tensor named, or the nvfp4 triple if there is one, or the only tensor.
///
/// # Errors
/// If there is no such tensor, there are several and none is named, or one has the wrong type or shape.
pub fn read<'a>(files: &'a TensorFiles, tensor: Option<&str>) -> Result<AOperand<'a>, Error> {
    find(files, tensor, &OPERAND)
}

/// [`read`] for a file that holds a result, C `[M, N]`; errors say so.
///
/// # Errors
/// Those of [`read`].
pub fn read_result<'a>(files: &'a TensorFiles, tensor: Option<&str>) -> Result<AOperand<'a>, Error> {
    find(files, tensor, &RESULT)
}

fn find<'a>(files: &'a TensorFiles, tensor: Option<&str>, role: &Role) -> Result<AOperand<'a>, Error> {
    let &Role { option, valid } = role;
    let fault = |found| Error::Activations { file: files.root().into(), found, valid };
    if let Some(name) = tensor {
        let view = files.get(name).ok_or_else(|| {
            fault(format!("no tensor `{name}` among {}", list(files.tensors().map(|t| t.name))))
        })?;
        let Some((prefix, part)) = PREFIXES.iter().find_map(|p| Some((p, name.strip_prefix(p)?))) else {
            return view.float_matrix().map(AOperand::Float);
        };
        return match part {
            "_packed" => read_triple(files, prefix, valid),
            "_scale" | "_scale_2" if files.get(&format!("{prefix}_packed")).is_some() => Err(fault(format!(
                "`{name}` is a part of an nvfp4 operand, which {option} names by its codes, `{prefix}_packed`"
            ))),
            _ => view.float_matrix().map(AOperand::Float),
        };
    }
    let has_part = |prefix: &&&str| PARTS.iter().any(|part| files.get(&format!("{prefix}{part}")).is_some());
    if let Some(prefix) = PREFIXES.iter().find(has_part) {
        return match files.get(prefix) {
            None => read_triple(files, prefix, valid),
            Some(_) => Err(fault(format!("both `{prefix}` and `{prefix}_packed`, and {option} names none"))),
        };
    }
    let mut tensors = files.tensors();
    match (tensors.next(), tensors.next()) {
        (Some(view), None) => view.float_matrix().map(AOperand::Float),
        (None, _) => Err(fault("no tensor".into())),
        _ => Err(fault(format!(
            "several tensors ({}), and {option} names none",
            list(files.tensors().map(|t| t.name))
        ))),
    }
}

fn read_triple<'a>(files: &'a TensorFiles, prefix: &str, valid: &'static str) -> Result<AOperand<'a>, Error> {
    let fault = |found| Error::Activations { file: files.root().into(), found, valid };
    let found = PARTS.map(|part| files.get(&format!("{prefix}{part}")));
    let first = |there: bool| {
        PARTS.iter().zip(&found).find(|(_, view)| view.is_some() == there).map_or("", |(part, _)| part)
    };
    let (there, lacking) = (first(true), first(false));
    let [Some(codes), Some(scales), Some(global)] = found else {
        return Err(fault(format!("`{prefix}{there}` without `{prefix}{lacking}`")));
    };
    // Both may be U8.
    if scales.shape.len() == 2 && scales.shape[1] == codes.shape.last().map_or(0, |bytes| bytes * 8) {
        return Err(fault(format!(
            "`{}` {:?} and `{}` {:?}, which are exchanged",
            codes.name, codes.shape, scales.name, scales.shape
        )));
    }
    if codes.dtype != Dtype::U8 {
        return Err(codes.dtype_error("packed activations", "U8"));
    }
    if !matches!(scales.dtype, Dtype::F8E4m3 | Dtype::U8) {
        return Err(scales.dtype_error("nvfp4 block scales", "F8_E4M3 or U8"));
    }
    let &[rows, row_bytes] = codes.shape else {
        return Err(codes.shape_error("packed activations", "[M, K / 2]".into()));
    };
    let k = row_bytes.saturating_mul(2);
    let flat = || -> Result<ScaleLayout, Error> {
        let layout = files.metadata().get(LAYOUT_KEY).and_then(|name| ScaleLayout::by_name(name));
        layout.ok_or_else(|| {
            let valid = format!("[{rows}, {}], or flat with `{LAYOUT_KEY}` in the metadata", k / 16);
            scales.shape_error("block scales", valid)
        })
    };
    let layout = match *scales.shape {
        [r, c] if r == rows && c == k / 16 => ScaleLayout::Linear,
        [_] => flat()?,
        _ => return Err(scales.shape_error("block scales", format!("[{rows}, {}]", k / 16))),
    };
    let held = match (global.dtype, global.elements()) {
        (Dtype::F32, 1) => global.to_f32("a tensor scale")?[0],
        (Dtype::F32, _) => return Err(global.shape_error("a tensor scale", "[1]".into())),
        _ => return Err(global.dtype_error("a tensor scale", "F32")),
    };
    QuantizedMatrix::new(
        codes.name,
        BlockFormat::Nvfp4,
        rows,
        k,
        codes.bytes,
        scales.bytes,
        layout,
        GlobalScale::multiplier(held),
    )
    .and_then(|m| m.check_scales().map(|()| m))
    .map(AOperand::Quantized)
    .map_err(|source| Error::Format { file: files.root().into(), source })
}
