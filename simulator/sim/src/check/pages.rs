//! Shadow of global memory as one cluster has used it: pages made when first touched.

use super::shadow::{StateId, WRITTEN};
use std::collections::BTreeMap;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
const WORDS: usize = PAGE as usize / 4;

/// Pages by number (address / [`PAGE`]).
#[derive(Debug, Default)]
pub struct Pages(BTreeMap<u64, Vec<StateId>>);

impl Pages {
    /// The words of a page; memory counts as written before the kernel started.
    pub fn page(&mut self, number: u64) -> &mut Vec<StateId> {
        self.0.entry(number).or_insert_with(|| vec![WRITTEN; WORDS])
    }

    /// All words, for compaction.
    pub fn words(&mut self) -> impl Iterator<Item = &mut Vec<StateId>> {
        self.0.values_mut()
    }

    /// Pages in order; a page whose words are all in one state is shortened to that one.
    pub fn into_compressed(self) -> BTreeMap<u64, Vec<StateId>> {
        let mut pages = self.0;
        for words in pages.values_mut() {
            if words.iter().all(|w| *w == words[0]) {
                words.truncate(1);
                words.shrink_to_fit();
            }
        }
        pages
    }
}
