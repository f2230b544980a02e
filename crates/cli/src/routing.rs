//! Which experts each token goes to, and their weights: read from a file or drawn with a seed.

use std::path::Path;

use anyhow::{Context as _, bail};
use dualgemm::checkpoint::{Dtype, TensorFiles, TensorView};
use dualgemm::gemm::Routing;
use dualgemm_bench::inputs::Inputs;

use crate::computation::Routed;
use crate::report::counted;

const IDS: &str = "topk_ids";
const WEIGHTS: &str = "topk_weights";

/// `[tokens, top_k]` of both.
#[derive(Debug, Clone, PartialEq)]
pub struct OwnedRouting {
    ids: Vec<i32>,
    weights: Vec<f32>,
    /// Experts that a token goes to, ascending; the first one of all if none does.
    used: Vec<usize>,
    /// The same choices by places in that list.
    places: Vec<i32>,
    /// Experts of each token.
    pub top_k: usize,
    /// Where it comes from, for people.
    pub origin: String,
}

impl OwnedRouting {
    fn new(ids: Vec<i32>, weights: Vec<f32>, experts: &[usize], (top_k, origin): (usize, String)) -> Self {
        let mut used: Vec<usize> = ids.iter().filter_map(|&id| usize::try_from(id).ok()).collect();
        used.sort_unstable();
        used.dedup();
        let place = |id: &i32| {
            let place = usize::try_from(*id).ok().and_then(|id| used.binary_search(&id).ok());
            place.map_or(-1, |place| place as i32)
        };
        let places = ids.iter().map(place).collect();
        if used.is_empty() {
            used.extend(experts.first());
        }
        Self { ids, weights, used, places, top_k, origin }
    }

    /// For references: experts by their numbers.
    pub fn as_ref(&self) -> Routing<'_> {
        Routing { ids: &self.ids, weights: &self.weights }
    }

    /// For kernels: experts by their places among those that are used.
    pub fn places(&self) -> Routing<'_> {
        Routing { ids: &self.places, weights: &self.weights }
    }

    /// The experts that have to be there.
    pub fn used(&self) -> &[usize] {
        &self.used
    }

    /// Rows and experts that it comes to.
    pub fn routed(&self) -> Routed {
        Routed::of(self.as_ref())
    }

    /// Whether a token goes to an expert.
    pub fn names(&self, expert: usize) -> bool {
        self.used.binary_search(&expert).is_ok()
    }

    /// Draws for this many tokens from these experts.
    pub fn seeded(tokens: usize, experts: &[usize], top_k: usize, seed: u64) -> anyhow::Result<Self> {
        if top_k > experts.len() {
            bail!("--top-k: is {top_k}; there are {}", counted(experts.len(), "expert"));
        }
        let numbers: Vec<i32> = experts.iter().filter_map(|&expert| i32::try_from(expert).ok()).collect();
        let (ids, weights) = Inputs::seeded(seed).routing(tokens, &numbers, top_k);
        let origin = format!("{} a token, drawn with seed {seed}", counted(top_k, "expert"));
        Ok(Self::new(ids, weights, experts, (top_k, origin)))
    }

    /// Reads one for this many tokens and these experts.
    pub fn read(path: &Path, tokens: usize, experts: &[usize], top_k: Option<usize>) -> anyhow::Result<Self> {
        let files = TensorFiles::open(path)?;
        let tensor = |name: &str| {
            let found = files.get(name).with_context(|| {
                format!("{}: has no tensor {name}; {IDS} and {WEIGHTS} are needed", path.display())
            })?;
            let [rows, top_k] = *found.shape else {
                bail!("{}: {name} is {:?}; [M, k] is needed", path.display(), found.shape)
            };
            if rows != tokens || top_k == 0 {
                bail!(
                    "{}: {name} is [{rows}, {top_k}]; [{tokens}, k] with k from 1 is needed",
                    path.display()
                );
            }
            Ok((found, top_k))
        };
        let ((ids, in_file), (weights, of_weights)) = (tensor(IDS)?, tensor(WEIGHTS)?);
        if in_file != of_weights {
            bail!("{}: {IDS} is [M, {in_file}] and {WEIGHTS} [M, {of_weights}]", path.display());
        }
        if let Some(asked) = top_k.filter(|&asked| asked != in_file) {
            bail!("--top-k: is {asked}; {} has {} a token", path.display(), counted(in_file, "expert"));
        }
        let ids = numbers(&ids, path)?;
        if weights.dtype != Dtype::F32 {
            bail!("{}: {WEIGHTS} is {}; F32 is needed", path.display(), weights.dtype);
        }
        let kept = ids.iter().map(|&id| i32::try_from(id).unwrap_or(i32::MIN)).collect();
        let origin = (in_file, format!("{} a token, from {}", counted(in_file, "expert"), path.display()));
        let this = Self::new(kept, weights.to_f32("the weights of a router")?, experts, origin);
        let beyond = experts.last().map_or(0, |last| last + 1);
        this.as_ref().check(tokens, in_file, beyond).with_context(|| path.display().to_string())?;
        let missing = |&(_, &id): &(usize, &i64)| {
            usize::try_from(id).is_ok_and(|id| experts.binary_search(&id).is_err())
        };
        if let Some((at, id)) = ids.iter().enumerate().find(missing) {
            bail!(
                "{}: {IDS}[{}, {}] is {id}, where the layer has {} others; -1 skips one",
                path.display(),
                at / in_file,
                at % in_file,
                experts.len()
            );
        }
        Ok(this)
    }
}

/// Integers of 32 or 64 bits.
fn numbers(view: &TensorView<'_>, path: &Path) -> anyhow::Result<Vec<i64>> {
    Ok(match view.dtype {
        Dtype::I32 => {
            view.bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect()
        }
        Dtype::I64 => view.bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
        other => bail!("{}: {} is {other}; I32 or I64 is needed", path.display(), view.name),
    })
}
