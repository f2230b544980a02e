//! tcgen05: every row, with what is expected computed here.
//!
//! The card that would certify these files is not at hand, so the simulator is not asked: [`layout`] restates the
//! layouts as the PTX ISA and CUTLASS draw them, [`product`] multiplies with plain loops in binary64 on numbers whose
//! sums are exact in any order.

mod access;
mod issue;
pub(super) mod layout;
mod multiply;
mod product;
mod transfer;

use super::{Draft, bytes_of, indented};

/// The files.
pub fn drafts() -> Vec<Draft> {
    let mut list = access::drafts();
    list.extend(transfer::drafts());
    list.extend(multiply::drafts());
    list
}

/// Words that differ wherever they lie: `index` times an odd number.
const MIX: u32 = 0x9e37_79b1;

/// A kernel of four warps that has all of tensor memory: allocation before the body, deallocation after it.
struct Entry {
    /// `cta_group`; with 2 the kernel runs as a cluster of two CTAs.
    group: u32,
    /// Parameters besides `out`, each with the comma before it.
    parameters: String,
    /// Registers and shared memory.
    declared: String,
    /// Here `%t` is the thread, `%rank` the CTA, `%tm` the address of tensor memory, `%tw` that of the warp's lanes,
    /// `%out` the output, `%issue` true in one thread of the group, `%done` the address of an mbarrier for one arrival.
    body: String,
    /// The body allocates and frees tensor memory itself.
    bare: bool,
    /// CTAs of the cluster.
    ctas: u32,
}

impl Entry {
    fn new(group: u32, declared: &str, body: &str) -> Entry {
        let (declared, body) = (declared.into(), body.into());
        Entry { group, parameters: String::new(), declared, body, bare: false, ctas: group }
    }

    fn text(&self) -> String {
        let group = self.group;
        let (allocate, address, free) = match self.bare {
            true => Default::default(),
            false => (
                format!(
                    "@%first tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%slot], 512;
                     @%first tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;"
                ),
                "ld.shared.u32 %tm, [%slot];\nshl.b32 %tw, %warp, 21;\nadd.u32 %tw, %tw, %tm;".to_string(),
                format!("@%first tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %tm, 512;"),
            ),
        };
        let body = ptx!(
            "tcgen05_kernel",
            declared = self.declared,
            allocate,
            handover = handover(group),
            address,
            body = self.body,
            free
        );
        format!(
            ".visible .entry k{group}(.param .u64 out{})\n.reqntid 128, 1, 1\n{{\n{REGISTERS}{}\tret;\n}}\n",
            self.parameters,
            indented(&body)
        )
    }
}

const REGISTERS: &str = "\
\t.reg .pred %p<8>, %leader, %issue, %first;
\t.reg .b16 %rs<4>;
\t.reg .b32 %r<32>, %v<128>, %t, %warp, %rank, %tm, %tw, %slot, %done;
\t.reg .b64 %rd<16>, %out;
";

/// All threads of the group meet.
fn barrier(group: u32) -> &'static str {
    match group {
        1 => "bar.sync 0;",
        _ => "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;",
    }
}

/// All threads of the group meet, tensor memory included.
fn handover(group: u32) -> String {
    format!("tcgen05.fence::before_thread_sync;\n{}\ntcgen05.fence::after_thread_sync;", barrier(group))
}

/// Waits for phase `phase` of `%done`; `label` is unique.
fn wait(label: &str, phase: usize) -> String {
    format!(
        "{label}:
         mbarrier.try_wait.parity.shared::cta.b64 %p0, [%done], {};
         @!%p0 bra {label};
         tcgen05.fence::after_thread_sync;",
        phase % 2
    )
}

/// The issuing thread commits to `%done` of every CTA of the group.
fn commit(group: u32) -> &'static str {
    match group {
        1 => "@%issue tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%done];",
        _ => {
            "mov.b16 %rs0, 3;
             @%issue tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%done], %rs0;"
        }
    }
}

/// Columns `first..end` of the warp's lanes get [`filled`]; eight at a time.
fn fill(label: &str, first: u32, end: u32) -> String {
    let mut text = format!(
        "mov.u32 %r0, {first};
         {label}:
         add.u32 %r1, %tw, %r0;
         mad.lo.u32 %r2, %rank, 128, %t;
         mad.lo.u32 %r2, %r2, 512, %r0;\n"
    );
    for i in 0..8 {
        text += &format!("add.u32 %r3, %r2, {i};\nmul.lo.u32 %v{i}, %r3, {MIX};\n");
    }
    text + &format!(
        "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r1], {};
         add.u32 %r0, %r0, 8;
         setp.lt.u32 %p0, %r0, {end};
         @%p0 bra {label};
         tcgen05.wait::st.sync.aligned;",
        registers("v", 0, 8)
    )
}

/// What [`fill`] leaves in a cell.
fn filled(rank: u32, lane: u32, column: u32) -> u32 {
    ((rank * 128 + lane) * 512 + column).wrapping_mul(MIX)
}

/// `{%v0, %v1, …}`
fn registers(prefix: &str, first: u32, count: u32) -> String {
    let list: Vec<String> = (first..first + count).map(|i| format!("%{prefix}{i}")).collect();
    format!("{{{}}}", list.join(", "))
}

/// The launch line of an entry.
fn launch(entry: &Entry) -> String {
    let Entry { group, ctas, .. } = entry;
    format!("launch k{group} grid {ctas} block 128{}", if *ctas == 2 { " cluster 2" } else { "" })
}

/// A file: rows, PTX version, head lines, kernels, and what the outputs hold.
fn file(
    name: &str,
    rows: &str,
    version: &str,
    head: &[String],
    entries: &[Entry],
    expected: impl FnOnce() -> Vec<Vec<u32>> + Send + 'static,
) -> Draft {
    let mut text = format!(
        "//! row {rows}\n//! -- Expected: computed from the layouts of the PTX ISA, not by the simulator. Needs sm_100a.\n"
    );
    for line in head {
        text += &format!("//! {line}\n");
    }
    text += &format!(".version {version}\n.target sm_100a\n.address_size 64\n\n");
    for entry in entries {
        text += &entry.text();
    }
    let expected = Box::new(move || expected().into_iter().map(bytes_of).collect());
    Draft { name: format!("tcgen05/{name}"), text, expected }
}

/// A file of kernels that have nothing but an output each, with what it holds.
fn known(name: &str, rows: &str, kernels: impl IntoIterator<Item = (Entry, Vec<u32>)>) -> Draft {
    let (entries, outputs): (Vec<_>, Vec<_>) = kernels.into_iter().unzip();
    let lines =
        |(entry, output): (&Entry, &Vec<u32>)| [launch(entry), format!("out u32 {} = ?", output.len())];
    let head: Vec<String> = entries.iter().zip(&outputs).flat_map(lines).collect();
    file(name, rows, "8.6", &head, &entries, || outputs)
}
