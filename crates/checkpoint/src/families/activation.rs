//! Which activation an MLP has: what its configuration says, read as the row of its family says.

use std::fmt;
use std::path::Path;

use dualgemm_gemm::Activation;
use serde_json::Value;

use super::{
    Absent, Clamp, Family, Function, Limit, Neutral, OAI, Shape, inner, model_types, says_nothing, speaks,
};
use crate::gguf::GgufValue;
use crate::model_config::{ARCHITECTURE, from_gguf, gguf_name, model_field, parts};
use crate::module::MlpKind;
use crate::{Error, JsonFile};

/// An activation, and what says so.
#[derive(Debug, Clone, PartialEq)]
pub struct Stated {
    /// The activation.
    pub activation: Activation,
    /// Where it comes from.
    pub origin: Origin,
}

impl Stated {
    /// What a configuration says of an MLP.
    pub fn of_config(config: &JsonFile, layer: usize, kind: MlpKind) -> Result<Self, Error> {
        Said::new(config, None).activation(layer, kind, false)
    }

    /// What the metadata of a GGUF file says of an MLP.
    pub fn of_gguf(
        file: &Path,
        metadata: &[(String, GgufValue)],
        layer: usize,
        kind: MlpKind,
    ) -> Result<Self, Error> {
        let value = from_gguf(metadata).ok_or_else(|| no_configuration(file, true))?;
        Said::new(&JsonFile { path: file.into(), value }, Some(metadata)).activation(layer, kind, false)
    }
}

/// `clamped-silu:10 (config.json: swiglu_limit)`
impl fmt::Display for Stated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.activation, self.origin)
    }
}

/// Where an activation comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Whoever opened the checkpoint asked for it.
    Asked,
    /// The file, the family, or both.
    File {
        /// Name of the file.
        file: String,
        /// Its entries that say so.
        keys: Vec<String>,
        /// The row of the table of families that says the rest.
        family: Option<&'static str>,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asked => f.write_str("as asked, --activation"),
            Self::File { file, keys, family } => {
                if !keys.is_empty() {
                    write!(f, "{file}: {}", keys.join(", "))?;
                }
                let between = if keys.is_empty() { "" } else { "; " };
                family.map_or(Ok(()), |family| write!(f, "{between}family {family}"))
            }
        }
    }
}

/// Every name of a function that is understood in every family.
const NAMES: &str = "silu, swish, swigluoai, gelu_pytorch_tanh, gelu_new, relu or relu2";
/// Families without a row: only what their configuration says in plain words counts.
const NO_FAMILY: Function = Function::Named { keys: super::COMMON_KEYS, otherwise: None, also: &[] };

fn fault(file: &Path, key: impl Into<String>, found: impl Into<String>, valid: impl Into<String>) -> Error {
    Error::Activation { file: file.into(), key: key.into(), found: found.into(), valid: valid.into() }
}

/// That there is no configuration at all.
pub(crate) fn no_configuration(file: &Path, gguf: bool) -> Error {
    let key = if gguf { ARCHITECTURE } else { "config.json" };
    fault(
        file,
        key,
        "missing, and nothing else says which activation the MLPs have",
        format!("a configuration that names it: {NAMES}"),
    )
}

/// What a checkpoint says about its model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Said<'c> {
    config: &'c JsonFile,
    /// Architecture and metadata of a GGUF file.
    gguf: Option<(&'c str, &'c [(String, GgufValue)])>,
    family: Option<&'static Family>,
}

#[derive(Debug, Default)]
struct Followed {
    keys: Vec<String>,
    /// Whether the family said something that the entries did not.
    family: bool,
}

impl<'c> Said<'c> {
    pub(crate) fn new(config: &'c JsonFile, metadata: Option<&'c [(String, GgufValue)]>) -> Self {
        let named = |all: &'c [(String, GgufValue)]| {
            let entry = all.iter().find(|(key, _)| key == ARCHITECTURE);
            entry.and_then(|(_, name)| name.as_str()).map(|name| (name, all))
        };
        let gguf = metadata.and_then(named);
        let family = match gguf {
            // The same name may stand for other things in GGUF than in configurations.
            Some((name, _)) => Family::of_architecture(name),
            None => Family::of_config(config),
        };
        Self { config, gguf, family }
    }

    pub(crate) fn family(&self) -> Option<&'static Family> {
        self.family
    }

    /// The activation of an MLP; `mtp` says that it is in a part that predicts further tokens and numbers its own layers.
    pub(crate) fn activation(&self, layer: usize, kind: MlpKind, mtp: bool) -> Result<Stated, Error> {
        let mut followed = Followed::default();
        let shape = self.shape(layer, mtp, &mut followed)?;
        self.check_rest(shape)?;
        self.check_neutrals(layer, false)?;
        let limit = self.limit(layer, kind, mtp, &mut followed)?;
        let activation = match (shape, limit) {
            (Shape::Oai, _) => {
                let [alpha, beta, limit] = OAI.map(|(keys, usual)| self.number(keys, usual, &mut followed));
                Activation::SwigluOai { alpha: alpha?, beta: beta?, limit: limit? }
            }
            (Shape::Silu, None) => Activation::Silu,
            (Shape::Silu, Some((limit, _))) => {
                followed.family = true;
                match self.family.map(|family| family.clamp) {
                    Some(Clamp::After) => Activation::SwigluStep { limit },
                    Some(Clamp::Before) | None => Activation::ClampedSilu { limit },
                }
            }
            (other, Some((limit, key))) => {
                let found = format!("{limit} beside {}, which is not limited in any known way", other.name());
                return Err(self.fault(&key, found, "no limit"));
            }
            (Shape::GeluTanh, None) => Activation::GeluTanh,
            (Shape::Relu, None) => Activation::Relu,
            (Shape::Relu2, None) => Activation::Relu2,
        };
        if let Err(error) = activation.check() {
            return Err(self.fault(
                followed.keys.first().map_or("hidden_act", String::as_str),
                error.to_string(),
                "finite numbers and positive limits",
            ));
        }
        let file =
            self.config.path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into());
        let family = self.family.filter(|_| followed.family).map(Family::name);
        // Limits say more than the name of the function.
        followed.keys.reverse();
        Ok(Stated { activation, origin: Origin::File { file, keys: followed.keys, family } })
    }

    /// What the file calls an entry.
    fn name(&self, key: &str) -> String {
        let Some((name, metadata)) = self.gguf else { return key.into() };
        // Some files have the configuration's own word for it.
        let own = format!("{name}.{key}");
        if metadata.iter().any(|(entry, _)| *entry == own) { own } else { gguf_name(self.family, name, key) }
    }

    fn fault(&self, key: &str, found: impl Into<String>, valid: impl Into<String>) -> Error {
        // An element is written after the key of its list.
        let (list, element) = key.find('[').map_or((key, ""), |at| key.split_at(at));
        fault(&self.config.path, self.name(list) + element, found, valid)
    }

    fn follow(&self, key: &str, followed: &mut Followed) {
        let name = self.name(key);
        // What a family implies is put in its place in a configuration, and is no entry of the file.
        match self.gguf {
            Some((_, metadata)) if !metadata.iter().any(|(entry, _)| *entry == name) => {
                followed.family = true
            }
            _ if followed.keys.contains(&name) => {}
            _ => followed.keys.push(name),
        }
    }

    fn shape(&self, layer: usize, mtp: bool, followed: &mut Followed) -> Result<Shape, Error> {
        let function = self.family.map_or(NO_FAMILY, |family| family.function);
        // Nemotron-NAS has one for each layer.
        let by_layer = format!("block_configs.{layer}.ffn.hidden_act");
        let mut found = None;
        for key in Some(by_layer.as_str()).filter(|_| !mtp).into_iter().chain(function.keys().iter().copied())
        {
            let Some(value) = self.field(key) else { continue };
            let shape = self.shape_named(function, key, value)?;
            match found {
                None => {
                    found = Some((key, shape));
                    match function {
                        Function::Named { .. } => self.follow(key, followed),
                        _ => followed.family = true,
                    }
                }
                Some((first, other)) if other != shape && key != by_layer && first != by_layer => {
                    let valid = format!("what {} says", self.name(first));
                    return Err(self.fault(key, format!("{value}, another function"), valid));
                }
                Some(_) => {}
            }
        }
        if let Some((_, shape)) = found {
            return Ok(shape);
        }
        let implied = self.family.and_then(Family::implied);
        followed.family = true;
        match (implied, function) {
            (Some(shape), _) => Ok(shape),
            (None, Function::Missing(what)) => Err(self.missing(what)),
            (None, _) => Err(self.unknown()),
        }
    }

    fn shape_named(&self, function: Function, key: &str, value: &Value) -> Result<Shape, Error> {
        let name = value.as_str().unwrap_or_default();
        let (known, valid) = match function {
            Function::Missing(what) => return Err(self.missing(what)),
            Function::Fixed { shape, names } => (
                names.contains(&name).then_some(shape),
                format!("{}, which the family has built in", names.join(" or ")),
            ),
            Function::Named { also, .. } => {
                let own = also.iter().find(|(own, _)| *own == name).map(|(_, shape)| *shape);
                (own.or_else(|| Shape::named(name)), NAMES.into())
            }
        };
        known.ok_or_else(|| self.fault(key, format!("{value}, which is not implemented"), valid))
    }

    /// What to call the model in a message: entry and value.
    fn who(&self) -> (String, String) {
        match self.gguf {
            Some((name, _)) => (ARCHITECTURE.into(), format!("\"{name}\"")),
            None => {
                let name = model_types(&self.config.value).next();
                ("model_type".into(), name.map_or_else(|| "missing".into(), |name| format!("\"{name}\"")))
            }
        }
    }

    fn missing(&self, what: &str) -> Error {
        let (key, found) = self.who();
        fault(
            &self.config.path,
            key,
            format!("{found}, whose MLPs are not implemented: {what}"),
            format!("one that is: {NAMES}"),
        )
    }

    fn unknown(&self) -> Error {
        let ((key, found), act) = (self.who(), self.name("hidden_act"));
        let family = if found == "missing" { "" } else { ", a family that is not known" };
        fault(
            &self.config.path,
            key,
            format!("{found}{family}, and no {act} says which activation its MLPs have"),
            format!("a known family, or a {act}: {NAMES}"),
        )
    }

    /// An entry of the language model; parts of a path are separated by dots.
    fn field(&self, key: &str) -> Option<&'c Value> {
        let (first, rest) = key.split_once('.').unwrap_or((key, ""));
        let value = model_field(&self.config.value, first)?;
        let path = rest.replace('.', "/");
        let value = if path.is_empty() { Some(value) } else { value.pointer(&format!("/{path}")) };
        value.filter(|value| !value.is_null())
    }

    /// An entry that may be null.
    fn entry(&self, key: &str) -> Option<&'c Value> {
        parts(&self.config.value).find_map(|part| part.get(key))
    }

    fn number(&self, keys: &[&str], usual: f32, followed: &mut Followed) -> Result<f32, Error> {
        let Some((key, value)) = keys.iter().find_map(|key| Some((*key, self.field(key)?))) else {
            followed.family = true;
            return Ok(usual);
        };
        self.follow(key, followed);
        let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
        number.ok_or_else(|| self.fault(key, value.to_string(), "a finite number"))
    }

    /// The limit of an MLP, with the entry that has it.
    fn limit(
        &self,
        layer: usize,
        kind: MlpKind,
        mtp: bool,
        followed: &mut Followed,
    ) -> Result<Option<(f32, String)>, Error> {
        let limits = self.family.map_or(&[][..], |family| family.limits);
        for limit in limits.iter().filter(|limit| limit.kinds.contains(&kind)) {
            if let Some(value) = self.entry(limit.key) {
                if limit.list && (mtp || self.is_beyond(layer)) {
                    followed.family = true;
                    return self.limit_in_mtp(limit, value, layer, mtp);
                }
                self.follow(limit.key, followed);
                return self.limit_in(limit, value, layer);
            }
            match if self.gguf.is_some() { limit.absent_in_gguf } else { limit.absent } {
                Absent::Next => {}
                Absent::NoLimit => {
                    followed.family = true;
                    return Ok(None);
                }
                Absent::Is(number) => {
                    followed.family = true;
                    return Ok(Some((number, limit.key.into())));
                }
                Absent::Refused => {
                    return Err(self.fault(limit.key, "missing", "a limit, which the family always has"));
                }
            }
        }
        Ok(None)
    }

    /// Whether a layer comes after those that the configuration counts: one that predicts further tokens.
    fn is_beyond(&self, layer: usize) -> bool {
        let count = self.field("num_hidden_layers").and_then(Value::as_u64);
        count.is_some_and(|count| layer as u64 >= count)
    }

    /// The limit of a layer that predicts further tokens, where the entry is about the others, one by one.
    fn limit_in_mtp(
        &self,
        limit: &Limit,
        value: &Value,
        layer: usize,
        mtp: bool,
    ) -> Result<Option<(f32, String)>, Error> {
        let own = value.get(layer).filter(|_| !mtp);
        if says_nothing(value) || (limit.in_mtp == Absent::NoLimit && own.is_none_or(says_nothing)) {
            return Ok(None);
        }
        let found = own.map_or_else(|| "one limit for each layer".into(), Value::to_string);
        let found =
            format!("{found}, which is not known to hold in layer {layer}, one that predicts further tokens");
        Err(self.fault(limit.key, found, "no limit"))
    }

    fn limit_in(&self, limit: &Limit, value: &Value, layer: usize) -> Result<Option<(f32, String)>, Error> {
        let (key, value) = match value {
            Value::Array(all) => {
                let key = format!("{}[{layer}]", limit.key);
                let short = || {
                    self.fault(
                        &key,
                        format!("missing: the list has {} numbers", all.len()),
                        "a number for each layer",
                    )
                };
                (key.clone(), all.get(layer).ok_or_else(short)?)
            }
            one => (limit.key.into(), one),
        };
        let is_none = |number: f64| number == 0.0 || (limit.negative && number < 0.0);
        if value.is_null() || value.as_f64().is_some_and(is_none) {
            return Ok(None);
        }
        let number =
            value.as_f64().map(|limit| limit as f32).filter(|limit| *limit > 0.0 && limit.is_finite());
        let number = number
            .ok_or_else(|| self.fault(&key, value.to_string(), "a positive number, or 0 for no limit"))?;
        Ok(Some((number, key)))
    }

    /// Refuses numbers that change the gates of a layer's MLPs, or what comes after the activation.
    pub(crate) fn check_neutrals(&self, layer: usize, after: bool) -> Result<(), Error> {
        let all = self.family.map_or(&[][..], |family| family.neutral);
        all.iter().filter(|n| n.after == after).try_for_each(|neutral| self.check_neutral(neutral, layer))
    }

    fn check_neutral(&self, neutral: &Neutral, layer: usize) -> Result<(), Error> {
        let at = neutral.at.unwrap_or(layer);
        let number = match self.field(neutral.key) {
            Some(Value::Array(all)) => match all.get(at) {
                Some(value) => value.as_f64(),
                None => {
                    let found = format!("missing: the list has {} numbers", all.len());
                    return Err(self.fault(
                        &format!("{}[{at}]", neutral.key),
                        found,
                        "a number for each layer",
                    ));
                }
            },
            Some(value) => value.as_f64(),
            None => Some(neutral.absent.get(at).copied().unwrap_or(neutral.neutral)),
        };
        if number == Some(neutral.neutral) {
            return Ok(());
        }
        let found = number.map_or_else(|| "no number".into(), |number| number.to_string());
        let found = format!("{found} for layer {layer}, which is not implemented");
        let valid = neutral.neutral.to_string();
        if neutral.after {
            // An activation that is asked for does not change it.
            let (file, key) = (self.config.path.clone(), format!("{}[{at}]", self.name(neutral.key)));
            return Err(Error::Config { file, key, found, valid });
        }
        Err(self.fault(neutral.key, found, valid))
    }

    /// Refuses the first entry that speaks of an activation and that nothing above follows.
    fn check_rest(&self, shape: Shape) -> Result<(), Error> {
        let followed = |key: &str| {
            let of_family = self.family.is_some_and(|family| family.explains(key));
            let of_shape = shape == Shape::Oai && OAI.iter().any(|(keys, _)| keys.contains(&key));
            let of_nobody = self.family.is_none() && NO_FAMILY.keys().contains(&key);
            of_family || of_shape || of_nobody
        };
        // Another name of the same function is no contradiction.
        let agrees = |value: &Value| {
            value.as_str().and_then(|name| Shape::named(&name.to_ascii_lowercase())) == Some(shape)
        };
        let open = |key: &str, value: &Value| speaks(key, value) && !says_nothing(value) && !agrees(value);
        for part in parts(&self.config.value).filter_map(Value::as_object) {
            if let Some((key, value)) = part.iter().find(|(key, value)| open(key, value) && !followed(key)) {
                return Err(self.not_understood(key, value));
            }
        }
        // What the language model's part keeps in objects of its own.
        let part = parts(&self.config.value).next().and_then(Value::as_object);
        for (name, value) in part.into_iter().flatten().filter(|(name, _)| !followed(name)) {
            let within = inner(name, value).into_iter().flatten();
            if let Some((key, value)) = within.into_iter().find(|(key, value)| open(key, value)) {
                return Err(self.not_understood(&format!("{name}.{key}"), value));
            }
        }
        Ok(())
    }

    fn not_understood(&self, key: &str, value: &Value) -> Error {
        let text = value.to_string();
        let text = if text.len() > 60 { "a longer value".into() } else { text };
        let (_, name) = self.who();
        let family = if self.family.is_some() {
            format!("family {name}")
        } else {
            "a family that is not known".into()
        };
        let found = format!("{text}, which is not understood in {family}");
        self.fault(key, found, "an entry that a row of the family explains, or none")
    }
}

impl Family {
    /// Whether a row says what an entry means, or that it means nothing for the MLPs.
    pub(crate) fn explains(&self, key: &str) -> bool {
        let of_function = self.function.keys().iter().any(|known| known.split('.').next() == Some(key));
        of_function
            || self.limits.iter().any(|limit| limit.key == key)
            || self.neutral.iter().any(|neutral| neutral.key == key)
            || self.ignored.contains(&key)
    }
}
