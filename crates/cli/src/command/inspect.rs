//! `inspect CHECKPOINT`: its gated MLPs, convention and scales, gate and up side by side; and which linear layers there are
//! in which format.

mod matrices;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use clap::Args;
use dualgemm::checkpoint::{
    Checkpoint, Error, GateUpSource, LinearSource, MlpInfo, MlpKind, ModuleInfo, Which,
};
use dualgemm::formats::GlobalScale;
use serde::Serialize;

use self::matrices::Matrices;
use super::Verdict;
use crate::args::{ReadArgs, read_with};
use crate::layer;
use crate::report::{Bytes, Output, Table, grouped, span};

/// Arguments of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Directory, .safetensors, .safetensors.index.json or .gguf file.
    pub checkpoint: PathBuf,
    #[command(flatten)]
    pub read: ReadArgs,
    /// List every tensor too.
    #[arg(long)]
    pub tensors: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    checkpoint: PathBuf,
    convention: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    overrides: Vec<String>,
    files: Vec<PathBuf>,
    bytes: usize,
    mlps: Vec<MlpReport>,
    /// Experts (and MLPs without experts) whose gate and up have different tensor scales. A consumer that fuses
    /// both into one matrix with one scale computes them wrongly.
    halves_differ: Vec<String>,
    /// Every linear layer, quantized or not.
    modules: Vec<ModuleInfo>,
    /// Those of pictures and sound.
    modality_modules: Vec<ModuleInfo>,
    tensor_count: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<TensorReport>>,
    #[serde(skip)]
    why_no_mlp: String,
}

#[derive(Debug, Serialize)]
struct MlpReport {
    #[serde(flatten)]
    info: MlpInfo,
    /// Activation and what says so, or why it is not known.
    activation: String,
    entries: Vec<Entry>,
}

/// Gate and up of one MLP or expert.
#[derive(Debug, Serialize)]
struct Entry {
    name: String,
    expert: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pair: Option<Pair>,
    /// Why the pair cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<String>,
}

impl Entry {
    fn differs(&self) -> bool {
        self.pair.as_ref().is_some_and(|pair| pair.tensor_scale_ratio != 1.0)
    }
}

#[derive(Debug, Serialize)]
struct Pair {
    gate: HalfReport,
    up: HalfReport,
    /// Larger tensor scale over smaller one; 1 where both are the same.
    tensor_scale_ratio: f64,
    bias: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_scale_fault: Option<String>,
}

#[derive(Debug, Serialize)]
struct HalfReport {
    tensor: String,
    format: String,
    n: usize,
    k: usize,
    /// The multiplier.
    tensor_scale: f32,
    /// The number in the file.
    tensor_scale_held: f32,
    input_scale: Option<f32>,
}

#[derive(Debug, Serialize)]
struct TensorReport {
    name: String,
    dtype: String,
    shape: Vec<usize>,
}

impl Pair {
    fn of(source: &GateUpSource<'_>) -> Self {
        let (inputs, input_scale_fault) = match source.input_scales() {
            Ok(scales) => (scales, None),
            Err(error) => (None, Some(error.to_string())),
        };
        let half = |of: &LinearSource<'_>, input: Option<GlobalScale>| HalfReport {
            tensor: of.name(),
            format: of.format().to_string(),
            n: of.rows(),
            k: of.k(),
            tensor_scale: of.tensor_scale.value(),
            tensor_scale_held: of.tensor_scale.held(),
            input_scale: input.map(GlobalScale::value),
        };
        let GateUpSource { gate, up } = source;
        let ratio = gate.tensor_scale.exact() / up.tensor_scale.exact();
        Self {
            gate: half(gate, inputs.map(|(gate, _)| gate)),
            up: half(up, inputs.map(|(_, up)| up)),
            tensor_scale_ratio: ratio.max(1.0 / ratio),
            bias: gate.bias.is_some(),
            input_scale_fault,
        }
    }
}

fn entries(checkpoint: &Checkpoint, info: &MlpInfo) -> Vec<Entry> {
    let found = |which| checkpoint.gate_up_source(info.layer, which);
    let entry = |expert: Option<usize>, found: Result<GateUpSource<'_>, Error>| {
        let name = expert.map_or(info.path.clone(), |e| format!("{}[{e}]", info.path));
        let (pair, fault) = match found {
            Ok(source) => (Some(Pair::of(&source)), None),
            Err(error) => (None, Some(error.to_string())),
        };
        Entry { name, expert, pair, fault }
    };
    match info.kind {
        MlpKind::Dense => vec![entry(None, found(Which::Dense))],
        MlpKind::Shared => vec![entry(None, found(Which::Shared))],
        MlpKind::Experts => match checkpoint.experts(info.layer) {
            Ok(ids) => ids.into_iter().map(|id| entry(Some(id), found(Which::Expert(id)))).collect(),
            Err(error) => vec![entry(None, Err(error))],
        },
    }
}

/// Format and shape of an entry's weights; whether its input scales cannot be used, and whether it has any.
type Alike = Option<(String, (bool, bool))>;

impl MlpReport {
    /// What the table calls some of its entries.
    fn name_of(&self, entries: &[&Entry]) -> String {
        match entries {
            [one] => one.name.clone(),
            several => {
                let experts: Vec<usize> = several.iter().filter_map(|entry| entry.expert).collect();
                format!("{}[{}]", self.info.path, ranges(&experts))
            }
        }
    }

    /// One line for all experts that differ in their scales alone.
    fn rows(&self) -> Vec<Vec<String>> {
        let kind = |entry: &&Entry| {
            let weights = |p: &Pair| format!("{} [{}, {}]", p.gate.format, p.gate.n, p.gate.k);
            let inputs = |p: &Pair| (p.input_scale_fault.is_some(), p.gate.input_scale.is_some());
            entry.pair.as_ref().map(|p| (weights(p), inputs(p)))
        };
        let row = |(kind, entries): (Alike, Vec<&Entry>)| {
            let mut row =
                vec![self.info.layer.to_string(), self.name_of(&entries), self.info.kind.to_string()];
            let Some((weights, inputs)) = kind else {
                row.push("cannot be read, see below".into());
                return row;
            };
            let pairs = || entries.iter().filter_map(|entry| entry.pair.as_ref());
            let halves = |of: fn(&HalfReport) -> Option<f32>| {
                [span(pairs().filter_map(|p| of(&p.gate))), span(pairs().filter_map(|p| of(&p.up)))]
            };
            let ratio = pairs().map(|p| p.tensor_scale_ratio).fold(1.0, f64::max);
            let up_to = if entries.len() > 1 && ratio > 1.0 { "up to " } else { "" };
            row.push(weights);
            row.extend(halves(|half| Some(half.tensor_scale)));
            row.push(format!("{up_to}{ratio:.4}"));
            row.push(match inputs {
                (true, _) => "cannot be used, see below".into(),
                (false, true) => halves(|half| half.input_scale).join(", "),
                (false, false) => "none".into(),
            });
            row
        };
        grouped(&self.entries, kind).into_iter().map(row).collect()
    }
}

/// What is wrong in an MLP: what is the same of several experts but for their numbers, once.
fn faults(mlp: &MlpReport) -> Vec<String> {
    let mut found: BTreeMap<String, Vec<(&Entry, &str)>> = BTreeMap::new();
    for entry in &mlp.entries {
        let of_pair = entry.pair.as_ref().and_then(|pair| pair.input_scale_fault.as_ref());
        for fault in entry.fault.iter().chain(of_pair) {
            let alike = entry.expert.map(|e| {
                let path = &mlp.info.path;
                fault
                    .replace(&format!("{path}.{e}."), &format!("{path}.*."))
                    .replace(&format!("[{e}]"), "[*]")
            });
            found.entry(alike.unwrap_or_else(|| fault.clone())).or_default().push((entry, fault));
        }
    }
    let line = |(alike, entries): (String, Vec<(&Entry, &str)>)| match entries.as_slice() {
        [(one, fault)] => format!("{}: {fault}", one.name),
        several => {
            let experts: Vec<usize> = several.iter().filter_map(|(entry, _)| entry.expert).collect();
            format!("{}, experts {}: {alike}", mlp.info.path, ranges(&experts))
        }
    };
    found.into_iter().map(line).collect()
}

/// Ascending numbers, as in `0 to 5, 7`.
fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [first, .., last] => format!("{first} to {last}"),
        one => format!("{}", one[0]),
    });
    runs.collect::<Vec<_>>().join(", ")
}

impl Report {
    /// Activations, each with the MLPs that have it, in the order of the layers.
    fn activations(&self) -> Vec<(&str, String)> {
        let name = |mlp: &MlpReport| format!("{} {}", mlp.info.kind, mlp.info.layer);
        let names = |mlps: Vec<&MlpReport>| mlps.into_iter().map(name).collect::<Vec<_>>().join(", ");
        let all = grouped(&self.mlps, |mlp| mlp.activation.as_str());
        all.into_iter().map(|(activation, mlps)| (activation, names(mlps))).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, bytes) = (self.tensor_count, Bytes(self.bytes as u64));
        let read = read_with(&self.overrides);
        writeln!(f, "{}: {}{read}, {count} tensors, {bytes}", self.checkpoint.display(), self.convention)?;
        let mut table = Table::new(&[
            "layer",
            "MLP",
            "kind",
            "weights",
            "gate scale",
            "up scale",
            "ratio",
            "input scales",
        ]);
        for mlp in &self.mlps {
            mlp.rows().into_iter().for_each(|row| table.row(row));
        }
        write!(f, "{table}")?;
        self.mlps.iter().flat_map(faults).try_for_each(|fault| writeln!(f, "{fault}"))?;
        write!(f, "{}", Matrices::of(&self.modules))?;
        if let Some(first) = self.modality_modules.first() {
            let count = self.modality_modules.len();
            let matrices = if count == 1 { "matrix" } else { "matrices" };
            writeln!(
                f,
                "{count} {matrices} of pictures and sound, such as {}: {}",
                first.name, first.format
            )?;
        }
        for (activation, layers) in self.activations() {
            writeln!(f, "activation of {layers}: {activation}")?;
        }
        if let Some(tensors) = &self.tensors {
            let mut table = Table::new(&["tensor", "type", "shape"]);
            for t in tensors {
                table.row([t.name.clone(), t.dtype.clone(), format!("{:?}", t.shape)]);
            }
            write!(f, "{table}")?;
        }
        match self.halves_differ.as_slice() {
            [] if self.mlps.is_empty() => write!(f, "no gated MLP ({})", self.why_no_mlp),
            [] => {
                let all = self.mlps.iter().flat_map(|mlp| &mlp.entries).all(|entry| entry.pair.is_some());
                let everywhere = if all { "everywhere" } else { "where both can be read" };
                write!(f, "gate and up have the same tensor scale {everywhere}")
            }
            some => {
                let names = self.mlps.iter().filter_map(|mlp| {
                    let differ: Vec<&Entry> = mlp.entries.iter().filter(|entry| entry.differs()).collect();
                    (!differ.is_empty()).then(|| mlp.name_of(&differ))
                });
                let names = names.collect::<Vec<_>>().join(", ");
                write!(f, "gate and up have different tensor scales in {} of them: {names}", some.len())
            }
        }
    }
}

pub fn run(args: &InspectArgs, output: &Output) -> anyhow::Result<Verdict> {
    let checkpoint = layer::open(&args.checkpoint, &args.read, None)?;
    let infos = checkpoint.mlps();
    let bar = output.progress("inspect", infos.len());
    let mlps: Vec<MlpReport> = infos
        .into_iter()
        .map(|info| {
            bar.inc(1);
            let activation = match checkpoint.activation(info.layer, info.kind) {
                Ok(stated) => stated.to_string(),
                Err(error) => format!("not known: {error}"),
            };
            MlpReport { entries: entries(&checkpoint, &info), activation, info }
        })
        .collect();
    bar.finish_and_clear();
    let entries = mlps.iter().flat_map(|mlp| &mlp.entries);
    let halves_differ = entries.filter(|entry| entry.differs()).map(|entry| entry.name.clone()).collect();
    let files = checkpoint.files();
    let tensors = args.tensors.then(|| {
        let report = |t: dualgemm::checkpoint::TensorView<'_>| TensorReport {
            name: t.name.into(),
            dtype: t.dtype.to_string(),
            shape: t.shape.into(),
        };
        files.tensors().map(report).collect()
    });
    output.emit(&Report {
        checkpoint: args.checkpoint.clone(),
        convention: checkpoint.convention().name,
        overrides: args.read.overrides(),
        files: files.paths().map(Into::into).collect(),
        bytes: files.total_bytes(),
        mlps,
        halves_differ,
        modules: checkpoint.modules(),
        modality_modules: checkpoint.modality_modules(),
        tensor_count: files.tensors().count(),
        tensors,
        why_no_mlp: checkpoint.why_no_mlp(),
    })?;
    Ok(Verdict::Right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_experts_is_said_once() {
        let path = "model.layers.3.mlp.experts";
        let entry = |e: usize| {
            let what = if e == 4 { "weight" } else { "weight_scale" };
            let fault = Some(format!("{path}.{e}.gate_proj.{what}: is missing from m.safetensors"));
            Entry { name: format!("{path}[{e}]"), expert: Some(e), pair: None, fault }
        };
        let info = MlpInfo {
            layer: 3,
            path: path.into(),
            kind: MlpKind::Experts,
            experts: 6,
            fused: false,
            quantized: true,
        };
        let mlp = MlpReport { info, activation: String::new(), entries: (0..6).map(entry).collect() };
        let lone = format!("{path}[4]: {path}.4.gate_proj.weight: is missing from m.safetensors");
        let others = format!(
            "{path}, experts 0 to 3, 5: {path}.*.gate_proj.weight_scale: is missing from m.safetensors"
        );
        assert_eq!(faults(&mlp), [lone, others]);
    }
}
