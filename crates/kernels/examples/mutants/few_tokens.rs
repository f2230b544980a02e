//! The kernel for few tokens, and the kernels around the products of a mixture.

use dualgemm_device::{Device, DevicePtr};
use dualgemm_formats::{FloatType, GlobalScale, ScaleLayout};
use dualgemm_gemm::Activation;
use dualgemm_kernels::generic::copy::Copy;
use dualgemm_kernels::generic::mixture::{Lists, Mixture, Sizes};
use dualgemm_kernels::generic::quantize::{Floats, Out, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::parts::rows;
use dualgemm_kernels::parts::tiles::GroupArgs;
use dualgemm_kernels::sm90a::pack::Pack;
use dualgemm_kernels::warpwise::config::Config;
use dualgemm_kernels::warpwise::fused::{A, Variant};
use dualgemm_kernels::warpwise::host::{Fused, FusedArgs};
use dualgemm_mutate::Refused;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::Card;

use crate::cases::{Case, bytes_of, copied, finish, floats, poisoned, upload, weights, writes_a};

/// Warps with a ring of their own each, and warps that share blocks of A; A in floats and in codes, once with a
/// last block that is not whole. Each warp's ring goes round.
pub fn warpwise() -> Vec<Case> {
    let f16 = A::Half(HalfFormat::F16);
    let nvfp4 = A::Nvfp4(ScaleLayout::Linear);
    let config = |halves, tokens, k_groups| Config { halves, tokens, k_groups, chunks: 2 };
    vec![
        case(config(3, 2, 2), f16, (2, 56, 64 * 13)),
        case(config(3, 8, 2), f16, (8, 56, 64 * 13)),
        case(config(3, 2, 2), nvfp4, (2, 56, 64 * 13 - 16)),
        case(config(3, 8, 2), nvfp4, (8, 56, 64 * 13)),
        grouped(config(3, 2, 2), (3, 104, 64 * 7)),
    ]
}

/// Linear layers of two experts, whose first rows a kernel before writes.
fn grouped(config: Config, (m, n, k): (usize, usize, usize)) -> Case {
    let matrix = weights((m, n, k)).gate;
    let pack = Pack::of_matrix(&matrix).expect("weights that fit");
    Case::new(format!("{}, experts", config.name()), Card::H100, move |device| {
        let rows = rows::Variant { grouped: true, ..rows::Variant::new(Activation::Silu.program()) };
        let variant = Variant {
            a: A::Half(HalfFormat::F16),
            whole_blocks: true,
            linear: true,
            rows: rows.for_features(n),
        };
        let kernel = Fused::new(device, config, &variant)?;
        let (values, c) = (poisoned(device, m * k * 2)?, poisoned(device, m * n * 2)?);
        let first = writes_a(device, (m, k), Sink::Image(FloatType::F16), (values, 2 * k))?;
        let table: Vec<u8> = [0u32, 2, m as u32, 0].into_iter().flat_map(u32::to_le_bytes).collect();
        let (first_rows, second) = copied(device, upload(device, &table)?, table.len())?;
        let alphas = upload(
            device,
            &[pack.alpha(); 2].concat().iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>(),
        )?;
        let weights = upload(device, &[pack.bytes(); 2].concat())?;
        let args = FusedArgs {
            size: (m, n, k),
            a: values,
            a_pitch: 2 * k,
            a_scales: DevicePtr::NULL,
            weights,
            groups: Some(GroupArgs { count: 2, rows: first_rows, alphas }),
            settled: false,
            output: rows::Output::new(c, [1.0; 2]),
        };
        let spec = kernel.spec(&args)?;
        let again = kernel.spec(&FusedArgs { settled: true, ..args })?;
        finish(device, [first, second, spec, again], (c, m * n * 2))
    })
}

fn case(config: Config, a: A, shape: (usize, usize, usize)) -> Case {
    let (m, n, k) = shape;
    let pack = Pack::new(&weights(shape)).expect("weights that fit");
    let kind = if matches!(a, A::Half(_)) { "f16" } else { "nvfp4" };
    Case::new(format!("{}, {kind}", config.name()), Card::H100, move |device| {
        let rows = rows::Variant::new(Activation::Silu.program()).for_features(n);
        let variant = Variant { a, whole_blocks: k.is_multiple_of(64), linear: false, rows };
        let kernel = Fused::new(device, config, &variant)?;
        let (values, c) = (poisoned(device, m * k * 2)?, poisoned(device, m * n * 2)?);
        let a_scales = poisoned(device, m * k / 16)?;
        let first = match a {
            A::Half(_) => writes_a(device, (m, k), Sink::Image(FloatType::F16), (values, 2 * k))?,
            A::Nvfp4(layout) => {
                let from = upload(device, &bytes_of(&floats(m, k)))?;
                let from = Floats { m, k, values: from, pitch: 2 * k };
                let out = Out::Codes { codes: values, scales: a_scales };
                let scale = Scale::Static(GlobalScale::multiplier(0.01));
                Quantize::new(device, FloatType::F16, Sink::Codes(layout), false)?
                    .spec(&from, &out, &scale)?
            }
        };
        let output = rows::Output::new(c, pack.alpha());
        let weights = upload(device, pack.bytes())?;
        let args = FusedArgs {
            size: shape,
            a: values,
            a_pitch: 2 * k,
            a_scales,
            weights,
            groups: None,
            settled: false,
            output,
        };
        let spec = kernel.spec(&args)?;
        finish(device, [first, spec.clone(), spec], (c, m * n * 2))
    })
}

/// Experts are chosen, A and results written by kernels before: a case for each kernel; one sorts few choices, two sort many.
/// Which of an expert's rows a choice gets may depend on timing, so all of them are of one token and have one result.
pub fn mixture() -> Vec<Case> {
    let run = |device: &dyn Device, tokens: usize| -> Result<Vec<u8>, Refused> {
        let (k, n) = (64, 40);
        let sizes = Sizes { tokens, top_k: 2, experts: tokens + 8 };
        let choices = sizes.tokens * sizes.top_k;
        // Several warps clear, count and place; two tokens have experts that are elsewhere.
        let expert_of = |token: usize| token * 7 % sizes.experts;
        let ids = (0..sizes.tokens).flat_map(|token| match token {
            3 => [-1, expert_of(token) as i32],
            5 => [-1, sizes.experts as i32],
            _ => [expert_of(token) as i32; 2],
        });
        let mut of_row: Vec<i32> = ids.clone().filter(|id| (0..sizes.experts as i32).contains(id)).collect();
        of_row.sort_unstable();
        let kernels = Mixture::new(device, FloatType::F32)?;
        let lists = Lists {
            rows: poisoned(device, 4 * (sizes.experts + 1))?,
            row_of: poisoned(device, 4 * choices)?,
            choice_of: poisoned(device, 4 * choices)?,
        };
        // In pieces of 16 bytes.
        let written = |bytes: Vec<u8>| {
            let bytes = [bytes, vec![0; 15]].concat();
            let bytes = &bytes[..bytes.len() / 16 * 16];
            copied(device, upload(device, bytes)?, bytes.len())
        };
        let ids = ids.flat_map(i32::to_le_bytes).collect();
        let result = |expert: i32| {
            (0..n as i32).flat_map(move |column| ((expert * 100 + column) as f32).to_le_bytes())
        };
        let results = of_row.iter().flat_map(|&expert| result(expert));
        let weights = (0..choices).flat_map(|i| (i as f32 + 0.5).to_le_bytes()).collect();
        let (ids, first) = written(ids)?;
        let (a, second) = written(bytes_of(&floats(sizes.tokens, k)))?;
        let (results, third) = written(results.collect())?;
        let (weights, fourth) = written(weights)?;
        let (rows, bytes) = (of_row.len() * k * 2, sizes.tokens * n * 4);
        let gathered = poisoned(device, choices * k * 2)?;
        let (c, seen) = (poisoned(device, bytes)?, poisoned(device, bytes + rows)?);
        let copy = Copy::new(device)?;
        let mut launches = vec![first, second, third, fourth];
        launches.extend(kernels.by_expert(&sizes, ids, (a, 2 * k, k), &lists, gathered)?);
        launches.extend([
            kernels.combine(&sizes, (results, n), (&lists, weights), (c, false))?,
            copy.spec("C", (c, seen), bytes)?,
            copy.spec("A by expert", (gathered, seen.offset(bytes as u64)), rows)?,
        ]);
        finish(device, launches, (seen, bytes + rows))
    };
    // In the order in which they are loaded.
    let names = [("route", 260), ("gather", 260), ("sort", 40), ("combine_f32", 40)].into_iter().enumerate();
    let case = |(module, (name, tokens)): (usize, (&str, usize))| Case {
        module,
        ..Case::new(name.into(), Card::H100, move |device| run(device, tokens))
    };
    names.map(case).collect()
}
