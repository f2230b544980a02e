//! A checkpoint opened under one convention: layers, their gated MLPs and experts as quantized matrices that
//! borrow the mapped files.

mod access;
mod modules;
mod whole;

use std::collections::BTreeSet;
use std::path::Path;

use dualgemm_formats::ScaleLayout;
use dualgemm_gemm::{Activation, GateUp, GatedMlp, Linear};

use crate::convention::{Convention, Evidence};
use crate::error::list;
use crate::families::{self, Origin, Owner, Said, Stated};
use crate::gate_up::GateUpOrder;
use crate::module::{Mlp, MlpKind, ModuleIndex, Projection, Which};
use crate::scheme::{Scheme, Schemes};
use crate::source::{GateUpSource, LinearSource};
use crate::{Error, TensorFiles};

pub use modules::ModuleInfo;

/// Which nibble of a byte holds the even element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NibbleOrder {
    /// The low one: every producer but the next.
    LoHi,
    /// The high one: ComfyUI.
    HiLo,
}

/// The convention whose files come with a function of their own.
const GPT_OSS: &str = "gpt-oss";

/// What to do with a stored activation scale that is zero, negative, infinite or NaN, as calibration leaves it
/// for modules that saw no or only zero activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BadInputScale {
    /// Refuse the module's activation scale.
    #[default]
    Refuse,
    /// Use 1.
    One,
}

/// What a file cannot say about itself.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct OpenOptions {
    /// Name of the [convention](crate::convention::CONVENTIONS); by default what the files declare.
    pub convention: Option<String>,
    /// Nibble order of packed codes, where it is not the convention's. GGUF's cannot be changed.
    pub nibble_order: Option<NibbleOrder>,
    /// Order of fused gate/up tensors. Needed where a file has one, except in GGUF, which defines it.
    pub gate_up_order: Option<GateUpOrder>,
    /// Order of stored block scales, where it is not the convention's.
    pub scale_layout: Option<ScaleLayout>,
    /// Only MLPs whose name starts with this, where several parts of a model number their layers.
    pub within: Option<String>,
    /// Policy for unusable activation scales.
    pub bad_input_scale: BadInputScale,
    /// Activation of the MLPs, whatever the files say or leave out.
    pub activation: Option<Activation>,
}

/// A checkpoint. Matrices taken from it borrow its mapped files and cannot outlive it:
///
/// ```compile_fail,E0505
/// # use dualgemm_checkpoint::{Checkpoint, Error, OpenOptions};
/// # fn main() -> Result<(), Error> {
/// let checkpoint = Checkpoint::open("model".as_ref(), &OpenOptions::default())?;
/// let mlp = checkpoint.gate_up(0)?;
/// drop(checkpoint); // error: the matrices still borrow it
/// println!("{}", mlp.gate.rows());
/// # Ok(())
/// # }
/// ```
///
/// What takes a layer or a module fails as [`gate_up`](Self::gate_up) does, where it does not say when.
#[derive(Debug)]
pub struct Checkpoint {
    files: TensorFiles,
    convention: &'static Convention,
    schemes: Schemes,
    index: ModuleIndex,
    options: OpenOptions,
}

/// One gated MLP of a layer.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct MlpInfo {
    /// Layer number.
    pub layer: usize,
    /// What its modules' names have in common.
    pub path: String,
    /// Dense, shared or routed.
    pub kind: MlpKind,
    /// Number of routed experts; 0 for others.
    pub experts: usize,
    /// Whether gate and up are one tensor.
    pub fused: bool,
    /// Whether its weights are 4-bit.
    pub quantized: bool,
}

impl Checkpoint {
    /// Opens a directory, a `.safetensors` file, a `.safetensors.index.json` file or a `.gguf` file. Headers are
    /// read and checked, tensor data is mapped.
    ///
    /// # Errors
    /// As [`TensorFiles::open`]; if the convention is neither declared nor named; if the configuration is
    /// unusable; if an order of gate and up is named and no tensor holds both.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self, Error> {
        Self::from_files(TensorFiles::open(path)?, options)
    }

    /// As [`open`](Self::open), for files that are open already.
    pub fn from_files(files: TensorFiles, options: &OpenOptions) -> Result<Self, Error> {
        let (convention, schemes) = {
            let evidence = Evidence::new(&files)?;
            let convention = match &options.convention {
                Some(name) => Convention::named(name)?,
                None => Convention::detect(&evidence)?,
            };
            (convention, convention.schemes(&evidence)?)
        };
        let index = ModuleIndex::new(&files, convention, options.within.as_deref());
        if let (Some(order), Some(mlp)) = (options.gate_up_order, index.mlps.first())
            && !index.mlps.iter().any(Mlp::is_fused)
        {
            return Err(Error::Unsupported {
                module: mlp.path.clone(),
                found: format!("the order {order} for gate and up that are two tensors"),
                supported: "--gate-up-order (in Python gate_up_order=) is for one tensor that holds both; leave it out",
            });
        }
        Ok(Self { files, convention, schemes, index, options: options.clone() })
    }

    /// The files.
    pub fn files(&self) -> &TensorFiles {
        &self.files
    }

    /// The convention in force.
    pub fn convention(&self) -> &'static Convention {
        self.convention
    }

    pub(crate) fn index(&self) -> &ModuleIndex {
        &self.index
    }

    pub(crate) fn scheme(&self, module: &str) -> &Scheme {
        self.schemes.of(module)
    }

    /// Whether two files say different things of a module in 4 bits.
    pub(crate) fn is_contradicted(&self, module: &str) -> bool {
        self.is_packed_module(module) && self.schemes.contradiction(module).is_some()
    }

    /// Whether a module is in the part of the model that was asked for.
    pub(crate) fn is_within(&self, module: &str) -> bool {
        self.options.within.as_ref().is_none_or(|within| module.starts_with(within.as_str()))
    }

    /// Names of the modules whose weights are of a type that holds 4-bit blocks.
    pub fn quantized_modules(&self) -> impl Iterator<Item = &str> {
        self.index.modules.keys().map(String::as_str).filter(|module| self.is_packed_module(module))
    }

    /// Every gated MLP, in layer order.
    pub fn mlps(&self) -> Vec<MlpInfo> {
        let info = |mlp: &Mlp| MlpInfo {
            layer: mlp.layer,
            path: mlp.path.clone(),
            kind: mlp.kind,
            experts: if mlp.kind == MlpKind::Experts { self.expert_ids(mlp).len() } else { 0 },
            fused: mlp.is_fused(),
            quantized: self.is_quantized(mlp),
        };
        self.index.mlps.iter().map(info).collect()
    }

    /// Numbers of the layers with a gated MLP, ascending.
    pub fn layers(&self) -> Vec<usize> {
        let layers: BTreeSet<usize> = self.index.mlps.iter().map(|m| m.layer).collect();
        layers.into_iter().collect()
    }

    /// What the checkpoint has instead of gated MLPs, for messages.
    pub fn why_no_mlp(&self) -> String {
        match (&self.index.ungated, &self.options.within) {
            (Some(path), _) => format!("`{path}` has up and down projections, but no gate"),
            (None, Some(within)) => {
                format!("no MLP has a name that begins with `{within}`, as `within` asks")
            }
            (None, None) => self.files.names(),
        }
    }

    /// The activation of an MLP of a layer: the one that was asked for, or what the configuration and the family of the
    /// model say. A plan knows nothing of checkpoints: it computes the one of its description.
    ///
    /// # Errors
    /// If there is no such MLP, nothing says which activation it has, what does is not understood, or it is one that is
    /// not implemented. An activation is never assumed.
    pub fn activation(&self, layer: usize, kind: MlpKind) -> Result<Stated, Error> {
        self.activation_of(self.mlp(layer, kind)?)
    }

    pub(crate) fn activation_of(&self, mlp: &Mlp) -> Result<Stated, Error> {
        if let Some(activation) = self.options.activation {
            return Ok(Stated { activation, origin: Origin::Asked });
        }
        let metadata = self.files.gguf_metadata();
        let Some(config) = self.files.config() else {
            return Err(families::no_configuration(self.files.root(), metadata.is_some()));
        };
        // The entries that are read are the language model's.
        let owner = families::owner(&mlp.path);
        if let Owner::Unknown(part) = owner {
            return Err(Error::Activation {
                file: config.path.clone(),
                key: "the configuration".into(),
                found: format!(
                    "not read for names with `{part}`, which is not known as a part of the language model"
                ),
                valid: "an MLP of the language model".into(),
            });
        }
        let said = Said::new(config, metadata);
        let stated = said.activation(mlp.layer, mlp.kind, owner == Owner::Mtp)?;
        // gpt-oss calls its own function silu, too.
        let is_plain = !matches!(stated.activation, Activation::SwigluOai { .. });
        if self.convention.name == GPT_OSS && said.family().is_none() && is_plain {
            return Err(Error::Activation {
                file: config.path.clone(),
                key: "the configuration".into(),
                found: format!(
                    "of a family that is not known, says {}, and its tensors are stored as gpt-oss stores them",
                    stated.activation
                ),
                valid: "a known family, or swigluoai".into(),
            });
        }
        Ok(stated)
    }

    pub(crate) fn is_quantized(&self, mlp: &Mlp) -> bool {
        mlp.modules().any(|m| self.is_packed_module(m))
    }

    pub(crate) fn mlp(&self, layer: usize, kind: MlpKind) -> Result<&Mlp, Error> {
        let file = || self.files.root().to_path_buf();
        let all: Vec<&Mlp> = self.index.mlps.iter().filter(|m| m.layer == layer).collect();
        if all.is_empty() {
            let layers = self.layers();
            let exist = match layers.as_slice() {
                [] => format!("no layer ({})", self.why_no_mlp()),
                [one] => format!("layer {one}"),
                [first, .., last] if layers.len() == last - first + 1 => format!("layers {first} to {last}"),
                several => format!("layers {}", list(several)),
            };
            return Err(Error::NoLayer { file: file(), layer, exist });
        }
        let of_kind: Vec<&Mlp> = all.iter().copied().filter(|m| m.kind == kind).collect();
        match of_kind.as_slice() {
            [mlp] => Ok(mlp),
            [] => Err(Error::LayerKind {
                file: file(),
                layer,
                found: list(all.iter().map(|m| format!("{} `{}`", m.kind, m.path))),
                valid: match kind {
                    MlpKind::Dense => {
                        let ids = self.experts(layer).unwrap_or_default();
                        let ids = ids.first().zip(ids.last());
                        let ids = ids.map_or(String::new(), |(first, last)| format!(" {first} to {last}"));
                        let has = |kind| all.iter().any(|m| m.kind == kind);
                        let ways = [
                            has(MlpKind::Experts).then(|| format!("--expert{ids} for one")),
                            has(MlpKind::Shared).then(|| "--shared-expert for the shared one".into()),
                            has(MlpKind::Experts).then(|| "--op moe for all".into()),
                        ];
                        let ways: Vec<String> = ways.into_iter().flatten().collect();
                        format!("it has no dense MLP: {}", ways.join(", "))
                    }
                    MlpKind::Shared => "there is no shared expert in it".into(),
                    MlpKind::Experts => "there are no experts in it".into(),
                },
            }),
            several => {
                // Where a vision tower kept its floats there is one answer.
                let quantized: Vec<&Mlp> = several.iter().copied().filter(|m| self.is_quantized(m)).collect();
                if let [mlp] = quantized.as_slice() {
                    return Ok(mlp);
                }
                Err(Error::LayerKind {
                    file: file(),
                    layer,
                    found: format!("several: {}", list(several.iter().map(|m| format!("`{}`", m.path)))),
                    valid: "say within which of these names to look (`within`)".into(),
                })
            }
        }
    }

    /// An MLP of a layer, and which of its experts is asked for.
    fn find(&self, layer: usize, which: Which) -> Result<(&Mlp, Option<usize>), Error> {
        let mlp = self.mlp(layer, which.kind())?;
        let Which::Expert(expert) = which else { return Ok((mlp, None)) };
        let ids = self.experts(layer)?;
        if ids.binary_search(&expert).is_err() {
            return Err(Error::NoExpert { path: mlp.path.clone(), expert, exist: list(&ids) });
        }
        Ok((mlp, Some(expert)))
    }

    /// Gate and up of a layer's dense MLP.
    ///
    /// # Errors
    /// If there is no such layer, it holds experts only, or a tensor is missing, not quantized or breaks a rule.
    pub fn gate_up(&self, layer: usize) -> Result<GateUp<'_>, Error> {
        self.gate_up_source(layer, Which::Dense)?.read()
    }

    /// Gate and up of an MLP before they are read, to be taken a run of features at a time.
    pub fn gate_up_source(&self, layer: usize, which: Which) -> Result<GateUpSource<'_>, Error> {
        let (mlp, expert) = self.find(layer, which)?;
        self.source_of(mlp, expert)
    }

    /// The down projection of a layer's dense MLP.
    pub fn down(&self, layer: usize) -> Result<Linear<'_>, Error> {
        self.down_source(layer, Which::Dense)?.read()
    }

    /// The down projection of an MLP before it is read, to be taken a run of features at a time.
    pub fn down_source(&self, layer: usize, which: Which) -> Result<LinearSource<'_>, Error> {
        let (mlp, expert) = self.find(layer, which)?;
        let own = mlp.own(expert);
        let module = mlp.module(own, Projection::Down);
        let module = module.ok_or_else(|| self.missing_module(mlp, own, Projection::Down))?;
        self.source_in_any_format(module, expert)
    }

    /// All three matrices of an MLP.
    ///
    /// # Errors
    /// As [`gate_up`](Self::gate_up), and of an expert that is not there.
    pub fn gated_mlp(&self, layer: usize, which: Which) -> Result<GatedMlp<'_>, Error> {
        let gate_up = self.gate_up_source(layer, which)?.read()?;
        Ok(GatedMlp { gate_up, down: self.down_source(layer, which)?.read()? })
    }

    /// Whether an MLP of a layer has a down projection at all, as part of a checkpoint may not.
    pub fn has_down(&self, layer: usize, which: Which) -> bool {
        self.find(layer, which)
            .is_ok_and(|(mlp, expert)| mlp.module(mlp.own(expert), Projection::Down).is_some())
    }

    /// Numbers of the routed experts of a layer, ascending, whether each has tensors of its own or all share one. A file that
    /// holds a part of a model may have gaps.
    ///
    /// # Errors
    /// If there is no such layer or it has no experts.
    pub fn experts(&self, layer: usize) -> Result<Vec<usize>, Error> {
        let mlp = self.mlp(layer, MlpKind::Experts)?;
        let ids = self.expert_ids(mlp);
        if let Some(module) = mlp.of_all_experts().filter(|_| ids.is_empty()) {
            // Why their number is not known.
            self.stored(module)?;
        }
        Ok(ids)
    }

    pub(crate) fn expert_ids(&self, mlp: &Mlp) -> Vec<usize> {
        let own = mlp.experts();
        if !own.is_empty() {
            return own;
        }
        let Some(module) = mlp.of_all_experts() else { return Vec::new() };
        match self.weight(module) {
            Some(w) if !w.bytes.is_empty() && w.shape.len() > 2 => (0..w.shape[0]).collect(),
            Some(_) => (0..self.stored(module).ok().and_then(|s| s.experts).unwrap_or(0)).collect(),
            None => Vec::new(),
        }
    }

    /// A linear layer by name, for example an attention projection, in 4 bits or in floats where the files say so.
    ///
    /// # Errors
    /// If there is no such module, it is in another format, or a tensor is missing or breaks a rule.
    pub fn linear(&self, module: &str) -> Result<Linear<'_>, Error> {
        self.linear_source(module)?.read()
    }

    /// The same before it is read, to be taken a run of features at a time.
    pub fn linear_source(&self, module: &str) -> Result<LinearSource<'_>, Error> {
        if !self.index.modules.contains_key(module) {
            return Err(self.no_module(module));
        }
        self.source_in_any_format(module, None)
    }
}
