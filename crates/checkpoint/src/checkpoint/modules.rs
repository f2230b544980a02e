//! The linear layers that there are, by name: attention projections, down projections, output heads.

use super::Checkpoint;
use crate::Error;
use crate::error::list;
use crate::linear::{Kept, kept};

/// Names that are listed where a module is not there.
const NEAR: usize = 4;

/// A linear layer of a checkpoint, quantized or not.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ModuleInfo {
    /// Its name.
    pub name: String,
    /// Block format of 4-bit weights, or the type of the stored tensor; where 4-bit weights cannot be used, why.
    pub format: String,
    /// `[out, in]`, with the experts first where all are one tensor.
    pub shape: Vec<usize>,
}

impl Checkpoint {
    /// Every linear layer in the order of their names: no embeddings, norms and convolutions.
    pub fn modules(&self) -> Vec<ModuleInfo> {
        self.modules_but(|kept| {
            matches!(kept, Some(Kept::Embedding | Kept::Norm | Kept::Convolution | Kept::Modality))
        })
    }

    /// The linear layers of pictures and sound, which [`modules`](Self::modules) leaves out.
    pub fn modality_modules(&self) -> Vec<ModuleInfo> {
        self.modules_but(|kept| !matches!(kept, Some(Kept::Modality)))
    }

    fn modules_but(&self, apart: impl Fn(Option<Kept>) -> bool) -> Vec<ModuleInfo> {
        let names = self.index.modules.keys().filter(|name| !apart(kept(name)) && self.is_within(name));
        names.filter_map(|name| self.module_info(name)).collect()
    }

    fn module_info(&self, name: &str) -> Option<ModuleInfo> {
        let weight = self.weight(name).filter(|weight| weight.shape.len() >= 2)?;
        let (format, shape) = if self.is_packed_module(name) {
            match self.stored(name) {
                Ok(stored) => {
                    let shape = stored.experts.into_iter().chain([stored.rows, stored.k]).collect();
                    (stored.format.to_string(), shape)
                }
                Err(error) => (error.to_string(), weight.shape.to_vec()),
            }
        } else {
            (weight.dtype.to_string().to_lowercase(), weight.shape.to_vec())
        };
        Some(ModuleInfo { name: name.into(), format, shape })
    }

    /// What is said of a name that no module has: which names are most like it.
    pub(crate) fn no_module(&self, module: &str) -> Error {
        let common = |a: &mut dyn Iterator<Item = u8>, b: &mut dyn Iterator<Item = u8>| {
            a.zip(b).take_while(|(a, b)| a == b).count()
        };
        let alike = |name: &str| {
            let from_start = common(&mut module.bytes(), &mut name.bytes());
            from_start + common(&mut module.bytes().rev(), &mut name.bytes().rev())
        };
        let mut near: Vec<String> = self.modules().into_iter().map(|module| module.name).collect();
        near.sort_by_key(|name| std::cmp::Reverse(alike(name)));
        Error::NoModule {
            file: self.files.root().into(),
            module: module.into(),
            near: if near.is_empty() { "none".into() } else { list(near.iter().take(NEAR)) },
        }
    }
}
