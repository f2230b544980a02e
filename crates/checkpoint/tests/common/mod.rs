//! Synthetic checkpoints for the tests: tensors with reproducible bytes, written as a producer would.

#![allow(dead_code, reason = "every test binary uses its own part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use dualgemm_checkpoint::gguf::{GgufValue, write_to};
use dualgemm_checkpoint::safetensors::serialize;
use dualgemm_checkpoint::validate::Finding;
use dualgemm_checkpoint::{
    Checkpoint, Dtype, Error, LinearSource, OpenOptions, TensorData, TensorOut, Which,
};
use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{GateUp, Linear};
use serde_json::{Value, json};

/// The real checkpoints.
pub fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/smollm2-135m-layer14").join(name)
}

/// Reproducible bytes (an xorshift generator).
pub struct Bytes(u64);

impl Bytes {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn codes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.next() >> 24) as u8).collect()
    }

    /// Healthy scale bytes of both formats.
    pub fn scales(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| 0x28 + (self.next() >> 24) as u8 % 0x30).collect()
    }
}

/// A weight as bytes: dense codes and linear scales.
#[derive(Clone)]
pub struct Weight {
    pub rows: usize,
    pub k: usize,
    pub block: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
}

impl Weight {
    pub fn new(seed: u64, rows: usize, k: usize) -> Self {
        Self::with_block(seed, rows, k, 16)
    }

    pub fn with_block(seed: u64, rows: usize, k: usize, block: usize) -> Self {
        let mut b = Bytes::new(seed);
        Self { rows, k, block, codes: b.codes(rows * k / 2), scales: b.scales(rows * k / block) }
    }

    /// What a matrix holds.
    pub fn of(m: &QuantizedMatrix<'_>) -> Self {
        let (codes, scales) = m.dense_rows(0..m.rows());
        Self { rows: m.rows(), k: m.k(), block: m.format().block_len(), codes, scales }
    }

    /// The same as a matrix in nvfp4, under this tensor scale.
    pub fn matrix(&self, name: &str, scale: f32) -> QuantizedMatrix<'static> {
        let (codes, scales) = (self.codes.clone(), self.scales.clone());
        let (format, layout, scale) =
            (BlockFormat::Nvfp4, ScaleLayout::Linear, GlobalScale::multiplier(scale));
        QuantizedMatrix::new(name.to_owned(), format, self.rows, self.k, codes, scales, layout, scale)
            .unwrap()
    }

    pub fn swizzled(&self) -> Vec<u8> {
        ScaleLayout::Linear.convert(&self.scales, ScaleLayout::Sf128x4, self.rows, self.k / self.block)
    }

    /// Rows picked from this weight.
    pub fn rows_at(&self, rows: impl IntoIterator<Item = usize>) -> Self {
        let (cb, sb) = (self.k / 2, self.k / self.block);
        let rows: Vec<usize> = rows.into_iter().collect();
        let pick =
            |all: &[u8], len: usize| rows.iter().flat_map(|r| all[r * len..(r + 1) * len].to_vec()).collect();
        Self {
            rows: rows.len(),
            codes: pick(&self.codes, cb),
            scales: pick(&self.scales, sb),
            ..self.clone()
        }
    }

    pub fn stacked(&self, below: &Self) -> Self {
        let mut out = self.clone();
        out.rows += below.rows;
        out.codes.extend(&below.codes);
        out.scales.extend(&below.scales);
        out
    }

    /// That a matrix read from a file holds exactly these codes and scales.
    #[track_caller]
    pub fn assert_is(&self, m: &QuantizedMatrix<'_>) {
        assert_eq!((m.rows(), m.k()), (self.rows, self.k), "{}", m.name());
        let (codes, scales) = m.dense_rows(0..m.rows());
        assert!(codes == self.codes, "codes of {} differ", m.name());
        assert!(scales == self.scales, "scales of {} differ", m.name());
    }
}

/// That a layer, and runs of its features that start and end at blocks, atoms and periods and beside them, are these.
#[track_caller]
pub fn assert_runs(source: &LinearSource<'_>, w: &Weight) {
    let n = w.rows;
    for rows in [0..n, 0..1, 7..33, 64..128, 96..n, n - 1..n] {
        if rows.start >= rows.end || rows.end > n {
            continue;
        }
        let part = source.features(rows.clone()).unwrap();
        let (name, scale) = (part.weight.name(), part.weight.global_scale());
        assert_eq!((name, scale), (&*source.name(), source.tensor_scale));
        assert_eq!(part.bias.as_deref(), source.bias.as_ref().map(|bias| &bias[rows.clone()]));
        w.rows_at(rows).assert_is(part.weight.blocks().unwrap());
    }
    assert!(source.features(3..3).is_err(), "no features are no matrix");
}

/// A checkpoint directory in the making.
#[derive(Default)]
pub struct Fixture {
    pub tensors: Vec<TensorOut<'static>>,
    pub metadata: BTreeMap<String, String>,
    pub config: Option<Value>,
    pub hf_quant_config: Option<Value>,
}

impl Fixture {
    pub fn with(config: Value) -> Self {
        Self { config: Some(config), ..Self::default() }
    }

    pub fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> &mut Self {
        self.tensors.push(TensorOut::new(name, dtype, shape, bytes));
        self
    }

    pub fn f32(&mut self, name: &str, shape: &[usize], values: &[f32]) -> &mut Self {
        self.add(name, Dtype::F32, shape, values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn remove(&mut self, name: &str) -> &mut Self {
        let before = self.tensors.len();
        self.tensors.retain(|t| t.name != name);
        assert_eq!(self.tensors.len() + 1, before, "{name} was there");
        self
    }

    pub fn tensor(&mut self, name: &str) -> &mut TensorOut<'static> {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap()
    }

    /// The bytes of a tensor.
    pub fn bytes(&mut self, name: &str) -> &mut Vec<u8> {
        let TensorData::Bytes(bytes) = &mut self.tensor(name).data else {
            panic!("{name} is made of weights")
        };
        bytes.to_mut()
    }

    /// Gate and up of layer 0 as one module in ModelOpt's convention, each row with its number as bias; `swizzled`: block
    /// scales in 128x4 order.
    pub fn modelopt_fused(&mut self, w: &Weight, swizzled: bool) -> &mut Self {
        let module = "model.layers.0.mlp.gate_up_proj";
        self.modelopt(module, w, 1e-3, None);
        let bias: Vec<f32> = (0..w.rows).map(|row| row as f32).collect();
        self.f32(&format!("{module}.bias"), &[w.rows], &bias);
        if swizzled {
            let (bytes, scale) = (w.swizzled(), self.tensor(&format!("{module}.weight_scale")));
            (scale.dtype, scale.shape, scale.data) = (Dtype::U8, vec![bytes.len()], bytes.into());
        }
        self
    }

    /// A module in ModelOpt's convention.
    pub fn modelopt(&mut self, module: &str, w: &Weight, scale: f32, input: Option<f32>) -> &mut Self {
        self.add(&format!("{module}.weight"), Dtype::U8, &[w.rows, w.k / 2], w.codes.clone());
        let scales = [w.rows, w.k / w.block];
        self.add(&format!("{module}.weight_scale"), Dtype::F8E4m3, &scales, w.scales.clone());
        self.f32(&format!("{module}.weight_scale_2"), &[], &[scale]);
        if let Some(input) = input {
            self.f32(&format!("{module}.input_scale"), &[], &[input]);
        }
        self
    }

    /// Modules of 64 x 64 under a path in ModelOpt's convention, of this seed and those behind it.
    pub fn modules(&mut self, path: &str, names: &[&str], seed: u64) -> &mut Self {
        for (name, seed) in names.iter().zip(seed..) {
            self.modelopt(&format!("{path}.{name}"), &Weight::new(seed, 64, 64), 1e-3, None);
        }
        self
    }

    /// A module in the compressed-tensors convention.
    pub fn compressed(&mut self, module: &str, w: &Weight, divisor: f32, input: Option<f32>) -> &mut Self {
        self.add(&format!("{module}.weight_packed"), Dtype::U8, &[w.rows, w.k / 2], w.codes.clone());
        let (dtype, shape) = (if w.block == 16 { Dtype::F8E4m3 } else { Dtype::U8 }, [w.rows, w.k / w.block]);
        self.add(&format!("{module}.weight_scale"), dtype, &shape, w.scales.clone());
        if w.block == 16 {
            self.f32(&format!("{module}.weight_global_scale"), &[1], &[divisor]);
        }
        if let Some(input) = input {
            self.f32(&format!("{module}.input_global_scale"), &[1], &[input]);
        }
        self
    }

    /// Writes the directory.
    pub fn write(&self, dir: &Path) {
        std::fs::write(dir.join("model.safetensors"), serialize(&self.tensors, &self.metadata).unwrap())
            .unwrap();
        self.write_configs(dir);
    }

    pub fn write_configs(&self, dir: &Path) {
        for (name, value) in [("config.json", &self.config), ("hf_quant_config.json", &self.hf_quant_config)]
        {
            if let Some(value) = value {
                std::fs::write(dir.join(name), value.to_string()).unwrap();
            }
        }
    }

    /// Writes the tensors into shards by name, with an index.
    pub fn write_sharded(&self, dir: &Path, shard: impl Fn(&str) -> usize) {
        let mut shards: BTreeMap<usize, Vec<TensorOut<'_>>> = BTreeMap::new();
        let mut map = serde_json::Map::new();
        for t in &self.tensors {
            let s = shard(&t.name);
            shards.entry(s).or_default().push(t.clone());
            map.insert(t.name.clone(), json!(shard_name(s)));
        }
        for (s, tensors) in &shards {
            let bytes = serialize(tensors, &self.metadata).unwrap();
            std::fs::write(dir.join(shard_name(*s)), bytes).unwrap();
        }
        let index = json!({ "metadata": { "total_size": 0 }, "weight_map": map });
        std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
        self.write_configs(dir);
    }

    /// Writes into a new temporary directory and opens it.
    pub fn open(&self, options: &OpenOptions) -> Result<Checkpoint, Error> {
        let dir = tempfile::tempdir().unwrap();
        self.write(dir.path());
        // Mapped files outlive their names.
        Checkpoint::open(dir.path(), options)
    }
}

// One dense layer: gate and up [128, 64], down [64, 128].

pub const GATE: &str = "model.layers.0.mlp.gate_proj";
pub const UP: &str = "model.layers.0.mlp.up_proj";
pub const DOWN: &str = "model.layers.0.mlp.down_proj";

/// What the projections of an MLP are called: gate, up, down.
pub const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

pub fn gate() -> Weight {
    Weight::new(1, 128, 64)
}

pub fn up() -> Weight {
    Weight::new(2, 128, 64)
}

pub fn down() -> Weight {
    Weight::new(3, 64, 128)
}

pub fn modelopt(config: Value, input: Option<f32>) -> Fixture {
    let mut f = Fixture::with(config);
    for (module, w, scale) in [(GATE, gate(), 1e-3), (UP, up(), 2e-3), (DOWN, down(), 3e-3)] {
        f.modelopt(module, &w, scale, input);
    }
    f
}

pub fn compressed(config: Value, input: Option<f32>) -> Fixture {
    let mut f = Fixture::with(config);
    for (module, w, divisor) in [(GATE, gate(), 1000.0), (UP, up(), 500.0), (DOWN, down(), 250.0)] {
        f.compressed(module, &w, divisor, input);
    }
    f
}

pub fn defaults() -> OpenOptions {
    OpenOptions::default()
}

#[track_caller]
pub fn assert_mlp(c: &Checkpoint, scales: [f32; 2], input: Option<f32>) {
    let mlp = c.gate_up(0).unwrap();
    gate().assert_is(&mlp.gate);
    up().assert_is(&mlp.up);
    assert_eq!([mlp.gate.global_scale().value(), mlp.up.global_scale().value()], scales);
    assert_eq!(input_scales(c).unwrap().map(|(g, _)| g.value()), input);
}

pub fn expert(c: &Checkpoint, layer: usize, expert: usize) -> Result<GateUp<'_>, Error> {
    c.gate_up_source(layer, Which::Expert(expert))?.read()
}

/// The down projection of an expert.
pub fn expert_down(c: &Checkpoint, layer: usize, expert: usize) -> Result<Linear<'_>, Error> {
    c.down_source(layer, Which::Expert(expert))?.read()
}

/// Tensor scales of what goes into gate and up of layer 0.
pub fn input_scales(c: &Checkpoint) -> Result<Option<(GlobalScale, GlobalScale)>, Error> {
    c.gate_up_source(0, Which::Dense)?.input_scales()
}

/// A GGUF file of this architecture, with these entries of it, opened.
pub fn open_gguf(
    architecture: &str,
    entries: &[(&str, GgufValue)],
    tensors: &[TensorOut<'_>],
    options: &OpenOptions,
) -> Checkpoint {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let mut metadata = vec![("general.architecture".to_owned(), GgufValue::String(architecture.into()))];
    metadata.extend(entries.iter().map(|(key, value)| (format!("{architecture}.{key}"), value.clone())));
    write_to(&path, &metadata, tensors).unwrap();
    // Mapped files outlive their names.
    Checkpoint::open(&path, options).unwrap()
}

/// MLPs of layers of a GGUF file in mxfp4, one for each ending of their names; of experts, two.
pub fn gguf_mlps(layers: usize, endings: &[&str]) -> Vec<TensorOut<'static>> {
    let dtype = Dtype::from_ggml(Dtype::GGML_MXFP4).unwrap();
    let names = (0..layers).flat_map(|layer| endings.iter().map(move |ending| (layer, *ending)));
    let mlp = |(layer, ending)| {
        ["gate", "up", "down"].map(|projection| {
            let lead: &[usize] = if ending == "_exps" { &[2] } else { &[] };
            let shape = [lead, &[32, 32]].concat();
            let bytes = vec![120; shape.iter().product::<usize>() / 32 * 17];
            TensorOut::new(format!("blk.{layer}.ffn_{projection}{ending}.weight"), dtype, shape, bytes)
        })
    };
    names.flat_map(mlp).collect()
}

pub fn shard_name(shard: usize) -> String {
    format!("model-{shard:05}.safetensors")
}

pub fn modelopt_config(algo: &str) -> Value {
    json!({ "hidden_act": "silu", "quantization_config": { "quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"] } })
}

/// A checkpoint of ModelOpt's with floats for activations, no tensor in it yet.
pub fn w4a16() -> Fixture {
    Fixture::with(modelopt_config("W4A16_NVFP4"))
}

/// A compressed-tensors configuration with these groups: (targets, group size, activations).
pub fn compressed_config(groups: &[(&[&str], u64, Value)]) -> Value {
    let groups: serde_json::Map<String, Value> = groups
        .iter()
        .enumerate()
        .map(|(i, (targets, size, input))| {
            let weights = json!({ "num_bits": 4, "type": "float", "group_size": size });
            (
                format!("group_{i}"),
                json!({ "targets": targets, "weights": weights, "input_activations": input }),
            )
        })
        .collect();
    json!({ "hidden_act": "silu", "quantization_config": {
        "quant_method": "compressed-tensors", "format": null, "ignore": ["lm_head"], "config_groups": groups } })
}

pub fn local_activations() -> Value {
    json!({ "num_bits": 4, "type": "float", "group_size": 16, "dynamic": "local" })
}

#[track_caller]
pub fn assert_has(text: &str, part: &str) {
    assert!(text.contains(part), "{text}\nhas no\n{part}");
}

#[track_caller]
pub fn assert_starts(text: &str, start: &str) {
    assert!(text.starts_with(start), "{text}\ndoes not start with\n{start}");
}

#[track_caller]
pub fn assert_ends(text: &str, end: &str) {
    assert!(text.ends_with(end), "{text}\ndoes not end with\n{end}");
}

/// Messages with the temporary directory's name taken out.
pub fn message(e: &Error) -> String {
    let text = e.to_string();
    let temp = format!("{}/", std::env::temp_dir().display());
    let Some(start) = text.find(&temp) else { return text };
    let end = text[start + temp.len()..].find([':', ';', '/', ' ']);
    let end = end.map_or(text.len(), |i| start + temp.len() + i);
    format!("{}DIR{}", &text[..start], &text[end..])
}

/// That every element is code · block scale · tensor scale.
#[track_caller]
pub fn assert_values(m: &QuantizedMatrix<'_>, w: &Weight, tensor_scale: f64) {
    const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let e4m3 = |b: u8| match (b >> 3, f64::from(b & 7)) {
        (0, mantissa) => mantissa * 2f64.powi(-9),
        (exponent, mantissa) => (8.0 + mantissa) * 2f64.powi(i32::from(exponent) - 10),
    };
    assert_eq!((m.rows(), m.k()), (w.rows, w.k));
    for row in 0..w.rows {
        for k in 0..w.k {
            let code = w.codes[(row * w.k + k) / 2] >> (4 * (k % 2)) & 15;
            let scale = w.scales[(row * w.k + k) / w.block];
            let scale = if w.block == 16 { e4m3(scale) } else { 2f64.powi(i32::from(scale) - 127) };
            let sign = if code > 7 { -1.0 } else { 1.0 };
            let (want, found) = (sign * E2M1[usize::from(code & 7)] * scale * tensor_scale, m.value(row, k));
            assert!((found - want).abs() <= 1e-12 * want.abs(), "[{row}, {k}]: {found}, not {want}");
        }
    }
}

#[track_caller]
pub fn refusal<T>(found: Result<T, Error>) -> String {
    message(&found.err().expect("a refusal"))
}

/// What the validator finds in a directory.
pub fn findings(f: &Fixture, options: &OpenOptions) -> Vec<Finding> {
    let dir = tempfile::tempdir().unwrap();
    f.write(dir.path());
    dualgemm_checkpoint::validate(dir.path(), options)
}

pub fn rules(c: &Checkpoint) -> Vec<&'static str> {
    c.validate().iter().map(|f| f.rule.id).collect()
}

pub fn mxfp4(f: &mut Fixture, module: &str, w: &Weight, scale: (&str, Dtype)) {
    f.add(&format!("{module}.weight"), Dtype::U8, &[w.rows, w.k / 2], w.codes.clone());
    f.add(&format!("{module}{}", scale.0), scale.1, &[w.rows, w.k / 32], w.scales.clone());
}
