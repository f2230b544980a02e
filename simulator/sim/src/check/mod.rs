//! The checkers: pure bookkeeping that says whether an access or an operation is allowed.
//!
//! `order` knows who has synchronized with whom in a cluster and `outside` what of that crosses clusters, `shadow`
//! remembers accesses word by word, `lanes` which lanes of a warp made them, `pages` does so for global memory, `cross`
//! compares what different clusters did to it and `launches` what overlapping launches did; `proxy` knows which writes
//! were fenced for the async proxy, and `undefined` where values came from that nothing wrote. Bounds, alignment,
//! barriers, mbarriers, registers in flight and tensor memory are checked where they are implemented (`memory`,
//! `machine`, `exec`).

pub mod cross;
pub mod hash;
pub mod lanes;
pub mod launches;
pub mod order;
pub mod outside;
pub mod pages;
pub mod proxy;
pub mod shadow;
pub mod undefined;
