//! What went into the layers of a model while it ran: the file of `quantize --calibration`, as `dualgemm.calibrate` of the
//! Python package writes it.
//!
//! ```json
//! { "dtype": "bf16", "amax": { "model.layers.0.mlp.down_proj": 12.5 } }
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use dualgemm::formats::{FloatType, GlobalScale, Producer};
use serde::Deserialize;

use crate::report::counted;

/// Largest magnitudes by module.
#[derive(Debug)]
pub struct Calibration {
    path: PathBuf,
    held: Held,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Held {
    /// Type of the activations, in which llm-compressor divides.
    dtype: FloatType,
    amax: BTreeMap<String, f32>,
}

impl Calibration {
    /// Reads a file. Fails if it cannot be read, is something else, or holds a number that is not positive and finite.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read(path).with_context(|| path.display().to_string())?;
        let held: Held = serde_json::from_slice(&text)
            .with_context(|| format!("{}: is no calibration of dualgemm.calibrate", path.display()))?;
        let wrong = held.amax.iter().find(|(_, amax)| !(amax.is_finite() && **amax > 0.0));
        if let Some((module, amax)) = wrong {
            bail!("{}: {module}: amax is {amax}; a positive finite number is needed", path.display());
        }
        Ok(Self { path: path.into(), held })
    }

    /// The scale of what goes into a module, or into several by one weight, as the producer makes it: ModelOpt the multiplier amax / 2688 in f32, llm-compressor
    /// the divisor 2688 / amax, rounded in the type of the activations. llama.cpp makes none: GGUF takes ModelOpt's, as
    /// `convert` does. Fails if the file has no number for a module.
    pub fn input_scale(&self, modules: &[String], producer: Producer) -> anyhow::Result<GlobalScale> {
        let (mut amax, mut module) = (0.0, "");
        for name in modules {
            let Some(&found) = self.held.amax.get(name) else {
                let (path, count) = (self.path.display(), self.held.amax.len());
                bail!(
                    "{path}: has no amax of {name}, which is quantized; it has those of {}",
                    counted(count, "module")
                );
            };
            if found > amax {
                (amax, module) = (found, name);
            }
        }
        let producer = if producer == Producer::Ggml { Producer::ModelOpt } else { producer };
        // Producers take a tensor of zeros for one whose scale is zero.
        if !(amax / 2688.0).is_normal() {
            let path = self.path.display();
            bail!(
                "{path}: {module}: amax is {amax:e}, whose 2688th part is no normal f32; at least 3.2e-35 is needed"
            );
        }
        Ok(producer.global_scale(amax, self.held.dtype))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> anyhow::Result<Calibration> {
        let path = std::env::temp_dir().join(format!("dualgemm-calibration-{}.json", text.len()));
        std::fs::write(&path, text).unwrap();
        Calibration::read(&path)
    }

    #[test]
    fn each_producer_divides_its_own_way() {
        let c = read(r#"{"dtype": "bf16", "amax": {"a.q_proj": 12.5}}"#).unwrap();
        let of = |c: &Calibration, modules: &[&str], producer| {
            c.input_scale(&modules.iter().map(|m| m.to_string()).collect::<Vec<_>>(), producer)
        };
        let scale = |producer| of(&c, &["a.q_proj"], producer).unwrap();
        assert_eq!(scale(Producer::ModelOpt), GlobalScale::multiplier(12.5 / 2688.0));
        assert_eq!(scale(Producer::Ggml), scale(Producer::ModelOpt));
        // One weight for several: the largest.
        let both =
            read(r#"{"dtype": "bf16", "amax": {"a.0.up": 2.0, "a.1.up": 12.5, "a.2.up": 1.0}}"#).unwrap();
        let all = of(&both, &["a.0.up", "a.1.up", "a.2.up"], Producer::ModelOpt);
        assert_eq!(all.unwrap(), GlobalScale::multiplier(12.5 / 2688.0));
        // 1 / 12.5 has no bf16; with its nearest, 0.080078, it is 215.25, whose nearest is 215.
        assert_eq!(scale(Producer::CompressedTensors), GlobalScale::divisor(215.0));
        let error = of(&c, &["a.q_proj", "a.k_proj"], Producer::ModelOpt).unwrap_err().to_string();
        assert!(
            error.ends_with("has no amax of a.k_proj, which is quantized; it has those of 1 module"),
            "{error}"
        );
        let tiny = read(r#"{"dtype": "bf16", "amax": {"a.q_proj": 1e-42}}"#).unwrap();
        for producer in [Producer::ModelOpt, Producer::CompressedTensors] {
            let error = of(&tiny, &["a.q_proj"], producer).unwrap_err().to_string();
            assert!(error.contains("a.q_proj: amax is 1e-42, whose 2688th part"), "{error}");
        }
    }

    #[test]
    fn other_files_and_numbers_are_refused() {
        for (text, why) in [
            (r#"{"dtype": "bf16", "amax": {"a": 0.0}}"#, "a: amax is 0; a positive finite number"),
            (r#"{"dtype": "f64", "amax": {"a": 1}}"#, "is no calibration of dualgemm.calibrate"),
            ("[]", "is no calibration of dualgemm.calibrate"),
        ] {
            let error = format!("{:#}", read(text).unwrap_err());
            assert!(error.contains(why), "{error}");
        }
    }
}
