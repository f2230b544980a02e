//! Branches, calls, barriers, clusters, launch control, register pools.

use super::raw::Raw;
use super::{Draft, bytes_of};

/// The files.
pub fn drafts() -> Vec<Draft> {
    let mut list = vec![
        Raw::written("control/branches", include_str!("ptx/branches.ptx")),
        Raw::written("control/calls", include_str!("ptx/calls.ptx"))
            .globals(include_str!("ptx/calls_functions.ptx")),
        indirect(),
        Raw::written("control/exits", include_str!("ptx/exits.ptx")),
        Raw::written("control/elect", include_str!("ptx/elect.ptx")),
        Raw::written("control/setmaxnreg", include_str!("ptx/setmaxnreg.ptx"))
            .directives(".reqntid 256, 1, 1\n.maxnreg 80\n"),
        Raw::written("control/clusters", include_str!("ptx/clusters.ptx")),
        Raw::written("control/cluster_barriers", include_str!("ptx/cluster_barriers.ptx")),
        Raw::written("control/partial_warps", include_str!("ptx/partial_warps.ptx")),
    ];
    list.extend(barriers());
    list.extend(launch_control());
    list.into_iter().map(Raw::draft).collect()
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
        .body(include_str!("ptx/call_indirect.ptx"))
        .expects(vec![bytes_of(expected)])
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
            ptx!("bar_reductions", word)
        } else {
            "st.global.u32 [%out+512], %r5;".into()
        };
        list.push(
            Raw::new(&format!("control/{name}"), rows, "block 128", "u32 256")
                .body(&ptx!("bar", word, aligned, reductions)),
        );
    }
    list
}

fn launch_control() -> Vec<Raw> {
    let query = include_str!("ptx/clc_query.ptx");
    [
        ("clc", "clc_try_cancel", "", 1),
        ("clc_multicast", "clc_try_cancel_multicast", ".multicast::cluster::all", 2),
    ]
    .into_iter()
    .map(|(name, row, multicast, cluster)| {
        let rows = format!("{row} clc_is_canceled clc_first_ctaid clc_first_ctaid_dim");
        // A grid of one cluster has nothing left to cancel: the answer is the same every time.
        let launch = format!("grid {cluster} block 32 cluster {cluster}");
        let sync = if cluster == 2 {
            "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
        } else {
            "bar.sync 0;"
        };
        Raw::new(&format!("control/{name}"), &rows, &launch, &format!("u32 {}", 32 * cluster))
            .target("sm_100a", "8.6")
            .body(&ptx!("clc", sync, multicast, query))
    })
    .collect()
}
