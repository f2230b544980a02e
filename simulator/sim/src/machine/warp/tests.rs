//! Tests of `machine::warp`.

use super::*;

fn warp(lanes: u32) -> Warp {
    Warp::new(0, lanes, Regs::default(), Local::default(), Local::default(), (0, false))
}

#[test]
fn parted_lanes_meet_at_the_post_dominator_exact() {
    let mut w = warp(0xff);
    let g = w.groups.pop().unwrap();
    let mut a = w.split(g, 0x0f, 10, 1, 20).unwrap();
    assert_eq!((a.pc, a.mask), (1, 0xf0));
    a.pc = 20;
    assert!(w.settle(a).is_none());
    let mut b = w.groups.pop().unwrap();
    assert_eq!((b.pc, b.mask), (10, 0x0f));
    b.pc = 20;
    let all = w.settle(b).unwrap();
    assert_eq!((all.pc, all.mask, all.scope), (20, 0xff, 0));
}

#[test]
fn lanes_that_exit_are_not_waited_for_exact() {
    let mut w = warp(0xff);
    let g = w.groups.pop().unwrap();
    let mut a = w.split(g, 0x0f, 10, 1, 20).unwrap();
    a.pc = 20;
    assert!(w.settle(a).is_none());
    let b = w.groups.pop().unwrap();
    assert!(w.exit(b, 0x0f).is_none());
    let rest = w.groups.pop().unwrap();
    assert_eq!((rest.pc, rest.mask), (20, 0xf0));
}

#[test]
fn a_loop_that_lanes_leave_one_by_one_uses_one_scope_exact() {
    let mut w = warp(0xf);
    let mut g = w.groups.pop().unwrap();
    for lane in 0..3 {
        g = w.split(g, 1 << lane, 9, 1, 9).unwrap();
        assert_eq!(w.scopes.iter().filter(|s| s.live).count(), 2);
    }
    g.pc = 9;
    let all = w.settle(g).unwrap();
    assert_eq!((all.mask, all.scope), (0xf, 0));
}

#[test]
fn early_lanes_can_be_let_through_exact() {
    let mut w = warp(0x3);
    let g = w.groups.pop().unwrap();
    let stuck = w.split(g, 0x1, 9, 1, 9).unwrap();
    assert_eq!(stuck.mask, 0x2);
    assert!(w.release_waiting());
    let early = w.groups.pop().unwrap();
    assert_eq!((early.pc, early.mask, early.scope), (9, 1, 0));
    assert!(!w.release_waiting());
    let mut stuck = stuck;
    stuck.pc = 9;
    assert_eq!(w.settle(stuck).unwrap().scope, 0);
}

#[test]
fn lanes_meet_at_a_warp_synchronous_instruction_exact() {
    let mut w = warp(0xff);
    let g = w.groups.pop().unwrap();
    let mut a = w.split(g, 0x0f, 10, 1, 20).unwrap();
    a.pc = 15;
    assert!(!w.gather(&mut a, 0xff));
    a.wait = Wait::Lanes(0xff);
    w.groups.push(a);
    let at = w.groups.iter().position(|g| g.mask == 0x0f).unwrap();
    let mut b = w.groups.swap_remove(at);
    b.pc = 15;
    assert!(w.gather(&mut b, 0xff));
    let all = b;
    // Both came from the same branch, whose meeting point is still ahead.
    assert_eq!((all.mask, all.scope), (0xff, 1));
    assert!(w.groups.is_empty());
}

#[test]
fn lanes_that_part_and_meet_keep_what_each_knows_exact() {
    let mut w = Warp::new(0, 0xff, Regs::default(), Local::default(), Local::default(), (0, true));
    let mut g = w.groups.pop().unwrap();
    w.note(&mut g, 0xff, true);
    let mut first = w.split(g, 0x0f, 10, 1, 20).unwrap();
    let mut told = View::default();
    told.learn(30, 5);
    first.known.join(first.mask, &told);
    first.pc = 20;
    assert!(w.settle(first).is_none());
    let mut second = w.groups.pop().unwrap();
    second.pc = 20;
    let mut all = w.settle(second).unwrap();
    let knows = |g: &Group, lane| g.known.of(lane).knows(30, 5);
    assert!(knows(&all, 4) && !knows(&all, 3) && all.known.alike(0x18).is_none());
    // One lane publishes what it did itself; all together, everything.
    let one = w.publish(&all, 1);
    assert!(!one.knows(0, 2) && one.whose(0, 2).lanes == 1);
    w.sync(&mut all, 0xff);
    assert!(knows(&all, 3) && all.known.alike(0xff).is_some_and(|view| view.knows(0, 2)));
    assert!(w.publish(&all, 1).knows(0, 2));
}
