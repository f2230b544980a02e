//! Tests of `check::shadow`.

use super::*;
use crate::check::lanes::Lanes;
use crate::check::order::{Part, View};
use crate::check::proxy::Fence;

/// Four warps in each of two CTAs: actors 0 to 15 and 16 to 31.
const ACTORS: Actors = Actors { ctas: 2, warps: 4 };
const LOOK: Look = Look { race: true, uninit: true, memory: Memory::Shared(0), actors: ACTORS };

/// As who makes an access, with what it knows.
fn who(a: Access, view: &View) -> Who<'_> {
    Who { actor: a.actor, clock: a.clock, pc: a.pc, view, warp: None, lanes: Lanes::Any }
}

fn by(actor: Actor, clock: u32, kind: Kind) -> Access {
    Access { actor, clock, pc: actor as u32 * 100 + clock, kind, era: 0 }
}

fn run(steps: &[(usize, usize, Access, &View)]) -> Result<(), (usize, Conflict)> {
    let mut states = States::default();
    let mut words = vec![FRESH; 8];
    steps.iter().try_for_each(|&(s, n, a, v)| states.access((&mut words, None), s, n, a, &who(a, v), LOOK))
}

#[test]
fn writes_of_the_same_value_are_no_race_but_still_writes_exact() {
    let none = View::default();
    let (w, same) = (by(0, 1, Kind::WRITE), by(1, 1, Kind::WRITE.same()));
    assert_eq!(run(&[(0, 4, w, &none), (0, 4, same, &none)]), Ok(()));
    let read = by(0, 2, Kind::READ);
    let found = run(&[(0, 4, w, &none), (0, 4, same, &none), (0, 4, read, &none)]);
    assert_eq!(found, Err((0, Conflict::Race(by(1, 1, Kind::WRITE)))));
    let mut knows = View::default();
    knows.learn(0, 1);
    let found = run(&[(0, 4, w, &none), (0, 4, by(2, 1, Kind::READ), &knows), (0, 4, same, &none)]);
    assert_eq!(found, Err((0, Conflict::Race(by(2, 1, Kind::READ)))));
    let copy = by(2, 1, Kind::PROXY_WRITE);
    assert!(run(&[(0, 4, copy, &none), (0, 4, same, &none)]).is_err());
}

#[test]
fn unordered_write_and_read_conflict_exact() {
    let none = View::default();
    let w = by(0, 1, Kind::WRITE);
    let r = by(1, 1, Kind::READ);
    assert_eq!(run(&[(0, 4, w, &none), (0, 4, r, &none)]), Err((0, Conflict::Race(w))));
    let mut knows = View::default();
    knows.learn(0, 1);
    assert_eq!(run(&[(0, 4, w, &none), (0, 4, r, &knows)]), Ok(()));
    // The reader is not known to the next writer.
    let w2 = by(2, 1, Kind::WRITE);
    assert_eq!(run(&[(0, 4, w, &none), (0, 4, r, &knows), (0, 4, w2, &knows)]), Err((0, Conflict::Race(r))));
}

#[test]
fn bytes_of_a_word_are_told_apart_exact() {
    let none = View::default();
    let (a, b) = (by(0, 1, Kind::WRITE), by(1, 1, Kind::WRITE));
    assert_eq!(run(&[(4, 1, a, &none), (5, 1, b, &none)]), Ok(()));
    assert_eq!(run(&[(4, 2, a, &none), (5, 1, b, &none)]), Err((5, Conflict::Race(a))));
    let r = by(1, 2, Kind::READ);
    assert_eq!(run(&[(5, 1, b, &none), (5, 2, r, &none)]), Err((6, Conflict::Uninit)));
}

#[test]
fn strong_accesses_do_not_race_with_each_other_exact() {
    let none = View::default();
    let s = |actor| by(actor, 1, Kind::WRITE.strong(Some(Scope::Cta)));
    assert_eq!(run(&[(0, 4, s(0), &none), (0, 4, s(1), &none), (0, 4, s(2), &none)]), Ok(()));
    let r = by(3, 1, Kind::READ);
    assert_eq!(run(&[(0, 4, s(0), &none), (0, 4, r, &none)]), Err((0, Conflict::Race(s(0)))));
    // In another CTA only a wider scope is in reach.
    assert_eq!(run(&[(0, 4, s(0), &none), (0, 4, s(16), &none)]), Err((0, Conflict::Race(s(0)))));
    let wide = |actor| by(actor, 1, Kind::WRITE.strong(Some(Scope::Cluster)));
    assert_eq!(run(&[(0, 4, wide(0), &none), (0, 4, wide(16), &none)]), Ok(()));
}

#[test]
fn async_access_needs_the_proxy_fence_exact() {
    let mut view = View::default();
    let w = by(0, 1, Kind::WRITE);
    view.learn(0, 1);
    let r = by(1, 1, Kind::PROXY_READ);
    assert_eq!(run(&[(0, 16, w, &view), (0, 16, r, &view)]), Err((0, Conflict::Unfenced(w))));
    view.fence_proxy(&[Fence::Global], &[(9, 1)]);
    assert_eq!(run(&[(0, 16, w, &view), (0, 16, r, &view)]), Err((0, Conflict::Unfenced(w))));
    view.fence_proxy(&[Fence::Cta(0)], &[(9, 1)]);
    assert_eq!(run(&[(0, 16, w, &view), (0, 16, r, &view)]), Ok(()));
}

#[test]
fn compaction_keeps_what_words_hold_exact() {
    let none = View::default();
    let mut states = States::default();
    let mut words = vec![FRESH; 4];
    for clock in 1..100 {
        let write = by(0, clock, Kind::WRITE);
        states.access((&mut words, None), 0, 3, write, &who(write, &none), LOOK).unwrap();
    }
    let before = states.remembered(words[0]);
    states.compact(std::iter::once(&mut words));
    assert!(states.len() < 8);
    assert_eq!(states.remembered(words[0]), before);
}

/// Accesses by lanes of one warp, first actor 0: start, length, whether it writes, its clock, for whom.
fn by_lanes(view: &View, steps: &[(usize, usize, bool, u32, Lanes)]) -> Result<(), (usize, Conflict)> {
    let (mut states, mut words, mut tags) = (States::default(), vec![WRITTEN; 8], Tags::default());
    steps.iter().try_for_each(|&(start, len, write, clock, lanes)| {
        let a = by(0, clock, if write { Kind::WRITE } else { Kind::READ });
        let who = Who { warp: Some(0), lanes, ..who(a, view) };
        states.access((&mut words, Some(&mut tags)), start, len, a, &who, LOOK)
    })
}

#[test]
fn lanes_of_a_warp_know_their_own_bytes_exact() {
    let (none, each, one) = (View::default(), Lanes::Each(0, 2), Lanes::One);
    let race =
        |byte, write| Err((byte, Conflict::Race(by(0, 1, if write { Kind::WRITE } else { Kind::READ }))));
    assert_eq!(by_lanes(&none, &[(0, 32, true, 1, each), (0, 32, false, 2, each)]), Ok(()));
    assert_eq!(by_lanes(&none, &[(0, 32, true, 1, each), (6, 2, false, 2, one(3))]), Ok(()));
    assert_eq!(by_lanes(&none, &[(0, 32, true, 1, each), (6, 4, false, 2, one(3))]), race(8, true));
    assert_eq!(by_lanes(&none, &[(0, 32, false, 1, each), (4, 2, true, 2, one(1))]), race(4, false));
    // Both lanes have read it, so neither may write it.
    let again = [(0, 4, false, 1, one(1)), (0, 4, false, 1, one(2)), (0, 4, true, 2, one(2))];
    assert_eq!(by_lanes(&none, &again), race(0, false));
    let several = [(0, 4, false, 1, Lanes::Several), (0, 4, true, 2, one(2))];
    assert_eq!(by_lanes(&none, &several), race(0, false));
    assert_eq!(by_lanes(&none, &[(0, 4, true, 1, Lanes::Every), (0, 4, false, 2, one(2))]), Ok(()));
    // After a `bar.warp.sync` all is known.
    let mut synced = View::default();
    synced.learn(0, 1);
    assert_eq!(by_lanes(&synced, &[(0, 32, true, 1, each), (0, 32, false, 2, one(9))]), Ok(()));
}

#[test]
fn a_part_is_known_by_lanes_exact() {
    let mut view = View::default();
    view.learn_part(Part { actor: 0, clock: 1, lanes: 0b110, own: true });
    let whose = |view: &View| (view.knows(0, 1), view.whose(0, 1).lanes, view.whose(0, 1).own);
    assert_eq!(whose(&view), (false, 0, true));
    let settled = |lanes| {
        let mut view = view.clone();
        view.settle(lanes);
        whose(&view)
    };
    assert_eq!(
        [settled(0b1), settled(0b11), settled(0b1110)],
        [(false, 0, false), (false, 0b10, false), (true, 0, false)]
    );
    let mut other = View::default();
    other.learn_part(Part { actor: 0, clock: 1, lanes: 0b1, own: false });
    let (steps, reader) = (by(0, 1, Kind::WRITE), by(4, 1, Kind::READ));
    let (mut states, mut words, mut tags) = (States::default(), vec![WRITTEN; 8], Tags::default());
    let writer = Who { warp: Some(0), lanes: Lanes::Each(0, 4), ..who(steps, &view) };
    states.access((&mut words, Some(&mut tags)), 0, 8, steps, &writer, LOOK).unwrap();
    let reader_is = Who { lanes: Lanes::One(7), ..who(reader, &other) };
    let found = states.access((&mut words, Some(&mut tags)), 0, 8, reader, &reader_is, LOOK);
    assert_eq!(found, Err((4, Conflict::Race(steps))));
}
