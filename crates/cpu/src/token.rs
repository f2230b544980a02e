//! One token through a decoder layer of the Llama kind, or a whole prompt: all that the layer computes beside its matrix products,
//! which the caller makes.
//!
//! ```text
//! q, k, v = products(norm(x))            q and k normed by head in some families, then rotated
//! cache  += k, v
//! x       = x + product(attention(q, cache))
//! x       = x + MLP(norm(x))
//! ```
//!
//! Each step rounds its result to the type of x, as torch does with the same steps, so that a layer gives the same bits but for
//! the order of the sums in norms and attention. Attention is f32 inside: see `attention`; that of a prompt is
//! [`Causal`].

mod attention;

use dualgemm_formats::{FloatMatrix, FloatType, Matrix, match_floats};
use dualgemm_gemm::{AOperand, OutputMut};
use half::{bf16, f16};

use crate::aligned::Aligned;
use crate::attention::{Causal, Heads, Prepared, is_available};
use crate::float_linear::Element;
use crate::isa::{Available, InstructionSet, Work};
use crate::threads::{self, SharedSlice};
use crate::{CpuOptions, Error, Isa, lanes, team, vmath};

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
    /// Tokens of a call: 1, or those of a prompt where [`takes_prompts`] says so.
    pub rows: usize,
}

/// Whether layers of this type and these features of a head take more than one token, on this machine.
pub fn takes_prompts(float: FloatType, head_dim: usize) -> bool {
    float == FloatType::Bf16 && is_available(head_dim)
}

impl LayerDesc {
    /// Most features of a head.
    pub const MAX_HEAD_DIM: usize = 512;

    fn check(&self) -> Result<(), Error> {
        let Self { float, hidden, heads, kv_heads, head_dim, rows } = *self;
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
        if rows != 1 && (rows == 0 || !takes_prompts(float, head_dim)) {
            let expected = "1; more of bf16 alone, by kernels that multiply bf16, with a head_dim of multiples of 32 up to 256";
            return fault("the number of tokens", rows.to_string(), expected);
        }
        Ok(())
    }
}

/// The norm by root mean square, `weight · x / √(mean(x²) + eps)`.
#[derive(Debug)]
pub struct Norm<'a> {
    /// One row.
    pub weight: FloatMatrix<'a>,
    /// What is added to the mean.
    pub eps: f32,
    /// Whether the product alone is rounded, as in gpt-oss; else the quotient is, too.
    pub rounds_once: bool,
}

/// The operands of a call. Vectors are matrices of one row.
#[derive(Debug)]
pub struct Tokens<'a> {
    /// What enters the layer, a row for each token.
    pub x: FloatMatrix<'a>,
    /// Before attention, and before the MLP.
    pub norms: [Norm<'a>; 2],
    /// Of each head's query and key, in families that have them.
    pub head_norms: Option<[Norm<'a>; 2]>,
    /// Cosines and sines of each token's position, for all features of a head or for the first half, which the second repeats.
    pub rotation: [FloatMatrix<'a>; 2],
    /// The factor of products of queries and keys.
    pub scale: f32,
    /// Of each head of queries, the score of a token without a value: a term of the softmax's denominator. None with a prompt.
    pub sinks: Option<FloatMatrix<'a>>,
    /// Keys and values of the tokens before, `[kv_heads, room, head_dim]`. The tokens' own follow the first `len`.
    pub cache: [OutputMut<'a>; 2],
    /// Tokens that the cache has room for.
    pub room: usize,
    /// Tokens before; a prompt has none.
    pub len: usize,
    /// How many of these, the first ones, nothing attends to: those before a window, or padding.
    pub unseen: usize,
    /// What leaves the layer, as x.
    pub out: OutputMut<'a>,
}

/// The buffers of a layer's tokens. Runs allocate nothing, after the first of a prompt.
#[derive(Debug)]
pub struct TokenLayer {
    desc: LayerDesc,
    isa: Available,
    threads: usize,
    room: Aligned<f32>,
    prepared: Prepared,
}

impl TokenLayer {
    /// Allocates the buffers.
    ///
    /// # Errors
    /// If the shape is not one that is computed, or this machine lacks the instruction set that `options` names.
    pub fn new(desc: &LayerDesc, options: CpuOptions) -> Result<Self, Error> {
        desc.check()?;
        let isa = options.isa.map_or_else(Isa::detect, Isa::require)?.checked()?;
        let threads = options.threads.unwrap_or_else(team::threads).max(1);
        let of_token = 2 * desc.hidden + 2 * (desc.heads + desc.kv_heads) * desc.head_dim;
        let room = Aligned::zeroed(desc.rows * of_token);
        Ok(Self { desc: *desc, isa, threads, room, prepared: Prepared::default() })
    }

    /// Computes the tokens, adds their keys and values to the cache and writes `out`. `product` computes the layer's products, of a
    /// row for each token; those of queries, keys and values in one call.
    ///
    /// # Errors
    /// If an operand has another type or shape than the layer, and what `product` returns. The cache's first `len` tokens are as
    /// they were.
    pub fn run<E: From<Error>>(
        &mut self,
        tokens: Tokens<'_>,
        product: impl FnMut(&AOperand<'_>, &mut [(Part, OutputMut<'_>)]) -> Result<(), E>,
    ) -> Result<(), E> {
        match_floats!(self.desc.float, FloatType[T] => self.run_as::<T, E>(tokens, product))
    }

    fn run_as<T: Float, E: From<Error>>(
        &mut self,
        mut tokens: Tokens<'_>,
        mut product: impl FnMut(&AOperand<'_>, &mut [(Part, OutputMut<'_>)]) -> Result<(), E>,
    ) -> Result<(), E> {
        let LayerDesc { hidden, heads, kv_heads, head_dim, rows, .. } = self.desc;
        let (isa, of_queries, of_keys) = (self.isa, heads * head_dim, kv_heads * head_dim);
        // One token's norms take less time than a thread takes to wake.
        let threads = if rows == 1 { 1 } else { self.threads };
        let (room, len, first, scale) = (tokens.room, tokens.len, tokens.unseen, tokens.scale);
        let Operands { x, norms, head_norms, rotation, sinks, keys, values, out } =
            Operands::<T>::of(&self.desc, &mut tokens)?;

        let (normed, rest) = bytemuck::cast_slice_mut::<f32, T>(&mut self.room).split_at_mut(rows * hidden);
        let (y, rest) = rest.split_at_mut(rows * hidden);
        let (q, rest) = rest.split_at_mut(rows * of_queries);
        let (attended, rest) = rest.split_at_mut(rows * of_queries);
        let (k, rest) = rest.split_at_mut(rows * of_keys);
        let v = &mut rest[..rows * of_keys];

        threads::for_each_part(threads, normed, hidden, |row, normed| {
            normed.copy_from_slice(x.row(row));
            isa.dispatch(Rms { x: normed, norm: norms[0] });
        });
        let [of_query, of_key, of_value] = [&mut *q, &mut *k, &mut *v].map(T::into_output);
        let parts = &mut [(Part::Query, of_query), (Part::Key, of_key), (Part::Value, of_value)];
        product(&operand(normed, rows)?, parts)?;
        let caches = [SharedSlice::new(&mut *keys), SharedSlice::new(&mut *values)];
        threads::for_each_part(threads, q, of_queries, |row, q| {
            let [cos, sin] = rotation.map(|of| {
                let (left, right) = of.row(row).split_at(head_dim / 2);
                [left, if right.is_empty() { left } else { right }]
            });
            isa.dispatch(Position { heads: q, norm: head_norms[0], cos, sin });
            for head in 0..kv_heads {
                let [key, _] = [(&caches[0], &*k), (&caches[1], &*v)].map(|(cache, new)| {
                    // SAFETY: each row is handed out once.
                    let to = unsafe { cache.part((head * room + len + row) * head_dim, head_dim) };
                    to.copy_from_slice(&new[row * of_keys + head * head_dim..][..head_dim]);
                    to
                });
                isa.dispatch(Position { heads: key, norm: head_norms[1], cos, sin });
            }
        });
        if rows == 1 {
            let cached = attention::Cached { keys, values, room, first, len: len + 1, head_dim };
            cached.attend(isa, self.threads, q, sinks, scale, attended);
        } else {
            let of = |elements, heads, head_stride, row_stride| Heads {
                // Layers of other types take no prompts.
                elements: bytemuck::cast_slice::<T, bf16>(elements),
                heads,
                head_stride,
                row_stride,
            };
            let q = of(q, heads, head_dim, of_queries);
            let [k, v] = [keys, values].map(|of_cache| of(of_cache, kv_heads, room * head_dim, head_dim));
            let attended = bytemuck::cast_slice_mut(attended);
            let causal = Causal { q, k, v, rows, dim: head_dim, scale };
            causal.run_on(isa, attended, threads, &mut self.prepared)?;
        }
        product(&operand(attended, rows)?, &mut [(Part::Output, T::into_output(y))])?;
        let of_row = SharedSlice::new(normed);
        threads::for_each_part(threads, out, hidden, |row, out| {
            // SAFETY: as above.
            let normed = unsafe { of_row.part(row * hidden, hidden) };
            out.copy_from_slice(x.row(row));
            isa.dispatch(Add { to: &mut *out, y: &y[row * hidden..][..hidden] });
            normed.copy_from_slice(out);
            isa.dispatch(Rms { x: normed, norm: norms[1] });
        });
        product(&operand(normed, rows)?, &mut [(Part::Mlp, T::into_output(y))])?;
        threads::for_each_part(threads, out, hidden, |row, out| {
            isa.dispatch(Add { to: out, y: &y[row * hidden..][..hidden] });
        });
        Ok(())
    }
}

/// What a call reads and writes, of the type and shape that the layer has.
struct Operands<'a, T: Clone> {
    x: &'a Matrix<'a, T>,
    norms: [Weights<'a, T>; 2],
    head_norms: [Option<Weights<'a, T>>; 2],
    rotation: [&'a Matrix<'a, T>; 2],
    sinks: Option<&'a [T]>,
    keys: &'a mut [T],
    values: &'a mut [T],
    out: &'a mut [T],
}

impl<'a, T: Float> Operands<'a, T> {
    fn of(desc: &LayerDesc, tokens: &'a mut Tokens<'_>) -> Result<Self, Error> {
        let LayerDesc { hidden, heads, kv_heads, head_dim, rows, .. } = *desc;
        let [first, second] = &tokens.norms;
        let of_heads = |what, at: usize| {
            tokens.head_norms.as_ref().map(|norms| norm(what, &norms[at], head_dim)).transpose()
        };
        let Tokens { room, len, unseen, .. } = *tokens;
        let sinks = tokens.sinks.as_ref().map(|sinks| matrix("the sinks", sinks, 1, heads)).transpose()?;
        let (fits, expected) = if rows == 1 {
            (unseen <= len && len < room, "those unseen at least, less than")
        } else {
            (len == 0 && rows <= room && sinks.is_none(), "0 before a prompt without sinks, and")
        };
        if !fits {
            return Err(Error::NotPlanned {
                what: "the number of tokens before",
                found: format!("{len}, {unseen} of them unseen"),
                expected: format!("{expected} the room for {room}"),
            });
        }
        let of_pairs = |what, at: usize| {
            let of: &FloatMatrix<'_> = &tokens.rotation[at];
            matrix(what, of, rows, if of.cols() == head_dim / 2 { head_dim / 2 } else { head_dim })
        };
        let (in_cache, [keys, values]) = (kv_heads * head_dim * room, &mut tokens.cache);
        Ok(Self {
            x: matrix("x", &tokens.x, rows, hidden)?,
            norms: [
                norm("the norm before attention", first, hidden)?,
                norm("the norm before the MLP", second, hidden)?,
            ],
            head_norms: [of_heads("the norm of queries", 0)?, of_heads("the norm of keys", 1)?],
            rotation: [of_pairs("cos", 0)?, of_pairs("sin", 1)?],
            sinks: sinks.map(|sinks| sinks.row(0)),
            keys: output("the keys", keys, in_cache)?,
            values: output("the values", values, in_cache)?,
            out: output("out", &mut tokens.out, rows * hidden)?,
        })
    }
}

/// A type of activations.
trait Float: Element + Send + Sync {
    const NAME: &str;
    /// Rounds to nearest, ties to even.
    fn narrow(x: f32) -> Self;
    fn widen(self) -> f32;
    fn matrix<'m>(matrix: &'m FloatMatrix<'_>) -> Option<&'m Matrix<'m, Self>>;
    fn from_rows(values: &[Self], rows: usize) -> Result<FloatMatrix<'_>, dualgemm_formats::Error>;
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

            fn from_rows(values: &[Self], rows: usize) -> Result<FloatMatrix<'_>, dualgemm_formats::Error> {
                Ok(FloatMatrix::$variant(Matrix::new("tokens", rows, values.len() / rows, values)?))
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

fn matrix<'m, T: Float>(
    what: &'static str,
    matrix: &'m FloatMatrix<'_>,
    rows: usize,
    cols: usize,
) -> Result<&'m Matrix<'m, T>, Error> {
    match T::matrix(matrix) {
        Some(found) if (found.rows(), found.cols()) == (rows, cols) => Ok(found),
        _ => {
            let found = format!("[{}, {}] of {:?}", matrix.rows(), matrix.cols(), matrix.float_type());
            Err(Error::NotPlanned { what, found, expected: format!("[{rows}, {cols}] of {}", T::NAME) })
        }
    }
}

/// A norm's weights, its eps, and whether it rounds once.
type Weights<'a, T> = (&'a [T], f32, bool);

fn norm<'m, T: Float>(what: &'static str, norm: &'m Norm<'_>, len: usize) -> Result<Weights<'m, T>, Error> {
    Ok((matrix(what, &norm.weight, 1, len)?.row(0), norm.eps, norm.rounds_once))
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

fn operand<T: Float>(values: &[T], rows: usize) -> Result<AOperand<'_>, Error> {
    Ok(AOperand::Float(T::from_rows(values, rows)?))
}

/// Norms a vector.
#[inline(always)]
fn rms_norm<T: Float>(x: &mut [T], (weight, eps, once): Weights<'_, T>) {
    let mut lanes = [0.0f32; 16];
    let (whole, rest) = x.as_chunks::<16>();
    for x in whole {
        lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane += x.widen() * x.widen());
    }
    lanes.iter_mut().zip(rest).for_each(|(lane, x)| *lane += x.widen() * x.widen());
    let factor = 1.0 / (lanes.iter().sum::<f32>() / x.len() as f32 + eps).sqrt();
    for (x, w) in x.iter_mut().zip(weight) {
        let quotient = x.widen() * factor;
        *x = T::narrow(if once { quotient } else { T::round(quotient) } * w.widen());
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
    /// Of the left features, and of the right ones.
    cos: [&'a [T]; 2],
    sin: [&'a [T]; 2],
}

impl<T: Float> Work for Position<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        if self.cos[0].len().is_multiple_of(16) { self.rotate::<16>() } else { self.rotate::<8>() }
    }
}

impl<T: Float> Position<'_, T> {
    /// `N` pairs at a time.
    #[inline(always)]
    fn rotate<const N: usize>(self) {
        let half = self.cos[0].len();
        let [cos, sin] = [self.cos, self.sin].map(|sides| sides.map(|side| side.as_chunks::<N>().0));
        for head in self.heads.chunks_exact_mut(2 * half) {
            if let Some(norm) = self.norm {
                rms_norm(head, norm);
            }
            let (left, right) = head.split_at_mut(half);
            let pairs = left.as_chunks_mut::<N>().0.iter_mut().zip(right.as_chunks_mut::<N>().0);
            for (i, (left, right)) in pairs.enumerate() {
                let (l, r) = (*left, *right);
                *left = sums(&products(&l, &cos[0][i], 1.0), &products(&r, &sin[0][i], -1.0));
                *right = sums(&products(&r, &cos[1][i], 1.0), &products(&l, &sin[1][i], 1.0));
            }
        }
    }
}

#[inline(always)]
fn products<T: Float, const N: usize>(x: &[T; N], of: &[T; N], sign: f32) -> [f32; N] {
    lanes::zip(x, of, |x, of| T::round(sign * x.widen() * of.widen()))
}

#[inline(always)]
fn sums<T: Float, const N: usize>(x: &[f32; N], y: &[f32; N]) -> [T; N] {
    lanes::zip(x, y, |x, y| T::narrow(x + y))
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
