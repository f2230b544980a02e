//! The files of a checkpoint as one set of named tensors: a directory, a shard index, one safetensors file or
//! one GGUF file. No convention is known here.
//!
//! A shard index maps every tensor name to a file; gate and up, and each one's scales, may lie in different
//! files, so tensors are looked up over the whole set and never per file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::list;
use crate::families::{Family, Said};
use crate::gguf::{Gguf, GgufValue, split};
use crate::json;
use crate::mapped::MappedFile;
use crate::model_config;
use crate::safetensors::Header;
use crate::{Error, TensorInfo, TensorView};

const INDEX: &str = "model.safetensors.index.json";
/// How the names of files begin that are in Mistral's format.
const CONSOLIDATED: &[u8] = b"consolidated";
const OPENABLE: &str = "give a directory with safetensors files, a .safetensors file, a .safetensors.index.json file or a .gguf file";

/// A JSON file beside the tensors, or an object in the metadata of a file.
#[derive(Debug, Clone)]
pub struct JsonFile {
    /// Where it lies.
    pub path: PathBuf,
    /// What it holds; an object.
    pub value: Value,
}

/// All tensors of a checkpoint, mapped, not read.
#[derive(Debug)]
pub struct TensorFiles {
    root: PathBuf,
    files: Vec<MappedFile>,
    /// By name, with the number of the file.
    tensors: BTreeMap<String, (usize, TensorInfo)>,
    metadata: BTreeMap<String, String>,
    gguf: Option<Vec<(String, GgufValue)>>,
    config: Option<JsonFile>,
    hf_quant_config: Option<JsonFile>,
}

impl TensorFiles {
    /// Opens a directory, a `.safetensors` file, a `.safetensors.index.json` file or a `.gguf` file and checks
    /// every header. Tensor data is mapped and not touched.
    ///
    /// # Errors
    /// If there is nothing of these kinds, a header or the index breaks a rule, or a file cannot be read.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let mut this = Self {
            root: path.into(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            metadata: BTreeMap::new(),
            gguf: None,
            config: None,
            hf_quant_config: None,
        };
        let meta = std::fs::metadata(path).map_err(|e| Error::io(path, "open", e))?;
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let mut lone = false;
        let configs = if meta.is_dir() {
            this.open_dir(path)?;
            path
        } else {
            if name.ends_with(".gguf") {
                this.open_gguf(path)?;
                return Ok(this);
            } else if name.ends_with(".safetensors") {
                this.add_safetensors(path)?;
                lone = true;
            } else if name.ends_with(".index.json") {
                this.open_index(path)?;
            } else {
                return Err(Error::Path {
                    file: path.into(),
                    found: "has an unknown ending".into(),
                    valid: OPENABLE,
                });
            }
            path.parent().unwrap_or(Path::new(""))
        };
        // Mistral's own files have their configuration in another, which holds what is of use here under the same names.
        let beside = || match read_json(&configs.join("config.json"))? {
            None => read_json(&configs.join("params.json")),
            found => Ok(found),
        };
        // A file that stands alone may carry the configuration itself.
        let carried = if lone { model_config::from_metadata(&this.metadata, path)? } else { None };
        this.config = carried.map_or_else(beside, |carried| Ok(Some(carried)))?;
        this.config.iter().try_for_each(model_config::check_parts)?;
        this.hf_quant_config = read_json(&configs.join("hf_quant_config.json"))?;
        Ok(this)
    }

    fn open_dir(&mut self, dir: &Path) -> Result<(), Error> {
        let index = dir.join(INDEX);
        if index.exists() {
            return self.open_index(&index);
        }
        let io = |e| Error::io(dir, "list", e);
        let mut files = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(io)? {
            let path = entry.map_err(io)?.path();
            // Names that start with a dot are outputs still being written.
            let hidden =
                path.file_name().is_none_or(|n| n.as_encoded_bytes().first().is_some_and(|&b| b == b'.'));
            if !hidden && path.extension().is_some_and(|e| e == "safetensors") {
                files.push(path);
            }
        }
        if files.is_empty() {
            let found = "holds no safetensors file".into();
            return Err(Error::Path { file: dir.into(), found, valid: OPENABLE });
        }
        // Mistral's own names of the same tensors, beside Hugging Face's.
        let consolidated =
            |f: &PathBuf| f.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(CONSOLIDATED));
        if !files.iter().all(consolidated) {
            files.retain(|f| !consolidated(f));
        }
        files.sort();
        files.iter().try_for_each(|f| self.add_safetensors(f))
    }

    fn open_index(&mut self, index: &Path) -> Result<(), Error> {
        let fault = |rule, found: String, valid: &str| Error::header(index, rule, found, valid);
        let json = read_json(index)?
            .ok_or_else(|| Error::io(index, "open", std::io::Error::from(std::io::ErrorKind::NotFound)))?;
        let map = json.value.get("weight_map").and_then(Value::as_object).ok_or_else(|| {
            fault("weight-map", "no object `weight_map`".into(), "an object of tensor name to file name")
        })?;
        let mut want: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (tensor, shard) in map {
            let shard = shard.as_str().filter(|s| is_plain_file_name(s)).ok_or_else(|| {
                fault(
                    "shard-name",
                    format!("{shard} for tensor `{tensor}`"),
                    "the name of a file beside the index",
                )
            })?;
            want.entry(shard).or_default().insert(tensor);
        }
        if want.is_empty() {
            return Err(fault("weight-map", "an empty `weight_map`".into(), "at least one tensor"));
        }
        for (shard, names) in want {
            let path = index.with_file_name(shard);
            if let (Ok(false), Some(name)) = (path.try_exists(), names.first()) {
                let found = format!("tensor `{name}` in {shard}, which is not there");
                return Err(fault("weight-map", found, "the name of a file beside the index"));
            }
            self.add_safetensors(&path)?;
            let file = self.files.len() - 1;
            if let Some(name) =
                names.iter().find(|name| self.tensors.get(**name).is_none_or(|(of, _)| *of != file))
            {
                return Err(fault(
                    "weight-map",
                    format!("tensor `{name}` in {shard}, which does not hold it"),
                    "the file that holds each tensor",
                ));
            }
        }
        if let Some(name) = self.tensors.keys().find(|name| !map.contains_key(*name)) {
            return Err(fault(
                "weight-map",
                format!("no entry for tensor `{name}`"),
                "an entry for each tensor of the shards",
            ));
        }
        Ok(())
    }

    fn add_safetensors(&mut self, path: &Path) -> Result<(), Error> {
        let mapped = MappedFile::open(path)?;
        let header = Header::parse(mapped.bytes(), path)?;
        self.metadata.extend(header.metadata);
        self.insert(mapped, header.tensors)
    }

    fn insert(&mut self, file: MappedFile, tensors: Vec<TensorInfo>) -> Result<(), Error> {
        for info in tensors {
            if let Some((other, _)) = self.tensors.get(&info.name) {
                let other = self.files.get(*other).unwrap_or(&file).path().display();
                let found = format!("tensor `{}`, which {other} holds too", info.name);
                return Err(Error::header(file.path(), "duplicate", found, "each tensor in one file"));
            }
            self.tensors.insert(info.name.clone(), (self.files.len(), info));
        }
        self.files.push(file);
        Ok(())
    }

    /// Opens a GGUF file, with all others that it was split into.
    fn open_gguf(&mut self, path: &Path) -> Result<(), Error> {
        let metadata = self.add_gguf(path)?;
        let parts = split::parts(&metadata, path)?;
        // The first has the metadata of the model.
        self.gguf = Some(metadata);
        for part in parts.iter().filter(|part| *part != path) {
            let metadata = self.add_gguf(part)?;
            if *part == parts[0] {
                self.gguf = Some(metadata);
            }
        }
        let config = model_config::from_gguf(self.gguf.as_deref().unwrap_or_default());
        self.config = config.map(|value| JsonFile { path: path.into(), value });
        Ok(())
    }

    /// The family of models that the configuration or the metadata names, if it is known.
    pub(crate) fn family(&self) -> Option<&'static Family> {
        Said::new(self.config()?, self.gguf_metadata()).family()
    }

    fn add_gguf(&mut self, path: &Path) -> Result<Vec<(String, GgufValue)>, Error> {
        let mapped = MappedFile::open(path)?;
        let gguf = Gguf::parse(mapped.bytes(), path)?;
        self.insert(mapped, gguf.tensors)?;
        Ok(gguf.metadata)
    }

    /// The path that was opened.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The files that hold the tensors.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(MappedFile::path)
    }

    /// Bytes of all files together.
    pub fn total_bytes(&self) -> usize {
        self.files.iter().map(|f| f.bytes().len()).sum()
    }

    /// Lets go of all pages of the files that are in memory. Nothing read from them changes: what is touched again
    /// is read again. For callers that copy weights into another form and would otherwise hold them twice.
    pub fn release_pages(&self) {
        self.files.iter().for_each(|file| file.release_pages(0..file.bytes().len()));
    }

    /// The same for the pages of one tensor, which takes time by its size and not by that of the files.
    pub(crate) fn release_tensor(&self, name: &str) {
        if let Some((file, info)) = self.tensors.get(name) {
            self.files[*file].release_pages(info.range.clone());
        }
    }

    /// The file that holds the tensor of that name.
    pub fn file_of(&self, name: &str) -> Option<&Path> {
        self.tensors.get(name).map(|(file, _)| self.files[*file].path())
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        self.tensors.get(name).map(|entry| self.view(entry))
    }

    fn view<'s>(&'s self, (file, info): &'s (usize, TensorInfo)) -> TensorView<'s> {
        let bytes = &self.files[*file].bytes()[info.range.clone()];
        TensorView { name: &info.name, dtype: info.dtype, shape: &info.shape, bytes }
    }

    /// Every tensor, by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.tensors.values().map(|entry| self.view(entry))
    }

    /// `__metadata__` of the safetensors files, all together.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Metadata of a GGUF file; `None` for other files.
    pub fn gguf_metadata(&self) -> Option<&[(String, GgufValue)]> {
        self.gguf.as_deref()
    }

    /// `config.json` beside the tensors, or what the metadata of a lone file says in its place.
    pub fn config(&self) -> Option<&JsonFile> {
        self.config.as_ref()
    }

    /// `hf_quant_config.json` beside the tensors.
    pub fn hf_quant_config(&self) -> Option<&JsonFile> {
        self.hf_quant_config.as_ref()
    }

    /// How many tensors there are and what a few are called, for messages.
    pub(crate) fn names(&self) -> String {
        let few = self.tensors.keys().take(3).map(|name| format!("`{name}`"));
        match self.tensors.len() {
            0 => "no tensors".into(),
            count @ ..=3 => format!("{count} tensors: {}", list(few)),
            count => format!("{count} tensors, such as {}", list(few)),
        }
    }
}

/// A shard must lie beside its index: a path in an index could point anywhere.
fn is_plain_file_name(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|n| n == name) && name.ends_with(".safetensors")
}

/// Reads a JSON object; `None` if there is no such file.
fn read_json(path: &Path) -> Result<Option<JsonFile>, Error> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(path, "read", e)),
    };
    let value = json::object(&text, path, "the file")?;
    Ok(Some(JsonFile { path: path.into(), value }))
}
