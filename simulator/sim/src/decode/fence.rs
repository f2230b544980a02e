//! Fences and barriers of threads. PTX ISA 9.7.13.1 (`bar`), 9.7.13.2 (`barrier.cluster`), 9.7.13.5 (`fence`).

use super::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fence {
    /// Orders memory accesses: `fence.acq_rel`, `fence.sc`, `membar`; `acquire` and `release` halves.
    Memory { scope: Scope, acquire: bool, release: bool },
    /// `fence.proxy.async`: generic writes to these memories become visible to the async proxy.
    Async(Memories),
    /// `fence.mbarrier_init`: initializations of mbarriers by this thread become visible to the cluster and the async proxy.
    Initialized,
    /// A fence between proxies that are one here.
    Nothing,
}

/// The memories of a `fence.proxy.async`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memories {
    /// None is named: all.
    All,
    Global,
    /// `.shared::cluster`
    Cluster,
    /// `.shared::cta`
    Cta,
}

/// What a CTA barrier does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Sync,
    Arrive,
    Popc,
    And,
    Or,
}

#[derive(Debug, Clone)]
pub enum Barrier {
    Cta {
        kind: Kind,
        /// Whether the warp executes it as one.
        aligned: bool,
        /// Barrier number.
        id: Src,
        /// Threads that take part; all if absent.
        count: Option<Src>,
        /// Result and predicate of `red`.
        vote: Option<(Dst, Src)>,
    },
    Warp(Src),
    /// `barrier.cluster.arrive`; whether aligned, whether it releases.
    ClusterArrive(bool, bool),
    /// `barrier.cluster.wait`; whether aligned.
    ClusterWait(bool),
}

/// `.gl` is what `membar` calls the GPU.
fn scope(i: &mut Ins<'_>) -> Option<Scope> {
    i.one_of(Scope::NAMES).or_else(|| i.has("gl").then_some(Scope::Gpu))
}

/// `fence`, `membar`
pub fn fence(i: &mut Ins<'_>) -> Result<Op> {
    let proxy = i.ast.modifiers.iter().any(|m| m.starts_with("proxy"));
    if proxy {
        let asynchronous = i.ast.modifiers.iter().any(|m| m.starts_with("async"));
        let alias = i.has("alias");
        let tensormap = i.ast.modifiers.iter().any(|m| m.starts_with("tensormap"));
        if !(asynchronous || alias || tensormap) {
            return i.error("needs a proxy: .alias, .async or .tensormap::generic");
        }
        if tensormap && (i.has("acquire") || i.has("release")) {
            let (acquire, scope) = (i.has("acquire"), scope(i));
            let Some(scope) = scope else { return i.error("needs a scope: .cta .cluster .gpu or .sys") };
            return Ok(Op::Fence(Fence::Memory { scope, acquire, release: !acquire }));
        }
        if !asynchronous {
            return Ok(Op::Fence(Fence::Nothing));
        }
        let named = |memory: &str| i.ast.modifiers.iter().any(|m| m.ends_with(memory));
        let memories = [
            ("shared::cluster", Memories::Cluster),
            ("shared::cta", Memories::Cta),
            ("global", Memories::Global),
        ];
        let memory = memories.into_iter().find(|(name, _)| named(name));
        return Ok(Op::Fence(Fence::Async(memory.map_or(Memories::All, |m| m.1))));
    }
    let initialized = i.has("mbarrier_init");
    // Restricted to one space: a fence of everything is at least as strong.
    i.ignore_if(|m| m.starts_with("sync_restrict"));
    let acquire = i.has("acquire");
    let release = i.has("release");
    i.ignore(&["acq_rel", "sc"]);
    let scope = scope(i);
    i.finish()?;
    let Some(scope) = scope else { return i.error("needs a scope: .cta .cluster .gpu or .sys") };
    if initialized {
        return Ok(Op::Fence(Fence::Initialized));
    }
    let both = acquire == release;
    Ok(Op::Fence(Fence::Memory { scope, acquire: both || acquire, release: both || release }))
}

/// `bar`, `barrier`
pub fn barrier(i: &mut Ins<'_>) -> Result<Op> {
    let short = i.ast.root == "bar";
    if i.has("warp") {
        i.ignore(&["sync"]);
        i.finish()?;
        return Ok(Op::Barrier(Barrier::Warp(i.src(0, Type::B32)?)));
    }
    let cluster = i.has("cluster");
    i.ignore(&["cta"]);
    let aligned = i.has("aligned") || short;
    if cluster {
        // A wait always acquires: PTX 9 spells `.relaxed` for arrivals only, and ptxas refuses it on a wait.
        let op = match i.need("an operation", &[("arrive", true), ("wait", false)])? {
            true => {
                let relaxed = i.has("relaxed");
                i.ignore_if(|m| m == "release" && !relaxed);
                Barrier::ClusterArrive(aligned, !relaxed)
            }
            false => {
                i.ignore(&["acquire"]);
                Barrier::ClusterWait(aligned)
            }
        };
        i.finish()?;
        return Ok(Op::Barrier(op));
    }
    let kind = if i.has("red") {
        i.ignore(&["u32", "pred"]);
        i.need("an operation", &[("popc", Kind::Popc), ("and", Kind::And), ("or", Kind::Or)])?
    } else {
        i.need("an operation", &[("sync", Kind::Sync), ("arrive", Kind::Arrive)])?
    };
    i.finish()?;
    let red = !matches!(kind, Kind::Sync | Kind::Arrive);
    let at = usize::from(red);
    let id = i.src(at, Type::U32)?;
    let have = i.count() - at - usize::from(red);
    let count = if have > 1 { Some(i.src(at + 1, Type::U32)?) } else { None };
    let vote = if red { Some((i.dst(0)?, i.predicate(i.count() - 1)?)) } else { None };
    if kind == Kind::Arrive && count.is_none() {
        return i.error("arrive needs a thread count");
    }
    Ok(Op::Barrier(Barrier::Cta { kind, aligned, id, count, vote }))
}
