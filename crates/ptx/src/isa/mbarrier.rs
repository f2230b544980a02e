//! Memory barriers in shared memory, and fences.

rows! { Mbarrier;
    mbarrier_init 7.0 ALL "parallel-synchronization-and-communication-instructions-mbarrier-init" "mbarrier.init{.<S=shared|shared::cta>}.b64  [m:S], n:u32";
    mbarrier_inval 7.0 ALL "parallel-synchronization-and-communication-instructions-mbarrier-inval" "mbarrier.inval{.<S=shared|shared::cta>}.b64  [m:S]";
    mbarrier_expect_tx 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-expect-tx" "mbarrier.expect_tx{.relaxed.<cta|cluster>}{.<S=shared|shared::cta|shared::cluster>}.b64  [m:S], n:u32";
    mbarrier_complete_tx 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-complete-tx" "mbarrier.complete_tx{.relaxed.<cta|cluster>}{.<S=shared|shared::cta|shared::cluster>}.b64  [m:S], n:u32";
    mbarrier_arrive 7.0 ALL "parallel-synchronization-and-communication-instructions-mbarrier-arrive" "mbarrier.arrive{.<S=shared|shared::cta>}.b64  d:b64, [m:S]";
    mbarrier_arrive_sink 7.1 ALL "parallel-synchronization-and-communication-instructions-mbarrier-arrive" "mbarrier.arrive{.<S=shared|shared::cta>}.b64  _, [m:S]";
    mbarrier_arrive_count 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-arrive" "mbarrier.arrive{.<S=shared|shared::cta>}.b64  d:b64_, [m:S], n:u32";
    mbarrier_arrive_release 8.0 ALL "parallel-synchronization-and-communication-instructions-mbarrier-arrive" "mbarrier.arrive.release.cta{.<S=shared|shared::cta>}.b64  d:b64_, [m:S]";
    mbarrier_arrive_release_count 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-arrive" "mbarrier.arrive.release.cta{.<S=shared|shared::cta>}.b64  d:b64_, [m:S], n:u32";
    mbarrier_arrive_release_cluster 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-arrive" "mbarrier.arrive.release.cluster{.<S=shared|shared::cta>}.b64  d:b64_, [m:S], ?n:u32";
    mbarrier_arrive_relaxed 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-arrive" "mbarrier.arrive.relaxed.<cta|cluster>{.<S=shared|shared::cta>}.b64  d:b64_, [m:S], ?n:u32";
    mbarrier_arrive_remote 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-arrive" "mbarrier.arrive{.<release|relaxed>.<cta|cluster>}.shared::cluster.b64  _, [m:shared::cluster], ?n:u32";
    mbarrier_arrive_expect_tx 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-arrive" "mbarrier.arrive.expect_tx{.<release|relaxed>.<cta|cluster>}{.<S=shared|shared::cta>}.b64  d:b64_, [m:S], n:u32";
    mbarrier_arrive_expect_tx_remote 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-arrive" "mbarrier.arrive.expect_tx{.<release|relaxed>.<cta|cluster>}.shared::cluster.b64  _, [m:shared::cluster], n:u32";
    mbarrier_arrive_no_complete 7.0 ALL "parallel-synchronization-and-communication-instructions-mbarrier-arrive" "mbarrier.arrive.noComplete{.<S=shared|shared::cta>}.b64  d:b64, [m:S], n:u32";
    mbarrier_arrive_drop 7.0 ALL "parallel-synchronization-and-communication-instructions-mbarrier-arrive-drop" "mbarrier.arrive_drop{.<S=shared|shared::cta>}.b64  d:b64, [m:S]";
    mbarrier_arrive_drop_remote 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-arrive-drop" "mbarrier.arrive_drop{.<release|relaxed>.<cta|cluster>}.shared::cluster.b64  _, [m:shared::cluster], ?n:u32";
    mbarrier_test_wait 7.0 ALL "parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait" "mbarrier.test_wait{.<S=shared|shared::cta>}.b64  d:pred, [m:S], state:b64!";
    mbarrier_test_wait_parity 7.1 ALL "parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait" "mbarrier.test_wait.parity{.<S=shared|shared::cta>}.b64  d:pred, [m:S], parity:u32";
    mbarrier_test_wait_acquire 8.0 ALL "parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait" "mbarrier.test_wait.parity.acquire.cta{.<S=shared|shared::cta>}.b64  d:pred, [m:S], parity:u32";
    mbarrier_test_wait_acquire_cluster 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait" "mbarrier.test_wait.parity.acquire.cluster{.<S=shared|shared::cta>}.b64  d:pred, [m:S], parity:u32";
    mbarrier_test_wait_relaxed 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait" "mbarrier.test_wait.parity.relaxed.<cta|cluster>{.<S=shared|shared::cta>}.b64  d:pred, [m:S], parity:u32";
    mbarrier_try_wait 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait" "mbarrier.try_wait{.<S=shared|shared::cta>}.b64  d:pred, [m:S], state:b64!, ?hint:u32";
    mbarrier_try_wait_parity 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait" "mbarrier.try_wait.parity{.<S=shared|shared::cta>}.b64  d:pred, [m:S], parity:u32, ?hint:u32";
    mbarrier_try_wait_parity_sem 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait" "mbarrier.try_wait.parity.<acquire|relaxed>.<cta|cluster>{.<S=shared|shared::cta>}.b64  d:pred, [m:S], parity:u32, ?hint:u32";
    mbarrier_pending_count 7.0 ALL "parallel-synchronization-and-communication-instructions-mbarrier-pending-count" "mbarrier.pending_count.b64  d:u32, state:b64!";

    membar 1.4 ALL "parallel-synchronization-and-communication-instructions-membar-fence" "membar.<cta|gl|sys>";
    fence 6.0 ALL "parallel-synchronization-and-communication-instructions-membar-fence" "fence{.<sc|acq_rel>}.<cta|gpu|sys>";
    fence_cluster 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-membar-fence" "fence{.<sc|acq_rel>}.cluster";
    fence_one_way 8.6 ALL "parallel-synchronization-and-communication-instructions-membar-fence" "fence.<acquire|release>.<cta|gpu|sys>";
    fence_one_way_cluster 8.6 SM90_UP "parallel-synchronization-and-communication-instructions-membar-fence" "fence.<acquire|release>.cluster";
    fence_mbarrier_init 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-membar-fence" "fence.mbarrier_init.release.cluster";
    fence_proxy_alias 7.5 ALL "parallel-synchronization-and-communication-instructions-membar-fence" "fence.proxy.alias";
    fence_proxy_async 8.0 SM90_UP "parallel-synchronization-and-communication-instructions-membar-fence" "fence.proxy.async{.<global|shared::cta|shared::cluster>}";
    fence_proxy_tensormap_release 8.3 SM90_UP "parallel-synchronization-and-communication-instructions-membar-fence" "fence.proxy.tensormap::generic.release.<cta|cluster|gpu|sys>";
    fence_proxy_tensormap_acquire 8.3 SM90_UP "parallel-synchronization-and-communication-instructions-membar-fence" "fence.proxy.tensormap::generic.acquire.<cta|cluster|gpu|sys>  [a:generic], n:#128";
    fence_proxy_async_generic_acquire 8.6 SM90_UP "parallel-synchronization-and-communication-instructions-membar-fence" "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster";
    fence_proxy_async_generic_release 8.6 SM90_UP "parallel-synchronization-and-communication-instructions-membar-fence" "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster";
    fence_acquire_restrict 8.6 SM90_UP "parallel-synchronization-and-communication-instructions-membar-fence" "fence.acquire.sync_restrict::shared::cluster.cluster";
    fence_release_restrict 8.6 SM90_UP "parallel-synchronization-and-communication-instructions-membar-fence" "fence.release.sync_restrict::shared::cta.cluster";
}
