//! Arguments, routings and tensors that no operation takes.

use std::path::PathBuf;

use safetensors::Dtype;

use super::{drawn, mixture, mixture_of, routing};
use crate::common::{Tensors, arg, refusal, tensors, write};

/// A mixture of experts 0, 1 and 3 with a shared one, and where C would be written.
struct Refusing {
    dir: tempfile::TempDir,
    checkpoint: PathBuf,
}

impl Refusing {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = mixture(dir.path(), &[0, 1, 3], true);
        Self { dir, checkpoint }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What it refuses is one line with these parts, and leaves no file.
    #[track_caller]
    fn refused(&self, more: &[&str], want: &[&str]) {
        let out = self.file("c.safetensors");
        let args = ["run", arg(&self.checkpoint), "--activation", "silu", "--m", "2", "--output", arg(&out)];
        let stderr = refusal(&[&args[..], more].concat(), 2).replace(arg(self.dir.path()), "{dir}");
        assert!(want.iter().all(|want| stderr.contains(want)), "{more:?}: {stderr}");
        assert!(!out.exists(), "{more:?}");
    }

    #[track_caller]
    fn moe(&self, more: &[&str], want: &[&str]) {
        self.refused(&[&["--op", "moe"], more].concat(), want);
    }
}

#[test]
fn arguments_and_routings_that_a_mixture_does_not_take_are_refused() {
    let this = Refusing::new();
    let file = this.file("r.safetensors");
    let moe = |more: &[&str], want: &[&str]| this.moe(more, want);
    moe(&[], &["--top-k: is needed; the checkpoint has none of num_experts_per_tok"]);
    moe(&["--top-k", "4"], &["--top-k: is 4; there are 3 experts"]);
    moe(&["--top-k", "2", "--expert", "1"], &["--op moe: is of all experts"]);
    moe(&["--top-k", "2", "--out-dtype", "nvfp4"], &["C of the mixture is nvfp4", "f32, f16 or bf16"]);
    moe(&["--top-k", "2", "--between", "nvfp4"], &["--between nvfp4: ", "down_proj", "has no input scale"]);
    moe(
        &["--top-k", "2", "--quantize", "dynamic", "--router-weights", "input"],
        &["--router-weights input: multiplies A, which is nvfp4"],
    );
    let given = ["--routing", arg(&file)];
    routing(&file, &[0, 1, 3, 4], &[0.5; 4], [2, 2], true);
    moe(&given, &["{dir}/r.safetensors: topk_ids[1, 1] is 4", "numbers below 4"]);
    routing(&file, &[0, 1, -2, 1], &[0.5; 4], [2, 2], true);
    moe(&given, &["{dir}/r.safetensors: topk_ids[1, 0] is -2", "-1 for none"]);
    routing(&file, &[0, 1, 2, 3], &[0.5; 4], [2, 2], false);
    moe(&given, &["topk_ids[1, 0] is 2, where the layer has 3 others; -1 skips one"]);
    routing(&file, &[0, 1, 3, i64::from(u32::MAX) + 2], &[0.5; 4], [2, 2], true);
    moe(&given, &["topk_ids[1, 1] is "]);
    routing(&file, &[0, 1, 3, 0], &[0.5, 0.5, f32::NAN, 0.5], [2, 2], true);
    moe(&given, &["topk_weights[1, 0] is NaN", "finite numbers"]);
    routing(&file, &[0, 1, 3, 0], &[0.5; 4], [4, 1], true);
    moe(&given, &["topk_ids is [4, 1]; [2, k] with k from 1 is needed"]);
    routing(&file, &[0, 1, 3, 0], &[0.5; 4], [2, 2], true);
    moe(&[&given[..], &["--top-k", "1"]].concat(), &["--top-k: is 1; ", "has 2 experts a token"]);
    moe(&["--routing", arg(&this.checkpoint)], &["has no tensor topk_ids"]);
    this.refused(
        &["--op", "mlp"],
        &["no dense MLP: --expert 0 to 3 for one, --shared-expert for the shared one, --op moe for all"],
    );
    this.refused(
        &["--op", "linear", "--module", "lm_heat"],
        &["lm_heat: there is no such module in", "lm_head"],
    );
    // What the configuration says, which the user may repeat. Beside one the metadata does not count.
    let modelopt = ["--convention", "modelopt"];
    std::fs::write(this.file("config.json"), r#"{"num_experts_per_tok": 2}"#).unwrap();
    let asked = [&modelopt[..], &["--top-k", "1"]].concat();
    moe(&asked, &["--top-k: is 1; num_experts_per_tok of the checkpoint is 2"]);
    std::fs::write(this.file("config.json"), r#"{"num_experts_per_tok": 0}"#).unwrap();
    moe(&modelopt, &["config.json: num_experts_per_tok is 0; valid is a positive integer"]);
}

#[test]
fn tensors_that_a_mixture_does_not_take_are_refused() {
    let this = Refusing::new();
    let checkpoint = &this.checkpoint;
    let (whole, floats) = (tensors(checkpoint), tensors(&this.file("floats.safetensors")));
    // The metadata, which told the convention, is lost on the way.
    let rewritten = |tensors: &Tensors, want: &[&str]| {
        write(checkpoint, tensors);
        this.moe(&["--convention", "modelopt", "--top-k", "2"], want);
    };
    // A shared expert in 16 bits, and what else may stand there: none of it is left out silently.
    let mut shared: Tensors = whole.iter().filter(|t| !t.0.contains("shared")).cloned().collect();
    shared.extend(floats.iter().filter(|t| t.0.contains("shared")).cloned());
    rewritten(
        &shared,
        &["shared_experts: is the shared expert of layer 5, and not in 4 bits", "--routed-only"],
    );
    shared.retain(|t| !t.0.contains("shared") || t.0.contains("shared_experts.down"));
    rewritten(&shared, &["shared_experts", "--routed-only"]);
    let gate = |name: &str| {
        let mut gated = whole.clone();
        gated.push((format!("{name}.weight"), Dtype::BF16, vec![1, 48], drawn(5, 48)));
        gated
    };
    rewritten(&gate("model.layers.5.mlp.shared_gate"), &["shared_gate.weight: multiplies the shared expert"]);
    let renamed = |tensors: &Tensors, from: &str, to: &str| -> Tensors {
        tensors.iter().map(|t| (t.0.replace(from, to), t.1, t.2.clone(), t.3.clone())).collect()
    };
    let huge = renamed(&whole, "experts.3.", "experts.2147483653.");
    rewritten(&huge, &["has an expert of number 2147483653; at most 65535 is taken"]);
    // The down projection of another expert has its shape in the place of gate and up: N = 48, K = 64.
    let other = mixture_of(this.dir.path(), &[1], [64, 64, 48]);
    let mut odd: Tensors = whole.iter().filter(|t| !t.0.contains("experts.1.")).cloned().collect();
    odd.extend(tensors(&other).into_iter().filter(|t| t.0.contains("experts.1.")));
    rewritten(
        &odd,
        &["experts of a layer have one shape and format", "experts.1.gate_proj: is nvfp4 [64, 64]"],
    );
    // An expert that lacks its down projection.
    let kept: Tensors = whole.iter().filter(|t| !t.0.contains("experts.1.down_proj")).cloned().collect();
    rewritten(&kept, &["the down projection of expert 1", "is missing"]);
}

/// It would be a number in nvfp4 between the products.
#[test]
fn nan_in_a_is_refused_where_nvfp4_is_between() {
    let this = Refusing::new();
    let a = this.file("a.safetensors");
    let mut values = [1f32; 48];
    values[5] = f32::NAN;
    let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
    write(&a, &[("x", Dtype::F32, [1, 48], bytes)]);
    let run = ["run", arg(&this.checkpoint), "--activation", "silu", "--op", "mlp", "--expert", "1"];
    let stderr = refusal(&[&run[..], &["--between", "nvfp4", "--input", arg(&a)]].concat(), 2);
    assert!(stderr.contains("A: element [0,5] is NaN; --between nvfp4 has no such number"), "{stderr}");
}
