//! From a module's name to its checked bytes, scales and bias.

use dualgemm_formats::{BlockFormat, FloatType, GlobalScale};
use dualgemm_gemm::AFormat;

use super::{BadInputScale, Checkpoint, NibbleOrder};
use crate::convention::Role;
use crate::error::list;
use crate::families::{Owner, owner};
use crate::gate_up::GateUpOrder;
use crate::model_config::{expert_count, model_field};
use crate::module::{Mlp, MlpKind, Module, Place, Projection};
use crate::packed::Stored;
use crate::scheme::{Input, Scheme, Weights};
use crate::{Dtype, Error, TensorView};

impl Checkpoint {
    pub(crate) fn weight(&self, module: &str) -> Option<TensorView<'_>> {
        self.tensor(self.index.modules.get(module)?, Role::Weight)
    }

    /// Whether a module's weight is of a type that can hold 4-bit blocks.
    pub(crate) fn is_packed_module(&self, module: &str) -> bool {
        self.weight(module).is_some_and(|weight| weight.dtype.holds_4_bits())
    }

    fn tensor(&self, module: &Module, role: Role) -> Option<TensorView<'_>> {
        self.files.get(module.get(role)?)
    }

    pub(crate) fn missing_module(&self, mlp: &Mlp, expert: Option<usize>, projection: Projection) -> Error {
        let known = mlp.modules().next().unwrap_or(&mlp.path).to_owned();
        let what = match projection {
            Projection::Gate => "the gate projection",
            Projection::Up => "the up projection",
            Projection::GateUp => "the gate and up projection",
            Projection::Down => "the down projection",
        };
        let of = expert.map_or(String::new(), |e| format!(" of expert {e}"));
        Error::MissingTensor {
            file: self.files.root().into(),
            tensor: format!("{what}{of} beside `{known}`"),
            needed_by: format!("`{}`", mlp.path),
            convention: self.convention.name,
        }
    }

    pub(crate) fn missing(&self, module: &str, role: Role, needed_by: &str) -> Error {
        let weight = self.index.modules.get(module).and_then(|m| m.get(Role::Weight));
        Error::MissingTensor {
            file: self.files.root().into(),
            tensor: self.convention.tensor_name(module, weight, role, self.scheme(module)),
            needed_by: needed_by.into(),
            convention: self.convention.name,
        }
    }

    /// Finds a module's weight and block scales and understands their shapes.
    pub(crate) fn stored(&self, name: &str) -> Result<Stored<'_>, Error> {
        let Some(module) = self.index.modules.get(name) else {
            return Err(self.missing(name, Role::Weight, name));
        };
        let weight =
            self.tensor(module, Role::Weight).ok_or_else(|| self.missing(name, Role::Weight, name))?;
        // From here on no dimension is 0, so that each is bounded by the bytes that are there.
        if weight.bytes.is_empty() {
            return Err(weight.shape_error("a weight", "at least one row and one column".into()));
        }
        let scheme = self.schemes.of(name);
        let not_quantized = |why| Error::NotQuantized { module: name.into(), why };
        let format = match &scheme.weights {
            Weights::ByType => {
                let asked = match self.options.nibble_order {
                    Some(NibbleOrder::HiLo) => Some("swapped nibbles".into()),
                    _ => self.options.scale_layout.map(|layout| format!("{layout} order of scales")),
                };
                if let Some(asked) = asked {
                    return Err(Error::Unsupported {
                        module: name.into(),
                        found: format!("{asked} in a GGUF file"),
                        supported: "the order that its blocks fix is",
                    });
                }
                let stored = Stored::gguf(weight.clone()).ok_or_else(|| {
                    not_quantized(format!("its type is {} {:?}", weight.dtype, weight.shape))
                })?;
                self.check_known(name, module, scheme)?;
                return Ok(stored);
            }
            Weights::Float(why) if weight.dtype.holds_4_bits() => {
                return Err(not_quantized(format!("{why}, yet `{}` is {}", weight.name, weight.dtype)));
            }
            Weights::Float(why) => {
                return Err(not_quantized(format!("{why}, and `{}` is {}", weight.name, weight.dtype)));
            }
            Weights::Other(what) => return Err(not_quantized(what.clone())),
            Weights::Refused(e) => return Err((**e).clone()),
            Weights::Blocks(format) => *format,
        };
        if !weight.dtype.holds_4_bits() {
            return Err(not_quantized(format!("`{}` is {}", weight.name, weight.dtype)));
        }
        if let Some(contradiction) = self.schemes.contradiction(name) {
            return Err(contradiction);
        }
        self.check_known(name, module, scheme)?;
        let scales = self
            .tensor(module, Role::BlockScale)
            .ok_or_else(|| self.missing(name, Role::BlockScale, name))?;
        let stacked = self.stacked_experts(name, module, &weight, &scales)?;
        let layout = self.options.scale_layout.unwrap_or(scheme.scale_layout);
        let swap = self.options.nibble_order.unwrap_or(scheme.nibble_order) == NibbleOrder::HiLo;
        let stored = Stored::new(weight, scales, format, (layout, swap), stacked)?;
        self.check_hidden_size(name, &stored)?;
        Ok(stored)
    }

    /// Format, rows and K of a weight in blocks or in floats; none of one that cannot be read.
    pub(crate) fn shape(&self, name: &str) -> Option<(AFormat, usize, usize)> {
        if let Some((weight, float)) = self.in_floats(name).ok()? {
            return Some((float.into(), weight.shape[0], weight.shape[1]));
        }
        let stored = self.stored(name).ok()?;
        Some((stored.format.into(), stored.rows, stored.k))
    }

    /// The weight of a module that is in floats where the files say so: a matrix of one of the types that matrices come in.
    pub(crate) fn in_floats(&self, name: &str) -> Result<Option<(TensorView<'_>, FloatType)>, Error> {
        let scheme = self.schemes.of(name);
        let (Weights::Float(_) | Weights::ByType, Some(module)) =
            (&scheme.weights, self.index.modules.get(name))
        else {
            return Ok(None);
        };
        let weight = self.tensor(module, Role::Weight);
        let Some(weight) = weight.filter(|w| w.shape.len() == 2 && !w.bytes.is_empty()) else {
            return Ok(None);
        };
        let Some(float) = weight.dtype.float_type() else { return Ok(None) };
        self.check_known(name, module, scheme)?;
        Ok(Some((weight, float)))
    }

    /// Refuses a weight with a tensor under its name that changes its meaning, or that nothing says the meaning of.
    fn check_known(&self, name: &str, module: &Module, scheme: &Scheme) -> Result<(), Error> {
        if let Some(transform) = module.get(Role::Transform).or_else(|| self.schemes.transform(name)) {
            return Err(Error::Unsupported {
                module: name.into(),
                found: format!("`{transform}`, which changes what the weights mean,"),
                supported: "plain block-scaled weights are",
            });
        }
        // Producers have none for mxfp4, and loaders disagree on one that is there.
        let no_scale = matches!(scheme.weights, Weights::Blocks(BlockFormat::Mxfp4));
        let floats = !self.is_packed_module(name);
        let is_known = |role: Role| match role {
            Role::Weight | Role::Bias => true,
            Role::TensorScale => !no_scale && !floats,
            _ => !floats,
        };
        let names = scheme.names.unwrap_or(self.convention.suffixes).iter();
        let names: Vec<_> = names.filter(|(_, role)| is_known(*role)).collect();
        let role = |tensor: &str| names.iter().find(|(ending, _)| tensor[name.len()..] == **ending);
        let mut unknown = module.tensors().filter(|tensor| role(tensor).is_none());
        let Some(tensor) = unknown.next().or(module.unknown.first().map(String::as_str)) else {
            return Ok(());
        };
        let first = role(tensor).and_then(|&&(_, role)| module.get(role));
        let why = match first {
            Some(first) => format!("`{first}` is in its place"),
            None if no_scale && module.get(Role::TensorScale) == Some(tensor) => {
                "mxfp4 has no tensor scale".into()
            }
            None => "its meaning is not known".into(),
        };
        let valid = names.iter().filter(|(ending, role)| ending.starts_with('.') && *role != Role::Transform);
        Err(Error::UnknownTensor {
            tensor: tensor.into(),
            module: name.into(),
            why,
            convention: self.convention.name,
            valid: list(valid.map(|(ending, _)| ending)),
        })
    }

    /// How many experts a matrix holds one below the other, where all of a layer are one matrix.
    fn stacked_experts(
        &self,
        name: &str,
        module: &Module,
        weight: &TensorView<'_>,
        scales: &TensorView<'_>,
    ) -> Result<Option<usize>, Error> {
        let of_all = |p: &Place| p.kind == MlpKind::Experts && p.expert.is_none();
        if weight.shape.len() != 2 || !Place::parse(name).as_ref().is_some_and(of_all) {
            return Ok(None);
        }
        let config = self.files.config().and_then(|json| expert_count(&json.value));
        let tensor_scale = self.tensor(module, Role::TensorScale).map(|view| view.shape.iter().product());
        let said = [
            ("the configuration", config),
            ("the shape of the block scales", (scales.shape.len() == 3).then(|| scales.shape[0])),
            ("the number of tensor scales", tensor_scale.filter(|&count| count > 1)),
        ];
        let said: Vec<(&str, usize)> =
            said.into_iter().filter_map(|(who, count)| Some((who, count?))).collect();
        let fits = |count: usize| count > 0 && weight.shape[0].is_multiple_of(count);
        match said.as_slice() {
            [(_, count), rest @ ..] if rest.iter().all(|(_, c)| c == count) && fits(*count) => {
                Ok(Some(*count))
            }
            [] => Err(weight.shape_error(
                "all experts of a layer",
                "[experts, rows, k / 2], or [experts · rows, k / 2] where num_experts, num_local_experts or \
                 n_routed_experts of config.json says how many they are"
                    .into(),
            )),
            said => Err(weight.shape_error(
                "all experts of a layer",
                format!(
                    "[experts · rows, k / 2] with one number of experts that divides the rows; found {}",
                    list(said.iter().map(|(who, count)| format!("{count} ({who})")))
                ),
            )),
        }
    }

    /// A 3-D parameter whose K is not the model's hidden size has its dimensions in an order that is not known.
    fn check_hidden_size(&self, name: &str, stored: &Stored<'_>) -> Result<(), Error> {
        let hidden = self.files.config().and_then(|json| {
            let at = |path| json.value.pointer(path).and_then(serde_json::Value::as_u64);
            at("/hidden_size").or_else(|| at("/text_config/hidden_size"))
        });
        let (Some(hidden), Some(place), Some(_)) = (hidden, Place::parse(name), stored.experts) else {
            return Ok(());
        };
        let (found, what) = match place.projection {
            Projection::Down => (stored.rows, "rows"),
            Projection::Gate | Projection::Up | Projection::GateUp => (stored.k, "K"),
        };
        if found as u64 == hidden {
            return Ok(());
        }
        Err(Error::Shape {
            tensor: stored.weight_name().into(),
            what: "a projection of this model",
            found: vec![stored.experts.unwrap_or(1), stored.rows, stored.k],
            valid: format!("{what} = {hidden}, the hidden_size of config.json"),
        })
    }

    fn check_expert(&self, stored: &Stored<'_>, expert: Option<usize>) -> Result<(), Error> {
        let exist = match (stored.experts, expert) {
            (None, _) => return Ok(()),
            (Some(count), Some(e)) if e < count => return Ok(()),
            (Some(count), _) => format!("{count} in one tensor, counted from 0"),
        };
        let expert = expert.unwrap_or(stored.experts.unwrap_or(0));
        Err(Error::NoExpert { path: stored.weight_name().into(), expert, exist })
    }

    /// The tensor scale of an expert that exists.
    pub(crate) fn checked_scale(
        &self,
        module: &str,
        stored: &Stored<'_>,
        expert: Option<usize>,
    ) -> Result<GlobalScale, Error> {
        self.check_expert(stored, expert)?;
        self.tensor_scale(module, stored, expert)
    }

    /// Order of the rows of a fused module, as the caller, the convention or the family says.
    pub(crate) fn fused_order(&self, module: &str) -> Option<GateUpOrder> {
        let of_family = || self.files.family()?.fused_order(module);
        self.options.gate_up_order.or(self.convention.fused_order).or_else(of_family)
    }

    /// The number in a scale tensor that belongs to an expert, or to all.
    fn scale_value(
        view: &TensorView<'_>,
        experts: Option<usize>,
        expert: Option<usize>,
        what: &'static str,
    ) -> Result<f32, Error> {
        if view.dtype != Dtype::F32 {
            return Err(view.dtype_error(what, "F32"));
        }
        let values = view.to_f32(what)?;
        match (values.as_slice(), experts, expert) {
            (&[one], _, _) => Ok(one),
            (all, Some(count), Some(e)) if all.len() == count && e < count => Ok(all[e]),
            _ => {
                let per_expert =
                    experts.map_or(String::new(), |count| format!(" or {count}, one per expert"));
                Err(view.shape_error(what, format!("one value{per_expert}")))
            }
        }
    }

    fn tensor_scale(
        &self,
        name: &str,
        stored: &Stored<'_>,
        expert: Option<usize>,
    ) -> Result<GlobalScale, Error> {
        const WHAT: &str = "a tensor scale";
        let view = self.index.modules.get(name).and_then(|m| self.tensor(m, Role::TensorScale));
        let Some(view) = view else {
            let of_all = self.convention.needs_tensor_scale && stored.format == BlockFormat::Nvfp4;
            let needed = of_all || self.schemes.of(name).needs_tensor_scale;
            return if needed {
                let needed_by = stored.name(expert);
                Err(self.missing(name, Role::TensorScale, &needed_by))
            } else {
                Ok(GlobalScale::ONE)
            };
        };
        let value = Self::scale_value(&view, stored.experts, expert, WHAT)?;
        let scale = self.convention.sense.scale(value);
        if !is_usable(scale) {
            return Err(Error::ScaleValue { tensor: view.name.into(), what: WHAT, value });
        }
        Ok(scale)
    }

    pub(crate) fn input_scale(
        &self,
        name: &str,
        stored: &Stored<'_>,
        expert: Option<usize>,
    ) -> Result<Option<GlobalScale>, Error> {
        const WHAT: &str = "an activation scale";
        let input = self.schemes.of(name).input;
        let view = self.index.modules.get(name).and_then(|m| self.tensor(m, Role::InputScale));
        let view = match (view, input) {
            (_, Input::Ignored) | (None, Input::Optional) => return Ok(None),
            (None, Input::Required) => {
                let needed_by = stored.name(expert);
                return Err(self.missing(name, Role::InputScale, &needed_by));
            }
            (Some(view), _) => view,
        };
        let value = Self::scale_value(&view, stored.experts, expert, WHAT)?;
        let scale = self.convention.sense.scale(value);
        match (is_usable(scale), self.options.bad_input_scale) {
            (true, _) => Ok(Some(scale)),
            (false, BadInputScale::One) => Ok(Some(GlobalScale::ONE)),
            (false, BadInputScale::Refuse) => {
                Err(Error::ScaleValue { tensor: view.name.into(), what: WHAT, value })
            }
        }
    }

    /// The bias of a module of so many rows, or that of an expert where one tensor has so many of them.
    pub(crate) fn bias(
        &self,
        name: &str,
        (experts, rows): (Option<usize>, usize),
        expert: Option<usize>,
    ) -> Result<Option<Vec<f32>>, Error> {
        const WHAT: &str = "a bias";
        let view = self.index.modules.get(name).and_then(|m| self.tensor(m, Role::Bias));
        self.check_mlp_bias(name, view.as_ref())?;
        let Some(view) = view else { return Ok(None) };
        let values = view.to_f32(WHAT)?;
        let first = match (experts, expert) {
            (None, _) if values.len() == rows => 0,
            (Some(count), Some(e)) if e < count && values.len() == count * rows => e * rows,
            (experts, _) => {
                let lead = experts.map_or(String::new(), |e| format!("{e}, "));
                return Err(view.shape_error(WHAT, format!("[{lead}{rows}]")));
            }
        };
        let values = &values[first..][..rows];
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(Error::BiasValue { tensor: view.name.into(), at: first + at, value: values[at] });
        }
        Ok(Some(values.to_vec()))
    }

    /// A dense MLP of the language model has biases where the configuration's `mlp_bias` says so, and there alone.
    fn check_mlp_bias(&self, name: &str, bias: Option<&TensorView<'_>>) -> Result<(), Error> {
        const KEY: &str = "mlp_bias";
        let Some(config) = self.files.config() else { return Ok(()) };
        let stated = model_field(&config.value, KEY).map(|stated| (stated.as_bool(), stated));
        let ours = |p: &Place| p.kind == MlpKind::Dense && owner(&p.path) == Owner::Trunk;
        let fault = |found: &serde_json::Value, valid| {
            let (file, key) = (config.path.clone(), KEY.into());
            Error::Config { file, key, found: found.to_string(), valid }
        };
        match (stated, bias) {
            _ if !Place::parse(name).as_ref().is_some_and(ours) => Ok(()),
            (Some((Some(true), _)), None) => {
                Err(self.missing(name, Role::Bias, "`mlp_bias`, which is true,"))
            }
            (Some((Some(false), found)), Some(bias)) => {
                Err(fault(found, format!("true, as `{}` is there", bias.name)))
            }
            (Some((None, found)), _) => Err(fault(found, "true or false".into())),
            _ => Ok(()),
        }
    }
}

/// Whether both the number in the file and the multiplier it means can scale anything.
fn is_usable(scale: GlobalScale) -> bool {
    [scale.held(), scale.value()].iter().all(|x| x.is_finite() && *x > 0.0)
}
