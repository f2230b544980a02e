//! Shadow of global memory as one cluster has used it: pages made when first touched.

use super::lanes::Tags;
use super::shadow::{StateId, WRITTEN};
use std::collections::BTreeMap;

/// Bytes of a page.
pub const PAGE: u64 = 1024;
const WORDS: usize = PAGE as usize / 4;

/// Pages by number (address / [`PAGE`]).
#[derive(Debug, Default)]
pub struct Pages(BTreeMap<u64, (Vec<StateId>, Tags)>);

impl Pages {
    /// The words of a page, and the lanes that made their last accesses; memory counts as written before the kernel started.
    pub fn page(&mut self, number: u64) -> (&mut [StateId], &mut Tags) {
        let (words, tags) = self.0.entry(number).or_insert_with(|| (vec![WRITTEN; WORDS], Tags::default()));
        (words, tags)
    }

    /// All words, for compaction.
    pub fn words(&mut self) -> impl Iterator<Item = &mut Vec<StateId>> {
        self.0.values_mut().map(|(words, _)| words)
    }

    /// What was touched, in order: a grid that fills memory has thousands of clusters with a thousand runs each.
    pub fn into_runs(self) -> Vec<Run> {
        let mut out = Vec::new();
        self.0.into_iter().for_each(|(page, (words, _))| runs(page, &words, &mut out));
        out.shrink_to_fit();
        out
    }
}

/// Words of a page that were touched and are in one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub page: u64,
    pub start: u16,
    /// The one after the last.
    pub end: u16,
    pub state: StateId,
}

fn runs(page: u64, words: &[StateId], out: &mut Vec<Run>) {
    let mut start = 0;
    for same in words.chunk_by(|a, b| a == b) {
        let end = start + same.len() as u16;
        if same[0] != WRITTEN {
            out.push(Run { page, start, end, state: same[0] });
        }
        start = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_leave_out_what_was_not_touched_exact() {
        let mut pages = Pages::default();
        pages.page(3).0[4..8].fill(5);
        pages.page(3).0[8] = 6;
        pages.page(3).0[WORDS - 1] = 5;
        pages.page(7);
        let run = |start, end, state| Run { page: 3, start, end, state };
        let last = WORDS as u16;
        let found = vec![run(4, 8, 5), run(8, 9, 6), run(last - 1, last, 5)];
        assert_eq!(pages.into_runs(), found);
    }
}
