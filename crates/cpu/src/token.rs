//! One token through a decoder layer of the Llama kind: all that the layer computes beside its matrix products, which the caller
//! makes.
//!
//! ```text
//! q, k, v = products(norm(x))            q and k normed by head in some families, then rotated
//! cache  += k, v
//! x       = x + product(attention(q, cache))
//! x       = x + MLP(norm(x))
//! ```
//!
//! Each step rounds its result to the type of x, as torch does with the same steps, so that a layer gives the same bits but for
//! the order of the sums in norms and attention. Attention is f32 inside: see `attention`.

mod attention;

use dualgemm_formats::{FloatMatrix, FloatType, Matrix};
use dualgemm_gemm::{AOperand, OutputMut};
use half::{bf16, f16};

use crate::aligned::Aligned;
use crate::float_linear::Element;
use crate::isa::{Available, InstructionSet, Work};
use crate::{CpuOptions, Error, Isa, vmath};

/// A product that a layer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The queries of all heads.
    Query,
    /// The keys.
    Key,
    /// The values.
    Value,
    /// What follows attention.
    Output,
    /// The whole MLP.
    Mlp,
}

/// The shape of a layer and the type of its activations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerDesc {
    /// Type of the activations, of the norms' weights and of the cache.
    pub float: FloatType,
    /// Features of x.
    pub hidden: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, each for as many heads of queries.
    pub kv_heads: usize,
    /// Features of a head: a multiple of 16 up to [`MAX_HEAD_DIM`](Self::MAX_HEAD_DIM).
    pub head_dim: usize,
}

impl LayerDesc {
    /// Most features of a head.
    pub const MAX_HEAD_DIM: usize = 512;

    fn check(&self) -> Result<(), Error> {
        let Self { hidden, heads, kv_heads, head_dim, .. } = *self;
        let fault = |what, found: String, expected: &str| {
            Err(Error::NotPlanned { what, found, expected: expected.into() })
        };
        if !head_dim.is_multiple_of(16) || !(1..=Self::MAX_HEAD_DIM).contains(&head_dim) {
            return fault("head_dim", head_dim.to_string(), "multiples of 16 up to 512");
        }
        if hidden == 0 || kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            let found = format!("{hidden} features, {heads} heads and {kv_heads} heads of keys");
            return fault("the layer", found, "at least one of each, and heads that share keys evenly");
        }
        Ok(())
    }
}

/// The norm by root mean square, `weight · round(x / √(mean(x²) + eps))`.
#[derive(Debug)]
pub struct Norm<'a> {
    /// One row.
    pub weight: FloatMatrix<'a>,
    /// What is added to the mean.
    pub eps: f32,
}

/// The operands of one token. Vectors are matrices of one row.
#[derive(Debug)]
pub struct Token<'a> {
    /// What enters the layer.
    pub x: FloatMatrix<'a>,
    /// Before attention, and before the MLP.
    pub norms: [Norm<'a>; 2],
    /// Of each head's query and key, in families that have them.
    pub head_norms: Option<[Norm<'a>; 2]>,
    /// Cosines and sines of the token's position, for all features of a head; the second half repeats the first.
    pub rotation: [FloatMatrix<'a>; 2],
    /// The factor of products of queries and keys.
    pub scale: f32,
    /// Keys and values of the tokens before, `[kv_heads, room, head_dim]`. The token's own follow the first `len`.
    pub cache: [OutputMut<'a>; 2],
    /// Tokens that the cache has room for.
    pub room: usize,
    /// Tokens before, fewer than that.
    pub len: usize,
    /// What leaves the layer.
    pub out: OutputMut<'a>,
}

/// The buffers of a layer's tokens. Runs allocate nothing.
#[derive(Debug)]
pub struct TokenLayer {
    desc: LayerDesc,
    isa: Available,
    threads: usize,
    room: Aligned<f32>,
}

impl TokenLayer {
    /// Allocates the buffers.
    ///
    /// # Errors
    /// If the shape is not one that is computed, or this machine lacks the instruction set that `options` names.
    pub fn new(desc: &LayerDesc, options: CpuOptions) -> Result<Self, Error> {
        desc.check()?;
        let isa = options.isa.map_or_else(Isa::detect, Isa::require)?.checked()?;
        let threads = options.threads.unwrap_or_else(rayon::current_num_threads).max(1);
        let room = Aligned::zeroed(2 * desc.hidden + 2 * (desc.heads + desc.kv_heads) * desc.head_dim);
        Ok(Self { desc: *desc, isa, threads, room })
    }

    /// Computes the token, adds its key and value to the cache and writes `out`. `product` computes the layer's products of a row.
    ///
    /// # Errors
    /// If an operand has another type or shape than the layer, and what `product` returns. The cache's first `len` tokens are as
    /// they were.
    pub fn run<E: From<Error>>(
        &mut self,
        token: Token<'_>,
        product: impl FnMut(Part, &AOperand<'_>, OutputMut<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        match self.desc.float {
            FloatType::F32 => self.run_as::<f32, E>(token, product),
            FloatType::F16 => self.run_as::<f16, E>(token, product),
            FloatType::Bf16 => self.run_as::<bf16, E>(token, product),
        }
    }

    fn run_as<T: Float, E: From<Error>>(
        &mut self,
        token: Token<'_>,
        mut product: impl FnMut(Part, &AOperand<'_>, OutputMut<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let LayerDesc { hidden, heads, kv_heads, head_dim, .. } = self.desc;
        let (isa, of_queries, of_keys) = (self.isa, heads * head_dim, kv_heads * head_dim);
        let x = row::<T>("x", &token.x, hidden)?;
        let [first, second] = &token.norms;
        let before_attention = norm("the norm before attention", first, hidden)?;
        let before_mlp = norm("the norm before the MLP", second, hidden)?;
        let of_query =
            token.head_norms.as_ref().map(|norms| norm("the norm of queries", &norms[0], head_dim));
        let of_key = token.head_norms.as_ref().map(|norms| norm("the norm of keys", &norms[1], head_dim));
        let head_norms = [of_query.transpose()?, of_key.transpose()?];
        let [cos, sin] = &token.rotation;
        let (cos, sin) = (row::<T>("cos", cos, head_dim)?, row::<T>("sin", sin, head_dim)?);
        let ([mut keys, mut values], mut out, room) = (token.cache, token.out, token.room);
        if token.len >= room {
            let (what, found) = ("the number of tokens before", token.len.to_string());
            return Err(Error::NotPlanned {
                what,
                found,
                expected: format!("less than the room for {room}"),
            }
            .into());
        }
        let keys = output::<T>("the keys", &mut keys, of_keys * room)?;
        let values = output::<T>("the values", &mut values, of_keys * room)?;
        let out = output::<T>("out", &mut out, hidden)?;

        let (normed, rest) = bytemuck::cast_slice_mut::<f32, T>(&mut self.room).split_at_mut(hidden);
        let (y, rest) = rest.split_at_mut(hidden);
        let (q, rest) = rest.split_at_mut(of_queries);
        let (attended, rest) = rest.split_at_mut(of_queries);
        let (k, rest) = rest.split_at_mut(of_keys);
        let v = &mut rest[..of_keys];

        normed.copy_from_slice(x);
        isa.dispatch(Rms { x: &mut *normed, norm: before_attention });
        let a = operand(normed)?;
        product(Part::Query, &a, T::into_output(q))?;
        product(Part::Key, &a, T::into_output(k))?;
        product(Part::Value, &a, T::into_output(v))?;
        for (of_heads, norm) in [&mut *q, &mut *k].into_iter().zip(head_norms) {
            isa.dispatch(Position { heads: of_heads, norm, cos, sin });
        }
        for (cache, new) in [(&mut *keys, &*k), (&mut *values, &*v)] {
            let of_heads = cache.chunks_exact_mut(room * head_dim).zip(new.chunks_exact(head_dim));
            of_heads.for_each(|(cache, new)| cache[token.len * head_dim..][..head_dim].copy_from_slice(new));
        }
        let cached = attention::Cached { keys, values, room, len: token.len + 1, head_dim };
        cached.attend(isa, self.threads, q, token.scale, attended);
        product(Part::Output, &operand(attended)?, T::into_output(y))?;
        out.copy_from_slice(x);
        isa.dispatch(Add { to: &mut *out, y: &*y });
        normed.copy_from_slice(out);
        isa.dispatch(Rms { x: &mut *normed, norm: before_mlp });
        product(Part::Mlp, &operand(normed)?, T::into_output(y))?;
        isa.dispatch(Add { to: out, y });
        Ok(())
    }
}

/// A type of activations.
trait Float: Element + Send + Sync {
    const NAME: &str;
    /// Rounds to nearest, ties to even.
    fn narrow(x: f32) -> Self;
    fn widen(self) -> f32;
    fn matrix<'m>(matrix: &'m FloatMatrix<'_>) -> Option<&'m Matrix<'m, Self>>;
    fn from_row(row: &[Self]) -> Result<FloatMatrix<'_>, dualgemm_formats::Error>;
    fn output<'o>(output: &'o mut OutputMut<'_>) -> Option<&'o mut [Self]>;
    fn into_output(row: &mut [Self]) -> OutputMut<'_>;

    /// The nearest value of this type.
    #[inline(always)]
    fn round(x: f32) -> f32 {
        Self::narrow(x).widen()
    }
}

macro_rules! floats {
    ($($float:ident $variant:ident: |$x:ident| $narrow:expr, |$y:ident| $widen:expr;)*) => {$(
        impl Float for $float {
            const NAME: &str = stringify!($float);

            #[inline(always)]
            fn narrow($x: f32) -> Self {
                $narrow
            }

            #[inline(always)]
            fn widen(self) -> f32 {
                let $y = self;
                $widen
            }

            fn matrix<'m>(matrix: &'m FloatMatrix<'_>) -> Option<&'m Matrix<'m, Self>> {
                if let FloatMatrix::$variant(matrix) = matrix { Some(matrix) } else { None }
            }

            fn from_row(row: &[Self]) -> Result<FloatMatrix<'_>, dualgemm_formats::Error> {
                Ok(FloatMatrix::$variant(Matrix::new("a row", 1, row.len(), row)?))
            }

            fn output<'o>(output: &'o mut OutputMut<'_>) -> Option<&'o mut [Self]> {
                if let OutputMut::$variant(output) = output { Some(output) } else { None }
            }

            fn into_output(row: &mut [Self]) -> OutputMut<'_> {
                OutputMut::$variant(row)
            }
        }
    )*};
}
floats! {
    f32 F32: |x| x, |y| y;
    f16 F16: |x| f16::from_f32(x), |y| y.to_f32();
    bf16 Bf16: |x| bf16::from_bits(vmath::bf16_bits(x)), |y| f32::from_bits(u32::from(y.to_bits()) << 16);
}

fn row<'m, T: Float>(what: &'static str, matrix: &'m FloatMatrix<'_>, len: usize) -> Result<&'m [T], Error> {
    match T::matrix(matrix) {
        Some(found) if (found.rows(), found.cols()) == (1, len) => Ok(found.row(0)),
        _ => {
            let found = format!("[{}, {}] of {:?}", matrix.rows(), matrix.cols(), matrix.float_type());
            Err(Error::NotPlanned { what, found, expected: format!("[1, {len}] of {}", T::NAME) })
        }
    }
}

/// A norm's weights and eps.
type Weights<'a, T> = (&'a [T], f32);

fn norm<'m, T: Float>(what: &'static str, norm: &'m Norm<'_>, len: usize) -> Result<Weights<'m, T>, Error> {
    Ok((row(what, &norm.weight, len)?, norm.eps))
}

fn output<'o, T: Float>(
    what: &'static str,
    output: &'o mut OutputMut<'_>,
    len: usize,
) -> Result<&'o mut [T], Error> {
    let fault = |found| Error::NotPlanned { what, found, expected: format!("{len} values of {}", T::NAME) };
    let found = T::output(output).ok_or_else(|| fault("of another type".into()))?;
    if found.len() == len { Ok(found) } else { Err(fault(format!("{} values", found.len()))) }
}

fn operand<T: Float>(row: &[T]) -> Result<AOperand<'_>, Error> {
    Ok(AOperand::Float(T::from_row(row)?))
}

/// Norms a vector.
#[inline(always)]
fn rms_norm<T: Float>(x: &mut [T], (weight, eps): Weights<'_, T>) {
    let mut lanes = [0.0f32; 16];
    for x in x.chunks(16) {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane += x.widen() * x.widen();
        }
    }
    let factor = 1.0 / (lanes.iter().sum::<f32>() / x.len() as f32 + eps).sqrt();
    for (x, w) in x.iter_mut().zip(weight) {
        *x = T::narrow(T::round(x.widen() * factor) * w.widen());
    }
}

struct Rms<'a, T> {
    x: &'a mut [T],
    norm: Weights<'a, T>,
}

impl<T: Float> Work for Rms<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        rms_norm(self.x, self.norm);
    }
}

/// Norms each head, if it has norms, and rotates it: features i and i + half are a pair.
struct Position<'a, T> {
    heads: &'a mut [T],
    norm: Option<Weights<'a, T>>,
    cos: &'a [T],
    sin: &'a [T],
}

impl<T: Float> Work for Position<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        let half = self.cos.len() / 2;
        let (cos, sin) = (self.cos.split_at(half), self.sin.split_at(half));
        for head in self.heads.chunks_exact_mut(2 * half) {
            if let Some(norm) = self.norm {
                rms_norm(head, norm);
            }
            let (left, right) = head.split_at_mut(half);
            let rotated = |x: f32, cos: T, other: f32, sin: T| {
                T::narrow(T::round(x * cos.widen()) + T::round(other * sin.widen()))
            };
            for (i, (left, right)) in left.iter_mut().zip(right).enumerate() {
                let (l, r) = (left.widen(), right.widen());
                *left = rotated(l, cos.0[i], -r, sin.0[i]);
                *right = rotated(r, cos.1[i], l, sin.1[i]);
            }
        }
    }
}

struct Add<'a, T> {
    to: &'a mut [T],
    y: &'a [T],
}

impl<T: Float> Work for Add<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        for (to, y) in self.to.iter_mut().zip(self.y) {
            *to = T::narrow(to.widen() + y.widen());
        }
    }
}
