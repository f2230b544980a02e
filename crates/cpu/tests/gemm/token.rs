//! A decoder layer's token: norms, rotation and attention, against the definition in f64.

use dualgemm_cpu::token::{LayerDesc, Norm, Part, TokenLayer, Tokens, takes_prompts};
use dualgemm_cpu::{Error, Isa};
use dualgemm_formats::{Float, FloatType, match_floats};

use super::*;

/// Shapes: heads, heads of keys, features of a head, tokens before.
const SHAPES: [[usize; 4]; 6] =
    [[4, 4, 16, 1], [9, 3, 64, 300], [4, 2, 48, 7], [10, 2, 80, 128], [8, 1, 128, 129], [2, 1, 512, 255]];

const HIDDEN: usize = 40;
const EPS: f32 = 1e-5;

/// Vectors of one type, and what a step that rounds to it may be off by.
fn typed(float: FloatType, values: &[f32]) -> FloatMatrix<'static> {
    FloatMatrix::rounded("v", float, 1, values.len(), values.iter().copied()).unwrap()
}

/// Memory for values of a type.
enum Memory {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Memory {
    fn new(float: FloatType, values: &[f32]) -> Self {
        match_floats!(float, FloatType => Self(values.iter().map(|&x| Float::nearest(x)).collect()))
    }

    fn output(&mut self) -> OutputMut<'_> {
        match_floats!(self, Self(values) => OutputMut: values)
    }

    fn values(&self) -> Vec<f64> {
        match_floats!(self, Self(values) => values.iter().map(|x| x.value().into()).collect())
    }
}

fn values(matrix: &FloatMatrix<'_>) -> Vec<f64> {
    (0..matrix.cols()).map(|i| matrix.value(0, i).into()).collect()
}

/// The products of the layer under test: element i of a result is one of the row, by a step of its own for each part.
fn source(part: Part, i: usize, len: usize) -> usize {
    (i * [7, 11, 13, 5, 3][part as usize] + part as usize) % len
}

fn write(out: &mut OutputMut<'_>, of: impl Fn(usize) -> f32) {
    match_floats!(out, OutputMut(out) => out.iter_mut().enumerate().for_each(|(i, out)| *out = Float::nearest(of(i))),
        OutputMut::Nvfp4 { .. } => unreachable!("products are floats"));
}

fn product(a: &AOperand<'_>, parts: &mut [(Part, OutputMut<'_>)]) -> Result<(), Error> {
    let AOperand::Float(a) = a else { unreachable!("activations are floats") };
    for (part, out) in parts {
        let of_row = out.floats().unwrap().1 / a.rows();
        write(out, |i| a.value(i / of_row, source(*part, i % of_row, a.cols())));
    }
    Ok(())
}

fn norm(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + f64::from(EPS)).sqrt() * w).collect()
}

fn taken(part: Part, a: &[f64], len: usize) -> Vec<f64> {
    (0..len).map(|i| a[source(part, i, a.len())]).collect()
}

fn rotated(heads: &[f64], norms: Option<&Vec<f64>>, [cos, sin]: [&[f64]; 2]) -> Vec<f64> {
    let dim = cos.len();
    let of_head = |head: &[f64]| -> Vec<f64> {
        let head = norms.map_or_else(|| head.to_vec(), |weight| norm(head, weight));
        let other = |i: usize| if i < dim / 2 { -head[i + dim / 2] } else { head[i - dim / 2] };
        (0..dim).map(|i| head[i] * cos[i] + other(i) * sin[i]).collect()
    };
    heads.chunks(dim).flat_map(of_head).collect()
}

/// What the query of a head attends to; the sink has a score and no value.
fn attended(query: &[f64], keys: &[f64], values: &[f64], scale: f64, sink: Option<f64>) -> Vec<f64> {
    let dim = query.len();
    let dot = |key: &[f64]| scale * key.iter().zip(query).map(|(x, y)| x * y).sum::<f64>();
    let scores: Vec<_> = keys.chunks(dim).map(dot).collect();
    let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<_> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp());
    (0..dim).map(|i| values.chunks(dim).zip(&weights).map(|(v, w)| v[i] * w / total).sum()).collect()
}

/// What families differ in.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Llama,
    /// With norms of queries and keys.
    Qwen3,
    /// With sinks, half of each table, and so many tokens before the window.
    GptOss {
        unseen: usize,
    },
}

/// Runs a token and compares it with the definition; returns the bits of the result.
fn check(float: FloatType, options: CpuOptions, shape: [usize; 4], kind: Kind) -> Vec<f64> {
    let with_head_norms = kind == Kind::Qwen3;
    let unseen = if let Kind::GptOss { unseen } = kind { Some(unseen) } else { None };
    let [heads, kv_heads, head_dim, len] = shape;
    let (room, mut random) = (len + 5, Random(heads as u64));
    let mut row = |len: usize| typed(float, &random.floats(len));
    let (x, weights) = (row(HIDDEN), [row(HIDDEN), row(HIDDEN), row(head_dim), row(head_dim)]);
    let angles: Vec<f32> = (0..head_dim).map(|i| (i % (head_dim / 2)) as f32 * 0.7).collect();
    let rotation =
        [f32::cos, f32::sin].map(|f| typed(float, &angles.iter().map(|&x| f(x)).collect::<Vec<_>>()));
    let mut cache = [0; 2].map(|_| Memory::new(float, &random.floats(kv_heads * room * head_dim)));
    let before = cache.each_ref().map(Memory::values);
    let mut out = Memory::new(float, &[f32::NAN; HIDDEN]);
    // Large enough to weigh as much as all tokens do, and to be the largest score.
    let sinks = unseen.map(|_| typed(float, &(0..heads).map(|i| i as f32).collect::<Vec<_>>()));
    let tables = rotation.each_ref().map(|table| match unseen {
        Some(_) => typed(float, &(0..head_dim / 2).map(|i| table.value(0, i)).collect::<Vec<_>>()),
        None => table.clone(),
    });
    let norm_of = |at: usize| Norm { weight: weights[at].clone(), eps: EPS, rounds_once: unseen.is_some() };
    let scale = (head_dim as f32).powf(-0.5);
    let desc = LayerDesc { float, hidden: HIDDEN, heads, kv_heads, head_dim, rows: 1 };
    let [keys, values_] = &mut cache;
    let token = Tokens {
        x: x.clone(),
        norms: [norm_of(0), norm_of(1)],
        head_norms: with_head_norms.then(|| [norm_of(2), norm_of(3)]),
        rotation: tables,
        scale,
        sinks: sinks.clone(),
        cache: [keys.output(), values_.output()],
        room,
        len,
        unseen: unseen.unwrap_or(0),
        out: out.output(),
    };
    TokenLayer::new(&desc, options).unwrap().run(token, product).unwrap();

    let (x, weights) = (values(&x), weights.each_ref().map(values));
    let rotation = rotation.each_ref().map(values);
    let rotation = [&rotation[0][..], &rotation[1]];
    let normed = norm(&x, &weights[0]);
    let of_heads = |part, heads, weight| {
        let norms = if with_head_norms { Some(weight) } else { None };
        rotated(&taken(part, &normed, heads * head_dim), norms, rotation)
    };
    let (q, k) = (of_heads(Part::Query, heads, &weights[2]), of_heads(Part::Key, kv_heads, &weights[3]));
    let v = taken(Part::Value, &normed, kv_heads * head_dim);
    let mut result = vec![];
    // Values are about 1, and each of some steps rounds them.
    let close = 8.0
        * if float == FloatType::F32 {
            1e-6
        } else if float == FloatType::F16 {
            5e-4
        } else {
            4e-3
        };
    for (head, query) in q.chunks(head_dim).enumerate() {
        let own = head / (heads / kv_heads);
        let [keys, values] = [(&before[0], &k), (&before[1], &v)].map(|(before, new)| {
            let old = &before[own * room * head_dim..][unseen.unwrap_or(0) * head_dim..len * head_dim];
            [old, &new[own * head_dim..][..head_dim]].concat()
        });
        let sink = sinks.as_ref().map(|sinks| sinks.value(0, head).into());
        result.extend(attended(query, &keys, &values, scale.into(), sink));
    }
    for ((now, before), new) in cache.each_ref().map(Memory::values).iter().zip(&before).zip([&k, &v]) {
        for (at, (now, before)) in now.iter().zip(before).enumerate() {
            let (head, token, i) = (at / (room * head_dim), at / head_dim % room, at % head_dim);
            let want = if token == len { new[head * head_dim + i] } else { *before };
            let off = if token == len { close } else { 0.0 };
            assert!((now - want).abs() <= off, "cache of {shape:?} in {float:?} at {at}: {now}, {want}");
        }
    }
    let sum = |x: &[f64], y: Vec<f64>| x.iter().zip(y).map(|(x, y)| x + y).collect::<Vec<_>>();
    let x = sum(&x, taken(Part::Output, &result, HIDDEN));
    let want = sum(&x, taken(Part::Mlp, &norm(&x, &weights[1]), HIDDEN));
    let got = out.values();
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert!((got - want).abs() <= close, "{shape:?} in {float:?} at {i}: {got}, {want}");
    }
    got
}

#[test]
fn a_token_is_the_definition_close() {
    for isa in isas().filter(|isa| !EMULATED || *isa == Isa::best()) {
        for float in [FloatType::F32, FloatType::F16, FloatType::Bf16] {
            for shape in SHAPES {
                let options =
                    |threads| CpuOptions { isa: Some(isa), threads: Some(threads), ..CpuOptions::default() };
                let len = shape[3];
                let windows = [0, len / 3, len].map(|unseen| Kind::GptOss { unseen });
                for kind in [&[Kind::Llama, Kind::Qwen3][..], &windows].concat() {
                    let one = check(float, options(1), shape, kind);
                    assert_eq!(one, check(float, options(3), shape, kind), "{isa}, {shape:?}, {kind:?}");
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let desc = LayerDesc { float: FloatType::F32, hidden: 8, heads: 4, kv_heads: 2, head_dim: 16, rows: 1 };
    let fault = |desc| TokenLayer::new(&desc, CpuOptions::default()).unwrap_err().to_string();
    assert!(fault(LayerDesc { head_dim: 24, ..desc }).starts_with("head_dim is 24;"));
    assert!(fault(LayerDesc { head_dim: 528, ..desc }).contains("multiples of 16 up to 512"));
    assert!(fault(LayerDesc { rows: 0, ..desc }).starts_with("the number of tokens is 0;"));
    assert!(
        fault(LayerDesc { rows: 2, ..desc }).contains("more of bf16 alone, by kernels that multiply bf16")
    );
    assert!(fault(LayerDesc { kv_heads: 3, ..desc }).contains("4 heads and 3 heads of keys"));
    let run = |x: usize, float, room: usize, len, unseen| {
        let norm = || Norm { weight: typed(FloatType::F32, &[1.0; 8]), eps: EPS, rounds_once: false };
        let (mut keys, mut values) = (vec![0.0; 2 * 16 * 3], vec![0.0; 2 * 16 * 3]);
        let token = Tokens {
            x: typed(float, &vec![1.0; x]),
            norms: [norm(), norm()],
            head_norms: None,
            rotation: [typed(FloatType::F32, &[1.0; 16]), typed(FloatType::F32, &[0.0; 16])],
            scale: 1.0,
            sinks: Some(typed(FloatType::F32, &[0.0; 4])),
            cache: [OutputMut::F32(&mut keys), OutputMut::F32(&mut values)],
            room,
            len,
            unseen,
            out: OutputMut::F32(&mut [0.0; 8]),
        };
        TokenLayer::new(&desc, CpuOptions::default()).unwrap().run(token, product).map_err(|e| e.to_string())
    };
    run(8, FloatType::F32, 3, 2, 0).unwrap();
    assert!(
        run(9, FloatType::F32, 3, 2, 0)
            .unwrap_err()
            .contains("x is [1, 9] of F32; the plan was made for [1, 8] of f32")
    );
    assert!(run(8, FloatType::F16, 3, 2, 0).unwrap_err().contains("x is [1, 8] of F16"));
    assert!(run(8, FloatType::F32, 3, 3, 0).unwrap_err().contains("the number of tokens before is 3"));
    let unseen = run(8, FloatType::F32, 3, 1, 2).unwrap_err();
    assert!(unseen.contains(
        "is 1, 2 of them unseen; the plan was made for those unseen at least, less than the room for 3"
    ));
    assert!(
        run(8, FloatType::F32, 4, 2, 0)
            .unwrap_err()
            .contains("the keys is 96 values; the plan was made for 128")
    );
}

#[test]
fn a_prompt_is_its_tokens_one_by_one_close() {
    let float = FloatType::Bf16;
    for [heads, kv_heads, head_dim, rows] in [[4, 2, 32, 2], [9, 3, 64, 70], [2, 1, 256, 33]] {
        if !takes_prompts(float, head_dim) {
            eprintln!("skipped: this processor has no kernels of avx512bf16");
            return;
        }
        let (mut random, room) = (Random(rows as u64), rows + 3);
        let mut row = |len: usize| typed(float, &random.floats(len));
        let weights = [row(HIDDEN), row(HIDDEN), row(head_dim), row(head_dim)];
        let [x, cos, sin] = [HIDDEN, head_dim, head_dim].map(|len| random.floats(rows * len));
        let some = |values: &[f32], first: usize, count: usize| {
            let len = values.len() / rows;
            let values = values[first * len..][..count * len].iter().map(|&x| bf16::from_f32(x));
            FloatMatrix::Bf16(Matrix::new("v", count, len, values.collect::<Vec<_>>()).unwrap())
        };
        // So many tokens at a time, and what the cache holds after the last one.
        let run = |count: usize, threads| {
            let (mut out, of_cache) =
                (Memory::new(float, &vec![f32::NAN; rows * HIDDEN]), kv_heads * room * head_dim);
            let mut cache = [0; 2].map(|_| Memory::new(float, &vec![0.5; of_cache]));
            let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
            let desc = LayerDesc { float, hidden: HIDDEN, heads, kv_heads, head_dim, rows: count };
            let mut layer = TokenLayer::new(&desc, options).unwrap();
            for first in (0..rows).step_by(count) {
                let norm_of = |at: usize| Norm { weight: weights[at].clone(), eps: EPS, rounds_once: false };
                let OutputMut::Bf16(out) = out.output() else { unreachable!("as it was made") };
                let [keys, values] = &mut cache;
                let tokens = Tokens {
                    x: some(&x, first, count),
                    norms: [norm_of(0), norm_of(1)],
                    head_norms: Some([norm_of(2), norm_of(3)]),
                    rotation: [some(&cos, first, count), some(&sin, first, count)],
                    scale: (head_dim as f32).powf(-0.5),
                    sinks: None,
                    cache: [keys.output(), values.output()],
                    room,
                    len: first,
                    unseen: 0,
                    out: OutputMut::Bf16(&mut out[first * HIDDEN..][..count * HIDDEN]),
                };
                layer.run(tokens, product).unwrap();
            }
            (out.values(), cache.each_ref().map(Memory::values))
        };
        let (got, cache) = run(rows, 1);
        assert_eq!((&got, &cache), (&run(rows, 3).0, &run(rows, 3).1));
        let (want, want_cache) = run(1, 1);
        // Neither rounds more than the other but for a prompt's weights.
        assert_eq!(cache, want_cache);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((got - want).abs() <= 8.0 * 4e-3, "{rows} x {head_dim} at {i}: {got}, {want}");
        }
    }
}

#[test]
fn a_norm_that_rounds_once_is_off_by_half_a_unit_exact() {
    let float = FloatType::Bf16;
    let mut random = Random(3);
    let [x, weight] = [0; 2].map(|_| typed(float, &random.floats(HIDDEN)));
    let want = norm(&values(&x), &values(&weight));
    let off = |rounds_once| {
        let norm_of = || Norm { weight: weight.clone(), eps: EPS, rounds_once };
        let [mut keys, mut values, mut out] = [16, 16, HIDDEN].map(|len| vec![bf16::ZERO; len]);
        let tokens = Tokens {
            x: x.clone(),
            norms: [norm_of(), norm_of()],
            head_norms: None,
            rotation: [typed(float, &[1.0; 16]), typed(float, &[0.0; 16])],
            scale: 1.0,
            sinks: None,
            cache: [OutputMut::Bf16(&mut keys), OutputMut::Bf16(&mut values)],
            room: 1,
            len: 0,
            unseen: 0,
            out: OutputMut::Bf16(&mut out),
        };
        let desc = LayerDesc { float, hidden: HIDDEN, heads: 1, kv_heads: 1, head_dim: 16, rows: 1 };
        let mut most: f64 = 0.0;
        let seen = |a: &AOperand<'_>, parts: &mut [(Part, OutputMut<'_>)]| {
            if let (Part::Query, AOperand::Float(a)) = (parts[0].0, a) {
                let off = (0..HIDDEN).map(|i| (f64::from(a.value(0, i)) / want[i] - 1.0).abs());
                most = most.max(off.fold(0.0, f64::max));
            }
            product(a, parts)
        };
        TokenLayer::new(&desc, CpuOptions::default()).unwrap().run(tokens, seen).unwrap();
        most
    };
    let unit = f64::from(bf16::EPSILON.to_f32());
    assert!(off(true) <= 0.5001 * unit && off(false) > 0.5001 * unit);
}
