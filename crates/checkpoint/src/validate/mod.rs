//! Checks a checkpoint against every rule and lists what it finds, instead of stopping at the first fault.

mod fused;
mod numbers;
mod rules;
mod scale_order;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use dualgemm_formats::{GlobalScale, GlobalScaleSource, ScaleLayout};
use serde_json::Value;

use fused::Differences;
pub use rules::{RULES, Rule, Severity};

use crate::convention::{Role, quantization};
use crate::error::list;
use crate::model_config::expert_count;
use crate::module::{Mlp, MlpKind, Place, Projection};
use crate::packed::BlockScales;
use crate::scheme::Weights;
use crate::{Checkpoint, Error, OpenOptions};

/// A broken rule: which, where, and what was found there.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Finding {
    /// The rule.
    pub rule: &'static Rule,
    /// Tensor, module or file at fault.
    pub tensor: String,
    /// Value found.
    pub value: String,
    /// All of it in one line.
    pub message: String,
}

impl Finding {
    fn new(rule: &str, tensor: impl Into<String>, value: impl Into<String>, message: String) -> Self {
        Self { rule: Rule::named(rule), tensor: tensor.into(), value: value.into(), message }
    }
}

impl From<&Error> for Finding {
    fn from(e: &Error) -> Self {
        let (tensor, value) = e.subject();
        Self::new(e.rule(), tensor, value, e.to_string())
    }
}

/// Opens and checks a checkpoint. A file that cannot be opened is one finding.
pub fn validate(path: &Path, options: &OpenOptions) -> Vec<Finding> {
    match Checkpoint::open(path, options) {
        Ok(checkpoint) => checkpoint.validate(),
        Err(e) => vec![Finding::from(&e)],
    }
}

impl Checkpoint {
    /// Checks every quantized module and every gated MLP; reads all scales, and codes only where they lie
    /// between scales, as in GGUF, a piece at a time.
    pub fn validate(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        self.check_configs(&mut findings);
        self.check_numbers(&mut findings);
        if self.layers().is_empty() {
            let file = self.files().root().display().to_string();
            let message = format!("{file}: no gated MLP ({})", self.why_no_mlp());
            findings.push(Finding::new("layers", file, "none", message));
        }
        for name in self.index().modules.keys().filter(|name| self.is_within(name)) {
            self.check_module(name, &mut findings);
        }
        self.check_declared(&mut findings);
        self.check_parts(&mut findings);
        let mut differences = Differences::default();
        self.check_fused(&mut differences);
        self.check_experts_per_token(&mut findings);
        for mlp in &self.index().mlps {
            self.check_experts(mlp, &mut findings);
            findings.extend(self.odd_experts(mlp, None).map(|e| Finding::from(&e)));
            self.check_down(mlp, &mut findings);
            self.check_activation(mlp, &mut findings);
            let experts: Vec<Option<usize>> = match mlp.kind {
                MlpKind::Experts => self.expert_ids(mlp).into_iter().map(Some).collect(),
                MlpKind::Dense | MlpKind::Shared => vec![None],
            };
            for expert in experts {
                self.check_pair(mlp, expert, &mut findings, &mut differences);
            }
        }
        differences.into_findings(&mut findings);
        findings
    }

    fn check_configs(&self, findings: &mut Vec<Finding>) {
        if let Some(json) = self.files().config()
            && let [Some(model), Some(text)] = quantization(&json.value)
            && model != text
        {
            let entries = [model, text].into_iter().filter_map(Value::as_object).flatten();
            let differ: BTreeSet<&str> =
                entries.map(|(key, _)| &**key).filter(|key| model.get(key) != text.get(key)).collect();
            let (file, differ) = (json.path.display().to_string(), list(differ));
            let message = format!(
                "{file}: its quantization_config and that of its text_config differ in {differ}; the first counts, as it \
                 does in transformers and vLLM"
            );
            findings.push(Finding::new("config-agrees", file, differ, message));
        }
        let algo = |json: Option<&crate::JsonFile>, path| {
            json.and_then(|j| j.value.pointer(path)).filter(|v| !v.is_null()).cloned()
        };
        let new = algo(self.files().config(), "/quantization_config/quant_algo");
        let old = algo(self.files().hf_quant_config(), "/quantization/quant_algo");
        if let (Some(new), Some(old)) = (new, old)
            && new != old
            // What matters is an error of the modules that it concerns.
            && !self.index().modules.keys().any(|module| self.is_contradicted(module))
        {
            let file = self.files().root().display().to_string();
            let message = format!("{file}: config.json says quant_algo {new}, hf_quant_config.json {old}");
            findings.push(Finding::new("config-agrees", file, old.to_string(), message));
        }
    }

    fn check_module(&self, name: &str, findings: &mut Vec<Finding>) {
        let module = &self.index().modules[name];
        let has_scales = module.get(Role::BlockScale).is_some() || module.get(Role::TensorScale).is_some();
        let is_mlp = Place::parse(name).is_some();
        let declared = matches!(self.scheme(name).weights, Weights::Blocks(_)) && is_mlp;
        let packed = self.is_packed_module(name);
        let alone = module.get(Role::Weight).is_none();
        // Floats that nobody declared otherwise, norms and embeddings among them, break no rule here.
        if !(packed || ((declared || alone) && has_scales)) {
            return;
        }
        if matches!(self.scheme(name).weights, Weights::Other(_)) {
            return;
        }
        let stored = match self.stored(name) {
            Ok(stored) => stored,
            Err(e) => {
                let finding = Finding::from(&e);
                // What a configuration says of many modules is one fault.
                let refused = matches!(self.scheme(name).weights, Weights::Refused(_));
                if !(refused && findings.iter().any(|f| f.message == finding.message)) {
                    findings.push(finding);
                }
                return;
            }
        };
        let experts: Vec<Option<usize>> = match stored.experts {
            Some(count) => (0..count).map(Some).collect(),
            None => vec![None],
        };
        for expert in experts {
            if let Err(e) = self.bias(name, (stored.experts, stored.rows), expert) {
                findings.push(Finding::from(&e));
            }
            match self.checked_scale(name, &stored, expert) {
                Ok(global) => {
                    let release = || self.files().release_tensor(stored.weight_name());
                    check_scales(&stored.scales(expert, release), global, findings);
                }
                Err(e) => findings.push(Finding::from(&e)),
            }
            if let Err(e) = self.input_scale(name, &stored, expert) {
                let mut finding = Finding::from(&e);
                let of_expert = Place::parse(name).is_some_and(|p| p.kind == MlpKind::Experts);
                if of_expert {
                    finding.rule = Rule::named("uncalibrated");
                }
                findings.push(finding);
            }
        }
    }

    /// Experts with modules of their own are numbered from 0, up to what the configuration says or the largest there is.
    fn check_experts(&self, mlp: &Mlp, findings: &mut Vec<Finding>) {
        let experts = mlp.experts();
        let Some(last) = experts.last() else { return };
        let config = self.files().config().map(|json| &json.value);
        let expected = config.and_then(expert_count).unwrap_or(0).max(last.saturating_add(1));
        let missing = expected - experts.len();
        if missing > 0 {
            let first = experts.iter().enumerate().find(|&(i, &e)| i != e).map_or(experts.len(), |(i, _)| i);
            let message =
                format!("{}: has no expert {first} ({missing} of {expected} are missing)", mlp.path);
            findings.push(Finding::new("layers", &mlp.path, format!("{missing} experts"), message));
        }
        for (projection, name) in [
            (Projection::Gate, "gate"),
            (Projection::Up, "up"),
            (Projection::GateUp, "gate and up"),
            (Projection::Down, "down"),
        ] {
            let without = |&&expert: &&usize| mlp.module(Some(expert), projection).is_none();
            let lacking = experts.iter().filter(without).count();
            let Some(first) = experts.iter().find(without).filter(|_| lacking < experts.len()) else {
                continue;
            };
            let message = format!(
                "{}: expert {first} has no {name} projection ({lacking} of {} have none)",
                mlp.path,
                experts.len()
            );
            findings.push(Finding::new("layers", &mlp.path, format!("{lacking} without {name}"), message));
        }
    }

    /// Where there are experts, a token has some of them.
    fn check_experts_per_token(&self, findings: &mut Vec<Finding>) {
        let counts = self.index().mlps.iter().filter(|mlp| mlp.kind == MlpKind::Experts);
        let Some(least) = counts.map(|mlp| self.expert_ids(mlp).len()).min() else { return };
        let stated = self.files().config().and_then(|json| expert_count(&json.value)).unwrap_or(0);
        match self.experts_per_token() {
            Ok(Some((key, top_k))) if top_k > least.max(stated) => {
                let file = self.files().root().display();
                let message = format!("{file}: {key} is {top_k}; a layer has {} experts", least.max(stated));
                findings.push(Finding::new("config", key, top_k.to_string(), message));
            }
            Ok(_) => {}
            Err(e) => findings.push(Finding::from(&e)),
        }
    }

    /// Down takes as many features as gate and up give, and gives as many as they take. Experts are compared with each other elsewhere.
    fn check_down(&self, mlp: &Mlp, findings: &mut Vec<Finding>) {
        let first = mlp.experts().first().copied();
        let Some(down) = mlp.module(first, Projection::Down) else { return };
        let (Some((gate, k, n)), Some((_, rows, of_row))) = (self.sizes(mlp), self.shape(down)) else {
            return;
        };
        for (what, found, of_gate, expected) in [("K", of_row, "N", n), ("N", rows, "K", k)] {
            if found != expected {
                let message =
                    format!("{down}: its {what} is {found}, but the {of_gate} of `{gate}` is {expected}");
                let value = format!("[{rows}, {of_row}]");
                findings.push(Finding::new("layers", down, value, message));
            }
        }
    }

    /// Parts of a model that number their layers alike: whoever takes one of these MLPs has to say from which part.
    fn check_parts(&self, findings: &mut Vec<Finding>) {
        let mut mlps: BTreeMap<(usize, MlpKind), usize> = BTreeMap::new();
        for mlp in self.index().mlps.iter().filter(|mlp| self.is_quantized(mlp)) {
            *mlps.entry((mlp.layer, mlp.kind)).or_default() += 1;
        }
        mlps.retain(|_, count| *count > 1);
        let Some(Err(e)) = mlps.keys().next().map(|&(layer, kind)| self.mlp(layer, kind)) else { return };
        let others = match mlps.len() - 1 {
            0 => String::new(),
            n => format!("; {n} more like it"),
        };
        let (file, found) = e.subject();
        findings.push(Finding::new("one-mlp", file, found, format!("{e}{others}")));
    }

    /// What no layer states is one finding.
    fn check_activation(&self, mlp: &Mlp, findings: &mut Vec<Finding>) {
        if let Err(e) = self.activation_of(mlp)
            && self.is_quantized(mlp)
        {
            let finding = Finding::from(&e);
            if !findings.iter().any(|known| known.message == finding.message) {
                findings.push(finding);
            }
        }
    }

    fn check_pair(
        &self,
        mlp: &Mlp,
        expert: Option<usize>,
        findings: &mut Vec<Finding>,
        differences: &mut Differences,
    ) {
        let own = mlp.own(expert);
        let gate = mlp.module(own, Projection::Gate);
        let fused = mlp.module(own, Projection::GateUp);
        let Some(module) = gate.or(fused) else { return };
        let packed = [Some(module), mlp.module(own, Projection::Up)]
            .map(|m| m.is_some_and(|m| self.is_packed_module(m)));
        if packed == [false; 2] {
            return;
        }
        // What concerns one module has been found there already.
        let add = |findings: &mut Vec<Finding>, e: &Error| {
            let mut finding = Finding::from(e);
            // One of the two was left in floats: neither can be computed.
            if fused.is_none() && packed[0] != packed[1] && matches!(e, Error::NotQuantized { .. }) {
                finding.rule = Rule::named("layers");
            }
            if !findings.iter().any(|f| f.message == finding.message) {
                findings.push(finding);
            }
        };
        let both = match self.source_of(mlp, expert) {
            Ok(both) => both,
            Err(e) => return add(findings, &e),
        };
        let layers = expert.map_or("gate and up".into(), |e| format!("gate and up of expert {e}"));
        let (gate, up) = (both.gate.tensor_scale, both.up.tensor_scale);
        differences.compare("halves-tensor-scale", module, ("tensor scales", &layers), &[gate, up], || {
            self.then_tensor_scales()
        });
        match both.input_scales() {
            Ok(Some((gate, up))) => {
                differences.compare(
                    "halves-input-scale",
                    module,
                    ("activation scales", &layers),
                    &[gate, up],
                    || {
                        // The larger multiplier, which is the smaller divisor.
                        let wider = if gate.value() > up.value() { gate } else { up };
                        let held = wider.held();
                        format!("the one input of both is quantized by {held}, which saturates for neither")
                    },
                );
            }
            Ok(None) => {}
            Err(e) => add(findings, &e),
        }
    }
}

/// Checks the values of block scales and of the tensor scale above them.
fn check_scales(scales: &BlockScales<'_>, global: GlobalScale, findings: &mut Vec<Finding>) {
    let name = &scales.name;
    let mut push = |rule, value: String, message: String| {
        findings.push(Finding::new(rule, name, value, format!("{name}: {message}")));
    };
    let mut faults =
        scales.iter().filter_map(|(place, byte)| scales.format.check_scale(name, place, byte).err());
    if let Some(first) = faults.next() {
        let faulty = 1 + faults.count();
        let first = first.to_string();
        let first = first.strip_prefix(name).and_then(|m| m.strip_prefix(": ")).unwrap_or(&first);
        push("scale-byte", format!("{faulty} bytes"), format!("{first} ({faulty} such bytes)"));
    } else if let Some(better) = scale_order::better_layout(scales) {
        push(
            "scale-order",
            scales.layout.to_string(),
            format!("block scales look like {better} order but are read as {}", scales.layout),
        );
    }
    let padding = nonzero_padding(scales);
    if padding > 0 {
        push(
            "scale-padding",
            format!("{padding} bytes"),
            format!("{padding} padding bytes of its {} scales are not zero", scales.layout),
        );
    }
    let (what, usual, wrong) = match global.source() {
        GlobalScaleSource::Multiplier => ("multiplier", "below 1", global.held() >= 1.0),
        GlobalScaleSource::Divisor(d) => ("divisor", "above 1", d <= 1.0),
        GlobalScaleSource::Absent => return,
    };
    if wrong {
        push(
            "tensor-scale-sense",
            global.held().to_string(),
            format!("tensor scale {} as a {what}, which is {usual} unless |w| exceeds 2688", global.held()),
        );
    }
}

/// Padding bytes that are not zero.
fn nonzero_padding(scales: &BlockScales<'_>) -> usize {
    if scales.layout == ScaleLayout::Linear {
        return 0;
    }
    let all = scales.bytes.iter().filter(|&&b| b != 0).count();
    let real = scales.iter().filter(|&(_, byte)| byte != 0).count();
    all - real
}
