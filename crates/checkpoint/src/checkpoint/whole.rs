//! Whether an MLP or a mixture is all that its gate, up and down make of it: a model may have norms, scales and further
//! experts among them, which nothing here computes.

use std::collections::BTreeSet;

use dualgemm_gemm::RouterWeights;

use super::Checkpoint;
use crate::Error;
use crate::families::{Said, Sum};
use crate::gguf::GgufValue;
use crate::linear::{is_correction, is_router};
use crate::model_config::{EXPERTS_PER_TOKEN, model_field};
use crate::module::{Mlp, MlpKind, Projection, SHARED};
use crate::scheme::ancestors;

/// Parts of names below which all routed experts of a block are.
const ALL_EXPERTS: &[&str] = &["experts", "local_experts", "switch_mlp"];

impl Checkpoint {
    /// Checks that an MLP, or each of a layer's routed experts, is `act(gate) · up`, then down, and nothing more.
    ///
    /// # Errors
    /// If there is no such MLP, another tensor than theirs lies among its own, or the configuration has a number that
    /// scales what comes out of it.
    pub fn check_whole(&self, layer: usize, kind: MlpKind) -> Result<(), Error> {
        let mlp = self.mlp(layer, kind)?;
        self.check_alone(mlp, &mlp.path, false)
    }

    /// Checks that a layer's mixture is the sum of its routed experts by their weights, and of its shared expert unless only
    /// the routed ones are asked for.
    ///
    /// # Errors
    /// As [`check_whole`](Self::check_whole), for everything that the block of the experts holds beside its router; if the
    /// family weighs its shared expert; and if experts differ in shape or format.
    pub fn check_mixture(&self, layer: usize, routed_only: bool) -> Result<(), Error> {
        let mlp = self.mlp(layer, MlpKind::Experts)?;
        let shared = self.index.mlps.iter().find(|m| m.layer == layer && m.kind == MlpKind::Shared);
        if let (Sum::WeighsShared(what), Some(shared), false) = (self.sum(), shared, routed_only) {
            return Err(Error::Unsupported {
                module: shared.path.clone(),
                found: format!("{what}, which multiplies the shared expert,"),
                supported: "the routed experts alone are (--routed-only)",
            });
        }
        let all = ancestors(&mlp.path)
            .find(|path| path.rsplit('.').next().is_some_and(|p| ALL_EXPERTS.contains(&p)));
        let block = all.map_or(mlp.path.as_str(), |all| all.rsplit_once('.').map_or("", |(block, _)| block));
        let under = if block.is_empty() || is_layer(block) { &mlp.path } else { block };
        self.check_alone(mlp, under, routed_only)?;
        self.odd_experts(mlp, shared.filter(|_| !routed_only)).next().map_or(Ok(()), Err)
    }

    /// Experts of a layer are of one shape and format, whichever each has, and the shared one takes and gives as many features: of
    /// each projection, the first that is not. Those that cannot be read are other faults.
    pub(crate) fn odd_experts<'a>(
        &'a self,
        mlp: &'a Mlp,
        shared: Option<&'a Mlp>,
    ) -> impl Iterator<Item = Error> + 'a {
        let projections = [Projection::Gate, Projection::Up, Projection::GateUp, Projection::Down];
        projections.into_iter().filter_map(move |projection| {
            let shape =
                |name| self.shape(name).map(|(format, rows, k)| (name, format!("{format} [{rows}, {k}]")));
            // One tensor may have all experts.
            let experts = mlp.experts().into_iter().map(Some).chain([None]);
            let mut shapes = experts.filter_map(|expert| shape(mlp.module(expert, projection)?));
            let (first, usual) = shapes.next()?;
            let end = |name| {
                self.shape(name).map(|(_, rows, k)| if projection == Projection::Down { rows } else { k })
            };
            let of_shared = shared.and_then(|shared| shared.module(None, projection));
            let of_shared = of_shared.filter(|name| end(name).is_some_and(|found| Some(found) != end(first)));
            let mut others = shapes.filter(|(_, shape)| *shape != usual).chain(of_shared.and_then(shape));
            let (module, found) = others.next()?;
            let more = match others.count() {
                0 => String::new(),
                n => format!("; {n} more differ from it"),
            };
            Some(Error::ExpertsDiffer {
                module: module.into(),
                found,
                usual: format!("`{first}` {usual}"),
                more,
            })
        })
    }

    /// Whether the weights of the router multiply what goes into the experts of this model or what comes out.
    pub fn router_weights(&self) -> RouterWeights {
        match self.sum() {
            Sum::WeighsInputs => RouterWeights::Input,
            Sum::Plain | Sum::WeighsShared(_) => RouterWeights::Output,
        }
    }

    /// How many experts each token has, and the entry of the configuration or of GGUF's metadata that says so; `None` if
    /// neither does.
    ///
    /// # Errors
    /// If it is no positive integer.
    pub fn experts_per_token(&self) -> Result<Option<(String, usize)>, Error> {
        let config = self.files.config();
        let of_config = |key: &&'static str| {
            let config = config?;
            Some((config.path.as_path(), key.to_string(), model_field(&config.value, key)?.to_string()))
        };
        let of_gguf = |(key, value): &(String, GgufValue)| {
            let value = value.as_u64().map_or_else(|| format!("{value:?}"), |value| value.to_string());
            let is_count = key.rsplit('.').next().is_some_and(|last| EXPERTS_PER_TOKEN.contains(&last));
            is_count.then(|| (self.files.root(), key.clone(), value))
        };
        let metadata = || self.files.gguf_metadata().into_iter().flatten().find_map(of_gguf);
        let Some((file, key, found)) = EXPERTS_PER_TOKEN.iter().find_map(of_config).or_else(metadata) else {
            return Ok(None);
        };
        match found.parse() {
            Ok(top_k) if top_k > 0 => Ok(Some((key, top_k))),
            _ => Err(Error::Config { file: file.into(), key, found, valid: "a positive integer".into() }),
        }
    }

    fn sum(&self) -> Sum {
        self.files.family().map_or(Sum::Plain, |family| family.sum)
    }

    /// Refuses a tensor under this name that is no projection of the layer's MLPs there, no router and no correction of one.
    fn check_alone(&self, mlp: &Mlp, under: &str, routed_only: bool) -> Result<(), Error> {
        if let Some(config) = self.files.config() {
            Said::new(config, self.files.gguf_metadata()).check_neutrals(mlp.layer, true)?;
        }
        // What GGUF has of a layer is all in one place; the names of its MLPs' tensors start alike.
        let (of_layer, routed) = (is_layer(under), mlp.kind == MlpKind::Experts);
        let of_block =
            |m: &&Mlp| m.layer == mlp.layer && (m.path == mlp.path || (routed && m.kind != MlpKind::Dense));
        let modules = self.index.mlps.iter().filter(of_block).flat_map(Mlp::modules);
        // Adapters beside a layer are chosen at run time, and not here.
        let own: BTreeSet<&str> = modules.map(|m| m.strip_suffix(".base_layer").unwrap_or(m)).collect();
        let known = |name: &str, rest: &str| {
            let module = self.convention.split(name).map_or(name, |(module, _)| module);
            let routes = || is_router(rest) || is_correction(rest);
            let shared = || rest.split('.').any(|p| SHARED.iter().any(|shared| p.starts_with(shared)));
            ancestors(module).any(|module| own.contains(module))
                || self.convention.is_harmless(name)
                || ((routed || of_layer) && routes())
                || (routed_only && shared())
                || (of_layer && (!rest.starts_with("ffn") || rest.starts_with("ffn_norm")))
        };
        for tensor in self.files.tensors() {
            let below = tensor.name.strip_prefix(under).and_then(|rest| rest.strip_prefix('.'));
            let rest = if under.is_empty() { Some(tensor.name) } else { below };
            if rest.is_some_and(|rest| !known(tensor.name, rest)) {
                return Err(Error::Unsupported {
                    module: tensor.name.into(),
                    found: format!(
                        "a tensor in `{under}` that is no gate, up or down projection and no router's"
                    ),
                    supported: "whole MLPs and mixtures of these alone are; gate and up, and single layers, can be computed",
                });
            }
        }
        Ok(())
    }
}

/// Whether a name is a layer's own: its only number is the last part.
fn is_layer(path: &str) -> bool {
    let mut numbers = path.split('.').map(|part| part.parse::<usize>().is_ok());
    numbers.next_back() == Some(true) && numbers.all(|number| !number)
}
