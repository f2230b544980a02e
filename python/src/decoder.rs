//! `DecoderLayer`: one token or a prompt through a whole decoder layer in one call; or up to its MLP, where that is a module that
//! Python calls.

use std::cell::RefCell;
use std::sync::Mutex;

use dualgemm::cpu::CpuOptions;
use dualgemm::cpu::attention::{Causal, Heads, Prepared, is_available};
use dualgemm::cpu::token::{LayerDesc, Norm, Part, TokenLayer, Tokens, takes_prompts};
use dualgemm::formats::{FloatMatrix, FloatType, Matrix, match_floats};
use dualgemm::gemm::{AOperand, OutputMut, QuantizeA};
use dualgemm::{AnyRunner, Error, LayerCall, Target};
use half::{bf16, f16};
use pyo3::prelude::*;

use crate::array::{Array, Dtype};
use crate::destination::output;
use crate::error::{Kind, facade, refuse};
use crate::facts::float_values;
use crate::float_linear::FloatLinear;
use crate::linear::Linear;
use crate::mlp::Mlp;
use crate::operand::floats;
use crate::packed::Packed;
use crate::pool::Threads;
use crate::runners::{self, Problem, Product, ProductRunner, Waiting, Weights, cpu_options, is_small};

/// Writes what enters the MLP for the caller, whose MLP it is; to the layer the MLP is 0.
fn hand_over(a: &AOperand<'_>, y: OutputMut<'_>, to: Option<&mut OutputMut<'_>>) -> Result<(), Error> {
    fn copy<T: Copy + Default>(a: &Matrix<'_, T>, y: &mut [T], to: &mut [T]) -> bool {
        y.fill(T::default());
        let fits = to.len() == a.rows() * a.cols();
        if fits {
            to.chunks_exact_mut(a.cols()).enumerate().for_each(|(row, to)| to.copy_from_slice(a.row(row)));
        }
        fits
    }
    let done = match (a, y, to) {
        (AOperand::Float(FloatMatrix::F32(a)), OutputMut::F32(y), Some(OutputMut::F32(to))) => copy(a, y, to),
        (AOperand::Float(FloatMatrix::F16(a)), OutputMut::F16(y), Some(OutputMut::F16(to))) => copy(a, y, to),
        (AOperand::Float(FloatMatrix::Bf16(a)), OutputMut::Bf16(y), Some(OutputMut::Bf16(to))) => {
            copy(a, y, to)
        }
        _ => false,
    };
    if done {
        Ok(())
    } else {
        Err(Error::operand("normed", "missing or another", "an array like x, which the MLP reads"))
    }
}

/// A layer and its products: queries, keys, values, what follows attention; and the MLP, if it is part of the call.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Shape {
    layer: LayerDesc,
    products: [Option<Product>; 5],
}

/// What computes it.
struct Runners {
    layer: TokenLayer,
    products: Vec<Option<ProductRunner>>,
}

impl Problem for Shape {
    type Runner = Runners;

    fn runner(&self, target: &Target) -> Result<Runners, Error> {
        let options = cpu_options(target);
        // As many threads as it is worth.
        let of = |product: Product| {
            let threads = if is_small(&product) { Some(1) } else { options.threads };
            product.runner(&Target::Cpu(CpuOptions { threads, ..options }))
        };
        let products = self.products.iter().map(|product| product.map(of).transpose());
        Ok(Runners {
            layer: TokenLayer::new(&self.layer, options)?,
            products: products.collect::<Result<_, _>>()?,
        })
    }

    fn waiting() -> &'static Mutex<Vec<Waiting<Self>>> {
        static WAITING: Mutex<Vec<Waiting<Shape>>> = Mutex::new(Vec::new());
        &WAITING
    }

    fn bytes(&self) -> usize {
        let LayerDesc { rows, hidden, heads, kv_heads, head_dim, .. } = self.layer;
        let own = rows.saturating_mul(8 * hidden + (8 * heads + 12 * kv_heads) * head_dim);
        own + self.products.iter().flatten().map(Product::bytes).sum::<usize>()
    }

    fn multiplications(&self) -> Option<usize> {
        self.products.iter().flatten().map(Product::multiplications).sum()
    }
}

/// The weights of a linear layer.
#[derive(FromPyObject)]
pub enum LayerWeights {
    Packed(Py<Linear>),
    Floats(Py<FloatLinear>),
}

impl LayerWeights {
    fn shape(&self, py: Python<'_>) -> (usize, usize) {
        match self {
            Self::Packed(linear) => linear.bind(py).as_super().get().layer.shape.ends(),
            Self::Floats(linear) => linear.get().shape,
        }
    }

    fn product(&self, py: Python<'_>, call: &LayerCall, rows: usize) -> Product {
        match self {
            Self::Packed(linear) => {
                Product::Packed(linear.bind(py).as_super().get().layer.shape.describe(call))
            }
            Self::Floats(linear) => linear.get().of_rows(rows),
        }
    }
}

/// The weights of a layer's products.
#[pyclass(module = "dualgemm", frozen)]
pub struct DecoderLayer {
    linears: [LayerWeights; 4],
    mlp: Option<Py<Mlp>>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    hidden: usize,
    norms_round_once: bool,
}

/// The weights of a norm, and what it adds to the mean.
type NormOf<'py> = (Bound<'py, PyAny>, f32);

#[pymethods]
impl DecoderLayer {
    #[new]
    #[pyo3(signature = (linears, mlp, heads, head_dim, norms_round_once = false))]
    fn new(
        py: Python<'_>,
        linears: [LayerWeights; 4],
        mlp: Option<Py<Mlp>>,
        heads: usize,
        head_dim: usize,
        norms_round_once: bool,
    ) -> PyResult<Self> {
        let [q, k, v, o] = linears.each_ref().map(|linear| linear.shape(py));
        let (hidden, of_queries) = (q.1, heads * head_dim);
        let y = mlp.as_ref().map_or((hidden, hidden), |mlp| packed(mlp, py).layer.shape.ends());
        let fits = head_dim > 0 && k.0.is_multiple_of(head_dim) && q.0 == of_queries;
        if !fits || [k, v, o, y] != [(k.0, hidden), (k.0, hidden), (hidden, of_queries), (hidden, hidden)] {
            return Err(Kind::Operand.raise(format!(
                "q, k, v, o and the MLP are {q:?}, {k:?}, {v:?}, {o:?} and {y:?}, which is no layer of {heads} heads of \
                 {head_dim}"
            )));
        }
        Ok(Self { kv_heads: k.0 / head_dim, linears, mlp, heads, head_dim, hidden, norms_round_once })
    }

    /// Whether it takes prompts in bf16 on this machine.
    #[getter]
    fn takes_prompts(&self) -> bool {
        takes_prompts(FloatType::Bf16, self.head_dim)
    }

    /// Computes a token, or a prompt of more. `norms` are those before attention and before the MLP, and of queries and keys in
    /// families that have them; `rotation` is the cosines and sines; `cache` the keys and values, `[…, kv_heads, room, head_dim]`, where
    /// `len` tokens are there, none before a prompt, and the first `unseen` are not attended to. Without an MLP, `out` is what it is
    /// added to, and `normed` what it reads. `sinks` are those of each head, in families that have them.
    #[pyo3(signature = (x, norms, rotation, scale, cache, len, unseen, out, normed = None, sinks = None))]
    #[allow(clippy::too_many_arguments, reason = "Python passes them one by one")]
    fn _run(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        norms: Vec<NormOf<'_>>,
        rotation: [Bound<'_, PyAny>; 2],
        scale: f32,
        cache: [Bound<'_, PyAny>; 2],
        len: usize,
        unseen: usize,
        out: &Bound<'_, PyAny>,
        normed: Option<&Bound<'_, PyAny>>,
        sinks: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let x = Array::on_cpu("x", x)?;
        let norms = norms.into_iter().map(|(weight, eps)| Ok((Array::on_cpu("a norm", &weight)?, eps)));
        let norms = norms.collect::<PyResult<Vec<_>>>()?;
        let [cos, sin] = [Array::on_cpu("cos", &rotation[0])?, Array::on_cpu("sin", &rotation[1])?];
        let [mut keys, mut values] = [Array::on_cpu("keys", &cache[0])?, Array::on_cpu("values", &cache[1])?];
        let mut out = Array::on_cpu("out", out)?;
        let mut normed = normed.map(|normed| Array::on_cpu("normed", normed)).transpose()?;
        let sinks = sinks.map(|sinks| Array::on_cpu("sinks", sinks)).transpose()?;
        let read = [&x, &cos, &sin].into_iter().chain(&sinks).chain(norms.iter().map(|(weight, _)| weight));
        let read: Vec<_> = read.map(Array::extent).collect();
        let written: Vec<_> = [&keys, &values, &out].into_iter().chain(&normed).map(Array::extent).collect();
        for (i, one) in written.iter().enumerate() {
            if written[..i].iter().chain(&read).any(|other| one.start < other.end && other.start < one.end) {
                refuse!(Operand, "keys, values, out and normed: share memory with another operand");
            }
        }
        let room = keys.shape.len().checked_sub(2).map_or(0, |at| keys.shape[at]);
        let row_of = |at: usize| -> PyResult<Norm<'_>> {
            let (weight, eps) = (matrix("a norm", &norms[at].0, 1)?, norms[at].1);
            Ok(Norm { weight, eps, rounds_once: self.norms_round_once })
        };
        let head_norms = match norms.len() {
            2 => None,
            4 => Some([row_of(2)?, row_of(3)?]),
            other => return Err(Kind::Operand.raise(format!("norms: are {other}; 2 or 4 are needed"))),
        };
        let rows = x.shape.iter().rev().skip(1).product();
        let tokens = Tokens {
            x: matrix("x", &x, rows)?,
            norms: [row_of(0)?, row_of(1)?],
            head_norms,
            rotation: [matrix("cos", &cos, rows)?, matrix("sin", &sin, rows)?],
            scale,
            sinks: sinks.as_ref().map(|sinks| matrix("sinks", sinks, 1)).transpose()?,
            cache: [output("keys", &mut keys)?, output("values", &mut values)?],
            room,
            len,
            unseen,
            out: output("out", &mut out)?,
        };
        let mut normed = normed.as_mut().map(|normed| output("normed", normed)).transpose()?;
        let shape = self.shape(py, tokens.x.float_type(), rows);
        let arrays = self.linears.iter().map(|linear| match linear {
            LayerWeights::Packed(_) => Ok(None),
            LayerWeights::Floats(linear) => linear.get().operands(py).map(Some),
        });
        let arrays = arrays.collect::<PyResult<Vec<_>>>()?;
        let linears = self.linears.iter().zip(&arrays).map(|(linear, in_floats)| {
            Ok(match (linear, in_floats) {
                (_, Some((w, bias))) => Weights::Floats(floats("w", w)?, bias.as_deref()),
                (LayerWeights::Packed(linear), None) => {
                    Weights::Packed(&linear.bind(py).as_super().get().layer.weights, None)
                }
                (LayerWeights::Floats(_), None) => refuse!(Operand, "w: is missing"),
            })
        });
        let mlp = self.mlp.as_ref().map(|mlp| Ok(Weights::Packed(&packed(mlp, py).layer.weights, None)));
        let weights = linears.chain(mlp).collect::<PyResult<Vec<_>>>()?;
        runners::run(py, shape, &Target::default(), |runners| {
            let Runners { layer, products } = runners;
            layer.run(tokens, |a: &AOperand<'_>, parts: &mut [(Part, OutputMut<'_>)]| {
                let first = parts[0].0 as usize;
                let of = &mut products[first..first + parts.len()];
                if parts.len() > 1 && of.iter().all(|of| matches!(of, Some(ProductRunner::Packed(_)))) {
                    return run_all(a, of, &weights[first..], parts);
                }
                for (product, (part, c)) in of.iter_mut().zip(parts) {
                    let c = std::mem::replace(c, OutputMut::F32(&mut []));
                    match product {
                        Some(product) => product.run(a, &weights[*part as usize], (c, false)).map(drop)?,
                        None => hand_over(a, c, normed.as_mut())?,
                    }
                }
                Ok(())
            })
        })
    }
}

/// Products in 4 bits of one A, together.
fn run_all(
    a: &AOperand<'_>,
    of: &mut [Option<ProductRunner>],
    weights: &[Weights<'_>],
    parts: &mut [(Part, OutputMut<'_>)],
) -> Result<(), Error> {
    let mut products = Vec::new();
    for ((product, weights), (_, c)) in of.iter_mut().zip(weights).zip(parts) {
        if let (Some(ProductRunner::Packed(runner)), Weights::Packed(weights, None)) = (product, weights) {
            products.push((runner, *weights, std::mem::replace(c, OutputMut::F32(&mut []))));
        }
    }
    AnyRunner::run_all(a, &mut products)
}

/// The heads of an array `[1, heads, rows, dim]` of bf16, and its rows and features; `None` if it is another.
fn heads<'a>(array: &'a Array<'_>) -> Option<(Heads<'a>, [usize; 2])> {
    let (&[1, heads, rows, dim], &[_, head, row, 1]) = (&array.shape[..], &array.strides[..]) else {
        return None;
    };
    let elements = (array.dtype == Dtype::Bf16).then(|| array.as_span::<bf16>())??;
    let (head_stride, row_stride) = (head as usize, row as usize);
    Some((Heads { elements, heads, head_stride, row_stride }, [rows, dim]))
}

/// Writes what a prompt's tokens attend to, each to itself and those before, of q `[1, heads, rows, dim]` and k and v `[1, kv_heads,
/// rows, dim]`, into out `[1, rows, heads, dim]`. False, and nothing is written, if this processor or these arrays are not those that
/// it is for.
#[pyfunction]
pub fn attend_causal(
    py: Python<'_>,
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    scale: f32,
    out: &Bound<'_, PyAny>,
) -> PyResult<bool> {
    thread_local! {
        static PREPARED: RefCell<Prepared> = RefCell::default();
    }
    let [q, k, v] = [Array::on_cpu("q", q)?, Array::on_cpu("k", k)?, Array::on_cpu("v", v)?];
    let mut out = Array::on_cpu("out", out)?;
    let (Some((qs, shape)), Some((ks, k_shape)), Some((vs, v_shape))) = (heads(&q), heads(&k), heads(&v))
    else {
        return Ok(false);
    };
    let [rows, dim] = shape;
    if k_shape != shape || v_shape != shape || !is_available(dim) {
        return Ok(false);
    }
    let extent = out.extent();
    if [&q, &k, &v].iter().any(|read| read.extent().start < extent.end && extent.start < read.extent().end) {
        refuse!(Operand, "out: shares memory with another operand");
    }
    let OutputMut::Bf16(to) = output("out", &mut out)? else { return Ok(false) };
    let (threads, causal) = (Threads::current(py)?, Causal { q: qs, k: ks, v: vs, rows, dim, scale });
    let done = PREPARED.with_borrow_mut(|prepared| {
        let mut work = || causal.run(to, threads.count(), prepared);
        // One thread needs no other.
        py.detach(|| if threads.count() == 1 { work() } else { threads.install(work) })
    });
    done.map(|()| true).map_err(facade)
}

/// How many entries of a mask of one token, the first ones, hide what they stand for: zeros of bytes, or the lowest number of a type
/// of floats. `None` if a later one is not seen as it is, or none is.
#[pyfunction]
pub fn unseen(mask: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    let array = Array::on_cpu("mask", mask)?;
    let (lowest, added) = match array.dtype {
        Dtype::Byte => {
            let seen = array.gather::<u8>("mask")?.into_iter();
            (-1.0, seen.map(|seen| if seen == 0 { -1.0 } else { 0.0 }).collect())
        }
        Dtype::F16 => (f16::MIN.to_f32(), float_values("mask", &array)?),
        Dtype::Bf16 => (bf16::MIN.to_f32(), float_values("mask", &array)?),
        _ => (f32::MIN, float_values("mask", &array)?),
    };
    let (unseen, seen) = added.split_at(added.iter().take_while(|&&x| x <= lowest).count());
    Ok((!seen.is_empty() && seen.iter().all(|&x| x == 0.0)).then_some(unseen.len()))
}

fn packed<'a>(mlp: &'a Py<Mlp>, py: Python<'a>) -> &'a Packed {
    mlp.bind(py).as_super().as_super().get()
}

impl DecoderLayer {
    fn shape(&self, py: Python<'_>, float: FloatType, rows: usize) -> Shape {
        let call = LayerCall::new(rows, float.into(), float.into());
        let [q, k, v, o] = self.linears.each_ref().map(|linear| Some(linear.product(py, &call, rows)));
        let mlp = self.mlp.as_ref().map(|mlp| {
            let (facts, layer) = (&mlp.bind(py).as_super().get().facts, &packed(mlp, py).layer);
            let call = facts.call(rows, float.into(), float.into(), [QuantizeA::No; 2], &layer.target);
            Product::Packed(layer.shape.describe(&call))
        });
        let Self { hidden, heads, kv_heads, head_dim, .. } = *self;
        Shape {
            layer: LayerDesc { float, hidden, heads, kv_heads, head_dim, rows },
            products: [q, k, v, o, mlp],
        }
    }
}

/// All elements of an array of floats as so many rows.
fn matrix<'a>(name: &str, array: &'a Array<'_>, rows: usize) -> PyResult<FloatMatrix<'a>> {
    fn of<'a, T: Copy>(name: &str, array: &'a Array<'_>, rows: usize) -> PyResult<Matrix<'a, T>> {
        let cols = array.len() / rows.max(1);
        match array.as_slice::<T>() {
            Some(values) => Matrix::new(name, rows, cols, values),
            None => Matrix::new(name, rows, cols, array.gather::<T>(name)?),
        }
        .map_err(facade)
    }
    Ok(match_floats!(array.float_type(name)?, FloatType => FloatMatrix(of(name, array, rows)?)))
}
