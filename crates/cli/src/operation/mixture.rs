//! The experts of a layer: found, and of one kind.

use anyhow::{Context as _, bail};
use dualgemm::checkpoint::{Checkpoint, EXPERTS_PER_TOKEN, MlpInfo, MlpKind, Which};

use super::{Mixture, Mlp};
use crate::activation::DEFAULT_SEED;
use crate::args::{ActivationArgs, OperationArgs};
use crate::layer::Layer;
use crate::routing::OwnedRouting;

/// The largest number of an expert: no model has as many, and a slot is kept for each.
const MOST_EXPERTS: usize = 65_535;
/// Parts of names of tensors of shared experts, and of what multiplies them.
const SHARED: [&str; 4] = ["shared_expert", "share_expert", "shared_mlp", "_shexp"];
const SHARED_GATES: [&str; 4] =
    ["shared_expert_gate", "shared_experts_gate", "shared_gate", "ffn_gate_inp_shexp"];
/// Whether a tensor is of a layer: the first number in a name is the layer's, and a name without one is of layer 0.
fn is_of_layer(name: &str, number: usize) -> bool {
    name.split('.').find_map(|part| part.parse().ok()).unwrap_or(0) == number
}

impl<'c> Mixture<'c> {
    pub(super) fn of(checkpoint: &'c Checkpoint, number: usize, routed_only: bool) -> anyhow::Result<Self> {
        let mlps = checkpoint.mlps();
        let of_kind = |kind| mlps.iter().filter(move |mlp| (mlp.layer, mlp.kind) == (number, kind));
        let paths = |kind| of_kind(kind).map(|mlp| format!("`{}`", mlp.path)).collect::<Vec<_>>().join(", ");
        for (kind, what) in [(MlpKind::Experts, "groups of experts"), (MlpKind::Shared, "shared experts")] {
            if of_kind(kind).count() > 1 && !(routed_only && kind == MlpKind::Shared) {
                bail!("layer {number}: has several {what}, {}, and one is computed here", paths(kind));
            }
        }
        let ids = checkpoint.experts(number)?;
        let last = ids.last().copied().unwrap_or(0);
        if last > MOST_EXPERTS {
            bail!(
                "{}: has an expert of number {last}; at most {MOST_EXPERTS} is taken",
                paths(MlpKind::Experts)
            );
        }
        let mut experts: Vec<_> = (0..=last).map(|_| None).collect();
        for id in ids {
            experts[id] = Some(Mlp::of(Layer::at(checkpoint, number, Which::Expert(id))?)?);
        }
        let shared = match of_kind(MlpKind::Shared).next().filter(|_| !routed_only) {
            Some(mlp) => Some(Self::shared(checkpoint, mlp)?),
            None => None,
        };
        let this = Self { checkpoint, number, experts, shared };
        if let Some(name) = this.left_out().filter(|_| !routed_only) {
            bail!(
                "{name}: belongs to a shared expert that is no MLP of 4 bits, and would be missing from the sum; \
                 --routed-only leaves it out"
            );
        }
        checkpoint.check_mixture(number, routed_only)?;
        Ok(this)
    }

    /// The shared expert, where nothing multiplies it.
    fn shared(checkpoint: &'c Checkpoint, mlp: &MlpInfo) -> anyhow::Result<Mlp<'c>> {
        let number = mlp.layer;
        if !mlp.quantized {
            bail!(
                "{}: is the shared expert of layer {number}, and not in 4 bits; --routed-only leaves it out",
                mlp.path
            );
        }
        let gate =
            checkpoint.files().tensors().map(|tensor| tensor.name).find(|name| {
                is_of_layer(name, number) && SHARED_GATES.iter().any(|gate| name.contains(gate))
            });
        if let Some(gate) = gate {
            bail!(
                "{gate}: multiplies the shared expert `{}` by a gate that is not computed here; --routed-only leaves the \
                 shared expert out",
                mlp.path
            );
        }
        Mlp::of(Layer::at(checkpoint, number, Which::Shared)?)
    }

    /// A tensor of a shared expert of the layer, if none is computed.
    fn left_out(&self) -> Option<&'c str> {
        let of_layer = |name: &&str| is_of_layer(name, self.number);
        let names = self.checkpoint.files().tensors().map(|tensor| tensor.name);
        let shared = |name: &&str| SHARED.iter().any(|part| name.contains(part));
        names.filter(of_layer).find(shared).filter(|_| self.shared.is_none())
    }

    /// Every expert, the shared one last.
    pub(super) fn all(&self) -> impl Iterator<Item = &Mlp<'c>> {
        self.experts.iter().flatten().chain(&self.shared)
    }

    pub(super) fn first(&self) -> anyhow::Result<&Mlp<'c>> {
        self.all().next().with_context(|| format!("layer {}: has no expert", self.number))
    }

    fn ids(&self) -> Vec<usize> {
        (0..self.experts.len()).filter(|&id| self.experts[id].is_some()).collect()
    }

    pub(super) fn routing(
        &self,
        args: &OperationArgs,
        a: &ActivationArgs,
        tokens: usize,
    ) -> anyhow::Result<OwnedRouting> {
        let top_k = args.top_k.map(|top_k| top_k as usize);
        if let Some(path) = &args.routing {
            return OwnedRouting::read(path, tokens, &self.ids(), top_k);
        }
        let top_k = match (top_k, self.checkpoint.experts_per_token()?) {
            (Some(asked), Some((key, stated))) if asked != stated => {
                bail!("--top-k: is {asked}; {key} of the checkpoint is {stated}")
            }
            (Some(top_k), _) | (None, Some((_, top_k))) => top_k,
            (None, None) => {
                bail!("--top-k: is needed; the checkpoint has none of {}", EXPERTS_PER_TOKEN.join(", "))
            }
        };
        OwnedRouting::seeded(tokens, &self.ids(), top_k, a.seed.unwrap_or(DEFAULT_SEED))
    }
}
