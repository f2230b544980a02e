//! Moves, loads, stores, address arithmetic, non-bulk asynchronous copies, atomics.

rows! { LdSt;
    mov 1.0 ALL "data-movement-and-conversion-instructions-mov" "mov.<T=pred|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64>  d:T, a:any";
    mov_b128 8.3 ALL "data-movement-and-conversion-instructions-mov" "mov.b128  d:b128, a:b128!";
    mov_pack_2x16 1.0 ALL "data-movement-and-conversion-instructions-mov" "mov.b32  d:b32, {a:b16*2}";
    mov_unpack_2x16 1.0 ALL "data-movement-and-conversion-instructions-mov" "mov.b32  {d:b16_*2}, a:b32!";
    mov_pack_4x8 1.0 ALL "data-movement-and-conversion-instructions-mov" "mov.b32  d:b32, {a:b8!*4}";
    mov_unpack_4x8 1.0 ALL "data-movement-and-conversion-instructions-mov" "mov.b32  {d:b8_*4}, a:b32!";
    mov_pack_2x8 1.0 ALL "data-movement-and-conversion-instructions-mov" "mov.b16  d:b16, {a:b8!*2}";
    mov_unpack_2x8 1.0 ALL "data-movement-and-conversion-instructions-mov" "mov.b16  {d:b8_*2}, a:b16!";
    mov_pack_2x32 1.0 ALL "data-movement-and-conversion-instructions-mov" "mov.b64  d:b64, {a:b32*2}";
    mov_unpack_2x32 1.0 ALL "data-movement-and-conversion-instructions-mov" "mov.b64  {d:b32_*2}, a:b64!";
    mov_pack_4x16 1.0 ALL "data-movement-and-conversion-instructions-mov" "mov.b64  d:b64, {a:b16*4}";
    mov_unpack_4x16 1.0 ALL "data-movement-and-conversion-instructions-mov" "mov.b64  {d:b16_*4}, a:b64!";
    mov_pack_2x64 8.3 ALL "data-movement-and-conversion-instructions-mov" "mov.b128  d:b128, {a:b64*2}";
    mov_unpack_2x64 8.3 ALL "data-movement-and-conversion-instructions-mov" "mov.b128  {d:b64_*2}, a:b128!";
    cvta 2.0 ALL "data-movement-and-conversion-instructions-cvta" "cvta.<global|shared|local|const>.u64  d:u64, a:u64";
    cvta_to 2.0 ALL "data-movement-and-conversion-instructions-cvta" "cvta.to.<global|shared|local|const>.u64  d:u64, a:u64!";
    cvta_param 7.7 ALL "data-movement-and-conversion-instructions-cvta" "cvta{.to}.param.u64  d:u64, a:u64!";
    cvta_cta 7.8 ALL "data-movement-and-conversion-instructions-cvta" "cvta{.to}.shared::cta.u64  d:u64, a:u64!";
    cvta_cluster 7.8 SM90_UP "data-movement-and-conversion-instructions-cvta" "cvta{.to}.shared::cluster.u64  d:u64, a:u64!";
    isspacep 2.0 ALL "data-movement-and-conversion-instructions-isspacep" "isspacep.<global|shared|local|const>  d:pred, a:u64!";
    mapa 7.8 SM90_UP "data-movement-and-conversion-instructions-mapa" "mapa{.shared::cluster}.<T=u32|u64>  d:T, a:T, cta:u32";
    getctarank 7.8 SM90_UP "data-movement-and-conversion-instructions-getctarank" "getctarank{.shared::cluster}.<T=u32|u64>  d:u32, a:T!";

    // Loads.
    ld 1.0 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}{.<S=global|shared|local|const|param>}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:S]";
    ld_v2 1.0 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}{.<S=global|shared|local|const|param>}.v2.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  {d:T~_*2}, [a:S]";
    ld_v4 1.0 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}{.<S=global|shared|local|const|param>}.v4.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*4}, [a:S]";
    ld_b128 8.3 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}{.<S=global|shared|local|const>}.b128  d:b128, [a:S]";
    ld_window 7.8 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}.shared::cta.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:shared]";
    ld_window_vec 7.8 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}.shared::cta.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*N}, [a:shared]";
    ld_cluster 7.8 SM90_UP "data-movement-and-conversion-instructions-ld" "ld{.weak}.shared::cluster.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:shared::cluster]";
    ld_cluster_vec 7.8 SM90_UP "data-movement-and-conversion-instructions-ld" "ld{.weak}.shared::cluster.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*N}, [a:shared::cluster]";
    ld_cache 2.0 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}.global.<ca|cg|cs|lu|cv>.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:global]";
    ld_cache_vec 2.0 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}.global.<ca|cg|cs|lu|cv>.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*N}, [a:global]";
    ld_hint 7.4 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}.global{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}{.L2::<64B|128B|256B>}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:global], C?policy:b64";
    ld_hint_vec 7.4 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}.global{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}{.L2::<64B|128B|256B>}.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*N}, [a:global], C?policy:b64";
    ld_256 8.8 BLACKWELL "data-movement-and-conversion-instructions-ld" "ld{.weak}.global{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}{.L2::<64B|128B|256B>}.v8.<T=b32|u32|s32|f32>  {d:T_*8}, [a:global], C?policy:b64";
    ld_256_b64 8.8 BLACKWELL "data-movement-and-conversion-instructions-ld" "ld{.weak}.global{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}{.L2::<64B|128B|256B>}.v4.<T=b64|u64|s64|f64>  {d:T_*4}, [a:global], C?policy:b64";
    ld_nc 3.1 ALL "data-movement-and-conversion-instructions-ld-global-nc" "ld.global{.<ca|cg|cs>}.nc.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:global]";
    ld_nc_vec 3.1 ALL "data-movement-and-conversion-instructions-ld-global-nc" "ld.global{.<ca|cg|cs>}.nc.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*N}, [a:global]";
    ld_nc_hint 7.4 ALL "data-movement-and-conversion-instructions-ld-global-nc" "ld.global.nc{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}{.L2::<64B|128B|256B>}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:global], C?policy:b64";
    ld_nc_hint_vec 7.4 ALL "data-movement-and-conversion-instructions-ld-global-nc" "ld.global.nc{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}{.L2::<64B|128B|256B>}.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*N}, [a:global], C?policy:b64";
    ld_volatile 1.1 ALL "data-movement-and-conversion-instructions-ld" "ld.volatile{.<S=global|shared>}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:S]";
    ld_strong 6.0 ALL "data-movement-and-conversion-instructions-ld" "ld.<relaxed|acquire>.<cta|gpu|sys>{.<S=global|shared>}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:S]";
    ld_strong_vec 6.0 ALL "data-movement-and-conversion-instructions-ld" "ld.<relaxed|acquire>.<cta|gpu|sys>{.<S=global|shared>}.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*N}, [a:S]";
    ld_strong_cluster 7.8 SM90_UP "data-movement-and-conversion-instructions-ld" "ld.<relaxed|acquire>.cluster{.<S=global|shared|shared::cluster>}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:S]";

    // Stores.
    st 1.0 ALL "data-movement-and-conversion-instructions-st" "st{.weak}{.<S=global|shared|local>}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:S], b:T~";
    st_v2 1.0 ALL "data-movement-and-conversion-instructions-st" "st{.weak}{.<S=global|shared|local>}.v2.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:S], {b:T~*2}";
    st_v4 1.0 ALL "data-movement-and-conversion-instructions-st" "st{.weak}{.<S=global|shared|local>}.v4.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  [a:S], {b:T~*4}";
    st_b128 8.3 ALL "data-movement-and-conversion-instructions-st" "st{.weak}{.<S=global|shared|local>}.b128  [a:S], b:b128!";
    st_param 2.0 ALL "data-movement-and-conversion-instructions-st" "st.param.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:param_out], b:T~";
    st_window 7.8 ALL "data-movement-and-conversion-instructions-st" "st{.weak}.shared::cta.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:shared], b:T~";
    st_window_vec 7.8 ALL "data-movement-and-conversion-instructions-st" "st{.weak}.shared::cta.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  [a:shared], {b:T~*N}";
    st_cluster 7.8 SM90_UP "data-movement-and-conversion-instructions-st" "st{.weak}.shared::cluster.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:shared::cluster], b:T~";
    st_cluster_vec 7.8 SM90_UP "data-movement-and-conversion-instructions-st" "st{.weak}.shared::cluster.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  [a:shared::cluster], {b:T~*N}";
    st_cache 2.0 ALL "data-movement-and-conversion-instructions-st" "st{.weak}.global.<wb|cg|cs|wt>.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:global], b:T~";
    st_cache_vec 2.0 ALL "data-movement-and-conversion-instructions-st" "st{.weak}.global.<wb|cg|cs|wt>.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  [a:global], {b:T~*N}";
    st_hint 7.4 ALL "data-movement-and-conversion-instructions-st" "st{.weak}.global{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:global], b:T~, C?policy:b64";
    st_hint_vec 7.4 ALL "data-movement-and-conversion-instructions-st" "st{.weak}.global{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  [a:global], {b:T~*N}, C?policy:b64";
    st_256 8.8 BLACKWELL "data-movement-and-conversion-instructions-st" "st{.weak}.global{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}.v8.<T=b32|u32|s32|f32>  [a:global], {b:T*8}, C?policy:b64";
    st_256_b64 8.8 BLACKWELL "data-movement-and-conversion-instructions-st" "st{.weak}.global{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}.v4.<T=b64|u64|s64|f64>  [a:global], {b:T*4}, C?policy:b64";
    st_volatile 1.1 ALL "data-movement-and-conversion-instructions-st" "st.volatile{.<S=global|shared>}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:S], b:T~";
    st_strong 6.0 ALL "data-movement-and-conversion-instructions-st" "st.<relaxed|release>.<cta|gpu|sys>{.<S=global|shared>}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:S], b:T~";
    st_strong_vec 6.0 ALL "data-movement-and-conversion-instructions-st" "st.<relaxed|release>.<cta|gpu|sys>{.<S=global|shared>}.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  [a:S], {b:T~*N}";
    st_strong_cluster 7.8 SM90_UP "data-movement-and-conversion-instructions-st" "st.<relaxed|release>.cluster{.<S=global|shared|shared::cluster>}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:S], b:T~";
    st_async 8.1 SM90_UP "data-movement-and-conversion-instructions-st-async" "st.async{.weak}.shared::cluster.mbarrier::complete_tx::bytes.<T=b32|b64|u32|u64|s32|s64|f32|f64>  [a:shared::cluster], b:T!, [m:shared::cluster]";
    st_async_vec 8.1 SM90_UP "data-movement-and-conversion-instructions-st-async" "st.async{.weak}.shared::cluster.mbarrier::complete_tx::bytes.v<N=2|4>.<T=b32|u32|s32|f32>  [a:shared::cluster], {b:T!*N}, [m:shared::cluster]";
    red_async 8.1 SM90_UP "parallel-synchronization-and-communication-instructions-red-async" "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.<inc|dec|min|max|add>.u32  [a:shared::cluster], b:u32!, [m:shared::cluster]";

    // Caches.
    prefetch 2.0 ALL "data-movement-and-conversion-instructions-prefetch-prefetchu" "prefetch{.<S=global|local>}.<L1|L2>  [a:S]";
    prefetch_l2 7.4 ALL "data-movement-and-conversion-instructions-prefetch-prefetchu" "prefetch.global.L2::<evict_last|evict_normal>  [a:global]";
    prefetchu 2.0 ALL "data-movement-and-conversion-instructions-prefetch-prefetchu" "prefetchu.L1  [a:generic]";
    createpolicy_fractional 7.4 ALL "data-movement-and-conversion-instructions-createpolicy" "createpolicy.fractional.L2::<evict_last|evict_normal|evict_first|evict_unchanged>{.L2::<evict_first|evict_unchanged>}.b64  d:b64, ?fraction:f32";
    createpolicy_range 7.4 ALL "data-movement-and-conversion-instructions-createpolicy" "createpolicy.range.global.L2::<evict_last|evict_normal|evict_first|evict_unchanged>{.L2::<evict_first|evict_unchanged>}.b64  d:b64, [a:global], primary:b32, total:b32";
    applypriority 7.4 ALL "data-movement-and-conversion-instructions-applypriority" "applypriority.global.L2::evict_normal  [a:global], n:#128";
    discard 7.4 ALL "data-movement-and-conversion-instructions-discard" "discard.global.L2  [a:global], n:#128";

    // Asynchronous copies of 4 to 16 bytes.
    cp_async_ca 7.0 ALL "data-movement-and-conversion-instructions-cp-async" "cp.async.ca.shared.global  [d:shared], [a:global], n:#4|8|16, ?src:u32";
    cp_async_ca_window 7.8 ALL "data-movement-and-conversion-instructions-cp-async" "cp.async.ca.shared::cta.global  [d:shared], [a:global], n:#4|8|16, ?src:u32";
    cp_async_ca_prefetch 7.8 ALL "data-movement-and-conversion-instructions-cp-async" "cp.async.ca.<shared|shared::cta>.global.L2::<64B|128B|256B>  [d:shared], [a:global], n:#4|8|16, ?src:u32";
    cp_async_cg 7.0 ALL "data-movement-and-conversion-instructions-cp-async" "cp.async.cg.shared.global  [d:shared], [a:global], n:#16, ?src:u32";
    cp_async_cg_window 7.8 ALL "data-movement-and-conversion-instructions-cp-async" "cp.async.cg.shared::cta.global  [d:shared], [a:global], n:#16, ?src:u32";
    cp_async_cg_prefetch 7.8 ALL "data-movement-and-conversion-instructions-cp-async" "cp.async.cg.<shared|shared::cta>.global.L2::<64B|128B|256B>  [d:shared], [a:global], n:#16, ?src:u32";
    cp_async_hint 7.8 ALL "data-movement-and-conversion-instructions-cp-async" "cp.async.cg.<shared|shared::cta>.global.L2::cache_hint{.L2::<64B|128B|256B>}  [d:shared], [a:global], n:#16, policy:b64";
    cp_async_commit 7.0 ALL "data-movement-and-conversion-instructions-cp-async-commit-group" "cp.async.commit_group";
    cp_async_wait 7.0 ALL "data-movement-and-conversion-instructions-cp-async-wait-group" "cp.async.wait_group  n:#";
    cp_async_wait_all 7.0 ALL "data-movement-and-conversion-instructions-cp-async-wait-group" "cp.async.wait_all";
    cp_async_mbarrier 7.0 ALL "parallel-synchronization-and-communication-instructions-cp-async-mbarrier-arrive" "cp.async.mbarrier.arrive{.noinc}{.<S=shared>}.b64  [m:S]";
    cp_async_mbarrier_window 7.8 ALL "parallel-synchronization-and-communication-instructions-cp-async-mbarrier-arrive" "cp.async.mbarrier.arrive{.noinc}.shared::cta.b64  [m:shared]";

    // Atomics.
    atom_add 6.0 ALL "parallel-synchronization-and-communication-instructions-atom" "atom{.<relaxed|acquire|release|acq_rel>}{.<cta|gpu|sys>}{.<S=global|shared>}.add.<T=u32|s32|u64|f32|f64>  d:T_, [a:S], b:T";
    atom_add_f16 6.3 ALL "parallel-synchronization-and-communication-instructions-atom" "atom{.<relaxed|acquire|release|acq_rel>}{.<cta|gpu|sys>}{.<S=global|shared>}.add.noftz.<T=f16|f16x2>  d:T_, [a:S], b:T!";
    atom_add_bf16 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-atom" "atom{.<relaxed|acquire|release|acq_rel>}{.<cta|gpu|sys>}{.<S=global|shared>}.add.noftz.<T=bf16|bf16x2>  d:T_, [a:S], b:T!";
    atom_bits 6.0 ALL "parallel-synchronization-and-communication-instructions-atom" "atom{.<relaxed|acquire|release|acq_rel>}{.<cta|gpu|sys>}{.<S=global|shared>}.<and|or|xor|exch>.<T=b32|b64>  d:T_, [a:S], b:T";
    atom_min_max 6.0 ALL "parallel-synchronization-and-communication-instructions-atom" "atom{.<relaxed|acquire|release|acq_rel>}{.<cta|gpu|sys>}{.<S=global|shared>}.<min|max>.<T=u32|s32|u64|s64>  d:T_, [a:S], b:T";
    atom_inc_dec 6.0 ALL "parallel-synchronization-and-communication-instructions-atom" "atom{.<relaxed|acquire|release|acq_rel>}{.<cta|gpu|sys>}{.<S=global|shared>}.<inc|dec>.u32  d:u32_, [a:S], b:u32";
    atom_cas 6.3 ALL "parallel-synchronization-and-communication-instructions-atom" "atom{.<relaxed|acquire|release|acq_rel>}{.<cta|gpu|sys>}{.<S=global|shared>}.cas.<T=b16|b32|b64>  d:T_, [a:S], b:T, c:T";
    atom_cluster 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-atom" "atom{.<relaxed|acquire|release|acq_rel>}.<cta|cluster|gpu>.shared::cluster.add.<T=u32|s32|u64>  d:T_, [a:shared::cluster], b:T";
    red_add 6.0 ALL "parallel-synchronization-and-communication-instructions-red" "red{.<relaxed|release>}{.<cta|gpu|sys>}{.<S=global|shared>}.add.<T=u32|s32|u64|f32|f64>  [a:S], b:T";
    red_add_f16 6.3 ALL "parallel-synchronization-and-communication-instructions-red" "red{.<relaxed|release>}{.<cta|gpu|sys>}{.<S=global|shared>}.add.noftz.<T=f16|f16x2>  [a:S], b:T!";
    red_add_bf16 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-red" "red{.<relaxed|release>}{.<cta|gpu|sys>}{.<S=global|shared>}.add.noftz.<T=bf16|bf16x2>  [a:S], b:T!";
    red_bits 6.0 ALL "parallel-synchronization-and-communication-instructions-red" "red{.<relaxed|release>}{.<cta|gpu|sys>}{.<S=global|shared>}.<and|or|xor>.<T=b32|b64>  [a:S], b:T";
    red_min_max 6.0 ALL "parallel-synchronization-and-communication-instructions-red" "red{.<relaxed|release>}{.<cta|gpu|sys>}{.<S=global|shared>}.<min|max>.<T=u32|s32|u64|s64>  [a:S], b:T";
    red_inc_dec 6.0 ALL "parallel-synchronization-and-communication-instructions-red" "red{.<relaxed|release>}{.<cta|gpu|sys>}{.<S=global|shared>}.<inc|dec>.u32  [a:S], b:u32";
    red_add_vec 8.1 SM90_UP "parallel-synchronization-and-communication-instructions-red" "red{.<relaxed|release>}{.<cta|gpu|sys>}.global.add{C:.L2::cache_hint}.v<N=2|4>.f32  [a:global], {b:f32*N}, C?policy:b64";
}
