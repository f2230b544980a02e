//! The fused kernel for few tokens.

use dualgemm_device::DevicePtr;
use dualgemm_formats::{FloatMatrix, FloatType, Matrix, ScaleLayout};
use dualgemm_gemm::{AOperand, Activation, Epilogue, Linear, bounded_reference};
use dualgemm_kernels::fused::{self, Fused, FusedArgs, Weights};
use dualgemm_kernels::generic::copy::Copy;
use dualgemm_kernels::generic::mixture::{Lists, Mixture, RowOf, Sizes};
use dualgemm_kernels::operands::Operands;
use dualgemm_kernels::parts::format::Format;
use dualgemm_kernels::parts::groups::{GroupArgs, Groups};
use dualgemm_kernels::parts::operand::Operand;
use dualgemm_kernels::parts::rows::Output;
use dualgemm_kernels::parts::variant::{Out, Variant};
use dualgemm_kernels::warpwise::config::Config;
use dualgemm_ptx::builder::HalfFormat;
use half::bf16;

use crate::problem::{check_on, gpu, linear, operands, run};

fn silu(codes: Option<ScaleLayout>) -> Variant {
    Variant { codes, ..Variant::new(Activation::Silu.program()) }
}

const CODES: Option<ScaleLayout> = Some(ScaleLayout::Linear);

fn config(halves: u32, tokens: u32, k_groups: u32) -> Config {
    Config { halves, tokens, k_groups, chunks: 2 }
}

#[test]
fn every_tile_of_the_kernel_for_few_tokens_close() {
    // Half a chunk, whole ones, and both; warps that do not take equal parts of K.
    let sizes = Config::menu().filter(|config| [1, 2, 3, 6, 7, 12].contains(&config.halves));
    for (i, config) in sizes.enumerate() {
        let codes = if i % 2 == 0 || !config.expands_codes() { None } else { CODES };
        // More than one CTA, the last one not full; a warp's ring goes round.
        let n = config.halves as usize * 16 * 2 + 8;
        let blocks = (config.k_groups * (config.chunks + 1) + 1).min(30) as usize;
        let (config, tokens) = (fused::Config::Warpwise(config), config.tokens);
        check_on(&*gpu(&config), config, &silu(codes), &[tokens], (n, 64 * blocks), 1);
    }
}

/// A in bf16 becomes f16 by powers of two, each warp's share of a row by its own: rows of any size, parts of them that are zero, and
/// numbers far below the largest of their row.
#[test]
fn rows_in_bf16_of_any_size_are_right_close() {
    let (m, n, k) = (4, 72, 320);
    let variant = Variant { compute: HalfFormat::Bf16, ..linear(false) };
    for tokens in [1, 2, 4] {
        let config = fused::Config::Warpwise(config(2, tokens, 3));
        let (_, weights) = operands(&config, &variant, 1, (m, n, k));
        let value = |row: usize, at: usize| {
            let value = (at as f32 * 0.7 + row as f32).sin();
            match row {
                0 => value * if at < k / 2 { 0.0 } else { 1.0 },
                1 => value * 2f32.powi(100),
                2 => value * 2f32.powi(-100),
                _ => value * 2f32.powi(16 - at as i32 % 45),
            }
        };
        let a =
            (0..m).flat_map(|row| (0..k).map(move |at| bf16::from_f32(value(row, at)))).collect::<Vec<_>>();
        let a = AOperand::Float(FloatMatrix::Bf16(Matrix::new("A", m, k, a).unwrap()));
        let found = run(&*gpu(&config), (config, &variant), &a, &weights, (&[], 1));
        let layer = Linear::new(weights[0].gate.clone());
        let want = bounded_reference(&Epilogue::default(), &a, 0..m, &layer);
        for (at, (got, want)) in found.values.iter().zip(&want).enumerate() {
            assert!((f64::from(*got) - want.value).abs() <= want.error, "{tokens}, {at}: {got:e}, {want:?}");
        }
    }
}

/// Two products of a mixture and their sum, ids written by a launch before: what the products read of their rows is the sorted
/// ones' table, or the ids. `settled` says of which product.
fn mixture(ids: &[i32], sorted: bool, settled: [bool; 2]) -> Result<Vec<u8>, String> {
    let (n, k, choices, sizes) = (64, 64, ids.len(), Sizes { tokens: ids.len() / 3, top_k: 3, experts: 3 });
    let config = fused::Config::Warpwise(config(2, 2, 1));
    let gpu = &*gpu(&config);
    let kernels = [Out::F16, Out::F32].map(|out| {
        let variant = Variant { grouped: true, choices: !sorted, out, ..linear(false) }.for_weights(n, k);
        Fused::new(gpu, config, &variant).unwrap()
    });
    let upload = |bytes: &[u8]| {
        let ptr = gpu.alloc(bytes.len()).unwrap();
        gpu.copy_to(ptr, bytes).map(|()| ptr).unwrap()
    };
    let words = |words: usize| upload(&vec![0xA5; 4 * words]);
    let (a, weights) = operands(&config, kernels[0].variant(), sizes.experts, (sizes.tokens, n, k));
    let there = Operands::upload(&kernels[0], &a, &weights, &[0, 0, 0, 0]).unwrap();
    let lists = Lists { rows: words(4), row_of: words(choices), choice_of: words(choices) };
    let [rows_of_a, between, results, c] = [n / 2, n / 2, n, n].map(|each| words(choices * each));
    let factors = upload(&(0..choices).flat_map(|i| (0.5 + i as f32).to_le_bytes()).collect::<Vec<_>>());
    let (ids, written) =
        (upload(&ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>()), words(choices));
    let mixture = Mixture::new(gpu, FloatType::F32, None).unwrap();
    let mut specs = vec![Copy::new(gpu).unwrap().spec("ids", (ids, written), 4 * choices).unwrap()];
    let mut first = there.args.a.codes;
    if sorted {
        let a = (first, there.args.a.pitch, k);
        specs.extend(mixture.by_expert(&sizes, (written, DevicePtr::NULL), a, &lists, rows_of_a).unwrap());
        first = rows_of_a;
    }
    let of = Groups { count: sizes.experts, rows: if sorted { lists.rows } else { written } };
    let groups = there.args.groups.map(|groups| GroupArgs { of, ..groups });
    let ends = [(first, between, sizes.top_k), (between, results, 1)];
    for ((kernel, (from, to, per_row)), settled) in kernels.iter().zip(ends).zip(settled) {
        let per_row = (!sorted).then_some(per_row);
        let rows = choices / per_row.unwrap_or(1);
        let a = Operand::new(Format::Half(HalfFormat::F16), (rows, k), from, DevicePtr::NULL);
        let args = FusedArgs::new((choices, n, k), a, there.args.weights, Output::new(to, [1.0; 2]));
        specs.push(kernel.spec(&FusedArgs { groups, choices: per_row, settled, ..args }).unwrap());
    }
    let rows = if sorted { RowOf::Listed(lists.row_of) } else { RowOf::Itself(written) };
    specs.push(mixture.combine(&sizes, (results, n), (rows, factors), (c, false)).unwrap());
    // SAFETY: the operands were allocated here, as large as the launches say.
    let launched = specs.into_iter().try_for_each(|spec| unsafe { gpu.launch(&spec.programmatic(true)) });
    let mut found = vec![0; sizes.tokens * n * 4];
    launched.and_then(|()| gpu.copy_from(&mut found, c)).map_err(|e| e.to_string())?;
    Ok(found)
}

/// The second of two products may read the table of rows, or the ids, before the first has ended, which has waited for what wrote
/// them; the first may not.
#[test]
fn settled_rows_are_read_early_exact() {
    let ids = [2, 0, 1, 2, 1, 0, 1, 2, 0, 0, 1, 2];
    for (sorted, writer) in [(true, "sort"), (false, "copy")] {
        let run = |settled| mixture(&ids, sorted, settled).unwrap_or_else(|e| panic!("{e}"));
        assert!(run([false, true]) == run([false, false]), "sorted: {sorted}");
        let early = mixture(&ids, sorted, [true, true]).unwrap_err();
        let want = format!("is not ordered with a write by an earlier launch of `{writer}`");
        assert!(early.contains(&want), "{early}");
    }
}

/// What is computed of a choice does not depend on how its expert's tokens were found: experts of more tokens than a tile has, of
/// none, chosen twice by a token, and such as there are not.
#[test]
fn choices_as_they_are_give_what_sorted_rows_give_exact() {
    let ids = [2, 0, 1, 2, 2, -1, 0, 3, 2, 2, 1, 0, 0, 0, 0, 2, 2, i32::MIN, i32::MAX, -1, 0, 0, 2, 0];
    for ids in [&ids[..], &ids[..12]] {
        let [as_they_are, sorted] =
            [false, true].map(|sorted| mixture(ids, sorted, [false, true]).unwrap_or_else(|e| panic!("{e}")));
        assert!(as_they_are == sorted, "{ids:?}");
    }
}

#[test]
fn more_choices_than_a_warp_has_lanes_are_refused() {
    let config = fused::Config::Warpwise(config(2, 2, 1));
    let variant = Variant { grouped: true, choices: true, ..linear(false) };
    let gpu = &*gpu(&config);
    let kernel = Fused::new(gpu, config, &variant).unwrap();
    let (there, (n, k)) = (DevicePtr(1 << 20), (64, 64));
    let a = Operand::new(Format::Half(HalfFormat::F16), (1, k), there, there);
    for (m, per_row) in [(36, 36), (4, 3), (4, 0)] {
        let args = FusedArgs::new((m, n, k), a, Weights::Pack(there), Output::new(there, [1.0; 2]));
        let groups = Some(GroupArgs { of: Groups { count: 2, rows: there }, alphas: there });
        let message =
            kernel.spec(&FusedArgs { groups, choices: Some(per_row), ..args }).unwrap_err().to_string();
        assert!(message.contains(&format!("{m}, {per_row} for a row of A")), "{message}");
    }
}

/// Two CTAs of a kernel fit on a multiprocessor, unless each can have one to itself: then they must not lie in pairs.
#[test]
fn ctas_that_can_be_alone_are() {
    let (config, (m, k), there) = (fused::Config::Warpwise(config(2, 2, 16)), (1, 64), DevicePtr(1 << 20));
    let gpu = &*gpu(&config);
    let kernel = Fused::new(gpu, config, &silu(None)).unwrap();
    for (ctas, alone) in [(132, true), (133, false)] {
        let a = Operand::new(Format::Half(HalfFormat::F16), (m, k), there, there);
        let output = Output::new(there, [1.0; 2]);
        let args = FusedArgs::new((m, 32 * ctas, k), a, Weights::Pack(there), output);
        let spec = kernel.spec(&args).unwrap();
        assert_eq!(spec.grid, [ctas as u32, 1, 1]);
        assert_eq!(2 * (spec.dynamic_shared + 1024) > gpu.info().shared_per_sm, alone, "{ctas} CTAs");
    }
}
