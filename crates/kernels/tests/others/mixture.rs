//! Rows of A sorted by expert, by one launch and by two.

use dualgemm_bench::inputs::Inputs;
use dualgemm_formats::FloatType;
use dualgemm_kernels::generic::mixture::{Lists, Mixture, RowOf, Sizes};
use half::f16;

use crate::common::*;

fn check((tokens, top_k, experts): (usize, usize, usize), k: usize, launches: usize) {
    for weighs in [None, Some(FloatType::F16)] {
        check_rows((tokens, top_k, experts), k, launches, weighs);
    }
}

fn check_rows(
    (tokens, top_k, experts): (usize, usize, usize),
    k: usize,
    launches: usize,
    weighs: Option<FloatType>,
) {
    let gpu = gpu();
    let (sizes, choices) = (Sizes { tokens, top_k, experts }, tokens * top_k);
    // Some experts get no row, and some choices none of the experts here.
    let id = |choice: usize| match choice % 11 {
        4 => -1,
        9 => (experts + choice) as i32,
        _ => (choice * choice * 7 % experts) as i32,
    };
    let ids: Vec<i32> = (0..choices).map(id).collect();
    let here = |&id: &i32| (0..experts as i32).contains(&id);
    let mut sorted: Vec<usize> = (0..choices).filter(|&choice| here(&ids[choice])).collect();
    sorted.sort_by_key(|&choice| ids[choice]);
    let a = Inputs::seeded(3).floats("a", FloatType::F16, tokens, k).unwrap();
    let there = upload_floats(gpu, &a);
    let words = |words: usize| poisoned(gpu, 4 * words);
    let lists = Lists { rows: words(experts + 1), row_of: words(choices), choice_of: words(choices) };
    let out = poisoned(gpu, choices * k * 2);
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let kernels = Mixture::new(gpu, FloatType::F32, weighs).unwrap();
    let weight = |choice: usize| (choice as f32 - 3.5) / 7.0;
    let weights: Vec<u8> = (0..choices).flat_map(|choice| weight(choice).to_le_bytes()).collect();
    let (a_there, from) = ((there.values, there.pitch, k), (upload(gpu, &bytes), upload(gpu, &weights)));
    let specs = kernels.by_expert(&sizes, from, a_there, &lists, out).unwrap();
    assert_eq!(specs.len(), launches);
    specs.iter().for_each(|spec| run(gpu, spec));
    let list = |from, count: usize| -> Vec<u32> {
        read(gpu, from, 4 * count).as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    };
    let lower = |expert: usize| sorted.iter().filter(|&&choice| ids[choice] < expert as i32).count() as u32;
    assert_eq!(list(lists.rows, experts + 1), (0..=experts).map(lower).collect::<Vec<_>>());
    let choice_of = list(lists.choice_of, sorted.len());
    if launches == 1 {
        assert_eq!(choice_of, sorted.iter().map(|&choice| choice as u32).collect::<Vec<_>>());
    }
    let (row_of, gathered) = (list(lists.row_of, choices), read(gpu, out, choices * k * 2));
    for (choice, &row) in row_of.iter().enumerate() {
        match here(&ids[choice]) {
            true => assert_eq!(choice_of[row as usize], choice as u32),
            false => assert_eq!(row, u32::MAX, "choice {choice}"),
        }
    }
    for (row, (&choice, &like)) in choice_of.iter().zip(&sorted).enumerate() {
        assert_eq!(ids[choice as usize], ids[like], "row {row}");
        let token = choice as usize / top_k;
        let want = (0..k).map(|column| match weighs {
            None => f16::from_f32(a.value(token, column)),
            Some(_) => f16::from_f32(a.value(token, column) * weight(choice as usize)),
        });
        let want: Vec<u8> = want.flat_map(f16::to_le_bytes).collect();
        assert!(gathered[row * k * 2..][..k * 2] == want[..], "row {row}, {weighs:?}");
    }
    assert!(gathered[sorted.len() * k * 2..].iter().all(|&byte| byte == 0xA5), "rows of no choice");
}

#[test]
fn few_choices_are_sorted_by_one_launch_and_many_by_two_exact() {
    check((1, 3, 700), 72, 1);
    check((37, 3, 20), 72, 1);
    check((256, 2, 40), 72, 1);
    check((171, 3, 40), 72, 2);
    // More of a row than threads read at once.
    check((1, 3, 4), 8 * (4 * 256 + 2), 1);
}

/// Of more choices than are read at once, in their order; those without a row count nothing.
#[test]
fn results_are_summed_in_the_order_of_choices_exact() {
    let (gpu, tokens, top_k, n) = (gpu(), 3, 6, 24);
    let value = |row: usize, column: usize| 1.0 / (3 + row * 7 + column) as f32;
    let weight = |choice: usize| 0.1 + choice as f32 / 7.0;
    // Choices 1 and 14 have no row.
    let row_of = |choice: usize| (choice % 13 != 1).then_some((choice * 5) % 18);
    let words =
        |words: Vec<u32>| upload(gpu, &words.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    let choices = || 0..tokens * top_k;
    let results = choices().flat_map(|row| (0..n).map(move |column| value(row, column).to_bits()));
    let results = words(results.collect());
    let weights = words(choices().map(|choice| weight(choice).to_bits()).collect());
    let row_of_there =
        words(choices().map(|choice| row_of(choice).map_or(u32::MAX, |row| row as u32)).collect());
    let kernels = Mixture::new(gpu, FloatType::F32, None).unwrap();
    let sizes = Sizes { tokens, top_k, experts: 4 };
    for before in [None, Some(0.3f32)] {
        let c = words(vec![before.unwrap_or(f32::NAN).to_bits(); tokens * n]);
        let to = (c, before.is_some());
        let rows = RowOf::Listed(row_of_there);
        run(gpu, &kernels.combine(&sizes, (results, n), (rows, weights), to).unwrap());
        let sum = |(token, column): (usize, usize)| {
            let own =
                (token * top_k..(token + 1) * top_k).filter_map(|choice| Some((choice, row_of(choice)?)));
            let sum = own.fold(0.0f32, |sum, (choice, row)| sum + weight(choice) * value(row, column));
            before.map_or(sum, |before| sum + before)
        };
        let want: Vec<f32> = (0..tokens * n).map(|at| sum((at / n, at % n))).collect();
        let got = read(gpu, c, 4 * tokens * n);
        assert_eq!(got.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect::<Vec<_>>(), want);
    }
}
