//! A model as a GGUF file: whole, for the families whose names and orders in llama.cpp are known here, or its gated MLPs
//! alone, which llama.cpp does not load.

mod hparams;
mod tokenizer;
mod whole;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use dualgemm_formats::{BlockFormat, GlobalScaleSource, gguf as nvfp4};

use super::{LinearOut, Model, WeightPart, WriteReport, config_to_gguf};
use crate::error::list;
use crate::families::{Owner, owner};
use crate::gguf::{GgufValue, write_to};
use crate::linear::{is_correction, is_router};
use crate::model_config::CONTENTS;
use crate::module::{MlpKind, Place, Projection};
use crate::scheme::ancestors;
use crate::{Dtype, Error, JsonFile, Stated, TensorData, TensorOut, TensorView};
use hparams::Hparams;
use whole::Family;

/// Modules that become one tensor, by expert; keyed by layer and tensor name.
type Groups<'m, 'a> = BTreeMap<(usize, String), Vec<(Option<usize>, &'m LinearOut<'a>)>>;

fn stem(place: &Place) -> String {
    let projection = match place.projection {
        Projection::Gate => "ffn_gate",
        Projection::Up => "ffn_up",
        Projection::GateUp => "ffn_gate_up",
        Projection::Down => "ffn_down",
    };
    let kind = match place.kind {
        MlpKind::Dense => "",
        MlpKind::Shared => "_shexp",
        MlpKind::Experts => "_exps",
    };
    format!("blk.{}.{projection}{kind}", place.layer)
}

/// Biases by module.
type Biases<'m> = BTreeMap<&'m str, Vec<f32>>;

/// GGUF's numbers of what most tensors of a file are.
const FILE_TYPES: [(Option<BlockFormat>, u32); 3] =
    [(Some(BlockFormat::Nvfp4), 39), (Some(BlockFormat::Mxfp4), 38), (None, 32)];

/// Faults of the model are said of where it comes from.
pub(super) fn write(path: &Path, model: &Model<'_>) -> Result<WriteReport, Error> {
    let source = model.source.as_deref().unwrap_or(path);
    if model.mlp_only { write_mlps(path, source, model) } else { write_whole(path, source, model) }
}

fn write_whole(path: &Path, source: &Path, model: &Model<'_>) -> Result<WriteReport, Error> {
    let (family, config) = Family::of(model, source)?;
    let hparams = Hparams::of(config, source)?;
    let tensors = whole::tensors(source, model, family, &hparams)?;
    let architecture = family.architecture;
    let format = model.linears.first().map(|l| l.weight.format());
    let file_type = FILE_TYPES.iter().find(|(of, _)| *of == format).map_or(0, |(_, number)| *number);
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let string = |text: &str| GgufValue::String(text.into());
    let mut metadata = vec![
        ("general.architecture".into(), string(architecture)),
        // What llama.cpp computes for these families, for readers that would have to guess.
        (format!("{architecture}.hidden_activation"), string("silu")),
        ("general.type".into(), string("model")),
        ("general.name".into(), string(&name)),
        ("general.file_type".into(), GgufValue::U32(file_type)),
        ("general.quantization_version".into(), GgufValue::U32(2)),
    ];
    metadata.extend(hparams.metadata(architecture));
    metadata.extend(tokenizer::metadata(&model.beside, config, hparams.vocabulary)?);
    write_to(path, &metadata, &tensors)?;
    Ok(WriteReport { files: vec![path.into()], tensors: tensors.len(), skipped: Vec::new() })
}

fn write_mlps(path: &Path, source: &Path, model: &Model<'_>) -> Result<WriteReport, Error> {
    let mut skipped = model.skipped.clone();
    skipped.extend(model.others.iter().map(|t| t.name.clone()));
    // Experts of one projection become one tensor.
    let mut groups = Groups::new();
    let mut places = BTreeMap::new();
    for linear in &model.linears {
        // `blk.N` is a layer of the language model: other parts' layers have no name there.
        let of_trunk = |place: &Place| owner(&place.path) == Owner::Trunk;
        let Some(place) = Place::parse(&linear.module).filter(of_trunk) else {
            skipped.push(linear.module.clone());
            continue;
        };
        let first = places.entry((place.layer, place.kind)).or_insert_with(|| place.path.clone());
        if *first != place.path {
            return Err(Error::Unsupported {
                module: source.display().to_string(),
                found: format!(
                    "two MLPs of layer {} of one kind, `{first}` and `{}`,",
                    place.layer, place.path
                ),
                supported: "one dense MLP, one shared expert and one set of experts for each layer are in GGUF",
            });
        }
        groups.entry((place.layer, stem(&place))).or_default().push((place.expert, linear));
    }
    if let (true, Some(other)) = (groups.is_empty(), model.linears.first()) {
        return Err(Error::Unsupported {
            module: source.display().to_string(),
            found: format!(
                "a model without a quantized MLP in a language model's layers (`{}` is there)",
                other.module
            ),
            supported: "names with the parts of a language model are, as in model.layers.0.mlp",
        });
    }
    let biases = of_mlps(source, model, &mut skipped, places.values())?;
    let mut tensors = Vec::new();
    for ((_, stem), group) in &mut groups {
        group.sort_by_key(|(expert, _)| *expert);
        push_group(&mut tensors, &mut skipped, stem, group, &biases, WeightPart::GgufBlocks, source)?;
    }
    let metadata = metadata(model, &groups);
    check_activations(source, model, &metadata, places.into_keys())?;
    write_to(path, &metadata, &tensors)?;
    Ok(WriteReport { files: vec![path.into()], tensors: tensors.len(), skipped })
}

/// The biases of MLPs that are among the other tensors, by module. What else lies in an MLP would be missing from it.
fn of_mlps<'m>(
    source: &Path,
    model: &'m Model<'_>,
    skipped: &mut Vec<String>,
    mlps: impl Iterator<Item = &'m String> + Clone,
) -> Result<Biases<'m>, Error> {
    let written: BTreeSet<&str> = model.linears.iter().map(|l| l.module.as_str()).collect();
    let mut biases = Biases::new();
    for tensor in &model.others {
        let name = tensor.name.as_str();
        if let (Some(module), TensorData::Bytes(bytes)) = (name.strip_suffix(".bias"), &tensor.data)
            && written.contains(module)
        {
            let view = TensorView { name, dtype: tensor.dtype, shape: &tensor.shape, bytes };
            biases.insert(module, view.to_f32("a bias")?);
            skipped.retain(|skipped| skipped != name);
        }
    }
    // A projection that stays in floats is left out with all that is its own.
    let of_module = |name: &str| ancestors(name).any(|m| Place::parse(m).is_some() && !written.contains(m));
    let is_inside = |name: &str| match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        // The names of a GGUF file: all of an MLP begins so, and so do its norm and its router.
        Some((_, part)) => {
            let routes = part.starts_with("ffn_norm") || is_router(part);
            part.starts_with("ffn") && !routes && !of_module(name)
        }
        None => mlps.clone().any(|mlp| {
            let rest = name.strip_prefix(mlp.as_str()).and_then(|rest| rest.strip_prefix('.'));
            rest.is_some_and(|rest| !is_router(rest) && !is_correction(rest)) && !of_module(name)
        }),
    };
    match skipped.iter().find(|name| is_inside(name)) {
        None => Ok(biases),
        Some(name) => Err(Error::Unsupported {
            module: format!("{}: {name}", source.display()),
            found: "a tensor in an MLP that is no projection and no bias of one".into(),
            supported: "gated MLPs of these alone can be written to GGUF without the rest of the model",
        }),
    }
}

/// Nothing is written that would be read back with another activation, or refused where the source is not.
fn check_activations(
    path: &Path,
    model: &Model<'_>,
    metadata: &[(String, GgufValue)],
    mut mlps: impl Iterator<Item = (usize, MlpKind)>,
) -> Result<(), Error> {
    let Some(config) = &model.config else { return Ok(()) };
    let config = JsonFile { path: "config.json".into(), value: config.clone() };
    // Without what an open checkpoint could be asked for.
    let why = |e: Error| match e {
        Error::Activation { key, found, .. } => format!("{key} is {found}"),
        other => other.to_string(),
    };
    mlps.try_for_each(|(layer, kind)| {
        let here = Stated::of_config(&config, layer, kind);
        let found = match (here, Stated::of_gguf(path, metadata, layer, kind)) {
            (Ok(here), Ok(there)) if here.activation == there.activation => return Ok(()),
            // Refused on both sides: whoever reads either has to ask for an activation.
            (Err(_), Err(_)) => return Ok(()),
            (Ok(here), Ok(there)) => {
                format!("{}, which would be read as {}", here.activation, there.activation)
            }
            (Ok(here), Err(e)) => format!("{}, which would not be read back: {}", here.activation, why(e)),
            (Err(e), Ok(there)) => {
                format!("not known ({}) and would be read as {}", why(e), there.activation)
            }
        };
        Err(Error::Unsupported {
            module: path.display().to_string(),
            found: format!("the {kind} of layer {layer}, whose activation is {found},"),
            supported: "activations that GGUF's metadata can name for the model's architecture are",
        })
    })
}

fn push_group<'m>(
    tensors: &mut Vec<TensorOut<'m>>,
    skipped: &mut Vec<String>,
    stem: &str,
    group: &[(Option<usize>, &'m LinearOut<'_>)],
    biases: &Biases<'_>,
    part: WeightPart,
    path: &Path,
) -> Result<(), Error> {
    let first = &group[0].1.weight;
    let experts = group[0].0.is_some();
    let same = group.iter().enumerate().all(|(i, (expert, l))| {
        let w = &l.weight;
        *expert == experts.then_some(i)
            && (w.format(), w.rows(), w.k()) == (first.format(), first.rows(), first.k())
    });
    if !same {
        return Err(Error::Unsupported {
            module: format!("{}: {stem}", path.display()),
            found: format!("the set {}", list(group.iter().map(|(_, l)| &l.module))),
            supported: "one module, or experts numbered from 0 without gaps and all of one shape and format, are",
        });
    }
    let dtype = match first.format() {
        BlockFormat::Nvfp4 => {
            let fits = nvfp4::len(&group[0].1.module, first.rows(), first.k());
            fits.map_err(|source| Error::Format { file: path.into(), source })?;
            Dtype::GGML_NVFP4
        }
        BlockFormat::Mxfp4 => Dtype::GGML_MXFP4,
    };
    let lead = if experts { vec![group.len()] } else { Vec::new() };
    let with = |rest: &[usize]| [lead.as_slice(), rest].concat();
    let dtype = Dtype::from_ggml(dtype).ok_or_else(|| Error::Unsupported {
        module: stem.into(),
        found: format!("GGUF type {dtype}"),
        supported: "the types of the type table are",
    })?;
    let weights = group.iter().map(|(_, l)| &l.weight).collect();
    let (name, shape) = (format!("{stem}.weight"), with(&[first.rows(), first.k()]));
    tensors.push(TensorOut::of_weights(name, dtype, shape, part, weights));

    let mut floats = |name: &str, shape: Vec<usize>, values: Vec<f32>| {
        tensors.push(TensorOut::floats(format!("{stem}.{name}"), shape, &values));
    };
    let scales: Vec<_> = group.iter().map(|(_, l)| l.weight.tensor_scale()).collect();
    if scales.iter().any(|s| s.source() != GlobalScaleSource::Absent) {
        floats("scale", vec![group.len()], scales.iter().map(|s| s.value()).collect());
    }
    let inputs: Vec<f32> = group.iter().filter_map(|(_, l)| l.input_scale.map(|s| s.value())).collect();
    if inputs.len() == group.len() {
        floats("input_scale", vec![group.len()], inputs);
    } else {
        let of = |l: &LinearOut<'_>| l.input_scale.map(|_| format!("input scale of {}", l.module));
        skipped.extend(group.iter().filter_map(|(_, l)| of(l)));
    }
    let bias = |l: &'m LinearOut<'_>| l.bias.as_ref().or_else(|| biases.get(l.module.as_str()));
    let biases: Vec<&[f32]> = group.iter().filter_map(|(_, l)| bias(l).map(Vec::as_slice)).collect();
    if biases.len() == group.len() {
        floats("bias", with(&[first.rows()]), biases.concat());
    } else if !biases.is_empty() {
        return Err(Error::Unsupported {
            module: format!("{}: {stem}", path.display()),
            found: format!("a bias for {} of {} experts", biases.len(), group.len()),
            supported: "one for each or none at all is",
        });
    }
    Ok(())
}

fn metadata(model: &Model<'_>, groups: &Groups<'_, '_>) -> Vec<(String, GgufValue)> {
    let (architecture, mut out) = config_to_gguf(model.config.as_ref(), "unknown");
    out.push(("general.quantization_version".into(), GgufValue::U32(2)));
    out.push((CONTENTS.into(), GgufValue::String("gated MLPs only".into())));
    let count = |n: usize| GgufValue::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let mut add = |key: &str, n: Option<usize>| {
        if let Some(n) = n {
            out.push((format!("{architecture}.{key}"), count(n)));
        }
    };
    let gate = groups.iter().find(|((_, stem), _)| stem.contains("ffn_gate")).map(|(_, g)| g);
    add("block_count", groups.keys().map(|(layer, _)| layer + 1).max());
    add("embedding_length", gate.map(|g| g[0].1.weight.k()));
    add("feed_forward_length", gate.map(|g| g[0].1.weight.rows()));
    add("expert_count", gate.filter(|g| g[0].0.is_some()).map(Vec::len));
    out
}
