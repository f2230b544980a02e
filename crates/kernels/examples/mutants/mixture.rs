//! The kernels around the products of a mixture.

use dualgemm_device::{Device, DevicePtr};
use dualgemm_formats::FloatType;
use dualgemm_kernels::generic::copy::Copy;
use dualgemm_kernels::generic::mixture::{Lists, Mixture, RowOf, Sizes};
use dualgemm_mutate::Refused;
use dualgemm_sim::Card;

use crate::cases::{Case, finish, floats, poisoned, upload, written};

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
        let kernels = Mixture::new(device, FloatType::F32, None)?;
        let lists = Lists {
            rows: poisoned(device, 4 * (sizes.experts + 1))?,
            row_of: poisoned(device, 4 * choices)?,
            choice_of: poisoned(device, 4 * choices)?,
        };
        let ids: Vec<u8> = ids.flat_map(i32::to_le_bytes).collect();
        let result = |expert: i32| {
            (0..n as i32).flat_map(move |column| ((expert * 100 + column) as f32).to_le_bytes())
        };
        let results = of_row.iter().flat_map(|&expert| result(expert));
        let weights: Vec<u8> = (0..choices).flat_map(|i| (i as f32 + 0.5).to_le_bytes()).collect();
        // Choices that are not sorted have results of their own, and lists from before the launches.
        let lists_before = [upload(device, &ids)?, upload(device, &weights)?];
        let (ids, first) = written(device, ids)?;
        let (a, second) = written(device, floats(sizes.tokens, k).to_le_bytes())?;
        let (results, third) = written(device, results.collect())?;
        let (weights, fourth) = written(device, weights)?;
        let (own, fifth) =
            written(device, (0..choices * n).flat_map(|i| (i as f32).to_le_bytes()).collect())?;
        let (rows, bytes) = (of_row.len() * k * 2, sizes.tokens * n * 4);
        let gathered = poisoned(device, choices * k * 2)?;
        let (c, seen) = (poisoned(device, 2 * bytes)?, poisoned(device, 2 * bytes + rows)?);
        let unsorted = c.offset(bytes as u64);
        let copy = Copy::new(device)?;
        let mut launches = vec![first, second, third, fourth];
        launches.extend(kernels.by_expert(
            &sizes,
            (ids, DevicePtr::NULL),
            (a, 2 * k, k),
            &lists,
            gathered,
        )?);
        launches.extend([
            kernels.combine(&sizes, (results, n), (RowOf::Listed(lists.row_of), weights), (c, false))?,
            fifth,
            kernels.combine(
                &sizes,
                (own, n),
                (RowOf::Itself(lists_before[0]), lists_before[1]),
                (unsorted, false),
            )?,
            copy.spec("C", (c, seen), 2 * bytes)?,
            copy.spec("A by expert", (gathered, seen.offset(2 * bytes as u64)), rows)?,
        ]);
        finish(device, launches, (seen, 2 * bytes + rows))
    };
    // In the order in which they are loaded.
    let names = [("route", 260), ("gather", 260), ("sort", 40), ("combine_f32", 40)].into_iter().enumerate();
    let case = |(module, (name, tokens)): (usize, (&str, usize))| Case {
        module,
        ..Case::new(name.into(), Card::H100, move |device| run(device, tokens))
    };
    names.map(case).collect()
}
