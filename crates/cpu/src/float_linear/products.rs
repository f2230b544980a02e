//! The products of rows and features, from steps of K: vectors of what lies side by side in both.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

use crate::amx::TILE_K;
use crate::fetch::prefetch;
use crate::w4a16::Vector;

/// The products of some rows and features: slices of one length, of rows padded to whole steps with zeros. `FETCH` asks the memory
/// for what follows the weights of each feature.
///
/// # Safety
/// The machine has the instruction set.
#[inline(always)]
pub(crate) unsafe fn multiply<P: Products, const FEATURES: usize, const ROWS: usize, const FETCH: bool>(
    weights: [&[P::W]; FEATURES],
    rows: [&[P::A]; ROWS],
) -> [[f32; FEATURES]; ROWS] {
    const { assert!(FEATURES.is_multiple_of(4) && P::STEP <= TILE_K) };
    let len = weights[0].len();
    let whole = len / P::STEP * P::STEP;
    assert!(weights.iter().all(|w| w.len() == len), "weights");
    assert!(rows.iter().all(|a| a.len() >= len.next_multiple_of(P::STEP)), "padding");
    let mut sums = [[0.0; FEATURES]; ROWS];
    // SAFETY: the caller's machine has the instruction set, and steps are inside the slices.
    unsafe {
        let mut chains = [[P::Sum::zero(); FEATURES]; ROWS];
        let (mut w, mut a) = ([weights[0].as_ptr(); FEATURES], [rows[0].as_ptr(); ROWS]);
        w.iter_mut().zip(weights).for_each(|(to, from)| *to = from.as_ptr());
        a.iter_mut().zip(rows).for_each(|(to, from)| *to = from.as_ptr());
        for k in (0..whole).step_by(P::STEP) {
            if FETCH {
                for w in w {
                    prefetch(w.wrapping_add(k).cast::<u8>().wrapping_add(P::Sum::AHEAD / FEATURES));
                }
            }
            add::<P, FEATURES, ROWS>(&mut chains, w, a, k, k);
        }
        if whole < len {
            let mut tails = [[P::W::zeroed(); TILE_K]; FEATURES];
            for ((tail, from), w) in tails.iter_mut().zip(weights).zip(&mut w) {
                tail[..len - whole].copy_from_slice(&from[whole..]);
                *w = tail.as_ptr();
            }
            add::<P, FEATURES, ROWS>(&mut chains, w, a, 0, whole);
        }
        for (sums, chains) in sums.iter_mut().zip(chains) {
            for (sums, chains) in sums.as_chunks_mut::<4>().0.iter_mut().zip(chains.as_chunks::<4>().0) {
                *sums = P::Sum::sums(*chains);
            }
        }
    }
    sums
}

/// Adds a step of each feature, from its element `w_k` on, times that of each row, from `a_k` on.
#[inline(always)]
unsafe fn add<P: Products, const FEATURES: usize, const ROWS: usize>(
    chains: &mut [[P::Sum; FEATURES]; ROWS],
    weights: [*const P::W; FEATURES],
    rows: [*const P::A; ROWS],
    w_k: usize,
    a_k: usize,
) {
    // SAFETY: `multiply` passes pointers to a step of k of each feature and row.
    unsafe {
        let mut a = [P::a(rows[0].add(a_k)); ROWS];
        for (a, from) in a.iter_mut().zip(rows) {
            *a = P::a(from.add(a_k));
        }
        for (feature, from) in weights.into_iter().enumerate() {
            let w = P::w(from.add(w_k));
            for (chains, a) in chains.iter_mut().zip(a) {
                chains[feature] = P::add(a, w, chains[feature]);
            }
        }
    }
}

/// Products of a row and a feature, a step of K at a time. The methods are `unsafe` as those of [`Vector`] are; pointers are to a
/// step.
pub(crate) trait Products {
    /// Elements of A.
    type A: Pod;
    /// Elements of the weights.
    type W: Pod;
    /// A step of either.
    type Factor: Copy;
    /// Sums, by lane.
    type Sum: Vector;
    /// Elements of K.
    const STEP: usize;

    unsafe fn a(from: *const Self::A) -> Self::Factor;
    unsafe fn w(from: *const Self::W) -> Self::Factor;
    unsafe fn add(a: Self::Factor, w: Self::Factor, sum: Self::Sum) -> Self::Sum;
}

/// Fused multiply-adds of f32.
pub(crate) struct Fused<V, T>(PhantomData<(V, T)>);

impl<V: Vector, T: Element> Products for Fused<V, T> {
    type A = f32;
    type W = T;
    type Factor = V;
    type Sum = V;
    const STEP: usize = V::LANES;

    #[inline(always)]
    unsafe fn a(from: *const f32) -> V {
        // SAFETY: the contract is the same.
        unsafe { V::load(from) }
    }

    #[inline(always)]
    unsafe fn w(from: *const T) -> V {
        // SAFETY: the contract is the same.
        unsafe { T::load(from) }
    }

    #[inline(always)]
    unsafe fn add(a: V, w: V, sum: V) -> V {
        // SAFETY: the contract is the same.
        unsafe { V::mul_add(a, w, sum) }
    }
}

/// A float that vectors of f32 are made of.
pub(crate) trait Element: Pod {
    /// A vector of them.
    ///
    /// # Safety
    /// As for [`Vector::load`].
    unsafe fn load<V: Vector>(from: *const Self) -> V;
}

/// Implements [`Element`] by a method of [`Vector`].
macro_rules! elements {
    ($($float:ty: $load:ident;)*) => {$(
        impl Element for $float {
            #[inline(always)]
            unsafe fn load<V: Vector>(from: *const Self) -> V {
                // SAFETY: the contract is the same.
                unsafe { V::$load(from) }
            }
        }
    )*};
}
elements! {
    f32: load;
    f16: load_f16;
    bf16: load_bf16;
}
