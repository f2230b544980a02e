//! What is computed of a checkpoint, found in its files: gate and up, a linear layer, a whole MLP, or a mixture of experts.

mod mixture;

use std::ops::Range;

use anyhow::{Context as _, bail};
use dualgemm::check::{MlpFeatures, Reference};
use dualgemm::checkpoint::{Checkpoint, GateUpSource, LinearSource, Stated};
use dualgemm::formats::{GlobalScale, ScaleLayout};
use dualgemm::gemm::{
    AFormat, AOperand, Bounded, DualGemmDesc, Epilogue, GateUp, GatedMlp, Linear, MlpDesc, OutFormat,
    OutScale, RouterWeights,
};
use dualgemm::{AnyDesc, AnyPlan, AnyWeights, Error, MixtureDesc, MlpPlan, PackedMlp};

use crate::activation::{Activation, Source};
use crate::args::{EpilogueArgs, LayerArgs, OpArg, OperationArgs, ProblemArgs, out_format};
use crate::layer::{self, InputScales, Layer};
use crate::routing::OwnedRouting;
use crate::scales::{self, Basis, InputScale, MatrixReport, RoutingReport};

#[derive(Debug)]
pub struct Mlp<'c> {
    layer: Layer<'c>,
    down: LinearSource<'c>,
}

/// All experts of a layer.
#[derive(Debug)]
pub struct Mixture<'c> {
    checkpoint: &'c Checkpoint,
    number: usize,
    experts: Vec<Option<Mlp<'c>>>,
    shared: Option<Mlp<'c>>,
}

/// What is computed.
#[derive(Debug)]
pub enum Operation<'c> {
    /// Gate and up of an MLP.
    GateUp(Layer<'c>),
    /// A linear layer, by its name.
    Linear(String, LinearSource<'c>),
    Mlp(Mlp<'c>),
    /// A mixture of experts.
    Mixture(Mixture<'c>),
}

impl<'c> Mlp<'c> {
    fn of(layer: Layer<'c>) -> anyhow::Result<Self> {
        let down = layer.down()?;
        if down.k() != layer.n() {
            bail!(
                "{}: is [{}, {}]; gate and up have {} features, which are its K",
                down.name(),
                down.rows(),
                down.k(),
                layer.n()
            );
        }
        Ok(Self { layer, down })
    }

    fn desc(&self, gate_up: DualGemmDesc, out: OutFormat) -> MlpDesc {
        MlpDesc::new(gate_up, self.down.rows(), self.down.format(), out)
    }

    fn prepack(&self, plan: &MlpPlan, progress: impl Fn(usize)) -> Result<PackedMlp, Error> {
        let gate_up = self.layer.prepack(&plan.gate_up, 0..self.layer.n(), progress)?;
        Ok(PackedMlp { gate_up, down: plan.down.prepack(&self.down.read()?)? })
    }

    fn read(&self) -> Result<GatedMlp<'c>, Error> {
        Ok(GatedMlp { gate_up: self.layer.weights()?, down: self.down.read()? })
    }

    fn matrices(&self) -> [MatrixReport; 3] {
        let GateUpSource { gate, up } = self.layer.source();
        [("gate", gate), ("up", up), ("down", &self.down)].map(|(role, m)| MatrixReport::of(role, m))
    }
}

impl MlpFeatures for Mlp<'_> {
    fn gate_up(&self, run: Range<usize>) -> Result<GateUp<'_>, Error> {
        Ok(self.layer.features(run)?)
    }

    fn down(&self, run: Range<usize>) -> Result<Linear<'_>, Error> {
        Ok(self.down.features(run)?)
    }
}

/// What the arguments say is computed, and on which A.
#[derive(Debug)]
pub struct Given<'c, 'a> {
    /// Found in the checkpoint.
    pub operation: Operation<'c>,
    /// As it is multiplied.
    pub a: Activation<'a>,
    /// What follows the products.
    pub epilogue: Epilogue,
    stated: Option<Stated>,
    input_scale: Option<InputScale>,
}

impl<'c, 'a> Given<'c, 'a> {
    /// Finds it; A comes from `source`.
    pub fn of(checkpoint: &'c Checkpoint, args: &ProblemArgs, source: &'a Source) -> anyhow::Result<Self> {
        let operation = Operation::of(checkpoint, &args.operation, &args.layer)?;
        let (epilogue, stated) = operation.epilogue(&args.epilogue)?;
        let given = source.activation(&args.activations, operation.k()?, || operation.input_scales())?;
        let input_scale = InputScale::of(&given.a, given.quantize, |value| operation.input_scale_from(value));
        let a = given.ready_for(args.operation.op)?;
        Ok(Self { operation, a, epilogue, stated, input_scale })
    }

    /// The problem, with C in `out`.
    pub fn problem(&self, args: &ProblemArgs, out: OutFormat) -> anyhow::Result<Problem> {
        self.operation.problem(&self.a, args, out)
    }

    /// What a result rests on.
    pub fn basis(self, args: &ProblemArgs, routing: Option<&OwnedRouting>) -> Basis {
        let Self { operation, stated, input_scale, .. } = self;
        let report = |routing| RoutingReport::new(routing, operation.router_weights(&args.operation));
        Basis {
            overrides: args.layer.read.overrides(),
            matrices: operation.matrices(routing),
            input_scale,
            routing: routing.map(report),
            activation: stated.map(Into::into),
        }
    }
}

/// A problem of an operation: what a plan is made of.
#[derive(Debug)]
pub struct Problem {
    /// Shapes and formats.
    pub desc: AnyDesc,
    /// Of a mixture.
    pub routing: Option<OwnedRouting>,
}

impl<'c> Operation<'c> {
    /// The one that the arguments name.
    pub fn of(checkpoint: &'c Checkpoint, args: &OperationArgs, which: &LayerArgs) -> anyhow::Result<Self> {
        args.check()?;
        Ok(match args.op {
            OpArg::GateUp => Self::GateUp(Layer::of(checkpoint, which)?),
            OpArg::Mlp => {
                let layer = Layer::of(checkpoint, which)?;
                layer.check_whole()?;
                Self::Mlp(Mlp::of(layer)?)
            }
            OpArg::Linear => {
                let module = args.module.as_ref().context("--module: is needed for --op linear")?;
                if which.read.within.is_some() {
                    bail!("--within: is of MLPs; --op linear takes the module of --module");
                }
                Self::Linear(module.clone(), checkpoint.linear_source(module)?)
            }
            OpArg::Moe => {
                if which.expert.is_some() || which.shared_expert {
                    bail!("--op moe: is of all experts of a layer; --op mlp is of one");
                }
                let number = layer::number(checkpoint, which)?;
                Self::Mixture(Mixture::of(checkpoint, number, args.routed_only)?)
            }
        })
    }

    /// What reports call it: the layer, or the module.
    pub fn name(&self) -> String {
        match self {
            Self::GateUp(layer) | Self::Mlp(Mlp { layer, .. }) => format!("layer {}", layer.number),
            Self::Linear(name, _) => name.clone(),
            Self::Mixture(mixture) => format!("layer {}", mixture.number),
        }
    }

    /// Number of the layer, where it is of one.
    pub fn layer(&self) -> Option<usize> {
        match self {
            Self::GateUp(layer) | Self::Mlp(Mlp { layer, .. }) => Some(layer.number),
            Self::Linear(..) => None,
            Self::Mixture(mixture) => Some(mixture.number),
        }
    }

    /// Columns of A.
    pub fn k(&self) -> anyhow::Result<usize> {
        Ok(match self {
            Self::GateUp(layer) | Self::Mlp(Mlp { layer, .. }) => layer.k(),
            Self::Linear(_, linear) => linear.k(),
            Self::Mixture(mixture) => mixture.first()?.layer.k(),
        })
    }

    /// The scales by which A may be quantized; of a mixture the largest, none if an expert has none.
    pub fn input_scales(&self) -> anyhow::Result<Option<InputScales>> {
        Ok(match self {
            Self::GateUp(layer) | Self::Mlp(Mlp { layer, .. }) => layer.input_scales()?,
            Self::Linear(_, linear) => {
                let scale = linear.input_scale()?.map(GlobalScale::value);
                scale.map(|scale| InputScales { gate: scale, up: scale })
            }
            Self::Mixture(mixture) => {
                let mut largest = InputScales { gate: 0.0, up: 0.0 };
                for mlp in mixture.all() {
                    let Some(scales) = mlp.layer.input_scales()? else { return Ok(None) };
                    (largest.gate, largest.up) = (largest.gate.max(scales.gate), largest.up.max(scales.up));
                }
                Some(largest)
            }
        })
    }

    /// What says that A is quantized by this scale.
    pub fn input_scale_from(&self, value: f32) -> String {
        let found = match self {
            Self::GateUp(layer) | Self::Mlp(Mlp { layer, .. }) => scales::of_gate_up(layer.source(), value),
            Self::Linear(_, linear) => scales::of_linear(linear, value),
            Self::Mixture(mixture) => {
                mixture.all().find_map(|mlp| scales::of_gate_up(mlp.layer.source(), value))
            }
        };
        found.unwrap_or_else(|| "the checkpoint".into())
    }

    /// The activation, and what says so; none of a linear layer.
    pub fn epilogue(&self, args: &EpilogueArgs) -> anyhow::Result<(Epilogue, Option<Stated>)> {
        let layer = match self {
            Self::GateUp(layer) | Self::Mlp(Mlp { layer, .. }) => layer,
            Self::Mixture(mixture) => &mixture.first()?.layer,
            Self::Linear(..) => {
                let asked = [
                    ("--activation", args.activation.is_some()),
                    ("--round-gate-up-to-bf16", args.round_gate_up_to_bf16),
                ];
                if let Some((option, _)) = asked.into_iter().find(|(_, asked)| *asked) {
                    bail!(
                        "{option}: a linear layer has no activation; it comes with --op gate-up, mlp and moe"
                    );
                }
                return Ok((Epilogue::default(), None));
            }
        };
        let (epilogue, stated) = layer::epilogue(layer, args)?;
        Ok((epilogue, Some(stated)))
    }

    /// The matrices that are read.
    pub fn matrices(&self, routing: Option<&OwnedRouting>) -> Vec<MatrixReport> {
        match self {
            Self::GateUp(layer) => {
                let GateUpSource { gate, up } = layer.source();
                vec![MatrixReport::of("gate", gate), MatrixReport::of("up", up)]
            }
            Self::Linear(_, linear) => vec![MatrixReport::of("linear", linear)],
            Self::Mlp(mlp) => mlp.matrices().into(),
            Self::Mixture(mixture) => {
                let used = |id: &usize| routing.is_none_or(|routing| routing.names(*id));
                let of = |mlp: &Mlp<'_>, expert| mlp.matrices().map(|matrix| matrix.of_expert(expert));
                let experts = (0..mixture.experts.len())
                    .filter(used)
                    .filter_map(|id| Some(of(mixture.experts[id].as_ref()?, Some(id))));
                experts.chain(mixture.shared.iter().map(|mlp| of(mlp, None))).flatten().collect()
            }
        }
    }

    /// The scale that the next layer has for a C in nvfp4, where something says so.
    pub fn output_scale(&self) -> anyhow::Result<Option<f32>> {
        Ok(match self {
            Self::GateUp(layer) => layer.output_scale()?,
            Self::Linear(..) | Self::Mlp(_) | Self::Mixture(_) => None,
        })
    }

    /// Where the weights of a mixture's router go: as asked, or as the model has it.
    pub fn router_weights(&self, args: &OperationArgs) -> RouterWeights {
        match (args.router_weights, self) {
            (Some(asked), _) => asked,
            (None, Self::Mixture(mixture)) => mixture.checkpoint.router_weights(),
            _ => RouterWeights::Output,
        }
    }

    /// The problem on this A, with C in `out`.
    fn problem(&self, a: &Activation<'_>, args: &ProblemArgs, out: OutFormat) -> anyhow::Result<Problem> {
        let Activation { a, quantize: quantize_a, .. } = a;
        let (quantize_a, m, a_format) = (*quantize_a, a.rows(), AFormat::of(a));
        let ProblemArgs { operation: args, activations, epilogue: epilogues, .. } = args;
        let on_a = |desc: DualGemmDesc, out: OutFormat| DualGemmDesc { quantize_a, out, ..desc };
        let gate_up = |layer: &Layer<'_>, out: OutFormat| -> anyhow::Result<DualGemmDesc> {
            let (epilogue, _) = layer::epilogue(layer, epilogues)?;
            let desc = DualGemmDesc::new(m, layer.n(), layer.k(), a_format, layer.format());
            Ok(on_a(DualGemmDesc { epilogue, ..desc }, out))
        };
        let mut routing = None;
        let desc = match self {
            Self::GateUp(layer) => AnyDesc::Product(gate_up(layer, out)?),
            Self::Linear(_, w) => {
                AnyDesc::Product(on_a(DualGemmDesc::linear(m, w.rows(), w.k(), a_format, w.format()), out))
            }
            Self::Mlp(mlp) => {
                let between = between(args.between, mlp.down.input_scale())?;
                check_finite(a, between)?;
                AnyDesc::Mlp(mlp.desc(gate_up(&mlp.layer, between)?, out))
            }
            Self::Mixture(mixture) => {
                let between = mixture_between(args.between, mixture)?;
                check_finite(a, between)?;
                let first = mixture.first()?;
                let chosen = mixture.routing(args, activations, m)?;
                let mut routed = MixtureDesc {
                    mlp: first.desc(gate_up(&first.layer, between)?, out),
                    experts: chosen.used().len(),
                    top_k: chosen.top_k,
                    shared: None,
                    router: self.router_weights(args),
                };
                let a_format = routed.mlp.gate_up.a_compute();
                if routed.router == RouterWeights::Input && a_format.block_format().is_some() {
                    bail!(
                        "--router-weights input: multiplies A, which is {a_format}; f32, f16 or bf16 is needed"
                    );
                }
                routing = Some(chosen);
                if let Some(mlp) = &mixture.shared {
                    routed.shared = Some(mlp.desc(gate_up(&mlp.layer, between)?, OutFormat::F32));
                }
                AnyDesc::Mixture(routed)
            }
        };
        desc.check()?;
        Ok(Problem { desc, routing })
    }

    /// Brings the weights that are used into the order of the kernels.
    pub fn prepack(
        &self,
        planned: &AnyPlan,
        routing: Option<&OwnedRouting>,
        progress: &dyn Fn(usize),
    ) -> Result<AnyWeights, Error> {
        Ok(match (self, planned, routing) {
            (Self::GateUp(layer), AnyPlan::Product(plan), _) => {
                AnyWeights::Product(layer.prepack(plan, 0..layer.n(), progress)?)
            }
            (Self::Linear(_, linear), AnyPlan::Product(plan), _) => {
                AnyWeights::Product(plan.prepack(&linear.read()?)?)
            }
            (Self::Mlp(mlp), AnyPlan::Mlp(plan), _) => AnyWeights::Mlp(mlp.prepack(plan, progress)?),
            (Self::Mixture(mixture), AnyPlan::Mixture(plan), Some(routing)) => {
                let features = plan.mlp.gate_up.desc().n + plan.mlp.down.desc().n;
                let read = |(done, &id): (usize, &usize)| -> Result<Option<GatedMlp<'_>>, Error> {
                    // What was read before is packed.
                    mixture.checkpoint.files().release_pages();
                    progress(done * features);
                    mixture.experts.get(id).and_then(Option::as_ref).map(Mlp::read).transpose()
                };
                let shared = mixture.shared.as_ref().map(Mlp::read).transpose()?;
                let experts = routing.used().iter().enumerate().map(read);
                AnyWeights::Mixture(plan.prepack(experts, shared.as_ref())?)
            }
            _ => unreachable!("the plan is made of this operation's description"),
        })
    }

    /// Features that packing and the reference tell of: those of gate and up, and of down.
    pub fn features(&self, desc: &AnyDesc) -> usize {
        match (self, desc) {
            (Self::GateUp(_) | Self::Linear(..), _) => desc.last().n,
            (Self::Mlp(_), _) => desc.first().n + desc.last().n,
            (Self::Mixture(mixture), _) => (desc.first().n + desc.last().n) * mixture.all().count(),
        }
    }

    /// C of the sampled rows in f64. A is as the products see it.
    pub fn reference(
        &self,
        Problem { desc, routing }: &Problem,
        of: Reference<'_>,
    ) -> Result<Vec<Bounded>, Error> {
        match (self, desc, routing) {
            (Self::GateUp(layer), AnyDesc::Product(desc), _) => {
                of.runs(&desc.epilogue, desc.n, &|run| Ok(layer.features(run)?))
            }
            (Self::Linear(_, linear), AnyDesc::Product(desc), _) => {
                of.runs(&desc.epilogue, desc.n, &|run| Ok(linear.features(run)?))
            }
            (Self::Mlp(mlp), AnyDesc::Mlp(desc), _) => of.mlp(desc, mlp),
            (Self::Mixture(mixture), AnyDesc::Mixture(desc), Some(routing)) => {
                let all = (&mixture.experts[..], mixture.shared.as_ref());
                of.mixture(desc, routing.as_ref(), all)
            }
            _ => unreachable!("the description is this operation's"),
        }
    }
}

/// Refuses an A whose NaN or infinity would be some finite number between the products: nvfp4 has neither.
fn check_finite(a: &AOperand<'_>, between: OutFormat) -> anyhow::Result<()> {
    let (AOperand::Float(a), OutFormat::Nvfp4 { .. }) = (a, between) else { return Ok(()) };
    match a.not_finite() {
        None => Ok(()),
        Some((row, col)) => bail!(
            "A: element [{row},{col}] is {}; --between nvfp4 has no such number: finite ones are needed, or --between bf16",
            a.value(row, col)
        ),
    }
}

/// The format between the products of an MLP; nvfp4 takes the down projection's input scale.
fn between(
    asked: Option<AFormat>,
    scale: Result<Option<GlobalScale>, dualgemm::checkpoint::Error>,
) -> anyhow::Result<OutFormat> {
    let format = asked.unwrap_or(AFormat::Bf16);
    let scale = if format == AFormat::Nvfp4 { scale? } else { None };
    let scale = scale.map_or(OutScale::Dynamic, |scale| OutScale::Static(scale.value()));
    Ok(out_format(format, ScaleLayout::Linear, scale))
}

/// The same for a mixture, whose experts share the largest of their scales.
fn mixture_between(asked: Option<AFormat>, mixture: &Mixture<'_>) -> anyhow::Result<OutFormat> {
    let mut largest = GlobalScale::multiplier(0.0);
    for mlp in mixture.all().filter(|_| asked == Some(AFormat::Nvfp4)) {
        let Some(scale) = mlp.down.input_scale()? else {
            bail!(
                "--between nvfp4: {} has no input scale, and the tokens of a mixture cannot share a dynamic one; f32, f16 \
                 and bf16 are possible",
                mlp.down.name()
            );
        };
        if scale.value() > largest.value() {
            largest = scale;
        }
    }
    between(asked, Ok(Some(largest)))
}
