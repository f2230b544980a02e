//! Float weights to quantize: tensors as they are, and the matrices in the two tensors that hold all experts of a layer.
//!
//! transformers 5 has `experts.gate_up_proj` `[experts, 2 · n, k]` and `experts.down_proj` `[experts, k, n]`, Granite's files
//! `input_linear` and `output_linear`. In gpt-oss, Llama 4 and others the last two dimensions are the other way round; both
//! shapes together tell which. llm-compressor and ModelOpt write `experts.E.{gate,up,down}_proj` for them, but ModelOpt
//! keeps Llama 4's and gpt-oss's as they are.
//!
//! Sources: `llmcompressor/modeling/moe` of llm-compressor 0.14, `modelopt/torch/export/moe_utils.py` and
//! `_export_quantized_weight` of ModelOpt 0.47.

use std::collections::BTreeMap;

use bytemuck::Pod;
use dualgemm_formats::{FloatMatrix, Matrix, match_floats};

use crate::families::model_types;
use crate::linear::kept;
use crate::module::{MlpKind, Place, Projection};
use crate::tensor::cast;
use crate::{Dtype, Error, GateUpOrder, Half, TensorFiles, TensorView};

/// Families whose experts ModelOpt keeps in one tensor of each projection (`Llama4TextExperts`, `GptOssExperts`).
const ONE_TENSOR: &[&str] = &["llama4", "llama4_text", "gpt_oss"];

/// A matrix of floats, `[out, in]`.
#[derive(Debug, Clone)]
pub struct FloatWeight<'a> {
    /// The tensor's name, or that which a part of it gets.
    pub name: String,
    /// Modules whose inputs go into it, as a calibration names them.
    pub inputs: Vec<String>,
    /// How many matrices lie in it one below the other, where it is those of all experts.
    pub experts: Option<usize>,
    tensor: TensorView<'a>,
    part: Part,
}

#[derive(Debug, Clone, Copy)]
enum Part {
    Whole,
    /// Of the experts from the first on, all of one shape. Of a projection that is gate and up in this order, one half.
    Experts {
        first: usize,
        half: Option<(GateUpOrder, Half)>,
        transposed: bool,
    },
}

impl<'a> From<TensorView<'a>> for FloatWeight<'a> {
    fn from(tensor: TensorView<'a>) -> Self {
        let module = tensor.name.strip_suffix(".weight").unwrap_or(tensor.name);
        Self {
            name: tensor.name.into(),
            inputs: vec![module.into()],
            experts: None,
            tensor,
            part: Part::Whole,
        }
    }
}

impl<'a> FloatWeight<'a> {
    /// Reads it; parts of tensors are copied.
    ///
    /// # Errors
    /// If the type is not F32, F16 or BF16.
    pub fn floats(&self) -> Result<FloatMatrix<'a>, Error> {
        let Part::Experts { first, half, transposed } = self.part else { return self.tensor.float_matrix() };
        let (rows, k) = rows_and_k(&self.tensor, transposed);
        let experts = first..first + self.experts.unwrap_or(1);
        let n = if half.is_some() { rows / 2 } else { rows };
        let row = |i| half.map_or(i, |(order, half)| order.fused_row(half, i, n));
        let bytes =
            &self.tensor.bytes[experts.start * self.expert_bytes()..experts.end * self.expert_bytes()];
        let gather = Gather { experts: experts.len(), rows, k, n, transposed };
        let name = self.name.as_str();
        let fault = |source| Error::Format { file: self.tensor.name.into(), source };
        let matrix = match_floats!(self.tensor.dtype,
            Dtype => FloatMatrix(gather.matrix(name, bytes, row).map_err(fault)?),
            _ => return Err(self.tensor.dtype_error("a float matrix", "F32, F16 or BF16")));
        Ok(matrix)
    }

    /// Elements per row.
    pub fn k(&self) -> usize {
        match self.part {
            Part::Whole => self.tensor.shape.last().copied().unwrap_or(0),
            Part::Experts { transposed, .. } => rows_and_k(&self.tensor, transposed).1,
        }
    }

    fn expert_bytes(&self) -> usize {
        self.tensor.bytes.len() / self.tensor.shape[0]
    }
}

/// `[out, in]` of each matrix in a tensor of three dimensions.
fn rows_and_k(tensor: &TensorView<'_>, transposed: bool) -> (usize, usize) {
    let (a, b) = (tensor.shape[1], tensor.shape[2]);
    if transposed { (b, a) } else { (a, b) }
}

struct Gather {
    experts: usize,
    rows: usize,
    k: usize,
    /// Rows of each expert that are taken.
    n: usize,
    transposed: bool,
}

impl Gather {
    fn matrix<T: Pod>(
        &self,
        name: &str,
        bytes: &[u8],
        row: impl Fn(usize) -> usize,
    ) -> Result<Matrix<'static, T>, dualgemm_formats::Error> {
        let Self { experts, rows, k, n, transposed } = *self;
        let (all, mut out) = (cast::<T>(bytes), Vec::with_capacity(experts * n * k));
        for expert in all.chunks_exact(rows * k) {
            for row in (0..n).map(&row) {
                match transposed {
                    false => out.extend_from_slice(&expert[row * k..(row + 1) * k]),
                    true => out.extend((0..k).map(|col| expert[col * rows + row])),
                }
            }
        }
        Matrix::new(name, experts * n, k, out)
    }
}

/// The experts of a layer in tensors of three dimensions.
#[derive(Debug, Clone)]
pub struct FusedExperts<'a> {
    /// What the modules of single experts begin with: `model.layers.3.mlp.experts`.
    path: String,
    gate_up: TensorView<'a>,
    down: TensorView<'a>,
    biases: Vec<(TensorView<'a>, Projection)>,
    order: GateUpOrder,
    transposed: bool,
    one_tensor: bool,
}

/// A tensor that stays as it is, and why.
pub type Left<'a> = (TensorView<'a>, String);

impl<'a> FusedExperts<'a> {
    /// Those of all layers, and the tensors of experts that cannot be taken apart.
    pub fn all(files: &'a TensorFiles) -> (Vec<Self>, Vec<Left<'a>>) {
        let mut mlps: BTreeMap<String, Vec<(TensorView<'a>, Projection)>> = BTreeMap::new();
        let (mut found, mut left) = (Vec::new(), Vec::new());
        for tensor in files.tensors().filter(|t| t.dtype.is_float()) {
            let module = tensor.name.strip_suffix(".weight").unwrap_or(tensor.name);
            let place = Place::parse(module).filter(|p| p.kind == MlpKind::Experts && p.expert.is_none());
            match place.filter(|_| tensor.shape.len() == 3) {
                Some(place) => mlps.entry(place.path).or_default().push((tensor, place.projection)),
                None if is_of_experts(&tensor) => {
                    left.push((tensor, "experts in one tensor under a name that no producer knows".into()));
                }
                None => {}
            }
        }
        for (path, tensors) in mlps {
            match Self::of(files, path, &tensors) {
                Ok(experts) => found.push(experts),
                Err(why) => left.extend(tensors.into_iter().map(|(tensor, _)| (tensor, why.clone()))),
            }
        }
        (found, left)
    }

    fn of(
        files: &'a TensorFiles,
        path: String,
        tensors: &[(TensorView<'a>, Projection)],
    ) -> Result<Self, String> {
        let mut tensors = tensors.to_vec();
        tensors.sort_by_key(|(_, projection)| *projection);
        let [(gate_up, Projection::GateUp), (down, Projection::Down)] = tensors.as_slice() else {
            let names = tensors.iter().map(|(t, _)| t.name);
            let names = crate::error::list(names);
            return Err(format!("experts in {names}; producers take apart gate and up in one, and down"));
        };
        if let Some(what) = kept(gate_up.name) {
            return Err(what.to_string());
        }
        let fits = |transposed| {
            let ((two_n, k), (rows, n)) = (rows_and_k(gate_up, transposed), rows_and_k(down, transposed));
            two_n == 2 * n && k == rows && gate_up.shape[0] == down.shape[0] && gate_up.elements() > 0
        };
        let Some(transposed) = [false, true].into_iter().find(|&transposed| fits(transposed)) else {
            return Err(format!(
                "experts of shapes {:?} and {:?}, which are not [experts, 2 · n, k] and [experts, k, n]",
                gate_up.shape, down.shape
            ));
        };
        let config = files.config().map(|json| &json.value);
        let types: Vec<&str> = config.into_iter().flat_map(model_types).collect();
        // In transformers 5 the experts of every family are gate, then up, but for gpt-oss, whose row of the table says so.
        let of_family = |family: &crate::Family| {
            let module = gate_up.name.strip_suffix(".weight").unwrap_or(gate_up.name);
            let of_transformers = module.ends_with("experts.gate_up_proj").then_some(GateUpOrder::GateUp);
            family.fused_order(module).or(of_transformers)
        };
        let Some(order) = files.family().and_then(of_family) else {
            return Err(match types.first() {
                Some(name) => {
                    format!("experts whose rows of gate and up are in an order that is not known of {name}")
                }
                None => {
                    "experts, and no config.json says in which order their rows of gate and up are".into()
                }
            });
        };
        let biases = biases(files, gate_up, down, transposed)?;
        let one_tensor = transposed && types.iter().any(|name| ONE_TENSOR.contains(name));
        Ok(Self {
            path: all_experts(path),
            gate_up: gate_up.clone(),
            down: down.clone(),
            biases,
            order,
            transposed,
            one_tensor,
        })
    }

    /// Whether ModelOpt writes one tensor of each projection for them.
    pub fn stays_one_in_modelopt(&self) -> bool {
        self.one_tensor
    }

    /// The tensors with weights.
    pub fn weights(&self) -> [&TensorView<'a>; 2] {
        [&self.gate_up, &self.down]
    }

    /// The tensors with biases.
    pub fn biases(&self) -> impl Iterator<Item = &TensorView<'a>> {
        self.biases.iter().map(|(tensor, _)| tensor)
    }

    fn names(&self, last: &str) -> Vec<String> {
        (0..self.gate_up.shape[0]).map(|expert| format!("{}.{expert}.{last}", self.path)).collect()
    }

    /// Gate, up and down of each expert, under names of linear layers.
    pub fn apart(&self) -> Vec<FloatWeight<'a>> {
        let mut weights = Vec::new();
        for (last, tensor, half) in [
            ("gate_proj", &self.gate_up, Some((self.order, Half::Gate))),
            ("up_proj", &self.gate_up, Some((self.order, Half::Up))),
            ("down_proj", &self.down, None),
        ] {
            weights.extend(self.names(last).into_iter().enumerate().map(|(first, module)| FloatWeight {
                name: format!("{module}.weight"),
                inputs: vec![module],
                experts: None,
                tensor: tensor.clone(),
                part: Part::Experts { first, half, transposed: self.transposed },
            }));
        }
        weights
    }

    /// Gate and up of all experts, and down of all, under the names of their tensors.
    pub fn together(&self) -> [FloatWeight<'a>; 2] {
        [("gate_proj", &self.gate_up), ("down_proj", &self.down)].map(|(input, tensor)| FloatWeight {
            name: tensor.name.into(),
            inputs: self.names(input),
            experts: Some(tensor.shape[0]),
            tensor: tensor.clone(),
            part: Part::Experts { first: 0, half: None, transposed: self.transposed },
        })
    }

    /// The biases of [`apart`](Self::apart), in the file's type.
    #[cfg(feature = "write")]
    pub fn biases_apart(&self) -> Vec<crate::TensorOut<'static>> {
        let halves = [("gate_proj", Some(Half::Gate)), ("up_proj", Some(Half::Up)), ("down_proj", None)];
        let mut out = Vec::new();
        for (tensor, projection) in &self.biases {
            let (rows, width) = (tensor.shape[1], tensor.bytes.len() / tensor.elements());
            let is_both = *projection == Projection::GateUp;
            for (last, half) in halves.into_iter().filter(|(_, half)| half.is_some() == is_both) {
                let n = if is_both { rows / 2 } else { rows };
                let row = |i| half.map_or(i, |half| self.order.fused_row(half, i, n));
                for (expert, module) in self.names(last).into_iter().enumerate() {
                    let at = |i| (expert * rows + row(i)) * width;
                    let bytes: Vec<u8> =
                        (0..n).flat_map(|i| &tensor.bytes[at(i)..at(i) + width]).copied().collect();
                    out.push(crate::TensorOut::new(format!("{module}.bias"), tensor.dtype, [n], bytes));
                }
            }
        }
        out
    }
}

/// The module that single experts are below: Granite's tensors are beside it.
fn all_experts(path: String) -> String {
    if path.rsplit('.').next() == Some("experts") { path } else { format!("{path}.experts") }
}

/// The biases of two projections, whose tensors have `_bias` or `.bias` behind the name of the module.
fn biases<'a>(
    files: &'a TensorFiles,
    gate_up: &TensorView<'a>,
    down: &TensorView<'a>,
    transposed: bool,
) -> Result<Vec<(TensorView<'a>, Projection)>, String> {
    let mut found = Vec::new();
    for (weight, projection) in [(gate_up, Projection::GateUp), (down, Projection::Down)] {
        let module = weight.name.strip_suffix(".weight").unwrap_or(weight.name);
        let named = ["_bias", ".bias"].iter().filter_map(|ending| files.get(&format!("{module}{ending}")));
        for bias in named {
            let shape = [weight.shape[0], rows_and_k(weight, transposed).0];
            if !bias.dtype.is_float() || bias.shape != shape {
                return Err(format!(
                    "experts whose {} is {} {:?}, not {shape:?}",
                    bias.name, bias.dtype, bias.shape
                ));
            }
            found.push((bias, projection));
        }
    }
    Ok(found)
}

/// Whether a tensor is a weight of all experts that no rule for linear layers takes.
fn is_of_experts(tensor: &TensorView<'_>) -> bool {
    let below = tensor.name.split('.').any(|part| part == "experts" || part == "local_experts");
    below
        && tensor.shape.len() > 1
        && !tensor.name.ends_with("bias")
        && (tensor.shape.len() > 2 || !tensor.name.ends_with(".weight"))
}
