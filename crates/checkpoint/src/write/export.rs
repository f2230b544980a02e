//! From an open checkpoint to a model that any convention can be written from: fused tensors split, experts
//! in one tensor taken apart, names in Hugging Face's style.

use std::collections::BTreeSet;

use super::{KvCache, LinearOut, Model, Output, beside};
use crate::convention::Role;
use crate::module::{Mlp, MlpKind, Projection};
use crate::scheme::Weights;
use crate::{Checkpoint, Error, TensorOut};

/// Endings of tensors that mean something in their own convention alone. Where `.input_scale` is none of the convention's,
/// it scales activations in fp8.
const MARKERS: &[&str] = &[".comfy_quant", ".weight_shape", ".input_scale"];

impl Checkpoint {
    /// Everything in the checkpoint, ready to be written in another convention. Of a GGUF file, whose other
    /// names and orders belong to llama.cpp, only the gated MLPs. Gate and up in one tensor are split, but where the model's
    /// own code has them so and safetensors are written.
    ///
    /// # Errors
    /// If a module in a 4-bit block format cannot be read. One in another quantization is among the
    /// [`others`](Model::others), and [`foreign`](Model::foreign) says so.
    pub fn export(&self, to: Output) -> Result<Model<'_>, Error> {
        let is_gguf = self.files().gguf_metadata().is_some();
        let config = self.files().config().map(|json| json.value.clone());
        let source = Some(self.files().root().into());
        let (beside, kv_cache) = (beside(self.files())?, KvCache::of(self.files()));
        let mut model = Model { config, source, beside, kv_cache, ..Model::default() };
        let mut done = BTreeSet::new();
        let of_family = |module| {
            let order = self.files().family().and_then(|family| family.fused_order(module));
            order.is_some() && order == self.fused_order(module)
        };
        for mlp in &self.index().mlps {
            let fused = mlp.module(None, Projection::GateUp).filter(|_| mlp.kind != MlpKind::Experts);
            let stays = to != Output::Gguf && !is_gguf && fused.is_some_and(of_family);
            if !stays && mlp.modules().any(|m| self.is_quantized_module(m)) {
                self.export_mlp(mlp, is_gguf, &mut model, &mut done)?;
            }
        }
        for (name, module) in &self.index().modules {
            let quantized = self.is_quantized_module(name);
            let packed = self.is_packed_module(name);
            let has_scales = module.get(Role::BlockScale).is_some();
            // Scales alone would read as scales of nothing, whichever convention they are written in.
            if module.get(Role::Weight).is_none() && has_scales {
                return Err(self.missing(name, Role::Weight, name));
            }
            let scheme = &self.scheme(name).weights;
            if matches!(scheme, Weights::Blocks(_)) && !packed && has_scales {
                // Says why the weight is none that these scales could belong to.
                self.stored(name)?;
            }
            let foreign = match scheme {
                Weights::Other(what) if packed || has_scales => Some(Error::Unsupported {
                    module: name.clone(),
                    found: what.clone(),
                    supported: "4-bit blocks beside floats are; GGUF output takes the MLPs alone",
                }),
                Weights::Refused(e) if has_scales => Some((**e).clone()),
                _ => None,
            };
            model.foreign = model.foreign.take().or(foreign);
            if quantized && !done.contains(name.as_str()) && !is_gguf {
                let mut linear = LinearOut::of(name.clone(), self.layer_source(name, None)?)?;
                // It is among the others.
                linear.bias = None;
                model.linears.push(linear);
            }
            for role in Role::ALL {
                let Some(tensor) = module.get(role) else { continue };
                let written = done.contains(name.as_str()) || (quantized && role != Role::Bias);
                if is_gguf && !done.contains(name.as_str()) {
                    model.skipped.push(tensor.into());
                } else if !written {
                    model.others.extend(self.files().get(tensor).as_ref().map(TensorOut::from));
                }
            }
        }
        for tensor in &self.index().others {
            if is_gguf {
                model.skipped.push(tensor.clone());
            } else if !MARKERS.iter().any(|m| tensor.ends_with(m)) {
                model.others.extend(self.files().get(tensor).as_ref().map(TensorOut::from));
            }
        }
        Ok(model)
    }

    /// Whether a module is in a 4-bit block format, as far as its configuration says.
    fn is_quantized_module(&self, name: &str) -> bool {
        self.is_packed_module(name) && !matches!(self.scheme(name).weights, Weights::Other(_))
    }

    /// Gate and up together, and down. What is quantized and is not half of a quantized pair is left to be written as
    /// any other module; `done` gets the modules that are not.
    fn export_mlp<'s>(
        &'s self,
        mlp: &'s Mlp,
        is_gguf: bool,
        model: &mut Model<'s>,
        done: &mut BTreeSet<&'s str>,
    ) -> Result<(), Error> {
        let path = match (is_gguf, mlp.kind) {
            (false, _) => mlp.path.clone(),
            (true, MlpKind::Dense) => format!("model.layers.{}.mlp", mlp.layer),
            (true, MlpKind::Shared) => format!("model.layers.{}.mlp.shared_expert", mlp.layer),
            (true, MlpKind::Experts) => format!("model.layers.{}.mlp.experts", mlp.layer),
        };
        let experts: Vec<Option<usize>> = match mlp.kind {
            MlpKind::Experts => self.expert_ids(mlp).into_iter().map(Some).collect(),
            MlpKind::Dense | MlpKind::Shared => vec![None],
        };
        let has_own = !mlp.experts().is_empty();
        for expert in experts {
            let own = expert.filter(|_| has_own);
            let name = |projection, fallback: &str| match mlp.module(own, projection) {
                Some(name) if !is_gguf && own == expert => name.to_owned(),
                _ => match expert {
                    Some(e) => format!("{path}.{e}.{fallback}"),
                    None => format!("{path}.{fallback}"),
                },
            };
            let packed = |p| mlp.module(own, p).filter(|module| self.is_quantized_module(module));
            let mut push = |module, source| {
                model.linears.push(LinearOut::of(module, source)?);
                Ok::<_, Error>(())
            };
            let (gate, up) = (packed(Projection::Gate), packed(Projection::Up));
            let fused = packed(Projection::GateUp);
            if fused.is_some() || (gate.is_some() && up.is_some()) {
                done.extend([fused, gate, up].into_iter().flatten());
                let both = self.source_of(mlp, expert)?;
                push(name(Projection::Gate, "gate_proj"), both.gate)?;
                push(name(Projection::Up, "up_proj"), both.up)?;
            }
            if let Some(module) = packed(Projection::Down) {
                done.insert(module);
                push(name(Projection::Down, "down_proj"), self.layer_source(module, expert)?)?;
            }
        }
        Ok(())
    }
}
