//! Small checkpoints, what is changed in them, and what reading them gives: the cases of `cases/`, whose first file says how
//! they are written.

use std::path::PathBuf;

use crate::common::*;
use dualgemm_cases::{Lines, expanded, fits, named, paragraphs, parse};
use dualgemm_checkpoint::activations::read;
use dualgemm_checkpoint::gguf::GgufValue;
use dualgemm_checkpoint::safetensors::serialize;
use dualgemm_checkpoint::validate::Finding;
use dualgemm_checkpoint::write::{Model, Output, WriteReport, write};
use dualgemm_checkpoint::{
    BadInputScale, Checkpoint, Dtype, Error, FusedExperts, LinearSource, MlpKind, OpenOptions, TensorFiles,
    Which,
};
use dualgemm_formats::{ScaleLayout, gguf};
use dualgemm_gemm::AFormat;
use half::bf16;
use serde_json::Value;
use tempfile::TempDir;

fn optional(word: Option<&str>) -> Option<f32> {
    word.filter(|word| *word != "none").map(parse)
}

fn json(text: &str) -> Option<Value> {
    (text != "none").then(|| serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}")))
}

/// `1+2[96..128]`: weights of these seeds one below the other, and of these rows alone; with `/2` every second one.
fn weight(text: &str, [rows, k, block]: [&str; 3]) -> Weight {
    let (seeds, part) = text.trim_end_matches(']').split_once('[').unwrap_or((text, ""));
    let of = |seed| Weight::with_block(parse(seed), parse(rows), parse(k), parse(block));
    let whole = seeds.split('+').map(of).reduce(|above, below| above.stacked(&below)).unwrap();
    let Some((first, rest)) = part.split_once("..") else { return whole };
    let (end, step) = rest.split_once('/').unwrap_or((rest, "1"));
    whole.rows_at((parse(first)..parse(end)).step_by(parse(step)))
}

/// Codes or block scales of a weight as a file may hold them.
fn stored(scales: bool, words: &[&str]) -> Vec<u8> {
    let dims = [words[1], words[2], words[3]];
    let one = |seed: &str| {
        let w = weight(seed, dims);
        let (bytes, cols) = if scales { (&w.scales, w.k / w.block) } else { (&w.codes, w.k / 2) };
        match words.get(4).copied().unwrap_or("rows") {
            "rows" => bytes.clone(),
            "columns" => {
                (0..cols).flat_map(|c| bytes.iter().skip(c).step_by(cols)).copied().collect::<Vec<u8>>()
            }
            "swizzled" => w.swizzled(),
            "swapped" => bytes.iter().map(|byte| byte.rotate_left(4)).collect(),
            other => panic!("`{other}`"),
        }
    };
    words[0].split('+').flat_map(one).collect()
}

pub fn gguf_blocks(w: &Weight) -> (Dtype, Vec<u8>) {
    if w.block == 16 {
        let blocks = gguf::from_matrix(&w.matrix("w", 1.0)).unwrap();
        return (Dtype::from_ggml(Dtype::GGML_NVFP4).unwrap(), blocks);
    }
    let mut blocks = Vec::new();
    for (codes, scale) in w.codes.chunks(16).zip(&w.scales) {
        let code = |k: usize| codes[k / 2] >> (4 * (k % 2)) & 15;
        blocks.push(*scale);
        blocks.extend((0..16).map(|j| code(j) | code(j + 16) << 4));
    }
    (Dtype::from_ggml(Dtype::GGML_MXFP4).unwrap(), blocks)
}

fn shape(word: &str) -> Vec<usize> {
    word.split('x').filter(|n| *n != "scalar").map(parse).collect()
}

fn base(words: &[&str]) -> Fixture {
    let input = |at: usize| optional(words.get(at).copied());
    match words[0] {
        "modelopt" => modelopt(modelopt_config(words[1]), input(2)),
        "compressed" => {
            let activations = input(1).map_or(Value::Null, |_| local_activations());
            compressed(compressed_config(&[(&["Linear"], 16, activations)]), input(1))
        }
        "alike" => {
            let mut f = base(&words[1..]);
            f.tensors.clear();
            let put = if words[1] == "modelopt" { Fixture::modelopt } else { Fixture::compressed };
            for (seed, module) in (0..).zip([GATE, UP, DOWN]) {
                let (scale, input) = if words[1] == "modelopt" { (1e-3, 0.5) } else { (1000.0, 8.0) };
                put(&mut f, module, &Weight::new(seed, 64, 64), scale, Some(input));
            }
            f
        }
        "empty" => Fixture::default(),
        "whole" => super::whole::model(words[1]),
        "gguf" => {
            let mut f = Fixture::default();
            f.metadata.insert("gguf".into(), words[1].into());
            f
        }
        other => panic!("no base `{other}`"),
    }
}

/// Puts a value at a path of keys, through objects that are made on the way; none removes what is there.
fn put(at: &mut Option<Value>, path: &[&str], value: Option<Value>) {
    let [key, rest @ ..] = path else { return *at = value };
    let entries = at.get_or_insert_default();
    if !entries.is_object() {
        *entries = Value::Object(Default::default());
    }
    let entries = entries.as_object_mut().unwrap();
    let mut inner = entries.remove(*key);
    put(&mut inner, rest, value);
    entries.extend(inner.map(|inner| ((*key).into(), inner)));
}

fn option(options: &mut OpenOptions, name: &str, value: &str) {
    match name {
        "within" => options.within = Some(value.into()),
        "order" => options.gate_up_order = Some(parse(value)),
        "nibbles" => options.nibble_order = Some(serde_json::from_value(value.into()).unwrap()),
        "scales" => options.scale_layout = Some(named(ScaleLayout::ALL, value)),
        "bad-input-scale" => options.bad_input_scale = BadInputScale::One,
        other => panic!("no option `{other}`"),
    }
}

fn edit(f: &mut Fixture, line: &str) {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[0] {
        "-" => {
            // This tensor, or all whose names begin so.
            let (before, exact) = (f.tensors.len(), f.tensors.iter().any(|t| t.name == words[1]));
            let gone = |name: &str| if exact { name == words[1] } else { name.starts_with(words[1]) };
            f.tensors.retain(|t| !gone(&t.name));
            assert!(f.tensors.len() < before, "{} was there", words[1]);
        }
        "+" => {
            let ggml = |number: &str| Dtype::from_ggml(parse(number));
            let dtype = words[2].strip_prefix("ggml").map_or_else(|| Dtype::from_safetensors(words[2]), ggml);
            let (name, dtype, shape) = (words[1], dtype.unwrap(), shape(words[3]));
            let (count, values) = (shape.iter().product(), &words[4..]);
            let counting = values.first() == Some(&"count");
            let value = |at: usize| if counting { at as f32 } else { parse(values[at % values.len()]) };
            let bytes = match (dtype, values.is_empty()) {
                (Dtype::F32, false) => (0..count).flat_map(|at| value(at).to_le_bytes()).collect(),
                (Dtype::Bf16, false) => {
                    (0..count).flat_map(|at| bf16::from_f32(value(at)).to_le_bytes()).collect()
                }
                _ => vec![values.first().map_or(0, |value| parse(value)); dtype.byte_len(count).unwrap()],
            };
            f.add(name, dtype, &shape, bytes);
        }
        "codes" | "scales" => {
            let dtype = Dtype::from_safetensors(words[2]).unwrap();
            f.add(words[1], dtype, &shape(words[3]), stored(words[0] == "scales", &words[4..]));
        }
        "blocks" => {
            let (dtype, bytes) = gguf_blocks(&weight(words[3], [words[4], words[5], words[6]]));
            f.add(words[1], dtype, &shape(words[2]), bytes);
        }
        "text" => {
            let (name, text) = line["text ".len()..].split_once(' ').unwrap();
            f.add(name, Dtype::U8, &[text.len()], text.as_bytes().to_vec());
        }
        "module" => {
            let [name, kind, seed, rows, k] = [1, 2, 3, 4, 5].map(|at| words[at]);
            let (scale, input) = (optional(words.get(6).copied()), optional(words.get(7).copied()));
            let of = |block| weight(seed, [rows, k, block]);
            match kind {
                "modelopt" => drop(f.modelopt(name, &of("16"), scale.unwrap(), input)),
                "compressed" => drop(f.compressed(name, &of("16"), scale.unwrap(), input)),
                "compressed-mx" => drop(f.compressed(name, &of("32"), 0.0, input)),
                // mxfp4, its scales under this ending.
                _ => mxfp4(f, name, &of("32"), (kind, Dtype::U8)),
            }
        }
        "experts" => {
            for expert in words[1..].iter().copied() {
                let (path, seed) = match expert {
                    "shared" => ("model.layers.0.mlp.shared_experts".into(), 99),
                    number => (format!("model.layers.0.mlp.experts.{number}"), parse(number)),
                };
                for projection in PROJECTIONS {
                    f.modelopt(&format!("{path}.{projection}"), &Weight::new(seed, 64, 64), 1e-3, Some(0.5));
                }
            }
        }
        "set" => f.tensor(words[1]).data = parse::<f32>(words[2]).to_le_bytes().to_vec().into(),
        "byte" => f.bytes(words[1])[parse::<usize>(words[2])] = parse(words[3]),
        "rename" => f.tensors.iter_mut().for_each(|t| t.name = t.name.replace(words[1], words[2])),
        "dtype" => f.tensor(words[1]).dtype = Dtype::from_safetensors(words[2]).unwrap(),
        "metadata" => {
            let (key, text) = line["metadata ".len()..].split_once(" = ").unwrap();
            f.metadata.insert(key.into(), text.into());
        }
        _ => {
            let (path, value) = line.split_once(" = ").unwrap_or_else(|| panic!("no edit: {line}"));
            let mut path: Vec<&str> = path.split('/').collect();
            let (of, first) = match path.remove(0) {
                "config" => (&mut f.config, None),
                "quantization" => (&mut f.config, Some("quantization_config")),
                "hf" => (&mut f.hf_quant_config, Some("quantization")),
                other => panic!("no file `{other}`"),
            };
            let path: Vec<&str> = first.into_iter().chain(path).collect();
            put(of, &path, json(value));
        }
    }
}

fn said<T>(found: Result<T, Error>) -> String {
    said_as(found, |_| "ok".into())
}

fn said_as<T>(found: Result<T, Error>, text: impl FnOnce(T) -> String) -> String {
    found.map_or_else(|e| message(&e), text)
}

fn joined(all: impl IntoIterator<Item = String>) -> String {
    all.into_iter().collect::<Vec<_>>().join(" | ")
}

fn kind(word: &str) -> MlpKind {
    match word {
        "dense" => MlpKind::Dense,
        "shared" => MlpKind::Shared,
        "experts" => MlpKind::Experts,
        other => panic!("`{other}`"),
    }
}

/// `gate`, `up` and `down` of layer 0; `3/gate` of another layer, `3/shared/gate` and `3/7/gate` of its experts; a module.
fn source<'c>(c: &'c Checkpoint, which: &str) -> Result<LinearSource<'c>, Error> {
    let (layer, which, half) = match which.split('/').collect::<Vec<_>>()[..] {
        [half] => (0, Which::Dense, half),
        [layer, half] => (parse(layer), Which::Dense, half),
        [layer, "shared", half] => (parse(layer), Which::Shared, half),
        [layer, expert, half] => (parse(layer), Which::Expert(parse(expert)), half),
        _ => panic!("`{which}`"),
    };
    match half {
        "gate" => Ok(c.gate_up_source(layer, which)?.gate),
        "up" => Ok(c.gate_up_source(layer, which)?.up),
        "down" => c.down_source(layer, which),
        module => c.linear_source(module),
    }
}

/// A number, a list of numbers, or a text.
fn gguf_value(text: &str) -> GgufValue {
    match json(text) {
        Some(Value::Array(all)) => {
            let bytes = all.iter().flat_map(|n| (n.as_u64().unwrap() as u32).to_le_bytes());
            GgufValue::Array { element: 4, len: all.len() as u64, bytes: bytes.collect() }
        }
        Some(Value::Number(number)) => GgufValue::U32(number.as_u64().unwrap() as u32),
        Some(Value::String(text)) => GgufValue::String(text),
        _ => panic!("`{text}`"),
    }
}

/// A checkpoint, and what it was written as.
struct Case {
    f: Fixture,
    options: OpenOptions,
    written: Option<(TempDir, PathBuf, WriteReport)>,
}

impl Case {
    fn open(&self) -> Result<Checkpoint, Error> {
        match (&self.written, self.f.metadata.get("gguf")) {
            (Some((_, path, _)), _) => Checkpoint::open(path, &defaults()),
            (None, Some(architecture)) => {
                let entries = self.f.metadata.iter().filter(|(key, _)| *key != "gguf");
                let entries: Vec<_> = entries.map(|(key, text)| (key.as_str(), gguf_value(text))).collect();
                Ok(open_gguf(architecture, &entries, &self.f.tensors, &self.options))
            }
            (None, None) => self.f.open(&self.options),
        }
    }

    fn findings(&self) -> Vec<Finding> {
        match self.f.metadata.contains_key("gguf") {
            true => self.open().unwrap().validate(),
            false => findings(&self.f, &self.options),
        }
    }

    /// Writes it as this convention, perhaps under a name of its own: `gguf`, `whole-gguf`, `modelopt/m.safetensors`.
    fn write(&self, output: &str) -> (TempDir, PathBuf, Result<WriteReport, Error>) {
        let dir = tempfile::tempdir().unwrap();
        let whole = output.strip_prefix("whole-");
        let (output, name) =
            whole.unwrap_or(output).split_once('/').unwrap_or((whole.unwrap_or(output), "m"));
        let output = Output::by_name(output).unwrap();
        let path = dir.path().join(if output == Output::Gguf { "m.gguf" } else { name });
        let report = self.open().and_then(|c| {
            // Of GGUF the MLPs alone are read, and only they are asked for.
            let alone = output == Output::Gguf || c.convention().name == "gguf";
            write(&path, output, &Model { mlp_only: alone && whole.is_none(), ..c.export(output)? })
        });
        (dir, path, report)
    }

    fn to(&mut self, output: &str) {
        let (dir, path, report) = self.write(output);
        let report = report.unwrap_or_else(|e| panic!("{e}"));
        assert!(report.files.iter().all(|file| file.exists()));
        self.written = Some((dir, path, report));
    }
}

fn check(case: &Case, line: &str) {
    let (what, rest) = line.split_once(' ').unwrap_or((line, ""));
    let (word, pattern) = rest.split_once(' ').unwrap_or((rest, ""));
    let words: Vec<&str> = rest.split(' ').collect();
    let (open, findings) = (|| case.open(), || case.findings());
    let report = || &case.written.as_ref().unwrap().2;
    let refused =
        |found: String, pattern: &str| assert!(fits(&found, pattern), "says\n{found}\nnot\n{pattern}");
    let linear = |c: &Checkpoint, name: &str| said(c.linear(name));
    match what {
        "mlp" => {
            assert_mlp(&open().unwrap(), [parse(words[0]), parse(words[1])], optional(Some(words[2])));
        }
        "is" | "differs" => {
            let (c, w) = (open().unwrap(), weight(words[1], [words[2], words[3], words[4]]));
            let source = source(&c, word).unwrap();
            let m = source.blocks(0..source.rows()).unwrap();
            assert_eq!(m.format().block_len(), w.block);
            if what == "differs" {
                return assert_ne!(m.dense_rows(0..m.rows()).0, w.codes);
            }
            assert_runs(&source, &w);
            if let Some(scale) = words.get(5) {
                // Of a divisor the exact reciprocal.
                let scale = scale.strip_prefix("1/").map(|divisor| 1.0 / parse::<f64>(divisor));
                assert_values(&m, &w, scale.unwrap_or_else(|| parse::<f32>(words[5]).into()));
            }
        }
        "layout" => {
            let c = open().unwrap();
            let source = source(&c, word).unwrap();
            let m = source.blocks(0..source.rows()).unwrap();
            assert_eq!(m.scale_layout().to_string(), pattern);
        }
        "bias" => {
            let c = open().unwrap();
            let bias = source(&c, word).unwrap().bias.unwrap();
            assert_eq!(bias[parse::<usize>(words[1])], parse::<f32>(words[2]));
        }
        "inputs" => {
            let c = open().unwrap();
            let found = source(&c, word).unwrap().input_scale().unwrap();
            assert_eq!(found.map(|scale| scale.value()), optional(Some(pattern)));
        }
        "open" => refused(said(open()), rest),
        "read" => refused(said(open().and_then(|c| source(&c, word)?.read().map(drop))), pattern),
        "down-input" => refused(said(source(&open().unwrap(), "down").unwrap().input_scale()), rest),
        "gate-up" => refused(said(open().and_then(|c| c.gate_up(0).map(drop))), rest),
        "down" => refused(said(open().unwrap().down(0)), rest),
        "input" => refused(said(input_scales(&open().unwrap())), rest),
        "linear" => refused(linear(&open().unwrap(), word), pattern),
        "experts" => {
            let ids = |ids: Vec<usize>| ids.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
            refused(said_as(open().unwrap().experts(parse(word)), ids), pattern);
        }
        "activation" => {
            refused(said_as(open().unwrap().activation(0, kind(word)), |s| s.to_string()), pattern)
        }
        "whole" => refused(said(open().unwrap().check_whole(0, kind(word))), pattern),
        "mixture" => refused(said(open().unwrap().check_mixture(0, false)), rest),
        "routed" => refused(said(open().unwrap().check_mixture(0, true)), rest),
        "router" => assert_eq!(format!("{:?}", open().unwrap().router_weights()), rest),
        "mlps" => {
            let mlps = open().unwrap().mlps();
            assert_eq!(joined(mlps.iter().map(|m| format!("{} {} {}", m.layer, m.kind, m.experts))), rest);
        }
        "modules" => {
            let all = open().unwrap().modules();
            assert_eq!(joined(all.iter().map(|m| format!("{} {} {:?}", m.name, m.format, m.shape))), rest);
        }
        "gguf" => {
            let c = open().unwrap();
            let found = c.files().gguf_metadata().unwrap().iter().find(|(key, _)| key == word);
            assert_eq!(format!("{:?}", found.unwrap().1), pattern);
        }
        "fused" => {
            let dir = tempfile::tempdir().unwrap();
            case.f.write(dir.path());
            let files = TensorFiles::open(dir.path()).unwrap();
            let (found, left) = FusedExperts::all(&files);
            assert!(found.is_empty());
            refused(joined(left.into_iter().map(|(tensor, why)| format!("{}: {why}", tensor.name))), rest);
        }
        // The tensors as a file of activations.
        "file" | "file-of" => {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a.safetensors");
            std::fs::write(&path, serialize(&case.f.tensors, &case.f.metadata).unwrap()).unwrap();
            let (tensor, pattern) = if what == "file" { (None, rest) } else { (Some(word), pattern) };
            let files = TensorFiles::open(&path).unwrap();
            refused(
                said_as(read(&files, tensor), |a| format!("{} [{}, {}]", AFormat::of(&a), a.rows(), a.k())),
                pattern,
            );
        }
        "refused" => {
            let (dir, _, found) = case.write(word);
            refused(said(found), pattern);
            assert!(dir.path().read_dir().unwrap().next().is_none(), "something is left");
        }
        "wrote" => assert_eq!(report().tensors, parse::<usize>(rest)),
        "files" => assert_eq!(report().files.len(), parse::<usize>(rest)),
        "skipped" => {
            assert_eq!(joined(report().skipped.clone()), rest.strip_prefix("nothing").unwrap_or(rest));
        }
        "quantized" => {
            assert_eq!(open().unwrap().quantized_modules().any(|m| m == word).to_string(), pattern);
        }
        "tensor" => assert_eq!(open().unwrap().files().get(word).unwrap().shape, shape(pattern)),
        "exports" => {
            let c = open().unwrap();
            assert!(c.export(Output::Modelopt).unwrap().linears.iter().any(|l| l.module == rest));
        }
        // A fault of the gate projection: nothing reads or writes it, and all else is read.
        "gate-alone" => {
            let c = open().unwrap();
            refused(linear(&c, GATE), rest);
            refused(said(c.gate_up(0)), rest);
            assert_eq!(linear(&c, UP), "ok");
            let is_it = |m: &str| m.contains(rest.trim_matches('…'));
            assert!(c.validate().iter().any(|f| f.rule.id == "config" && is_it(&f.message)));
            assert!(c.export(Output::Modelopt).is_err());
        }
        "convention" => assert_eq!(open().unwrap().convention().name, rest),
        "finds" => {
            let found = joined(findings().iter().map(|f| format!("{} {} {}", f.rule.id, f.tensor, f.value)));
            assert_eq!(found, rest.strip_prefix("nothing").unwrap_or(rest));
        }
        "says" => refused(findings().remove(0).message, &rest.replace("DIR", "…")),
        "some" => assert!(findings().iter().any(|f| fits(&f.message, rest)), "{:#?}", findings()),
        "rules" => {
            let found = findings();
            assert_eq!(found.iter().map(|f| f.rule.id).collect::<Vec<_>>().join(" "), rest, "{found:#?}");
        }
        other => panic!("no check `{other}`"),
    }
}

fn run(lines: Lines<'_>) {
    let [(_, first), rest @ ..] = lines else { return };
    // What a failure shows.
    println!("{}: {first}", lines[0].0);
    let f = base(&first.split_whitespace().collect::<Vec<_>>());
    let mut case = Case { f, options: defaults(), written: None };
    for (place, line) in rest {
        println!("{place}: {line}");
        match line.split_once(' ') {
            Some((">", line)) => check(&case, line),
            Some(("to", output)) => case.to(output),
            Some(("option", line)) => {
                let (name, value) = line.split_once(' ').unwrap();
                option(&mut case.options, name, value);
            }
            _ => expanded(line).iter().for_each(|line| edit(&mut case.f, line)),
        }
    }
}

#[test]
fn every_case_gives_what_it_says() {
    let names = [("$gate", GATE), ("$up", UP), ("$down", DOWN), ("$mlp", "model.layers.0.mlp")];
    let mut names: Vec<(String, String)> = names.map(|(name, text)| (name.into(), text.into())).into();
    let files = [
        ("activations.txt", include_str!("cases/activations.txt")),
        ("declared.txt", include_str!("cases/declared.txt")),
        ("findings.txt", include_str!("cases/findings.txt")),
        ("gguf.txt", include_str!("cases/gguf.txt")),
        ("models.txt", include_str!("cases/models.txt")),
        ("stored.txt", include_str!("cases/stored.txt")),
        ("written.txt", include_str!("cases/written.txt")),
    ];
    let count: usize = files.into_iter().map(|file| paragraphs(file, &mut names, &mut run)).sum();
    assert!(count > 300, "{count} cases");
}
