//! What a result rests on, and where each comes from: matrices, tensor scales, the routing, the activation.

use std::fmt;

use dualgemm::checkpoint::{GateUpSource, LinearSource, ScaleOrigin, Stated};
use dualgemm::formats::GlobalScaleSource;
use dualgemm::gemm::{AOperand, Activation, QuantizeA, RouterWeights};
use serde::Serialize;

use crate::computation::Routed;
use crate::report::counted;
use crate::routing::OwnedRouting;

/// What a result rests on: a part of the reports of `run` and `verify`.
#[derive(Debug, Default, Serialize)]
pub struct Basis {
    /// Options that override what the checkpoint says of itself.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overrides: Vec<String>,
    /// The weights that were read, with their tensor scales.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub matrices: Vec<MatrixReport>,
    /// The tensor scale that quantizes A.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_scale: Option<InputScale>,
    /// Which experts tokens go to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routing: Option<RoutingReport>,
    /// The function of gate and up.
    #[serde(flatten)]
    pub activation: Option<ActivationReport>,
}

/// A matrix of weights.
#[derive(Debug, Serialize)]
pub struct MatrixReport {
    /// gate, up, down or linear.
    role: &'static str,
    /// Number of the routed expert that it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    expert: Option<usize>,
    /// Whether it belongs to a mixture's shared expert.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    shared: bool,
    name: String,
    format: String,
    /// The multiplier.
    tensor_scale: f32,
    tensor_scale_from: ScaleOrigin,
}

impl MatrixReport {
    /// A matrix of a checkpoint.
    pub fn of(role: &'static str, matrix: &LinearSource<'_>) -> Self {
        Self {
            role,
            expert: None,
            shared: false,
            name: matrix.name(),
            format: format!("{} [{}, {}]", matrix.format(), matrix.rows(), matrix.k()),
            tensor_scale: matrix.tensor_scale.value(),
            tensor_scale_from: matrix.tensor_scale_from.clone(),
        }
    }

    /// The same of a routed expert, or of the shared one.
    pub fn of_expert(self, expert: Option<usize>) -> Self {
        Self { expert, shared: expert.is_none(), ..self }
    }
}

impl fmt::Display for MatrixReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, format, tensor_scale, .. } = self;
        match &self.tensor_scale_from {
            ScaleOrigin::Tensor { tensor, file } => {
                // What both names begin with stands there already, and so does the folder; JSON has them whole.
                let module = name.strip_suffix("weight").unwrap_or(name);
                let tensor = tensor.strip_prefix(module).unwrap_or(tensor);
                let file = file.file_name().unwrap_or(file.as_os_str()).display();
                write!(f, "{name}, {format}, tensor scale {tensor_scale:e}, `{tensor}` in {file}")
            }
            ScaleOrigin::One(why) => write!(f, "{name}, {format}, tensor scale {why}"),
        }
    }
}

/// A line of a report: a label in a column, and what it labels, whose further lines are indented as far.
pub fn labelled(f: &mut fmt::Formatter<'_>, label: &str, text: impl fmt::Display) -> fmt::Result {
    writeln!(f, "  {label:<10} {}", text.to_string().replace('\n', "\n             "))
}

impl Basis {
    /// How the checkpoint was read, a line for each matrix, but only the first of many experts, A, the activation and the
    /// routing.
    pub fn write(&self, f: &mut fmt::Formatter<'_>, a: &str) -> fmt::Result {
        if !self.overrides.is_empty() {
            labelled(f, "read with", self.overrides.join(" "))?;
        }
        let all = &self.matrices;
        let first = all.iter().find_map(|matrix| matrix.expert);
        let more = all.iter().filter(|m| m.role == "down" && m.expert.is_some() && m.expert != first).count();
        for matrix in all.iter().filter(|matrix| matrix.expert == first || matrix.expert.is_none()) {
            let of = matrix.expert.map_or(String::new(), |expert| format!("expert {expert}: "));
            let of = if matrix.shared { "shared expert: " } else { &of };
            let and = match (matrix.role, matrix.expert.is_some(), more) {
                ("down", true, 1..) => format!("; and {}", counted(more, "more expert")),
                _ => String::new(),
            };
            labelled(f, matrix.role, format!("{of}{matrix}{and}"))?;
        }
        let scale = self.input_scale.as_ref().filter(|scale| scale.value.is_some());
        labelled(f, "A", format!("{a}{}", scale.map_or(String::new(), |scale| format!("\n{}", scale.from))))?;
        if let Some(ActivationReport { activation, activation_from }) = &self.activation {
            labelled(f, "activation", format!("{activation} ({activation_from})"))?;
        }
        self.routing.as_ref().map_or(Ok(()), |routing| labelled(f, "routing", routing))
    }
}

/// The tensor scale that quantizes A.
#[derive(Debug, Serialize)]
pub struct InputScale {
    /// The multiplier; none where each A has its own.
    pub value: Option<f32>,
    pub from: String,
}

impl InputScale {
    /// That of an A before it is quantized; none where A stays floats. `from` says where a static scale comes from.
    pub fn of(a: &AOperand<'_>, quantize: QuantizeA, from: impl FnOnce(f32) -> String) -> Option<Self> {
        match (a, quantize) {
            (AOperand::Quantized(a), _) => {
                Some(Self { value: Some(a.global_scale().value()), from: "the input's own".into() })
            }
            (_, QuantizeA::No) => None,
            (_, QuantizeA::Dynamic) => {
                Some(Self { value: None, from: "dynamic: the largest value of A".into() })
            }
            (_, QuantizeA::Static(value)) => Some(Self { value: Some(value), from: from(value) }),
        }
    }
}

/// Whose scale it is that quantizes A: gate's, unless only up's has that value; none if neither.
pub fn of_gate_up(layer: &GateUpSource<'_>, value: f32) -> Option<String> {
    [&layer.gate, &layer.up].into_iter().find_map(|half| of_linear(half, value))
}

/// Whose scale it is that quantizes what goes into a linear layer, if it has that value.
pub fn of_linear(layer: &LinearSource<'_>, value: f32) -> Option<String> {
    let (scale, from) = (layer.input_scale().ok()??, layer.input_scale_from.as_ref()?);
    (scale.value() == value).then(|| match scale.source() {
        GlobalScaleSource::Absent => format!("--unusable-input-scale-is-one, instead of {from}"),
        GlobalScaleSource::Multiplier | GlobalScaleSource::Divisor(_) => from.to_string(),
    })
}

/// The activation, and what says so: file and entry, the family, or the option.
#[derive(Debug, Serialize)]
pub struct ActivationReport {
    pub activation: Activation,
    pub activation_from: String,
}

impl From<Stated> for ActivationReport {
    fn from(stated: Stated) -> Self {
        Self { activation: stated.activation, activation_from: stated.origin.to_string() }
    }
}

/// The routing of a mixture.
#[derive(Debug, Serialize)]
pub struct RoutingReport {
    from: String,
    top_k: usize,
    /// Rows that experts computed.
    rows: usize,
    /// Experts that had one.
    experts: usize,
    /// output or input.
    router_weights: &'static str,
}

impl RoutingReport {
    /// Of this routing, whose weights go there.
    pub fn new(routing: &OwnedRouting, router_weights: RouterWeights) -> Self {
        let Routed { rows, experts } = routing.routed();
        let router_weights = match router_weights {
            RouterWeights::Input => "input",
            RouterWeights::Output => "output",
        };
        Self { from: routing.origin.clone(), top_k: routing.top_k, rows, experts, router_weights }
    }
}

impl fmt::Display for RoutingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, rows, experts, router_weights, .. } = self;
        write!(
            f,
            "{from}: {} of {}, weights on the {router_weights}",
            counted(*rows, "row"),
            counted(*experts, "expert")
        )
    }
}
