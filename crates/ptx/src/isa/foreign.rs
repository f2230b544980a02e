//! Forms beside the table's that compilers and hand-written code have: hints about caches where the table has none, vectors of
//! `volatile`, cluster scope, 32-bit masks of halves. ptxas takes each, and the simulator executes it as the row that it
//! stands beside.

rows! { LdSt;
    ld_cache_generic 2.0 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}{.<S=shared|local|const|param>}.<ca|cg|cs|lu|cv>.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:S]";
    ld_cache_generic_vec 2.0 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}{.<S=shared|local|const|param>}.<ca|cg|cs|lu|cv>.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*N}, [a:S]";
    ld_hint_generic 7.4 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}{.L2::<64B|128B|256B>}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:generic], C?policy:b64";
    ld_hint_generic_vec 7.4 ALL "data-movement-and-conversion-instructions-ld" "ld{.weak}{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}{.L2::<64B|128B|256B>}.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*N}, [a:generic], C?policy:b64";
    ld_256_generic 8.8 BLACKWELL "data-movement-and-conversion-instructions-ld" "ld{.weak}{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}{.L2::<64B|128B|256B>}.v8.<T=b32|u32|s32|f32>  {d:T_*8}, [a:generic], C?policy:b64";
    ld_volatile_vec 1.1 ALL "data-movement-and-conversion-instructions-ld" "ld.volatile{.<S=global|shared>}.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*N}, [a:S]";
    ld_strong_hint 7.4 ALL "data-movement-and-conversion-instructions-ld" "ld.<relaxed|acquire>.<cta|gpu|sys>{.global}.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>{.L2::<64B|128B|256B>}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:global]";
    ld_strong_hint_vec 7.4 ALL "data-movement-and-conversion-instructions-ld" "ld.<relaxed|acquire>.<cta|gpu|sys>{.global}.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>{.L2::<64B|128B|256B>}.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*N}, [a:global]";
    ld_strong_cluster_vec 7.8 SM90_UP "data-movement-and-conversion-instructions-ld" "ld.<relaxed|acquire>.cluster{.<S=global|shared|shared::cluster>}.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  {d:T~_*N}, [a:S]";
    ld_strong_window 7.8 ALL "data-movement-and-conversion-instructions-ld" "ld.<relaxed|acquire>.<cta|gpu|sys>.shared::cta.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  d:T~, [a:shared]";
    st_cache_generic 2.0 ALL "data-movement-and-conversion-instructions-st" "st{.weak}{.<S=shared|local>}.<wb|cg|cs|wt>.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:S], b:T~";
    st_cache_generic_vec 2.0 ALL "data-movement-and-conversion-instructions-st" "st{.weak}{.<S=shared|local>}.<wb|cg|cs|wt>.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  [a:S], {b:T~*N}";
    st_hint_generic 7.4 ALL "data-movement-and-conversion-instructions-st" "st{.weak}{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:generic], b:T~, C?policy:b64";
    st_hint_generic_vec 7.4 ALL "data-movement-and-conversion-instructions-st" "st{.weak}{.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>}{C:.L2::cache_hint}.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  [a:generic], {b:T~*N}, C?policy:b64";
    st_volatile_vec 1.1 ALL "data-movement-and-conversion-instructions-st" "st.volatile{.<S=global|shared>}.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  [a:S], {b:T~*N}";
    st_strong_hint 7.4 ALL "data-movement-and-conversion-instructions-st" "st.<relaxed|release>.<cta|gpu|sys>{.global}.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:global], b:T~";
    st_strong_cluster_vec 7.8 SM90_UP "data-movement-and-conversion-instructions-st" "st.<relaxed|release>.cluster{.<S=global|shared|shared::cluster>}.v<N=2|4>.<T=b8|b16|b32|u8|u16|u32|s8|s16|s32|f32>  [a:S], {b:T~*N}";
    st_strong_window 7.8 ALL "data-movement-and-conversion-instructions-st" "st.<relaxed|release>.<cta|gpu|sys>.shared::cta.<T=b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>  [a:shared], b:T~";
    atom_add_cluster 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-atom" "atom{.<relaxed|acquire|release|acq_rel>}.cluster{.<S=global|shared>}.add.<T=u32|s32|u64|f32|f64>  d:T_, [a:S], b:T";
    atom_bits_cluster 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-atom" "atom{.<relaxed|acquire|release|acq_rel>}.cluster{.<S=global|shared>}.<and|or|xor|exch>.<T=b32|b64>  d:T_, [a:S], b:T";
    atom_min_max_cluster 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-atom" "atom{.<relaxed|acquire|release|acq_rel>}.cluster{.<S=global|shared>}.<min|max>.<T=u32|s32|u64|s64>  d:T_, [a:S], b:T";
    atom_cas_cluster 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-atom" "atom{.<relaxed|acquire|release|acq_rel>}.cluster{.<S=global|shared>}.cas.<T=b16|b32|b64>  d:T_, [a:S], b:T, c:T";
    red_add_cluster 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-red" "red{.<relaxed|release>}.cluster{.<S=global|shared>}.add.<T=u32|s32|u64|f32|f64>  [a:S], b:T";
    red_bits_cluster 7.8 SM90_UP "parallel-synchronization-and-communication-instructions-red" "red{.<relaxed|release>}.cluster{.<S=global|shared>}.<and|or|xor>.<T=b32|b64>  [a:S], b:T";
    red_add_vec_generic 8.1 SM90_UP "parallel-synchronization-and-communication-instructions-red" "red{.<relaxed|release>}{.<cta|gpu|sys>}.add.v<N=2|4>.f32  [a:generic], {b:f32*N}";
    set_f16_int 4.2 ALL "half-precision-comparison-instructions-set" "set.<eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan>{.ftz}.<T=u32|s32>.f16x2  d:T, a:f16x2!, b:f16x2!";
}
