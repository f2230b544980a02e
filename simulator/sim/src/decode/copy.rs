//! Asynchronous copies without a tensor map. PTX ISA 9.7.9.25 (`cp.async`, `cp.async.bulk`), `st.async`,
//! `red.async`, `st.bulk`, `clusterlaunchcontrol.try_cancel`.

use super::atomic::{operator, reduce_type};
use super::mbarrier::Mbar;
use super::*;
use crate::semantics::reduce::Reduction;

#[derive(Debug, Clone)]
pub enum CpAsync {
    /// A copy of 4, 8 or 16 bytes: `source` bytes are read, the rest is zeroed.
    Copy {
        /// Shared destination.
        to: Addr,
        /// Global source.
        from: Addr,
        bytes: u32,
        /// Bytes read, if fewer.
        source: Option<Src>,
        /// Predicate: read nothing.
        ignore: Option<Src>,
    },
    Commit,
    /// `wait_group n`
    Wait(u32),
    WaitAll,
}

/// How the completion of a bulk copy is noticed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Completion {
    /// Bytes are counted on this barrier.
    Mbarrier(Addr),
    /// The thread's bulk group.
    Group,
}

/// An element-wise reduction at the destination: operator and type of an element.
pub type Reduce = (Reduction, Type);

#[derive(Debug, Clone, Copy)]
pub struct BulkCopy {
    pub to: Addr,
    pub from: Addr,
    pub size: Src,
    pub completion: Completion,
    pub multicast: Option<Src>,
    pub reduce: Option<Reduce>,
    /// Mask of the bytes of every 16 that are written.
    pub bytes: Option<Src>,
}

#[derive(Debug, Clone)]
pub enum Bulk {
    Copy(BulkCopy),
    Commit,
    /// `cp.async.bulk.wait_group`; `true`: `.read`
    Wait(u32, bool),
    /// `st.async`, `red.async`: values to another CTA.
    Store {
        to: Addr,
        /// Type of an element.
        ty: Type,
        s: Vec<Src>,
        /// Barrier that counts the bytes.
        barrier: Addr,
        reduce: Option<Reduce>,
    },
    /// `st.bulk`: zeros.
    Fill(Addr, Src),
    /// `clusterlaunchcontrol.try_cancel`; `true`: to every CTA of the cluster.
    TryCancel(Addr, Addr, bool),
}

/// `cp.async` without bulk
pub fn cp_async(i: &mut Ins<'_>) -> Result<Op> {
    i.ignore(&["async"]);
    let op = if i.has("mbarrier") {
        i.ignore(&["arrive", "b64"]);
        let noinc = i.has("noinc");
        let space = match i.space() {
            Space::Generic => Space::Generic,
            _ => Space::SharedCta,
        };
        i.finish()?;
        return Ok(Op::Mbarrier(Mbar::CopyArrive(i.addr(0, space)?, noinc)));
    } else if i.has("commit_group") {
        CpAsync::Commit
    } else if i.has("wait_all") {
        CpAsync::WaitAll
    } else if i.has("wait_group") {
        CpAsync::Wait(constant(i, 0)?)
    } else {
        let hint = i.ast.has("L2::cache_hint");
        i.cache_hints();
        i.ignore(&["shared", "shared::cta", "global"]);
        let bytes = constant(i, 2)?;
        if !matches!(bytes, 4 | 8 | 16) {
            return i.error(format!("copies {bytes} bytes: 4, 8 or 16 are allowed"));
        }
        let extra = i.count() - 3 - usize::from(hint);
        let (mut source, mut ignore) = (None, None);
        if extra > 0 {
            let value = i.src(3, Type::U32)?;
            match value {
                Src::Reg(crate::program::Reg::Pred(_)) | Src::NotPred(_) => ignore = Some(value),
                _ => source = Some(value),
            }
        }
        CpAsync::Copy {
            to: i.addr(0, Space::SharedCta)?,
            from: i.addr(1, Space::Global)?,
            bytes,
            source,
            ignore,
        }
    };
    i.finish()?;
    Ok(Op::CpAsync(op))
}

/// Operand `at` as a constant.
pub fn constant(i: &Ins<'_>, at: usize) -> Result<u32> {
    match i.src(at, Type::U32)? {
        Src::Imm(n) => Ok(n as u32),
        _ => i.error(format!("operand {} must be a constant", at + 1)),
    }
}

/// `cp.async.bulk` and `cp.reduce.async.bulk` without tensor
pub fn bulk(i: &mut Ins<'_>) -> Result<Op> {
    i.ignore(&["async", "bulk", "reduce"]);
    if i.has("commit_group") {
        i.finish()?;
        return Ok(Op::Bulk(Bulk::Commit));
    }
    if i.has("wait_group") {
        let read = i.has("read");
        i.finish()?;
        return Ok(Op::Bulk(Bulk::Wait(constant(i, 0)?, read)));
    }
    if i.has("prefetch") {
        return Ok(Op::Nop);
    }
    let reducing = i.ast.root == "cp" && i.ast.modifiers.first().is_some_and(|m| m == "reduce");
    i.cache_hints();
    let masked = i.has("cp_mask");
    let multicast = i.has("multicast::cluster");
    let counted = i.has("mbarrier::complete_tx::bytes");
    let grouped = i.has("bulk_group");
    // The first space is the destination's, the second the source's.
    let spaces = i.spaces();
    let [to, from] = spaces[..] else { return i.error("needs a destination and a source space") };
    let reduce = if reducing {
        i.ignore(&["noftz"]);
        let op = operator(i);
        let ty = i.ty()?;
        match (op, reduce_type(ty)) {
            (Some(op), Some((ty, _))) => Some((op, ty)),
            _ => return i.error("needs a reduction and its type"),
        }
    } else {
        None
    };
    i.finish()?;
    let completion = match (counted, grouped) {
        (true, false) => Completion::Mbarrier(i.addr(3, Space::SharedCluster)?),
        (false, true) => Completion::Group,
        _ => return i.error("needs .mbarrier::complete_tx::bytes or .bulk_group"),
    };
    let multicast = if multicast { Some(i.src(4, Type::B16)?) } else { None };
    let bytes = if masked { Some(i.src(i.count() - 1, Type::B16)?) } else { None };
    let (to, from, size) = (i.addr(0, to)?, i.addr(1, from)?, i.src(2, Type::U32)?);
    Ok(Op::Bulk(Bulk::Copy(BulkCopy { to, from, size, completion, multicast, reduce, bytes })))
}

pub fn st_async(i: &mut Ins<'_>) -> Result<Op> {
    async_store(i, false)
}

pub fn red_async(i: &mut Ins<'_>) -> Result<Op> {
    async_store(i, true)
}

fn async_store(i: &mut Ins<'_>, reducing: bool) -> Result<Op> {
    i.ignore(&["async", "relaxed", "weak", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes"]);
    i.ignore(&["v2", "v4"]);
    let op = operator(i);
    let ty = i.ty()?;
    i.finish()?;
    let reduce = match (reducing, op, reduce_type(ty)) {
        (false, None, _) => None,
        (true, Some(op), Some((ty, _))) => Some((op, ty)),
        _ => return i.error("needs a reduction and its type"),
    };
    let to = i.addr(0, Space::SharedCluster)?;
    let barrier = i.addr(2, Space::SharedCluster)?;
    Ok(Op::Bulk(Bulk::Store { to, ty, s: i.srcs(1, ty)?, barrier, reduce }))
}

pub fn st_bulk(i: &mut Ins<'_>) -> Result<Op> {
    i.ignore(&["bulk", "weak"]);
    let space = i.space();
    i.finish()?;
    if i.src(2, Type::U64)? != Src::Imm(0) {
        return i.error("the initial value is 0");
    }
    Ok(Op::Bulk(Bulk::Fill(i.addr(0, space)?, i.src(1, Type::U64)?)))
}

/// `clusterlaunchcontrol.try_cancel`
pub fn try_cancel(i: &mut Ins<'_>) -> Result<Op> {
    i.ignore(&["try_cancel", "async", "shared::cta", "mbarrier::complete_tx::bytes", "b128"]);
    let all = i.has("multicast::cluster::all");
    i.finish()?;
    match (i.operand(0)?, i.operand(1)?) {
        (Operand::Address(_), Operand::Address(_)) => {}
        _ => return i.error("needs the address of the response and of a barrier"),
    }
    Ok(Op::Bulk(Bulk::TryCancel(i.addr(0, Space::SharedCta)?, i.addr(1, Space::SharedCta)?, all)))
}
