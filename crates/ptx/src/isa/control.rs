//! Control flow, barriers, communication between lanes, launch control.

rows! { Control;
    bra 1.0 ALL "control-flow-instructions-bra" "bra{.uni}  l:label";
    brx_idx 6.0 ALL "control-flow-instructions-brx-idx" "brx.idx{.uni}  i:u32!, targets:label";
    call 1.0 ALL "control-flow-instructions-call" "call{.uni}  procedure:symbol";
    call_args 1.0 ALL "control-flow-instructions-call" "call{.uni}  consumer:symbol, args:group";
    call_returns 1.0 ALL "control-flow-instructions-call" "call{.uni}  returns:group, source:symbol";
    call_returns_args 1.0 ALL "control-flow-instructions-call" "call{.uni}  returns:group, function:symbol, args:group";
    call_indirect 2.1 ALL "control-flow-instructions-call" "call{.uni}  returns:group, f:b64!, args:group, prototype:symbol";
    ret 1.0 ALL "control-flow-instructions-ret" "ret{.uni}";
    exit 1.0 ALL "control-flow-instructions-exit" "exit";
    trap 1.0 ALL "miscellaneous-instructions-trap" "trap";
    brkpt 1.0 ALL "miscellaneous-instructions-brkpt" "brkpt";
    nanosleep 6.3 ALL "miscellaneous-instructions-nanosleep" "nanosleep.u32  t:u32";

    bar_sync 1.0 ALL "parallel-synchronization-and-communication-instructions-bar" "bar.sync  a:u32, ?n:u32";
    bar_sync_cta 7.8 ALL "parallel-synchronization-and-communication-instructions-bar" "bar.cta.sync  a:u32, ?n:u32";
    bar_arrive 2.0 ALL "parallel-synchronization-and-communication-instructions-bar" "bar.arrive  a:u32, n:u32";
    bar_arrive_cta 7.8 ALL "parallel-synchronization-and-communication-instructions-bar" "bar.cta.arrive  a:u32, n:u32";
    bar_red_popc 2.0 ALL "parallel-synchronization-and-communication-instructions-bar" "bar.red.popc.u32  d:u32, a:u32, c:pred^";
    bar_red_popc_cta 7.8 ALL "parallel-synchronization-and-communication-instructions-bar" "bar.cta.red.popc.u32  d:u32, a:u32, c:pred^";
    bar_red_bool 2.0 ALL "parallel-synchronization-and-communication-instructions-bar" "bar.red.<and|or>.pred  d:pred, a:u32, c:pred^";
    bar_red_bool_cta 7.8 ALL "parallel-synchronization-and-communication-instructions-bar" "bar.cta.red.<and|or>.pred  d:pred, a:u32, c:pred^";
    barrier_sync 6.0 ALL "parallel-synchronization-and-communication-instructions-bar" "barrier.sync{.aligned}  a:u32, ?n:u32";
    barrier_sync_cta 7.8 ALL "parallel-synchronization-and-communication-instructions-bar" "barrier.cta.sync{.aligned}  a:u32, ?n:u32";
    barrier_arrive 6.0 ALL "parallel-synchronization-and-communication-instructions-bar" "barrier.arrive{.aligned}  a:u32, n:u32";
    barrier_arrive_cta 7.8 ALL "parallel-synchronization-and-communication-instructions-bar" "barrier.cta.arrive{.aligned}  a:u32, n:u32";
    bar_warp_sync 6.0 ALL "parallel-synchronization-and-communication-instructions-bar-warp-sync" "bar.warp.sync  mask:b32";
    barrier_cluster_arrive 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-barrier-cluster" "barrier.cluster.arrive{.aligned}";
    barrier_cluster_arrive_sem 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-barrier-cluster" "barrier.cluster.arrive.<release|relaxed>{.aligned}";
    barrier_cluster_wait 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-barrier-cluster" "barrier.cluster.wait{.aligned}";
    barrier_cluster_wait_sem 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-barrier-cluster" "barrier.cluster.wait.acquire{.aligned}";

    shfl 6.0 ALL "data-movement-and-conversion-instructions-shfl-sync" "shfl.sync.<up|down|bfly|idx>.b32  d:b32|?dp:pred, a:b32, b:b32, c:b32, mask:b32";
    vote_bool 6.0 ALL "parallel-synchronization-and-communication-instructions-vote-sync" "vote.sync.<all|any|uni>.pred  d:pred, a:pred^, mask:b32";
    vote_ballot 6.0 ALL "parallel-synchronization-and-communication-instructions-vote-sync" "vote.sync.ballot.b32  d:b32, a:pred^, mask:b32";
    match_any 6.0 ALL "parallel-synchronization-and-communication-instructions-match-sync" "match.any.sync.<T=b32|b64>  d:b32, a:T, mask:b32";
    match_all 6.0 ALL "parallel-synchronization-and-communication-instructions-match-sync" "match.all.sync.<T=b32|b64>  d:b32|?dp:pred, a:T, mask:b32";
    activemask 6.2 ALL "parallel-synchronization-and-communication-instructions-activemask" "activemask.b32  d:b32";
    redux_int 7.0 ALL "parallel-synchronization-and-communication-instructions-redux-sync" "redux.sync.<add|min|max>.<T=u32|s32>  d:T, a:T, mask:b32";
    redux_bits 7.0 ALL "parallel-synchronization-and-communication-instructions-redux-sync" "redux.sync.<and|or|xor>.b32  d:b32, a:b32, mask:b32";
    redux_f32 8.6 SM100 "parallel-synchronization-and-communication-instructions-redux-sync" "redux.sync.<min|max>{.abs}{.NaN}.f32  d:f32, a:f32, mask:b32";
    elect 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-elect-sync" "elect.sync  d:b32_|dp:pred, mask:b32";

    setmaxnreg 8.0 SM90_UP "miscellaneous-instructions-setmaxnreg" "setmaxnreg.<inc|dec>.sync.aligned.u32  n:#24..256";
    griddepcontrol 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-griddepcontrol" "griddepcontrol.<launch_dependents|wait>";
    clc_try_cancel 8.6 BLACKWELL "parallel-synchronization-and-communication-instructions-clusterlaunchcontrol-try-cancel" "clusterlaunchcontrol.try_cancel.async{.<S=shared::cta>}.mbarrier::complete_tx::bytes.b128  [d:S], [m:S]";
    clc_try_cancel_multicast 8.6 BLACKWELL "parallel-synchronization-and-communication-instructions-clusterlaunchcontrol-try-cancel" "clusterlaunchcontrol.try_cancel.async{.<S=shared::cta>}.mbarrier::complete_tx::bytes.multicast::cluster::all.b128  [d:S], [m:S]";
    clc_is_canceled 8.6 BLACKWELL "parallel-synchronization-and-communication-instructions-clusterlaunchcontrol-query-cancel" "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128  d:pred, a:b128!";
    clc_first_ctaid 8.6 BLACKWELL "parallel-synchronization-and-communication-instructions-clusterlaunchcontrol-query-cancel" "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128  {d:b32_*4}, a:b128!";
    clc_first_ctaid_dim 8.6 BLACKWELL "parallel-synchronization-and-communication-instructions-clusterlaunchcontrol-query-cancel" "clusterlaunchcontrol.query_cancel.get_first_ctaid::<x|y|z>.b32.b128  d:b32, a:b128!";
}
