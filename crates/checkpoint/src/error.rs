//! What can be wrong with a checkpoint. Every message names the file or tensor, the rule, the value found and
//! what would be valid.

use std::path::PathBuf;
use std::sync::Arc;

/// A fault of a file, a configuration or a tensor.
#[non_exhaustive]
#[derive(Debug, Clone, thiserror::Error)]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", file.display())]
    Io { file: PathBuf, action: &'static str, source: Arc<std::io::Error> },
    /// A safetensors header, a GGUF header or a shard index breaks a rule of its format.
    #[error("{}: header rule `{rule}`: found {found}; valid is {valid}", file.display())]
    Header { file: PathBuf, rule: &'static str, found: String, valid: String },
    /// A file ends before a tensor of its header does.
    #[error(
        "{}: is cut short: tensor `{tensor}` ends at byte {end} of the data, and the file has {found} (an incomplete download?)",
        file.display()
    )]
    CutShort { file: PathBuf, tensor: String, end: u64, found: u64 },
    /// A path of a kind that cannot be read.
    #[error("{}: {found}; {valid}", file.display())]
    Path { file: PathBuf, found: String, valid: &'static str },
    /// A JSON configuration holds something unusable.
    #[error("{}: {key} is {found}; valid is {valid}", file.display())]
    Config { file: PathBuf, key: String, found: String, valid: String },
    /// The activation of an MLP is not known: nothing states it, or what does is not understood.
    #[error(
        "{}: {key} is {found}; valid is {valid}; an activation that is asked for (--activation, in Python activation=, \
         in C the activation of dualgemm_desc, in candle Options::epilogue) overrides it", file.display()
    )]
    Activation { file: PathBuf, key: String, found: String, valid: String },
    /// Nothing in the checkpoint says which convention its tensors follow, or more than one thing does.
    #[error("{}: {found}; name the convention (--convention, in Python convention=), one of {valid}", file.display())]
    Convention { file: PathBuf, found: String, valid: String },
    /// A model that is not quantized at all.
    #[error(
        "{0}: its weights are floats ({dtype}), not 4 bits; quantize it first: dualgemm quantize {0} OUT \
         --producer=modelopt, or in Python quantize_model", file.display()
    )]
    Floats { file: PathBuf, dtype: crate::Dtype },
    /// A tensor that must be there is not.
    #[error("{tensor}: is missing from {}; {needed_by} needs it ({convention} convention)", file.display())]
    MissingTensor { file: PathBuf, tensor: String, needed_by: String, convention: &'static str },
    /// A tensor beside a weight that changes nobody knows what.
    #[error(
        "{tensor}: belongs to `{module}`, but {why}; valid in the {convention} convention are one each of {valid}"
    )]
    UnknownTensor { tensor: String, module: String, why: String, convention: &'static str, valid: String },
    /// A tensor has a storage type that cannot hold what its name says.
    #[error("{tensor}: stored as {found}; {what} must be {valid}")]
    Dtype { tensor: String, what: &'static str, found: String, valid: &'static str },
    /// A tensor has the wrong shape.
    #[error("{tensor}: shape {found:?} cannot be {what}; valid is {valid}")]
    Shape { tensor: String, what: &'static str, found: Vec<usize>, valid: String },
    /// A tensor breaks a rule of its block format.
    #[error("{}: {source}", file.display())]
    Format { file: PathBuf, source: dualgemm_formats::Error },
    /// A scale of a tensor or of its activations is no scale.
    #[error("{tensor}: holds {value}; {what} must be a positive finite number")]
    ScaleValue { tensor: String, what: &'static str, value: f32 },
    /// A bias has an element that is no number or infinite.
    #[error("{tensor}: element {at} is {value}; biases must be finite")]
    BiasValue { tensor: String, at: usize, value: f32 },
    #[error("{}: no gated MLP in layer {layer}; there is one in {exist}", file.display())]
    NoLayer { file: PathBuf, layer: usize, exist: String },
    /// The layer exists but not in the form asked for.
    #[error("{}: layer {layer} holds {found}; {valid}", file.display())]
    LayerKind { file: PathBuf, layer: usize, found: String, valid: String },
    #[error("{path}: no expert {expert}; there are {exist}")]
    NoExpert { path: String, expert: usize, exist: String },
    /// Gate and up are one tensor and nothing says in which order.
    #[error(
        "{tensor}: holds gate and up in one tensor; name their order (--gate-up-order, in Python gate_up_order=), one of \
         {valid}"
    )]
    FusedOrder { tensor: String, valid: String },
    /// A fused tensor whose rows do not fit the order named for it.
    #[error("{tensor}: has {rows} rows; order {order} needs a positive multiple of {multiple}")]
    FusedRows { tensor: String, order: &'static str, rows: usize, multiple: usize },
    /// Something named in a text that has no such name.
    #[error("{what} `{found}` is unknown; valid are {valid}")]
    Name { what: &'static str, found: String, valid: String },
    #[error("{module}: there is no such module in {}; the closest names are {near}", file.display())]
    NoModule { file: PathBuf, module: String, near: String },
    /// A module that is not quantized where a quantized one is needed.
    #[error("{module}: is not quantized: {why}; a 4-bit weight (nvfp4 or mxfp4) is needed")]
    NotQuantized { module: String, why: String },
    /// Gate and up do not belong together.
    #[error("{gate} is {gate_shape} and {up} is {up_shape}; gate and up must have one shape and format")]
    HalvesDiffer { gate: String, gate_shape: String, up: String, up_shape: String },
    /// An expert is not as the others of its layer are.
    #[error("{module}: is {found}, and {usual}; experts of a layer have one shape and format{more}")]
    ExpertsDiffer { module: String, found: String, usual: String, more: String },
    /// Valid data of a kind that this crate does not handle.
    #[error("{module}: {found} is not supported; {supported}")]
    Unsupported { module: String, found: String, supported: &'static str },
    /// A file of activations without exactly one readable operand.
    #[error("{}: {found}; valid is {valid}", file.display())]
    Activations { file: PathBuf, found: String, valid: &'static str },
}

impl Error {
    pub(crate) fn io(file: impl Into<PathBuf>, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { file: file.into(), action, source: Arc::new(source) }
    }

    pub(crate) fn header(
        file: impl Into<PathBuf>,
        rule: &'static str,
        found: impl Into<String>,
        valid: impl Into<String>,
    ) -> Self {
        Self::Header { file: file.into(), rule, found: found.into(), valid: valid.into() }
    }

    /// The validation rule ([`RULES`](crate::validate::RULES)) that this fault breaks.
    pub fn rule(&self) -> &'static str {
        match self {
            Self::Io { .. } | Self::Path { .. } => "readable",
            Self::Header { .. } | Self::CutShort { .. } => "header",
            Self::Config { .. } => "config",
            Self::Activation { .. } => "activation",
            Self::Convention { .. } | Self::Floats { .. } | Self::Name { .. } => "convention",
            Self::MissingTensor { .. } => "missing-tensor",
            Self::UnknownTensor { .. } => "unknown-tensor",
            Self::Dtype { .. } => "storage-type",
            Self::Shape { .. } => "shape",
            Self::Format { source, .. } => match source {
                dualgemm_formats::Error::ScaleByte { .. } => "scale-byte",
                dualgemm_formats::Error::GlobalScale { .. } => "tensor-scale",
                _ => "shape",
            },
            Self::ScaleValue { .. } => "tensor-scale",
            Self::BiasValue { .. } => "bias",
            Self::NoLayer { .. }
            | Self::LayerKind { .. }
            | Self::NoModule { .. }
            | Self::NoExpert { .. }
            | Self::HalvesDiffer { .. }
            | Self::ExpertsDiffer { .. } => "layers",
            Self::FusedOrder { .. } | Self::FusedRows { .. } => "fused-order",
            Self::NotQuantized { .. } | Self::Unsupported { .. } => "unsupported",
            Self::Activations { .. } => "activations",
        }
    }
}

impl Error {
    /// The tensor, module or file at fault, and the value found there.
    pub fn subject(&self) -> (String, String) {
        let path = |file: &PathBuf| file.display().to_string();
        match self {
            Self::Io { file, source, .. } => (path(file), source.to_string()),
            Self::Header { file, found, .. }
            | Self::Path { file, found, .. }
            | Self::Convention { file, found, .. }
            | Self::LayerKind { file, found, .. }
            | Self::Activations { file, found, .. } => (path(file), found.clone()),
            Self::CutShort { file, found, .. } => (path(file), format!("{found} bytes of data")),
            Self::Config { file, key, found, .. } | Self::Activation { file, key, found, .. } => {
                (format!("{}: {key}", file.display()), found.clone())
            }
            Self::Floats { file, dtype } => (path(file), dtype.to_string()),
            Self::MissingTensor { tensor, .. } => (tensor.clone(), "missing".into()),
            Self::UnknownTensor { tensor, module, .. } => (tensor.clone(), format!("beside {module}")),
            Self::Dtype { tensor, found, .. } => (tensor.clone(), found.clone()),
            Self::Shape { tensor, found, .. } => (tensor.clone(), format!("{found:?}")),
            Self::Format { file, source } => (path(file), source.to_string()),
            Self::ScaleValue { tensor, value, .. } | Self::BiasValue { tensor, value, .. } => {
                (tensor.clone(), value.to_string())
            }
            Self::NoLayer { file, layer, .. } => (path(file), layer.to_string()),
            Self::NoModule { file, module, .. } => (path(file), module.clone()),
            Self::NoExpert { path, expert, .. } => (path.clone(), expert.to_string()),
            Self::FusedOrder { tensor, .. } => (tensor.clone(), "no order".into()),
            Self::FusedRows { tensor, rows, .. } => (tensor.clone(), format!("{rows} rows")),
            Self::Name { what, found, .. } => ((*what).into(), found.clone()),
            Self::NotQuantized { module, why } => (module.clone(), why.clone()),
            Self::HalvesDiffer { gate, gate_shape, up_shape, .. } => {
                (gate.clone(), format!("{gate_shape} and {up_shape}"))
            }
            Self::ExpertsDiffer { module, found, .. } | Self::Unsupported { module, found, .. } => {
                (module.clone(), found.clone())
            }
        }
    }
}

/// Joins names for a message, shortening long lists.
pub(crate) fn list<T: std::fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    const SHOWN: usize = 12;
    let mut out = String::new();
    let mut count = 0;
    for item in items {
        count += 1;
        if count <= SHOWN {
            if count > 1 {
                out.push_str(", ");
            }
            out.push_str(&item.to_string());
        }
    }
    match count {
        0 => "none".into(),
        _ if count > SHOWN => format!("{out} and {} more", count - SHOWN),
        _ => out,
    }
}
