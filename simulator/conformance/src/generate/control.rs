//! Branches, calls, barriers, clusters, launch control, register pools.

use super::raw::Raw;
use super::{Draft, bytes_of};

/// The files.
pub fn drafts() -> Vec<Draft> {
    let mut list = vec![
        branches(),
        calls(),
        indirect(),
        exits(),
        elect(),
        setmaxnreg(),
        clusters(),
        cluster_forms(),
        divergence(),
    ];
    list.extend(barriers());
    list.extend(launch_control());
    list.into_iter().map(Raw::draft).collect()
}

fn branches() -> Raw {
    Raw::new("control/branches", "bra brx_idx", "block 128", "u32 128").body(
        "// Loops of a different length per lane, then a jump table.
         mov.u32 %r2, 0;
         and.b32 %r3, %t, 15;
         LOOP:
         setp.eq.u32 %p0, %r3, 0;
         @%p0 bra DONE;
         mad.lo.u32 %r2, %r2, 3, %r3;
         sub.u32 %r3, %r3, 1;
         bra.uni LOOP;
         DONE:
         and.b32 %r4, %t, 3;
         targets: .branchtargets A, B, C, D;
         brx.idx %r4, targets;
         A: add.u32 %r2, %r2, 1000;
         bra OUT;
         B: add.u32 %r2, %r2, 2000;
         C: xor.b32 %r2, %r2, 85;
         bra OUT;
         D: not.b32 %r2, %r2;
         OUT:
         st.global.u32 [%out], %r2;",
    )
}

fn divergence() -> Raw {
    Raw::new(
        "control/partial_warps",
        "vote_ballot shfl match_any redux_int bar_warp_sync",
        "block 64",
        "u32 256",
    )
    .body(
        "// Odd lanes and even lanes work apart, with masks that name them.
             and.b32 %r2, %t, 1;
             setp.eq.u32 %p0, %r2, 0;
             mul.lo.u32 %r3, %t, 7;
             and.b32 %r9, %t, 4;
             @%p0 bra EVEN;
             setp.ge.u32 %p1, %lane, 9;
             vote.sync.ballot.b32 %r4, %p1, 0xaaaaaaaa;
             shfl.sync.bfly.b32 %r5, %r3, 2, 0x1f, 0xaaaaaaaa;
             redux.sync.add.u32 %r6, %r3, 0xaaaaaaaa;
             match.any.sync.b32 %r7, %r9, 0xaaaaaaaa;
             bra JOIN;
             EVEN:
             setp.lt.u32 %p1, %lane, 9;
             vote.sync.ballot.b32 %r4, %p1, 0x55555555;
             shfl.sync.down.b32 %r5, %r3, 4, 0x1f, 0x55555555;
             redux.sync.max.u32 %r6, %r3, 0x55555555;
             match.any.sync.b32 %r7, %r9, 0x55555555;
             JOIN:
             bar.warp.sync 0xffffffff;
             st.global.u32 [%out], %r4;
             st.global.u32 [%out+256], %r5;
             st.global.u32 [%out+512], %r6;
             st.global.u32 [%out+768], %r7;",
    )
}

fn calls() -> Raw {
    Raw::new(
        "control/calls",
        "call call_args call_returns call_returns_args ret st_param",
        "block 64",
        "u32 128",
    )
    .globals(
        ".global .b32 counter[64];
.func procedure()
{
\t.reg .b32 a; .reg .b64 p;
\tmov.u32 a, %tid.x;
\tmov.u64 p, counter;
\tmad.wide.u32 p, a, 4, p;
\tadd.u32 a, a, 5;
\tst.global.u32 [p], a;
\tret;
}
.func consumer(.param .b32 x)
{
\t.reg .b32 a, b; .reg .b64 p;
\tld.param.b32 b, [x];
\tmov.u32 a, %tid.x;
\tmov.u64 p, counter;
\tmad.wide.u32 p, a, 4, p;
\tld.global.u32 a, [p];
\tmad.lo.u32 a, a, 10, b;
\tst.global.u32 [p], a;
\tret;
}
.func (.param .b32 y) source()
{
\t.reg .b32 a;
\tmov.u32 a, %tid.x;
\tmul.lo.u32 a, a, a;
\tst.param.b32 [y], a;
\tret;
}
.func (.param .b32 y) function(.param .b32 x)
{
\t.reg .b32 a; .reg .pred p;
\tld.param.b32 a, [x];
\tsetp.gt.u32 p, a, 30;
\t@p ret;
\tadd.u32 a, a, 100;
\tst.param.b32 [y], a;
\tret;
}
",
    )
    .body(
        ".param .b32 given;
         .param .b32 taken;
         call procedure;
         st.param.b32 [given], %t;
         call consumer, (given);
         mov.u64 %rd1, counter;
         mad.wide.u32 %rd1, %t, 4, %rd1;
         ld.global.u32 %r2, [%rd1];
         st.global.u32 [%out], %r2;
         call (taken), source;
         ld.param.b32 %r3, [taken];
         min.u32 %r5, %t, 30;
         st.param.b32 [given], %r5;
         call (taken), function, (given);
         ld.param.b32 %r4, [taken];
         add.u32 %r3, %r3, %r4;
         st.global.u32 [%out+256], %r3;",
    )
}

/// Functions by address: the same in all lanes, another one in each lane, and from a table.
fn indirect() -> Raw {
    let function = |name: &str, body: &str| {
        format!(
            ".func (.param .b32 y) {name}(.param .b32 x)\n{{\n\t.reg .b32 a;\n\tld.param.b32 a, [x];\n\t{body}\n\tst.param.b32 [y], a;\n\tret;\n}}\n"
        )
    };
    let functions = [
        function("triple", "mul.lo.u32 a, a, 3;"),
        function("plus", "add.u32 a, a, 1000;"),
        function("square", "mul.lo.u32 a, a, a;"),
        ".global .align 8 .u64 table[3] = {triple, plus, square};\n".into(),
    ];
    let results = |t: u32, which: u32| match which {
        0 => 3 * t,
        1 => t + 1000,
        _ => t * t,
    };
    let expected = [1, 0, 2].into_iter().flat_map(|step| {
        (0..64u32).map(move |t| match step {
            1 => results(t, 2),
            0 => results(t, t / 5 % 2),
            _ => results(t, t % 3),
        })
    });
    Raw::new("control/call_indirect", "call_indirect", "block 64", "u32 192")
        .globals(&functions.concat())
        .body(
            ".param .b32 given;
             .param .b32 taken;
             prototype: .callprototype (.param .b32 _) _ (.param .b32 _);
             st.param.b32 [given], %t;
             mov.u64 %rd1, square;
             call.uni (taken), %rd1, (given), prototype;
             ld.param.b32 %r2, [taken];
             st.global.u32 [%out], %r2;
             // Every five lanes another one of two.
             mov.u64 %rd2, triple;
             mov.u64 %rd3, plus;
             div.u32 %r3, %t, 5;
             and.b32 %r3, %r3, 1;
             setp.eq.u32 %p0, %r3, 0;
             selp.b64 %rd1, %rd2, %rd3, %p0;
             st.param.b32 [given], %t;
             call (taken), %rd1, (given), prototype;
             ld.param.b32 %r2, [taken];
             st.global.u32 [%out+256], %r2;
             rem.u32 %r3, %t, 3;
             mov.u64 %rd4, table;
             mad.wide.u32 %rd4, %r3, 8, %rd4;
             ld.global.u64 %rd1, [%rd4];
             st.param.b32 [given], %t;
             call (taken), %rd1, (given), prototype;
             ld.param.b32 %r2, [taken];
             st.global.u32 [%out+512], %r2;",
        )
        .expects(vec![bytes_of(expected)])
}

fn exits() -> Raw {
    Raw::new("control/exits", "exit ret trap brkpt", "block 96", "u32 96").body(
        "// Lanes leave at different points; nobody reaches the trap.
         st.global.u32 [%out], 1;
         setp.lt.u32 %p0, %lane, 5;
         @%p0 exit;
         st.global.u32 [%out], 2;
         setp.lt.u32 %p0, %lane, 20;
         @%p0 ret;
         st.global.u32 [%out], 3;
         setp.gt.u32 %p1, %t, 1000;
         @%p1 trap;
         @%p1 brkpt;",
    )
}

fn elect() -> Raw {
    Raw::new("control/elect", "elect", "block 64", "u32 64").body(
        "// Who is elected is up to the device; that it is one, and that all are told the same, is not.
         elect.sync %r2|%p0, 0xffffffff;
         vote.sync.ballot.b32 %r3, %p0, 0xffffffff;
         popc.b32 %r4, %r3;
         bfind.u32 %r5, %r3;
         sub.u32 %r5, %r5, %r2;
         mad.lo.u32 %r4, %r5, 100, %r4;
         st.global.u32 [%out], %r4;",
    )
}

fn setmaxnreg() -> Raw {
    Raw::new("control/setmaxnreg", "setmaxnreg", "block 256", "u32 256")
        .directives(".reqntid 256, 1, 1\n.maxnreg 80\n")
        .body(
            "setp.lt.u32 %p0, %t, 128;
         @%p0 bra GIVE;
         setmaxnreg.inc.sync.aligned.u32 120;
         mul.lo.u32 %r2, %t, 3;
         bra STORE;
         GIVE:
         setmaxnreg.dec.sync.aligned.u32 40;
         add.u32 %r2, %t, 7;
         STORE:
         st.global.u32 [%out], %r2;",
        )
}

fn clusters() -> Raw {
    Raw::new(
        "control/clusters",
        "barrier_cluster_arrive barrier_cluster_wait mapa getctarank cvta_cluster ld_cluster st_cluster",
        "grid 8 block 64 cluster 4",
        "u32 1536",
    )
    .body(
        ".shared .align 16 .b32 mine[64];
         // Every CTA writes to the next one and reads the previous one.
         mov.u32 %r2, %cluster_ctarank;
         mov.u32 %r3, %cluster_nctarank;
         add.u32 %r4, %r2, 1;
         rem.u32 %r4, %r4, %r3;
         mov.u32 %r5, mine;
         mad.lo.u32 %r5, %t, 4, %r5;
         mapa.shared::cluster.u32 %r6, %r5, %r4;
         barrier.cluster.arrive.aligned;
         barrier.cluster.wait.aligned;
         st.shared::cluster.u32 [%r6], %gid;
         barrier.cluster.arrive.aligned;
         barrier.cluster.wait.aligned;
         ld.shared.u32 %r7, [%r5];
         st.global.u32 [%out], %r7;
         ld.shared::cluster.u32 %r8, [%r6];
         st.global.u32 [%out+2048], %r8;
         getctarank.shared::cluster.u32 %r9, %r6;
         // The same through generic addresses.
         cvt.u64.u32 %rd1, %r5;
         cvta.shared::cluster.u64 %rd2, %rd1;
         mapa.u64 %rd3, %rd2, %r4;
         ld.u32 %r10, [%rd3];
         getctarank.u64 %r11, %rd3;
         cvta.to.shared::cluster.u64 %rd4, %rd3;
         ld.shared::cluster.u32 %r12, [%rd4];
         mad.lo.u32 %r9, %r9, 16, %r11;
         sub.u32 %r12, %r12, %r10;
         mad.lo.u32 %r9, %r12, 1000, %r9;
         add.u32 %r9, %r9, %r10;
         st.global.u32 [%out+4096], %r9;
         barrier.cluster.arrive.aligned;
         barrier.cluster.wait.aligned;",
    )
}

fn cluster_forms() -> Raw {
    Raw::new(
        "control/cluster_barriers",
        "barrier_cluster_arrive barrier_cluster_arrive_sem barrier_cluster_wait barrier_cluster_wait_sem",
        "grid 2 block 32 cluster 2",
        "u32 64",
    )
    .body(
        ".shared .align 16 .b32 box[32];
         mov.u32 %r2, %cluster_ctarank;
         xor.b32 %r2, %r2, 1;
         mov.u32 %r5, box;
         mad.lo.u32 %r5, %t, 4, %r5;
         mapa.shared::cluster.u32 %r6, %r5, %r2;
         barrier.cluster.arrive.relaxed.aligned;
         barrier.cluster.wait.acquire.aligned;
         st.shared::cluster.u32 [%r6], %gid;
         barrier.cluster.arrive.release;
         barrier.cluster.wait;
         ld.shared.u32 %r7, [%r5];
         barrier.cluster.arrive;
         barrier.cluster.wait.acquire;
         st.global.u32 [%out], %r7;",
    )
}

fn barriers() -> Vec<Raw> {
    let mut list = Vec::new();
    for (name, rows, word, aligned) in [
        ("bar", "bar_sync bar_arrive bar_red_popc bar_red_bool", "bar", ""),
        ("bar_cta", "bar_sync_cta bar_arrive_cta bar_red_popc_cta bar_red_bool_cta", "bar.cta", ""),
        ("barrier", "barrier_sync barrier_arrive", "barrier", ""),
        ("barrier_cta", "barrier_sync_cta barrier_arrive_cta", "barrier.cta", ""),
        ("barrier_aligned", "barrier_sync barrier_arrive", "barrier", ".aligned"),
        ("barrier_cta_aligned", "barrier_sync_cta barrier_arrive_cta", "barrier.cta", ".aligned"),
    ] {
        let reductions = if word.starts_with("bar.") || word == "bar" {
            format!(
                "setp.gt.u32 %p1, %lane, 20;
                 {word}.red.popc.u32 %r6, 0, %p1;
                 {word}.red.and.pred %p2, 0, %p1;
                 {word}.red.or.pred %p3, 0, !%p1;
                 selp.u32 %r7, 1000, 0, %p2;
                 selp.u32 %r8, 2000, 0, %p3;
                 add.u32 %r6, %r6, %r7;
                 add.u32 %r6, %r6, %r8;
                 st.global.u32 [%out+512], %r6;"
            )
        } else {
            "st.global.u32 [%out+512], %r5;".into()
        };
        list.push(Raw::new(&format!("control/{name}"), rows, "block 128", "u32 256").body(&format!(
            ".shared .align 16 .b32 box[128];
             mov.u32 %r2, box;
             mad.lo.u32 %r3, %t, 4, %r2;
             mul.lo.u32 %r4, %t, 11;
             st.shared.u32 [%r3], %r4;
             {word}.sync{aligned} 0;
             xor.b32 %r5, %t, 96;
             mad.lo.u32 %r5, %r5, 4, %r2;
             ld.shared.u32 %r5, [%r5];
             st.global.u32 [%out], %r5;
             {word}.sync{aligned} 1, 128;
             // Warps 0 and 1 produce, warps 2 and 3 wait for them at barrier 2.
             setp.ge.u32 %p0, %t, 64;
             @%p0 bra WAIT;
             st.shared.u32 [%r3], %gid;
             {word}.arrive{aligned} 2, 128;
             bra JOIN;
             WAIT:
             {word}.sync{aligned} 2, 128;
             ld.shared.u32 %r5, [%r3+-256];
             st.global.u32 [%out], %r5;
             JOIN:
             {word}.sync{aligned} 0;
             {reductions}"
        )));
    }
    list
}

fn launch_control() -> Vec<Raw> {
    let query = "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %rq0;
         mov.u32 %r10, 0;
         mov.u32 %r11, 0;
         mov.u32 %r12, 0;
         mov.u32 %r13, 0;
         selp.u32 %r9, 1, 0, %p2;
         @%p2 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r10, %r11, %r12, %r13}, %rq0;
         @%p2 clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r13, %rq0;";
    [("clc", "clc_try_cancel", "", 1), ("clc_multicast", "clc_try_cancel_multicast", ".multicast::cluster::all", 2)]
        .into_iter()
        .map(|(name, row, multicast, cluster)| {
            let rows = format!("{row} clc_is_canceled clc_first_ctaid clc_first_ctaid_dim");
            // A grid of one cluster has nothing left to cancel: the answer is the same every time.
            let launch = format!("grid {cluster} block 32 cluster {cluster}");
            let sync = if cluster == 2 { "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" } else { "bar.sync 0;" };
            Raw::new(&format!("control/{name}"), &rows, &launch, &format!("u32 {}", 32 * cluster))
                .target("sm_100a", "8.6")
                .body(&format!(
                    ".reg .b128 %rq<1>;
                     .shared .align 16 .b8 answer[16];
                     .shared .align 8 .b64 done;
                     mov.u32 %r2, done;
                     mov.u32 %r3, answer;
                     mov.u32 %r4, %cluster_ctarank;
                     setp.eq.u32 %p0, %t, 0;
                     @%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
                     @%p0 fence.mbarrier_init.release.cluster;
                     {sync}
                     @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
                     {sync}
                     setp.eq.and.u32 %p1, %r4, 0, %p0;
                     @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{multicast}.b128 [%r3], [%r2];
                     WAIT:
                     mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], 0;
                     @!%p3 bra WAIT;
                     ld.shared.b128 %rq0, [%r3];
                     {query}
                     st.global.u32 [%out], %r9;
                     {sync}"
                ))
        })
        .collect()
}
