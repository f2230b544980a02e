//! Any JSON object as a configuration: its family's reader returns, and GGUF's metadata that carry it state the same
//! activation or refuse. Seeds: the corpus of configurations.

#![no_main]

use std::path::Path;

use dualgemm_checkpoint::write::config_to_gguf;
use dualgemm_checkpoint::{JsonFile, MlpKind, Stated};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(bytes) else { return };
    if !value.is_object() {
        return;
    }
    let config = JsonFile { path: "config.json".into(), value };
    let (_, metadata) = config_to_gguf(Some(&config.value), "unknown");
    for layer in 0..3 {
        for kind in [MlpKind::Dense, MlpKind::Shared, MlpKind::Experts] {
            let here = Stated::of_config(&config, layer, kind);
            let there = Stated::of_gguf(Path::new("m.gguf"), &metadata, layer, kind);
            if let (Ok(here), Ok(there)) = (&here, &there) {
                assert_eq!(here.activation, there.activation, "{here}, in GGUF {there}");
            }
            if let Ok(here) = here {
                assert!(here.activation.check().is_ok(), "{here}");
            }
        }
    }
});
