//! Which format a configuration promises for which module: ordered rules, first match wins.

use std::path::{Path, PathBuf};

use dualgemm_formats::{BlockFormat, ScaleLayout};
use fancy_regex::Regex;

use crate::convention::Role;
use crate::{Error, NibbleOrder};

/// What the weights of a module are.
#[derive(Debug, Clone)]
pub(crate) enum Weights {
    /// 4-bit blocks.
    Blocks(BlockFormat),
    /// Left in float; says which part of the configuration decided so.
    Float(String),
    /// Quantized in a way that is not a 4-bit block format.
    Other(String),
    /// The configuration says something of them that cannot be used, which concerns no other module.
    Refused(Box<Error>),
    /// The storage type of the tensor says it (GGUF).
    ByType,
}

/// Whether a module stores the tensor scale of its activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Input {
    /// Activations are nvfp4 with a stored scale; without it the file is faulty.
    Required,
    /// Used if it is there.
    Optional,
    /// Activations are not nvfp4: a scale that is there means something else.
    Ignored,
}

#[derive(Debug, Clone)]
pub(crate) struct Scheme {
    pub(crate) weights: Weights,
    pub(crate) input: Input,
    pub(crate) scale_layout: ScaleLayout,
    pub(crate) nibble_order: NibbleOrder,
    /// Whether a weight without a tensor scale is a fault, where the convention does not say so of all nvfp4.
    pub(crate) needs_tensor_scale: bool,
    /// Endings of tensor names, where the convention has several sets of them.
    pub(crate) names: Option<&'static [(&'static str, Role)]>,
}

impl Scheme {
    pub(crate) fn blocks(format: BlockFormat, input: Input) -> Self {
        Self::new(Weights::Blocks(format), input)
    }

    pub(crate) fn float(why: impl Into<String>) -> Self {
        Self::new(Weights::Float(why.into()), Input::Ignored)
    }

    pub(crate) fn other(what: impl Into<String>) -> Self {
        Self::new(Weights::Other(what.into()), Input::Ignored)
    }

    pub(crate) fn by_type() -> Self {
        Self::new(Weights::ByType, Input::Optional)
    }

    /// What is said of a module, or why it cannot be used, once that module is asked for.
    pub(crate) fn or_refused(found: Result<Self, Error>) -> Self {
        found.unwrap_or_else(|e| Self::new(Weights::Refused(Box::new(e)), Input::Ignored))
    }

    fn new(weights: Weights, input: Input) -> Self {
        Self {
            weights,
            input,
            scale_layout: ScaleLayout::Linear,
            nibble_order: NibbleOrder::LoHi,
            needs_tensor_scale: false,
            names: None,
        }
    }
}

/// Which modules a rule is for.
#[derive(Debug)]
pub(crate) enum Pattern {
    /// That module and everything below it.
    Under(String),
    /// Shell wildcards `*` and `?`, against the module or one above it (ModelOpt).
    Glob(String),
    /// Python's `re.match`: a regular expression anchored at the start only (compressed-tensors `re:`).
    Regex(Box<Regex>),
    /// Every linear layer.
    Linear,
    /// What the first matches and none of the others does.
    But(Box<Pattern>, Vec<Pattern>),
}

impl Pattern {
    /// A compressed-tensors target: `re:…`, a module name, or the class `Linear`.
    pub(crate) fn target(target: &str, file: &Path, key: &str) -> Result<Self, Error> {
        if let Some(pattern) = target.strip_prefix("re:") {
            let regex = Regex::new(&format!("^(?:{pattern})")).map_err(|e| Error::Config {
                file: file.into(),
                key: key.into(),
                found: format!("`{target}` ({e})"),
                valid: "`re:` and a regular expression".into(),
            })?;
            return Ok(Self::Regex(Box::new(regex)));
        }
        Ok(if target == "Linear" { Self::Linear } else { Self::Under(target.into()) })
    }

    fn matches(&self, module: &str) -> bool {
        match self {
            Self::Under(name) => module
                .strip_prefix(name.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.')),
            Self::Glob(glob) => ancestors(module).any(|m| glob_matches(glob, m)),
            // A pattern that backtracks without end counts as no match; the limit is the library's.
            Self::Regex(regex) => regex.is_match(module).unwrap_or(false),
            Self::Linear => true,
            Self::But(all, except) => all.matches(module) && !except.iter().any(|p| p.matches(module)),
        }
    }
}

/// The module, then every module above it.
pub(crate) fn ancestors(module: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(module), |m| m.rfind('.').map(|dot| &m[..dot]))
}

fn glob_matches(glob: &str, text: &str) -> bool {
    let (glob, text) = (glob.as_bytes(), text.as_bytes());
    let (mut g, mut t, mut star) = (0, 0, None);
    while t < text.len() {
        match glob.get(g) {
            Some(b'*') => {
                star = Some((g, t));
                g += 1;
            }
            Some(&c) if c == b'?' || c == text[t] => {
                g += 1;
                t += 1;
            }
            // Give the last star one more byte.
            _ => match star {
                Some((at, taken)) => {
                    star = Some((at, taken + 1));
                    g = at + 1;
                    t = taken + 1;
                }
                None => return false,
            },
        }
    }
    glob[g..].iter().all(|&c| c == b'*')
}

/// What a model does to the inputs or outputs of modules at run time.
#[derive(Debug)]
pub(crate) struct Transform {
    pub(crate) targets: Vec<Pattern>,
    pub(crate) ignore: Vec<Pattern>,
    pub(crate) what: String,
}

/// Rules in order of precedence, and what holds where none matches.
#[derive(Debug)]
pub(crate) struct Schemes {
    rules: Vec<(Pattern, Scheme)>,
    otherwise: Scheme,
    transforms: Vec<Transform>,
    /// What else is said of the same modules, which has to be usable too, and the same.
    repeated: Vec<Schemes>,
    /// The file that says so, where several do.
    file: PathBuf,
}

impl Schemes {
    pub(crate) fn new(rules: Vec<(Pattern, Scheme)>, otherwise: Scheme) -> Self {
        Self { rules, otherwise, transforms: Vec::new(), repeated: Vec::new(), file: PathBuf::new() }
    }

    pub(crate) fn with_transforms(self, transforms: Vec<Transform>) -> Self {
        Self { transforms, ..self }
    }

    pub(crate) fn with_repeated(self, repeated: Vec<Schemes>) -> Self {
        Self { repeated, ..self }
    }

    pub(crate) fn said_by(self, file: &Path) -> Self {
        Self { file: file.into(), ..self }
    }

    /// Why a module in 4-bit blocks cannot be used: another file says something else of it. One that says nothing of it,
    /// as a list of layers without it does, is less detailed.
    pub(crate) fn contradiction(&self, module: &str) -> Option<Error> {
        let Weights::Blocks(format) = self.first(module).weights else { return None };
        self.repeated.iter().find_map(|other| {
            let named = other.rules.iter().any(|(p, _)| p.matches(module));
            let found = match &other.first(module).weights {
                Weights::Blocks(same) if *same == format => return None,
                Weights::Blocks(another) => another.to_string(),
                Weights::Float(why) if named => format!("left in floats by {why}"),
                Weights::Other(what) => what.clone(),
                Weights::Float(_) | Weights::Refused(_) | Weights::ByType => return None,
            };
            Some(Error::Config {
                file: other.file.clone(),
                key: format!("what is said of `{module}`"),
                found,
                valid: format!("{format}, as {} says", self.file.display()),
            })
        })
    }

    /// What says that a module's inputs or outputs are transformed, if anything does.
    pub(crate) fn transform(&self, module: &str) -> Option<&str> {
        let any = |patterns: &[Pattern]| patterns.iter().any(|p| p.matches(module));
        self.transforms.iter().find(|t| any(&t.targets) && !any(&t.ignore)).map(|t| t.what.as_str())
    }

    pub(crate) fn of(&self, module: &str) -> &Scheme {
        let scheme = self.first(module);
        let refused = |s: &&Scheme| matches!(s.weights, Weights::Refused(_));
        match scheme.weights {
            Weights::Blocks(_) => {
                self.repeated.iter().map(|s| s.first(module)).find(refused).unwrap_or(scheme)
            }
            _ => scheme,
        }
    }

    fn first(&self, module: &str) -> &Scheme {
        self.rules.iter().find(|(p, _)| p.matches(module)).map_or(&self.otherwise, |(_, scheme)| scheme)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_like_fnmatch() {
        for (glob, text, expected) in [
            ("lm_head", "lm_head", true),
            ("model.layers.0*", "model.layers.0.mlp", true),
            ("model.layers.0*", "model.layers.10", false),
            ("*self_attn*", "model.layers.3.self_attn.q_proj", true),
            ("*.mlp.g?te", "a.mlp.gate", true),
            ("*.mlp.gate", "a.mlp.gate_proj", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("", "", true),
            ("*", "", true),
        ] {
            assert_eq!(glob_matches(glob, text), expected, "{glob} {text}");
        }
    }

    #[test]
    fn regex_targets_are_anchored_at_the_start_only() {
        let p = |t| Pattern::target(t, Path::new("config.json"), "targets").unwrap();
        assert!(p(r"re:model\.layers\.1").matches("model.layers.12.mlp"));
        assert!(!p("re:layers").matches("model.layers.1"));
        assert!(p(r"re:.*\.down_proj$").matches("model.layers.1.mlp.down_proj"));
        assert!(p(r"re:^(?!.*attn).*proj").matches("model.layers.1.mlp.up_proj"), "lookahead");
        assert!(!p(r"re:^(?!.*attn).*proj").matches("model.layers.1.self_attn.q_proj"));
        assert!(p("model.layers.1").matches("model.layers.1.mlp"));
        assert!(!p("model.layers.1").matches("model.layers.12"));
        let e = Pattern::target("re:(", Path::new("config.json"), "group_0.targets").unwrap_err();
        assert!(e.to_string().starts_with("config.json: group_0.targets is `re:(` ("), "{e}");
    }
}
